"""The run folder of a recipe of several stages, with the ranks that work in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout import files
from flatout.config.settings import Settings
from flatout.engine.ranks import Ranks, from_environment, joined
from flatout.engine.resolve import check_build
from flatout.engine.watchdog import Watchdog
from flatout.hardware import detect
from flatout.plan import Plan
from flatout.recipes.sealed import Seals
from flatout.recipes.session import Session, begun, open_session
from flatout.recipes.setup import plan_for
from flatout.record import Run, Sink
from flatout.record.events import Notice


@dataclass(frozen=True, kw_only=True)
class Staged:
    """`resume` is true if an earlier attempt began in the folder."""

    session: Session
    ranks: Ranks
    plan: Plan
    seals: Seals
    resume: bool

    def begun(self, folder: Path) -> bool:
        """Whether a stage has begun. A stage that was killed while its folder was being made has not: it is removed."""
        self.ranks.on_first(lambda: self._remove_unstarted(folder))
        return Run.is_at(folder)

    def _remove_unstarted(self, folder: Path) -> None:
        files.sweep(folder)
        unstarted = self.resume and folder.is_dir() and not Run.is_at(folder)
        if unstarted and not any(path.is_dir() for path in folder.iterdir()):
            files.remove(folder)


@dataclass(frozen=True, kw_only=True)
class InStages:
    """A recipe of several stages, and where it runs."""

    staged: Staged

    @property
    def session(self) -> Session:
        return self.staged.session

    @property
    def ranks(self) -> Ranks:
        return self.staged.ranks

    @property
    def seals(self) -> Seals:
        return self.staged.seals


@contextmanager
def opened(settings: Settings, *, folder: Path, resume: bool, sinks: Sequence[Sink]) -> Iterator[Staged]:
    """Joins the ranks, plans, and creates or opens the run folder."""
    hardware = detect()
    check_build(hardware)
    with joined(from_environment(), num_gpus=hardware.num_gpus) as ranks:
        folder = Path(ranks.agree(str(folder)))
        plan = plan_for(settings, hardware=hardware, ranks=ranks)
        torch.set_num_threads(plan.decisions.threads)  # also for sampling and measuring, before any training
        resume = begun(folder, ranks, resume=resume)
        with open_session(settings, plan=plan, ranks=ranks, folder=folder, resume=resume, sinks=sinks) as session:
            seals = Seals(
                root=session.run.path,
                run=session.run.id,
                tell=lambda text: session.recorder.event(Notice(text=text)),
            )
            hang_s = settings.train.hang_s if ranks.world > 1 else None
            with Watchdog(session.run, session.recorder, ranks, hang_s=hang_s, name="stages"):
                yield Staged(session=session, ranks=ranks, plan=plan, seals=seals, resume=resume)
