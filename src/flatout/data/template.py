"""Chat templates: messages to the text and ids in the format that a model was trained on.

`chat` finds the tokenizer's own template and runs it in a sandbox. Messages are data: a message that spells out a
control token is refused. Used by recipe sft.
"""

from __future__ import annotations

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

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text of a conversation; with `prompt`, up to the start of the assistant's answer."""
        try:
            return self._compiled.render(messages, words=self._words, add_generation_prompt=prompt)
        except chat.TemplateFailed as error:
            raise BadRow(f"the chat template refuses it: {error}") from None

    def conversation(self, messages: Sequence[Message], *, given: int = 0) -> Conversation:
        """A conversation's text, and the spans of the assistant's messages after the first `given` messages."""
        for message in messages:
            self._check(message)
        text = self.render(messages)
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= given]
        spans = [self._span(messages, i, text) for i in answers]
        if not spans:
            raise BadRow("no message of the assistant")
        return Conversation(text=text, spans=spans)

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        """Ids, and which of them belong to answers. Batched, because the tokenizer then uses all cores."""
        encodings = self._backend.encode_batch([one.text for one in conversations], add_special_tokens=False)
        return [_answered(encoding, one.spans) for encoding, one in zip(encodings, conversations, strict=True)]

    def encode(self, messages: Sequence[Message]) -> Encoded:
        return self.encode_batch([self.conversation(messages)])[0]

    def _span(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        """The span of the assistant's message in the text, including its end mark."""
        before = self.render(messages[:index], prompt=True)
        through = text if index == len(messages) - 1 else self.render(messages[: index + 1])
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
        if message["role"] == "assistant" and not content.strip():
            raise BadRow("an empty answer")
        if found := next((word for word in self._control if word in content), None):
            raise BadRow(f"a message spells out the control token {found}")


def _answered(encoding: Any, spans: Sequence[tuple[int, int]]) -> Encoded:
    # By their ends: for a token that is only white space, some tokenizers report no other offset.
    ends = np.array([end for _, end in encoding.offsets], np.int64)
    answered = np.zeros(len(ends), np.bool_)
    for low, high in spans:
        answered |= (low < ends) & (ends <= high)
    return Encoded(ids=list(encoding.ids), answered=answered.tolist())
