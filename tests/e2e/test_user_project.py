"""A project written for this framework's public names, all of its hooks in real runs: when they are called and with what."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import REPO, Run, base_flags, finish, launch

PROJECT = REPO / "tests" / "assets" / "user_project"
SMALL = (
    "--num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 4 --rollout-max-response-len 12 --lr 1e-3 "
    "--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --rollout-seed 7"
).split()


@pytest.fixture
def project(tmp_path) -> Path:
    return Path(shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__")))


def events(run: Run) -> list[list]:
    return [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]


def names(run: Run) -> list[str]:
    return [event[0] for event in events(run)]


def test_every_hook_of_a_project_is_called_at_its_time(train, workspace, project):
    """All modules are found in the working folder; both rounds call the hooks in the order of the loop."""
    (project / "own.yaml").write_text("my_search_budget: 3\n")
    run = train(
        *(*SMALL, "--custom-config-path", "own.yaml", "--reward-key", "score"),
        *("--custom-generate-function-path", "search_agent.generate", "--custom-rm-path", "search_agent.py"),
        *("--data-source-path", "data_hooks.py:EasyFirst", "--buffer-filter-path", "data_hooks.pop_shortest"),
        *("--over-sampling-batch-size", 4, "--dynamic-sampling-filter-path", "data_hooks.check_spread"),
        *("--rollout-sample-hook-path", "data_hooks.mark", "--rollout-sample-hook-path", "data_hooks.replace"),
        *("--rollout-sample-filter-path", "data_hooks.remove_long"),
        *("--rollout-all-samples-process-path", "data_hooks.look_at_all"),
        *("--custom-reward-post-process-path", "data_hooks.reward_post_process"),
        *("--custom-rollout-log-function-path", "data_hooks.log_rollout"),
        *(
            "--custom-eval-rollout-log-function-path",
            "data_hooks.log_eval",
            "--eval-function-path",
            "data_hooks.evaluate",
        ),
        *("--eval-interval", 2, "--eval-prompt-data", "own_set", workspace.data, "--skip-eval-before-train"),
        *(
            "--custom-megatron-init-path",
            "train_hooks.init",
            "--custom-model-provider-path",
            "train_hooks.model_provider",
        ),
        *("--custom-megatron-before-log-prob-hook-path", "train_hooks.before_log_prob"),
        *("--custom-megatron-before-train-step-hook-path", "train_hooks.before_train_step"),
        *("--custom-advantage-function-path", "train_hooks.advantage", "--use-tis"),
        *(
            "--custom-tis-function-path",
            "train_hooks.tis",
            "--rollout-data-postprocess-path",
            "train_hooks.postprocess",
        ),
        *("--custom-pg-loss-reducer-function-path", "train_hooks.pg_reducer"),
        cwd=project,
    )
    seen = events(run)
    first, second = (
        [
            name
            for name in names(run)[seen.index(start) :]
            if name not in ("generate", "rm", "sample_hook", "get_samples", "tis")
        ]
        for start in (["post_process", 8, True], ["before_train_step", 0, 0])
    )
    train_part = ["post_process", "before_log_prob", "advantage", "postprocess", "before_train_step"]
    assert first[: len(train_part)] == train_part and "buffer_filter" in second
    end_of_round = ["sample_filter", "all_samples", "log", *train_part]
    assert [name for name in second if name not in ("dynamic_filter", "buffer_filter")][1:] == [
        *end_of_round,
        "eval",
        "eval_log",
    ]
    assert ["megatron_init"] in seen and ["model_provider", True, True] in seen
    assert names(run).index("megatron_init") < names(run).index("model_provider") < names(run).index("before_log_prob")
    for event in (
        *(["sample_filter", 2], ["log", 1, 8, True], ["before_log_prob", "", "list"], ["buffer_filter", None]),
        *(["advantage", ["kl", "log_probs", "rewards"]], ["postprocess", 1, ["advantages", "log_probs"]]),
        *(["before_train_step", 1, 0], ["eval", 1], ["eval_log", 1, ["own_set"]], ["generate", 0, 3]),
    ):
        assert event in seen, event
    assert {tuple(event[2:]) for event in seen if event[0] == "sample_hook"} == {(0, False), (1, False)}
    longest, mean = run.series("own/length/max"), run.series("own/length/mean")
    assert mean == run.series("rollout/response_len/mean") and longest == run.series("rollout/response_len/max")
    assert min(run.series("perf/own_filter_time")) > 0
    assert run.series("eval/own_set") == [0.5] and min(run.series("train/grad_norm")) > 0
    assert (
        all(ratio > 0 for ratio in run.series("train/own_tis"))
        and min(run.series("rollout/multi_turn/turns_mean") or [1]) >= 1
    )


def test_loops_of_ones_own_train_on_the_same_samples_and_numbers_as_train_py(cluster, workspace, tmp_path):
    """examples/own_loop/loop.py, and one on handles, against train.py with its reward as the hook, side by side."""
    loop = REPO / "examples" / "own_loop" / "loop.py"
    started = []
    for name, script in (("own", loop), ("handles", PROJECT / "loop.py"), ("train", "train.py")):
        flags = [
            *base_flags(workspace, tmp_path, name),
            *SMALL,
            "--custom-rm-path",
            f"{loop}:reward",
            "--deterministic-mode",
        ]
        flags += [
            "--save-debug-rollout-data",
            tmp_path / name / "{rollout_id}.pt",
            "--use-kl-loss",
            "--kl-loss-coef",
            0.01,
            "--save-interval",
            2,
        ]
        started.append(launch(flags, address=cluster, script=script))
    outputs = [finish(process) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], "".join(output[-3000:] for output in outputs)
    own, handles, reference = (Run(0, "", tmp_path / name) for name in ("own", "handles", "train"))
    import torch

    for rollout_id in (0, 1):
        ours, handled, theirs = (
            torch.load(tmp_path / name / f"{rollout_id}.pt", weights_only=True)["samples"]
            for name in ("own", "handles", "train")
        )
        for column in ("tokens", "reward", "rollout_log_probs", "weight_versions", "group_index", "index"):
            expected = [sample[column] for sample in theirs]
            assert [sample[column] for sample in ours] == expected == [sample[column] for sample in handled], column
    for metric in (
        "train/loss",
        "train/grad_norm",
        "train/kl_loss",
        "rollout/raw_reward",
        "rollout/advantages",
        "data/trained",
    ):
        assert own.series(metric) == reference.series(metric) and len(own.series(metric)) == 2, metric
        assert handles.series(metric) == reference.series(metric), metric
    written = [set(line) for line in handles.metrics("rollout/step")]
    assert handles.series("loop/rounds") == [1, 2] and set().union(*written) > set().union(
        *map(set, reference.metrics("rollout/step"))
    )
    assert max(own.series("train/grad_norm")) > 0
    for name in ("own", "train"):
        assert (tmp_path / name / "checkpoints" / "iter_0000001" / "manifest.json").is_file()
