# GLM-4-9B-0414 and GLM-Z1-9B-0414.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-40}"
   --hidden-size 4096 --ffn-hidden-size 13696
   --num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128
   --vocab-size 151552
   --swiglu --disable-bias-linear --add-qkv-bias
   --normalization RMSNorm --norm-epsilon 1e-5
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000}" --rotary-percent 0.5 --rotary-interleaved --no-rope-fusion
   --post-self-attn-layernorm --post-mlp-layernorm
   --untie-embeddings-and-output-weights
)
