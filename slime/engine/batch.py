"""The running requests as columns: row i of every array belongs to row i of the KV cache.

Arrays instead of objects, so that a step costs the same few numpy calls for one request as for hundreds; a Request is
touched when it starts, when it ends, and per token only if it asked for something special (streaming, stop strings,
penalties, top log-probs). Knows no model and no threads.
"""

from __future__ import annotations

import numpy as np

from slime.engine.requests import Request

_NO_TOKEN = -1
_COLUMNS = {
    "last_token": np.int64,  # sampled, not yet in the cache
    "length": np.int64,  # tokens in the cache
    "generated": np.int64,  # output tokens, those before a retraction included
    "base": np.int64,  # output tokens that the Request already holds
    "max_new": np.int64,
    "min_new": np.int64,
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int64,
    "min_p": np.float32,
    "adapter": np.int64,  # number of its adapter, 0 without
    "seed": np.uint64,
    "greedy": np.bool_,
    "filtered": np.bool_,
    "adjusted": np.bool_,  # logits change before sampling: penalties, min_new_tokens
    "has_stop_strings": np.bool_,
    "wants_kept": np.bool_,  # the ids that the filters kept
    "wants_top": np.bool_,  # log-probs of other tokens than the sampled one
    "streams": np.bool_,
}


class RunningBatch:
    """Columns of the running requests; rows 0..size-1 are valid."""

    def __init__(self, max_rows: int):
        self.requests: list[Request] = []
        self._columns = {name: np.zeros(max_rows, dtype=dtype) for name, dtype in _COLUMNS.items()}
        self.stop_ids = np.full((max_rows, 1), _NO_TOKEN, dtype=np.int64)
        self._tokens = np.zeros((max_rows, 256), dtype=np.int32)
        self._logprobs = np.zeros((max_rows, 256), dtype=np.float32)

    @property
    def size(self) -> int:
        return len(self.requests)

    def __getattr__(self, name: str) -> np.ndarray:
        columns = self.__dict__.get("_columns", {})
        if name not in columns:
            raise AttributeError(name)
        return columns[name]

    def add(self, request: Request) -> int:
        """Append a request whose prompt and earlier output are in the cache; return its row."""
        row, params = self.size, request.params
        self.requests.append(request)
        num_output = len(request.output_ids)
        values = {
            "last_token": _NO_TOKEN,
            "length": len(request.prompt_ids) + num_output,
            "generated": num_output,
            "base": num_output,
            "max_new": params.max_new_tokens,
            "min_new": params.min_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "adapter": request.adapter_number,
            "seed": request.seed,
            "greedy": params.temperature == 0.0,
            "filtered": params.is_filtered,
            "adjusted": params.is_penalised or params.min_new_tokens > 0,
            "has_stop_strings": bool(params.stop),
            "wants_kept": params.returns_kept_ids,
            "wants_top": request.wants_table,
            "streams": request.stream,
        }
        for name, value in values.items():
            self._columns[name][row] = value
        self._set_stop_ids(row, request.stop_ids)
        return row

    def record(self, first: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Append one sampled token to rows first..first+len(tokens)-1."""
        rows = slice(first, first + len(tokens))
        column = self.generated[rows] - self.base[rows]
        if int(column.max()) >= self._tokens.shape[1]:
            self._widen()
        index = np.arange(rows.start, rows.stop)
        self._tokens[index, column] = tokens
        self._logprobs[index, column] = logprobs
        self.generated[rows] += 1
        self.last_token[rows] = tokens

    def tail(self, row: int, count: int) -> list[int]:
        """Return the last `count` output tokens of a row (fewer if there are not so many)."""
        have = int(self.generated[row] - self.base[row])
        recent = self._tokens[row, max(0, have - count) : have].tolist()
        missing = count - len(recent)
        return self.requests[row].output_ids[-missing:] + recent if missing > 0 else recent

    def last_logprob(self, row: int) -> float:
        return float(self._logprobs[row, int(self.generated[row] - self.base[row]) - 1])

    def flush_row(self, row: int) -> Request:
        """Copy the row's new tokens into its Request and return that."""
        request = self.requests[row]
        new = int(self.generated[row] - self.base[row])
        request.output_ids.extend(self._tokens[row, :new].tolist())
        request.output_logprobs.extend(self._logprobs[row, :new].tolist())
        self.base[row] = self.generated[row]
        return request

    def remove(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Drop rows; the last ones move into the holes. Returns (moved from, moved to) for the cache."""
        gone = set(rows)
        new_size = self.size - len(gone)
        holes = sorted(row for row in gone if row < new_size)
        movers = [row for row in range(new_size, self.size) if row not in gone]
        if holes:
            width = int((self.generated[movers] - self.base[movers]).max())
            for array in self._columns.values():
                array[holes] = array[movers]
            self.stop_ids[holes] = self.stop_ids[movers]
            self._tokens[holes, :width] = self._tokens[movers, :width]
            self._logprobs[holes, :width] = self._logprobs[movers, :width]
            for source, target in zip(movers, holes, strict=True):
                self.requests[target] = self.requests[source]
        del self.requests[new_size:]
        return movers, holes

    def _set_stop_ids(self, row: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.stop_ids.shape[1]:
            wider = np.full((self.stop_ids.shape[0], len(ids)), _NO_TOKEN, dtype=np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, : len(ids)] = ids

    def _widen(self) -> None:
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)], axis=1)
        self._logprobs = np.concatenate([self._logprobs, np.zeros_like(self._logprobs)], axis=1)
