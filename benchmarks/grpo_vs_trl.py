"""Our loop against TRL's GRPOTrainer: same model, task, batch, sampling and cores, in one run.

python benchmarks/grpo_vs_trl.py            # about six minutes; makes .venv-trl the first time
python benchmarks/grpo_vs_trl.py --smoke    # a tiny shape through our loop only

Ours is `python train.py` as a user runs it (the flags are printed); TRL runs in its own virtual environment. Both are
confined to the same cores, one thread per process. Medians over steps, the first ones left out. The last line is
`RESULT {json}`; `ratio` is TRL's wall seconds per step over ours.
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

TRL_PACKAGES = ["torch==2.13.0", "trl==1.16.0", "datasets", "transformers"]
SAVINGS = ["--share-prompts", "--skip-zero-advantage"]


def main() -> None:
    args = _arguments()
    shape = sorting.SHAPES["smoke" if args.smoke else "bench"]
    if args.smoke:
        args.steps, args.warmup, args.without_trl, args.single_core = 2, 1, True, False
    both = args.cores or common.cores_of_machine(2)
    folder = sorting.prepare(shape, fresh=args.fresh, cores=both)
    settings = {"two_cores": both} | ({"one_core": both.split(",")[0]} if args.single_core else {})
    result: dict = {"benchmark": "grpo_vs_trl", "steps": args.steps, "warmup": args.warmup}
    for name, cores in settings.items():
        ours = run_ours(shape, folder, args, cores, name)
        theirs = None if args.without_trl else run_trl(shape, folder, args, cores)
        result[name] = {"cores": cores, "slime": ours, "trl": theirs}
        if theirs:
            for what in ("wall", "cpu"):
                result[name][f"ratio_{what}"] = round(theirs[f"{what}_s_per_step"] / ours[f"{what}_s_per_step"], 2)
        report(name, result[name])
    result["ratio"] = result["two_cores"].get("ratio_wall")
    common.print_result(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each side (default 20)")
    parser.add_argument("--warmup", type=int, default=3, help="first steps left out of medians (default 3)")
    parser.add_argument("--cores", help='cores of the main comparison, e.g. "0,1" (default: the first two)')
    parser.add_argument("--single-core", action="store_true", help="a second comparison with everything on one core")
    parser.add_argument("--no-savings", action="store_true", help=f"our loop without {' '.join(SAVINGS)}")
    parser.add_argument("--trl-threads", type=int, default=1, help="threads of TRL's one process (default 1)")
    parser.add_argument("--without-trl", action="store_true", help="our side only")
    parser.add_argument("--fresh", action="store_true", help="make data and start model anew")
    parser.add_argument("--smoke", action="store_true", help="tiny shape, two steps, our side only")
    return parser.parse_args()


def run_ours(shape, folder: Path, args, cores: str, setting: str) -> dict:
    """Run our loop and read its metrics.jsonl."""
    from slime.observability.tracking import read_metrics

    name = f"grpo-{shape.name}-{setting}"
    run_dir = common.WORK / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    extra = [] if args.no_savings else SAVINGS
    flags = sorting.grpo_flags(shape, folder, name, steps=args.steps, evaluate=True, extra=extra)
    print("\n  python train.py " + " ".join(flags) + "\n", flush=True)
    started = time.time()
    cpu = common.train(flags, cores=cores, log=common.WORK / f"{name}.log")
    rounds = rounds_of(read_metrics(run_dir))
    # A step lasts from the end of a round to the end of the next; evaluations lie in the first and the last round.
    kept = rounds[args.warmup : -1] or rounds[-1:]
    parts = cpu.between(rounds[args.warmup - 1]["end"], rounds[-2]["end"]) if len(rounds) > args.warmup + 1 else {}
    steps = len(kept)
    ends = [r["end"] for r in rounds]
    spans = [
        after - before for before, after in zip(ends[args.warmup - 1 :], ends[args.warmup : -1], strict=False)
    ] or [ends[-1] - ends[-2]]
    evals = [line for line in read_metrics(run_dir) if line["step_key"] == "eval/step"]

    def middle(key: str) -> float:
        return statistics.median(r[key] for r in kept)

    wall = statistics.median(spans)
    generated = middle("rollout/response_lengths") * shape.prompts * shape.samples
    trained = middle("rollout/total_lengths") * shape.prompts * shape.samples
    return {
        "wall_s_per_step": round(wall, 4),
        "cpu_s_per_step": round(parts.get("total", 0.0) / steps, 4) or None,
        "cpu_s_by_process": {k: round(v / steps, 4) for k, v in sorted(parts.items()) if k != "total"},
        "generate_s": round(middle("perf/generate_wall_time"), 4),
        "train_s": round(middle("perf/train_wall_time"), 4),
        "sync_s": round(middle("perf/sync_wall_time"), 4),
        "generated_tokens_per_s": round(generated / wall),
        "trained_tokens_per_s": round(trained / wall),
        "read_by_trainer_tokens": round(middle("perf/actor_train_read_tokens")),
        "generated_tokens_per_step": round(generated),
        "reward_first_last": [round(_mean(rounds[:5]), 3), round(_mean(rounds[-5:]), 3)],
        "held_out_greedy": [round(evals[0]["eval/greedy"], 3), round(evals[-1]["eval/greedy"], 3)],
        "held_out_sampled": [round(evals[0]["eval/sampled"], 3), round(evals[-1]["eval/sampled"], 3)],
        "whole_run_s": round(time.time() - started, 1),
    }


def rounds_of(lines: list[dict]) -> list[dict]:
    """One dict per round: all its metrics, and "end", the moment its last line was written."""
    rounds: dict[int, dict] = {}
    for line in lines:
        if line["step_key"] == "rollout/step":
            row = rounds.setdefault(line["step"], {})
            row.update(line, end=line["time"])
    return [rounds[step] for step in sorted(rounds)]


def _mean(rounds: list[dict]) -> float:
    return statistics.mean(r["rollout/raw_reward"] for r in rounds)


def run_trl(shape, folder: Path, args, cores: str) -> dict:
    """Run TRL's trainer in its own environment."""
    python = common.make_venv(common.ROOT / ".venv-trl", TRL_PACKAGES)
    worker = [str(python), str(Path(__file__).with_name("trl_worker.py")), str(folder)]
    worker += ["--steps", str(args.steps), "--warmup", str(args.warmup), "--threads", str(args.trl_threads)]
    worker += ["--prompts", str(shape.prompts), "--samples", str(shape.samples), "--max-new", str(shape.max_new)]
    worker += ["--lr", str(shape.lr), "--lr-warmup", str(shape.warmup)]
    print("  " + " ".join(worker), flush=True)
    return common.run_worker(common.pinned(worker, cores), deadline_s=300 + 30 * args.steps)


def report(setting: str, both: dict) -> None:
    """Print one comparison as a table."""
    ours, theirs = both["slime"], both["trl"] or {}
    print(f"\n{setting} (cores {both['cores']}){'slime':>16}{'trl':>14}")
    for key in ours:
        if not isinstance(ours[key], dict):
            print(f"  {key:<28}{ours[key]!s:>16}{theirs.get(key, '-')!s:>16}")
    print(f"  cpu_s_by_process {ours['cpu_s_by_process']}")
    if theirs:
        print(f"  TRL / slime: wall {both['ratio_wall']}, CPU {both['ratio_cpu']}")


if __name__ == "__main__":
    main()
