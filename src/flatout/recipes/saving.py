"""The state of a run: copied in the step, written in the background, committed atomically, restored by `--resume`."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flatout import files
from flatout.config.settings import Settings
from flatout.data.tokenizer import FILES, Tokenizer
from flatout.engine.checkpoint import MANIFEST, Checkpoint, Checkpoints, restore
from flatout.engine.faults import MAX_ROLLBACKS
from flatout.engine.pieces import Piece, Staging, on_host, pieces
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.engine.trained import check_tokenizer, tokenizer_fingerprint
from flatout.errors import EnvironmentLacks, RunFailed, UsageError
from flatout.recipes.session import Ledger, Session, identity_of
from flatout.record import events

T = TypeVar("T")


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
    rollbacks: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> State:
        """Raises BadFile for an impossible number: no run can resume from it."""
        source = checkpoint.folder / MANIFEST
        state = files.typed(cls, dict(checkpoint.state), source=source)
        for name in ("tokens", "seconds", "saves", "loss_scale", "loss_scale_streak", "rollbacks"):
            value = getattr(state, name)
            if not 0 <= value < math.inf or (name == "loss_scale" and not value):
                raise files.BadFile(source, f"says {name}: {value}, which is impossible: remove that checkpoint")
        return state


@dataclass(kw_only=True)
class _Pending:
    """A save in flight. A rank that writes nothing has no future."""

    step: int
    future: Future[Path] | None
    began: float
    blocked_s: float
    best: Mapping[str, float] | None = None
    told: bool = False


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
        self.asked: int | None = None  # step of the last save, which may still be in flight
        self.failed = ""  # why the last save failed
        self.asynchronous = settings.save.asynchronous
        self._pending: _Pending | None = None
        self._staging = Staging()
        self._reserved: Future[None] | None = None  # page-locked memory for the copies of a device
        self._periodic = bool(settings.save.every or settings.save.best)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        # A group of their own for the threads that save: the main threads use the others meanwhile.
        self._group: Any = dist.new_group(backend="gloo") if engine.sharded else None

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
        ledger, state = self.ledger, State.of(checkpoint)
        self._load(checkpoint, state)
        ledger.skips.rollbacks = state.rollbacks
        ledger.tokens, ledger.seconds, ledger.saves = state.tokens, state.seconds, state.saves
        ledger.val_losses, ledger.task_scores = state.val_losses, state.task_scores
        ledger.remember(self.session.run.latest_steps(), before_step=checkpoint.step)
        self.session.recorder.event(events.Resumed(step=checkpoint.step, checkpoint=checkpoint.folder.name))
        self.step = self.asked = checkpoint.step
        return checkpoint.step

    def _load(self, checkpoint: Checkpoint, state: State) -> None:
        engine = self.engine
        restore(checkpoint, model=engine.model, optimizer=engine.optimizer, ranks=self.ranks)
        engine.scale.fill_(state.loss_scale)
        engine.scale_streak.fill_(state.loss_scale_streak)

    def roll_back(self, step: int) -> None:
        """Loads the weights of the newest checkpoint and saves them as the state after `step` steps.

        So a run that is killed now does not return to the data whose updates were skipped.
        """
        skips = self.ledger.skips
        self.settle()
        self.ledger.write(self.engine.finished(all=True))
        if skips.rollbacks >= MAX_ROLLBACKS:
            raise skips.fatal(f"it has done so {skips.rollbacks} times")
        # One from before the first bad update, unless only later ones are kept: these hold the weights from before it.
        checkpoint = self.checkpoints.latest(upto=skips.first)[0] or self.checkpoints.latest()[0]
        if checkpoint is None or not checkpoint.resumable:
            raise skips.fatal("there is none yet that holds weights and optimizer")
        self.engine.forget()
        self._load(checkpoint, State.of(checkpoint))
        event = events.RolledBack(step=step, checkpoint=checkpoint.folder.name, cause=skips.cause)
        self.session.recorder.event(event)
        skips.gone_back()
        self.save(step, wait=True)

    def save_best(self, step: int, **found: float) -> None:
        """Saves the best state so far, and keeps it."""
        if self.asked != step:
            self.save(step)
        if self._pending is None:
            if self.step == step:
                self._keep_best(step, found)
        else:
            self._pending.best = found

    def _keep_best(self, step: int, found: Mapping[str, float]) -> None:
        if not self.ranks.first:
            return
        try:
            self.checkpoints.mark_best(step)
        except OSError as error:
            self.session.recorder.event(events.SaveFailed(step=step, error=str(error)))
        else:
            self.session.recorder.event(
                events.BestKept(step=step, val_loss=found.get("val_loss"), task_score=found.get("task_score"))
            )

    def save(self, step: int, *, wait: bool = False) -> bool:
        """Copies the state after `step` steps, and writes it in the background unless it is told to `wait`.

        One save is in flight at most. A failure, as on a full disk, is reported and not fatal. Returns whether the
        state is saved, as far as it was waited for.
        """
        self.settle()
        began, engine, ledger = time.perf_counter(), self.engine, self.ledger
        ledger.write(engine.finished(all=True))
        state = State(
            tokens=ledger.tokens,
            seconds=ledger.seconds,
            saves=ledger.saves + 1,
            val_losses=list(ledger.val_losses),
            task_scores=list(ledger.task_scores),
            base=self.base,
            loss_scale=engine.scale.item(),
            loss_scale_streak=engine.scale_streak.item(),
            rollbacks=ledger.skips.rollbacks,
        )
        self.asked = step
        writes = self.ranks.first or engine.sharded
        groups, copied = self._copies(wait=wait) if writes else ({}, None)
        self.asynchronous = not self.ranks.any(not self.asynchronous)  # all ranks wait for a save, or none
        write = self._writing(step, groups, copied, asdict(state))
        future = self._thread.submit(write) if writes else None
        self._pending = _Pending(step=step, future=future, began=began, blocked_s=time.perf_counter() - began)
        return self.settle() if wait or not self.asynchronous else True

    def _pieces(self) -> dict[str, dict[str, Piece]]:
        return pieces(self.engine.model, None if self.weights_only else self.engine.optimizer, ranks=self.ranks)

    def _copies(self, *, wait: bool) -> tuple[dict[str, dict[str, Piece]], Any]:
        """Copies of this rank's tensors, and the event after which they are complete."""
        engine, groups = self.engine, self._pieces()
        on_gpu = engine.active.device.type == "cuda"
        if wait and on_gpu and (self._reserved is None or not self._reserved.done()):
            self._staging.cancelled = True  # a save that is waited for is faster without page-locked memory
            return on_host(groups), None
        if self.asynchronous:
            try:
                if self._reserved is not None:
                    self._reserved.result()
                copies, copied = self._staging.take(groups)
                engine.copied = copied
                return copies, copied
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if on_gpu:
                    torch.cuda.synchronize()  # copies may be under way to memory that is released now
                self.asynchronous, self._staging, self._reserved = False, Staging(), None
                text = f"checkpoints are written while training waits: the host has no memory for a copy ({error})"
                self.session.recorder.event(events.Notice(text=text))
        return on_host(groups), None

    def _writing(
        self, step: int, groups: dict[str, dict[str, Piece]], copied: Any, state: dict[str, Any]
    ) -> Callable[[], Path]:
        """What the thread does. If the weights are sharded, all ranks write, and the first one commits."""
        ranks, checkpoints, group = self.ranks, self.checkpoints, self._group

        def told(value: Any) -> Any:
            box = [value]
            if group is not None:
                dist.broadcast_object_list(box, src=0, group=group)
            return box[0]

        def attempt(action: Callable[[], T]) -> tuple[T | None, OSError | None]:
            try:
                return action(), None
            except OSError as error:
                return None, error

        def write() -> Path:
            if copied is not None:
                copied.synchronize()
            final, error = attempt(lambda: checkpoints.begin(step)) if ranks.first else (None, None)
            there = final is not None and final.exists()
            partial = told(None if final is None else final if there else checkpoints.partial(final))
            if partial is None:
                raise error or OSError("the first rank could not write")
            if told(there):
                return Path(partial)
            try:
                facts, error = attempt(lambda: checkpoints.write(partial, groups))
                every: list[Any] = [(facts, None if error is None else str(error))]
                if group is not None:
                    every = [None] * ranks.world
                    dist.all_gather_object(every, (facts, None if error is None else str(error)), group=group)
                if failed := next((text for _, text in every if text), None):
                    raise error or OSError(failed)
                merged = {name: known for found, _ in every for name, known in found.items()}
                done, error = None, None
                if ranks.first:
                    assert final is not None
                    done, error = attempt(
                        lambda: checkpoints.commit(partial, final, written=merged, state=state, world=ranks.world)
                    )
                text = told(None if error is None else str(error))
                if text:
                    raise error or OSError(text)
                return done or partial
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise

        return write

    def poll(self) -> None:
        """Reports a save that has ended meanwhile, and prepares the first one; never waits."""
        if self._reserved is None and self._periodic and self.asynchronous and self.engine.optimizer.state:
            on_gpu, writes = self.engine.active.device.type == "cuda", self.ranks.first or self.engine.sharded
            if on_gpu and writes:
                self._reserved = self._thread.submit(self._staging.reserve, self._pieces())
        if self._pending is not None and self._pending.future is not None and self._pending.future.done():
            self._report(self._pending)

    def settle(self) -> bool:
        """Waits on all ranks until the save in flight has ended. Returns whether it succeeded."""
        pending, self._pending = self._pending, None
        if pending is None:
            return not self.failed
        self.failed = ""
        if pending.future is not None:
            self._report(pending)
        if self.ranks.any(bool(self.failed)):
            self.failed = self.failed or "another rank could not save"
            return False
        self.ledger.saves += 1
        self.step = pending.step
        if pending.best is not None:
            self._keep_best(pending.step, pending.best)
        return True

    def close(self) -> None:
        """Waits for a save in flight when the run fails, so that it is recorded; ranks that share one do not wait."""
        pending, self._pending, self._staging.cancelled = self._pending, None, True
        if pending is not None and pending.future is not None and self._group is None:
            self._report(pending)
        self._thread.shutdown(wait=self._group is None)

    def _report(self, pending: _Pending) -> None:
        """Records how a save ended, once."""
        assert pending.future is not None
        error = pending.future.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        if error is not None:
            self.failed = error.strerror or str(error)
        if pending.told or not self.ranks.first:
            return
        pending.told = True
        if error is not None:
            self.session.recorder.event(events.SaveFailed(step=pending.step, error=str(error)))
            return
        self.session.recorder.event(
            events.Saved(
                step=pending.step,
                checkpoint=pending.future.result().name,
                seconds=time.perf_counter() - pending.began,
                blocked_s=pending.blocked_s,
            )
        )
