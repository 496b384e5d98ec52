"""HTML by construction: text is escaped unless it was made here, and nothing that could run can be written.

A run's name, a path, an error or a model's output is untrusted. `tag` escapes it, and refuses
event handlers, styles and links that leave the page, so that no fragment has to.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from flatout.output import clean

_VOID = {"meta", "br", "hr", "link"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | float | None | Iterable["Child"]


def text(value: object) -> Html:
    """Anything as text: what means something in HTML is escaped."""
    return value if isinstance(value, Html) else Html(html.escape(clean(value), quote=True))


def join(*children: Child) -> Html:
    """Children one after the other; None is left out, lists are flattened."""
    return Html("".join(_parts(children)))


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. `class_` and `for_` lose their underscore, others become hyphens; None and False are left out."""
    opened = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{opened}>")
    return Html(f"<{name}{opened}>{join(*children)}</{name}>")


def _parts(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, str | int | float):
            yield text(child)
        else:
            yield from _parts(child)


def _attribute(key: str, value: str | float | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if name.startswith("on") or name == "style" or (name in ("href", "src") and not str(value).startswith("#")):
        raise ValueError(f"{name}={value!r} has no place in a report: it could run or fetch something")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{text(value)}"'
