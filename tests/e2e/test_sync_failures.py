"""FB-A24: an engine that dies or hangs in the middle of a weight update ends the run within a deadline, and nothing is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from slime.config import checkpoint_dirs
from slime.utils.engine_client import EngineClient
from tests.e2e.conftest import assert_all_ends, base_flags, command_line, finish, launch, processes_of, wait_until
from tests.e2e.test_sync_loop import SMALL

#: One weight per bucket, and the hook holds the third one of version 2, so that the update is hit in the middle.
FLAGS = [*SMALL, *("--rollout-num-gpus", 2, "--update-weight-buffer-size", 1, "--save-interval", 1)]
FLAGS += ["--update-weight-transport", "broadcast", "--custom-megatron-init-path", "tests.e2e.hooks.held_in_update_2"]


def engines(directory: Path) -> list[psutil.Process]:
    """The servers of a run, without their supervisors."""
    found = [(process, command_line(process)) for process in processes_of(directory)]
    return [p for p, words in found if "slime.engine" in words and "slime.utils.supervise" not in words]


def hit_in_the_update(directory: Path, signal_number: int) -> str:
    """Send a signal to an engine that holds the first two of the weights of version 2. Returns its URL."""
    wait_until(lambda: (directory / "run" / "in_update").exists(), "the update to version 2", poll_s=0.02)
    victim, _ = engines(directory)
    words = victim.cmdline()
    url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    with EngineClient(url) as client:
        assert client.weight_version() == "2"
    os.kill(victim.pid, signal_number)
    (directory / "run" / "go_on").touch()
    return url


@pytest.mark.parametrize(
    ("signal_number", "deadline_minutes"), [(signal.SIGKILL, 10.0), (signal.SIGSTOP, 0.15)], ids=["dies", "hangs"]
)
def test_fb_a24_engine_that_fails_in_a_weight_update_ends_the_run_and_no_checkpoint_is_lost(
    cluster, workspace, tmp_path, signal_number, deadline_minutes
):
    flags = [*base_flags(workspace, tmp_path), *FLAGS, "--num-rollout", 3]
    process = launch([*flags, "--distributed-timeout-minutes", deadline_minutes], address=cluster)
    url = hit_in_the_update(tmp_path, signal_number)
    output = finish(process, 180)
    assert process.returncode == 1 and url in output, output[-3000:]
    assert ("1 of 2 rollout engines died" in output) == (signal_number == signal.SIGKILL), output[-3000:]
    assert "Traceback" not in output
    assert_all_ends(tmp_path)
    assert checkpoint_dirs.latest(str(tmp_path / "run" / "checkpoints")).rollout_id == 1
