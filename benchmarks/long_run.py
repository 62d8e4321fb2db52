"""Does a long run stay flat? Runs many tiny rounds through ``train.py`` and watches memory, open files and threads of every process.

    python benchmarks/long_run.py --num-rollout 500

After a warm-up the medians of the first and the last quarter are compared, process by process and in all. The closing line is
``RESULT {json}``; its ``ratio`` is the largest growth found (1.0 is flat; above 1.05 the exit status is 1). Memory is proportional
set size where the system tells it, which counts the object store's pages too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from slime.utils.platform import FAMILY_VARIABLE, family

REPO = Path(__file__).resolve().parents[1]
MAX_GROWTH = 1.05
WARM_UP_SHARE = 0.2
SAMPLE_EVERY_S = 1.0
RESOURCES = ("memory_bytes", "open_files", "threads")


def train_flags(root: Path, num_rollout: int) -> list[str]:
    """Tiny rounds of a tiny model: 4 prompts x 4 samples of 4 tokens."""
    from slime.utils.tiny_model import make_tiny_model

    make_tiny_model(
        root / "model", arch="qwen3", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, seed=0
    )
    rows = [{"prompt": f"copy {index:04d}=", "label": f"{index:04d}"} for index in range(64)]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [
        *("--hf-checkpoint", str(root / "model"), "--prompt-data", str(root / "data.jsonl")),
        *("--custom-rm-path", "slime.quickstart.task.exact_match", "--output-dir", str(root), "--run-name", "run"),
        *f"--num-rollout {num_rollout} --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 4".split(),
        *"--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --sglang-context-length 64".split(),
        *"--use-dynamic-batch-size --max-tokens-per-gpu 4096 --lr 1e-5".split(),
    ]


def rounds_done(root: Path) -> int:
    path = root / "run" / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("perf/round_time") if path.exists() else 0


def name_of(process: psutil.Process) -> str:
    """A name that stays the same while the process lives: Ray writes the running method into the title."""
    words = process.cmdline()
    title = words[0] if words else process.name()
    if title.startswith("ray::"):
        return title.split(".")[0]
    modules = [word for previous, word in zip(words, words[1:], strict=False) if previous == "-m"]
    return modules[-1] if modules else Path(words[-1] if "python" in title and len(words) == 2 else title).name


def sample(mark: str) -> dict[str, dict[str, float]]:
    """Resources by process name, summed over processes of one name."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(RESOURCES, 0.0))
    for process in family(mark):
        try:
            memory = process.memory_full_info()
            entry = found[name_of(process)]
            entry["memory_bytes"] += getattr(memory, "pss", 0) or memory.rss
            entry["open_files"] += process.num_fds()
            entry["threads"] += process.num_threads()
        except psutil.Error:
            continue  # it ended while we looked
    return dict(found)


def watch(process: subprocess.Popen, mark: str, root: Path, deadline_s: float) -> list[tuple[int, dict]]:
    """[(rounds done, sample)] until the run ends."""
    samples, give_up_at = [], time.monotonic() + deadline_s
    while process.poll() is None:
        if time.monotonic() > give_up_at:
            process.terminate()
            raise RuntimeError(
                f"the run did {rounds_done(root)} rounds in {deadline_s:.0f} s and was stopped (--deadline)"
            )
        samples.append((rounds_done(root), sample(mark)))
        time.sleep(SAMPLE_EVERY_S)
    return samples


def growth(samples: list[tuple[int, dict]], num_rollout: int) -> dict[str, dict[str, float]]:
    """Last quarter over first quarter, both after the warm-up, by process name and resource."""
    settled = [resources for done, resources in samples if WARM_UP_SHARE * num_rollout <= done < num_rollout]
    if len(settled) < 8:
        raise RuntimeError(f"only {len(settled)} samples after the warm-up: raise --num-rollout")
    quarter = len(settled) // 4
    names = set.intersection(*(set(resources) for resources in settled))
    ratios: dict[str, dict[str, float]] = {}
    for name in sorted(names):
        ratios[name] = {}
        for resource in RESOURCES:
            first = statistics.median(part[name][resource] for part in settled[:quarter])
            last = statistics.median(part[name][resource] for part in settled[-quarter:])
            ratios[name][resource] = last / first if first else 1.0
    ratios["all processes"] = {
        resource: statistics.median(sum(entry[resource] for entry in part.values()) for part in settled[-quarter:])
        / statistics.median(sum(entry[resource] for entry in part.values()) for part in settled[:quarter])
        for resource in RESOURCES
    }
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--num-rollout", type=int, default=500, help="rounds (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds after which the run is stopped")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="long-run-") as folder:
        root = Path(folder)
        flags = train_flags(root, arguments.num_rollout)
        with open(root / "output.log", "w", encoding="utf-8") as log:
            command, env = [sys.executable, str(REPO / "train.py"), *flags], os.environ | {FAMILY_VARIABLE: root.name}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
            started = time.monotonic()
            samples = watch(process, root.name, root, arguments.deadline)
        if process.returncode != 0:
            print((root / "output.log").read_text(encoding="utf-8")[-3000:], file=sys.stderr)
            return 1
        wall_s = time.monotonic() - started
    ratios = growth(samples, arguments.num_rollout)
    print(f"{'process':<34}" + "".join(f"{resource:>14}" for resource in RESOURCES))
    for name, entry in ratios.items():
        print(f"{name:<34}" + "".join(f"{entry[resource]:>14.3f}" for resource in RESOURCES))
    worst = max(ratios["all processes"].values())
    print("RESULT " + json.dumps({"ratio": worst, "rounds": arguments.num_rollout, "wall_s": wall_s, "growth": ratios}))
    return int(worst > MAX_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
