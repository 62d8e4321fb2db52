"""Where the time of a GRPO round goes, in milliseconds, from a real run of `train.py`.

python benchmarks/round_profile.py                     # the benchmark shape (32 x 8 samples, 3.2M parameters)
python benchmarks/round_profile.py --shape quickstart  # 64 x 8 samples of at most 7 tokens, 0.43M parameters
python benchmarks/round_profile.py --shape 135m        # 4 x 8 samples of 32 tokens, random weights of a 135M shape
python benchmarks/round_profile.py --smoke             # a tiny shape, to see that it works

Two sources: the CPU clocks that the system keeps for every thread of every process of the run, and the timers in
metrics.jsonl. Compute is what multiplies matrices and samples tokens: the engine's own thread and the trainer's passes
and optimizer. Everything else is overhead, also what no other program could leave out: advantages, metrics of the loss, and
the trainer's copy of the weights (an engine's copy of them is done by its own thread). The last line is `RESULT {json}` with
`overhead_cpu_share` and `overhead_wall_share`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common, sorting
from benchmarks.grpo_vs_trl import SAVINGS, rounds_of

_LOOK_EVERY_S = 1.0
_PASSES = ("forward_backward", "log_probs", "ref_log_probs")


def main() -> None:
    args = _arguments()
    shape = sorting.SHAPES["smoke" if args.smoke else args.shape]
    if args.smoke:
        args.steps, args.warmup = 60, 5  # rounds of some 0.1 s: enough of them to look at the threads a few times
    cores = args.cores or common.cores_of_machine(2)
    folder = sorting.prepare(shape, cores=cores)
    name = f"profile-{shape.name}"
    run_dir = common.WORK / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    savings = [] if args.no_savings else [flag for flag in SAVINGS if shape.name != "135m" or "zero" not in flag]
    extra = [*savings, *args.flags.split()]  # random weights are never rewarded: skipping would leave nothing to train
    flags = sorting.grpo_flags(shape, folder, name, steps=args.steps, evaluate=False, extra=extra)
    threads = ThreadClocks()
    cpu = common.train(flags, cores=cores, log=common.WORK / f"{name}.log", watch=threads.look)
    table = build_table(run_dir, cpu, threads, args.warmup)
    print_table(shape.name, table, args.threads)
    common.print_result({"benchmark": "round_profile", "shape": shape.name, **table})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("bench", "quickstart", "135m"), default="bench")
    parser.add_argument("--steps", type=int, default=20, help="rounds (default 20)")
    parser.add_argument("--warmup", type=int, default=3, help="first rounds left out (default 3)")
    parser.add_argument("--cores", help='cores of the run, e.g. "0,1" (default: the first two)')
    parser.add_argument("--no-savings", action="store_true", help=f"without {' '.join(SAVINGS)}")
    parser.add_argument("--flags", default="", help="more flags of train.py, in one argument")
    parser.add_argument("--threads", type=int, default=20, help="busiest threads to list (default 20)")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, short rounds")
    return parser.parse_args()


class ThreadClocks:
    """CPU seconds of all threads of a run over time: `look` takes a sample, `between` subtracts two."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, dict[tuple[str, int, int], float]]] = []
        self._names: dict[tuple[int, int], str] = {}

    def look(self, cpu: common.TreeCpu) -> None:
        if self._rows and time.time() - self._rows[-1][0] < _LOOK_EVERY_S:
            return
        row = {}
        for pid, label in cpu.labels().items():
            for thread, seconds in common.thread_seconds(pid).items():
                row[label, pid, thread] = seconds
                if (pid, thread) not in self._names:
                    self._names[pid, thread] = common.thread_name(pid, thread)
        self._rows.append((time.time(), row))

    def between(self, start: float, end: float) -> dict[tuple[str, int, int], float]:
        """CPU seconds per second of wall time of each thread (part of the run, process, thread), about from start to end.

        Raises: RuntimeError when fewer than two samples lie there.
        """
        inside = [row for row in self._rows if start <= row[0] <= end]
        if len(inside) < 2:
            raise RuntimeError("the run was too short to look at its threads twice")
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        return {key: (seconds - first.get(key, 0.0)) / (last_at - first_at) for key, seconds in last.items()}

    def name(self, pid: int, thread: int) -> str:
        kind = "main" if pid == thread else "thread"
        return f"{kind} {self._names.get((pid, thread), '')}".strip()


def build_table(run_dir: Path, cpu: common.TreeCpu, threads: ThreadClocks, warmup: int) -> dict:
    """CPU and wall milliseconds of a round by what they were spent on; means, so that parts add up."""
    from slime.observability.tracking import read_metrics

    rounds = rounds_of(read_metrics(run_dir))
    start, end, count = rounds[warmup - 1]["end"], rounds[-1]["end"], len(rounds) - warmup
    parts = {name: seconds / count * 1e3 for name, seconds in cpu.between(start, end).items()}
    rates = threads.between(start, end)
    kept = rounds[warmup:]

    def mean(key: str) -> float:
        return statistics.mean(r.get(key, 0.0) for r in kept) * 1e3

    wall = (end - start) / count * 1e3
    passes, optimizer = sum(mean(f"perf/{name}_time") for name in _PASSES), mean("perf/optimizer_time")
    # The trainer's timers are wall time; on a busy machine its CPU time bounds them.
    spent = mean("perf/train_time") + mean("perf/update_weights_time")
    busy = min(1.0, parts.get("trainer", 0.0) / max(1e-9, spent))
    engine = _shares(rates, "engine")
    manager = _shares(rates, "rollout manager")
    decode = parts.get("engine", 0.0) * engine["busiest"]
    trainer = _shares(rates, "trainer")
    worked = parts.get("trainer", 0.0) * trainer["busiest"]
    table = {
        "engine: decode and sampling": decode,
        "trainer: forward and backward": passes * busy,
        "trainer: optimizer": optimizer * busy,
        "trainer: its thread besides (shard, advantages, metrics, weights)": worked - (passes + optimizer) * busy,
        "trainer: other threads (Ray, gloo, calls to engines)": parts.get("trainer", 0.0) - worked,
        "engine: HTTP, JSON, scheduling": parts.get("engine", 0.0) - decode,
        "router": parts.get("router", 0.0),
        "manager: event loop (HTTP, samples, rewards)": parts.get("rollout manager", 0.0) * manager["busiest"],
        "manager: actor's thread (conversion, metrics, Ray put)": parts.get("rollout manager", 0.0) * manager["second"],
        "manager: Ray's threads": parts.get("rollout manager", 0.0) * (1 - manager["busiest"] - manager["second"]),
        "driver: loop, progress, logging": parts.get("driver", 0.0),
        "Ray: raylet, store, idle workers": parts.get("ray", 0.0),
    }
    computed = sum(list(table.values())[:3])
    phases = {name: mean(f"perf/{name}_wall_time") for name in ("generate", "train", "sync")}
    overhead_wall = wall - min(decode, phases["generate"]) - passes - optimizer
    listed = sorted(rates.items(), key=lambda item: -item[1])
    return {
        "rounds": count,
        "wall_ms": round(wall, 1),
        "wall_phases_ms": {k: round(v, 1) for k, v in phases.items()}
        | {"between phases": round(max(0.0, wall - sum(phases.values())), 1)},
        "cpu_ms": round(parts["total"], 1),
        "cpu_by_part_ms": {name: round(value, 1) for name, value in table.items()},
        "overhead_cpu_share": round(1 - computed / parts["total"], 3),
        "overhead_wall_share": round(overhead_wall / wall, 3),
        "threads_ms": {
            f"{label} {pid} {threads.name(pid, thread)} {thread}": round(rate * wall, 1)
            for (label, pid, thread), rate in listed
            if rate * wall >= 0.5
        },
    }


def _shares(rates: dict[tuple[str, int, int], float], label: str) -> dict[str, float]:
    """Shares of a part's CPU time: of the busiest and the second busiest thread of each of its processes."""
    total, busy = 0.0, [0.0, 0.0]
    for pid in {p for found, p, _ in rates if found == label}:
        own = sorted((rate for (found, p, _), rate in rates.items() if found == label and p == pid), reverse=True)
        total += sum(own)
        busy = [busy[i] + (own[i] if i < len(own) else 0.0) for i in range(2)]
    first, second = (share / total if total > 0 else 0.0 for share in busy)
    return {"busiest": first, "second": second}


def print_table(shape: str, table: dict, num_threads: int) -> None:
    print(f"\none round of the {shape} shape: {table['wall_ms']} ms wall, {table['cpu_ms']} ms CPU over all processes")
    for name, value in table["cpu_by_part_ms"].items():
        print(f"  {name:<66}{value:>9.1f} ms {100 * value / table['cpu_ms']:>5.1f} %")
    print(f"  wall: {table['wall_phases_ms']}")
    print(
        f"  overhead: {100 * table['overhead_cpu_share']:.1f} % of CPU, {100 * table['overhead_wall_share']:.1f} % of wall"
    )
    print("  busiest threads, ms per round:")
    for name, value in list(table["threads_ms"].items())[:num_threads]:
        print(f"    {name:<64}{value:>8.1f}")


if __name__ == "__main__":
    main()
