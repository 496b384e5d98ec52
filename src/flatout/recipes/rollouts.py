"""Rollouts: the weights that are being trained answer questions, the answers are graded, and steps learn from them.

A phase generates and grades completions for `rl.prompts` prompts and then takes `rl.updates` optimizer steps per epoch
on them. Everything in a phase follows from the seed, its number and the weights at its start, so a run that is resumed
between two phases continues exactly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from flatout import policy
from flatout.config.settings import RlSettings, Settings
from flatout.data.examples import Examples
from flatout.data.packed import Packed
from flatout.data.stream import NOT_TRAINED, Batch, permute
from flatout.data.tokenizer import Tokenizer
from flatout.engine.faults import OutOfMemory, largest, smaller
from flatout.engine.opening import stop_ids
from flatout.engine.prepare import unprepared
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.errors import RunFailed
from flatout.plan import Plan
from flatout.recipes.questions import Live
from flatout.recipes.sampling import Fitting, Graders
from flatout.recipes.session import Session
from flatout.recipes.stages import questions_of
from flatout.record.events import RolloutsGraded, TaskRollouts
from flatout.sample import Completion, Sampler, Sampling, prompt_ids, sampler_of, stop_texts, text_of
from flatout.tasks import Task

# Column names of a batch.
ADVANTAGE, OLD_LOGP, WEIGHT = "advantage", "old_logp", "weight"
ESTIMATORS: dict[str, policy.Estimator] = {
    "grpo": "group",
    "dapo": "group",
    "gspo": "group",
    "dr_grpo": "group_mean",
    "rloo": "leave_one_out",
}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question of a task in a phase."""

    task: int
    question: int
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The completions of one prompt, by sample number, with their rewards."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]
    answered: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class Update:
    """The examples of one optimizer step; of one task where gradients are kept apart."""

    examples: Examples
    task: str | None = None


class Rollouts:
    """The source of a run that learns from its own completions."""

    steps_per_epoch: float | None = None

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.tasks = [questions_of(spec) for spec in settings.rl.tasks]

    def trial_batch(self, ranks: Ranks, *, micro_batch: int) -> Batch:
        """A micro-batch full of text of one document per sequence."""
        length = self.settings.data.sequence_length
        tokens = np.zeros(micro_batch * (length + 1), np.int32)
        examples = Examples(
            tokens=tokens,
            trained=np.ones(len(tokens), np.bool_),
            ends=np.arange(1, micro_batch + 1) * (length + 1),
            columns={name: np.zeros(len(tokens), np.float32) for name in columns_of(self.settings.rl)},
        )
        return packed(examples, self.settings).batches(micro_batch)[0]

    @contextmanager
    def batches(
        self, engine: Engine, plan: Plan, session: Session, ranks: Ranks, *, start: int, stop: int
    ) -> Iterator[RolloutBatches]:
        with ExitStack() as stack:
            graders = [stack.enter_context(Graders(spec)) for spec in self.settings.rl.tasks]
            yield RolloutBatches(self, engine, plan, session, ranks, graders)


class RolloutBatches:
    def __init__(
        self,
        source: Rollouts,
        engine: Engine,
        plan: Plan,
        session: Session,
        ranks: Ranks,
        graders: Sequence[Graders],
    ) -> None:
        self.settings, self.rl = source.settings, source.settings.rl
        self.tasks, self.tokenizer, self.graders = source.tasks, source.tokenizer, graders
        self.engine, self.plan, self.session, self.ranks = engine, plan, session, ranks
        self.micro_batch = plan.decisions.micro_batch
        sample = self.settings.sample
        self.sampling = Sampling(
            max_tokens=sample.max_tokens,
            min_tokens=sample.min_tokens,
            temperature=sample.temperature,
            top_p=sample.top_p,
            top_k=sample.top_k,
            stop_ids=stop_ids(self.settings.model, self.tokenizer),
            stop_texts=stop_texts(self.tokenizer),
        )
        self.fitting = Fitting(self._sampler, rows=plan.rows or 64, tell=session.recorder.event)
        self._phase: int | None = None
        self._updates: list[list[Update]] = []  # by step in an epoch of the phase

    # -- what the loop asks for

    def next(self, step: int) -> list[Batch]:
        phase, at = divmod(step, self.rl.steps_in_phase)
        if phase != self._phase:
            self._updates = self._roll_out(phase, step=step)
            self._phase = phase
        batches: list[Batch] = []
        for update in self._updates[at % self.rl.updates]:
            batches += packed(update.examples, self.settings).batches(self.micro_batch, task=update.task)
        return batches

    def again(self, step: int) -> None:
        pass  # the phase is kept

    def shrink(self, step: int, *, cause: OutOfMemory) -> tuple[int, int]:
        before = self.micro_batch
        if before == 1:
            raise RunFailed(
                f"step {step} ran out of memory even with micro-batch 1 ({cause}). "
                + largest(self.plan.predicted.memory_gib)
            )
        self.micro_batch = smaller(before)
        return before, self.micro_batch

    def resumable(self, step: int) -> bool:
        return step % self.rl.steps_in_phase == 0

    def feed_more(self, *, limit: int) -> int | None:
        return None

    # -- a phase

    def _roll_out(self, phase: int, *, step: int) -> list[list[Update]]:
        """Generate, grade, compare. Every rank does this for its share of the prompts."""
        began = time.perf_counter()
        self.engine.phases.mark("generate")
        prompts = self._prompts(phase)
        completions = self._generated(prompts, phase=phase)
        self.engine.phases.mark("grade")
        groups = self._graded(prompts, completions)
        self.engine.phases.mark("data")
        self._report(groups, step=step, seconds=time.perf_counter() - began)
        return self._compared(groups)

    def _prompts(self, phase: int) -> list[Prompt]:
        """This rank's prompts: the next questions of every task, in an order that the seed gives."""
        found = []
        each = self.rl.prompts // len(self.tasks)
        for number, task in enumerate(self.tasks):
            for at in range(self.ranks.rank, each, self.ranks.world):
                question = question_of(task, phase * each + at, seed=self.settings.seed)
                ids = tuple(prompt_ids(self.tokenizer, task.prompt(question)))
                found.append(Prompt(task=number, question=question, ids=ids))
        return found

    def _generated(self, prompts: Sequence[Prompt], *, phase: int) -> list[list[Completion]]:
        # Another seed in every phase: a question that comes again gets other random numbers.
        sampling = replace(self.sampling, seed=self.settings.seed * 1_000_003 + phase)
        keys = [prompt.task * 1_000_003 + prompt.question for prompt in prompts]

        def generate(sampler: Sampler) -> list[list[Completion]]:
            found: list[list[Completion]] = [[] for _ in prompts]
            ids = [prompt.ids for prompt in prompts]
            for done in sampler.generate(ids, sampling=sampling, samples=self.rl.samples, keys=keys):
                found[done.prompt].append(done)
            return [sorted(many, key=lambda one: one.sample) for many in found]

        with torch.no_grad():
            return self.fitting.run(generate)

    def _sampler(self, rows: int) -> Sampler:
        """On the weights that are being trained; it reads them again before every use."""
        return sampler_of(Live(model=unprepared(self.engine.model), tokenizer=self.tokenizer), rows=rows)

    def _graded(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        waiting = [
            [self.graders[p.task].grade(p.question, text_of(self.tokenizer, c.ids, self.sampling)) for c in many]
            for p, many in zip(prompts, completions, strict=True)
        ]
        groups = []
        for prompt, many, futures in zip(prompts, completions, waiting, strict=True):
            graded = [future.result() for future in futures]
            penalties = [self._overlong(len(one.ids)) for one in many]
            groups.append(
                Group(
                    prompt=prompt,
                    completions=tuple(many),
                    rewards=tuple(g.reward + p for g, p in zip(graded, penalties, strict=True)),
                    answered=tuple(g.answered for g in graded),
                )
            )
        for grader in self.graders:
            grader.forget()
        return groups

    def _overlong(self, length: int) -> float:
        return policy.overlong_penalty(length, limit=self.sampling.max_tokens, buffer=self.rl.overlong_buffer)

    def _compared(self, groups: Sequence[Group]) -> list[list[Update]]:
        """Advantages within each group, and the groups shared out over the updates of an epoch."""
        rewards = np.array([group.rewards for group in groups])
        advantages = policy.group_advantages(rewards, estimator=ESTIMATORS[self.rl.algorithm])
        updates = []
        for at in range(self.rl.updates):
            chosen = range(at, len(groups), self.rl.updates)
            if self.rl.method == "mixed":
                updates.append([self._update([groups[i] for i in chosen], advantages[list(chosen)])])
                continue
            apart = []
            for number, name in enumerate(self.settings.rl.tasks):
                own = [i for i in chosen if groups[i].prompt.task == number]
                apart.append(self._update([groups[i] for i in own], advantages[own], task=name))
            updates.append(apart)
        return updates

    def _update(self, groups: Sequence[Group], advantages: policy.Floats, *, task: str | None = None) -> Update:
        rows = [
            (group.prompt.ids, one, float(advantage))
            for group, own in zip(groups, advantages, strict=True)
            for one, advantage in zip(group.completions, own, strict=True)
            if one.ids and not (self.rl.mask_truncated and one.status == "length")
        ]
        lengths = np.array([len(one.ids) for _, one, _ in rows])
        weights = self._weights(lengths)
        tokens = [np.array([*prompt, *one.ids], np.int32) for prompt, one, _ in rows]
        trained = [np.arange(len(ids)) >= len(ids) - n for ids, n in zip(tokens, lengths, strict=True)]
        columns = {
            ADVANTAGE: spread([advantage for *_, advantage in rows], tokens),
            WEIGHT: spread(weights, tokens),
        }
        examples = replace(Examples.of(zip(tokens, trained, strict=True)), columns=columns)
        if OLD_LOGP in columns_of(self.rl):
            examples = replace(examples, columns=columns | {OLD_LOGP: self._log_probs(examples)})
        return Update(examples=examples, task=task)

    def _log_probs(self, examples: Examples) -> NDArray[np.float32]:
        """Of every token under the weights at the start of the phase, as the steps of the phase compute them."""
        numbered = replace(examples, columns={"number": np.arange(len(examples.tokens))})
        found = np.zeros(len(examples.tokens), np.float32)
        for batch in packed(numbered, self.settings).batches(self.micro_batch):
            trained = batch.targets != NOT_TRAINED
            logp = self.engine.log_probs(batch, temperature=self.sampling.temperature).cpu()
            found[batch.columns["number"][trained].numpy()] = logp[trained].float().numpy()
        return found

    def _weights(self, lengths: NDArray[np.int64]) -> policy.Floats:
        """By the sequences of all ranks."""
        return policy.token_weights(lengths, aggregation=self.rl.aggregation, max_length=self.sampling.max_tokens)

    def _report(self, groups: Sequence[Group], *, step: int, seconds: float) -> None:
        by_task = [
            summary([group for group in groups if group.prompt.task == number], task=spec)
            for number, spec in enumerate(self.settings.rl.tasks)
        ]
        tokens = sum(len(one.ids) for group in groups for one in group.completions)
        self.session.recorder.event(
            RolloutsGraded(step=step, tasks=tuple(by_task), tokens=tokens, seconds=seconds, rows=self.fitting.rows)
        )


def summary(groups: Sequence[Group], *, task: str) -> TaskRollouts:
    every = [one for group in groups for one in zip(group.completions, group.rewards, group.answered, strict=True)]

    def mean(values: Sequence[float]) -> float | None:
        return float(np.mean(values)) if len(values) else None

    return TaskRollouts(
        task=task,
        prompts=len(groups),
        reward=mean([reward for _, reward, _ in every]),
        accuracy=mean([reward >= 1.0 for _, reward, _ in every]),
        answered=mean([ok for *_, ok in every]),
        length=mean([len(one.ids) for one, *_ in every]),
        truncated=mean([one.status == "length" for one, *_ in every]),
        without_signal=mean([len(set(group.rewards)) == 1 for group in groups]),
    )


def columns_of(rl: RlSettings) -> tuple[str, ...]:
    """With one step per phase the policy that generated is the policy that learns, and needs no old log-probability."""
    return (ADVANTAGE, WEIGHT) if rl.steps_in_phase == 1 else (ADVANTAGE, WEIGHT, OLD_LOGP)


def question_of(task: Task, at: int, *, seed: int) -> int:
    """The question at a place of the endless sequence of a task's questions: every epoch in an order of its own."""
    if task.size is None:
        return at
    epoch, within = divmod(at, task.size)
    return int(permute(np.array([within], np.int64), task.size, key=(seed, epoch, 1))[0])


def packed(examples: Examples, settings: Settings) -> Packed:
    length = settings.data.sequence_length
    return Packed(examples, sequence_length=length, batch_sequences=1, seed=settings.seed, shuffle=False)


def spread(values: Sequence[float] | policy.Floats, tokens: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
    """One value for every token of its sequence."""
    return np.repeat(np.asarray(values, np.float32), [len(ids) for ids in tokens])
