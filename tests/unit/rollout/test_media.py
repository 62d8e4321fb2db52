"""Images and audio of a sample: from the row to the engine, through buffer, checkpoint and dump, to the trainer's shard."""

import base64
import io
import itertools
import pickle
from types import SimpleNamespace

import numpy
import pytest
import torch
from fake_engine import reply
from PIL import Image

from slime.batching import schedule
from slime.observability.debug_dump import load_rollout_dump, save_rollout_dump
from slime.rollout import data_state, generate_state
from slime.rollout.base_types import leaves_of
from slime.rollout.data_source import RolloutDataSourceWithBuffer, create_data_source
from slime.rollout.data_source_adapter import DataSourceAdapter
from slime.rollout.generate_state import GenerateState
from slime.rollout.request import fill_prompt
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.plain_data import same
from slime.utils.processing_utils import load_image, media_for_engine
from slime.utils.types import Sample

KEYS = {"image": "images", "audio": "sounds"}


def picture(number):
    return Image.new("RGB", (4, 3), (number, 10, 20))


def png_text(number):
    stream = io.BytesIO()
    picture(number).save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


def decoded(uri):
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))).convert("RGB")


@pytest.fixture
def media_args(engine, make_args, write_rows, tmp_path):
    (tmp_path / "hello.wav").write_bytes(b"RIFF")
    rows = [
        {"input": f"<image> p{i} <audio>", "images": [png_text(i)], "sounds": str(tmp_path / "hello.wav")}
        for i in range(10)
    ]

    def make(**overrides):
        engine.answer = lambda payload: reply([7, 8, 9], "abc", prompt_tokens=expanded(payload))
        return make_args(engine, prompt_data=write_rows(rows, "media.jsonl"), multimodal_keys=KEYS, **overrides)

    return make


def expanded(payload):
    """Tokens that the engine reads: three for an image, beside its placeholder."""
    return len(payload["input_ids"]) + 3 * len(payload["image_data"])


class Processor:
    """As a checkpoint's: placeholders expand to three ids per image, and there are pixels beside them."""

    chat_template = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] if part['type'] == 'text' else '#' }}{% endfor %}{% endfor %}"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.calls = []

    def __call__(self, text, images=None, videos=None, audio=None, return_tensors=None):
        self.calls.append((text, images, audio))
        ids = self.tokenizer.encode(text[0]) + [3] * 3 * len(images)
        pixels = torch.tensor([image.getpixel((0, 0)) for image in images], dtype=torch.float32)
        return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)), "pixel_values": pixels}


@pytest.fixture
def with_processor(monkeypatch):
    def install(args):
        state = GenerateState(args)
        tokenizer = state.tokenizer
        monkeypatch.setattr(tokenizer, "chat_template", Processor.chat_template)
        state.processor = generate_state._shared[vars(args)[generate_state._ORIGIN]].processor = Processor(tokenizer)
        return state.processor

    return install


def test_built_in_generator_sends_media_and_keeps_what_the_processor_made(engine, media_args, with_processor):
    args = media_args(rollout_engine="sglang")
    processor = with_processor(args)
    groups = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    for sample in leaves_of(groups):
        row = sample.group_index
        assert sample.multimodal_train_inputs["pixel_values"].tolist() == [[row, 10, 20]]
        assert sample.tokens[:-3][-3:] == [3, 3, 3] and sample.prompt_length == len(sample.tokens) - 3
    prompts = {tuple(processor.tokenizer.encode(f"# p{row} #")) for row in range(2)}
    assert {tuple(request["input_ids"]) for request in engine.requests} == prompts  # not expanded: the engine does that
    assert not any("text" in request for request in engine.requests)
    sent = sorted(decoded(request["image_data"][0]).getpixel((0, 0))[0] for request in engine.requests)
    assert sent == [0, 0, 1, 1]
    assert {request["audio_data"][0] for request in engine.requests} == {"data:audio/x-wav;base64,UklGRg=="}
    assert processor.calls[0][2] is not None and len(processor.calls) == 2  # once for a prompt
    for first, second in groups:
        assert first.multimodal_train_inputs is not second.multimodal_train_inputs
        assert first.multimodal_train_inputs["pixel_values"] is second.multimodal_train_inputs["pixel_values"]


def test_an_engine_that_expands_media_otherwise_ends_the_run(engine, media_args, with_processor):
    args = media_args(rollout_engine="sglang")
    with_processor(args)
    engine.answer = lambda payload: reply([7], "a", prompt_tokens=expanded(payload) + 1)
    with pytest.raises(ValueError, match="the engine read 10 tokens, the processor of --hf-checkpoint made 9"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_media_for_a_model_without_a_processor_are_refused(engine, media_args):
    args = media_args(rollout_engine="sglang", apply_chat_template=False)
    with pytest.raises(ValueError, match="has media .*has no processor that reads them"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert not engine.requests


def test_rows_of_a_users_class_without_any_media_need_no_processor(engine, make_args):
    class Rows(RolloutDataSourceWithBuffer):
        def get_samples(self, num_samples):
            groups = super().get_samples(num_samples)
            for sample in itertools.chain.from_iterable(groups):
                sample.multimodal_inputs = {"images": None, "videos": []}
            return groups

    args = make_args(engine)
    assert len(generate_rollout(args, 0, Rows(args)).samples) == args.rollout_batch_size


def test_samples_with_media_are_asked_for_one_by_one(engine, media_args, with_processor):
    args = media_args(rollout_engine="embedded", group_requests="always")
    with_processor(args)
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert len(engine.requests) == 4 and all("n" not in request["sampling_params"] for request in engine.requests)
    assert all(request["image_data"] for request in engine.requests)


def test_a_continued_sample_sends_its_ids_and_its_media(engine, media_args, with_processor):
    args = media_args(rollout_engine="sglang", partial_rollout=True, over_sampling_batch_size=3, rollout_batch_size=1)
    tokenizer = with_processor(args).tokenizer
    hung = []

    def answer(payload):
        prompt = payload["input_ids"]
        if prompt != tokenizer.encode("# p0 #") and prompt not in hung and prompt[-1] != 5:
            hung.append(prompt)
            return {"hang": [5]}
        return reply([7, 8], "ab", prompt_tokens=expanded(payload))

    engine.answer = answer
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    engine.requests.clear()
    generate_rollout(args, 1, source)
    continued = [request["input_ids"] for request in engine.requests if request["input_ids"][-1] == 5]
    assert continued and all(ids[:-1] in hung for ids in continued)  # the prompt as at first: not expanded
    assert all(request["image_data"] for request in engine.requests)


def test_train_inputs_are_made_where_a_source_brought_ids_alone(engine, media_args, with_processor):
    args = media_args(rollout_engine="sglang")
    with_processor(args)
    source = RolloutDataSourceWithBuffer(args)
    for sample in source.dataset.samples:
        sample.tokens = [1, 2]
    sample = generate_rollout(args, 0, source).samples[0][0]
    assert sample.multimodal_train_inputs is not None and sample.tokens[:2] != [1, 2]


def restored(args, source, tmp_path, make=create_data_source):
    data_state.save(args, source, str(tmp_path), 0)
    again = make(args)
    data_state.load(args, again, str(tmp_path), 0)
    return again


def test_media_of_a_row_are_not_stored_and_changed_ones_are(media_args, tmp_path):
    args = media_args(data_source_path="slime.rollout.data_source.RolloutDataSourceWithBuffer")
    source = create_data_source(args)
    groups = source.get_samples(2)
    for sample in leaves_of(groups):
        sample.append_response_tokens(tokens=[5], log_probs=[-0.5])
    groups[1][0].multimodal_inputs["images"].append(picture(99))  # what a tool drew
    source.add_samples(groups)
    stored = source.state_dict()["buffer"]
    assert [sample["multimodal_inputs"] is None for group in stored for sample in group] == [True, True, False, True]
    again = restored(args, source, tmp_path).get_samples(2)
    for before, after in zip(leaves_of(groups), leaves_of(again), strict=True):
        assert same(before.multimodal_inputs, after.multimodal_inputs)
    assert again[0][0].multimodal_inputs["images"] is not again[0][1].multimodal_inputs["images"]


def test_media_that_a_hook_took_away_do_not_come_back(media_args, tmp_path):
    args = media_args(data_source_path="slime.rollout.data_source.RolloutDataSourceWithBuffer")
    source = create_data_source(args)
    (group,) = source.get_samples(1)
    group[0].append_response_tokens(tokens=[5], log_probs=[-0.5])
    group[0].multimodal_inputs = None
    source.add_samples([group])
    (again,) = restored(args, source, tmp_path).get_samples(1)
    assert not again[0].multimodal_inputs and again[1].multimodal_inputs


class Albums:
    """A user's source that makes its pictures itself."""

    def __init__(self, args):
        self.count = 0

    def get_samples(self, num_samples):
        self.count += num_samples
        samples = [Sample(prompt=[{"role": "user", "content": [{"type": "image", "image": picture(1)}]}])]
        samples[0].multimodal_inputs = {"images": [picture(1)], "audios": [(b"\x01\x02", 16000)]}
        samples[0].metadata["thumbnail"] = picture(2)
        return samples * num_samples

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("streamed", [False, True])
def test_media_of_a_users_source_and_of_a_stream_survive_a_checkpoint(media_args, tmp_path, streamed):
    overrides = {"streaming_data": True} if streamed else {"data_source_path": f"{__name__}.Albums"}
    args = media_args(**overrides)
    source = create_data_source(args)
    (group,) = source.get_samples(1)
    again = restored(args, source, tmp_path).get_samples(1)[0]
    assert same(group[0].multimodal_inputs, again[0].multimodal_inputs)
    assert same(group[0].prompt, again[0].prompt) and same(group[0].metadata, again[0].metadata)


class Lectures(Albums):
    """A source whose media are objects."""

    speech: object = None

    def get_samples(self, num_samples):
        return [Sample(prompt="a", multimodal_inputs={"audios": [self.speech]}) for _ in range(num_samples)]


@pytest.mark.parametrize("saves", [{"save": "checkpoints"}, {"save_debug_rollout_data": "{rollout_id}.pt"}, {}])
def test_objects_of_a_users_source_become_data_or_are_named_before_anything_is_generated(
    media_args, monkeypatch, saves
):
    source = create_data_source(media_args(data_source_path=f"{__name__}.Lectures", **saves))
    monkeypatch.setattr(Lectures, "speech", SimpleNamespace(data=torch.zeros(1, 4), sample_rate=8000))
    (group,) = source.get_samples(1)
    (sound,) = group[0].multimodal_inputs["audios"]
    assert sound["array"].tolist() == [0] * 4 and sound["sampling_rate"] == 8000
    monkeypatch.setattr(Lectures, "speech", object())
    if not saves:
        assert source.get_samples(1)
        return
    with pytest.raises(
        ValueError, match=r"--data-source-path .*Lectures: sample .*\['audios'\]\[0\] is a builtins.object"
    ):
        source.get_samples(1)


async def leave_a_handle(args, sample, sampling_params):
    sample.tokens, sample.multimodal_train_inputs = [1, 2], {"handle": object()}
    sample.append_response_tokens(tokens=[5], log_probs=[-0.5])
    sample.status = Sample.Status.COMPLETED
    return sample


def test_what_a_generate_function_leaves_in_train_inputs_is_checked_in_the_first_round(engine, make_args):
    args = make_args(engine, custom_generate_function_path=f"{__name__}.leave_a_handle", save="checkpoints")
    with pytest.raises(ValueError, match=r"sample \d: multimodal_train_inputs\['handle'\] is a builtins.object"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_samples_of_a_prompt_share_its_images_in_memory_in_files_and_in_the_shard(media_args, tmp_path):
    class Photographs(Albums):
        def get_samples(self, num_samples):
            image = Image.effect_noise((200, 200), 90)
            train = {"pixel_values": torch.rand(300, 100)}
            return [Sample(prompt="a", multimodal_inputs={"images": [image]}, multimodal_train_inputs=train)]

    def stored(count):
        args = media_args(n_samples_per_prompt=count)
        source = DataSourceAdapter(args, Photographs(args))
        (group,) = source.get_samples(1)
        data_state.save(args, source, str(tmp_path), 0)
        again = DataSourceAdapter(args, Photographs(args))
        data_state.load(args, again, str(tmp_path), 0)
        return group, again.get_samples(1)[0], (tmp_path / data_state.FILE).stat().st_size

    size = stored(1)[2]
    group, again, size_of_8 = stored(8)
    assert size_of_8 < 1.2 * size
    for samples in (group, again):
        assert len({id(sample.multimodal_inputs["images"]) for sample in samples}) == 8
        assert len({id(sample.multimodal_inputs["images"][0]) for sample in samples}) == 1
    column = schedule._media_column([sample.multimodal_train_inputs for sample in again])
    assert len(pickle.dumps(column)) < 1.2 * len(pickle.dumps(column[:1]))
    assert torch.equal(column[3]["pixel_values"], group[3].multimodal_train_inputs["pixel_values"])


def test_media_survive_a_dump(tmp_path):
    sample = Sample(index=0, prompt="a", multimodal_inputs={"images": [picture(3)], "videos": None})
    sample.multimodal_inputs["audios"] = [(numpy.arange(3, dtype=numpy.float32), 16000)]
    sample.multimodal_train_inputs = {"pixel_values": torch.ones(1, 3), "grid": numpy.ones((1, 3)), "names": ["x"]}
    save_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 0, [sample])
    (back,) = load_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 0)
    assert same(back.multimodal_inputs, sample.multimodal_inputs)
    assert same(back.multimodal_train_inputs, sample.multimodal_train_inputs)


def test_the_teacher_gets_the_media_and_ids_that_it_expands_itself(media_args, with_processor, monkeypatch):
    import asyncio

    from slime.rollout import on_policy_distillation as opd

    async def teacher(url, payload, **options):
        assert decoded(payload["image_data"][0]).getpixel((0, 0)) == (4, 10, 20)
        assert payload["input_ids"] == [*tokenizer.encode("# p4"), 7]
        count = len(payload["input_ids"]) + 3
        return {"meta_info": {"input_token_logprobs": [[-float(i), 1, None] for i in range(count)]}}

    monkeypatch.setattr(opd, "post", teacher)
    args = media_args(rm_url="http://teacher/generate", rm_timeout=5.0)
    tokenizer = with_processor(args).tokenizer
    sample = Sample(prompt="# p4", multimodal_inputs={"images": [picture(4)]})
    fill_prompt(GenerateState(args), sample)
    sample.append_response_tokens(tokens=[7], log_probs=[-0.5])
    asyncio.run(opd.score_with_teacher(args, sample))
    assert sample.teacher_log_probs == [-float(len(sample.tokens) - 1)]


@pytest.mark.parametrize("kind", ["images", "videos", "audios"])
@pytest.mark.parametrize("item", ["clips/missing.mp4", "file:///clips/a.mp4", "", "clips/missing"])
def test_a_text_that_is_no_media_is_named_not_sent(kind, item):
    with pytest.raises(ValueError, match=f"{item!r} is no {kind[:-1]}: no such file"):
        media_for_engine({kind: [item]})
    with pytest.raises(ValueError, match=f"{item!r} is no image: no such file"):
        load_image(item)


def test_base64_and_urls_are_sent(tmp_path):
    audio = base64.b64encode(b"RIFF").decode()
    items = [audio, audio[:4] + "\n" + audio[4:], "https://x/a.wav", b"RIFF"]
    sent = media_for_engine({"audios": items})["audio_data"]
    assert [text.split(",", 1)[-1] for text in sent] == [audio, audio[:4] + "\n" + audio[4:], "https://x/a.wav", audio]


@pytest.mark.parametrize(
    ("keys", "fields"),
    [(None, []), ({"image": "images"}, []), (KEYS, ["audio_data"]), ({"video": "v"}, ["video_data"])],
)
def test_router_of_a_run_with_sound_lets_it_through(keys, fields):
    from slime.ray.router import fields_to_keep

    args = SimpleNamespace(use_rollout_routing_replay=False, rollout_top_p=1.0, multimodal_keys=keys, eval_datasets=[])
    assert fields_to_keep(args) == fields
