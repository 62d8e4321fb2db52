"""The critic's output layer: one number per position instead of a row of logits.

Invariants: every tensor rank holds the whole head and computes the same values, so its gradient needs no reduction; it is
drawn from `--seed` alone, so that every layout starts from the same critic. Values are float32 and know no temperature.
"""

from __future__ import annotations

import torch

_WEIGHT_KEYS = ("output_layer.weight", "output_layer.bias")
_DEFAULT_STD = 0.02


class ValueHead(torch.nn.Module):
    """Linear map hidden -> 1 in place of a language model's output layer.

    Args:
        config: the TransformerConfig of the model. seed: of the weight's normal distribution; the bias is 0.
    """

    def __init__(self, config, seed: int):
        super().__init__()
        self.config = config
        std = config.init_method_std or _DEFAULT_STD
        drawn = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(seed)) * std
        self.weight = torch.nn.Parameter(drawn.to(config.params_dtype))
        self.weight.is_embedding_or_output_parameter = True  # as Megatron marks output layers
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor, weight=None, runtime_gather_output=None) -> tuple[torch.Tensor, None]:
        """Return ([T, 1, 1] values, None) of [T, 1, H] hidden states; the other arguments are those of Megatron's layer."""
        if self.config.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # Every rank computes all values, so each keeps its own part of the gradient.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()), None


def has_value_head(bare) -> bool:
    """Return whether this pipeline stage of a bare model ends in a value head."""
    return bare.post_process and isinstance(bare.output_layer, ValueHead)


def is_part_of_head(bare, name: str) -> bool:
    """Return whether a parameter belongs to the value head, which no Hugging Face folder has."""
    return has_value_head(bare) and name in _WEIGHT_KEYS


def leave_out_foreign_head(state: dict, directory: str) -> None:
    """Drop the head from the state to be loaded unless the torch_dist directory holds one: it keeps its drawn weights."""
    from megatron.core import dist_checkpointing

    saved = dist_checkpointing.load_tensors_metadata(directory)
    for key in _WEIGHT_KEYS:
        there = saved.get(key)
        if key in state and (there is None or there.global_shape != state[key].global_shape):
            del state[key]
