# Qwen2.5 0.5B.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-24}"
   --hidden-size 896 --ffn-hidden-size 4864
   --num-attention-heads 14 --group-query-attention --num-query-groups 2 --kv-channels 64
   --vocab-size 151936
   --swiglu --disable-bias-linear --add-qkv-bias
   --normalization RMSNorm --norm-epsilon 1e-6
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
)
