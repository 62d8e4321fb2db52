"""A reward engine (`--is-embedding`) scores what the same model scores in the rollout process, and refuses what is no sequence."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

from slime.rollout.rm_hub import async_rm
from slime.utils.reward_model import RewardModel
from slime.utils.tiny_model import make_tiny_model, write_byte_tokenizer
from slime.utils.types import Sample
from tests.engine.engine_process import START_DEADLINE_S, engine_environment, free_port, serving

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A random Qwen3 with a head of one output, in Hugging Face's format."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("rm") / "model"
    config = AutoConfig.from_pretrained(make_tiny_model(folder.parent / "base", arch="qwen3", seed=3), num_labels=1)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    write_byte_tokenizer(folder)
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "chat_template": CHAT}))
    return str(folder)


@pytest.fixture(scope="module")
def url(model_path):
    with serving(model_path, "--is-embedding", "--dtype", "float32") as (url, _):
        yield url


def classify(url: str, **body) -> httpx.Response:
    return httpx.post(f"{url}/classify", json=body, trust_env=False, timeout=60)


def test_texts_and_ids_one_or_several_get_the_models_scores(url, model_path):
    model = RewardModel(model_path, "float32")
    texts = ["good answer", "bad", "a much longer answer than the others"]
    expected = [model.score(model.encode(text)) for text in texts]
    assert len(set(expected)) == 3
    assert classify(url, text=texts[0]).json()["embedding"] == pytest.approx(expected[:1])
    for body in ({"text": texts}, {"input_ids": [model.encode(text) for text in texts]}):
        assert [reply["embedding"][0] for reply in classify(url, **body).json()] == pytest.approx(expected)
    assert classify(url, text=texts[1]).json()["meta_info"]["prompt_tokens"] == len(model.encode("bad"))


@pytest.mark.parametrize(
    "body", [{}, {"text": ""}, {"text": 5}, {"text": []}, {"input_ids": [True]}, {"input_ids": [10**6]}, {"input_ids": [-1]}, {"text": "x" * 5000}]
)  # fmt: skip
def test_what_is_no_sequence_is_refused_and_the_engine_goes_on(url, body):
    assert classify(url, **body).status_code == 400
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


def test_rewards_are_the_same_in_process_and_from_the_engine(url, model_path):
    async def both(sample: Sample) -> list[float]:
        shared = dict(custom_rm_path=None, rm_type="reward_model", rm_timeout=60.0, hf_checkpoint=None)
        here = SimpleNamespace(rm_url=None, rm_model_path=model_path, **shared)
        there = SimpleNamespace(rm_url=url, rm_model_path=model_path, **shared)
        return [await async_rm(args, sample) for args in (here, there)]

    for prompt in ("What is 2 + 2?", [{"role": "user", "content": "What is 2 + 2?"}]):
        here, there = asyncio.run(both(Sample(prompt=prompt, response="4")))
        assert here == pytest.approx(there)
    model = RewardModel(model_path)
    assert here == pytest.approx(model.score(model.encode("<user>What is 2 + 2?<assistant>4")))


def test_model_without_a_head_is_refused_at_start(tmp_path):
    folder = make_tiny_model(tmp_path / "base", arch="qwen3")
    with pytest.raises(ValueError, match="is no reward model.*Qwen3ForCausalLM"):
        RewardModel(str(folder))
    command = [
        sys.executable,
        "-m",
        "slime.engine",
        "--is-embedding",
        "--model-path",
        str(folder),
        "--port",
        str(free_port()),
    ]
    ended = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, timeout=START_DEADLINE_S)
    assert ended.returncode == 1 and "is no reward model" in ended.stderr
