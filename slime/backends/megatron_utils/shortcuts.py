"""Megatron's detours that change no number, taken out: they are most of the fixed cost of a small step.

    plain_linears      linear layers without fusion or communication as torch's own, instead of an autograd function in Python
    skip_lonely        gradient reduction and parameter gathering in groups of one rank
    list_kernels       norm and scaling of all gradients in one call instead of a Python loop (where neither Transformer Engine
                       nor Apex brings kernels)
    fuse_adam          torch's Adam in one pass over memory instead of about ten

Each is conditional on the case that it covers; everything else goes Megatron's way. `tests/unit/megatron/test_shortcuts.py`
compares with and without, and fails when a name is gone from the pinned version.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.optimizer_fixes import parts


def plain_linears() -> None:
    """Replace the linear function and the tensor-parallel mappings in Megatron's layers. Safe to call again."""
    from megatron.core.tensor_parallel import layers

    if hasattr(layers, "_slow_linear"):
        return
    layers._slow_linear = layers.linear_with_grad_accumulation_and_async_allreduce
    layers._slow_copy = layers.copy_to_tensor_model_parallel_region
    layers._slow_reduce = layers.reduce_from_tensor_model_parallel_region
    linear = partial(_linear, layers._slow_linear)
    vars(linear).update(vars(layers._slow_linear))  # the function keeps a flag of its own under its global name
    layers.linear_with_grad_accumulation_and_async_allreduce = linear
    layers.copy_to_tensor_model_parallel_region = partial(_mapping, layers._slow_copy)
    layers.reduce_from_tensor_model_parallel_region = partial(_mapping, layers._slow_reduce)


def _linear(
    slow,
    input,
    weight,
    bias,
    gradient_accumulation_fusion,
    allreduce_dgrad,
    sequence_parallel,
    grad_output_buffer=None,
    *args,
    **kwargs,
):
    if gradient_accumulation_fusion or allreduce_dgrad or sequence_parallel or grad_output_buffer is not None:
        return slow(
            input,
            weight,
            bias,
            gradient_accumulation_fusion,
            allreduce_dgrad,
            sequence_parallel,
            grad_output_buffer,
            *args,
            **kwargs,
        )
    return F.linear(input, weight, bias)


def _mapping(slow, input_, group=None):
    """The forward or backward all-reduce of a tensor-parallel region; one rank has nothing to add up."""
    return input_ if group is not None and group.size() == 1 else slow(input_, group=group)


def list_kernels() -> None:
    """Replace Megatron's Python loops over gradients. Does nothing where compiled kernels are in their place."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale
    if clip_grads.to_local_if_dtensor is utils.to_local_if_dtensor:
        clip_grads.to_local_if_dtensor = partial(_local, utils.to_local_if_dtensor)


def _local(slow, tensor):
    return tensor if type(tensor) is torch.Tensor else slow(tensor)


def _l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor, *args):
    norms = torch._foreach_norm(tensor_lists[0])
    return torch.linalg.vector_norm(torch.stack(norms).float()).reshape(1), None


def _scale(chunk_size, noop_flag, tensor_lists, scale):
    sources, targets = tensor_lists
    if sources is targets:
        torch._foreach_mul_(targets, scale)
    else:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, scale))


def skip_lonely(model) -> None:
    """Leave out the collectives of a data-parallel wrapper's buffers in groups of one rank."""
    config = model.ddp_config
    if config.overlap_grad_reduce or config.overlap_param_gather or config.num_distributed_optimizer_instances > 1:
        return
    for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
        sharded = config.use_distributed_optimizer
        ranks = group.intra_distributed_optimizer_instance_group if sharded else group.data_parallel_group
        if ranks.size() == 1:
            group.start_grad_sync = partial(_only_scale, group)
            if sharded:
                group.start_param_sync = partial(_already_synced, group)


def _only_scale(group, force_all_reduce: bool = False) -> None:
    for bucket in group.buckets:
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor


def _already_synced(group, force_sync: bool = False) -> None:
    group.param_gather_dispatched = True


def fuse_adam(optimizer) -> None:
    """Have torch's Adam update in one fused pass; also after a checkpoint brought settings of its own. Safe to call again."""
    for part in parts(optimizer):
        inner = part.optimizer
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            for group in inner.param_groups:
                group["fused"], group["foreach"] = True, False
