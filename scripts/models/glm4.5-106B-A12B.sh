# GLM-4.5-Air.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-46}"
   --hidden-size 4096 --ffn-hidden-size 10944
   --num-attention-heads 96 --group-query-attention --num-query-groups 8 --kv-channels 128
   --vocab-size 151552
   --swiglu --disable-bias-linear --add-qkv-bias
   --normalization RMSNorm --norm-epsilon 1e-5
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}" --rotary-percent 0.5
   --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1408
   --moe-layer-freq "[0]*1+[1]*$((${MODEL_ARGS_NUM_LAYERS:-46} - 1))"
   --moe-shared-expert-intermediate-size 1408
   --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-dtype fp32
   --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0
   --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
   --untie-embeddings-and-output-weights
)
