"""``slime quickstart``: makes model and data, runs the two training commands, prints what came of it.

Both commands are printed before they run; anyone can run them by hand. Nothing here trains: it only starts ``train.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from slime.quickstart import recipe, report, task

_STOP_DEADLINE_S = 12.0


def run(*, seed: int, num_rollout: int, output_dir: str) -> None:
    """The whole quickstart below ``output_dir``; raises RuntimeError when one of its commands fails."""
    import yaml

    from slime.utils.tiny_model import make_tiny_model

    started = time.monotonic()
    root = Path(output_dir).resolve() / time.strftime(f"quickstart-seed{seed}-%Y%m%d-%H%M%S")
    root.mkdir(parents=True)
    memory = MemoryWatch()
    print(f"[1/3] a Qwen3-shaped model from scratch and the task (sort {task.NUM_DIGITS} digits) in {root}", flush=True)
    model, sft_model, config = root / "model", root / "sft-model", root / "eval.yaml"
    make_tiny_model(model, seed=seed, **recipe.MODEL)
    train_data, held_out = task.write_data(root, seed)
    config.write_text(yaml.safe_dump(recipe.eval_config(held_out)), encoding="utf-8")
    common = {"seed": seed, "output_dir": root}
    with memory:
        print(f"[2/3] SFT warm-up, {recipe.SFT_ROUNDS} rounds: it stops early on purpose", flush=True)
        _train(recipe.sft_flags(model, train_data, sft_model, run_name="sft", **common))
        print(
            f"[3/3] GRPO, {num_rollout} rounds of {recipe.ROLLOUT_BATCH} x {recipe.SAMPLES_PER_PROMPT} samples",
            flush=True,
        )
        grpo = recipe.grpo_flags(sft_model, train_data, config, num_rollout=num_rollout, run_name="grpo", **common)
        _train(grpo)
    print(report.closing_table(root, wall_s=time.monotonic() - started, peak_bytes=memory.peak_bytes), flush=True)


def _train(flags: list[str]) -> None:
    """Run ``python train.py FLAGS`` in the foreground; an interrupt is passed on and waited for."""
    script = Path(__file__).resolve().parents[2] / "train.py"
    if not script.exists():
        raise FileNotFoundError(f"{script} is missing: slime quickstart runs from a source checkout (pip install -e .)")
    print(f"\n  {_python()} train.py {_wrapped(flags)}\n", flush=True)
    process = subprocess.Popen([sys.executable, str(script), *flags])
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_DEADLINE_S)
        raise
    if status != 0:
        raise RuntimeError(f"train.py ended with status {status}; its message is above")


def _python() -> str:
    """This interpreter as a shell finds it from here, whether its environment is activated or not."""
    path = os.path.relpath(sys.executable)
    return sys.executable if path.startswith(os.pardir) else path


def _wrapped(flags: list[str]) -> str:
    """The flags as a shell command that can be pasted, a few to a line."""
    words, lines, line = list(flags), [], ""
    for word in words:
        if word.startswith("--") and len(line) + len(word) > 100:
            lines.append(line)
            line = ""
        line += f"{word} "
    return " \\\n    ".join([*lines, line]).rstrip()


class MemoryWatch:
    """Peak of the memory of everything that is started while it watches (PSS where the system tells it)."""

    def __init__(self):
        from slime.utils.platform import FAMILY_VARIABLE

        self.peak_bytes = 0
        self._mark = uuid.uuid4().hex
        os.environ[FAMILY_VARIABLE] = self._mark
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join(5.0)

    def _watch(self) -> None:
        from slime.utils.platform import family_memory_bytes

        while not self._ended.wait(2.0):
            self.peak_bytes = max(self.peak_bytes, family_memory_bytes(self._mark))
