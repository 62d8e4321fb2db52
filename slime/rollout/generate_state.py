"""`GenerateState`: what all samples generated in one event loop share.

Invariants: one object per (args, event loop), so that semaphores are never shared between loops; the tokenizer and the
progress are shared by all loops of one args. Copies of args that users' functions make share what their original has.
Outside a running loop the state of the background loop is meant. Does not generate anything itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from slime.observability.progress import Progress
from slime.rollout.rm_hub.math_verify_pool import num_workers
from slime.rollout.round_policy import RoundPolicy, create_policy
from slime.utils.async_utils import get_background_loop
from slime.utils.http_utils import init_http_client
from slime.utils.processing_utils import load_processor, load_tokenizer

NUM_REMOTE_REWARDS = 64  # reward requests to --rm-url that are under way at the same time
NUM_PLAIN_REWARDS = 32  # plain (not async) reward functions that run at the same time


class _Origin:
    """Lies in args and is the same object in all copies of them."""

    def __deepcopy__(self, memo) -> _Origin:
        return self


_ORIGIN = "_generate_state_origin"  # the name under which it lies there

_lock = threading.RLock()
_states: dict[tuple[_Origin, asyncio.AbstractEventLoop], GenerateState] = {}


class _PerArgs:
    """What the states of one args share across loops."""

    def __init__(self, args) -> None:
        self.progress = Progress()
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        self.processor = load_processor(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)


_shared: dict[_Origin, _PerArgs] = {}


class _OnePerLoop(type):
    def __call__(cls, args) -> GenerateState:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = get_background_loop()
        with _lock:
            key = (vars(args).setdefault(_ORIGIN, _Origin()), loop)
            if key not in _states:
                for stale in [known for known in _states if known[1].is_closed()]:
                    del _states[stale]
                _states[key] = super().__call__(args, loop)
            return _states[key]


class GenerateState(metaclass=_OnePerLoop):
    """`GenerateState(args)` returns the state of the running loop; public for custom generate functions.

    Attributes: `tokenizer`, `processor` (None without one), `semaphore` (one permit per whole sample),
    `sampling_params`, `aborted`, `pendings`, `remaining_batch_size`, `progress`, `dp_rank`, `counters`.
    """

    def __init__(self, args, loop: asyncio.AbstractEventLoop) -> None:
        if args.rollout_temperature <= 0:
            raise ValueError(
                f"--rollout-temperature {args.rollout_temperature} must be > 0: a greedy policy has no gradient "
                "(--eval-temperature may be 0)"
            )
        self.args, self.loop = args, loop
        with _lock:
            origin = vars(args)[_ORIGIN]
            shared = _shared[origin] = _shared.get(origin) or _PerArgs(args)
        self.tokenizer, self.processor, self.progress = shared.tokenizer, shared.processor, shared.progress
        self.semaphore = asyncio.Semaphore(max(1, args.sglang_server_concurrency * num_engines(args)))
        self.group_turn = asyncio.Lock()  # held while a group collects its permits
        self.plain_rewards = asyncio.Semaphore(NUM_PLAIN_REWARDS)
        self.remote_rewards = asyncio.Semaphore(NUM_REMOTE_REWARDS)
        # Graders that answer so many at a time; a reward's time counts from when it is its turn.
        self.graders_turns = {"math_verify": asyncio.Semaphore(num_workers()), "reward_model": asyncio.Semaphore(1)}
        self.sampling_params = train_sampling_params(args)
        self.dp_counts = [0] * max(1, args.sglang_dp_size or 1)
        self.rollout_id = 0
        self.last_prompt: tuple[str | None, list[int]] = (None, [])
        self.last_media: tuple[str, dict, list[int], dict] | None = (
            None  # text, media, ids, the processor's other outputs
        )
        init_http_client(args)
        self.reset()

    def policy_for(self, args) -> RoundPolicy:
        """The object of `--round-policy-path`. A user's is built once, since it may keep what it learns from round to round; ours go by
        the arguments of the round, which a rollout function of the user's may have changed."""
        return create_policy(args) if args.round_policy_path.startswith("slime.") else self._users_policy

    @functools.cached_property
    def _users_policy(self) -> RoundPolicy:
        return create_policy(self.args)

    def reset(self) -> None:
        """Make the state ready for the next round."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task] = set()
        self.aborted = False
        self.counters: Counter[str] = Counter()
        self.first_failure: str | None = None  # traceback of the first reward that failed
        self.reward_tasks: set[asyncio.Future] = set()

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The least loaded data-parallel rank of an engine, counted as busy meanwhile."""
        rank = min(range(len(self.dp_counts)), key=self.dp_counts.__getitem__)
        self.dp_counts[rank] += 1
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    @property
    def dp_rank(self) -> int:
        return min(range(len(self.dp_counts)), key=self.dp_counts.__getitem__)


def num_engines(args) -> int:
    """Engines behind the default router, at least one."""
    return max(1, args.rollout_num_engines or 1)


def train_sampling_params(args) -> dict[str, Any]:
    """The `sampling_params` of a training request."""
    params = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
    }
    if args.rollout_top_p != 1.0:
        params["custom_params"] = {"return_top_p_token_ids": True}
    return params


def uses_sampling_seeds(args) -> bool:
    """Whether requests carry a seed: always with the embedded engine, else under deterministic inference."""
    return args.rollout_engine == "embedded" or bool(args.sglang_enable_deterministic_inference)


def round_seed(args, rollout_id: int, index: int, num_tokens: int) -> int:
    """Seed of a training request; those of neighbouring samples count up, so that one number says a group's seeds.

    The base has 30 bits, which leaves a SGLang server's 31 room for the index.
    """
    return (sampling_seed(args, rollout_id, num_tokens) >> 1) + index


def sampling_seed(args, *parts: Any) -> int:
    """A 31-bit seed from `--rollout-seed` and what identifies the draw (round, sample index, tokens so far)."""
    text = ":".join(map(str, (args.rollout_seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
