import json

import pytest
from aiohttp import web
from fake_engine import reply

from slime.rollout.data_source import create_data_source
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.sglang_streaming_rollout import ChunkMerger
from slime.utils.processing_utils import load_tokenizer
from slime.utils.tiny_model import write_byte_tokenizer
from slime.utils.types import Sample

PATH = "slime.rollout.sglang_streaming_rollout.generate_streaming"


def chunks(kind):
    """Three tokens, the stop reason with the last one."""
    for end in (1, 2, 3):
        start = 0 if kind == "cumulative" else end - 1
        body = reply([10, 11, 12][start:end], "abc"[start:end], "stop")
        body["meta_info"]["completion_tokens"] = end
        body["meta_info"]["weight_versions"] = [
            {"version": "1", "start": 0, "end": 2},
            {"version": "2", "start": 2, "end": 3},
        ]
        if end < 3:
            body["meta_info"]["finish_reason"] = None
        yield body


@pytest.fixture
def streaming_engine(engine, monkeypatch):
    """The fake engine with a streaming `/generate`; `engine.lines` are its data lines."""

    async def generate(request):
        payload = await request.json()
        engine.requests.append(payload)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for line in engine.lines:
            await response.write(f"data: {line}\n\n".encode())
        await response.write_eof()
        return response

    monkeypatch.setattr(engine, "stream", generate, raising=False)
    return engine


@pytest.mark.parametrize("kind", ["cumulative", "incremental"])
def test_chunks_of_both_kinds_give_each_token_once(kind):
    merger = ChunkMerger()
    fresh = [merger.fresh_part(chunk) for chunk in chunks(kind)]
    assert [[t[1] for t in part["meta_info"]["output_token_logprobs"]] for part in fresh] == [[10], [11], [12]]
    assert merger.text == "abc"


@pytest.mark.parametrize("kind", ["cumulative", "incremental"])
def test_a_streamed_sample_equals_a_whole_one(streaming_engine, make_args, kind):
    streaming_engine.lines = [*map(json.dumps, chunks(kind)), "not json", "[DONE]"]
    args = make_args(streaming_engine, custom_generate_function_path=PATH, rollout_batch_size=1)
    sample = generate_rollout(args, 0, create_data_source(args)).samples[0][0]
    assert sample.tokens[-3:] == [10, 11, 12] and sample.response == "abc"
    assert sample.status == Sample.Status.COMPLETED and sample.weight_versions == ["1"]
    assert sample.token_weight_versions == ["1", "1", "2"] and sample.rollout_log_probs == [-0.5] * 3
    request = streaming_engine.requests[0]
    assert request["stream"] is True and "sampling_seed" in request["sampling_params"]


def test_text_that_an_engine_takes_back_is_not_said_twice(streaming_engine, make_args):
    """Only with the last token is "bc" known to be a stop string, which the request wants cut off."""
    bodies = [*chunks("cumulative")]
    bodies[-1]["text"] = "a"
    streaming_engine.lines = [*map(json.dumps, bodies), "[DONE]"]
    args = make_args(streaming_engine, custom_generate_function_path=PATH, rollout_batch_size=1)
    sample = generate_rollout(args, 0, create_data_source(args)).samples[0][0]
    assert (sample.response, sample.response_length) == ("a", 3)


def test_top_p_data_of_cumulative_chunks_is_cut():
    merger = ChunkMerger()
    first, second = reply([1]), reply([1, 2])
    first["meta_info"] |= {"completion_tokens": 1, "top_p_token_ids": [1, 5], "top_p_token_offsets": [0, 2]}
    second["meta_info"] |= {"completion_tokens": 2, "top_p_token_ids": [1, 5, 2], "top_p_token_offsets": [0, 2, 3]}
    merger.fresh_part(first)
    meta_info = merger.fresh_part(second)["meta_info"]
    assert meta_info["top_p_token_ids"].tolist() == [2] and meta_info["top_p_token_offsets"].tolist() == [0, 1]


def test_a_streamed_group_that_is_stopped_goes_on_from_what_it_said(engine, make_args, monkeypatch):
    """Row 0 says two tokens and then nothing until the abort; the engine's answer to the abort never comes."""

    async def generate(request):
        payload = await request.json()
        engine.requests.append(payload)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        slow = payload["input_ids"][1] == 24 and len(payload["input_ids"]) == 2
        body = reply([73, 74], "ab", "stop")
        if slow:
            body["meta_info"]["finish_reason"] = None
        await response.write(f"data: {json.dumps(body)}\n\n".encode())
        if slow:
            await engine._abort_event.wait()
        await response.write_eof()
        return response

    monkeypatch.setattr(engine, "stream", generate, raising=False)
    args = make_args(
        engine,
        custom_generate_function_path=PATH,
        over_sampling_batch_size=3,
        partial_rollout=True,
        n_samples_per_prompt=1,
    )
    source = create_data_source(args)
    assert [group[0].data_row for group in generate_rollout(args, 0, source).samples] == [1, 2]
    (waiting,) = source.buffer[0]
    assert (waiting.status, waiting.response, waiting.response_length) == (Sample.Status.ABORTED, "ab", 2)
    sample = generate_rollout(args, 1, source).samples[0][0]
    assert sample.tokens[-4:] == [73, 74] * 2 and sample.response == "abab" and sample.status == Sample.Status.COMPLETED
    assert sample.metadata["start_rollout_id"] == 0 and sample.loss_mask == [1] * 4


@pytest.mark.parametrize("path", [None, PATH])
def test_the_text_of_a_continued_response_has_no_seam(engine, make_args, tmp_path, monkeypatch, path):
    """The first call ends in the middle of a character; its text and that of the second have a broken half each."""
    (tmp_path / "bytes").mkdir()
    write_byte_tokenizer(tmp_path / "bytes")
    whole = "café"
    ids = load_tokenizer(str(tmp_path / "bytes")).encode(whole, add_special_tokens=False)
    assert len(ids) == 5
    parts = [(ids[:4], "caf\ufffd", "abort"), (ids[4:], "\ufffd", "stop")]

    async def stream(request):
        engine.requests.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(engine.answer(None))}\n\n".encode())
        await response.write_eof()
        return response

    engine.answer = lambda payload: reply(*parts[min(1, len(engine.requests) - 1)])
    if path:
        monkeypatch.setattr(engine, "stream", stream)
    args = make_args(
        engine, hf_checkpoint=str(tmp_path / "bytes"), custom_generate_function_path=path, rollout_batch_size=1,
        n_samples_per_prompt=1, partial_rollout=True,
    )  # fmt: skip
    sample = generate_rollout(args, 0, create_data_source(args)).samples[0][0]
    assert len(engine.requests) == 2 and sample.tokens[-5:] == ids
    assert sample.response == whole


def test_an_engine_that_refuses_or_gives_up_is_understood(streaming_engine, make_args, monkeypatch):
    args = make_args(streaming_engine, custom_generate_function_path=PATH, rollout_batch_size=1)
    streaming_engine.lines = ['{"error": {"message": "out of memory"}}', "[DONE]"]
    with pytest.raises(RuntimeError, match="the stream says .*out of memory"):
        generate_rollout(args, 0, create_data_source(args))
    accepts = streaming_engine.stream

    async def refuse_first(request):
        if (await request.json())["input_ids"][1] == 24:  # p0
            return web.json_response({"error": {"message": "longer than the context"}}, status=400)
        return await accepts(request)

    monkeypatch.setattr(streaming_engine, "stream", refuse_first)
    streaming_engine.lines = [*map(json.dumps, chunks("cumulative"))]
    source = create_data_source(args)
    assert [group[0].data_row for group in generate_rollout(args, 0, source).samples] == [1]
    assert source.stats()["failed"] == 1
