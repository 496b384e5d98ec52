"""The training loop of every recipe. A recipe's data and objective are its `Material`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.config.settings import Settings
from flatout.engine.faults import OutOfMemory
from flatout.errors import RunFailed
from flatout.recipes.material import OpenMaterial
from flatout.recipes.session import Session
from flatout.recipes.setup import Training, set_up
from flatout.recipes.validation import every
from flatout.record import Outcome, Sink, events
from flatout.verdict import judge

# A loader worker is added when more than this share of the time is spent waiting for data, checked this often.
WAIT_SHARE, WAIT_STEPS = 0.02, 20


def train(
    settings: Settings,
    open_material: OpenMaterial,
    *,
    folder: Path,
    resume: bool = False,
    sinks: Sequence[Sink] = (),
    session: Session | None = None,
) -> Outcome:
    """Trains a recipe. A recipe that already has the run folder open passes its `session`."""
    with set_up(settings, open_material, folder=folder, resume=resume, sinks=sinks, session=session) as training:
        return _loop(training)


def _loop(training: Training) -> Outcome:
    engine, batches, ledger, session = training.engine, training.batches, training.ledger, training.session
    start, total_steps, phases, profile = training.start, training.total_steps, engine.phases, training.profile
    stopped_by = "target" if training.validation.reached() else ""
    step, paused = start, start - 1
    while not stopped_by:
        # The state after `step` steps. Time spent on it here counts towards the step that follows.
        engine.begin_step(step)

        # If a checkpoint can be resumed from here: go back, evaluate, save, stop.
        if batches.resumable(step):
            stopped_by = _pause(training, step, since=paused)
            paused = step
        if stopped_by or step >= total_steps:
            break

        # Take the step; if memory runs out, retry it with less.
        profile.before(step)
        phases.mark("data")
        try:
            batch = batches.next(step)
            training.witness.before(step, traced=profile.traces)
            engine.step(step, batch)
        except OutOfMemory as error:
            _take_less_memory(training, step, error)
            continue

        # Once: record what ran, and where the time went.
        training.witness.after()
        if profile.ends(step):
            phases.mark("profile")
            profile.write(step)

        # Record the steps whose numbers have arrived.
        phases.mark("record")
        ledger.write(engine.finished())
        if training.plan.job.pins.workers is None and every(WAIT_STEPS, step):
            _feed_more(training, step)
        engine.end_step()
        step += 1

    ledger.write(engine.finished(all=True))
    if ledger.skips.cause:
        raise ledger.skips.fatal("the run is over")
    if (left_out := training.facts.summary()) != training.left_out:  # a stream may have left out more since
        session.recorder.event(events.Notice(text=f"left out: {left_out}"))
    return _finish(training, step, stopped_by)


def _pause(training: Training, step: int, *, since: int) -> str:
    """Evaluates and saves what is due after `step` steps, `since` the last such pause. Returns why to stop, or ""."""
    settings, validation, saving = training.settings, training.validation, training.saving
    phases, session, stopped_by = training.engine.phases, training.session, ""
    saving.poll()
    if training.ledger.skips.cause:
        phases.mark("save")
        saving.roll_back(step)
    if any(validation.due(step, since=since)) and (step > training.start or training.start == 0):
        phases.mark("eval")
        stopped_by = validation.measure(step, since=since)
        if settings.save.best and validation.best and step > training.start:
            phases.mark("save")
            saving.save_best(step, **validation.best)
    if training.ranks.any(bool(session.stop)):
        stopped_by = session.stop.signal.name if session.stop.signal else "SIGTERM"
    due = every(training.save_steps, step, since=since) or stopped_by.startswith("SIG")
    if due and step > (saving.asked or training.start):
        phases.mark("save")
        saving.save(step, wait=bool(stopped_by))
    return stopped_by


def _take_less_memory(training: Training, step: int, error: OutOfMemory) -> None:
    """Prepares a retry of `step`: first without CUDA graphs, then in smaller micro-batches."""
    record = training.session.recorder
    if error.recorded:
        training.batches.again(step)
        how = "from here on it runs without CUDA graphs"
        record.event(events.Notice(text=f"step {step} ran out of memory ({error}): {how}"))
    else:
        before, after = training.batches.shrink(step, cause=error)
        record.event(events.MemoryRanOut(step=step, micro_batch=before, now=after, error=str(error)))


def _feed_more(training: Training, step: int) -> None:
    """Adds a loader worker if the device has waited for data since the last check."""
    share, limit = training.ledger.data_share_since_last(), (training.hardware.num_cpus or 1) // training.ranks.world
    if share is not None and share > WAIT_SHARE and (workers := training.batches.feed_more(limit=limit)):
        training.session.recorder.event(events.WorkerAdded(step=step, workers=workers, data_share=share))


def _finish(training: Training, step: int, stopped_by: str) -> Outcome:
    """Evaluates and saves a last time, and judges the run by its criteria."""
    settings, validation, saving = training.settings, training.validation, training.saving
    if not stopped_by.startswith("SIG") and step > training.start:
        stopped_by = validation.measure(step, last=True) or stopped_by
        if settings.save.best and validation.best:
            saving.save_best(step, **validation.best)
    saving.settle()
    if saving.step != step and step > training.start and not saving.save(step, wait=True):
        kept = "nothing is saved" if saving.step is None else f"the last saved step is {saving.step}"
        raise RunFailed(
            f"the run stopped at step {step}, and its state could not be saved: {saving.failed}; {kept}. "
            "Fix that, then continue with --resume"
        )
    outcome = training.ledger.outcome(steps=step, stopped_by=stopped_by or "end", saved_step=saving.step)
    verdicts = tuple(judge(settings.criteria, outcome))
    training.session.recorder.event(events.Ended(step=step, outcome=outcome, verdicts=verdicts))
    return outcome
