"""Call a user's reward hook in whichever documented form it has.

Forms, told apart by signature: `(args, sample, ...)`, `(args, samples, ...)` and a class with
`__init__(model_path)` and `compute_reward(prompts, responses) -> list`. Functions may be async or plain; plain ones run
in a thread so that they do not hold up generation. A hook is never called with an empty list; a class is built once
per process.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Mapping, Set

from slime.utils.async_utils import gather_or_cancel, run_in_thread
from slime.utils.hook_calls import wrong
from slime.utils.hook_forms import accepted_keywords, is_plain, reward_form
from slime.utils.misc import load_hook

_build_lock = threading.Lock()


async def custom_rewards(args, path: str, samples: list, **kwargs) -> list:
    """Return one reward per sample from the hook at `path`.

    Raises:
        ValueError: a batch hook returned another number of rewards; the path is named.
    """
    if not samples:
        return []
    hook = load_hook(path, "custom_rm_path")
    form = reward_form(hook)
    if form == "single":
        extra = accepted_keywords(hook, kwargs) if kwargs else {}
        if len(samples) == 1:
            return [await _call(hook, args, samples[0], **extra)]
        return await gather_or_cancel([_call(hook, args, sample, **extra) for sample in samples])
    if form == "class":
        scorer = await run_in_thread(_instance, hook, _model_path(args)) if inspect.isclass(hook) else hook
        rewards = await _call(scorer.compute_reward, [s.prompt for s in samples], [s.response for s in samples])
    else:
        rewards = await _call(hook, args, samples, **accepted_keywords(hook, kwargs))
    is_list = hasattr(rewards, "__len__") and not isinstance(rewards, (str, bytes, Mapping, Set))
    if not is_list or len(rewards) != len(samples):
        raise wrong("custom_rm_path", path, f"returned {rewards!r:.200} for {len(samples)} samples")
    return list(rewards)


async def _call(function, *arguments, **kwargs):
    if not is_plain(function):
        return await function(*arguments, **kwargs)
    result = await run_in_thread(function, *arguments, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _instance(cls: type, model_path: str):
    with _build_lock:
        return _build(cls, model_path)


@functools.cache
def _build(cls: type, model_path: str):
    return cls(model_path)


def _model_path(args) -> str | None:
    return args.rm_model_path or args.rm_url or args.hf_checkpoint
