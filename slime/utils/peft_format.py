"""Adapters in PEFT's folder format: `adapter_config.json` and `adapter_model.safetensors`.

The trainer writes it, engines and PEFT itself read it. A tensor is named
`base_model.model.<module>.lora_A.weight` [rank, in] or `...lora_B.weight` [out, rank]; the served matrix is
W + scaling * B @ A with scaling = alpha / rank. Anything that would mean another computation (DoRA, biases, ranks per
module, ...) is refused. Does not know models.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.utils.weight_file import open_safetensors, write_safetensors

if TYPE_CHECKING:
    import torch

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
#: Keys of adapter_config.json that change the computation -> values that leave it plain.
_PLAIN = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
}


def adapter_config(base: str, rank: int, alpha: float, dropout: float, targets: list[str]) -> dict[str, Any]:
    """Return the contents of adapter_config.json for a plain LoRA of a causal language model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
    }


def scaling_of(config: dict[str, Any]) -> float:
    """Return what B @ A is multiplied by.

    >>> scaling_of({"r": 8, "lora_alpha": 16})
    2.0
    """
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def tensor_name(module: str, factor: str) -> str:
    """Return PEFT's name of factor "A" or "B" of a Hugging Face module.

    >>> tensor_name("model.layers.0.mlp.up_proj", "A")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{_PREFIX}{module}.lora_{factor}.weight"


def factors_by_module(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return module -> (A, B).

    Raises: ValueError for a tensor that is neither factor, a factor without its other half, or halves that do not fit.
    """
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, factor = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
        if factor not in ("A", "B") or not name.startswith(_PREFIX):
            raise ValueError(f"adapter tensor {name!r} is not the A or B of a linear layer")
        halves.setdefault(module, {})[factor] = tensor
    for module, pair in halves.items():
        if len(pair) != 2:
            raise ValueError(f"adapter module {module!r} has only its {''.join(pair)} factor")
        if pair["A"].dim() != 2 or pair["B"].dim() != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            shapes = {factor: list(tensor.shape) for factor, tensor in sorted(pair.items())}
            raise ValueError(f"adapter module {module!r} has factors of shapes {shapes} that cannot be multiplied")
    return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuse what is not a plain LoRA.

    Raises: ValueError naming `where` and the key.
    """
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise ValueError(f"{where}: peft_type {config['peft_type']!r} is not supported (LORA is)")
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            raise ValueError(f"{where}: {key} {config[key]!r} is not supported")
    if type(config.get("r")) is not int or config["r"] < 1:
        raise ValueError(f"{where}: r {config.get('r')!r} must be an integer above 0")
    if not isinstance(config.get("lora_alpha"), (int, float)):
        raise ValueError(f"{where}: lora_alpha {config.get('lora_alpha')!r} must be a number")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the checked adapter_config.json of a folder.

    Raises: ValueError when it is absent or not a plain LoRA's.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not a PEFT adapter folder: no {CONFIG_FILE} there")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    check_config(config, str(folder))
    return config


def read_adapter(folder: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return (config, tensors by PEFT name) of a folder, on the CPU.

    Raises: ValueError when the folder is incomplete or not a plain LoRA's.
    """
    config = read_config(folder)
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: no {WEIGHTS_FILE} there (pickled adapters are not loaded)")
    with open_safetensors(path) as file:
        return config, {name: file.get_tensor(name) for name in file.keys()}


def write_adapter(folder: str | Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write a folder that PEFT loads; it is made."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_safetensors(contents, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
