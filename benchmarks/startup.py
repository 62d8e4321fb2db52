"""Seconds from the command to the first generated answer: `python train.py` with the flags of the quickstart.

python benchmarks/startup.py             # two starts
python benchmarks/startup.py --smoke     # one

The model is the quickstart's, untrained. The first answer is the first reply that the rollout side got, by the traces of the
dumped samples; answers have at most seven tokens, so that the first token lies milliseconds before. The last line is
`RESULT {json}`; `ratio` is 25 over the seconds, above 1 when the bar of 25 seconds is met.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common

BAR_S = 25.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="starts (default 2)")
    parser.add_argument("--cores", help='cores of the run, e.g. "0,1" (default: the first two)')
    parser.add_argument("--smoke", action="store_true", help="one start")
    args = parser.parse_args()
    folder = common.WORK / "startup"
    shutil.rmtree(folder, ignore_errors=True)
    flags = prepare(folder)
    rows = [start(folder, flags, args.cores) for _ in range(1 if args.smoke else args.repeats)]
    result = {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}
    print(f"from the command to the first answer: {result['first_answer_s']} s (bar {BAR_S:g} s)")
    common.print_result({"benchmark": "startup", **result, "ratio": round(BAR_S / result["first_answer_s"], 2)})


def prepare(folder: Path) -> list[str]:
    """Model, data and flags of the quickstart's GRPO command, for one round."""
    import yaml

    from slime.quickstart import recipe, task
    from slime.utils.tiny_model import make_tiny_model

    folder.mkdir(parents=True)
    model, config = folder / "model", folder / "eval.yaml"
    make_tiny_model(model, seed=0, **recipe.MODEL)
    train_data, held_out = task.write_data(folder, 0)
    config.write_text(yaml.safe_dump(recipe.eval_config(held_out)), encoding="utf-8")
    flags = recipe.grpo_flags(model, train_data, config, num_rollout=1, seed=0, output_dir=folder, run_name="run")
    return [*flags, "--save-debug-rollout-data", str(folder / "dump_{rollout_id}.pt")]


def start(folder: Path, flags: list[str], cores: str | None) -> dict[str, float]:
    """Run the command once; seconds until generation began, and until the first answer was there."""
    import torch

    from slime.observability.tracking import read_metrics

    shutil.rmtree(folder / "run", ignore_errors=True)
    began = time.time()
    common.train(flags, cores=cores or common.cores_of_machine(2), log=folder / "run.log")
    whole = time.time() - began
    samples = torch.load(folder / "dump_eval_0.pt", weights_only=True)["samples"]
    answered = min(
        event["ts"]
        for sample in samples
        for event in sample["trace"]["events"]
        if event["type"] == "span_end" and event["name"] == "sglang_generate"
    )
    asked = next(line["perf/startup_time"] for line in read_metrics(folder / "run") if "perf/startup_time" in line)
    return {"first_answer_s": answered - began, "asked_s": asked, "whole_run_s": whole}


if __name__ == "__main__":
    main()
