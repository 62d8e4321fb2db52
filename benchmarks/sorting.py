"""The benchmark's task, data and models: sort digits, graded by exact match.

Shapes: `bench` (8 digits, 3.2 million parameters), `quickstart` (6 digits, 0.43 million), whose start models are made once
by a short SFT through `train.py` and kept under outputs/benchmarks, and `135m` (random weights of SmolLM2-135M's shape: for
costs, nothing is learned).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from slime.quickstart import task

NUM_TRAIN, NUM_HELD_OUT = 9000, 512


@dataclass(frozen=True)
class Shape:
    """digits, model, batch and learning settings of one size."""

    name: str
    digits: int
    model: dict
    prompts: int
    samples: int
    max_new: int
    lr: float
    warmup: int
    sft_rounds: int


SHAPES = {
    "bench": Shape(
        "bench",
        digits=8,
        model={"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 768},
        prompts=32,
        samples=8,
        max_new=16,
        lr=1e-4,
        warmup=5,
        sft_rounds=60,
    ),
    "quickstart": Shape(
        "quickstart",
        digits=6,
        model={"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 384},
        prompts=64,
        samples=8,
        max_new=7,
        lr=2e-4,
        warmup=10,
        sft_rounds=50,
    ),
    "135m": Shape(
        "135m",
        digits=24,
        model={
            **{"arch": "llama", "hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 1536},
            "vocab": 49152,
        },
        prompts=4,
        samples=8,
        max_new=32,
        lr=1e-6,
        warmup=1,
        sft_rounds=0,
    ),
    "smoke": Shape(
        "smoke",
        digits=3,
        model={"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 64},
        prompts=4,
        samples=4,
        max_new=4,
        lr=1e-4,
        warmup=1,
        sft_rounds=0,
    ),
}


def prepare(shape: Shape, *, fresh: bool = False, cores: str | None = None) -> Path:
    """Make data and start model of a shape once; returns the folder with model/, train.jsonl, held_out.jsonl, eval.yaml."""
    import shutil

    import yaml

    from slime.utils.tiny_model import make_tiny_model

    folder = common.WORK / f"start-{shape.name}"
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    is_smoke = shape.name == "smoke"
    rows = (200, 20) if is_smoke else (NUM_TRAIN, NUM_HELD_OUT)
    _, held_out = task.write_data(folder, 0, shape.digits, *rows)
    start = folder / "model" if shape.sft_rounds == 0 else folder / "untrained"
    make_tiny_model(start, **{"arch": "qwen3", "tied": True, "seed": 0, "max_positions": 256, **shape.model})
    common_row = {"path": str(held_out), "input_key": "prompt", "label_key": "label"}
    common_row["max_response_len"] = shape.max_new
    sets = [
        {"name": "sampled", "n_samples_per_eval_prompt": 2, "temperature": 1.0, **common_row},
        {"name": "greedy", "n_samples_per_eval_prompt": 1, "temperature": 0.0, **common_row},
    ]
    (folder / "eval.yaml").write_text(yaml.safe_dump({"datasets": sets}), encoding="utf-8")
    if shape.sft_rounds:
        print(f"SFT warm-up of the {shape.name} model, {shape.sft_rounds} rounds", flush=True)
        common.train(_sft_flags(shape, folder), cores=cores, log=folder / "sft.log")
    (folder / "complete").touch()
    return folder


def _sft_flags(shape: Shape, folder: Path) -> list[str]:
    return [
        *("--hf-checkpoint", str(folder / "untrained"), "--prompt-data", str(folder / "train.jsonl")),
        *("--input-key prompt --label-key label --debug-train-only --n-samples-per-prompt 1 --rollout-shuffle").split(),
        *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"),
        *"--loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns".split(),
        *f"--num-rollout {shape.sft_rounds} --rollout-batch-size 128 --global-batch-size 128".split(),
        *"--use-dynamic-batch-size --max-tokens-per-gpu 8192 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.99".split(),
        *"--weight-decay 0 --clip-grad 1.0 --lr-decay-style constant --lr 2e-3 --lr-warmup-iters 20".split(),
        *"--actor-num-nodes 1 --actor-num-gpus-per-node 1 --seed 0 --rollout-seed 0".split(),
        *("--save-interval", str(shape.sft_rounds), "--save-hf", str(folder / "model")),
        *("--output-dir", str(folder), "--run-name", "sft"),
    ]


def grpo_flags(shape: Shape, folder: Path, run_name: str, *, steps: int, evaluate: bool, extra: list[str]) -> list[str]:
    """The flags of our run: what a user would type for this task."""
    flags = [
        *("--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "train.jsonl")),
        *("--input-key prompt --label-key label --rollout-shuffle").split(),
        *("--custom-rm-path", "slime.quickstart.task.exact_match"),
        *f"--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --num-rollout {steps}".split(),
        *f"--rollout-batch-size {shape.prompts} --n-samples-per-prompt {shape.samples}".split(),
        *f"--global-batch-size {shape.prompts * shape.samples} --rollout-max-response-len {shape.max_new}".split(),
        *"--rollout-temperature 1.0 --use-dynamic-batch-size --max-tokens-per-gpu 16384".split(),
        *"--calculate-per-token-loss --optimizer adam --adam-beta1 0.9 --adam-beta2 0.99 --weight-decay 0".split(),
        *f"--clip-grad 1.0 --lr-decay-style constant --lr {shape.lr} --lr-warmup-iters {shape.warmup}".split(),
        *"--actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --seed 0 --rollout-seed 0".split(),
        *"--sglang-context-length 64 --precision fp32".split(),
        *("--output-dir", str(common.WORK / "runs"), "--run-name", run_name),
        *extra,
    ]
    if evaluate:
        flags += ["--eval-config", str(folder / "eval.yaml"), "--eval-interval", str(steps)]
    return flags
