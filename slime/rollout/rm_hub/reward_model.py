"""The `reward_model` reward type: the score that a reward model gives to prompt and response.

With `--rm-url` an engine is asked: SGLang or `slime engine`, both with `--is-embedding`, POST /classify. Without, the model of
`--rm-model-path` is loaded once into the rollout process and asked in a thread. Message prompts are rendered with the chat template of
`--rm-model-path`, text prompts are followed by the response as they are.
"""

from __future__ import annotations

import threading
from typing import Any

from slime.rollout.rm_hub.remote import ask
from slime.utils.async_utils import run_in_thread
from slime.utils.processing_utils import load_tokenizer
from slime.utils.reward_model import RewardModel

_lock = threading.Lock()
_loaded: dict[tuple[type, str], Any] = {}


async def reward_model(args, response: str, sample) -> float:
    """Return the model's number for one sample.

    Raises:
        ValueError: no model is named, or its answer is no score; the flag is named. RuntimeError: as `http_utils.post`.
    """
    if not args.rm_url and not args.rm_model_path:
        raise ValueError("--rm-type reward_model needs --rm-model-path, or --rm-url of an engine that serves the model")
    if not args.rm_url:
        return await run_in_thread(_score_here, args.rm_model_path, sample.prompt, response)
    text = await run_in_thread(_text, args, sample.prompt, response)
    url = args.rm_url.rstrip("/").removesuffix("/classify") + "/classify"
    return _score_of(await ask(args, url, {"text": text}), url)


def _score_of(answer: Any, url: str) -> float:
    values = answer.get("embedding") if isinstance(answer, dict) else None
    if not isinstance(values, list) or len(values) != 1:
        raise ValueError(
            f"--rm-url {url}: expected one score in 'embedding', got {answer!r:.200}: a reward model has one output"
        )
    return values[0]


def _score_here(path: str, prompt: str | list[dict], response: str) -> float:
    model = _once(RewardModel, path)
    return model.score(model.encode(conversation_text(model.tokenizer, prompt, response)))


def _text(args, prompt: str | list[dict], response: str) -> str:
    if isinstance(prompt, str):
        return prompt + response
    return conversation_text(_once(load_tokenizer, args.rm_model_path or args.hf_checkpoint), prompt, response)


def conversation_text(tokenizer, prompt: str | list[dict], response: str) -> str:
    """Return what the reward model reads: a text prompt and the response, or the rendered conversation with it at the end.

    Raises: ValueError when messages meet a tokenizer without chat template.
    """
    if isinstance(prompt, str):
        return prompt + response
    if not tokenizer.chat_template:
        raise ValueError("the prompt is a message list, but the tokenizer of --rm-model-path has no chat template")
    return tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": response}], tokenize=False)


def _once(load, path: str):
    """Return what `load(path)` gave the first time."""
    with _lock:
        if (load, path) not in _loaded:
            _loaded[load, path] = load(path)
        return _loaded[load, path]
