"""Scores models on tasks: completions are graded, choices compared by likelihood, texts measured by perplexity."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flatout.data.tokenizer import Tokenizer
from flatout.errors import UsageError
from flatout.evaluate.intervals import Difference, mean_interval, paired, ratio_interval, wilson
from flatout.sample import RoutedSampler, Sampler, Sampling, answer_space, prompt_ids, stop_texts, text_of
from flatout.tasks import Grader, Measured, Named, Task, Texts, open_task

# The seed for the questions under a limit: the same for every model, spread over the file.
SUBSET_SEED = 0
# Text is read in independent windows of this many tokens.
WINDOW = 1024
CHOICES_AT_ONCE = 32
# If at least this share of completions could not be graded, the metric's name says so.
UNGRADED_SHARE = 0.05

# (done, of) after each question
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of one task, with counts of completions without answer, too long, cut off, or not graded."""

    task: str
    spec: str
    metric: str  # accuracy (all rewards 0 or 1), reward, perplexity; with the share not graded, if it is large
    value: float
    low: float | None
    high: float | None
    n: int  # questions; for perplexity, tokens
    of: int | None  # the task's number of questions; None if it is endless
    samples: int
    seconds: float
    indices: tuple[int, ...]
    rewards: tuple[float, ...]  # the mean over its samples, for each question; for perplexity, each window's loss
    tokens: tuple[int, ...] = ()  # for perplexity, those of each window
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def brief(self) -> dict[str, Any]:
        """The score for a run's record, without the rewards of single questions."""
        return {key: value for key, value in asdict(self).items() if key not in ("indices", "rewards", "tokens")}


def evaluate(
    specs: Sequence[str],
    *,
    sampler: Sampler,
    tokenizer: Tokenizer,
    sampling: Sampling,
    samples: int = 1,
    limit: int | None = None,
    progress: Progress = lambda done, of: None,
) -> Iterable[Score]:
    """Scores each task in turn. All specs are opened first, so that a mistake is reported at once."""
    tasks = [open_task(spec) for spec in specs]
    for task in tasks:
        chosen(task.size, limit=limit, name=task.name)
    for spec, task in zip(specs, tasks, strict=True):
        begun = time.monotonic()
        if isinstance(task, Texts):
            score = _texts(task, spec, sampler=sampler, tokenizer=tokenizer, limit=limit, progress=progress)
        else:
            indices = chosen(task.size, limit=limit, name=task.name)
            if task.choices(indices[0]) is not None:
                score = _choices(task, spec, indices, sampler=sampler, tokenizer=tokenizer, progress=progress)
            else:
                stops = replace(sampling, stop_texts=stop_texts(tokenizer))
                score = _written(
                    task,
                    spec,
                    indices,
                    sampler=sampler,
                    tokenizer=tokenizer,
                    sampling=stops,
                    samples=samples,
                    progress=progress,
                )
        yield replace(score, seconds=time.monotonic() - begun)


def chosen(size: int | None, *, limit: int | None, name: str = "this task") -> list[int]:
    """The indices of the questions to use."""
    if size is None:
        if limit is None:
            raise UsageError(f"{name} is endless: set the number of questions with --limit")
        return list(range(limit))
    if limit is None or limit >= size:
        return list(range(size))
    return sorted(random.Random(SUBSET_SEED).sample(range(size), limit))


def compare(first: Score, second: Score) -> Difference | None:
    """The difference of two models on the same questions; of perplexity, in loss per token.

    None if they were asked other questions, or cut the text into other tokens.
    """
    if first.indices != second.indices:
        return None
    if first.metric != "perplexity":
        return paired(first.rewards, second.rewards)
    if first.details.get("text") != second.details.get("text"):
        return None
    apart = [b - a for a, b in zip(first.rewards, second.rewards, strict=True)]
    interval = ratio_interval(apart, first.tokens)
    if interval is None:
        return None
    return Difference(value=sum(apart) / sum(first.tokens), low=interval.low, high=interval.high, n=first.n, p=None)


def _written(
    task: Task,
    spec: str,
    indices: Sequence[int],
    *,
    sampler: Sampler,
    tokenizer: Tokenizer,
    sampling: Sampling,
    samples: int,
    progress: Progress,
) -> Score:
    prompts = [prompt_ids(tokenizer, task.prompt(i)) for i in indices]
    rewards: list[list[float]] = [[] for _ in indices]
    measured: dict[str, list[Any]] = {}
    counts = dict.fromkeys(("answered", "too_long", "cut_short", "killed", "tokens"), 0)
    with Grader(spec) as grader:
        for done in sampler.generate(prompts, sampling=sampling, samples=samples, keys=indices):
            graded = grader.grade(indices[done.prompt], text_of(tokenizer, done.ids, sampling))
            rewards[done.prompt].append(graded.reward)
            for name, value in graded.measures.items():
                measured.setdefault(name, []).append(value)
            counts["answered"] += graded.answered
            counts["too_long"] += done.status == "too_long"
            counts["cut_short"] += done.status == "length"
            counts["killed"] += graded.status == "killed"
            counts["tokens"] += len(done.ids)
            progress(sum(map(len, rewards)), len(indices) * samples)
    details: dict[str, Any] = counts | {"answered": counts["answered"] / (len(indices) * samples)}
    if samples > 1:
        solved = sum(max(many) == 1.0 for many in rewards)
        within = wilson(solved, len(indices))
        details["solved_once"] = {"value": solved / len(indices), "low": within.low, "high": within.high}
    if isinstance(sampler, RoutedSampler):
        adapters = [sampler.names[which] for which, _ in sampler.chosen]
        details["adapters"] = {name: adapters.count(name) for name in sampler.names if name in adapters}
    if isinstance(task, Measured) and measured:
        details["measures"] = {
            name: task.summed(values) if isinstance(values[0], list) else sum(values) / len(values)
            for name, values in measured.items()
        }
    flat = {reward for many in rewards for reward in many}
    means = [sum(many) / len(many) for many in rewards]
    score = _score(task, spec, indices, means, binary=flat <= {0.0, 1.0}, samples=samples, details=details)
    ungraded = counts["killed"] / (len(indices) * samples)
    if ungraded < UNGRADED_SHARE:
        return score
    return replace(score, metric=f"{score.metric}, {100 * ungraded:.0f} % not graded")


def _choices(
    task: Task, spec: str, indices: Sequence[int], *, sampler: Sampler, tokenizer: Tokenizer, progress: Progress
) -> Score:
    """Chooses the likeliest per byte, so that a long choice has no disadvantage."""
    space = answer_space(tokenizer)
    rewards = [0.0] * len(indices)
    asked, too_long = [], 0
    for at, i in enumerate(indices):
        prompt, choices = prompt_ids(tokenizer, task.prompt(i)), list(task.choices(i) or ())
        continuations = tokenizer.encode_batch([space + choice for choice in choices])
        if len(prompt) + max(map(len, continuations)) > sampler.window:
            too_long += 1
        else:
            asked.append((at, prompt, choices, continuations))
    for start in range(0, len(asked), CHOICES_AT_ONCE):
        part = asked[start : start + CHOICES_AT_ONCE]
        found = sampler.likelihoods([(prompt, continuations) for _, prompt, _, continuations in part])
        for (at, _, choices, _), sums in zip(part, found, strict=True):
            per_byte = [value / len(choice.encode()) for value, choice in zip(sums, choices, strict=True)]
            rewards[at] = task.reward(indices[at], choices[per_byte.index(max(per_byte))])
        progress(start + len(part), len(asked))
    return _score(task, spec, indices, rewards, binary=True, samples=1, details={"too_long": too_long})


def _score(
    task: Task,
    spec: str,
    indices: Sequence[int],
    rewards: Sequence[float],
    *,
    binary: bool,
    samples: int,
    details: dict[str, Any],
) -> Score:
    interval = mean_interval(rewards)
    return Score(
        task=task.name,
        spec=spec,
        metric=task.metric if isinstance(task, Named) else "accuracy" if binary else "reward",
        value=sum(rewards) / len(rewards),
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        n=len(rewards),
        of=task.size,
        samples=samples,
        seconds=0.0,
        indices=tuple(indices),
        rewards=tuple(rewards),
        details=details,
    )


def _texts(
    task: Texts, spec: str, *, sampler: Sampler, tokenizer: Tokenizer, limit: int | None, progress: Progress
) -> Score:
    """Perplexity over windows of text; `limit` counts windows."""
    size = min(WINDOW, sampler.window)
    windows: list[list[int]] = []
    for i in range(task.size):
        ids = [*tokenizer.begin_ids, *tokenizer.encode_batch([task.text(i)])[0]]
        # Each ends where the next begins, so that every token but the first is predicted once.
        windows += [ids[at : at + size + 1] for at in range(0, len(ids) - 1, size)]
    if not windows:
        raise UsageError(f"{spec}: nothing to predict, the texts have at most one token")
    indices = chosen(len(windows), limit=limit)
    kept = [windows[i] for i in indices]
    losses, tokens = [], []
    for at, found in enumerate(sampler.surprisals(kept)):
        losses.append(sum(found))
        tokens.append(float(len(found)))
        progress(at + 1, len(kept))
    loss = sum(losses) / sum(tokens)
    interval = ratio_interval(losses, tokens)
    num_bytes = sum(len(tokenizer.decode(window[1:]).encode()) for window in kept)
    return Score(
        task=task.name,
        spec=spec,
        metric="perplexity",
        value=_exp(loss),
        low=_exp(interval.low) if interval else None,
        high=_exp(interval.high) if interval else None,
        n=int(sum(tokens)),
        of=sum(len(window) - 1 for window in windows),
        samples=1,
        seconds=0.0,
        indices=tuple(indices),
        rewards=tuple(losses),
        tokens=tuple(map(int, tokens)),
        details={
            "loss": loss,
            "text": hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16],
            "bits_per_byte": sum(losses) / math.log(2) / num_bytes if num_bytes else None,
            "windows": len(kept),
            "window_tokens": size,
        },
    )


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
