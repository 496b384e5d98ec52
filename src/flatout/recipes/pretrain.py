"""Pretraining a decoder: `flatout train` with `recipe: pretrain`.

`run` reads downwards: where it runs, what it learns from, how it runs, what it starts from, then one loop of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flatout import hub
from flatout.config.settings import Settings
from flatout.cost import checkpoint_bytes
from flatout.data.corpus import Corpus, open_corpus
from flatout.data.feed import Feed
from flatout.data.stream import Batch, Stream
from flatout.engine.checkpoint import Checkpoints, restore
from flatout.engine.faults import OutOfMemory, explained, largest, require_space, smaller
from flatout.engine.prepare import prepare
from flatout.engine.ranks import Ranks, from_environment, joined
from flatout.engine.resolve import Active, check_build, resolve
from flatout.engine.step import Engine
from flatout.errors import RunFailed, UsageError
from flatout.hardware import Hardware, bf16_ratio, detect
from flatout.model import Decoder, weights
from flatout.optim import adamw, schedule
from flatout.plan import Plan, decide, job_of
from flatout.probe import Phases
from flatout.recipes.profiling import Profile
from flatout.recipes.session import Ledger, Session, identity_of, open_session
from flatout.recipes.verdict import Outcome, judge
from flatout.record import Sink

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
) -> Outcome:
    with ExitStack() as stack:
        # Where it runs.
        ranks, hardware = from_environment(), detect()
        check_build(hardware)
        ranks = stack.enter_context(joined(ranks, cuda=hardware.gpu is not None))
        folder = Path(ranks.agree(str(folder)))

        # What it learns from, and for how long.
        corpus = stack.enter_context(open_corpus(settings.data, seed=settings.seed))
        stream = training_stream(settings, corpus)
        total_steps = steps_of(settings, stream)

        # How it runs.
        plan = plan_for(settings, hardware=hardware, num_ranks=ranks.world, total_steps=total_steps)
        corpus.check_vocab(plan.job.shape.vocab)
        checkpoint_size = checkpoint_bytes(plan.job.shape, weights_only=settings.save.weights_only)
        require_space(folder, needed_bytes=(settings.save.keep + 1) * checkpoint_size, what="checkpoints")
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
        stack.enter_context(explained(plan.predicted.memory_gib))
        active = resolve(plan, local_rank=ranks.local_rank, deterministic=settings.train.deterministic)
        phases = Phases(device=active.device.type)
        engine = build_engine(settings, plan, active, ranks=ranks, phases=phases, total_steps=total_steps)
        ledger = Ledger(session, plan=plan, active=active, total_steps=total_steps)
        validation = validation_batches(settings, corpus, plan, ranks)
        if ranks.first and not resume:
            corpus.tokenizer.save(session.run.tokenizer_dir)
        introduce(session, plan, active, hardware=hardware, ranks=ranks, corpus=corpus, total_steps=total_steps)

        # What it starts from.
        identity = identity_of(
            shape=plan.job.shape.to_json(),
            seed=settings.seed,
            data=corpus.fingerprint,
            sequence_length=settings.data.sequence_length,
            batch_tokens=settings.train.batch_tokens,
            packing=settings.data.packing,
            shuffle=settings.data.shuffle,
        )
        checkpoints = Checkpoints(session.run.checkpoints_dir, identity=identity, keep=settings.save.keep)
        start = resume_from(checkpoints, engine, ledger, session) if resume else 0
        feed = stack.enter_context(Batches(stream, plan, ranks, start=start, stop=total_steps))
        profile = Profile(settings.profile.steps, folder=session.run.profile_dir, cuda=active.device.type == "cuda")
        save = partial(save_state, settings, checkpoints, engine, ledger, session, ranks)

        step, stopped_by, evaluated, saved = start, "", -1, start
        while True:
            # The state after `step` steps. What is done with it counts towards the step that follows.
            engine.begin_step(step)
            fresh = step > start or start == 0

            # Once in a while: validate, and see whether that is enough.
            if settings.eval.every and step % settings.eval.every == 0 and fresh and evaluated != step:
                phases.mark("eval")
                stopped_by = validate(settings, engine, ledger, session, validation, step=step)
                evaluated = step

            # Asked to stop, here or on any other rank.
            if ranks.any(bool(session.stop)):
                stopped_by = session.stop.signal.name if session.stop.signal else "SIGTERM"

            # Once in a while, and before leaving early: save.
            if step > saved and (due(step, settings.save.every) or stopped_by.startswith("SIG")):
                phases.mark("save")
                save(step)
                saved = step

            if stopped_by or step >= total_steps:
                break

            profile.before(step)
            phases.mark("data")
            try:
                engine.step(step, next(feed))
            except OutOfMemory as error:
                before, after = feed.shrink(step, cause=error)
                session.recorder.event("oom", step=step, micro_batch=before, now=after, error=str(error))
                continue

            # Once: write down where the time went.
            if profile.ends(step):
                phases.mark("profile")
                profile.write()
                session.recorder.event("profile", step=step, folder=str(session.run.profile_dir))

            phases.mark("record")
            ledger.write(engine.finished())
            if plan.job.pins.workers is None and due(step, WAIT_STEPS):
                feed_more(feed.feed, ledger, session, step=step, limit=hardware.num_cpus or 1)
            engine.end_step()
            step += 1

        ledger.write(engine.finished(all=True))
        if not stopped_by.startswith("SIG"):
            if evaluated != step:
                stopped_by = validate(settings, engine, ledger, session, validation, step=step) or stopped_by
            if saved != step and not save(step):
                raise RunFailed(f"the run reached step {step}, but its last checkpoint could not be saved")
        return conclude(settings, ledger, session, step=step, stopped_by=stopped_by or "end")


class Batches:
    """The micro-batches of one step after the other; smaller ones from where the device ran out of memory."""

    def __init__(self, stream: Stream, plan: Plan, ranks: Ranks, *, start: int, stop: int) -> None:
        self.stream, self.plan, self.ranks, self.stop = stream, plan, ranks, stop
        self.micro_batch = plan.decisions.micro_batch or 1
        self.feed = self._open(start)

    def __next__(self) -> list[Batch]:
        return next(self.feed)

    def shrink(self, step: int, *, cause: OutOfMemory) -> tuple[int, int]:
        """Gives `step` again, and all after it, in smaller micro-batches; the batch of the step stays the same."""
        before = self.micro_batch
        if before == 1:
            raise RunFailed(
                f"step {step} found too little memory even with micro-batch 1 ({cause}). "
                + largest(self.plan.predicted.memory_gib)
            )
        self.micro_batch = smaller(before)
        self.feed.close()
        self.feed = self._open(step)
        return before, self.micro_batch

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.feed.close()

    def _open(self, start: int) -> Feed:
        make = partial(
            self.stream.micro_batches, rank=self.ranks.rank, world=self.ranks.world, micro_batch=self.micro_batch
        )
        decisions = self.plan.decisions
        return Feed(
            make,
            start=start,
            stop=self.stop,
            workers=decisions.workers or 0,
            prefetch=decisions.prefetch or 1,
            pin=bool(decisions.pin_memory),
        )


def due(step: int, every: int | None) -> bool:
    return every is not None and step > 0 and step % every == 0


def dry_run(settings: Settings) -> Plan:
    """All that can be checked and decided without reading the data: this torch, this hardware, the plan."""
    ranks, hardware = from_environment(), detect()
    check_build(hardware)
    return plan_for(settings, hardware=hardware, num_ranks=ranks.world, total_steps=None)


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


def steps_of(settings: Settings, stream: Stream) -> int:
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


def plan_for(settings: Settings, *, hardware: Hardware, num_ranks: int, total_steps: int | None) -> Plan:
    """The plan of this configuration on the hardware that is here."""
    ratio = bf16_ratio() if hardware.gpu is None and settings.plan.precision is None else None
    return decide(
        job_of(settings, hardware=hardware, num_ranks=num_ranks, total_steps=total_steps, cpu_bf16_ratio=ratio)
    )


def build_engine(
    settings: Settings, plan: Plan, active: Active, *, ranks: Ranks, phases: Phases, total_steps: int
) -> Engine:
    """The model with its weights, prepared for this device, and the optimizer that trains it."""
    if settings.model.name is not None and settings.model.weights == "load":
        model = weights.load(hub.folder(settings.model.name, weights=True), compute_dtype=active.dtype)
        model.to(active.device)
    else:
        with torch.device(active.device):
            model = Decoder(plan.job.shape, compute_dtype=active.dtype)
        model.initialise(settings.seed)
    rows = prepare(model, active=active, recompute=plan.decisions.recompute or "none")
    return Engine(
        model=model,
        optimizer=adamw(model, settings.train, fused=active.fused_optimizer),
        schedule=schedule(settings.train, total_steps=total_steps),
        active=active,
        ranks=ranks,
        phases=phases,
        rows=rows,
        loss_chunk=plan.decisions.loss_chunk or 1024,
        clip=settings.train.clip,
        seed=settings.seed,
    )


def validation_batches(settings: Settings, corpus: Corpus, plan: Plan, ranks: Ranks) -> list[Batch]:
    """This rank's part of the fixed validation set: the first windows of the held-out data, always the same."""
    length = settings.data.sequence_length
    windows = min((corpus.valid.num_tokens - 1) // length, settings.eval.tokens // length)
    per_rank = max(1, windows // ranks.world)
    # Whole micro-batches where there are enough windows: the shapes are then those of training.
    micro_batch = min(plan.decisions.micro_batch or 1, per_rank)
    per_rank -= per_rank % micro_batch
    stream = Stream(
        corpus.valid,
        sequence_length=length,
        batch_sequences=per_rank * ranks.world,
        seed=settings.seed,
        packing=settings.data.packing,
        shuffle=False,
    )
    return stream.micro_batches(0, rank=ranks.rank, world=ranks.world, micro_batch=micro_batch)


def introduce(
    session: Session,
    plan: Plan,
    active: Active,
    *,
    hardware: Hardware,
    ranks: Ranks,
    corpus: Corpus,
    total_steps: int,
) -> None:
    """Says once, at the start, what was planned and what is really active."""
    record = session.recorder
    record.event("hardware", **hardware.to_json())
    record.event("data", **corpus.describe())
    record.event("plan", **plan.to_json())
    record.event("active", **dict[str, Any](active.facts))
    if ranks.world == 1 and hardware.num_gpus > 1:
        record.event(
            "notice",
            text=f"this machine has {hardware.num_gpus} GPUs and this run uses one; to use all: "
            f"torchrun --nproc-per-node {hardware.num_gpus} -m flatout train ...",
        )
    record.event("start", folder=str(session.run.path), total_steps=total_steps)


def resume_from(checkpoints: Checkpoints, engine: Engine, ledger: Ledger, session: Session) -> int:
    """Puts the newest whole checkpoint back and gives its step; 0 if the run never saved one."""
    checkpoint, problems = checkpoints.latest()
    for problem in problems:
        session.recorder.event("bad-checkpoint", text=problem)
    if checkpoint is None:
        if problems:
            raise RunFailed("no checkpoint of this run can be trusted: " + "; ".join(problems))
        session.recorder.event("notice", text="the run had saved nothing yet: it starts from the beginning")
        return 0
    if not checkpoint.resumable:
        raise UsageError(f"{checkpoint.folder} holds weights only (save.weights_only): it cannot be resumed")
    restore(checkpoint, model=engine.model, optimizer=engine.optimizer)
    state = checkpoint.state
    engine.scale.fill_(state["loss_scale"])
    engine.scale_streak.fill_(state["loss_scale_streak"])
    ledger.tokens, ledger.seconds, ledger.saves = state["tokens"], state["seconds"], state["saves"]
    ledger.val_losses = list(state["val_losses"])
    session.recorder.event("resume", step=checkpoint.step, checkpoint=checkpoint.folder.name)
    return checkpoint.step


def save_state(
    settings: Settings,
    checkpoints: Checkpoints,
    engine: Engine,
    ledger: Ledger,
    session: Session,
    ranks: Ranks,
    step: int,
) -> bool:
    """Saves on the first rank while the others wait. A full disk is reported and survived."""
    ledger.write(engine.finished(all=True))
    saved = True
    if ranks.first:
        state = {
            "tokens": ledger.tokens,
            "seconds": ledger.seconds,
            "saves": ledger.saves + 1,
            "val_losses": ledger.val_losses,
            "loss_scale": engine.scale.item(),
            "loss_scale_streak": engine.scale_streak.item(),
        }
        optimizer = None if settings.save.weights_only else engine.optimizer
        try:
            path = checkpoints.save(step, model=engine.model, optimizer=optimizer, state=state)
        except OSError as error:
            session.recorder.event("save-failed", step=step, error=str(error))
            saved = False
        else:
            ledger.saves += 1
            session.recorder.event("save", step=step, checkpoint=path.name)
    ranks.barrier()
    return saved


def validate(
    settings: Settings, engine: Engine, ledger: Ledger, session: Session, batches: list[Batch], *, step: int
) -> str:
    """Measures the validation loss; says why to stop, `target` or `patience`, or nothing."""
    loss = engine.evaluate(batches)
    ledger.val_losses.append(loss)
    session.recorder.event("eval", step=step, val_loss=loss)
    target, patience = settings.target.val_loss, settings.eval.patience
    if target is not None and loss <= target:
        ledger.write(engine.finished(all=True))
        session.recorder.event(
            "target",
            step=step,
            val_loss=loss,
            seconds=ledger.seconds,
            tokens=ledger.tokens,
            gpu_hours=ledger.seconds / 3600 * ledger.plan.job.num_ranks,
        )
        return "target"
    if patience is not None:
        best = min(ledger.val_losses)
        recent = ledger.val_losses[-patience:]
        older = ledger.val_losses[:-patience]
        if older and min(recent) > min(older) - settings.eval.min_delta:
            session.recorder.event("patience", step=step, best=best, patience=patience)
            return "patience"
    return ""


def feed_more(feed: Feed, ledger: Ledger, session: Session, *, step: int, limit: int) -> None:
    """Adds a loader worker when the device was kept waiting for data."""
    share = ledger.speed.read().data_share
    if share is not None and share > WAIT_SHARE and 0 < feed.num_workers < limit:
        feed.add_worker()
        session.recorder.event("workers", step=step, workers=feed.num_workers, data_share=share)


def conclude(settings: Settings, ledger: Ledger, session: Session, *, step: int, stopped_by: str) -> Outcome:
    """The last word of a run: what it came to, and whether that met its criteria."""
    outcome = ledger.outcome(steps=step, stopped_by=stopped_by)
    verdicts = judge(settings.criteria, outcome)
    session.recorder.event("end", step=step, outcome=outcome.to_json(), verdicts=[asdict(v) for v in verdicts])
    return outcome
