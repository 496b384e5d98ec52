"""The OpenAI endpoint: streamed and whole answers, stop texts, refusals."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from flatout.data.tokenizer import ByteTokenizer
from flatout.sample import Sampling
from flatout.sample.serve import Served, Server


class Chatty(ByteTokenizer):
    has_template = True  # type: ignore[assignment]

    def render_ids(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        return list("".join(f"[{m['role']}]{m['content']}" for m in messages).encode())


class Says:
    """Answers with the end of its prompt in capitals, or with one text, and ends with the stop token."""

    window = 200

    def __init__(self) -> None:
        self.seen: list[Sampling] = []
        self.text: str | None = None

    def stream(self, prompt: Sequence[int], *, sampling: Sampling) -> Iterator[int]:
        self.seen.append(sampling)
        text = self.text or ByteTokenizer().decode(prompt)[-5:].upper()
        for at, byte in enumerate(text.encode()):
            if at == sampling.max_tokens:
                return
            yield byte
        yield 256


@pytest.fixture
def server() -> Iterator[Server]:
    sampling = Sampling(max_tokens=50, temperature=0.7, stop_ids=frozenset({256}))
    made = Server(Served("tiny", Says(), Chatty(), sampling))  # type: ignore[arg-type]
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def asked(server: Server, path: str, body: Any = None, *, token: str | None = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    sent = {"Authorization": f"Bearer {server.token if token is None else token}", **headers}
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    connection.request("GET" if data is None else "POST", path, body=data, headers=sent)
    reply = connection.getresponse()
    found = reply.status, reply.read().decode()
    connection.close()
    return found


CHAT = "/v1/chat/completions"
HELLO = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}


def test_a_whole_answer(server: Server) -> None:
    status, text = asked(server, CHAT, {**HELLO, "temperature": 0, "seed": 5, "top_p": 0.5})
    found = json.loads(text)
    assert status == 200
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "HELLO"}
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"] == {"prompt_tokens": 11, "completion_tokens": 6, "total_tokens": 17}
    used = server.served.sampler.seen[-1]  # type: ignore[attr-defined]
    assert (used.temperature, used.top_p, used.seed, used.max_tokens) == (0.0, 0.5, 5, 50)
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    same = asked(server, CHAT, {"messages": [{"role": "user", "content": parts}]})[1]
    assert json.loads(same)["choices"][0]["message"]["content"] == "HELLO"
    plain = json.loads(asked(server, "/v1/completions", {"prompt": "a world", "max_tokens": 3})[1])
    assert (plain["choices"][0]["text"], plain["choices"][0]["finish_reason"]) == ("WOR", "length")


def test_a_streamed_answer_and_stop_texts(server: Server) -> None:
    server.served.sampler.text = "one two STOP three"  # type: ignore[attr-defined]
    body = {**HELLO, "stream": True, "stop": ["STOP"], "stream_options": {"include_usage": True}}
    status, text = asked(server, CHAT, body)
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert status == 200
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]]
    assert "".join(said) == "one two "
    assert len([piece for piece in said if piece]) > 3, "piece by piece"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["prompt_tokens"] == 11
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_only_this_machine_with_the_token(server: Server) -> None:
    assert asked(server, "/v1/models")[0] == 200
    assert json.loads(asked(server, "/v1/models")[1])["data"][0]["id"] == "tiny"
    for status, headers in (
        (401, {"Authorization": "Bearer wrong"}),
        (401, {"Authorization": ""}),
        (403, {"Host": "evil.example"}),
        (403, {"Origin": "http://evil.example"}),
    ):
        assert asked(server, CHAT, HELLO, **headers)[0] == status
        assert asked(server, "/v1/models", **headers)[0] == status
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        ([], "must be a JSON object"),
        ({}, "messages must be a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "a message needs a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be text"),
        ({**HELLO, "temperature": "hot"}, "temperature is 'hot'"),
        ({**HELLO, "temperature": -1}, "temperature -1"),
        ({**HELLO, "max_tokens": 0}, "max_tokens is 0"),
        ({**HELLO, "stop": [3]}, "stop must be"),
        ({**HELLO, "n": 2}, "n must be 1"),
        ({**HELLO, "seed": -1}, "seed is -1"),
        ({**HELLO, "seed": 10**400}, "seed is 1"),
        ({**HELLO, "temperature": 10**400}, "temperature is 1"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature is nan"),
        (b'{"messages": [{"role": "user", "content": "x"}], "top_p": 1e999}', "top_p is inf"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 1' + b"0" * 5000 + b"}", "not JSON"),
        ({"messages": [{"role": "user", "content": "a \ud800 b"}]}, "invalid Unicode"),
        ({**HELLO, "stop": ["\udfff"]}, "invalid Unicode"),
        (b'{"messages": ' + b"[" * 100_000, "not JSON"),
        (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", "a message needs a role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "a message needs a role"),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "must be text"),
        ({"messages": {"role": "user"}}, "messages must be a list"),
        ({**HELLO, "stream": "yes"}, "stream is 'yes'"),
        ({**HELLO, "stop": ["x"] * 1000}, "at most 16"),
        ({**HELLO, "max_tokens": 1.5}, "max_tokens is 1.5"),
        (b"\xff\xfe", "not JSON"),
        (b"", "not JSON"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "the model's window only 200"),
    ],
)
def test_mistakes_are_told(server: Server, body: Any, words: str) -> None:
    status, text = asked(server, CHAT, body)
    assert status == 400
    assert words in json.loads(text)["error"]["message"]


def test_other_paths(server: Server) -> None:
    assert asked(server, "/v1/embeddings", HELLO)[0] == 404
    assert asked(server, "/")[0] == 404


def raw(server: Server, data: bytes) -> bytes:
    """The answer to bytes, which end here."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return answer


def request_head(server: Server, line: str, *headers: str) -> bytes:
    own = [f"Host: 127.0.0.1:{server.port}", f"Authorization: Bearer {server.token}"]
    return "\r\n".join([line, *own, *headers, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    ("line", "headers", "body"),
    [
        ("GET http://[/v1/models HTTP/1.1", [], b""),
        ("GET http://[::1/v1/models", [], b""),
        ("GARBAGE", [], b""),
        ("GET / HTTP/x.y", [], b""),
        (f"POST {CHAT} HTTP/1.1", ["Content-Length: " + "9" * 5000], b"{}"),
        (f"POST {CHAT} HTTP/1.1", ["Content-Length: -1"], b"{}"),
        (f"POST {CHAT} HTTP/1.1", ["Content-Length: \u00b2"], b"{}"),
        (f"POST {CHAT} HTTP/1.1", ["Content-Length: 2", "Content-Length: 3"], b"{}"),
        (f"POST {CHAT} HTTP/1.1", ["Content-Length: 3000000"], b"x" * 3_000_000),
        (f"POST {CHAT} HTTP/1.1", ["Content-Length: 99"], b"{"),
        (f"POST {CHAT} HTTP/1.1", ["Transfer-Encoding: chunked"], b"2\r\n{}\r\n0\r\n\r\n"),
        (f"POST {CHAT} HTTP/1.1", ["Transfer-Encoding: chunked", "Content-Length: 2"], b"{}"),
        (f"POST {CHAT} HTTP/1.1", [], b""),
    ],
)
def test_what_is_no_request_gets_a_400(server: Server, line: str, headers: list[str], body: bytes) -> None:
    answer = raw(server, request_head(server, line, *headers) + body)
    assert answer.split(b"\r\n")[0].split(b" ")[1] == b"400", answer[:200]
    assert asked(server, "/v1/models")[0] == 200


def test_a_refused_body_is_not_read_as_a_request(server: Server) -> None:
    inner = request_head(server, "GET /v1/models HTTP/1.1")
    head = request_head(server, "POST /v1/embeddings HTTP/1.1", f"Content-Length: {len(inner)}")
    assert raw(server, head + inner).count(b"HTTP/1.1 ") == 1


def test_a_sampler_that_fails_is_an_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(prompt: Sequence[int], *, sampling: Sampling) -> Iterator[int]:
        yield 65
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.served.sampler, "stream", fails)
    status, text = asked(server, CHAT, HELLO)
    assert (status, json.loads(text)["error"]["message"]) == (500, "the answer failed: out of memory")
    status, text = asked(server, CHAT, {**HELLO, "stream": True})
    assert status == 200
    assert "out of memory" in json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["message"]


def test_damaged_requests_always_get_a_status_line(server: Server) -> None:
    """A good request with bytes exchanged, left out and repeated."""
    body = json.dumps({**HELLO, "temperature": 0.5, "stop": ["x"], "seed": 3}).encode()
    good = request_head(server, f"POST {CHAT} HTTP/1.1", f"Content-Length: {len(body)}") + body
    draws = random.Random(0)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draws.randint(1, 4)):
            at, many = draws.randrange(len(data)), draws.choice([1, 1, 2, 9])
            new = draws.choice([b"", bytes(draws.choices(range(256), k=many)), bytes(data[at : at + 20]) * many])
            data[at : at + many] = new
        if bytes(data).strip(b"\r\n"):
            assert raw(server, bytes(data) + b"\r\n\r\n").startswith(b"HTTP/1."), bytes(data)
    assert asked(server, CHAT, HELLO)[0] == 200
