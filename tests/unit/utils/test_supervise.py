"""A supervised command ends with its parent, with its own group, and reports its status."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from slime.utils import supervise

DEADLINE_S = 60.0


def wait_until(condition, what):
    give_up_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.05)


def read_pid(path):
    wait_until(lambda: path.exists() and path.read_text().strip(), f"{path.name}")
    return int(path.read_text())


def sleeper(pid_file):
    return [
        sys.executable,
        "-c",
        f"import os,time; open({str(pid_file)!r},'w').write(str(os.getpid())); time.sleep(600)",
    ]


def test_stop_ends_the_command(tmp_path):
    process = supervise.start(sleeper(tmp_path / "pid"), str(tmp_path / "log"))
    pid = read_pid(tmp_path / "pid")
    assert process.pid == pid and process.poll() is None
    process.stop()
    assert not psutil.pid_exists(pid)
    assert process.poll() == 128 + 15


def test_supervisor_is_no_child_of_ours(tmp_path):
    """Ray's workers kill their children when they exit; a supervisor killed that way could end nothing."""
    process = supervise.start(sleeper(tmp_path / "pid"), str(tmp_path / "log"))
    try:
        assert not any(
            "slime.utils.supervise" in child.cmdline() for child in psutil.Process().children(recursive=True)
        )
    finally:
        process.stop()


def test_command_ends_when_its_parent_is_killed(tmp_path):
    script = (
        "import sys,time; from slime.utils import supervise;"
        f"process = supervise.start({sleeper(tmp_path / 'pid')!r}, {str(tmp_path / 'log')!r}); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    pid = read_pid(tmp_path / "pid")
    parent.kill()
    parent.wait(DEADLINE_S)
    wait_until(lambda: not psutil.pid_exists(pid), "the command to end")


def test_children_of_an_ended_command_are_ended_too(tmp_path):
    child = sleeper(tmp_path / "pid")
    process = supervise.start(
        [sys.executable, "-c", f"import subprocess; subprocess.Popen({child!r})"], str(tmp_path / "log")
    )
    wait_until(lambda: process.poll() is not None, "the command to end")
    assert process.poll() == 0
    pid_file = tmp_path / "pid"
    if pid_file.exists() and pid_file.read_text():
        wait_until(lambda: not psutil.pid_exists(int(pid_file.read_text())), "the grandchild to end")


@pytest.mark.parametrize("status", [0, 3])
def test_status_and_output_of_the_command_are_kept(tmp_path, status):
    log = str(tmp_path / "logs" / "log")
    process = supervise.start([sys.executable, "-c", f"print('hello'); raise SystemExit({status})"], log)
    wait_until(lambda: process.poll() is not None, "the command to end")
    assert process.poll() == status
    assert supervise.log_tail(log) == "hello"


def test_tail_of_a_missing_log_says_so(tmp_path):
    assert "no log" in supervise.log_tail(os.fspath(tmp_path / "absent"))
