"""Columns of running requests, admission, version spans."""

from __future__ import annotations

import numpy as np

from slime.engine.admission import PREFILL_TOKENS, PrefillBudget, prefill_groups
from slime.engine.batch import RunningBatch
from slime.engine.requests import Request
from slime.engine.sampling_params import SamplingParams


def request(rid: str, prompt: list[int] | None = None, stop_ids: tuple[int, ...] = (), **params) -> Request:
    return Request(rid, prompt or [1, 2], SamplingParams(**params), seed=7, stop_ids=stop_ids)


def batch_of(*names: str) -> RunningBatch:
    batch = RunningBatch(8)
    for name in names:
        batch.add(request(name))
    return batch


def record(batch: RunningBatch, tokens: list[int]) -> None:
    batch.record(0, np.array(tokens), -np.array(tokens, dtype=np.float32))


def test_removed_rows_are_filled_from_the_end():
    batch = batch_of("a", "b", "c", "d", "e")
    record(batch, [1, 2, 3, 4, 5])
    record(batch, [11, 12, 13, 14, 15])
    assert batch.remove([0, 3]) == ([4], [0])
    assert [r.rid for r in batch.requests] == ["e", "b", "c"]
    assert [batch.flush_row(row).output_ids for row in range(3)] == [[5, 15], [2, 12], [3, 13]]
    assert batch.last_token[:3].tolist() == [15, 12, 13]


def test_removing_all_rows_moves_nothing():
    batch = batch_of("a", "b")
    record(batch, [1, 2])
    assert batch.remove([0, 1]) == ([], [])
    assert batch.size == 0


def test_outputs_longer_than_the_first_buffer_are_kept():
    batch = batch_of("a")
    for token in range(700):
        record(batch, [token])
    assert batch.tail(0, 3) == [697, 698, 699]
    flushed = batch.flush_row(0)
    assert flushed.output_ids == list(range(700))
    assert flushed.output_logprobs[5] == -5.0


def test_flushed_row_goes_on_where_it_was():
    batch = batch_of("a")
    record(batch, [1])
    batch.flush_row(0)
    record(batch, [2])
    assert batch.tail(0, 5) == [1, 2]
    assert batch.flush_row(0).output_ids == [1, 2]
    assert batch.generated[0] == 2


def test_stop_ids_of_an_earlier_request_do_not_linger():
    batch = RunningBatch(2)
    batch.add(request("a", stop_ids=(4, 5, 6)))
    record(batch, [1])
    batch.remove([0])
    batch.add(request("b", stop_ids=(9,)))
    assert batch.stop_ids[0].tolist() == [9, -1, -1]


def test_equal_prompts_are_read_once_and_lengths_grouped():
    short, long = [1] * 10, [2] * 1000
    groups = prefill_groups([request("a", short), request("b", long), request("c", short), request("d", [3] * 12)])
    assert [[[r.rid for r in family] for family in group] for group in groups] == [[["a", "c"], ["d"]], [["b"]]]


def test_scoring_requests_are_read_apart():
    groups = prefill_groups([request("a"), request("b", max_new_tokens=0)])
    assert len(groups) == 2


def test_prefill_budget_counts_equal_prompts_once_and_lets_one_long_prompt_in():
    budget = PrefillBudget()
    long = [1] * (PREFILL_TOKENS + 5)
    assert budget.take(request("a", long))
    assert budget.take(request("b", long))
    assert not budget.take(request("c", [2]))


def test_version_spans_cover_the_output_without_empty_ones():
    one = request("a")
    one.note_version("1", 0)
    one.note_version("2", 0)
    one.note_version("2", 3)
    one.note_version("3", 5)
    one.note_version("4", 5)
    one.output_ids = list(range(9))
    assert one.version_spans() == [{"version": "2", "start": 0, "end": 5}, {"version": "4", "start": 5, "end": 9}]
    never_started = request("b")
    never_started.weight_version = "4"
    assert never_started.version_spans() == [{"version": "4", "start": 0, "end": 0}]
