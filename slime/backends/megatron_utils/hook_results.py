"""Calls of the trainer's hooks, and what they give back, checked before it reaches the model.

An error names the flag and the hook, what is wrong, and the form that is expected. L_i: response tokens of sample i, N: those
of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slime.utils import device
from slime.utils.hook_calls import call_hook, call_path, spec_path, wrong
from slime.utils.hook_forms import accepted_keywords, accepts_keyword
from slime.utils.misc import load_hook

ADVANTAGE = "custom_advantage_function_path"
LOSS = "custom_loss_function_path"
MODEL = "custom_model_provider_path"
POSTPROCESS = "rollout_data_postprocess_path"
SPEC = "spec"
REDUCER = "custom_pg_loss_reducer_function_path"
TIS = "custom_tis_function_path"


def advantages(args, data: dict) -> None:
    """Let the hook set `advantages` and `returns` of `data`, one tensor [L_i] per sample each."""
    path = args.custom_advantage_function_path
    call_hook(args, ADVANTAGE, args, data)
    for name in ("advantages", "returns"):
        if name not in data:
            raise wrong(ADVANTAGE, path, f"did not set {name}")
        _check_rows(ADVANTAGE, path, name, data[name], data["response_lengths"])


def postprocess(args, rollout_id: int, data: dict) -> None:
    """Let the hook change the columns of `data`; those that are trained on have to fit the samples afterwards."""
    path = args.rollout_data_postprocess_path
    before = {"loss_masks", "advantages", "returns", "log_probs", "rollout_log_probs"} & data.keys()
    call_hook(args, POSTPROCESS, args, rollout_id, data)
    for name in sorted(before):
        if name not in data:
            raise wrong(POSTPROCESS, path, f"removed {name}")
        _check_rows(POSTPROCESS, path, name, data[name], data["response_lengths"])


def _check_rows(option: str, path: str, name: str, rows: Any, lengths: list[int]) -> None:
    found = [tuple(row.shape) if isinstance(row, torch.Tensor) else f"a {type(row).__name__}" for row in rows]
    if found != [(length,) for length in lengths]:
        raise wrong(option, path, f"left {name} of shapes {found[:8]} for responses of {list(lengths)[:8]} tokens")


def loss(args, columns: dict, logits: torch.Tensor, reducer: Callable) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics as detached tensors) of `--custom-loss-function-path`."""
    path, result = args.custom_loss_function_path, call_hook(args, LOSS, args, columns, logits, reducer)
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[1], dict):
        raise wrong(LOSS, path, f"returned a {type(result).__name__}")
    value, metrics = result
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise wrong(LOSS, path, f"returned a {type(value).__name__}{shape} as the loss, which is no scalar")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise wrong(LOSS, path, "returned a loss without gradient: it has to be computed from logits")
    return value.reshape(()), {name: torch.as_tensor(x, device=value.device).detach() for name, x in metrics.items()}


def tis(args, *, pg_loss: torch.Tensor, loss_masks: list[torch.Tensor], **others: Any):
    """(token losses [N], masks, metrics) of `--custom-tis-function-path`."""
    path = args.custom_tis_function_path
    result = call_hook(args, TIS, args=args, pg_loss=pg_loss, loss_masks=loss_masks, **others)
    if not isinstance(result, (tuple, list)) or len(result) != 3 or not isinstance(result[2], dict):
        raise wrong(TIS, path, f"returned a {type(result).__name__}")
    corrected, masks, metrics = result
    for name, tensor in {"pg_loss": corrected, **metrics}.items():
        if getattr(tensor, "shape", None) != pg_loss.shape:
            shape = tuple(getattr(tensor, "shape", ()))
            raise wrong(TIS, path, f"returned {name} of shape {shape}, pg_loss has {tuple(pg_loss.shape)}")
    if masks is not None:
        _check_rows(TIS, path, "loss_masks", masks, [len(mask) for mask in loss_masks])
    return corrected, masks, metrics


def step_sums_function(args) -> Callable | None:
    """What the TIS function wants summed over each optimizer step (`slime.algorithms.off_policy_hooks`), or None."""
    path = args.custom_tis_function_path
    if path is None or not (args.use_tis or args.get_mismatch_metrics):
        return None
    make = getattr(load_hook(path, TIS), "step_sums", None)
    if make is None:
        return None
    function = make(args) if callable(make) else make
    if function is not None and not (callable(make) and callable(function)):
        raise _wrong_step_sums(path, f"a {type(function).__name__}")
    return function


def step_sums(args, function: Callable, columns: list[list[torch.Tensor]]) -> torch.Tensor:
    """Its sums over this rank's samples of the step, float64 [number of sums]."""
    result = function(*columns)
    try:
        sums = torch.as_tensor(result, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        raise _wrong_step_sums(args.custom_tis_function_path, f"that returned {result!r:.100}") from None
    if sums.dim() != 1 or not sums.isfinite().all():
        raise _wrong_step_sums(args.custom_tis_function_path, f"that returned {result!r:.100}")
    return sums


def check_same_count(args, count: int, group: Any) -> None:
    """Sums of another length on another rank would be added to what they are not."""
    counts = torch.tensor([count, -count], device=device.device())
    torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX, group=group)
    if counts[0] != -counts[1]:
        raise _wrong_step_sums(args.custom_tis_function_path, f"that returned {-counts[1]} to {counts[0]} numbers")


def _wrong_step_sums(path: str, what: str) -> ValueError:
    form = "step_sums(args) -> None or a function (train_log_probs, rollout_log_probs, loss_masks) -> list of finite numbers"
    return ValueError(
        f"--custom-tis-function-path {path} has step_sums {what}; expected {form}, of one length on every rank"
    )


def reducer(args, total_lengths: list[int], response_lengths: list[int], masks: list[torch.Tensor]) -> Callable:
    """The function from token losses [N] to a scalar that `--custom-pg-loss-reducer-function-path` makes."""
    path = args.custom_pg_loss_reducer_function_path
    function = call_hook(args, REDUCER, total_lengths, response_lengths, masks, args.calculate_per_token_loss)
    if not callable(function):
        raise wrong(REDUCER, path, f"returned a {type(function).__name__}")

    def reduce(tokens: torch.Tensor) -> torch.Tensor:
        value = function(tokens)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise wrong(
                REDUCER, path, f"made a function that returned a {type(value).__name__}, which is no scalar tensor"
            )
        return value.reshape(())

    return reduce


def model(args, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> torch.nn.Module:
    """This stage's part of the model, from `--custom-model-provider-path`."""
    path = args.custom_model_provider_path
    function = load_hook(path, MODEL)
    optional = accepted_keywords(function, {"vp_stage": vp_stage})
    if accepts_keyword(function, "args"):
        optional["args"] = args
    module = call_hook(args, MODEL, pre_process=pre_process, post_process=post_process, **optional)
    if not isinstance(module, torch.nn.Module):
        raise wrong(MODEL, path, f"returned a {type(module).__name__}")
    check_attention(MODEL, path, module)
    if post_process and not hasattr(module, "output_layer"):
        raise wrong(MODEL, path, f"returned a {type(module).__name__} without output_layer")
    return module


def spec(args, config, vp_stage: int | None):
    """The spec of the layers, or of the whole block, that `--spec` names or its function returns."""
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    path = spec_path(args.spec)
    if args.lora_rank > 0:
        raise ValueError(f"--spec {path} and --lora-rank exclude each other: adapters stand on the built-in layers")
    found = load_hook(path, SPEC)
    if not isinstance(found, ModuleSpec):
        found = call_path(path, SPEC, args, config, vp_stage)
    if not isinstance(found, (ModuleSpec, TransformerBlockSubmodules)):
        raise wrong(SPEC, path, f"returned a {type(found).__name__}")
    return found


def check_attention(option: str, path: str, module: torch.nn.Module) -> None:
    """Refuse Megatron's plain attention, which would let the samples of a stream see each other."""
    if any(type(part).__name__ == "DotProductAttention" for part in module.modules()):
        raise wrong(
            option, path, "built attention that cannot read several samples in one stream, megatron's DotProductAttention; take "
            "slime.backends.megatron_utils.layer_spec.decoder_spec(config, vp_stage), or Transformer Engine's spec on a GPU"
        )  # fmt: skip
