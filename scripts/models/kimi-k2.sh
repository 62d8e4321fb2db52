# Kimi K2 Instruct.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE, MODEL_ARGS_NORM_EPSILON, MODEL_ARGS_ROTARY_SCALING_FACTOR.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-61}"
   --hidden-size 7168 --ffn-hidden-size 18432
   --num-attention-heads 64 --kv-channels 64
   --vocab-size 163840
   --swiglu --disable-bias-linear --qk-layernorm
   --normalization RMSNorm --norm-epsilon "${MODEL_ARGS_NORM_EPSILON:-1e-6}"
   --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-50000}" --no-rope-fusion
   --rope-type yarn --rotary-scaling-factor "${MODEL_ARGS_ROTARY_SCALING_FACTOR:-32}" --mscale 1.0 --mscale-all-dim 1.0
   --original-max-position-embeddings 4096 --beta-fast 1 --beta-slow 1
   --attention-softmax-in-fp32
   --num-experts 384 --moe-router-topk 8 --moe-ffn-hidden-size 2048
   --moe-layer-freq "[0]*1+[1]*$((${MODEL_ARGS_NUM_LAYERS:-61} - 1))"
   --moe-shared-expert-intermediate-size 2048
   --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-dtype fp32
   --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0
   --moe-router-topk-scaling-factor 2.827
   --moe-router-num-groups 1 --moe-router-group-topk 1
   --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
   --untie-embeddings-and-output-weights
)
