"""Starting on a large prompt file with `--streaming-data`: seconds and memory until the first prompts are there.

python benchmarks/streaming_data.py                  # 5 million rows of JSONL, written once under outputs/benchmarks
python benchmarks/streaming_data.py --rows 100000 --kind parquet
python benchmarks/streaming_data.py --smoke          # 20,000 rows

A process of its own opens the file as a run does, hands out 32 prompts, saves its state, and a second one goes on from a state in
the middle of the file. The last line is `RESULT {json}`; `start_s` and `peak_mib` are what counts (bars: 5 s, 1024 MiB).
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import common

BATCH = 32


def main() -> None:
    args = _arguments()
    if args.worker:
        common.print_result(work(args.worker, args.rows, args.resume))
        return
    path = prompt_file(args.rows, args.kind)
    fresh, resumed = (measure(path, args, resume) for resume in (False, True))
    result = {"benchmark": "streaming_data", "rows": args.rows, "kind": args.kind, **fresh}
    result |= {"resume_s": resumed["start_s"], "resume_peak_mib": resumed["peak_mib"]}
    common.print_result(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--smoke", dest="rows", action="store_const", const=20_000, help="a small file")
    parser.add_argument("--kind", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def prompt_file(rows: int, kind: str) -> Path:
    """A file of this many rows, written once."""
    path = common.WORK / f"prompts-{rows}.{kind}"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    if kind == "jsonl":
        filler = "and so on, " * 5
        with partial.open("w") as file:
            for i in range(rows):
                file.write(f'{{"prompt": "question {i}: {filler}what is {i} + 1?", "label": "{i + 1}"}}\n')
    else:
        import pyarrow
        from pyarrow import parquet

        with parquet.ParquetWriter(partial, pyarrow.schema([("prompt", "string"), ("label", "string")])) as writer:
            for start in range(0, rows, 100_000):
                numbers = range(start, min(start + 100_000, rows))
                columns = {"prompt": [f"question {i}" for i in numbers], "label": [str(i) for i in numbers]}
                writer.write_table(pyarrow.table(columns))
    partial.rename(path)
    return path


def measure(path: Path, args: argparse.Namespace, resume: bool) -> dict:
    command = [sys.executable, __file__, "--worker", str(path), "--rows", str(args.rows)]
    return common.run_worker(command + ["--resume"] * resume, deadline_s=300)


def work(path: Path, rows: int, resume: bool) -> dict:
    """Open the data source as a run does; seconds without imports, peak memory of the whole process."""
    import torch  # noqa: F401

    from slime.config import parse_args
    from slime.rollout.data_source import create_data_source

    model = common.WORK / "model-streaming"
    if not (model / "tokenizer.json").exists():
        from slime.utils.tiny_model import make_tiny_model

        make_tiny_model(model)
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(path), "--streaming-data", "--num-rollout", "1"]
    args = parse_args(
        [*flags, "--run-name", "streaming", "--output-dir", str(common.WORK), "--rollout-max-prompt-len", "512"]
    )
    state = common.WORK / f"streaming-{rows}{path.suffix}.pt"
    started = time.perf_counter()
    source = create_data_source(args)
    if resume:
        source.load_state_dict(torch.load(state, weights_only=True))
    groups = source.get_samples(BATCH)
    seconds = time.perf_counter() - started
    source.mark_finished(groups)
    if not resume:
        move_to_middle(source, rows)
        torch.save(source.state_dict(), state)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"start_s": round(seconds, 3), "peak_mib": round(peak), "first": groups[0][0].prompt[:20]}


def move_to_middle(source, rows: int) -> None:
    """As if half of the file had been handed out and trained."""
    stream = source.dataset._stream
    stream._rows.skip(rows // 2 - stream.position)
    stream.position = source.sample_offset = rows // 2


if __name__ == "__main__":
    main()
