"""Runs the ranks of a job as processes of this machine, restarts them from the last checkpoint, and ends with them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

from flatout.launch.job import FINAL, Job, ended, exit_code_of, followed
from flatout.output import err

POLL_S = 0.05
# Once a rank has failed, the others have this long to notice and to say what they know.
GRACE_S = 5.0
# The lines that are shown of the rank that failed first.
TAIL = 40


@dataclass(kw_only=True)
class Rank:
    """A process of the job, and the last lines that it wrote to stderr."""

    number: int
    process: subprocess.Popen[bytes]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))
    reader: threading.Thread | None = None

    def read(self, *, shown: bool) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            text = line.decode(errors="replace")
            self.lines.append(text)
            if shown:
                # Whoever read it may have left, and the rank must not wait for that.
                with suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(text)
                    sys.stderr.flush()


def run(job: Job) -> int:
    """Runs the job to its end and returns its exit code."""
    code = 0
    for restart in range(job.restarts + 1):
        with forwarded() as stop:
            if restart and stop.number is None:
                err.write(f"restart {restart} of {job.restarts}, from the last checkpoint\n")
            code = _attempt(job, restart=restart, stop=stop)
        if code in FINAL or stop.number is not None:
            break
    return code


def _attempt(job: Job, *, restart: int, stop: Stop) -> int:
    environment = job.environment(restart=restart) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LOCAL_WORLD_SIZE": str(job.ranks),
    }
    ranks: list[Rank] = []
    try:
        for number in range(job.world):
            own = {"RANK": str(number), "LOCAL_RANK": str(number)}
            ranks.append(_started(job.command, {**os.environ, **environment, **own}, number=number))
            stop.processes.append(ranks[-1].process)
        failed = _wait(ranks)
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        if rank.reader is not None:
            rank.reader.join(GRACE_S)
    code = exit_code_of([rank.process.returncode for rank in ranks])
    if code not in FINAL:
        err.write(explained(failed))
    return code


def _started(command: Sequence[str], environment: Mapping[str, str], *, number: int) -> Rank:
    """A rank in a session of its own: Ctrl-C reaches it only through the launcher."""
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdout=None if number == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    rank = Rank(number=number, process=process)
    rank.reader = threading.Thread(target=rank.read, kwargs={"shown": number == 0}, daemon=True)
    rank.reader.start()
    return rank


def _wait(ranks: Sequence[Rank]) -> list[Rank]:
    """Waits for all ranks. Once one has failed, ends the others after a while. Returns those that failed, in order."""
    failed: list[Rank] = []
    until = float("inf")
    while running := [rank for rank in ranks if rank.process.poll() is None]:
        failed += [rank for rank in ranks if rank not in failed and rank.process.returncode not in (None, 0)]
        if failed and until == float("inf"):
            until = time.monotonic() + GRACE_S
        if time.monotonic() > until:
            for rank in running:
                rank.process.kill()  # also ends a rank that is stopped
        time.sleep(POLL_S)
    return failed + [rank for rank in ranks if rank not in failed and rank.process.returncode != 0]


def explained(failed: Sequence[Rank]) -> str:
    """Which rank failed first and how, its last lines at the end."""
    by_itself = [rank for rank in failed if not followed("".join(rank.lines))]
    first = (by_itself or list(failed))[0]
    return ended(first.number, first.process.returncode) + "".join(first.lines)


class Stop:
    """The signal that ended the job, if any, and the processes that it is passed on to."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.processes: list[subprocess.Popen[bytes]] = []

    def handle(self, number: int, _frame: FrameType | None) -> None:
        again = self.number is not None
        self.number = number
        if again and number != signal.SIGINT:
            return  # they are saving
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


@contextmanager
def forwarded() -> Iterator[Stop]:
    """Signals to this process go to those of the block, which save and end."""
    stop = Stop()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    before = {n: signal.signal(n, stop.handle) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
