"""Sizes of the learning-rate schedule, counted in samples like Megatron's scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleSizes:
    """train_iters: optimizer steps of the run; decay_samples: horizon; increment: samples per optimizer step."""

    train_iters: int
    decay_samples: int
    increment: int


def schedule_sizes(
    num_rollout: int, rollout_batch_size: int, n_samples_per_prompt: int, global_batch_size: int
) -> ScheduleSizes:
    """Return the sizes of a run of `num_rollout` rounds.

    >>> schedule_sizes(100, 32, 8, 128)
    ScheduleSizes(train_iters=200, decay_samples=25600, increment=128)
    """
    train_iters = num_rollout * rollout_batch_size * n_samples_per_prompt // global_batch_size
    return ScheduleSizes(train_iters, train_iters * global_batch_size, global_batch_size)
