"""An HTTP server for this machine only: the live page and the chat endpoint listen on it.

It listens on 127.0.0.1 and has a token that every request must bring. Requests to another host name (DNS rebinding) and
requests of other sites' pages are not its own.
"""

from __future__ import annotations

import hmac
import secrets
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from flatout.errors import EnvironmentLacks

ADDRESS = "127.0.0.1"


class Loopback(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler], *, port: int = 0, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        try:
            super().__init__((ADDRESS, port), handler)
        except OSError as error:
            raise EnvironmentLacks(
                f"cannot listen on {ADDRESS}:{port}: {error.strerror}. Choose another one with --port, or remove it."
            ) from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def is_addressed(self, headers: Message) -> bool:
        """Whether the request names this server and comes from no other site's page."""
        names = {f"{name}:{self.port}" for name in (ADDRESS, "localhost")}
        origin = headers.get("Origin")
        foreign = origin is not None and origin not in {f"http://{name}" for name in names}
        return headers.get_all("Host") in [[name] for name in names] and not foreign

    def knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores the error: a client that goes away in the middle of an answer is not a problem."""
