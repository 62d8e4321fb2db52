"""FB-A02 with twenty `kill -9` of a rollout side at random points, against a real engine behind the real router."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from slime.config import checkpoint_dirs
from slime.rollout import data_state, ledger_command
from slime.rollout.data_ledger import NAMES
from slime.rollout.ledger_check import check
from slime.utils.engine_client import EngineClient
from tests.e2e.conftest import REPO, write_rows
from tests.e2e.ledger_lab import MODEL, NUM_KILLS
from tests.engine.engine_process import engine_command, engine_environment, free_port, stop_process

NUM_ROWS, BATCH = 23, 2


@pytest.fixture(scope="module")
def router_port(workspace):
    """One engine behind a router; both outlive every killed client."""
    port, router = free_port(), free_port()
    engine = subprocess.Popen(
        engine_command(workspace.model, port, "--log-level", "warning"), env=engine_environment(), cwd=REPO
    )
    fields = {"host": "127.0.0.1", "port": router, "prometheus_port": free_port(), "policy": "round_robin"}
    fields |= {"log_level": "error", "disable_retries": True, "worker_urls": [f"http://127.0.0.1:{port}"]}
    command = [sys.executable, "-m", "slime.ray.router_main", json.dumps(fields)]
    with EngineClient(f"http://127.0.0.1:{port}") as client:
        try:
            client.wait_ready(120, lambda: engine.poll() is None)
            process = subprocess.Popen(command, env=engine_environment(), cwd=REPO)
        except BaseException:
            stop_process(engine)
            raise
    try:
        with EngineClient(f"http://127.0.0.1:{router}") as client:
            client.wait_ready(120, lambda: process.poll() is None)
        yield router
    finally:
        process.kill()  # it holds the interpreter's lock, a signal handler would never run
        process.wait(60)
        stop_process(engine)


def rows() -> list[dict]:
    """Every fifth prompt is dropped by the filter, row 3 does not fit into the context."""
    return [{"prompt": ("x" * 400 if i == 3 else "") + f"copy {i:03d}=", "label": f"{i}"} for i in range(NUM_ROWS)]


FLAGS = (
    "--run-name run --no-resume --rollout-shuffle --num-rollout 1 --n-samples-per-prompt 2 --over-sampling-batch-size 5 "
    "--partial-rollout --partial-rollout-max-age 1 --round-policy-path slime.rollout.round_policy.DropOldGroups "
    "--dynamic-sampling-filter-path tests.e2e.hooks.drop_every_fifth_prompt --custom-rm-path tests.e2e.hooks.first_token_is_even "
    "--sglang-context-length 300 --custom-generate-function-path tests.e2e.hooks.long_tailed --rollout-max-response-len 60"
).split()


def flags(workspace, folder: Path) -> list[str]:
    data = write_rows(folder / "rows.jsonl", rows())
    places = [
        "--hf-checkpoint",
        workspace.model,
        "--prompt-data",
        data,
        "--output-dir",
        folder,
        "--save",
        folder / "save",
    ]
    return [str(word) for word in (*places, *FLAGS, "--rollout-batch-size", BATCH)]


@pytest.mark.slow
def test_fb_a02_killed_twenty_times_every_prompt_ends_exactly_once(router_port, workspace, tmp_path, capsys):
    result = subprocess.run(
        [sys.executable, "-m", "tests.e2e.ledger_lab", *flags(workspace, tmp_path)],
        env={**engine_environment(), "ROUTER_PORT": str(router_port), "TOKENIZERS_PARALLELISM": "false"},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    starts = json.loads(result.stdout.splitlines()[-1].removeprefix("RESULT "))["starts"]
    assert len(starts) == NUM_KILLS + 1 and starts == sorted(starts) and len(set(starts)) > 3, starts
    for checkpoint in checkpoint_dirs.all_complete(str(tmp_path / "save")):
        check_checkpoint(Path(checkpoint.directory))
    assert ledger_command.run(str(tmp_path / "save")) == 0
    assert "every prompt handed out ended once or is open once" in capsys.readouterr().out
    command = [sys.executable, "-c", "from slime.cli import main; main()", "ledger", str(tmp_path / "nowhere")]
    missing = subprocess.run(command, cwd=REPO, env=engine_environment(), capture_output=True, text=True)
    assert missing.returncode == 2 and "no complete checkpoint" in missing.stderr


def check_checkpoint(directory: Path) -> None:
    """What the "model" was trained on and what the ledger says agree; every prompt is somewhere, once."""
    state = torch.load(directory / data_state.FILE, weights_only=True)
    assert check(state).problems == []
    trained = json.loads((directory / MODEL).read_text())
    assert len(trained) == len({group_index for _, group_index, _, _ in trained}) == BATCH * (trained[-1][0] + 1)
    ledger = state["ledger"]
    ended = {epoch: [NAMES.get(code) for code in codes.tolist()] for epoch, codes in ledger["rows"].items()}
    by_ledger = Counter(row for names in ended.values() for row, name in enumerate(names) if name == "trained")
    assert by_ledger == Counter(row for _, _, row, _ in trained)
    for names in ended.values():
        for row, name in enumerate(names):
            possible = {"failed"} if row == 3 else {"filtered", "aged_out"} if row % 5 == 0 else {"trained", "aged_out"}
            assert name is None or name in possible, (row, name)
    num_open = len(ledger["in_flight"]) + len(ledger["waiting"])
    num_ended = sum(name is not None for names in ended.values() for name in names)
    assert num_open + num_ended == state["epoch_id"] * NUM_ROWS + state["sample_offset"]
