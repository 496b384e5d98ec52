"""The OpenAI endpoint: streamed and whole answers, stop texts, refusals."""

from __future__ import annotations

import http.client
import json
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
    thread = threading.Thread(target=made.serve_forever, daemon=True)
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
