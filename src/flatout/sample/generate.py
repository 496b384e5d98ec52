"""The in-process sampler: prompts of any lengths are read once into a cache, rows that end make room for the next.

A prompt with several samples is read once and its row copied; so is what all prompts begin with. Rows in flight stand
together at the beginning of the cache, so that a step looks at nothing else.

Legend: R rows in flight, N tokens of a pass, V vocabulary, C hidden width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.data.tokenizer import Tokenizer
from flatout.model import Decoder, Rectangular
from flatout.sample.cache import Cache, Cached
from flatout.sample.draw import draw, row_key, uniform
from flatout.sample.request import Completion, Prompt, Sampling, Status

# What is looked at of the cache grows in such steps, so that there are few shapes.
BLOCK = 64
PREFILL_TOKENS = 8192
# A beginning that all prompts share is read once if it is at least so long.
WORTH_SHARING = 16
# Rows of logits that exist at once while likelihoods are summed.
LOGIT_ROWS = 512
# So many ids at the end are enough to see a stop text appear.
STOP_IDS = 24
ROWS = {"cpu": 32, "cuda": 256}
CACHE_BYTES_CPU = 2 << 30


@dataclass
class _Row:
    """One completion in the making."""

    prompt: int
    sample: int
    key: int
    length: int  # of the prompt
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    status: Status | None = None

    @property
    def seen(self) -> int:
        """Tokens in the cache: all but the newest, which is read next."""
        return self.length + len(self.ids) - 1

    def done(self) -> Completion:
        assert self.status is not None
        return Completion(
            prompt=self.prompt,
            sample=self.sample,
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            status=self.status,
        )


class Generator:
    """A `Sampler` on our decoder, as it is: on its device, in its compute type, with what is attached to it."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, rows: int | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.window = model.shape.positions
        self.device = model.embedding.device
        self._rows = rows or ROWS.get(self.device.type, ROWS["cpu"])
        self._cache: Cache | None = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling,
        samples: int = 1,
        first: int = 0,
        keys: Sequence[int] | None = None,
    ) -> Iterator[Completion]:
        keys = range(len(prompts)) if keys is None else keys
        waiting: deque[_Row] = deque()
        for i, prompt in enumerate(prompts):
            for sample in range(first, first + samples):
                row = _Row(prompt=i, sample=sample, key=row_key(sampling.seed, keys[i], sample), length=len(prompt))
                if not 0 < len(prompt) < self.window:
                    row.status = "too_long"
                    yield row.done()
                else:
                    waiting.append(row)
        for rows in self._steps(prompts, waiting, sampling):
            yield from (row.done() for row in rows if row.status)

    @torch.no_grad()
    def stream(self, prompt: Prompt, *, sampling: Sampling) -> Iterator[int]:
        row = _Row(prompt=0, sample=0, key=row_key(sampling.seed, 0, 0), length=len(prompt))
        for _ in self._steps([prompt], deque([row]), sampling):
            yield row.ids[-1]

    @torch.no_grad()
    def likelihoods(self, items: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[float]]:
        if not items:
            return []
        found: list[list[float]] = []
        num_rows = [1 + len(many) for _, many in items]
        cache = self._room(
            rows=max([*num_rows, min(sum(num_rows), self._rows)]),
            length=max(len(prompt) + max(map(len, many)) for prompt, many in items),
            at_least=max(num_rows),
        )
        for batch in _batches(items, rows=cache.rows):
            found += self._likelihoods(batch, cache)
        return found

    @torch.no_grad()
    def surprisals(self, sequences: Sequence[Prompt]) -> Iterator[list[float]]:
        for sequence in sequences:
            tokens = torch.tensor(sequence, device=self.device)
            targets = tokens[1:]
            positions = torch.arange(len(targets), device=self.device)

            def head(hidden_NC: Tensor, weight_VC: Tensor, targets: Tensor = targets) -> Tensor:
                return _logprobs(hidden_NC, weight_VC, targets)

            yield (-self.model(tokens[:-1], positions, Rectangular(batch=1), head)).tolist()

    def _steps(self, prompts: Sequence[Prompt], waiting: deque[_Row], sampling: Sampling) -> Iterator[list[_Row]]:
        """After each step, the rows that got a token; those that have ended are out afterwards."""
        if not waiting:
            return
        longest = max(row.length for row in waiting) + sampling.max_tokens
        # One row more, the last, holds what all prompts begin with.
        cache = self._room(rows=min(len(waiting), self._rows) + 1, length=min(longest, self.window))
        shared = self._read_shared([prompts[row.prompt] for row in waiting], cache)
        live: list[_Row] = []
        while waiting or live:
            if waiting and len(live) < cache.rows - 1:
                fresh, logits_RV = self._admit(prompts, waiting, cache, num_live=len(live), shared=shared)
                self._extend(fresh, logits_RV, sampling)
                live += fresh
                yield fresh
            else:
                logits_RV = self._decode(live, cache)
                self._extend(live, logits_RV, sampling)
                yield live[:]
            self._leave(live, cache)

    def _read_shared(self, prompts: Sequence[Prompt], cache: Cache) -> int:
        """How many tokens all prompts begin with, read into the last row; 0 where it would not pay."""
        # The first and the last in order differ where any two do.
        first, last = min(map(list, prompts)), max(map(list, prompts))
        # Each prompt keeps a token of its own, whose logits are wanted.
        most = min(map(len, prompts)) - 1
        shared = next((at for at in range(most) if first[at] != last[at]), most)
        if shared < WORTH_SHARING or first == last:
            return 0
        attend = Cached(cache, first=cache.rows - 1, lengths=[shared], starts=[0], block=BLOCK)
        self._logits(first[:shared], attend)
        return shared

    def _admit(
        self, prompts: Sequence[Prompt], waiting: deque[_Row], cache: Cache, *, num_live: int, shared: int
    ) -> tuple[list[_Row], Tensor]:
        """Reads prompts into free rows, each once however many samples of it there are."""
        readers: list[_Row] = []
        copies: list[tuple[int, _Row]] = []  # (reader's place, row)
        room = cache.rows - 1 - num_live
        while waiting and len(readers) + len(copies) < room:
            row = waiting[0]
            if readers and readers[-1].prompt == row.prompt:
                copies.append((len(readers) - 1, waiting.popleft()))
            elif readers and sum(reader.length for reader in readers) + row.length > PREFILL_TOKENS:
                break
            else:
                readers.append(waiting.popleft())
        count, lengths = len(readers), [row.length - shared for row in readers]
        if shared:
            cache.copy([cache.rows - 1] * count, range(num_live, num_live + count), length=shared)
        attend = Cached(cache, first=num_live, lengths=lengths, starts=[shared] * count, block=BLOCK)
        logits_RV = self._logits([i for row in readers for i in prompts[row.prompt][shared:]], attend)
        sources = [num_live + at for at, _ in copies]
        places = range(num_live + len(readers), num_live + len(readers) + len(copies))
        cache.copy(sources, places, length=shared + max(lengths))
        order = [*range(len(readers)), *(at for at, _ in copies)]
        return [*readers, *(row for _, row in copies)], logits_RV[order]

    def _decode(self, live: Sequence[_Row], cache: Cache) -> Tensor:
        attend = Cached(cache, first=0, lengths=[1] * len(live), starts=[row.seen for row in live], block=BLOCK)
        return self._logits([row.ids[-1] for row in live], attend)

    def _logits(self, tokens: Sequence[int], attend: Cached) -> Tensor:
        """Of the last token of each row."""

        def head(hidden_NC: Tensor, weight_VC: Tensor) -> Tensor:
            return _logits(hidden_NC[attend.last_R], weight_VC)

        out: Tensor = self.model(torch.tensor(tokens, device=self.device), attend.positions_N, attend, head)
        return out

    def _extend(self, rows: Sequence[_Row], logits_RV: Tensor, sampling: Sampling) -> None:
        """Draws a token for each row, and says which rows end with it."""
        keys = torch.tensor([row.key for row in rows], device=self.device)
        places = torch.tensor([len(row.ids) for row in rows], device=self.device)
        # A head may be wider than the tokenizer: what has no text is never drawn.
        known_RV = logits_RV[:, : self.tokenizer.vocab_size]
        chosen_R = draw(known_RV, uniform(keys, places), places, sampling)
        logprobs_R = logits_RV.gather(-1, chosen_R[:, None])[:, 0] - logits_RV.logsumexp(-1)
        # The one synchronisation of a step.
        for row, token, logprob in zip(rows, chosen_R.tolist(), logprobs_R.tolist(), strict=True):
            row.ids.append(token)
            row.logprobs.append(logprob)
            if token in sampling.stop_ids or self._stop_text(row, sampling):
                row.status = "stopped"
            elif len(row.ids) >= sampling.max_tokens or row.length + len(row.ids) >= self.window:
                row.status = "length"

    def _stop_text(self, row: _Row, sampling: Sampling) -> bool:
        if not sampling.stop_texts or len(row.ids) < sampling.min_tokens:
            return False
        text = self.tokenizer.decode(row.ids[-STOP_IDS:])
        return any(stop in text for stop in sampling.stop_texts)

    def _leave(self, live: list[_Row], cache: Cache) -> None:
        """Rows that have ended go; the last ones take their places."""
        for at in reversed([at for at, row in enumerate(live) if row.status]):
            last = live.pop()
            if at < len(live):
                cache.copy([len(live)], [at], length=last.seen)
                live[at] = last

    def _likelihoods(self, batch: Sequence[tuple[Prompt, Sequence[Prompt]]], cache: Cache) -> list[list[float]]:
        """Each prompt is read once; its continuations go on from copies of its row."""
        lengths = [len(prompt) for prompt, _ in batch]
        attend = Cached(cache, first=0, lengths=lengths, starts=[0] * len(batch), block=BLOCK)
        first_RV = self._logits([i for prompt, _ in batch for i in prompt], attend).log_softmax(-1)
        sums = [[float(first_RV[at, many[0]]) for many in choices] for at, (_, choices) in enumerate(batch)]
        longer = [
            (at, which, many)
            for at, (_, choices) in enumerate(batch)
            for which, many in enumerate(choices)
            if len(many) > 1
        ]
        if not longer:
            return sums
        sources = [at for at, _, _ in longer]
        cache.copy(sources, range(len(batch), len(batch) + len(longer)), length=max(lengths))
        rest = Cached(
            cache,
            first=len(batch),
            lengths=[len(many) - 1 for _, _, many in longer],
            starts=[lengths[at] for at in sources],
            block=BLOCK,
        )
        targets = torch.tensor([i for _, _, many in longer for i in many[1:]], device=self.device)

        def head(hidden_NC: Tensor, weight_VC: Tensor) -> Tensor:
            found = _logprobs(hidden_NC, weight_VC, targets)
            return found.new_zeros(len(longer)).index_add(0, rest.row_N, found)

        tokens = torch.tensor([i for _, _, many in longer for i in many[:-1]], device=self.device)
        more = self.model(tokens, rest.positions_N, rest, head).tolist()
        for (at, which, _), value in zip(longer, more, strict=True):
            sums[at][which] += value
        return sums

    def _room(self, *, rows: int, length: int, at_least: int = 2) -> Cache:
        """A cache for so many rows and tokens, the one there is where it will do; fewer rows where memory is short."""
        shape, dtype = self.model.shape, self.model.compute_dtype
        length = -(-length // BLOCK) * BLOCK
        held_bytes = 2 * self._cache.k_LRGSD.nbytes if self._cache else 0
        row_bytes = 2 * shape.layers * shape.kv_width * length * dtype.itemsize
        rows = max(at_least, min(rows, _budget_bytes(self.device, held_bytes) // row_bytes))
        if self._cache is None or self._cache.rows < rows or self._cache.length < length:
            self._cache = None  # before the next one is made
            self._cache = Cache.make(shape, rows=rows, length=length, dtype=dtype, device=self.device)
        return self._cache


def _budget_bytes(device: torch.device, held_bytes: int) -> int:
    """What a cache may take: half of what is free on a GPU, the present cache counted as free."""
    return (torch.cuda.mem_get_info(device)[0] + held_bytes) // 2 if device.type == "cuda" else CACHE_BYTES_CPU


def _logits(hidden_NC: Tensor, weight_VC: Tensor) -> Tensor:
    return F.linear(hidden_NC, weight_VC.to(hidden_NC.dtype)).float()


def _logprobs(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> Tensor:
    """Of each target; the logits of all tokens never exist at once."""
    parts = []
    for hidden, targets in zip(hidden_NC.split(LOGIT_ROWS), targets_N.split(LOGIT_ROWS), strict=True):
        logits = _logits(hidden, weight_VC)
        parts.append(logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1))
    return torch.cat(parts)


def _batches(
    items: Sequence[tuple[Prompt, Sequence[Prompt]]], *, rows: int
) -> Iterator[list[tuple[Prompt, Sequence[Prompt]]]]:
    """In order, each with no more rows and tokens than fit."""
    batch: list[tuple[Prompt, Sequence[Prompt]]] = []
    for item in items:
        together = [*batch, item]
        num_rows = sum(1 + len(choices) for _, choices in together)
        num_tokens = max(len(prompt) for prompt, _ in together) * len(together)
        if batch and (num_rows > rows or num_tokens > PREFILL_TOKENS):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
