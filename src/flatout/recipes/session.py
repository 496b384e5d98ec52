"""The environment of every recipe's loop: run folder, monitor, signals, and the ledger of finished steps."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout import trackers
from flatout.config import dump, to_mapping
from flatout.config.settings import Settings
from flatout.cost import GIB
from flatout.engine.faults import SkipWatch, StopRequest, stop_on_signals
from flatout.engine.prepare import recompiles
from flatout.engine.ranks import Ranks
from flatout.engine.resolve import Active
from flatout.engine.step import StepFacts
from flatout.files import inside
from flatout.plan import Plan, compile_break_even
from flatout.probe import Monitor, describe, launched
from flatout.record import WARM_STEPS, Outcome, Recorder, Run, Sink, Span, StepExtra, StepRecord, redacted
from flatout.record.events import Compiled, Notice, UpdateSkipped
from flatout.record.records import PEAK
from flatout.verdict import LossTrend, Speedometer, reward_ends

# Steps between garbage collections when the plan disables automatic ones.
GC_STEPS = 500


@dataclass(frozen=True, kw_only=True)
class Session:
    run: Run
    recorder: Recorder
    monitor: Monitor
    stop: StopRequest


def begun(folder: Path, ranks: Ranks, *, resume: bool) -> bool:
    """Whether there is a run to resume: as asked, or because a launcher restarted this job.

    A run that was killed before its folder stood starts again.
    """
    return ranks.any(ranks.first and (resume or launched.continues(folder)) and not Run.is_missing(folder))


@contextmanager
def open_session(
    settings: Settings,
    *,
    plan: Plan,
    ranks: Ranks,
    folder: Path,
    resume: bool,
    sinks: Sequence[Sink],
) -> Iterator[Session]:
    """Creates or opens the run folder, locks it, and starts recording and monitoring; undoes it all at the end."""
    config_text, config = dump(settings), to_mapping(settings)
    with ExitStack() as stack:
        with ranks.first_leads():
            if ranks.first:
                restarted, changed = not resume and Run.is_half_made(folder), {}
                log = settings.log
                trackers.check(
                    tensorboard=log.tensorboard, wandb=log.wandb != "off", trackio=log.trackio, mlflow=log.mlflow
                )
                if resume:
                    run = Run.open(folder)
                    stack.enter_context(run.lock())
                    changed = changed_settings(run.config, redacted(config))
                    run.reconfigure(config_text=config_text, config=config)
                else:
                    run = stack.enter_context(
                        Run.created(
                            folder,
                            config_text=config_text,
                            config=config,
                            plan=plan.to_json(),
                            hardware=plan.job.hardware.to_json(),
                            environment=describe(),
                        )
                    )
                recorder = stack.enter_context(run.recorder(sinks=[*sinks, *_trackers(settings, run, plan, config)]))
                if changed:
                    words = "; ".join(f"{key} {before} -> {now}" for key, (before, now) in changed.items())
                    recorder.event(Notice(text=f"this attempt has other settings than the one before: {words}"))
                if restarted:
                    text = f"{folder} was not complete when the run was stopped: the run starts from the beginning"
                    recorder.event(Notice(text=text))
        attempt = ranks.agree(str(recorder.attempt) if ranks.first else "")
        if not ranks.first:
            run = Run.open(folder)
            recorder = stack.enter_context(run.recorder(rank=ranks.rank, attempt=int(attempt)))
        monitor = stack.enter_context(Monitor(on_sample=recorder.sample, gpu=ranks.local_rank))
        stop = stack.enter_context(stop_on_signals())
        if plan.decisions.manual_gc:
            gc.collect()
            gc.disable()
            stack.callback(gc.enable)
        yield Session(run=run, recorder=recorder, monitor=monitor, stop=stop)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ between two attempts, with both values, by their dotted names."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= {f"{key}.{name}": values for name, values in changed_settings(old, new).items()}
        elif key in now and key != "run" and _as_json(old) != _as_json(new):  # a key of later versions says nothing
            found[key] = (old, new)
    return found


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _trackers(settings: Settings, run: Run, plan: Plan, config: Mapping[str, Any]) -> Iterator[Sink]:
    log = settings.log
    name = log.name or trackers.run_name(settings.recipe)
    if log.tensorboard:
        yield trackers.tensorboard(inside(run.trackers_dir / "tensorboard" / name, run.path), rates=plan.rates)
    if log.wandb != "off":
        yield trackers.wandb(
            log.wandb, project=log.project, name=name, folder=run.trackers_dir, config=config, rates=plan.rates
        )
    shared: dict[str, Any] = {"project": log.project, "name": name, "config": config, "rates": plan.rates}
    if log.trackio:
        yield trackers.trackio(**shared)
    if log.mlflow:
        yield trackers.mlflow(folder=inside(run.trackers_dir / "mlflow", run.path), **shared)


class Ledger:
    """Writes finished steps to the record and keeps the sums for the run's verdict."""

    def __init__(self, session: Session, *, plan: Plan, active: Active, traced: tuple[int, int] | None = None) -> None:
        """`traced` are the first and the last step under the profiler."""
        self.session, self.plan, self.active, self.traced = session, plan, active, traced
        self.speed = Speedometer(plan.rates)
        self.trend = LossTrend()
        self.skips = SkipWatch(plan.decisions.precision)
        self.tokens, self.seconds, self.saves = 0, 0.0, 0
        self.val_losses: list[float] = []
        self.task_scores: list[float] = []
        self._busy: list[float] = []
        self._early: list[float] = []
        self._looked = (0.0, 0.0)
        self._peaks: dict[str, float] = {}  # GiB, by phase

    def write(self, finished: Iterable[StepFacts]) -> None:
        for facts in finished:
            profiled = self.traced is not None and self.traced[0] <= facts.step <= self.traced[1]
            extra = StepExtra(
                lr=facts.lr,
                grad_norm=facts.grad_norm,
                targets=facts.target_tokens,
                skipped=facts.skipped,
                loss_scale=facts.loss_scale,
                graphs=recompiles() if self.active.compile != "none" else None,
                profiled=profiled,
                metrics=facts.metrics,
            )
            utilisation = self.session.monitor.utilisation()
            record = StepRecord(
                attempt=self.session.recorder.attempt,
                step=facts.step,
                time=facts.time,
                seconds=facts.seconds,
                tokens=facts.tokens,
                padded_tokens=facts.padded_tokens,
                loss=facts.loss,
                # What a profiler costs is in every phase, so that the phases of such a step are not known.
                spans=(Span(phase="profile", seconds=facts.seconds),) if profiled else facts.spans,
                memory=self._memory() | self._new_peaks(facts.peaks_gib),
                utilisation=utilisation,
                extra=extra,
            )
            self.session.recorder.step(record)
            self._compile_payback(record)
            self.tokens += facts.tokens
            self.seconds += facts.seconds
            self.speed.see(record)
            self.trend.see(facts.loss)
            if "gpu" in utilisation:
                self._busy.append(utilisation["gpu"])
            if facts.step % GC_STEPS == GC_STEPS - 1 and not gc.isenabled():
                gc.collect()
            if self.skips.see(step=facts.step, loss=facts.loss, grad_norm=facts.grad_norm):
                self.session.recorder.event(UpdateSkipped(step=facts.step, loss=facts.loss, grad_norm=facts.grad_norm))

    def _memory(self) -> dict[str, float]:
        found = device_memory(self.active.device, self.session.monitor)
        if self._peaks:  # the allocator's own peak begins again with every phase
            found["peak_gib"] = max(found["peak_gib"], *self._peaks.values())
        return found

    def _new_peaks(self, peaks_gib: Mapping[str, float]) -> dict[str, float]:
        """The phases that needed more memory than in any step before."""
        new = {phase: gib for phase, gib in peaks_gib.items() if gib > self._peaks.get(phase, 0.0)}
        self._peaks |= new
        return {f"{PEAK}/{phase}": gib for phase, gib in new.items() if phase}

    def _compile_payback(self, record: StepRecord) -> None:
        """Records once how long compiling took, from the first steps, and the step at which it breaks even."""
        if self.active.compile == "none" or len(self._early) > WARM_STEPS:
            return
        self._early.append(record.training_s)
        if len(self._early) > WARM_STEPS:
            took = max(0.0, self._early[0] - self._early[-1])
            paid = compile_break_even(self.plan.job, precision=self.plan.decisions.precision, compile_s=took)
            self.session.recorder.event(Compiled(step=record.step, seconds=took, break_even=paid))

    def remember(self, steps: Iterable[StepRecord], *, before_step: int) -> None:
        """Adds the steps of earlier attempts, so that the run is judged as a whole."""
        for record in steps:
            if record.step < before_step:
                self.speed.see(record)
                if record.loss is not None:
                    self.trend.see(record.loss)
        self._looked = (self.speed.data, self.speed.seconds)

    def data_share_since_last(self) -> float | None:
        """Share of the time spent waiting for data since the last call."""
        data, seconds = self.speed.data - self._looked[0], self.speed.seconds - self._looked[1]
        self._looked = (self.speed.data, self.speed.seconds)
        return data / seconds if seconds > 0 else None

    def outcome(self, *, steps: int, stopped_by: str, saved_step: int | None) -> Outcome:
        memory = self._memory()
        peak, total = memory.get("peak_gib"), memory.get("total_gib")
        first, last = self.trend.ends()
        rewards = reward_ends(self.session.run)
        return Outcome(
            steps=steps,
            tokens=self.tokens,
            hours=self.seconds / 3600,
            speed=self.speed.read(),
            loss_first_tenth=first,
            loss_last_tenth=last,
            val_losses=tuple(self.val_losses),
            task_scores=tuple(self.task_scores),
            reward_first_tenth=rewards[0],
            reward_last_tenth=rewards[1],
            peak_gib=peak,
            memory_share=peak / total if peak is not None and total else None,
            utilisation=sum(self._busy) / len(self._busy) if self._busy else None,
            saves=self.saves,
            saved_step=saved_step,
            stopped_by=stopped_by,
        )


def device_memory(device: torch.device, monitor: Monitor) -> dict[str, float]:
    """The allocator's memory on a GPU, the process's resident memory on a CPU. Does not synchronize."""
    if device.type == "cuda":
        return {
            "allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            "peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "total_gib": torch.cuda.get_device_properties(device).total_memory / GIB,
        }
    sample = monitor.latest()
    memory = {}
    if "process_rss_gib" in sample:
        memory["allocated_gib"] = sample["process_rss_gib"]
        memory["peak_gib"] = monitor.peak["process_rss_gib"]
        memory["total_gib"] = sample["ram_total_gib"]
    return memory


def identity_of(**facts: Any) -> str:
    """One hash over everything that a checkpoint must share with the run that loads it."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
