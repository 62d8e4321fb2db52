"""FB-A24: an engine that dies or hangs in the middle of a weight update ends the run within a deadline, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from slime.config import checkpoint_dirs
from slime.utils.engine_client import EngineClient, EngineError
from tests.e2e.conftest import base_flags, finish, launch, processes_of
from tests.e2e.test_failures import wait_until
from tests.e2e.test_sync_loop import SMALL

UPDATE_DEADLINE_MINUTES = 0.1
#: One weight per bucket makes an update long enough to be hit in the middle.
FLAGS = [*SMALL, *("--rollout-num-gpus", 2, "--update-weight-buffer-size", 1, "--save-interval", 1)]
FLAGS += ["--update-weight-transport", "broadcast"]


def engines(directory: Path) -> list[psutil.Process]:
    """The servers of a run, without their supervisors."""
    found = [(process, process.cmdline()) for process in processes_of(directory)]
    return [p for p, words in found if "slime.engine" in words and "slime.utils.supervise" not in words]


def url_of(engine: psutil.Process) -> str:
    words = engine.cmdline()
    return f"http://127.0.0.1:{words[words.index('--port') + 1]}"


def hit_in_an_update(directory: Path, version: str, signal_number: int) -> str:
    """Send a signal to an engine once it holds the first of the weights of ``version``. Returns its URL."""
    victim = wait_until(lambda: len(engines(directory)) == 2 and engines(directory)[0], "two engines")
    with EngineClient(url_of(victim)) as client:
        give_up_at = time.monotonic() + 120
        while True:
            assert time.monotonic() < give_up_at, f"no update to version {version}"
            try:
                if client.weight_version() == version:
                    break
            except EngineError:
                time.sleep(0.1)  # it is still starting
            time.sleep(0.001)
        os.kill(victim.pid, signal_number)
    return client.base_url


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_fb_a24_engine_that_fails_in_a_weight_update_ends_the_run_and_no_checkpoint_is_lost(
    cluster, workspace, tmp_path, signal_number
):
    flags = [*base_flags(workspace, tmp_path), *FLAGS, "--num-rollout", 3]
    process = launch([*flags, "--distributed-timeout-minutes", UPDATE_DEADLINE_MINUTES], address=cluster)
    url = hit_in_an_update(tmp_path, "2", signal_number)
    started = time.monotonic()
    output = finish(process, 60)
    assert process.returncode == 1 and url in output, output[-3000:]
    assert ("1 of 2 rollout engines died" in output) == (signal_number == signal.SIGKILL), output[-3000:]
    assert "Traceback" not in output
    assert time.monotonic() - started < 60 * UPDATE_DEADLINE_MINUTES + 25
    assert not processes_of(tmp_path)
    assert checkpoint_dirs.latest(str(tmp_path / "run" / "checkpoints")).rollout_id == 1
