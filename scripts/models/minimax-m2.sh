# MiniMax-M2 and M2.5.
# Its query and key norms span all heads together.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-62}"
   --hidden-size 3072 --ffn-hidden-size 1536
   --num-attention-heads 48 --group-query-attention --num-query-groups 8 --kv-channels 128
   --vocab-size 200064
   --swiglu --disable-bias-linear --qk-layernorm
   --normalization RMSNorm --norm-epsilon 1e-6
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-5000000}" --rotary-percent 0.5 --no-rope-fusion --attention-softmax-in-fp32
   --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 1536
   --moe-layer-freq "[1]*${MODEL_ARGS_NUM_LAYERS:-62}"
   --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-dtype fp32
   --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type none --moe-aux-loss-coeff 0
   --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
   --untie-embeddings-and-output-weights
)
