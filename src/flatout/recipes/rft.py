"""Rejection-sampling fine-tuning: `flatout train` with `recipe: rft`; its first half alone is `flatout sample`.

A model answers a task's questions many times, the correct answers are kept, and the student is trained on them. The
stages are in `stages`, sampling in `sampling`; the training is that of recipe sft.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from flatout.config.settings import Settings
from flatout.recipes.sampling import Kept, Stopped
from flatout.recipes.staged import opened
from flatout.recipes.stages import RunTasks, Stages, by_question, nothing_trained, total
from flatout.record import Outcome, Sink


def run(
    settings: Settings,
    *,
    folder: Path,
    resume: bool = False,
    sinks: Sequence[Sink] = (),
    train: bool = True,
) -> Outcome:
    """Without `train`, samples and writes the dataset of the first round, and stops there."""
    began, tasks = time.monotonic(), RunTasks.of(settings)
    with opened(settings, folder=folder, resume=resume, sinks=sinks) as staged:
        stages = Stages(settings=settings, tasks=tasks, staged=staged)
        stages.sweep()
        try:
            # The student: a published model, one of our own runs, or a model that first learns the task's format.
            student = stages.student()

            # Its score before training.
            scores = [stages.score(student, number=0)] if train else []

            kept: dict[int, list[Kept]] = {}
            sampled = settings.rft.generator or student
            for number in range(1, (settings.rft.rounds if train else 1) + 1):
                # Correct answers, by it or by a larger model.
                chunks = stages.samples(sampled, number=number, before=kept)
                rows = stages.dataset(chunks, number=number, student=student, least=2 if train else 1)
                kept = by_question(chunks)
                if not train:
                    return nothing_trained()

                # Training on them, each round from the original weights.
                outcome = stages.trained(student, rows, number=number)
                if outcome.stopped_by.startswith("SIG"):
                    return outcome

                # Its score now; in the next round it is itself the sampled model.
                sampled = str(stages.folder_of(number))
                scores.append(stages.score(sampled, number=number))
            stages.verdict(scores, counts=total(chunks), seconds=None if staged.resume else time.monotonic() - began)
            return outcome
        except Stopped as stopped:
            signal = staged.session.stop.signal
            return nothing_trained(stopped_by=signal.name if signal else str(stopped))
