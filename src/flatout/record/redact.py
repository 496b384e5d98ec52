"""Masks secrets in text. Everything that a run folder or a tracker keeps goes through this module.

It masks what is named like a secret (`api_key: …`, `--token …`), what has the shape of one (a URL's
userinfo, well-known key prefixes), and the values this process's own secret environment variables hold.
A command line is a list, in which an option named like a secret masks what follows it; a secret found there is
masked from then on wherever it comes up again.
It masks too much rather than too little, because run folders are shared, and a report with `***` is still useful.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

MASK = "***"
# Shorter values, masked wherever they come up, would mask ordinary words.
_SHORTEST = 8

# `pad_token`, `flops_per_token` or `time_to_first_token` is a technical term, not a secret.
_OF_THE_TRADE = (
    *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "per", "image", "video", "audio", "start", "end", "stop"),
    *("first", "next", "last", "new", "max", "min", "num", "special", "boi", "eoi", "eot", "eom", "think"),
)
_TOKEN = "".join(rf"(?<!{word}[_-])" for word in _OF_THE_TRADE) + "token"
_NAME = (
    r"[\w.-]*(?:"
    r"(?:api|access|secret|private|account|signing|encryption|wandb)[_-]?keys?"
    r"|secrets?|passw(?:or)?ds?|passphrases?|credentials?|signature"
    rf"|{_TOKEN}"
    r")"
)
_NAMED = re.compile(_NAME, re.IGNORECASE)
# As an option of a command or in the query of an address, these stand for secrets too.
_OPTION_NAME = rf"(?:{_NAME}|(?:[\w.-]*[_.-])?(?:auth|pwd)|(?:(?:db|user|admin|root|smtp|login)[_-]?)?pass|key)"
_OPTION = re.compile(rf"--?{_OPTION_NAME}", re.IGNORECASE)
_SETTING = re.compile(rf"(?:--?|\+\+?)?{_OPTION_NAME}", re.IGNORECASE)  # with = and its value behind it
_FLAG = re.compile(r"-[A-Za-z]|--[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)
_SCRIPT = re.compile(r".+\.(?:py|sh)", re.IGNORECASE)
_NOTHING = r"(?!(?:null|none|true|false)\b|~)"
_QUOTED_OR_WORD = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^\s"',&;)}\]]+)"""

_RULES = tuple(
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        # A YAML line: the value runs to the end of the line.
        rf"""^(?P<keep>[ \t]*(?:-[ \t]+)?{_NAME}[ \t]*:[ \t]+){_NOTHING}[^\s"'\[{{|>].*$""",
        rf"""(?P<keep>(?<![\w.-]){_NAME}["']?[ \t]*[=:][ \t]*){_NOTHING}{_QUOTED_OR_WORD}""",
        rf"""(?P<keep>(?<![\w.-])--{_OPTION_NAME}(?:[ \t]+|=))(?!-){_QUOTED_OR_WORD}""",
        # A header of a request: the value runs to the end of the line, or of the quotes it stands in.
        r"""(?P<keep>\b(?:(?:proxy-)?authorization|(?:set-)?cookie)["']?[ \t]*:[ \t]*)(?!\*)[^\s"'][^"'\r\n]*""",
        rf"""(?P<keep>[?&;](?:{_OPTION_NAME}|[\w.-]*sig)=)[^\s"'&;#]+""",
        r"(?P<keep>\b(?:bearer|basic)[ ]+)[\w.~+/=-]{8,}",
        r"""(?P<keep>\b[a-z][a-z0-9+.-]*://)[^\s/"']+(?=@)""",
        r"(?P<keep>-----BEGIN [A-Z ]*PRIVATE KEY-----)[\s\S]*?(?=-----END|\Z)",
    )
)
_SHAPES = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|wandb_v\d_[\w-]{16,}|AIza[\w-]{30,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)


# Secrets from command lines that this process has handled.
_handed_over: set[str] = set()


def redact(text: str) -> str:
    """The text with its secrets masked; the rest, line structure included, stays as it is."""
    return _masked(text, _known_secrets())


def redacted(value: Any) -> Any:
    """The same for JSON-like data and dataclasses of it: text inside is redacted, text under a secret's name masked."""
    return _walked(value, _known_secrets())


def redact_command(arguments: Sequence[str]) -> list[str]:
    """The same for a command line, argument by argument."""
    shown, secret_next, own = [], False, _own_options(arguments)
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if secret_next and not _FLAG.fullmatch(argument):
            shown.append(MASK)
        elif equals and _SETTING.fullmatch(name):
            _hand_over(value)
            shown.append(f"{name}={MASK}")
        else:
            shown.append(argument)
        # What follows -p may as well be a port, or a word that a report needs.
        if shown[-1] == MASK and not (arguments[at - 1] == "-p" and (argument.isalpha() or argument.isdigit())):
            _hand_over(argument)
        secret_next = shown[-1] != MASK and (_OPTION.fullmatch(argument) is not None or (argument == "-p" and at > own))
    return [redact(argument) for argument in shown]


def _own_options(arguments: Sequence[str]) -> int:
    """Where a command's own options begin: behind the script that Python or a launcher is given, or the program."""
    for at, argument in enumerate(arguments):
        if at and (_SCRIPT.fullmatch(argument) or arguments[at - 1] in ("-m", "-c")):
            return at
    return 0


def _hand_over(secret: str) -> None:
    if len(secret) >= _SHORTEST:
        _handed_over.add(secret)


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
            key: _hidden(item) if _NAMED.fullmatch(str(key)) else _walked(item, secrets) for key, item in value.items()
        }
    if is_dataclass(value) and not isinstance(value, type):
        facts = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **_walked(facts, secrets))
    if isinstance(value, list | tuple):
        walked = (_walked(item, secrets) for item in value)
        return tuple(walked) if isinstance(value, tuple) else list(walked)
    return value


def _hidden(value: Any) -> Any:
    """The value under a secret's name with its text masked, also in lists."""
    if isinstance(value, str):
        return MASK if value else value
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    return redacted(value)


def _known_secrets() -> list[str]:
    # Longest first, so that one secret inside another leaves nothing.
    of_environment = {v for name, v in os.environ.items() if len(v) >= _SHORTEST and _NAMED.fullmatch(name)}
    return sorted(of_environment | _handed_over, key=len, reverse=True)
