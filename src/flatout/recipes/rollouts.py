"""Rollouts: the weights that are being trained answer questions, the answers are graded, and steps learn from them.

A phase generates and grades completions for `rl.prompts` prompts and then takes `rl.updates` optimizer steps per epoch
on them. Everything in a phase follows from the seed, its number, the weights at its start and the accuracy of earlier
phases, which the run folder has. So a run that is resumed between two phases continues exactly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from flatout.config.settings import Settings
from flatout.data.stream import Batch, permute
from flatout.data.tokenizer import Tokenizer
from flatout.engine.faults import OutOfMemory
from flatout.engine.opening import stop_ids
from flatout.engine.prepare import unprepared
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.errors import UsageError
from flatout.plan import Plan, named_shape
from flatout.plan.rollouts import MOST_ROWS
from flatout.recipes.batches import shrunk
from flatout.recipes.experience import Experience, Group, Prompt, Update, full_batch, packed
from flatout.recipes.levels import Levels
from flatout.recipes.questions import Live
from flatout.recipes.sampling import Fitting, Graders
from flatout.recipes.session import Session
from flatout.recipes.validation import every, save_steps_of
from flatout.record.events import Notice
from flatout.record.rollouts import RolloutSample, RolloutsGraded, TaskRollouts
from flatout.sample import (
    Completion,
    Sampler,
    Sampling,
    answer_space,
    backend_of,
    prompt_ids,
    prompt_ids_batch,
    sampler_of,
    stop_texts,
    text_of,
    vocabulary_check,
)
from flatout.tasks import Graded, Task, Worked

# Questions whose prompts are measured before the run starts.
CHECKED = 16
# Completions of a phase that the record keeps, and the most characters of each.
KEPT, KEPT_CHARACTERS = 4, 2000


@dataclass(frozen=True, kw_only=True)
class Grade:
    """A completion's text, and its grade when it is ready."""

    text: str
    future: Future[Graded]


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The completions of a phase, by prompt and sample, and their grades, which are being computed."""

    prompts: Sequence[Prompt]
    completions: Sequence[Sequence[Completion]]
    grades: Sequence[Sequence[Grade]]
    levels: Mapping[str, int | None]  # of the tasks, when the phase was generated
    seconds: float


class Rollouts:
    """The source of a run that learns from its own completions."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.sampling = _sampling(settings, tokenizer)
        # What is missing, or what this sampler cannot do, is named now.
        check = vocabulary_check(backend_of(settings.rl.sampler, sampling=self.sampling))
        if settings.model.name is not None:
            check(tokenizer, named_shape(settings.model).vocab)
        self.levels = Levels(settings.rl)
        lengths = [
            self._checked(spec, self.levels.task(spec, level=self.levels.level(spec))) for spec in settings.rl.tasks
        ]
        self.prompt_tokens = sum(lengths) / len(lengths)

    @property
    def steps_per_epoch(self) -> float | None:
        """An epoch has as many prompts as the tasks have questions; every task has the same number of prompts."""
        rl, count = self.settings.rl, 0
        for spec in rl.tasks:
            size = self.levels.task(spec, level=self.levels.level(spec)).size
            if size is None or rl.curriculum:
                return None
            count += size
        return count / rl.prompts * rl.steps_in_phase

    def _checked(self, spec: str, task: Task) -> float:
        """The mean length of its first prompts. Refuses a task that cannot be learnt from."""
        if self.settings.rl.teach and not isinstance(task, Worked):
            raise UsageError(
                f"rl.teach: {spec} has no worked solutions. In a jsonl: file, name their field: "
                "jsonl:FILE?solution=FIELD; the generated tasks, units, sums:shown and gsm8k: have them; or set "
                "rl.teach: 0"
            )
        asked = {
            "train.epochs": self.settings.train.epochs is not None,
            "save.every: epoch": self.settings.save.every == "epoch",
        }
        epochs = next((name for name, wanted in asked.items() if wanted), None)
        if epochs is not None and (task.size is None or self.settings.rl.curriculum):
            why = (
                f"{spec} makes new questions without end"
                if task.size is None
                else "rl.curriculum changes its questions"
            )
            raise UsageError(f"{epochs}: {why}, so there is no epoch: give steps")
        some = range(min(CHECKED, task.size or CHECKED))
        lengths = [len(prompt_ids(self.tokenizer, task.prompt(i))) for i in some]
        shortest, length, room = min(lengths), self.settings.data.sequence_length, self.settings.sample.max_tokens
        if shortest + room > length:
            raise UsageError(
                f"the prompts of {spec} have {shortest} tokens or more; with sample.max_tokens ({room}) they do not "
                f"fit data.sequence_length ({length}): raise it, and model.positions too, or lower sample.max_tokens"
            )
        return sum(lengths) / len(lengths)

    def trial_batch(self, ranks: Ranks, *, micro_batch: int) -> Batch:
        return full_batch(self.settings, micro_batch)

    @contextmanager
    def batches(
        self, engine: Engine, plan: Plan, session: Session, ranks: Ranks, *, start: int, stop: int
    ) -> Iterator[RolloutBatches]:
        if self.settings.rl.sampler == "vllm" and ranks.world > 1:
            raise UsageError(f"rl.sampler: vllm runs on one rank, not on {ranks.world}: use flatout, or one GPU")
        self.levels.recall(session.run.events(), before=start)
        with ExitStack() as stack:
            graders = {
                spec: stack.enter_context(Graders(spec, count=self.settings.rl.graders)) for spec in self.levels.specs
            }
            batches = RolloutBatches(self, engine, plan, session, ranks, graders)
            stack.callback(batches.fitting.close)
            yield batches


def _sampling(settings: Settings, tokenizer: Tokenizer) -> Sampling:
    sample = settings.sample
    return Sampling(
        max_tokens=sample.max_tokens,
        min_tokens=sample.min_tokens,
        temperature=sample.temperature,
        top_p=sample.top_p,
        top_k=sample.top_k,
        stop_ids=stop_ids(settings.model, tokenizer),
        stop_texts=stop_texts(tokenizer),
    )


class RolloutBatches:
    """The batches of a run that learns from its own completions, phase by phase."""

    def __init__(
        self,
        source: Rollouts,
        engine: Engine,
        plan: Plan,
        session: Session,
        ranks: Ranks,
        graders: dict[str, Graders],
    ) -> None:
        self.settings, self.rl = source.settings, source.settings.rl
        self.levels, self.tokenizer, self.graders = source.levels, source.tokenizer, graders
        self.engine, self.plan, self.session, self.ranks = engine, plan, session, ranks
        self.micro_batch = plan.decisions.micro_batch
        self.save_steps = save_steps_of(self.settings, source.steps_per_epoch)
        sample = self.settings.sample
        self.sampling = source.sampling
        share = -(-self.rl.prompts * self.rl.samples // ranks.world)
        rows = sample.rows or min(share, MOST_ROWS[engine.active.device.type])
        self.fitting = Fitting(self._sampler, rows=rows, tell=session.recorder.event)
        self.experience = Experience(self.settings, plan, engine, ranks)
        self._told: set[str] = set()  # tasks whose first question that does not fit was reported
        self._phase: int | None = None
        self._ahead: dict[int, Generated] = {}  # by phase
        self._updates: list[list[Update]] = []  # by step in an epoch of the phase

    # -- what the loop asks for

    def next(self, step: int) -> list[Batch]:
        phase, at = divmod(step, self.rl.steps_in_phase)
        if phase != self._phase:
            with self.engine.gathered():
                self._updates = self._taught(phase) if phase < self.rl.teach else self._rolled_out(phase, step=step)
            self._phase = phase
        self.engine.phases.mark("pack")
        batches: list[Batch] = []
        for update in self._updates[at % self.rl.updates]:
            batches += packed(update.examples, self.settings).batches(self.micro_batch, task=update.task)
        return [batch.pinned() for batch in batches] if self.plan.decisions.pin_memory else batches

    def again(self, step: int) -> None:
        pass  # the phase is kept

    def shrink(self, step: int, *, cause: OutOfMemory) -> tuple[int, int]:
        before = self.micro_batch
        self.micro_batch = self.experience.micro_batch = shrunk(before, self.plan, step=step, cause=cause)
        return before, self.micro_batch

    def resumable(self, step: int) -> bool:
        return step % self.rl.steps_in_phase == 0

    def feed_more(self, *, limit: int) -> int | None:
        return None

    # -- a phase

    def _rolled_out(self, phase: int, *, step: int) -> list[list[Update]]:
        """Generate, grade, compare. Every rank does this for its share of the prompts."""
        spent, waited, queued, tried = 0.0, 0.0, 0.0, list[Group]()
        found: dict[int, Group] = {}  # by slot; the last one, unless an earlier one had signal
        for one in range(phase, self._last_ahead(phase) + 1):
            if one not in self._ahead:
                self._ahead[one] = self._generated(self._prompts(one), phase=one)
        generated = self._ahead.pop(phase)
        for round_ in range(1, self.rl.dynamic_sampling + 2):
            ready = time.perf_counter()
            self._wait_in_queue(generated)
            queued += time.perf_counter() - ready
            self.engine.phases.mark("grade", role="grader")
            groups = self._graded(generated)
            waited += time.perf_counter() - ready
            spent += generated.seconds
            tried += groups
            found |= {group.prompt.slot: group for group in groups}
            lacking = {slot for slot, group in found.items() if not group.has_signal}
            if round_ > self.rl.dynamic_sampling or not lacking:
                break
            prompts = [prompt for prompt in self._prompts(phase, round_=round_) if prompt.slot in lacking]
            generated = self._generated(prompts, phase=phase)
        for graders in self.graders.values():
            graders.forget()
        self.engine.phases.mark("pack")
        self._report(tried, levels=generated.levels, step=step, seconds=spent + waited, waited=waited, queued=queued)
        return self.experience.updates(list(found.values()), phase=phase)

    def _last_ahead(self, phase: int) -> int:
        """The last phase that is generated now: none behind a save, so that a run resumed there does the same."""
        last, steps = phase, self.plan.job.steps or 0
        while last < phase + self.rl.ahead and (last + 1) * self.rl.steps_in_phase < steps:
            if self._saved_at(last + 1):
                break
            last += 1
        return last

    def _saved_at(self, phase: int) -> bool:
        """Whether the weights at the start of a phase are saved."""
        evaluation = (self.settings.eval.every, self.settings.eval.tasks_every) if self.settings.save.best else ()
        step, before = phase * self.rl.steps_in_phase, (phase - 1) * self.rl.steps_in_phase
        return any(every(cadence, step, since=before) for cadence in (self.save_steps, *evaluation))

    def _taught(self, phase: int) -> list[list[Update]]:
        """Worked solutions in the place of completions, each better than anything else."""
        prompts, texts = self._prompts(phase), []
        space = answer_space(self.tokenizer)
        for prompt in prompts:
            task = self.levels.task(prompt.task, level=prompt.level)
            assert isinstance(task, Worked)
            texts.append(space + task.solution(prompt.question))
        ids = self.tokenizer.encode_batch(texts)
        solutions = [(*own, self.tokenizer.eos_id)[: self.sampling.max_tokens] for own in ids]
        return self.experience.solutions(prompts, solutions)

    def _prompts(self, phase: int, *, round_: int = 0) -> list[Prompt]:
        """This rank's prompts: the next questions of the tasks, in an order that the seed gives.

        A round of dynamic sampling takes questions of its own, so that a phase does not depend on earlier ones.
        """
        self.engine.phases.mark("data")
        rl, tasks = self.rl, self.rl.tasks
        each, rounds = rl.prompts // len(tasks), rl.dynamic_sampling + 1
        slots = np.arange(self.ranks.rank, rl.prompts, self.ranks.world, dtype=np.int64)
        places = phase * rl.prompts + slots
        if self.settings.mtl.method == "mixed" and len(tasks) > 1:
            # The same questions as in equal batches, in another order over the whole run.
            count = (self.plan.job.steps or 0) // rl.steps_in_phase * rl.prompts
            places = permute(places, count, key=(self.settings.seed, 0, 2))
        asked = []
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            in_phase, at = divmod(place, rl.prompts)
            task, number = divmod(at, each)
            spec, level = tasks[task], self.levels.level(tasks[task])
            place = (in_phase * rounds + round_) * each + number
            question = question_of(self.levels.task(spec, level=level), place, seed=self.settings.seed)
            asked.append(Prompt(slot=slot, task=spec, level=level, question=question, ids=()))
        texts = [self.levels.task(one.task, level=one.level).prompt(one.question) for one in asked]
        ids = prompt_ids_batch(self.tokenizer, texts)
        return [prompt for one, own in zip(asked, ids, strict=True) if (prompt := self._fitting(one, own)) is not None]

    def _fitting(self, prompt: Prompt, ids: Sequence[int]) -> Prompt | None:
        """The prompt with its ids; None if it leaves no room for an answer, which is told once for each task."""
        if len(ids) + self.sampling.max_tokens <= self.settings.data.sequence_length:
            return replace(prompt, ids=tuple(ids))
        if prompt.task not in self._told:
            self._told.add(prompt.task)
            text = f"{prompt.task}: question {prompt.question} has a prompt of {len(ids)} tokens, which does not fit"
            tell = f"{text} data.sequence_length with sample.max_tokens; such questions are left out"
            self.session.recorder.event(Notice(text=tell))
        return None

    def _generated(self, prompts: Sequence[Prompt], *, phase: int) -> Generated:
        self.engine.phases.mark("generate", role="sampler")
        began = time.perf_counter()
        # Another seed in every phase: a question that comes again gets other random numbers.
        sampling = replace(self.sampling, seed=self.settings.seed * 1_000_003 + phase)
        keys = [self.rl.tasks.index(prompt.task) * 1_000_003 + prompt.question for prompt in prompts]

        def generate(sampler: Sampler) -> tuple[list[list[Completion]], list[list[Grade]]]:
            found: list[list[tuple[Completion, Grade]]] = [[] for _ in prompts]
            ids = [prompt.ids for prompt in prompts]
            for done in sampler.generate(ids, sampling=sampling, samples=self.rl.samples, keys=keys):
                prompt = prompts[done.prompt]
                text = text_of(self.tokenizer, done.ids, self.sampling)
                graders = self.graders[self.levels.spec(prompt.task, level=prompt.level)]
                found[done.prompt].append((done, Grade(text=text, future=graders.grade(prompt.question, text))))
            ordered = [sorted(many, key=lambda one: one[0].sample) for many in found]
            return [[one for one, _ in many] for many in ordered], [[grade for _, grade in many] for many in ordered]

        with torch.no_grad():
            completions, grades = self.fitting.run(generate) if prompts else ([], [])
        seconds = time.perf_counter() - began
        levels = {spec: self.levels.level(spec) for spec in self.rl.tasks}
        return Generated(prompts=prompts, completions=completions, grades=grades, levels=levels, seconds=seconds)

    def _sampler(self, rows: int) -> Sampler:
        """On the weights that are being trained; it reads them again before every use."""
        live = Live(model=unprepared(self.engine.model), tokenizer=self.tokenizer)
        watch = partial(self.engine.phases.mark, role="sampler")
        if self.rl.sampler == "vllm":
            return sampler_of(live, backend="vllm", rows=rows, memory=self.rl.vllm_memory, watch=watch)
        return sampler_of(live, rows=rows, watch=watch)

    def _wait_in_queue(self, generated: Generated) -> None:
        """Waits until the last completion is being graded."""
        self.engine.phases.mark("queue", role="grader")
        waiting: dict[str, list[Future[Graded]]] = {}
        for prompt, grades in zip(generated.prompts, generated.grades, strict=True):
            spec = self.levels.spec(prompt.task, level=prompt.level)
            waiting.setdefault(spec, []).extend(grade.future for grade in grades)
        for spec, futures in waiting.items():
            self.graders[spec].wait_in_queue(futures)

    def _graded(self, generated: Generated) -> list[Group]:
        groups = []
        for prompt, many, waiting in zip(generated.prompts, generated.completions, generated.grades, strict=True):
            graded = [one.future.result() for one in waiting]
            groups.append(
                Group(
                    prompt=prompt,
                    completions=tuple(many),
                    texts=tuple(one.text for one in waiting),
                    scores=tuple(one.reward for one in graded),
                    penalties=tuple(self.experience.penalty(len(one.ids)) for one in many),
                    answered=tuple(one.answered for one in graded),
                    grading_s=tuple(one.seconds for one in graded),
                    killed=sum(one.status == "killed" for one in graded),
                )
            )
        return groups

    def _report(
        self,
        groups: Sequence[Group],
        *,
        levels: Mapping[str, int | None],
        step: int,
        seconds: float,
        waited: float,
        queued: float,
    ) -> None:
        """Records the completions of all ranks by task."""
        by_task = [[group for group in groups if group.prompt.task == spec] for spec in self.rl.tasks]
        device = self.engine.active.device
        counts, slowest = np.stack([counted(of) for of in by_task]), np.array([slowest_s(of) for of in by_task])
        totals = self.ranks.sum_(torch.from_numpy(counts).to(device)).cpu().numpy()
        longest = self.ranks.max_(torch.from_numpy(slowest).to(device)).tolist()
        event = RolloutsGraded(
            step=step,
            tasks=tuple(
                summary(row, task=spec, level=levels[spec], slowest_s=seconds)
                for spec, row, seconds in zip(self.rl.tasks, totals, longest, strict=True)
            ),
            tokens=int(totals[:, COUNTS.index("tokens")].sum()),
            seconds=seconds,
            grading_s=waited,
            queue_s=queued,
            rows=self.fitting.rows,
            samples=tuple(kept(groups)),
        )
        self.session.recorder.event(event)
        self.levels.see(event)


COUNTS = (
    *("prompts", "completions", "reward", "correct", "answered", "tokens", "truncated", "no_signal", "killed"),
    *("timed", "grading_s"),
)


def counted(groups: Sequence[Group]) -> NDArray[np.float64]:
    """Sums over the completions of one task, in the order of COUNTS."""
    found = dict.fromkeys(COUNTS, 0.0)
    for group in groups:
        found["prompts"] += 1
        found["completions"] += len(group.completions)
        found["reward"] += sum(group.rewards)
        found["correct"] += sum(score >= 1.0 for score in group.scores)
        found["answered"] += sum(group.answered)
        found["tokens"] += sum(len(one.ids) for one in group.completions)
        found["truncated"] += sum(one.status == "length" for one in group.completions)
        found["no_signal"] += not group.has_signal
        found["killed"] += group.killed
        found["timed"] += sum(seconds is not None for seconds in group.grading_s)
        found["grading_s"] += sum(seconds or 0.0 for seconds in group.grading_s)
    return np.array([found[name] for name in COUNTS])


def slowest_s(groups: Sequence[Group]) -> float:
    """The longest time that grading one completion took; 0 if none was timed."""
    return max((seconds or 0.0 for group in groups for seconds in group.grading_s), default=0.0)


def summary(counts: NDArray[np.float64], *, task: str, level: int | None, slowest_s: float) -> TaskRollouts:
    found = dict(zip(COUNTS, counts.tolist(), strict=True))

    def mean(name: str, *, of: str = "completions") -> float | None:
        return found[name] / found[of] if found[of] else None

    return TaskRollouts(
        task=task,
        prompts=int(found["prompts"]),
        reward=mean("reward"),
        accuracy=mean("correct"),
        answered=mean("answered"),
        length=mean("tokens"),
        truncated=mean("truncated"),
        without_signal=mean("no_signal", of="prompts"),
        killed=int(found["killed"]),
        level=level,
        grading_s=mean("grading_s", of="timed"),
        slowest_s=slowest_s if found["timed"] else None,
    )


def kept(groups: Sequence[Group]) -> Iterator[RolloutSample]:
    """For the reader of the record: the first completion of some prompts, evenly spaced, and the slowest to grade."""
    shown = [(group, 0) for group in groups[:: max(1, -(-len(groups) // KEPT))] if group.texts]
    timed = [(s, at, k) for at, group in enumerate(groups) for k, s in enumerate(group.grading_s) if s is not None]
    if timed:
        _, at, k = max(timed)
        shown.append((groups[at], k))
    for group, k in shown:
        yield RolloutSample(
            task=group.prompt.task,
            question=group.prompt.question,
            completion=group.texts[k][:KEPT_CHARACTERS],
            reward=group.rewards[k],
            grading_s=group.grading_s[k],
        )


def question_of(task: Task, at: int, *, seed: int) -> int:
    """The question at a place of the endless sequence of a task's questions: every epoch has its own order."""
    if task.size is None:
        return at
    epoch, within = divmod(at, task.size)
    return int(permute(np.array([within], np.int64), task.size, key=(seed, epoch, 1))[0])
