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
from flatout.data.tokenizer import JsonTokenizer, Tokenizer, template_advice
from flatout.errors import UsageError

Message = Mapping[str, Any]
ROLES = ("system", "user", "assistant", "tool")


class BadRow(ValueError):
    """A row that cannot be trained on; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A conversation. Answers among the first `given` messages are part of the prompt and are not learnt."""

    messages: Sequence[Message]
    given: int = 0
    tools: Sequence[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    text: str
    spans: Sequence[tuple[int, int]]  # the assistant's messages, each with its end mark


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
                f"the tokenizer {tokenizer.name} has no chat template, which messages need: "
                f"{template_advice(tokenizer.name)}, or give prompt and completion texts with data.as_chat: false"
            )
        self.tokenizer = tokenizer
        self._program = chat.compiled(text, dated=False, what=f"the chat template of {tokenizer.name}")
        self._words = chat.words_of(tokenizer.files)
        # Control tokens are recognised in the template's text, unlike in a document's.
        self._backend = type(tokenizer.backend).from_str(tokenizer.files["tokenizer.json"])
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder().values()
        self._control = [token.content for token in added if token.special and token.content.strip()]

    def conversations(self, several: Sequence[Turns]) -> list[Conversation | BadRow]:
        """The text of each, and the spans of the assistant's messages after the given ones; or why there is none."""
        found: list[Conversation | BadRow | None] = []
        talks = []
        for turns in several:
            try:
                talks.append(self._talk(turns))
                found.append(None)
            except BadRow as error:
                found.append(error)
        rendered = iter(self._program.rendered(talks, words=self._words))
        return [_conversation(next(rendered)) if one is None else one for one in found]

    def conversation(self, turns: Turns) -> Conversation:
        [found] = self.conversations([turns])
        if isinstance(found, BadRow):
            raise found
        return found

    def _talk(self, turns: Turns) -> chat.Talk:
        messages, tools = turns.messages, turns.tools
        for message in messages:
            self._check(message)
        self._check_control(json.dumps(tools or "", ensure_ascii=False, default=str))
        wanted = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= turns.given]
        if not wanted:
            raise BadRow("no message of the assistant")
        expected = [("tool calls", call["function"]["name"]) for m in messages for call in m.get("tool_calls", ())]
        expected += [("tools", name)] if tools and (name := _tool_name(tools[0])) else []
        return chat.Talk(messages=messages, tools=tools, wanted=wanted, expected=expected)

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        """Ids, and which of them belong to answers. Batched, because the tokenizer then uses all cores."""
        encodings = self._backend.encode_batch([one.text for one in conversations], add_special_tokens=False)
        return [_answered(encoding, one.spans) for encoding, one in zip(encodings, conversations, strict=True)]

    def encode(self, messages: Sequence[Message]) -> Encoded:
        return self.encode_batch([self.conversation(Turns(messages=messages))])[0]

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


def _conversation(found: chat.Rendered | chat.TemplateFailed) -> Conversation | BadRow:
    if isinstance(found, chat.BadConversation):
        return BadRow(str(found))
    if isinstance(found, chat.TemplateFailed):
        return BadRow(f"the chat template refuses it: {found}")
    return Conversation(text=found.text, spans=found.spans)


def _tool_name(tool: Any) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _answered(encoding: Any, spans: Sequence[tuple[int, int]]) -> Encoded:
    # By their ends: for a token that is only white space, some tokenizers report no other offset.
    ends = np.array([end for _, end in encoding.offsets], np.int64)
    lows, highs = np.array(spans, np.int64).reshape(-1, 2).T
    span = np.searchsorted(lows, ends) - 1  # the last one that begins before
    answered = (span >= 0) & (ends <= highs[span])
    return Encoded(ids=list(encoding.ids), answered=answered.tolist())
