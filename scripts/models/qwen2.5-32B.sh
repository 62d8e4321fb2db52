# Qwen2.5 32B.
# The base model has the norm epsilon 1e-5, the instruct model 1e-6.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE, MODEL_ARGS_NORM_EPSILON.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-64}"
   --hidden-size 5120 --ffn-hidden-size 27648
   --num-attention-heads 40 --group-query-attention --num-query-groups 8 --kv-channels 128
   --vocab-size 152064
   --swiglu --disable-bias-linear --add-qkv-bias
   --normalization RMSNorm --norm-epsilon "${MODEL_ARGS_NORM_EPSILON:-1e-5}"
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --untie-embeddings-and-output-weights
)
