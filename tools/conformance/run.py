"""Holds the embedded engine against a real SGLang on this machine's CPU: `make conformance`.

Steps, each of which can be chosen with --only:
  compare  the same requests to both servers on the same weights; every difference in keys, types, token ids and log-probs
  suite    tests/engine against SGLang and against the embedded engine
  grpo     rounds of train.py with SGLang as the rollout engine, on slots of its own (weights by broadcast, or through a folder) and
           on the trainer's (--colocate: weights through shared memory); after each sync its weights have the trainer's checksums
  media    rounds of train.py without a trainer on a Qwen2-VL: images, continued responses, scores
--record writes SGLang's replies to tests/assets/sglang, which the default tests compare the embedded engine with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

STEPS = ("compare", "suite", "grpo", "media")
START_DEADLINE_S = 900.0
RECORDED = REPO / "tests/assets/sglang/replies.json"
NUM_ROUNDS = 3
GRPO = (
    "--rollout-engine sglang --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6 "
    f"--num-rollout {NUM_ROUNDS} --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --lr 1e-3 "
    "--custom-rm-path tests.e2e.hooks.first_token_is_even --sglang-context-length 512 --check-weight-update-equal"
)
PLACEMENTS = {"separate": ["--update-weight-transport", "broadcast"], "colocated": ["--colocate"]}


def main() -> int:
    args = parse()
    os.chdir(REPO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended on the way out
    with tempfile.TemporaryDirectory(prefix="slime-conformance-") as folder:
        work = Path(args.work_dir or folder)
        work.mkdir(parents=True, exist_ok=True)
        from tools.conformance.replies import make_model

        model, other = make_model(work / "model"), make_model(work / "other", seed=1)
        failures: list[str] = []
        if {"compare", "suite"} & set(args.only):
            with sglang(args, model, work) as real:
                if "compare" in args.only:
                    failures += compare(real, model, work, args.record)
                if "suite" in args.only:
                    failures += suite("SGLang", real, model, other, args.pytest_args)
        if "suite" in args.only:
            failures += suite("embedded engine", None, model, other, args.pytest_args)
        if "grpo" in args.only:
            failures += grpo(args.sglang_python, model, work)
        if "media" in args.only:
            from tools.conformance.media import media

            failures += media(args.sglang_python, work)
    print("\n" + ("\n".join(f"FAILED {text}" for text in failures) or "conformance: all steps passed"))
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-python", required=True, help="interpreter of the environment with SGLang")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--sglang-url", help="a running SGLang to use, which serves WORK_DIR/model")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDED.relative_to(REPO)}")
    parser.add_argument("--work-dir", help="keep models and logs there")
    parser.add_argument(
        "--pytest-args", type=shlex.split, default=[], help="further arguments of pytest: --pytest-args='-k generate'"
    )
    args = parser.parse_args()
    args.sglang_python = os.path.abspath(args.sglang_python)
    return args


# ---- servers ----


def sglang(args: argparse.Namespace, model: Path, work: Path) -> contextlib.AbstractContextManager[str]:
    """The server to hold ours against: a running one, or one that is started here."""
    if args.sglang_url:
        return contextlib.nullcontext(args.sglang_url)
    return server("SGLang", sglang_command(args.sglang_python, model), work / "sglang.log", on_cpu=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sglang_command(python: str, model: Path) -> list[str]:
    from slime.backends.sglang_utils.launch import CPU_FLAGS, flag_words

    flags = {**CPU_FLAGS, "model_path": str(model), "dtype": "float32", "skip_server_warmup": True}
    return [python, "-m", "sglang.launch_server", *flag_words(flags)]


def embedded_command(model: Path) -> list[str]:
    return [sys.executable, "-m", "slime.engine", "--model-path", str(model), "--log-level", "warning"]


@contextlib.contextmanager
def server(name: str, command: list[str], log: Path, on_cpu: bool = False) -> Iterator[str]:
    """Run a server in a process group of its own; gives its URL once it generates."""
    from slime.backends.sglang_utils.launch import cpu_environment
    from slime.utils.engine_client import EngineClient

    port, started = free_port(), time.monotonic()
    environment = os.environ | (cpu_environment(1) if on_cpu else {"OMP_NUM_THREADS": "1"})
    if on_cpu:
        environment.pop("PYTHONPATH", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        try:
            with EngineClient(url) as client:
                client.wait_ready(START_DEADLINE_S, lambda: process.poll() is None)
        except RuntimeError as error:
            raise SystemExit(f"{name} did not start: {error}\n{log.read_text(errors='replace')[-4000:]}") from None
        print(f"{name}: ready at {url} after {time.monotonic() - started:.0f} s", flush=True)
        yield url
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """Terminate the process group, then kill what is left of it."""
    for number, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


# ---- steps ----


def compare(real_url: str, model: Path, work: Path, record: bool) -> list[str]:
    """Send the same requests to both servers. Returns the differences."""
    import httpx

    from tests.engine.recorded import ACCEPTED, EXTRA_KEYS, MISSING_KEYS
    from tools.conformance.replies import differences, exchange, folded, greedy_ids, load_requests

    failures, records = [], []
    with server("embedded engine", embedded_command(model), work / "embedded.log") as our_url:
        with httpx.Client(base_url=real_url, timeout=120) as real, httpx.Client(base_url=our_url, timeout=120) as ours:
            greedy = greedy_ids(real)
            if greedy != greedy_ids(ours):
                failures.append(f"compare: greedy ids {greedy_ids(ours)} instead of {greedy}")
            for request in load_requests(model, greedy):
                expected, got = exchange(real, request), exchange(ours, request)
                records.append({**request, **expected})
                if request["name"] in ACCEPTED:
                    continue
                found = differences(folded(expected), folded(got), EXTRA_KEYS, MISSING_KEYS)
                failures += [f"compare: {request['name']}: {text}" for text in found]
    print(f"compare: {len(records)} requests, {len(failures)} differences", flush=True)
    if record:
        write_records(records, model)
    return failures


def write_records(records: list[dict], model: Path) -> None:
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(trimmed(record, str(model)), ensure_ascii=False) for record in records]
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    RECORDED.write_text(text, encoding="utf-8")
    print(f"recorded {len(records)} replies in {RECORDED.relative_to(REPO)}", flush=True)


def trimmed(value, model: str):
    """Return a reply without what names this machine: paths, and messages, which carry stack traces."""
    if isinstance(value, dict):
        return {
            key: "(text)" if key == "message" and isinstance(v, str) else trimmed(v, model) for key, v in value.items()
        }
    if isinstance(value, list):
        return [trimmed(item, model) for item in value]
    return value.replace(model, "MODEL") if isinstance(value, str) else value


def suite(name: str, url: str | None, model: Path, other: Path, pytest_args: list[str]) -> list[str]:
    """Run tests/engine against `url`, or against an embedded engine that they start."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(REPO))
    if url is not None:
        environment |= {
            "SLIME_ENGINE_URL": url,
            "SLIME_ENGINE_KIND": "sglang",
            "SLIME_ENGINE_MODEL": str(model),
            "SLIME_ENGINE_OTHER_MODEL": str(other),
        }
    print(f"suite against the {name}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "tests/engine", *pytest_args]
    status = subprocess.run(command, env=environment, timeout=1800).returncode
    return [f"suite: tests/engine against the {name} ended with status {status}"] if status else []


def grpo(python: str, model: Path, work: Path) -> list[str]:
    """Run a short job with SGLang as the rollout engine in each placement. Returns what is wrong with what they left."""
    data = work / "data.jsonl"
    rows = [{"prompt": f"copy {index:04d}=", "label": f"{index:04d}"} for index in range(32)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "train.py", *GRPO.split(), "--sglang-python", python, "--hf-checkpoint", str(model)]
    command += ["--prompt-data", str(data), "--output-dir", str(work / "outputs")]
    disk = ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(work / "weights")]
    placements = PLACEMENTS | {"disk": disk}
    return [text for name, flags in placements.items() for text in grpo_job(name, [*command, *flags], work)]


def grpo_job(name: str, command: list[str], work: Path) -> list[str]:
    run_name = f"{name}-{os.getpid()}"
    started = time.monotonic()
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(REPO))
    status = subprocess.run([*command, "--run-name", run_name], env=environment, timeout=900).returncode
    if status:
        return [f"grpo, {name}: train.py ended with status {status}"]
    lines = [json.loads(line) for line in (work / "outputs" / run_name / "metrics.jsonl").read_text().splitlines()]
    key = "train/train_rollout_logprob_abs_diff"
    gaps = [line[key] for line in lines if key in line]
    print(f"grpo, {name}: {len(gaps)} rounds in {time.monotonic() - started:.0f} s, log-prob gaps {gaps}", flush=True)
    if len(gaps) != NUM_ROUNDS or max(gaps) > 1e-3:
        return [f"grpo, {name}: log-prob gaps between trainer and SGLang {gaps}, expected {NUM_ROUNDS} below 1e-3"]
    return []


if __name__ == "__main__":
    sys.exit(main())
