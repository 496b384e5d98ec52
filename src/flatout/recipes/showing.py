"""What a run would learn from its rows: `flatout data show CONFIG`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from flatout.config.recipes import RECIPES, recipes_that
from flatout.config.settings import Settings
from flatout.data.examples import Conversations, open_conversations
from flatout.data.mixture import Mixed
from flatout.errors import UsageError
from flatout.recipes.sft import stream_of, tokenizer_of

ANSWERS = ("chosen", "rejected")


@dataclass(frozen=True, kw_only=True)
class ShownExample:
    source: str
    label: str  # its number, and for pairs which of the two answers it is
    tokens: int
    learnt: int
    pieces: tuple[tuple[str, bool], ...]  # its text, in order, each piece learnt or not


@dataclass(frozen=True, kw_only=True)
class ShownSource:
    source: str
    formats: dict[str, int]  # rows by format
    train_examples: int
    valid_examples: int
    share: float  # of the training examples of an epoch


@dataclass(frozen=True, kw_only=True)
class Shown:
    examples: tuple[ShownExample, ...]
    sources: tuple[ShownSource, ...]
    lengths: dict[str, int]  # tokens of the training examples
    train_tokens: int
    learnt_tokens: int
    sequences: int
    sequence_length: int
    fill: float  # share of the positions of an epoch that hold a token
    left_out: str


def show(settings: Settings, *, count: int) -> Shown:
    """The first `count` examples of every source, and numbers of all of them."""
    recipe = RECIPES[settings.recipe]
    if recipe.learns_from != "rows":
        raise UsageError(
            f"recipe {settings.recipe} learns from {recipe.learns_from}; `flatout data show` shows the rows of recipe "
            f"{recipes_that(lambda other: other.learns_from == 'rows')}"
        )
    pairs = recipe.compares
    tokenizer = tokenizer_of(settings)
    with open_conversations(settings.data, seed=settings.seed, tokenizer=tokenizer, pairs=pairs) as found:
        stream = stream_of(found, settings, unit=2 if pairs else 1)
        packed = stream.first if isinstance(stream, Mixed) else stream
        weights = stream.drawn if isinstance(stream, Mixed) else found.counts
        lengths = found.train.lengths
        return Shown(
            examples=tuple(_examples(found, count=count, pairs=pairs)),
            sources=tuple(
                ShownSource(
                    source=source.label,
                    formats=dict(rows),
                    train_examples=here,
                    valid_examples=held,
                    share=weight / sum(weights),
                )
                for source, rows, here, held, weight in zip(
                    found.sources, found.facts.formats, found.counts, _held(found), weights, strict=True
                )
            ),
            lengths={
                "shortest": int(lengths.min()),
                "median": int(np.median(lengths)),
                "p90": int(np.quantile(lengths, 0.9)),
                "longest": int(lengths.max()),
            },
            train_tokens=len(found.train.tokens),
            learnt_tokens=int(found.train.trained.sum()),
            sequences=packed.num_sequences,
            sequence_length=settings.data.sequence_length,
            fill=packed.fill,
            left_out=found.summary(),
        )


def _held(found: Conversations) -> tuple[int, ...]:
    """Validation examples of each training source; those of a validation set of its own are none of them."""
    held = found.facts.counts["valid"]
    return held if len(held) == len(found.sources) else (0,) * len(found.sources)


def _examples(found: Conversations, *, count: int, pairs: bool) -> list[ShownExample]:
    shown = []
    begins = np.cumsum([0, *found.counts])
    for source, (low, high) in zip(found.sources, pairwise(begins.tolist()), strict=True):
        for number in range(low, min(high, low + count * (2 if pairs else 1))):
            begin, end = int(found.train.ends[number] - found.train.lengths[number]), int(found.train.ends[number])
            ids, learnt = found.train.tokens[begin:end].tolist(), found.train.trained[begin:end].tolist()
            at = number - low
            label = f"{at // 2 + 1}, {ANSWERS[at % 2]}" if pairs else str(at + 1)
            shown.append(
                ShownExample(
                    source=source.label,
                    label=label,
                    tokens=len(ids),
                    learnt=sum(learnt),
                    pieces=tuple(_pieces(found.tokenizer, ids, learnt)),
                )
            )
    return shown


def _pieces(tokenizer: Any, ids: list[int], learnt: list[bool]) -> list[tuple[str, bool]]:
    pairs = zip(ids, learnt, strict=True)
    return [(tokenizer.decode([i for i, _ in run]), is_learnt) for is_learnt, run in groupby(pairs, key=lambda p: p[1])]
