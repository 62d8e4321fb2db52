# GLM-4-32B-0414 and GLM-Z1-32B-0414.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-61}"
   --hidden-size 6144 --ffn-hidden-size 23040
   --num-attention-heads 48 --group-query-attention --num-query-groups 2 --kv-channels 128
   --vocab-size 151552
   --swiglu --disable-bias-linear
   --normalization RMSNorm --norm-epsilon 1e-5
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000}" --rotary-percent 0.5 --rotary-interleaved --no-rope-fusion
   --post-self-attn-layernorm --post-mlp-layernorm
   --untie-embeddings-and-output-weights
)
