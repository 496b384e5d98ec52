"""Renders conversations with the chat template of a model's tokenizer.

The template is untrusted Jinja, so it runs in a `sandbox`. Messages are data: a message that spells out `<|im_end|>`
gets the ids of those characters, while the template's own marks become control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from flatout.errors import EnvironmentLacks, UsageError, first_line
from flatout.files import parse_json

# Private-use characters. They replace control tokens that a message spells out while the template runs.
_STAND_INS = range(0xE000, 0xF8FF)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def template_of(files: Mapping[str, str]) -> str | None:
    """The chat template among a tokenizer's files, or None."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"]
    found = parse_json(files.get("tokenizer_config.json", "{}"), source="tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        default = (e.get("template") for e in found if isinstance(e, dict) and e.get("name") == "default")
        found = next(default, None)
    return found if isinstance(found, str) else None


def words_of(files: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold control tokens in a template, with their text."""
    words = {}
    for side in ("special_tokens_map.json", "tokenizer_config.json"):
        given = parse_json(files.get(side, "{}"), source=side)
        for name in _SPECIAL:
            value = given.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                words[name] = value
    return words


def rendered(
    template: str, messages: Sequence[Mapping[str, Any]], *, words: Mapping[str, str], add_generation_prompt: bool
) -> str:
    try:
        return compiled(template).render(messages, words=words, add_generation_prompt=add_generation_prompt)
    except TemplateFailed as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise UsageError(f"the chat template refuses these messages ({roles}): {error}") from None


def text_in(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(value for message in messages for value in message.values() if isinstance(value, str))


def encoded(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    messages: Sequence[Mapping[str, Any]],
    *,
    control: Sequence[str],
    encode: Callable[[str], list[int]],
    encode_text: Callable[[str], list[int]],
) -> list[int]:
    """Ids of the rendered messages. `encode` recognises control tokens in text, `encode_text` does not."""
    said = text_in(messages)
    spelled = [token for token in control if token and token in said]
    if not spelled:
        return encode(render(messages))
    free = (chr(code) for code in _STAND_INS if chr(code) not in said)
    # The longest first, because one may be part of another.
    stand_ins = dict(zip(sorted(spelled, key=len, reverse=True), free, strict=False))
    meant = {mark: token for token, mark in stand_ins.items()}
    spelled_out = re.compile("|".join(map(re.escape, stand_ins)))

    def hidden(value: Any) -> Any:
        return spelled_out.sub(lambda match: stand_ins[match[0]], value) if isinstance(value, str) else value

    text = render([{key: hidden(value) for key, value in message.items()} for message in messages])
    pieces = re.split(f"([{''.join(meant)}])", text)
    return [i for piece in pieces if piece for i in (encode_text(meant[piece]) if piece in meant else encode(piece))]


class TemplateFailed(ValueError):
    """The template failed on some messages; the text says why."""


class Program:
    """A compiled template in its sandbox."""

    def __init__(self, template: Any, sandbox: Any, *, too_much: type[Exception], what: str) -> None:
        self._template, self._sandbox, self._too_much, self.what = template, sandbox, too_much, what

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        words: Mapping[str, str],
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
    ) -> str:
        said = list(messages)
        values = {"messages": said, "add_generation_prompt": add_generation_prompt, **words}
        return self.filled(values | ({"tools": list(tools)} if tools else {}), [*said, {"tools": tools or ""}])

    def filled(self, values: Mapping[str, Any], given: Sequence[Mapping[str, Any]]) -> str:
        """The text for some values. Its limits grow with `given`."""
        self._sandbox.begin(given)
        try:
            text: str = self._template.render(dict(values))
        except self._too_much as error:  # the template's fault, not the row's: every row would fail
            raise UsageError(f"{self.what} is not usable: {error}") from None
        except Exception as error:  # untrusted code may raise anything
            raise TemplateFailed(first_line(error)[:100]) from None
        return text


@cache
def compiled(template: str, *, dated: bool = True, what: str = "the tokenizer's chat template") -> Program:
    """Compiles a template for the sandbox. Without `dated`, a template that reads today's date is refused."""
    try:
        import jinja2

        from flatout.data.sandbox import TEMPLATE_CHARACTERS, Sandbox, TooMuch
    except ImportError:
        raise EnvironmentLacks("chat templates need jinja2: pip install 'flatout[train]'") from None
    if len(template) > TEMPLATE_CHARACTERS:
        raise UsageError(
            f"the chat template has {len(template):,} characters; at most {TEMPLATE_CHARACTERS:,} are expected"
        )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def undated(_form: str) -> str:
        raise jinja2.TemplateError("it writes today's date, and training data must not change from day to day")

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **{k: v for k, v in options.items() if k in ("indent",)})

    sandbox = Sandbox(
        filters={"tojson": tojson},
        functions={"raise_exception": refuse, "strftime_now": _today if dated else undated},
    )
    try:
        return Program(sandbox.from_string(template), sandbox, too_much=TooMuch, what=what)
    except Exception as error:  # Jinja's own errors, and Python's errors for code that is nested too deeply
        said = "the chat template" if what.endswith("chat template") else what
        raise UsageError(f"{said} is not valid Jinja: {first_line(error)[:200]}") from None


class Fields:
    """A template over the fields of a row; it must use at least one of them."""

    def __init__(self, template: str) -> None:
        from jinja2 import Environment, meta

        self._program = compiled(template, dated=False, what="data.template")
        self._names = meta.find_undeclared_variables(Environment().parse(template))
        if not self._names:
            raise UsageError("data.template names no field of the rows; write them as {{ question }}")

    def render(self, row: Mapping[str, Any]) -> tuple[str, set[str]]:
        """The text of a row, and the fields that were used."""
        if missing := sorted(name for name in self._names if name not in row):
            raise TemplateFailed(f"no field {missing[0]!r}")
        return self._program.filled(row, [row]), set(self._names)


@cache
def compiled_fields(template: str) -> Fields:
    return Fields(template)


def _today(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)
