"""The one place that takes secrets out of text, used on everything a run folder or a tracker keeps.

It masks what is named like a secret (`api_key: …`, `--token …`), what has the shape of one (a URL's
userinfo, well-known key prefixes), and the values this process's own secret environment variables hold.
It rather masks too much: a run folder is shared, and a report with `***` in it is still a report.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

# `pad_token` or `flops_per_token` is the vocabulary of this trade, not a secret.
_NAME = (
    r"[\w.-]*(?:"
    r"(?:api|access|secret|private|account|signing|encryption|wandb)[_-]?key"
    r"|secret|passw(?:or)?d|passphrase|credentials?|signature"
    r"|(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!per_)(?<!image_)token"
    r")"
)
_NAMED = re.compile(_NAME, re.IGNORECASE)
_NOTHING = r"(?!(?:null|none|true|false)\b|~)"
_QUOTED_OR_WORD = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^\s"',&;)}\]]+)"""

_RULES = tuple(
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        # A YAML line: the value runs to the end of the line.
        rf"""^(?P<keep>[ \t]*(?:-[ \t]+)?{_NAME}[ \t]*:[ \t]+){_NOTHING}[^\s"'\[{{|>].*$""",
        rf"""(?P<keep>(?<![\w.-]){_NAME}["']?[ \t]*[=:][ \t]*){_NOTHING}{_QUOTED_OR_WORD}""",
        rf"""(?P<keep>(?<![\w.-])--{_NAME}[ \t]+)(?!-){_QUOTED_OR_WORD}""",
        r"(?P<keep>\b(?:bearer|basic)[ ]+)[\w.~+/=-]{8,}",
        r"""(?P<keep>\b[a-z][a-z0-9+.-]*://)[^\s/"']+(?=@)""",
        r"(?P<keep>-----BEGIN [A-Z ]*PRIVATE KEY-----)[\s\S]*?(?=-----END|\Z)",
    )
)
_SHAPES = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|wandb_v\d_[\w-]{16,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)


def redact(text: str) -> str:
    """The text with its secrets masked; the rest, line structure included, stays as it is."""
    return _masked(text, _secrets_of_this_process())


def redacted(value: Any) -> Any:
    """The same for JSON-like data: text inside it is redacted, and text under a secret's name is masked."""
    return _walked(value, _secrets_of_this_process())


def _masked(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    for rule in _RULES:
        text = rule.sub(rf"\g<keep>{MASK}", text)
    return _SHAPES.sub(MASK, text)


def _walked(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _masked(value, secrets)
    if isinstance(value, Mapping):
        return {
            key: MASK if isinstance(item, str) and item and _NAMED.fullmatch(str(key)) else _walked(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_walked(item, secrets) for item in value]
    return value


def _secrets_of_this_process() -> list[str]:
    # Short values would mask ordinary words; longest first, so that one secret inside another leaves nothing.
    found = {value for name, value in os.environ.items() if len(value) >= 8 and _NAMED.fullmatch(name)}
    return sorted(found, key=len, reverse=True)
