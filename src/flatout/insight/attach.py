"""Runs anyone's PyTorch script under the probe's agent and keeps what is seen in a run folder (`flatout doctor -- …`).

The script is started as it would be without us, in the same folder, terminal and process group; only PYTHONPATH and
one variable tell its Python to load the agent. The parent tails what the agent writes, samples the machine, passes on
signals, and turns it all into records that every other reader knows.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from flatout.errors import UsageError
from flatout.hardware import Hardware
from flatout.probe import Monitor, describe
from flatout.record import Recorder, Run, Span, StepRecord, redact

_AGENT = Path(__file__).parents[1] / "probe" / "inject"
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}
_POLL_S = 0.2
# A script that does not end after it was told to is given this long.
_GRACE_S = 20.0
_TAIL_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How long to watch, and what happens then."""

    steps: int = 20
    seconds: float = 60.0
    then: Literal["stop", "continue"] = "stop"
    look: bool = True  # profile, and replay the last batch; a proof only times
    switch: Mapping[str, Any] = field(default_factory=dict)  # fixes put in from outside
    variables: Mapping[str, str | None] = field(default_factory=dict)  # of the environment; None takes one out
    stdout_to_stderr: bool = False
    quiet: bool = False  # what the script prints goes nowhere
    limit_s: float | None = None  # a script that takes longer, start and end included, is killed


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What the agent saw of one rank."""

    facts: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]

    @property
    def timed(self) -> list[Mapping[str, Any]]:
        """The steps that count: past warm-up, before the profiler."""
        return [step for step in self.steps if step["stage"] == "timed" and step["seconds"]]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What became of a script, and what the agent saw of its rank 0."""

    returncode: int
    stopped: bool  # by us, after the window
    facts: Mapping[str, Any] | None  # None: no optimizer step was taken under a torch the agent saw
    steps: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]  # of the machine
    crash: str | None  # its last words, secrets masked
    ranks: Mapping[int, Rank] = field(default_factory=dict)  # rank 0 among them

    @property
    def timed(self) -> list[Mapping[str, Any]]:
        """The steps that count, of rank 0."""
        return Rank(facts={}, steps=self.steps).timed

    @property
    def interrupted(self) -> bool:
        """Somebody ended it: they mean us too."""
        return not self.stopped and self.returncode in (-signal.SIGINT, -signal.SIGTERM)


def new_run(path: Path, *, command: Sequence[str], hardware: Hardware, asked: Asked) -> Run:
    """The folder of a foreign job. It has no plan of ours, and its configuration is its command line."""
    shown = redact(shlex.join(command))
    return Run.create(
        path,
        config_text=f"command: {json.dumps(shown)}\n",
        config={"command": shown},
        plan={"foreign": True, "steps": asked.steps, "seconds": asked.seconds, "then": asked.then},
        hardware=hardware.to_json(),
        environment=describe(),
    )


def watch(command: Sequence[str], *, asked: Asked, run: Run | None = None) -> Watched:
    """Run the command to its end, or to the end of the window."""
    samples: list[Mapping[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="flatout-doctor-"))
    try:
        with _signals_blocked() as unblocked:
            process, tail = _start(command, asked=asked, folder=folder, mask=unblocked)
            with _recording(run) as recorder:
                books = _Books(folder, recorder)
                on_sample = _both(samples, recorder)
                with Monitor(interval_s=0.5, on_sample=on_sample):
                    returncode = _wait(process, books, limit_s=asked.limit_s)
                books.read()
                seen = books.facts()
                if recorder is not None and seen is not None:
                    recorder.event("observed", **{**seen, "argv": redact(shlex.join(seen["argv"]))})
        crash = _crash(folder, returncode, tail)
        stopped = seen is not None and seen["state"] == "stopped"
        return Watched(
            returncode=returncode,
            stopped=stopped,
            facts=seen,
            steps=books.steps,
            samples=samples,
            crash=crash,
            ranks=books.ranks(),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- the process


@contextmanager
def _signals_blocked() -> Iterator[set[Any]]:
    """Signals are taken one by one in `_wait`; the script starts with the mask it would have had."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    command: Sequence[str], *, asked: Asked, folder: Path, mask: set[Any]
) -> tuple[subprocess.Popen[bytes], deque[str]]:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    # With `continue` the script keeps its own terminal; otherwise its last words are kept as they pass through.
    piped = asked.then == "stop"
    stdout = subprocess.DEVNULL if asked.quiet else 2 if asked.stdout_to_stderr else None
    try:
        process = subprocess.Popen(
            list(command),
            env=_environment(asked, folder),
            stdout=stdout,
            stderr=subprocess.PIPE if piped else None,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        )
    except (FileNotFoundError, PermissionError) as error:
        raise UsageError(f"{command[0]!r} cannot be run: {error.strerror}") from error
    if process.stderr is not None:
        threading.Thread(target=_tee, args=(process.stderr, tail), daemon=True).start()
    return process, tail


def _environment(asked: Asked, folder: Path) -> dict[str, str]:
    told = {
        "out": str(folder),
        "steps": asked.steps,
        "seconds": asked.seconds,
        "stop": asked.then == "stop",
        "look": asked.look,
        "switch": dict(asked.switch),
    }
    # The folder may hold a path of ours that the user's other Pythons must not import from: it has one file only.
    path = os.pathsep.join(part for part in (str(_AGENT), os.environ.get("PYTHONPATH")) if part)
    changed = {**os.environ, **asked.variables, "PYTHONPATH": path, "FLATOUT_AGENT": json.dumps(told)}
    return {name: value for name, value in changed.items() if value is not None}


def _tee(source: IO[bytes], tail: deque[str]) -> None:
    """Pass stderr on as it comes, byte by byte the same, and keep its last lines."""
    last = b""
    while chunk := os.read(source.fileno(), 1 << 16):
        # Our own stderr may be gone, or no file at all in a test: the script goes on all the same.
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()
        *lines, last = (last + chunk).split(b"\n")
        tail.extend(line.decode(errors="replace") for line in lines)
    if last:
        tail.append(last.decode(errors="replace"))


def _wait(process: subprocess.Popen[bytes], books: _Books, *, limit_s: float | None) -> int:
    """Until the script ends; meanwhile its steps are read and signals meant for it are passed on."""
    began = time.monotonic()
    told_to_end: float | None = None
    while process.poll() is None:
        got = signal.sigtimedwait(_PASSED_ON | {signal.SIGCHLD}, _POLL_S)
        # One typed at the terminal has reached the script already; one sent to us (a code of 0 or less) has not.
        if got is not None and got.si_signo in _PASSED_ON and got.si_code <= 0:
            process.send_signal(got.si_signo)
        books.read()
        if told_to_end is None and books.is_over():
            told_to_end = time.monotonic()
        if told_to_end is not None and time.monotonic() - told_to_end > _GRACE_S:
            process.kill()
        if limit_s is not None and time.monotonic() - began > limit_s:
            process.kill()
    return process.wait()


# -- what the agent wrote


class _Books:
    """Reads the agents' files: rank 0's as it grows, with its steps recorded, the others' at the end."""

    def __init__(self, folder: Path, recorder: Recorder | None) -> None:
        self.folder, self.recorder = folder, recorder
        self.steps: list[Mapping[str, Any]] = []
        self._source: Path | None = None
        self._offset = 0
        self._world = 1

    def read(self) -> None:
        if self._source is None:
            self._source = self._first_rank("steps-*.jsonl")
            if self._source is None:
                return
            self._world = (self.facts() or {}).get("world", 1)
        with self._source.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._take(json.loads(line))

    def _take(self, step: Mapping[str, Any]) -> None:
        self.steps.append(step)
        if self.recorder is not None and step["seconds"] is not None:
            self.recorder.step(to_record(step, attempt=self.recorder.attempt, num_ranks=self._world))

    def facts(self) -> dict[str, Any] | None:
        path = self._first_rank("facts-*.json")
        if path is None:
            return None
        read: dict[str, Any] = json.loads(path.read_text())
        return read

    def ranks(self) -> dict[int, Rank]:
        """Every rank that wrote both of its files."""
        found: dict[int, Rank] = {}
        for path in self._by_rank("facts-*.json"):
            facts, steps = json.loads(path.read_text()), path.with_name(f"steps{path.stem[5:]}.jsonl")
            if facts["rank"] not in found and steps.exists():
                lines = steps.read_text().split("\n")[:-1]
                found[facts["rank"]] = Rank(facts=facts, steps=[json.loads(line) for line in lines])
        return found

    def is_over(self) -> bool:
        seen = self.facts()
        return seen is not None and seen["state"] == "stopped"

    def _first_rank(self, pattern: str) -> Path | None:
        return next(iter(self._by_rank(pattern)), None)

    def _by_rank(self, pattern: str) -> list[Path]:
        return sorted(self.folder.glob(pattern), key=lambda path: (int(path.stem.split("-")[1]), path.stat().st_ctime))


def to_record(step: Mapping[str, Any], *, attempt: int, num_ranks: int = 1) -> StepRecord:
    """An agent's line as a record. Other ranks are taken to have had as many tokens as this one."""
    micro = step["micro"]
    padded = sum(m["tokens"] or 0 for m in micro)
    real = sum(int(m["real"] if m["real"] is not None else m["tokens"] or 0) for m in micro)
    phases = step["device"] or step["host"]
    return StepRecord(
        attempt=attempt,
        step=step["step"],
        time=step["time"],
        seconds=step["seconds"],
        tokens=real * num_ranks,
        padded_tokens=padded * num_ranks,
        loss=step["loss"],
        spans=tuple(Span(phase=phase, seconds=seconds) for phase, seconds in phases.items() if seconds > 0),
        memory=step["memory"],
        extra={"stage": step["stage"], "lr": step["lr"], "micro_batches": len(micro)},
    )


def _crash(folder: Path, returncode: int, tail: deque[str]) -> str | None:
    """The traceback of the first rank that fell, or what the script said last."""
    if returncode == 0:
        return None
    told = sorted(folder.glob("crash-*.txt"), key=lambda path: path.stat().st_mtime)
    lines = told[0].read_text().splitlines() if told else list(tail)
    return redact("\n".join(lines[-_TAIL_LINES:]))


@contextmanager
def _recording(run: Run | None) -> Iterator[Recorder | None]:
    if run is None:
        yield None
        return
    with run.lock(), run.recorder() as recorder:
        yield recorder


def _both(samples: list[Mapping[str, Any]], recorder: Recorder | None) -> Any:
    def take(sample: Mapping[str, Any]) -> None:
        samples.append(sample)
        if recorder is not None:
            recorder.sample(sample)

    return take
