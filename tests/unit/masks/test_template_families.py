"""Masks of `--loss-mask-type auto` over templates of several model families: tools, empty turns, thoughts, trimmed texts."""

from __future__ import annotations

import pytest

from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.tiny_model import write_byte_tokenizer

LLAMA = (
    "{{ '<|bot|>' }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|sh|>ipython<|eh|>\n\n' + m.content + '<|eot|>' }}"
    "{% elif m.tool_calls %}{{ '<|sh|>assistant<|eh|>\n\n{\"name\": \"' + m.tool_calls[0].name + '\"}<|eot|>' }}"
    "{% else %}{{ '<|sh|>' + m.role + '<|eh|>\n\n' + (m.content | trim) + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|sh|>assistant<|eh|>\n\n' }}{% endif %}"
)
DEEPSEEK = (
    "{% set ns = namespace(tool=false) %}{{ '<|bos|>' }}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.tool = false %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ ('' if ns.tool else '<|outs|>') + '<|out|>' + m.content }}{% set ns.tool = true %}"
    "{% elif m.tool_calls %}{{ '<|Assistant|>' + (m.content or '') + '<|call|>' + m.tool_calls[0].name + '<|eos|>' }}"
    "{% else %}{{ ('<|outsend|>' if ns.tool else '<|Assistant|>') + m.content.split('</think>')[-1] + '<|eos|>' }}"
    "{% set ns.tool = false %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|outsend|>' if ns.tool else '<|Assistant|>' }}{% endif %}"
)
GLM = (
    "{% set ns = namespace(last=-1) %}[gMASK]<sop>"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set parts = (m.content or '').split('</think>') %}"
    "{% if m.role == 'tool' %}"
    "{{ ('' if messages[loop.index0 - 1].role == 'tool' else '<|observation|>') + '\n<result>' + m.content + '</result>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\n<think>' }}"
    "{% if loop.index0 > ns.last and parts | length > 1 %}{{ parts[0].split('<think>')[-1].strip() }}{% endif %}{{ '</think>' }}"
    "{% if parts[-1].strip() %}{{ '\n' + parts[-1].strip() }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.name + '</tool_call>' }}{% endfor %}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

USER = {"role": "user", "content": "hi"}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


TOOLS = [
    USER,
    said("", tool_calls=[{"name": "f"}]),
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
    said("done"),
]
EMPTY = [USER, said(""), USER, said("y")]
SPACES = [{"role": "system", "content": "S"}, USER, said("  x\n"), USER, said("x")]
THOUGHTS = [USER, said("<think>\nR1\n</think>\n\nA1"), USER, said("<think>\nR2\n</think>\n\nA2")]
LEFT_OUT = [USER, said("no", step_loss_mask=0), USER, said("yes")]


@pytest.mark.parametrize(
    "template, messages, trained",
    [
        (LLAMA, TOOLS, ['{"name": "f"}<|eot|>', "done<|eot|>"]),
        (LLAMA, EMPTY, ["<|eot|>", "y<|eot|>"]),
        (LLAMA, SPACES, ["x<|eot|>", "x<|eot|>"]),
        (LLAMA, LEFT_OUT, ["yes<|eot|>"]),
        (DEEPSEEK, TOOLS, ["<|call|>f<|eos|>", "done<|eos|>"]),
        (DEEPSEEK, EMPTY, ["<|eos|>", "y<|eos|>"]),
        (DEEPSEEK, THOUGHTS, ["\n\nA1<|eos|>", "\n\nA2<|eos|>"]),  # what the template shows of them
        (DEEPSEEK, LEFT_OUT, ["yes<|eos|>"]),
        (GLM, TOOLS, ["<tool_call>f</tool_call>", "done"]),
        (GLM, EMPTY, ["y"]),
        (GLM, SPACES, ["x", "x"]),
        (GLM, THOUGHTS, ["A1", "R2</think>\nA2"]),
        (GLM, LEFT_OUT, ["yes"]),
    ],
)
def test_auto_trains_what_assistants_said_and_the_end_token_of_the_template(tmp_path, template, messages, trained):
    from transformers import AutoTokenizer

    write_byte_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    tokenizer.chat_template = template
    generator = MultiTurnLossMaskGenerator(tokenizer, "auto")
    ids, mask = generator.get_loss_mask(messages)
    assert generator.get_text_from_loss_mask(ids, mask) == trained
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
