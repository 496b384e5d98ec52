"""Evaluates tasks during training (`eval.tasks`): the current weights get the questions of `flatout eval`.

The first rank evaluates with greedy decoding while the others wait. It changes no random state or count of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.config.settings import Settings
from flatout.cost import Adapters
from flatout.data.tokenizer import Tokenizer
from flatout.engine.opening import stop_ids
from flatout.engine.prepare import unprepared
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.errors import UsageError
from flatout.evaluate import chosen, evaluate
from flatout.model import Model
from flatout.recipes.session import Session
from flatout.record.events import TaskResult, TasksScored
from flatout.sample import Sampling, sampler_of
from flatout.tasks import Task, Texts, by_domain, open_task


def questions_of(spec: str) -> Task:
    task = open_task(spec)
    if isinstance(task, Texts):
        raise UsageError(f"{spec} has no questions: this recipe takes tasks with questions")
    return task


def check_tasks(settings: Settings) -> None:
    """Reports mistakes in the tasks before anything is loaded."""
    for spec in settings.eval.tasks:
        task = open_task(spec)
        chosen(task.size, limit=settings.eval.task_limit, name=task.name)


@dataclass(frozen=True, kw_only=True)
class Live:
    """The model that is being trained, with its adapters, which has no folder."""

    model: Model
    tokenizer: Tokenizer
    folder: Path | None = None
    adapters: Adapters | None = None


class Questions:
    def __init__(
        self, settings: Settings, engine: Engine, session: Session, ranks: Ranks, tokenizer: Tokenizer
    ) -> None:
        self.engine, self.session, self.ranks, self.tokenizer = engine, session, ranks, tokenizer
        self.specs, self.limit = by_domain(settings.eval.tasks), settings.eval.task_limit
        self.sampling = Sampling(
            max_tokens=settings.eval.task_tokens, stop_ids=stop_ids(settings.model, tokenizer), seed=settings.seed
        )

    @classmethod
    def of(
        cls, settings: Settings, engine: Engine, session: Session, ranks: Ranks, tokenizer: Tokenizer
    ) -> Questions | None:
        return cls(settings, engine, session, ranks, tokenizer) if settings.eval.tasks else None

    def ask(self, step: int) -> float | None:
        """Records every task's score after `step` steps. Returns the mean over tasks with answers, on all ranks."""
        found = ""
        with self.ranks.first_leads():
            if self.ranks.first:
                found = self._ask(step)
        told = self.ranks.agree(found)
        return float(told) if told else None

    def _ask(self, step: int) -> str:
        model = unprepared(self.engine.model)
        on_gpu = self.engine.active.device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()  # the KV cache is sized by the free memory
        scores = list(
            evaluate(
                self.specs,
                sampler=sampler_of(Live(model=model, tokenizer=self.tokenizer)),
                tokenizer=self.tokenizer,
                sampling=self.sampling,
                limit=self.limit,
            )
        )
        if on_gpu:
            torch.cuda.empty_cache()
        self.session.recorder.event(
            TasksScored(
                step=step,
                temperature=self.sampling.temperature,
                max_tokens=self.sampling.max_tokens,
                samples=1,
                limit=self.limit,
                template=self.tokenizer.has_template,
                tasks=tuple(TaskResult(**score.brief()) for score in scores),
            )
        )
        values = [score.value for score in scores if score.metric != "perplexity"]
        return repr(sum(values) / len(values)) if values else ""
