"""Megatron-LM's flags that are accepted without effect: kernels, communication, its own logs and checkpoint formats.

The line format stands in megatron_table.py, the reason of each group in status.py.
"""

NOOP_TABLE: dict[str, str] = {
    "patch": """
--use-gated-attention true
--no-position-embedding false True add_position_embedding
--enable-experimental true
""",
    "kernels": """
--attention-backend lower auto attention_backend flash,fused,unfused,local,auto
--use-flash-attn true
--transformer-impl str transformer_engine transformer_impl local,transformer_engine,inference_optimized
--use-mcore-models true
--no-masked-softmax-fusion false True masked_softmax_fusion
--no-bias-gelu-fusion false True bias_gelu_fusion
--no-bias-swiglu-fusion false True bias_swiglu_fusion
--no-bias-dropout-fusion false True bias_dropout_fusion
--no-rope-fusion false True apply_rope_fusion
--fused-single-qkv-rope true
--use-fused-weighted-squared-relu true
--cross-entropy-loss-fusion true
--cross-entropy-fusion-impl str native cross_entropy_fusion_impl native,te
--no-persist-layer-norm false True persist_layer_norm
--memory-efficient-layer-norm true
--no-gradient-accumulation-fusion false True gradient_accumulation_fusion
--no-async-tensor-model-parallel-allreduce false True async_tensor_model_parallel_allreduce
--no-clone-scatter-output-in-embedding false True clone_scatter_output_in_embedding
--distribute-saved-activations true
--disable-bf16-reduced-precision-matmul true
--tp-comm-overlap true
--tp-comm-overlap-cfg str None
--disable-tp-comm-overlap-ag false True tp_comm_overlap_ag
--disable-tp-comm-overlap-rs false True tp_comm_overlap_rs
--tp-comm-overlap-rs-dgrad true
--tp-comm-overlap-disable-fc1 true
--tp-comm-overlap-disable-qkv true
--disable-tp-comm-bulk-dgrad false True tp_comm_bulk_dgrad
--disable-tp-comm-bulk-wgrad false True tp_comm_bulk_wgrad
--disable-tp-comm-split-ag false True tp_comm_split_ag
--disable-tp-comm-split-rs false True tp_comm_split_rs
--tp-comm-bootstrap-backend str nccl tp_comm_bootstrap_backend nccl,mpi,gloo
--no-overlap-p2p-communication false True overlap_p2p_comm
--overlap-p2p-communication-warmup-flush true - overlap_p2p_comm_warmup_flush
--use-ring-exchange-p2p true
--no-scatter-gather-tensors-in-pipeline false True scatter_gather_tensors_in_pipeline
--defer-embedding-wgrad-compute true
--wgrad-deferral-limit int 0
--no-align-grad-reduce false True align_grad_reduce
--no-align-param-gather false True align_param_gather
--overlap-param-gather true
--overlap-param-gather-with-optimizer-step true
--ddp-num-buckets int None
--ddp-bucket-size int None
--ddp-pad-buckets-for-high-nccl-busbw true
--ddp-average-in-collective true
--ddp-reduce-scatter-with-fp32-accumulation true
--no-gradient-reduce-div-fusion false True gradient_reduce_div_fusion
--nccl-ub true - nccl_ub
--disable-symmetric-registration true
--use-sharp true
--sharp-enabled-group str None
--high-priority-stream-groups strs None
--cp-comm-type strs None
--nccl-communicator-config-path str None
--lazy-mpu-init true
--local-rank int 0
--empty-unused-memory-level int 0
--manual-gc true
--manual-gc-interval int 0
--no-manual-gc-eval false True manual_gc_eval
--enable-cuda-graph true
--external-cuda-graph true
--cuda-graph-impl str none
--cuda-graph-scope str full
--cuda-graph-warmup-steps int 3
--te-rng-tracker true - use_te_rng_tracker
--inference-rng-tracker true
--symmetric-ar-type str None
--batch-invariant-mode true
--train-sync-interval int None
--num-workers int 2
""",
    "host_optimizer": """
--use-precision-aware-optimizer true
--optimizer-cpu-offload true
--optimizer-offload-fraction float 1.0
--use-torch-optimizer-for-cpu-offload true
--overlap-cpu-optimizer-d2h-h2d true
--no-pin-cpu-grads false True pin_cpu_grads
--no-pin-cpu-params false True pin_cpu_params
""",
    "forced": """
--use-distributed-optimizer true
--use-cpu-initialization true
--no-initialization false True perform_initialization
--variable-seq-lengths true
--disable-gloo-process-groups false True enable_gloo_process_groups
--tokenizer-type str None
--tokenizer-model str None
--dataloader-type str None dataloader_type single,cyclic,external
--no-check-for-nan-in-loss-and-grad false True check_for_nan_in_loss_and_grad
""",
    "pretraining_log": """
--log-interval int 100
--log-throughput true
--log-progress true
--log-params-norm true
--log-num-zeros-in-grad true
--log-max-attention-logit true
--log-energy true
--log-straggler true
--log-timers-to-tensorboard true
--no-log-loss-scale-to-tensorboard false True log_loss_scale_to_tensorboard
--no-log-learning-rate-to-tensorboard false True log_learning_rate_to_tensorboard
--log-validation-ppl-to-tensorboard true
--log-memory-to-tensorboard true
--log-memory-interval int None
--log-world-size-to-tensorboard true
--log-batch-size-to-tensorboard true
--tensorboard-dir str None
--tensorboard-log-interval int 1
--tensorboard-queue-size int 1000
--timing-log-level int 0
--timing-log-option str minmax timing_log_option max,minmax,all
--no-barrier-with-level-1-timing false True barrier_with_L1_time
--wandb-entity str None
--wandb-exp-name str None
--wandb-save-dir str None
--logging-level int None
--enable-one-logger true
--no-one-logger false True enable_one_logger
--one-logger-project str megatron-lm
--one-logger-run-name str None
--app-tag-run-name str None
--app-tag-run-version str 0.0.0
""",
    "checkpoint_format": """
--use-dist-ckpt true
--auto-detect-ckpt-format true
--dist-ckpt-format str None dist_ckpt_format_deprecated
--ckpt-format str torch_dist ckpt_format torch,torch_dist,zarr,torch_dcp,fsdp_dtensor
--ckpt-fully-parallel-save true - ckpt_fully_parallel_save_deprecated
--no-ckpt-fully-parallel-save false True ckpt_fully_parallel_save
--ckpt-fully-parallel-load true
--ckpt-assume-constant-structure true
--use-persistent-ckpt-worker true
--dist-ckpt-strictness str assume_ok_unexpected
--dist-ckpt-optim-fully-reshardable true
--dist-ckpt-save-pre-mcore-014 true
--save-retain-interval int None
--exit-on-missing-checkpoint true
""",
}
