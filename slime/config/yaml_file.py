"""Values of flags from YAML files: --config (any flag) and --custom-config-path (any attribute).

Keys are written with dashes or underscores, as the flag is spelled or as the attribute is called. Values are checked by
the same type and choices as on the command line; YAML's habit of reading 1e-5 as text is undone by that.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from typing import Any

from slime.config.spec import UserError

_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_SWITCHES = (argparse._StoreTrueAction, argparse._StoreFalseAction, argparse.BooleanOptionalAction)


def read_mapping(path: str, flag: str) -> dict[str, Any]:
    """Read a YAML file that holds a mapping."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.safe_load(file)
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{flag} {path}: not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{flag} {path}: expected a mapping of flags to values, got {type(data).__name__}")
    return {str(key): value for key, value in data.items()}


def interpolated(root: dict[str, Any], where: str) -> dict[str, Any]:
    """`${a.b}` replaced by the value at that place of the file, `${oc.env:NAME}` and `${oc.env:NAME,default}` by the environment's.

    Raises: UserError naming the reference that leads nowhere, or in a circle.
    """

    def look_up(name: str, above: tuple[str, ...]) -> Any:
        if name in above:
            raise UserError(f"{where}: ${{{name}}} refers to itself")
        if name.startswith("oc.env:"):
            variable, _, default = name.removeprefix("oc.env:").partition(",")
            found = os.environ.get(variable.strip(), default.strip() or None)
        else:
            found = root
            for key in name.split("."):
                found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            raise UserError(f"{where}: ${{{name}}} is not defined")
        return resolve(found, (*above, name))

    def resolve(value: Any, above: tuple[str, ...] = ()) -> Any:
        if isinstance(value, dict):
            return {key: resolve(item, above) for key, item in value.items()}
        if isinstance(value, list):
            return [resolve(item, above) for item in value]
        if not isinstance(value, str):
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return look_up(whole[1], above)
        return _REFERENCE.sub(lambda match: str(look_up(match[1], above)), value)

    return resolve(root)


def _element(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> Any:
    """Convert one value as the command line would."""
    if action.type is not None and not isinstance(value, dict):
        try:
            value = parser._get_value(action, value if isinstance(value, str) else str(value))
        except argparse.ArgumentError as error:
            raise UserError(f"{where}: {error.message}") from None
    if action.choices is not None and value not in action.choices:
        raise UserError(f"{where}: {value!r} is not one of {', '.join(map(str, action.choices))}")
    return value


def convert(parser: argparse.ArgumentParser, action: argparse.Action, key: str, value: Any, path: str) -> Any:
    """Convert a YAML value to what the flag would have stored."""
    where = f"{path}: {key}"
    if value is None:
        return None
    if isinstance(action, _SWITCHES):
        if not isinstance(value, bool):
            raise UserError(f"{where}: expected true or false, got {value!r}")
        is_own_name = key.replace("_", "-") in {name.removeprefix("--") for name in action.option_strings}
        inverted = isinstance(action, argparse._StoreFalseAction) and is_own_name
        return not value if inverted else value
    is_list = action.nargs not in (None, "?") or isinstance(action, argparse._AppendAction)
    if is_list:
        items = value if isinstance(value, list) else [value]
        if isinstance(action, argparse._AppendAction) and action.nargs is not None:
            occurrences = items if all(isinstance(item, list) for item in items) else [items]
            return [[_element(parser, action, item, where) for item in words] for words in occurrences]
        return [_element(parser, action, item, where) for item in items]
    if isinstance(value, list | bool):
        raise UserError(f"{where}: expected one value, got {value!r}")
    return _element(parser, action, value, where)


def _index(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Map every accepted key, in its underscore form, to the action of its flag; attributes win over spellings."""
    table: dict[str, argparse.Action] = {}
    for action in parser._actions:
        for name in action.option_strings:
            table.setdefault(name.lstrip("-").replace("-", "_"), action)
    for action in parser._actions:
        table.setdefault(action.dest, action)
    return table


def file_values(path: str, parser: argparse.ArgumentParser, notes: list[str]) -> dict[str, Any]:
    """Read the --config file: attribute -> value. Unknown keys are errors with the nearest flag."""
    table = _index(parser)
    values: dict[str, Any] = {}
    for key, value in read_mapping(path, "--config").items():
        plain = key.replace("-", "_")
        action = table.get(plain)
        if action is None:
            near = difflib.get_close_matches(plain, list(table), n=1, cutoff=0.6)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"--config {path}: unknown key {key}{hint}")
        values[action.dest] = convert(parser, action, key, value, path)
    notes.append(f"{len(values)} flags from {path}; the command line wins over the file")
    return values


def apply_custom_config(args: argparse.Namespace, given: set[str], notes: list[str]) -> None:
    """Set every key of --custom-config-path on args: the file wins, keys that no flag has are kept and named."""
    from slime.config.parse import standard_parser

    if not args.custom_config_path:
        return
    parser, _ = standard_parser()
    table = {action.dest: action for action in parser._actions}
    unknown = []
    for key, value in read_mapping(args.custom_config_path, "--custom-config-path").items():
        name = key.replace("-", "_")
        if name in table:
            value = convert(parser, table[name], name, value, args.custom_config_path)
        elif not hasattr(args, name):
            unknown.append(key)
        setattr(args, name, value)
        given.add(name)
    if unknown:
        notes.append(f"--custom-config-path sets keys that no flag has: {', '.join(unknown)}")
