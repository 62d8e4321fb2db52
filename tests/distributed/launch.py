"""Run a function in several gloo processes and collect what each returns, with a deadline.

The function lives in an importable module and is called as `function(rank, world_size, port, folder)`; its result must be
picklable by torch. Processes are stopped by pid when the deadline passes, and the error shows the last lines of each.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parents[2]
_CODE = """
import sys, torch
from importlib import import_module
module, name, rank, size, port, folder = sys.argv[1:]
result = getattr(import_module(module), name)(int(rank), int(size), int(port), folder)
torch.save(result, f"{folder}/result-{rank}.pt")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(module: str, name: str, world_size: int, folder: Path, deadline_s: float = 120) -> list:
    """Return the results of all ranks in rank order.

    Raises: RuntimeError when a rank fails or the deadline passes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), "PYTHONWARNINGS": "ignore"}
    ranks = []
    for rank in range(world_size):
        log = open(folder / f"log-{rank}.txt", "w")
        arguments = [module, name, str(rank), str(world_size), str(port), str(folder)]
        ranks.append(subprocess.Popen([sys.executable, "-c", _CODE, *arguments], stdout=log, stderr=log, env=env))
    deadline = time.monotonic() + deadline_s
    try:
        while any(r.poll() is None for r in ranks) and all(r.poll() in (None, 0) for r in ranks):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{name} on {world_size} ranks did not end within {deadline_s} s\n{_tails(folder, world_size)}"
                )
            time.sleep(0.05)
        if any(r.returncode for r in ranks):
            raise RuntimeError(f"{name} failed on {world_size} ranks\n{_tails(folder, world_size)}")
    finally:
        for r in ranks:
            r.kill()
            r.wait(timeout=10)
    return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(world_size)]


def _tails(folder: Path, world_size: int) -> str:
    return "\n".join(f"--- rank {r}\n{(folder / f'log-{r}.txt').read_text()[-1500:]}" for r in range(world_size))
