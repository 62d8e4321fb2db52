"""Wall time of rounds with long-tailed answers: plain, over-sampling, and over-sampling with partial rollout.

python benchmarks/partial_rollout.py
python benchmarks/partial_rollout.py --batch 16 --over 32 --limit 2048     # larger
python benchmarks/partial_rollout.py --smoke                               # seconds

Each way is a run of `train.py --debug-rollout-only`: Ray, router, real engines, the same prompts and lengths (log-normal, see
long_tail.py), rounds of `--batch` groups. Rounds after `--warmup` count, by `perf/rollout_time`. The last line is `RESULT {json}`;
`ratio` is over-sampling against partial rollout, `ratio_none` no over-sampling against it, both by seconds per round. Note
`mean_length`: plain over-sampling trains on shorter answers than the prompts have, because the long ones never win.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common

MODEL = {"arch": "qwen3", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128}


def main() -> None:
    args = _arguments()
    if args.smoke:
        args.rounds, args.warmup, args.batch, args.over, args.limit = 2, 1, 2, 4, 64
    ways = {
        "none": [],
        "over_sampling": ["--over-sampling-batch-size", str(args.over)],
        "partial": ["--over-sampling-batch-size", str(args.over), "--partial-rollout"],
    }
    if args.max_age is not None:
        ways["partial"] += ["--partial-rollout-max-age", str(args.max_age)]
    rows = {name: measure(name, flags, args) for name, flags in ways.items()}
    seconds = {name: row["seconds_per_round"] for name, row in rows.items()}
    result = {"benchmark": "partial_rollout", **{k: v for k, v in vars(args).items() if k != "smoke"}, "ways": rows}
    result["ratio"] = round(seconds["over_sampling"] / seconds["partial"], 2)
    result["ratio_none"] = round(seconds["none"] / seconds["partial"], 2)
    common.print_result(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=14, help="rounds of each way (default 14)")
    parser.add_argument("--warmup", type=int, default=4, help="first rounds that do not count (default 4)")
    parser.add_argument("--batch", type=int, default=8, help="groups of a round (default 8)")
    parser.add_argument("--over", type=int, default=16, help="groups started with over-sampling (default 16)")
    parser.add_argument("--samples", type=int, default=2, help="samples of a group (default 2)")
    parser.add_argument("--limit", type=int, default=1024, help="longest answer in tokens (default 1024)")
    parser.add_argument("--engines", type=int, default=1, help="engines (default 1)")
    parser.add_argument("--max-age", type=int, help="--partial-rollout-max-age of the partial way")
    parser.add_argument("--smoke", action="store_true", help="a few short rounds")
    return parser.parse_args()


def measure(name: str, flags: list[str], args: argparse.Namespace) -> dict:
    """One run; medians and sums over the rounds that count."""
    folder = common.WORK / "partial_rollout"
    model = folder / "model"
    if not (model / "tokenizer.json").exists():
        from slime.utils.tiny_model import make_tiny_model

        make_tiny_model(model, max_positions=8192, **MODEL)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "number {i}:", "label": "{i}"}}\n' for i in range(4000)))
    run = folder / name
    (run / "metrics.jsonl").unlink(missing_ok=True)
    hooks = Path(__file__).with_name("long_tail.py")
    command = ["--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--debug-rollout-only"]
    command += ["--output-dir", str(folder), "--run-name", name, "--rollout-num-gpus", str(args.engines)]
    command += ["--num-rollout", str(args.rounds), "--rollout-batch-size", str(args.batch)]
    command += ["--n-samples-per-prompt", str(args.samples), "--rollout-max-response-len", str(args.limit)]
    command += ["--custom-generate-function-path", f"{hooks}:generate", "--custom-rm-path", f"{hooks}:reward"]
    cpu = common.train(command + flags, cores=None, log=folder / f"{name}.log")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "perf/rollout_time" in line][args.warmup :]
    engine = cpu.between(rounds[0]["time"] - rounds[0]["perf/rollout_time"], rounds[-1]["time"]).get("engine", 0.0)
    row = {
        "seconds_per_round": round(statistics.mean(line["perf/rollout_time"] for line in rounds), 3),
        "engine_cpu_s_per_round": round(engine / len(rounds), 3),
        "mean_length": round(statistics.mean(line["rollout/response_len/mean"] for line in rounds), 1),
        "continued_groups": sum(line.get("rollout/continued_groups", 0) for line in rounds),
        "oldest_group": max(line.get("rollout/oldest_group", 0) for line in rounds),
    }
    print(f"{name}: {row}", flush=True)
    return row


if __name__ == "__main__":
    main()
