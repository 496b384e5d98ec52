"""`Run` creates, locks and reads one run folder; a training process writes into it with a `Recorder`."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from flatout.errors import EnvironmentLacks, FlatoutError, UsageError
from flatout.files import (
    BadFile,
    inside,
    is_temporary,
    open_for_appending,
    read_bytes,
    read_text,
    sweep,
    typed,
    write_atomic,
)
from flatout.record import rollup
from flatout.record.events import AttemptBegan, Event, Hung, LinesDropped, SinkFailed, event_from_json, event_of
from flatout.record.lines import Line, LineWriter, decode, encode, last_line, read_lines, spread_lines
from flatout.record.records import Diagnosis, Sink, StepRecord, step_to_json
from flatout.record.redact import redact, redacted
from flatout.record.rollup import Rollup
from flatout.record.schemas import ConfigView, EnvironmentView, HardwareView, LimitView, PlanView, Sample
from flatout.record.sealed import is_sealed, seal, unseal

log = logging.getLogger(__name__)

_CONFIG_TEXT, _CONFIG, _PLAN, _HARDWARE, _ENVIRONMENT = (
    "config.yaml",
    "config.json",
    "plan.json",
    "hardware.json",
    "env.json",
)
_FINDINGS, _LOCK, _REPORT = "findings.json", ".lock", "report.html"
_FOLDERS = ("checkpoints", "tokenizer", "samples", "profile", "trackers")
# With fewer steps than this many roll-ups, a history reads every step.
_FEW_ROLLUPS = 16
# In the order in which they are written; the last one makes the folder a run. The sealed ones must not be edited.
_SEALED = (_PLAN, _HARDWARE, _ENVIRONMENT)
_WRITTEN_ONCE = (*_SEALED, _CONFIG, _CONFIG_TEXT)
# In the folder of a search, which is no run.
SEARCH = "search.json"
_RECORDED = re.compile(r"(steps|events|monitor)(-rank(\d+))?(\.rollup)?\.jsonl")

# A forked child (a loader worker) shares its parent's lock and must release it, or the lock outlives a killed parent.
_held_locks: set[int] = set()


def _let_go_of_locks() -> None:
    for fd in _held_locks:
        os.close(fd)
    _held_locks.clear()


os.register_at_fork(after_in_child=_let_go_of_locks)


@dataclass(frozen=True)
class Run:
    """One run folder. It can be read while the run is going, without disturbing it."""

    path: Path

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        config_text: str,
        config: Mapping[str, Any],
        plan: Mapping[str, Any],
        hardware: Mapping[str, Any],
        environment: Mapping[str, Any],
    ) -> Run:
        """Creates the folder and writes what is known before the first step, with secrets masked."""
        with cls.created(
            path, config_text=config_text, config=config, plan=plan, hardware=hardware, environment=environment
        ) as run:
            return run

    @classmethod
    @contextmanager
    def created(
        cls,
        path: Path | str,
        *,
        config_text: str,
        config: Mapping[str, Any],
        plan: Mapping[str, Any],
        hardware: Mapping[str, Any],
        environment: Mapping[str, Any],
    ) -> Iterator[Run]:
        """A new run, locked before its first file is written until the end of the block."""
        run = cls(Path(path))
        run._check_vacant()
        with _writing(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        with run.lock():
            run._check_vacant()  # another process may have been faster
            with _writing(run.path):
                for name, value in (
                    (_PLAN, plan),
                    (_HARDWARE, hardware),
                    (_ENVIRONMENT, {"run_id": secrets.token_hex(16), **environment}),
                ):
                    write_atomic(run._at(name), seal(redacted(value), name=name))
            # The text comes last: with it the folder is a run.
            run.reconfigure(config_text=config_text, config=config)
            yield run

    @classmethod
    def require_vacant(cls, path: Path | str) -> None:
        """Refuses a folder in which `created` would not start a run."""
        cls(Path(path))._check_vacant()

    def _check_vacant(self) -> None:
        present = self._present()
        if len(present) == len(_WRITTEN_ONCE):
            raise UsageError(
                f"{self.path} already holds a run. Continue it with --resume, or start another with --run FOLDER."
            )
        if present and not self._half_made():
            raise UsageError(
                f"{self.path} holds {', '.join(present)} but is not a complete run, and nothing is overwritten. "
                "Delete them, or choose another folder with --run FOLDER."
            )

    def _present(self) -> list[str]:
        return [name for name in _WRITTEN_ONCE if os.path.lexists(self.path / name)]

    def _half_made(self) -> bool:
        """Whether `created` was killed here: its first files are whole, and there is no record."""
        present = self._present()
        return (
            len(present) < len(_WRITTEN_ONCE)
            and present == list(_WRITTEN_ONCE[: len(present)])
            and all(is_sealed(self.path / name) for name in present if name in _SEALED)
            and not any(_RECORDED.fullmatch(path.name) or path.name in _FOLDERS for path in self.path.iterdir())
        )

    @classmethod
    def is_half_made(cls, path: Path | str) -> bool:
        """Whether a run was killed while its folder was being created, so that it can be created again without loss."""
        run = cls(Path(path))
        if not run.path.is_dir() or not run._half_made():
            return False
        return bool(run._present()) or all(
            found.name == _LOCK or is_temporary(found.name) for found in run.path.iterdir()
        )

    @classmethod
    def is_missing(cls, path: Path | str) -> bool:
        """Whether no run stands at `path`, so that one can be created there without loss."""
        return not os.path.lexists(path) or cls.is_half_made(path)

    def reconfigure(self, *, config_text: str, config: Mapping[str, Any]) -> None:
        """Saves the settings with which a resumed run continues."""
        with _writing(self.path):
            write_atomic(self._at(_CONFIG), encode(redacted(config), indent=2))
            write_atomic(self._at(_CONFIG_TEXT), redact(config_text).encode())

    def replan(self, plan: Mapping[str, Any]) -> None:
        """Saves the plan after the search on the device, before the first step."""
        with _writing(self.path):
            write_atomic(self._at(_PLAN), seal(redacted(plan), name=_PLAN))

    @classmethod
    def open(cls, path: Path | str) -> Run:
        run = cls(Path(path))
        try:
            missing = [name for name in reversed(_WRITTEN_ONCE) if not run._at(name).is_file()]
            why = f"it lacks {', '.join(missing)}" if run.path.is_dir() else "there is no such folder"
            if run._at(SEARCH).is_file():
                why = "it holds the trials of a search, whose results are ablation.html or tuned.json"
            elif run.path.is_file():
                why = "it is a file"
            half_made = bool(missing and run._present()) and cls.is_half_made(path)
        except OSError as error:
            raise UsageError(f"{run.path} cannot be read as a run folder: {error.strerror or error}") from None
        if half_made:
            raise UsageError(
                f"{run.path} is not a run folder yet: it was interrupted while being created. "
                "Run the same `flatout train` again."
            )
        if missing:
            raise UsageError(f"{run.path} is not a run folder: {why}. `flatout train CONFIG --run FOLDER` makes one.")
        return run

    @classmethod
    def is_at(cls, path: Path | str) -> bool:
        """Whether there is a run at `path`."""
        return all((Path(path) / name).is_file() for name in _WRITTEN_ONCE)

    @classmethod
    def is_named_by(cls, name: str | Path) -> bool:
        """Whether a name of a model names a run, whole or damaged; opening a damaged one names the file it lacks."""
        of_runs_only = [file for file in _WRITTEN_ONCE if file != _CONFIG]
        return sum(os.path.lexists(Path(name) / file) for file in of_runs_only) >= 2

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes from training into this folder; the system releases the lock when the process dies."""
        with _writing(self.path):
            fd = open_for_appending(self._at(_LOCK))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 256, 0).decode(errors="replace") or "another process"
            os.close(fd)
            raise UsageError(
                f"{self.path} is already in use by {holder}. Wait for it, or choose another folder with --run FOLDER."
            ) from None
        except OSError as error:  # some cluster file systems are mounted without locks
            os.close(fd)
            raise EnvironmentLacks(
                f"{self.path} cannot be locked: {error.strerror}. Choose a folder on another disk with --run FOLDER."
            ) from error
        _held_locks.add(fd)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
            yield
        finally:
            if fd in _held_locks:  # not in a forked child, which has let go already
                _held_locks.remove(fd)
                os.close(fd)

    def recorder(self, *, rank: int = 0, attempt: int | None = None, sinks: Sequence[Sink] = ()) -> Recorder:
        """Starts an attempt. Rank 0 takes the next number; the other ranks get rank 0's."""
        if attempt is None:
            if rank:
                raise ValueError(f"rank {rank} needs the attempt of rank 0, or their lines could not be matched")
            attempt = 1 + max(self._last_attempt("events"), self._last_attempt("steps"))
        for name in _FOLDERS:  # a link in the place of one is refused now, not when it is first needed
            self._at(name)
        with _writing(self.path):
            return Recorder(self, rank=rank, attempt=attempt, sinks=sinks)

    def note(self, event: Event) -> None:
        """Adds an event to a run that is not being trained, without starting a new attempt."""
        attempt = max(self._last_attempt("events"), self._last_attempt("steps"))
        with self.lock(), _writing(self.path):
            file = LineWriter(self.file("events", 0))
            try:
                if not file.append(_stamped(event, attempt=attempt).to_json()):
                    raise OSError("no room for another line")
            finally:
                file.close()

    def steps(self, *, rank: int = 0) -> Iterator[StepRecord]:
        """Every line as written; steps that were repeated after a kill appear twice."""
        return (rollup.step_of(line) for line in read_lines(self.file("steps", rank)))

    def latest_steps(self, *, rank: int = 0) -> Iterator[StepRecord]:
        """Each step once, in order: the history of the weights as they are now.

        If an attempt went back to an earlier step, the older lines after that step are left out,
        even if the new attempt has not reached them yet.
        """
        for part, before_step in rollup.still_valid(self.rollups(rank=rank)):
            yield from rollup.steps_of(part, steps_path=self.file("steps", rank), before_step=before_step)

    def rollups(self, *, rank: int = 0) -> list[Rollup]:
        """All lines of `steps`, up to 256 in one; reads the roll-ups on file and only the steps after them."""
        path, steps_path = self.file("rollups", rank), self.file("steps", rank)
        known = rollup.saved(path, steps_path=steps_path)
        complete, growing = rollup.following(known, steps_path=steps_path)
        if complete:
            try:
                with self.lock(), _writing(self.path):
                    rollup.save(path, known + complete)
            except FlatoutError as error:
                # A live run writes its own roll-ups, and a read-only folder can still be read.
                log.debug("roll-ups not saved: %s", error)
        return known + complete + growing

    def latest_rollups(self, *, rank: int = 0) -> list[Rollup]:
        """`latest_steps`, up to 256 in one."""
        steps_path = self.file("steps", rank)
        return [
            part
            if before_step is None or part.last_step < before_step
            else rollup.shortened(part, steps_path=steps_path, before_step=before_step)
            for part, before_step in rollup.still_valid(self.rollups(rank=rank))
        ]

    def history(self, *, at_most: int, rank: int = 0, latest: Sequence[Rollup] | None = None) -> list[Rollup]:
        """`latest_steps` in at most `at_most` parts of similar length, for charts; a short run step by step.

        Pass the `latest_rollups` as `latest` if they are already read.
        """
        parts = self.latest_rollups(rank=rank) if latest is None else latest
        if sum(part.num_steps for part in parts) <= rollup.STEPS_PER_ROLLUP * _FEW_ROLLUPS:
            parts = [rollup.single(record) for part in parts for record in self.steps_in(part, rank=rank)]
        size = max(1, -(-len(parts) // at_most))
        return [rollup.merged(parts[at : at + size]) for at in range(0, len(parts), size)]

    def steps_in(self, part: Rollup, *, rank: int = 0) -> Iterator[StepRecord]:
        """The lines a roll-up covers."""
        return rollup.steps_of(part, steps_path=self.file("steps", rank))

    def events(self, *, rank: int = 0) -> Iterator[Event]:
        found = (event_from_json(line.value, source=line.place) for line in read_lines(self.file("events", rank)))
        silences = {} if rank else self._silences()
        return iter(sorted(chain(found, silences.values()), key=lambda event: event.time)) if silences else found

    def _silences(self) -> dict[int, Hung]:
        """That the first rank did not answer, by attempt: only another rank could record it."""
        found: dict[int, Hung] = {}
        for rank in self.ranks()[1:]:
            for event in self.events(rank=rank):
                if isinstance(event, Hung) and event.silent and event.rank == 0:
                    found.setdefault(event.attempt, event)
        return found

    def recent_steps(self, count: int, *, rank: int = 0, latest: Sequence[Rollup] | None = None) -> list[StepRecord]:
        """The last lines of `latest_steps`, at most `count`, found from the end; `latest` as for `history`."""
        found: list[StepRecord] = []
        for part in reversed(self.latest_rollups(rank=rank) if latest is None else latest):
            found = [*self.steps_in(part, rank=rank), *found]
            if len(found) >= count:
                break
        return found[-count:]

    def samples(self, *, rank: int = 0, at_most: int | None = None) -> Iterator[Mapping[str, Any]]:
        """The monitor's samples on this rank's machine, at most `at_most`, evenly spread over the run."""
        path = self.file("monitor", rank)
        lines = read_lines(path) if at_most is None else spread_lines(path, count=at_most)
        return (_sample_of(line) for line in lines)

    def last_sample(self, *, rank: int = 0) -> Mapping[str, Any] | None:
        line = last_line(self.file("monitor", rank))
        return _sample_of(line) if line else None

    def ranks(self) -> list[int]:
        """The ranks that recorded steps."""
        names = (_RECORDED.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(match[3] or 0) for match in names if match and match[1] == "steps" and not match[4])

    @property
    def id(self) -> str | None:
        """The unique id of this run; None in folders of versions that wrote none."""
        found = self.environment.get("run_id")
        return None if found is None else str(found)

    @property
    def config_text(self) -> str:
        return read_text(self._at(_CONFIG_TEXT))

    @property
    def config(self) -> Mapping[str, Any]:
        return self._read(_CONFIG, ConfigView)

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan as it was written; an edited file is refused."""
        plan = self._unsealed(_PLAN, way_out="; to change a decision, set plan.KEY in the configuration")
        return dict(typed(PlanView, plan, source=self.path / _PLAN))

    @property
    def hardware(self) -> Mapping[str, Any]:
        return dict(typed(HardwareView, self._unsealed(_HARDWARE), source=self.path / _HARDWARE))

    @property
    def environment(self) -> Mapping[str, Any]:
        return self._unsealed(_ENVIRONMENT)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The doctor's latest diagnosis of this run; None if there is no diagnosis."""
        if not self._at(_FINDINGS).is_file():
            return None
        try:
            found = typed(Diagnosis, self._read(_FINDINGS), source=self.path / _FINDINGS)
            typed(LimitView, found.limit, source=self.path / _FINDINGS)
            return found
        except BadFile as error:
            raise BadFile(error.path, f"{error.why}. Run the doctor again, or delete the file.") from None

    def write_diagnosis(self, diagnosis: Diagnosis) -> None:
        with _writing(self.path):
            write_atomic(self._at(_FINDINGS), encode(redacted(asdict(diagnosis)), indent=2))

    @property
    def checkpoints_dir(self) -> Path:
        return self._at("checkpoints")

    @property
    def tokenizer_dir(self) -> Path:
        return self._at("tokenizer")

    @property
    def samples_dir(self) -> Path:
        return self._at("samples")

    def stage_dir(self, name: str) -> Path:
        """The folder of a stage of this run, which is a run itself."""
        return self._at(name)

    @property
    def profile_dir(self) -> Path:
        return self._at("profile")

    @property
    def trackers_dir(self) -> Path:
        return self._at("trackers")

    def stacks_path(self, rank: int) -> Path:
        """Where a rank writes the stacks of its threads when the run hangs."""
        return self._at(f"stacks-rank{rank:05d}.txt")

    @property
    def report_path(self) -> Path:
        return self._at(_REPORT)

    def file(self, what: Literal["steps", "events", "monitor", "rollups"], rank: int) -> Path:
        """The file of a rank's steps, events, monitor samples or roll-ups."""
        stem, suffix = ("steps", ".rollup.jsonl") if what == "rollups" else (what, ".jsonl")
        return self._at(f"{stem}-rank{rank:05d}{suffix}" if rank else f"{stem}{suffix}")

    def _at(self, name: str) -> Path:
        """The path of a file or folder of the run. Every access uses it, so none follows a link out of the folder."""
        return inside(self.path / name, self.path)

    def _read(self, name: str, kind: type[Any] = dict) -> dict[str, Any]:
        path = self._at(name)
        return dict(typed(kind, decode(read_bytes(path), source=str(path)), source=path))

    def _unsealed(self, name: str, *, way_out: str = "") -> dict[str, Any]:
        way_out = f"restore it, or start again in another folder with --run FOLDER{way_out}"
        environment = unseal(self._at(_ENVIRONMENT), root=self.path, required=False, way_out=way_out)
        typed(EnvironmentView, environment, source=self.path / _ENVIRONMENT)
        # Versions that write a run id also seal these files.
        return unseal(self._at(name), root=self.path, required="run_id" in environment, way_out=way_out)

    def _last_attempt(self, what: Literal["steps", "events"]) -> int:
        line = last_line(self.file(what, 0))
        if line is None:
            return 0
        record = rollup.step_of(line) if what == "steps" else event_from_json(line.value, source=line.place)
        return record.attempt


class Recorder:
    """Writes one attempt of one rank, and forwards its records to the sinks.

    Once open it never stops training: a line that cannot be written is dropped and counted (`num_dropped`, and
    an event as soon as one can be written), and a sink that raises is removed with an event.
    """

    def __init__(self, run: Run, *, rank: int, attempt: int, sinks: Sequence[Sink]) -> None:
        self.attempt = attempt
        self.num_dropped = 0
        self._drop_told = False
        self._sinks = list(sinks)
        if rank == 0:  # under the lock, and before the other ranks write
            sweep(run.path)
        steps_path, rollups_path = run.file("steps", rank), run.file("rollups", rank)
        self._steps = LineWriter(steps_path)
        self._events = LineWriter(run.file("events", rank))
        self._monitor = LineWriter(run.file("monitor", rank))
        # The last attempt's unfinished roll-up ends here, so that the new ones follow without a gap.
        known = rollup.saved(rollups_path, steps_path=steps_path)
        complete, growing = rollup.following(known, steps_path=steps_path)
        rollup.save(rollups_path, known + complete + growing)
        self._rollups: LineWriter | None = LineWriter(rollups_path)
        self._blocks = rollup.Blocks()
        self.event(AttemptBegan(rank=rank, pid=os.getpid(), host=socket.gethostname()))

    def step(self, record: StepRecord) -> None:
        start_byte = self._steps.end_byte
        if self._put(self._steps, step_to_json(record)):
            for done in self._blocks.add(record, start_byte=start_byte, end_byte=self._steps.end_byte):
                self._put_rollup(done)
        for sink in tuple(self._sinks):
            self._tell(sink, record)

    def event(self, event: Event | str, *, step: int | None = None, **data: Any) -> None:
        """An event, or its kind, step and data."""
        if isinstance(event, str):
            event = event_of(event, data, step=step, source="the new event:")
        event = _stamped(event, attempt=self.attempt)
        self._put(self._events, event.to_json())
        for sink in tuple(self._sinks):
            self._tell(sink, event)

    def sample(self, values: Mapping[str, Any]) -> None:
        """Records a sample of the monitor; may be called from its thread."""
        self._put(self._monitor, {"attempt": self.attempt, **values})

    def close(self) -> None:
        if self.num_dropped:
            self._put_drop_event()
        for sink in tuple(self._sinks):
            self._tell(sink, None)
        for file in (self._steps, self._events, self._monitor, self._rollups):
            if file is not None:
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, file: LineWriter, value: Mapping[str, Any]) -> bool:
        written = file.append(value)
        if not written:
            self.num_dropped += 1
            if self.num_dropped == 1:
                log.warning("the run folder cannot be written (disk full?): training continues, lines are dropped")
        if self.num_dropped and not self._drop_told:
            self._drop_told = self._put_drop_event()
        return written

    def _put_drop_event(self) -> bool:
        dropped = LinesDropped(num_lines=self.num_dropped)
        return self._events.append(_stamped(dropped, attempt=self.attempt).to_json())

    def _put_rollup(self, done: Rollup) -> None:
        if self._rollups is not None and not self._put(self._rollups, asdict(done)):
            # A gap would make the later ones useless; the next reader rebuilds the rest.
            self._rollups.close()
            self._rollups = None

    def _tell(self, sink: Sink, what: StepRecord | Event | None) -> None:
        try:
            match what:
                case StepRecord():
                    sink.step(what)
                case Event():
                    sink.event(what)
                case None:
                    sink.close()
        except (Exception, SystemExit) as error:  # rich leaves the program when its reader is gone
            self._sinks.remove(sink)
            log.warning("%s failed and is switched off: %s", type(sink).__name__, redact(str(error)))
            self.event(SinkFailed(sink=type(sink).__name__, error=f"{type(error).__name__}: {error}"))


def _stamped(event: Event, *, attempt: int) -> Event:
    """The event as it is recorded: with its attempt and time, and with secrets masked."""
    stamped: Event = redacted(replace(event, attempt=attempt, time=time.time()))
    return stamped


def _sample_of(line: Line) -> Mapping[str, Any]:
    typed(Sample, line.value, source=line.place)
    return line.value


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot write the run folder {path}: {error.strerror or error}. "
            "Choose a folder you may write to, on a disk with free space, with --run FOLDER."
        ) from error
