"""The files of examples/hooks in one real run: every hook at once, through train.py."""

from __future__ import annotations

import re
import string

import torch

from tests.e2e.conftest import REPO, Run

HOOKS = REPO / "examples" / "hooks"
SMALL = (
    "--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 4 --sglang-context-length 128 --lr 1e-3 "
    "--actor-num-gpus-per-node 1 --rollout-num-gpus 1"
).split()


STATS = ("mean", "median", "max", "min")
#: what a run with --use-kl-loss, --use-tis and all --log- switches writes, whatever happens in it
EVERY_ROUND = {
    *(f"rollout/response_len/{stat}" for stat in STATS),
    *(f"perf/{name}/{stat}" for name in ("request/e2e_latency", "decode/throughput") for stat in STATS),
    *(
        f"rollout/{name}"
        for name in "raw_reward rewards truncated truncated_ratio repetition_frac reward_failed".split()
    ),
    *(
        f"rollout/{name}"
        for name in "response_lengths total_lengths log_probs rollout_log_probs advantages returns".split()
    ),
    *(f"rollout/{name}" for name in "prefix_cache_hit_rate avg_cached_tokens_per_sample ref_log_probs kl".split()),
    *(f"perf/{name}" for name in "rollout_time tokens_per_gpu_per_sec effective_tokens_per_gpu_per_sec".split()),
    *(f"perf/longest_{name}_tokens_per_sec" for name in ("sample", "effective_sample")),
    *(
        f"perf/{name}_time"
        for name in "train_wait train step actor_train log_probs ref_log_probs update_weights".split()
    ),
    *("perf/wait_time_ratio", "perf/actor_train_tok_per_s", "perf/actor_train_tflops", "perf/request/count"),
    *(f"passrate/pass@{k}" for k in (1, 2, 4)),
    *("correct_entropy", *(f"correct_length/p{p}" for p in (25, 50, 75, 100))),
}
EVERY_STEP = {
    *(f"train/{name}" for name in "loss pg_loss entropy_loss pg_clipfrac ppo_kl kl_loss ois tis tis_clipfrac".split()),
    *(f"train/{name}" for name in "train_rollout_logprob_abs_diff grad_norm lr-pg_0 global_batch_size".split()),
}


def missing(run: Run) -> set[str]:
    """Metrics of EVERY_ROUND and EVERY_STEP that some round or step of the run lacks."""
    found = set()
    for step_key, expected in (("rollout/step", EVERY_ROUND), ("train/step", EVERY_STEP)):
        by_step: dict[int, set[str]] = {}
        for line in run.metrics(step_key):
            by_step.setdefault(line["step"], set()).update(line)
        found |= set().union(*(expected - names for names in by_step.values())) if by_step else expected
    return found


def undocumented(run: Run) -> set[str]:
    """Metrics that the run wrote and docs/metrics.md does not name."""
    page = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    patterns = []
    for row in re.findall(r"^\| (`[^|]*) \|", page, re.M):
        for name in re.findall(r"`([^`]+)`", row):
            name = re.sub(r"\{([^}]*)\}", lambda m: "(" + m[1].replace(",", "|") + ")", name)
            patterns.append(re.sub(r"[A-Z]{2,}|K\b", r"[^/]+", name))
    written = {name for line in run.metrics() for name in line} - {"time", "step_key", "step"}
    return {name for name in written if not any(re.fullmatch(pattern, name) for pattern in patterns)}


def test_all_hooks_work_together_in_a_run(train, tmp_path):
    run = train(
        *(*SMALL, "--rollout-max-response-len", 48, "--max-turns", 2),
        *("--data-source-path", HOOKS / "data_source.py", "--rollout-stop", *string.ascii_letters, *string.digits),
        *("--custom-generate-function-path", HOOKS / "multi_turn_tool.py"),
        *("--rollout-sample-hook-path", f"{HOOKS}/sample_hook.py:strip_answer"),
        *("--custom-rm-path", HOOKS / "reward_class.py", "--rm-model-path", tmp_path),
        *("--dynamic-sampling-filter-path", f"{HOOKS}/filters.py:keep_mixed"),
        *("--buffer-filter-path", f"{HOOKS}/filters.py:newest_first"),
        *("--rollout-sample-filter-path", f"{HOOKS}/filters.py:drop_truncated"),
        *("--round-policy-path", f"{HOOKS}/round_policy.py:OneInReserve"),
        *("--rollout-all-samples-process-path", f"{HOOKS}/all_samples.py:keep_failures"),
        *("--custom-rollout-log-function-path", f"{HOOKS}/log_functions.py:log_rollout"),
        *("--custom-megatron-init-path", f"{HOOKS}/trainer.py:limit_threads"),
        *("--spec", HOOKS / "layer_spec.py", "gentle_attention"),
        *("--custom-megatron-before-log-prob-hook-path", f"{HOOKS}/trainer.py:before_log_prob"),
        *("--rollout-data-postprocess-path", f"{HOOKS}/trainer.py:clip_advantages"),
        *("--custom-megatron-before-train-step-hook-path", f"{HOOKS}/trainer.py:warm_up"),
        *("--custom-reward-post-process-path", f"{HOOKS}/reward_post_process.py:minus_group_mean"),
        *("--custom-advantage-function-path", f"{HOOKS}/loss.py:early_tokens_count_more"),
        *("--loss-type", "custom_loss", "--custom-loss-function-path", f"{HOOKS}/loss.py:reinforce"),
        *("--save-debug-rollout-data", tmp_path / "dump_{rollout_id}.pt"),
    )
    assert len(run.series("train/entropy_of_sampled")) == 2 and min(run.series("train/grad_norm")) > 0
    samples = torch.load(tmp_path / "dump_0.pt", weights_only=True)["samples"]
    with_tool = [sample for sample in samples if 0 in sample["loss_mask"]]
    assert with_tool and all(0.0 in sample["rollout_log_probs"] for sample in with_tool)
    assert all("full_response" in sample["metadata"] for sample in samples)
    assert undocumented(run) == set()
    assert len((run.directory / "best.txt").read_text().splitlines()) == 2


def test_metrics_of_a_run_are_documented_and_its_data_may_be_streamed(train, workspace, tmp_path):
    (tmp_path / "hook.py").write_text("def custom_rm(args, sample): return float(sample.index % 2)\n")
    run = train(
        *(*SMALL, "--rollout-max-response-len", 6, "--streaming-data", "--num-data-workers", 2),
        *("--use-kl-loss", "--kl-loss-coef", "0.01", "--use-tis", "--num-steps-per-rollout", 2, "--log-passrate"),
        *("--eval-prompt-data", "held_out", f"{workspace.data}@[0:4]", "--eval-interval", 2, "--save-interval", 2),
        *("--n-samples-per-eval-prompt", 2, "--custom-rm-path", tmp_path / "hook.py"),
        *("--advantage-estimator", f"{HOOKS}/estimator.py:fading", "--gamma", 0.9, "--mismatch-alarm", "1e-12"),
        *("--rollout-function-path", HOOKS / "rollout_function.py"),
        *("--eval-function-path", f"{HOOKS}/rollout_function.py:eval_function"),
        *("--custom-eval-rollout-log-function-path", f"{HOOKS}/log_functions.py:log_eval"),
        *("--custom-convert-samples-to-train-data-path", f"{HOOKS}/convert.py:convert"),
        *("--custom-tis-function-path", f"{HOOKS}/off_policy.py:drop_far_tokens"),
        *("--custom-pg-loss-reducer-function-path", f"{HOOKS}/off_policy.py:per_longest"),
        *("--custom-model-provider-path", f"{HOOKS}/model_provider.py:frozen_embedding"),
    )
    assert undocumented(run) == {"rollout/longest_response"}  # which examples/hooks/rollout_function.py adds
    assert run.series("rollout/train_rollout_alarm") == [
        1.0,
        1.0,
    ]  # no two kernels agree to 1e-12: the console says so, once
    assert run.output.count("trainer and engine disagree") == 1 and "--check-weight-update-equal" in run.output
    assert all(0.999 < ess < 1.0001 for ess in run.series("rollout/train_rollout_ess"))
    assert len(run.metrics("train/step")) == 4 and {"eval/held_out"} <= run.metrics("eval/step")[0].keys()
