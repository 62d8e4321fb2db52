"""Import path of memory helpers for users' hooks in the trainer; the devices are in `slime.utils.device`."""

from __future__ import annotations

import gc
import logging

from slime.utils import device

logger = logging.getLogger(__name__)


def clear_memory(clear_host_memory: bool = False) -> None:
    """Give back what nobody refers to; the host's allocator keeps nothing that could be cleared."""
    device.synchronize()
    gc.collect()
    device.empty_cache()


def available_memory() -> dict[str, float]:
    """What the device holds and has left, in GB; {} without one."""
    return device.memory_summary()


def print_memory(msg: str, clear_before_print: bool = False) -> dict[str, float]:
    """Log it, and return it."""
    if clear_before_print:
        clear_memory()
    summary = available_memory()
    logger.info("memory %s: %s", msg, summary)
    return summary
