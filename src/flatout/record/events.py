"""The events of a run: one dataclass for each kind, with the sentence that describes it to users.

A line of events.jsonl holds `attempt`, `time`, `kind`, `step` and `data`; the fields of the dataclass are the data.
Unknown fields are ignored, an unknown kind is read as `Other`, and data whose type differs from the fields' is refused,
so that no reader gets text where it expects a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from flatout.files import Count, Finite, typed
from flatout.record.outcome import Outcome, Verdict
from flatout.record.schemas import HardwareView, PlanView, Process, Scalar
from flatout.words import counted, duration, interval_text, loss_text, number, percent, score_text

EVENTS: dict[str, type[Event]] = {}
# The fields of every event; the recorder fills in the first two.
_STAMP = ("attempt", "time", "step")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something other than a step: an evaluation, a save, a fault."""

    ignores_unknown: ClassVar[bool] = True
    _kind: ClassVar[str] = ""

    attempt: Count = 0
    time: Finite = 0.0  # unix seconds
    step: Count | None = None

    def __init_subclass__(cls, *, kind: str = "") -> None:
        if kind:
            cls._kind = kind
            EVENTS[kind] = cls

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def data(self) -> Mapping[str, Any]:
        """The data as it is written; unknown optional fields are left out."""
        known = {one.name: (getattr(self, one.name), one.default) for one in fields(self) if one.name not in _STAMP}
        return {name: _plain(value) for name, (value, default) in known.items() if not value is default is None}

    def sentence(self) -> str | None:
        """The event in one sentence, the same in the terminal and in reports; None for events without one."""
        return None

    def to_json(self) -> dict[str, Any]:
        stamp = {"attempt": self.attempt, "time": self.time, "kind": self.kind, "step": self.step}
        return {**stamp, "data": dict(self.data)}


@dataclass(frozen=True, kw_only=True)
class Facts(Event):
    """An event whose data is a mapping defined elsewhere."""

    schema: ClassVar[Any] = Mapping[str, Any]

    facts: Mapping[str, Any]

    @property
    def data(self) -> Mapping[str, Any]:
        return self.facts


@dataclass(frozen=True, kw_only=True)
class Other(Facts):
    """An event of a kind that this version does not know."""

    name: str

    @property
    def kind(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class _Line:
    attempt: Count
    time: Finite
    kind: str
    step: Count | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


def event_from_json(value: Mapping[str, Any], *, source: str) -> Event:
    """The event in a line of events.jsonl; data that does not match its kind is refused."""
    line = typed(_Line, value, source=source)
    return event_of(line.kind, line.data, attempt=line.attempt, time=line.time, step=line.step, source=source)


def event_of(kind: str, data: Mapping[str, Any], *, source: str, **stamp: Any) -> Event:
    known = EVENTS.get(kind)
    if known is None:
        return Other(name=kind, facts=data, **stamp)
    source = f"{source} an event {kind!r},"
    if issubclass(known, Facts):
        typed(known.schema, data, source=source)
        return known(facts=data, **stamp)
    return typed(known, {**data, **stamp}, source=source)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


# -- start and end of a run


@dataclass(frozen=True, kw_only=True)
class AttemptBegan(Event, kind="attempt"):
    rank: Count = 0
    pid: Process | None = None
    host: str | None = None

    def sentence(self) -> str:
        return f"attempt {self.attempt} started: process {self.pid or 'n/a'} on {self.host or 'n/a'}"


@dataclass(frozen=True, kw_only=True)
class HardwareFound(Facts, kind="hardware"):
    """`Hardware.to_json`."""

    schema: ClassVar[Any] = HardwareView


@dataclass(frozen=True, kw_only=True)
class DataOpened(Event, kind="data"):
    source: str
    train_tokens: Count
    valid_tokens: Count
    tokenizer: str
    vocab: Count
    complete: bool = True
    fingerprint: str | None = None
    left_out: str = ""
    bad_rows: Mapping[str, Any] | None = None
    train_examples: Count | None = None
    valid_examples: Count | None = None
    trained_tokens: Count | None = None
    too_long: Mapping[str, Any] | None = None
    sequences: Count | None = None  # that an epoch's examples are packed into
    sequence_length: Count | None = None
    fill: Finite | None = None  # share of their positions that hold a token

    def sentence(self) -> str:
        examples = ""
        if self.train_examples is not None:
            held = f", {counted(self.valid_examples, 'example')} held out" if self.valid_examples is not None else ""
            examples = f"{counted(self.train_examples, 'example')} to train on{held}, "
        packed = ""
        if self.sequences is not None and self.fill is not None:
            packed = (
                f"; {counted(self.sequences, 'sequence')} of {self.sequence_length} tokens, {percent(self.fill)} full"
            )
        return (
            f"{self.source}: {examples}{self.train_tokens:,} tokens to train on, {self.valid_tokens:,} held out, "
            f"tokenizer {self.tokenizer} ({self.vocab:,} ids){packed}"
        )


@dataclass(frozen=True, kw_only=True)
class Planned(Facts, kind="plan"):
    """`Plan.to_json`, as the run used it."""

    schema: ClassVar[Any] = PlanView


@dataclass(frozen=True, kw_only=True)
class PathsActive(Facts, kind="active"):
    """The parts of the plan that the device supports, and what runs instead of the others."""

    schema: ClassVar[Any] = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class PathsRan(Facts, kind="ran"):
    """What a step ran, by the names of its operators: what was planned, what ran, and what says so, by decision."""

    schema: ClassVar[Any] = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Started(Event, kind="start"):
    total_steps: Count | None = None
    folder: str | None = None

    def sentence(self) -> str:
        return f"Run folder {self.folder or 'n/a'}, {number(self.total_steps)} steps"


@dataclass(frozen=True, kw_only=True)
class Resumed(Event, kind="resume"):
    checkpoint: str

    def sentence(self) -> str:
        return f"resumed from {self.checkpoint}"


@dataclass(frozen=True, kw_only=True)
class TargetReached(Event, kind="target"):
    seconds: Finite
    val_loss: float | None = None
    tokens: Count | None = None
    gpu_hours: Finite | None = None

    def sentence(self) -> str:
        return (
            f"target reached: validation loss {loss_text(self.val_loss)} after {duration(self.seconds)}, "
            f"{number(self.tokens)} tokens, {number(self.gpu_hours)} device-hours"
        )


@dataclass(frozen=True, kw_only=True)
class PatienceEnded(Event, kind="patience"):
    patience: Count
    best: float

    def sentence(self) -> str:
        return f"no improvement in {self.patience} evaluations (best {loss_text(self.best)})"


@dataclass(frozen=True, kw_only=True)
class Ended(Event, kind="end"):
    outcome: Outcome
    verdicts: tuple[Verdict, ...]

    def sentence(self) -> str:
        met = [verdict.met for verdict in self.verdicts]
        end = "ended" if self.outcome.stopped_by == "end" else f"ended by {self.outcome.stopped_by}"
        return end + (f", {met.count(True)} of {len(met)} criteria met" if met else "")


# -- measurements and checkpoints


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event, kind="eval"):
    val_loss: float

    def sentence(self) -> str:
        return f"validation loss {loss_text(self.val_loss)}"


class _Details(TypedDict, total=False):
    answered: Finite | None
    killed: Count


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """One task's score; `low` and `high` are its 95 % interval."""

    ignores_unknown: ClassVar[bool] = True

    task: str
    spec: str
    metric: str
    value: float
    low: float | None
    high: float | None
    n: Count
    samples: Count
    of: Count | None = None
    seconds: Finite | None = None
    details: _Details = field(default_factory=_Details)

    @property
    def score(self) -> str:
        """The score with the name of its metric, its interval, and the number of ungraded answers."""
        text = f"{self.metric} {score_text(self.metric, self.value)}"
        return text + interval_text(self.metric, self.low, self.high, brackets=True) + self.ungraded

    @property
    def ungraded(self) -> str:
        """The suffix of the score if graders were killed and the metric's name does not mention it."""
        killed = 0 if "not graded" in self.metric else self.details.get("killed", 0)
        return f", {killed:,} not graded" if killed else ""


@dataclass(frozen=True, kw_only=True)
class TasksScored(Event, kind="tasks"):
    """Task scores, measured during the run or later by `flatout eval`."""

    tasks: tuple[TaskResult, ...]
    temperature: Finite | None = None
    max_tokens: Count | None = None
    samples: Count | None = None
    limit: Count | None = None
    template: bool | None = None
    model: str | None = None
    on: str | None = None
    top_p: Finite | None = None
    seed: int | None = None
    notices: tuple[str, ...] = ()

    def sentence(self) -> str:
        return "; ".join(f"{task.task} {task.score}, n {task.n:,}" for task in self.tasks)


@dataclass(frozen=True, kw_only=True)
class Saved(Event, kind="save"):
    checkpoint: str
    seconds: Finite | None = None  # from the copy to the moved pointer
    blocked_s: Finite | None = None  # in which training waited for the copy

    def sentence(self) -> str:
        return f"saved {self.checkpoint}"


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event, kind="save-failed"):
    error: Scalar = None

    def sentence(self) -> str:
        return f"NOT saved, training continues: {self.error or 'the reason was not recorded'}"


@dataclass(frozen=True, kw_only=True)
class BestKept(Event, kind="best"):
    val_loss: float | None = None
    task_score: float | None = None

    def sentence(self) -> str:
        if self.task_score is not None:
            return f"kept as the best checkpoint so far: task score {percent(self.task_score)}"
        return f"kept as the best checkpoint so far: validation loss {loss_text(self.val_loss)}"


@dataclass(frozen=True, kw_only=True)
class Profiled(Event, kind="profile"):
    folder: str

    def sentence(self) -> str:
        return f"trace and kernel table in {self.folder}"


# -- problems and what the run did about them


@dataclass(frozen=True, kw_only=True)
class UpdateSkipped(Event, kind="skipped"):
    loss: Scalar
    grad_norm: Scalar

    def sentence(self) -> str:
        return f"update skipped: loss {self.loss}, gradient norm {self.grad_norm}"


@dataclass(frozen=True, kw_only=True)
class RolledBack(Event, kind="rollback"):
    """The weights went back to a checkpoint; the data since then is skipped."""

    checkpoint: str
    cause: Scalar = None

    def sentence(self) -> str:
        back = f"went back to the weights of {self.checkpoint} and skips the data up to step {self.step}"
        return f"{back}: {self.cause or 'the reason was not recorded'}"


@dataclass(frozen=True, kw_only=True)
class Hung(Event, kind="hang"):
    """Nothing moved for too long: a rank that does not answer, or one that the others wait for."""

    rank: Count
    phase: str
    seconds: Finite
    silent: bool
    stacks: str = ""

    def sentence(self) -> str:
        where = f"phase {self.phase} of step {self.step if self.step is not None else 'n/a'}"
        what = f"no progress for {self.seconds:.0f} s: rank {self.rank} is stuck in {where}"
        if self.silent:
            what = f"rank {self.rank} has not answered for {self.seconds:.0f} s, last seen in {where}: stopped or gone"
        return what + (f". Stacks of the other ranks: {self.stacks}" if self.stacks else "")


@dataclass(frozen=True, kw_only=True)
class Compiled(Event, kind="compile"):
    seconds: Finite
    break_even: Count | None

    def sentence(self) -> str:
        gain = f"break-even at step {self.break_even} (estimated)" if self.break_even else "gain unknown"
        return f"compiling took {self.seconds:.1f} s, {gain}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    ignores_unknown: ClassVar[bool] = True

    micro_batch: Count
    tokens_per_s: Finite | None
    first_s: Finite | None = None


@dataclass(frozen=True, kw_only=True)
class MicroBatchSearched(Event, kind="micro_batch"):
    trials: tuple[Trial, ...]
    seconds: Finite
    compile_seconds: Finite

    def sentence(self) -> str:
        tried = ", ".join(
            f"{one.micro_batch} {f'{one.tokens_per_s:,.0f} tokens/s' if one.tokens_per_s else 'did not fit'}"
            for one in self.trials
        )
        compiling = f", {self.compile_seconds:.1f} s of it in first passes" if self.compile_seconds else ""
        return f"micro-batch search took {self.seconds:.1f} s{compiling}: {tried}"


@dataclass(frozen=True, kw_only=True)
class MemoryRanOut(Event, kind="oom"):
    micro_batch: Count
    now: Count
    error: Scalar = None

    def sentence(self) -> str:
        return (
            f"out of memory with micro-batch {self.micro_batch}; this step is repeated with micro-batch {self.now} "
            "and more accumulation, and all later steps use it"
        )


@dataclass(frozen=True, kw_only=True)
class WorkerAdded(Event, kind="workers"):
    workers: Count
    data_share: Finite | None

    def sentence(self) -> str:
        return f"{percent(self.data_share)} of the time was spent waiting for data; now {self.workers} workers"


@dataclass(frozen=True, kw_only=True)
class LinesDropped(Event, kind="lines_dropped"):
    num_lines: Count

    def sentence(self) -> str:
        return f"{self.num_lines:,} lines of the record were dropped because they could not be written (disk full?)"


@dataclass(frozen=True, kw_only=True)
class SinkFailed(Event, kind="sink_failed"):
    sink: str
    error: Scalar

    def sentence(self) -> str:
        return f"{self.sink} failed and is switched off: {self.error}"


@dataclass(frozen=True, kw_only=True)
class Notice(Event, kind="notice"):
    text: Scalar

    def sentence(self) -> str:
        return str(self.text)


@dataclass(frozen=True, kw_only=True)
class BadCheckpoint(Event, kind="bad-checkpoint"):
    text: Scalar

    def sentence(self) -> str:
        return str(self.text)


# -- recipe rft


@dataclass(frozen=True, kw_only=True)
class StageTrained(Event, kind="stage"):
    folder: str
    steps: Count
    seconds: Finite
    loss: float | None
    val_loss: float | None

    @classmethod
    def of(cls, outcome: Outcome, folder: Path) -> StageTrained:
        return cls(
            folder=str(folder),
            steps=outcome.steps,
            seconds=outcome.hours * 3600,
            loss=outcome.loss_last_tenth,
            val_loss=outcome.val_losses[-1] if outcome.val_losses else None,
        )

    def sentence(self) -> str:
        losses = f"loss {number(self.loss)}, validation loss {number(self.val_loss)}"
        return f"{self.folder}: {self.steps} steps in {duration(self.seconds)}, {losses}"


@dataclass(frozen=True, kw_only=True)
class SamplingBegan(Event, kind="sample"):
    round: Count
    task: str
    questions: Count
    oversample: Count
    adaptive: bool
    temperature: Finite
    model: str
    on: str
    rows: Count | None = None

    def sentence(self) -> str:
        how = "at most" if self.adaptive else "exactly"
        return (
            f"round {self.round}: {self.questions:,} questions of {self.task}, {how} {self.oversample} "
            f"samples each at temperature {self.temperature:g}, from {self.model} ({self.on})"
        )


@dataclass(frozen=True, kw_only=True)
class SamplingProgress(Event, kind="sampling"):
    """Progress of sampling. It is shown as a `line` that the next one replaces, not as a sentence."""

    questions: Count
    of: Count
    samples: Count
    kept: Count
    success_rate: Finite | None
    tokens_per_s: Finite | None
    left_s: Finite | None
    rows: Count
    memory: Mapping[str, Finite]

    def line(self) -> str:
        used, total = self.memory.get("peak_gib", self.memory.get("allocated_gib")), self.memory.get("total_gib")
        parts = [
            f"questions {self.questions:,}/{self.of:,}",
            f"samples {self.samples:,}",
            f"kept {self.kept:,}",
            f"success {percent(self.success_rate)}",
            f"{number(self.tokens_per_s)} tok/s",
            f"{self.rows} rows",
            f"mem {number(used)}/{number(total)} GiB" + (f" ({percent(used / total)})" if used and total else ""),
            f"ETA {duration(self.left_s)}",
        ]
        return "  ".join(parts)


@dataclass(frozen=True, kw_only=True)
class ChunkSampled(Event, kind="chunk"):
    """A sampled chunk of questions. `surprisal` is the mean negative log-probability of its tokens.

    It is recorded and not printed: the terminal shows `SamplingProgress`.
    """

    samples: Count
    correct: Count
    tokens: Count
    seconds: Finite
    surprisal: Finite | None


@dataclass(frozen=True, kw_only=True)
class RowsHalved(Event, kind="rows"):
    rows: Count
    now: Count
    error: Scalar = None

    def sentence(self) -> str:
        return f"out of memory with {self.rows} concurrent sequences; they are sampled again with {self.now}"


@dataclass(frozen=True, kw_only=True)
class DatasetMade(Event, kind="dataset"):
    round: Count
    path: str
    questions: Count
    solved: Count
    kept: Count
    correct: Count
    samples: Count
    tokens: Count
    seconds: Finite
    success_rate: Finite | None
    correct_share: Finite | None
    answered_share: Finite | None
    tokens_per_s: Finite | None
    duplicates: Count
    unfinished: Count
    cut_short: Count
    too_long: Count
    killed: Count
    answered: Count | None = None

    def sentence(self) -> str:
        parts = [
            f"round {self.round}: {self.solved:,} of {self.questions:,} questions solved "
            f"({percent(self.success_rate)}), {self.kept:,} rows kept from {self.correct:,} correct answers in "
            f"{self.samples:,} samples ({percent(self.correct_share)}; {percent(self.answered_share)} answered), "
            f"{self.tokens:,} tokens in {duration(self.seconds)}, {number(self.tokens_per_s)} tokens/s",
        ]
        left_out = {
            "duplicates": self.duplicates,
            "correct but cut off": self.unfinished,
            "cut off at the length limit": self.cut_short,
            "longer than the context window": self.too_long,
            "graders killed": self.killed,
        }
        parts += [f"{count:,} {words}" for words, count in left_out.items() if count]
        return f"{', '.join(parts)}; {self.path}"


@dataclass(frozen=True, kw_only=True)
class StudentScored(Event, kind="score"):
    round: Count
    value: Finite
    n: Count
    details: _Details
    task: str | None = None
    spec: str | None = None
    metric: str = "accuracy"
    low: float | None = None
    high: float | None = None
    of: Count | None = None
    samples: Count = 1
    seconds: Finite | None = None

    def sentence(self) -> str:
        when = f"after round {self.round}" if self.round else "before training"
        answered = percent(self.details.get("answered"))
        return f"{when}: {percent(self.value)} of {self.n:,} questions correct, {answered} answered"


@dataclass(frozen=True, kw_only=True)
class Gain:
    ignores_unknown: ClassVar[bool] = True

    value: Finite
    low: Finite
    high: Finite
    p: Finite | None
    n: Count | None = None


@dataclass(frozen=True, kw_only=True)
class StudentJudged(Event, kind="rft"):
    """The student on the same held-out questions, before and after each round."""

    difference: Gain | None
    seconds: Finite | None
    task: str = ""
    n: Count = 0
    accuracy: tuple[float, ...] = ()
    intervals: tuple[tuple[float | None, float | None], ...] = ()
    answered: tuple[float | None, ...] = ()
    dataset: Mapping[str, Any] | None = None

    def sentence(self) -> str:
        found, took = self.difference, duration(self.seconds)
        if found is None:
            return f"too few questions to tell whether accuracy changed; {took} in total"
        words = "rose" if found.low > 0 else "fell" if found.high < 0 else "did not change significantly"
        return (
            f"accuracy {words}: {100 * found.value:+.1f} points (95 % interval {100 * found.low:+.1f} to "
            f"{100 * found.high:+.1f}, McNemar p {number(found.p, digits=2)}), {took} in total"
        )


# -- another script, watched by the doctor


@dataclass(frozen=True, kw_only=True)
class ScriptWatched(Facts, kind="observed"):
    """What the doctor's agent observed."""
