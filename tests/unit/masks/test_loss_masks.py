"""Loss masks of conversations: what is trained, over several kinds of chat template."""

from __future__ import annotations

import logging

import pytest

from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.tiny_model import write_byte_tokenizer

TOOLS_AND_ROLES = """
{%- if tools %}{{ '<|im_start|>system\n# Tools ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}ASSISTANT_OR_PLAIN{% endif %}
{%- endfor %}
"""
CHATML = (
    TOOLS_AND_ROLES.replace(
        "ASSISTANT_OR_PLAIN",
        "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '\n<tool_call>\n' + (c | tojson) + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}",
    )
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML
)
THINKING = (
    """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
"""
    + TOOLS_AND_ROLES.replace(
        "ASSISTANT_OR_PLAIN",
        "{{ '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' %}"
        "{%- set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
        "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}"
        "{%- if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' + answer }}{% else %}{{ answer }}{% endif %}"
        "{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}",
    )
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
NO_END_TOKEN = (
    "{{ '[gMASK]' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte_tokenizer")
    write_byte_tokenizer(folder)
    return str(folder)


@pytest.fixture
def make(tokenizer_folder):
    from transformers import AutoTokenizer

    def build(template, kind):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        tokenizer.chat_template = template
        return MultiTurnLossMaskGenerator(tokenizer, kind)

    return build


def full_ids(generator, messages, tools=None):
    text = generator.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return generator.tokenizer(text, add_special_tokens=False)["input_ids"]


def trained(generator, messages, tools=None):
    ids, mask = generator.get_loss_mask(messages, tools)
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    return ids, generator.get_text_from_loss_mask(ids, mask)


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
CALL = {"role": "assistant", "content": "look", "tool_calls": [{"name": "a"}, {"name": "b"}]}
TOOL_A, TOOL_B = {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}
THOUGHT_1 = {"role": "assistant", "content": "<think>\nREASONING_1\n</think>\n\nANSWER_1"}
THOUGHT_2 = {"role": "assistant", "content": "<think>\nREASONING_2\n</think>\n\nANSWER_2"}


@pytest.mark.parametrize("kind, newline", [("qwen", "\n"), ("qwen3", "\n"), ("qwen3_5", "\n"), ("auto", "")])
def test_fb_t01_tool_runs_equal_the_full_render_and_only_assistants_train(make, kind, newline):
    generator = make(CHATML, kind)
    messages = [USER, CALL, TOOL_A, TOOL_B, ANSWER]
    ids, texts = trained(generator, messages, tools=[{"name": "a"}])
    assert ids == full_ids(generator, messages, [{"name": "a"}])
    call = 'look\n<tool_call>\n{"name": "a"}\n</tool_call>\n<tool_call>\n{"name": "b"}\n</tool_call><|im_end|>'
    assert texts == [call + newline, "hello<|im_end|>" + newline]


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5", "auto"])
def test_default_system_block_appears_once(make, kind):
    generator = make(DEFAULT_SYSTEM, kind)
    messages = [USER, ANSWER, USER, ANSWER]
    ids, texts = trained(generator, messages)
    assert ids == full_ids(generator, messages) and len(texts) == 2
    with_system = [{"role": "system", "content": "S"}, USER, ANSWER]
    assert trained(generator, with_system)[0] == full_ids(generator, with_system)


def test_single_thinking_turn_is_equal_in_qwen3_and_qwen3_5(make):
    messages = [{"role": "system", "content": "S"}, USER, THOUGHT_1]
    first, second = (make(THINKING, kind).get_loss_mask(messages) for kind in ("qwen3", "qwen3_5"))
    assert first == second
    assert trained(make(THINKING, "auto"), messages)[1] == ["REASONING_1\n</think>\n\nANSWER_1<|im_end|>"]


def test_early_turns_keep_the_template_text_in_qwen3_5_and_auto_but_not_in_qwen3(make, caplog):
    messages = [USER, THOUGHT_1, USER, THOUGHT_2]
    generator = make(THINKING, "qwen3_5")
    ids, texts = trained(generator, messages)
    assert ids == full_ids(generator, messages)
    assert texts == ["ANSWER_1<|im_end|>\n", "REASONING_2\n</think>\n\nANSWER_2<|im_end|>\n"]
    assert trained(make(THINKING, "auto"), messages)[1] == [
        "ANSWER_1<|im_end|>",
        "REASONING_2\n</think>\n\nANSWER_2<|im_end|>",
    ]
    with caplog.at_level(logging.WARNING):
        spurious = trained(make(THINKING, "qwen3"), messages)[1][0]
    assert spurious.endswith("</think>\n\nANSWER_1<|im_end|>\n") and "other tokens" in caplog.text


def test_template_without_end_token_trains_the_content(make):
    generator = make(NO_END_TOKEN, "auto")
    ids, texts = trained(generator, [USER, ANSWER, USER, {"role": "assistant", "content": "bye"}])
    assert texts == ["hello", "bye"] and ids == full_ids(generator, [USER, ANSWER, USER, {**ANSWER, "content": "bye"}])


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5", "auto"])
def test_step_loss_mask_excludes_a_turn(make, kind):
    _, texts = trained(make(CHATML, kind), [USER, {**ANSWER, "step_loss_mask": 0}, USER, {**ANSWER, "content": "yes"}])
    assert [text.strip() for text in texts] == ["yes<|im_end|>"]


def test_equal_turns_are_found_each_at_its_own_place(make):
    generator = make(CHATML, "auto")
    ids, mask = generator.get_loss_mask([USER, ANSWER, {"role": "user", "content": "hello"}, ANSWER])
    assert generator.get_text_from_loss_mask(ids, mask) == ["hello<|im_end|>"] * 2


def test_distill_trains_the_last_message_without_end_token(make):
    assert trained(make(CHATML, "distill_qwen"), [USER, ANSWER])[1] == ["hello"]


def test_fb_t02_response_runs_from_the_first_one_to_the_end(make):
    generator = make(CHATML, "qwen")
    assert generator.get_response_lengths([[0, 0, 1, 1, 0, 0, 1], [0, 0], [1]]) == [5, 0, 1]


def test_multimodal_mask_is_padded_on_the_left(make):
    generator = make(CHATML, "qwen")
    parts = [{"type": "image", "image": "x"}, {"type": "text", "text": "hi"}]
    text_ids, text_mask = generator.get_loss_mask([USER, ANSWER])
    messages = [{"role": "user", "content": parts}, ANSWER]
    ids, mask = generator.get_loss_mask_with_multimodal_alignment(messages, [7] * 5 + text_ids)
    assert mask == [0] * 5 + text_mask and len(ids) == len(mask)
    with pytest.raises(ValueError, match="fewer"):
        generator.get_loss_mask_with_multimodal_alignment(messages, [1])


def test_unknown_type_and_missing_template_are_refused(make):
    with pytest.raises(ValueError, match="--loss-mask-type 'glm'"):
        make(CHATML, "glm")
    with pytest.raises(ValueError, match="chat template"):
        make(None, "qwen")
