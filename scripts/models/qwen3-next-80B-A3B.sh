# Qwen3-Next 80B-A3B.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-48}"
   --hidden-size 2048 --ffn-hidden-size 5120
   --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 256
   --vocab-size 151936
   --swiglu --disable-bias-linear --qk-layernorm --attention-output-gate
   --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000000}" --rotary-percent 0.25
   --experimental-attention-variant gated_delta_net --linear-attention-freq 4
   --linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16 --linear-num-value-heads 32
   --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512
   --moe-layer-freq "[1]*${MODEL_ARGS_NUM_LAYERS:-48}"
   --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate
   --moe-router-score-function softmax --moe-router-dtype fp32
   --moe-router-load-balancing-type none --moe-aux-loss-coeff 0
   --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall --moe-token-drop-policy probs
   --untie-embeddings-and-output-weights
)
