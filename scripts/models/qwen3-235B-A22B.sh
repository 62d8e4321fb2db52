# Qwen3 235B-A22B.
# The 2507 checkpoints have the rotary base 5000000.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-94}"
   --hidden-size 4096 --ffn-hidden-size 12288
   --num-attention-heads 64 --group-query-attention --num-query-groups 4 --kv-channels 128
   --vocab-size 151936
   --swiglu --disable-bias-linear --qk-layernorm
   --normalization RMSNorm --norm-epsilon 1e-6
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536
   --moe-layer-freq "[1]*${MODEL_ARGS_NUM_LAYERS:-94}"
   --moe-router-score-function softmax --moe-router-dtype fp32
   --moe-router-load-balancing-type none --moe-aux-loss-coeff 0
   --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall --moe-token-drop-policy probs
   --untie-embeddings-and-output-weights
)
