# GLM-5.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-78}"
   --hidden-size 6144 --ffn-hidden-size 12288
   --num-attention-heads 64 --kv-channels 192
   --vocab-size 154880 --make-vocab-size-divisible-by 16
   --swiglu --disable-bias-linear --qk-layernorm
   --normalization RMSNorm --norm-epsilon 1e-5
   --multi-latent-attention --q-lora-rank 2048 --kv-lora-rank 512 --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --rope-type rope
   --no-position-embedding --enable-experimental
   --experimental-attention-variant dsa --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
   --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
   --moe-layer-freq "[0]*3+[1]*$((${MODEL_ARGS_NUM_LAYERS:-78} - 3))"
   --moe-shared-expert-intermediate-size 2048
   --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-dtype fp32
   --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0
   --moe-router-topk-scaling-factor 2.5
   --moe-router-num-groups 1 --moe-router-group-topk 1
   --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
   --untie-embeddings-and-output-weights
)
