"""Shows the jobs of `flatout launch` while they run: the lines that they print, and a table of where each stands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flatout.errors import FlatoutError
from flatout.insight.story import Story, tell
from flatout.insight.watch import Reader, line
from flatout.record import Run
from flatout.record.events import Saved
from flatout.terminal import table
from flatout.words import duration, loss_text, number

# Seconds between two looks at the run folders; in a pipe, between two lines about a job that just goes on.
LOOK_S = 1.0
LINE_S = 60.0
NUM_PARTS = 8


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """A job as its launcher sees it."""

    name: str
    folder: Path
    place: str
    state: str
    over: bool


class Board:
    """In a terminal a live table, in a pipe a line whenever a job changes its state."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._readers: dict[Path, Reader] = {}
        self._states: dict[Path, str] = {}
        self._shown_at = self._told_at = time.monotonic()

    def __enter__(self) -> Board:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def show(self, rows: Sequence[JobRow]) -> None:
        """Brings the view up to date, where it is time or a job has changed its state."""
        changed = [row for row in rows if self._states.get(row.folder) != row.state]
        self._states = {row.folder: row.state for row in rows}
        now = time.monotonic()
        if self.live is not None:
            if changed or now >= self._shown_at + LOOK_S:
                self._shown_at = now
                self.live.update(jobs_table([(row, self._story(row.folder)) for row in rows]), refresh=True)
            return
        for row in changed:
            self.say(f"{row.name}: {row.state}")
        if now >= self._told_at + LINE_S:
            self._told_at = now
            for row in rows:
                if not row.over and (story := self._story(row.folder)) is not None:
                    self.say(line(story))

    def _story(self, folder: Path) -> Story | None:
        """None until the job has created its run folder, or if that cannot be read."""
        try:
            if folder not in self._readers:
                if not Run.is_at(folder):
                    return None
                self._readers[folder] = Reader(Run.open(folder))
            return self._readers[folder].read()
        except (FlatoutError, OSError):
            return None


def jobs_table(rows: Sequence[tuple[JobRow, Story | None]]) -> Table:
    """A row for each job, for 80 columns."""
    rewards = any(story is not None and story.rollouts for _, story in rows)
    shown = table("", "job", "on", "state", "step", "reward" if rewards else "loss", "tokens/s", "left")
    for row, story in rows:
        head = [Text(row.name), Text(row.place), Text(row.state)]
        if story is None:
            shown.add_row(*head)
            continue
        total = "" if story.total_steps is None else f"/{story.total_steps:,}"
        left = "" if row.over or story.left_s is None else duration(story.left_s)
        speed = (story.speed if row.over else story.recent).tokens_per_s
        shown.add_row(*head, f"{story.num_steps:,}{total}", _gain(story, rewards=rewards), number(speed), left)
    return shown


def _gain(story: Story, *, rewards: bool) -> str:
    if rewards:
        return number(story.rollouts[-1].reward if story.rollouts else None)
    return loss_text(None if story.last is None else story.last.loss)


def standing(folder: Path) -> str | None:
    """How far the run in a folder is, and what of it is saved; None if there is no run that can be read."""
    try:
        if not Run.is_at(folder):
            return None
        story = tell(Run.open(folder), num_parts=NUM_PARTS)
    except (FlatoutError, OSError):
        return None
    total = "" if story.total_steps is None else f" of {story.total_steps:,}"
    saves = [event for event in story.events if isinstance(event, Saved)]
    saved = f"saved as {saves[-1].checkpoint}" if saves else "nothing saved yet"
    return f"{story.num_steps:,}{total} steps, {saved}"
