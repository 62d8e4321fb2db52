# MiMo-7B-RL; its multi-token-prediction layer is not part of the shape.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-36}"
   --hidden-size 4096 --ffn-hidden-size 11008
   --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
   --vocab-size 151680
   --swiglu --disable-bias-linear --add-qkv-bias
   --normalization RMSNorm --norm-epsilon 1e-5
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-640000}"
   --untie-embeddings-and-output-weights
)
