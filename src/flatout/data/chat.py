"""Renders conversations with the chat template of a model's tokenizer.

The template is untrusted Jinja, so it runs in a process of its own, the `sandbox`, with limits on its time and memory.
Messages are data: a message that spells out `<|im_end|>` gets the ids of those characters, while the template's own
marks become control tokens.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import IO, Any

from flatout.errors import EnvironmentLacks, RunFailed, UsageError
from flatout.files import own_environment, own_python, parse_json

# Private-use characters. They replace control tokens that a message spells out while the template runs.
_STAND_INS = range(0xE000, 0xF8FF)
Messages = Sequence[Mapping[str, Any]]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
TEMPLATE_CHARACTERS = 1 << 18  # the longest published one has 17 thousand
# The most that a template is given at once, and what it may take for that. Half a million tokens need no more.
REQUEST_BYTES, PROCESSOR_S, MEMORY_BYTES = 2 << 20, 10.0, 1 << 30


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
    template: str, several: Sequence[Messages], *, words: Mapping[str, str], add_generation_prompt: bool, name: str
) -> list[str]:
    """The texts of conversations, by the template of the tokenizer `name`."""
    program = compiled(template, what=f"the chat template of {name}")
    talks = [Talk(messages=messages) for messages in several]
    texts = []
    for talk, found in zip(talks, program.rendered(talks, words=words, prompt=add_generation_prompt), strict=True):
        if isinstance(found, TemplateFailed):
            roles = ", ".join(str(m.get("role")) for m in talk.messages[:8]) + (", …" if len(talk.messages) > 8 else "")
            raise UsageError(f"the chat template refuses these messages ({roles}): {found}")
        texts.append(found.text)
    return texts


def text_in(messages: Messages) -> str:
    return "\n".join(value for message in messages for value in message.values() if isinstance(value, str))


def encoded(
    render: Callable[[Messages], str],
    messages: Messages,
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


class BadConversation(TemplateFailed):
    """It did not fail, but the conversation cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation to render, the messages to locate in its text, and what the text must have, by kind and name."""

    messages: Messages
    tools: Sequence[Any] | None = None
    wanted: Sequence[int] = ()
    expected: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class Rendered:
    text: str
    spans: Sequence[tuple[int, int]] = ()  # of the wanted messages


@dataclass(frozen=True, kw_only=True)
class Program:
    """A template that compiles. Without `dated` it fails where it reads today's date."""

    template: str
    dated: bool
    what: str
    names: frozenset[str] = frozenset()  # the variables that it reads

    def rendered(
        self, talks: Sequence[Talk], *, words: Mapping[str, str], prompt: bool = False
    ) -> list[Rendered | TemplateFailed]:
        """The conversations, or why they cannot be rendered, with the variables that transformers sets."""
        items = []
        for talk in talks:
            values = {"messages": list(talk.messages)} | ({"tools": list(talk.tools)} if talk.tools else {})
            asked = {"wanted": list(talk.wanted), "expected": list(talk.expected)} if talk.wanted else {}
            items.append({"values": values | {"add_generation_prompt": prompt} | dict(words), **asked})
        return self._asked(items)

    def filled(self, values: Mapping[str, Any]) -> str:
        """The text for some values."""
        [found] = self._asked([{"values": values}])
        if isinstance(found, TemplateFailed):
            raise found
        return found.text

    def checked(self) -> Program:
        """The same with its names; refused if it does not compile."""
        [reply] = self._ask([b"null"])
        self._usable(reply)
        return replace(self, names=frozenset(reply["names"]))

    def _asked(self, items: Sequence[Mapping[str, Any]]) -> list[Rendered | TemplateFailed]:
        """One answer for each item; those that fit are sent together."""
        found: dict[int, Rendered | TemplateFailed] = {}
        group: dict[int, bytes] = {}
        for number, item in enumerate(items):
            try:
                data = _json(item)
            except TemplateFailed as error:
                found[number] = error
                continue
            if group and sum(map(len, group.values())) + len(data) > REQUEST_BYTES:
                found |= self._answers(group)
                group = {}
            group[number] = data
        found |= self._answers(group) if group else {}
        return [found[number] for number in range(len(items))]

    def _answers(self, group: Mapping[int, bytes]) -> dict[int, Rendered | TemplateFailed]:
        replies = self._ask(list(group.values()))
        return {number: self._answer(reply) for number, reply in zip(group, replies, strict=True)}

    def _answer(self, reply: Mapping[str, Any]) -> Rendered | TemplateFailed:
        self._usable(reply)
        if (problem := reply.get("problem")) is None:
            return Rendered(text=reply["text"], spans=[(low, high) for low, high in reply.get("spans", ())])
        return BadConversation(reply["why"]) if problem == "conversation" else _failed(reply["why"])

    def _usable(self, reply: Mapping[str, Any]) -> None:
        """Refuses a template that no row can use."""
        match reply.get("problem"):
            case "invalid":
                raise UsageError(f"{self.what} is not valid Jinja: {_first_line(reply['why'])[:200]}")
            case "memory":
                raise UsageError(f"{self.what} is not usable: it needs more than {MEMORY_BYTES >> 20} MiB of memory")
            case "unusable":
                raise UsageError(f"{self.what} is not usable: {reply['why']}")

    def _ask(self, items: Sequence[bytes]) -> list[dict[str, Any]]:
        asked = {"template": self.template, "dated": self.dated, "processor_s": PROCESSOR_S}
        head = json.dumps(asked)[:-1].encode()
        return _sandbox.ask(head + b', "items": [' + b", ".join(items) + b"]}\n", replies=len(items), what=self.what)


def _json(item: Mapping[str, Any]) -> bytes:
    try:
        data = json.dumps(item, ensure_ascii=False, default=str).encode(errors="surrogatepass")
    except (ValueError, RecursionError, TypeError) as error:
        raise _failed(str(error)) from None
    if len(data) > REQUEST_BYTES:
        raise BadConversation(f"longer than {REQUEST_BYTES >> 20} MiB, the most that a template is given")
    return data[:-1] + b', "bytes": %d}' % len(data)


def _failed(why: str) -> TemplateFailed:
    return TemplateFailed(_first_line(why)[:100])


@cache
def compiled(template: str, *, dated: bool = True, what: str = "the tokenizer's chat template") -> Program:
    """Checks that a template compiles. Without `dated`, it fails where it reads today's date."""
    if importlib.util.find_spec("jinja2") is None:
        raise EnvironmentLacks("chat templates need jinja2: pip install 'flatout[train]'")
    if len(template) > TEMPLATE_CHARACTERS:
        raise UsageError(f"{what} has {len(template):,} characters; at most {TEMPLATE_CHARACTERS:,} are expected")
    return Program(template=template, dated=dated, what=what).checked()


class Fields:
    """A template over the fields of a row; it must use at least one of them."""

    def __init__(self, template: str) -> None:
        self._program = compiled(template, dated=False, what="data.template")
        if not self._program.names:
            raise UsageError("data.template names no field of the rows; write them as {{ question }}")

    def render(self, row: Mapping[str, Any]) -> tuple[str, set[str]]:
        """The text of a row, and the fields that were used."""
        names = set(self._program.names)
        if missing := sorted(name for name in names if name not in row):
            raise TemplateFailed(f"no field {missing[0]!r}")
        return self._program.filled({name: row[name] for name in names}), names


@cache
def compiled_fields(template: str) -> Fields:
    return Fields(template)


# -- the process ---------------------------------------------------------------------------------------------


class _Died(Exception):
    """The process ended at a request."""


class _Sandbox:
    """The process that runs templates: started by the first of them, and again after its end. Threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None  # a file: nobody reads a pipe while the process works
        self._abandoned: list[subprocess.Popen[bytes]] = []

    def ask(self, line: bytes, *, replies: int, what: str) -> list[dict[str, Any]]:
        with self._turn:
            try:
                return self._exchange(line, replies, what)
            except _Died:  # another program may have ended it
                pass
            try:
                return self._exchange(line, replies, what)
            except _Died as error:
                raise RunFailed(f"the process that runs {what} ends at once: {error}") from None

    def _exchange(self, line: bytes, num_replies: int, what: str) -> list[dict[str, Any]]:
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin.fileno(), line)
            answers = [process.stdout.readline() for _ in range(num_replies)]
            if not answers[-1].endswith(b"\n"):
                raise BrokenPipeError
        except BrokenPipeError:
            why = self._end(process)
            if process.returncode == -signal.SIGPROF:
                raise UsageError(
                    f"{what} is not usable: it takes more than {PROCESSOR_S:g} s of processor time for a row"
                ) from None
            raise _Died(why) from None
        except BaseException:  # such as Ctrl-C: this answer would be taken for that of the next request
            self._end(process)
            raise
        return [json.loads(answer.decode(errors="surrogatepass")) for answer in answers]

    def _started(self) -> subprocess.Popen[bytes]:
        python, *rest = own_python("flatout.data.sandbox")
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            return subprocess.Popen(
                [python, "-s", "-S", *rest, str(MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd="/",
                env=own_environment() | {"PYTHONHASHSEED": "0"},
                start_new_session=True,  # Ctrl-C is for us
            )
        except OSError as error:
            raise EnvironmentLacks(f"no process can be started for chat templates: {error.strerror or error}") from None

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Ends the process, if it has not ended itself, and says why it has."""
        self._process = None
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        assert self._stderr is not None
        with self._stderr as file:
            file.seek(0)
            said = file.read().decode(errors="replace").strip()
        return said.splitlines()[-1][:200] if said else f"exit code {process.returncode}"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._end(self._process)

    def forget(self) -> None:
        """In a forked process, which shares the pipes but must not use them."""
        process, self._process, self._turn = self._process, None, threading.Lock()
        if process is not None:
            nothing = os.open(os.devnull, os.O_RDWR)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                os.dup2(nothing, pipe.fileno())  # closing it may wait for a thread that only the parent has
            os.close(nothing)
            process.returncode = 0  # not ours to wait for
            self._abandoned.append(process)


def _write(descriptor: int, data: bytes) -> None:
    """Without a buffer, which a forked process would write again."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _first_line(text: str) -> str:
    return (text.strip() or "an error without a message").splitlines()[0]


_sandbox = _Sandbox()
atexit.register(_sandbox.close)
os.register_at_fork(after_in_child=_sandbox.forget)
