"""The processes of a search: each runs one command, and ends with all its descendants when the search does.

Importing torch takes as long as a short training. So on a GPU the next process does it while the present one trains,
and then waits for its arguments.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.insight import supervisor

GRACE_S = 10.0
# Cores beyond which imports do not slow down a training.
CORES = 4
_WAITING = """
import json, os, sys, time
began = time.time()
import flatout.cli, flatout.recipes.loop
ready = time.time()
line = sys.stdin.readline()
if line:
    told = json.loads(line)
    with open(told["times"], "w") as file:
        json.dump([ready - began, ready], file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["flatout", *told["arguments"]]
    exec(told["code"])
    flatout.cli.main()
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    returncode: int
    said: str  # the end of what it wrote on stderr
    timed_out: bool
    oom_killed: bool  # the system killed a process meanwhile because memory ran out


class Process:
    """A command under a supervisor, which stops everything that still runs when it is told to, or when we are gone."""

    def __init__(self, command: Sequence[str], *, stdin: int = subprocess.DEVNULL) -> None:
        mask = " ".join(str(int(number)) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        control, self._ours = os.pipe()
        self._status, theirs = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, it is read when the process has ended
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", supervisor.__file__),
                    *(str(control), str(theirs), str(GRACE_S), "stop", mask, *command),
                ],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(control, theirs),
            )
        finally:
            os.close(control)
            os.close(theirs)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @classmethod
    def waiting(cls) -> Process:
        """One that imports what a training needs, and waits for its arguments."""
        return cls([sys.executable, "-c", _WAITING], stdin=subprocess.PIPE)

    def tell(self, arguments: Sequence[str], *, code: str, times: Path) -> None:
        """Its arguments, and code that it runs first. It writes to `times` how long it imported, and until when."""
        line = json.dumps({"arguments": list(arguments), "code": code, "times": str(times)}) + "\n"
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and its exit code says why
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def wait(self, limit_s: float) -> Ended:
        timed_out, kills = False, oom_kills()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        told = self.close()
        oom_killed = oom_kills() > kills
        ended: dict[str, Any] = json.loads(told) if told else {"error": "the supervisor process was killed"}
        self._errors.seek(0)
        said = self._errors.read()[-(1 << 14) :].decode(errors="replace")
        if "error" in ended:
            return Ended(returncode=1, said=str(ended["error"]), timed_out=timed_out, oom_killed=oom_killed)
        code: int | None = ended["returncode"]
        return Ended(returncode=1 if code is None else code, said=said, timed_out=timed_out, oom_killed=oom_killed)

    def close(self) -> bytes:
        """Stops what still runs. Returns what the supervisor said."""
        if self._ours < 0:
            return b""
        os.close(self._ours)
        self._ours = -1
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # what it was not told
                self._process.stdin.close()
        told = os.read(self._status, 1 << 16)
        os.close(self._status)
        return told


def oom_kills() -> int:
    """How many processes of this machine the kernel has killed because memory ran out; 0 where it does not count."""
    with suppress(OSError), open("/proc/vmstat") as file:
        for name, value in map(str.split, file):
            if name == "oom_kill":
                return int(value)
    return 0
