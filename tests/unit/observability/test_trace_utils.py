import asyncio
import json
import logging
import types

import pytest

from slime.observability import trace_utils as trace


def make_sample(index=0, group_index=7):
    return types.SimpleNamespace(index=index, group_index=group_index)


def kinds(sample):
    return [(event["type"], event["name"]) for event in sample.trace["events"]]


def test_a_span_has_a_start_and_an_end_with_the_sample_s_ids():
    sample = make_sample(3)
    with trace.trace_span(sample, "reward_model", attrs={"a": 1}) as span:
        span.set("b", 2)
    start, end = sample.trace["events"]
    assert (start["type"], start["attrs"], end["type"], end["attrs"]) == ("span_start", {"a": 1}, "span_end", {"b": 2})
    assert start["span_id"] == end["span_id"]
    assert (start["sample_id"], start["group_id"], start["attempt"]) == (3, 7, 0)
    assert start["trace_id"] == sample.trace["trace_id"]
    json.dumps(sample.trace)


def test_spans_nest_over_several_samples():
    samples = [make_sample(0), make_sample(1)]
    with trace.trace_span(samples, "generate_and_rm_group"), trace.trace_span(samples[1], "generate_and_rm"):
        trace.trace_event(samples[1], "tool_call")
    outer, inner, event = samples[1].trace["events"][:3]
    assert inner["parent_span_id"] == outer["span_id"]
    assert event["parent_span_id"] == inner["span_id"]
    assert kinds(samples[0]) == [("span_start", "generate_and_rm_group"), ("span_end", "generate_and_rm_group")]


def test_a_sample_outside_the_open_span_gets_no_parent_from_it():
    inside, outside = make_sample(0), make_sample(1)
    with trace.trace_span(inside, "generate_and_rm"):
        trace.trace_event(outside, "e")
    assert "parent_span_id" not in outside.trace["events"][0]


def test_parallel_tasks_keep_their_own_parents():
    sample = make_sample()

    async def work(name):
        with trace.trace_span(sample, name):
            await asyncio.sleep(0)
            trace.trace_event(sample, f"in_{name}")
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(work("a"), work("b"))

    asyncio.run(main())
    span_ids = {e["name"]: e["span_id"] for e in sample.trace["events"] if e["type"] == "span_start"}
    parents = {e["name"]: e["parent_span_id"] for e in sample.trace["events"] if e["type"] == "event"}
    assert parents == {"in_a": span_ids["a"], "in_b": span_ids["b"]}


def test_an_error_passes_through_and_is_recorded():
    sample = make_sample()
    with pytest.raises(KeyError), trace.trace_span(sample, "x"):
        raise KeyError("lost")
    assert sample.trace["events"][-1]["attrs"] == {"error_type": "KeyError", "error_message": "'lost'"}


def test_attributes_set_after_the_close_still_arrive():
    sample = make_sample()
    with trace.trace_span(sample, "x") as span:
        pass
    span.update_attrs({"late": True})
    assert sample.trace["events"][-1]["attrs"] == {"late": True}


@pytest.mark.parametrize("target", [None, 5, [], [[None]], object()])
def test_a_wrong_target_never_breaks_the_block(target):
    with trace.trace_span(target, "x") as span:
        span.set("a", 1)
    trace.trace_event(target, "e")
    trace.trace_next_attempt(target)
    assert trace.import_trace(trace.export_trace(target)) is None


def test_a_new_attempt_is_counted_and_marked():
    sample = make_sample()
    trace.trace_next_attempt(sample)
    trace.trace_event(sample, "e")
    assert kinds(sample) == [("event", "attempt_start"), ("event", "e")]
    assert [event["attempt"] for event in sample.trace["events"]] == [1, 1]


def test_an_exported_trace_goes_on_below_the_span_it_left():
    sample = make_sample()
    with trace.trace_span(sample, "outer"):
        payload = json.loads(json.dumps(trace.export_trace(sample)))
    handle = trace.import_trace(payload)
    trace.trace_event(handle, "elsewhere")
    event = handle.carrier["events"][0]
    assert event["trace_id"] == sample.trace["trace_id"]
    assert event["parent_span_id"] == sample.trace["events"][0]["span_id"]


def test_functions_are_traced_by_parameter_name_getter_or_first_sample(caplog):
    sample = make_sample()

    @trace.trace_function("by_name", target="s", attrs_getter=lambda n, s: {"n": n})
    def by_name(n, s):
        return n

    @trace.trace_function("by_getter", target_getter=lambda box: box["s"])
    async def by_getter(box):
        return 2

    @trace.trace_function("guessed")
    def guessed(args, samples):
        return 3

    with caplog.at_level(logging.WARNING):
        results = (
            by_name(1, s=sample),
            asyncio.run(by_getter({"s": sample})),
            guessed(0, [sample]),
            guessed(0, [sample]),
        )
    assert results == (1, 2, 3, 3)
    assert [name for kind, name in kinds(sample) if kind == "span_start"] == [
        "by_name",
        "by_getter",
        "guessed",
        "guessed",
    ]
    assert sample.trace["events"][0]["attrs"] == {"n": 1}
    assert caplog.text.count("has no target") == 1


def test_a_failing_getter_leaves_the_function_alone():
    @trace.trace_function("x", target_getter=lambda s: s.nope, attrs_getter=lambda s: 1 / 0)
    def double(s):
        return 2 * s

    assert double(4) == 8


def test_meta_info_becomes_attributes_and_children_of_disaggregated_serving():
    meta = {
        "completion_tokens": 5,
        "finish_reason": {"type": "stop"},
        "id": "r1",
        "pd_prefill_forward_duration": 0.5,
        "pd_decode_forward_duration": 0.25,
        "pd_transfer_total_mb": 8,
    }
    sample = make_sample()
    with trace.trace_span(sample, "sglang_generate") as span:
        span.update(trace.build_sglang_meta_trace_attrs(meta))
    events = {(e["type"], e["name"]): e for e in sample.trace["events"]}
    parent = events["span_start", "sglang_generate"]
    prefill = events["span_start", "sglang_pd_prefill"]
    assert prefill["parent_span_id"] == parent["span_id"]
    assert events["span_end", "sglang_pd_decode"]["ts"] == pytest.approx(parent["ts"] + 0.75)
    assert events["event", "sglang_pd_summary"]["attrs"] == {"pd_transfer_total_mb": 8}
    end = events["span_end", "sglang_generate"]["attrs"]
    assert (end["finish_reason"], end["sglang_request_id"], end["pd_prefill_forward_duration"]) == ("stop", "r1", 0.5)
    json.dumps(sample.trace)


@pytest.mark.parametrize("meta", [None, {}, "text"])
def test_missing_meta_info_has_no_attributes(meta):
    assert trace.build_sglang_meta_trace_attrs(meta) == {}
