"""The closing table of the quickstart, read from the run's metrics.jsonl like any other reader would."""

from __future__ import annotations

import statistics
from pathlib import Path

from slime.observability.tracking import read_metrics


def closing_table(root: Path, *, wall_s: float, peak_bytes: int) -> str:
    """Pass rates before and after, speed, where the time went, and what to look at next."""
    lines = read_metrics(root / "grpo")
    evals = [line for line in lines if line["step_key"] == "eval/step"]
    rounds = [line for line in lines if "perf/round_time" in line]
    table = ["", f"{'held-out pass rate':<22}{'before RL':>10}{'after RL':>10}{'gain':>8}"]
    for name in ("sampled", "greedy"):
        before, after = evals[0][f"eval/{name}"], evals[-1][f"eval/{name}"]
        table.append(f"  {name:<20}{before:>10.3f}{after:>10.3f}{after - before:>+8.3f}")
    table += ["", *_speed(lines, rounds), "", *_time(rounds, wall_s)]
    table.append(f"  peak memory {peak_bytes / 2**30:.2f} GiB over all processes")
    table += ["", *_next_steps(root)]
    return "\n".join(table)


def _speed(lines: list[dict], rounds: list[dict]) -> list[str]:
    def middle(name: str) -> float:
        return statistics.median(line[name] for line in lines if line.get(name) is not None)

    return [
        f"rounds {len(rounds)}, in the middle one",
        f"  generation {middle('perf/tokens_per_gpu_per_sec'):>8.0f} response tokens/s",
        f"  training   {middle('perf/actor_train_tok_per_s'):>8.0f} prompt and response tokens/s",
    ]


def _time(rounds: list[dict], wall_s: float) -> list[str]:
    phases = {}
    for line in rounds:
        for name, value in line.items():
            if name.endswith("_wall_time"):
                phase = name.removeprefix("perf/").removesuffix("_wall_time")
                phases[phase] = phases.get(phase, 0.0) + value
    in_phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.items())
    return [f"time {wall_s:.0f} s in all; GRPO rounds: {in_phases}"]


def _next_steps(root: Path) -> list[str]:
    return [
        "Longer SFT would also solve this task: the point is the loop (prompts, engines, rewards, training, weight sync).",
        "Look next at",
        f"  {root}/grpo/metrics.jsonl and  tensorboard --logdir {root}",
        "  README.md: the same flags on your model and data; docs/architecture.md: the life of a round",
    ]
