import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.utils import platform

PACKAGE = Path(platform.__file__).resolve().parents[1]
SYSTEM_NAMES = re.compile(r"/proc\b|/dev/shm|/sys/|os\.fork\b|smaps|sched_getaffinity")


@pytest.fixture(params=["this system", "without a proc folder"])
def _system(request, monkeypatch, tmp_path):
    if request.param != "this system":
        monkeypatch.setattr(platform, "_PROC", tmp_path)


def test_memory_of_a_tree_holds_its_children(_system):
    code = "import sys; data = bytearray(b'x' * 50_000_000); print('ready', flush=True); sys.stdin.read()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout.readline() == "ready\n"
        assert platform.process_tree_memory_bytes(parent.pid) > 50_000_000
    finally:
        parent.communicate(timeout=120)
    assert platform.process_tree_memory_bytes(parent.pid) == 0


def test_shared_memory_folder_is_writable_and_falls_back(monkeypatch, tmp_path):
    assert os.access(platform.shared_memory_dir(), os.W_OK)
    monkeypatch.setattr(platform, "_SHARED_MEMORY", tmp_path / "missing")
    assert platform.shared_memory_dir().is_dir()


def test_no_other_module_names_what_one_system_has():
    found = [
        f"{path.relative_to(PACKAGE)}:{number} {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "platform.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if SYSTEM_NAMES.search(line)
    ]
    assert not found, "these belong into slime/utils/platform.py:\n" + "\n".join(found)


def test_family_is_found_by_its_mark_whoever_the_parent_is(tmp_path):
    """A grandchild whose parent ended belongs to nobody's tree, and still to the family."""
    pid_file = tmp_path / "pid"
    sleeper = f"import os,time; open({str(pid_file)!r},'w').write(str(os.getpid())); time.sleep(600)"
    launcher = f"import subprocess,sys; subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True)"
    env = os.environ | {platform.FAMILY_VARIABLE: "test-family"}
    subprocess.run([sys.executable, "-c", launcher], env=env, check=True, timeout=120)
    give_up_at = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < give_up_at, "waited 60 s for the sleeper"
        time.sleep(0.05)
    pid = int(pid_file.read_text())
    try:
        assert [process.pid for process in platform.family("test-family")] == [pid]
        assert platform.family_memory_bytes("test-family") > 1_000_000
        assert platform.family_memory_bytes("another-family") == 0
    finally:
        os.kill(pid, signal.SIGKILL)
