"""Memory that can be released while the trainer uses the device: tags weights, kv_cache (cuda_graph is accepted).

Invariant: the engine must be idle to release; generation is refused while anything is released. On a machine without an
accelerator weights already are in host memory and only the cache is freed. Called on the engine thread.
"""

from __future__ import annotations

import torch

from slime.engine.generator import Generator
from slime.engine.scheduler import Scheduler
from slime.utils import device

TAGS = ("weights", "kv_cache", "cuda_graph")


def release(scheduler: Scheduler, tags: list[str] | None) -> None:
    """Free the memory behind the tags (all when None).

    Raises: ValueError for an unknown tag or while requests run.
    """
    chosen = _checked(tags)
    if scheduler.is_busy():
        raise ValueError(f"release of memory with {scheduler.num_running} running requests: pause or flush first")
    if "kv_cache" in chosen:
        scheduler.generator.cache.drop()
    if "weights" in chosen:
        _move_weights(scheduler.generator, torch.device("cpu"))
        device.empty_cache()
    scheduler.released |= chosen


def resume(scheduler: Scheduler, tags: list[str] | None) -> None:
    """Take the memory back (all tags when None); doing it twice is harmless."""
    chosen = _checked(tags)
    if "weights" in chosen:
        _move_weights(scheduler.generator, scheduler.generator.model.device)
    scheduler.released -= chosen


def _checked(tags: list[str] | None) -> set[str]:
    if tags is not None and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise ValueError(f"tags must be a list of strings or null, got {tags!r}")
    chosen = set(TAGS if tags is None else tags)
    if not chosen <= set(TAGS):
        raise ValueError(f"tags {sorted(chosen - set(TAGS))}: expected some of {', '.join(TAGS)}")
    return chosen


def _move_weights(generator: Generator, target: torch.device) -> None:
    generator.model.weights.move_to(target)
