"""The stages of rejection-sampling fine-tuning. Each continues after the work that an earlier attempt finished."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from flatout import files, hub
from flatout.config.settings import (
    CriteriaSettings,
    EvalSettings,
    LoraSettings,
    ModelSettings,
    ProfileSettings,
    SaveSettings,
    Settings,
    TargetSettings,
)
from flatout.config.tasks import held_out
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.engine.checkpoint import as_os_error
from flatout.engine.opening import Opened, open_model
from flatout.engine.trained import chosen_checkpoint, export_whole, open_trained
from flatout.errors import RunFailed, UsageError
from flatout.evaluate import Score, chosen, compare, evaluate
from flatout.recipes import sft
from flatout.recipes.questions import questions_of
from flatout.recipes.sampling import Chunk, Counts, Fitting, Kept, Sampled, Stopped, free_memory
from flatout.recipes.sealed import seal_of, unwritable
from flatout.recipes.session import device_memory, identity_of
from flatout.recipes.staged import InStages
from flatout.record import Outcome, Run, Speed, events
from flatout.sample import Sampler, Sampling, plain_prompt, sampler_of, stop_texts
from flatout.tasks import Messages, Worked, open_task, with_prompt

# Used where the plan cannot predict how many completions fit.
ROWS = 64


@dataclass(frozen=True, kw_only=True)
class RunTasks:
    """The tasks of a run: the sampled one, the same with the student's prompt, and the measured one."""

    sampled: str
    student: str
    measured: str
    questions: list[int]

    @classmethod
    def of(cls, settings: Settings) -> RunTasks:
        rft = settings.rft
        assert rft.task is not None
        measured = rft.valid or held_out(rft.task) or ""
        student = rft.student_prompt or rft.prompt
        made = [with_prompt(rft.task, rft.prompt), with_prompt(rft.task, student), with_prompt(measured, student)]
        for spec in made:
            task = questions_of(spec)
            limit = rft.valid_questions if spec == made[2] else rft.questions
            questions = chosen(task.size, limit=limit, name=task.name)
            if not questions or task.choices(questions[0]) is not None:
                raise UsageError(f"{spec} is multiple choice; recipe rft takes tasks whose answers are generated")
        worked = None if rft.teach is None else open_task(rft.teach)
        if worked is not None and (not isinstance(worked, Worked) or worked.size is None):
            raise UsageError(
                f"rft.teach: {rft.teach} has no worked solutions, or is endless; use sums:shown, units:train or "
                "gsm8k:FILE"
            )
        if rft.teach is not None and settings.model.name is not None and Run.is_named_by(settings.model.name):
            raise UsageError(f"rft.teach and {settings.model.name}, an already trained run: leave one out")
        sampled = questions_of(made[0])
        return cls(
            sampled=made[0],
            student=made[1],
            measured=made[2],
            questions=chosen(sampled.size, limit=rft.questions, name=sampled.name),
        )


@dataclass(frozen=True, kw_only=True)
class Measured(Score):
    """A saved score. `identity` is that of the weights and the questions; older versions did not write it."""

    identity: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stages(InStages):
    """The stages of `rft`, one method each.

    All ranks train and sample; the first one writes what a later stage reads, and scores, while the others wait.
    """

    settings: Settings
    tasks: RunTasks

    def sweep(self) -> None:
        """Removes the temporary files that a killed attempt left."""
        run = self.session.run
        if self.ranks.first:
            for folder in (run.path, run.samples_dir, *run.samples_dir.glob("round-*/")):
                files.sweep(folder)

    def student(self) -> str:
        """The name or folder of the student, for recipe sft."""
        settings, run = self.settings, self.session.run
        name, to = settings.model.name, run.stage_dir("student").absolute()
        if self.ranks.on_first(to.exists):
            self.ranks.on_first(lambda: self.seals.check_folder(to))
        elif settings.rft.teach is not None:
            outcome = self._teach(run.stage_dir("taught"))
            if outcome.stopped_by.startswith("SIG"):
                raise Stopped(outcome.stopped_by)
            self.ranks.on_first(lambda: self._as_folder(Run.open(run.stage_dir("taught")), to))
        elif name is not None and Run.is_named_by(name):
            self.ranks.on_first(lambda: self._as_folder(Run.open(name), to))
        elif name is not None and settings.model.revision is not None:
            return str(hub.folder(name, weights=True, revision=settings.model.revision))
        else:
            return str(name)
        return str(to)

    def score(self, name: str, *, number: int) -> Score:
        """Accuracy on the held-out questions with greedy decoding after round `number`; 0 is before the first."""
        path = self.session.run.samples_dir / f"score-{number}.json"
        self.ranks.on_first(lambda: self._score(name, path, number=number))
        if self.ranks.any(bool(self.session.stop)):
            raise Stopped("SIGTERM")
        return self.seals.read(path, Measured)

    def _score(self, name: str, path: Path, *, number: int) -> None:
        rft = self.settings.rft
        how = [self.tasks.measured, rft.valid_questions, self.settings.sample.max_tokens]
        try:
            known = self.seals.read(path, Measured)
        except FileNotFoundError:
            known = None
        # Changed weights, as after more steps, are measured again.
        if known is not None and known.identity == identity_of(how=how, weights=weights_of(name)):
            return
        model = self._opened(name)
        sampling = Sampling(max_tokens=self.settings.sample.max_tokens, stop_ids=model.stop_ids)

        def measure(sampler: Sampler) -> Score:
            [score] = evaluate(
                [self.tasks.measured],
                sampler=sampler,
                tokenizer=model.tokenizer,
                sampling=sampling,
                limit=rft.valid_questions,
            )
            return score

        score = self._fitting(model).run(measure)
        identity = identity_of(how=how, weights=model.checksum or weights_of(name))
        self.seals.write(path, score.to_json() | {"identity": identity})
        self.session.recorder.event(events.StudentScored(round=number, **score.brief()))

    def samples(self, name: str, *, number: int, before: Mapping[int, Sequence[Kept]]) -> list[Chunk]:
        settings, session = self.settings, self.session
        rft, task = settings.rft, questions_of(self.tasks.sampled)
        model = self._opened(name)
        sampling = Sampling(
            max_tokens=settings.sample.max_tokens,
            min_tokens=settings.sample.min_tokens,
            temperature=settings.sample.temperature,
            top_p=settings.sample.top_p,
            top_k=settings.sample.top_k,
            stop_ids=model.stop_ids,
            stop_texts=stop_texts(model.tokenizer),
            seed=settings.seed + number - 1,
        )
        identity = identity_of(
            weights=model.checksum or weights_of(name),
            sampling=asdict(sampling) | {"stop_ids": sorted(sampling.stop_ids)},
            prompts=[list(map(dict, task.prompt(i))) for i in self.tasks.questions],
            before=[asdict(one) for many in before.values() for one in many],
            how=[rft.oversample, rft.adaptive, rft.first, rft.keep, rft.chunk],
        )
        fitting = self._fitting(model)
        session.recorder.event(
            events.SamplingBegan(
                round=number,
                task=self.tasks.sampled,
                questions=len(self.tasks.questions),
                oversample=rft.oversample,
                adaptive=rft.adaptive,
                temperature=sampling.temperature,
                model=name,
                on=model.where,
                rows=fitting.rows,
            )
        )
        device = model.model.head_weight.device
        return Sampled(
            task=task,
            spec=self.tasks.sampled,
            tokenizer=model.tokenizer,
            sampling=sampling,
            rft=rft,
            fitting=fitting,
            identity=identity,
            seals=self.seals,
            ranks=self.ranks,
            tell=session.recorder.event,
            memory=partial(device_memory, device, session.monitor),
            stop=lambda: bool(session.stop),
        ).collect(self.tasks.questions, folder=session.run.samples_dir / f"round-{number}", before=before)

    def dataset(self, chunks: Sequence[Chunk], *, number: int, student: str, least: int) -> Path:
        """Writes all kept completions, in the order of the questions, for recipe sft. Fewer rows than `least` fail.

        Training needs two: one to train on, one to validate with.
        """
        path, counts = self.session.run.samples_dir / f"round-{number}.jsonl", total(chunks)
        counts = replace(counts, seconds=counts.seconds / self.ranks.world)  # they sample at the same time
        task, tokenizer = questions_of(self.tasks.student), load_tokenizer(student, documents=None, cache=Path())
        kept = [one for chunk in chunks for one in chunk.kept]
        rows = (
            row(tokenizer, task.prompt(one.question), one.text) | {"index": one.question, "sample": one.sample}
            for one in kept
        )
        self.ranks.on_first(lambda: self.seals.write_rows(path, "".join(f"{json.dumps(one)}\n" for one in rows)))
        self.session.recorder.event(events.DatasetMade(round=number, path=str(path), **counts.to_json()))
        if len(kept) < least:
            raise RunFailed(
                f"too little to train on: {counts.solved} of {counts.questions} questions solved in {counts.samples} "
                f"samples, {counts.answered} of which gave an answer in the requested format. Use a larger "
                "rft.generator, raise rft.oversample or sample.max_tokens, or check the prompt (rft.prompt)"
            )
        return path

    def trained(self, student: str, rows: Path, *, number: int) -> Outcome:
        """Trains a round: the last one in this run's own folder, earlier ones in separate folders."""
        settings, run = as_sft(self.settings, student=student, rows=rows), self.session.run
        free_memory()
        if number == self.settings.rft.rounds:
            return sft.run(
                settings,
                folder=run.path,
                resume=self.staged.resume and run.checkpoints_dir.is_dir(),
                session=self.session,
            )
        return self._stage(settings, self.folder_of(number))

    def folder_of(self, number: int) -> Path:
        run = self.session.run
        return run.path if number == self.settings.rft.rounds else run.stage_dir(f"round-{number}")

    def verdict(self, scores: Sequence[Score], *, counts: Counts, seconds: float | None) -> None:
        """Records the final result: the student's scores before and after, on the same questions."""
        before, after = scores[0], scores[-1]
        difference = compare(before, after)
        self.session.recorder.event(
            events.StudentJudged(
                task=self.tasks.measured,
                n=after.n,
                accuracy=tuple(score.value for score in scores),
                intervals=tuple((score.low, score.high) for score in scores),
                answered=tuple(score.details["answered"] for score in scores),
                difference=None if difference is None else events.Gain(**asdict(difference)),
                dataset=counts.to_json(),
                seconds=seconds,
            )
        )

    def _teach(self, folder: Path) -> Outcome:
        """Fine-tunes all weights on the task's own worked solutions."""
        settings, rft, run = self.settings, self.settings.rft, self.session.run
        assert rft.teach is not None
        task, prompted = open_task(rft.teach), questions_of(with_prompt(rft.teach, rft.student_prompt or rft.prompt))
        assert isinstance(task, Worked)
        tokenizer = load_tokenizer(sft.tokenizer_of(settings), documents=None, cache=Path())
        path = run.samples_dir / "solutions.jsonl"
        solved = (row(tokenizer, prompted.prompt(i), task.solution(i)) for i in chosen(prompted.size, limit=None))
        self.ranks.on_first(lambda: self.seals.write_rows(path, "".join(f"{json.dumps(one)}\n" for one in solved)))
        train = replace(
            settings.train,
            steps=rft.teach_steps,
            epochs=None,
            tokens=None,
            lr=rft.teach_lr or settings.train.lr,
            warmup_steps=min(settings.train.warmup_steps, rft.teach_steps // 2),
        )
        text = f"fine-tuned on the solutions of {rft.teach}: {train.steps} steps in {folder}"
        self.session.recorder.event(events.Notice(text=text))
        alike = as_sft(settings, student=None, rows=path)
        return self._stage(replace(alike, train=train, lora=LoraSettings()), folder)

    def _stage(self, settings: Settings, folder: Path) -> Outcome:
        """Runs an intermediate training, without success criteria."""
        quiet = replace(
            settings,
            eval=EvalSettings(tokens=settings.eval.tokens),
            save=SaveSettings(every=settings.save.every),
            target=TargetSettings(),
            criteria=CriteriaSettings(),
            profile=ProfileSettings(),
        )
        outcome = sft.run(quiet, folder=folder, resume=self.staged.begun(folder))
        self.session.recorder.event(events.StageTrained.of(outcome, folder))
        free_memory()
        return outcome

    def _as_folder(self, run: Run, to: Path) -> None:
        """Exports the model of a run as a sealed Hugging Face folder, atomically."""
        trained = open_trained(run, trust=self.settings.model.trust)
        self._tell(trained.notices)
        try:
            with self.seals.writing_folder(to) as folder:
                export_whole(trained, folder, dtype=torch.float32)
        except (OSError, SafetensorError) as error:
            raise unwritable(to, as_os_error(error, to)) from None

    def _opened(self, name: str) -> Opened:
        """Opens a model for sampling, after freeing the memory of the previous one."""
        free_memory()
        pinned = self.staged.plan.job.pins.precision
        model = open_model(name, dtype=pinned, trust=self.settings.model.trust)
        self._tell(model.notices)
        return model

    def _tell(self, notices: Iterable[str]) -> None:
        for text in notices:
            self.session.recorder.event(events.BadCheckpoint(text=text))

    def _fitting(self, model: Opened) -> Fitting:
        return Fitting(
            lambda rows: sampler_of(model, rows=rows),
            rows=self.staged.plan.rows or ROWS,
            tell=self.session.recorder.event,
        )


# --- from settings to settings -----------------------------------------------------------------------------


def as_sft(settings: Settings, *, student: str | None, rows: Path) -> Settings:
    """The same run as recipe sft on the sampled rows. `student` None: the configured model."""
    model = settings.model if student is None else ModelSettings(name=student, trust=settings.model.trust)
    # A completion may spell out a control token: such a row is left out and counted, without stopping the run.
    data = replace(settings.data, source="jsonl", path=str(rows), on_bad_row="skip", max_bad_share=1.0)
    return replace(settings, recipe="sft", model=model, data=data)


def row(tokenizer: Tokenizer, prompt: Messages, answer: str) -> dict[str, Any]:
    """A row for recipe sft: the exact prompt that is sampled and measured, and the answer to train on."""
    if tokenizer.has_template:
        said = [{"role": "assistant", "content": answer}]
        return {"prompt": [dict(message) for message in prompt], "completion": said}
    return {"prompt": plain_prompt(prompt), "completion": f" {answer}"}


# --- helpers ----------------------------------------------------------------------------------------------


def weights_of(name: str) -> str:
    """Identifies the weights behind a name: the checkpoint of a run, the seal of a folder, or the name."""
    if Run.is_named_by(name):
        return chosen_checkpoint(Run.open(name))[0].checksum
    return seal_of(Path(name)) or name


def by_question(chunks: Sequence[Chunk]) -> dict[int, list[Kept]]:
    kept: dict[int, list[Kept]] = {}
    for one in (one for chunk in chunks for one in chunk.kept):
        kept.setdefault(one.question, []).append(one)
    return kept


def total(chunks: Sequence[Chunk]) -> Counts:
    return sum((chunk.counts for chunk in chunks), Counts())


def nothing_trained(*, stopped_by: str = "end") -> Outcome:
    return Outcome(steps=0, tokens=0, hours=0.0, speed=Speed(steps=0), saved_step=0, stopped_by=stopped_by)
