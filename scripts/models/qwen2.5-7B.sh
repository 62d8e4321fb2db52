# Qwen2.5 7B.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-28}"
   --hidden-size 3584 --ffn-hidden-size 18944
   --num-attention-heads 28 --group-query-attention --num-query-groups 4 --kv-channels 128
   --vocab-size 152064
   --swiglu --disable-bias-linear --add-qkv-bias
   --normalization RMSNorm --norm-epsilon 1e-6
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --untie-embeddings-and-output-weights
)
