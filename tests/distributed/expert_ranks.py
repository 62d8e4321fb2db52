"""What the ranks of `test_expert_layouts.py` do: the rounds of `train_ranks.py` on a model with experts."""

from __future__ import annotations

from tests.distributed.train_ranks import GRPO, _start, save_and_go_on, train

SEQUENCE = dict(tensor_model_parallel_size=2, sequence_parallel=True)


def one_rank(rank, size, port, folder) -> dict:
    """The reference, and a resume from what two expert ranks saved."""
    _start(rank, size, port, folder)
    where = (rank, size, port, folder)
    return {
        "grpo": train(*where, **GRPO),
        "resumed": train(*where, first=1, resume=f"{folder}/../iter_0000000", **GRPO),
    }


def two_ranks(rank, size, port, folder) -> dict:
    """Every layout of two ranks."""
    _start(rank, size, port, folder)
    saved = f"{folder}/../iter_0000000"
    where = (rank, size, port, folder)
    experts = dict(expert_model_parallel_size=2)
    return {
        "saved": save_and_go_on(*where, saved, **experts),
        "resumed": train(*where, first=1, resume=saved, **experts, **GRPO),
        "data_parallel": train(*where, **GRPO),
        "expert_parallel": train(*where, **experts, **GRPO),
        "tensor_and_expert_parallel": train(*where, **experts, **SEQUENCE, **GRPO),
        "expert_tensor_parallel": train(*where, expert_tensor_parallel_size=2, **SEQUENCE, **GRPO),
        "pipeline_parallel": train(*where, pipeline_model_parallel_size=2, **GRPO),
    }
