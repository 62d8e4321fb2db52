"""Reading an engine reply's `meta_info` into the per-token fields of a `Sample`.

Invariant: every function here either leaves the sample's fields aligned with its tokens or raises ValueError naming
the span. Knows the wire forms of SGLang (lists, base64 of little-endian int32, tensors); knows no HTTP.
"""

from __future__ import annotations

import base64
import reprlib
from typing import Any

TOP_P_KEYS = (("top_p_token_ids", "top_p_token_offsets"), ("top_p_kept_token_ids", "top_p_kept_token_offsets"))


def flat_list(values: Any) -> list:
    """A list of plain numbers from a list, a tensor or an array; None gives []."""
    if values is None:
        return []
    if hasattr(values, "reshape"):
        return values.reshape(-1).tolist()
    return list(values)


def int32_tensor(value: Any):
    """One-dimensional int32 tensor from base64 text, bytes, a tensor, an array or a (nested) list."""
    import numpy as np
    import torch

    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return torch.from_numpy(np.frombuffer(bytes(value), dtype="<i4").astype(np.int32))
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", torch.int32).reshape(-1)
    return torch.from_numpy(np.array(value, dtype=np.int32).reshape(-1))


def token_versions(meta_info: dict, num_tokens: int) -> list[str | None]:
    """The weight version of each of the `num_tokens` output tokens of one engine call; None where unknown.

    >>> token_versions({"weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}]}, 3)
    ['1', '1', '2']
    """
    whole = meta_info.get("weight_version")
    versions: list[str | None] = [None if whole is None else str(whole)] * num_tokens
    for span in meta_info.get("weight_versions") or []:
        start, end = max(0, int(span["start"])), min(int(span["end"]), num_tokens)
        for position in range(start, end):
            versions[position] = str(span["version"])
    return versions


def check_log_probs(tokens: list[int], log_probs: list[float] | None, trainable: bool, where: str) -> None:
    if not trainable and log_probs is not None:
        raise ValueError(f"{where}: log_probs given for tokens that are not trainable")
    if trainable and tokens and log_probs is None:
        raise ValueError(f"{where}: {len(tokens)} trainable tokens without log_probs")
    if log_probs is not None and len(log_probs) != len(tokens):
        raise ValueError(f"{where}: {len(log_probs)} log_probs for {len(tokens)} tokens")


def check_span(index, name: str, found: int, expected: int) -> None:
    if found < expected:
        raise ValueError(f"sample {index}: {name} covers response tokens [0:{found}), [{found}:{expected}) are missing")
    if found > expected:
        raise ValueError(f"sample {index}: {name} has [{expected}:{found}) beyond the response of {expected} tokens")


# ---- top-p replay --------------------------------------------------------------------------------------------------


def append_top_p(sample, num_tokens: int, trainable: bool, meta_info: dict) -> None:
    """Concatenate the kept ids of the new tokens, shifting their offsets behind the ones already there."""
    import_needed = any(meta_info.get(key) is not None for pair in TOP_P_KEYS for key in pair)
    active = sample.rollout_top_p_token_offsets is not None
    if not import_needed and not (active and num_tokens and not trainable):
        return
    import torch

    if not trainable:
        ids, offsets = int32_tensor([]), int32_tensor([0] * (num_tokens + 1))
    else:
        ids, offsets = _top_p_arrays(sample, num_tokens, meta_info)
    if not active:
        earlier = sample.response_length - num_tokens
        old_ids, old_offsets = int32_tensor([]), int32_tensor([0] * (earlier + 1))
        if not trainable:
            return
    else:
        old_ids = int32_tensor(sample.rollout_top_p_token_ids)
        old_offsets = int32_tensor(sample.rollout_top_p_token_offsets)
    sample.rollout_top_p_token_ids = torch.cat([old_ids, ids])
    sample.rollout_top_p_token_offsets = torch.cat([old_offsets, offsets[1:] + old_offsets[-1]])


def _top_p_arrays(sample, num_tokens: int, meta_info: dict):
    ids = next((meta_info[i] for i, _ in TOP_P_KEYS if meta_info.get(i) is not None), None)
    offsets = next((meta_info[o] for _, o in TOP_P_KEYS if meta_info.get(o) is not None), None)
    where = f"sample {sample.index}: top-p replay data"
    if ids is None or offsets is None:
        raise ValueError(f"{where} needs both the token ids and the offsets")
    ids, offsets = int32_tensor(ids), int32_tensor(offsets)
    if len(offsets) != num_tokens + 1:
        raise ValueError(f"{where}: {len(offsets)} offsets for {num_tokens} new tokens, expected {num_tokens + 1}")
    _check_offsets(where, offsets, len(ids))
    return ids, offsets


def _check_offsets(where: str, offsets, num_ids: int) -> None:
    """The offsets cut `num_ids` kept ids into one piece per token.

    Raises: ValueError otherwise.
    """
    offsets = [int(offset) for offset in offsets]
    if offsets[0] != 0 or offsets[-1] != num_ids or offsets != sorted(offsets):
        raise ValueError(
            f"{where}: offsets must rise from 0 to the number of kept ids, {num_ids}, not {reprlib.repr(offsets)}"
        )


def check_top_p(sample) -> None:
    offsets, ids = sample.rollout_top_p_token_offsets, sample.rollout_top_p_token_ids
    if (offsets is None) != (ids is None):
        raise ValueError(
            f"sample {sample.index}: rollout_top_p_token_ids and _offsets must both be set or both be None"
        )
    if offsets is None:
        return
    check_span(sample.index, "rollout_top_p_token_offsets", len(offsets) - 1, sample.response_length)
    _check_offsets(f"sample {sample.index}: top-p replay data", offsets, len(ids))


# ---- routing replay ------------------------------------------------------------------------------------------------


def append_routed_experts(sample, args, meta_info: dict) -> None:
    """Store the experts chosen for every token but the last, shape [len(tokens) - 1, num_layers, topk]."""
    raw = meta_info.get("routed_experts")
    if raw is None:
        return
    import torch

    start = int(meta_info.get("routed_experts_start_len") or 0)
    if start < 0:
        raise ValueError(f"sample {sample.index}: routed_experts_start_len {start} is negative")
    layers, topk = args.num_layers, args.moe_router_topk
    flat = int32_tensor(raw)
    rows = max(0, len(sample.tokens) - 1 - start)
    if flat.numel() != rows * layers * topk:
        raise ValueError(
            f"sample {sample.index}: routed_experts of tokens [{start}:{start + rows}) hold {flat.numel()} numbers, "
            f"expected {rows} x {layers} layers x top-{topk}"
        )
    experts = flat.reshape(rows, layers, topk)
    if start:
        known = sample.rollout_routed_experts
        if known is None or len(known) < start:
            raise ValueError(
                f"sample {sample.index}: routed_experts start at token {start}, but rows "
                f"[{0 if known is None else len(known)}:{start}) were never received"
            )
        experts = torch.cat([torch.as_tensor(known, dtype=torch.int32)[:start], experts])
    sample.rollout_routed_experts = experts


def check_routed_experts(sample) -> None:
    experts = sample.rollout_routed_experts
    expected = max(0, len(sample.tokens) - 1)
    if experts is not None and len(experts) > expected:
        raise ValueError(
            f"sample {sample.index}: rollout_routed_experts has {len(experts)} rows for {expected + 1} tokens"
        )
