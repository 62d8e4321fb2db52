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
    """Have `get_args` give this process's arguments, with the vocabulary's size as the model has it.

    Before users' modules are imported, in the Data Buffer's process too: a file may hold hooks of both.
    """

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
    _put(_NAME, get_args=get_args, print_rank_0=_print_rank_0)
    _put(f"{_NAME}.utils", print_rank_0=_print_rank_0, unwrap_model=_unwrap_model)
    _put(f"{_NAME}.global_vars", get_args=get_args)
    _put(f"{_NAME}.arguments", core_transformer_config_from_args=_transformer_config)


def _transformer_config(args, config_class=None):
    from slime.backends.megatron_utils.model_config import transformer_config

    return transformer_config(args)


def _print_rank_0(message) -> None:
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def _unwrap_model(model, *_kinds):
    from slime.backends.megatron_utils.model_provider import unwrap

    return [unwrap(chunk) for chunk in model] if isinstance(model, list) else unwrap(model)


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
