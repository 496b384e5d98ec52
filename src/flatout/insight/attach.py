"""Runs any PyTorch script under the probe's agent and records the observations in a run folder (`flatout doctor -- …`).

The script is started as usual, in the same folder, terminal and process group; only PYTHONPATH and
one variable make its Python load the agent. Its parent is the `supervisor`, which stops leftover processes. This module
reads the agent's files as they grow, samples the machine, forwards signals, and writes ordinary records of a run.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from flatout.errors import RunFailed, UsageError
from flatout.files import parse_json, read_bytes, read_json
from flatout.hardware import Hardware
from flatout.insight import supervisor
from flatout.probe import Monitor, describe
from flatout.record import Recorder, Run, Span, StepExtra, StepRecord, redact, redact_command
from flatout.record.events import ScriptWatched

_AGENT = Path(__file__).parents[1] / "probe" / "inject"
_ENDS = supervisor.PASSED_ON - {signal.SIGUSR1, signal.SIGUSR2}
_POLL_S = 0.2
# A script that does not stop gets this many seconds, and as many again after SIGTERM.
_GRACE_S = 10.0
# A phase that lasts longer than this is told, and told again as often.
_TELL_S = 10.0
_PHASES = {
    "other": "between the phases of a step",
    "data": "waiting for data",
    "loss": "computing the loss",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "generate": "in generation",
    "reward": "in the reward function",
    "reference": "in a forward pass without gradients",
    "eval": "in evaluation",
    "make": "making an optimizer",
    "save": "saving",
}
_TAIL_LINES, _TAIL_BYTES = 40, 1 << 14
# At this signal the script's Python writes its stack to a file. Scripts use SIGUSR1 and SIGUSR2, so this one is free.
_STACK_SIGNAL = signal.SIGRTMAX - 2
_STACK_S = 2.0
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How long to watch, and what to do afterwards."""

    steps: int = 20
    seconds: float = 60.0  # of timed steps, after warm-up
    then: Literal["stop", "continue"] = "stop"
    look: bool = True  # profile, and replay the last batch; --prove only measures time
    switch: Mapping[str, Any] = field(default_factory=dict)  # fixes that the agent switches on
    variables: Mapping[str, str | None] = field(default_factory=dict)  # of the environment; None removes one
    stdout_to_stderr: bool = False
    quiet: bool = False  # discard the script's output
    limit_s: float = 600.0  # for the whole watch, from the script's start; with `stop` the script is stopped then


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The agent's observations of one rank."""

    facts: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]

    @property
    def timed(self) -> list[Mapping[str, Any]]:
        """The steps that count: after the last warm-up and before the profiler.

        A further optimizer that steps for the first time makes the warm-up begin again.
        """
        last = max((i for i, step in enumerate(self.steps) if step["stage"] == "warm"), default=-1)
        return [step for step in self.steps[last + 1 :] if step["stage"] == "timed" and step["seconds"]]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """How a script ended, and the agent's observations of its rank 0."""

    returncode: int
    stopped: bool  # by us, after the window or at the limit
    facts: Mapping[str, Any] | None  # None: the agent saw no optimizer step
    steps: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]  # of the machine
    crash: str | None  # its last output, secrets masked
    ranks: Mapping[int, Rank] = field(default_factory=dict)  # rank 0 among them
    timed_out_s: float | None = None  # the time limit at which it was stopped
    was_at: str | None = None  # the line of its main thread then
    signalled: bool = False  # a signal told the doctor to stop
    left: Sequence[int] = ()  # processes that could not be stopped
    progress: Mapping[str, Any] | None = None  # of the agent, where it saw no step: torch's version, backward passes
    startup_s: float | None = None  # from the script's start to the end of its first step

    @property
    def timed(self) -> list[Mapping[str, Any]]:
        """The steps that count, of rank 0."""
        return Rank(facts={}, steps=self.steps).timed

    def run_s(self, asked: Asked, *, step_s: float) -> float | None:
        """About how long another run of the script takes that only times its steps; None if no step was observed."""
        if self.startup_s is None:
            return None
        return self.startup_s + min(asked.steps * step_s, asked.seconds)

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it; the doctor should then stop too."""
        return self.signalled or (not self.stopped and self.returncode in (-signal.SIGINT, -signal.SIGTERM))


def new_run(path: Path, *, command: Sequence[str], hardware: Hardware, asked: Asked) -> Run:
    """Creates the run folder of a watched script. It has no plan, and its configuration is the command line."""
    shown = shlex.join(redact_command(command))
    return Run.create(
        path,
        config_text=f"command: {json.dumps(shown)}\n",
        config={"command": shown},
        plan={
            "foreign": True,
            "steps": asked.steps,
            "seconds": asked.seconds,
            "limit_s": asked.limit_s,
            "then": asked.then,
        },
        hardware=hardware.to_json(),
        environment=describe(),
    )


def watch(command: Sequence[str], *, asked: Asked, run: Run | None = None) -> Watched:
    """Runs the command until it ends, the window ends, or the time limit is reached."""
    samples: list[Mapping[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="flatout-doctor-"))
    began = time.time()
    try:
        with (
            _signals_blocked() as mask,
            _Script(command, asked=asked, folder=folder, mask=mask) as script,
            _recording(run) as recorder,
        ):
            books = _AgentFiles(folder, recorder)
            with Monitor(interval_s=0.5, on_sample=_both(samples, recorder)):
                script.wait(books)
            books.read()
            seen = books.facts()
            if recorder is not None and seen is not None:
                shown = shlex.join(redact_command(seen["argv"]))
                recorder.event(ScriptWatched(facts={**seen, "argv": shown}))
        stopped = seen is not None and seen["state"] == "stopped"
        return Watched(
            returncode=script.returncode,
            stopped=stopped or script.timed_out,
            facts=seen,
            steps=books.steps,
            samples=samples,
            crash=None if script.timed_out else _crash(folder, script.returncode, bytes(script.tail)),
            ranks=books.ranks(),
            progress=books.progress(),
            startup_s=None if not books.steps else max(0.0, books.steps[0]["time"] - began),
            timed_out_s=asked.limit_s if script.timed_out else None,
            was_at=script.was_at,
            signalled=script.signalled,
            left=script.left,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- the process


@contextmanager
def _signals_blocked() -> Iterator[set[Any]]:
    """Blocks signals, which `_Script.wait` handles one by one; the script starts with the original mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, supervisor.PASSED_ON | {signal.SIGCHLD})
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Script:
    """The script under its supervisor. Leaving the context stops it and all its processes if they still run."""

    def __init__(self, command: Sequence[str], *, asked: Asked, folder: Path, mask: set[Any]) -> None:
        self.command, self.asked, self.folder = command, asked, folder
        self.returncode, self.left = 0, ()
        self.timed_out = self.signalled = False
        self.was_at: str | None = None
        self.tail = bytearray()
        self._began = time.monotonic()
        # With `continue` the script keeps its terminal; otherwise the end of its stderr is kept.
        piped = asked.then == "stop"
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        started = [sys.executable, "-I", "-S", supervisor.__file__, str(control), str(status), str(_GRACE_S)]
        self.process = subprocess.Popen(
            [*started, asked.then, " ".join(str(int(number)) for number in mask), *command],
            env=_environment(asked, folder),
            stdout=subprocess.DEVNULL if asked.quiet else 2 if asked.stdout_to_stderr else None,
            stderr=subprocess.PIPE if piped else None,
            pass_fds=(control, status),
        )
        os.close(control)
        os.close(status)
        self._tee: threading.Thread | None = None
        if self.process.stderr is not None:
            self._tee = threading.Thread(target=_tee, args=(self.process.stderr, self.tail), daemon=True)
            self._tee.start()

    def __enter__(self) -> _Script:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._control)  # the supervisor then stops the script
        self.process.wait()
        os.close(self._status)
        if self._tee is not None:
            self._tee.join(_GRACE_S)  # do not wait for a process that could not be stopped and holds it open

    def wait(self, books: _AgentFiles) -> None:
        """Waits until the script ends; meanwhile reads its steps and forwards signals to it."""
        end_at: float | None = None
        progress = _Progress(self._began)
        while self.process.poll() is None:
            got = signal.sigtimedwait(supervisor.PASSED_ON | {signal.SIGCHLD}, _POLL_S)
            if got is not None and got.si_signo in supervisor.PASSED_ON:
                # A signal from the terminal has reached the script already; one sent to us (code of 0 or less) has not.
                if got.si_code <= 0:
                    self._tell(f"{got.si_signo} 0")
                self.signalled |= got.si_signo in _ENDS
            books.read()
            if self.asked.then == "continue":
                continue  # as without the doctor: the script may handle a signal slowly, or ignore it
            now = time.monotonic()
            if not self.asked.quiet and end_at is None:
                progress.tell(books.phase(), now=now)
            if end_at is None:
                if self.signalled or books.is_over():
                    end_at = now + _GRACE_S
                elif now > self._began + self.asked.limit_s:
                    self.timed_out, self.was_at, end_at = True, self._main_thread(), now
            if end_at is not None and now >= end_at:
                self._tell("end")
                end_at = math.inf
        self._read_status()

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError):
            os.write(self._control, f"{line}\n".encode())

    def _read_status(self) -> None:
        told = os.read(self._status, 1 << 16)
        if not told:
            raise RunFailed("the supervisor process was killed, and the script with it: run the command again")
        status = json.loads(told)
        if "error" in status:
            raise UsageError(f"{self.command[0]!r} cannot be run: {status['error']}")
        self.returncode, self.left = status["returncode"] or 0, tuple(status["left"])

    def _main_thread(self) -> str | None:
        """The line where the script's main thread is, of the first rank, if its Python wrote its stack."""
        able = sorted(
            self.folder.glob("stack-*.txt"), key=lambda path: (path.stem.split("-")[1] != "0", path.stat().st_ctime)
        )
        if not able:
            return None
        self._tell(f"{int(_STACK_SIGNAL)} {able[0].stem.split('-')[2]}")
        until = time.monotonic() + _STACK_S
        while time.monotonic() < until and not able[0].read_bytes().endswith(b"\n"):
            time.sleep(0.05)
        frames = list(_FRAME.finditer(able[0].read_bytes()[: 1 << 16].decode(errors="replace")))
        of_user = [one for one in frames if "site-packages" not in one["file"] and "/lib/python" not in one["file"]]
        return next((f"{one['file']}:{one['line']} in {one['name']}" for one in [*of_user, *frames]), None)


class _Progress:
    """Tells the user what takes long: a phase that does not end, or a script that takes no step."""

    def __init__(self, now: float) -> None:
        self._seen: tuple[str, int] | None = None
        self._since = self._told = now

    def tell(self, seen: tuple[str, int] | None, *, now: float) -> None:
        if seen != self._seen:
            self._seen, self._since, self._told = seen, now, now
        if now - self._told < _TELL_S:
            return
        self._told = now
        phase, steps = seen or ("", 0)
        where = _PHASES.get(phase, phase) or "starting"
        # Our own stderr may be closed, or not a file in a test.
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"flatout: still {where}, {now - self._since:.0f} s ({steps} optimizer steps so far)\n")
            sys.stderr.flush()


def _environment(asked: Asked, folder: Path) -> dict[str, str]:
    stop = asked.then == "stop"
    told = {
        "out": str(folder),
        "steps": asked.steps,
        "seconds": asked.seconds,
        "ends_at": time.monotonic() + asked.limit_s,  # on a clock that all processes of a machine share
        "stack_signal": int(_STACK_SIGNAL) if stop else None,
        "stop": stop,
        "look": asked.look,
        "switch": dict(asked.switch),
    }
    # Other Pythons of the user may import from this folder too, so it contains only one file.
    path = os.pathsep.join(part for part in (str(_AGENT), os.environ.get("PYTHONPATH")) if part)
    changed = {**os.environ, **asked.variables, "PYTHONPATH": path, "FLATOUT_AGENT": json.dumps(told)}
    return {name: value for name, value in changed.items() if value is not None}


def _tee(source: IO[bytes], tail: bytearray) -> None:
    """Forwards stderr unchanged and keeps its end."""
    while chunk := os.read(source.fileno(), 1 << 16):
        # Our own stderr may be closed, or not a file in a test: the script continues anyway.
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()
        tail += chunk
        del tail[:-_TAIL_BYTES]


# -- the agent's files


class _AgentFiles:
    """Reads the agents' files: rank 0's as it grows, recording its steps, and those of the other ranks at the end."""

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
                self._take(parse_json(line, source=self._source))

    def _take(self, step: Mapping[str, Any]) -> None:
        self.steps.append(step)
        if self.recorder is not None and step["seconds"] is not None:
            self.recorder.step(to_record(step, attempt=self.recorder.attempt, num_ranks=self._world))

    def facts(self) -> dict[str, Any] | None:
        path = self._first_rank("facts-*.json")
        return None if path is None else read_json(path)

    def ranks(self) -> dict[int, Rank]:
        """Every rank that wrote both of its files."""
        found: dict[int, Rank] = {}
        for path in self._by_rank("facts-*.json"):
            facts, steps = read_json(path), path.with_name(f"steps{path.stem[5:]}.jsonl")
            if facts["rank"] not in found and steps.exists():
                lines = read_bytes(steps).split(b"\n")[:-1]
                found[facts["rank"]] = Rank(facts=facts, steps=[parse_json(line, source=steps) for line in lines])
        return found

    def progress(self) -> dict[str, Any] | None:
        """What the first rank's agent last wrote about where it is; None if torch was not imported."""
        path = self._first_rank("phase-*.json")
        return None if path is None else read_json(path)

    def phase(self) -> tuple[str, int] | None:
        """The phase that the first rank is in, and the number of its steps so far."""
        told = self.progress()
        return None if told is None else (str(told["phase"]), int(told["steps"]))

    def is_over(self) -> bool:
        seen = self.facts()
        return seen is not None and seen["state"] == "stopped"

    def _first_rank(self, pattern: str) -> Path | None:
        return next(iter(self._by_rank(pattern)), None)

    def _by_rank(self, pattern: str) -> list[Path]:
        return sorted(self.folder.glob(pattern), key=lambda path: (int(path.stem.split("-")[1]), path.stat().st_ctime))


def to_record(step: Mapping[str, Any], *, attempt: int, num_ranks: int = 1) -> StepRecord:
    """Converts an agent's line to a record. Other ranks are assumed to have the same number of tokens."""
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
        extra=StepExtra(stage=step["stage"], lr=step["lr"], micro_batches=len(micro)),
    )


def _crash(folder: Path, returncode: int, tail: bytes) -> str | None:
    """The traceback of the first rank that failed, or the script's last output."""
    if returncode == 0:
        return None
    told = sorted(folder.glob("crash-*.txt"), key=lambda path: path.stat().st_mtime)
    lines = (told[0].read_bytes() if told else tail).decode(errors="replace").split("\n")
    return redact("\n".join(lines[-_TAIL_LINES:]).strip("\n"))


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
