"""The in-process sampler, with continuous batching: many concurrent sequences, and each that ends frees its place.

A prompt is prefilled once for all its samples, and the common prefix of all prompts once in total. With kernels the
steps run as CUDA graphs that include the sampling, and the host checks only at intervals; otherwise the same loop runs
step by step. Random numbers depend only on the position, so both generate the same tokens.

Legend: R concurrent rows, N tokens of a pass, V vocabulary, C hidden width, S tokens a row may generate.
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
from flatout.model import Decoder
from flatout.model.attention import over_sequences
from flatout.sample.cache import BLOCK, READ_TOKENS, Cache, Cached, Rows, Store, logits, logits_after
from flatout.sample.draw import numbered, row_key
from flatout.sample.reader import Reader
from flatout.sample.request import Completion, Keys, Prompt, Sampling, Unfinished, Watch, unwatched
from flatout.sample.state import State, TokenSampler

# A common prefix of all prompts is prefilled once if it has at least this many tokens.
SHORTEST_SHARED = 16
# Rows of logits that exist at once while likelihoods are summed.
LOGIT_ROWS = 512
# The number of last ids that is enough to detect a stop text.
STOP_IDS = 24
ROWS = {"cpu": 32, "cuda": 1024}
CACHE_BYTES_CPU = 2 << 30
# Steps between two checks of the host with CUDA graphs: few, because ended rows run on until the check; more if it must
# decode text to find a stop text.
CHECK, CHECK_TEXT = 4, 16
# New rows are admitted when one in this many places is free: prefilling few prompts costs almost as much as many.
REFILL = 8
# Steps of fewer rows cost the same, and each size has its own CUDA graph.
FEWEST = 32


@dataclass(kw_only=True)
class _Row(Unfinished):
    length: int  # of the prompt
    generated: int = 0  # tokens generated at the last check
    read: int = 0  # tokens already searched for a stop text


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """A CUDA graph of a step, and the tensors it reads that nothing else keeps alive."""

    graph: Any
    sampler: TokenSampler


@dataclass
class _Running:
    """The concurrent rows: their KV store, their state on the device, and the CUDA graphs of steps."""

    store: Store
    state: State
    places: list[_Row | None]
    recorded: dict[Any, _Recorded] = field(default_factory=dict)
    memory: Any = None  # shared by all graphs; the handle is invalid once its last graph is freed

    @property
    def live(self) -> list[int]:
        return [place for place, row in enumerate(self.places) if row is not None]

    def step(self, rows: int, sampler: TokenSampler) -> None:
        """Generates one more token in each of the first rows."""
        state = self.state
        logits_RV = self.store.decode(state.token[:rows], state.position[:rows])
        sampler.advance(state, logits_RV, state.places[:rows])

    def move(self, source: Sequence[int], to: Sequence[int]) -> None:
        self.store.move(source, to)
        self.state.move(source, to)
        for before, after in zip(source, to, strict=True):
            self.places[after], self.places[before] = self.places[before], None


def no_kernels(device: torch.device) -> str | None:
    """Why generation runs without kernels on a device; None if they run."""
    if device.type != "cuda":
        return "the kernels need a GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None if torch.cuda.get_device_capability(device) >= (8, 0) else "the kernels need SM 8.0 or newer"


class Generator:
    """A `Sampler` on our decoder, on its device, in its compute type, with its adapters."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        rows: int | None = None,
        kernels: bool | None = None,
        watch: Watch = unwatched,
    ) -> None:
        self.tokenizer, self._watch = tokenizer, watch
        self.window = model.shape.positions
        self.device = model.embedding.device
        self.plain_because = no_kernels(self.device) if kernels is None else None if kernels else "requested"
        self.kernels = self.plain_because is None
        self._reader = Reader(model, kernels=self.kernels)
        self._rows = rows or ROWS.get(self.device.type, ROWS["cpu"])
        self._cache: Cache | None = None
        self._running: _Running | None = None

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
        self._watch("sync")
        self._reader.refresh()
        self._watch("generate")
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

            attend = over_sequences(self.model.shape, batch=1)
            yield (-self.model(tokens[:-1], positions, attend, head)).tolist()

    def _rounds(
        self, prompts: Sequence[Prompt], waiting: deque[_Row], sampling: Sampling, *, watched: bool = False
    ) -> Iterator[list[_Row]]:
        """Yields the ended rows after each check, or all if `watched`. Out of memory, it retries with half the rows."""
        if self._running:
            self._running.places = []  # rows that the caller abandoned
        while waiting:
            try:
                yield from self._run(prompts, waiting, sampling, watched=watched)
            except torch.OutOfMemoryError:
                rows = self._running.store.rows if self._running else min(self._rows, len(waiting))
                if rows == 1:
                    raise
            else:
                return
            # After the handler, all memory of the failed pass is free. Unfinished rows restart, with the same tokens.
            unfinished = [row for row in self._running.places if row and not row.status] if self._running else []
            waiting.extendleft(replace(row, ids=[], logprobs=[], generated=0, read=0) for row in reversed(unfinished))
            self._rows, self._running, self._cache = rows // 2, None, None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _run(
        self, prompts: Sequence[Prompt], waiting: deque[_Row], sampling: Sampling, *, watched: bool
    ) -> Iterator[list[_Row]]:
        shared = _common([prompts[row.prompt] for row in waiting])
        running = self._running = self._prepared(waiting, sampling, shared=shared)
        running.store.share(prompts[waiting[0].prompt][:shared])
        known = self.tokenizer.vocab_size
        sampler = TokenSampler.of(sampling, known=known, kernel=self.kernels, device=self.device)
        recorded = self.kernels and self.device.type == "cuda"
        interval = 1 if watched or not recorded else CHECK_TEXT if sampling.stop_texts else CHECK
        # Without stop tokens no row ends before its limit, so no check is needed until the first one ends.
        known_end = recorded and not (watched or sampling.stop_ids or sampling.stop_texts)
        enough = max(1, running.store.rows // REFILL) if recorded else 1
        while waiting or running.live:
            free = running.store.rows - len(running.live)
            refill = free == running.store.rows or free >= min(enough, len(waiting))
            if not (waiting and refill and self._admit(running, prompts, waiting, sampler, shared=shared)):
                rows, (soonest, left) = self._rows_to_run(running, waiting), self._left(running, sampling)
                for _ in range(soonest if known_end else min(interval, left)):
                    self._step(running, rows, sampler, recorded=recorded)
            ended = self._check(running, sampling, watched=watched)
            yield [row for row in running.places if row] if watched else [row for _, row in ended]
            self._release(running, [place for place, _ in ended])

    def _prepared(self, waiting: Sequence[_Row], sampling: Sampling, *, shared: int) -> _Running:
        """A store and state for these rows, reused if large enough; for fewer rows if memory is short."""
        most = max(row.length for row in waiting)
        own = min(sampling.max_tokens, self.window - min(row.length for row in waiting))
        store: Store
        if self.kernels:
            store = self._pool(waiting, own=own, shared=shared)
        else:
            # One extra row, the last, holds the common prefix of all prompts.
            rows = min(len(waiting), self._rows)
            store = Rows(self.model, self._room(rows=rows + 1, length=min(most + own, self.window)), rows=rows)
        running = self._running  # not earlier: it would keep alive a pool that `_pool` drops
        if running is None or running.store is not store:
            state = State.make(rows=store.rows, tokens=store.own or own, device=self.device)
            return _Running(store=store, state=state, places=[None] * store.rows)
        running.state.alive.zero_()
        running.places = [None] * store.rows
        return running

    def _pool(self, waiting: Sequence[_Row], *, own: int, shared: int) -> Store:
        from flatout.sample.pool import Pool

        shape, dtype = self.model.shape, self.model.compute_dtype
        lengths = sorted((len_ - shared for len_ in {row.prompt: row.length for row in waiting}.values()), reverse=True)
        samples = -(-len(waiting) // len(lengths))
        old = self._running.store if self._running else None
        token_bytes = 2 * shape.layers * shape.kv_width * dtype.itemsize
        held_bytes = 2 * old.k_LGPD.nbytes if isinstance(old, Pool) else 0
        budget = _budget_bytes(self.device, held_bytes) // token_bytes
        rows = min(_bucket(len(waiting)), self._rows)
        while True:
            # The longest prompts, as many as can be concurrent.
            needed = shared + sum(lengths[: -(-rows // samples) + 1])
            if rows * own + needed <= budget or rows == 1:
                break
            rows = rows * 3 // 4
        if isinstance(old, Pool) and old.fits(rows=rows, own=own, prompts=needed):
            old.tile_for(samples)
            return old
        old = self._running = None  # freed before the next one is allocated
        # Room for longer prompts in later calls: a new pool needs new CUDA graphs.
        prompts = min(_bucket(needed), max(needed, budget - rows * own))
        return Pool(self.model, rows=rows, own=own, prompts=prompts, samples=samples)

    def _admit(
        self, running: _Running, prompts: Sequence[Prompt], waiting: deque[_Row], sampler: TokenSampler, *, shared: int
    ) -> bool:
        """Prefills prompts into free places, each once for as many of its samples as fit, and samples their first
        tokens. False if the store cannot hold another prompt yet."""
        free = [place for place, row in enumerate(running.places) if row is None]
        taken = list(islice(waiting, len(free)))
        groups = [list(rows) for _, rows in groupby(taken, key=lambda row: row.prompt)]
        places, at = [], iter(free)
        for rows in groups:
            places.append([next(at) for _ in rows])
        logits_PV = running.store.admit([prompts[rows[0].prompt][shared:] for rows in groups], places)
        count = logits_PV.shape[0]
        assert count or running.live, "a prompt fits an empty store"
        if not count:
            return False
        fresh = [
            (place, row)
            for many, rows in zip(places, groups[:count], strict=False)
            for place, row in zip(many, rows, strict=True)
        ]
        for place, row in fresh:
            running.places[place] = row
            waiting.popleft()
        where = torch.tensor([place for place, _ in fresh], device=self.device)
        running.state.begin(
            where,
            keys=[row.key for _, row in fresh],
            lengths=[row.length for _, row in fresh],
            limits=[min(sampler.sampling.max_tokens, self.window - row.length) for _, row in fresh],
        )
        which = [i for i, rows in enumerate(groups[:count]) for _ in rows]
        sampler.advance(running.state, logits_PV[torch.tensor(which, device=self.device)], where)
        return True

    def _rows_to_run(self, running: _Running, waiting: Sequence[_Row]) -> int:
        """How many of the first places the next steps run; rows are compacted if that makes them fewer."""
        live = running.live
        if not running.store.gaps:
            return len(live)
        rows = running.store.rows
        now, then = (min(max(FEWEST, _bucket(count)), rows) for count in (live[-1] + 1, len(live)))
        if waiting or then == now:
            return now
        self._compact(running)
        return then

    def _compact(self, running: _Running) -> None:
        live = running.live
        gaps = [place for place in range(len(live)) if running.places[place] is None]
        if gaps:
            running.move(live[-len(gaps) :], gaps)

    def _left(self, running: _Running, sampling: Sampling) -> tuple[int, int]:
        """Steps until the first row reaches its limit, and until the last does."""
        rows = [row for row in running.places if row]
        left = [min(sampling.max_tokens, self.window - row.length) - row.generated for row in rows]
        return min(left), max(left)

    def _step(self, running: _Running, rows: int, sampler: TokenSampler, *, recorded: bool) -> None:
        if not recorded:
            running.step(rows, sampler)
            return
        # Settings that are fixed in a graph; lengths, limits and seeds are read from the device.
        settings = sampler.sampling
        cut = (settings.temperature, settings.top_p, settings.top_k, settings.min_tokens, settings.stop_ids)
        key = (rows, running.store.layout, cut)
        if key in running.recorded:
            running.recorded[key].graph.replay()
            return
        # This step runs without a graph, which also compiles its kernels; the step is then captured for later ones.
        running.step(rows, sampler)
        graph = torch.cuda.CUDAGraph()
        running.memory = running.memory or torch.cuda.graph_pool_handle()
        # Other threads, such as a feed's, may copy during the capture.
        with torch.cuda.graph(graph, pool=running.memory, capture_error_mode="thread_local"):
            running.step(rows, sampler)
        running.recorded[key] = _Recorded(graph=graph, sampler=sampler)

    def _check(self, running: _Running, sampling: Sampling, *, watched: bool) -> list[tuple[int, _Row]]:
        """The rows that have ended, with their tokens. The only wait for the device."""
        state, live = running.state, running.live
        if not live:
            return []
        alive, counts = torch.stack((state.alive, state.count))[:, : live[-1] + 1].tolist()
        rows = [(place, row) for place in live if (row := running.places[place])]
        for place, row in rows:
            row.generated = counts[place]
        read = rows if watched else self._with_stop_text(rows, state, sampling) if sampling.stop_texts else []
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

    def _with_stop_text(
        self, rows: Sequence[tuple[int, _Row]], state: State, sampling: Sampling
    ) -> list[tuple[int, _Row]]:
        """Rows with a stop text among their newest tokens: only those are fetched whole."""
        width = min(state.tokens, CHECK_TEXT + STOP_IDS)
        count = rows[-1][0] + 1
        first = (state.count[:count] - width).clamp(min=0)
        tails = state.ids_RS[:count].gather(1, first[:, None] + torch.arange(width, device=self.device)).tolist()
        found = []
        for place, row in rows:
            text = self.tokenizer.decode(tails[place][: row.generated])
            if any(stop in text for stop in sampling.stop_texts):
                found.append((place, row))
            else:
                row.read = row.generated
        return found

    def _fetch(self, rows: Sequence[tuple[int, _Row]], state: State) -> None:
        """Fetches the tokens that rows have generated so far."""
        if not rows:
            return
        where = torch.tensor([place for place, _ in rows], device=self.device)
        most = max(row.generated for _, row in rows)
        ids, logprobs = state.ids_RS[where, :most].tolist(), state.logprobs_RS[where, :most].tolist()
        for (_, row), row_ids, row_logprobs in zip(rows, ids, logprobs, strict=True):
            row.ids, row.logprobs = row_ids[: row.generated], row_logprobs[: row.generated]

    def _cut_at_stop_text(self, row: _Row, sampling: Sampling) -> bool:
        """Whether a stop text appeared since the last check; the row then ends where the stop text is complete."""
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

    def _release(self, running: _Running, places: Sequence[int]) -> None:
        if not places:
            return
        running.state.end(places)
        running.store.release(places)
        for place in places:
            running.places[place] = None
        if not running.store.gaps and running.live:
            self._compact(running)

    def _likelihoods(self, batch: Sequence[tuple[Prompt, Sequence[Prompt]]], cache: Cache) -> list[list[float]]:
        """Each prompt is prefilled once; its continuations start from copies of its row."""
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
        """A cache for these rows and tokens, reused if large enough; with fewer rows if memory is short."""
        shape, dtype = self.model.shape, self.model.compute_dtype
        length = -(-length // BLOCK) * BLOCK
        held_bytes = 2 * self._cache.k_LRGSD.nbytes if self._cache else 0
        row_bytes = 2 * shape.layers * shape.kv_width * length * dtype.itemsize
        rows = max(at_least, min(rows, _budget_bytes(self.device, held_bytes) // row_bytes))
        if self._cache is None or self._cache.rows < rows or self._cache.length < length:
            self._cache = None  # freed before the next one is allocated
            self._cache = Cache.make(shape, rows=rows, length=length, dtype=dtype, device=self.device)
        return self._cache


def _budget_bytes(device: torch.device, held_bytes: int) -> int:
    """The most bytes for a cache: half of the free memory on a GPU, where the present cache counts as free."""
    return (torch.cuda.mem_get_info(device)[0] + held_bytes) // 2 if device.type == "cuda" else CACHE_BYTES_CPU


def _bucket(rows: int) -> int:
    """Rounds the number of rows up to a power of two, so that there are few sizes."""
    return 1 << (rows - 1).bit_length()


def _common(prompts: Sequence[Prompt]) -> int:
    """The length of the common prefix of all prompts; 0 if it is too short to share."""
    # In sorted order, the first and the last have the shortest common prefix.
    first, last = min(map(list, prompts)), max(map(list, prompts))
    # Each prompt keeps at least one token of its own, whose logits are needed.
    most = min(map(len, prompts)) - 1
    shared = next((at for at in range(most) if first[at] != last[at]), most)
    return 0 if shared < SHORTEST_SHARED or first == last else shared


def _logits(model: Decoder, tokens: Sequence[int], attend: Cached) -> Tensor:
    """The logits after the last token of each row."""
    ids = torch.tensor(tokens, device=attend.positions_N.device)
    return logits_after(model, ids, attend.positions_N, attend, attend.last_R)


def _logprobs(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> Tensor:
    """The log-probability of each target, without the logits of all tokens at once."""
    parts = []
    for hidden, targets in zip(hidden_NC.split(LOGIT_ROWS), targets_N.split(LOGIT_ROWS), strict=True):
        found = logits(hidden, weight_VC)
        parts.append(found.gather(-1, targets[:, None])[:, 0] - found.logsumexp(-1))
    return torch.cat(parts)


def _batches(
    items: Sequence[tuple[Prompt, Sequence[Prompt]]], *, rows: int
) -> Iterator[list[tuple[Prompt, Sequence[Prompt]]]]:
    """Batches in order, each with no more rows and tokens than fit."""
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
