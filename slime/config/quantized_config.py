"""Which quantization_config of a config.json can be read: fp8 (e4m3) in blocks, and int4 of compressed-tensors.

Knows no torch; read by the checks of the arguments and by `slime.utils.quantization`, which computes.
"""

from __future__ import annotations

from typing import Any

_FP8 = {"fmt": "e4m3", "activation_scheme": "dynamic"}


def unsupported(config: dict[str, Any]) -> str | None:
    """Say what a quantization_config asks for and nobody here has; None when it can be read."""
    method = config.get("quant_method")
    if method == "fp8":
        wrong = [key for key, value in _FP8.items() if config.get(key, value) != value]
        return (
            f"quantization_config.{wrong[0]} {config[wrong[0]]!r} is not supported ({_FP8[wrong[0]]} is)"
            if wrong
            else None
        )
    if method == "compressed-tensors":
        return _unsupported_int4(config)
    return f"quantization_config.quant_method {method!r} is not supported (fp8, compressed-tensors are)"


def int4_weights(config: dict[str, Any]) -> dict[str, Any]:
    """The description of the weights of compressed-tensors' first group."""
    return ((config.get("config_groups") or {}).get("group_0") or {}).get("weights") or {}


def _unsupported_int4(config: dict[str, Any]) -> str | None:
    weights, groups = int4_weights(config), config.get("config_groups") or {}
    kind = (config.get("format", "pack-quantized"), len(groups), weights.get("num_bits"), weights.get("type", "int"))
    if kind == ("pack-quantized", 1, 4, "int"):
        return None
    return (
        f"compressed-tensors with format {kind[0]!r}, {kind[1]} config groups, num_bits {kind[2]} and type {kind[3]!r} is not "
        "supported (pack-quantized, one group, 4-bit integers are)"
    )
