"""Megatron-LM's own flags as users type them: one line per flag, grouped by what becomes of it here.

Line: ``flag kind default dest choices`` (columns after kind are optional, ``-`` leaves one out). Kinds: true, false
(switches), int, float, str, ints, strs, lower, pattern. ``None`` is None. What becomes of a group stands in status.py.
Fields of the core's dataclasses that have no line here get a flag from megatron_fields.json.
It does not know the framework's flags; where both declare a name, the framework's wins.
"""

from slime.config.megatron_noop import NOOP_TABLE

TABLE: dict[str, str] = {
    **NOOP_TABLE,
    "live": """
--num-layers int None
--hidden-size int None
--ffn-hidden-size int None
--num-attention-heads int None
--kv-channels int None
--group-query-attention true
--num-query-groups int 1
--vocab-size int None
--make-vocab-size-divisible-by int 128
--max-position-embeddings int None
--position-embedding-type str learned_absolute position_embedding_type learned_absolute,rope,none
--use-rotary-position-embeddings true
--rotary-base float 10000
--rotary-percent float 1.0
--use-rope-scaling true
--rope-scaling-factor float 8.0
--normalization str LayerNorm normalization LayerNorm,RMSNorm
--norm-epsilon float 1e-05
--swiglu true
--disable-bias-linear false True add_bias_linear
--add-qkv-bias true
--qk-layernorm true
--untie-embeddings-and-output-weights true
--spec strs None
--attention-dropout float 0.0
--hidden-dropout float 0.0
--attention-softmax-in-fp32 true
--init-method-std float 0.02
--seq-length int None
--bf16 true
--fp16 true
--accumulate-allreduce-grads-in-fp32 true
--loss-scale float None
--initial-loss-scale float 4294967296
--min-loss-scale float 1.0
--loss-scale-window float 1000
--hysteresis int 2
--recompute-activations true
--recompute-granularity str None recompute_granularity full,selective
--recompute-method str None recompute_method uniform,block
--recompute-num-layers int None
--recompute-modules strs None
--sequence-parallel true
--deterministic-mode true
--optimizer str adam optimizer adam,sgd,muon,dist_muon
--min-lr float 0.0
--lr-decay-style str linear lr_decay_style constant,linear,cosine,inverse-square-root,WSD
--lr-wsd-decay-style str exponential lr_wsd_decay_style exponential,linear,cosine,minus_sqrt
--lr-decay-iters int None
--lr-wsd-decay-iters int None
--lr-warmup-fraction float None
--lr-warmup-iters int 0
--lr-warmup-init float 0.0
--weight-decay float 0.01
--start-weight-decay float None
--end-weight-decay float None
--weight-decay-incr-style str constant weight_decay_incr_style constant,linear,cosine
--adam-beta1 float 0.9
--adam-beta2 float 0.999
--adam-eps float 1e-08
--sgd-momentum float 0.9
--overlap-grad-reduce true
--override-opt_param-scheduler true - override_opt_param_scheduler
--use-checkpoint-opt_param-scheduler true - use_checkpoint_opt_param_scheduler
--ckpt-step int None
--no-load-optim true
--no-load-rng true
--no-save-rng true
--finetune true
--trust-remote-code true
""",
    "layout": """
--tensor-model-parallel-size int 1
--pipeline-model-parallel-size int 1
--context-parallel-size int 1
--expert-model-parallel-size int 1
--expert-tensor-parallel-size int None
--virtual-pipeline-model-parallel-size int None
--num-layers-per-virtual-pipeline-stage int None
--num-virtual-stages-per-pipeline-rank int None
--microbatch-group-size-per-virtual-pipeline-stage int None microbatch_group_size_per_vp_stage
--decoder-first-pipeline-num-layers int None
--decoder-last-pipeline-num-layers int None
""",
    "parallel": """
--pipeline-model-parallel-layout str None
--pipeline-model-parallel-split-rank int None
--pipeline-model-parallel-comm-backend str None
--account-for-embedding-in-pipeline-split true
--account-for-loss-in-pipeline-split true
--hierarchical-context-parallel-sizes ints None
--hybrid-context-parallel true
--max-seqlen-per-dp-cp-rank int None
--use-tp-pp-dp-mapping true
--num-distributed-optimizer-instances int 1
""",
    "moe": """
--num-experts int None
--moe-layer-freq pattern 1
--moe-ffn-hidden-size int None
--moe-router-load-balancing-type str aux_loss moe_router_load_balancing_type none,aux_loss,seq_aux_loss,global_aux_loss
--moe-router-dtype str None moe_router_dtype fp32,fp64
--moe-router-score-function str softmax moe_router_score_function softmax,sigmoid
--moe-router-topk int 2
--moe-router-pre-softmax true
--moe-router-enable-expert-bias true
--moe-router-bias-update-rate float 0.001
--moe-aux-loss-coeff float 0.0
--moe-z-loss-coeff float None
--moe-per-layer-logging true
""",
    "moe_kernels": """
--moe-grouped-gemm true
--moe-permute-fusion true
--moe-router-fusion true
--moe-token-dispatcher-type str alltoall moe_token_dispatcher_type allgather,alltoall,flex
--moe-enable-deepep true
--moe-flex-dispatcher-backend str deepep
--moe-deepep-num-sms int 20
--moe-hybridep-num-sms int 16
""",
    "moe_drop_policy": """
--moe-token-drop-policy str probs moe_token_drop_policy probs,position
""",
    "moe_shared": """
--moe-shared-expert-intermediate-size int None
--moe-shared-expert-gate true
--moe-shared-expert-overlap true
""",
    "moe_router": """
--moe-router-num-groups int None
--moe-router-group-topk int None
--moe-router-topk-scaling-factor float None
--moe-router-topk-limited-devices int None
--moe-apply-probs-on-input true
--moe-latent-size int None
""",
    "moe_mismatch": """
--moe-expert-capacity-factor float None
--moe-pad-expert-input-to-capacity true
--moe-token-dropping true
--moe-input-jitter-eps float None
--moe-router-force-load-balancing true
""",
    "moe_old": """
--moe-use-legacy-grouped-gemm true
--moe-layer-recompute true
--moe-extended-tp true
""",
    "moe_replay": """
--moe-enable-routing-replay true
""",
    "moe_fp8": """
--moe-router-padding-for-fp8 true
--moe-router-padding-for-quantization true
""",
    "moe_other": """
--moe-use-upcycling true
--moe-upcycling-granularity int 1
--overlap-moe-expert-parallel-comm true
--delay-wgrad-compute true
--ep-overlap-early-attn-memory-release true
""",
    "mla": """
--multi-latent-attention true
--q-lora-rank int None
--kv-lora-rank int 32
--qk-head-dim int 128
--qk-pos-emb-head-dim int 64
--v-head-dim int 128
--rotary-scaling-factor float 1.0
--mscale float 1.0
--mscale-all-dim float 0.0
--rope-type str None rope_type rope,yarn
--original-max-position-embeddings int None
--beta-fast float 32.0
--beta-slow float 1.0
--cache-mla-latents true
""",
    "hybrid": """
--is-hybrid-model true
--hybrid-attention-ratio float 0.0
--hybrid-mlp-ratio float 0.0
--hybrid-override-pattern str None
--mamba-state-dim int 128
--mamba-head-dim int 64
--mamba-num-groups int 8
--mamba-num-heads int None
--disable-mamba-mem-eff-path false True use_mamba_mem_eff_path
--experimental-attention-variant str None
--linear-attention-type str None
--linear-attention-freq pattern None
--linear-conv-kernel-dim int 4
--linear-key-head-dim int 128
--linear-value-head-dim int 128
--linear-num-key-heads int 16
--linear-num-value-heads int 32
--attention-output-gate true
--apply-layernorm-1p true
--dsa-indexer-n-heads int None
--dsa-indexer-head-dim int None
--dsa-indexer-topk int None
--dsa-indexer-loss-coeff float None
--dsa-indexer-use-sparse-loss true
""",
    "architecture": """
--encoder-num-layers int None
--decoder-num-layers int None
--relative-attention-num-buckets int 32
--relative-attention-max-distance int 128
--rotary-interleaved true
--rotary-seq-len-interpolation-factor int None
--no-rope-freq pattern None
--mrope-section ints None
--apply-residual-connection-post-layernorm true
--openai-gelu true
--squared-relu true
--quick-geglu true
--onnx-safe true
--bert-no-binary-head false True bert_binary_head
--activation-func-clamp-value float None
--glu-linear-offset float 0.0
--softmax-type str vanilla
--softmax-scale float None
--window-size str None
--window-attn-skip-freq pattern None
--qk-l2-norm true
--qk-clip true
--qk-clip-alpha float 0.5
--qk-clip-threshold float 100
--post-self-attn-layernorm true
--post-mlp-layernorm true
--fp32-residual-connection true
--apply-query-key-layer-scaling true
--heterogeneous-layers-config-path str None
--heterogeneous-layers-config-encoded-json str None
--embedding-init-method-std float None
--init-method-xavier-uniform true
""",
    "fp8": """
--fp8-format str None fp8
--fp8-recipe str delayed
--fp8-margin int 0
--fp8-interval int 1
--fp8-amax-history-len int 1
--fp8-amax-compute-algo str most_recent
--no-fp8-wgrad false True fp8_wgrad
--fp8-param-gather true
--fp8-dot-product-attention true
--fp8-multi-head-attention true
--fp4-format str None fp4
--fp4-recipe str nvfp4
--fp4-param-gather true
--first-last-layers-bf16 true
--num-layers-at-start-in-bf16 int 1
--num-layers-at-end-in-bf16 int 1
--reuse-grad-buf-for-mxfp8-param-ag true
--te-precision-config-file str None
--use-kitchen true
--use-kitchen-attention true
--kitchen-attention-backend str sdpa
--kitchen-config-file str None
--kitchen-recipe-number int None
""",
    "optimizer": """
--decoupled-lr float None
--decoupled-min-lr float None
--no-decoupled-weight-decay false True decoupled_weight_decay
--apply-wd-to-qk-layernorm true
--muon-momentum float 0.95
--muon-no-split-qkv false True muon_split_qkv
--muon-use-nesterov true
--muon-scale-mode str spectral
--muon-fp32-matmul-prec str medium
--muon-num-ns-steps int 5
--muon-tp-mode str blockwise
--muon-extra-scale-factor float 1.0
--main-grads-dtype str fp32 main_grads_dtype fp32,bf16
--main-params-dtype str fp32 main_params_dtype fp32,fp16
--exp-avg-dtype str fp32 exp_avg_dtype fp32,fp16,bf16,fp8
--exp-avg-sq-dtype str fp32 exp_avg_sq_dtype fp32,fp16,bf16,fp8
--no-store-param-remainders false True store_param_remainders
--grad-reduce-in-bf16 true
--fp16-lm-cross-entropy true
--data-parallel-random-init true
""",
    "offload": """
--cpu-offloading true
--cpu-offloading-num-layers int 0
--cpu-offloading-activations true
--cpu-offloading-weights true
--cpu-offloading-double-buffering true
--fine-grained-activation-offloading true
--offload-modules strs None
--min-offloaded-tensor-size int 1048576
""",
    "fsdp": """
--use-megatron-fsdp true
--use-custom-fsdp true
--use-torch-fsdp2 true
--torch-fsdp2-no-reshard-after-forward false True torch_fsdp2_reshard_after_forward
--init-model-with-meta-device true
--data-parallel-sharding-strategy str no_shard
--outer-dp-sharding-strategy str no_shard
--fsdp-double-buffer true
--fsdp-manual-registration true
--suggested-communication-unit-size int None
--keep-fp8-transpose-cache true
--no-preserve-fp32-weights false True preserve_fp32_weights
--no-strict-fsdp-dtensor-load false True strict_fsdp_dtensor_load
""",
    "loading": """
--pretrained-checkpoint str None
--use-checkpoint-args true
--use-mp-args-from-checkpoint-args true
--no-use-tokenizer-model-from-checkpoint-args false True use_tokenizer_model_from_checkpoint_args
--ckpt-convert-format str None
--ckpt-convert-save str None
--ckpt-convert-update-legacy-dist-opt-format true
--load-model-opt-format true
--non-persistent-save-interval int None
--non-persistent-ckpt-type str None
--non-persistent-global-ckpt-dir str None
--non-persistent-local-ckpt-dir str None
--non-persistent-local-ckpt-algo str fully_parallel
--replication true
--replication-jump int None
--replication-factor int 2
""",
    "schedule": """
--train-iters int None
--train-samples int None
--lr-decay-samples int None
--lr-warmup-samples int 0
--lr-wsd-decay-samples int None
--rampup-batch-size strs None
--decrease-batch-size-if-needed true
--iterations-to-skip ints None
--exit-interval int None
--exit-duration-in-mins int None
--exit-signal-handler true
--eval-iters int 100
--skip-train true
--full-validation true
--multiple-validation-sets true
""",
    "data": """
--data-path strs None
--train-data-path strs None
--valid-data-path strs None
--test-data-path strs None
--data-args-path str None
--per-split-data-args-path str None
--data-cache-path str None
--split str None
--mock-data true
--no-mmap-bin-files false True mmap_bin_files
--no-create-attention-mask-in-dataloader false True create_attention_mask_in_dataloader
--num-dataset-builder-threads int 1
--object-storage-cache-path str None
--mid-level-dataset-surplus float 0.005
--reset-position-ids true
--reset-attention-mask true
--eod-mask-loss true
--mask-prob float 0.15
--short-seq-prob float 0.1
--sample-rate float 1.0
--encoder-seq-length int None
--decoder-seq-length int None
--retriever-seq-length int 256
--vocab-file str None
--merge-file str None
--vocab-extra-ids int 0
--tokenizer-metadata str None
--tiktoken-pattern str None
--tiktoken-num-special-tokens int 1000
--tiktoken-special-tokens strs None
--special-tokens strs None
""",
    "profile": """
--profile true
--profile-step-start int 10
--profile-step-end int 12
--profile-ranks ints 0
--use-pytorch-profiler true
--memory-snapshot-path str snapshot.pickle
""",
    "serving": """
--flash-decode true
--inference-dynamic-batching true
--inference-max-requests int 8
--inference-max-seq-length int 2560
--inference-batch-times-seqlen-threshold int -1
--max-tokens-to-oom int 12000
--output-bert-embeddings true
--bert-embedder-type str megatron
--use-inference-optimized-layers true
--inference-fuse-tp-communication true
--inference-sampling-seed int 42
--mlp-chunks-for-prefill int 1
""",
    "other": """
--yaml-cfg str None
--use-legacy-models true
--check-for-spiky-loss true
--check-for-large-grads true
--check-weight-hash-across-dp-replicas-interval int None
--error-injection-rate int 0
--error-injection-type str transient_error
--rerun-mode str disabled
--result-rejected-tracker-filename str None
--disable-straggler-on-startup true
--straggler-ctrlr-port int 65535
--straggler-minmax-count int 1
--adlr-autoresume true
--adlr-autoresume-interval int 1000
--enable-ft-package true
--calc-ft-timeouts true
--config-logger-dir str None
--test-mode true
--fake-process-group true
--retro-add-retriever true
--retro-project-dir str None
--quant-recipe str None
""",
}
