"""transformers `generate` on one static batch; started by engine.py. Prints `RESULT {json}`.

usage: generate_worker.py FOLDER DTYPE REQUESTS PROMPT NEW REPEATS
"""

from __future__ import annotations

import json
import statistics
import sys
import time

BUDGET_S = 30.0  # no further repetition is begun after this long


def main() -> None:
    folder, dtype = sys.argv[1:3]
    requests, prompt, new, repeats = map(int, sys.argv[3:7])
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
    ids = torch.randint(10, 255, (requests, prompt))
    result = {"transformers": transformers.__version__}
    for name, with_logprobs in (("with_logprobs", True), ("plain", False)):
        measure(model, ids, 2, with_logprobs)
        rows, begun = [], time.perf_counter()
        while len(rows) < repeats and (not rows or time.perf_counter() - begun < BUDGET_S):
            rows.append(measure(model, ids, new, with_logprobs))
        result[name] = {
            "tokens_per_cpu_s": round(statistics.median(requests * new / cpu for cpu, _ in rows)),
            "tokens_per_s": round(statistics.median(requests * new / wall for _, wall in rows)),
        }
    print("RESULT " + json.dumps(result))


def measure(model, ids, new: int, with_logprobs: bool) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one batch."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1,
        pad_token_id=0, return_dict_in_generate=True, output_logits=with_logprobs,
    )  # fmt: skip
    cpu, wall = time.process_time(), time.perf_counter()
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        if with_logprobs:
            first = ids.shape[1]
            columns = [output.sequences[:, first + i : first + i + 1] for i in range(new)]
            log_probs = [x.float().log_softmax(-1).gather(1, t) for x, t in zip(output.logits, columns, strict=True)]
            assert len(log_probs) == new
    assert output.sequences.shape[1] == ids.shape[1] + new
    return time.process_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    main()
