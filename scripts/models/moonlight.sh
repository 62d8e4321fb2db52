# Moonlight 16B-A3B.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS=(
   --num-layers "${MODEL_ARGS_NUM_LAYERS:-27}"
   --hidden-size 2048 --ffn-hidden-size 11264
   --num-attention-heads 16 --kv-channels 128
   --vocab-size 163840
   --swiglu --disable-bias-linear --qk-layernorm
   --normalization RMSNorm --norm-epsilon 1e-5
   --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
   --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-50000}" --no-rope-fusion
   --rope-type rope --rotary-scaling-factor 1 --mscale 1.0 --mscale-all-dim 1.0
   --attention-softmax-in-fp32
   --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408
   --moe-layer-freq "[0]*1+[1]*$((${MODEL_ARGS_NUM_LAYERS:-27} - 1))"
   --moe-shared-expert-intermediate-size 2816
   --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-dtype fp32
   --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
   --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0
   --moe-router-topk-scaling-factor 2.446
   --moe-router-num-groups 1 --moe-router-group-topk 1
   --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall --moe-token-drop-policy probs
   --untie-embeddings-and-output-weights
)
