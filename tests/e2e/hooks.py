"""User code of the end-to-end tests: rewards and generate functions in the documented forms."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time

HOLD_DEADLINE_S = 240.0


async def first_token_is_even(args, sample, **kwargs):
    """A reward that any policy can climb: the first response token is even."""
    return float(sample.tokens[len(sample.tokens) - sample.response_length] % 2 == 0)


async def group_judge(args, samples, **kwargs):
    """Of four prompts two make it raise, the second of all makes it hang, one gets some nonsense; the last is judged with an
    engine's help."""
    case = samples[0].group_index % 4
    if samples[0].group_index == 1:
        await asyncio.sleep(3600)
    if case in (0, 1):
        raise RuntimeError("the judge is down")
    if case == 2:
        return [None, {"score": float("nan")}, {"score": 0.25, "kind": "short"}, {"score": 0.75, "kind": "long"}][
            -len(samples) :
        ]
    from slime.rollout.engine_control import get_model_url
    from slime.utils.http_utils import post

    body = {"input_ids": samples[0].tokens, "sampling_params": {"max_new_tokens": 1}}
    answer = await post(get_model_url(args, "default"), body)
    assert answer["meta_info"]["completion_tokens"] == 1
    return [{"score": float(i % 2), "kind": "short"} for i, _ in enumerate(samples)]


async def nothing_of_each_sixteenth(args, sample, sampling_params):
    """The built-in generator; of four prompts with four executions each, the first execution of the third comes to nothing."""
    from slime.rollout.sglang_rollout import generate

    return [] if sample.index % 16 == 8 else await generate(args, sample, sampling_params)


async def always_fails(args, sample, **kwargs):
    raise RuntimeError("the judge is down")


async def fails_for_each_fourth(args, sample, **kwargs):
    if sample.index % 4 == 0:
        raise RuntimeError("the judge is down")
    return float(sample.index % 2)


def drop_every_fifth_prompt(args, samples, **kwargs):
    """A filter whose verdict can be told from the prompt."""
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    keep = int(samples[0].label) % 5 != 0
    return DynamicFilterOutput(keep=keep, reason=None if keep else "fifth")


def note_written_weights(args, version_dir, rollout_engines):
    """Writes down what each rank finds: the folder's files, and the versions that the engines serve."""
    import torch.distributed as dist

    served = [engine.weight_version() for engine in rollout_engines]
    note = {"folder": version_dir, "files": os.listdir(version_dir), "served": served}
    with open(os.path.join(args.run_dir, f"written_{dist.get_rank()}.jsonl"), "a") as file:
        file.write(json.dumps(note) + "\n")


def long_step_in_round_2(args, rollout_id, step_id, model, optimizer, lr_scheduler):
    """Leaves a file in the run directory and takes its time, so that a test can act in the middle of training."""
    if rollout_id == 2:
        with open(os.path.join(args.run_dir, "training"), "w"):
            time.sleep(HOLD_DEADLINE_S)


def held_beyond_a_round(args, rollout_id, step_id, model, optimizer, lr_scheduler):
    """Before a step: waits while the file `last_round` beside the run directory names an earlier round, and then says `held`.

    A test that acts on a running run is so never too late.
    """
    limit, give_up_at = os.path.join(args.output_dir, "last_round"), time.monotonic() + HOLD_DEADLINE_S
    while rollout_id > _number_in(limit) and time.monotonic() < give_up_at:
        open(os.path.join(args.output_dir, "held"), "w").close()
        time.sleep(0.02)


def _number_in(path) -> float:
    try:
        with open(path) as file:
            return int(file.read())
    except FileNotFoundError:
        return float("inf")


def held_in_update_2(args):
    """At the start of a trainer: its third bucket of weights for version 2 waits from the file `in_update` in the run directory
    to the file `go_on`."""
    from slime.backends.weight_sync.distributed import BroadcastTransport

    send, versions = BroadcastTransport.send, []

    def held(transport, bucket, version, submit):
        versions.append(version)
        if version == "2" and versions.count("2") == 3:
            open(os.path.join(args.run_dir, "in_update"), "w").close()
            give_up_at = time.monotonic() + HOLD_DEADLINE_S
            while not os.path.exists(os.path.join(args.run_dir, "go_on")) and time.monotonic() < give_up_at:
                time.sleep(0.01)
        send(transport, bucket, version, submit)

    BroadcastTransport.send = held


async def long_tailed(args, sample, sampling_params):
    """The built-in generator with a length per sample: most are short, a few take all of the limit."""
    from slime.rollout.sglang_rollout import generate

    share = random.Random(sample.index).random() ** 4
    length = max(1, int(share * sampling_params["max_new_tokens"]))
    return await generate(args, sample, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})


async def uneven_streams(args, sample, sampling_params):
    """The streaming generator; every second group takes all of the limit, the others end at once."""
    from slime.rollout.sglang_streaming_rollout import generate_streaming

    length = sampling_params["max_new_tokens"] if sample.group_index % 2 else 4
    return await generate_streaming(args, sample, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})


async def fan_out(args, sample, sampling_params):
    """One to three parts per execution; their rewards are equal but for rounding."""
    from slime.rollout.sglang_rollout import generate

    parts = []
    for number in range(1 + sample.index % 3):
        part = sample.duplicate()
        part.rollout_id = sample.index
        part = await generate(args, part, {**sampling_params, "max_new_tokens": 2 + number})
        part.reward = (0.1 + 0.2 if number % 2 else 0.3) + sample.index % 2
        parts.append(part)
    return parts


def remove_first_group(args, groups):
    """A sample filter that leaves nothing of one prompt in the loss."""
    for sample in groups[0]:
        sample.remove_sample = True
