"""Find the characters that assistant messages contribute to a rendered conversation.

Spans are (start, end) character ranges, in order, one per trained assistant turn. Two ways: by ChatML markers, and for
any template by replacing one message at a time and comparing the renders. Pure string work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
Span = tuple[int, int]

CHATML_HEADER = "<|im_start|>assistant\n"
CHATML_END = "<|im_end|>"
THINK_OPEN = "<think>\n"
SENTINEL = "\ue000\ue001\ue002"
"""Private-use characters: no real message starts or ends with them."""


def is_trained(message: dict[str, Any]) -> bool:
    """Return whether a message is an assistant turn that its `step_loss_mask` does not exclude."""
    return message["role"] == "assistant" and message.get("step_loss_mask", 1) == 1


def chatml_spans(text: str, messages: Messages) -> list[Span]:
    """Return the spans after each assistant header (and an opening think tag) up to the end token and its newline.

    Raises:
        ValueError: the render has another number of assistant turns than the messages, or a turn has no end token.
    """
    spans, position = [], 0
    for message in messages:
        if message["role"] != "assistant":
            continue
        header = text.find(CHATML_HEADER, position)
        end = text.find(CHATML_END, header)
        if header < 0 or end < 0:
            raise ValueError(
                f"--loss-mask-type qwen3_5: assistant turn {len(spans)} is not between {CHATML_HEADER!r} and "
                f"{CHATML_END!r} in the rendered conversation; use --loss-mask-type auto"
            )
        start = header + len(CHATML_HEADER)
        if text.startswith(THINK_OPEN, start):
            start += len(THINK_OPEN)
        position = end + len(CHATML_END)
        end = position + (1 if text.startswith("\n", position) else 0)
        spans.append((start, end) if is_trained(message) else (start, start))
    return [span for span in spans if span[1] > span[0]]


def auto_spans(render: Callable[[Messages], str], messages: Messages) -> list[Span]:
    """Return the span of each trained turn for any template: its content and tool calls, plus the template's end token.

    The conversation is rendered once more per trained turn, with that message replaced by a sentinel; what differs from
    the full render is what the message contributed. White space after the end token is not trained.

    Raises:
        ValueError: the sentinel does not show up, or spans overlap: the template rewrites other turns as well.
    """
    text = render(messages)
    end_text = _end_of_turn(render)
    spans: list[Span] = []
    for position, message in enumerate(messages):
        if not is_trained(message):
            continue
        changed = render([*messages[:position], _sentinel_message(message), *messages[position + 1 :]])
        start, end = _difference(text, changed)
        if SENTINEL not in changed or start > changed.index(SENTINEL) or (spans and start < spans[-1][1]):
            raise ValueError(
                f"--loss-mask-type auto: message {position} cannot be located in the rendered conversation; the chat "
                "template changes other turns depending on it"
            )
        if end_text and text.startswith(end_text, end):
            end += len(end_text)
        spans.append((start, end))
    return [span for span in spans if span[1] > span[0]]


def _sentinel_message(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "content": SENTINEL}


def _end_of_turn(render: Callable[[Messages], str]) -> str:
    """Return what the template writes after the last assistant message, trailing white space left out."""
    probe = render([{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}])
    return probe[probe.rindex(SENTINEL) + len(SENTINEL) :].rstrip() if SENTINEL in probe else ""


def _difference(text: str, changed: str) -> Span:
    """Return the range of `text` between the longest common prefix and the longest common suffix with `changed`."""
    limit = min(len(text), len(changed))
    start = 0
    while start < limit and text[start] == changed[start]:
        start += 1
    suffix = 0
    while suffix < limit - start and text[-1 - suffix] == changed[-1 - suffix]:
        suffix += 1
    return start, len(text) - suffix
