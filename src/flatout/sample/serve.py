"""A model behind the endpoints of OpenAI's API, for the tools people have: `flatout chat MODEL --serve`.

It listens on 127.0.0.1, and answers only to its own host name and with the token that it printed. One answer at a time
is generated. Paths: `/v1/models`, `/v1/chat/completions` and `/v1/completions`, streamed or whole.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from flatout.data.tokenizer import Tokenizer
from flatout.errors import UsageError, first_line
from flatout.loopback import ADDRESS, Loopback
from flatout.sample.request import Sampler, Sampling
from flatout.sample.text import answer_pieces, pieces, prompt_ids, stop_texts

MOST_BYTES = 1 << 21  # of a request
MOST_STOPS, MOST_REAL = 16, 1e6
# A client that is still sending when it is refused gets so much time and data to finish, and to read why.
LINGER_S, LINGER_BYTES = 2.0, 1 << 26
ROLES = ("system", "user", "assistant", "developer")


@dataclass
class Served:
    """A model that answers; `sampling` has the values of a request that names none."""

    name: str
    sampler: Sampler
    tokenizer: Tokenizer
    sampling: Sampling
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(kw_only=True)
class Answer:
    """An answer while it is generated. `reason` and the counts are known at its end."""

    prompt: list[int]
    sampling: Sampling
    stops: tuple[str, ...]
    chat: bool = True
    tokens: int = 0
    reason: str = "stop"

    def text(self, served: Served) -> Iterator[str]:
        """The pieces, up to a stop text, of which nothing is shown."""
        held, longest = "", max(map(len, self.stops), default=1)
        with served.lock:
            read = answer_pieces if self.chat else pieces
            for piece in read(served.tokenizer, self._ids(served)):
                held += piece
                ends = [at for stop in self.stops if (at := held.find(stop)) >= 0]
                if ends:
                    self.reason = "stop"
                    if min(ends):
                        yield held[: min(ends)]
                    return
                safe = len(held) - (longest - 1)  # the rest may be the beginning of a stop text
                if safe > 0:
                    yield held[:safe]
                    held = held[safe:]
        if held:
            yield held

    def _ids(self, served: Served) -> Iterator[int]:
        for token in served.sampler.stream(self.prompt, sampling=self.sampling):
            self.tokens += 1
            if token in self.sampling.stop_ids:
                return
            yield token
        self.reason = "length"

    def usage(self) -> dict[str, int]:
        asked = len(self.prompt)
        return {"prompt_tokens": asked, "completion_tokens": self.tokens, "total_tokens": asked + self.tokens}


class Server(Loopback):
    def __init__(self, served: Served, *, port: int = 0, token: str | None = None) -> None:
        self.served = served
        super().__init__(_Handler, port=port, token=token)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "flatout", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    default_request_version = "HTTP/1.0"  # a request line that cannot be read gets a status line, too

    def do_GET(self) -> None:
        self._answered(self._get)

    def do_POST(self) -> None:
        self._answered(self._post)

    def _answered(self, work: Callable[[str], None]) -> None:
        """Works on the path of a request that may be answered. Whatever goes wrong has its status line."""
        self._begun = False
        try:
            self._check_caller()
            work(self._path())
        except _Refused as error:
            self._fail(error.status, str(error))
        except UsageError as error:
            self._fail(HTTPStatus.BAD_REQUEST, str(error))
        except ConnectionError:  # the client has gone
            self.close_connection = True
        except Exception as error:
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, f"the answer failed: {first_line(error)[:200]}")

    def _get(self, path: str) -> None:
        if path != "/v1/models":
            raise _Refused(HTTPStatus.NOT_FOUND, f"{path:.200} is not served here: /v1/models, {', '.join(ANSWERS)}")
        model = {"id": self.server.served.name, "object": "model", "created": 0, "owned_by": "flatout"}
        self._json(HTTPStatus.OK, {"object": "list", "data": [model]})

    def _post(self, path: str) -> None:
        if path not in ANSWERS:
            raise _Refused(HTTPStatus.NOT_FOUND, f"{path:.200} is not served here: {', '.join(ANSWERS)}")
        body = self._body()
        answer = ANSWERS[path](body, self.server.served)
        shape = _Shape(chat=path.endswith("chat/completions"), model=self.server.served.name)
        if _flag(body, "stream"):
            asked = body.get("stream_options")
            self._stream(answer, shape, usage=isinstance(asked, dict) and bool(asked.get("include_usage")))
        else:
            text = "".join(answer.text(self.server.served))
            self._json(HTTPStatus.OK, shape.whole(text, answer))

    def _stream(self, answer: Answer, shape: _Shape, *, usage: bool) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = self._begun = True
        self._event(shape.first())
        for piece in answer.text(self.server.served):
            self._event(shape.part(piece))
        self._event(shape.last(answer))
        if usage:
            self._event(shape.usage(answer))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: Mapping[str, Any] | None) -> None:
        if value is not None:
            self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
            self.wfile.flush()

    def _path(self) -> str:
        try:
            return urlsplit(self.path).path
        except ValueError:
            raise UsageError(f"{self.path:.200} is no path") from None

    def _body(self) -> Mapping[str, Any]:
        length = self._length()
        data = self.rfile.read(length)
        try:
            found = json.loads(data)
            json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate is no text
        except (ValueError, RecursionError) as error:
            why = ": it has invalid Unicode" if isinstance(error, UnicodeEncodeError) else ""
            raise UsageError(f"the request is not JSON that can be read{why}") from None
        if not isinstance(found, dict):
            raise UsageError("the request must be a JSON object")
        return found

    def _length(self) -> int:
        given = self.headers.get_all("Content-Length") or []
        digits = given[0].strip() if len(given) == 1 and "Transfer-Encoding" not in self.headers else ""
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 10 and int(digits) <= MOST_BYTES):
            raise UsageError(f"a request needs one Content-Length, of at most {MOST_BYTES} bytes")
        return int(digits)

    def _check_caller(self) -> None:
        """Refuses a wrong host name (DNS rebinding), another site's page, and who has no token."""
        if not self.server.is_addressed(self.headers):
            raise _Refused(HTTPStatus.FORBIDDEN, "this server answers only programs on this machine")
        scheme, _, given = (self.headers.get("Authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not self.server.knows(given.strip()):
            raise _Refused(HTTPStatus.UNAUTHORIZED, "the API key is missing or wrong: use the one that flatout printed")

    def _fail(self, status: HTTPStatus, words: str) -> None:
        """The error as JSON, or as the last event of a stream. The rest of the request is not read as another one."""
        error = {"error": {"message": words, "type": "invalid_request_error", "code": int(status)}}
        self.close_connection = True
        with suppress(OSError):  # the client has gone
            if self._begun:
                self._event(error)
                return
            self._json(status, error)
            self._linger()

    def _linger(self) -> None:
        """Reads what is still sent: closing at once would take the answer back."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(LINGER_S)
        end, left = time.monotonic() + LINGER_S, LINGER_BYTES
        while left > 0 and time.monotonic() < end and (part := self.connection.recv(1 << 16)):
            left -= len(part)

    def _json(self, status: HTTPStatus, value: Mapping[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: requests are the user's own."""


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


class _Shape:
    """The JSON of an answer, as OpenAI's API has it."""

    def __init__(self, *, chat: bool, model: str) -> None:
        self._chat, kind = chat, "chat.completion" if chat else "text_completion"
        self._head = {"id": f"flatout-{secrets.token_hex(8)}", "created": int(time.time()), "model": model}
        self._kinds = (kind, f"{kind}.chunk" if chat else kind)

    def whole(self, text: str, answer: Answer) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": answer.reason}
        return {**self._head, "object": self._kinds[0], "choices": [choice], "usage": answer.usage()}

    def first(self) -> dict[str, Any] | None:
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self._chat else None

    def part(self, text: str) -> dict[str, Any]:
        return self._chunk({"delta": {"content": text}} if self._chat else {"text": text}, None)

    def last(self, answer: Answer) -> dict[str, Any]:
        return self._chunk({"delta": {}} if self._chat else {"text": ""}, answer.reason)

    def usage(self, answer: Answer) -> dict[str, Any]:
        return {**self._head, "object": self._kinds[1], "choices": [], "usage": answer.usage()}

    def _chunk(self, said: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": self._kinds[1], "choices": [choice]}


def _of_messages(body: Mapping[str, Any], served: Served) -> Answer:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise UsageError("messages must be a list with at least one message")
    messages = [_message(one) for one in given]
    return _answer(body, served, prompt_ids(served.tokenizer, messages), stops=stop_texts(served.tokenizer))


def _of_prompt(body: Mapping[str, Any], served: Served) -> Answer:
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise UsageError("prompt must be one text")
    ids = [*served.tokenizer.begin_ids, *served.tokenizer.encode_batch([prompt])[0]]
    return replace(_answer(body, served, ids, stops=()), chat=False)


ANSWERS: Mapping[str, Callable[[Mapping[str, Any], Served], Answer]] = {
    "/v1/chat/completions": _of_messages,
    "/v1/completions": _of_prompt,
}


def _message(one: Any) -> dict[str, str]:
    role = one.get("role") if isinstance(one, dict) else None
    if role not in ROLES:
        raise UsageError(f"a message needs a role of {', '.join(ROLES)}, not {role!r:.40}")
    content = one.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise UsageError("the parts of a message must be text: this model reads no pictures or sounds")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UsageError("the content of a message must be text")
    return {"role": "system" if role == "developer" else role, "content": content}


def _answer(body: Mapping[str, Any], served: Served, ids: list[int], *, stops: Sequence[str]) -> Answer:
    if body.get("n") not in (None, 1):
        raise UsageError("n must be 1: one answer at a time")
    own = served.sampling
    room = served.sampler.window - len(ids)
    if room < 1:
        raise UsageError(f"the prompt has {len(ids)} tokens, and the model's window only {served.sampler.window}")
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    most = own.max_tokens if most is None else most
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise UsageError(f"max_tokens is {most!r:.40}, and must be a whole number from 1 on")
    asked = body.get("stop")
    asked = [] if asked is None else [asked] if isinstance(asked, str) else asked
    if not isinstance(asked, list) or not all(isinstance(one, str) and one for one in asked):
        raise UsageError("stop must be a text or a list of texts")
    if len(asked) > MOST_STOPS:
        raise UsageError(f"stop has {len(asked)} texts; at most {MOST_STOPS} are read")
    sampling = replace(
        own,
        max_tokens=min(most, room),
        temperature=_real(body, "temperature", own.temperature),
        top_p=_real(body, "top_p", own.top_p),
        seed=_seed(body, own.seed),
    )
    return Answer(prompt=ids, sampling=sampling, stops=(*stops, *asked))


def _real(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MOST_REAL:
        raise UsageError(f"{name} is {value!r:.40}, and must be a number")
    return float(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r:.40}, and must be true or false")
    return bool(value)


def _seed(body: Mapping[str, Any], default: int) -> int:
    """The request's seed; without one, another for each request, as a repeated question is asked for another answer."""
    value = body.get("seed")
    if value is None:
        return secrets.randbits(31) if default == 0 else default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise UsageError(f"seed is {value!r:.40}, and must be a whole number from 0 on")
    return value
