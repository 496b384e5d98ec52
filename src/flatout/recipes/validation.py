"""Validation during a run: the loss on a fixed set, the scores of tasks, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable

from flatout.config.settings import Settings
from flatout.data.corpus import Corpus
from flatout.data.stream import Batch, Steps, Stream
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.errors import UsageError
from flatout.recipes.questions import Questions
from flatout.recipes.session import Ledger, Session
from flatout.record.events import Evaluated, PatienceEnded, TargetReached

# Windows are taken in whole groups of this many, if there are enough, so that they split evenly.
GROUP = 64


def validation_batches(settings: Settings, corpus: Corpus, ranks: Ranks, *, micro_batch: int) -> list[Batch]:
    """This rank's part of the first windows of the held-out data.

    The windows depend only on the data and the configuration, so the loss can be compared between
    machines, numbers of ranks and micro-batches.
    """
    length = settings.data.sequence_length
    windows = max(1, min((corpus.valid.num_tokens - 1) // length, settings.eval.tokens // length))
    windows -= windows % GROUP if windows > GROUP else 0

    def stream_of(size: int) -> Stream:
        return Stream(
            corpus.valid,
            sequence_length=length,
            batch_sequences=size,
            seed=settings.seed,
            packing=settings.data.packing,
            shuffle=False,
        )

    return held_out(stream_of, windows=windows, ranks=ranks, micro_batch=micro_batch)


def held_out(stream_of: Callable[[int], Steps], *, windows: int, ranks: Ranks, micro_batch: int) -> list[Batch]:
    """This rank's part of the first windows, in micro-batches of the largest size that divides them."""
    size = next(n for n in range(min(micro_batch, windows), 0, -1) if windows % n == 0)
    stream, mine = stream_of(size), range(ranks.rank, windows // size, ranks.world)
    return [batch for group in mine for batch in stream.micro_batches(group, micro_batch=size)]


# An epoch of 10 / 3 steps ends with step 10 three times over, whatever the rounding.
ROUNDING = 1e-9


def every(steps: float | None, step: int, *, since: int | None = None) -> bool:
    """Whether a multiple of `steps` was reached after step `since`, by default the step before."""
    before = step - 1 if since is None else since
    return steps is not None and (step + ROUNDING) // steps > (before + ROUNDING) // steps


def save_steps_of(settings: Settings, steps_per_epoch: float | None) -> float | None:
    """The steps between two checkpoints: of an epoch not always a whole number, and a save waits for its last step."""
    if settings.save.every != "epoch":
        return settings.save.every
    if steps_per_epoch is None:
        raise UsageError(
            "save.every: epoch needs data whose size is known, and this stream is still being written: give a number "
            "of steps"
        )
    return max(1.0, steps_per_epoch)


class Validation:
    """Measures the loss and tasks, keeps the results, and decides when to stop."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        ledger: Ledger,
        session: Session,
        batches: list[Batch],
        *,
        questions: Questions | None = None,
    ) -> None:
        wanted = settings.eval
        self.target, self.patience, self.min_delta = settings.target.val_loss, wanted.patience, wanted.min_delta
        self.by_tasks, self.every = wanted.criterion == "tasks", wanted.every
        self.tasks_every = (wanted.tasks_every or wanted.every) if questions else None
        self.engine, self.ledger, self.session = engine, ledger, session
        self.batches, self.questions = batches, questions
        self.has_loss = engine.ranks.any(bool(batches))  # a small set may leave some ranks without a part
        self.loss_step: int | None = None  # step of the last measurement
        self.tasks_step: int | None = None
        # The last measurement, if it is the best so far.
        self.best: dict[str, float] | None = None

    def due(self, step: int, *, since: int | None = None, last: bool = False) -> tuple[bool, bool]:
        """Whether the loss is due, and whether the tasks are; at the last step both are, unless just measured.

        `since` is the step of the last call, by default the step before.
        """
        loss = self.has_loss and self.loss_step != step and (last or every(self.every, step, since=since))
        tasks = self.tasks_step != step and (last or every(self.tasks_every, step, since=since))
        return loss, tasks and self.questions is not None

    def measure(self, step: int, *, since: int | None = None, last: bool = False) -> str:
        """Measures what is due after `step` steps. Returns the reason to stop, `target` or `patience`, or ""."""
        by_loss, by_tasks = self.due(step, since=since, last=last)
        if by_loss:
            self.loss_step, loss = step, self.engine.evaluate(self.batches)
            self.ledger.val_losses.append(loss)
            self.session.recorder.event(Evaluated(step=step, val_loss=loss))
        if by_tasks and self.questions is not None:
            with self.engine.gathered():
                self.tasks_step, score = step, self.questions.ask(step)
            if score is not None:
                self.ledger.task_scores.append(score)
        judged = by_tasks if self.by_tasks else by_loss
        self.best = self._best() if judged else None
        if by_loss and self.reached():
            # The evaluation waited for the device, so the time so far is complete.
            self.ledger.write(self.engine.finished(all=True))
            seconds = self.ledger.seconds
            self.session.recorder.event(
                TargetReached(
                    step=step,
                    val_loss=self.ledger.val_losses[-1],
                    seconds=seconds,
                    tokens=self.ledger.tokens,
                    gpu_hours=seconds / 3600 * self.ledger.plan.job.num_ranks,
                )
            )
            return "target"
        if judged and self.patience is not None and since_best(self._values(), self.min_delta) >= self.patience:
            best = abs(min(self._values()))
            self.session.recorder.event(PatienceEnded(step=step, best=best, patience=self.patience))
            return "patience"
        return ""

    def reached(self) -> bool:
        """Whether the last measured loss reached the target."""
        losses = self.ledger.val_losses
        return self.target is not None and bool(losses) and losses[-1] <= self.target

    def _values(self) -> list[float]:
        """The values the run is judged by, with the sign such that lower is better."""
        return [-score for score in self.ledger.task_scores] if self.by_tasks else self.ledger.val_losses

    def _best(self) -> dict[str, float] | None:
        *before, value = self._values()
        if not all(value < other for other in before):
            return None
        return {"task_score": -value} if self.by_tasks else {"val_loss": value}


def since_best(losses: list[float], min_delta: float) -> int:
    """Evaluations since the last one that was better than all before by more than `min_delta`; NaN never is."""
    best, since = math.inf, 0
    for loss in losses:
        if loss < best - min_delta or (best == math.inf and math.isfinite(loss)):
            best, since = loss, 0
        else:
            since += 1
    return since
