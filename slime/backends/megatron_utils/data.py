"""Micro-batches of a shard as packed streams, with the positions that predict response tokens.

A shard is the dict of per-sample lists that the Data Buffer sends to one data-parallel rank (`slime.batching.schedule`).
Invariants: samples keep the order of the index list; row n of `rows` is the stream position whose logits predict
response token n, so a log-prob list always splits by `response_lengths`. Letters: T stream tokens, N response tokens.

Example: tokens [5, 6, 7, 8] with a response of 2 -> rows [1, 2], targets [7, 8].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime.backends.megatron_utils.packed_sequences import PackedBatchParams

WHOLE_BATCH_KEYS = (
    "raw_reward",
    "total_lengths",
    "partition",
    "global_batch_sizes",
    "num_microbatches",
    "micro_batch_indices",
)


@dataclass(frozen=True)
class MicroBatch:
    """One packed stream on the device. `indices` are the positions of its samples in the shard."""

    indices: tuple[int, ...]
    tokens: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    packed: PackedBatchParams
    rows: torch.Tensor  # [N]
    targets: torch.Tensor  # [N]
    response_lengths: tuple[int, ...]
    total_lengths: tuple[int, ...]

    def column(self, data: dict, key: str) -> list:
        """Return this micro-batch's entries of a per-sample column."""
        values = data[key]
        return [values[i] for i in self.indices]

    def flat(self, data: dict, key: str) -> torch.Tensor:
        """Return a per-token column of this micro-batch, concatenated, [N]."""
        return torch.cat(self.column(data, key)) if self.indices else self.targets.new_zeros(0)


def pack(
    tokens: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    indices: Sequence[int],
    multiple: int,
    where: torch.device,
) -> MicroBatch:
    """Lay samples end to end and pad the stream with token 0 to a multiple of `multiple`, as a sequence of its own.

    Raises: ValueError for a sample whose response leaves no prompt token.
    """
    lengths = [len(t) for t in tokens]
    for i, length, response in zip(indices, lengths, response_lengths, strict=True):
        if response >= length:
            raise ValueError(
                f"sample {i} of the shard has {length} tokens and a response of {response}: no prompt token"
            )
    num_tokens = sum(lengths)
    padding = -num_tokens % multiple
    parts = [*tokens, torch.zeros(padding, dtype=torch.int64)] if padding else list(tokens)
    stream = torch.cat(parts)
    size = torch.tensor(lengths + ([padding] if padding else []))
    starts = size.cumsum(0) - size
    positions = torch.arange(len(stream)) - torch.repeat_interleave(starts, size)
    rows = _predicting_rows(starts[: len(lengths)], torch.tensor(lengths), torch.tensor(list(response_lengths)))
    return MicroBatch(
        indices=tuple(indices),
        tokens=stream[None].to(where),
        positions=positions[None].to(where),
        packed=PackedBatchParams.from_lengths(size.tolist(), where),
        rows=rows.to(where),
        targets=stream[rows + 1].to(where),
        response_lengths=tuple(response_lengths),
        total_lengths=tuple(lengths),
    )


def _predicting_rows(starts: torch.Tensor, lengths: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    first = starts + lengths - responses - 1
    offset = responses.cumsum(0) - responses
    return torch.arange(int(responses.sum())) + torch.repeat_interleave(first - offset, responses)


def stream_multiple(args) -> int:
    """Return what a stream's length must divide by: the flag's granularity on a GPU, what tensor parallelism needs here."""
    from slime.utils import device

    tensor_ranks = args.tensor_model_parallel_size
    return tensor_ranks * (args.data_pad_size_multiplier if device.has_accelerator() else 1)


class ShardBatches:
    """The micro-batches of a shard; each is packed once and reused by every pass of the rollout."""

    def __init__(self, data: dict, multiple: int, where: torch.device):
        self.data, self.multiple, self.where = data, multiple, where
        self._made: dict[tuple[int, ...], MicroBatch] = {}

    def make(self, index_lists: Sequence[Sequence[int]]) -> list[MicroBatch]:
        """Return one MicroBatch per index list."""
        return [self._one(tuple(indices)) for indices in index_lists]

    def _one(self, indices: tuple[int, ...]) -> MicroBatch:
        if indices not in self._made:
            tokens = [self.data["tokens"][i] for i in indices]
            responses = [self.data["response_lengths"][i] for i in indices]
            self._made[indices] = pack(tokens, responses, indices, self.multiple, self.where)
        return self._made[indices]

    def steps(self) -> list[list[MicroBatch]]:
        """Return the micro-batches of each optimizer step, in order."""
        steps, start = [], 0
        for count in self.data["num_microbatches"]:
            steps.append(self.make(self.data["micro_batch_indices"][start : start + count]))
            start += count
        return steps

    def all(self) -> list[MicroBatch]:
        """Return the micro-batches of all steps."""
        return [batch for step in self.steps() for batch in step]


def to_device(shard: dict, where: torch.device) -> dict:
    """Return the shard with per-token columns on the device; tokens stay, they are packed on the CPU."""
    moved = dict(shard)
    for key, value in shard.items():
        if key in ("tokens", *WHOLE_BATCH_KEYS):
            continue
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            moved[key] = [v.to(where) for v in value]
        elif isinstance(value, torch.Tensor):
            moved[key] = value.to(where)
    return moved
