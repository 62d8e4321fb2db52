"""Whole runs through ``train.py`` as a user starts it. One Ray cluster serves the session; each run has its own engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[2]
RUN_DEADLINE_S = 600
NUM_SLOTS = 4


@dataclass
class Workspace:
    """A folder with a tiny model (``model``) and prompts (``data``); runs are written below it."""

    root: Path
    model: Path
    data: Path


@dataclass
class Run:
    """A finished run: exit status, what it printed, and its run directory."""

    status: int
    output: str
    directory: Path

    def metrics(self, step_key: str | None = None) -> list[dict]:
        lines = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if step_key is None or line["step_key"] == step_key]

    def series(self, name: str) -> list[float]:
        return [line[name] for line in self.metrics() if name in line]


def digits_rows(count: int) -> list[dict]:
    return [{"prompt": f"copy {index:04d}=", "label": f"{index:04d}"} for index in range(count)]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Workspace:
    from slime.utils.tiny_model import make_tiny_model

    root = tmp_path_factory.mktemp("e2e")
    make_tiny_model(
        root / "model", arch="qwen3", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, seed=0
    )
    return Workspace(root, root / "model", write_rows(root / "data.jsonl", digits_rows(64)))


@pytest.fixture(scope="session")
def cluster() -> str:
    """Address of a Ray cluster with logical slots that all runs of the session join."""
    from types import SimpleNamespace

    import ray

    from slime.ray import boot

    boot.connect(SimpleNamespace(ray_address=None, omp_num_threads=1, has_gpu=False), NUM_SLOTS)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def base_flags(workspace: Workspace, output_dir: Path, name: str = "run") -> list:
    """Model, prompts and run directory of a run on the workspace."""
    model_and_data = ["--hf-checkpoint", workspace.model, "--prompt-data", workspace.data]
    return [*model_and_data, "--output-dir", output_dir, "--run-name", name]


def launch(flags: list[str], *, address: str | None, script: str = "train.py", cwd: Path = REPO) -> subprocess.Popen:
    """Start a driver in a process group of its own."""
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]  # scripts of other folders import this tree too
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):  # the session's cluster set the latter; a user's shell does not
        env.pop(name, None)
    if address:
        env["RAY_ADDRESS"] = address
    return subprocess.Popen(
        [sys.executable, str(REPO / script), *map(str, flags)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, deadline_s: float = RUN_DEADLINE_S) -> str:
    """Wait for a driver and return what it printed; a run past its deadline is ended and fails the test."""
    try:
        return process.communicate(timeout=deadline_s)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            output = process.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        pytest.fail(f"the run did not end within {deadline_s} s; it printed:\n{output[-4000:]}")


@pytest.fixture
def train(cluster, workspace, tmp_path):
    """``train(*flags)`` runs ``train.py`` on the workspace's model and data, and returns the finished Run."""

    def run(*flags, name: str = "run", check: bool = True, script: str = "train.py", cwd: Path = REPO) -> Run:
        base = ["--output-dir", tmp_path, "--run-name", name]
        if "--hf-checkpoint" not in flags:
            base += ["--hf-checkpoint", workspace.model]
        if "--prompt-data" not in flags:
            base += ["--prompt-data", workspace.data]
        process = launch([*base, *flags], address=cluster, script=script, cwd=cwd)
        output = finish(process)
        result = Run(process.returncode, output, tmp_path / name)
        assert not check or result.status == 0, output[-6000:]
        return result

    return run


def processes_of(directory: Path) -> list[psutil.Process]:
    """Processes that name ``directory`` or hold a file below it: engines, routers and supervisors write their logs there."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            words = [*(process.info["cmdline"] or []), *(file.path for file in process.open_files())]
        except psutil.Error:
            continue  # it ended while we looked
        if any(str(directory) in word for word in words):
            found.append(process)
    return found


def command_line(process: psutil.Process) -> list[str]:
    """Its words, none when it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_until(condition, what: str, deadline_s: float = 240.0, poll_s: float = 0.1):
    give_up_at = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < give_up_at, f"waited {deadline_s} s for {what}"
        time.sleep(poll_s)
    return value


def assert_all_ends(directory: Path) -> None:
    """Nothing of a run below ``directory`` stays; what was told to end may need a moment."""
    wait_until(lambda: not processes_of(directory), "servers of the run to end", 60)
