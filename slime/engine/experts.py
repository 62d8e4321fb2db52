"""A mixture-of-experts MLP: which experts a token visits, and the weighted sum of what they give.

The router computes in fp32 whatever the model's dtype, as trainers do: a rounded score may pick another expert. Ties and
order are those of `torch.topk` over the scores. Knows no cache and no requests.
Shapes: T tokens, E hidden size, N experts, K experts a token, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def route(h: torch.Tensor, router: torch.Tensor, count: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights [T, K] fp32, chosen experts [T, K]) of tokens h [T, E] for a router [N, E].

    `normalise`: the K weights of a token add up to one; otherwise they are their share among all experts.
    """
    scores = F.linear(h.float(), router.float())
    if normalise:
        values, chosen = scores.topk(count)
        return values.softmax(-1), chosen
    return scores.softmax(-1).topk(count)


Adapt = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mix(
    h: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    adapt: Adapt | None = None,
) -> torch.Tensor:
    """Return the weighted sum [T, E] of each token's experts; gate_up is [N, 2 * F, E], down [N, E, F].

    `adapt(matrix, x, out, tokens)` adds what low-rank adapters add to a product of some tokens, [n] of the T, with the
    matrix of an expert, such as "gate_up:3".
    """
    adapt = adapt or (lambda matrix, x, out, tokens: out)
    order = chosen.flatten().argsort(stable=True)  # by expert, so that each is one product
    tokens = order // chosen.shape[1]
    rows = h[tokens]
    outputs, start = [], 0
    for expert, size in enumerate(torch.bincount(chosen.flatten(), minlength=gate_up.shape[0]).tolist()):
        if size:
            x, at = rows[start : start + size], tokens[start : start + size]
            gate, up = adapt(f"gate_up:{expert}", x, F.linear(x, gate_up[expert]), at).chunk(2, -1)
            x = F.silu(gate) * up
            outputs.append(adapt(f"down:{expert}", x, F.linear(x, down[expert]), at))
            start += size
    weighted = torch.cat(outputs) * weights.flatten()[order, None].to(h.dtype)
    return torch.zeros_like(h).index_add_(0, tokens, weighted)
