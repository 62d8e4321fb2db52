"""TRL's GRPOTrainer on the benchmark's task; started by grpo_vs_trl.py in an environment of its own.

Needs torch, trl, datasets and transformers, nothing of ours. Prints `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    for name, kind in (("steps", int), ("warmup", int), ("threads", int), ("prompts", int), ("samples", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name, kind in (("max-new", int), ("lr", float), ("lr-warmup", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    started = time.time()
    tokenizer = AutoTokenizer.from_pretrained(args.folder + "/model", padding_side="left")
    tokenizer.pad_token, tokenizer.eos_token = "<|pad|>", "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(args.folder + "/model", dtype=torch.float32)
    held_out = [json.loads(line) for line in open(args.folder + "/held_out.jsonl", encoding="utf-8")]
    before = [pass_rate(model, tokenizer, held_out, args.max_new, *how) for how in ((False, 1), (True, 2))]
    trainer, times, counters = make_trainer(args, model, tokenizer)
    trainer.train()
    after = [pass_rate(trainer.model, tokenizer, held_out, args.max_new, *how) for how in ((False, 1), (True, 2))]
    print("RESULT " + json.dumps(summary(args, trainer, times, counters, before, after, time.time() - started)))


def make_trainer(args, model, tokenizer):
    """The trainer with clocks around its steps and its generation."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    batch = args.prompts * args.samples
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, fp16=False, per_device_train_batch_size=batch,
        gradient_accumulation_steps=1, steps_per_generation=1, num_generations=args.samples,
        max_completion_length=args.max_new, max_steps=args.steps, learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup", warmup_steps=args.lr_warmup, beta=0.0, temperature=1.0, epsilon=0.2,
        epsilon_high=0.28, scale_rewards="group", loss_type="dapo", logging_steps=1, save_strategy="no", report_to=[],
        gradient_checkpointing=False, dataloader_num_workers=0, disable_tqdm=True, seed=0, max_grad_norm=1.0,
        adam_beta2=0.99, weight_decay=0.0,
    )  # fmt: skip
    data = load_dataset("json", data_files={"train": args.folder + "/train.jsonl"})["train"]
    times, counters = [(time.perf_counter(), time.process_time())], {"generate_s": [], "tokens": []}

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            times[:] = [(time.perf_counter(), time.process_time())]

        def on_step_end(self, *_, **__):
            times.append((time.perf_counter(), time.process_time()))
            print(f"step {len(times) - 1} {times[-1][0] - times[-2][0]:.3f} s", flush=True)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    inner = trainer._generate_single_turn

    def timed(*a, **k):
        begun = time.perf_counter()
        output = inner(*a, **k)
        counters["generate_s"].append(time.perf_counter() - begun)
        counters["tokens"].append(sum(len(ids) for ids in output[0]))
        return output

    trainer._generate_single_turn = timed
    return trainer, times, counters


def exact(completions, label, **_) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, label, strict=False)]


def summary(args, trainer, times, counters, before, after, whole_s) -> dict:
    import resource

    import torch
    import transformers
    import trl

    steps = list(zip(times, times[1:], strict=False))[args.warmup :]
    wall = statistics.median(b[0] - a[0] for a, b in steps)
    cpu = statistics.median(b[1] - a[1] for a, b in steps)
    tokens = statistics.median(counters["tokens"][args.warmup :])
    generate = statistics.median(counters["generate_s"][args.warmup :])
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    prompt = 6 + len(json.loads(open(args.folder + "/held_out.jsonl", encoding="utf-8").readline())["label"])
    trained = tokens + prompt * args.prompts * args.samples
    return {
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "threads": args.threads,
        "wall_s_per_step": round(wall, 4),
        "cpu_s_per_step": round(cpu, 4),
        "generate_s": round(generate, 4),
        "train_s": round(wall - generate, 4),
        "generated_tokens_per_s": round(tokens / wall),
        "trained_tokens_per_s": round(trained / wall),
        "generated_tokens_per_step": round(tokens),
        "reward_first_last": [round(statistics.mean(part), 3) for part in (rewards[:5], rewards[-5:])],
        "held_out_greedy": [round(before[0], 3), round(after[0], 3)],
        "held_out_sampled": [round(before[1], 3), round(after[1], 3)],
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "whole_run_s": round(whole_s, 1),
    }


def pass_rate(model, tokenizer, rows, max_new: int, sample: bool, times: int) -> float:
    import torch

    rows = [row for row in rows for _ in range(times)]
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    model.eval()
    with torch.no_grad():
        output = model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=max_new,
            do_sample=sample, top_k=0, top_p=1.0, temperature=1.0 if sample else None, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    model.train()
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == row["label"] for text, row in zip(texts, rows, strict=False)) / len(rows)


if __name__ == "__main__":
    main()
