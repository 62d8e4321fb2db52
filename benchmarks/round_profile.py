"""Where the time of a GRPO round goes, in milliseconds, from a real run of `train.py`.

python benchmarks/round_profile.py                     # the benchmark shape (32 x 8 samples, 3.2M parameters)
python benchmarks/round_profile.py --shape quickstart  # 64 x 8 samples of at most 7 tokens, 0.43M parameters
python benchmarks/round_profile.py --smoke             # a tiny shape, to see that it works

Three sources: the CPU clocks of every process and of the engine's threads; the timers in metrics.jsonl; and stack samples
of the rollout manager's event loop, taken by `sampled_rollout` below. Compute is what multiplies matrices and samples
tokens: the engine's own thread and the trainer's forward, backward and optimizer. Everything else is overhead; the last
line is `RESULT {json}` with `overhead_cpu_share` and `overhead_wall_share`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common, sorting
from benchmarks.grpo_vs_trl import SAVINGS, rounds_of

# The first file of a stack, from the innermost frame outwards, that matches decides what a sample is counted as.
_CATEGORIES = (
    ("trace", ("observability/trace",)),
    ("rewards", ("rm_hub/", "rollout/scoring", "benchmarks/sorting")),
    ("HTTP and JSON", ("aiohttp/", "http_utils", "json/", "yarl/", "multidict/")),
    ("prompts and samples", ("data_source", "data_ledger", "utils/types", "meta_info", "rollout/request")),
    ("rollout bookkeeping", ("slime/rollout/",)),
    ("event loop", ("asyncio/",)),
)
_SAMPLE_EVERY_S = 0.002


def main() -> None:
    args = _arguments()
    shape = sorting.SHAPES["smoke" if args.smoke else args.shape]
    if args.smoke:
        args.steps, args.warmup = 4, 1
    cores = args.cores or common.cores_of_machine(2)
    folder = sorting.prepare(shape, cores=cores)
    name = f"profile-{shape.name}"
    run_dir = common.WORK / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    extra = [] if args.no_savings else SAVINGS
    if not args.without_stacks:
        extra = [*extra, "--rollout-function-path", "benchmarks.round_profile.sampled_rollout"]
    flags = sorting.grpo_flags(shape, folder, name, steps=args.steps, evaluate=False, extra=extra)
    engine = EngineThreads()
    cpu = common.train(flags, cores=cores, log=common.WORK / f"{name}.log", watch=engine.look)
    table = build_table(run_dir, cpu, engine, args.warmup)
    print_table(shape.name, table)
    common.print_result({"benchmark": "round_profile", "shape": shape.name, **table})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("bench", "quickstart"), default="bench")
    parser.add_argument("--steps", type=int, default=20, help="rounds (default 20)")
    parser.add_argument("--warmup", type=int, default=3, help="first rounds left out (default 3)")
    parser.add_argument("--cores", help='cores of the run, e.g. "0,1" (default: the first two)')
    parser.add_argument("--no-savings", action="store_true", help=f"without {' '.join(SAVINGS)}")
    parser.add_argument("--without-stacks", action="store_true", help="no stack samples (they cost about a percent)")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, four rounds")
    return parser.parse_args()


class EngineThreads:
    """CPU seconds of the engine's threads over time: the busiest beside the main one computes, the rest is HTTP and JSON."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []

    def look(self, cpu: common.TreeCpu) -> None:
        for pid in cpu.pids("engine"):
            threads = common.thread_seconds(pid)
            main = threads.pop(pid, None)
            if main is not None and threads:
                compute = max(threads.values())
                self.rows.append((time.time(), compute, main + sum(threads.values()) - compute))

    def compute_share(self, start: float, end: float) -> float:
        """Share of the engine's CPU time between two moments that its computing thread took."""
        inside = [row for row in self.rows if start <= row[0] <= end]
        inside = inside if len(inside) > 1 else self.rows[-2:]
        if not inside:
            raise RuntimeError("no engine process of the run was seen")
        compute, other = inside[-1][1] - inside[0][1], inside[-1][2] - inside[0][2]
        return compute / (compute + other) if compute + other > 0 else 0.0


def build_table(run_dir: Path, cpu: common.TreeCpu, engine: EngineThreads, warmup: int) -> dict:
    """CPU and wall milliseconds of a round by what they were spent on."""
    from slime.observability.tracking import read_metrics

    rounds = rounds_of(read_metrics(run_dir))
    start, end, count = rounds[warmup - 1]["end"], rounds[-1]["end"], len(rounds) - warmup
    parts = {name: seconds / count * 1e3 for name, seconds in cpu.between(start, end).items()}

    def middle(key: str) -> float:
        return statistics.median(r[key] for r in rounds[warmup:]) * 1e3

    wall = (
        statistics.median(b["end"] - a["end"] for a, b in zip(rounds[warmup - 1 :], rounds[warmup:], strict=False))
        * 1e3
    )
    share = engine.compute_share(start, end)
    compute_engine = parts.get("engine", 0.0) * share
    passes, optimizer = middle("perf/forward_backward_time"), middle("perf/optimizer_time")
    # The trainer's timers are wall time; on a busy machine its CPU time bounds them.
    busy = min(
        1.0, parts.get("trainer", 0.0) / max(1e-9, middle("perf/train_time") + middle("perf/update_weights_time"))
    )
    table = {
        "engine: decode and sampling": compute_engine,
        "trainer: forward and backward": passes * busy,
        "trainer: optimizer": optimizer * busy,
        "trainer: rest (shard, advantages, sync, Ray)": parts.get("trainer", 0.0) - (passes + optimizer) * busy,
        "engine: HTTP and JSON": parts.get("engine", 0.0) - compute_engine,
        "router": parts.get("router", 0.0),
        **_manager_rows(run_dir, parts.get("rollout manager", 0.0), middle("perf/convert_time")),
        "driver: loop, progress, logging": parts.get("driver", 0.0),
        "Ray: raylet, store, idle workers": parts.get("ray", 0.0),
    }
    computed = sum(list(table.values())[:3])
    phases = {name: middle(f"perf/{name}_wall_time") for name in ("generate", "train", "sync")}
    idle = max(0.0, wall - sum(phases.values()))
    overhead_wall = wall - min(compute_engine, phases["generate"]) - passes - optimizer
    return {
        "rounds": count,
        "wall_ms": round(wall, 1),
        "wall_phases_ms": {**{k: round(v, 1) for k, v in phases.items()}, "between phases": round(idle, 1)},
        "cpu_ms": round(parts["total"], 1),
        "cpu_by_part_ms": {name: round(value, 1) for name, value in table.items()},
        "overhead_cpu_share": round(1 - computed / parts["total"], 3),
        "overhead_wall_share": round(overhead_wall / wall, 3),
    }


def _manager_rows(run_dir: Path, cpu_ms: float, convert_ms: float) -> dict[str, float]:
    """The manager's CPU time, by where its stacks were; conversion has its own timer."""
    file = run_dir / "stacks.json"
    counts = json.loads(file.read_text()) if file.exists() else {}
    total = sum(counts.values()) or 1
    left = max(0.0, cpu_ms - convert_ms)
    rows = {f"manager: {name}": left * count / total for name, count in sorted(counts.items(), key=lambda x: -x[1])}
    rows = rows or {"manager: generation": left}
    return rows | {"manager: conversion and Ray put": min(convert_ms, cpu_ms)}


def print_table(shape: str, table: dict) -> None:
    print(f"\none round of the {shape} shape: {table['wall_ms']} ms wall, {table['cpu_ms']} ms CPU over all processes")
    for name, value in table["cpu_by_part_ms"].items():
        print(f"  {name:<48}{value:>9.1f} ms {100 * value / table['cpu_ms']:>5.1f} %")
    print(f"  wall: {table['wall_phases_ms']}")
    print(
        f"  overhead: {100 * table['overhead_cpu_share']:.1f} % of CPU, {100 * table['overhead_wall_share']:.1f} % of wall"
    )


# ---- inside the rollout manager ------------------------------------------------------------------------------------


def sampled_rollout(args, rollout_id, data_source, evaluation=False):
    """The default rollout function with a thread that looks at the event loop's stack; counts go to stacks.json."""
    from slime.rollout.sglang_rollout import generate_rollout
    from slime.utils.async_utils import get_background_loop

    sampler = _StackSampler(get_background_loop())
    sampler.start()
    try:
        return generate_rollout(args, rollout_id, data_source, evaluation)
    finally:
        sampler.stop_into(Path(args.run_dir) / "stacks.json")


class _StackSampler(threading.Thread):
    def __init__(self, loop):
        super().__init__(daemon=True)
        self._counts: dict[str, int] = {}
        self._ended = threading.Event()
        self._ident: int | None = None
        loop.call_soon_threadsafe(self._note_ident)

    def _note_ident(self) -> None:
        self._ident = threading.get_ident()

    def run(self) -> None:
        while not self._ended.wait(_SAMPLE_EVERY_S):
            frame = sys._current_frames().get(self._ident)
            name = _category(frame) if frame is not None else None
            if name is not None:
                self._counts[name] = self._counts.get(name, 0) + 1

    def stop_into(self, file: Path) -> None:
        self._ended.set()
        self.join(1.0)
        earlier = json.loads(file.read_text()) if file.exists() else {}
        for name, count in self._counts.items():
            earlier[name] = earlier.get(name, 0) + count
        partial = file.with_suffix(".tmp")
        partial.write_text(json.dumps(earlier))
        os.replace(partial, file)


def _category(frame) -> str | None:
    """What the innermost telling frame is about; None while the loop waits for events."""
    if frame.f_code.co_filename.endswith("selectors.py"):
        return None
    while frame is not None:
        for name, parts in _CATEGORIES:
            if any(part in frame.f_code.co_filename for part in parts):
                return name
        frame = frame.f_back
    return None  # run_forever alone: the selector waits


if __name__ == "__main__":
    main()
