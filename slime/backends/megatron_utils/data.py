"""Micro-batches of a shard as packed streams, with the positions that predict response tokens.

A shard is the dict of per-sample lists that the Data Buffer sends to one data-parallel rank (`slime.batching.schedule`).
Invariants: samples keep the order of the index list; row n of `rows` is the stream position whose logits predict
response token n, so a log-prob list always splits by `response_lengths`. Letters: T stream tokens, N response tokens.

Example: tokens [5, 6, 7, 8] with a response of 2 -> rows [1, 2], targets [7, 8].

With shared prompts (`--share-prompts`) samples of one micro-batch and adapter with equal prompt ids hold the prompt once, and last
response tokens, which predict nothing, are not read: [5, 6, 7, 8] and [5, 6, 9, 3] -> stream [5, 6, 7, 9].
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch

from slime.backends.megatron_utils.context_parallel import lay_zigzag
from slime.backends.megatron_utils.packed_sequences import PackedBatchParams, SharedPrompts, Zigzag

WHOLE_BATCH_KEYS = (
    "raw_reward",
    "total_lengths",
    "partition",
    "global_batch_sizes",
    "num_microbatches",
    "micro_batch_indices",
    "fillers",
)


@dataclass(frozen=True)
class MicroBatch:
    """One packed stream on the device. `indices` are the positions of its samples in the shard.

    `skipped` are the samples of the same micro-batch that need no pass: zeros in every sum, but part of denominators.
    Under context parallelism the stream holds this rank's part of each sample: `rows` and `targets` are of the n response
    tokens predicted here, `own` says which of the N they are. Columns stay whole.
    """

    indices: tuple[int, ...]
    tokens: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    packed: PackedBatchParams
    rows: torch.Tensor  # [n]
    targets: torch.Tensor  # [n]
    response_lengths: tuple[int, ...]
    total_lengths: tuple[int, ...]
    skipped: tuple[int, ...] = ()
    own: torch.Tensor | None = None  # [n], None when n is N

    def column(self, data: dict, key: str) -> list:
        """Return this micro-batch's entries of a per-sample column."""
        values = data[key]
        return [values[i] for i in self.indices]

    def with_indices(self, indices: tuple[int, ...]) -> MicroBatch:
        """Return the same stream naming other samples; for columns only."""
        return replace(self, indices=indices)

    def flat(self, data: dict, key: str) -> torch.Tensor:
        """Return a per-token column of this micro-batch, concatenated, [N]."""
        return torch.cat(self.column(data, key)) if self.indices else self.targets.new_zeros(0)


def pack(
    tokens: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    indices: Sequence[int],
    multiple: int,
    where: torch.device,
    sharers: Sequence[int] | None = None,
    skipped: Sequence[int] = (),
    part: Zigzag | None = None,
) -> MicroBatch:
    """Lay samples, or this rank's `part` of each, end to end; pad the stream with token 0 to a multiple of `multiple`, as
    a sequence of its own.

    Args:
        sharers: one number per sample; those of one number share equal prompts. None: every sample has its own.

    Raises: ValueError for a sample whose response leaves no prompt token.
    """
    lengths = [len(t) for t in tokens]
    for i, length, response in zip(indices, lengths, response_lengths, strict=True):
        if response >= length:
            raise ValueError(
                f"sample {i} of the shard has {length} tokens and a response of {response}: no prompt token"
            )
    targets = torch.cat([t[len(t) - n :] for t, n in zip(tokens, response_lengths, strict=True)])
    own = None
    if part is not None:
        laid = lay_zigzag(tokens, response_lengths, multiple, part, where)
        stream, positions, packed, rows, own = laid.tokens, laid.positions, laid.packed, laid.rows, laid.own
        targets = targets[own]
    else:
        sizes = (lengths, list(response_lengths), multiple, where)
        laid = _end_to_end(tokens, *sizes) if sharers is None else _shared_stream(tokens, sharers, *sizes)
        stream, positions, packed, rows = laid
    return MicroBatch(
        indices=tuple(indices),
        tokens=stream[None].to(where),
        positions=positions[None].to(where),
        packed=packed,
        rows=rows.to(where),
        targets=targets.to(where),
        response_lengths=tuple(response_lengths),
        total_lengths=tuple(lengths),
        skipped=tuple(skipped),
        own=None if own is None else own.to(where),
    )


def _end_to_end(tokens, lengths: list[int], responses: list[int], multiple: int, where: torch.device):
    """Return (stream [T], positions [T], PackedBatchParams, rows [N])."""
    padding = -sum(lengths) % multiple
    parts = [*tokens, torch.zeros(padding, dtype=torch.int64)] if padding else list(tokens)
    stream = torch.cat(parts)
    size = torch.tensor(lengths + ([padding] if padding else []))
    starts = size.cumsum(0) - size
    positions = torch.arange(len(stream)) - torch.repeat_interleave(starts, size)
    rows = _predicting_rows(starts[: len(lengths)], torch.tensor(lengths), torch.tensor(responses))
    return stream, positions, PackedBatchParams.from_lengths(size.tolist(), where), rows


def _shared_stream(tokens, sharers, lengths: list[int], responses: list[int], multiple: int, where: torch.device):
    """The same with every distinct prompt of a sharer once and without last response tokens."""
    parts, positions, rows, size = [], [], [], 0
    starts: dict[tuple[int, bytes], int] = {}
    shared = SharedPrompts([], [], [])
    for ids, sharer, length, response in zip(tokens, sharers, lengths, responses, strict=True):
        prompt, own = length - response, max(response - 1, 0)
        key = sharer, ids[:prompt].numpy().tobytes()
        if key not in starts:
            starts[key] = size
            parts.append(ids[:prompt])
            positions.append(torch.arange(prompt))
            size += prompt
        shared.prompt_starts.append(starts[key])
        shared.prompts.append(prompt)
        shared.own_starts.append(size)
        parts.append(ids[prompt : prompt + own])
        positions.append(torch.arange(prompt, prompt + own))
        if response:
            rows += [starts[key] + prompt - 1, *range(size, size + own)]
        size += own
    sequences = [p + max(r - 1, 0) for p, r in zip(shared.prompts, responses, strict=True)]
    padding = -size % multiple
    if padding:
        parts.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(torch.arange(padding))
        shared.prompt_starts.append(size)
        shared.prompts.append(padding)
        shared.own_starts.append(size + padding)
        sequences.append(padding)
    where_at = torch.cat(positions)
    packed = PackedBatchParams.from_lengths(sequences, where, shared, where_at.to(where))
    return torch.cat(parts), where_at, packed, torch.tensor(rows, dtype=torch.int64)


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

    def __init__(
        self,
        data: dict,
        multiple: int,
        where: torch.device,
        share_prompts: bool = False,
        part: Zigzag | None = None,
    ):
        self.data, self.multiple, self.where, self.share_prompts, self.part = data, multiple, where, share_prompts, part
        self._made: dict[tuple, MicroBatch] = {}

    def make(self, index_lists: Sequence[Sequence[int]], idle: AbstractSet[int] = frozenset()) -> list[MicroBatch]:
        """Return one MicroBatch per index list, without the samples in `idle` as far as one sample is left."""
        return [self._one(tuple(indices), idle) for indices in index_lists]

    def _one(self, indices: tuple[int, ...], idle: AbstractSet[int]) -> MicroBatch:
        skipped = tuple(i for i in indices if i in idle)
        if indices and len(skipped) == len(indices):
            skipped = skipped[1:]  # every rank runs every micro-batch
        kept = tuple(i for i in indices if i not in skipped) if skipped else indices
        if (kept, skipped) not in self._made:
            tokens = [self.data["tokens"][i] for i in kept]
            responses = [self.data["response_lengths"][i] for i in kept]
            adapters = [self.data["adapters"][i] for i in kept] if "adapters" in self.data else None
            sharers = (adapters or [0] * len(kept)) if self.share_prompts else None
            batch = pack(tokens, responses, kept, self.multiple, self.where, sharers, skipped, self.part)
            if adapters is not None:
                batch.packed.adapter_of_token = _adapter_of_token(batch, adapters).to(self.where)
            self._made[kept, skipped] = batch
        return self._made[kept, skipped]

    def steps(self, idle: AbstractSet[int] = frozenset()) -> list[list[MicroBatch]]:
        """Return the micro-batches of each optimizer step, in order; `idle` as in `make`."""
        steps, start = [], 0
        for count in self.data["num_microbatches"]:
            steps.append(self.make(self.data["micro_batch_indices"][start : start + count], idle))
            start += count
        return steps

    def all(self) -> list[MicroBatch]:
        """Return the micro-batches of all steps."""
        return [batch for step in self.steps() for batch in step]


def _adapter_of_token(batch: MicroBatch, adapters: list[int]) -> torch.Tensor:
    """Return the number of each stream token's adapter, [T]; padding goes to the first."""
    lengths, shared = batch.packed.lengths, batch.packed.shared  # in this stream, the padding's last
    if shared is None:
        return torch.tensor([*adapters, 0])[: len(lengths)].repeat_interleave(torch.tensor(lengths))
    numbers = torch.zeros(batch.tokens.shape[1], dtype=torch.int64)
    places = zip(adapters, lengths, shared.prompt_starts, shared.prompts, shared.own_starts, strict=False)
    for number, length, start, prompt, own in places:
        numbers[start : start + prompt] = number
        numbers[own : own + length - prompt] = number
    return numbers


def with_own_columns(shard: dict) -> dict:
    """Return the shard as it is worked on: `total_lengths` of its own samples, and their `local_raw_reward` beside the batch's."""
    own = {"total_lengths": [len(tokens) for tokens in shard["tokens"]]}
    rewards = of_own_samples(shard, shard.get("raw_reward") or [])
    return shard | own | ({} if rewards is None else {"local_raw_reward": rewards})


def of_own_samples(data: dict, of_batch: list) -> list | None:
    """Return this rank's entries of a list over the whole batch; None where a conversion of the user's left it shorter."""
    partition = data["partition"]
    return [of_batch[position] for position in partition] if len(of_batch) > max(partition, default=-1) else None


def to_device(shard: dict, where: torch.device) -> dict:
    """Return the shard with per-token columns on the device; tokens and experts stay, they are laid out on the CPU."""
    moved = dict(shard)
    for key, value in shard.items():
        if key in ("tokens", "rollout_routed_experts", *WHOLE_BATCH_KEYS):
            continue
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            moved[key] = [v.to(where) for v in value]
        elif isinstance(value, torch.Tensor):
            moved[key] = value.to(where)
    return moved


def real_samples(data: dict) -> list[int]:
    """Return the places of a shard's samples that are not fillers (`slime.batching.schedule`)."""
    fillers = set(data.get("fillers", ()))
    return [i for i in range(len(data["tokens"])) if i not in fillers]


def samples_without_advantage(data: dict) -> frozenset[int]:
    """Return the samples whose group-relative reward, and with it every advantage, is exactly zero."""
    return frozenset(i for i, reward in enumerate(data["rewards"]) if reward == 0.0)
