"""The in-process sampler: many rows in flight, each a completion in the making; one that ends makes room for the next.

A prompt is read once for all its samples, and what all prompts begin with once for all. Where there are kernels the
steps run as recorded CUDA graphs with the draws inside, and the host looks only now and then; elsewhere the same
loop runs step by step. Draws are counted, so neither changes what is drawn.

Legend: R rows in flight, N tokens of a pass, V vocabulary, C hidden width, S tokens a row may write.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor

from flatout.data.tokenizer import Tokenizer
from flatout.model import Decoder, Rectangular
from flatout.sample.cache import BLOCK, READ_TOKENS, Cache, Cached, Rows, Store, logits, logits_after
from flatout.sample.draw import numbered, row_key
from flatout.sample.reader import Reader
from flatout.sample.request import Completion, Keys, Prompt, Sampling, Unfinished
from flatout.sample.state import Chance, State

# A beginning that all prompts share is read once if it is at least so long.
WORTH_SHARING = 16
# Rows of logits that exist at once while likelihoods are summed.
LOGIT_ROWS = 512
# So many ids at the end are enough to see a stop text appear.
STOP_IDS = 24
ROWS = {"cpu": 32, "cuda": 1024}
CACHE_BYTES_CPU = 2 << 30
# Steps between two looks of the host where steps are recorded: few, as rows that have ended go on until it looks; more
# where it must read the words for a stop text.
LOOK, LOOK_AT_WORDS = 4, 16
# New rows are read when this share of the places is free: reading a few prompts costs almost what many cost.
REFILL = 8
# Steps of fewer rows cost the same, and each size is recorded.
FEWEST = 32


@dataclass(kw_only=True)
class _Row(Unfinished):
    length: int  # of the prompt
    written: int = 0  # at the last look
    read: int = 0  # of what is written, looked through for a stop text


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """A step as it was recorded, and what it reads that nobody else may hold."""

    graph: Any
    chance: Chance


@dataclass
class _Flight:
    """Rows in flight: where they keep what they have read, what the device knows of them, and recorded steps."""

    store: Store
    state: State
    places: list[_Row | None]
    recorded: dict[Any, _Recorded] = field(default_factory=dict)
    memory: Any = None  # that recorded steps share: a handle is dead once its last graph is gone

    @property
    def live(self) -> list[int]:
        return [place for place, row in enumerate(self.places) if row is not None]

    def step(self, rows: int, chance: Chance) -> None:
        """One more token of each of the first rows."""
        state = self.state
        logits_RV = self.store.decode(state.token[:rows], state.position[:rows])
        chance.advance(state, logits_RV, state.places[:rows])

    def move(self, source: Sequence[int], to: Sequence[int]) -> None:
        self.store.move(source, to)
        self.state.move(source, to)
        for before, after in zip(source, to, strict=True):
            self.places[after], self.places[before] = self.places[before], None


def no_kernels(device: torch.device) -> str | None:
    """Why generation runs step by step on a device; None where its kernels run."""
    if device.type != "cuda":
        return "kernels are for GPUs"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None if torch.cuda.get_device_capability(device) >= (8, 0) else "kernels begin with SM 8.0"


class Generator:
    """A `Sampler` on our decoder: on its device, in its compute type, with what is attached to it."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, *, rows: int | None = None, kernels: bool | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.window = model.shape.positions
        self.device = model.embedding.device
        self.plain_because = no_kernels(self.device) if kernels is None else None if kernels else "asked for"
        self.kernels = self.plain_because is None
        self._reader = Reader(model, kernels=self.kernels)
        self._rows = rows or ROWS.get(self.device.type, ROWS["cpu"])
        self._cache: Cache | None = None
        self._flight: _Flight | None = None

    @property
    def model(self) -> Decoder:
        return self._reader.model

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, samples: int = 1, first: int = 0, keys: Keys = None
    ) -> Iterator[Completion]:
        waiting: deque[_Row] = deque()
        for i, sample, key in numbered(len(prompts), samples, first=first, keys=keys, seed=sampling.seed):
            row = _Row(prompt=i, sample=sample, key=key, length=len(prompts[i]))
            if not 0 < row.length < self.window:
                row.status = "too_long"
                yield row.done()
            else:
                waiting.append(row)
        self._reader.refresh()
        for rows in self._rounds(prompts, waiting, sampling):
            yield from (row.done() for row in rows if row.status)

    @torch.no_grad()
    def stream(self, prompt: Prompt, *, sampling: Sampling) -> Iterator[int]:
        row = _Row(prompt=0, sample=0, key=row_key(sampling.seed, 0, 0), length=len(prompt))
        self._reader.refresh()
        shown = 0
        for _ in self._rounds([prompt], deque([row]), sampling, watched=True):
            yield from row.ids[shown:]
            shown = len(row.ids)

    @torch.no_grad()
    def likelihoods(self, items: Sequence[tuple[Prompt, Sequence[Prompt]]]) -> list[list[float]]:
        if not items:
            return []
        self._reader.refresh()
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
        self._reader.refresh()
        for sequence in sequences:
            tokens = torch.tensor(sequence, device=self.device)
            targets = tokens[1:]
            positions = torch.arange(len(targets), device=self.device)

            def head(hidden_NC: Tensor, weight_VC: Tensor, targets: Tensor = targets) -> Tensor:
                return _logprobs(hidden_NC, weight_VC, targets)

            yield (-self.model(tokens[:-1], positions, Rectangular(batch=1), head)).tolist()

    def _rounds(
        self, prompts: Sequence[Prompt], waiting: deque[_Row], sampling: Sampling, *, watched: bool = False
    ) -> Iterator[list[_Row]]:
        """After each look, the rows that have ended, or all if they are watched. Out of memory it goes on with half."""
        if self._flight:
            self._flight.places = []  # rows that nobody waited for
        while waiting:
            try:
                yield from self._fly(prompts, waiting, sampling, watched=watched)
            except torch.OutOfMemoryError:
                rows = self._flight.store.rows if self._flight else min(self._rows, len(waiting))
                if rows == 1:
                    raise
            else:
                return
            # Past the handler: what failed, and all it held, is gone. Rows in flight begin anew and write the same.
            unfinished = [row for row in self._flight.places if row and not row.status] if self._flight else []
            waiting.extendleft(replace(row, ids=[], logprobs=[], written=0, read=0) for row in reversed(unfinished))
            self._rows, self._flight, self._cache = rows // 2, None, None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _fly(
        self, prompts: Sequence[Prompt], waiting: deque[_Row], sampling: Sampling, *, watched: bool
    ) -> Iterator[list[_Row]]:
        shared = _common([prompts[row.prompt] for row in waiting])
        flight = self._flight = self._prepared(waiting, sampling, shared=shared)
        flight.store.share(prompts[waiting[0].prompt][:shared])
        known = self.tokenizer.vocab_size
        chance = Chance.of(sampling, known=known, kernel=self.kernels, device=self.device)
        recorded = self.kernels and self.device.type == "cuda"
        look = 1 if watched or not recorded else LOOK_AT_WORDS if sampling.stop_texts else LOOK
        # Without stop tokens nothing ends before its limit: there is nothing to look for until the first does.
        known_end = recorded and not (watched or sampling.stop_ids or sampling.stop_texts)
        enough = max(1, flight.store.rows // REFILL) if recorded else 1
        while waiting or flight.live:
            free = flight.store.rows - len(flight.live)
            refill = free == flight.store.rows or free >= min(enough, len(waiting))
            if not (waiting and refill and self._admit(flight, prompts, waiting, chance, shared=shared)):
                rows, (soonest, left) = self._drawn_up(flight, waiting), self._left(flight, sampling)
                for _ in range(soonest if known_end else min(look, left)):
                    self._step(flight, rows, chance, recorded=recorded)
            ended = self._looked(flight, sampling, watched=watched)
            yield [row for row in flight.places if row] if watched else [row for _, row in ended]
            self._leave(flight, [place for place, _ in ended])

    def _prepared(self, waiting: Sequence[_Row], sampling: Sampling, *, shared: int) -> _Flight:
        """Room for these rows, what there is where it will do; for fewer of them where memory is short."""
        most = max(row.length for row in waiting)
        own = min(sampling.max_tokens, self.window - min(row.length for row in waiting))
        store: Store
        if self.kernels:
            store = self._pool(waiting, own=own, shared=shared)
        else:
            # One row more, the last, holds what all prompts begin with.
            rows = min(len(waiting), self._rows)
            store = Rows(self.model, self._room(rows=rows + 1, length=min(most + own, self.window)), rows=rows)
        flight = self._flight  # not before: it would outlive what `_pool` gives up
        if flight is None or flight.store is not store:
            state = State.make(rows=store.rows, tokens=store.own or own, device=self.device)
            return _Flight(store=store, state=state, places=[None] * store.rows)
        flight.state.alive.zero_()
        flight.places = [None] * store.rows
        return flight

    def _pool(self, waiting: Sequence[_Row], *, own: int, shared: int) -> Store:
        from flatout.sample.pool import Pool

        shape, dtype = self.model.shape, self.model.compute_dtype
        lengths = sorted((len_ - shared for len_ in {row.prompt: row.length for row in waiting}.values()), reverse=True)
        samples = -(-len(waiting) // len(lengths))
        old = self._flight.store if self._flight else None
        token_bytes = 2 * shape.layers * shape.kv_width * dtype.itemsize
        held_bytes = 2 * old.k_LGPD.nbytes if isinstance(old, Pool) else 0
        budget = _budget_bytes(self.device, held_bytes) // token_bytes
        rows = min(_bucket(len(waiting)), self._rows)
        while True:
            # Of the longest prompts, as many as can be in flight at once.
            needed = shared + sum(lengths[: -(-rows // samples) + 1])
            if rows * own + needed <= budget or rows == 1:
                break
            rows = rows * 3 // 4
        if isinstance(old, Pool) and old.fits(rows=rows, own=own, prompts=needed):
            old.tile_for(samples)
            return old
        old = self._flight = None  # before the next one is made
        return Pool(self.model, rows=rows, own=own, prompts=needed, samples=samples)

    def _admit(
        self, flight: _Flight, prompts: Sequence[Prompt], waiting: deque[_Row], chance: Chance, *, shared: int
    ) -> bool:
        """Reads prompts into free places, each once for as many samples of it as there is room for, and draws their
        first tokens. False where the store has no room for another prompt yet."""
        free = [place for place, row in enumerate(flight.places) if row is None]
        taken = list(islice(waiting, len(free)))
        groups = [list(rows) for _, rows in groupby(taken, key=lambda row: row.prompt)]
        places, at = [], iter(free)
        for rows in groups:
            places.append([next(at) for _ in rows])
        logits_PV = flight.store.admit([prompts[rows[0].prompt][shared:] for rows in groups], places)
        count = logits_PV.shape[0]
        assert count or flight.live, "a prompt fits an empty store"
        if not count:
            return False
        fresh = [
            (place, row)
            for many, rows in zip(places, groups[:count], strict=False)
            for place, row in zip(many, rows, strict=True)
        ]
        for place, row in fresh:
            flight.places[place] = row
            waiting.popleft()
        where = torch.tensor([place for place, _ in fresh], device=self.device)
        flight.state.begin(
            where,
            keys=[row.key for _, row in fresh],
            lengths=[row.length for _, row in fresh],
            limits=[min(chance.sampling.max_tokens, self.window - row.length) for _, row in fresh],
        )
        which = [i for i, rows in enumerate(groups[:count]) for _ in rows]
        chance.advance(flight.state, logits_PV[torch.tensor(which, device=self.device)], where)
        return True

    def _drawn_up(self, flight: _Flight, waiting: Sequence[_Row]) -> int:
        """How many of the first places the next steps run; rows close up where that makes them fewer."""
        live = flight.live
        if not flight.store.holes:
            return len(live)
        rows = flight.store.rows
        now, then = (min(max(FEWEST, _bucket(count)), rows) for count in (live[-1] + 1, len(live)))
        if waiting or then == now:
            return now
        self._close_up(flight)
        return then

    def _close_up(self, flight: _Flight) -> None:
        live = flight.live
        holes = [place for place in range(len(live)) if flight.places[place] is None]
        if holes:
            flight.move(live[-len(holes) :], holes)

    def _left(self, flight: _Flight, sampling: Sampling) -> tuple[int, int]:
        """Steps until the first row must have ended, and the last."""
        rows = [row for row in flight.places if row]
        left = [min(sampling.max_tokens, self.window - row.length) - row.written for row in rows]
        return min(left), max(left)

    def _step(self, flight: _Flight, rows: int, chance: Chance, *, recorded: bool) -> None:
        if not recorded:
            flight.step(rows, chance)
            return
        # What is baked into a graph; lengths, limits and seeds are read from the device.
        asked = chance.sampling
        cut = (asked.temperature, asked.top_p, asked.top_k, asked.min_tokens, asked.stop_ids)
        key = (rows, flight.store.layout, cut)
        if key in flight.recorded:
            flight.recorded[key].graph.replay()
            return
        # This step as it is, which also compiles what it needs; the same is then recorded for those to come.
        flight.step(rows, chance)
        graph = torch.cuda.CUDAGraph()
        flight.memory = flight.memory or torch.cuda.graph_pool_handle()
        # Other threads, a feed's above all, go on with copies of their own.
        with torch.cuda.graph(graph, pool=flight.memory, capture_error_mode="thread_local"):
            flight.step(rows, chance)
        flight.recorded[key] = _Recorded(graph=graph, chance=chance)

    def _looked(self, flight: _Flight, sampling: Sampling, *, watched: bool) -> list[tuple[int, _Row]]:
        """The rows that have ended, with what they have written. The one wait for the device."""
        state, live = flight.state, flight.live
        if not live:
            return []
        alive, counts = torch.stack((state.alive, state.count))[:, : live[-1] + 1].tolist()
        rows = [(place, row) for place in live if (row := flight.places[place])]
        for place, row in rows:
            row.written = counts[place]
        read = rows if watched else self._suspects(rows, state, sampling) if sampling.stop_texts else []
        self._fetch(read, state)
        for place, row in read:
            if self._cut_at_stop_text(row, sampling):
                alive[place] = 0
        ended = [(place, row) for place, row in rows if not alive[place]]
        fetched = {place for place, _ in read}
        self._fetch([(place, row) for place, row in ended if place not in fetched], state)
        for _, row in ended:
            stopped = row.status or row.ids[-1] in sampling.stop_ids
            row.status = "stopped" if stopped else "length"
        return ended

    def _suspects(self, rows: Sequence[tuple[int, _Row]], state: State, sampling: Sampling) -> list[tuple[int, _Row]]:
        """Rows whose newest words have a stop text among them: only those are fetched whole."""
        width = min(state.tokens, LOOK_AT_WORDS + STOP_IDS)
        count = rows[-1][0] + 1
        first = (state.count[:count] - width).clamp(min=0)
        tails = state.ids_RS[:count].gather(1, first[:, None] + torch.arange(width, device=self.device)).tolist()
        found = []
        for place, row in rows:
            text = self.tokenizer.decode(tails[place][: row.written])
            if any(stop in text for stop in sampling.stop_texts):
                found.append((place, row))
            else:
                row.read = row.written
        return found

    def _fetch(self, rows: Sequence[tuple[int, _Row]], state: State) -> None:
        """What rows have written so far."""
        if not rows:
            return
        where = torch.tensor([place for place, _ in rows], device=self.device)
        most = max(row.written for _, row in rows)
        ids, logprobs = state.ids_RS[where, :most].tolist(), state.logprobs_RS[where, :most].tolist()
        for (_, row), row_ids, row_logprobs in zip(rows, ids, logprobs, strict=True):
            row.ids, row.logprobs = row_ids[: row.written], row_logprobs[: row.written]

    def _cut_at_stop_text(self, row: _Row, sampling: Sampling) -> bool:
        """Whether a stop text was written since the last look; the row then ends where it was complete."""
        begun, row.read = row.read, len(row.ids)

        def stops(first: int, end: int) -> bool:
            text = self.tokenizer.decode(row.ids[max(0, first) : end])
            return any(stop in text for stop in sampling.stop_texts)

        if not sampling.stop_texts or not stops(begun + 1 - STOP_IDS, len(row.ids)):
            return False
        for end in range(max(begun + 1, sampling.min_tokens), len(row.ids) + 1):
            if stops(end - STOP_IDS, end):
                row.ids, row.logprobs, row.status = row.ids[:end], row.logprobs[:end], "stopped"
                return True
        return False

    def _leave(self, flight: _Flight, places: Sequence[int]) -> None:
        if not places:
            return
        flight.state.end(places)
        flight.store.leave(places)
        for place in places:
            flight.places[place] = None
        if not flight.store.holes and flight.live:
            self._close_up(flight)

    def _likelihoods(self, batch: Sequence[tuple[Prompt, Sequence[Prompt]]], cache: Cache) -> list[list[float]]:
        """Each prompt is read once; its continuations go on from copies of its row."""
        lengths = [len(prompt) for prompt, _ in batch]
        attend = Cached(cache, first=0, lengths=lengths, starts=[0] * len(batch), block=BLOCK)
        first_RV = _logits(self.model, [i for prompt, _ in batch for i in prompt], attend).log_softmax(-1)
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


def _bucket(rows: int) -> int:
    """A few sizes for all numbers of rows: powers of two."""
    return 1 << (rows - 1).bit_length()


def _common(prompts: Sequence[Prompt]) -> int:
    """How many tokens all prompts begin with; 0 where reading them once would not pay."""
    # The first and the last in order differ where any two do.
    first, last = min(map(list, prompts)), max(map(list, prompts))
    # Each prompt keeps a token of its own, whose logits are wanted.
    most = min(map(len, prompts)) - 1
    shared = next((at for at in range(most) if first[at] != last[at]), most)
    return 0 if shared < WORTH_SHARING or first == last else shared


def _logits(model: Decoder, tokens: Sequence[int], attend: Cached) -> Tensor:
    """After the last token of each row."""
    ids = torch.tensor(tokens, device=attend.positions_N.device)
    return logits_after(model, ids, attend.positions_N, attend, attend.last_R)


def _logprobs(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> Tensor:
    """Of each target; the logits of all tokens never exist at once."""
    parts = []
    for hidden, targets in zip(hidden_NC.split(LOGIT_ROWS), targets_N.split(LOGIT_ROWS), strict=True):
        found = logits(hidden, weight_VC)
        parts.append(found.gather(-1, targets[:, None])[:, 0] - found.logsumexp(-1))
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
        if batch and (num_rows > rows or num_tokens > READ_TOKENS):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
