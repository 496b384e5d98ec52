"""The data of recipe router: the worked solutions of several tasks, packed together, each with its adapter.

`data.sources` names the tasks. A task without a path is generated; one with a path reads a file and holds a part of it
out. The batch of a step is a pure function of (data, seed, step), with its temperature, its noise and, in phase 3,
the curriculum from single tasks to all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flatout.config.settings import RouterSettings, Settings, SourceSettings
from flatout.data.examples import Encoder, Examples
from flatout.data.packed import Packed
from flatout.data.stream import Batch
from flatout.data.template import BadRow
from flatout.data.tokenizer import Tokenizer
from flatout.errors import UsageError
from flatout.sample import plain_prompt
from flatout.tasks import Messages, Texts, Worked, open_task

# Columns of a batch. Of each token: its adapter, if it belongs to the prompt, its share of the answer, its example.
ADAPTER, PROMPT, SHARE, EXAMPLE = "adapter", "prompt", "share", "example"
# Of the step: the temperature, and the target tokens per document, which turn a sum over documents into their mean.
TEMPERATURE, PER_DOCUMENT = "temperature", "per_document"
# Of each document and adapter: Gumbel noise.
NOISE = "noise"
# Solutions of an endless task, unless the source says how many.
ENDLESS = 2000
# Held-out solutions of each task for the validation loss.
VALID = 200


@dataclass(frozen=True, kw_only=True)
class Source:
    """One item of `data.sources`: the adapter's name, and the task it is for."""

    name: str
    train: str
    valid: str
    size: int | None
    weight: float | None

    @classmethod
    def of(cls, given: SourceSettings) -> Source:
        head, _, query = str(given.task).partition("?")
        if given.path is None:
            train, valid = (f"{head}:{split}{'?' if query else ''}{query}" for split in ("train", "valid"))
        else:
            more = f"{query}&" if query else ""
            train, valid = (f"{head}:{given.path}?{more}part={part}" for part in ("train", "valid"))
        return cls(name=given.adapter, train=train, valid=valid, size=given.size, weight=given.weight)

    def solutions(self, spec: str, *, most: int | None) -> list[tuple[Messages, str]]:
        task = open_task(spec)
        if isinstance(task, Texts) or not isinstance(task, Worked):
            raise UsageError(f"data.sources: {spec} has no worked solutions to train on; choose another task")
        count = most or ENDLESS if task.size is None else min(task.size, most or task.size)
        if not count:
            raise UsageError(f"data.sources: {self.name} is empty: {spec} has no questions")
        return [(task.prompt(i), task.solution(i)) for i in range(count)]


def sources_of(settings: Settings) -> list[Source]:
    return [Source.of(given) for given in settings.data.sources]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Training and held-out examples of all sources, with the columns of the router."""

    names: tuple[str, ...]
    train: Examples
    valid: Examples
    each: Sequence[Examples]  # the training examples of each source
    tokenizer: Tokenizer
    source: str
    dropped: int

    @property
    def fingerprint(self) -> str:
        return self.train.fingerprint

    def check_vocab(self, vocab: int) -> None:
        largest = max(int(part.tokens.max(initial=0)) for part in (self.train, self.valid))
        if largest >= vocab:
            raise UsageError(f"the data has token id {largest}, but the model's vocabulary ends at {vocab - 1}")

    def describe(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "train_tokens": len(self.train.tokens),
            "valid_tokens": len(self.valid.tokens),
            "train_examples": len(self.train),
            "valid_examples": len(self.valid),
            "trained_tokens": int(self.train.trained.sum()),
            "complete": True,
            "tokenizer": self.tokenizer.name,
            "vocab": self.tokenizer.vocab_size,
            "fingerprint": self.fingerprint,
            "left_out": self.summary(),
        }

    def summary(self) -> str:
        why = "too long for the window, or with a control token in their text"
        return f"{self.dropped} examples ({why})" if self.dropped else ""


def open_mixture(settings: Settings, tokenizer: Tokenizer) -> Mixture:
    sources, encoder = sources_of(settings), Encoder(settings.data, tokenizer)
    encoded = {}
    for part in ("train", "valid"):
        for source in sources:
            most = source.size if part == "train" else VALID
            rows = source.solutions(getattr(source, part), most=most)
            made = Examples.of(_fitting(encoder, rows))
            if not len(made):
                text = f"data.sources: no example of {source.name} fits data.sequence_length; raise it"
                raise UsageError(f"{text} ({settings.data.sequence_length})")
            encoded[part, source.name] = made
    each = [encoded["train", source.name] for source in sources]
    taken = _weighted(each, [source.weight for source in sources], seed=settings.seed)
    counts = ", ".join(f"{source.name} {len(part):,}" for source, part in zip(sources, taken, strict=True))
    return Mixture(
        names=tuple(source.name for source in sources),
        train=_joined(taken),
        valid=_joined([encoded["valid", source.name] for source in sources]),
        each=[_joined([part], first=i) for i, part in enumerate(each)],
        tokenizer=tokenizer,
        source=f"worked solutions: {counts}",
        dropped=sum(encoder.too_long.values()),
    )


def _fitting(
    encoder: Encoder, rows: Sequence[tuple[Messages, str]]
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    for start in range(0, len(rows), 1024):
        drafts = []
        for prompt, answer in islice(rows, start, start + 1024):
            try:
                drafts.append(encoder.draft(row_of(encoder.tokenizer, prompt, answer)))
            except BadRow:
                encoder.too_long["dropped"] += 1
        for ids, trained in encoder.encode(drafts):
            if len(ids) > encoder.data.sequence_length + 1:
                encoder.too_long["dropped"] += 1
            else:
                yield ids, trained


def row_of(tokenizer: Tokenizer, prompt: Messages, answer: str) -> dict[str, Any]:
    """The exact prompt that is sampled and measured, and the answer to train on."""
    if tokenizer.has_template:
        said = [{"role": "assistant", "content": answer}]
        return {"prompt": [dict(message) for message in prompt], "completion": said}
    return {"prompt": plain_prompt(prompt), "completion": f" {answer}"}


def _weighted(parts: Sequence[Examples], weights: Sequence[float | None], *, seed: int) -> list[Examples]:
    """As many examples of each source in an epoch as its weight says; a small source is repeated, a large one cut."""
    given = [weight for weight in weights if weight is not None]
    if len(given) < len(parts):
        return list(parts)
    total, found = sum(len(part) for part in parts), []
    for part, weight in zip(parts, given, strict=True):
        wanted = max(1, round(total * weight / sum(given)))
        whole, rest = divmod(wanted, len(part))
        chosen = np.zeros(len(part), np.bool_)
        chosen[np.random.default_rng(seed).permutation(len(part))[:rest]] = True
        found.append(_repeated([part] * whole + ([part.part(chosen)] if rest else [])))
    return found


def _repeated(parts: Sequence[Examples]) -> Examples:
    lengths = np.concatenate([part.lengths for part in parts])
    return Examples(
        tokens=np.concatenate([part.tokens for part in parts]),
        trained=np.concatenate([part.trained for part in parts]),
        ends=np.cumsum(lengths, dtype=np.int64),
    )


def _joined(parts: Sequence[Examples], *, first: int = 0) -> Examples:
    """All examples, with their columns; the adapter of a part is its number, from `first` on."""
    joined = _repeated(parts)
    lengths, starts = joined.lengths, joined.ends - joined.lengths
    adapters = np.repeat(np.arange(first, first + len(parts)), [len(part) for part in parts])
    answers = np.add.reduceat(joined.trained.astype(np.int64), starts)
    answered = np.cumsum(joined.trained)
    prompt = answered == np.repeat(answered[starts] - joined.trained[starts], lengths)
    # A column's value for a token is stored where that token is the target: one place later.
    prompt = np.roll(prompt, 1)
    return replace(
        joined,
        columns={
            ADAPTER: np.repeat(adapters, lengths).astype(np.int64),
            PROMPT: prompt.astype(np.float32),
            SHARE: np.where(joined.trained, np.repeat(1.0 / np.maximum(answers, 1), lengths), 0.0).astype(np.float32),
            EXAMPLE: np.repeat(np.arange(len(joined)), lengths).astype(np.int64),
        },
    )


class Steps:
    """The batches of a phase. Without `total`, as for validation: no noise, and the temperature of inference."""

    def __init__(
        self,
        packed: Packed,
        router: RouterSettings,
        *,
        num_adapters: int,
        seed: int,
        singles: Sequence[Packed] = (),
        total: int | None = None,
    ) -> None:
        self._packed, self._router, self._seed, self._singles, self._total = packed, router, seed, singles, total
        self._num_adapters = num_adapters

    @property
    def steps_per_epoch(self) -> float:
        return self._packed.steps_per_epoch

    def micro_batches(self, step: int, *, rank: int = 0, world: int = 1, micro_batch: int) -> list[Batch]:
        single = self.single(step)
        packed = self._packed if single is None else self._singles[single]
        batches = packed.micro_batches(step, rank=rank, world=world, micro_batch=micro_batch)
        documents, targets = packed.counts(step)
        per_document = targets / max(1, documents)
        temperature = torch.tensor([self.temperature(step)])
        of_step = {PER_DOCUMENT: torch.tensor([per_document]), TEMPERATURE: temperature}
        return [
            replace(batch, columns={**batch.columns, **of_step, NOISE: self._noise(batch, step)}) for batch in batches
        ]

    def temperature(self, step: int) -> float:
        router = self._router
        if router.temperature_mode != "annealed":
            return router.temperature
        if self._total is None or router.phase == "3":  # phase 3 goes on where phase 2 ended
            return router.temperature_end
        done = min(1.0, step / max(1, self._total - 1))
        return float(router.temperature * (router.temperature_end / router.temperature) ** done)

    def single(self, step: int) -> int | None:
        """The only task of a step of the curriculum; None: all tasks."""
        if not self._singles or self._total is None:
            return None
        done = min(1.0, step / max(1, self._total - 1))
        share = self._router.single_first + (self._router.single_last - self._router.single_first) * done
        first, second = _uniform(self._seed, "curriculum", np.array([step, step]), 2)[0]
        return int(second * len(self._singles)) if first < share else None

    def _noise(self, batch: Batch, step: int) -> torch.Tensor:
        """Gumbel noise that depends on the example and the step, not on the place in a batch."""
        assert batch.cu_seqlens is not None
        begins = batch.cu_seqlens[:-1].long().clamp(max=batch.tokens.numel() - 1)
        examples = batch.columns[EXAMPLE][begins].numpy()
        if self._total is None or self._router.mode == "soft":
            return torch.zeros(len(examples), self._num_adapters)
        uniform = _uniform(self._seed, f"noise {step}", examples, self._num_adapters)
        return torch.from_numpy(-np.log(-np.log(uniform))).float()


def _uniform(seed: int, what: str, keys: NDArray[Any], count: int) -> NDArray[np.float64]:
    """Numbers between 0 and 1 for each key, always the same ones."""
    found = np.empty((len(keys), count))
    for row, key in enumerate(keys.tolist()):
        digest = hashlib.blake2b(f"{seed}/{what}/{key}".encode(), digest_size=8 * count).digest()
        found[row] = (np.frombuffer(digest, "<u8") + 0.5) / 2.0**64
    return np.clip(found, 1e-12, 1 - 1e-12)
