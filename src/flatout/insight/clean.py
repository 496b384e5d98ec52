"""Makes untrusted text safe to print by removing control characters, which could move the cursor or reverse a line."""

from __future__ import annotations

import re

# C0 and C1 controls, bidirectional controls and lone surrogates. Newline and tab are kept.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def clean(value: object) -> str:
    return _UNPRINTABLE.sub("\ufffd", str(value))
