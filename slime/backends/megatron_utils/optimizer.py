"""Wrap the model for gradient reduction and build Megatron's optimizer and its learning-rate schedule.

The schedule counts samples: it advances by the global batch size per optimizer step, and its length is that of the
whole run, `num_rollout * rollout_batch_size * n_samples_per_prompt // global_batch_size` steps.
"""

from __future__ import annotations

import dataclasses
import re

import torch

from slime.backends.megatron_utils import optimizer_fixes, shortcuts
from slime.backends.megatron_utils.model_config import DTYPES
from slime.backends.megatron_utils.parameters import all_named_parameters, is_expert
from slime.backends.megatron_utils.stateless_adam import replace_adam
from slime.config.validate import schedule_problem


def freeze_parameters(args, chunks: list[torch.nn.Module]) -> None:
    """Turn gradients off as `--only-train-params-name-list` or `--freeze-params-name-list` say (`re.search`).

    Patterns are searched in names with global layer numbers, over all pipeline stages.

    Raises: ValueError when a pattern matches nothing, or a stage has nothing left to train.
    """
    only, frozen = args.only_train_params_name_list, args.freeze_params_name_list
    if not only and not frozen:
        return
    own = {name: p for name, p in all_named_parameters(chunks) if isinstance(p, torch.nn.Parameter)}
    names = _names_on_all_ranks(list(own))
    for pattern in only or frozen:
        if not any(re.search(pattern, name) for name in names):
            flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
            raise ValueError(f"{flag} {pattern}: no parameter of the model matches")
    for name, parameter in own.items():
        if only:
            parameter.requires_grad_(any(re.search(pattern, name) for pattern in only))
        elif any(re.search(pattern, name) for pattern in frozen):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in own.values()):
        where = "" if len(names) == len(own) else " on one of the pipeline stages"
        raise ValueError(
            f"no parameter left to train{where}: --only-train-params-name-list {only}, --freeze-params-name-list {frozen}"
        )


def _names_on_all_ranks(own: list[str]) -> set[str]:
    """Names of all pipeline stages and of the experts of all expert ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    names = set(own)
    for group in (mpu.get_pipeline_model_parallel_group(), mpu.get_expert_model_parallel_group()):
        if group.size() > 1:
            found = [None] * group.size()
            dist.all_gather_object(found, names, group=group)
            names = set().union(*found)
    return names


def shards_optimizer(args) -> bool:
    """Return whether optimizer state is spread over data-parallel ranks; Megatron can do that for Adam only."""
    return args.use_distributed_optimizer and args.optimizer == "adam"


def wrap_model(args, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the chunks in 16-bit casting (if the precision asks) and Megatron's data-parallel wrapper."""
    return [_wrap_chunk(args, chunk, is_first=i == 0) for i, chunk in enumerate(chunks)]


def _wrap_chunk(args, model: torch.nn.Module, is_first: bool) -> torch.nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = model.config
    for name, parameter in model.named_parameters():
        if is_expert(name):
            # Also on one expert rank, as on several: then a checkpoint's optimizer has the same parts on every layout.
            parameter.allreduce = False
    if config.fp16 or config.bf16:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.precision == "fp32" or args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=shards_optimizer(args),
        check_for_nan_in_grad=False,  # a step with such gradients is skipped and reported, it does not end the run
    )
    wrapped = DistributedDataParallel(config, ddp_config, model, disable_bucketing=not is_first)
    wrapped.broadcast_params()
    shortcuts.skip_lonely(wrapped)
    return wrapped


def build_optimizer(args, model: list):
    """Return Megatron's optimizer over wrapped model chunks, with its gradient callbacks put into the model config."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.utils import get_model_config

    optimizer_fixes.install()
    shortcuts.list_kernels()
    optimizer = get_megatron_optimizer(optimizer_config(args), model)
    optimizer_fixes.give_initialisers(optimizer)
    shortcuts.fuse_adam(optimizer)
    if args.use_stateless_adam:
        replace_adam(optimizer, args.decoupled_weight_decay)
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = model[0].no_sync if len(model) == 1 else [chunk.no_sync for chunk in model]
    return optimizer


def optimizer_config(args):
    """Return the OptimizerConfig; fields are taken from the arguments of the same name."""
    from megatron.core.optimizer import OptimizerConfig

    given = vars(args)
    values = {}
    for field in dataclasses.fields(OptimizerConfig):
        if field.init and field.name in given and not (given[field.name] is None and field.default is not None):
            value = given[field.name]
            values[field.name] = DTYPES[value] if field.name.endswith("_dtype") and isinstance(value, str) else value
    values.update(
        fp16=args.precision == "fp16",
        bf16=args.precision == "bf16",
        params_dtype=DTYPES[args.precision],
        use_distributed_optimizer=shards_optimizer(args),
    )
    return OptimizerConfig(**values)


def num_train_steps(args) -> int:
    """Return the optimizer steps of the whole run."""
    return args.num_rollout * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size


def build_scheduler(args, optimizer):
    """Return the OptimizerParamScheduler.

    Raises: ValueError when the warmup does not end before the schedule does, or the run has no step.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    batch = args.global_batch_size
    decay_iters = args.lr_decay_iters if args.lr_decay_iters is not None else num_train_steps(args)
    decay = decay_iters * batch
    fraction = args.lr_warmup_fraction
    warmup = fraction * decay if fraction is not None else args.lr_warmup_iters * batch
    if args.lr_decay_style == "constant":
        decay = max(decay, warmup + batch)  # nothing decays: a run shorter than its warmup is fine
    if decay <= 0 or warmup >= decay:
        raise ValueError(schedule_problem(decay_iters, warmup / batch))
    start_wd = args.weight_decay if args.start_weight_decay is None else args.start_weight_decay
    end_wd = args.weight_decay if args.end_weight_decay is None else args.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr or 0.0,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=max(num_train_steps(args), 1) * batch,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        # A continued run follows the schedule of its own command line (a longer --num-rollout moves the end of a decay).
        override_opt_param_scheduler=args.override_opt_param_scheduler or not args.use_checkpoint_opt_param_scheduler,
        wsd_decay_steps=None if args.lr_wsd_decay_iters is None else args.lr_wsd_decay_iters * batch,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def reset_states(optimizer) -> None:
    """Forget moments and step counts (`--reset-optimizer-states`), keeping the state tensors."""
    for part in optimizer_fixes.parts(optimizer):
        for state in part.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    value.zero_()
        for group in part.optimizer.param_groups:
            if "step" in group:  # the fused Adams of GPUs count here
                group["step"] = 0
