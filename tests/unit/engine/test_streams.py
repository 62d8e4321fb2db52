"""Pieces of a /generate stream: the answer so far, or what is new."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.engine.requests import Chunk, Request
from slime.engine.sampling_params import SamplingParams
from slime.engine.streams import NativePieces
from slime.engine.tokenizer import EngineTokenizer
from slime.engine.wire import ReplyWriter
from slime.utils.tiny_model import write_byte_tokenizer


@pytest.mark.parametrize("is_incremental", [False, True])
def test_pieces_hold_the_answer_so_far_or_what_is_new(tmp_path, is_incremental):
    write_byte_tokenizer(tmp_path)
    tokenizer = EngineTokenizer(tmp_path)
    ids = tokenizer.encode("abc")
    request = Request("r", [1], SamplingParams(max_new_tokens=3), seed=0, stop_ids=(), return_logprob=True)
    request.finished_at = request.received_at
    call = SimpleNamespace(requests=[request], text_in_logprobs=False, is_list=False)
    pieces = NativePieces(ReplyWriter(tokenizer), call, is_incremental)
    shown = []
    for n in range(2):
        shown += pieces.of(request, Chunk([ids[n]], [-0.5], n + 1, "v"))
    request.output_ids, request.output_logprobs, request.text = ids, [-0.5] * 3, "abc"
    request.finish_reason = {"type": "length", "length": 3}
    shown += pieces.of(request, None)
    texts = ["a", "b", "c"] if is_incremental else ["a", "ab", "abc"]
    assert [piece["text"] for piece in shown] == texts
    assert [tokenizer.decode(piece["output_ids"]) for piece in shown] == texts
    assert [len(piece["meta_info"]["output_token_logprobs"]) for piece in shown] == [len(text) for text in texts]
    assert [piece["meta_info"]["completion_tokens"] for piece in shown] == [1, 2, 3]
