"""Finds the fastest micro-batch on this device by trying a few (`plan.micro_batch: auto`).

Each candidate runs real forward and backward passes over the longest sequences, with gradients allocated as in a real
step. A candidate that does not fit is skipped. The batch of a step stays as configured, and no weight, scale or random
state that a step uses is changed. Results are stored in the user's cache folder.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flatout import __version__, files
from flatout.data.stream import Batch
from flatout.engine.faults import is_out_of_memory
from flatout.engine.ranks import Ranks
from flatout.engine.step import Engine
from flatout.errors import RunFailed, UsageError
from flatout.files import BadFile, write_atomic
from flatout.plan import Plan

# Decided before the search, and fixed in the engine that it tries.
KEPT = ("recompute", "graphs", "fp8")
# Timed passes per candidate, seconds after which no further one is tried, and the tolerance for equal speed.
PASSES, BUDGET_S, NEAR = 3, 50.0, 0.99
# A file of the cache has a few hundred bytes.
CACHE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Trial:
    micro_batch: int
    tokens_per_s: float | None  # None: it did not fit
    first_s: float  # of the first pass, which compiles


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """A cached search result; `key` identifies its case."""

    key: str
    trials: tuple[Trial, ...]


def candidates(plan: Plan) -> list[int]:
    """The predicted size, then its neighbours: twice as large if memory may allow it, and smaller ones."""
    sequences, predicted = plan.job.rank_sequences, plan.decisions.micro_batch
    sizes = [n for n in range(1, sequences + 1) if sequences % n == 0]
    larger = [n for n in sizes if predicted < n <= 2 * predicted and _may_fit(plan, n)][-1:]
    if plan.decisions.graphs:
        larger = []  # without CUDA graphs it would only hide the host better, and with them it would take more memory
    smaller = [next((n for n in reversed(sizes) if n <= predicted // part), None) for part in (2, 4)]
    return [predicted, *larger, *(n for n in dict.fromkeys(smaller) if n is not None)]


def search(engine: Engine, plan: Plan, ranks: Ranks, batch_of: Callable[[int], Batch]) -> list[Trial]:
    """Tries the candidates on all ranks; if none fits, halves the smallest until one does."""
    trials: list[Trial] = []
    began = time.perf_counter()
    waiting = candidates(plan)
    while waiting:
        size = waiting.pop(0)
        trial = _try(engine, batch_of, size, ranks)
        trials.append(trial)
        if not waiting and not _fitting(trials) and size > 1:
            waiting.append(_half(plan, size))
        spent = time.perf_counter() - began - sum(t.first_s for t in trials)
        if ranks.any(spent > BUDGET_S) and _fitting(trials):
            break
    if not _fitting(trials):
        raise RunFailed("not even one sequence fits into this device's memory: shorten data.sequence_length")
    return trials


def chosen(trials: Sequence[Trial]) -> Trial:
    """The smallest of those as fast as the fastest: free memory is more useful than a percent of speed."""
    fitting = _fitting(trials)
    best = max(trial.tokens_per_s or 0.0 for trial in fitting)
    return min((t for t in fitting if (t.tokens_per_s or 0.0) >= NEAR * best), key=lambda t: t.micro_batch)


def key_of(plan: Plan) -> str:
    """A key over everything that the result depends on."""
    loose = ("micro_batch", "accumulation", "loss_chunk", "workers", "prefetch", "pin_memory", "manual_gc")
    facts = {
        "versions": [__version__, str(torch.__version__)],
        "device": [plan.job.hardware.name, plan.job.hardware.memory_gib],
        "shape": plan.job.shape.to_json(),
        "adapters": None if plan.job.adapters is None else asdict(plan.job.adapters),
        "job": [plan.job.sequence_length, plan.job.rank_sequences, plan.job.num_ranks, plan.job.packing],
        "decisions": {k: v for k, v in asdict(plan.decisions).items() if k not in loose},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def remembered(folder: Path, key: str) -> list[Trial] | None:
    """The result of an earlier search; None if there is none, or its file is not valid."""
    path = folder / f"{key[:32]}.json"
    try:
        found = files.typed(Remembered, files.read_json(path, limit=CACHE_BYTES), source=path)
    except (OSError, BadFile):
        return None
    trials = list(found.trials)
    return trials if found.key == key and _fitting(trials) and all(map(_possible, trials)) else None


def remember(folder: Path, key: str, trials: Sequence[Trial]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.sweep(folder)
        write_atomic(
            folder / f"{key[:32]}.json", json.dumps(asdict(Remembered(key=key, trials=tuple(trials)))).encode()
        )
    except OSError:
        return  # without a writable cache, the next run searches again


def longest(batch: Batch) -> Batch:
    """The same tokens as one document per sequence: the most attention work for a batch of this shape."""
    if batch.cu_seqlens is None:
        return batch
    tokens, length = batch.tokens.numel(), batch.sequence_length
    ends = torch.full_like(batch.cu_seqlens, tokens)
    whole = torch.arange(0, tokens + 1, length, dtype=ends.dtype)
    ends[: len(whole)] = whole
    positions = torch.arange(length).repeat(batch.num_sequences)
    return replace(batch, cu_seqlens=ends, positions=positions, longest=None)


def fitted(plan: Plan, trials: Sequence[Trial], *, size: int, source: str) -> Plan:
    """The plan with the size that was found, and the reason."""
    kept = {name: getattr(plan.decisions, name) for name in KEPT}
    found = plan.with_pins(micro_batch=size, **kept)
    speeds = {trial.micro_batch: trial.tokens_per_s for trial in trials}
    others = [f"{n}: {f'{speed:,.0f}' if speed else 'did not fit'}" for n, speed in speeds.items() if n != size]
    how = "without CUDA graphs" if plan.decisions.graphs else "forward and backward"
    reason = f"{speeds[size]:,.0f} tokens/s {how}, {source}" + (f" ({', '.join(others)})" if others else "")
    reasons = {name: plan.reasons[name] for name in KEPT}
    return replace(found, reasons={**found.reasons, **reasons, "micro_batch": reason})


def _try(engine: Engine, batch_of: Callable[[int], Batch], size: int, ranks: Ranks) -> Trial:
    seconds, first_s, short = None, 0.0, False
    try:
        batch = longest(batch_of(size))
        start = time.perf_counter()
        engine.trial_pass(batch)
        engine.wait()
        first_s = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(PASSES):
            engine.trial_pass(batch)
        engine.wait()
        seconds = (time.perf_counter() - start) / PASSES
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        short = True
    engine.forget()
    gc.collect()
    if ranks.any(short) or seconds is None:
        return Trial(micro_batch=size, tokens_per_s=None, first_s=first_s)
    tokens = size * batch.sequence_length * ranks.world
    return Trial(micro_batch=size, tokens_per_s=tokens / seconds, first_s=max(0.0, first_s - seconds))


def _possible(trial: Trial) -> bool:
    speed = 1.0 if trial.tokens_per_s is None else trial.tokens_per_s
    return trial.micro_batch >= 1 and 0 < speed < math.inf and 0 <= trial.first_s < math.inf


def _fitting(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.tokens_per_s is not None]


def _half(plan: Plan, size: int) -> int:
    return next(n for n in range(size // 2, 0, -1) if plan.job.rank_sequences % n == 0)


def _may_fit(plan: Plan, size: int) -> bool:
    total = plan.job.hardware.memory_gib
    if total is None:
        return False
    pins: dict[str, Any] = {"micro_batch": size, "recompute": plan.decisions.recompute}
    try:
        return plan.with_pins(**pins).predicted.peak_gib <= plan.decisions.memory_fraction * total
    except UsageError:  # the plan already knows that it does not fit
        return False
