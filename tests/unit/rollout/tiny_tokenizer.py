"""Two tiny tokenizers with chat templates: ChatML-like (newline after the end token) and GLM-like (no end token)."""

from __future__ import annotations

import os
from pathlib import Path

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
BOS_CHATML = "<s>" + CHATML

SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]


def build(folder: Path, template: str | None = CHATML, add_bos: bool = False) -> str:
    """Write a character-level tokenizer (with "ab" as one more id) to `folder`; returns the path."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    chars = [chr(c) for c in range(32, 127)] + ["\n"]
    vocab = {token: i for i, token in enumerate(SPECIAL + chars + ["ab", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"ab|[\s\S]"), behavior="isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    from tokenizers import decoders

    tokenizer.decoder = decoders.Fuse()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if add_bos else None,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


class PidTokenizer:
    """Its template shows which process rendered; a token per letter."""

    chat_template = "x"
    bos_token_id = None

    def apply_chat_template(self, messages, **options):
        return f"{messages[0]['content']} {os.getpid()}"

    def encode(self, text, add_special_tokens=False):
        return list(text.split(" ")[0])
