"""Low-rank adapters (LoRA) on the linear layers of a frozen model.

`attach` puts them on a model; `layers` computes, `weights` moves them in and out whole, under PEFT's names.
"""

from slime.backends.megatron_utils.lora.layers import Adapters, adapters_of, attach, clear, trained_parameters

__all__ = ["Adapters", "adapters_of", "attach", "clear", "trained_parameters"]
