"""What the benchmarks share: CPU time of a process tree, own virtual environments, core pinning, the RESULT line.

Wall time on a shared machine is noise; every benchmark reports CPU-seconds beside it. Standard library and psutil.
"""

from __future__ import annotations

import bisect
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "outputs" / "benchmarks"
MARK = "SLIME_BENCHMARK_RUN"
_TICK = os.sysconf("SC_CLK_TCK")
_LABELS = (
    ("slime.engine", "engine"),
    ("MegatronActor", "trainer"),
    ("TrainActor", "trainer"),
    ("RolloutManager", "rollout manager"),
    ("router_main", "router"),
    ("sglang::router", "router"),  # what it calls itself
    ("train.py", "driver"),
)


def one_thread_env() -> dict[str, str]:
    """The environment of a measured process: one thread, offline, this checkout on the path."""
    single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    return {**os.environ, **single, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def pinned(command: list[str], cores: str | None) -> list[str]:
    """The command confined to cores like "0,1" where `taskset` exists."""
    return ["taskset", "-c", cores, *command] if cores and shutil.which("taskset") else command


def cores_of_machine(count: int) -> str:
    """The first `count` cores that this process may use, as `taskset` wants them."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return ",".join(map(str, list(usable)[:count]))


def make_venv(directory: Path, packages: list[str]) -> Path:
    """Make a virtual environment once and return its interpreter; a half-made one is made anew."""
    done, python = directory / ".complete", directory / "bin" / "python"
    wanted = "\n".join(packages)
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"making {directory} ({', '.join(packages)})", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    done.write_text(wanted)
    return python


def result_of(output: str) -> dict:
    """The JSON of a worker's last RESULT line."""
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"the worker printed no RESULT line; the end of its output:\n{output[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def print_result(result: dict) -> None:
    """The last line of a benchmark, for programs to read."""
    print("RESULT " + json.dumps(result), flush=True)


def run_worker(command: list[str], *, deadline_s: float) -> dict:
    """Run a worker to its end and return its RESULT; its output goes to the terminal too.

    Raises: RuntimeError when it fails or takes longer than the deadline.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=one_thread_env(), cwd=ROOT
    )
    timer = threading.Timer(deadline_s, process.kill)
    timer.start()
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(("RESULT", "step ", "Traceback")):
            print("  " + line.rstrip(), flush=True)
    timer.cancel()
    if process.wait() != 0:
        raise RuntimeError(f"{command} ended with status {process.returncode}:\n{''.join(lines[-40:])}")
    return result_of("".join(lines))


class TreeCpu(threading.Thread):
    """CPU seconds of a process and everything that it started, sampled, by part of the run.

    Servers belong to nobody (they are supervised), so members are known by a mark in their environment. A process that
    ended keeps what it had used. `between(start, end)` answers for any window of wall-clock time.
    """

    def __init__(self, pid: int, mark: str, every_s: float = 0.2):
        super().__init__(daemon=True)
        self.pid, self.every_s = pid, every_s
        self._mark = f"{MARK}={mark}".encode()
        self._times: list[float] = []
        self._rows: list[dict[int, float]] = []
        self._labels: dict[int, str] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        known: dict[int, float] = {}
        refresh_at = 0.0
        while not self._ended.is_set():
            if time.time() >= refresh_at:
                refresh_at = time.time() + 2.0
                self._refresh()
            for pid in self._labels:
                seconds = _cpu_seconds(f"/proc/{pid}/stat")
                if seconds is not None:
                    known[pid] = seconds
            self._times.append(time.time())
            self._rows.append(dict(known))
            self._ended.wait(self.every_s)

    def stop(self) -> None:
        self._ended.set()
        self.join(5.0)

    def _refresh(self) -> None:
        import psutil

        for process in psutil.process_iter():
            if self._labels.get(process.pid) not in (None, "ray"):
                continue
            try:
                if self._mark not in Path(f"/proc/{process.pid}/environ").read_bytes():
                    continue
                line = " ".join(process.cmdline())
            except (psutil.Error, OSError):
                continue
            label = next((label for part, label in _LABELS if part in line and "supervise" not in line), "ray")
            self._labels[process.pid] = label

    def between(self, start: float, end: float) -> dict[str, float]:
        """CPU seconds by part of the run, and "total", between two moments of `time.time()`."""
        first, last = self._at(start), self._at(end)
        parts: dict[str, float] = {}
        for pid, seconds in last.items():
            label = self._labels.get(pid, "ray")
            parts[label] = parts.get(label, 0.0) + seconds - first.get(pid, 0.0)
        parts["total"] = sum(parts.values())
        return parts

    def _at(self, moment: float) -> dict[int, float]:
        right = bisect.bisect(self._times, moment)
        if right == 0:
            return {}
        if right == len(self._times):
            return self._rows[-1]
        share = (moment - self._times[right - 1]) / (self._times[right] - self._times[right - 1])
        before, after = self._rows[right - 1], self._rows[right]
        return {pid: before.get(pid, 0.0) + share * (value - before.get(pid, 0.0)) for pid, value in after.items()}

    def pids(self, label: str) -> list[int]:
        return [pid for pid, found in self._labels.items() if found == label]

    def labels(self) -> dict[int, str]:
        """Part of the run by process id."""
        return dict(self._labels)


def thread_name(pid: int, thread: int) -> str:
    """Name of a thread as the system knows it; "" when it is gone. Python's own threads are called like their process."""
    try:
        return Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip()
    except OSError:
        return ""


def thread_seconds(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process, by thread id."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return {}
    found = {int(t): _cpu_seconds(f"/proc/{pid}/task/{t}/stat") for t in threads}
    return {thread: seconds for thread, seconds in found.items() if seconds is not None}


def _cpu_seconds(stat_file: str) -> float | None:
    try:
        fields = Path(stat_file).read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICK


def train(flags: list[str], *, cores: str | None, log: Path, watch=None) -> TreeCpu:
    """Run `python train.py FLAGS` to its end, as a user does; returns the CPU record of its process tree.

    Args:
        watch: called with the record every second while it runs.

    Raises: RuntimeError with the end of the log when it fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = pinned([sys.executable, str(ROOT / "train.py"), *flags], cores)
    with log.open("w") as file:
        mark = uuid.uuid4().hex
        env = {**one_thread_env(), MARK: mark}
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
    cpu = TreeCpu(process.pid, mark)
    cpu.start()
    try:
        while process.poll() is None:
            if watch is not None:
                watch(cpu)
            time.sleep(1.0 if watch is None else 0.5)
    except BaseException:
        process.terminate()
        process.wait(20.0)
        raise
    finally:
        cpu.stop()
    if process.returncode != 0:
        raise RuntimeError(f"train.py ended with status {process.returncode}:\n{log.read_text()[-3000:]}")
    return cpu
