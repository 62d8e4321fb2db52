"""The experts that a reply reports are those of transformers for the same tokens, however the tokens came to be read."""

from __future__ import annotations

import queue

import pytest
import torch

from slime.engine.build import build_engine
from slime.engine.server_args import ServerArgs
from slime.utils.meta_info import int32_tensor
from slime.utils.tiny_model import Experts, make_tiny_model

LAYERS, TOP_K = 3, 2
PROMPT = list(range(40, 60))


class Server:
    """An engine without sockets."""

    def __init__(self, folder, **flags):
        self.ended: queue.Queue = queue.Queue()
        args = ServerArgs(str(folder), mem_bytes=1 << 24, max_running_requests=4, **flags)
        self.engine = build_engine(args, self._note)
        self.engine.scheduler.start()

    def _note(self, events) -> None:
        for request, chunk in events:
            if chunk is None:
                self.ended.put(request)

    def generate(self, **body) -> list[tuple[list[int], dict]]:
        """(prompt and output ids, meta_info) of every answer."""
        requests = self.engine.api._parser.parse({"return_routed_experts": True, **body}).requests
        for request in requests:
            self.engine.scheduler.submit(request)
        for _ in requests:
            self.ended.get(timeout=60)
        writer = self.engine.api._writer
        return [(r.prompt_ids + r.output_ids, writer.reply(r, False)["meta_info"]) for r in requests]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    experts = Experts(count=6, per_token=TOP_K, dense_layers=(1,))
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), arch="qwen3_moe", init_std=0.2, layers=LAYERS, experts=experts
    )


@pytest.fixture(scope="module")
def server(folder):
    server = Server(folder, enable_return_routed_experts=True)
    yield server
    server.engine.scheduler.stop()


@pytest.fixture(scope="module")
def experts_of(folder):
    """tokens -> sorted expert ids [tokens - 1, layers, top k] by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def compute(tokens: list[int]) -> torch.Tensor:
        scores = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
        chosen = [s.topk(TOP_K).indices.sort(1).values for s in scores]
        return torch.stack([chosen[0], torch.zeros_like(chosen[0]), chosen[1]], 1).int()

    return compute


def reported(meta: dict) -> torch.Tensor:
    return int32_tensor(meta["routed_experts"]).view(-1, LAYERS, TOP_K).sort(2).values


def test_prompt_read_once_for_several_answers_and_decoded_tokens(server, experts_of):
    params = {"max_new_tokens": 9, "temperature": 1.0, "n": 3, "ignore_eos": True}
    answers = server.generate(input_ids=PROMPT, sampling_params=params)
    assert len({tuple(tokens) for tokens, _ in answers}) == 3
    for tokens, meta in answers:
        assert torch.equal(reported(meta), experts_of(tokens))


def test_a_conversation_that_goes_on_gets_the_experts_of_what_was_not_read_again(server, experts_of):
    params = {"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    ((tokens, _),) = server.generate(input_ids=[7, *PROMPT], sampling_params=params)
    server.generate(input_ids=[9] * 40, sampling_params=params)  # writes over the row of the first
    ((longer, meta),) = server.generate(input_ids=[*tokens, 3, 4], sampling_params=params)
    assert meta["cached_tokens"] > 20
    assert torch.equal(reported(meta), experts_of(longer))


def test_prompts_of_different_length_and_a_prompt_that_is_only_scored(server, experts_of):
    prompts = [PROMPT[:5], PROMPT[3:], [9, 9, 200]]
    params = [{"max_new_tokens": count, "ignore_eos": True} for count in (2, 5, 9)]  # rows move when one ends
    for tokens, meta in server.generate(input_ids=prompts, sampling_params=params):
        assert torch.equal(reported(meta), experts_of(tokens))
    scored = server.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 0}, return_logprob=True)
    assert torch.equal(reported(scored[0][1]), experts_of([5, 6, 7]))


def test_requests_that_do_not_ask_get_none_and_a_server_without_the_flag_says_so(server, folder):
    ((_, meta),) = server.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1}, return_routed_experts=False)
    assert "routed_experts" not in meta
    plain = Server(folder)
    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        plain.generate(input_ids=PROMPT)
    plain.engine.scheduler.stop()


def test_a_dense_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no experts"):
        Server(make_tiny_model(tmp_path), enable_return_routed_experts=True)
