"""Finds answers in untrusted text and compares them. Nothing is evaluated; every search is linear in a bounded tail.

Computer algebra (`same_maths`) runs in a process that is killed at its time limit.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Sequence

from flatout.tasks import workers

# An answer is at the end: only this many last characters are searched.
LOOKED_AT = 1 << 16
LONGEST_NUMBER = 64
LONGEST_FORMULA = 1000

Finder = Callable[[str], str | None]

_NUMBER = r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+|(?<=[0-9])\.?)(?:[eE][-+]?[0-9]{1,3})?"
_NUMBERS = re.compile(rf"(?<![\w.]){_NUMBER}(?![0-9])")
_WHOLE_NUMBER = re.compile(_NUMBER)
_INTEGER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,1000})")
_FRACTION = re.compile(r"([-+]?)\\?[dt]?frac\{([^{}]*)\}\{([^{}]*)\}|([^/]*)/([^/]*)")
_SPACES = re.compile(r"\s+")
# Markup that does not change the meaning of a formula.
_MARKUP = re.compile(r"\\left|\\right|\\displaystyle|\\[!,;: ]|\\(?=[$%])|[$\s]")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")


def tail(text: str) -> str:
    return text[-LOOKED_AT:]


def after_thought(text: str) -> str:
    """The text after the thinking; empty if the thinking never ended."""
    _, end, rest = text.rpartition("</think>")
    if end:
        return rest
    return "" if "<think>" in text else text


def tagged(text: str) -> str | None:
    """The text inside the last <answer>…</answer>."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(0, end))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def hashed(text: str) -> str | None:
    """The text after the last ####, to the end of its line."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() or None if mark else None


def boxed(text: str) -> str | None:
    r"""The text inside the last \boxed{…}, with balanced braces; None if they never close."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at in range(start + len("\\boxed"), len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : at].strip()
    return None


def last_number(text: str) -> str | None:
    found = None
    for match in _NUMBERS.finditer(text):
        found = match
    return None if found is None or _foreign_digits(text[found.start() : found.end() + 1]) else found[0]


def last_line(text: str) -> str | None:
    return text.strip().rpartition("\n")[2].strip() or None


EXPLICIT: tuple[Finder, ...] = (tagged, boxed, hashed)


def find(completion: str, finders: Sequence[Finder]) -> str | None:
    """The result of the first finder that finds an answer."""
    text = after_thought(tail(completion))
    return next((found for finder in finders if (found := finder(text)) is not None), None)


def number(text: str) -> float | None:
    """A finite number in ASCII digits: 1,234.5, -3e8, $7, 12 %, 3/4, \\frac{3}{4}. None for anything else."""
    stripped = _MARKUP.sub("", text[: 2 * LONGEST_NUMBER]).removesuffix("%").rstrip(".")
    if not stripped or len(text) > 2 * LONGEST_NUMBER:
        return None
    if (plain := _finite(stripped)) is not None:
        return plain
    if not (parts := _FRACTION.fullmatch(stripped)):
        return None
    above = _finite((parts[1] or "") + parts[2] if parts[2] is not None else parts[4])
    below = _finite(parts[3] if parts[3] is not None else parts[5])
    return above / below if above is not None and below else None


def amount(text: str) -> float | None:
    """A number, or the only number in a few words: "about 3.5 miles"."""
    if (whole := number(text)) is not None:
        return whole
    if len(text) > 2 * LONGEST_NUMBER or _foreign_digits(text):
        return None
    found = _NUMBERS.findall(text)
    return _finite(found[0]) if len(found) == 1 else None


def close(got: float, want: float, *, relative: float = 0.0, absolute: float = 1e-9) -> bool:
    return abs(got - want) <= max(absolute, relative * abs(want))


def same_text(got: str, want: str) -> bool:
    """Equal except for case, white space and a full stop at the end."""
    return _plain(got) == _plain(want)


def same_maths(got: str, want: str) -> bool:
    """Equal as text, as numbers or, if math-verify is installed, as mathematics."""
    got, want = _without_markup(got), _without_markup(want)
    if not got or len(got) > LONGEST_FORMULA:
        return False
    if got == want:
        return True
    if _INTEGER.fullmatch(got) and _INTEGER.fullmatch(want):
        return int(got.replace(",", "")) == int(want.replace(",", ""))
    a, b = number(got), number(want)
    if a is not None and b is not None:
        return close(a, b, relative=0.0 if _INTEGER.fullmatch(want) else 1e-9)
    if not has_maths():
        return False
    return verify(got, want) if workers.KILLABLE else workers.call("maths", got, want) is True


def without_text(text: str) -> str:
    r"""The text with \text{…} and the like replaced by what is inside."""
    return _TEXT.sub(r"\1", tail(text))


def has_maths() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def warm_maths() -> None:
    """Imports the computer algebra before the fork, so that no child has to."""
    if has_maths():
        import math_verify  # noqa: F401


def verify(got: str, want: str) -> bool:
    """Compares by math-verify, in a process that can be killed: its own time limit needs the main thread's alarm."""
    import math_verify

    gold = math_verify.parse(f"${want}$", parsing_timeout=None)
    target = math_verify.parse(f"${got}$", parsing_timeout=None)
    return bool(math_verify.verify(gold, target, timeout_seconds=None))


def _finite(text: str) -> float | None:
    if len(text) > LONGEST_NUMBER or not text.isascii() or not _WHOLE_NUMBER.fullmatch(text):
        return None
    value = float(text.replace(",", ""))
    return value if math.isfinite(value) else None


def _foreign_digits(text: str) -> bool:
    """Whether there are digits of other scripts: `float` reads them, but no answer format uses them."""
    return any(c.isdecimal() and not c.isascii() for c in text)


def _plain(text: str) -> str:
    return _SPACES.sub(" ", tail(text)).strip().rstrip(".").casefold()


def _without_markup(text: str) -> str:
    text = without_text(text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _MARKUP.sub("", text).rstrip(".")
