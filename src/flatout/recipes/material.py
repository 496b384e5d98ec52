"""What a run learns from, whatever kind of data that is: the loop asks for no more than this."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from flatout.config.settings import Settings
from flatout.data.stream import Batch
from flatout.data.tokenizer import Tokenizer
from flatout.engine.faults import OutOfMemory
from flatout.engine.objective import Combine, CrossEntropy, Objective
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.plan import Plan


class Part(Protocol):
    """The training or the validation data."""

    @property
    def fingerprint(self) -> str: ...


class Facts(Protocol):
    """What is known about data that was opened and verified."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def valid(self) -> Part: ...
    def describe(self) -> dict[str, Any]: ...
    def summary(self) -> str:
        """What was left out, in words; nothing where nothing was."""
        ...

    def check_vocab(self, vocab: int) -> None: ...


class Batches(Protocol):
    """The micro-batches of one step after the other, on this rank."""

    @property
    def micro_batch(self) -> int: ...

    def next(self, step: int) -> list[Batch]:
        """The micro-batches of `step`, which follows the step before it."""
        ...

    def again(self, step: int) -> None:
        """The next call gives `step` once more, as it was."""
        ...

    def shrink(self, step: int, *, cause: OutOfMemory) -> tuple[int, int]:
        """As `again`, in smaller micro-batches from here on. Returns the size before and after."""
        ...

    def resumable(self, step: int) -> bool:
        """Whether the weights after `step` steps are enough to go on from.

        A stream is a pure function of the step: always. Rollouts are made by the weights at the start of a phase, so
        a checkpoint in the middle of it could not make them again: only between two phases.
        """
        ...

    def feed_more(self, *, limit: int) -> int | None:
        """Called when the device waited for data: the number of loader workers now, or None if none was added."""
        ...


class Source(Protocol):
    """Where the batches come from: a stream of prepared data, or rollouts of the weights that are being trained."""

    @property
    def steps_per_epoch(self) -> float | None: ...

    def trial_batch(self, ranks: Ranks, *, micro_batch: int) -> Batch:
        """One micro-batch of the shape that the steps will have, to find the size that runs fastest."""
        ...

    def batches(
        self, engine: Engine, plan: Plan, ranks: Ranks, *, start: int, stop: int
    ) -> AbstractContextManager[Batches]: ...


@dataclass(frozen=True, kw_only=True)
class Material:
    facts: Facts
    source: Source
    held_out: Callable[[Ranks, int], list[Batch]]  # a rank's validation batches, by micro-batch
    # What a step minimises, and how the gradients of several tasks become one; None: they are added up.
    objective: Objective = field(default_factory=CrossEntropy)
    combine: Combine | None = None
    # Positions a token attends to on average, where that is known; None: half the sequence.
    mean_context: float | None = None
    # Tokens of the longest document, where documents are packed; None: unknown.
    longest: int | None = None
    # Share of the tokens that the loss looks at; None: all of them.
    trained_share: float | None = None


OpenMaterial = Callable[[Settings], AbstractContextManager[Material]]
