"""Requests to `flatout chat --serve`, whole and broken: each connection gets a status, and the server stays."""

from __future__ import annotations

import errno
import json
import random
import re
import socket
import threading
import time
from pathlib import Path

from tests import warm
from tests.attacks import Trial, hostile

WAIT_S = 60.0
_SERVERS: dict[Path, tuple[warm.Started, int, str]] = {}
_LOCK = threading.Lock()


def server(ground: Path) -> tuple[warm.Started, int, str]:
    """One for all trials; a new one if that has ended."""
    with _LOCK:
        found = _SERVERS.get(ground)
        if found is not None and found[0].poll() is None:
            return found
        environment = {"FLATOUT_CACHE": str(ground / "cache"), "OMP_NUM_THREADS": "1"}
        started = warm.Started("chat", "tuned", "--serve", cwd=ground, environment=environment)
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            said = started.so_far()
            if match := re.search(r"127\.0\.0\.1:(\d+).*\nAPI key\s+(\S+)", said):
                _SERVERS[ground] = (started, int(match[1]), match[2])
                return _SERVERS[ground]
            time.sleep(0.05)
        raise TimeoutError(f"the server did not start: {said!r}")


def stop() -> None:
    for started, _, _ in _SERVERS.values():
        if started.poll() is None:
            started.send_signal(2)
            started.wait(20)
    _SERVERS.clear()


def body(r: random.Random) -> bytes:
    asked = {
        "model": "x",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "temperature": 0.5,
        "seed": 1,
    }
    asked |= {"prompt": "hi", "stop": ["x"], "stream": r.random() < 0.3, "top_p": 0.9, "n": 1}
    match r.randrange(6):
        case 0:
            return hostile.spoiled(r, json.dumps(asked).encode())
        case 1:
            return hostile.dumped(hostile.value(r)).encode(errors="surrogatepass")
        case 2:
            key = r.choice(("temperature", "top_p", "max_tokens", "seed", "n", "top_k"))
            return json.dumps(asked | {key: 0}).replace(f'"{key}": 0', f'"{key}": {hostile.number(r)}').encode()
        case 3:
            turn = {"role": r.choice(("user", "assistant", "system", "x")), "content": hostile.value(r)}
            return hostile.dumped(asked | {"messages": [turn] * r.choice((1, 2, 300))}).encode(errors="surrogatepass")
        case 4:
            return json.dumps(
                asked | {"prompt": hostile.text(r), "stop": [hostile.text(r)] * r.choice((1, 500))}
            ).encode()
        case _:
            return hostile.dumped(hostile.spoiled_json(r, asked, times=3)).encode(errors="surrogatepass")


def request(r: random.Random, *, port: int, token: str) -> tuple[bytes, bool]:
    """The bytes of a request, and whether they are a whole one."""
    method = r.choice(("POST", "POST", "POST", "GET", "PUT", "OPTIONS", "HEAD", "", "G T", "\x16\x03\x01"))
    paths = (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/",
        "http://[/v1/models",
        "//",
        "*",
        "/v1/../x",
        "/%00",
    )
    path = r.choice(paths) if r.random() < 0.8 else hostile.text(r).replace("\n", "").replace(" ", "")[:3000]
    content = body(r)
    lengths = (str(len(content)), str(len(content)), "-1", "", "9" * 5000, "0", "1e3", "٣", "0x10", "5, 5", str(2**63))
    length = r.choice(lengths) if r.random() < 0.4 else str(len(content))
    host = r.choice(("evil.example", "", "[::1", "127.0.0.1:99999")) if r.random() < 0.15 else f"127.0.0.1:{port}"
    key = r.choice(("", "x", "é", "\x1b[2J")) if r.random() < 0.15 else token
    headers = [
        f"Host: {host}",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    ]
    if r.random() < 0.3:
        more = (
            "Transfer-Encoding: chunked",
            "Expect: 100-continue",
            "Content-Encoding: gzip",
            "X: " + "a" * 70_000,
            ": x",
            "x",
        )
        headers.append(
            r.choice((*more, *["Content-Length: 3"], "Connection: keep-alive", "Origin: http://evil.example"))
        )
    if r.random() < 0.1:
        headers *= 60
    version = r.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/x", ""))
    head = "\r\n".join([f"{method} {path} {version}", *headers, "", ""])
    sent = head.encode(errors="surrogatepass") + content
    whole = (
        bool(method) and length.isdecimal() and length.isascii() and len(length) < 10 and int(length) <= len(content)
    )
    whole = whole and len(sent) < 1 << 20  # an answer to more can be lost with what nobody read
    return sent, whole


def serving(t: Trial) -> None:
    r = t.random
    started, port, token = server(t.ground)
    for _ in range(4):
        sent, whole = request(r, port=port, token=token)
        t.commands.append(f"chat tuned --serve <- {sent[:400]!r} ({len(sent)} bytes)")
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)  # no more is coming, so that nothing is waited for
                while len(answer) < 1 << 20 and (part := connection.recv(65536)):
                    answer += part
        except TimeoutError:
            t.fault(f"no end of the answer after {WAIT_S:.0f} s")
            return
        except OSError as error:  # refused before all of it was read; the status is what counts
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                raise
        if whole and not re.match(rb"HTTP/1\.[01] [1-5]\d\d ", answer) and not answer.startswith((b"<!DOCTYPE", b"{")):
            t.fault(f"the connection was closed without a status: {answer[:100]!r} to {sent[:300]!r}")
        if b"Traceback" in answer:
            t.fault("a traceback in the answer")
        if started.poll() is not None:
            t.fault(f"the server ended: {started.poll()}")
            return
    said = started.said()
    if "Traceback" in said:
        t.fault(f"a traceback of the server: {said[-600:]}")
        stop()  # the next trial has its own
