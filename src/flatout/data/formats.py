"""What a row means: its format is recognised by its keys, or mapped by the settings.

    messages              {"messages": [{"role", "content"}], "tools"?}     content parts and tool calls too
    sharegpt              {"conversations": [{"from", "value"}], "system"?, "tools"?}
    alpaca                {"instruction", "input"?, "output", "system"?, "history"?}
    prompt-completion     {"prompt", "completion"}      texts, or two lists of messages
    question-answer       {"question", "answer"}
    instruction-response  {"instruction", "response", "context"?}
    segments              {"segments": [{"text", "label"}]}
    tokens                {"input_ids", "labels"?, "attention_mask"?}
    text                  {"text"}
    preference            {"prompt"?, "chosen", "rejected"}      for recipe dpo

Every reader says which keys it used, so that what is not used can be told. `flatout data show` prints the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.config.settings import DataSettings, RowFormat
from flatout.data.chat import TemplateFailed, compiled_fields
from flatout.data.forms import INSTRUCTION, QUESTION
from flatout.data.template import BadRow, Turns

Message = dict[str, Any]
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
# Which keys each format must have, in the order in which they are tried.
KEYS: Mapping[RowFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "tokens": ("input_ids",),
    "segments": ("segments",),
    "preference": ("chosen", "rejected"),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "instruction-response": ("instruction", "response"),
    "question-answer": ("question", "answer"),
    "text": ("text",),
}
MOST_KEYS_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Texts, each learnt or not. `closed`: between the tokens that begin and end a text for this tokenizer."""

    texts: tuple[tuple[str, bool], ...]
    closed: bool = True


@dataclass(frozen=True, kw_only=True)
class Ids:
    ids: tuple[int, ...]
    learnt: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two answers to one prompt, of which the first is preferred."""

    chosen: Turns | Pieces
    rejected: Turns | Pieces


Part = Turns | Pieces | Ids  # what one example is made of
Meaning = Part | Pair


@dataclass(frozen=True, kw_only=True)
class Read:
    """A row's meaning, the name of its format, and the keys that were used."""

    meaning: Meaning
    format: str
    used: frozenset[str]


def read(row: Any, data: DataSettings, *, format: RowFormat | None, chat: bool) -> Read:
    """What a row says. `chat`: whether the tokenizer has a chat template, for the formats that work with either.

    Raises BadRow with the row's keys and the setting that would read it.
    """
    if not isinstance(row, dict):
        raise BadRow("not an object")
    row = {key: value for key, value in row.items() if value is not None and isinstance(key, str)}
    if data.template is not None:
        return _templated(row, data)
    if format is None and data.messages_field in row:  # mapped, or the name that everybody uses
        found = row[data.messages_field]
        turns = _turns(found, row) if _is_sharegpt(found) else Turns(messages=_messages(found), tools=_tools(row))
        return Read(meaning=turns, format="messages", used=frozenset({data.messages_field, "tools"}))
    mapped = (data.prompt_field, data.completion_field)
    if mapped != (DataSettings().prompt_field, DataSettings().completion_field) and format is None:
        _require(row, mapped, "data.prompt_field and data.completion_field")
        texts = _pair_of_texts(row[mapped[0]], row[mapped[1]], as_chat=bool(data.as_chat))
        return Read(meaning=texts, format=f"{mapped[0]} and {mapped[1]}", used=frozenset(mapped))
    chosen = format or recognised(row)
    if chosen is None:
        raise BadRow(_unknown(row))
    _require(row, KEYS[chosen], f"data.format {chosen}" if format else chosen)
    meaning, used = _READERS[chosen](row, chat if data.as_chat is None else data.as_chat, data)
    return Read(meaning=meaning, format=chosen, used=frozenset(used))


def recognised(row: Mapping[str, Any]) -> RowFormat | None:
    """The format of a row by its keys."""
    return next((name for name, keys in KEYS.items() if all(row.get(key) is not None for key in keys)), None)


def _unknown(row: Mapping[str, Any]) -> str:
    keys = _shown_keys(row)
    if len(row) and any(key in row for key in ("prompt", "question", "instruction")):
        lacking = [names for names in KEYS.values() if len(names) == 2 and names[0] in row]
        others = " or ".join(repr(names[1]) for names in lacking)
        return f"no {others} beside {lacking[0][0]!r} (keys: {keys}); name the answer with data.completion_field"
    return f"no known format (keys: {keys}); set data.prompt_field and data.completion_field, or data.template"


def _shown_keys(row: Mapping[str, Any]) -> str:
    names = sorted(key[:40] for key in row)
    more = f" and {len(names) - MOST_KEYS_SHOWN} more" if len(names) > MOST_KEYS_SHOWN else ""
    return ", ".join(names[:MOST_KEYS_SHOWN]) + more if names else "none"


def _require(row: Mapping[str, Any], keys: Sequence[str], by: str) -> None:
    if missing := [key for key in keys if row.get(key) is None]:
        raise BadRow(f"no {' and no '.join(map(repr, missing))} for {by} (keys: {_shown_keys(row)})")


# -- one reader for each format ------------------------------------------------------------------------------


def _read_messages(row: Mapping[str, Any], chat: bool, data: DataSettings) -> tuple[Meaning, set[str]]:
    return Turns(messages=_messages(row["messages"]), tools=_tools(row)), {"messages", "tools"}


def _read_sharegpt(row: Mapping[str, Any], chat: bool, data: DataSettings) -> tuple[Meaning, set[str]]:
    return _turns(row["conversations"], row), {"conversations", "system", "tools"}


def _read_pairs(row: Mapping[str, Any], chat: bool, data: DataSettings) -> tuple[Meaning, set[str]]:
    as_chat = bool(data.as_chat)  # texts of this format are given as they are to be continued
    return _pair_of_texts(row["prompt"], row["completion"], as_chat=as_chat), {"prompt", "completion"}


def _read_alpaca(row: Mapping[str, Any], chat: bool, data: DataSettings) -> tuple[Meaning, set[str]]:
    used = {"instruction", "input", "output", "system", "history"}
    asked, answer = _text(row, "instruction"), _answer(row, "output")
    given, system = _text(row, "input", optional=True), _text(row, "system", optional=True)
    history = row.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, (list, tuple)) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
        for turn in history
    ):
        raise BadRow("'history' is not a list of pairs of texts")
    if chat:
        messages = [{"role": "system", "content": system}] if system else []
        for question, reply in history:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        said = "\n\n".join(text for text in (asked, given) if text)
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        return Turns(messages=messages), used
    pieces = [(f"{system}\n\n", False)] if system else []
    for question, reply in history:
        pieces += [(INSTRUCTION.written(question), False), (f"{reply}\n\n", False)]
    context = f"\n\n### Input:\n{given}" if given else ""
    pieces += [(INSTRUCTION.written(f"{asked}{context}"), False), (answer, True)]
    return Pieces(texts=tuple(pieces)), used


def _read_response(row: Mapping[str, Any], chat: bool, data: DataSettings) -> tuple[Meaning, set[str]]:
    """As databricks-dolly: an instruction, its response, and what it is about."""
    inner = {
        "instruction": row["instruction"], "output": row["response"], "input": row.get("context", row.get("input")),
        "system": row.get("system"), "history": row.get("history"),
    }  # fmt: skip
    about = "context" if "context" in row else "input"
    kept = {key: value for key, value in inner.items() if value is not None}
    return _read_alpaca(kept, chat, data)[0], {"instruction", "response", about, "system", "history"}


def _read_question(row: Mapping[str, Any], chat: bool, data: DataSettings) -> tuple[Meaning, set[str]]:
    asked, answer = _text(row, "question"), _answer(row, "answer")
    about, system = _text(row, "context", optional=True), _text(row, "system", optional=True)
    used = {"question", "answer", "context", "system"}
    if chat:
        said = "\n\n".join(text for text in (about, asked) if text)
        turns = [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        return Turns(messages=([{"role": "system", "content": system}] if system else []) + turns), used
    before = "".join(f"{text}\n\n" for text in (system, about) if text)
    return Pieces(texts=((f"{before}{QUESTION.written(asked)}", False), (f"{QUESTION.space}{answer}", True))), used


def _read_segments(row: Mapping[str, Any], chat: bool, data: DataSettings) -> tuple[Meaning, set[str]]:
    segments = row["segments"]
    if not isinstance(segments, list) or not segments:
        raise BadRow("'segments' is not a list of objects with text and label")
    texts = []
    for segment in segments:
        text, label = (segment.get("text"), segment.get("label")) if isinstance(segment, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(label, bool):
            raise BadRow("a segment has no 'text' and true or false as 'label'")
        texts.append((text, label))
    return Pieces(texts=tuple(texts), closed=False), {"segments"}


def _read_tokens(row: Mapping[str, Any], chat: bool, data: DataSettings) -> tuple[Meaning, set[str]]:
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    seen = row.get("attention_mask", [1] * len(ids) if isinstance(ids, list) else None)
    if not all(isinstance(part, list) and all(type(i) is int for i in part) for part in (ids, labels, seen)):
        raise BadRow("'input_ids', 'labels' and 'attention_mask' are not lists of whole numbers")
    if not len(ids) == len(labels) == len(seen):
        raise BadRow("'input_ids', 'labels' and 'attention_mask' have different lengths")
    kept = [(i, label) for i, label, here in zip(ids, labels, seen, strict=True) if here]
    if any(i < 0 or i > 2**31 - 1 for i, _ in kept):
        raise BadRow("'input_ids' has a number that is not a token")
    if any(label not in (-100, i) for i, label in kept):
        raise BadRow("'labels' has an id that is neither -100 nor that of the token (labels are not shifted)")
    learnt = tuple(label != -100 for _, label in kept)
    return Ids(ids=tuple(i for i, _ in kept), learnt=learnt), {"input_ids", "labels", "attention_mask"}


def _read_text(row: Mapping[str, Any], chat: bool, data: DataSettings) -> tuple[Meaning, set[str]]:
    text = _text(row, "text")
    if not text.strip():
        raise BadRow("an empty text")
    return Pieces(texts=((text, True),)), {"text"}


def _read_preference(row: Mapping[str, Any], chat: bool, data: DataSettings) -> tuple[Meaning, set[str]]:
    prompt, used = row.get("prompt", ""), {"prompt", "chosen", "rejected", "tools"}
    answers = (row["chosen"], row["rejected"])
    if all(isinstance(answer, list) for answer in answers):
        said = [_messages(answer) for answer in answers]
        # Without a prompt of messages, or with the prompt as a text beside whole conversations, the prompt is what
        # both conversations begin with.
        if isinstance(prompt, list):
            before = _messages(prompt)
            said = [[*before, *answer] for answer in said]
            given = len(before)
        else:
            alike = (a == b for a, b in zip(*said, strict=False))
            given = next((i for i, same in enumerate(alike) if not same), min(map(len, said)))
        if any(len(turns) <= given for turns in said):
            raise BadRow("'chosen' and 'rejected' are the same conversation, or one is the beginning of the other")
        tools = _tools(row)
        first, second = (Turns(messages=turns, given=given, tools=tools) for turns in said)
        return Pair(chosen=first, rejected=second), used
    if not isinstance(prompt, str) or not all(isinstance(answer, str) for answer in answers):
        raise BadRow("'prompt', 'chosen' and 'rejected' are neither texts nor lists of messages")
    if not all(answer.strip() for answer in answers):
        raise BadRow("an empty answer")
    if data.as_chat:
        texts = [_pair_of_texts(prompt, answer, as_chat=True) for answer in answers]
    else:
        texts = [Pieces(texts=((prompt, False), (answer, True))) for answer in answers]
    return Pair(chosen=texts[0], rejected=texts[1]), used


_READERS: Mapping[RowFormat, Callable[[Mapping[str, Any], bool, DataSettings], tuple[Meaning, set[str]]]] = {
    "messages": _read_messages,
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
    "prompt-completion": _read_pairs,
    "question-answer": _read_question,
    "instruction-response": _read_response,
    "segments": _read_segments,
    "tokens": _read_tokens,
    "text": _read_text,
    "preference": _read_preference,
}


# -- parts of rows -------------------------------------------------------------------------------------------


def _templated(row: Mapping[str, Any], data: DataSettings) -> Read:
    """A prompt that the configuration's own template makes from the fields."""
    assert data.template is not None
    answer = data.completion_field
    _require(row, (answer,), "data.completion_field")
    try:
        prompt, used = compiled_fields(data.template).render(row)
    except TemplateFailed as error:
        raise BadRow(f"data.template fails on it: {error} (keys: {_shown_keys(row)})") from None
    meaning = _pair_of_texts(prompt, row[answer], as_chat=bool(data.as_chat))
    return Read(meaning=meaning, format="template", used=frozenset({*used, answer}))


def _pair_of_texts(prompt: Any, completion: Any, *, as_chat: bool) -> Turns | Pieces:
    if isinstance(prompt, list) and isinstance(completion, list):
        return Turns(messages=[*_messages(prompt), *_messages(completion)], given=len(prompt))
    if not (isinstance(prompt, str) and isinstance(completion, str)):
        raise BadRow("prompt and completion are neither two texts nor two lists of messages")
    if not completion.strip():
        raise BadRow("an empty answer")
    if as_chat:
        return Turns(messages=[{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}])
    return Pieces(texts=((prompt, False), (completion, True)))


def _text(row: Mapping[str, Any], key: str, *, optional: bool = False) -> str:
    value = row.get(key, "" if optional else None)
    if not isinstance(value, str):
        raise BadRow(f"{key!r} is not a text")
    return value


def _answer(row: Mapping[str, Any], key: str) -> str:
    text = _text(row, key)
    if not text.strip():
        raise BadRow("an empty answer")
    return text


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRow("messages are not a list of objects")
    return [_message(message) for message in messages]


def _message(message: Mapping[str, Any]) -> Message:
    """A message whose content is one text, and whose tool calls are objects."""
    kept = {key: value for key, value in message.items() if value is not None}
    content = kept.get("content")
    if isinstance(content, list):
        kept["content"] = "".join(_part(part) for part in content)
    if calls := kept.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadRow("'tool_calls' is not a list")
        kept["tool_calls"] = [_call(call) for call in calls]
        kept.setdefault("content", "")
    else:
        kept.pop("tool_calls", None)
    return kept


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise BadRow(f"a content part of type {str(kind)[:40]!r}; only texts can be learnt")
    return str(part["text"])


def _call(call: Any) -> Message:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call has no function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # as the OpenAI API writes them; templates expect an object
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise BadRow("the arguments of a tool call are not JSON") from None
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(row: Mapping[str, Any]) -> Sequence[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise BadRow("'tools' is not JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise BadRow("'tools' is not a list")
    return tools or None


def _is_sharegpt(messages: Any) -> bool:
    return isinstance(messages, list) and bool(messages) and isinstance(messages[0], dict) and "from" in messages[0]


def _turns(conversation: Any, row: Mapping[str, Any]) -> Turns:
    """ShareGPT's turns; some datasets write them as messages under the same key."""
    if not isinstance(conversation, list) or not all(isinstance(turn, dict) for turn in conversation):
        raise BadRow("'conversations' is not a list of objects")
    if not _is_sharegpt(conversation):
        messages = _messages(conversation)
    else:
        messages = []
        for turn in conversation:
            role = ROLES.get(str(turn.get("from")))
            if role is None:
                raise BadRow(f"from {str(turn.get('from'))[:40]!r} is not one of {', '.join(ROLES)}")
            said: Message = {"role": role, "content": turn.get("value")}
            if turn.get("from") == "function_call":
                try:
                    call = json.loads(str(turn.get("value")))
                except (ValueError, RecursionError):
                    raise BadRow("a function_call is not JSON") from None
                said = {"role": role, "content": "", "tool_calls": call if isinstance(call, list) else [call]}
            messages.append(_message(said))
    system = _text(row, "system", optional=True)
    if system and messages and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Turns(messages=messages, tools=_tools(row))
