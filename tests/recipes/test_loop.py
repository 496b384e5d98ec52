"""The loop with batches that the weights being trained make themselves, as rollouts are: retried, saved, resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flatout.config import load
from flatout.config.settings import Settings
from flatout.data.stream import Batch, Steps
from flatout.engine.faults import OutOfMemory
from flatout.engine.objective import CrossEntropy, Head, Rule
from flatout.engine.prepare import attend_for
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.plan import Plan
from flatout.recipes import pretrain
from flatout.recipes.batches import Streamed
from flatout.recipes.loop import train
from flatout.recipes.material import Material
from flatout.recipes.session import Session
from flatout.record import Run

PHASE, OVERRIDES = 3, ["train.steps=12", "save.every=2", "eval.every=4", "plan.micro_batch=2"]


class Counted(CrossEntropy):
    """Cross-entropy that reports how many targets the model would have chosen itself."""

    metrics: Mapping[str, Rule] = {"agreed": "mean"}

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        chosen = (head.hidden_NC @ head.weight_VC.t()).argmax(-1)
        return {**super().__call__(batch, head), "agreed": (chosen == batch.targets).sum()}


@dataclass
class Rollouts:
    """The targets of three steps are what the model says at the start of the first, with every fifth left as it is."""

    stream: Steps
    engine: Engine
    micro_batch: int
    fails_at: int | None
    short_at: int | None
    phase: dict[int, list[Batch]]

    def next(self, step: int) -> list[Batch]:
        if step % PHASE == 0 and step not in self.phase:
            self.phase = {s: self._written(s) for s in range(step, step + PHASE)}
        if step == self.fails_at:
            raise ConnectionResetError("killed here")
        if step == self.short_at:
            self.short_at = None
            raise OutOfMemory("out of memory", recorded=False)
        return self.phase[step]

    def again(self, step: int) -> None:
        pass

    def shrink(self, step: int, *, cause: OutOfMemory) -> tuple[int, int]:
        before, self.micro_batch = self.micro_batch, self.micro_batch // 2
        cut = {s: [part for batch in batches for part in halves(batch)] for s, batches in self.phase.items()}
        self.phase = cut
        return before, self.micro_batch

    def resumable(self, step: int) -> bool:
        return step % PHASE == 0

    def feed_more(self, *, limit: int) -> int | None:
        return None

    @torch.no_grad()
    def _written(self, step: int) -> list[Batch]:
        return [self._answered(batch) for batch in self.stream.micro_batches(step, micro_batch=self.micro_batch)]

    def _answered(self, batch: Batch) -> Batch:
        model = self.engine.model
        hidden = model.hidden(batch.tokens, batch.positions, attend_for(batch, active=self.engine.active))
        said = (hidden @ model.head_weight.t()).argmax(-1)
        said[::5] = batch.targets[::5]
        return replace(batch, targets=said)


def halves(batch: Batch) -> list[Batch]:
    length = batch.sequence_length
    cut = {name: tensor.view(-1, length) for name, tensor in batch.tensors.items()}
    return [
        replace(batch.with_tensors({n: t[i] for n, t in cut.items()}), num_sequences=1, num_target_tokens=length)
        for i in range(batch.num_sequences)
    ]


@dataclass(frozen=True)
class Live(Streamed):
    fails_at: int | None = None
    short_at: int | None = None

    @contextmanager
    def batches(
        self, engine: Engine, plan: Plan, session: Session, ranks: Ranks, *, start: int, stop: int
    ) -> Iterator[Rollouts]:
        yield Rollouts(self.stream, engine, plan.decisions.micro_batch or 1, self.fails_at, self.short_at, {})


def run(config: Path, folder: Path, *, resume: bool = False, **faults: int) -> None:
    @contextmanager
    def rollouts(settings: Settings) -> Iterator[Material]:
        with pretrain.running_text(settings) as material:
            assert isinstance(material.source, Streamed)
            yield replace(material, source=Live(material.source.stream, **faults), objective=Counted())

    train(load(config, overrides=OVERRIDES).settings, rollouts, folder=folder, resume=resume)


def weights(folder: Path) -> str:
    newest = max((folder / "checkpoints").glob("step-*"))
    return hashlib.sha256((newest / "weights-rank00000.safetensors").read_bytes()).hexdigest()


def test_rollouts_are_saved_between_phases_and_resumed_to_the_same_bits(config: Path, tmp_path: Path) -> None:
    run(config, tmp_path / "whole")
    with pytest.raises(ConnectionResetError):
        run(config, tmp_path / "killed", fails_at=8)
    saved = [event.step for event in Run.open(tmp_path / "killed").events() if event.kind == "save"]
    # Every second step was asked for: where a phase has run past one, its end stands for it.
    assert saved == [3, 6]
    run(config, tmp_path / "killed", resume=True)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    measured = [event.step for event in Run.open(tmp_path / "whole").events() if event.kind == "eval"]
    assert measured == [0, 6, 9, 12]
    losses = [{step.step: step.loss for step in Run.open(tmp_path / name).steps()} for name in ("whole", "killed")]
    assert losses[0] == losses[1]


def test_rollouts_of_a_phase_are_kept_when_a_step_runs_out_of_memory(config: Path, tmp_path: Path) -> None:
    run(config, tmp_path / "whole")
    run(config, tmp_path / "short", short_at=4)
    record = Run.open(tmp_path / "short")
    assert [(e.step, e.data["now"]) for e in record.events() if e.kind == "oom"] == [(4, 1)]
    losses = [[step.loss for step in Run.open(tmp_path / name).steps()] for name in ("whole", "short")]
    # To the end of that phase: later ones are written by weights that were summed in another order.
    assert losses[1][:6] == pytest.approx(losses[0][:6], rel=1e-5)
