"""Seeds of the engine calls that a user's generate function makes.

Invariants: two calls never draw the same random numbers, whether they ask the same (solvers side by side) or go on (turns of a
conversation); the same calls of the same round get the same seeds, in whatever order answers come. Sends nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

from slime.rollout.generate_state import sampling_seed


class CallSeeds:
    """Counts the calls of one execution of a generate function."""

    def __init__(self, args) -> None:
        self._args = args
        self._times: Counter[tuple] = Counter()

    def of_call(self, prompt: Any, *who: Any) -> int:
        """The seed of the next call with this prompt (ids or text), on behalf of `who` (parts that identify the draw)."""
        digest = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=8).hexdigest()
        key = (*who, digest)
        self._times[key] += 1
        return sampling_seed(self._args, *key, self._times[key])
