"""What a run learns from, whatever kind of data that is: the loop asks for no more than this."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from flatout.config.settings import Settings
from flatout.data.stream import Batch, Steps
from flatout.data.tokenizer import Tokenizer
from flatout.engine.ranks import Ranks


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


@dataclass(frozen=True, kw_only=True)
class Material:
    facts: Facts
    stream: Steps
    held_out: Callable[[Ranks, int], list[Batch]]  # a rank's validation batches, by micro-batch
    # Positions a token attends to on average, where that is known; None: half the sequence.
    mean_context: float | None = None
    # Tokens of the longest document, where documents are packed; None: unknown.
    longest: int | None = None
    # Share of the tokens that the loss looks at; None: all of them.
    trained_share: float | None = None


OpenData = Callable[[Settings], AbstractContextManager[Material]]
