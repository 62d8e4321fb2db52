"""The one table of what is not built yet, and of what old scripts carry that means nothing here.

A flag absent from both tables is live. To make a capability live, build it and delete its entry.
UNBUILT: dest -> (what is missing, values that need it; None means any value but the default).
NOOP: dest -> why the flag changes nothing; it is logged when given. MEGATRON_GROUPS: the same for Megatron's own flags.
"""

# fmt: off
from __future__ import annotations

Unbuilt = tuple[str, tuple | None]

#: Families whose weights can be converted and whose shape can be read from config.json.
MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe", "llama")


def _all(reason: str, *dests: str) -> dict[str, Unbuilt]:
    return {dest: (reason, None) for dest in dests}


UNBUILT: dict[str, Unbuilt] = {
    **_all("ending the trainer between rounds is not built yet: --offload-train frees its memory", "release_train"),
    "update_weight_mode": ("delta updates are not built yet", ("delta",)),
    **_all(
        "engines that pull into a local copy are not built yet (SGLang needs a patch for it): they read --update-weight-disk-dir",
        "update_weight_local_checkpoint_dir",
    ),
    "update_weight_delta_encoding": ("delta updates are not built yet", ("overwrite",)),
    "update_weight_delta_checksum": ("delta updates are not built yet", ("blake3", "adler32")),
    **_all("engines started elsewhere are not built yet", "rollout_external_engine_addrs"),
    **_all("an engine topology file is not built yet: all engines are equal", "sglang_config", "prefill_num_servers"),
    **_all("engines that span several slots are not built yet: only 1 works", "rollout_num_gpus_per_engine"),
    **_all("using a router that already runs is not built yet", "sglang_router_ip", "sglang_router_port"),
    **_all("restarting dead engines is not built yet", "use_fault_tolerance"),
    **_all("posting through Ray actors is not built yet", "use_distributed_post"),
    "rollout_data_transport": ("the NIXL transport is not built yet", ("nixl",)),
    **_all("the external trajectory server is not built yet", "rollout_buffer_url"),
    **_all("multi-token prediction is not built yet", "mtp_num_layers", "enable_mtp_training"),
    **_all("sparse-attention models are not built yet", "freeze_indexer"),
    **_all("the contiguous layout of context parallelism is not built yet: zigzag is", "allgather_cp"),
    "qwen_gdn_backend": ("gated-delta-net models are not built yet", ("flashqla",)),
    **_all(
        "block-FP8 forward is not built yet",
        "megatron_deepgemm_forward_layers",
        "megatron_deepgemm_forward_modules",
        "megatron_deepgemm_moe_forward_layers",
        "megatron_deepgemm_moe_forward_modules",
    ),
    **_all("the memory recorder is not built yet", "record_memory_history", "memory_snapshot_num_steps"),
    "memory_recorder": ("the memory recorder is not built yet", ("memray",)),
    **_all("the profiler is not built yet", "profile_target"),
    **_all("the run-time assertions are not built yet", "ci_test", "ci_save_grad_norm", "ci_load_grad_norm"),
    **_all(
        "the teacher server is not built yet",
        "teacher_port",
        "teacher_warmup_port",
        "teacher_warmup_timeout_s",
        "teacher_sample_reduction_chunk_size",
        "teacher_label_reduction_chunk_size",
        "megatron_server_max_length",
        "megatron_server_update_timeout_s",
        "megatron_server_warmup",
    ),
}

#: Values of unbuilt flags that mean "off" though they are not the default.
OFF_VALUES: dict[str, tuple] = {"rope_type": ("rope",)}

NOOP: dict[str, str] = {
    "http_proxy": "nothing reads it",
    "model_name": "the weight converter follows model_type in config.json",
    "num_gpus_per_node": "Ray places the slots, and an engine takes one slot",
    "min_batch_collection_ratio": "nothing reads it",
    "fetch_trajectory_retry_times": "only the external trajectory server reads it",
    "rollout_task_type": "only the external trajectory server reads it",
    "memory_snapshot_dir": "only the memory recorder reads it",
    "ci_disable_kl_checker": "only --ci-test reads it",
    "ci_train_rollout_logprob_abs_diff_threshold": "only --ci-test reads it",
    "mtp_loss_scaling_factor": "only multi-token prediction reads it",
    "rollout_health_check_interval": "only the restart of dead engines reads it",
    "rollout_health_check_timeout": "only the restart of dead engines reads it",
    "rollout_health_check_first_wait": "only the restart of dead engines reads it",
}

#: Passed on to Megatron where there is a GPU; elsewhere put back to the default.
KERNELS = "tunes kernels or communication of a GPU; results do not depend on it"

#: The same for optimizer state that would leave a GPU: beside none it lies in host memory anyway.
HOST_OPTIMIZER = "optimizer state leaves no GPU here, it is in host memory already"
GPU_ONLY = (KERNELS, HOST_OPTIMIZER)

#: Groups of Megatron's own flags (megatron_table.py, megatron_noop.py) -> (status, reason).
MEGATRON_GROUPS: dict[str, tuple[str, str]] = {
    "live": ("live", ""),
    "kernels": ("noop", KERNELS),
    "host_optimizer": ("noop", HOST_OPTIMIZER),
    "pretraining_log": ("noop", "curves go to metrics.jsonl and TensorBoard of the run folder"),
    "forced": ("noop", "the trainer sets it itself"),
    "checkpoint_format": ("noop", "checkpoints here have one format"),
    "patch": ("noop", "no effect in stock Megatron"),
    "layout": ("live", ""),
    "parallel": ("unbuilt", "this way of laying out ranks is not built yet (docs/parallelism.md has those that are)"),
    "moe": ("live", ""),
    "moe_kernels": ("noop", KERNELS),
    "moe_drop_policy": ("noop", "no token is dropped: an engine drops none"),
    "moe_shared": ("unbuilt", "no built model has shared experts"),
    "moe_router": ("unbuilt", "no built model has such a router"),
    "moe_mismatch": ("unbuilt", "the trainer would route tokens otherwise than the engine that generated them"),
    "moe_old": ("unbuilt", "an old spelling: --moe-grouped-gemm, --recompute-modules and --expert-tensor-parallel-size are today's"),
    "moe_replay": ("unbuilt", "Megatron's own replay is for debugging: --use-routing-replay and --use-rollout-routing-replay are built"),
    "moe_fp8": ("unbuilt", "8-bit and 4-bit training is not built yet"),
    "moe_other": ("unbuilt", "the trainer does not support this Megatron feature"),
    "mla": ("unbuilt", "multi-latent attention is not built yet"),
    "hybrid": ("unbuilt", "hybrid and linear-attention models are not built yet"),
    "architecture": ("unbuilt", "this architecture is not built yet: Qwen2, Qwen3 and Llama shapes are"),
    "fp8": ("unbuilt", "8-bit and 4-bit training is not built yet"),
    "optimizer": ("unbuilt", "this optimizer feature is not built yet"),
    "fsdp": ("unbuilt", "fully sharded data parallelism is not built yet"),
    "offload": ("unbuilt", "activation offloading is not built yet"),
    "profile": ("unbuilt", "the profiler is not built yet"),
    "data": ("unbuilt", "prompts come from --prompt-data; Megatron's pretraining data flags do not apply"),
    "schedule": ("unbuilt", "the number of steps follows --num-rollout or --num-epoch and the batch sizes"),
    "serving": ("unbuilt", "engines generate; Megatron's own inference does not apply"),
    "loading": ("unbuilt", "only checkpoints of this framework and Hugging Face folders are loaded"),
    "other": ("unbuilt", "the trainer does not support this Megatron feature"),
}
