"""Chat templates: messages to the text and ids in the format that a model was trained on.

`chat` finds the tokenizer's own template and runs it in a sandbox. Messages are data: a message that spells out a
control token is refused. Used by recipe sft.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.data import chat
from flatout.data.tokenizer import JsonTokenizer, Tokenizer
from flatout.errors import UsageError

Message = Mapping[str, Any]
ROLES = ("system", "user", "assistant", "tool")
TEMPLATE_FILE = "chat_template.jinja"


class BadRow(ValueError):
    """A row that cannot be trained on; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    text: str
    spans: list[tuple[int, int]]  # the assistant's messages, each with its end mark


@dataclass(frozen=True, kw_only=True)
class Encoded:
    ids: list[int]
    answered: list[bool]  # whether each id belongs to an assistant message


class Template:
    """Renders conversations with a tokenizer's own template and tokenizes the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        text = chat.template_of(tokenizer.files) if isinstance(tokenizer, JsonTokenizer) else None
        if text is None or not isinstance(tokenizer, JsonTokenizer):
            raise UsageError(
                f"the tokenizer {tokenizer.name} has no chat template, which messages need: use the tokenizer of an "
                f"instruction-tuned model, put a {TEMPLATE_FILE} next to its tokenizer.json, or give prompt and "
                "completion texts with data.as_chat: false"
            )
        self.tokenizer = tokenizer
        self._compiled = chat.compiled(text, dated=False)
        self._words = chat.words_of(tokenizer.files)
        # Control tokens are recognised in the template's text, unlike in a document's.
        self._backend = type(tokenizer.backend).from_str(tokenizer.files["tokenizer.json"])
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder().values()
        self._control = [token.content for token in added if token.special and token.content.strip()]

    def render(self, messages: Sequence[Message], *, prompt: bool = False, tools: Sequence[Any] | None = None) -> str:
        """The text of a conversation; with `prompt`, up to the start of the assistant's answer."""
        try:
            return self._compiled.render(messages, words=self._words, add_generation_prompt=prompt, tools=tools)
        except chat.TemplateFailed as error:
            raise BadRow(f"the chat template refuses it: {error}") from None

    def conversation(
        self, messages: Sequence[Message], *, given: int = 0, tools: Sequence[Any] | None = None
    ) -> Conversation:
        """A conversation's text, and the spans of the assistant's messages after the first `given` messages."""
        for message in messages:
            self._check(message)
        self._check_control(json.dumps(tools or "", ensure_ascii=False, default=str))
        text = self.render(messages, tools=tools)
        calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
        if lost := next((name for name in calls if name not in text), None):
            raise BadRow(f"the chat template leaves tool calls out (such as {lost[:40]!r})")
        if tools and (name := _tool_name(tools[0])) and name not in text:
            raise BadRow(f"the chat template leaves tools out (such as {name[:40]!r})")
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= given]
        spans = [self._span(messages, i, text, tools) for i in answers]
        if not spans:
            raise BadRow("no message of the assistant")
        return Conversation(text=text, spans=spans)

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        """Ids, and which of them belong to answers. Batched, because the tokenizer then uses all cores."""
        encodings = self._backend.encode_batch([one.text for one in conversations], add_special_tokens=False)
        return [_answered(encoding, one.spans) for encoding, one in zip(encodings, conversations, strict=True)]

    def encode(self, messages: Sequence[Message]) -> Encoded:
        return self.encode_batch([self.conversation(messages)])[0]

    def _span(self, messages: Sequence[Message], index: int, text: str, tools: Sequence[Any] | None) -> tuple[int, int]:
        """The span of the assistant's message in the text, including its end mark."""
        before = self.render(messages[:index], prompt=True, tools=tools)
        last = index == len(messages) - 1
        through = text if last else self.render(messages[: index + 1], tools=tools)
        if not (through.startswith(before) and text.startswith(through)):
            raise BadRow(
                "the chat template rewrites earlier turns, so the answers cannot be separated from the prompts"
            )
        return len(before), len(through)

    def _check(self, message: Message) -> None:
        content = message.get("content")
        if message.get("role") not in ROLES:
            raise BadRow(f"role {message.get('role')!r} is not one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise BadRow("a message's content is not a string")
        calls = message.get("tool_calls")
        if message["role"] == "assistant" and not content.strip() and not calls:
            raise BadRow("an empty answer")
        self._check_control(content if not calls else content + json.dumps(calls, ensure_ascii=False, default=str))

    def _check_control(self, text: str) -> None:
        if found := next((word for word in self._control if word in text), None):
            raise BadRow(f"a message spells out the control token {found}")


def _tool_name(tool: Any) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _answered(encoding: Any, spans: Sequence[tuple[int, int]]) -> Encoded:
    # By their ends: for a token that is only white space, some tokenizers report no other offset.
    ends = np.array([end for _, end in encoding.offsets], np.int64)
    answered = np.zeros(len(ends), np.bool_)
    for low, high in spans:
        answered |= (low < ends) & (ends <= high)
    return Encoded(ids=list(encoding.ids), answered=answered.tolist())
