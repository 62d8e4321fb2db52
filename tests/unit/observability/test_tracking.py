import json
import math
import types
from dataclasses import dataclass

import pytest
import yaml

from slime.observability.tracking import Tracker, read_metrics


@dataclass
class _Dataset:
    name: str
    path: str


def make_args(tmp_path, **changes):
    fields = {
        "run_dir": str(tmp_path / "run"),
        "run_name": "run",
        "use_tensorboard": False,
        "tb_project_name": None,
        "tb_experiment_name": None,
        "use_wandb": False,
        "wandb_always_use_train_step": False,
    }
    return types.SimpleNamespace(**fields | changes)


def read_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(autouse=True)
def _event_files_in_order(monkeypatch):
    """Files are read in the order of their names, which begin with the second; those of one second count up, in three digits."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))


def test_each_log_call_is_one_line_on_disk_at_once(tmp_path):
    tracker = Tracker(make_args(tmp_path))
    tracker.log({"rollout/raw_reward": 0.5}, "rollout/step", 3)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) | {"time": 0} == {
        "time": 0,
        "step_key": "rollout/step",
        "step": 3,
        "rollout/raw_reward": 0.5,
    }
    tracker.close()


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    with Tracker(make_args(tmp_path)) as tracker:
        tracker.log({"a": math.nan, "b": math.inf, "c": True}, "train/step", 0)
    (line,) = read_metrics(tmp_path / "run")
    assert (line["a"], line["b"], line["c"]) == (None, None, 1)


def test_one_element_tensors_and_arrays_are_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    with Tracker(make_args(tmp_path)) as tracker:
        tracker.log({"a": numpy.float32(1.5), "b": numpy.array([2])}, "train/step", numpy.int64(4))
    (line,) = read_metrics(tmp_path / "run")
    assert (line["a"], line["b"], line["step"]) == (1.5, 2, 4)


def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path):
    with Tracker(make_args(tmp_path)) as tracker, pytest.raises(ValueError, match="rollout/reward.*list"):
        tracker.log({"rollout/reward": [1.0]}, "rollout/step", 0)


def test_a_resumed_run_appends_and_closes_a_line_cut_by_a_kill(tmp_path):
    args = make_args(tmp_path)
    with Tracker(args) as tracker:
        tracker.log({"a": 1}, "train/step", 0)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"time": 1, "ste')
    with Tracker(args) as tracker:
        tracker.log({"a": 2}, "train/step", 1)
    assert [line["a"] for line in read_metrics(tmp_path / "run")] == [1, 2]


def test_closing_twice_is_allowed(tmp_path):
    tracker = Tracker(make_args(tmp_path, use_tensorboard=True))
    tracker.close()
    tracker.close()


def test_the_resolved_configuration_is_readable_yaml(tmp_path):
    args = make_args(
        tmp_path,
        sglang_api_key="s3cr3t",
        eval_datasets=[_Dataset("aime", "/x")],
        hook=print,
        betas=(0.9, 0.98),
        lr=1e-6,
        none=None,
    )
    Tracker(args).close()
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["eval_datasets"] == [{"name": "aime", "path": "/x"}]
    assert (config["betas"], config["lr"], config["none"]) == ([0.9, 0.98], 1e-6, None)
    assert isinstance(config["hook"], str) and "s3cr3t" not in str(config)


def test_keys_of_accounts_inside_of_settings_stay_out_of_the_configuration(tmp_path):
    args = make_args(
        tmp_path,
        train_env_vars={
            "WANDB_API_KEY": "s3cr3t",
            "HF_TOKEN": "s3cr3t",
            "AWS_SECRET_ACCESS_KEY": "s3cr3t",
            "DEBUG": "1",
        },
        eval_datasets=[{"name": "a", "reward_model": {"judges": [{"api_key": "s3cr3t", "url": "u"}]}}],
        calculate_per_token_loss=True,
    )
    Tracker(args).close()
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "s3cr3t" not in text
    config = yaml.safe_load(text)
    assert config["train_env_vars"] == {"DEBUG": "1"} and config["calculate_per_token_loss"]
    assert config["eval_datasets"][0]["reward_model"] == {"judges": [{"url": "u"}]}


def test_scalars_arrive_in_the_run_directory_for_tensorboard(tmp_path):
    with Tracker(make_args(tmp_path, use_tensorboard=True)) as tracker:
        tracker.log({"train/loss": 0.25}, "train/step", 7)
    assert read_scalars(tmp_path / "run" / "tensorboard") == {"train/loss": [(7, 0.25)]}


def test_tensorboard_folder_follows_environment_then_project(tmp_path, monkeypatch):
    from slime.observability.tensorboard_utils import tensorboard_dir

    args = make_args(tmp_path, tb_project_name="p", tb_experiment_name="e")
    assert str(tensorboard_dir(args)) == "tensorboard_log/p/e"
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    assert tensorboard_dir(args) == tmp_path / "tb"


def test_no_events_are_written_when_tensorboard_is_off(tmp_path):
    Tracker(make_args(tmp_path)).close()
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_continued_run_has_each_round_once_and_keeps_what_it_did_before(tmp_path):
    args = make_args(tmp_path)
    with Tracker(args) as tracker:
        for rollout_id in range(4):
            tracker.log({"a": rollout_id}, "rollout/step", rollout_id)
            for step in (2 * rollout_id, 2 * rollout_id + 1):
                tracker.log({"b": step}, "train/step", step)
            tracker.log({"c": 1}, "eval/step", rollout_id)
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"time": 1, "step_k')  # killed while it wrote a line
    with Tracker(args) as tracker:
        tracker.rewind(2, steps_per_rollout=2)
        tracker.rewind(2, steps_per_rollout=2)
        tracker.log({"a": 20}, "rollout/step", 2)
    lines = read_metrics(tmp_path / "run")
    assert [line["a"] for line in lines if "a" in line] == [0, 1, 20]
    assert [line["b"] for line in lines if "b" in line] == [0, 1, 2, 3]
    assert len(path.read_text().splitlines()) == len(lines)
    superseded = (tmp_path / "run" / "metrics.superseded.jsonl").read_text().splitlines()
    assert len(superseded) == 2 * (1 + 2 + 1) + 1


@pytest.mark.parametrize("steps_per_round", [1, 3])
def test_continued_run_shows_each_step_once_in_tensorboard(tmp_path, steps_per_round):
    args = make_args(tmp_path, use_tensorboard=True)

    def attempt(rounds, sign):
        """As in the look-ahead loop, a round is generated before the one before it is trained."""
        with Tracker(args) as tracker:
            tracker.rewind(rounds[0], steps_per_round)
            for rollout_id in rounds:
                tracker.log({"r": sign * rollout_id}, "rollout/step", rollout_id)
                for step in range((rollout_id - 1) * steps_per_round, rollout_id * steps_per_round):
                    if rollout_id > rounds[0]:
                        tracker.log({"t": sign * step, f"t{sign}": math.nan}, "train/step", step)
                tracker.log({"e": sign * rollout_id}, "eval/step", rollout_id)

    attempt(range(6), 1)
    attempt(range(3, 8), -1)
    attempt(range(7, 9), 10)
    shown = read_scalars(tmp_path / "run" / "tensorboard")
    assert shown["r"] == shown["e"] == [(0, 0), (1, 1), (2, 2), (3, -3), (4, -4), (5, -5), (6, -6), (7, 70), (8, 80)]
    of_round = [1, 1, 1, -1, -1, -1, -1, 10]
    assert shown["t"] == [(step, step * of_round[step // steps_per_round]) for step in range(8 * steps_per_round)]
    lines = read_metrics(tmp_path / "run")
    for tag, points in shown.items():
        assert [step for step, _ in points] == [line["step"] for line in lines if tag in line], tag
    assert all(math.isnan(value) for _, value in shown["t1"])


def test_restart_from_nothing_leaves_nothing_of_the_attempt_before(tmp_path):
    args = make_args(tmp_path, use_tensorboard=True)
    for value in (1, 2):
        with Tracker(args) as tracker:
            tracker.rewind(0, steps_per_rollout=1)
            tracker.log({"eval/set": value}, "eval/step", -1)
            tracker.log({"rollout/x": value}, "rollout/step", 0)
    assert read_scalars(tmp_path / "run" / "tensorboard") == {"eval/set": [(-1, 2)], "rollout/x": [(0, 2)]}
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [-1, 0]


def test_continuing_in_a_new_folder_has_nothing_to_set_aside(tmp_path):
    with Tracker(make_args(tmp_path)) as tracker:
        tracker.rewind(5, steps_per_rollout=1)
        tracker.log({"a": 1}, "rollout/step", 5)
    assert len(read_metrics(tmp_path / "run")) == 1
    assert not (tmp_path / "run" / "metrics.superseded.jsonl").exists()
