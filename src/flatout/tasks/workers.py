"""Grades in processes that can be killed: untrusted text costs at most a second, and never the run.

One process per `Worker` builds the task once and forks a child for every request, which may have several completions.
Requests and replies are JSON lines; nothing is pickled. A completion that ends its child gets no reward, and a new
child grades the next one. A worker that does not work at all is an error, with the end of its stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from flatout.errors import EnvironmentLacks, RunFailed
from flatout.files import own_environment, own_python

TIMEOUT_S = 2.0
# The longest limit that a task may state for itself.
LONGEST_S = 3600.0
# Time to import computer algebra on a busy machine; only the first request waits for it.
START_S = 120.0
# A lost worker is restarted and the request repeated, up to this many attempts.
ATTEMPTS = 2
# The largest reply, and how much of a worker's stderr is reported.
REPLY_BYTES = 1 << 20
WORDS_BYTES = 2000

# Where the processes run: unset, on this machine; `ray`, where Ray places them, and what is needed to reach it.
GRADERS, RAY = "FLATOUT_GRADERS", ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")

# True in a forked child: there, expensive comparisons may run in the same process.
KILLABLE = False
# True in a worker process and in its children.
SERVING = False


class Killed:
    """Returned instead of a reply: the request took too long or too much memory, or crashed."""


KILLED = Killed()


class _Lost(Exception):
    """The worker died, did not answer, or sent an invalid reply."""


class Worker:
    """Answers requests, one at a time; may be called from any thread."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S, variables: Sequence[str] = ()) -> None:
        """`variables` are the names of environment variables that the process also gets."""
        self.timeout_s = timeout_s
        self._variables = tuple(variables)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._buffer = b""

    def call(self, operation: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The operation's result, or KILLED. Raises if the worker itself does not work."""
        (result,) = self.call_each(operation, [arguments], timeout_s=timeout_s)
        return result

    def call_each(
        self, operation: str, several: Sequence[Sequence[Any]], *, timeout_s: float | None = None
    ) -> list[Any]:
        """The result, or KILLED, for each list of arguments. The time limit is that of one."""
        within = self.timeout_s if timeout_s is None else timeout_s
        request = json.dumps({"op": operation, "several": several, "timeout_s": within}).encode() + b"\n"
        with self._lock:
            for attempt in range(ATTEMPTS):
                try:
                    replies = self._replies_to(request, count=len(several), timeout_s=within)
                    break
                except _Lost as error:
                    words = self.stderr_end()
                    self._stop()  # a late reply must not be taken for that of a later request
                    if attempt + 1 == ATTEMPTS:
                        raise RunFailed(f"the grading process does not work: {error}{words}") from None
                except BaseException:
                    self._stop()
                    raise
        for reply in replies:
            if "error" in reply:
                raise RunFailed(f"the grading process cannot grade: {reply['error']}")
        return [reply.get("result", KILLED) for reply in replies]

    def stderr_end(self) -> str:
        """The end of the process's stderr, to append to a sentence."""
        if self._stderr is None:
            return ""
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, end - WORDS_BYTES))
        said = self._stderr.read(WORDS_BYTES).decode(errors="replace").strip()
        return f". Its stderr ends with:\n{said}" if said else ""

    def close(self) -> None:
        with self._lock:
            self._stop()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop()

    def _replies_to(self, request: bytes, *, count: int, timeout_s: float) -> list[dict[str, Any]]:
        """One reply for each list of arguments, or a single error."""
        start_s = START_S if self._process is None else START_S / 4
        process = self._started()
        reply = _parsed(self._exchanged(process, request, within_s=count * timeout_s + start_s))
        match reply:
            case {"needs_s": int() | float() as needs_s} if 0 <= needs_s <= LONGEST_S:
                reply = _parsed(self._exchanged(process, b"", within_s=count * needs_s + START_S / 4))
        match reply:
            case {"error": _}:
                return [reply]
            case {"replies": [*replies]} if len(replies) == count and all(map(_is_reply, replies)):
                return replies
        raise _Lost("its reply has no result")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            try:
                # A file, not a pipe: nothing reads it meanwhile, and a full pipe would block the worker.
                self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
                on_ray = os.environ.get(GRADERS) == "ray"
                self._process = subprocess.Popen(
                    [*own_python("flatout.tasks.on_ray"), *self._variables]
                    if on_ray
                    else own_python("flatout.tasks.worker"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._stderr,
                    start_new_session=True,
                    env=own_environment((*self._variables, *RAY) if on_ray else self._variables),
                )
                assert self._process.stdin is not None
                os.set_blocking(self._process.stdin.fileno(), False)
            except OSError as error:
                raise EnvironmentLacks(f"a process for grading cannot be started: {error.strerror or error}") from None
        return self._process

    def _exchanged(self, process: subprocess.Popen[bytes], request: bytes, *, within_s: float) -> bytes:
        """Sends a request and returns the reply line, within this time."""
        assert process.stdin is not None
        assert process.stdout is not None
        into, out, end = process.stdin.fileno(), process.stdout.fileno(), time.monotonic() + within_s
        while b"\n" not in self._buffer:
            left = max(0.0, end - time.monotonic())
            readable, writable, _ = select.select([out], [into] if request else [], [], left)
            if not readable and not writable:
                raise _Lost(f"it did not answer within {within_s:g} s")
            if writable:
                try:
                    request = request[os.write(into, request) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    raise _Lost(_ended(process)) from None
            if readable:
                part = os.read(out, 1 << 16)
                if not part:
                    raise _Lost(_ended(process))
                self._buffer += part
                if len(self._buffer) > REPLY_BYTES:
                    raise _Lost(f"its reply has more than {REPLY_BYTES:,} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _stop(self) -> None:
        process, self._process, self._buffer = self._process, None, b""
        stderr, self._stderr = self._stderr, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (stderr, *((process.stdin, process.stdout) if process is not None else ())):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        raise _Lost("its reply is not JSON") from None
    if not isinstance(reply, dict):
        raise _Lost("its reply has no result")
    return reply


def _is_reply(value: Any) -> bool:
    return isinstance(value, dict) and bool(value.keys() & {"result", "error", "killed"})


def _ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(START_S)
    except subprocess.TimeoutExpired:
        return "it closed its output"
    return f"it ended with exit code {code}" if code >= 0 else f"it was killed by signal {-code}"


_shared: Worker | None = None
_shared_lock = threading.Lock()


def call(operation: str, *arguments: Any) -> Any:
    """Calls an operation of a worker that is shared by all callers without their own."""
    global _shared
    with _shared_lock:
        _shared = _shared or Worker()
    return _shared.call(operation, *arguments)
