"""Hostile texts and numbers, and ways to spoil a file."""

from __future__ import annotations

import json
import os
import random
from contextlib import suppress
from typing import Any

TOUCH = "touch EXECUTED"
PYTHON = f"__import__('os').system('{TOUCH}')"
TEXTS = (
    *("", " ", "\n", "a\nb", "\t", "-", "--", "--help", "~", "~nobody/x", ".", "..", "../../..", "/", "/dev/null"),
    *("/dev/zero", "/dev/full", "/dev/stdin", "/proc/self/mem", "/proc/self/environ", "/etc/passwd", "null", "true"),
    *("\x1b[2J\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "\x7f\b\b", "a\rb", "\u202eabc", "\u2028", "\ufeff", "\x00"),
    *("\ud800", "\udcff", "\udc9b31m", "\uffff", "é" * 130, "🦊" * 64, "a" * 300, "a" * 5000, "x/" * 2500, "/" * 5000),
    *("%s%n%x", "{0.__class__}", "{}", "[bold red]", "[/]", "[link=http://x]", "\\x1b[2J", "'", '"', "'''", "#", "|"),
    *("*", "**/*", "[a", "?", "a=b", "=", ":", "::", "a:b:c", "bpe:", "bpe:0", "bpe:999999999", "bpe:٣", "byte"),
    *("!!python/object/apply:os.system [touch EXECUTED]", "&a [*a]", "*a", "[1, [2", "{a: b", "? !!x"),
    *(
        "{{ 7*7 }}",
        "{% for a in b %}",
        f"$({TOUCH})",
        f"`{TOUCH}`",
        f"; {TOUCH}",
        PYTHON,
        f"python:os:system?x={TOUCH}",
    ),
    *("os:system", "builtins:exec", "subprocess:run", "a.b.c:d", "python:os:system", "python::", "judge=http://[::"),
    *("http://127.0.0.1:1/x", "file:///etc/passwd", "hf:../..", "a/b", "a/b/c", "OWNER/NAME", "hf:", "a@b"),
    *(
        "units",
        "units:train?size=16",
        "code:train?size=999999999",
        "jsonl:/dev/zero",
        "gsm8k:",
        "math:x",
        "units?level=٣",
    ),
)
NUMBERS = (
    *("0", "-0", "-1", "1", "2", "3", "7", "256", "257", "1000000", "1000000000", "2147483648", "4294967296"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "9" * 30, "9" * 400, "9" * 5000),
    *("1e3", "1e9", "1e15", "1e30", "1e308", "1e400", "-1e400", "nan", "NaN", "inf", "-inf", ".nan", "0.1", "1e-300"),
    *("5e-324", "0x10", "0b1", "1_000", "٣", "1,000", "1.5", "1.0", "+1", "1e", "e1", "0.0000001", "--1", " 1", "1 "),
)


def text(r: random.Random) -> str:
    """A hostile text, or several in a row."""
    return "".join(r.choice(TEXTS) for _ in range(r.choice((1, 1, 1, 2, 3))))


def argument(r: random.Random) -> str:
    """One that a command line can hold."""
    while True:
        found = r.choice((text, number))(r)
        with suppress(UnicodeEncodeError):
            if b"\0" not in os.fsencode(found):
                return found


def number(r: random.Random) -> str:
    if r.random() < 0.7:
        return r.choice(NUMBERS)
    return str(r.choice((r.randrange(-10, 300), r.randrange(2**70), 2 ** r.randrange(80), -(2 ** r.randrange(70)))))


def value(r: random.Random, *, depth: int = 3) -> Any:
    """A JSON value."""
    match r.randrange(9 if depth else 6):
        case 0:
            return text(r)
        case 1:
            return r.choice((0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**30)))
        case 2:
            return r.choice((0.0, -0.0, 1e308, float("inf"), float("nan"), 5e-324, -1.5))
        case 3:
            return r.choice((None, True, False))
        case 4:
            return "x" * r.choice((1, 1000, 100_000))
        case 5:
            return nested(r.choice((10, 200, 5000)))
        case 6:
            return [value(r, depth=depth - 1) for _ in range(r.randrange(4))]
        case 7:
            return {text(r): value(r, depth=depth - 1) for _ in range(r.randrange(4))}
        case _:
            return [r.choice((0, "", None))] * r.choice((10, 1000))


class Raw(str):
    """JSON text as it is."""


def nested(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


def dumped(found: Any) -> str:
    """JSON, with raw parts put in afterwards."""
    parts: list[str] = []

    def hide(one: Any) -> Any:
        if isinstance(one, Raw):
            parts.append(str(one))
            return f"RAW-{len(parts) - 1}-PART"
        if isinstance(one, dict):
            return {key: hide(inner) for key, inner in one.items()}
        return [hide(inner) for inner in one] if isinstance(one, list) else one

    made = json.dumps(hide(found))
    for place, part in enumerate(parts):
        made = made.replace(f'"RAW-{place}-PART"', part)
    return made


def places(found: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside one."""
    inner = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def replaced(found: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(found) if isinstance(found, dict) else list(found)
    copy[path[0]] = replaced(found[path[0]], path[1:], new)
    return copy


def spoiled_json(r: random.Random, found: Any, *, times: int = 1, new: Any = None) -> Any:
    """JSON with some of its values replaced or removed."""
    for _ in range(times):
        path = r.choice(places(found)[1:] or [()])
        found = replaced(found, path, value(r) if new is None else new(r))
    return found


def spoiled(r: random.Random, content: bytes) -> bytes:
    """Bytes after some damage."""
    data = bytearray(content)
    for _ in range(r.choice((1, 1, 2, 5))):
        at, size = r.randrange(len(data) + 1), r.choice((1, 4, 64, 1000))
        match r.randrange(8):
            case 0:
                data = data[:at]
            case 1:
                data[at : at + size] = b""
            case 2:
                data[at : at + size] = r.randbytes(size)
            case 3:
                data[at:at] = text(r).encode(errors="replace")
            case 4:
                data[at:at] = data[at : at + size] * r.choice((2, 50))
            case 5:
                data = bytearray()
            case 6:
                data[at : at + size] = b"\0" * size
            case _:
                if at < len(data):
                    data[at] ^= 1 << r.randrange(8)
    return bytes(data)
