"""The tasks of a run by level. With `rl.curriculum` the level of a task follows the accuracy of earlier phases."""

from __future__ import annotations

from collections.abc import Iterable

from flatout.config.settings import RlSettings
from flatout.errors import UsageError
from flatout.recipes.questions import questions_of
from flatout.record import Event
from flatout.record.rollouts import RolloutsGraded
from flatout.tasks import Task

# A task gets harder above the first accuracy and easier below the second.
HARDER, EASIER = 0.7, 0.2
FIRST, LAST = 1, 5


class Levels:
    """The tasks of `rl.tasks`, each at its present level."""

    def __init__(self, rl: RlSettings) -> None:
        self.tasks, self.curriculum = rl.tasks, rl.curriculum
        self._levels = dict.fromkeys(rl.tasks, FIRST) if rl.curriculum else {}
        try:
            self._opened = {spec: questions_of(spec) for spec in self.specs}
        except UsageError as error:
            if not rl.curriculum:
                raise
            raise UsageError(f"rl.curriculum needs tasks with levels 1 to 5, such as math: {error}") from None

    @property
    def specs(self) -> list[str]:
        """Every task that may be asked."""
        if not self.curriculum:
            return list(self.tasks)
        return [self.spec(task, level=level) for task in self.tasks for level in range(FIRST, LAST + 1)]

    def level(self, task: str) -> int | None:
        """The level of a task in the next phase; None without a curriculum."""
        return self._levels.get(task)

    def spec(self, task: str, *, level: int | None) -> str:
        return task if level is None else f"{task}{'&' if '?' in task else '?'}level={level}"

    def task(self, task: str, *, level: int | None) -> Task:
        return self._opened[self.spec(task, level=level)]

    def see(self, event: RolloutsGraded) -> None:
        """Moves the levels after a phase; one that was generated at an earlier level says nothing about this one."""
        for one in event.tasks:
            if one.task in self._levels and one.accuracy is not None and one.level in (None, self._levels[one.task]):
                up = (one.accuracy > HARDER) - (one.accuracy < EASIER)
                self._levels[one.task] = min(LAST, max(FIRST, self._levels[one.task] + up))

    def recall(self, events: Iterable[Event], *, before: int) -> None:
        """Repeats what was seen in the phases before a step; of a phase that was repeated, the last."""
        phases = {e.step: e for e in events if isinstance(e, RolloutsGraded) and e.step is not None and e.step < before}
        for step in sorted(phases):
            self.see(phases[step])
