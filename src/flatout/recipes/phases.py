"""The phases of recipe router as stages: each is a run of its own, and continues after what an earlier attempt did.

The last phase trains in the run's own folder, earlier ones in `phase-1` and `phase-2` inside it. After each, every task
is scored on held-out questions: by the base, by its own adapter, by the adapter that the router chooses.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from flatout.config.settings import (
    CriteriaSettings,
    DataSettings,
    LoraSettings,
    ModelSettings,
    ProfileSettings,
    Settings,
    TargetSettings,
)
from flatout.data.tokenizer import load_tokenizer
from flatout.engine.checkpoint import as_os_error
from flatout.engine.opening import Opened, open_model
from flatout.engine.trained import chosen_checkpoint, open_trained, router_of
from flatout.errors import UsageError
from flatout.evaluate import Score, evaluate, wilson
from flatout.model import Decoder, Model, Router, lora, peft
from flatout.model.loading import export_model
from flatout.recipes import sft
from flatout.recipes.mixture import row_of, sources_of
from flatout.recipes.sampling import Stopped, free_memory
from flatout.recipes.sealed import unwritable
from flatout.recipes.session import identity_of
from flatout.recipes.setup import base_of
from flatout.recipes.staged import InStages
from flatout.record import Outcome, Run, events
from flatout.record.routed import AdapterScore, PhaseScored
from flatout.sample import RoutedSampler, Sampler, Sampling, plain_prompt, sampler_of
from flatout.tasks import Messages

PHASES = ("1", "2", "3")


def prepared(settings: Settings) -> Settings:
    """The settings with the base of the run that a phase alone continues; mistakes in data and start are reported."""
    for source in sources_of(settings):
        source.solutions(source.train, most=1)
        source.solutions(source.valid, most=1)
    start = settings.router.start
    if start is None:
        return settings
    names = [source.name for source in sources_of(settings)]
    if Run.is_at(start):
        run = _trained_run(start, phase=settings.router.phase)
        known = run.plan.get("job", {}).get("adapters") or {}
        _require(names, list(known.get("names") or ()), start=start)
        base = run.plan["job"].get("base")
        if base is None:
            return settings
        return _on_base(settings, ModelSettings(name=base, trust=settings.model.trust))
    if settings.router.phase == "3":
        raise UsageError(f"router.start: {start} is not a run; phase 3 continues a run of phase 2, which has a router")
    if not Path(start).is_dir():
        raise UsageError(f"router.start: there is no run and no folder {start}")
    _require(names, [path.parent.name for path in Path(start).glob(f"*/{peft.CONFIG}")], start=start)
    return settings


def _on_base(settings: Settings, base: ModelSettings) -> Settings:
    """The settings with this model and, if the run made it, the tokenizer that is saved with it."""
    if base.name == settings.model.name:
        return replace(settings, model=base)
    return replace(settings, model=base, data=replace(settings.data, tokenizer=DataSettings().tokenizer))


def _trained_run(start: str, *, phase: str) -> Run:
    run = Run.open(start)
    config = run.config.get("router")
    if run.config.get("recipe") != "router" or not isinstance(config, dict):
        raise UsageError(f"router.start: {start} is a run of recipe {run.config.get('recipe')}, not of recipe router")
    done = str(config.get("phase"))
    if phase == "3" and done == "1":
        raise UsageError(f"router.start: {start} is a run of phase 1, which has no router; run phase 2 first")
    chosen_checkpoint(run)
    return run


def _require(names: Sequence[str], found: Sequence[str], *, start: str) -> None:
    if missing := [name for name in names if name not in found]:
        has = ", ".join(sorted(found)) or "none"
        raise UsageError(f"router.start: {start} has no adapter for {', '.join(missing)}; it has {has}")


def equipped(model: Model, *, settings: Settings, names: Sequence[str]) -> None:
    """Adds the router, loads what earlier phases trained, and freezes what this one does not train."""
    router, phase = settings.router, settings.router.phase
    assert isinstance(model, Decoder)
    if phase == "1":
        return
    made = router_of(router, names, width=model.shape.hidden)
    made.initialise(settings.seed)
    model.router = made.to(model.embedding.device)
    assert router.start is not None
    if Run.is_at(router.start):
        _take(model, open_trained(Run.open(router.start), device=model.embedding.device).model, names)
    else:
        for which, name in enumerate(names):
            folder = Path(router.start) / name
            spec = replace(peft.read(folder), base_bits=16)
            peft.load(model, folder, spec, base=base_of(settings), which=which)
    for name, parameter in model.named_parameters():
        if ".adapters." in name:
            parameter.requires_grad_(phase == "3")


@torch.no_grad()
def _take(model: Decoder, before: Model, names: Sequence[str]) -> None:
    """Copies the adapters by their names, and the router if there is one."""
    assert isinstance(before, Decoder)
    known = lora.names_of(before)
    for which, name in enumerate(names):
        theirs = lora.adapters(before, known.index(name))
        for key, pair in lora.adapters(model, which).items():
            for mine, other in zip(pair, theirs[key], strict=True):
                if mine.shape != other.shape:
                    raise UsageError(
                        f"router.start: adapter {name} has shape {tuple(other.shape)} in {key}, and this run's have "
                        f"{tuple(mine.shape)}: set lora as in that run"
                    )
                mine.copy_(other)
    if isinstance(before.router, Router) and isinstance(model.router, Router):
        if before.router.names != tuple(names):
            raise UsageError(f"router.start: its router chooses among {', '.join(before.router.names)}, in that order")
        model.router.load_state_dict(before.router.state_dict())


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The sealed scores of a phase."""

    identity: str
    scored: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Phases(InStages):
    """The stages. All ranks train; the first one writes what a later stage reads, and scores, while the others wait."""

    settings: Settings
    train: Callable[..., Outcome]

    @property
    def wanted(self) -> tuple[str, ...]:
        return PHASES if self.settings.router.phase == "all" else (self.settings.router.phase,)

    def folder_of(self, phase: str) -> Path:
        run = self.session.run
        return run.path.absolute() if phase == self.wanted[-1] else run.stage_dir(f"phase-{phase}").absolute()

    def base(self) -> ModelSettings:
        """The frozen model under the adapters, taught first if it is random."""
        settings, to = self.settings, self.session.run.stage_dir("base").absolute()
        if settings.router.teach_steps is None:
            return settings.model
        if self.ranks.on_first(to.exists):
            self.ranks.on_first(lambda: self.seals.check_folder(to))
        else:
            self._teach(settings.router.teach_steps, to)
        return ModelSettings(name=str(to))

    def trained(self, phase: str, *, base: ModelSettings) -> Outcome:
        """Trains a phase, unless an earlier attempt finished it."""
        settings, folder = self._of_phase(phase, base), self.folder_of(phase)
        last = folder == self.session.run.path.absolute()
        free_memory()
        if self.ranks.on_first(lambda: _finished(folder)) and (done := _finished(folder)) is not None:
            return done
        if last:
            resume = self.staged.resume and self.session.run.checkpoints_dir.is_dir()
            outcome = self.train(settings, folder=self.session.run.path, resume=resume, session=self.session)
        else:
            outcome = self.train(_quiet(settings), folder=folder, resume=self.staged.begun(folder))
            self._told(outcome, folder)
        if outcome.stopped_by.startswith("SIG"):
            raise Stopped(outcome.stopped_by)
        return outcome

    def score(self, phase: str, how: Sequence[str]) -> None:
        """Scores every task after a phase, unless that was done for these very weights."""
        free_memory()
        self.ranks.on_first(lambda: self._score(phase, how))
        if self.ranks.any(bool(self.session.stop)):
            raise Stopped(self.session.stop.signal.name if self.session.stop.signal else "SIGTERM")

    def _score(self, phase: str, how: Sequence[str]) -> None:
        folder, path = self.folder_of(phase), self.session.run.samples_dir / f"phase-{phase}.json"
        sources, router = sources_of(self.settings), self.settings.router
        identity = identity_of(
            weights=chosen_checkpoint(Run.open(folder))[0].checksum,
            how=[list(how), router.questions, router.answer_tokens, [source.valid for source in sources]],
        )
        try:
            if self.seals.read(path, Saved).identity == identity:
                return
        except FileNotFoundError:
            pass
        model = open_model(str(folder), bank=True)
        measured = Measured(settings=self.settings, model=model)
        found = [score for one in how for score in measured.scores(one)]
        event = PhaseScored(
            phase=int(phase),
            folder=str(folder),
            names=tuple(source.name for source in sources),
            scores=tuple(found),
            **measured.routing(),
        )
        self.seals.write(path, asdict(Saved(identity=identity, scored=json.loads(json.dumps(event.to_json())))))
        self.session.recorder.event(event)

    def _of_phase(self, phase: str, base: ModelSettings) -> Settings:
        settings, router = self.settings, self.settings.router
        steps = {"1": None, "2": router.router_steps, "3": router.joint_steps}[phase]
        lr = {"1": settings.train.lr, "2": router.router_lr, "3": router.joint_lr}[phase]
        train = replace(settings.train, lr=lr)
        if steps is not None:
            train = replace(
                train, steps=steps, epochs=None, tokens=None, warmup_steps=min(train.warmup_steps, steps // 2)
            )
        start = router.start
        if self.settings.router.phase == "all" and phase != "1":
            start = str(self.folder_of("1" if phase == "2" else "2"))
        return replace(
            _on_base(settings, replace(base, trust=settings.model.trust)),
            train=train,
            router=replace(router, phase=phase, start=start, teach_steps=None, teach_lr=None, teach_answers="own"),  # type: ignore[arg-type]
        )

    def _teach(self, steps: int, to: Path) -> None:
        """Fine-tunes all weights on the solutions of all sources, and writes them as the base."""
        settings, folder = self.settings, self.session.run.stage_dir("taught")
        path = self.session.run.samples_dir / "solutions.jsonl"
        each = [source.solutions(source.train, most=source.size) for source in sources_of(settings)]
        if settings.router.teach_answers == "shuffled":
            each = [_shuffled(pairs, seed=settings.seed) for pairs in each]
        solutions = [pair for pairs in each for pair in pairs]
        spec = self._tokenizer(solutions)
        tokenizer = load_tokenizer(spec, documents=None, cache=Path())
        text = "".join(f"{json.dumps(row_of(tokenizer, prompt, answer))}\n" for prompt, answer in solutions)
        self.ranks.on_first(lambda: self.seals.write_rows(path, text))
        train = replace(
            settings.train,
            steps=steps,
            epochs=None,
            tokens=None,
            lr=settings.router.teach_lr or settings.train.lr,
            warmup_steps=min(settings.train.warmup_steps, steps // 2),
        )
        data = replace(settings.data, source="jsonl", path=str(path), sources=(), on_bad_row="skip", max_bad_share=1.0)
        alike = replace(settings, recipe="sft", data=replace(data, tokenizer=spec), train=train, lora=LoraSettings())
        outcome = sft.run(_quiet(alike), folder=folder, resume=self.staged.begun(folder))
        self._told(outcome, folder)
        if outcome.stopped_by.startswith("SIG"):
            raise Stopped(outcome.stopped_by)
        self.ranks.on_first(lambda: self._write_base(folder, to))

    def _write_base(self, folder: Path, to: Path) -> None:
        trained = open_trained(Run.open(folder))
        try:
            with self.seals.writing_folder(to) as partial:
                trained.tokenizer.save(partial)
                export_model(trained.model, partial, dtype=torch.float32, eos_token_id=trained.tokenizer.eos_id)
        except (OSError, SafetensorError) as error:
            raise unwritable(to, as_os_error(error, to)) from None

    def _tokenizer(self, solutions: Sequence[tuple[Messages, str]]) -> str:
        """The tokenizer of a base of random weights; `bpe:SIZE` is trained on the solutions of all sources."""
        spec, folder = sft.tokenizer_of(self.settings), self.session.run.stage_dir("bpe").absolute()
        if not spec.startswith("bpe:"):
            return spec

        def texts() -> Iterator[str]:
            return (f"{plain_prompt(prompt)} {answer}" for prompt, answer in solutions)

        def write() -> None:
            if folder.exists():
                return self.seals.check_folder(folder)
            try:
                with self.seals.writing_folder(folder) as partial:
                    load_tokenizer(spec, documents=texts, cache=partial)
            except OSError as error:
                raise unwritable(folder, error) from None

        self.ranks.on_first(write)
        return str(folder)

    def _told(self, outcome: Outcome, folder: Path) -> None:
        self.session.recorder.event(events.StageTrained.of(outcome, folder))


class Measured:
    """Scores the tasks with one bank, and counts how the router sent their prompts."""

    def __init__(self, *, settings: Settings, model: Opened) -> None:
        self.settings, self.opened, self.sources = settings, model, sources_of(settings)
        self._chosen: dict[str, list[tuple[int, float]]] = {}
        self._last: tuple[tuple[str, int | None], Sampler] | None = None

    def scores(self, how: str) -> Iterator[AdapterScore]:
        for which, source in enumerate(self.sources):
            sampler = self._sampler(how, which)
            score = self._score(sampler, source.valid)
            if isinstance(sampler, RoutedSampler):
                self._chosen[source.name] = list(sampler.chosen)
            yield AdapterScore(
                task=source.name,
                how=how,
                metric=score.metric,
                value=score.value,
                low=score.low,
                high=score.high,
                n=score.n,
                measures=score.details.get("measures"),
            )

    def routing(self) -> dict[str, Any]:
        """How the prompts were routed: for each task, the prompts that each adapter got."""
        if not self._chosen:
            return {}
        count = len(self.sources)
        confusion = [
            [sum(which == e for which, _ in self._chosen[source.name]) for e in range(count)] for source in self.sources
        ]
        right, total = sum(confusion[e][e] for e in range(count)), sum(map(sum, confusion))
        within, sure = wilson(right, total), [sure for many in self._chosen.values() for _, sure in many]
        return {
            "confusion": tuple(tuple(row) for row in confusion),
            "routed_right": right / total,
            "low": within.low,
            "high": within.high,
            "confidence": sum(sure) / len(sure),
        }

    def _sampler(self, how: str, which: int) -> Sampler:
        """The base and the router serve all tasks with one sampler, which takes seconds to start on a GPU."""
        routed = how in ("routed", "joint")
        key = how, None if routed or how == "base" else which
        if self._last is None or self._last[0] != key:
            model = self.opened.model
            assert isinstance(model, Decoder)
            self._last = None  # one sampler's cache at a time
            opened = self.opened if routed else replace(self.opened, model=lora.alone(model, key[1]))
            self._last = key, sampler_of(opened)
        return self._last[1]

    def _score(self, sampler: Sampler, spec: str) -> Score:
        router = self.settings.router
        [score] = evaluate(
            [spec],
            sampler=sampler,
            tokenizer=self.opened.tokenizer,
            sampling=Sampling(max_tokens=router.answer_tokens, stop_ids=self.opened.stop_ids),
            limit=router.questions,
        )
        return score


def _shuffled(pairs: Sequence[tuple[Messages, str]], *, seed: int) -> list[tuple[Messages, str]]:
    """Each question with the answer of a random question of its source."""
    answers = [answer for _, answer in pairs]
    random.Random(seed).shuffle(answers)
    return [(prompt, answer) for (prompt, _), answer in zip(pairs, answers, strict=True)]


def _quiet(settings: Settings) -> Settings:
    """An intermediate training, without success criteria."""
    return replace(settings, target=TargetSettings(), criteria=CriteriaSettings(), profile=ProfileSettings())


def _finished(folder: Path) -> Outcome | None:
    """The outcome of a phase that ended by itself, by its length or by early stopping; it is not trained further."""
    if not Run.is_at(folder):
        return None
    run = Run.open(folder)
    ended = [event for event in run.events() if isinstance(event, events.Ended)]
    if not ended or ended[-1].outcome is None or ended[-1].outcome.stopped_by.startswith("SIG"):
        return None
    checkpoint, _ = chosen_checkpoint(run)
    return ended[-1].outcome if checkpoint.step == ended[-1].outcome.steps else None
