"""The settings of the quickstart, as the command lines that a user would type.

They are chosen to learn surely, not to be the best: SFT stops early on purpose (longer SFT alone would also solve the task), so that
RL has something to show. Standard library only: ``slime --help`` reads the defaults.
"""

from __future__ import annotations

from pathlib import Path

NUM_ROLLOUT = 120
SFT_ROUNDS = 55
SFT_BATCH = 128
ROLLOUT_BATCH, SAMPLES_PER_PROMPT = 64, 8
EVAL_SAMPLES = 2

# The tiny model: Qwen3's layout, 0.43 million parameters.
MODEL = {
    "arch": "qwen3",
    "hidden": 128,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "ffn": 384,
    "tied": True,
}

_OPTIMIZER = (
    "--optimizer adam --adam-beta1 0.9 --adam-beta2 0.99 --weight-decay 0 --clip-grad 1.0 --lr-decay-style constant"
)


def sft_flags(model: Path, data: Path, export: Path, *, seed: int, output_dir: Path, run_name: str) -> list[str]:
    """Flags of the SFT warm-up; ``export`` gets the trained model as a Hugging Face folder."""
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(data), "--input-key", "prompt", "--label-key", "label"),
        *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--debug-train-only"),
        *"--loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns".split(),
        *f"--num-rollout {SFT_ROUNDS} --rollout-batch-size {SFT_BATCH} --global-batch-size {SFT_BATCH}".split(),
        *"--n-samples-per-prompt 1 --rollout-shuffle --use-dynamic-batch-size --max-tokens-per-gpu 8192".split(),
        *f"{_OPTIMIZER} --lr 2e-3 --lr-warmup-iters 20".split(),
        *f"--actor-num-nodes 1 --actor-num-gpus-per-node 1 --seed {seed} --rollout-seed {seed}".split(),
        *("--save-interval", str(SFT_ROUNDS), "--save-hf", str(export)),
        *("--output-dir", str(output_dir), "--run-name", run_name),
    ]


def grpo_flags(
    model: Path, data: Path, eval_config: Path, *, num_rollout: int, seed: int, output_dir: Path, run_name: str
) -> list[str]:
    """Flags of the GRPO run: one trainer rank, one engine, evaluation before and after."""
    from slime.quickstart.task import MAX_NEW_TOKENS

    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(data), "--input-key", "prompt", "--label-key", "label"),
        *("--custom-rm-path", "slime.quickstart.task.exact_match", "--eval-config", str(eval_config)),
        *f"--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --num-rollout {num_rollout}".split(),
        *f"--rollout-batch-size {ROLLOUT_BATCH} --n-samples-per-prompt {SAMPLES_PER_PROMPT}".split(),
        *f"--global-batch-size {ROLLOUT_BATCH * SAMPLES_PER_PROMPT} --rollout-shuffle".split(),
        *f"--rollout-max-response-len {MAX_NEW_TOKENS} --rollout-temperature 1.0".split(),
        *"--use-dynamic-batch-size --max-tokens-per-gpu 16384 --calculate-per-token-loss".split(),
        *f"{_OPTIMIZER} --lr 2e-4 --lr-warmup-iters 10".split(),
        *f"--actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --seed {seed} --rollout-seed {seed}".split(),
        *f"--eval-interval {num_rollout} --sglang-context-length 64 --check-weight-update-equal".split(),
        *("--output-dir", str(output_dir), "--run-name", run_name),
    ]


def eval_config(held_out: Path) -> dict:
    """The held-out set twice: sampled as in training, and greedy."""
    from slime.quickstart.task import MAX_NEW_TOKENS

    common = {"path": str(held_out), "input_key": "prompt", "label_key": "label", "max_response_len": MAX_NEW_TOKENS}
    return {
        "datasets": [
            {"name": "sampled", "n_samples_per_eval_prompt": EVAL_SAMPLES, "temperature": 1.0, **common},
            {"name": "greedy", "n_samples_per_eval_prompt": 1, "temperature": 0.0, **common},
        ]
    }
