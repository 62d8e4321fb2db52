"""One curve per algorithm on the quickstart's task, for docs/algorithms.

python benchmarks/algorithm_curves.py              # all; about a minute each
python benchmarks/algorithm_curves.py grpo gspo    # some
python benchmarks/algorithm_curves.py --draw       # pictures and pages again from the recorded numbers

Every run starts from the same model after the quickstart's short SFT and sees the same prompts; only the flags in VARIANTS
differ. It runs `python train.py`, reads metrics.jsonl, writes docs/algorithms/curves/NAME.json and NAME.svg, and puts the
picture and a small table into the page between its marks. One seed on a toy: that it learns, not which is better.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common
from slime.observability.tracking import read_metrics
from slime.quickstart import recipe, task

PAGES = common.ROOT / "docs" / "algorithms"
CURVES = PAGES / "curves"
WORK = common.WORK / "curves"
ROUNDS, PROMPTS, STEPS, SEED = 40, 32, 2, 0
MARK = re.compile(r"<!-- curve: (?P<name>\w+) -->\n(?:.*?<!-- end of curve -->\n)?", re.S)

#: page -> flags beyond the quickstart's
VARIANTS = {
    "grpo": "",
    "dr_grpo": "--advantage-estimator dr_grpo",
    "rloo": "--advantage-estimator rloo",
    "gspo": "--advantage-estimator gspo --eps-clip 0.01 --eps-clip-high 0.02",
    "cispo": "--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0",
    "ppo": (
        "--advantage-estimator ppo --normalize-advantages --num-critic-only-steps 5 "
        "--megatron-config-path benchmarks/ppo_critic.yaml"
    ),
    "reinforce_plus_plus": "--advantage-estimator reinforce_plus_plus --normalize-advantages",
    "reinforce_plus_plus_baseline": "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
}


def prepare() -> Path:
    """Make model, data and the SFT start once; the curve of the SFT is recorded on the way."""
    import yaml

    from slime.utils.tiny_model import make_tiny_model

    if (WORK / "complete").exists():
        return WORK
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    make_tiny_model(WORK / "model", seed=SEED, **recipe.MODEL)
    train_data, held_out = task.write_data(WORK, SEED)
    (WORK / "eval.yaml").write_text(yaml.safe_dump(recipe.eval_config(held_out)), encoding="utf-8")
    flags = recipe.sft_flags(WORK / "model", train_data, WORK / "start", seed=SEED, output_dir=WORK, run_name="sft")
    common.train(flags, cores=None, log=WORK / "sft.log")
    record("sft", "train/loss", "loss", f"{recipe.SFT_ROUNDS} rounds of {recipe.SFT_BATCH} examples", {})
    (WORK / "complete").touch()
    return WORK


def flags_of(name: str) -> list[str]:
    """The quickstart's GRPO flags with a smaller batch in two steps, the default reduction, and the variant's own."""
    flags = recipe.grpo_flags(
        WORK / "start", WORK / "train.jsonl", WORK / "eval.yaml",
        num_rollout=ROUNDS, seed=SEED, output_dir=WORK, run_name=name,
    )  # fmt: skip
    flags = [flag for flag in flags if flag not in ("--calculate-per-token-loss", "--check-weight-update-equal")]
    batch = PROMPTS * recipe.SAMPLES_PER_PROMPT // STEPS
    return [
        *flags,
        *f"--rollout-batch-size {PROMPTS} --global-batch-size {batch} --no-resume".split(),
        *VARIANTS[name].split(),
    ]


def run(name: str) -> None:
    """Train one variant and record its reward per round and its held-out pass rates."""
    shutil.rmtree(WORK / name, ignore_errors=True)
    common.train(flags_of(name), cores=None, log=WORK / f"{name}.log")
    evals = [line for line in read_metrics(WORK / name) if line["step_key"] == "eval/step"]
    held_out = {kind: [round(evals[i][f"eval/{kind}"], 4) for i in (0, -1)] for kind in ("sampled", "greedy")}
    record(name, "rollout/raw_reward", "mean reward of the round", VARIANTS[name] or "the quickstart's flags", held_out)


def record(name: str, metric: str, label: str, settings: str, held_out: dict) -> None:
    """Write the numbers of a run."""
    values = [round(line[metric], 4) for line in read_metrics(WORK / name) if metric in line]
    CURVES.mkdir(parents=True, exist_ok=True)
    content = {"metric": metric, "label": label, "settings": settings, "held_out": held_out, "values": values}
    (CURVES / f"{name}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


# ---- drawing -------------------------------------------------------------------------------------------------------


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Centred moving average.

    >>> smooth([0.0, 3.0, 0.0], 3)
    [1.5, 1.0, 1.5]
    """
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def picture(curve: dict) -> str:
    """An SVG of the values (thin) and their moving average."""
    width, height, left, bottom, top = 640, 240, 48, 34, 14
    values = curve["values"]
    low, high = min(0.0, *values), max(values) * 1.1 or 1.0

    def points(series: list[float]) -> str:
        step = (width - left - 12) / max(1, len(series) - 1)
        scale = (height - bottom - top) / (high - low)
        return " ".join(
            f"{left + i * step:.1f},{height - bottom - (v - low) * scale:.1f}" for i, v in enumerate(series)
        )

    ticks = []
    for part in range(5):
        value = low + (high - low) * part / 4
        y = height - bottom - (height - bottom - top) * part / 4
        ticks.append(f'<line x1="{left}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        ticks.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" fill="#555">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *ticks,
            f'<polyline points="{points(values)}" fill="none" stroke="#9bc" stroke-width="1"/>',
            f'<polyline points="{points(smooth(values))}" fill="none" stroke="#147" stroke-width="2"/>',
            f'<text x="{left}" y="{height - 10}">round 0</text>',
            f'<text x="{width - 12}" y="{height - 10}" text-anchor="end">round {len(values) - 1}</text>',
            f'<text x="{(left + width) / 2:.0f}" y="{height - 10}" text-anchor="middle">{curve["label"]}</text>',
            "</svg>\n",
        ]
    )


def block(name: str, curve: dict) -> str:
    """What stands between the marks of a page."""
    values = curve["values"]
    ends = [sum(part) / len(part) for part in (values[:5], values[-5:])]
    lines = [
        f"<!-- curve: {name} -->",
        f"![{curve['label']} of {name}](curves/{name}.svg)",
        "",
        f"Settings: {_shown(curve['settings'])}.",
        "",
        "| | at first | at last |",
        "|---|---|---|",
        f"| {curve['label']}, mean of five rounds | {ends[0]:.3f} | {ends[1]:.3f} |",
    ]
    names = {"sampled": "held-out pass rate, sampled", "greedy": "held-out pass rate, greedy"}
    lines += [f"| {names[kind]} | {pair[0]:.3f} | {pair[1]:.3f} |" for kind, pair in curve["held_out"].items()]
    return "\n".join([*lines, "<!-- end of curve -->", ""])


def _shown(settings: str) -> str:
    return f"`{settings}`" if settings.startswith("--") else settings


def missing(name: str) -> str:
    """The block of a curve that nobody has measured."""
    text = f"Not measured yet: `python benchmarks/algorithm_curves.py {name}`."
    return f"<!-- curve: {name} -->\n{text}\n<!-- end of curve -->\n"


def fill(text: str) -> str:
    """Return a page with the current block behind every mark."""

    def one(match: re.Match) -> str:
        path = CURVES / f"{match['name']}.json"
        if not path.exists():
            return missing(match["name"])
        return block(match["name"], json.loads(path.read_text(encoding="utf-8")))

    return MARK.sub(one, text)


def draw() -> None:
    """Write pictures and pages from the recorded numbers."""
    for path in sorted(CURVES.glob("*.json")):
        path.with_suffix(".svg").write_text(picture(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if fill(text) != text:
            page.write_text(fill(text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *VARIANTS], help="default: all")
    parser.add_argument("--draw", action="store_true", help="no runs")
    args = parser.parse_args()
    if not args.draw:
        prepare()
        for name in args.names or VARIANTS:
            print(f"{name}: {VARIANTS[name]}", flush=True)
            run(name)
    draw()


if __name__ == "__main__":
    main()
