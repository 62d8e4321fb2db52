"""Tokenizers, processors, chat templates and media, as the rollout side uses them.

Invariants: rendered text becomes ids through `encode_prompt` alone, which yields at most one BOS token; code from a
checkpoint is executed only when the caller asks for it. Does not know rows, samples or engines.
"""

from __future__ import annotations

import base64
import functools
import io
import logging
import math
import mimetypes
import os
from typing import Any

from slime.utils.media_values import samples_and_rate, wav_file
from slime.utils.plain_data import is_image

logger = logging.getLogger(__name__)

MEDIA_PLACEHOLDERS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}


def load_tokenizer(path: str, **kwargs: Any):
    """The tokenizer of a checkpoint; `trust_remote_code=True` must be asked for."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer can be loaded from {path} (--hf-checkpoint): {error}") from error


def load_processor(path: str, **kwargs: Any):
    """The multimodal processor of a checkpoint (text with images, video or audio), or None when it has none.

    One that needs a package that is not installed is none, which is said: runs on text do without it.
    """
    names = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    if not any(os.path.exists(os.path.join(path, name)) for name in names):
        return None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(path, **kwargs)
    except ImportError as error:
        logger.warning("%s: its processor cannot be loaded, so that media cannot be read: %s", path, error)
        return None
    return processor if hasattr(processor, "tokenizer") else None  # not a tokenizer or a part of a processor alone


def render_chat(tokenizer, messages: list[dict], tools: list | None = None, template_kwargs: dict | None = None) -> str:
    """The text the model sees for a message list, with the header of the next assistant turn.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "a prompt is a message list, but the tokenizer of --hf-checkpoint has no chat template; use a chat model, "
            "add chat_template.jinja to its folder, or give plain text prompts"
        )
    options = {"add_generation_prompt": True, **(template_kwargs or {})}
    return tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **options)


def encode_prompt(tokenizer, text: str) -> list[int]:
    """Token ids of rendered or plain prompt text, with one BOS token exactly when this tokenizer puts one first."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = _own_bos(tokenizer)
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


@functools.lru_cache(maxsize=16)
def _own_bos(tokenizer) -> int | None:
    """The BOS id if this tokenizer puts it before a text by itself, else None."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    return bos if tokenizer.encode("a")[:1] == [bos] else None


# ---- media ---------------------------------------------------------------------------------------------------------


def place_media(messages: list[dict], media: dict[str, list]) -> list[dict]:
    """Replace `<image>`, `<video>` and `<audio>` in string contents by the row's media, in order.

    Args:
        media: type -> items of the row, or the only one. A dict with a `type`, or with the item under its kind, is a part of its
            own (which allows `max_pixels` and the like).
    """
    queues = {kind: _as_list(items) for kind, items in media.items()}
    placed = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = _split_content(content, queues)
        elif not isinstance(content, list):
            raise ValueError(f"message content is {type(content).__name__}, expected text or a list of parts")
        placed.append({**message, "content": content})
    left = {kind: len(items) for kind, items in queues.items() if items}
    assert not left, f"media without a placeholder in the prompt: {left}"
    return placed


def _split_content(text: str, queues: dict[str, list]) -> list[dict] | str:
    import re

    kinds = {MEDIA_PLACEHOLDERS[kind]: kind for kind in queues}
    parts: list[dict] = []
    for piece in re.split("(" + "|".join(map(re.escape, kinds)) + ")", text) if kinds else [text]:
        if piece in kinds:
            kind = kinds[piece]
            assert queues[kind], f"more {piece} placeholders than {kind} items in the row"
            parts.append(_media_part(kind, queues[kind].pop(0)))
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _as_list(items: Any) -> list:
    if items is None:
        return []
    return list(items) if isinstance(items, (list, tuple)) else [items]


def _media_part(kind: str, item: Any) -> dict:
    if isinstance(item, dict) and "type" in item:
        return item
    return {"type": kind, **(item if isinstance(item, dict) and kind in item else {kind: item})}


def load_image(item: Any):
    """A PIL image from a PIL image, its file's bytes, a data URI, bare base64 or a file path."""
    from PIL import Image

    if isinstance(item, Image.Image):
        return item
    if isinstance(item, dict):  # as data sets of the Hub keep images in Parquet
        item = item.get("bytes") or item.get("path")
    if isinstance(item, bytes):
        return Image.open(io.BytesIO(item)).convert("RGB")
    if isinstance(item, str) and os.path.exists(item):
        return Image.open(item).convert("RGB")
    if isinstance(item, str):
        payload = item.split(",", 1)[-1] if item.startswith("data:") else item
        try:
            return Image.open(io.BytesIO(base64.b64decode(payload))).convert("RGB")
        except (ValueError, OSError) as error:
            raise ValueError(_no_media(item, "image")) from error
    raise ValueError(f"cannot read an image from {type(item).__name__}")


def extract_media(messages: list[dict]) -> dict[str, list] | None:
    """`{"images": [PIL images], "videos": [...]}` of the parts of a message list (None where a kind is absent), and "audios" if
    there are some; videos and audio stay what the row holds."""
    parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
    images = [_within_limits(part) for part in parts if part.get("type") == "image"]
    videos = [part["video"] for part in parts if part.get("type") == "video"]
    audios = [part["audio"] for part in parts if part.get("type") == "audio"]
    if not (images or videos or audios):
        return None
    return {"images": images or None, "videos": videos or None, **({"audios": audios} if audios else {})}


def _within_limits(part: dict):
    """The part's image, scaled when it has fewer pixels than the part's `min_pixels` or more than its `max_pixels`."""
    image = load_image(part["image"])
    pixels = image.width * image.height
    wanted = max(part.get("min_pixels") or 0, min(pixels, part.get("max_pixels") or pixels))
    if wanted == pixels:
        return image
    scale = (wanted / pixels) ** 0.5
    round_ = math.floor if wanted < pixels else math.ceil
    return image.resize((max(1, round_(image.width * scale)), max(1, round_(image.height * scale))))


def process_vision_info(prompt: list[dict], processor=None) -> dict[str, list | None]:
    """The images and videos of a message list, for code that fills `multimodal_inputs` itself."""
    return extract_media(prompt) or {"images": None, "videos": None}


def build_processor_kwargs(multimodal_inputs: dict | None) -> dict[str, Any]:
    """Keyword arguments of a processor call for these media."""
    kwargs = {key: value for key, value in (multimodal_inputs or {}).items() if value is not None}
    if "audios" in kwargs:
        sounds = [samples_and_rate(item) for item in kwargs["audios"]]
        kwargs["audio"] = kwargs.pop("audios")
        if all(sounds) and len({rate for _, rate in sounds}) == 1:  # as processors want it
            kwargs["audio"] = [array for array, _ in sounds]
            kwargs["sampling_rate"] = sounds[0][1]
    kwargs["return_tensors"] = "pt"
    return kwargs


def encode_with_media(processor, text: str, multimodal_inputs: dict) -> tuple[list[int], dict[str, Any]]:
    """Token ids of a prompt with its media expanded, at most one BOS among them, and what else the processor makes of it.

    Returns: (ids, the other outputs but for the attention mask: pixel values and the like).
    """
    bos = processor.tokenizer.bos_token
    once = {"add_special_tokens": False} if bos and text.startswith(bos) else {}
    output = dict(processor(text=[text], **build_processor_kwargs(multimodal_inputs), **once))
    ids = output.pop("input_ids")[0].tolist()
    output.pop("attention_mask", None)
    return ids, output


def media_for_engine(multimodal_inputs: dict | None) -> dict[str, list[str]]:
    """The fields of a `/generate` body that carry these media, `image_data` and the like; {} without media.

    Raises: ValueError for an item that is neither an image, bytes, a file, a URL nor base64.
    """
    fields = {"images": ("image_data", "image"), "videos": ("video_data", "video"), "audios": ("audio_data", "audio")}
    return {
        fields[key][0]: [_engine_item(item, fields[key][1]) for item in items]
        for key, items in (multimodal_inputs or {}).items()
        if key in fields and items
    }


def _engine_item(item: Any, kind: str) -> str:
    """A data URI, or the URL that the item is."""
    if is_image(item):
        return encode_image_for_rollout_engine(item)
    sound = samples_and_rate(item) if kind == "audio" else None
    if sound is not None:
        item = wav_file(*sound)
    if isinstance(item, dict):
        item = item.get("bytes") or item.get("path") or item.get(kind)
    mime = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}[kind]
    if isinstance(item, str) and item.startswith(("data:", "http://", "https://")):
        return item
    if isinstance(item, str) and os.path.exists(item):
        mime = mimetypes.guess_type(item)[0] or mime
        with open(item, "rb") as file:
            item = file.read()
    if isinstance(item, bytes):
        item = base64.b64encode(item).decode("ascii")
    elif isinstance(item, str) and not _is_base64(item):
        raise ValueError(_no_media(item, kind))
    if not isinstance(item, str):
        raise ValueError(
            f"an engine cannot be sent {kind} as {type(item).__name__}: give a file, bytes, base64 or a URL"
        )
    return f"data:{mime};base64,{item}"


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode("".join(text.split()), validate=True))
    except ValueError:
        return False


def _no_media(text: str, kind: str) -> str:
    """What is wrong with a text that should be an image, video or audio: most often the path is another one."""
    return (
        f"{text[:200]!r} is no {kind}: no such file (paths count from {os.getcwd()}), no data URI and no base64 of one"
    )


def encode_image_for_rollout_engine(image) -> str:
    """A PIL image as a PNG data URI, the form `/generate` takes in `image_data`."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
