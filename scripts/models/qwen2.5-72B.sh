# Qwen2.5 72B.
# The base model has the norm epsilon 1e-5, the instruct model 1e-6.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE, MODEL_ARGS_NORM_EPSILON.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-80}"
   --hidden-size 8192 --ffn-hidden-size 29568
   --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 128
   --vocab-size 152064
   --swiglu --disable-bias-linear --add-qkv-bias
   --normalization RMSNorm --norm-epsilon "${MODEL_ARGS_NORM_EPSILON:-1e-6}"
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --untie-embeddings-and-output-weights
)
