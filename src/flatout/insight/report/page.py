"""One HTML file that needs nothing else: no script, no font, no picture from anywhere.

The policy in its head forbids everything but the one style sheet it carries, by its hash, so that even markup that
got past the escaping could neither run nor fetch.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from functools import cache
from importlib import resources

from flatout import __version__
from flatout.insight.compare import Comparison
from flatout.insight.report import fragments
from flatout.insight.report.html import Child, Html, join, tag
from flatout.insight.story import Story

# Nothing from anywhere, and no way out of the page.
POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'"


@cache
def style() -> Html:
    return Html((resources.files("flatout.insight.report") / "style.css").read_text())


def digest(content: str) -> str:
    """How a policy names inline content it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def html(stories: Sequence[Story], *, compared: Comparison | None = None) -> str:
    """The report of one run, or of several side by side."""
    title = f"{stories[0].name}: flatout report" if len(stories) == 1 else f"{len(stories)} runs: flatout report"
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(stories[0].told_at))
    policy = f"{POLICY}; style-src {digest(style())}"
    head = tag("meta", http_equiv="Content-Security-Policy", content=policy)
    return document(head, body(stories, made=made, compared=compared), title=title)


def body(stories: Sequence[Story], *, made: str, extra: Child = None, compared: Comparison | None = None) -> Html:
    """Everything that is seen; `extra` comes right after the verdict."""
    return join(
        tag("a", "Skip to the verdict", href="#content", class_="skip"),
        tag("header", tag("p", "flatout report", class_="brand"), tag("p", made, id="made")),
        tag("main", content(stories, extra=extra, compared=compared), id="content", tabindex="-1"),
        tag(
            "footer", f"Written by flatout {__version__} from run folders alone. Unknown values are n/a, never a guess."
        ),
    )


def content(stories: Sequence[Story], *, extra: Child = None, compared: Comparison | None = None) -> Html:
    if not stories:
        return join(extra)
    if len(stories) == 1:
        verdict, *rest = fragments.run_sections(stories[0])
        return join(fragments.contents(stories[0]), verdict, extra, rest)
    first, *others = fragments.side_by_side(stories, compared)
    runs = [
        tag("section", fragments.run_sections(story, id=f"r{at}-", level=3), id=f"r{at}")
        for at, story in enumerate(stories, 1)
    ]
    return join(fragments.runs_contents(stories), first, extra, others, runs)


def document(head: Child, seen: Html, *, title: str, script: str | None = None) -> str:
    return "<!doctype html>\n" + tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            head,
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", title),
            tag("style", style()),
        ),
        tag("body", seen, tag("script", Html(script)) if script else None),
        lang="en",
    )
