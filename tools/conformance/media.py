"""A vision model served by a real SGLang, asked as our rollout asks: images, continued responses, scores.

Runs the tests of its processor, which needs more than our environment has, and a job of train.py without a trainer. Each prompt
goes out with one token per image, and SGLang must read as many tokens as the processor makes (the rollout checks that); responses
that a round cut off go on in the next one; the log-probs of all of them, asked for as a teacher's, must be those of the rollout.
"""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
NUM_ROUNDS = 3
FLAGS = (
    "--debug-rollout-only --rollout-engine sglang --rollout-num-gpus 1 --apply-chat-template --partial-rollout "
    "--rollout-batch-size 4 --over-sampling-batch-size 8 --n-samples-per-prompt 2 --rollout-max-response-len 100 --rollout-top-k 20 "
    f"--num-rollout {NUM_ROUNDS} --sglang-context-length 512 --custom-rm-path tests.e2e.media_hooks.scored_as_sampled"
)
STOP = range(0, 256, 32)  # so that responses end sooner or later
#: Our processes may import the torchvision of SGLang's environment, which the processor of Qwen2-VL wants.
SITE = """import sys

import sglang_cpu_shim as shim


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision.extension" and not shim._kept:
            shim._define_torchvision_operators()


sys.meta_path.insert(0, Finder())
"""


def media(python: str, work: Path) -> list[str]:
    """Run the job. Returns what is wrong with the samples that it left."""
    from tests.vision_models import make_qwen2_vl

    model, data = make_qwen2_vl(work / "vision"), work / "images.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in _rows(24)))
    command = [sys.executable, "train.py", *FLAGS.split(), "--sglang-python", python, "--hf-checkpoint", str(model)]
    command += [
        "--rollout-stop-token-ids",
        *map(str, STOP),
        "--prompt-data",
        str(data),
        "--multimodal-keys",
        '{"image": "images"}',
    ]
    command += ["--output-dir", str(work / "outputs"), "--run-name", f"media-{os.getpid()}"]
    dump = work / "media-{rollout_id}.pt"
    started, environment = time.monotonic(), _environment(python, work)
    tests = [sys.executable, "-m", "pytest", "-q", "tests/unit/rollout/test_real_processor.py", "-k", "qwen2_vl"]
    status = subprocess.run(tests, env=environment, timeout=300).returncode
    failures = [f"media: the tests with Qwen2-VL's processor ended with status {status}"] if status else []
    command += ["--save-debug-rollout-data", str(dump)]
    status = subprocess.run(command, env=environment, timeout=600).returncode
    failures += [f"media: train.py ended with status {status}"] if status else _check(str(dump))
    print(f"media: {NUM_ROUNDS} rounds in {time.monotonic() - started:.0f} s, {len(failures)} failures", flush=True)
    return failures


def _rows(count: int) -> list[dict]:
    from PIL import Image

    rows = []
    for number in range(count):
        images = []
        for side in (30, 60)[: 1 + number % 2]:
            stream = io.BytesIO()
            Image.new("RGB", (side + number, side), (10 * number, 255 - 10 * number, 90)).save(stream, format="PNG")
            images.append(base64.b64encode(stream.getvalue()).decode())
        rows.append({"input": "<image> " * len(images) + f"what is it, {number}?", "images": images})
    return rows


def _environment(python: str, work: Path) -> dict[str, str]:
    code = "import site; print(site.getsitepackages()[0])"
    packages = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    site = work / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    if not (site / "torchvision").exists():
        (site / "torchvision").symlink_to(Path(packages) / "torchvision")
        (site / "sglang_cpu_shim.py").symlink_to(REPO / "tools/conformance/sglang_cpu/sglang_cpu_shim.py")
    return dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join((str(site), str(REPO))))


def _check(dump: str) -> list[str]:
    from slime.observability.debug_dump import load_rollout_dump

    samples = [sample for round_id in range(NUM_ROUNDS) for sample in load_rollout_dump(dump, round_id)]
    failures = [
        f"media: sample {sample.index}: log-probs asked for anew differ by {sample.reward}"
        for sample in samples
        if not sample.reward < 1e-3
    ]
    continued = [sample for sample in samples if "start_rollout_id" in sample.metadata]
    print(f"media: {len(samples)} samples, {len(continued)} of them continued in a later round", flush=True)
    if not continued:
        failures.append("media: no response was continued")
    return failures
