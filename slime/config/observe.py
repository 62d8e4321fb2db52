"""Flags of trackers, logging, debug dumps, profiling and CI assertions (declarations only)."""

# A table: one flag per line.
# fmt: off
from slime.config.spec import Flag, section

F = Flag

LOGGING = section(
    "logging",
    "slime/observability",
    [
        F("--use-wandb", "log to Weights & Biases as well (pip install 'slime[wandb]'); TensorBoard is then off unless asked for", action="true", default=False, src="U"),
        F("--wandb-mode", "overrides WANDB_MODE; offline writes files that `wandb sync` uploads later", choices=("online", "offline", "disabled"), src="U"),
        F("--wandb-dir", "folder of its files; the run folder when not given", "path", src="U"),
        F("--wandb-key", "API key, used only online; written to no file", src="U"),
        F("--wandb-host", "address of a server of your own", src="U"),
        F("--wandb-team", "team", src="U"),
        F("--wandb-group", "group; the run id is appended", src="U"),
        F("--wandb-project", "project", src="U"),
        F("--wandb-run-id", "run to write to or to go on with; not given: one per run folder", src="U"),
        F("--disable-wandb-random-suffix", "nothing is appended to the group name", dest="wandb_random_suffix", action="false", default=True, src="U"),
        F("--wandb-always-use-train-step", "rounds and evaluations stand at the training step they belong to, in W&B and TensorBoard", action="true", default=False, src="U"),
        F("--use-tensorboard", "write TensorBoard events; on when no tracker is chosen", action="bool", src="s"),
        F("--tb-project-name", "TensorBoard folder tensorboard_log/<project>/<experiment> instead of the run folder", src="U"),
        F("--tb-experiment-name", "second part of that folder; the run name when not given", src="U"),
        F("--log-multi-turn", "multi-turn statistics", action="true", default=False, src="U"),
        F("--log-passrate", "pass@n", action="true", default=False, src="U"),
        F("--log-reward-category", "key of a dict reward to count", src="U"),
        F("--log-correct-samples", "statistics over correct samples", action="true", default=False, src="U"),
        F("--custom-rollout-log-function-path", "callable (rollout_id, args, samples, extra_metrics, time) -> bool; true skips the built-in one", "hook", src="U", owner="slime"),
        F("--custom-eval-rollout-log-function-path", "callable (rollout_id, args, data, extra_metrics) -> bool", "hook", src="U", owner="slime"),
    ],
)

DEBUG = section(
    "debug and profiling",
    "slime/observability",
    [
        F("--debug-rollout-only", "engines only, no training", action="true", default=False, src="s", owner="slime/ray"),
        F("--debug-train-only", "trainer only, no engines", action="true", default=False, src="s", owner="slime/ray"),
        F("--save-debug-rollout-data", "dump samples to this file; {rollout_id} is substituted", "path", src="s", owner="slime"),
        F("--load-debug-rollout-data", "train on a dump instead of generating; {rollout_id} is substituted", "path", src="s", owner="slime"),
        F("--load-debug-rollout-data-subsample", "keep this share of a dump", "float", src="U", owner="slime"),
        F("--save-debug-train-data", "dump what the trainer got; {rollout_id} and {rank} are substituted", "path", src="U", owner="slime"),
        F("--load-forge-rollout-data", "replay a dump while engines stay up, with --rollout-function-path slime.rollout.forge_load.generate_rollout", "path", src="U", owner="slime/rollout"),
        F("--dump-details", "folder for both dumps and the tokenizer", "path", src="U", owner="slime/config/resolve.py"),
        F("--memory-snapshot-dir", "folder of the memory recorder", "path", ".", src="U"),
        F("--memory-snapshot-num-steps", "write a snapshot after N steps", "int", src="U"),
        F("--memory-recorder", "recorder", default="torch", choices=("torch", "memray"), src="U"),
        F("--record-memory-history", "start the memory recorder", action="true", default=False, src="U"),
        F("--profile-target", "what the profiler covers", default=["train_overall"], nargs="+", choices=("train_overall", "train_actor", "train_log_probs"), src="U"),
    ],
)

CI = section(
    "assertions for CI",
    "slime/backends/megatron_utils",
    [
        F("--ci-test", "check invariants while running", action="true", default=False, src="U"),
        F("--ci-disable-kl-checker", "leave the KL assertions out", action="true", default=False, src="U"),
        F("--ci-train-rollout-logprob-abs-diff-threshold", "largest mean difference of trainer and engine log-probs", "float", 0.1, src="U"),
        F("--ci-save-grad-norm", "store gradient norms; {role} {rollout_id} {step_id} are substituted", "path", src="U"),
        F("--ci-load-grad-norm", "compare gradient norms with stored ones", "path", src="U"),
    ],
)

TEACHER = section(
    "teacher server",
    "slime/backends/megatron_utils",
    [
        F("--teacher-port", "port of the stand-alone teacher server", "int", 7999, src="U"),
        F("--teacher-warmup-port", "port while it warms up", "int", 7999, src="U"),
        F("--teacher-warmup-timeout-s", "deadline of the warm-up", "float", 3000.0, src="U"),
        F("--teacher-sample-reduction-chunk-size", "rows per chunk", "int", 4096, src="U"),
        F("--teacher-label-reduction-chunk-size", "rows per chunk", "int", 4096, src="U"),
        F("--megatron-server-max-length", "0 is no limit", "int", 0, src="U"),
        F("--megatron-server-update-timeout-s", "deadline of a weight update", "float", 3600.0, src="U"),
        F("--megatron-server-warmup", "warm up before serving", action="bool", default=True, src="U"),
    ],
)

FLAGS = LOGGING + DEBUG + CI + TEACHER
