"""Quantise a Hugging Face folder into another one, weight by weight, without calibration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from slime.utils.quantization import quantized, scheme_of
from slime.utils.weight_file import open_safetensors, write_safetensors


def quantize_folder(source: str | Path, target: str | Path, quantization_config: dict[str, Any]) -> int:
    """Write `target` with the weights of `source` in the given form, file by file. Returns the number of quantised weights.

    Raises: ValueError when `source` is quantised already, or the form is not supported.
    """
    source, target = Path(source), Path(target)
    config = json.loads((source / "config.json").read_text())
    if config.get("quantization_config"):
        raise ValueError(f"{source} is quantised already ({config['quantization_config'].get('quant_method')})")
    scheme = scheme_of(quantization_config, str(target))
    target.mkdir(parents=True, exist_ok=False)
    count, weight_map, total = 0, {}, 0
    for path in sorted(source.glob("*.safetensors")):
        with open_safetensors(path) as file:
            names = list(file.keys())
            tensors = dict(quantized(((name, file.get_tensor(name)) for name in names), scheme))
        count += sum(map(scheme.covers, names))
        weight_map |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        write_safetensors(tensors, target / path.name)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy2(path, target / path.name)
    (target / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantization_config}, indent=2) + "\n"
    )
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    return count


def fp8_config(block: tuple[int, int] | None, skipped: list[str] | None = None) -> dict[str, Any]:
    """Return the quantization_config of fp8 with one scale per block, or per weight."""
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if block is not None:
        config["weight_block_size"] = list(block)
    if skipped:
        config["modules_to_not_convert"] = skipped
    return config


def int4_config(group_size: int, symmetric: bool, ignore: list[str]) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors' packed int4."""
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
