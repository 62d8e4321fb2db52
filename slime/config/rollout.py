"""Flags of generation, data, evaluation and rewards (declarations only)."""

# A table: one flag per line.
# fmt: off
from slime.config.spec import Flag, section

F = Flag

#: Built-in rewards; each also exists with the prefix boxed_.
RM_TYPES = ("math", "math_verify", "dapo", "deepscaler", "f1", "gpqa", "ifbench", "random", "remote_rm", "reward_model")

ROLLOUT = section(
    "rollout",
    "slime/rollout",
    [
        F("--hf-checkpoint", "Hugging Face folder: tokenizer, engine weights, model shape; weights need not be current", "path", src="s"),
        F("--rollout-function-path", "callable that runs a whole round: (args, rollout_id, data_source, evaluation=False)", "hook", "slime.rollout.sglang_rollout.generate_rollout", src="S", owner="slime"),
        F("--custom-generate-function-path", "callable that generates one sample: async (args, sample, sampling_params) -> Sample or list; or (args, samples, evaluation=False) -> list", "hook", src="S"),
        F("--rollout-sample-hook-path", "callable on every generated sample before the reward; repeatable", "hook", [], action="append", src="U"),
        F("--rollout-temperature", "sampling temperature; also divides trainer logits", "float", 1.0, src="U"),
        F("--rollout-top-p", "nucleus; below 1 the trainer's log-probs are among the tokens that the engine kept", "float", 1.0, src="U"),
        F("--rollout-top-k", "top-k; -1 is off", "int", -1, src="U"),
        F("--rollout-max-context-len", "prompt + response limit in tokens", "int", src="U"),
        F("--rollout-max-prompt-len", "longer prompts are dropped when data is loaded", "int", src="U", owner="slime"),
        F("--rollout-max-response-len", "limit of new tokens", "int", src="U"),
        F("--rollout-skip-special-tokens", "strip special tokens from response text", action="true", default=False, src="U"),
        F("--rollout-stop", "stop strings", nargs="+", src="U"),
        F("--rollout-stop-token-ids", "stop token ids", "int", nargs="+", src="U"),
        F("--rollout-shuffle", "reshuffle prompts every epoch", action="true", default=False, src="U"),
        F("--rollout-seed", "seed of prompt order and of sampling", "int", 42, src="U"),
        F("--rollout-batch-size", "prompts per round", "int", 32, src="S"),
        F("--n-samples-per-prompt", "responses per prompt; 8 when not given and the estimator compares responses of a prompt", "int", 1, src="S"),
        F("--group-requests", "one engine request for the fresh samples of a prompt instead of one each; auto: with the embedded engine and responses of at most 512 tokens", default="auto", choices=("auto", "always", "never"), src="O"),
        F("--over-sampling-batch-size", "prompts fetched each time the pool runs low; rollout batch size when not given", "int", src="U"),
        F("--dynamic-sampling-filter-path", "callable that keeps or drops the group of a prompt", "hook", src="U"),
        F("--partial-rollout", "unfinished groups go back to the buffer and continue later", action="true", default=False, src="U"),
        F("--partial-rollout-max-age", "rounds that a partial response may span beyond the one it began in; a round waits for groups at the limit; no limit when not given", "int", src="O"),
        F("--round-policy-path", "class (args) that decides how many groups a round starts, when it ends and what becomes of the rest", "hook", "slime.rollout.round_policy.RoundPolicy", src="O"),
        F("--mask-offpolicy-in-partial-rollout", "no loss on tokens generated in earlier rounds", action="true", default=False, src="U"),
        F("--rollout-sample-filter-path", "callable that marks samples remove_sample: they keep their place in normalisation, lose their loss", "hook", src="U"),
        F("--rollout-all-samples-process-path", "callable that sees all groups, dropped ones included", "hook", src="U"),
        F("--rollout-data-postprocess-path", "trainer side callable after log-probs and advantages", "hook", src="U", owner="slime/backends"),
        F("--check-samples", "check every sample before training: alignment, token ids, masks, log-probs; an error names the span and where it came from", action="bool", default=True, src="O", owner="slime/batching"),
        F("--rollout-data-transport", "how training data travels to the trainer", default="object-store", choices=("object-store", "nixl"), src="U", owner="slime"),
        F("--loss-mask-type", "multi-turn mask generator of SFT data", default="qwen", choices=("qwen", "qwen3", "qwen3_5", "distill_qwen", "auto"), src="U"),
        F("--max-turns", "turn budget of multi-turn generation", "int", src="X"),
        F("--rollout-buffer-url", "external trajectory server", src="U"),
        F("--fetch-trajectory-retry-times", "retries against it; -1 endless", "int", -1, src="U"),
        F("--min-batch-collection-ratio", "accepted for old scripts", "float", 1.0, src="U"),
        F("--rollout-task-type", "task name sent to the trajectory server", default="math", src="U"),
    ],
)

DATA = section(
    "data",
    "slime/rollout",
    [
        F("--prompt-data", ".jsonl or .parquet of prompts; suffix @[a:b] takes a slice of rows", "path", src="S"),
        F("--input-key", "row key of the prompt (prompt or messages when the flag is not given and rows have no input)", default="input", src="S"),
        F("--label-key", "row key of the reference answer (label when the flag is not given and rows have one)", src="S"),
        F("--metadata-key", "row key of free metadata", default="metadata", src="U"),
        F("--tool-key", "row key of tool schemas", default="tools", src="U"),
        F("--multimodal-keys", "JSON object: media type to row key", "json", src="U"),
        F("--apply-chat-template", "render message lists with the tokenizer's template", action="true", default=False, src="S"),
        F("--apply-chat-template-kwargs", "JSON object passed to the template", "json", {}, src="U"),
        F("--data-source-path", "class of the prompt source / Data Buffer", "hook", "slime.rollout.data_source.RolloutDataSourceWithBuffer", src="s", owner="slime"),
        F("--buffer-filter-path", "callable that picks groups from the buffer: (args, rollout_id, buffer, num_samples); FIFO when not given", "hook", src="s"),
        F("--disable-rollout-global-dataset", "no built-in data set; the data source brings the samples", dest="rollout_global_dataset", action="false", default=True, src="U"),
        F("--num-rollout", "rounds in total", "int", src="S", owner="slime"),
        F("--num-epoch", "passes over the data; used when --num-rollout is not given", "int", src="U", owner="slime"),
        F("--start-rollout-id", "first round; from the checkpoint, else 0", "int", src="U", owner="slime"),
        F("--num-data-workers", "processes that make prompts of rows (parse, chat template, token count); files of up to 256 rows and --streaming-data need none", "int", 0, src="X"),
        F("--streaming-data", "read the file lazily instead of holding all rows", action="true", default=False, src="X"),
    ],
)

EVAL = section(
    "evaluation",
    "slime/config/eval_datasets.py",
    [
        F("--eval-interval", "rounds between evaluations", "int", src="S", owner="slime"),
        F("--eval-prompt-data", "name path [name path ...]; repeatable", nargs="+", action="append", src="S"),
        F("--eval-config", "YAML or JSON file of data sets, wins over --eval-prompt-data", "path", src="U"),
        F("--eval-function-path", "callable of the evaluation round; the rollout function when not given", "hook", src="U", owner="slime"),
        F("--skip-eval-before-train", "no evaluation before the first round", action="true", default=False, src="U", owner="slime"),
        F("--n-samples-per-eval-prompt", "responses per evaluation prompt", "int", 1, src="S"),
        F("--eval-input-key", "overrides --input-key", src="U"),
        F("--eval-label-key", "overrides --label-key", src="U"),
        F("--eval-tool-key", "overrides --tool-key", src="U"),
        F("--eval-temperature", "overrides --rollout-temperature", "float", src="U"),
        F("--eval-top-p", "overrides --rollout-top-p", "float", src="U"),
        F("--eval-top-k", "overrides --rollout-top-k", "int", src="U"),
        F("--eval-max-response-len", "overrides --rollout-max-response-len", "int", src="U"),
        F("--eval-min-new-tokens", "at least this many new tokens", "int", src="U"),
        F("--eval-max-prompt-len", "longer evaluation prompts are dropped", "int", src="U", owner="slime/rollout"),
        F("--eval-max-context-len", "prompt + response limit of evaluation; --rollout-max-context-len when not given", "int", src="U", owner="slime/rollout"),
        F("--eval-reward-key", "key of a dict reward in evaluation; --reward-key when not given", src="U", owner="slime/rollout"),
    ],
)

REWARD = section(
    "reward",
    "slime/rollout/rm_hub",
    [
        F("--rm-type", "built-in reward: math, math_verify, dapo, deepscaler, f1, gpqa, ifbench, random, remote_rm, reward_model; boxed_ prefix extracts the boxed answer first", src="U"),
        F("--rm-url", "endpoint of remote_rm, or of an engine that serves the model of reward_model", src="U"),
        F("--custom-rm-path", "reward callable (args, sample), or a class with compute_reward(prompts, responses)", "hook", src="S"),
        F("--rm-model-path", "reward model: loaded by --rm-type reward_model, or given to a reward class", "path", src="O"),
        F("--rm-timeout", "seconds one reward call may take; a reward that raises or times out makes the sample FAILED: reward 0, removed from the loss, counted and named in the log", "float", 60.0, src="O"),
        F("--group-rm", "reward for the whole group at once; not in evaluation", action="true", default=False, src="U", owner="slime/rollout"),
        F("--reward-key", "key of a dict reward", src="U", owner="slime"),
        F("--custom-reward-post-process-path", "callable (args, samples) -> (raw, normalised)", "hook", src="U", owner="slime"),
        F("--custom-convert-samples-to-train-data-path", "callable (args, samples) -> dict", "hook", src="U", owner="slime"),
    ],
)

FLAGS = ROLLOUT + DATA + EVAL + REWARD
