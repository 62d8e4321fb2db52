"""One step of generation: read prompts or last tokens, sample, decide which rows are finished.

Owns the running batch and the cache contents, in step with each other. Invariant: after `prefill` and `decode` every
running row has exactly one sampled token that is not in the cache yet. Does not know queues, pauses or threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slime.engine import sampler
from slime.engine.admission import Family, is_scoring, num_kept, num_unread, sequence_length
from slime.engine.batch import RunningBatch
from slime.engine.kv_cache import KVCache
from slime.engine.lora import AdapterStore, TokenAdapters, token_adapters
from slime.engine.model import Model
from slime.engine.prefix_store import PrefixStore
from slime.engine.requests import Request
from slime.engine.tokenizer import EngineTokenizer, find_stop

LOGIT_ROWS = 512
"""Prompt positions whose logits are held at once when prompt log-probs are asked for."""


class Generator:
    """The model with its running requests."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        tokenizer: EngineTokenizer,
        max_rows: int,
        one_by_one: bool = False,
        keeps_prefixes: bool = True,
    ):
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.adapters = AdapterStore(model.weights)
        self.one_by_one = one_by_one  # same shapes for a request whatever else runs, hence the same bits
        self.batch = RunningBatch(max_rows)
        self.prefixes = PrefixStore(cache, lambda: model.weights.num_changes, keeps_prefixes)

    def find_prefix(self, request: Request) -> None:
        """Look up which of the request's tokens need not be read."""
        tokens = request.prompt_ids + request.output_ids if request.output_ids else request.prompt_ids
        request.prefix = self.prefixes.find(tokens, request.reusable_length, request.adapter_number)

    def make_room(self, num_new: int, length: int) -> None:
        """Prepare the cache for that many more rows and rows of that length."""
        self.cache.reserve(self.batch.size + num_new, length, self.batch.size)
        self.prefixes.fit()

    def prefill(self, families: list[Family]) -> dict[int, dict]:
        """Start requests: read prompt and earlier output, sample one token. Returns finish reasons by row.

        Rows are taken in this order: the first of each family, then the others.
        """
        if self.one_by_one and len(families) > 1:
            return {row: reason for family in families for row, reason in self.prefill([family]).items()}
        batch, device = self.batch, self.model.device
        first = batch.size
        kept, unread = [num_kept(family) for family in families], [num_unread(family) for family in families]
        hidden = self._read(families, kept, unread)
        source = list(range(len(families))) + [i for i, family in enumerate(families) for _ in family[1:]]
        requests = [family[0] for family in families] + [other for family in families for other in family[1:]]
        if len(requests) > len(families):
            longest = max(sequence_length(family) for family in families)
            self.cache.copy_rows(first + np.array(source[len(families) :]), first + len(families), longest)
        for n, (i, request) in enumerate(zip(source, requests, strict=True)):
            batch.add(request)
            request.weights_version = self.model.weights.num_changes
            if not request.num_retractions:
                request.cached_tokens = kept[i] if n < len(families) else len(request.prompt_ids) - 1
            if request.needs_input_logprobs and not request.input_logprobs:
                self._score_prompt(request, hidden[i], kept[i])
        if is_scoring(families[0]):
            return {first + i: {"type": "length", "length": 0} for i in range(len(requests))}
        last = torch.tensor(unread, device=device) - 1
        logits = self.model.logits(hidden[torch.arange(len(families), device=device), last])
        return self._sample(logits[torch.tensor(source, device=device)], first)

    def decode(self) -> dict[int, dict]:
        """Advance all running rows by one token. Returns finish reasons by row."""
        batch, device = self.batch, self.model.device
        lengths = batch.length[: batch.size]
        tokens = torch.from_numpy(batch.last_token[: batch.size]).to(device)
        positions = torch.from_numpy(lengths).to(device)
        if self.one_by_one:
            logits = torch.cat([self._decode_alone(row, tokens, positions) for row in range(batch.size)])
        else:
            lora = self._adapters_of_rows(range(batch.size))
            logits = self.model.logits(self.model.decode(tokens, positions, int(lengths.max()) + 1, lora=lora))
        lengths += 1
        return self._sample(logits, 0)

    def _decode_alone(self, row: int, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [1, V] of one row."""
        one, lora = slice(row, row + 1), self._adapters_of_rows([row])
        return self.model.logits(
            self.model.decode(tokens[one], positions[one], int(self.batch.length[row]) + 1, first_row=row, lora=lora)
        )

    def _adapters_of_rows(self, rows: Sequence[int]) -> TokenAdapters | None:
        if not self.batch.adapter[rows[0] : rows[-1] + 1].any():
            return None
        return token_adapters([self.batch.requests[row].adapter for row in rows], 1, self.model.device)

    def finish(self, rows: list[int]) -> None:
        """Forget rows that the caller has flushed, but keep what was read for requests that go on from there."""
        for row in rows:
            request = self.batch.requests[row]
            tokens = (request.prompt_ids + request.output_ids)[: int(self.batch.length[row])]
            self.prefixes.keep(row, tokens, request.weights_version, request.prefix, request.adapter_number)
            request.prefix = None
            if request.return_routed_experts:
                count = len(request.prompt_ids) + len(request.output_ids) - 1
                request.routed_experts = self.cache.experts[row, :count].to("cpu", torch.int32).numpy()
        self.remove(rows)

    def remove(self, rows: list[int]) -> None:
        """Forget rows; the caller has flushed them."""
        movers, holes = self.batch.remove(rows)
        if holes:
            self.cache.move_rows(movers, holes, int(self.batch.length[holes].max()))

    def _read(self, families: list[Family], kept: list[int], unread: list[int]) -> torch.Tensor:
        """Read the families' tokens behind those kept into rows batch.size..; returns hidden states [B, longest, E]."""
        first, device = self.batch.size, self.model.device
        padded = np.zeros((len(families), max(unread)), dtype=np.int64)
        for i, family in enumerate(families):
            padded[i, : unread[i]] = (family[0].prompt_ids + family[0].output_ids)[kept[i] :]
        tokens = torch.from_numpy(padded).to(device)
        lora = token_adapters([family[0].adapter for family in families], padded.shape[1], device)
        if not any(kept):
            return self.model.prefill(tokens, first, lora)
        for i, family in enumerate(families):
            self.prefixes.restore(family[0].prefix, first + i)
        known, lengths = torch.tensor(kept, device=device), torch.tensor(unread, device=device)
        return self.model.extend(tokens, first, known, lengths, lora)

    def _sample(self, logits: torch.Tensor, first: int) -> dict[int, dict]:
        """Sample a token for rows first.. from logits [rows, V] and record it."""
        batch = self.batch
        rows = slice(first, first + logits.shape[0])
        if batch.adjusted[rows].any():
            self._adjust(logits, rows)
        log_probs = sampler.log_probabilities(logits, batch.temperature[rows])
        greedy = batch.greedy[rows]
        uniforms = None if greedy.all() else sampler.uniform(batch.seed[rows], batch.generated[rows])
        tokens = sampler.draw(log_probs, uniforms, greedy)
        filtered = np.flatnonzero(batch.filtered[rows] & ~greedy)
        ids = p = None
        if len(filtered):
            at = torch.from_numpy(filtered).to(logits.device)
            columns = (column[rows][filtered] for column in (batch.top_p, batch.top_k, batch.min_p))
            ids, p = sampler.candidates(log_probs[at], *columns)
            tokens[at] = sampler.draw_among(ids, p, uniforms[filtered])
        chosen = log_probs.gather(1, tokens[:, None])[:, 0]
        if batch.wants_kept[rows].any():
            self._record_kept(rows, filtered, ids, p, chosen)
        if batch.wants_top[rows].any():
            self._record_top(log_probs, rows)
        batch.record(first, tokens.cpu().numpy(), chosen.cpu().numpy())
        return self._finished(rows)

    def _finished(self, rows: slice) -> dict[int, dict]:
        batch = self.batch
        reasons: dict[int, dict] = {}
        if batch.has_stop_strings[rows].any():
            reasons.update(self._stop_string_matches(rows))
        for row in np.flatnonzero(batch.generated[rows] >= batch.max_new[rows]) + rows.start:
            reasons.setdefault(int(row), {"type": "length", "length": int(batch.max_new[row])})
        stopped = (batch.last_token[rows, None] == batch.stop_ids[rows]).any(1)
        for row in np.flatnonzero(stopped) + rows.start:
            reasons[int(row)] = {"type": "stop", "matched": int(batch.last_token[row])}
        return reasons

    def _stop_string_matches(self, rows: slice) -> dict[int, dict]:
        batch = self.batch
        with_stops = (np.flatnonzero(batch.has_stop_strings[rows]) + rows.start).tolist()
        params = [batch.requests[row].params for row in with_stops]
        tails = [batch.tail(row, self.tokenizer.stop_window(p)) for row, p in zip(with_stops, params, strict=True)]
        reasons = {}
        for skip in (True, False):
            chosen = [i for i, p in enumerate(params) if p.skip_special_tokens == skip]
            texts = self.tokenizer.decode_batch([tails[i] for i in chosen], skip) if chosen else []
            for i, text in zip(chosen, texts, strict=True):
                matched = find_stop(text, params[i].stop)
                if matched is not None:
                    reasons[with_stops[i]] = {"type": "stop", "matched": matched}
        return reasons

    def _adjust(self, logits: torch.Tensor, rows: slice) -> None:
        """Apply penalties and min_new_tokens in place (row by row: few requests use them)."""
        batch = self.batch
        for row in np.flatnonzero(batch.adjusted[rows]) + rows.start:
            line, request = logits[row - rows.start], batch.requests[row]
            params = request.params
            if params.is_penalised:
                output = batch.tail(row, int(batch.generated[row]))
                penalise(line, request.prompt_ids, output, params)
            if batch.generated[row] < batch.min_new[row] and request.stop_ids:
                line[list(request.stop_ids)] = -torch.inf

    def _record_kept(self, rows: slice, filtered: np.ndarray, ids, p, chosen: torch.Tensor) -> None:
        """Note what the filters kept for the rows that ask for it, and make their log-probs `chosen` [rows] relative to it.

        ids, p: `sampler.candidates` of the `filtered` rows (places within `rows`), None without any.
        """
        wanted = np.flatnonzero(self.batch.wants_kept[rows])
        asked = np.intersect1d(wanted, filtered)
        kept = dict.fromkeys(wanted.tolist(), np.zeros(0, dtype=np.int32))
        if len(asked):
            device = chosen.device
            at = torch.from_numpy(np.searchsorted(filtered, asked)).to(device)
            lines, ids = p[at], ids[at]
            chosen[torch.from_numpy(asked).to(device)] -= lines.sum(-1).log()
            is_kept = lines > 0
            ends = is_kept.sum(-1).cumsum(-1).cpu().numpy()  # copies of the batch, not of each row
            parts = np.split(ids[is_kept].to("cpu", torch.int32).numpy(), ends[:-1])
            kept |= dict(zip(asked.tolist(), parts, strict=True))
        for row, row_ids in kept.items():
            self.batch.requests[rows.start + row].output_kept.append(row_ids)

    def _record_top(self, log_probs: torch.Tensor, rows: slice) -> None:
        for row in np.flatnonzero(self.batch.wants_top[rows]) + rows.start:
            request, line = self.batch.requests[row], log_probs[row - rows.start]
            if request.top_logprobs_num:
                request.output_top.append(top_pairs(line, request.top_logprobs_num))
            if request.logprob_token_ids:
                request.output_chosen.append(pairs_of(line, request.logprob_token_ids))

    def _score_prompt(self, request: Request, hidden: torch.Tensor, num_kept: int) -> None:
        """Fill in log-probs of the prompt tokens from logprob_start_len on; the first has none.

        `hidden` begins at token `num_kept`.
        """
        start, end = request.logprob_start_len, len(request.prompt_ids)
        tokens = torch.tensor(request.prompt_ids, device=hidden.device)
        request.input_logprobs, request.input_top, request.input_chosen = [None], [None], [None]
        for low in range(start, end - 1, LOGIT_ROWS):
            high = min(low + LOGIT_ROWS, end - 1)
            log_probs = self.model.logits(hidden[low - num_kept : high - num_kept]).log_softmax(-1)
            targets = tokens[low + 1 : high + 1]
            request.input_logprobs += log_probs.gather(1, targets[:, None])[:, 0].tolist()
            if request.top_logprobs_num:
                request.input_top += [top_pairs(line, request.top_logprobs_num) for line in log_probs]
            if request.logprob_token_ids:
                request.input_chosen += [pairs_of(line, request.logprob_token_ids) for line in log_probs]


def pairs_of(log_probs: torch.Tensor, ids: tuple[int, ...]) -> list[tuple[float, int]]:
    """Return (log-prob, token id) of the given ids in one row."""
    return list(zip(log_probs[list(ids)].tolist(), ids, strict=True))


def top_pairs(log_probs: torch.Tensor, count: int) -> list[tuple[float, int]]:
    """Return the `count` most likely (log-prob, token id) of one row."""
    values, ids = log_probs.topk(min(count, log_probs.shape[-1]))
    return list(zip(values.tolist(), ids.tolist(), strict=True))


def penalise(line: torch.Tensor, prompt: list[int], output: list[int], params) -> None:
    """Apply repetition (prompt and output), frequency and presence (output) penalties to logits [V] in place."""
    device = line.device
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}), device=device)
        values = line[seen]
        factor = params.repetition_penalty
        line[seen] = torch.where(values > 0, values / factor, values * factor)
    if output and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.tensor(output, device=device).unique(return_counts=True)
        line[ids] -= params.frequency_penalty * counts + params.presence_penalty
