"""What a policy learns from graded completions: advantages, weights, old log-probabilities, values, as examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout import policy
from flatout.config.settings import Settings
from flatout.data.examples import Examples
from flatout.data.packed import Packed
from flatout.data.stream import NOT_TRAINED, Batch
from flatout.engine.conflicts import is_method
from flatout.engine.objective import ACTOR, CRITIC, Head
from flatout.engine.prepare import unprepared
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.model import Decoder
from flatout.plan import Plan
from flatout.recipes.setup import build_model
from flatout.sample import Completion

# Column names of a batch.
ADVANTAGE, WEIGHT, OLD_LOGP, SAMPLER_LOGP = "advantage", "weight", "old_logp", "sampler_logp"
REFERENCE_LOGP, OLD_VALUE, RETURN = "reference_logp", "old_value", "return"
# Where the sampler's log-probabilities differ by at most this much on average, they are taken for the trainer's.
AGREES = 0.01
# The part of the completions by which that is found out: one in this many.
CHECKED_SHARE = 8


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question of a task in a phase. `slot` is its place among the prompts of all ranks."""

    slot: int
    task: str
    level: int | None
    question: int
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The completions of one prompt, by sample number, with their scores and penalties."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    scores: tuple[float, ...]
    penalties: tuple[float, ...]
    answered: tuple[bool, ...]
    grading_s: tuple[float | None, ...]
    killed: int

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(score + penalty for score, penalty in zip(self.scores, self.penalties, strict=True))

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ; compared exactly."""
        return len(set(self.rewards)) > 1


@dataclass(frozen=True, kw_only=True)
class Update:
    """The examples of one optimizer step; of one task where gradients are kept apart."""

    examples: Examples
    task: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A completion with its prompt. `values` holds the columns: one number for each token of the completion."""

    slot: int
    task: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    reward: float
    trained: bool
    values: dict[str, NDArray[np.float64]]


class Experience:
    """Turns the graded completions of a phase into the examples of its optimizer steps."""

    def __init__(self, settings: Settings, plan: Plan, engine: Engine, ranks: Ranks) -> None:
        self.settings, self.rl, self.engine, self.ranks = settings, settings.rl, engine, ranks
        self.method = policy.ALGORITHMS[self.rl.algorithm]
        self.reference = reference_of(settings, plan, engine) if self.rl.kl else None
        self.micro_batch = plan.decisions.micro_batch

    def penalty(self, length: int) -> float:
        limit, buffer = self.settings.sample.max_tokens, self.rl.overlong_buffer
        return policy.overlong_penalty(length, limit=limit, buffer=buffer)

    def updates(self, groups: Sequence[Group], *, phase: int) -> list[list[Update]]:
        """The examples of each step of an epoch; several for a step whose tasks have gradients of their own."""
        rows = [row for group in groups for row in self._rows(group)]
        comparable = sampled_plainly(self.settings)
        phases = self.engine.phases
        if self.rl.steps_in_phase > 1:
            phases.mark("old_logprobs", role=ACTOR)
            # Several steps leave the policy that generated. With one step it is the policy that learns.
            old = SAMPLER_LOGP if comparable and self._sampler_agrees(rows) else None
            self._fill(rows, OLD_LOGP, old or self._log_probs_of())
        if self.reference is not None:
            phases.mark("logprobs", role="reference")
            self._fill(rows, REFERENCE_LOGP, self._log_probs_of(self.reference))
        if not comparable:
            for row in rows:
                del row.values[SAMPLER_LOGP]
        if self.method.estimator is None:
            phases.mark("values", role=CRITIC)
            self._fill(rows, OLD_VALUE, self.engine.values)
            phases.mark("pack")
            self._estimate(rows)
        phases.mark("pack")
        learns = phase - self.rl.teach >= self.rl.critic_warmup or self.method.estimator is not None
        return self._shared_out(rows, scale=float(learns))

    def solutions(self, prompts: Sequence[Prompt], solutions: Sequence[tuple[int, ...]]) -> list[list[Update]]:
        """Worked solutions with advantage 1: a step on them is a step of supervised fine-tuning."""
        rows = []
        for prompt, ids in zip(prompts, solutions, strict=True):
            values = {ADVANTAGE: np.ones(len(ids))}
            if self.method.estimator is None:
                values |= {OLD_VALUE: np.zeros(len(ids)), RETURN: np.ones(len(ids))}
            rows.append(
                Row(
                    slot=prompt.slot,
                    task=prompt.task,
                    prompt=prompt.ids,
                    ids=ids,
                    reward=1.0,
                    trained=True,
                    values=values,
                )
            )
        return self._shared_out(rows)

    def _rows(self, group: Group) -> Iterator[Row]:
        """Without a critic, the advantage is the same number at all tokens of a completion."""
        advantages = np.zeros(len(group.rewards))
        if self.method.estimator is not None:
            rewards = np.array([group.rewards])
            advantages = policy.group_advantages(rewards, estimator=self.method.estimator)[0]
        for one, reward, advantage in zip(group.completions, group.rewards, advantages, strict=True):
            yield Row(
                slot=group.prompt.slot,
                task=group.prompt.task,
                prompt=group.prompt.ids,
                ids=one.ids,
                reward=reward,
                trained=not (self.rl.mask_truncated and one.status == "length"),
                values={ADVANTAGE: np.full(len(one.ids), advantage), SAMPLER_LOGP: np.array(one.logprobs)},
            )

    def _shared_out(self, rows: Sequence[Row], *, scale: float = 1.0) -> list[list[Update]]:
        """The prompts shared out over the steps of an epoch, every task evenly where batches are equal.

        `scale` multiplies the weight of the policy's loss.
        """
        tasks: Sequence[str | None] = self.rl.tasks if is_method(self.settings.mtl.method) else [None]
        each = self.rl.prompts // (1 if self.settings.mtl.method == "mixed" else len(self.rl.tasks))
        steps = []
        for at in range(self.rl.updates):
            chosen = [row for row in rows if row.slot % each * self.rl.updates // each == at]
            weights = scale * self._weights(chosen)
            for row, weight in zip(chosen, weights.tolist(), strict=True):
                row.values[WEIGHT] = np.full(len(row.ids), weight)
            by_task = {task: [row for row in chosen if task in (None, row.task)] for task in tasks}
            steps.append([Update(examples=examples_of(own), task=task) for task, own in by_task.items() if own])
        return steps

    def _weights(self, rows: Sequence[Row]) -> policy.Floats:
        """The weight of each row's tokens. With equal batches every task has the same share in the loss."""
        lengths = np.array([len(row.ids) for row in rows], np.int64)
        mixed = self.settings.mtl.method == "mixed"
        names = [""] * len(rows) if mixed else [row.task for row in rows]
        tasks = [""] if mixed else list(self.rl.tasks)
        trained = np.array([row.trained for row in rows], np.bool_)
        own = np.array([[name == task for name in names] for task in tasks], np.bool_) & trained  # [task, row]
        totals = self._over_ranks(np.stack([own.sum(1), (own * lengths).sum(1)]))
        sequences, tokens = np.maximum(totals, 1.0)
        weights = np.zeros(len(rows))
        for k in range(len(tasks)):
            part = policy.token_weights(
                lengths,
                aggregation=self.rl.aggregation or self.method.aggregation,
                max_length=self.settings.sample.max_tokens,
                tokens=float(tokens[k]),
                sequences=float(sequences[k]),
            )
            share = totals[1].sum() / (len(tasks) * tokens[k])  # 1 for one task
            weights = np.where(own[k], share * part, weights)
        return weights

    def _sampler_agrees(self, rows: Sequence[Row]) -> bool:
        """Whether the sampler's log-probabilities may be used instead of the trainer's, by a part of the rows."""
        if self.rl.old_logprobs != "auto":
            return self.rl.old_logprobs == "sampler"
        some = rows[: max(1, len(rows) // CHECKED_SHARE)]
        pairs = zip(some, self._measured(some, self._log_probs_of()), strict=True)
        difference = np.concatenate([np.zeros(1), *(np.abs(found - row.values[SAMPLER_LOGP]) for row, found in pairs)])
        return not self.ranks.any(bool(difference.mean() > AGREES))

    def _estimate(self, rows: Sequence[Row]) -> None:
        """Advantages and returns from the critic's values; advantages are whitened over the phase."""
        for row in rows:
            rewards = np.zeros(len(row.ids))
            rewards[-1] = row.reward
            values = row.values[OLD_VALUE]
            row.values[ADVANTAGE], row.values[RETURN] = policy.gae(
                rewards, values, gamma=self.rl.gamma, lam=self.rl.gae_lambda
            )
        every = np.concatenate([np.zeros(0), *(row.values[ADVANTAGE] for row in rows)])
        count, total, squares = self._over_ranks(np.array([len(every), every.sum(), (every**2).sum()]))
        mean = total / count
        deviation = max(0.0, squares / count - mean**2) ** 0.5
        for row in rows:
            row.values[ADVANTAGE] = (row.values[ADVANTAGE] - mean) / (deviation + 1e-8)

    def _over_ranks(self, numbers: NDArray[Any]) -> NDArray[np.float64]:
        device = self.engine.active.device
        return self.ranks.sum_(torch.from_numpy(numbers.astype(np.float64)).to(device)).cpu().numpy()

    # -- values at the tokens of completions, by the weights at the start of the phase

    def _log_probs_of(self, model: Decoder | None = None) -> Measure:
        def log_probs(batch: Batch, head: Head) -> Tensor:
            return head.log_probs(batch.targets, temperature=self.settings.sample.temperature)[0]

        return lambda batch: self.engine.measure(batch, log_probs, model=model)

    def _fill(self, rows: Sequence[Row], column: str, what: str | Measure) -> None:
        """Fills a column with what a function measures, or with another column."""
        if isinstance(what, str):
            for row in rows:
                row.values[column] = row.values[what]
            return
        for row, found in zip(rows, self._measured(rows, what), strict=True):
            row.values[column] = found

    def _measured(self, rows: Sequence[Row], measure: Measure) -> list[NDArray[np.float64]]:
        if not rows:
            return []
        numbers = np.arange(sum(len(row.prompt) + len(row.ids) for row in rows))
        plain = examples_of([replace(row, trained=True, values={}) for row in rows])
        examples = replace(plain, columns={"number": numbers})
        found = np.zeros(len(numbers))
        for batch in packed(examples, self.settings).batches(self.micro_batch):
            trained = batch.targets != NOT_TRAINED
            values = measure(batch).cpu()
            found[batch.columns["number"][trained].numpy()] = values[trained].double().numpy()
        ends = examples.ends.tolist()
        return [found[end - len(row.ids) : end] for row, end in zip(rows, ends, strict=True)]


# A number for each token of a batch.
Measure = Callable[[Batch], Tensor]


def sampled_plainly(settings: Settings) -> bool:
    """Whether the sampler's log-probabilities are those of the distribution that was sampled from."""
    sample = settings.sample
    return (sample.temperature, sample.top_p, sample.top_k) == (1.0, 1.0, 0)


def columns_of(settings: Settings) -> list[str]:
    """The columns of every batch of rollouts."""
    rl = settings.rl
    found = [ADVANTAGE, WEIGHT]
    found += [SAMPLER_LOGP] if sampled_plainly(settings) else []
    found += [OLD_LOGP] if rl.steps_in_phase > 1 else []
    found += [REFERENCE_LOGP] if rl.kl else []
    return found + ([OLD_VALUE, RETURN] if policy.ALGORITHMS[rl.algorithm].estimator is None else [])


def examples_of(rows: Sequence[Row]) -> Examples:
    """Prompts and completions, of which only completions are trained on."""
    lengths = np.array([(len(row.prompt), len(row.ids)) for row in rows], np.int64)
    ids = chain.from_iterable(part for row in rows for part in (row.prompt, row.ids))
    sampled = np.repeat(np.tile([False, True], len(rows)), lengths.reshape(-1))
    columns = {name: np.zeros(len(sampled), np.float32) for name in rows[0].values}
    for name, column in columns.items():
        column[sampled] = np.concatenate([row.values[name] for row in rows])
    return Examples(
        tokens=np.fromiter(ids, np.int32, len(sampled)),
        trained=sampled & np.repeat([row.trained for row in rows], lengths.sum(axis=1)),
        ends=np.cumsum(lengths.sum(axis=1)),
        columns=columns,
    )


def packed(examples: Examples, settings: Settings) -> Packed:
    return Packed(
        examples,
        sequence_length=settings.data.sequence_length,
        batch_sequences=1,
        seed=settings.seed,
        shuffle=False,
        few_shapes=True,
    )


def full_batch(settings: Settings, micro_batch: int) -> Batch:
    """A micro-batch full of text of one document per sequence, to find out how many fit."""
    length = settings.data.sequence_length
    tokens = np.zeros(micro_batch * (length + 1), np.int32)
    examples = Examples(
        tokens=tokens,
        trained=np.ones(len(tokens), np.bool_),
        ends=np.arange(1, micro_batch + 1) * (length + 1),
        columns={name: np.zeros(len(tokens), np.float32) for name in columns_of(settings)},
    )
    return packed(examples, settings).batches(micro_batch)[0]


def reference_of(settings: Settings, plan: Plan, engine: Engine) -> Decoder:
    """The initial model. Under adapters it is the same model without them, and takes no memory."""
    if plan.job.adapters is None:
        model = build_model(settings, plan, engine.active, note=lambda _: None)
        assert isinstance(model, Decoder)
        return model.to(engine.active.dtype).requires_grad_(False)
    plain = unprepared(engine.model)
    assert isinstance(plain, Decoder)
    for block in plain.blocks:
        block._modules = {**block._modules, "adapters": nn.ModuleDict()}
    return plain
