"""The SFT rollout function: both kinds of rows, the length policy, refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from slime.batching.convert import _loss_mask
from slime.config.eval_datasets import EvalDatasetConfig
from slime.rollout import sft_rollout
from slime.rollout.sft_rollout import generate_rollout
from slime.utils.tiny_model import write_byte_tokenizer
from slime.utils.types import Sample

END = 259


class ListSource:
    """Hands out given samples in a circle and remembers what was filtered."""

    def __init__(self, samples):
        self.samples, self.position, self.filtered = samples, 0, []

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            groups.append([self.samples[self.position % len(self.samples)]])
            self.position += 1
        return groups

    def mark_finished(self, samples, outcome):
        self.filtered.append((samples[0][0].index, outcome))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sft_tokenizer")
    write_byte_tokenizer(path)
    return str(path)


def make_args(folder, **changes):
    values = dict(
        hf_checkpoint=folder, trust_remote_code=False, loss_mask_type="qwen", n_samples_per_prompt=1,
        rollout_batch_size=1, rollout_max_context_len=None, sglang_context_length=None, model_arch={},
        strict_args=False, eval_max_prompt_len=None, custom_generate_function_path=None, eval_datasets=[],
    )  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_fb_l14_plain_rows_train_label_and_end_token_only(folder):
    sample = Sample(index=0, prompt="sort 21=", label="12")
    output = generate_rollout(make_args(folder), 0, ListSource([sample]))
    assert output.samples == [[sample]]
    assert sample.response == "12<|im_end|>" and len(sample.tokens) == len("sort 21=") + 3
    assert sample.response_length == 3 and sample.loss_mask == [1, 1, 1] and sample.tokens[-1] == END
    assert sample.reward == 0 and sample.rollout_log_probs is None
    sample.check_invariants()


def test_chat_rows_train_every_assistant_turn(folder):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    sample = Sample(index=0, prompt=messages)
    generate_rollout(make_args(folder), 0, ListSource([sample]))
    assert sample.loss_mask[:3] == [1, 1, 1] and sum(sample.loss_mask) == 6 and _loss_mask(sample) == sample.loss_mask
    assert sample.response.startswith("b<|im_end|>\n<|im_start|>user") and sample.response.endswith("d<|im_end|>\n")


def test_user_message_with_label_is_rendered_with_the_assistant_header(folder):
    sample = Sample(index=0, prompt=[{"role": "user", "content": "a"}], label=7)
    generate_rollout(make_args(folder), 0, ListSource([sample]))
    assert sample.response == "7<|im_end|>" and sample.loss_mask == [1, 1]


def test_fb_d10_long_and_empty_samples_are_dropped_and_counted(folder):
    long = Sample(index=0, prompt="x" * 50, label="y")
    silent = Sample(
        index=1, prompt=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "step_loss_mask": 0}]
    )
    fits = Sample(index=2, prompt="x" * 8, label="y")
    source = ListSource([long, silent, fits])
    output = generate_rollout(make_args(folder, rollout_max_context_len=40), 0, source)
    assert output.samples == [[fits]] and source.filtered == [(0, "filtered"), (1, "filtered")]
    assert output.metrics == {"sft/dropped_too_long": 1, "sft/dropped_no_trained_token": 1}


def test_exactly_the_limit_is_kept(folder):
    sample = Sample(index=0, prompt="x" * 8, label="y")
    assert generate_rollout(make_args(folder, rollout_max_context_len=10), 0, ListSource([sample])).samples


def test_refusals_name_the_flag(folder):
    source = ListSource([Sample(index=0, prompt="x" * 50, label="y")])
    with pytest.raises(ValueError, match="--rollout-max-context-len 5"):
        generate_rollout(make_args(folder, rollout_max_context_len=5), 0, source)
    with pytest.raises(ValueError, match="--label-key"):
        generate_rollout(make_args(folder), 0, ListSource([Sample(index=0, prompt="x")]))


def test_a_conversation_that_the_template_refuses_is_named(folder):
    generator = sft_rollout._mask_generator(folder, False, "auto", "{}")
    before = generator.tokenizer.chat_template
    generator.tokenizer.chat_template = "{{ raise_exception('no wizards') }}"
    messages = [{"role": "wizard", "content": "a spell"}, {"role": "assistant", "content": "b"}]
    try:
        with pytest.raises(ValueError, match="SFT sample 5, which begins with 'a spell': no wizards"):
            generate_rollout(
                make_args(folder, loss_mask_type="auto"), 0, ListSource([Sample(index=5, prompt=messages)])
            )
    finally:
        generator.tokenizer.chat_template = before


def test_a_source_without_rows_ends_the_round(folder):
    source = ListSource([])
    source.get_samples = lambda num_samples: []
    with pytest.raises(RuntimeError, match="round 4: the data source has no more prompts after 0 of 1 groups"):
        generate_rollout(make_args(folder), 4, source)


def test_fb_d10_the_models_positions_are_a_limit_too(folder):
    args = make_args(folder, model_arch={"max_position_embeddings": 12})
    long, fits = Sample(index=0, prompt="x" * 11, label="y"), Sample(index=1, prompt="x" * 10, label="y")
    output = generate_rollout(args, 0, ListSource([long, fits]))
    assert output.samples == [[fits]] and output.metrics["sft/dropped_too_long"] == 1


def test_options_of_the_template_reach_the_masks(folder):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template = "{% for m in messages %}<{{ m['role'] }}{{ mark }}>{{ m['content'] }}<|im_end|>{% endfor %}"
    sample = Sample(index=0, prompt=messages, apply_chat_template_kwargs={"mark": "!"})
    args = make_args(folder, loss_mask_type="auto")
    generator = sft_rollout._mask_generator(folder, False, "auto", '{"mark": "!"}')
    before, generator.tokenizer.chat_template = generator.tokenizer.chat_template, template
    try:
        generate_rollout(args, 0, ListSource([sample]))
        assert generator.tokenizer.decode(sample.tokens) == "<user!>a<|im_end|><assistant!>b<|im_end|>"
    finally:
        generator.tokenizer.chat_template = before
    assert sample.response == "b<|im_end|>"


def test_rows_with_media_are_refused(folder):
    sample = Sample(index=3, prompt="a", label="b", multimodal_inputs={"images": ["x"]})
    with pytest.raises(ValueError, match="SFT sample 3 has media"):
        generate_rollout(make_args(folder), 0, ListSource([sample]))


def test_held_out_rows_are_tokenised_like_those_of_training(folder, tmp_path):
    path = tmp_path / "held_out.jsonl"
    rows = [{"prompt": "sort 21=", "label": "12"}, {"prompt": "x" * 50, "label": "y"}, {"prompt": "q", "label": "a"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvalDatasetConfig("quiz", str(path), input_key="prompt", label_key="label", metadata_key="m", tool_key="t")
    args = make_args(folder, eval_datasets=[config], rollout_max_context_len=40)
    (samples,) = sft_rollout.held_out_samples(args).values()
    assert [sample.response for sample in samples] == ["12<|im_end|>", "a<|im_end|>"]
    assert [sample.index for sample in samples] == [0, 1]
    with pytest.raises(ValueError, match="evaluation set quiz: none of 3 rows"):
        sft_rollout.held_out_samples(make_args(folder, eval_datasets=[config], rollout_max_context_len=1))
