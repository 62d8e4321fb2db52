"""Finding a user's hook: `pkg.mod.attr`, `file.py:attr`, or `file.py` with the attribute searched by option name.

Invariant: a module is imported once per process, whatever its spelling. Every failure is an ImportError or AttributeError that
names the flag, the path, where it was looked for, what is there instead, and, for code that fails while it is imported, file
and line. Does not know what the hooks do; how they are called is in `slime.utils.hook_calls`.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable
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

_hook_folders: dict[str, str] = {}  # folder of a loaded `file.py` -> the file


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
    return f"searched working folder {os.getcwd()}, sys.path {list(dict.fromkeys(p for p in sys.path if p))}"


def _add_to_search_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


# ---- modules ---------------------------------------------------------------------------------------------------------


def _import_module(name: str, path: str, option: str | None) -> ModuleType:
    _add_to_search_path(os.getcwd())
    if name in sys.modules:
        return sys.modules[name]
    importlib.invalidate_caches()  # the file may be younger than the last look into its folder
    try:
        spec = importlib.util.find_spec(name)
        loaded = None if spec is None else _module_of_file(spec.origin)
        return importlib.import_module(name) if loaded is None else loaded
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _import_failure(error, path, option, name) from error


def _load_file(file: str, path: str, option: str | None) -> ModuleType:
    file = os.path.realpath(os.path.expanduser(file))
    if not os.path.isfile(file):
        hint = did_you_mean(os.path.basename(file), _python_files(os.path.dirname(file)))
        raise ImportError(f"{_flag(option)}cannot import {path!r}: no file {file}{hint}; {_search_path_text()}")
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
        _check_neighbours(module, file)
    except KeyboardInterrupt:
        del sys.modules[name]
        raise
    except BaseException as error:
        del sys.modules[name]
        raise _import_failure(error, path, option) from error
    _hook_folders.setdefault(os.path.dirname(file), file)
    return module


def _import_failure(error: BaseException, path: str, option: str | None, module: str | None = None) -> ImportError:
    """What went wrong in one message: a module that is not there, with the nearest name, or code that fails, with its place."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if module is not None and missing is not None and (module == missing or module.startswith(f"{missing}.")):
        parent, _, last = missing.rpartition(".")
        hint = did_you_mean(last, _modules_below(parent))
        return ImportError(f"{_flag(option)}cannot import {path!r}: {error}{hint}; {_search_path_text()}")
    kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
    search = f"; {_search_path_text()}" if missing else ""
    return ImportError(f"{_flag(option)}cannot import {path!r}: {kind}{error}{_place_of(error)}{search}")


def _place_of(error: BaseException) -> str:
    """File and line of the user's code that failed."""
    if isinstance(error, SyntaxError):
        return ""  # its text has them
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_import_machinery(f.filename)]
    frames = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f" (in {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _is_import_machinery(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen") or file == importlib.__file__


def _check_neighbours(module: ModuleType, file: str) -> None:
    """Refuse a module that got its neighbour's namesake: two hooks' folders that both hold a `helpers.py`.

    Python keeps one module of a name; the second hook would silently work with the first one's.
    """
    folder = os.path.dirname(file)
    names = {
        value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        for value in vars(module).values()
    }
    for name in names & {os.path.splitext(other)[0] for other in _python_files(folder)}:
        origin = os.path.realpath(getattr(sys.modules.get(name), "__file__", None) or file)
        other = _hook_folders.get(os.path.dirname(origin))
        if other is not None and os.path.dirname(origin) != folder:
            raise ImportError(
                f"{file} imports {name}, which is {origin} here: the hook {other} imported it first; rename one of the two files"
            )


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


# ---- attributes ------------------------------------------------------------------------------------------------------


def _attribute(module: ModuleType, attribute: str, path: str, option: str | None) -> Any:
    """`attribute` of the module; dots lead into classes and objects."""
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise AttributeError(
                f"{_flag(option)}{path!r}: module {module.__name__} ({getattr(module, '__file__', 'built in')}) has no "
                f"{attribute!r}{did_you_mean(name, _public_names(module))}; it defines {_public_names(module)}"
            )
        found = getattr(found, name)
    return found


def _public_names(module: ModuleType) -> list[str]:
    """Functions, classes and callable objects that the module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (callable(value) or hasattr(value, "compute_reward"))
        and getattr(value, "__module__", module.__name__) in (module.__name__, "functools")
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


# ---- suggestions -----------------------------------------------------------------------------------------------------


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean x?)` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _python_files(folder: str) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".py")] if os.path.isdir(folder) else []


def _modules_below(package: str) -> list[str]:
    """Names of the modules of a package that is loaded, or of the user's own ones at the top level."""
    libraries = ("site-packages", os.path.dirname(os.__file__))
    own = [folder for folder in sys.path if folder and not any(library in folder for library in libraries)]
    folders = getattr(sys.modules.get(package), "__path__", None) if package else [os.getcwd(), *own]
    return [module.name for module in pkgutil.iter_modules(folders or [])]
