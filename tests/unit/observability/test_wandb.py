"""The W&B sink: identity, axes, secrets, and real files of an offline run. Most tests bring a stand-in for the package."""

from __future__ import annotations

import http.server
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from slime.observability import wandb_utils
from slime.observability.tracking import Tracker, read_metrics


class FakeRun:
    def __init__(self):
        self.lines, self.axes, self.is_finished, self.starting_step, self.step = [], {}, False, 0, 0

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, data, step, commit):
        self.lines.append(data)

    def finish(self):
        self.is_finished = True
        raise TimeoutError("the server does not answer")


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package that records what it is told."""
    module = types.ModuleType("wandb")
    module.run = FakeRun()
    known = dict.fromkeys(("console", "finish_timeout", "base_url", "api_key"))
    module.Settings = type("Settings", (types.SimpleNamespace,), {"model_fields": known})

    def init(**options):
        module.options = options
        return module.run

    module.init, module.teardown = init, lambda: None
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(wandb_utils, "is_wandb_available", lambda: True)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def test_flags_become_the_identity_of_the_wandb_run(wandb, parsed, tmp_path):
    args = parsed(
        *"--use-wandb --wandb-project p --wandb-team t --wandb-group g --wandb-mode offline --wandb-run-id abc".split(),
        *("--disable-wandb-random-suffix", "--wandb-dir", str(tmp_path / "w"), "--wandb-host", "http://127.0.0.1:1"),
    )
    Tracker(args).close()
    told = wandb.options
    expected = {"project": "p", "entity": "t", "group": "g", "id": "abc", "mode": "offline", "name": "run"}
    assert {name: told[name] for name in expected} == expected
    assert told["dir"] == str(tmp_path / "w") and (tmp_path / "w").is_dir()
    # what this version does not know is left out
    assert vars(told["settings"]) == {"console": "off", "finish_timeout": 60.0, "base_url": "http://127.0.0.1:1"}
    assert told["config"]["rollout_batch_size"] == 4


def test_continued_run_keeps_its_id_and_the_group_carries_it(wandb, parsed):
    args = parsed("--use-wandb", "--wandb-group", "g")
    Tracker(args).close()
    first = wandb.options["id"]
    Tracker(args).close()
    assert wandb.options["id"] == first and len(first) == 8
    assert wandb.options["group"] == f"g_{first}" and wandb.options["mode"] == "online"


def test_runs_of_two_folders_have_different_ids(wandb, parsed, tmp_path):
    ids = []
    for name in ("one", "two"):
        Tracker(parsed("--use-wandb", "--run-name", name)).close()
        ids.append(wandb.options["id"])
        assert (tmp_path / name / "wandb_run_id.txt").read_text().split() == [wandb.options["id"]]
    assert len(set(ids)) == 2


def test_disabled_run_may_be_continued(parsed, tmp_path):
    for first in (0, 1, 0):
        with Tracker(parsed("--use-wandb", "--wandb-mode", "disabled")) as tracker:
            tracker.rewind(first, steps_per_rollout=1)
            for step in (0, 1):
                tracker.log({"train/loss": 0.5}, "train/step", step)


def test_api_key_is_used_online_and_stands_in_no_file(wandb, parsed, tmp_path):
    Tracker(parsed("--use-wandb", "--wandb-key", "s3cr3t", "--wandb-mode", "offline")).close()
    assert "s3cr3t" not in str(wandb.options)
    Tracker(parsed("--use-wandb", "--wandb-key", "s3cr3t", "--wandb-host", "http://127.0.0.1:1")).close()
    settings = vars(wandb.options.pop("settings"))
    assert (settings["api_key"], settings["base_url"]) == ("s3cr3t", "http://127.0.0.1:1")
    assert "s3cr3t" not in str(wandb.options)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]


def test_each_prefix_has_its_axis_and_lines_carry_the_step(wandb, parsed):
    with Tracker(parsed("--use-wandb")) as tracker:
        tracker.log({"train/loss": 0.5}, "train/step", 7)
        tracker.log({"eval/set": 1.0}, "eval/step", 2)
    assert wandb.run.lines == [{"train/loss": 0.5, "train/step": 7}, {"eval/set": 1.0, "eval/step": 2}]
    assert wandb.run.axes["train/*"] == "train/step" and wandb.run.axes["eval/*"] == "eval/step"
    for name in ("rollout/*", "perf/*", "passrate/*", "multi_turn/*"):
        assert wandb.run.axes[name] == "rollout/step"


def test_server_that_does_not_answer_at_the_end_is_a_warning(wandb, parsed, caplog):
    Tracker(parsed("--use-wandb")).close()
    assert wandb.run.is_finished and "wandb sync" in caplog.text


def test_metrics_that_wandb_does_not_take_stop_nothing(wandb, parsed, tmp_path, caplog, monkeypatch):
    def refuse(data, step, commit):
        raise ConnectionError("the service is gone")

    monkeypatch.setattr(wandb.run, "log", refuse)
    with Tracker(parsed("--use-wandb")) as tracker:
        for step in range(2):
            tracker.log({"train/loss": 0.5}, "train/step", step)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1]
    assert caplog.text.count("the service is gone; training goes on") == 1


@pytest.fixture
def wandb_server():
    """The address of a server that lets everybody in and takes nothing."""
    viewer = {"id": "1", "username": "u", "entity": "u", "flags": "{}", "teams": {"edges": []}}
    answer = json.dumps({"data": {"viewer": viewer}}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


OPEN_A_RUN = """import os, pickle, sys
from slime.observability.wandb_utils import WandbAdapter
WandbAdapter(pickle.load(open(sys.argv[1], "rb")), {})
os._exit(0)  # the server takes nothing, so there is nothing to wait for
"""


def test_key_is_not_written_to_the_home_folder_by_wandb_itself(parsed, tmp_path, wandb_server):
    home, key = tmp_path / "home", "5" * 40
    home.mkdir()
    args = parsed("--use-wandb", "--wandb-mode", "online", "--wandb-key", key, "--wandb-host", wandb_server)
    Path(args.run_dir).mkdir(exist_ok=True)
    given = tmp_path / "args.pickle"
    given.write_bytes(pickle.dumps(args))
    env = {**os.environ, "HOME": str(home), "NETRC": str(home / "netrc")}
    subprocess.run([sys.executable, "-c", OPEN_A_RUN, str(given)], env=env, timeout=120, check=True)
    given.unlink()
    assert (tmp_path / "run" / "wandb").is_dir()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]


def test_rounds_stand_at_training_steps_when_asked_for(wandb, parsed, tmp_path):
    args = parsed("--use-wandb", "--wandb-always-use-train-step", "--global-batch-size", "2")
    with Tracker(args) as tracker:
        tracker.log({"rollout/raw_reward": 1}, "rollout/step", 3)
        tracker.log({"train/loss": 1}, "train/step", 3)
    assert [line.get("rollout/step", line.get("train/step")) for line in wandb.run.lines] == [3 * 4 * 2 // 2, 3]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [3, 3]


def test_missing_package_or_server_is_an_error_that_names_the_flag(wandb, parsed, monkeypatch):
    def refuse(**options):
        raise ConnectionError("no route to host")

    wandb.init = refuse
    with pytest.raises(RuntimeError, match="--use-wandb.*no route to host.*--wandb-mode offline"):
        Tracker(parsed("--use-wandb"))
    monkeypatch.setattr(wandb_utils, "is_wandb_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"--use-wandb needs.*pip install 'slime\[wandb\]'"):
        Tracker(parsed("--use-wandb"))


def test_wandb_flags_alone_are_said_to_do_nothing(parsed):
    notes = parsed("--wandb-project", "p", "--wandb-group", "g").start_notes
    assert "--wandb-group, --wandb-project: no effect without --use-wandb" in notes


def test_offline_run_writes_wandbs_own_files(parsed, tmp_path):
    with Tracker(parsed("--use-wandb", "--wandb-mode", "offline")) as tracker:
        tracker.log({"train/loss": 0.25}, "train/step", 0)
    (record,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60
    while b"0.25" not in (written := record.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)  # a process of W&B's own writes it
    assert b"train/loss" in written and b"0.25" in written and b"train/step" in written
