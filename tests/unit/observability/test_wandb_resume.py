"""A continued run in W&B, by the real package against a server of ours: the same run, each round once where the server can rewind."""

from __future__ import annotations

import gzip
import http.server
import json
import threading

import pytest
import wandb

from slime.observability import wandb_utils
from slime.observability.tracking import Tracker, read_metrics

PROJECT = {"id": "p", "name": "p", "entity": {"id": "e", "name": "u"}}


class WandbServer:
    """What the wandb package asks for, in memory. `runs`: history lines by run id. `can_rewind`: whether it has that feature."""

    def __init__(self):
        self.runs: dict[str, list[dict]] = {}
        self.can_rewind = True

    def graphql(self, query: str, given: dict) -> dict:
        name = given.get("name") or given.get("runName")
        if "query RunResumeStatus" in query:
            return {"model": PROJECT | {"bucket": self._status(name) if name in self.runs else None}}
        if "mutation UpsertBucket" in query:
            self.runs.setdefault(name, [])
            return {"upsertBucket": {"bucket": self._bucket(name), "inserted": True}}
        if "mutation RewindRun" in query:
            assert self.can_rewind, "rewind is in private preview"
            self.runs[name] = [line for line in self.runs[name] if line["_step"] <= given["metricValue"]]
            return {"rewindRun": {"rewoundRun": self._bucket(name)}}
        if "mutation CreateRunFiles" in query:
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        viewer = {"id": "1", "username": "u", "entity": "u", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "entity": None}

    def _bucket(self, name: str) -> dict:
        count = len(self.runs[name])
        named = {"id": "b", "name": name, "displayName": name, "historyLineCount": count}
        return named | {"description": "", "config": "{}", "sweepName": None, "project": PROJECT}

    def _status(self, name: str) -> dict:
        tail = [json.dumps(line | {"_runtime": 1, "_timestamp": 1.0}) for line in self.runs[name][-1:]]
        other = {"summaryMetrics": "{}", "wandbConfig": '{"t": 1}', "eventsTail": "[]", "tags": [], "notes": ""}
        return self._bucket(name) | other | {"logLineCount": 0, "eventsLineCount": 0, "historyTail": json.dumps(tail)}

    def stream(self, name: str, files: dict) -> None:
        chunk = files.get("wandb-history.jsonl")
        if chunk is not None:
            assert chunk["offset"] == len(self.runs[name])
            self.runs[name] += [json.loads(line) for line in chunk["content"]]

    def points(self, name: str) -> list[tuple]:
        """(axis, step, value) of the run's lines."""
        axes = ("rollout/step", "train/step")
        return [next((axis, line[axis], line["x"]) for axis in axes if axis in line) for line in self.runs[name]]


@pytest.fixture
def server(monkeypatch):
    state = WandbServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            answer = {}
            try:
                if self.path == "/graphql":
                    call = json.loads(body)
                    answer = {"data": state.graphql(call["query"], call.get("variables") or {})}
                elif self.path.endswith("/file_stream"):
                    state.stream(self.path.split("/")[-2], json.loads(body).get("files") or {})
            except AssertionError as error:
                answer = {"data": None, "errors": [{"message": str(error)}]}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{http_server.server_port}"
        yield state
        http_server.shutdown()


@pytest.fixture
def attempt(parsed, tmp_path, monkeypatch, server):
    """``attempt(first, last)``: the rounds `first` to `last`, whose lines hold `first * 10` and their round, in the folder `run`.

    As in the look-ahead loop a round is generated before the one before it is trained. Returns the id of the W&B run.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def run(first: int, last: int, *flags: str) -> str:
        account = ["--wandb-host", server.url, "--wandb-key", "5" * 40, "--wandb-project", "p"]
        with Tracker(parsed("--use-wandb", *account, *flags)) as tracker:
            tracker.rewind(first, steps_per_rollout=2)
            for rollout_id in range(first, last + 2):
                tracker.log({"x": 10 * first + rollout_id}, "rollout/step", rollout_id)
                for step in (2 * rollout_id - 2, 2 * rollout_id - 1) if rollout_id > first else ():
                    tracker.log({"x": 10 * first + rollout_id - 1}, "train/step", step)
        return (tmp_path / "run" / "wandb_run_id.txt").read_text().strip()

    return run


def shown(metrics: list[dict]) -> list[tuple]:
    return [(line["step_key"], line["step"], line["x"]) for line in metrics]


def test_rounds_done_again_stand_once_in_the_same_run(attempt, server, tmp_path):
    run_id = attempt(0, 3)
    assert len(server.runs[run_id]) == 13
    assert attempt(2, 4) == run_id
    lines = read_metrics(tmp_path / "run")
    assert server.points(run_id) == shown(lines)
    assert [line["_step"] for line in server.runs[run_id]] == list(range(len(lines)))
    assert ("rollout/step", 1, 1) in shown(lines) and ("train/step", 3, 1) in shown(lines)  # kept behind what was cut
    assert ("rollout/step", 3, 23) in shown(lines) and ("rollout/step", 3, 3) not in shown(lines)


def test_server_that_cannot_rewind_keeps_all_lines_and_the_log_says_so(attempt, server, tmp_path, caplog):
    run_id = attempt(0, 3)
    server.can_rewind = False
    before = server.points(run_id)
    for first in (2, 3):
        caplog.clear()
        assert attempt(first, first) == run_id
        assert "shows the rounds that are done again twice" in caplog.text
    assert server.points(run_id)[: len(before)] == before
    assert ("rollout/step", 3, 33) in server.points(run_id) and ("train/step", 5, 22) in server.points(run_id)
    assert len(server.runs[run_id]) == len(before) + 4 + 4
    server.can_rewind = True  # too late: W&B's steps are no longer our lines
    attempt(3, 3)
    assert "more than this run has logged" in caplog.text


def test_starting_over_begins_a_new_run_and_leaves_the_old_one(attempt, server):
    old = attempt(0, 1)
    before = server.points(old)
    new = attempt(0, 0)
    assert new != old and server.points(old) == before
    assert server.points(new) == [
        ("rollout/step", 0, 0),
        ("rollout/step", 1, 1),
        ("train/step", 0, 0),
        ("train/step", 1, 0),
    ]


def test_run_goes_on_in_local_files_when_the_server_is_gone(attempt, server, tmp_path, caplog, monkeypatch):
    run_id = attempt(0, 1)
    monkeypatch.setattr(wandb_utils, "INIT_TIMEOUT_S", 2.0)
    assert attempt(1, 1, "--wandb-host", "http://127.0.0.1:9") == run_id
    assert "going on in local files" in caplog.text and "offline files cannot be rewound" in caplog.text
    assert list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}"))
    assert ("rollout/step", 1, 11) in shown(read_metrics(tmp_path / "run"))


def test_what_a_loop_of_the_users_logs_itself_takes_no_line_of_ours_away(parsed, server, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with Tracker(parsed("--use-wandb", "--wandb-host", server.url, "--wandb-key", "5" * 40)) as tracker:
        for rollout_id in range(3):
            tracker.log({"x": rollout_id}, "rollout/step", rollout_id)
            wandb.log({"mine": rollout_id})
    lines = server.runs[(tmp_path / "run" / "wandb_run_id.txt").read_text().strip()]
    assert [[line[name] for line in lines if name in line] for name in ("x", "mine")] == [[0, 1, 2]] * 2
