"""Conversations to the text a model was taught to read, by the chat template its tokenizer came with.

The template is Jinja of a stranger's, so it runs in Jinja's sandbox, as in transformers. What people say is data: a
message that spells out `<|im_end|>` gets the ids of those characters, while the template's own marks are control
tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from flatout.errors import EnvironmentLacks, UsageError

# Private-use characters: stand-ins for control tokens that a message spells out, while the template runs.
_STAND_INS = range(0xE000, 0xF8FF)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def template_of(files: Mapping[str, str]) -> str | None:
    """The chat template among a tokenizer's files; None where there is none."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"]
    found = json.loads(files.get("tokenizer_config.json", "{}")).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def words_of(files: Mapping[str, str]) -> dict[str, str]:
    """The names by which a template calls control tokens, and what they spell."""
    words = {}
    for side in ("special_tokens_map.json", "tokenizer_config.json"):
        given = json.loads(files.get(side, "{}"))
        for name in _SPECIAL:
            value = given.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                words[name] = value
    return words


def rendered(
    template: str, messages: Sequence[Mapping[str, Any]], *, words: Mapping[str, str], add_generation_prompt: bool
) -> str:
    program, said = compiled(template), [dict(message) for message in messages]
    try:
        return str(program.render(messages=said, add_generation_prompt=add_generation_prompt, **words))
    except Exception as error:  # a stranger's program may raise anything
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise UsageError(f"the chat template refuses these messages ({roles}): {error}") from None


def encoded(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    messages: Sequence[Mapping[str, Any]],
    *,
    control: Sequence[str],
    encode: Callable[[str], list[int]],
    encode_text: Callable[[str], list[int]],
) -> list[int]:
    """Ids of the rendered messages. `encode` makes control tokens of what spells them, `encode_text` never does."""
    said = "\n".join(value for message in messages for value in message.values() if isinstance(value, str))
    spelled = [token for token in control if token and token in said]
    if not spelled:
        return encode(render(messages))
    free = (chr(code) for code in _STAND_INS if chr(code) not in said)
    # The longest first: one may be part of another.
    stand_ins = dict(zip(sorted(spelled, key=len, reverse=True), free, strict=False))
    meant = {mark: token for token, mark in stand_ins.items()}
    spelled_out = re.compile("|".join(map(re.escape, stand_ins)))

    def hidden(value: Any) -> Any:
        return spelled_out.sub(lambda match: stand_ins[match[0]], value) if isinstance(value, str) else value

    text = render([{key: hidden(value) for key, value in message.items()} for message in messages])
    pieces = re.split(f"([{''.join(meant)}])", text)
    return [i for piece in pieces if piece for i in (encode_text(meant[piece]) if piece in meant else encode(piece))]


@cache
def compiled(template: str, *, dated: bool = True) -> Any:
    """The template as a program in a sandbox; not `dated`, one that asks for today's date is refused."""
    jinja2 = _jinja2()

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def undated(_form: str) -> str:
        raise jinja2.TemplateError("it writes today's date, and training data must not change from day to day")

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **{k: v for k, v in options.items() if k in ("indent",)})

    class Generation(jinja2.ext.Extension):  # type: ignore[misc, name-defined]
        """`{% generation %}` marks an answer for those who want a mask; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": refuse, "strftime_now": _today if dated else undated}
    try:
        return sandbox.from_string(template)
    except jinja2.TemplateError as error:
        raise UsageError(f"the chat template is not valid Jinja: {error}") from None


def _today(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)


def _jinja2() -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise EnvironmentLacks("chat templates need jinja2: pip install 'flatout[train]'") from None
    return jinja2
