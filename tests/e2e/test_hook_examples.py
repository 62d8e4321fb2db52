"""The files of examples/hooks in one real run: every hook at once, through train.py."""

from __future__ import annotations

import re

import torch

from tests.e2e.conftest import REPO, Run

HOOKS = REPO / "examples" / "hooks"
SMALL = (
    "--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 4 --sglang-context-length 128 --lr 1e-3 "
    "--actor-num-gpus-per-node 1 --rollout-num-gpus 1"
).split()


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
        *("--data-source-path", HOOKS / "data_source.py", "--rollout-stop", "e", "o", "a"),
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
