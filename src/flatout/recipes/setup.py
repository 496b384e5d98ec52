"""Everything before the first step: hardware, data, plan, engine, run folder, and the state to start from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from flatout import files, hub
from flatout.config import to_mapping
from flatout.config.recipes import RECIPES
from flatout.config.settings import PlanSettings, Settings
from flatout.cost import checkpoint_bytes
from flatout.data.prepare import cache_folder
from flatout.engine import ahead, search
from flatout.engine.faults import explained, require_space
from flatout.engine.objective import CrossEntropy
from flatout.engine.prepare import prepare
from flatout.engine.ranks import Ranks, from_environment, joined
from flatout.engine.resolve import Active, check_build, resolve
from flatout.engine.sharding import shard
from flatout.engine.step import Engine
from flatout.engine.watchdog import Watchdog
from flatout.errors import FlatoutError, UsageError
from flatout.hardware import Hardware, detect, with_cpu_facts
from flatout.model import Critic, Decoder, Model, load_adapted, load_model, peft
from flatout.optim import adamw, schedule
from flatout.plan import Decisions, Job, Plan, decide, job_of
from flatout.plan.decisions import PINNED
from flatout.probe import Phases
from flatout.recipes.inputs import check_inputs
from flatout.recipes.material import Batches, Facts, Material, OpenMaterial
from flatout.recipes.own_objective import objective_of
from flatout.recipes.profiling import Profile, Witness
from flatout.recipes.questions import Questions, check_tasks
from flatout.recipes.saving import Saving
from flatout.recipes.session import Ledger, Session, begun, changed_settings, open_session
from flatout.recipes.validation import Validation, save_steps_of
from flatout.record import Run, Sink, events, redacted


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run that is ready for its first step."""

    settings: Settings
    hardware: Hardware
    ranks: Ranks
    plan: Plan
    session: Session
    engine: Engine
    ledger: Ledger
    facts: Facts
    left_out: str  # rows left out, as far as known at the start
    batches: Batches
    validation: Validation
    saving: Saving
    profile: Profile
    witness: Witness
    start: int
    total_steps: int
    save_steps: float | None  # between two checkpoints


@contextmanager
def set_up(
    settings: Settings,
    open_material: OpenMaterial,
    *,
    folder: Path,
    resume: bool,
    sinks: Sequence[Sink],
    session: Session | None,
) -> Iterator[Training]:
    check_tasks(settings)
    with ExitStack() as stack:
        # The hardware. Kernels compile while the data is opened.
        hardware = detect()
        compiling = stack.enter_context(ahead.compiling(plan_to_compile(settings, hardware=hardware)))
        check_build(hardware)
        ranks = stack.enter_context(joined(from_environment(), num_gpus=hardware.num_gpus))
        folder = Path(ranks.agree(str(folder)))
        # A recipe of several stages knows itself whether this one has begun.
        resume = begun(folder, ranks, resume=resume) if session is None else ranks.any(ranks.first and resume)
        if resume:
            require_same_batches(settings, Run.open(folder))

        # The data, and how long to train on it.
        material = stack.enter_context(open_material(settings))
        facts = material.facts
        total_steps = steps_of(settings, material.source.steps_per_epoch)
        save_steps = save_steps_of(settings, material.source.steps_per_epoch)

        # The plan.
        plan = plan_for(
            settings,
            hardware=hardware,
            ranks=ranks,
            total_steps=total_steps,
            material=material,
            begun=folder if resume else None,
        )
        facts.check_vocab(plan.job.shape.vocab)
        require_room(settings, plan, folder)

        # The run folder.
        if session is None:
            session = stack.enter_context(
                open_session(settings, plan=plan, ranks=ranks, folder=folder, resume=resume, sinks=sinks)
            )
        elif ranks.first and not resume:
            session.run.replan(plan.to_json())

        hang_s = settings.train.hang_s
        watchdog = stack.enter_context(Watchdog(session.run, session.recorder, ranks, hang_s=hang_s))

        # The engine, with the fastest micro-batch.
        for process in compiling:
            process.join()
        stack.enter_context(explained(plan.predicted.memory_gib))
        active = resolve(plan, local_rank=ranks.local_rank, deterministic=settings.train.deterministic)
        engine = build_engine(
            settings, plan, active, ranks=ranks, material=material, total_steps=total_steps, session=session
        )
        plan = with_found_micro_batch(plan, engine, material, session, ranks, cache=cache_folder(settings.data))
        ledger = Ledger(session, plan=plan, active=active, traced=settings.profile.steps)
        left_out = announce(
            session, plan, active, hardware=hardware, ranks=ranks, material=material, total_steps=total_steps
        )

        # The state to start from.
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
        stack.callback(saving.close)
        start = saving.begin(facts.tokenizer, resume=resume)
        source = material.source.batches(engine, plan, session, ranks, start=start, stop=total_steps)
        batches = stack.enter_context(source)
        held_out = material.held_out(ranks, batches.micro_batch)
        questions = Questions.of(settings, engine, session, ranks, facts.tokenizer)
        watchdog.phases = engine.phases
        # CUDA graphs call nothing by name any more once they are recorded, and compiled code not before it is compiled.
        looked_at = start if active.graphs else min(start + 1, total_steps - 1)
        witness = Witness(
            looked_at if ranks.first else None,
            decisions=plan.decisions,
            on_gpu=active.device.type == "cuda",
            session=session,
        )
        stack.callback(witness.close)
        traced = settings.profile.steps if ranks.first else None
        profile = stack.enter_context(Profile(traced, session=session, witness=witness))
        yield Training(
            settings=settings,
            hardware=hardware,
            ranks=ranks,
            plan=plan,
            session=session,
            engine=engine,
            ledger=ledger,
            facts=facts,
            left_out=left_out,
            batches=batches,
            validation=Validation(settings, engine, ledger, session, held_out, questions=questions),
            saving=saving,
            profile=profile,
            witness=witness,
            start=start,
            total_steps=total_steps,
            save_steps=save_steps,
        )


def dry_run(settings: Settings, *, folder: Path, resume: bool = False) -> Plan:
    """Checks what a run checks first, and plans it, without reading the data or writing anything."""
    check_inputs(settings)
    check_tasks(settings)
    hardware = detect()
    check_build(hardware)
    objective_of(settings)
    if resume:
        require_same_batches(settings, Run.open(folder))
    else:
        Run.require_vacant(folder)
    plan = plan_for(settings, hardware=hardware, ranks=from_environment())
    require_room(settings, plan, folder)
    return plan


def steps_of(settings: Settings, steps_per_epoch: float | None) -> int:
    """The length of the run in optimizer steps."""
    train = settings.train
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return max(1, math.ceil(train.tokens / train.batch_tokens))
    if train.epochs is None or steps_per_epoch is None:
        raise UsageError(
            "train.epochs needs data whose size is known, and this stream is still being written: "
            "give train.steps or train.tokens"
        )
    at_once = settings.rl.steps_in_phase if RECIPES[settings.recipe].rolls_out else 1
    return max(1, math.ceil(train.epochs * steps_per_epoch / at_once)) * at_once


def plan_for(
    settings: Settings,
    *,
    hardware: Hardware,
    ranks: Ranks,
    total_steps: int | None = None,
    material: Material | None = None,
    begun: Path | None = None,
) -> Plan:
    """The plan of this configuration on this hardware, the same on all ranks.

    A run that was started in the folder `begun` keeps its decisions as far as the machine is the same.
    """
    if hardware.gpu is None:
        if ranks.first:  # on one rank only: the others would slow it down
            hardware = with_cpu_facts(hardware, cache=files.cache_folder(), num_ranks=ranks.world)
        hardware = Hardware.from_json(json.loads(ranks.agree(json.dumps(hardware.to_json()))))
    job = job_of(
        settings,
        hardware=hardware,
        num_ranks=ranks.world,
        total_steps=total_steps,
        mean_context=None if material is None else material.mean_context,
        longest=None if material is None else material.longest,
        trained_share=None if material is None else material.trained_share,
        prompt_tokens=None if material is None else material.prompt_tokens,
    )
    if begun is None:
        return decide(job)
    earlier = Run.open(begun).plan
    plan = decide(replace(job, pins=kept_pins(job, earlier)))
    # What an earlier attempt decided keeps its reason; only the user pins.
    told = {
        name: earlier["reasons"].get(name, reason)
        for name, reason in plan.reasons.items()
        if reason.startswith(PINNED) and getattr(job.pins, name, None) is None
    }
    return replace(plan, reasons={**plan.reasons, **told})


def require_same_batches(settings: Settings, run: Run) -> None:
    """Refuses settings that would give a resumed run other batches than those it has learnt from."""
    names = {"seed", "data.sequence_length", "data.packing", "data.shuffle", "train.batch_tokens"}
    changed = changed_settings(run.config, redacted(to_mapping(settings)))
    if found := {name: values for name, values in changed.items() if name in names}:
        words = "; ".join(f"{name} {before} -> {now}" for name, (before, now) in found.items())
        raise UsageError(
            f"{run.path} cannot continue with {words}: its batches would be others. Leave it as it was, or start a new "
            "run from these weights with model.name and --run FOLDER"
        )


def plan_to_compile(settings: Settings, *, hardware: Hardware) -> Plan | None:
    """The plan as far as it is known without the data; None if nothing needs compiling."""
    ranks = from_environment()
    if hardware.gpu is None or ranks.world > 1:
        return None
    try:
        plan = plan_for(settings, hardware=hardware, ranks=ranks)
    except FlatoutError:  # the plan needs the data, and reports any error then
        return None
    known = search.remembered(cache_folder(settings.data) / "micro-batch", search.key_of(plan))
    return None if known else plan


def kept_pins(job: Job, begun: Mapping[str, Any]) -> PlanSettings:
    """The decisions of an earlier attempt as pins, except where the configuration pins something else.

    On another machine or number of ranks only what changes the numbers is kept.
    """
    same = begun["job"]["hardware"] == job.hardware.name and begun["job"]["num_ranks"] == job.num_ranks
    names = [field.name for field in fields(Decisions)] if same else ["precision"]
    # If one of the two factors of the batch is given, the other follows.
    if job.pins.micro_batch or job.pins.accumulation:
        names = [name for name in names if name not in ("micro_batch", "accumulation")]
    kept = {name: begun["decisions"].get(name) for name in names if getattr(job.pins, name) is None}
    return replace(job.pins, **kept)


def require_room(settings: Settings, plan: Plan, folder: Path) -> None:
    """Refuses a run whose checkpoints do not fit on the disk."""
    size = checkpoint_bytes(plan.job.shape, weights_only=settings.save.weights_only, adapters=plan.job.adapters)
    count = settings.save.keep + settings.save.best + 1
    smaller = [] if settings.save.weights_only else ["set save.weights_only=true"]
    smaller += ["keep fewer with save.keep=2"] if settings.save.keep > 2 else []
    require_space(folder, needed_bytes=count * size, what="checkpoints", smaller=smaller)


def build_engine(
    settings: Settings,
    plan: Plan,
    active: Active,
    *,
    ranks: Ranks,
    material: Material,
    total_steps: int,
    session: Session,
) -> Engine:
    """The model with its weights, prepared for this device, and the optimizer that trains it."""

    def note(text: str) -> None:
        session.recorder.event(events.Notice(text=text))

    sharded = plan.decisions.sharding == "full"
    # Built on the host, so that the device never holds more than its shards and one block.
    first = replace(active, device=torch.device("cpu")) if sharded else active
    model = build_model(settings, plan, first, note=note)
    material.equip(model)
    chunk, recompute = plan.decisions.loss_chunk, plan.decisions.recompute
    head_loss, eight = prepare(model, active=active, recompute=recompute, loss_chunk=chunk)
    if getattr(model, "cap", None) and not isinstance(material.objective, CrossEntropy):
        why = f"the head of this model caps its logits at {model.cap:g}"
        raise UsageError(f"recipe {settings.recipe} needs plain logits, but {why}; use sft")
    if material.critic is not None:
        trunk = build_model(settings, plan, first, note=note) if material.critic == "own" else None
        if trunk is not None:
            prepare(trunk, active=replace(active, fp8=False), recompute=recompute, loss_chunk=chunk)
        model.critic = critic_of(model, trunk)
    if sharded:
        shard(model, active=active, ranks=ranks)
    return Engine(
        model=model,
        optimizer=adamw(model, settings.train, fused=active.fused_optimizer or sharded),
        schedule=schedule(settings.train, total_steps=total_steps, first=settings.rl.taught_first),
        active=active,
        ranks=ranks,
        phases=Phases(device=active.device.type, memory=True),
        head_loss=head_loss,
        eight=eight,
        batch_tokens=settings.train.batch_tokens,
        clip=settings.train.clip,
        seed=settings.seed,
        objective=material.objective,
        combine=material.combine,
        route=material.route,
        role=material.role,
    )


def critic_of(model: Model, trunk: Model | None) -> Critic:
    if not isinstance(model, Decoder) or not isinstance(trunk, Decoder | None):
        raise UsageError(f"rl.algorithm: ppo works only with flatout's own decoder: {model.shape.foreign}")
    return Critic(hidden=model.shape.hidden, device=model.embedding.device, trunk=trunk)


def build_model(settings: Settings, plan: Plan, active: Active, *, note: Callable[[str], None]) -> Model:
    """Loads or randomly initialises the model on the device. Under adapters, frozen weights are read one by one,
    directly in their final type."""
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
        name=chosen.name,
        trust=chosen.trust,
    )
    if settings.lora.adapter is not None:
        if not isinstance(model, Decoder):
            raise UsageError(f"lora.adapter works only with flatout's own decoder: {plan.job.shape.foreign}")
        peft.load(model, Path(settings.lora.adapter), adapters, base=base_of(settings))
    return model


def base_of(settings: Settings) -> str | None:
    """Identifies the frozen weights under adapters; None without adapters."""
    if settings.lora.rank is None:
        return None
    if settings.model.name is None or settings.model.weights == "random":
        return f"random, seed {settings.seed}"
    return peft.fingerprint(hub.folder(settings.model.name, weights=True, revision=settings.model.revision))


def with_found_micro_batch(
    plan: Plan, engine: Engine, material: Material, session: Session, ranks: Ranks, *, cache: Path
) -> Plan:
    """The plan with the fastest micro-batch on this device, unless it was pinned or there is no GPU."""
    pins = plan.job.pins
    if pins.micro_batch or pins.accumulation or engine.active.device.type != "cuda":
        return plan
    if engine.sharded:  # ranks cannot agree to skip a size that does not fit one of them
        return plan
    key, folder = search.key_of(plan), cache / "micro-batch"
    known = search.remembered(folder, key) if ranks.first else None
    if known and any(plan.job.rank_sequences % trial.micro_batch for trial in known):
        known = None  # no search of this plan tried this size
    text = ranks.agree("" if known is None else json.dumps([asdict(trial) for trial in known]))
    if text:
        trials, source = [search.Trial(**trial) for trial in json.loads(text)], "measured here before"
    else:
        began = time.perf_counter()
        trials = search.search(engine, plan, ranks, lambda size: material.source.trial_batch(ranks, micro_batch=size))
        source = "measured here"
        session.recorder.event(
            events.MicroBatchSearched(
                trials=tuple(events.Trial(**asdict(trial)) for trial in trials),
                seconds=time.perf_counter() - began,
                compile_seconds=sum(trial.first_s for trial in trials),
            )
        )
        if ranks.first:
            search.remember(folder, key, trials)
        # The recorded peak must be that of the run, not of the search.
        torch.cuda.reset_peak_memory_stats()
    size = int(ranks.agree(str(search.chosen(trials).micro_batch)))
    plan = search.fitted(plan, trials, size=size, source=source)
    if ranks.first:
        session.run.replan(plan.to_json())
    return plan


def announce(
    session: Session,
    plan: Plan,
    active: Active,
    *,
    hardware: Hardware,
    ranks: Ranks,
    material: Material,
    total_steps: int,
) -> str:
    """Records the plan and the active paths once, at the start. Returns the description of the rows left out."""
    record = session.recorder
    begun = session.run.plan["decisions"]
    for name, value in asdict(plan.decisions).items():
        if name in begun and begun[name] != value:
            text = f"this run started with plan.{name} {begun[name]} and continues with {value}: not bit-equal"
            record.event(events.Notice(text=text))
    record.event(events.HardwareFound(facts=hardware.to_json()))
    described = material.facts.describe() | getattr(material.source, "packing", {})
    record.event(events.DataOpened(**described))
    if described.get("valid_examples") == 1:
        text = "one example is held out: its loss says little of others; hold out more, such as data.valid_share=0.05"
        record.event(events.Notice(text=text))
    if left_out := str(described["left_out"]):
        record.event(events.Notice(text=f"left out: {left_out}"))
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
