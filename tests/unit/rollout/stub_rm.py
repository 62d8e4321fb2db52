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


def plain_slow(args, sample, **kwargs):
    time.sleep(0.1)
    return 1.0


async def exits_on_index_1(args, sample, **kwargs):
    return plain_exits_on_index_1(args, sample)


def plain_exits_on_index_1(args, sample, **kwargs):
    if sample.index == 1:
        sys.exit(3)
    return 1.0


async def odd_values(args, sample, **kwargs):
    bad = ["good", float("inf"), numpy.float32("nan"), 10**400, torch.tensor(float("nan"))]
    good = [numpy.float32(0.5), torch.tensor(0.5), numpy.float64(1), 1.0, numpy.int64(2)]
    return (bad, good)[sample.group_index][sample.index % 5]


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
