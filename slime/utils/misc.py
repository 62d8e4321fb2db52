"""Small leaves shared by all layers: hook loading, singletons, the periodic rule, grouping, boxed references, garbage.

Invariant: `load_function` imports a module once per process, whatever its spelling (dotted path, `file.py:attr`, or
`file.py` with the attribute searched by option name). Does not know what the hooks do; their call forms are in
`slime.utils.hook_forms`.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

# Attribute names searched in a `file.py` given without `:attr`, in order of preference, by option.
FILE_ATTRIBUTES = {
    "custom_generate_function_path": ("custom_generate", "generate"),
    "custom_rm_path": ("custom_rm", "reward_func", "CustomRewardModel"),
    "eval_custom_rm_path": ("custom_rm", "reward_func", "CustomRewardModel"),
    "rollout_function_path": ("rollout_function", "generate_rollout"),
    "eval_function_path": ("eval_function", "generate_rollout"),
}


class SingletonMeta(type):
    """Metaclass of classes with one instance per process; `clear_instance` forgets it."""

    _instances: dict[type, Any] = {}

    def __call__(cls, *args, **kwargs):
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    def clear_instance(cls) -> None:
        SingletonMeta._instances.pop(cls, None)


class Box:
    """Wraps a value (a Ray object reference) so that it is passed on as it is, not resolved on the way."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def inner(self) -> Any:
        return self._inner


def group_by(items: Iterable[Any], key: Callable[[Any], Any] | None = None) -> dict[Any, list[Any]]:
    """Lists of items by key, in first-seen order.

    >>> group_by([1, 2, 3], key=lambda x: x % 2)
    {1: [1, 3], 0: [2]}
    """
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Whether an action with this interval is due after rollout `rollout_id` (also at epoch ends and at the last one)."""
    if interval is None:
        return False
    if num_rollout is not None and rollout_id == num_rollout - 1:
        return True
    step = rollout_id + 1
    return step % interval == 0 or (num_rollout_per_epoch is not None and step % num_rollout_per_epoch == 0)


def settle_garbage_collection() -> None:
    """Call once a process that makes thousands of small objects a round has started.

    What is there by then lives until the end and is not searched again. Python's threshold of 700 new objects would start a score
    of searches in a round, of objects that nearly all live until its end; cycles are rare, and are found some rounds later.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


# ---- hooks ---------------------------------------------------------------------------------------------------------


def load_function(path: str) -> Any:
    """The object at `pkg.mod.attr` or `file.py:attr`; cached per path."""
    return load_hook(path, None)


def load_hook(path: str, option: str | None) -> Any:
    """Like `load_function`, and `file.py` alone searches the attribute by the option's name.

    Raises:
        ImportError: the module cannot be found or imported; the message shows flag, path and search path.
        AttributeError: the module has no such attribute.
    """
    name = None if option is None else option.lstrip("-").replace("-", "_")
    return _load_hook(path, name, os.getcwd())


def hook_attribute_path(path: str, option: str) -> str:
    """Load the hook and return its path with the attribute spelled out: a bare `file.py` becomes `/abs/file.py:attr`."""
    load_hook(path, option)
    if not path.endswith(".py"):
        return path
    name = option.lstrip("-").replace("-", "_")
    file = os.path.realpath(os.path.expanduser(path))
    return f"{file}:{_search_attribute(_load_file(file, path, name), path, name)}"


def spell_out_hooks(args: Any, options: Iterable[str]) -> None:
    """Load the hooks of these flags and make a bare `file.py` name `/abs/file.py:attr`, so that `load_function` finds it.

    Raises:
        ImportError, AttributeError: names the flag, the path, and what was found instead.
    """
    for option in options:
        value = getattr(args, option)
        if isinstance(value, list):
            setattr(args, option, [hook_attribute_path(path, option) for path in value])
        elif value:
            setattr(args, option, hook_attribute_path(value, option))


@functools.cache
def _load_hook(path: str, option: str | None, cwd: str) -> Any:
    file, _, attribute = path.rpartition(":")
    if file.endswith(".py"):
        return _attribute(_load_file(file, path, option), attribute, path, option)
    if path.endswith(".py"):
        module = _load_file(path, path, option)
        return _attribute(module, _search_attribute(module, path, option), path, option)
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ImportError(f"{_flag(option)}{path!r} is not a path of the form pkg.mod.attr, file.py:attr or file.py")
    return _attribute(_import_module(module_name, path, option), attribute, path, option)


def _flag(option: str | None) -> str:
    return "" if option is None else f"--{option.replace('_', '-')}: "


def _search_path_text() -> str:
    return f"working folder {os.getcwd()}, sys.path {[p for p in sys.path if p]}"


def _add_to_search_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _import_module(name: str, path: str, option: str | None) -> ModuleType:
    _add_to_search_path(os.getcwd())
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec(name)
        loaded = None if spec is None else _module_of_file(spec.origin)
        if loaded is not None:
            return loaded
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{_flag(option)}cannot import {path!r}: {error}; searched {_search_path_text()}") from error


def _load_file(file: str, path: str, option: str | None) -> ModuleType:
    file = os.path.realpath(os.path.expanduser(file))
    if not os.path.isfile(file):
        raise ImportError(f"{_flag(option)}cannot import {path!r}: no file {file}; searched {_search_path_text()}")
    loaded = _module_of_file(file)
    if loaded is not None:
        return loaded
    _add_to_search_path(os.path.dirname(file))
    stem = os.path.splitext(os.path.basename(file))[0]
    name = f"slime_hook_{stem}_{hashlib.sha1(file.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ImportError):
            raise ImportError(
                f"{_flag(option)}cannot import {path!r}: {error}; searched {_search_path_text()}"
            ) from error
        raise
    return module


def _module_of_file(file: str | None) -> ModuleType | None:
    """The module already loaded from this file under any name, so that its state is shared."""
    if not file:
        return None
    name, path = os.path.basename(file), os.path.realpath(file)
    for module_name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None) or ""
        if origin.endswith(name) and module_name != "__main__" and os.path.realpath(origin) == path:
            return module
    return None


def _attribute(module: ModuleType, attribute: str, path: str, option: str | None) -> Any:
    if not hasattr(module, attribute):
        raise AttributeError(
            f"{_flag(option)}{path!r}: module {module.__name__} ({module.__file__}) has no {attribute!r}; "
            f"it defines {_public_names(module)}"
        )
    return getattr(module, attribute)


def _public_names(module: ModuleType) -> list[str]:
    """Functions and classes that the module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


def _search_attribute(module: ModuleType, path: str, option: str | None) -> str:
    if option is None:
        raise ImportError(
            f"{path!r} names a file without an attribute; write file.py:attr, one of {_public_names(module)}"
        )
    if option == "data_source_path":
        found = _data_source_classes(module)
        wanted: tuple[str, ...] = ("a class with get_samples",)
    else:
        wanted = FILE_ATTRIBUTES.get(option, (option.removeprefix("custom_").removesuffix("_path"),))
        found = [name for name in wanted if hasattr(module, name)][:1]
    if len(found) != 1:
        problem = "more than one candidate" if found else "no candidate"
        raise AttributeError(
            f"{_flag(option)}{path!r}: {problem} for {', '.join(wanted)}; candidates in the file: "
            f"{found or _public_names(module)}; write {path}:NAME"
        )
    return found[0]


def _data_source_classes(module: ModuleType) -> list[str]:
    classes = [
        (name, value)
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "get_samples")
    ]
    parents = {base for _, value in classes for base in value.__mro__[1:]}
    return [name for name, value in classes if value not in parents]
