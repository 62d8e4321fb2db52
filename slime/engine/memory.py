"""Memory that can be released while the trainer uses the device: tags weights, kv_cache (cuda_graph is accepted).

Invariants: the engine must be idle to release; generation is refused while anything is released; releasing twice and
resuming what is resident change nothing; weights come back with the same bits. Called on the engine thread.
"""

from __future__ import annotations

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
        scheduler.generator.prefixes.clear()
    if "weights" in chosen:
        scheduler.generator.model.weights.release()
    device.empty_cache()
    scheduler.released |= chosen


def resume(scheduler: Scheduler, tags: list[str] | None) -> None:
    """Take the memory back (all tags when None); doing it twice is harmless."""
    chosen = _checked(tags)
    if "weights" in chosen:
        scheduler.generator.model.weights.restore()
    scheduler.released -= chosen


def _checked(tags: list[str] | None) -> set[str]:
    if tags is not None and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise ValueError(f"tags must be a list of strings or null, got {tags!r}")
    chosen = set(TAGS if tags is None else tags)
    if not chosen <= set(TAGS):
        raise ValueError(f"tags {sorted(chosen - set(TAGS))}: expected some of {', '.join(TAGS)}")
    return chosen
