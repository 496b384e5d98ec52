"""The live page: this machine only, its own name only, and only for who has the token."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.waiting import HANG_S

from flatout.errors import EnvironmentLacks
from flatout.insight.machine import sampling_machine
from flatout.insight.web import Server, Site
from flatout.loopback import ADDRESS
from flatout.record import Run


@pytest.fixture
def server(h200: Run) -> Iterator[Server]:
    with sampling_machine(disk=h200.path, interval_s=0.25) as sampler:
        found = Server(Site([h200], sampler))
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        found.server_close()
        thread.join()


def ask(server: Server, path: str | None = None, *, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(ADDRESS, server.port, timeout=HANG_S)
    connection.request(method, path if path is not None else f"/?token={server.token}", headers=headers)
    answer = connection.getresponse()
    answer.body = answer.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_who_has_the_token_sees_the_report(server: Server):
    answer = ask(server)
    assert answer.status == 200
    assert "4 of 4 criteria met." in answer.body
    assert "This machine, now" in answer.body
    fresh = ask(server, f"/content?token={server.token}")
    assert fresh.status == 200
    assert "<script" not in fresh.body


@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?token=%00", "?other=1", "?token=%C3%A9"])
@pytest.mark.parametrize("path", ["/", "/content", "/nothing"])
def test_without_the_token_there_is_nothing(server: Server, path: str, query: str):
    answer = ask(server, path + query)
    assert (answer.status, answer.body) == (401, "Unauthorized")


def test_a_token_is_long_and_never_the_same(server: Server, h200: Run):
    with sampling_machine(disk=h200.path, interval_s=1) as sampler:
        other = Server(Site([h200], sampler))
        other.server_close()
    assert other.token != server.token
    assert len(server.token) >= 32


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1.evil.example:{port}", ""]
)
def test_a_foreign_name_is_refused_even_with_the_token(server: Server, host: str):
    answer = ask(server, Host=host.format(port=server.port))
    assert (answer.status, answer.body) == (403, "Forbidden")


def test_two_names_are_refused(server: Server):
    request = (
        f"GET /?token={server.token} HTTP/1.1\r\nHost: {ADDRESS}:{server.port}\r\nHost: evil.example\r\n"
        "Connection: close\r\n\r\n"
    )
    with socket.create_connection((ADDRESS, server.port), timeout=HANG_S) as connection:
        connection.sendall(request.encode())
        assert b" 403 " in connection.recv(100)


def test_its_own_name_may_be_localhost(server: Server):
    assert ask(server, Host=f"localhost:{server.port}").status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1"])
def test_another_sites_page_is_refused(server: Server, origin: str):
    assert ask(server, Origin=origin).status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(server: Server, method: str):
    assert ask(server, method=method).status == 405
    assert ask(server, "/", method=method).status == 401
    assert ask(server, method=method, Host="evil.example").status == 403


def test_nothing_else_is_served(server: Server):
    for path in ("/../../etc/passwd", "/config.yaml", "//evil.example/"):
        assert ask(server, f"{path}?token={server.token}").status in (403, 404)


def test_every_answer_forbids_what_it_can(server: Server):
    for path in (None, "/", "/nothing"):
        answer = ask(server, path)
        policy = dict(rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["connect-src"] == "'self'"
        for kind in ("style-src", "script-src"):
            assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy[kind])
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert answer.headers["Server"].strip() == "flatout"


def test_the_page_holds_one_script_and_no_foreign_address(server: Server):
    tags: list[tuple[str, dict[str, str | None]]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append((tag, dict(attrs)))

    text = ask(server).body
    Reader().feed(text)
    assert [attributes for tag, attributes in tags if tag == "script"] == [{}]
    assert not [key for _, attributes in tags for key in attributes if key.startswith("on") or key in ("src", "style")]
    assert not re.search(r"https?://", text)
    assert server.token not in text


def test_it_listens_on_this_machine_only(server: Server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url.startswith("http://127.0.0.1:")


def test_a_port_in_use_says_what_to_do(server: Server, h200: Run):
    with (
        sampling_machine(disk=h200.path, interval_s=1) as sampler,
        pytest.raises(EnvironmentLacks, match="Choose another"),
    ):
        Server(Site([h200], sampler), port=server.port)


def test_nothing_is_written_to_the_log(server: Server, capfd: pytest.CaptureFixture[str]):
    ask(server)
    ask(server, "/?token=wrong")
    assert capfd.readouterr() == ("", "")


def test_many_looks_read_the_folder_once(server: Server, monkeypatch: pytest.MonkeyPatch):
    from flatout.insight import web

    told = []
    tell = web.tell
    monkeypatch.setattr(web, "tell", lambda run: told.append(run) or tell(run))
    monkeypatch.setattr(web, "FRESH_S", 3600.0)
    server.site._made_at = -3600.0
    for _ in range(5):
        ask(server)
    assert len(told) == 1


def test_the_command_says_its_address_serves_it_and_leaves_cleanly(h200: Run):
    process = subprocess.Popen(
        [sys.executable, "-m", "flatout", "watch", str(h200.path), "--web"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "40"},
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    with urllib.request.urlopen(address, timeout=HANG_S) as answer:
        assert b"4 of 4 criteria met." in answer.read()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, "")


def test_without_a_run_the_page_is_the_machine(tmp_path: Path):
    with sampling_machine(disk=tmp_path, interval_s=0.25) as sampler:
        text = Site([], sampler).document()
    assert text.count("<h1") == 1
    assert "This machine, now" in text
