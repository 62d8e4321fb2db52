"""Bodies of /v1/completions and /v1/chat/completions to the engine's own calls.

A body is translated into one of /generate and checked there, so both speak of the same sampling parameters. Invariant:
whatever a client sends, `parse` either returns a valid call or raises ValueError. Keys that are not known are ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.engine.chat_template import ChatTemplate, MalformedBody, checked_messages
from slime.engine.tokenizer import EngineTokenizer
from slime.engine.wire import CallParser, GenerateCall

COMPLETION_MAX_TOKENS = 16
DEFAULT_MODEL = "default"
"""Name in the reply to a request that names no model."""
MAX_LOGPROBS = 20
#: key of a body -> key of sampling_params
_SAMPLING = {
    **{key: key for key in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")},
    **{key: key for key in ("repetition_penalty", "stop", "stop_token_ids", "n", "ignore_eos", "no_stop_trim")},
    **{key: key for key in ("skip_special_tokens", "logit_bias", "regex", "ebnf", "custom_params")},
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass
class OpenAiCall:
    """One call and the shape of its reply."""

    generate: GenerateCall
    is_chat: bool
    model: str
    n: int
    with_logprobs: bool
    echoes: list[str]
    """Text put before the answers of each prompt (completions with `echo`)."""
    include_usage: bool
    continuous_usage: bool


class OpenAiParser:
    """Translate and check bodies."""

    def __init__(
        self, parser: CallParser, tokenizer: EngineTokenizer, template: ChatTemplate, folder: str, served: str
    ):
        self._parser, self._tokenizer, self._template, self._served = parser, tokenizer, template, served
        self._chat_defaults = _generation_defaults(Path(folder))

    def completion(self, body: dict[str, Any]) -> OpenAiCall:
        """Raises: ValueError saying which key is wrong."""
        prompt = body.get("prompt")
        if prompt is None:
            raise MalformedBody("prompt is required")
        if not prompt or (isinstance(prompt, list) and not all(prompt) and type(prompt[0]) is not int):
            raise ValueError("prompt cannot be empty")
        num_logprobs = _count(body, "logprobs", None)
        is_text = isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], str))
        native = {
            "text" if is_text else "input_ids": prompt,
            "return_logprob": num_logprobs is not None,
            "top_logprobs_num": num_logprobs or 0,
            "logprob_start_len": 0 if body.get("echo") and num_logprobs else -1,
        }
        sampling = _sampling(body, {})
        sampling["max_new_tokens"] = _count(body, "max_tokens", COMPLETION_MAX_TOKENS)
        call = self._call(body, native, sampling, is_chat=False)
        if body.get("echo"):
            call.echoes = self._echoes(prompt, is_text)
        return call

    def chat(self, body: dict[str, Any]) -> OpenAiCall:
        """Renders the template, which may take long: not on the event loop.

        Raises: ValueError saying which key is wrong.
        """
        messages, tools = checked_messages(body.get("messages")), _tools(body)
        options = _object(body, "chat_template_kwargs")
        if "chat_template" in options:
            raise ValueError("chat_template_kwargs.chat_template: a template from a request is not taken")
        ids = self._template.encode(messages, tools, bool(body.get("continue_final_message")), options)
        sampling = _sampling(body, self._chat_defaults)
        limit = _count(body, "max_completion_tokens", None) or _count(body, "max_tokens", None)
        sampling["max_new_tokens"] = self._parser.room_for(ids) if limit is None else limit
        if tools:
            sampling["skip_special_tokens"] = False  # tool calls are marked with special tokens
        native = {
            "input_ids": ids,
            "return_logprob": body.get("logprobs") is True,
            "top_logprobs_num": _count(body, "top_logprobs", 0),
        }
        return self._call(body, native, sampling, is_chat=True)

    def _call(self, body: dict, native: dict, sampling: dict, is_chat: bool) -> OpenAiCall:
        options = _object(body, "stream_options")
        rid = body.get("rid")
        call = self._parser.parse(
            {
                **native,
                "sampling_params": sampling,
                "stream": body.get("stream") is True,
                "return_text_in_logprobs": True,
                "rid": rid,
                "lora_path": self._adapter(body),
            }
        )
        return OpenAiCall(
            generate=call,
            is_chat=is_chat,
            model=body["model"] if isinstance(body.get("model"), str) else DEFAULT_MODEL,
            n=call.n,
            with_logprobs=native["return_logprob"],
            echoes=[],
            include_usage=options.get("include_usage") is True,
            continuous_usage=options.get("continuous_usage_stats") is True,
        )

    def _adapter(self, body: dict) -> Any:
        """Return the adapter that a model `base:adapter` names, else what lora_path names."""
        model = body.get("model")
        if isinstance(model, str) and model != self._served:
            head, colon, adapter = model.removeprefix(self._served).partition(":")
            if colon and adapter.strip():
                return adapter.strip()
        return body.get("lora_path")

    def _echoes(self, prompt: Any, is_text: bool) -> list[str]:
        prompts = prompt if isinstance(prompt, list) and type(prompt[0]) is not int else [prompt]
        return list(prompts) if is_text else [self._tokenizer.decode(ids) for ids in prompts]


def _sampling(body: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    given = {ours: body[theirs] for theirs, ours in _SAMPLING.items() if body.get(theirs) is not None}
    shape = _object(body, "response_format").get("type", "text")
    if shape != "text":
        raise ValueError(f"response_format {shape!r} is not supported by the embedded engine")
    return {**defaults, **given}


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tools that the template is told about."""
    tools, choice = body.get("tools") or [], body.get("tool_choice") or "auto"
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools must be a list of objects")
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{i}].function.name is required")
    if choice == "none":
        return []
    if choice in ("auto", "required"):
        if choice == "required" and not tools:
            raise ValueError("tool_choice is required, but there are no tools")
        return tools
    name = _object(choice, "function").get("name") if isinstance(choice, dict) else choice
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise ValueError(f"tool_choice names {name!r}, which is not among the tools")
    return chosen


def _count(body: dict[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be an integer not below 0, got {value!r}")
    if name in ("logprobs", "top_logprobs") and value > MAX_LOGPROBS:
        raise ValueError(f"{name} must be at most {MAX_LOGPROBS}, got {value}")
    return value


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {value!r}")
    return value


def _generation_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling defaults that the model's makers recommend; chat takes them, as SGLang does."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    return {key: config[key] for key in _MODEL_DEFAULTS if config.get(key) is not None}
