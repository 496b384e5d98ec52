"""The trusted side of the sandbox: starts it, hands it programs, and judges what comes back as data.

A verdict is made here, or by the tests of a problem's author, which run in a sandbox of their own. Nothing that a
program prints, returns, raises or does to its own process decides it, except by being the right answer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.errors import EnvironmentLacks, RunFailed
from flatout.tasks.sandbox import agent

START_S = 120.0  # on a busy machine
TOLERANCE = 1e-6
WAY_OUT = (
    "code is run only inside a sandbox of user namespaces, Landlock and seccomp: use Linux 5.13 or later on x86-64 or "
    "arm64, allow user namespaces (user.max_user_namespaces above 0, kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container also a seccomp profile that allows unshare and mount), or choose another task"
)
# What a run prints if it is closed; each line after that is a hole.
_PROBE = """
import os, socket
def probed(name, function):
    try:
        function()
    except OSError:
        return
    print(name)
probed("files can be read", lambda: os.listdir("/etc"))
probed("files can be written", lambda: open("/written", "w"))
probed("sockets can be opened", socket.socket)
probed("processes can be started", os.fork)
probed("signals can be sent", lambda: os.kill(os.getpid(), 0))
print("closed")
"""


class Stopped(Exception):
    """A run ended, took too long, or sent what is no message."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the judged function, and the value it must return."""

    args: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    value: Any


class Sandbox:
    """A started sandbox. Its runs share nothing, and forked children of this process may start runs too."""

    def __init__(self) -> None:
        if platform.system() != "Linux":
            raise EnvironmentLacks(f"this machine lacks Linux; {WAY_OUT}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The same order of sets every time. The library path finds Python's own library on some machines.
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-s", "-S", "-P", "-B", agent.__file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    cwd="/",
                    env={"PYTHONHASHSEED": "0"} | kept,
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvironmentLacks(f"the sandbox cannot be started: {error.strerror or error}") from None
        self._control = ours
        ours.settimeout(START_S)
        try:
            said = ours.recv(1000).decode(errors="replace")
        except OSError:
            said = f"an answer within {START_S:g} s"
        if said != "ready":
            self.close()
            raise EnvironmentLacks(
                f"this machine lacks {said.removeprefix('lacks ') or 'a Python that starts'}; {WAY_OUT}"
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self._control.close()  # its end ends every run
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- verdicts ------------------------------------------------------------------------------------------

    def output(self, program: str, stdin: str, *, end: float) -> str:
        """What the program prints before it ends. `end` is a time of time.monotonic()."""
        with self._run(end, mode="output", program=program, stdin=stdin) as run:
            return run.rest().decode(errors="replace")

    def returns(self, program: str, name: str, calls: Sequence[Call], *, end: float) -> bool:
        """Whether every call returns its value."""
        with self._run(end, mode="calls", program=program) as run:
            for call in calls:
                run.send(agent.call(name, call.args, call.named))
                if not _returned(run.receive(), call.value):
                    return False
        return True

    def passes(self, program: str, name: str, tests: str, *, before: str = "", end: float) -> bool:
        """Whether the tests pass, in a run of their own that has `before` and calls `name` of the program's run."""
        with (
            self._run(end, mode="calls", program=program) as judged,
            self._run(end, mode="tests", program=tests, before=before, name=name) as testing,
        ):
            while "passed" not in (message := testing.receive()):
                judged.send(message)
                testing.send(judged.receive())
        return message["passed"] is True

    @contextlib.contextmanager
    def _run(self, end: float, **request: Any) -> Iterator[_Run]:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                try:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                except OSError as error:
                    raise RunFailed(f"the sandbox has ended: {error.strerror or error}") from None
            run = _Run(ours, end=time.monotonic() + START_S)
            try:
                run.send({"cpu_s": max(1, math.ceil(end - time.monotonic())), **request})
                first = run.receive()
            except Stopped as error:
                raise RunFailed(f"the sandbox cannot start a run: {error}") from None
            if "lacks" in first:
                raise RunFailed(f"the sandbox cannot start a run: it lacks {first['lacks']}")
            run.end = end
            yield run


class _Run:
    """A connection to a run. Closing it ends the run."""

    def __init__(self, connection: socket.socket, *, end: float) -> None:
        self.connection, self.end = connection, end

    def send(self, message: dict[str, Any]) -> None:
        self._until_end()
        try:
            self.connection.sendall(agent.framed(message))
        except (OSError, ValueError) as error:
            raise Stopped(str(error)) from None

    def receive(self) -> dict[str, Any]:
        (length,) = struct.unpack(">I", self._read(4))
        if length > agent.FRAME_BYTES:
            raise Stopped("it sent a message that is too long")
        try:
            message = json.loads(self._read(length))
        except (ValueError, RecursionError):
            raise Stopped("it sent a message that is not JSON") from None
        if not isinstance(message, dict):
            raise Stopped("it sent a message that is not an object")
        return message

    def rest(self) -> bytes:
        data = bytearray()
        while part := self._part(1 << 16):
            data += part
            if len(data) > agent.FRAME_BYTES:
                raise Stopped("it printed too much")
        return bytes(data)

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            if not (part := self._part(length - len(data))):
                raise Stopped("it ended")
            data += part
        return bytes(data)

    def _part(self, most: int) -> bytes:
        self._until_end()
        try:
            return self.connection.recv(min(most, 1 << 20))
        except OSError as error:
            raise Stopped(str(error)) from None

    def _until_end(self) -> None:
        if (left := self.end - time.monotonic()) <= 0:
            raise Stopped("it took too long")
        self.connection.settimeout(left)


def _returned(reply: dict[str, Any], value: Any) -> bool:
    try:
        return "value" in reply and bool(agent.decode(reply["value"]) == value)
    except (ValueError, TypeError, RecursionError):  # it is not data
        return False


def same_output(got: str, want: str) -> bool:
    """Line by line, without white space at the ends; numbers within 1e-6, whole numbers exactly."""
    lines, wanted = ([line.split() for line in text.strip().split("\n")] for text in (got, want))
    return len(lines) == len(wanted) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(lines, wanted, strict=True)
    )


def _same_word(got: str, want: str) -> bool:
    if got == want:
        return True
    try:
        a, b = float(got), float(want)
    except ValueError:
        return False
    whole = all(word.lstrip("+-").isdecimal() for word in (got, want))
    return a == b if whole and max(abs(a), abs(b)) < 2**53 else not whole and abs(a - b) <= TOLERANCE * max(1.0, abs(b))


# -- before training, and for every grading process ---------------------------------------------------------

_shared: Sandbox | None = None


def check() -> None:
    """Raises EnvironmentLacks if this machine cannot close a sandbox, or if a program in it finds it open."""
    with Sandbox() as sandbox:
        try:
            said = sandbox.output(_PROBE, "", end=time.monotonic() + START_S)
        except (Stopped, RunFailed) as error:
            raise EnvironmentLacks(f"the sandbox does not work on this machine: {error}; {WAY_OUT}") from None
    if said != "closed\n":
        raise EnvironmentLacks(f"the sandbox is open on this machine: {said.strip()[:300]!r}; {WAY_OUT}")


def shared() -> Sandbox:
    """The sandbox of this process, started at the first call. Children that are forked later use it too."""
    global _shared
    if _shared is None:
        _shared = Sandbox()
    return _shared


def prepare() -> None:
    """Starts the shared sandbox, again if it has ended. A parent calls it before it forks."""
    global _shared
    if _shared is not None and not _shared.alive:
        _shared.close()
        _shared = None
    shared()
