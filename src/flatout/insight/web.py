"""The live page: the report's own fragments, served to this machine only (`flatout watch --web`).

It listens on 127.0.0.1, answers only to its own host name, and only to requests with the token in its URL. The page may
run one script, allowed by its hash, which fetches the fragments again; there is no other network traffic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from flatout.errors import FlatoutError
from flatout.insight.machine import MachineSampler
from flatout.insight.report import fragments, page
from flatout.insight.report.html import Html, tag
from flatout.insight.story import tell
from flatout.loopback import ADDRESS, Loopback
from flatout.record import Run, redact

# Requests that come faster than this get the same answer, so many open pages cost no more than one.
FRESH_S = 1.0


class Site:
    """The contents of the page, rebuilt at most once a second."""

    def __init__(self, runs: Sequence[Run], sampler: MachineSampler) -> None:
        self._runs, self._sampler = runs, sampler
        self._lock = threading.Lock()
        self._made_at, self._body = -FRESH_S, Html()
        self.script = (resources.files("flatout.insight") / "live.js").read_text()
        self.policy = "; ".join(
            [
                page.POLICY,
                "frame-ancestors 'none'",
                f"style-src {page.digest(page.style())}",
                f"script-src {page.digest(self.script)}",
                "connect-src 'self'",
            ]
        )

    def body(self) -> Html:
        with self._lock:
            if time.monotonic() - self._made_at >= FRESH_S:
                stories = [tell(run) for run in self._runs]
                made = time.strftime("live, %H:%M:%S")
                self._body = page.body(
                    stories, made=made, extra=fragments.now(self._sampler.latest(), level=2 if stories else 1)
                )
                self._made_at = time.monotonic()
            return self._body

    def document(self) -> str:
        names = [redact(run.path.name) for run in self._runs]
        title = names[0] if len(names) == 1 else f"{len(names)} runs" if names else "this machine"
        without = tag("noscript", tag("meta", http_equiv="refresh", content="5"))
        return page.document(without, self.body(), title=f"{title}: flatout watch", script=self.script)


class Server(Loopback):
    """Serves one site under its own token."""

    def __init__(self, site: Site, *, port: int = 0) -> None:
        self.site = site
        super().__init__(Handler, port=port)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "flatout", ""
    timeout = 10

    def do_GET(self) -> None:
        if (refusal := self._refusal()) is not None:
            self._answer(refusal, refusal.phrase)
            return
        try:
            match urlsplit(self.path).path:
                case "/":
                    self._answer(HTTPStatus.OK, self.server.site.document(), kind="text/html")
                case "/content":
                    self._answer(HTTPStatus.OK, self.server.site.body(), kind="text/html")
                case _:
                    self._answer(HTTPStatus.NOT_FOUND, "there is only one page here")
        except (FlatoutError, FileNotFoundError) as error:  # a run folder that is damaged, or gone
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, redact(str(error)))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Refuses: the server is read-only."""
        refusal = self._refusal() or HTTPStatus.METHOD_NOT_ALLOWED
        self.close_connection = True
        self._answer(refusal, refusal.phrase)

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def _refusal(self) -> HTTPStatus | None:
        """Why this request is refused: a wrong host name (DNS rebinding), another site's page, or no token."""
        if not self.server.is_addressed(self.headers):
            return HTTPStatus.FORBIDDEN
        given = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        if not self.server.knows(given):
            return HTTPStatus.UNAUTHORIZED
        return None

    def _answer(self, status: HTTPStatus, content: str, *, kind: str = "text/plain") -> None:
        data = content.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(data)),
            "Content-Security-Policy": self.server.site.policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because the URL contains the token."""
