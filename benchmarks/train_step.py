"""A whole training step of our trainer against the Hugging Face model on the same batch: tokens per second, fixed cost.

python benchmarks/train_step.py           # about two minutes
python benchmarks/train_step.py --smoke   # a tiny shape, seconds

Both sides run in one process on one thread, in turns: from lists of token ids to updated weights (batch building, forward,
log-probs, GRPO loss, backward, gradient clipping, Adam). Ours is `MegatronActor.train`, the call that a run makes, with all its
metrics and advantages; the other side is transformers with padding, the same loss written down in torch, and torch's fused AdamW.
Losses and gradient norms of both are compared before anything is timed. The best of
the repetitions counts, in CPU time of the process: other work on the machine only adds.

    equal       sequences of one length: no padding on either side
    long_tail   lengths as answers have them: most short, a few long; the other side pads to the longest
    fixed cost  a step so small that only overhead counts: milliseconds of ours minus milliseconds of the other side

The last line is `RESULT {json}`; `ratio` is tokens per second of ours over the other side's on long-tailed lengths.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common

MODEL = {
    "arch": "qwen3",
    "hidden": 256,
    "layers": 4,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "ffn": 768,
    "vocab": 4096,
}
SMALL = {
    "arch": "qwen3",
    "hidden": 128,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "ffn": 384,
    "vocab": 512,
}
SMOKE = {"arch": "qwen3", "hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 64, "vocab": 260}
BARS = {"long_tail": 1.5, "equal": 1.0, "fixed_ms": 8.0}
PROMPT_SHARE = 0.25
CLIP_GRAD = 1.0


def long_tailed_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Log-normal lengths (median a fifth of the longest, which occurs), sorted by nothing.

    >>> max(long_tailed_lengths(32, 512)), min(long_tailed_lengths(32, 512)) >= 8
    (512, True)
    """
    generator = random.Random(seed)
    lengths = [min(longest, max(8, round(longest / 5 * generator.lognormvariate(0, 0.7)))) for _ in range(count - 1)]
    return [*lengths, longest]


def make_shard(lengths: list[int], vocab: int, seed: int = 0) -> dict:
    """One step of one rank in one micro-batch, as the Data Buffer sends it: advantages +1 and -1 in turns."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    responses = [n - max(1, round(n * PROMPT_SHARE)) for n in lengths]
    masks = [torch.ones(n, dtype=torch.int32) for n in responses]
    return {
        "tokens": [torch.randint(0, vocab, (n,), generator=generator) for n in lengths],
        "response_lengths": responses,
        "rewards": [1.0 if i % 2 else -1.0 for i in range(count)],
        "raw_reward": [float(i % 2) for i in range(count)],
        "truncated": [0] * count,
        "sample_indices": list(range(count)),
        "rollout_ids": list(range(count)),
        "loss_masks": masks,
        "rollout_mask_sums": torch.tensor([float(n) for n in responses]),
        "total_lengths": list(lengths),
        "partition": list(range(count)),
        "global_batch_sizes": [count],
        "num_microbatches": [1],
        "micro_batch_indices": [list(range(count))],
    }


class Ours:
    """The trainer of a run, one rank."""

    def __init__(self, folder: Path, prompts: Path, batch: int, precision: str):
        from slime.backends.megatron_utils.actor import MegatronActor
        from slime.config import parse_args
        from slime.utils.http_utils import find_free_port

        words = f"--hf-checkpoint {folder} --prompt-data {prompts} --rm-type math --precision {precision}"
        words += f" --num-rollout 100000 --rollout-batch-size {batch // 2} --n-samples-per-prompt 2 --global-batch-size {batch}"
        words += " --use-dynamic-batch-size --max-tokens-per-gpu 1000000 --optimizer adam --lr 1e-6 --adam-beta2 0.999"
        words += f" --weight-decay 0 --clip-grad {CLIP_GRAD} --lr-decay-style constant --actor-num-gpus-per-node 1"
        words += f" --output-dir {folder.parent} --run-name train-step"
        self.actor = MegatronActor(parse_args(words.split()), 0, 1, "127.0.0.1", find_free_port())
        self.actor.init()
        self.rollout_id = 0

    def step(self, shard: dict) -> tuple[float, float]:
        """Train once; returns (loss, gradient norm)."""
        metrics = self.actor.train(self.rollout_id, shard)["steps"][self.rollout_id]
        self.rollout_id += 1
        return metrics["train/loss"], metrics["train/grad_norm"]


class HuggingFace:
    """transformers with right padding and the same objective."""

    def __init__(self, folder: Path, precision: str):
        import torch
        from transformers import AutoModelForCausalLM

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def step(self, shard: dict) -> tuple[float, float]:
        """Train once; returns (loss, gradient norm)."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        tokens = pad_sequence(shard["tokens"], batch_first=True)
        lengths = torch.tensor(shard["total_lengths"])
        places = torch.arange(tokens.shape[1])[None]
        attention = None if bool((lengths == lengths[0]).all()) else (places < lengths[:, None]).long()
        prompts = lengths - torch.tensor(shard["response_lengths"])
        mask = ((places >= prompts[:, None]) & (places < lengths[:, None]))[:, 1:].float()
        self.optimizer.zero_grad()
        logits = self.model(tokens, attention_mask=attention, use_cache=False).logits[:, :-1].float()
        log_probs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        ratio = torch.exp(log_probs - log_probs.detach())
        values = -ratio * torch.tensor(shard["rewards"])[:, None] * mask
        loss = (values.sum(1) / mask.sum(1).clamp(min=1)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        return float(loss.detach()), float(norm)


def check_equal(name: str, ours: tuple[float, float], theirs: tuple[float, float], precision: str) -> None:
    """The two sides must do the same work, or their times say nothing."""
    tolerance = 1e-3 if precision == "fp32" else 0.1
    for what, a, b in zip(("loss", "gradient norm"), ours, theirs, strict=True):
        if abs(a - b) > tolerance * max(1.0, abs(b)):
            raise RuntimeError(f"{name}: {what} differs, ours {a}, transformers {b}")


def measure(sides: dict, shard: dict, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step per side, {"ours": {"cpu_ms", "median_cpu_ms", "wall_ms"}, ...}; the sides take turns.

    The best of the repetitions counts, since other work on the machine only adds; the median stands beside it.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for side in sides.values():
        side.step(shard)  # warm
    for _ in range(repeats):
        for name, side in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            side.step(shard)
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        name: {
            "cpu_ms": min(cpu for cpu, _ in rows) * 1e3,
            "median_cpu_ms": statistics.median(cpu for cpu, _ in rows) * 1e3,
            "wall_ms": min(wall for _, wall in rows) * 1e3,
        }
        for name, rows in times.items()
    }


def run_model(name: str, shape: dict, shards: dict[str, list[int]], repeats: dict[str, int], precision: str) -> dict:
    """Measure every batch on one model."""
    from slime.utils.tiny_model import make_tiny_model

    folder = make_tiny_model(common.WORK / f"train-step-{name}" / "model", init_std=0.1, **shape)
    prompts = folder.parent / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "label": "b"}\n')
    results = {}
    sides = {
        "ours": Ours(folder, prompts, max(map(len, shards.values())), precision),
        "hf": HuggingFace(folder, precision),
    }
    for case, lengths in shards.items():
        shard = make_shard(lengths, shape["vocab"])
        check_equal(case, sides["ours"].step(shard), sides["hf"].step(shard), precision)
        times = measure(sides, shard, repeats[case])
        tokens = sum(lengths)
        results[case] = {
            "tokens": tokens,
            "padded_tokens": max(lengths) * len(lengths),
            **{side: {k: round(v, 2) for k, v in row.items()} for side, row in times.items()},
            "ours_tokens_per_s": round(tokens / times["ours"]["cpu_ms"] * 1e3),
            "hf_tokens_per_s": round(tokens / times["hf"]["cpu_ms"] * 1e3),
            "ratio": round(times["hf"]["cpu_ms"] / times["ours"]["cpu_ms"], 3),
            "ratio_wall": round(times["hf"]["wall_ms"] / times["ours"]["wall_ms"], 3),
            "difference_ms": round(times["ours"]["cpu_ms"] - times["hf"]["cpu_ms"], 2),
        }
        print(f"{name} {case}: {results[case]}", flush=True)
    return results


def main() -> None:
    args = _arguments()
    import torch

    from slime.backends.megatron_utils import cpu_compat

    torch.set_num_threads(1)
    cpu_compat.install()
    if args.smoke:
        batches = {"equal": [16] * 4, "long_tail": long_tailed_lengths(4, 32), "fixed": [24] * 4}
        rows = run_model("smoke", SMOKE, batches, dict.fromkeys(batches, 2), args.precision)
    else:
        batches = {"equal": [256] * 16, "long_tail": long_tailed_lengths(32, 512)}
        rows = run_model("main", MODEL, batches, dict.fromkeys(batches, args.repeats), args.precision)
        rows |= run_model("small", SMALL, {"fixed": [24] * 4}, {"fixed": 8 * args.repeats}, args.precision)
    fixed = rows["fixed"]["difference_ms"]
    common.print_result(
        {
            "benchmark": "train_step",
            "precision": args.precision,
            "ratio": rows["long_tail"]["ratio"],
            "ratio_equal": rows["equal"]["ratio"],
            "fixed_ms": fixed,
            "bars": BARS,
            "cases": rows,
        }
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--repeats", type=int, default=9, help="of each step; the best counts (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does it run?")
    return parser.parse_args()


if __name__ == "__main__":
    main()
