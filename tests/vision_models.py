"""Tiny model folders with real processors, made without a download.

`make_llava_processor` needs Pillow alone; `make_qwen2_vl`'s processor needs torchvision too, which transformers asks for because of
its videos. No fixtures here.
"""

from __future__ import annotations

import json
from pathlib import Path

from slime.utils.tiny_model import write_byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] if part['type'] == 'text' else 'IMAGE' }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def make_llava_processor(folder: Path) -> Path:
    """Tokenizer and processor of a LLaVA model: an image is cut to 28 x 28 pixels, which are 4 tokens."""
    _write_tokenizer(folder, ["<image>"], TEMPLATE.replace("IMAGE", "<image>"))
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    image = {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor", **sizes}
    whole = {"processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default"}
    _write(folder / "config.json", {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]})
    _write(folder / "preprocessor_config.json", image)
    _write(folder / "processor_config.json", {**whole, "image_token": "<image>", "num_additional_image_tokens": 1})
    return folder


def make_qwen2_vl(folder: Path) -> Path:
    """A whole Qwen2-VL with random weights: each 28 x 28 pixels of an image are a token."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    start, end, image, video = _write_tokenizer(folder, QWEN_TOKENS, TEMPLATE.replace("IMAGE", QWEN_IMAGE))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": 264, "max_position_embeddings": 2048, "rope_parameters": rope}
    text |= {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 259, "pad_token_id": 256}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "in_chans": 3}
    ids = {"image_token_id": image, "video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end}
    torch.manual_seed(0)
    config = Qwen2VLConfig(text_config=text, vision_config=vision, initializer_range=0.2, **ids)
    model = Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)  # or the image would hardly be seen in the log-probs
        model.lm_head.weight[256:].zero_()
    model.save_pretrained(folder)
    limits = {"min_pixels": 28 * 28, "max_pixels": 64 * 28 * 28}
    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    names = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    _write(folder / "preprocessor_config.json", {**names, **limits, **patches})
    return folder


def _write_tokenizer(folder: Path, tokens, template: str) -> list[int]:
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    write_byte_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer.convert_tokens_to_ids(list(tokens))


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
