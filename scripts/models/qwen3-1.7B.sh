# Qwen3 1.7B.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-28}"
   --hidden-size 2048 --ffn-hidden-size 6144
   --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 128
   --vocab-size 151936
   --swiglu --disable-bias-linear --qk-layernorm
   --normalization RMSNorm --norm-epsilon 1e-6
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
)
