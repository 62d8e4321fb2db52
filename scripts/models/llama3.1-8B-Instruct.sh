# Llama 3.1 8B, base and instruct.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-32}"
   --hidden-size 4096 --ffn-hidden-size 14336
   --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
   --vocab-size 128256
   --swiglu --disable-bias-linear
   --normalization RMSNorm --norm-epsilon 1e-5
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}" --use-rope-scaling --rope-scaling-factor 8
   --untie-embeddings-and-output-weights
)
