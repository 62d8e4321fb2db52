"""Checking and calling users' hooks: a mistake in one is said with its flag, its path and what is expected.

Invariants: a hook may be async wherever it may be plain; what it raises becomes a `HookError` that shows where in the user's
code it happened. Our own functions behind these flags are called as they are. The rows are in `slime.utils.hook_table`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from slime.utils.async_utils import finish, run_in_thread
from slime.utils.hook_forms import accepted_keywords, generate_form, is_plain, reward_form
from slime.utils.hook_loading import load_hook, spell_out_hooks
from slime.utils.hook_table import HOOKS, TRAINER_HOOKS

logger = logging.getLogger(__name__)

SHOWN_FRAMES = 8
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHONS = sysconfig.get_paths()["stdlib"] + os.sep


_running: dict[object, str] = {}  # calls of users' hooks, the oldest first


class HookError(RuntimeError):
    """A user's hook raised; the message names the flag and shows the place in the user's code."""


def wrong(option: str, path: str, what: str) -> ValueError:
    """The error of a hook that is not what it should be, with the expected signature."""
    return ValueError(f"{flag_of(option)} {path} {what}; expected {HOOKS[option].text}")


def flag_of(option: str) -> str:
    return f"--{option.replace('_', '-')}"


# ---- at start --------------------------------------------------------------------------------------------------------


def check_trainer_hooks(args) -> None:
    """Load the trainer's hooks and check how they can be called, before anything is built.

    Raises: ValueError naming the flag, the path and what was found instead.
    """
    check_hooks(args, [option for option in TRAINER_HOOKS if option not in ("advantage_estimator", "spec")])
    if args.spec:
        check_path(spec_path(args.spec), "spec")
    if "." in args.advantage_estimator:
        check_path(args.advantage_estimator, "advantage_estimator")


def spec_path(spec: list[str]) -> str:
    """The path in `--spec`, whose module and function are two words: `pkg.mod function` is `pkg.mod.function`."""
    return (":" if spec[0].endswith(".py") else ".").join(spec)


def check_hooks(args, options: list[str]) -> None:
    """Load the hooks of these flags, spell their paths out, and check that each can be called as it will be.

    Raises: ValueError naming the flag, the path and what was found instead.
    """
    try:
        spell_out_hooks(args, options)
    except (ImportError, AttributeError) as error:
        raise ValueError(str(error)) from error  # a wrong path is the user's mistake, not a failure of the run
    for option in options:
        value = getattr(args, option)
        for path in value if isinstance(value, list) else [value]:
            if path:
                check_path(path, option)


def check_path(path: str, option: str) -> None:
    """Load one hook and check that it can be called as a hook of this flag will be.

    Raises: ValueError naming the flag, the path and what was found instead.
    """
    try:
        function = load_hook(path, option)
    except (ImportError, AttributeError) as error:
        raise ValueError(str(error)) from error
    check_signature(option, function, path)


def check_signature(option: str, function: Any, path: str) -> None:
    """Raises: ValueError when the function cannot take the arguments that it will be given."""
    if not callable(function) and not hasattr(function, "compute_reward"):
        raise wrong(option, path, f"is a {type(function).__name__}, which cannot be called")
    if inspect.isclass(function):
        _check_class(option, function, path)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise wrong(option, path, "is a generator: use return, not yield")
    if option == "data_source_path":
        _check_data_source(function, path)
        return
    _check_call(option, path, *_arguments(option, function, path))


def _check_call(option: str, path: str, called: Callable, positional: tuple, keywords: dict) -> None:
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return  # written in C: it has none to look at
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        problem = wrong(option, path, f"is {_name(called)}{signature}: {error}")
        if not _decorator_takes(called, positional, keywords):
            raise problem from error
        logger.warning("%s; its decorator has to give what is missing", problem)


def _decorator_takes(called: Callable, positional: tuple, keywords: dict) -> bool:
    """Whether the function that a decorator put in place takes these arguments, whatever the decorated one does."""
    try:
        return _binds(inspect.signature(called, follow_wrapped=False), positional, keywords)
    except ValueError:
        return False


def _arguments(option: str, function: Any, path: str) -> tuple[Callable, tuple, dict]:
    """(what is called, its arguments by position, those by keyword); only their number and names matter."""
    if option == "custom_generate_function_path":
        try:
            form = generate_form(function)
        except ValueError as error:
            raise ValueError(f"{flag_of(option)} {path} {error}") from error
        return function, ("args", "samples") if form == "list" else ("args", "sample", "sampling_params"), {}
    if option == "custom_rm_path":
        if reward_form(function) == "class":
            scorer = function.compute_reward
            own = ("self",) if inspect.isclass(function) else ()
            return scorer, (*own, "prompts", "responses"), {}
        return function, ("args", "samples"), {}
    hook = HOOKS[option]
    offered = dict.fromkeys(hook.keywords) | accepted_keywords(function, dict.fromkeys(hook.optional))
    return function, hook.positional, offered


def _check_class(option: str, cls: type, path: str) -> None:
    """A class where one belongs, with the methods that are called."""
    methods = HOOKS[option].methods
    if option == "custom_rm_path" and hasattr(cls, "compute_reward"):
        _check_call(option, path, cls, ("model_path",), {})
    elif not methods:
        raise wrong(option, path, "is a class")
    missing = [name for name in methods if not callable(getattr(cls, name, None))]
    if missing:
        raise wrong(option, path, f"is the class {cls.__name__} without {', '.join(missing)}")


def _check_data_source(source: Callable, path: str) -> None:
    """A class, or a function that makes the object, with `(args)` or nothing; get_samples where it can be seen."""
    signature = inspect.signature(source)
    gives_samples = not inspect.isclass(source) and list(signature.parameters)[:1] == ["num_samples"]
    if gives_samples or not (_binds(signature, ("args",)) or _binds(signature, ())):
        raise wrong("data_source_path", path, f"is {_name(source)}{signature}")
    if inspect.isclass(source):
        _check_call("data_source_path", path, source.get_samples, ("self", "num_samples"), {})


def _binds(signature: inspect.Signature, positional: tuple, keywords: dict | None = None) -> bool:
    try:
        signature.bind(*positional, **(keywords or {}))
    except TypeError:
        return False
    return True


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


# ---- in the run ------------------------------------------------------------------------------------------------------


def call_hook(args, option: str, /, *arguments: Any, **keywords: Any) -> Any:
    """Call the function of a flag and return its result, awaited where it is async.

    Raises: HookError for what a user's function raises.
    """
    return call_path(getattr(args, option), option, *arguments, **keywords)


def call_path(path: str, option: str, /, *arguments: Any, **keywords: Any) -> Any:
    """`call_hook` of a path that is not the flag's own value."""
    function = load_hook(path, option)
    with naming(option, path):
        return not_generator(option, path, finish(function(*arguments, **keywords)))


async def await_hook(path: str, option: str, /, *arguments: Any, in_thread: bool = False, **keywords: Any) -> Any:
    """`call_path` from async code.

    Args:
        in_thread: a plain function runs in a thread of its own, so that it may take its time.
    """
    function = load_hook(path, option)
    with naming(option, path):
        if in_thread and is_plain(function):
            result = await run_in_thread(function, *arguments, **keywords)
        else:
            result = function(*arguments, **keywords)
        if inspect.isawaitable(result):
            result = await result
        return not_generator(option, path, result)


def not_generator(option: str, path: str, result: Any) -> Any:
    """Refuse what a function with `yield` gives back: nothing of its body has run."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise wrong(
            option,
            path,
            f"returned a{'n async' if inspect.isasyncgen(result) else ''} generator: use return, not yield",
        )
    return result


@contextlib.contextmanager
def naming(option: str, path: str) -> Iterator[None]:
    """Name the flag and the user's line in what a hook raises; our own functions raise what they raise."""
    if path.startswith("slime."):
        yield
        return
    call = object()
    _running[call] = f"{flag_of(option)} {path}"
    try:
        yield
    except HookError:
        raise
    except (Exception, SystemExit) as error:
        frames = _users_frames(error)
        if not frames:  # found wrong before or after the call
            raise
        shown = "".join(traceback.format_list(frames[-SHOWN_FRAMES:])).rstrip("\n")
        raise HookError(f"{flag_of(option)} {path} raised {type(error).__name__}: {error}\n{shown}") from error
    finally:
        del _running[call]


def oldest_call() -> dict[str, str]:
    """{"oldest hook": flag and path} of the user's hook that has been running for longest in this process, {} if none is."""
    calls = list(_running.values())
    return {"oldest hook": calls[0]} if calls else {}


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error from the first one on that is neither ours nor Python's own."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[next((i for i, frame in enumerate(frames) if _is_users(frame.filename)), len(frames)) :]


def _is_users(file: str) -> bool:
    if file.startswith("<frozen") or file.startswith(_OURS):
        return False
    return not file.startswith(_PYTHONS) or "site-packages" in file
