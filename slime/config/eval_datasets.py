"""Evaluation data sets: from --eval-prompt-data or the --eval-config file to one record per set.

A field is looked up in the set, then in the file's defaults, then in args (the first attribute of its chain that is not
None). It does not read the data.
"""

from __future__ import annotations

import argparse
import difflib
import os
from dataclasses import dataclass, field, fields
from typing import Any

from slime.config.paths import absolute_hook
from slime.config.spec import UserError, UserTypeError
from slime.config.yaml_file import interpolated, read_mapping

#: field -> attributes of args that are asked when neither the set nor the defaults have it.
CHAINS: dict[str, tuple[str, ...]] = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "min_new_tokens": ("eval_min_new_tokens",),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "custom_rm_path": ("eval_custom_rm_path", "custom_rm_path"),
}


@dataclass
class EvalDatasetConfig:
    """One evaluation data set with everything resolved.

    Example: ``EvalDatasetConfig(name="aime", path="data/aime.jsonl", n_samples_per_eval_prompt=8)``.
    """

    name: str
    path: str
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    min_new_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_eval_samples: int | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict | None = None
    custom_rm_path: str | None = None
    rm_type: str | None = None
    metadata_overrides: dict | None = field(default=None)
    custom_generate_function_path: str | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    app_service: str | None = None
    eval_task_timeout: int | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: dict | None = None
    reward_model: dict | None = None
    remote_environment: dict | None = None

    def __post_init__(self):
        if self.metadata_overrides is not None and not isinstance(self.metadata_overrides, dict):
            raise UserTypeError(f"evaluation set {self.name}: metadata_overrides must be a mapping")
        if self.min_eval_samples is not None and self.min_eval_samples <= 0:
            raise UserError(
                f"evaluation set {self.name}: min_eval_samples must be above 0, got {self.min_eval_samples}"
            )
        for name in ("custom_rm_path", "custom_generate_function_path"):
            if getattr(self, name):
                setattr(self, name, absolute_hook(getattr(self, name)))
        if self.path:
            self.path = os.path.abspath(os.path.expanduser(self.path))

    @property
    def unread(self) -> list[str]:
        """The settings given that nothing built in reads."""
        return [name for name in UNREAD if getattr(self, name) is not None]


#: Settings that are there for functions of the user.
UNREAD = ("app_service", "eval_task_timeout", "message_processor", "reward_model", "remote_environment")
FIELD_NAMES = tuple(item.name for item in fields(EvalDatasetConfig))


def _one(args: argparse.Namespace, entry: dict[str, Any], defaults: dict[str, Any]) -> EvalDatasetConfig:
    """Resolve one set."""
    values: dict[str, Any] = {}
    for name in FIELD_NAMES:
        if name in entry:
            values[name] = entry[name]
        elif name in defaults:
            values[name] = defaults[name]
        else:
            found = [vars(args).get(attribute) for attribute in CHAINS.get(name, ())]
            values[name] = next((value for value in found if value is not None), None)
    return EvalDatasetConfig(**values)


def _check_keys(mapping: dict, where: str, error: type[Exception]) -> None:
    """Refuse keys that a data set does not have."""
    unknown = sorted(map(str, set(mapping) - set(FIELD_NAMES)))
    if unknown:
        near = [(name, difflib.get_close_matches(name, FIELD_NAMES, n=1, cutoff=0.6)) for name in unknown]
        named = ", ".join(name + (f" (did you mean {found[0]}?)" if found else "") for name, found in near)
        raise error(f"{where}: unknown key {named}; valid keys: {', '.join(FIELD_NAMES)}")


def _entries(datasets: Any, path: str) -> list[dict[str, Any]]:
    """Bring both shapes of ``datasets`` to a list of mappings with a name."""
    if isinstance(datasets, dict):
        return [{"name": str(name), **(body or {})} for name, body in datasets.items()]
    if not isinstance(datasets, list):
        raise UserTypeError(
            f"--eval-config {path}: datasets must be a list or a mapping, got {type(datasets).__name__}"
        )
    for entry in datasets:
        if not isinstance(entry, dict) or not entry.get("name"):
            raise UserError(f"--eval-config {path}: every data set of a list needs a name, got {entry!r}")
    return datasets


def from_file(args: argparse.Namespace) -> list[EvalDatasetConfig]:
    """Build the sets of the --eval-config file (JSON is YAML)."""
    path = args.eval_config
    root = interpolated(read_mapping(path, "--eval-config"), f"--eval-config {path}")
    root = root.get("eval", root)
    if not isinstance(root, dict):
        raise UserError(f"--eval-config {path}: eval must be a mapping, got {type(root).__name__}")
    defaults = root.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise UserError(f"--eval-config {path}: defaults must be a mapping, got {type(defaults).__name__}")
    _check_keys(defaults, f"--eval-config {path}: defaults", UserError)
    for key in set(root) - {"datasets", "defaults"}:  # any other name may hold values for ${...}
        near = difflib.get_close_matches(str(key), ("datasets", "defaults"), n=1, cutoff=0.8)
        if near:
            raise UserError(f"--eval-config {path}: unknown key {key} (did you mean {near[0]}?)")
    if not root.get("datasets"):
        raise UserError(f"--eval-config {path}: no datasets; the file has {', '.join(map(str, root)) or 'nothing'}")
    sets = []
    for entry in _entries(root["datasets"], path):
        _check_keys(entry, f"--eval-config {path}: data set {entry['name']}", UserTypeError)
        if not entry.get("path"):
            raise UserTypeError(f"--eval-config {path}: data set {entry['name']} has no path")
        sets.append(_one(args, entry, defaults))
    return sets


def from_pairs(args: argparse.Namespace) -> list[EvalDatasetConfig]:
    """Build the sets of --eval-prompt-data: name path pairs of all occurrences; a lone value is a set called aime."""
    words = [word for occurrence in args.eval_prompt_data for word in occurrence]
    if len(words) == 1:
        words = ["aime", words[0]]
    if len(words) % 2:
        raise UserError(f"--eval-prompt-data needs name path pairs, got {len(words)} values: {' '.join(words)}")
    return [_one(args, {"name": n, "path": p}, {}) for n, p in zip(words[::2], words[1::2], strict=True)]


def where(args: argparse.Namespace, item: EvalDatasetConfig) -> str:
    """Name a set and the flag that it comes from, as the beginning of a message."""
    flag = f"--eval-config {args.eval_config}" if args.eval_config else "--eval-prompt-data"
    return f"{flag}: evaluation set {item.name}:"


def build_eval_datasets(args: argparse.Namespace) -> list[EvalDatasetConfig]:
    """Build the evaluation sets of a run; an empty list when none is named.

    Raises: UserError or TypeError for a malformed list or file, and for two sets of one name.
    """
    if args.eval_config:
        sets = from_file(args)
    elif args.eval_prompt_data:
        sets = from_pairs(args)
    else:
        return []
    names = [item.name for item in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"evaluation sets need different names, {', '.join(twice)} stands twice")
    return sets
