"""Text of strangers, made harmless to show: no control characters, which could move a cursor or turn a line around."""

from __future__ import annotations

import re

# C0 and C1 controls, what turns the direction of text, and what no encoding holds. Newline and tab stay.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def clean(value: object) -> str:
    return _UNPRINTABLE.sub("\ufffd", str(value))
