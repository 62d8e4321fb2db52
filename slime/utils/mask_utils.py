"""Token ids and loss masks of chat conversations: only what an assistant said is trained.

`MultiTurnLossMaskGenerator(tokenizer, type).get_loss_mask(messages, tools)` returns (ids, mask) of equal length. Types:
    qwen          each message rendered alone, the template's default system block cut off
    qwen3         each message rendered beside a dummy user message, for templates that need one
    qwen3_5       full render, spans found by the ChatML markers
    distill_qwen  first message as prompt, last one as response, no end token
    auto          full render of any template, spans found by replacing each assistant message and comparing
Messages of consecutive tool calls are rendered together, as Qwen templates put them into one user turn. A turn with
`step_loss_mask` other than 1 is not trained. Knows templates only through the tokenizer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from slime.utils.template_spans import auto_spans, chatml_spans

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen", "auto")
DUMMY: Messages = [{"role": "user", "content": "I am a user."}]
DISTILL_MARKER = "<｜Assistant｜>"
NUM_CHECKED_RENDERS = 32
"""How many multi-turn conversations are compared with the full render before the comparison is trusted."""


class MultiTurnLossMaskGenerator:
    """Masks for one tokenizer.

    Args:
        template_kwargs: options of the chat template (`--apply-chat-template-kwargs`).

    Raises:
        ValueError: unknown type, or a tokenizer without chat template.
    """

    def __init__(self, tokenizer, tokenizer_type: str = "qwen", template_kwargs: dict[str, Any] | None = None):
        if tokenizer_type not in TYPES:
            raise ValueError(f"--loss-mask-type {tokenizer_type!r} is unknown; choose one of {', '.join(TYPES)}")
        if not tokenizer.chat_template:
            raise ValueError(
                "loss masks of conversations need a chat template; the tokenizer of --hf-checkpoint has none"
            )
        if tokenizer_type == "qwen" and DISTILL_MARKER in tokenizer.get_added_vocab():
            tokenizer_type = "distill_qwen"
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self._template_kwargs = template_kwargs or {}
        self._checks_left = NUM_CHECKED_RENDERS
        self.system_message_length, self.gen_token_length = self._probe_lengths()

    def get_loss_mask(self, messages: Messages, tools: list | None = None) -> tuple[list[int], list[int]]:
        """Return (token ids, mask) of the whole conversation."""
        if not messages:
            raise ValueError("a conversation needs at least one message")
        if self.tokenizer_type == "distill_qwen":
            return self._distill(messages, tools)
        if self.tokenizer_type == "qwen3_5":
            return self._by_spans(messages, tools, chatml_spans(self._render(messages, tools), messages))
        if self.tokenizer_type == "auto":
            return self._by_spans(messages, tools, auto_spans(lambda m: self._render(m, tools), messages))
        ids, mask = self._turn_by_turn(messages, tools)
        self._compare_with_full_render(ids, messages, tools)
        return ids, mask

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Return, for each mask, its length from the first 1 to the end (0 without a 1)."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_mask: Sequence[int]) -> list[str]:
        """Return the decoded text of each run of ones."""
        runs: list[list[int]] = []
        previous = 0
        for token, trained in zip(token_ids, loss_mask, strict=True):
            if trained and not previous:
                runs.append([])
            if trained:
                runs[-1].append(token)
            previous = trained
        return [self.tokenizer.decode(run) for run in runs]

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Messages, input_ids: Sequence[int], tools: list | None = None
    ) -> tuple[list[int], list[int]]:
        """Return (input_ids, mask) where a processor expanded media tokens: the text mask, padded with zeros on the left.

        Correct only when all media come before the first trained token.

        Raises:
            ValueError: the text alone has more tokens than `input_ids`.
        """
        _, mask = self.get_loss_mask(_text_only(messages), tools)
        missing = len(input_ids) - len(mask)
        if missing < 0:
            raise ValueError(
                f"the processor gave {len(input_ids)} tokens, fewer than the {len(mask)} of the text alone"
            )
        return list(input_ids), [0] * missing + mask

    # ---- rendering -------------------------------------------------------------------------------------------------

    def _render(self, messages: Messages, tools: list | None = None, generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self._template_kwargs,
        )

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _ids(self, messages: Messages, tools: list | None = None, generation_prompt: bool = False) -> list[int]:
        return self._encode(self._render(messages, tools, generation_prompt))

    def _probe_lengths(self) -> tuple[int, int]:
        """Return (tokens of the default system block, tokens of the assistant header), measured with a probe message."""
        if self.tokenizer_type not in ("qwen", "qwen3"):
            return 0, 0
        one, two = len(self._ids(DUMMY)), len(self._ids(DUMMY + DUMMY))
        return 2 * one - two, len(self._ids(DUMMY, generation_prompt=True)) - one

    # ---- turn by turn ----------------------------------------------------------------------------------------------

    def _turn_by_turn(self, messages: Messages, tools: list | None) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        mask: list[int] = []
        render = self._render_alone if self.tokenizer_type == "qwen" else self._render_beside_dummy
        for position, turn in enumerate(_turns(messages)):
            turn_ids = render(turn, tools, is_first=position == 0)
            ids += turn_ids
            mask += self._turn_mask(turn[0], len(turn_ids))
        return ids, mask

    def _render_alone(self, turn: Messages, tools: list | None, is_first: bool) -> list[int]:
        if is_first:
            return self._ids(turn, tools)
        ids = self._ids(turn)
        return ids if turn[0]["role"] == "system" else ids[self.system_message_length :]

    def _render_beside_dummy(self, turn: Messages, tools: list | None, is_first: bool) -> list[int]:
        if is_first:
            return self._ids(turn + DUMMY, tools)[: -(len(self._ids(DUMMY)) - self.system_message_length)]
        return self._ids(DUMMY + turn)[len(self._ids(DUMMY)) :]

    def _turn_mask(self, message: dict[str, Any], length: int) -> list[int]:
        if message["role"] != "assistant" or message.get("step_loss_mask", 1) != 1:
            return [0] * length
        header = min(self.gen_token_length, length)
        return [0] * header + [1] * (length - header)

    def _compare_with_full_render(self, ids: list[int], messages: Messages, tools: list | None) -> None:
        """Say once when turn-by-turn ids are not what the template gives for the whole conversation."""
        if self._checks_left == 0:
            return
        self._checks_left -= 1
        if ids != self._ids(messages, tools):
            self._checks_left = 0
            logger.warning(
                "--loss-mask-type %s renders turn by turn and gives other tokens than the chat template for a whole "
                "conversation of %d messages; use qwen3_5 or auto to train on exactly the template's tokens",
                self.tokenizer_type,
                len(messages),
            )

    # ---- whole conversations ---------------------------------------------------------------------------------------

    def _by_spans(
        self, messages: Messages, tools: list | None, spans: list[tuple[int, int]]
    ) -> tuple[list[int], list[int]]:
        """Mask the tokens that overlap a character span of the full render."""
        if not self.tokenizer.is_fast:
            raise ValueError(f"--loss-mask-type {self.tokenizer_type} needs a fast tokenizer (character offsets)")
        text = self._render(messages, tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        template_ids = self.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=False,
            **self._template_kwargs,
        )
        if ids != list(template_ids):
            raise ValueError("the rendered conversation does not encode to the ids of the chat template itself")
        mask = [0] * len(ids)
        position = 0
        for start, end in spans:
            while position < len(ids) and encoded["offset_mapping"][position][1] <= start:
                position += 1
            while position < len(ids) and encoded["offset_mapping"][position][0] < end:
                mask[position] = 1
                position += 1
        return ids, mask

    def _distill(self, messages: Messages, tools: list | None) -> tuple[list[int], list[int]]:
        prompt = self._ids(messages[:1], tools, generation_prompt=True)
        response = self._encode(messages[-1]["content"])
        trained = int(messages[-1].get("step_loss_mask", 1) == 1)
        return prompt + response, [0] * len(prompt) + [trained] * len(response)


def _turns(messages: Messages) -> list[Messages]:
    """Split into single messages, runs of tool messages kept together."""
    turns: list[Messages] = []
    for message in messages:
        if turns and message["role"] == "tool" and turns[-1][-1]["role"] == "tool":
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns


def _text_only(messages: Messages) -> Messages:
    """Return the messages with list contents reduced to their text parts."""
    plain = []
    for message in messages:
        if isinstance(message.get("content"), list):
            text = "".join(part.get("text", "") for part in message["content"] if part.get("type") == "text")
            message = {**message, "content": text}
        plain.append(message)
    return plain
