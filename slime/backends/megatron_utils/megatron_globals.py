"""`megatron.training.get_args()` for users' hooks that are given no arguments, as model providers are not.

megatron-core comes without `megatron.training`; where that is not installed, modules of its name hold the few functions that
hooks take from there. Where it is, its own arguments become the run's.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAME = "megatron.training"


def offer(args) -> None:
    """Have `get_args` give this process's arguments, with the vocabulary's size as the model has it."""

    def get_args():
        from slime.backends.megatron_utils.model_config import padded_vocab_size, resolve_architecture

        resolve_architecture(args)
        own = copy.copy(args)
        own.padded_vocab_size = padded_vocab_size(args)
        return own

    if _is_installed():
        from megatron.training import global_vars

        if global_vars._GLOBAL_ARGS is None:
            global_vars.set_args(get_args())
        return
    from slime.backends.megatron_utils.model_config import transformer_config

    _put(_NAME, get_args=get_args)
    _put(f"{_NAME}.global_vars", get_args=get_args)
    _put(
        f"{_NAME}.arguments", core_transformer_config_from_args=lambda args, config_class=None: transformer_config(args)
    )


def _is_installed() -> bool:
    known = sys.modules.get(_NAME)
    return importlib.util.find_spec(_NAME) is not None if known is None else known.__spec__.loader is not None


def _put(name: str, **functions) -> None:
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, None, is_package=name == _NAME)
    if name == _NAME:
        module.__path__ = []
    vars(module).update(functions)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, module)
