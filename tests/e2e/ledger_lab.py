"""A rollout side that is killed with SIGKILL again and again: Data Buffer, rounds and checkpoints of a run, without trainer.

`python -m tests.e2e.ledger_lab FLAGS...` forks one attempt after the other from a process that has everything imported, kills
them at random moments and lets the last one do some rounds in peace. "Training" a round means to write down its prompts; what is
written down is part of the checkpoint, as weights are. Prints `RESULT {"starts": [first round of each attempt]}`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

NUM_KILLS = 20
SAVE_EVERY, LAST_ROUNDS = 2, 8
ATTEMPT_S = 240.0
MAX_EVENTS, AFTER_EVENT_S = 5, 0.3  # an attempt lives for some rounds and saves, and a little longer
MODEL = "model.json"


def main() -> None:
    from slime.config import parse_args

    args = parse_args(sys.argv[1:])
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", int(os.environ["ROUTER_PORT"])
    args.sglang_model_routers = None
    _import_everything(args)
    chance, starts = random.Random(20), []
    for attempt in range(NUM_KILLS + 1):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            last = LAST_ROUNDS if attempt == NUM_KILLS else None
            _exit_after(lambda: run_attempt(args, write_end, last, looks_ahead=attempt % 2 == 0))  # noqa: B023
        os.close(write_end)
        with open(read_end, "rb", buffering=0) as events:
            starts.append(int(events.readline()))
            if attempt < NUM_KILLS:
                for _ in range(chance.randint(0, MAX_EVENTS)):
                    events.read(1)
                time.sleep(chance.uniform(0, AFTER_EVENT_S))
                os.kill(pid, signal.SIGKILL)
            status = _wait(pid)
        expected = -signal.SIGKILL if attempt < NUM_KILLS else 0
        assert status == expected, f"attempt {attempt} ended with {status}"
    print("RESULT", json.dumps({"starts": starts}))


def _import_everything(args) -> None:
    """What an attempt needs and may be shared: no threads, no event loop, no connection."""
    import slime.ray.checkpoint
    import slime.rollout.data_source
    import slime.rollout.sglang_rollout  # noqa: F401
    from slime.utils import processing_utils

    tokenizer = processing_utils.load_tokenizer(args.hf_checkpoint)
    processing_utils.load_tokenizer = lambda *_, **__: tokenizer
    slime.rollout.generate_state.load_tokenizer = lambda *_, **__: tokenizer


def _exit_after(function) -> None:
    status = 1
    try:
        function()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(pid: int) -> int:
    give_up_at = time.monotonic() + ATTEMPT_S
    while time.monotonic() < give_up_at:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise RuntimeError(f"an attempt did not end within {ATTEMPT_S} s")


def run_attempt(args, report_to: int, num_rounds: int | None, looks_ahead: bool) -> None:
    """Rounds from the newest checkpoint on, as a run does them; endless without a number.

    Looking ahead, the next round is being generated while one is trained and saved: groups are in flight then.
    """
    from slime.config import checkpoint_dirs
    from slime.rollout import data_state
    from slime.rollout.data_source import create_data_source
    from slime.rollout.sglang_rollout import generate_rollout

    source, trained, first = create_data_source(args), [], 0
    found = checkpoint_dirs.latest(args.save)
    if found is not None:
        data_state.load(args, source, found.directory, found.rollout_id)
        with open(os.path.join(found.directory, MODEL)) as file:
            trained = json.load(file)
        first = found.rollout_id + 1
    os.write(report_to, f"{first}\n".encode())
    last = sys.maxsize if num_rounds is None else first + num_rounds - 1
    pool = ThreadPoolExecutor(1)
    ahead = pool.submit(generate_rollout, args, first, source)
    for rollout_id in range(first, last + 1):
        groups = ahead.result().samples
        source.mark_delivered(groups, rollout_id)
        if looks_ahead and rollout_id < last:
            ahead = pool.submit(generate_rollout, args, rollout_id + 1, source)
            time.sleep(0.01)
        trained += [[rollout_id, group[0].group_index, group[0].data_row, group[0].label] for group in groups]
        source.mark_finished(groups)
        os.write(report_to, b"t")
        if (rollout_id + 1) % SAVE_EVERY == 0 or rollout_id == last:
            save(args, source, trained, rollout_id)
            os.write(report_to, b"s")
        if not looks_ahead and rollout_id < last:
            ahead = pool.submit(generate_rollout, args, rollout_id + 1, source)


def save(args, source, trained: list, rollout_id: int) -> None:
    from slime.ray import checkpoint
    from slime.rollout import data_state

    partial = checkpoint.begin(args.save, rollout_id)
    with open(os.path.join(partial, MODEL), "w") as file:
        json.dump(trained, file)
    data_state.save(args, source, partial, rollout_id)
    facts = {"run_id": "lab", "weight_version": 0, "started_from": None, "precision": "fp32", "model": {}}
    checkpoint.commit(partial, rollout_id=rollout_id, **facts)


if __name__ == "__main__":
    main()
