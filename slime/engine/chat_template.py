"""Messages and tools to prompt tokens, through the model's own chat template.

The tokenizer of transformers is loaded at the first use, so an engine that only sees token ids never pays for it. Messages
are prepared as SGLang prepares them. Knows no requests.
"""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class MalformedBody(ValueError):
    """A body that lacks a key or has one of the wrong kind, rather than a value out of range."""


class ChatTemplate:
    """Renders with the tokenizer of one model folder; may be called from any thread."""

    def __init__(self, model_path: str | Path):
        self._path, self._tokenizer, self._lock = Path(model_path), None, threading.Lock()

    def encode(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        options: dict[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, with the opening of the next answer.

        `options` are further variables of the template. With `continue_final_message` the last assistant message is the
        beginning of the answer.
        Raises: ValueError for messages that the template refuses, or when the model has none.
        """
        prepared = [_prepared(message) for message in messages]
        opening = ""
        if prepared[-1]["role"] == "assistant" and isinstance(prepared[-1].get("content"), str):
            if continue_final_message:
                opening = prepared.pop()["content"]
            else:
                prepared[-1] = {"role": "user", "content": prepared[-1]["content"]}
        with self._lock:
            tokenizer = self._loaded()
            try:
                text = tokenizer.apply_chat_template(
                    prepared, tools=tools or None, tokenize=False, add_generation_prompt=True, **(options or {})
                )
            except Exception as error:  # templates raise what they like
                raise ValueError(f"the chat template refuses these messages: {error}") from error
            return tokenizer.encode(text, add_special_tokens=False) + (
                tokenizer.encode(opening, add_special_tokens=False) if opening else []
            )

    def _loaded(self):
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(str(self._path))
            except Exception as error:
                raise ValueError(f"chat needs a tokenizer and the model folder has none: {error}") from error
            if not tokenizer.chat_template:
                raise ValueError("the model has no chat template: use /v1/completions or /generate")
            self._tokenizer = tokenizer
        return self._tokenizer


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a request.

    Raises: ValueError saying what is wrong with them.
    """
    if not isinstance(messages, list):
        raise MalformedBody("messages must be a list")
    if not messages:
        raise ValueError("messages cannot be empty")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise MalformedBody(f"messages[{i}] must be an object whose role is one of {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise MalformedBody(f"messages[{i}].content: the embedded engine takes text parts only")
        elif content is not None and not isinstance(content, str):
            raise MalformedBody(f"messages[{i}].content must be a string, a list of parts or null")
    return messages


def _prepared(message: dict[str, Any]) -> dict[str, Any]:
    """Text parts joined, no nulls, arguments of tool calls as objects."""
    prepared = {key: value for key, value in copy.deepcopy(message).items() if value is not None}
    content = prepared.get("content", "")
    prepared["content"] = " ".join(part["text"] for part in content) if isinstance(content, list) else content
    for call in prepared.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except json.JSONDecodeError as error:
                raise ValueError(f"arguments of a tool call are not JSON: {error}") from error
    return prepared
