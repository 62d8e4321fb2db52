"""Hooks that the tests point flags at."""

from __future__ import annotations


async def one(args, sample, **kwargs):
    return 1.0


async def by_index(args, sample, **kwargs):
    return float(sample.index % 2)


async def async_rm(args, sample):
    from slime.utils.misc import load_hook

    return await load_hook(sample.custom_rm_path or args.custom_rm_path, "custom_rm_path")(args, sample)


async def batched_async_rm(args, samples):
    from slime.utils.misc import load_hook

    return await load_hook(args.custom_rm_path, "custom_rm_path")(args, samples)
