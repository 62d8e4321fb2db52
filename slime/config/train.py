"""Flags of the trainer, checkpoints, weight sync and trainer hooks (declarations only).

Megatron's own flags stand in megatron_flags.py; here are those that the framework adds, or whose default it changes.
"""

# A table: one flag per line.
# fmt: off
from slime.config.spec import Flag, section

F = Flag

TRAIN = section(
    "train",
    "slime/backends/megatron_utils",
    [
        F("--precision", "number format of the trainer; auto is bf16 with a GPU, fp32 without", default="auto", choices=("auto", "bf16", "fp16", "fp32"), src="O", owner="slime/config/resolve.py"),
        F("--qwen-gdn-backend", "kernels of gated-delta-net layers", default="fla", choices=("fla", "flashqla"), src="U"),
        F("--custom-model-provider-path", "callable (pre_process, post_process, vp_stage=None) -> model, replaces the builder", "hook", src="U"),
        F("--recompute-loss-function", "recompute the loss in backward to save memory", action="true", default=False, src="U"),
        F("--log-probs-chunk-size", "token rows per chunk when computing log-probs; -1 is no chunking", "int", -1, src="U"),
        F("--only-train-params-name-list", "regexes searched in parameter names; everything else is frozen", nargs="+", src="U"),
        F("--freeze-params-name-list", "regexes searched in parameter names that are frozen", nargs="+", src="U"),
        F("--freeze-indexer", "freeze sparse-attention indexer weights", action="true", default=False, src="U"),
        F("--allgather-cp", "contiguous all-gather layout of context parallelism", action="true", default=False, src="U"),
        F("--micro-batch-size", "samples in a micro-batch; ignored with dynamic batching", "int", 1, src="S", owner="slime"),
        F("--global-batch-size", "rollouts per optimizer step", "int", src="S", owner="slime"),
        F("--num-steps-per-rollout", "optimizer steps per round; derives the global batch", "int", src="s", owner="slime/config/resolve.py"),
        F("--balance-data", "spread micro-batches over data-parallel ranks by cost", action="true", default=False, src="U", owner="slime/batching"),
        F("--balance-by-flops", "cut micro-batches by cost too; may exceed the token cap", action="true", default=False, src="U", owner="slime/batching"),
        F("--use-dynamic-batch-size", "pack samples of different length up to --max-tokens-per-gpu", action="true", default=False, src="U", owner="slime/batching"),
        F("--max-tokens-per-gpu", "token cap of a micro-batch per slot", "int", src="U", owner="slime/batching"),
        F("--log-probs-max-tokens-per-gpu", "the cap in log-prob passes; --max-tokens-per-gpu when not given", "int", src="U"),
        F("--data-pad-size-multiplier", "packed sequences are padded to a multiple of this", "int", 128, src="U"),
        F("--seed", "seed of the trainer", "int", 1234, src="U"),
        F("--clip-grad", "gradient norm clip", "float", 1.0, src="U"),
        F("--lr", "peak learning rate", "float", 1e-6, src="U"),
        F("--reset-optimizer-states", "clear optimizer moments after each round", action="true", default=False, src="U"),
        F("--use-stateless-adam", "Adam that keeps no moments across steps", action="true", default=False, src="U"),
        F("--mtp-num-layers", "multi-token-prediction layers", "int", src="U"),
        F("--mtp-loss-scaling-factor", "weight of the multi-token-prediction loss", "float", 0.2, src="U"),
        F("--enable-mtp-training", "train the multi-token-prediction layers too", action="true", default=False, src="U"),
        F("--share-prompts", "read a prompt once for all its samples in a micro-batch; the same gradient with less work", action="true", default=False, src="O"),
        F("--skip-zero-advantage", "no training pass for samples whose advantage is zero; the same gradient, metrics over the rest", action="true", default=False, src="O"),
        F("--padded-vocab-size", "explicit padded vocabulary; else derived", "int", src="U"),
        F("--model-name", "name that picks the weight converter; from config.json when not given", src="U", owner="slime/backends"),
    ],
)

TRAIN_HOOKS = section(
    "trainer hooks",
    "slime/backends/megatron_utils",
    [
        F("--custom-megatron-init-path", "callable after parallel init", "hook", src="U"),
        F("--custom-megatron-before-log-prob-hook-path", "callable before each log-prob pass", "hook", src="U"),
        F("--custom-megatron-before-train-step-hook-path", "callable before each optimizer step", "hook", src="U"),
        F("--megatron-deepgemm-forward-layers", "zero-based layers with block-FP8 forward", "int", nargs="+", src="U"),
        F("--megatron-deepgemm-forward-modules", "module suffixes in those layers", nargs="+", src="U"),
        F("--megatron-deepgemm-moe-forward-layers", "the same for grouped experts", "int", nargs="+", src="U"),
        F("--megatron-deepgemm-moe-forward-modules", "module suffixes there", nargs="+", src="U"),
    ],
)

CONFIG_FILES = section(
    "configuration",
    "slime/config",
    [
        F("--config", "YAML file that may hold any flag; command line > file > default", "path", src="O"),
        F("--custom-config-path", "YAML mapping; every key becomes an attribute of args and wins over the command line", "path", src="U"),
        F("--strict-args", "no lenient defaults: what would be assumed is an error", action="true", default=False, src="O"),
        F("--allow-unknown-args", "unknown flags are a warning", action="true", default=False, src="O"),
        F("--run-name", "name of the run; time and prompt file when not given", src="O"),
        F("--output-dir", "folder of run folders", "path", "outputs", src="O"),
    ],
)

CHECKPOINT = section(
    "checkpoint",
    "slime/backends/megatron_utils",
    [
        F("--load", "actor checkpoint, or a Hugging Face folder", "path", src="U"),
        F("--ref-load", "reference checkpoint, also the start point when --load is not given", "path", src="U"),
        F("--ref-ckpt-step", "its step", "int", src="U"),
        F("--save", "folder of checkpoints; <run dir>/checkpoints when only --save-interval is given", "path", src="U", owner="slime"),
        F("--save-interval", "rounds between checkpoints; the last round is saved too", "int", src="S", owner="slime/ray"),
        F("--save-keep-last", "complete checkpoints of this run to keep; all when not given", "int", src="O", owner="slime/ray"),
        F("--save-hf", "Hugging Face export at each checkpoint; {rollout_id} is substituted", "path", src="U", owner="slime/ray"),
        F("--async-save", "write checkpoints in the background", action="true", default=False, src="U"),
        F("--no-save-optim", "leave optimizer state out of checkpoints", action="true", default=False, src="U"),
        F("--no-resume", "do not continue a run found under --save: start over in a fresh folder", action="true", default=False, src="O", owner="slime/config/checkpoint_paths.py"),
    ],
)

WEIGHT_SYNC = section(
    "weight sync",
    "slime/backends/weight_sync",
    [
        F("--update-weights-interval", "rounds between weight syncs", "int", 1, src="S", owner="slime/ray"),
        F("--update-weight-mode", "everything, or bytes changed since the last sync", default="full", choices=("full", "delta"), src="s"),
        F("--update-weight-transport", "direct (nccl): process group, or memory where a node's CPU processes share it; broadcast: process group always; disk: a folder that all see", default="nccl", choices=("nccl", "broadcast", "disk"), src="s", owner="slime/ray"),
        F("--update-weight-disk-dir", "folder of version folders weight_v%06d, seen by trainer and engines, used by one run at a time", "path", src="s"),
        F("--update-weight-disk-keep-files", "keep full checkpoints after engines loaded them", action="true", default=False, src="U", owner="slime/ray"),
        F("--update-weight-local-checkpoint-dir", "host-local copy that is patched before reload", "path", src="U"),
        F("--update-weight-delta-encoding", "delta format", default="xor", choices=("xor", "overwrite"), src="U"),
        F("--update-weight-delta-checksum", "digest of each tensor", default="xxh3-128", choices=("xxh3-128", "blake3", "adler32"), src="U"),
        F("--custom-update-weight-post-write-path", "callable (args, version_dir, rollout_engines) on every trainer rank after files are written", "hook", src="U", owner="slime/ray"),
        F("--update-weight-buffer-size", "bytes of a transfer bucket", "int", 536870912, src="U", owner="slime"),
        F("--release-train", "stop trainer workers while generating, start them again from --save", action="true", default=False, src="U"),
        F("--check-weight-update-equal", "at each sync compare a checksum of the trainer's weights with each engine's", action="true", default=False, src="U", owner="slime"),
    ],
)

FLAGS = TRAIN + TRAIN_HOOKS + CHECKPOINT + WEIGHT_SYNC + CONFIG_FILES
