# Qwen3.5 27B.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-64}"
   --hidden-size 5120 --ffn-hidden-size 17408
   --num-attention-heads 24 --group-query-attention --num-query-groups 4 --kv-channels 256
   --vocab-size 248320
   --swiglu --disable-bias-linear --qk-layernorm --attention-output-gate
   --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000000}" --rotary-percent 0.25
   --experimental-attention-variant gated_delta_net --linear-attention-freq 4
   --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16 --linear-num-value-heads 48
   --untie-embeddings-and-output-weights
)
