"""Runs untrusted Jinja with limits on its steps and on the length of its texts, and without access to the outside.

Jinja's own sandbox keeps a template from objects it must not touch, but not from endless loops or filling the memory.
Here every block is charged for its expressions when it is entered, every operation that reads a text or a list is
charged for its length, and the length of a long result is checked in advance. Steps are counted, not seconds, so that
the same row always has the same result. Imported only to compile a template: Jinja is not always installed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, operators
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A published template takes about 1,500 steps for a message. The limits grow with the messages to render.
STEPS, STEPS_PER_MESSAGE = 2_000_000, 20_000
CHARACTERS, CHARACTERS_PER_CHARACTER = 1 << 20, 8
TEMPLATE_CHARACTERS = 1 << 20
BLOCK_STEPS = 10  # of a block, a call or an item of an iterator, without its contents
CHARACTERS_PER_STEP = 64
ITEM_CHARACTERS = 64  # an item of a container counts as this many
INTEGER_BITS = 4096
SHORT = 4096  # characters of a text that costs only one step
DECIMALS = 100
# Filters and methods whose result can be as long as the product of their arguments.
_GROWING = frozenset(
    {"batch", "center", "expandtabs", "format", "format_map", "indent", "ljust", "rjust", "slice", "to_bytes", "tojson"}
    | {"translate", "urlize", "wordwrap", "xmlattr", "zfill"}
)
# Filters that never read the items of a container.
_SHALLOW = frozenset(
    {"attr", "count", "d", "default", "first", "groupby", "items", "last", "length", "list", "map", "max", "min"}
    | {"random", "reject", "rejectattr", "reverse", "safe", "select", "selectattr", "sort", "sum", "unique"}
)
_NUMBER = re.compile(rb"\d+")


class TooMuch(TemplateError):  # type: ignore[misc]
    """The template exceeds the limits for the rows it is given."""


class _Limits(threading.local):
    """The remaining limits of this thread's rendering."""

    steps = STEPS
    room: int | None = CHARACTERS  # None: unbounded


class _Counting(CodeGenerator):  # type: ignore[misc]
    """Generates Python code that charges for its work."""

    def blockvisit(self, nodes_: Iterable[nodes.Node], frame: Any) -> None:
        block = list(nodes_)
        inside = sum(1 for node in block for _ in node.find_all(nodes.Node))
        self.writeline(f"environment.spend({BLOCK_STEPS + len(block) + inside})")
        super().blockvisit(block, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.concat(map(environment.text_of, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Operand(self, node: nodes.Operand, frame: Any) -> None:
        if isinstance(node.expr, nodes.Const):  # the usual case: a role, a mark
            super().visit_Operand(node, frame)
            return
        self.write(f" {operators[node.op]} environment.charged_text(")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.copied(")
        self.visit(node.node, frame)
        self.write(")[")
        self.visit(node.arg, frame)
        self.write("]")


class Generation(Extension):  # type: ignore[misc]
    """`{% generation %}` marks an answer for a loss mask; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """The environment of one template. The remaining limits are kept per thread."""

    code_generator_class = _Counting
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, filters: Mapping[str, Any], functions: Mapping[str, Any]) -> None:
        self._left = _Limits()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=self.charged_text
        )
        del self.globals["lipsum"]  # writes any number of paragraphs
        self.globals |= functions
        self.filters.update(filters)
        for table in (self.filters, self.tests):
            table.update({name: self._charged(name, made) for name, made in table.items()})

    def begin(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Starts a rendering with the limits for these messages."""
        left, said = self._left, list(messages)
        left.steps, left.room = STEPS + STEPS_PER_MESSAGE * len(said), None
        size = sum(len(v) if type(v) is str else self._size(v) for message in said for v in message.values())
        left.room = CHARACTERS + CHARACTERS_PER_CHARACTER * size

    # -- called by the compiled template -------------------------------------------------------------------

    def spend(self, steps: int) -> None:
        left = self._left
        left.steps -= steps
        if left.steps < 0:
            raise TooMuch(f"it takes more than {STEPS:,} steps and {STEPS_PER_MESSAGE:,} for each message")

    def concat(self, parts: Iterable[str]) -> str:
        kept, length, room = [], 0, self._room
        for part in parts:
            length += len(part)
            if length > room:
                self._allow(length)
            kept.append(part)
        return "".join(kept)

    def charged_text(self, value: Any) -> Any:
        """Charges for a value that is compared, searched or written, which takes time by its length."""
        if type(value) is str:
            if len(value) > SHORT:
                self.spend(len(value) // CHARACTERS_PER_STEP)
        elif isinstance(value, Sized):
            self.spend(self._size(value) // CHARACTERS_PER_STEP)
        return value

    def text_of(self, value: Any) -> str:
        return value if type(value) is str else str(self.charged_text(value))

    def copied(self, value: Any) -> Any:
        self._allow(_length(value))
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str and len(left) + len(right) < SHORT:
            return left + right  # the most frequent case
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > INTEGER_BITS:
                raise TooMuch(f"it computes a number of more than {INTEGER_BITS:,} bits")
        elif operator == "+":
            self._allow(_length(left) + _length(right))
        elif operator == "*":
            self._allow((_length(left) or _length(right)) * _reach((left, right)))
        elif operator == "%" and isinstance(left, str | bytes):
            self._charge("format", (left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(__obj, "__wrapped__", __obj)  # `format`, as Jinja wraps it
        owner, name = getattr(inner, "__self__", None), getattr(inner, "__name__", None)
        if isinstance(owner, str | bytes | int) and isinstance(name, str):
            args = tuple(list(__self._charged_items(a)) if isinstance(a, Iterator) else a for a in args)
            __self._charge(name, (owner, *args, *kwargs.values()))
        else:
            args = tuple(__self._charged_items(a) if isinstance(a, Iterator) else a for a in args)
            __self.spend(BLOCK_STEPS + sum(map(_length, args)) // CHARACTERS_PER_STEP)
        return super().call(__context, __obj, *args, **kwargs)

    # -- charges -------------------------------------------------------------------------------------------

    def _charged(self, name: str, function: Any) -> Any:
        """Wraps a filter or test so that it charges for its arguments."""
        at = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the argument that Jinja itself inserts

        @wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            if len(args) > at and isinstance(args[at], Iterator):
                items = self._charged_items(args[at])
                args = (*args[:at], list(items) if name == "join" else items, *args[at + 1 :])
            self._charge(name, (*args[at:], *kwargs.values()))
            return function(*args, **kwargs)

        return charged

    def _charge(self, name: str, args: tuple[Any, ...]) -> None:
        """Charges for what a call reads, and refuses a call whose result would be too long before it runs."""
        sizes = [_length(value) if name in _SHALLOW else self._size(value) for value in args]
        self.spend(BLOCK_STEPS + sum(sizes) // CHARACTERS_PER_STEP)
        if name == "replace" and len(args) > 2 and all(isinstance(value, str) for value in args[:3]):
            text, old, new = args[:3]
            self._allow(len(text) + text.count(old) * len(new))
        elif name == "join":
            between = [(a, b) for a, b in ((0, 1), (1, 0)) if len(args) > 1 and isinstance(args[b], str | bytes)]
            self._allow(sum(sizes) + max((_items(args[a]) * sizes[b] for a, b in between), default=0))
        elif name == "sum" and any(isinstance(value, list | tuple) for value in args[1:]):
            raise TooMuch("it adds up lists")
        elif name == "round" and _reach(args[1:]) > DECIMALS:
            raise TooMuch(f"it rounds to more than {DECIMALS} decimals")
        elif name in _GROWING:
            length = _reach(args) if name not in ("format", "format_map") else _reach(args) * _width(args[0])
            for value, size in zip(args, sizes, strict=True):
                length *= 1 if isinstance(value, int) else max(size, 1)
            self._allow(length)

    def _charged_items(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(BLOCK_STEPS)
            yield item

    @property
    def _room(self) -> int:
        return self._left.room or CHARACTERS

    def _allow(self, length: int) -> None:
        """Checks that a text of this length is allowed."""
        if length > self._room:
            raise TooMuch(
                f"it makes a text or list of {length:,} characters; at most {self._room:,} are allowed for this row"
            )
        self.spend(length // CHARACTERS_PER_STEP)

    def _size(self, value: Any) -> int:
        """The approximate length of `value` as text. Stops early, because containers can repeat one another."""
        if isinstance(value, str | bytes):
            return len(value)
        room = self._left.room
        size, looked_at, left = 0, 0, [value]
        while left:
            one = left.pop()
            looked_at += 1
            size += 1
            if isinstance(one, str | bytes):
                size += len(one)
            elif isinstance(one, int):
                size += one.bit_length() // 3
            elif isinstance(one, list | tuple | set | frozenset):
                left += one
            elif isinstance(one, Mapping):
                left += [*one.keys(), *one.values()]
            elif isinstance(one, Sized):
                size += len(one)
                looked_at += len(one)
            if room is not None and size + len(left) > room:
                self._allow(size + len(left))
        if room is not None:
            self.spend(looked_at)
        return size


def _items(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else ITEM_CHARACTERS * _items(value)


def _reach(values: Iterable[Any]) -> int:
    """The largest width or count that the numbers among them can request."""
    reach = 1
    for value in values:
        if isinstance(value, int):
            reach = max(reach, abs(value))
        elif isinstance(value, tuple | list | dict):
            inner = value.values() if isinstance(value, dict) else value
            reach = max([reach, *(abs(one) for one in inner if isinstance(one, int))])
    return reach


def _width(text: Any) -> int:
    """The largest width that a format requests."""
    raw = text.encode(errors="replace") if isinstance(text, str) else text if isinstance(text, bytes) else b""
    return max([1, *(int(number[:18]) for number in _NUMBER.findall(raw))])
