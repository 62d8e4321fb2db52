"""The synchronous loop, as users type it."""

from __future__ import annotations

import pytest
import torch
import yaml

from tests.e2e.conftest import assert_all_ends, write_rows

SMALL = (
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6 --sglang-context-length 64 "
    "--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --lr 1e-3 --custom-rm-path tests.e2e.hooks.first_token_is_even"
).split()


def test_quick_start_command_of_the_documents_runs(train, tmp_path):
    flags = (
        "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 1 --advantage-estimator grpo --use-kl-loss "
        "--kl-loss-coef 0.001 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 2 "
        "--rollout-max-response-len 8 --sglang-context-length 64"
    ).split()
    run = train(*flags)
    assert run.series("perf/round_time") and len(run.metrics("train/step")) == 2
    assert len(run.series("perf/startup_time")) == 1 and run.series("perf/startup_time")[0] > 0
    # The reference is the initial actor: the first step starts at it, the second has moved or stayed finite.
    kl = run.series("train/kl_loss")
    assert abs(kl[0]) < 1e-8 and len(kl) == 2
    assert max(run.series("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert max(run.series("rollout/train_rollout_logprob_abs_diff")) < 1e-4
    warnings = [line for line in run.output.splitlines() if "WARNING" in line]
    assert run.series("rollout/train_rollout_alarm") == [0.0, 0.0]
    assert all("slots; the cluster has" in line for line in warnings), warnings  # those of an earlier run, not free yet
    assert "math" in run.output  # no --rm-type: said at start
    assert_all_ends(tmp_path)


def test_standard_grpo_command_runs_on_chat_data(train, tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {index} + 1?"}], "label": str(index + 1)}
        for index in range(40)
    ]
    data = write_rows(tmp_path / "chat.jsonl", rows)
    flags = (
        "--actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --advantage-estimator grpo --use-kl-loss "
        "--kl-loss-coef 0.001 --input-key prompt --label-key label --apply-chat-template --rollout-batch-size 32 "
        "--n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 1 --save-interval 100 --eval-interval 50 "
        "--rollout-max-response-len 8 --sglang-context-length 256"
    ).split()
    run = train(*flags, "--prompt-data", data)
    assert "no evaluation" in run.output  # an interval without data is a warning
    assert (run.directory / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert list((run.directory / "tensorboard").rglob("events.*"))


def test_weight_versions_follow_the_update_interval(train, tmp_path):
    dump = tmp_path / "dump_{rollout_id}.pt"
    train(*SMALL, "--num-rollout", 6, "--update-weights-interval", 3, "--save-debug-rollout-data", dump)
    versions = []
    for rollout_id in range(6):
        samples = torch.load(tmp_path / f"dump_{rollout_id}.pt", weights_only=True)["samples"]
        (version,) = {version for sample in samples for version in sample["weight_versions"]}
        versions.append(version)
    assert versions == ["0", "0", "0", "1", "1", "1"]


def test_learning_raises_the_reward_and_engines_hold_the_trained_weights(train):
    run = train(
        *SMALL,
        *"--num-rollout 20 --check-weight-update-equal --rollout-batch-size 16 --n-samples-per-prompt 8 --lr 1e-2".split(),
        *("--adam-beta2", "0.99", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048"),
    )
    rewards = run.series("rollout/raw_reward")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert run.series("rollout/weight_version") == [] or run.series("rollout/weight_version")[-1] == 20


@pytest.fixture
def eval_file(workspace, tmp_path):
    """Two sets with settings of their own: sampling, number of samples, reward, template, generate function."""
    chat = [{"question": [{"role": "user", "content": f"{index}?"}], "answer": str(index)} for index in range(4)]
    sets = {
        "greedy": {"path": f"{workspace.data}@[0:8]", "temperature": 0.0, "max_response_len": 3},
        "sampled": {
            "path": str(write_rows(tmp_path / "chat.jsonl", chat)),
            "input_key": "question",
            "label_key": "answer",
            "n_samples_per_eval_prompt": 4,
            "top_k": 50,
            "min_new_tokens": 2,
            "custom_rm_path": "tests.e2e.hooks.fails_for_each_fourth",
            "custom_generate_function_path": "tests.e2e.hooks.long_tailed",
            "metadata_overrides": {"level": 2},
        },
    }
    path = tmp_path / "eval.yaml"
    path.write_text(yaml.safe_dump({"eval": {"defaults": {"top_p": 0.9}, "datasets": sets}}))
    return path


def test_same_seed_gives_the_same_run_evaluated_or_not(train, eval_file, tmp_path):
    flags = (*SMALL, "--num-rollout", 2)
    evaluated = ("--eval-config", eval_file, "--eval-interval", 1)
    dump = ("--save-debug-rollout-data", tmp_path / "dump" / "{rollout_id}.pt")
    first, second = train(*flags, name="first"), train(*flags, *evaluated, *dump, name="2")
    assert [line["step"] for line in second.metrics("eval/step")] == [-1, 0, 1]
    assert {path.name for path in (tmp_path / "dump").glob("eval_*")} == {f"eval_{step}.pt" for step in (-1, 0, 1)}
    for metric in ("rollout/raw_reward", "train/grad_norm", "data/trained"):
        assert first.series(metric) == second.series(metric) and len(first.series(metric)) == 2, metric


def test_continuing_a_run_trains_each_round_once(train, tmp_path):
    save = ("--save", tmp_path / "save", "--save-interval", 1, "--lr-decay-style", "constant")
    first = train(*SMALL, *save, "--num-rollout", 2, "--async-save", name="first")
    second = train(*SMALL, *save, "--num-rollout", 4, name="second")
    straight = train(*SMALL, "--num-rollout", 4, "--lr-decay-style", "constant", name="straight")
    assert [line["step"] for line in second.metrics("train/step")] == [2, 3]
    rewards = first.series("rollout/raw_reward") + second.series("rollout/raw_reward")
    assert rewards == straight.series("rollout/raw_reward")
    gradients = first.series("train/grad_norm") + second.series("train/grad_norm")
    assert gradients == pytest.approx(straight.series("train/grad_norm"), rel=1e-5)


def test_evaluation_before_and_after_on_several_sets(train, workspace, tmp_path):
    run = train(
        *SMALL,
        *("--num-rollout", 2, "--eval-interval", 2, "--n-samples-per-eval-prompt", 2),
        *("--streaming-data", "--num-data-workers", 2),  # rows are read lazily; evaluation sets by two workers
        *("--eval-prompt-data", "first", workspace.data, "--eval-prompt-data", "second", f"{workspace.data}@[0:8]"),
    )
    evaluations = run.metrics("eval/step")
    assert len(evaluations) == 2
    assert all({"eval/first", "eval/second"} <= line.keys() for line in evaluations)


def test_evaluation_only_run(train, workspace):
    run = train(*SMALL, *("--num-rollout", 0, "--eval-interval", 1, "--eval-prompt-data", "only", workspace.data))
    assert len(run.metrics("eval/step")) == 1 and not run.metrics("train/step")


@pytest.mark.parametrize(
    "rollout", ["sglang_rollout.generate_rollout", "fully_async_rollout.generate_rollout_fully_async"]
)
def test_look_ahead_loops_train_every_round_within_their_age_bound_and_evaluate(train, eval_file, tmp_path, rollout):
    run = train(
        *(*SMALL, "--num-rollout", 4, "--async-buffer-size", 2, "--rollout-function-path", f"slime.rollout.{rollout}"),
        *("--eval-config", eval_file, "--eval-interval", 2, "--log-passrate"),
        *("--save-debug-rollout-data", tmp_path / "dump" / "{rollout_id}.pt"),
        script="train_async.py",
    )
    assert [line["step"] for line in run.metrics("train/step")] == [0, 1, 2, 3]
    evaluations = run.metrics("eval/step")
    assert [line["step"] for line in evaluations] == [0, 1, 3]  # before the first round, then after every second one
    for line in evaluations:
        assert line["eval/greedy/response_len/max"] <= 3 and "eval/greedy-pass@1" not in line
        assert line["eval/sampled"] == line["eval/sampled-pass@1"] == pytest.approx(2 / 3)  # of three of four samples
        assert line["eval/sampled-pass@2"] == 1 and "eval/sampled-pass@4" not in line
        assert line["eval/sampled-unscored_ratio"] == 0.25 and line["eval/reward_failed"] == 4
    samples = torch.load(tmp_path / "dump" / "eval_3.pt", weights_only=True)["samples"]
    sampled = [sample for sample in samples if sample["metadata"].get("level") == 2]
    assert len(samples) == 24 and len(sampled) == 16
    assert len({tuple(sample["tokens"]) for sample in sampled}) > 4 and all(
        "0?" in str(s["prompt"]) for s in sampled[:4]
    )
