"""Runs several jobs on this machine, as many at a time as it has room for. Each has its own GPUs, or its own cores."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flatout.errors import INTERRUPTED_EXIT, PREEMPTED_EXIT, UsageError
from flatout.launch.job import Job, exit_code_of, how_it_ended
from flatout.launch.local import forwarded
from flatout.probe.launched import JOB

POLL_S = 0.1
# A killed launcher leaves ranks behind, which save and end: how long their last lines are waited for.
LAST_WORDS_S = 60.0
TAIL = 40


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a job may use of this machine; nothing named: all of it."""

    devices: tuple[str, ...] = ()  # entries of CUDA_VISIBLE_DEVICES
    cores: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.devices:
            return f"GPU{'s' if len(self.devices) > 1 else ''} {','.join(self.devices)}"
        return f"{len(self.cores)} core{'s' if len(self.cores) > 1 else ''}" if self.cores else "this machine"

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}


def ranks_each(*, devices: Sequence[str], jobs: int) -> int:
    """The ranks of each of so many jobs at a time, one GPU each; one rank where there are fewer GPUs than jobs.

    A job on MIG instances has one rank, because CUDA shows a process no more than one of them.
    """
    return 1 if any(device.startswith("MIG-") for device in devices) else max(1, len(devices) // jobs)


def places(*, devices: Sequence[str], cores: Sequence[int], ranks: int, jobs: int, at_once: int | None) -> list[Place]:
    """A place for each job that runs at the same time: of the GPUs, or without any of the cores if `at_once` asks."""
    if devices:
        room = max(1, len(devices) // ranks)
        if at_once is not None and at_once > room:
            raise UsageError(
                f"--jobs {at_once} of {ranks} ranks need {at_once * ranks} GPUs, and {len(devices)} can be seen here: "
                f"use --jobs {room}, or fewer --ranks"
            )
        count = min(at_once or room, jobs)
        size = ranks if room * ranks <= len(devices) else len(devices)
        return [Place(devices=tuple(devices[at * size : (at + 1) * size])) for at in range(count)]
    count = min(at_once or 1, jobs)
    if count > len(cores):
        raise UsageError(f"--jobs {count} need as many CPU cores, and this process has {len(cores)}")
    if count == 1:
        return [Place()]
    size = len(cores) // count
    return [Place(cores=tuple(cores[at * size : (at + 1) * size])) for at in range(count)]


@dataclass(kw_only=True)
class Member:
    """One of the jobs: the command that launches it alone, where it runs, and how it ended."""

    name: str
    job: Job
    command: Sequence[str] = ()
    place: Place | None = None
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None
    stopped: bool = False  # by a signal to all of them
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))
    reader: threading.Thread | None = None
    ended_at: float | None = None

    @property
    def ending(self) -> str:
        if self.code is None:
            return "was not started"
        if self.code == 0:
            return "finished"
        if self.stopped:
            return "was stopped"
        return how_it_ended(self.code)

    @property
    def reason(self) -> str | None:
        """Why it failed, as far as it printed that."""
        found = [line for line in self.lines if line.startswith("error: ") or line.endswith(" first")]
        return found[-1].removeprefix("error: ") if found and self.code and not self.stopped else None

    def start(self, place: Place, *, said: queue.SimpleQueue[Line]) -> None:
        """In a session of its own, so that Ctrl-C reaches it only through this process."""
        with _bound_to(place.cores):
            self.process = subprocess.Popen(
                self.command,
                # By the name of the job it asks the kernel to end with this process.
                env={**os.environ, **place.environment, JOB: f"several-{os.getpid()}-{self.name}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.place = place
        self.reader = threading.Thread(target=self._read, args=(self.process, said), daemon=True)
        self.reader.start()

    def _read(self, process: subprocess.Popen[bytes], said: queue.SimpleQueue[Line]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(Line(member=self, text=line.decode(errors="replace").rstrip("\r\n")))

    def look(self) -> None:
        """Notices its end: that of its process, and of everything that writes for it."""
        assert self.process is not None
        assert self.reader is not None
        if self.process.poll() is None:
            return
        self.ended_at = self.ended_at or time.monotonic()
        if not self.reader.is_alive() or time.monotonic() > self.ended_at + LAST_WORDS_S:
            self.code = self.process.returncode


@dataclass(frozen=True, kw_only=True)
class Line:
    member: Member
    text: str


def run(
    members: Sequence[Member], *, places: Sequence[Place], say: Callable[[Line], None], show: Callable[[], None]
) -> int:
    """Runs all of them to their ends and returns one exit code. A signal stops those that run and starts no more.

    `say` gets each line that they print, `show` is called again and again, both in this thread.
    """
    said: queue.SimpleQueue[Line] = queue.SimpleQueue()
    waiting, running, free = deque(members), list[Member](), list(places)
    with forwarded() as stop:
        while running or (waiting and stop.number is None):
            while waiting and free and stop.number is None:
                member = waiting.popleft()
                member.start(free.pop(0), said=said)
                running.append(member)
                assert member.process is not None
                stop.processes.append(member.process)
            _drain(said, say)
            for member in [member for member in running if _over(member)]:
                running.remove(member)
                assert member.place is not None
                free.append(member.place)
                member.stopped = stop.number is not None
            show()
    _drain(said, say)
    show()
    if stop.number == signal.SIGINT:
        return INTERRUPTED_EXIT
    return exit_code_of([PREEMPTED_EXIT if member.code is None else member.code for member in members])


def _over(member: Member) -> bool:
    member.look()
    return member.code is not None


def _drain(said: queue.SimpleQueue[Line], say: Callable[[Line], None]) -> None:
    """Passes on what was printed; waits a moment for the first line."""
    wait_s = POLL_S
    while True:
        try:
            line = said.get(timeout=wait_s) if wait_s else said.get_nowait()
        except queue.Empty:
            return
        wait_s = 0.0
        line.member.lines.append(line.text)
        say(line)


@contextmanager
def _bound_to(cores: Sequence[int]) -> Iterator[None]:
    """Processes that are started within the block run on these cores only, and plan for as many."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
