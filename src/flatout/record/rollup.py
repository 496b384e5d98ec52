"""Summaries of 256 steps each, so that a run of a million steps opens at once (`watch`, `report`, `compare`).

A roll-up covers a byte range of steps.jsonl with one attempt and increasing steps, all of them or none under the
profiler; a resume or a rollback starts a new one. So the lines that a later attempt replaced are known without
reading them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout.errors import UsageError
from flatout.files import Count, Finite, typed, write_atomic
from flatout.record.lines import Line, encode, read_lines
from flatout.record.records import StepRecord, step_from_json, training_s

STEPS_PER_ROLLUP = 256
# A loss beyond this has overflowed any sum: it counts as not finite.
LARGEST_LOSS = 1e100


@dataclass(frozen=True, kw_only=True)
class Rollup:
    """At most 256 consecutive lines of steps.jsonl: sums, and means and peaks where a sum says nothing."""

    attempt: Count
    first_step: Count
    last_step: Count
    num_steps: Count
    start_byte: Count
    end_byte: Count
    first_time: Finite
    last_time: Finite
    seconds: Finite
    fastest_s: Finite  # the shortest and the longest step, training only
    slowest_s: Finite
    tokens: Count
    padded_tokens: Count
    loss: float | None  # mean of the finite ones, then their range
    loss_low: float | None
    loss_high: float | None
    num_non_finite: Count  # losses that were NaN or infinite
    spans: Mapping[str, Finite]  # seconds by phase; by role/phase where the role is not "train"
    memory: Mapping[str, Finite]  # highest
    utilisation: Mapping[str, Finite]  # mean
    extra: Mapping[str, float]  # mean of the finite numbers

    @property
    def phases(self) -> Mapping[str, float]:
        return self.spans

    @property
    def training_s(self) -> float:
        return training_s(self.seconds, self.spans)

    @property
    def profiled(self) -> bool:
        return self.extra.get("profiled") == 1.0

    @property
    def training_tokens(self) -> float:
        """Those of the steps whose time counts: without the steps under the profiler."""
        return self.tokens * (1.0 - self.extra.get("profiled", 0.0))

    @property
    def whole(self) -> bool:
        """Whether its numbers are consistent."""
        losses = (self.loss_low, self.loss, self.loss_high)
        return (
            0 < self.num_steps <= min(STEPS_PER_ROLLUP, self.last_step - self.first_step + 1)
            and self.start_byte < self.end_byte
            and 0 < self.fastest_s <= self.slowest_s
            and (losses == (None, None, None) or (None not in losses and self.num_non_finite < self.num_steps))
            and all(abs(loss) <= LARGEST_LOSS for loss in losses if loss is not None)
        )


@dataclass(frozen=True)
class _Step:
    record: StepRecord
    start_byte: int
    end_byte: int


class Blocks:
    """Groups steps into roll-ups as they arrive; used by the recorder and by readers that rebuild them."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def add(self, record: StepRecord, *, start_byte: int, end_byte: int) -> list[Rollup]:
        """The roll-ups that this step completes."""
        done = []
        if self._steps:
            last = self._steps[-1].record
            other = record.attempt != last.attempt or record.profiled != last.profiled
            if other or record.step <= last.step:
                done += self.close()
        self._steps.append(_Step(record, start_byte, end_byte))
        if len(self._steps) == STEPS_PER_ROLLUP:
            done += self.close()
        return done

    def close(self) -> list[Rollup]:
        """The remaining steps, as a shorter roll-up."""
        steps, self._steps = self._steps, []
        return [_summary(steps)] if steps else []


def saved(path: Path, *, steps_path: Path) -> list[Rollup]:
    """The saved roll-ups that agree with the steps; an empty list if the last one does not."""
    found: list[Rollup] = []
    try:
        for line in read_lines(path):
            rollup = typed(Rollup, line.value, source=line.place)
            if not rollup.whole or rollup.start_byte != (found[-1].end_byte if found else 0):
                break
            found.append(rollup)
        return found if not found or _agrees(found[-1], steps_path) else []
    except UsageError:
        return []  # damaged or from another version: rebuilt from the steps


def following(rollups: Sequence[Rollup], *, steps_path: Path) -> tuple[list[Rollup], list[Rollup]]:
    """Of the steps after `rollups`: the complete roll-ups, and the one still growing."""
    blocks, complete = Blocks(), []
    for line in read_lines(steps_path, start_byte=rollups[-1].end_byte if rollups else 0):
        complete += blocks.add(step_of(line), start_byte=line.start_byte, end_byte=line.end_byte)
    return complete, blocks.close()


def save(path: Path, rollups: Iterable[Rollup]) -> None:
    write_atomic(path, b"".join(encode(asdict(rollup)) for rollup in rollups))


def still_valid(rollups: Sequence[Rollup]) -> Iterator[tuple[Rollup, int | None]]:
    """Each roll-up that still counts, with the step from which a later one replaces it (None: not at all)."""
    kept: list[tuple[Rollup, int | None]] = []
    overtaken_at: int | None = None
    for rollup in reversed(rollups):
        if overtaken_at is None or rollup.first_step < overtaken_at:
            kept.append((rollup, overtaken_at))
            overtaken_at = rollup.first_step
    return reversed(kept)


def steps_of(rollup: Rollup, *, steps_path: Path, before_step: int | None = None) -> Iterator[StepRecord]:
    for line in read_lines(steps_path, start_byte=rollup.start_byte, end_byte=rollup.end_byte):
        record = step_of(line)
        if before_step is not None and record.step >= before_step:
            return
        yield record


def shortened(rollup: Rollup, *, steps_path: Path, before_step: int) -> Rollup:
    """The same roll-up without its replaced steps."""
    lines = read_lines(steps_path, start_byte=rollup.start_byte, end_byte=rollup.end_byte)
    steps = [_Step(step_of(line), line.start_byte, line.end_byte) for line in lines]
    return _summary([step for step in steps if step.record.step < before_step])


def single(record: StepRecord) -> Rollup:
    """One step as a roll-up."""
    return _summary([_Step(record, 0, 0)])


def merged(parts: Sequence[Rollup]) -> Rollup:
    """Several roll-ups in a row as one; means are weighted by steps."""
    first, last = parts[0], parts[-1]
    timed = [part for part in parts if not part.profiled] or parts
    losses = [(part.loss, part.num_steps - part.num_non_finite) for part in parts if part.loss is not None]
    return Rollup(
        attempt=last.attempt,
        first_step=first.first_step,
        last_step=last.last_step,
        num_steps=sum(part.num_steps for part in parts),
        start_byte=first.start_byte,
        end_byte=last.end_byte,
        first_time=first.first_time,
        last_time=last.last_time,
        seconds=sum(part.seconds for part in parts),
        fastest_s=min(part.fastest_s for part in timed),
        slowest_s=max(part.slowest_s for part in timed),
        tokens=sum(part.tokens for part in parts),
        padded_tokens=sum(part.padded_tokens for part in parts),
        loss=_weighted(losses),
        loss_low=min((part.loss_low for part in parts if part.loss_low is not None), default=None),
        loss_high=max((part.loss_high for part in parts if part.loss_high is not None), default=None),
        num_non_finite=sum(part.num_non_finite for part in parts),
        spans={key: sum(values) for key, values in _columns(part.spans for part in parts).items()},
        memory={key: max(values) for key, values in _columns(part.memory for part in parts).items()},
        utilisation=_weighted_columns([(part.utilisation, part.num_steps) for part in parts]),
        extra=_weighted_columns([(part.extra, part.num_steps) for part in parts]),
    )


def step_of(line: Line) -> StepRecord:
    return step_from_json(line.value, source=line.place)


def _agrees(rollup: Rollup, steps_path: Path) -> bool:
    """Whether the roll-up is still the summary of the steps between its bytes."""
    lines = read_lines(steps_path, start_byte=rollup.start_byte, end_byte=rollup.end_byte)
    steps = [_Step(step_of(line), line.start_byte, line.end_byte) for line in lines]
    return bool(steps) and _summary(steps) == rollup


def _summary(steps: Sequence[_Step]) -> Rollup:
    records = [step.record for step in steps]
    first, last = records[0], records[-1]
    losses = [record.loss for record in records if record.loss is not None]
    finite = [loss for loss in losses if abs(loss) <= LARGEST_LOSS]
    spans: dict[str, float] = defaultdict(float)
    for record in records:
        for phase, seconds in record.phases.items():
            spans[phase] += seconds
    return Rollup(
        attempt=first.attempt,
        first_step=first.step,
        last_step=last.step,
        num_steps=len(records),
        start_byte=steps[0].start_byte,
        end_byte=steps[-1].end_byte,
        first_time=first.time,
        last_time=last.time,
        seconds=sum(record.seconds for record in records),
        fastest_s=min(record.training_s for record in records),
        slowest_s=max(record.training_s for record in records),
        tokens=sum(record.tokens for record in records),
        padded_tokens=sum(record.padded_tokens for record in records),
        loss=sum(finite) / len(finite) if finite else None,
        loss_low=min(finite, default=None),
        loss_high=max(finite, default=None),
        num_non_finite=len(losses) - len(finite),
        spans=dict(spans),
        memory={key: max(values) for key, values in _columns(record.memory for record in records).items()},
        utilisation=_means(record.utilisation for record in records),
        extra=_means(record.extra.numbers() for record in records),
    )


def _weighted(values: Sequence[tuple[float, int]]) -> float | None:
    weight = sum(count for _, count in values)
    return sum(value * count for value, count in values) / weight if weight else None


def _weighted_columns(rows: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    columns: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for row, count in rows:
        for key, value in row.items():
            columns[key].append((value, count))
    means = {key: _weighted(values) for key, values in columns.items()}
    return {key: mean for key, mean in means.items() if mean is not None}


def _means(rows: Iterable[Mapping[str, object]]) -> dict[str, float]:
    return {key: sum(values) / len(values) for key, values in _columns(rows).items()}


def _columns(rows: Iterable[Mapping[str, object]]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                columns[key].append(value)
    return columns
