"""Hooks that the tests point flags at."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import numpy
import torch

from slime.utils.types import Sample

seen: dict[str, list] = {"groups": [], "all": [], "batch": []}


async def one(args, sample, **kwargs):
    return 1.0


async def by_index(args, sample, **kwargs):
    return float(sample.index % 2)


async def slow_for_late_groups(args, sample, **kwargs):
    if sample.group_index >= args.rollout_batch_size:
        await asyncio.sleep(600)
    return 1.0


async def hangs_on_index_1(args, sample, **kwargs):
    if sample.index == 1:
        await asyncio.sleep(600)
    return 1.0


async def always_raises(args, sample, **kwargs):
    raise KeyError("judge")


async def raises_on_index_1(args, sample, **kwargs):
    if sample.index == 1:
        raise KeyError("judge")
    return 1.0


async def raises_on_group_0(args, sample, **kwargs):
    if sample.group_index == 0:
        raise KeyError("judge")
    return 1.0


_never = threading.Event()


def plain_hangs_on_group_0(args, sample, **kwargs):
    if sample.group_index == 0:
        _never.wait()
    return 1.0


def plain_one(args, sample, **kwargs):
    return 1.0


def plain_slow(args, sample, **kwargs):
    time.sleep(0.1)
    return 1.0


async def exits_on_index_1(args, sample, **kwargs):
    return plain_exits_on_index_1(args, sample)


def plain_exits_on_index_1(args, sample, **kwargs):
    if sample.index == 1:
        sys.exit(3)
    return 1.0


async def nonsense(args, sample, **kwargs):
    """Group 0 gets what no reward is; the others a number."""
    values = [
        *(
            None,
            "",
            "1.0",
            b"1",
            [],
            [1.0],
            {},
            {"other": 1.0},
            {"score": None},
            {"score": "good"},
            {"score": float("nan")},
        ),
        *(
            float("inf"),
            -float("inf"),
            float("nan"),
            1e39,
            10**5000,
            1j,
            object(),
            print,
            torch.zeros(2),
            torch.zeros(0),
        ),
        *(numpy.zeros(3), torch.tensor(1 + 1j), numpy.datetime64("2020-01-01"), Sample.Status.FAILED, {"score": [1.0]}),
    ]
    return values[sample.index] if sample.group_index == 0 else {"score": 1.0}


NUM_NONSENSE = 26


async def group_nonsense(args, samples, **kwargs):
    """Each group but the last gets what no list of rewards is."""
    n = len(samples)
    values = [None, 1.0, "x" * n, [1.0] * (n + 1), [], {i: 1.0 for i in range(n)}, iter([1.0] * n), torch.zeros(n, 2)]
    group = samples[0].group_index
    return torch.arange(n) if group == len(values) else values[group]


async def slow_group_0_and_engine_call(args, samples, **kwargs):
    """A group judge that asks an engine; group 0 waits for an answer that never comes."""
    from slime.utils.http_utils import post

    if samples[0].group_index == 0:
        await asyncio.sleep(600)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    body = {"input_ids": samples[0].tokens, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    answer = await post(url, body)
    return [float(bool(answer["meta_info"]))] * len(samples)


async def odd_values(args, sample, **kwargs):
    bad = ["good", float("inf"), numpy.float32("nan"), 10**400, torch.tensor(float("nan"))]
    good = [numpy.float32(0.5), torch.tensor(0.5), numpy.float64(1), 1.0, numpy.int64(2)]
    return (bad, good)[sample.group_index][sample.index % 5]


async def scores(args, sample, **kwargs):
    return {"score": 1.0, "acc": True}


async def dict_or_none(args, sample, **kwargs):
    return None if sample.group_index == 1 else {"acc": sample.index % 2, "len": 3}


async def batch(args, samples, **kwargs):
    seen["batch"].append([s.index for s in samples])
    return [float(len(samples))] * len(samples)


def keep_odd_groups(args, samples, **kwargs):
    return samples[0].group_index % 2 == 1


def drop_all(args, samples, **kwargs):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    return DynamicFilterOutput(keep=False, reason="never")


def remember_kept(args, groups):
    seen["groups"].append(groups)
    groups[0][0].remove_sample = True


def remember_all(args, all_groups, data_source):
    seen["all"].append((all_groups, data_source))


def tag_hook(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["tag"] = (rollout_id, evaluation)


async def replace_hook(args, sample):
    return Sample.from_dict({**sample.to_dict(), "label": "replaced"})


def wrong_hook(args, sample, **kwargs):
    return 3


def drop_a_third(args, samples, **kwargs):
    return samples[0].group_index % 3 != 1
