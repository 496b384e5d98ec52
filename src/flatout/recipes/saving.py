"""The state of a run: saved whole on the first rank, found again by `--resume`."""

from __future__ import annotations

from dataclasses import asdict

from flatout.config.settings import Settings
from flatout.engine.checkpoint import Checkpoints, restore
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.errors import RunFailed, UsageError
from flatout.recipes.session import Ledger, Session, identity_of


class Saving:
    """Puts engine and ledger into checkpoints and back. `identity` is what both ends of a resume must share."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        ledger: Ledger,
        session: Session,
        ranks: Ranks,
        *,
        data: str,
        base: str | None = None,
    ) -> None:
        """`base` identifies the frozen weights under adapters, which no checkpoint holds."""
        adapters = ledger.plan.job.adapters
        self.engine, self.ledger, self.session, self.ranks = engine, ledger, session, ranks
        self.weights_only, self.base = settings.save.weights_only, base
        identity = identity_of(
            shape=engine.model.shape.to_json(),
            seed=settings.seed,
            data=data,
            sequence_length=settings.data.sequence_length,
            batch_tokens=settings.train.batch_tokens,
            packing=settings.data.packing,
            shuffle=settings.data.shuffle,
            **({} if adapters is None else {"adapters": asdict(adapters), "base": base}),
        )
        self.checkpoints = Checkpoints(session.run.checkpoints_dir, identity=identity, keep=settings.save.keep)
        self.step: int | None = None  # the newest that stands

    def resume(self) -> int:
        """Puts the newest whole checkpoint back and gives its step; 0 if the run never saved one."""
        checkpoint, problems = self.checkpoints.latest()
        for problem in problems:
            self.session.recorder.event("bad-checkpoint", text=problem)
        if checkpoint is None:
            if problems:
                raise RunFailed("no checkpoint of this run can be trusted: " + "; ".join(problems))
            self.session.recorder.event("notice", text="the run had saved nothing yet: it starts from the beginning")
            return 0
        if not checkpoint.resumable:
            raise UsageError(f"{checkpoint.folder} holds weights only (save.weights_only): it cannot be resumed")
        engine, ledger, state = self.engine, self.ledger, checkpoint.state
        restore(checkpoint, model=engine.model, optimizer=engine.optimizer)
        engine.scale.fill_(state["loss_scale"])
        engine.scale_streak.fill_(state["loss_scale_streak"])
        ledger.tokens, ledger.seconds, ledger.saves = state["tokens"], state["seconds"], state["saves"]
        ledger.val_losses, ledger.task_scores = list(state["val_losses"]), list(state.get("task_scores", ()))
        ledger.remember(self.session.run.latest_steps(), before_step=checkpoint.step)
        self.session.recorder.event("resume", step=checkpoint.step, checkpoint=checkpoint.folder.name)
        self.step = checkpoint.step
        return checkpoint.step

    def save_best(self, step: int, **found: float) -> None:
        """Saves the state that was just found to be the best, and keeps it."""
        if (self.step == step or self.save(step)) and self.ranks.first:
            self.checkpoints.mark_best(step)
            self.session.recorder.event("best", step=step, **found)

    def save(self, step: int) -> bool:
        """Saves on the first rank while the others wait. A full disk is reported and survived."""
        engine, ledger = self.engine, self.ledger
        ledger.write(engine.finished(all=True))
        failed = False
        if self.ranks.first:
            state = {
                "tokens": ledger.tokens,
                "seconds": ledger.seconds,
                "saves": ledger.saves + 1,
                "val_losses": ledger.val_losses,
                "task_scores": ledger.task_scores,
                "base": self.base,
                "loss_scale": engine.scale.item(),
                "loss_scale_streak": engine.scale_streak.item(),
            }
            optimizer = None if self.weights_only else engine.optimizer
            try:
                path = self.checkpoints.save(step, model=engine.model, optimizer=optimizer, state=state)
            except OSError as error:
                self.session.recorder.event("save-failed", step=step, error=str(error))
                failed = True
            else:
                self.session.recorder.event("save", step=step, checkpoint=path.name)
        if self.ranks.any(failed):
            return False
        ledger.saves += 1
        self.step = step
        return True
