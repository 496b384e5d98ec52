"""The state of a run: saved atomically on the first rank, restored by `--resume`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from flatout import files
from flatout.config.settings import Settings
from flatout.data.tokenizer import FILES, Tokenizer
from flatout.engine.checkpoint import MANIFEST, Checkpoint, Checkpoints, restore
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.engine.trained import check_tokenizer, tokenizer_fingerprint
from flatout.errors import EnvironmentLacks, RunFailed, UsageError
from flatout.recipes.session import Ledger, Session, identity_of
from flatout.record import events


@dataclass(frozen=True, kw_only=True)
class State:
    """The state in a checkpoint besides tensors."""

    tokens: int
    seconds: float
    saves: int
    val_losses: list[float]
    loss_scale: float
    loss_scale_streak: float
    task_scores: list[float] = field(default_factory=list)
    base: str | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> State:
        """Raises BadFile for an impossible number: no run can resume from it."""
        source = checkpoint.folder / MANIFEST
        state = files.typed(cls, dict(checkpoint.state), source=source)
        for name in ("tokens", "seconds", "saves", "loss_scale", "loss_scale_streak"):
            value = getattr(state, name)
            if not 0 <= value < math.inf or (name == "loss_scale" and not value):
                raise files.BadFile(source, f"says {name}: {value}, which is impossible: remove that checkpoint")
        return state


class Saving:
    """Saves engine and ledger to checkpoints and restores them. `identity` must be the same on both sides."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        ledger: Ledger,
        session: Session,
        ranks: Ranks,
        *,
        data: str,
        valid: str | None = None,
        base: str | None = None,
    ) -> None:
        """`data` and `valid` identify the training and the held-out data.

        `base` identifies the frozen weights under adapters, which no checkpoint holds.
        """
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
        self.checkpoints = Checkpoints(
            session.run.checkpoints_dir,
            identity=identity,
            keep=settings.save.keep,
            run=session.run.id,
            valid=valid,
        )
        self.step: int | None = None  # of the newest saved checkpoint
        self.failed = ""  # why the last save failed

    def begin(self, tokenizer: Tokenizer, *, resume: bool) -> int:
        """Restores the state and returns the step to start with. Also saves the tokenizer in the run folder."""
        checkpoint = self._newest() if resume else None
        with self.ranks.first_leads():
            if self.ranks.first:
                self._keep_tokenizer(tokenizer, checkpoint)
                if resume:
                    self.checkpoints.tidy(checkpoint)
        return 0 if checkpoint is None else self._restore(checkpoint)

    def _keep_tokenizer(self, tokenizer: Tokenizer, checkpoint: Checkpoint | None) -> None:
        """Saves the tokenizer atomically. An existing one must be the tokenizer of this run."""
        folder = self.session.run.tokenizer_dir
        whole = (folder / "tokenizer.json").is_file()
        try:
            if not whole:
                left = (path.name for path in folder.glob("*") if not path.name.endswith(".tmp"))
                others = [name for name in left if name not in FILES]
                if others:
                    raise UsageError(f"{folder} has {others[0]}, and nothing is overwritten: move the folder away")
                with files.whole_folder(folder) as partial:
                    tokenizer.save(partial)
            elif checkpoint is None:
                with TemporaryDirectory() as scratch:
                    tokenizer.save(Path(scratch))
                    if tokenizer_fingerprint(Path(scratch)) != tokenizer_fingerprint(folder):
                        raise UsageError(
                            f"{folder} is not the tokenizer of this run: remove the folder, and it is rebuilt"
                        )
        except OSError as error:
            raise EnvironmentLacks(f"{folder} cannot be written: {error.strerror or error}") from None
        if checkpoint is not None:
            check_tokenizer(folder, checkpoint)
        self.checkpoints.tokenizer = tokenizer_fingerprint(folder)

    def _newest(self) -> Checkpoint | None:
        """The newest intact checkpoint; None if the run never saved one."""
        checkpoint, problems = self.checkpoints.latest()
        for problem in problems:
            self.session.recorder.event(events.BadCheckpoint(text=problem))
        if checkpoint is None:
            if problems:
                raise RunFailed("no checkpoint of this run is intact: " + "; ".join(problems))
            self.session.recorder.event(
                events.Notice(text="the run had saved nothing yet: it starts from the beginning")
            )
        elif not checkpoint.resumable:
            raise UsageError(f"{checkpoint.folder} holds weights only (save.weights_only): it cannot be resumed")
        return checkpoint

    def _restore(self, checkpoint: Checkpoint) -> int:
        engine, ledger, state = self.engine, self.ledger, State.of(checkpoint)
        restore(checkpoint, model=engine.model, optimizer=engine.optimizer)
        engine.scale.fill_(state.loss_scale)
        engine.scale_streak.fill_(state.loss_scale_streak)
        ledger.tokens, ledger.seconds, ledger.saves = state.tokens, state.seconds, state.saves
        ledger.val_losses, ledger.task_scores = state.val_losses, state.task_scores
        ledger.remember(self.session.run.latest_steps(), before_step=checkpoint.step)
        self.session.recorder.event(events.Resumed(step=checkpoint.step, checkpoint=checkpoint.folder.name))
        self.step = checkpoint.step
        return checkpoint.step

    def save_best(self, step: int, **found: float) -> None:
        """Saves the best state so far, and keeps it."""
        if (self.step == step or self.save(step)) and self.ranks.first:
            try:
                self.checkpoints.mark_best(step)
            except OSError as error:
                self.session.recorder.event(events.SaveFailed(step=step, error=str(error)))
            else:
                self.session.recorder.event(
                    events.BestKept(step=step, val_loss=found.get("val_loss"), task_score=found.get("task_score"))
                )

    def save(self, step: int) -> bool:
        """Saves on the first rank while the others wait. A failure, as on a full disk, is reported and not fatal."""
        engine, ledger = self.engine, self.ledger
        ledger.write(engine.finished(all=True))
        failed = False
        if self.ranks.first:
            state = State(
                tokens=ledger.tokens,
                seconds=ledger.seconds,
                saves=ledger.saves + 1,
                val_losses=ledger.val_losses,
                task_scores=ledger.task_scores,
                base=self.base,
                loss_scale=engine.scale.item(),
                loss_scale_streak=engine.scale_streak.item(),
            )
            optimizer = None if self.weights_only else engine.optimizer
            try:
                path = self.checkpoints.save(step, model=engine.model, optimizer=optimizer, state=asdict(state))
            except OSError as error:
                self.failed, failed = error.strerror or str(error), True
                self.session.recorder.event(events.SaveFailed(step=step, error=str(error)))
            else:
                self.session.recorder.event(events.Saved(step=step, checkpoint=path.name))
        if self.ranks.any(failed):
            return False
        ledger.saves += 1
        self.step = step
        return True
