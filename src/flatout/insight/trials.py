"""Trials: short runs of one configuration with other settings, each in a process of its own (for `ablate` and `tune`).

A finished trial is one file in the folder of the search, so a search that was killed continues without repeating one. A
trial that crashes, hangs or runs out of memory is kept too, with its cause. The processes of a trial end with the
search, whatever ends it (`processes`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from flatout import __version__, parity
from flatout.config import load, to_mapping
from flatout.config.recipes import RECIPES
from flatout.config.settings import RftSettings, RouterSettings, Settings, TrainSettings
from flatout.errors import UsageError
from flatout.files import BadFile, cache_folder, read_json, typed, write_atomic
from flatout.hardware import detect, with_cpu_facts
from flatout.insight.compare import BLOCK_STEPS
from flatout.insight.processes import CORES, Ended, Process
from flatout.insight.story import tell
from flatout.insight.switches import LR, ROWS, SCHEDULE, TRAIN, WARMUP
from flatout.plan import decide, job_of
from flatout.record import WARM_STEPS, Event, Run, StepRecord, redact
from flatout.record.events import (
    ChunkSampled,
    DatasetMade,
    MemoryRanOut,
    RowsHalved,
    SamplingBegan,
    SamplingProgress,
)
from flatout.record.records import BESIDE
from flatout.record.rollouts import RolloutsGraded
from flatout.record.run import SEARCH

# The negative log-probability of generated tokens, in the records of recipe rl.
NLL = "nll"
TRIALS, LOCK, IMPORTED = "trials", "lock", "imported"
# Settings that have no effect without tasks.
OF_TASKS = ("criterion", "tasks_every", "task_limit", "task_tokens")
# Steps of a trial after its warm-up.
STEPS = BLOCK_STEPS
# A trial that lasts longer has hung, unless the first ones took long too.
LIMIT_S, LIMIT_TIMES = 600.0, 10.0
OUT_OF_MEMORY = "out of memory"
_MEMORY_WORDS = ("out of memory", "outofmemory", "cannot allocate memory", "memoryerror")
_SHOWN = 300


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings that differ from the configuration's, by dotted key, and code that runs before the command."""

    settings: Mapping[str, Any]
    seed: int
    code: str = ""

    @property
    def key(self) -> str:
        told = json.dumps([sorted(self.settings.items()), self.seed, self.code], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a trial measured. Unknown is None; `problem` is why there is nothing."""

    key: str
    settings: dict[str, Any]
    seed: int
    code: str = ""
    seconds: float = 0.0  # of the whole process
    start_s: float | None = None  # from the command to the end of the first step
    log_time: float | None = None  # the median logarithm of the seconds per token of warm steps
    log_total: float | None = None  # the same of all warm steps together, for what costs time in some steps only
    tokens_per_s: float | None = None  # of a typical warm step, as is mfu
    mfu: float | None = None
    peak_gib: float | None = None
    loss: float | None = None  # mean over the warm steps; for recipe rl, of the generated tokens' -log p
    last_loss: float | None = None  # mean over the last quarter of them
    problem: str | None = None
    stopped_s: float | None = None  # the limit that it exceeded
    decisions: dict[str, Any] = field(default_factory=dict)  # of the plan, as they were at the end
    active: dict[str, str] = field(default_factory=dict)  # the paths that the device supports
    call: float = 0.0  # when the call that measured it began: the speeds of two calls are not compared

    @property
    def out_of_memory(self) -> bool:
        return self.problem is not None and self.problem.startswith(OUT_OF_MEMORY)


class Trials:
    """The trials of one search, in one folder."""

    def __init__(
        self,
        config: Path,
        overrides: Sequence[str],
        *,
        folder: Path,
        limit_s: float = LIMIT_S,
        steps: int = STEPS,
        base: Mapping[str, Any] | None = None,
        reach_peak: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`base`: settings of every trial that does not set them itself; an existing folder keeps its own.

        With `reach_peak`, the warm-up of a trial ends early, so that it says something about the learning rate.
        """
        self.config, self.overrides, self.folder = config, list(overrides), folder
        self.settings = load(config, overrides=self.overrides).settings
        self.base = planned(self.settings) if base is None else dict(base)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError("trials are single processes: run this command without torchrun")
        self.samples, self.on_gpu = RECIPES[self.settings.recipe].samples, detect().gpu is not None
        self.limit_s, self.steps, self.reach_peak, self.say = limit_s, steps, reach_peak, say
        self.ahead = self.on_gpu and len(os.sched_getaffinity(0)) >= CORES
        self._next: Process | None = None
        self.found: dict[str, Measured] = {}
        self.call = time.time()
        self.spent_s = 0.0  # by the trials of this call
        load(config, overrides=[*self.overrides, *self._given(Trial(settings={}, seed=0))])  # or a mistake is named
        self._open()
        self.say(f"trials in {folder}")

    def _open(self) -> None:
        """Starts the folder, or reads what an earlier call measured there with the same configuration."""
        whole = json.dumps(to_mapping(self.settings), sort_keys=True)
        told = {
            "configuration": hashlib.sha256(whole.encode()).hexdigest(),  # it may contain secrets
            "number of steps": self.steps,
            "device": detect().gpu or "CPU",
            "version of flatout": __version__,
        }
        name = self.folder / SEARCH
        if name.exists():
            found = read_json(name)
            self.base = found.pop("base", {})
            if other := [key for key in told if found.get(key) != told[key]]:
                raise UsageError(
                    f"{self.folder} holds trials made with a different {' and a different '.join(other)}: name another "
                    "--run FOLDER"
                )
            self._lock()
            for file in sorted((self.folder / TRIALS).glob("*.json")):
                try:
                    one = typed(Measured, read_json(file, root=self.folder), source=file)
                except BadFile as error:
                    raise UsageError(f"{error}; delete the file to measure that trial again") from None
                self.found[one.key] = one
                self._allow(one)
            for left in self.folder.glob("trial-*"):  # of the trial that was running when an earlier call was killed
                shutil.rmtree(left, ignore_errors=True)
            return
        if self.folder.exists() and any(self.folder.iterdir()):
            raise UsageError(f"{self.folder} is not empty and holds no trials: name another --run FOLDER")
        try:
            (self.folder / TRIALS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--run {self.folder} cannot be created: {error.strerror}") from None
        self._lock()
        write_atomic(name, json.dumps(told | {"base": self.base}, indent=1).encode())

    def _lock(self) -> None:
        """Refuses a second search in the same folder; the system releases the lock when the process ends."""
        self._locked = (self.folder / LOCK).open("a")
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"another search is using {self.folder}: wait for it, or name another --run FOLDER"
            ) from None

    @property
    def about(self) -> str | None:
        """What trials of this recipe measure, where that is not plain."""
        likelihood = "The loss is the mean negative log-probability of the generated tokens."
        if self.samples:
            return f"Trials of recipe {self.settings.recipe} only sample. {likelihood}"
        if RECIPES[self.settings.recipe].rolls_out:
            return likelihood
        if RECIPES[self.settings.recipe].routes:
            phase = short(self.settings).get("router.phase", self.settings.router.phase)
            return f"Trials train phase {phase} of recipe router; router.phase selects another one."
        return None

    def known(self, trial: Trial) -> bool:
        """Whether it was measured. One that was stopped is tried again if it may take longer now."""
        found = self.found.get(trial.key)
        return found is not None and not (found.stopped_s is not None and found.stopped_s < self.limit_s)

    def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
        """Runs a trial, unless it is known; with `again`, one that failed then is tried again."""
        if self.known(trial) and not (again and self.found[trial.key].problem):
            return self.found[trial.key]
        began = time.time()
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="trial-") as scratch:
            run = Path(scratch) / "run"
            ended = self._process(trial, run)
            seconds = time.time() - began
            if ended.timed_out:
                found = self._failed(trial, seconds, f"it did not end within {self.limit_s:.0f} s and was stopped")
                found = replace(found, stopped_s=self.limit_s)
            elif ended.returncode and not (self.samples and _sampled_all(run)):
                found = self._failed(trial, seconds, _cause(ended))
            else:
                found = self._measured(trial, Run.open(run), seconds=seconds, began=_command_time(run, began=began))
        found = replace(found, call=self.call)
        self.found[found.key] = found
        self.spent_s += found.seconds
        file = self.folder / TRIALS / f"{found.key}.json"
        write_atomic(file, json.dumps(asdict(found), indent=1).encode(), root=self.folder)
        self._allow(found)
        self.say(f"{name}: {found.problem or _figures(found)} ({seconds:.0f} s)")
        return found

    def _allow(self, found: Measured) -> None:
        """Raises the limit where trials take long."""
        if found.problem is None:
            self.limit_s = max(self.limit_s, LIMIT_TIMES * found.seconds)

    def _process(self, trial: Trial, run: Path) -> Ended:
        arguments = [str(self.config), *self.overrides, *self._given(trial), "--run", str(run)]
        verb = "sample" if self.samples else "train"
        if not self.ahead:
            process = Process([*flatout_command(trial.code, verb), *arguments])
        else:
            if self._next is not None and not self._next.runs:
                self.close()
            process, self._next = self._next or Process.waiting(), None
        try:
            if self.ahead:
                process.tell([verb, *arguments], code=trial.code, times=run.parent / IMPORTED)
                self._next = Process.waiting()
            return process.wait(self.limit_s)
        finally:
            process.close()

    def close(self) -> None:
        """Ends the process that waits for another trial."""
        if self._next is not None:
            self._next.close()
            self._next = None

    def _given(self, trial: Trial) -> list[str]:
        """The overrides of a trial. What makes it short comes last."""
        values = {**self.base, **trial.settings, **short(self.settings, steps=self.steps), "seed": trial.seed}
        if not self.samples:
            own = {key: trial.settings[key] for key in (LR, WARMUP) if key in trial.settings}
            train = replace(self.settings.train, **{key.removeprefix(TRAIN): value for key, value in own.items()})
            values |= rates(train, steps=values["train.steps"], reach_peak=self.reach_peak)
            if self.reach_peak:
                values |= own
        return [f"{key}={_word(value)}" for key, value in values.items()]

    def _failed(self, trial: Trial, seconds: float, problem: str) -> Measured:
        return replace(_of(trial, seconds), problem=redact(problem))

    def _measured(self, trial: Trial, run: Run, *, seconds: float, began: float) -> Measured:
        events = list(run.events())
        if ran_out := next((event for event in events if isinstance(event, MemoryRanOut)), None):
            found = self._failed(trial, seconds, f"{OUT_OF_MEMORY} with micro-batch {ran_out.micro_batch}")
            return replace(found, decisions={"micro_batch": ran_out.micro_batch})
        if self.samples:
            return self._sampled(trial, run, events, seconds=seconds, began=began)
        story, steps = tell(run), list(run.latest_steps())
        size = self.settings.rl.steps_in_phase if self.settings.recipe == "rl" else 1
        warm = [step for step in steps[WARM_STEPS * size :] if step.tokens and step.training_s > 0]
        # Only the first step of a phase generates, so a phase is measured as a whole.
        parts = [warm[at : at + size] for at in range(0, len(warm) - size + 1, size)]
        spent = [sum(map(self._training_s, part)) / sum(step.tokens for step in part) for part in parts]
        if not spent:
            return self._failed(trial, seconds, "it took no step after its warm-up")
        losses = [step.loss for step in warm if step.loss is not None]
        if not losses or not all(map(math.isfinite, losses)):
            return self._failed(trial, seconds, "its loss is not finite")
        if self.settings.recipe == "rl":  # a policy's loss is close to zero, whatever it does
            losses = [step.extra.metrics[NLL] for step in warm]
        typical = parity.typical(spent)
        rolled = next((event for event in reversed(events) if isinstance(event, RolloutsGraded)), None)
        return replace(
            _of(trial, seconds),
            start_s=steps[0].time - began,
            log_time=typical,
            log_total=math.log(sum(map(self._training_s, warm)) / sum(step.tokens for step in warm)),
            tokens_per_s=math.exp(-typical),
            mfu=_scaled(story.speed.mfu, math.exp(-typical), story.speed.tokens_per_s),
            peak_gib=story.peak_gib,
            loss=fmean(losses),
            last_loss=fmean(losses[-max(1, len(losses) // 4) :]),
            decisions={choice.name: choice.value for choice in story.choices}
            | ({} if rolled is None else {ROWS: rolled.rows}),
            active=dict(story.active),
        )

    def _training_s(self, step: StepRecord) -> float:
        """On a GPU by the device's clock: the host runs ahead in the first steps, and waits for the last one."""
        spent = sum(span.seconds for span in step.spans if span.phase not in BESIDE)
        return spent if self.on_gpu and spent > 0 else step.training_s

    def _sampled(self, trial: Trial, run: Run, events: Sequence[Event], *, seconds: float, began: float) -> Measured:
        """A trial that samples is measured by its chunks; the first one warms up."""
        if halved := next((event for event in events if isinstance(event, RowsHalved)), None):
            found = self._failed(trial, seconds, f"{OUT_OF_MEMORY} with {halved.rows} concurrent sequences")
            return replace(found, decisions={ROWS: halved.rows})
        chunks = [event for event in events if isinstance(event, ChunkSampled) and event.tokens]
        warm, began_with = chunks[1:], next(event for event in events if isinstance(event, SamplingBegan))
        if not warm:
            return self._failed(trial, seconds, "it sampled fewer than two chunks: give a smaller rft.chunk")
        story, typical = tell(run), parity.typical([chunk.seconds / chunk.tokens for chunk in warm])
        spent_s, tokens = sum(chunk.seconds for chunk in warm), sum(chunk.tokens for chunk in warm)
        progress = [event.memory for event in events if isinstance(event, SamplingProgress)]
        peaks = [memory["peak_gib"] for memory in progress if "peak_gib" in memory]
        return replace(
            _of(trial, seconds),
            start_s=chunks[0].time - began,
            log_time=typical,
            log_total=math.log(spent_s / tokens),
            tokens_per_s=math.exp(-typical),
            peak_gib=max(peaks, default=None),
            loss=fmean(chunk.surprisal for chunk in warm if chunk.surprisal is not None),
            decisions={choice.name: choice.value for choice in story.choices} | {ROWS: began_with.rows},
            active=dict(story.active),
        )


def planned(settings: Settings) -> dict[str, Any]:
    """Decisions that follow from the real length of the run, or from what else the machine does at the moment."""
    made = decide(job_of(settings, hardware=with_cpu_facts(detect(), cache=cache_folder()), num_ranks=1))
    found: dict[str, Any] = {"plan.compile": made.decisions.compile}
    return found if made.job.device == "gpu" else found | {"plan.threads": made.decisions.threads}


def short(settings: Settings, *, steps: int = STEPS) -> dict[str, Any]:
    """What makes a run short, the same for every trial; the batch and the lengths stay."""
    if RECIPES[settings.recipe].samples:
        return _some_chunks(settings.rft, steps=steps)
    plain = Settings()
    steps = (WARM_STEPS + steps) * (settings.rl.steps_in_phase if settings.recipe == "rl" else 1)
    found: dict[str, Any] = {
        "train.steps": steps,
        "train.epochs": None,
        "train.tokens": None,
        "eval.every": None,
        "eval.tokens": min(settings.eval.tokens, 4 * settings.data.sequence_length),
        "eval.patience": None,
        "eval.tasks": [],
        **{f"eval.{name}": getattr(plain.eval, name) for name in OF_TASKS},
        "target.val_loss": None,
        "profile.steps": None,
        "save.every": None,
        "save.best": False,
        "save.weights_only": True,
        "log.tensorboard": False,
        "log.wandb": "off",
    }
    if RECIPES[settings.recipe].rolls_out:
        return found | {"rl.teach": 0, "rl.teach_lr": None}
    if RECIPES[settings.recipe].routes:
        return found | _one_phase(settings.router)
    return found


def rates(train: TrainSettings, *, steps: int, reach_peak: bool = False) -> dict[str, Any]:
    """A trial has the learning rates of the run's first steps, where nothing decays yet.

    With `reach_peak` it is a whole run: it warms up in at most a quarter of its steps, and decays.
    """
    warmup = train.warmup_steps
    if reach_peak:
        return {WARMUP: min(warmup, steps // 4)}
    if warmup < steps:
        return {SCHEDULE: "constant", WARMUP: warmup}
    return {SCHEDULE: "constant", WARMUP: steps - 1, LR: train.lr * steps / (warmup + 1)}


def _some_chunks(rft: RftSettings, *, steps: int) -> dict[str, Any]:
    """A trial of recipe rft samples chunks of questions, all samples of each, and trains nothing."""
    questions = rft.chunk * (1 + steps)
    return {
        "rft.questions": questions if rft.questions is None else min(questions, rft.questions),
        "rft.adaptive": False,
        "log.tensorboard": False,
        "log.wandb": "off",
    }


def _one_phase(router: RouterSettings) -> dict[str, Any]:
    """A trial of recipe router trains one phase, the configured one or the adapters, and scores one question a task."""
    found: dict[str, Any] = {"router.questions": 1, "router.answer_tokens": 1}
    found |= {"router.router_steps": None, "router.joint_steps": None}
    if router.teach_steps is not None:
        found["router.teach_steps"] = 1
    return found | ({"router.phase": "1"} if router.phase == "all" else {})


def _of(trial: Trial, seconds: float) -> Measured:
    return Measured(key=trial.key, settings=dict(trial.settings), seed=trial.seed, code=trial.code, seconds=seconds)


def _figures(found: Measured) -> str:
    speed, loss = found.tokens_per_s, found.loss
    return f"{'n/a' if speed is None else f'{speed:,.0f}'} tokens/s" + ("" if loss is None else f", loss {loss:.4f}")


def flatout_command(code: str, verb: str) -> list[str]:
    """The command, behind the code of a switch."""
    start = ["-c", f"{code}\nfrom flatout.cli import main; main()"] if code else ["-m", "flatout"]
    return [sys.executable, *start, verb]


def _scaled(value: float | None, to: float, of: float | None) -> float | None:
    return value * to / of if value is not None and of else None


def _command_time(run: Path, *, began: float) -> float:
    """The start of a trial for its start-up time: `began`, or earlier by the time of the imports it did ahead."""
    try:
        imported_s, ready = json.loads((run.parent / IMPORTED).read_text())
    except FileNotFoundError:
        return began
    return float(max(began, ready) - imported_s)


def _word(value: Any) -> str:
    return "null" if value is None else json.dumps(value) if isinstance(value, bool | list) else str(value)


def _sampled_all(run: Path) -> bool:
    """Whether a run that failed had sampled all its questions, and only lacked correct answers to train on."""
    return Run.is_named_by(str(run)) and any(isinstance(event, DatasetMade) for event in Run.open(run).events())


def _cause(ended: Ended) -> str:
    """The last line on stderr that says something, with out-of-memory named first."""
    lines = [line.strip() for line in ended.said.splitlines() if line.strip()]
    last = (lines[-1] if lines else "it said nothing")[:_SHOWN]
    if ended.oom_killed and ended.returncode == -signal.SIGKILL:
        return f"{OUT_OF_MEMORY}: the kernel's OOM killer ended it"
    if any(word in ended.said.lower() for word in _MEMORY_WORDS):
        return f"{OUT_OF_MEMORY}: {last}"
    code = ended.returncode
    how = f"exit {code}" if code > 0 else f"killed by signal {-code} ({signal.strsignal(-code)})"
    return f"{how}: {last}"
