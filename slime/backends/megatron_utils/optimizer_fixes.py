"""Faults of megatron-core 0.16's optimizers around checkpoints, and their repair. With torch's Adam:

1. A fresh Adam has no state, so `state_dict()` asserts: `prime` creates it with zeros.
2. Loading walks the live state, whose "step" is not among the loaded tensors (KeyError): `install` walks what was loaded.
3. Loading puts one step tensor into every parameter's state; Adam then increments it once per parameter and training
   drifts without a message: `unshare_steps` gives each its own.

With SGD:
4. There is no initialiser of its state, so saving and loading fail: `give_initialisers` adds one.

All are no-ops with optimizers that do not have the fault. The resume test compares the second step after loading:
the first looks right even with fault 3.
"""

from __future__ import annotations

import torch


def parts(optimizer) -> list:
    """Return the optimizers inside a ChainedOptimizer that have parameters, or the one itself."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member for member in members if member.optimizer is not None]


def install() -> None:
    """Replace the faulty loader of parameter state (fault 2). Safe to call again."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if DistributedOptimizer._set_main_param_and_optimizer_states is not _set_states:
        DistributedOptimizer._upstream_set_states = DistributedOptimizer._set_main_param_and_optimizer_states
        DistributedOptimizer._set_main_param_and_optimizer_states = _set_states


def _set_states(self, model_param, tensors) -> None:
    if self.config.use_precision_aware_optimizer:
        self._upstream_set_states(model_param, tensors)
        return
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    live = {"param": main_param, **self.optimizer.state[main_param]}
    for name, value in tensors.items():
        live[name].copy_(value)


def prime(optimizer) -> None:
    """Give Adam's parameters the zero state that their first step would create (fault 1)."""
    for part in parts(optimizer):
        inner = part.optimizer
        if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter].update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )


def give_initialisers(optimizer) -> None:
    """Let optimizers without Megatron's state initialiser be saved and loaded (fault 4)."""
    for part in parts(optimizer):
        if getattr(part, "init_state_fn", prime_sgd) is None:
            part.init_state_fn = prime_sgd


def prime_sgd(inner: torch.optim.Optimizer, config=None) -> None:
    """Give SGD's parameters the momentum that their first step would start from; nothing without momentum."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            if group.get("momentum") and not inner.state[parameter]:
                inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def unshare_steps(optimizer) -> None:
    """Give every parameter a step tensor of its own (fault 3)."""
    for part in parts(optimizer):
        for state in part.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
