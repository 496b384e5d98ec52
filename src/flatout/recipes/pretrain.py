"""Pretraining a decoder: `flatout train` with `recipe: pretrain`.

`run` reads downwards: where it runs, what it learns from, how it runs, what it starts from, then one loop of steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from flatout import hub
from flatout.config.settings import Decisions, PlanSettings, Settings
from flatout.cost import checkpoint_bytes
from flatout.data.corpus import Corpus, open_corpus
from flatout.data.prepare import cache_folder
from flatout.data.stream import Batch, Steps, Stream
from flatout.engine import search
from flatout.engine.faults import OutOfMemory, explained, require_space
from flatout.engine.prepare import prepare
from flatout.engine.ranks import Ranks, from_environment, joined
from flatout.engine.resolve import Active, check_build, resolve
from flatout.engine.step import Engine
from flatout.errors import RunFailed, UsageError
from flatout.hardware import Hardware, bf16_ratio, detect
from flatout.model import Model, load_adapted, load_model, peft
from flatout.optim import adamw, schedule
from flatout.plan import Job, Plan, decide, job_of
from flatout.probe import Phases
from flatout.recipes.batches import Batches
from flatout.recipes.material import Facts, Material, OpenData
from flatout.recipes.profiling import Profile
from flatout.recipes.questions import Questions, check_tasks
from flatout.recipes.saving import Saving
from flatout.recipes.session import Ledger, Session, open_session
from flatout.recipes.validation import Validation, every, validation_batches
from flatout.record import Outcome, Run, Sink, events
from flatout.verdict import judge

# Share of step time spent waiting for data above which a loader worker is added, and how often that is looked at.
WAIT_SHARE, WAIT_STEPS = 0.02, 20


def run(
    settings: Settings,
    *,
    folder: Path,
    config_text: str,
    config: Mapping[str, Any],
    resume: bool = False,
    sinks: Sequence[Sink] = (),
    open_data: OpenData | None = None,
    session: Session | None = None,
) -> Outcome:
    """`open_data` is for recipes that learn from something else in the same way; running text by default.

    A recipe that did something else before in the same run gives the `session` it has open.
    """
    check_tasks(settings)
    with ExitStack() as stack:
        # Where it runs.
        hardware = detect()
        check_build(hardware)
        ranks = stack.enter_context(joined(from_environment(), num_gpus=hardware.num_gpus))
        folder = Path(ranks.agree(str(folder)))

        # What it learns from, and for how long.
        material = stack.enter_context((open_data or running_text)(settings))
        facts, stream = material.facts, material.stream
        total_steps = steps_of(settings, stream)

        # How it runs.
        plan = plan_for(
            settings,
            hardware=hardware,
            ranks=ranks,
            total_steps=total_steps,
            mean_context=material.mean_context,
            longest=material.longest,
            trained_share=material.trained_share,
            begun=folder if resume else None,
        )
        facts.check_vocab(plan.job.shape.vocab)
        checkpoint_size = checkpoint_bytes(
            plan.job.shape, weights_only=settings.save.weights_only, adapters=plan.job.adapters
        )
        count = settings.save.keep + settings.save.best + 1
        require_space(folder, needed_bytes=count * checkpoint_size, what="checkpoints")
        if session is None:
            session = stack.enter_context(
                open_session(
                    settings,
                    config_text=config_text,
                    config=config,
                    plan=plan,
                    ranks=ranks,
                    folder=folder,
                    resume=resume,
                    sinks=sinks,
                )
            )
        elif not resume:
            session.run.replan(plan.to_json())
        stack.enter_context(explained(plan.predicted.memory_gib))
        active = resolve(plan, local_rank=ranks.local_rank, deterministic=settings.train.deterministic)
        phases = Phases(device=active.device.type)
        engine = build_engine(
            settings,
            plan,
            active,
            ranks=ranks,
            phases=phases,
            total_steps=total_steps,
            note=lambda text: session.recorder.event(events.Notice(text=text)),
        )
        plan = with_found_micro_batch(plan, engine, stream, session, ranks, cache=cache_folder(settings.data))
        ledger = Ledger(session, plan=plan, active=active)
        left_out = introduce(
            session, plan, active, hardware=hardware, ranks=ranks, facts=facts, total_steps=total_steps
        )

        # What it starts from.
        saving = Saving(
            settings,
            engine,
            ledger,
            session,
            ranks,
            data=facts.fingerprint,
            valid=facts.valid.fingerprint,
            base=base_of(settings),
        )
        start = saving.begin(facts.tokenizer, resume=resume)
        batches = stack.enter_context(Batches(stream, plan, ranks, start=start, stop=total_steps))
        held_out = material.held_out(ranks, batches.micro_batch)
        questions = Questions.of(settings, engine, session, ranks, facts.tokenizer)
        validation = Validation(settings, engine, ledger, session, held_out, questions=questions)
        profile = stack.enter_context(Profile(settings.profile.steps if ranks.first else None, session=session))

        step, stopped_by = start, "target" if validation.reached() else ""
        while not stopped_by:
            # The state after `step` steps. What is done with it counts towards the step that follows.
            engine.begin_step(step)

            # Once in a while: validate, and see whether that is enough.
            if any(validation.due(step)) and (step > start or start == 0):
                phases.mark("eval")
                stopped_by = validation.measure(step)
                if settings.save.best and validation.best and step > start:
                    phases.mark("save")
                    saving.save_best(step, **validation.best)

            # Asked to stop, here or on any other rank.
            if ranks.any(bool(session.stop)):
                stopped_by = session.stop.signal.name if session.stop.signal else "SIGTERM"

            # Once in a while, and before leaving early: save.
            if step > (saving.step or start) and (every(settings.save.every, step) or stopped_by.startswith("SIG")):
                phases.mark("save")
                saving.save(step)

            if stopped_by or step >= total_steps:
                break

            profile.before(step)
            phases.mark("data")
            try:
                engine.step(step, next(batches))
            except OutOfMemory as error:
                if error.recorded:
                    batches.again(step)
                    how = "its kernels are launched one by one from here on"
                    session.recorder.event(events.Notice(text=f"step {step} found too little memory ({error}): {how}"))
                    continue
                before, after = batches.shrink(step, cause=error)
                session.recorder.event(events.MemoryRanOut(step=step, micro_batch=before, now=after, error=str(error)))
                continue

            # Once: write down where the time went.
            if profile.ends(step):
                phases.mark("profile")
                profile.write(step)

            phases.mark("record")
            ledger.write(engine.finished())
            if plan.job.pins.workers is None and every(WAIT_STEPS, step):
                feed_more(batches, ledger, session, step=step, limit=(hardware.num_cpus or 1) // ranks.world)
            engine.end_step()
            step += 1

        ledger.write(engine.finished(all=True))
        if (said := facts.summary()) != left_out:  # of a stream, more is known by now
            session.recorder.event(events.Notice(text=f"not learnt from: {said}"))
        if not stopped_by.startswith("SIG") and step > start:
            stopped_by = validation.measure(step, last=True) or stopped_by
            if settings.save.best and validation.best:
                saving.save_best(step, **validation.best)
        if saving.step != step and step > start and not saving.save(step):
            kept = "nothing is saved" if saving.step is None else f"the last saved step is {saving.step}"
            raise RunFailed(
                f"the run stopped at step {step}, and its state could not be saved: {saving.failed}; {kept}. "
                "Mend that, then go on with --resume"
            )
        return conclude(settings, ledger, session, step=step, stopped_by=stopped_by or "end", saved=saving.step)


def dry_run(settings: Settings) -> Plan:
    """All that can be checked and decided without reading the data: this torch, this hardware, the plan."""
    check_tasks(settings)
    hardware = detect()
    check_build(hardware)
    return plan_for(settings, hardware=hardware, ranks=from_environment())


@contextmanager
def running_text(settings: Settings) -> Iterator[Material]:
    """Windows over documents end to end."""
    with open_corpus(settings.data, seed=settings.seed) as corpus:

        def validation(ranks: Ranks, micro_batch: int) -> list[Batch]:
            return validation_batches(settings, corpus, ranks, micro_batch=micro_batch)

        yield Material(facts=corpus, stream=training_stream(settings, corpus), held_out=validation)


def training_stream(settings: Settings, corpus: Corpus) -> Stream:
    data = settings.data
    return Stream(
        corpus.train,
        sequence_length=data.sequence_length,
        batch_sequences=settings.train.batch_tokens // data.sequence_length,
        seed=settings.seed,
        packing=data.packing,
        shuffle=data.shuffle,
    )


def steps_of(settings: Settings, stream: Steps) -> int:
    """The length of the run in optimizer steps, whichever way it was given."""
    train = settings.train
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return max(1, math.ceil(train.tokens / train.batch_tokens))
    if train.epochs is None or stream.steps_per_epoch is None:
        raise UsageError(
            "train.epochs needs data whose size is known, and this stream is still being written: "
            "give train.steps or train.tokens"
        )
    return max(1, math.ceil(train.epochs * stream.steps_per_epoch))


def plan_for(
    settings: Settings,
    *,
    hardware: Hardware,
    ranks: Ranks,
    total_steps: int | None = None,
    mean_context: float | None = None,
    longest: int | None = None,
    trained_share: float | None = None,
    begun: Path | None = None,
) -> Plan:
    """The plan of this configuration on the hardware that is here, the same on all ranks.

    A run that was begun in the folder `begun` keeps what it was begun with, as far as the machine is the same.
    """
    ratio = ""
    if hardware.gpu is None and settings.plan.precision is None and ranks.first:
        ratio = f"{bf16_ratio():.3g}"
    ratio = ranks.agree(ratio)
    job = job_of(
        settings,
        hardware=hardware,
        num_ranks=ranks.world,
        total_steps=total_steps,
        mean_context=mean_context,
        longest=longest,
        trained_share=trained_share,
        cpu_bf16_ratio=float(ratio) if ratio else None,
    )
    return decide(job if begun is None else replace(job, pins=kept_pins(job, Run.open(begun).plan)))


def kept_pins(job: Job, begun: Mapping[str, Any]) -> PlanSettings:
    """The decisions of an earlier attempt as pins, except where the configuration pins something else.

    On another machine or number of ranks only what changes the numbers is kept.
    """
    same = begun["job"]["hardware"] == job.hardware.name and begun["job"]["num_ranks"] == job.num_ranks
    names = [field.name for field in fields(Decisions)] if same else ["precision"]
    # Given one of the two that make up the batch, the other follows.
    if job.pins.micro_batch or job.pins.accumulation:
        names = [name for name in names if name not in ("micro_batch", "accumulation")]
    kept = {name: begun["decisions"].get(name) for name in names if getattr(job.pins, name) is None}
    return replace(job.pins, **kept)


def build_engine(
    settings: Settings,
    plan: Plan,
    active: Active,
    *,
    ranks: Ranks,
    phases: Phases,
    total_steps: int,
    note: Callable[[str], None] = lambda text: None,
) -> Engine:
    """The model with its weights, prepared for this device, and the optimizer that trains it."""
    model = build_model(settings, plan, active, note=note)
    head_loss, eight = prepare(
        model,
        active=active,
        recompute=plan.decisions.recompute or "none",
        loss_chunk=plan.decisions.loss_chunk or 1024,
    )
    return Engine(
        model=model,
        optimizer=adamw(model, settings.train, fused=active.fused_optimizer),
        schedule=schedule(settings.train, total_steps=total_steps),
        active=active,
        ranks=ranks,
        phases=phases,
        head_loss=head_loss,
        eight=eight,
        batch_tokens=settings.train.batch_tokens,
        clip=settings.train.clip,
        seed=settings.seed,
    )


def build_model(settings: Settings, plan: Plan, active: Active, *, note: Callable[[str], None]) -> Model:
    """Loaded or drawn, on the device; under adapters frozen, read there weight by weight in the type they keep."""
    chosen, adapters = settings.model, plan.job.adapters
    if adapters is None:
        return load_model(
            chosen,
            shape=plan.job.shape,
            device=active.device,
            compute_dtype=active.dtype,
            seed=settings.seed,
            note=note,
        )
    if plan.job.shape.adapter:
        raise UsageError(f"lora goes with our own decoder only: {plan.job.shape.adapter}")
    folder = None
    if chosen.name is not None and chosen.weights == "load":
        folder = hub.folder(chosen.name, weights=True, revision=chosen.revision)
    model = load_adapted(
        folder,
        adapters,
        shape=plan.job.shape,
        device=active.device,
        compute_dtype=active.dtype,
        seed=settings.seed,
        note=note,
    )
    if settings.lora.adapter is not None:
        peft.load(model, Path(settings.lora.adapter), adapters, base=base_of(settings))
    return model


def base_of(settings: Settings) -> str | None:
    """What identifies the frozen weights under adapters; None without such."""
    if settings.lora.rank is None:
        return None
    if settings.model.name is None or settings.model.weights == "random":
        return f"random, seed {settings.seed}"
    return peft.fingerprint(hub.folder(settings.model.name, weights=True, revision=settings.model.revision))


def with_found_micro_batch(
    plan: Plan, engine: Engine, stream: Steps, session: Session, ranks: Ranks, *, cache: Path
) -> Plan:
    """The plan with the micro-batch that runs fastest here, unless it was pinned or there is no GPU to fill."""
    pins = plan.job.pins
    if pins.micro_batch or pins.accumulation or engine.active.device.type != "cuda":
        return plan
    key, folder = search.key_of(plan), cache / "micro-batch"
    known = search.remembered(folder, key) if ranks.first else None
    if known and any(plan.job.rank_sequences % trial.micro_batch for trial in known):
        known = None  # no search of this plan tried such a size
    text = ranks.agree("" if known is None else json.dumps([asdict(trial) for trial in known]))
    if text:
        trials, source = [search.Trial(**trial) for trial in json.loads(text)], "measured here before"
    else:

        def batch_of(size: int) -> Batch:
            return stream.micro_batches(0, rank=ranks.rank, world=ranks.world, micro_batch=size)[0]

        began = time.perf_counter()
        trials, source = search.search(engine, plan, ranks, batch_of), "measured here"
        session.recorder.event(
            events.MicroBatchSearched(
                trials=tuple(events.Trial(**asdict(trial)) for trial in trials),
                seconds=time.perf_counter() - began,
                compile_seconds=sum(trial.first_s for trial in trials),
            )
        )
        if ranks.first:
            search.remember(folder, key, trials)
        # The peak that is recorded is the run's own.
        torch.cuda.reset_peak_memory_stats()
    size = int(ranks.agree(str(search.chosen(trials).micro_batch)))
    plan = search.fitted(plan, trials, size=size, source=source)
    if ranks.first:
        session.run.replan(plan.to_json())
    return plan


def introduce(
    session: Session,
    plan: Plan,
    active: Active,
    *,
    hardware: Hardware,
    ranks: Ranks,
    facts: Facts,
    total_steps: int,
) -> str:
    """Says once, at the start, what was planned and what is really active. Gives what was left out of the data."""
    record = session.recorder
    begun = session.run.plan["decisions"]
    for name, value in asdict(plan.decisions).items():
        if name in begun and begun[name] != value:
            text = f"this run began with plan.{name} {begun[name]} and goes on with {value}: not bit for bit the same"
            record.event(events.Notice(text=text))
    record.event(events.HardwareFound(facts=hardware.to_json()))
    described = facts.describe()
    record.event(events.DataOpened(**described))
    if left_out := str(described["left_out"]):
        record.event(events.Notice(text=f"not learnt from: {left_out}"))
    record.event(events.Planned(facts=plan.to_json()))
    record.event(events.PathsActive(facts=active.facts))
    if ranks.world == 1 and hardware.num_gpus > 1:
        text = (
            f"this machine has {hardware.num_gpus} GPUs and this run uses one; to use all: "
            f"torchrun --nproc-per-node {hardware.num_gpus} -m flatout train ..."
        )
        record.event(events.Notice(text=text))
    record.event(events.Started(folder=str(session.run.path), total_steps=total_steps))
    return left_out


def feed_more(batches: Batches, ledger: Ledger, session: Session, *, step: int, limit: int) -> None:
    """Adds a loader worker when the device was kept waiting for data since the last look."""
    share, feed = ledger.data_share_since_last(), batches.feed
    if share is not None and share > WAIT_SHARE and 0 < feed.num_workers < limit:
        feed.add_worker()
        session.recorder.event(events.WorkerAdded(step=step, workers=feed.num_workers, data_share=share))


def conclude(
    settings: Settings, ledger: Ledger, session: Session, *, step: int, stopped_by: str, saved: int | None
) -> Outcome:
    """The last word of a run: what it came to, and whether that met its criteria."""
    outcome = ledger.outcome(steps=step, stopped_by=stopped_by, saved_step=saved)
    verdicts = judge(settings.criteria, outcome)
    session.recorder.event(events.Ended(step=step, outcome=outcome, verdicts=tuple(verdicts)))
    return outcome
