"""The process in which templates run, with hard limits on its time and memory. It imports nothing but Jinja.

A template is untrusted code. Jinja's sandbox keeps it from the objects of this process, and the kernel ends the process
when it takes too much. Requests and replies are JSON in frames on stdin and stdout (`chat` has the other end).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import accumulate
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MESSAGES = 16_384
# A text may have this many characters, and so many for each byte that was given.
CHARACTERS, CHARACTERS_PER_BYTE = 1 << 20, 4
REASON_CHARACTERS = 500
# The cost of locating answers: characters to render, and these for each message.
MESSAGE_COST = 500
CHEAP, AFFORDABLE = 4_000_000, 200_000_000
# Parts of the conversation that stand for the whole when one answer is rendered.
HEAD_MESSAGES, HEAD_CHARACTERS = 3, 200
SPOT_CHECKS = 4

Message = dict[str, Any]
Spans = list[tuple[int, int]]
Render = Callable[..., str]


class Unusable(Exception):
    """The template exceeds a limit, whatever the row."""


class BadConversation(Exception):
    """The answers of a conversation cannot be located."""


# -- the environment that transformers gives a chat template -------------------------------------------------


class _Generation(Extension):  # type: ignore[misc]
    """`{% generation %}` marks an answer; its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Variables(Namespace):  # type: ignore[misc]
    """A namespace without names that mean something to Python or Jinja."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        given = dict(*values, **kwargs)
        for name in given:
            _require_public(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise TemplateError(f"a namespace cannot have {name!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _today(form: str) -> str:
    return datetime.now().strftime(form)


def _undated(_form: str) -> str:
    raise TemplateError("it writes today's date, and training data must not change from day to day")


@lru_cache(maxsize=8)
def compiled(template: str, *, dated: bool) -> tuple[Any, frozenset[str]]:
    """The template, and the variables that it reads."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _today if dated else _undated,
        "dict": _dict,
        "namespace": _Variables,
    }
    names = meta.find_undeclared_variables(environment.parse(template)) - set(environment.globals)
    return environment.from_string(template), frozenset(names)


# -- where the answers are -----------------------------------------------------------------------------------


def spans(render: Render, messages: Sequence[Message], *, tools: Any, wanted: Sequence[int], text: str) -> Spans:
    """The spans of the wanted answers in the text, from the end of the prompt to the end of the message.

    The definition is `_by_prefixes`, which renders the conversation twice for each answer. Long ones are rendered in
    parts, and the parts must add up to the text.
    """
    if len(messages) > MESSAGES:
        raise BadConversation(f"more than {MESSAGES:,} messages")
    each = [MESSAGE_COST + _length(message.get("content")) for message in messages]
    upto = list(accumulate(each))
    fixed = len(json.dumps(tools)) if tools else 0
    cost = 2 * sum(upto[i] + fixed for i in wanted)
    if cost <= CHEAP:
        return _by_prefixes(render, messages, tools=tools, wanted=wanted, text=text)
    found = _by_parts(render, messages, tools=tools, text=text)
    if found is not None:
        checked = {wanted[k * (len(wanted) - 1) // (SPOT_CHECKS - 1)] for k in range(SPOT_CHECKS)}
        exact = _by_prefixes(render, messages, tools=tools, wanted=sorted(checked), text=text)
        if exact == [found[i] for i in sorted(checked)]:
            return [found[i] for i in wanted]
    if cost > AFFORDABLE:
        raise BadConversation(
            f"{len(messages):,} messages are too many for this chat template, which renders a message by the others"
        )
    return _by_prefixes(render, messages, tools=tools, wanted=wanted, text=text)


def _by_prefixes(render: Render, messages: Sequence[Message], *, tools: Any, wanted: Sequence[int], text: str) -> Spans:
    """By the length of the conversation before each answer, and with it."""
    found = []
    for i in wanted:
        before = render(messages[:i], tools=tools, prompt=True)
        through = text if i == len(messages) - 1 else render(messages[: i + 1], tools=tools)
        if not (through.startswith(before) and text.startswith(through)):
            raise BadConversation(
                "the chat template rewrites earlier turns, so the answers cannot be separated from the prompts"
            )
        found.append((len(before), len(through)))
    return found


def _by_parts(
    render: Render, messages: Sequence[Message], *, tools: Any, text: str
) -> dict[int, tuple[int, int]] | None:
    """Every answer by what it adds to the few messages before it; None where that is not what the text has."""
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    head_end = answers[0] + 1 if answers[0] < HEAD_MESSAGES else int(messages[0].get("role") == "system")
    head = [_shortened(message) for message in messages[:head_end]]
    few = tools[:1] if tools and len(json.dumps(tools[:1])) < MESSAGE_COST * 8 else None
    found, end = {}, 0
    for k, i in enumerate(answers):
        # From the message after the answer before the last one; the first answer with all that comes before it.
        first = answers[k - 2] + 1 if k > 1 else 0
        part = [*(head if first >= head_end else []), *messages[first : i + 1]]
        since = len(part) - (i - answers[k - 1]) if k else 0
        given = few if k else tools
        try:
            earlier = render(part[:since], tools=given) if k else ""
            before, through = render(part[:-1], tools=given, prompt=True), render(part, tools=given)
        except TemplateError:  # it may miss what was left out
            return None
        if not (before.startswith(earlier) and through.startswith(before)):
            return None
        if not text.startswith(through[len(earlier) :], end):
            return None
        found[i] = (end + len(before) - len(earlier), end + len(through) - len(earlier))
        end = found[i][1]
    return found


def _shortened(message: Message) -> Message:
    content = message.get("content")
    return message | {"content": content[:HEAD_CHARACTERS]} if isinstance(content, str) else message


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


# -- requests ------------------------------------------------------------------------------------------------


def replies_to(line: bytes) -> Iterator[dict[str, Any]]:
    """Replies to the items of a request. The kernel ends the process at an item that takes longer than allowed."""
    request = json.loads(line.decode(errors="surrogatepass"))
    processor_s = request["processor_s"]
    signal.setitimer(signal.ITIMER_PROF, processor_s)
    try:
        template, names = compiled(request["template"], dated=request["dated"])
    except Exception as error:  # also Python's own, for code that is nested too deeply
        template, invalid = None, _problem("invalid", error)
    for item in request["items"]:
        signal.setitimer(signal.ITIMER_PROF, processor_s)
        if template is None:
            yield invalid
        elif item is None:
            yield {"names": sorted(names)}
        else:
            yield _reply(template, item)


def _reply(template: Any, item: Mapping[str, Any]) -> dict[str, Any]:
    """The text for `values`, with the spans of the messages at `wanted`; or a `problem`."""
    values, wanted = item["values"], item.get("wanted")
    most = CHARACTERS + CHARACTERS_PER_BYTE * item["bytes"]

    def render(messages: Sequence[Message], *, tools: Any, prompt: bool = False) -> str:
        changed = {"messages": messages, "add_generation_prompt": prompt} | ({"tools": tools} if tools else {})
        return written({name: value for name, value in values.items() if name != "tools"} | changed)

    def written(values: Mapping[str, Any]) -> str:
        text: str = template.render(values)
        if len(text) > most:
            raise Unusable(f"it makes a text of {len(text):,} characters; at most {most:,} are allowed for this row")
        return text

    try:
        text = written(values)
        if missing := next(_missing(item.get("expected", ()), text), None):
            raise BadConversation(f"the chat template leaves {missing[0]} out (such as {missing[1][:40]!r})")
        if wanted is None:
            return {"text": text}
        return {
            "text": text,
            "spans": spans(render, values["messages"], tools=values.get("tools"), wanted=wanted, text=text),
        }
    except BadConversation as error:
        return _problem("conversation", error)
    except Unusable as error:
        return _problem("unusable", error)
    except MemoryError:
        return _problem("memory", "")
    except Exception as error:  # untrusted code may raise anything
        return _problem("failed", error)


def _missing(expected: Sequence[tuple[str, str]], text: str) -> Iterator[tuple[str, str]]:
    """What the text lacks of (kind, name), which are usually in this order in it."""
    at = 0
    for kind, name in expected:
        found = text.find(name, at)
        at = max(at, found)
        if found < 0 and name not in text:
            yield kind, name


def _problem(kind: str, why: object) -> dict[str, Any]:
    said = str(why) or type(why).__name__
    return {"problem": kind, "why": said[:REASON_CHARACTERS]}


def main() -> None:
    memory_bytes = int(sys.argv[1])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # no handler: it must end a filter that is at work
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for line in sys.stdin.buffer:
        for reply in replies_to(line):
            sys.stdout.buffer.write(json.dumps(reply, ensure_ascii=False).encode(errors="surrogatepass") + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
