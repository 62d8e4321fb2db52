# GLM-4.7-Flash.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-47}"
   --hidden-size 2048 --ffn-hidden-size 10240
   --num-attention-heads 20 --kv-channels 192
   --vocab-size 154880 --make-vocab-size-divisible-by 64
   --swiglu --disable-bias-linear --qk-layernorm
   --normalization RMSNorm --norm-epsilon 1e-5
   --multi-latent-attention --q-lora-rank 768 --kv-lora-rank 512 --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}" --no-rope-fusion
   --rope-type rope
   --no-position-embedding
   --num-experts 64 --moe-router-topk 4 --moe-ffn-hidden-size 1536
   --moe-layer-freq "[0]*1+[1]*$((${MODEL_ARGS_NUM_LAYERS:-47} - 1))"
   --moe-shared-expert-intermediate-size 1536
   --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-dtype fp32
   --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0
   --moe-router-topk-scaling-factor 1.8
   --moe-router-num-groups 1 --moe-router-group-topk 1
   --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
   --untie-embeddings-and-output-weights
)
