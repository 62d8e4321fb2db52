"""Which of the adapters in training a sample belongs to: its metadata key `lora`, or the only one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.utils.types import Sample

KEY = "lora"


def adapter_number(sample: Sample | None, names: Sequence[str]) -> int:
    """Return the place of the sample's adapter in `names`.

    Raises: ValueError when there are several and the sample, or nothing, does not say which.
    """
    if len(names) == 1:
        return 0
    chosen = (sample.metadata or {}).get(KEY) if sample is not None else None
    if chosen not in names:
        which = "this request" if sample is None else f"sample {sample.index}"
        raise ValueError(
            f"{which} has to name its adapter in metadata[{KEY!r}], one of {', '.join(names)}; it has {chosen!r}"
        )
    return list(names).index(chosen)
