"""Rows with images through processors of transformers: LLaVA's always, Qwen2-VL's where torchvision is installed."""

import base64
import io

import pytest
import torch
from fake_engine import reply
from PIL import Image

from slime.batching.sample_check import check_alignment
from slime.rollout.base_types import leaves_of
from slime.rollout.conversation import generate_single
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine_control import get_model_url
from slime.rollout.generate_state import GenerateState
from slime.rollout.request import build_request, engine_ids, fill_prompt
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.http_utils import post
from slime.utils.processing_utils import load_processor
from tests.vision_models import make_llava_processor, make_qwen2_vl

MEDIA_TOKENS = {"llava": "<image>", "qwen2_vl": "<|image_pad|>"}


def png(width, height, colour):
    stream = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def model(request, tmp_path_factory):
    """(folder, id of a token that stands for a part of an image)"""
    if request.param == "qwen2_vl":
        pytest.importorskip("torchvision", reason="Qwen2-VL's processor wants torchvision", exc_type=Exception)
    make = {"llava": make_llava_processor, "qwen2_vl": make_qwen2_vl}[request.param]
    folder = make(tmp_path_factory.mktemp(request.param))
    return str(folder), load_processor(str(folder)).tokenizer.convert_tokens_to_ids(MEDIA_TOKENS[request.param])


@pytest.fixture
def args(engine, make_args, write_rows, model):
    images = [[png(60, 60, "red")], [png(60, 60, "red"), png(120, 60, "blue")]]
    rows = [{"input": "<image>" * len(items) + " which?", "images": items} for items in images]
    return make_args(
        engine,
        hf_checkpoint=model[0],
        prompt_data=write_rows(rows, "images.jsonl"),
        multimodal_keys={"image": "images"},
        apply_chat_template=True,
        rollout_engine="sglang",
    )


def test_prompts_are_what_the_processor_makes_and_engines_get_one_token_per_image(engine, args, model):
    _, image = model
    processor, seen = GenerateState(args).processor, []

    def answer(payload):
        seen.append(payload["input_ids"].count(image))
        pictures = [Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))) for uri in payload["image_data"]]
        text = processor.tokenizer.decode(payload["input_ids"])
        return reply(
            [7, 8], "ab", prompt_tokens=processor(text=[text], images=pictures, return_tensors="pt").input_ids.numel()
        )

    engine.answer = answer
    groups = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    assert sorted(seen) == [1, 1, 2, 2]
    for number, group in enumerate(groups, start=1):
        for sample in group:
            train = sample.multimodal_train_inputs
            tokens = torch.tensor(sample.tokens[: sample.prompt_length])
            expected = processor(text=[sample.prompt], images=sample.multimodal_inputs["images"], return_tensors="pt")
            assert torch.equal(tokens, expected.input_ids[0]) and (tokens == image).sum() >= 4 * number
            assert torch.equal(train["pixel_values"], expected.pixel_values)
            assert "image_grid_thw" not in expected or torch.equal(train["image_grid_thw"], expected.image_grid_thw)
        assert group[0].multimodal_train_inputs["pixel_values"] is group[1].multimodal_train_inputs["pixel_values"]


def test_the_prompt_limit_counts_what_images_expand_to(args, model):
    state = GenerateState(args)
    every = RolloutDataSourceWithBuffer(args).dataset
    lengths = [len(state.processor(text=[s.prompt], **_images(s), return_tensors="pt").input_ids[0]) for s in every]
    assert lengths[0] < lengths[1]
    args.rollout_max_prompt_len = lengths[1] - 1
    kept = RolloutDataSourceWithBuffer(args).dataset
    assert (len(kept), kept.num_too_long) == (1, 1)
    assert len(state.tokenizer.encode(every[1].prompt)) < lengths[1] - 1  # it is the images that are too much


def _images(sample):
    return {"images": sample.multimodal_inputs["images"]}


def test_a_continued_response_keeps_its_ids_behind_the_prompt_of_the_first_turn(engine, args, model):
    _, image = model
    args.partial_rollout, args.over_sampling_batch_size, args.rollout_batch_size = True, 2, 1
    state, hung = GenerateState(args), []

    def answer(payload):
        if payload["input_ids"].count(image) == 2 and len(hung) < 2:
            hung.append(payload["input_ids"])
            return {"hang": [200, 201]}  # bytes that are no text: encoding them again would give others
        return reply([7, 8], "ab")

    engine.answer = answer
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    engine.requests.clear()
    samples = leaves_of(generate_rollout(args, 1, source).samples)
    continued = [request["input_ids"] for request in engine.requests if request["input_ids"][-2:] == [200, 201]]
    assert len(continued) == 2 and all(ids[:-2] == hung[0] for ids in continued)
    for sample in samples:
        check_alignment(sample)
        assert sample.tokens[sample.prompt_length :] == [200, 201, 7, 8] and sample.tokens.count(image) > 4
        assert engine_ids(state, sample) == [*continued[0], 7, 8]


def test_a_response_that_holds_the_token_of_an_image_starts_again(args, model, caplog):
    state = GenerateState(args)
    (sample, _) = RolloutDataSourceWithBuffer(args).get_samples(1)[0]
    fill_prompt(state, sample)
    prompt = list(sample.tokens)
    sample.append_response_tokens(tokens=[7, model[1]], log_probs=[-0.5, -0.5])
    with pytest.raises(ValueError, match="its response holds the token of a medium"):
        engine_ids(state, sample)
    fill_prompt(state, sample)
    assert sample.tokens == prompt and sample.response_length == 0 and "it starts again" in caplog.text


async def ask_and_keep_the_text(args, sample, sampling_params):
    """As functions written for a text answer do: they post themselves, and set the response alone."""
    fill_prompt(GenerateState(args), sample)
    payload = build_request(args, sample, sampling_params)
    sample.tokens, sample.multimodal_train_inputs = [], None
    sample.response = (await post(get_model_url(args), payload))["text"]
    return sample


def test_a_functions_own_requests_with_media_are_recorded_as_the_engine_read_them(engine, args, model):
    engine.answer = lambda payload: reply([7, 8], "ab")
    args.custom_generate_function_path = f"{__name__}.ask_and_keep_the_text"
    for sample in leaves_of(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples):
        expected = GenerateState(args).processor(text=[sample.prompt], **_images(sample), return_tensors="pt")
        assert sample.tokens == [*expected.input_ids[0].tolist(), 7, 8] and sample.rollout_log_probs == [-0.5, -0.5]
        assert torch.equal(sample.multimodal_train_inputs["pixel_values"], expected.pixel_values)


async def ask_in_messages(args, sample, sampling_params):
    await generate_single([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])


def test_generate_single_does_not_leave_images_out_in_silence(engine, args):
    args.custom_generate_function_path = f"{__name__}.ask_in_messages"
    with pytest.raises(Exception, match="generate_single asks in text alone, but a message holds media"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert not engine.requests


def test_a_processor_without_its_package_leaves_runs_on_text_alone(tmp_path, monkeypatch, caplog):
    def missing(*args, **kwargs):
        raise ImportError("Qwen2VLVideoProcessor requires the Torchvision library")

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", missing)
    assert load_processor(str(make_llava_processor(tmp_path))) is None
    assert "requires the Torchvision library" in caplog.text
