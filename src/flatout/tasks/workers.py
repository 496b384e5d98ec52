"""Grading in processes that can be killed: hostile text costs a second at most, and never the run.

One process per `Worker` builds what is needed once and forks a child for every request, so nothing that a
completion did to its child is there for the next one. Requests and replies are JSON lines; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

TIMEOUT_S = 2.0
# Importing computer algebra on a busy machine; only the first request waits for it.
START_S = 120.0

# True in a forked child: there, heavy comparison may run in place.
KILLABLE = False


class Killed:
    """Instead of a reply: the request took too long, too much memory, or crashed."""


KILLED = Killed()


class Worker:
    """Answers requests, one at a time; may be called from any thread."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def call(self, operation: str, *arguments: Any) -> Any:
        """The operation's result, or KILLED."""
        request = {"op": operation, "args": arguments, "timeout_s": self.timeout_s}
        with self._lock:
            fresh = self._process is None
            try:
                process = self._started()
                self._send(process, json.dumps(request).encode() + b"\n")
                reply = json.loads(self._line(process, START_S if fresh else START_S / 4))
            except BaseException as error:  # a reply may still be on its way: it belongs to no later request
                self._stop()
                if isinstance(error, OSError | ValueError | TimeoutError):
                    return KILLED
                raise
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return KILLED if reply.get("killed") else reply["result"]

    def close(self) -> None:
        with self._lock:
            self._stop()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flatout.tasks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=_environment(),
            )
        return self._process

    def _send(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(data)
        process.stdin.flush()

    def _line(self, process: subprocess.Popen[bytes], within_s: float) -> bytes:
        assert process.stdout is not None
        end = time.monotonic() + self.timeout_s + within_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                raise TimeoutError
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _stop(self) -> None:
        process, self._process, self._buffer = self._process, None, b""
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_shared: Worker | None = None
_shared_lock = threading.Lock()


def call(operation: str, *arguments: Any) -> Any:
    """By the one worker that whoever has none of their own shares."""
    global _shared
    with _shared_lock:
        _shared = _shared or Worker()
    return _shared.call(operation, *arguments)


def _environment() -> dict[str, str]:
    """What Python needs to find this package, and nothing secret."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
