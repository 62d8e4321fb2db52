"""How many groups a round starts, when it ends, and what becomes of the rest: one object that a user may replace.

`--round-policy-path` names a class like `RoundPolicy` (built once per process with `args`). Invariants of the default: a round
starts `--over-sampling-batch-size` groups whenever those that can still fill it are too few; it ends with
`--rollout-batch-size` groups that passed the filter, but never aborts a group at its age limit. Numbers in, decisions out:
nothing here generates, aborts or stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.utils.async_utils import finish
from slime.utils.hook_calls import naming, wrong
from slime.utils.misc import load_hook

OPTION = "round_policy_path"
CONTINUE, RESTART, DROP = "continue", "restart", "drop"


@dataclass(frozen=True)
class RoundView:
    """A round as its policy sees it.

    target: groups wanted. num_passed: groups that are finished and passed the filter. num_running: groups being generated.
    num_due: those of the running ones that are at the age limit.
    """

    rollout_id: int
    target: int
    num_passed: int
    num_running: int
    num_due: int


class RoundPolicy:
    """The default: over-provision, stop at the target, keep what is unfinished, wait for what would get too old.

    A response may span the round it began in and `--partial-rollout-max-age` more (no limit when not given).
    """

    def __init__(self, args) -> None:
        self.target = args.rollout_batch_size
        self.fetch_size = args.over_sampling_batch_size or self.target
        self.partial = args.partial_rollout
        self.max_age: int | None = args.partial_rollout_max_age
        if self.fetch_size < self.target:
            raise ValueError(
                f"--over-sampling-batch-size {self.fetch_size} must be at least --rollout-batch-size {self.target}"
            )

    def num_to_start(self, view: RoundView) -> int:
        """Groups to start now. Asked at the start and after each group that ended, until the answer is 0."""
        return self.fetch_size if view.num_passed + view.num_running < view.target else 0

    def is_over(self, view: RoundView) -> bool:
        """Whether to abort what runs and end the round; asked after each group that ended. Needs `target` passed groups."""
        return view.num_passed >= view.target and view.num_due == 0

    def at_limit(self, age: int) -> bool:
        """Whether a group would be too old in the next round. `age`: rounds since its first token."""
        return self.max_age is not None and age >= self.max_age

    def is_due(self, age: int) -> bool:
        """Whether a running group has to be trained in this round."""
        return self.partial and self.at_limit(age)

    def is_too_old(self, age: int) -> bool:
        """Whether a group from the buffer is dropped (counted as aged out) instead of being continued or trained."""
        return self.max_age is not None and age > self.max_age

    def leftover(self, age: int, finished: bool) -> str:
        """What becomes of a group that the round did not need: "continue", "restart" (from its prompt) or "drop".

        Args:
            age: rounds since its first token, 0 for a group without one.
            finished: it has its responses and rewards; "continue" then means that it is trained in a later round.
        """
        if self.at_limit(age) or not (finished or self.partial):
            return RESTART
        return CONTINUE


class DropOldGroups(RoundPolicy):
    """Never waits: a group that was not trained at its age limit is dropped and counted as aged out.

    Rounds end sooner, but prompts whose responses take long are trained less often than others.
    """

    def is_over(self, view: RoundView) -> bool:
        return view.num_passed >= view.target

    def leftover(self, age: int, finished: bool) -> str:
        return DROP if self.at_limit(age) else super().leftover(age, finished)


def create_policy(args) -> RoundPolicy:
    """The object of `--round-policy-path`."""
    with naming(OPTION, args.round_policy_path):
        policy = load_hook(args.round_policy_path, OPTION)(args)
    return policy if args.round_policy_path.startswith("slime.") else _Named(policy, args.round_policy_path)


class _Named:
    """A user's policy: what its methods raise, or answer in an unknown way, is said with the flag."""

    def __init__(self, policy: Any, path: str) -> None:
        self._policy, self._path = policy, path

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._policy, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            with naming(OPTION, self._path):
                answer = finish(method(*arguments, **keywords))
            known = (CONTINUE, RESTART, DROP) if name == "leftover" else (True, False)
            if not (isinstance(answer, int) if name == "num_to_start" else answer in known):
                raise wrong(OPTION, self._path, f"answered {answer!r:.100} to {name}")
            return answer

        return call if callable(method) else method


def age_of(group: list, rollout_id: int) -> int:
    """Rounds since the first token of a group was generated; 0 for a new one."""
    starts = [leaf.metadata.get("start_rollout_id", rollout_id) for leaf in leaves_of(group)]
    return rollout_id - min(starts, default=rollout_id)
