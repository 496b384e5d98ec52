"""Times the phases of a training loop without adding a device synchronisation (`train`, `doctor`).

    phases.begin_step()
    phases.mark("data")          # each mark ends the phase before it and starts the next
    phases.mark("forward")
    phases.mark("backward")
    phases.end_step(tokens=n)
    for timing in phases.ready():    # finished steps only; on CUDA usually a step or two late
        ...

On CUDA a mark puts a timing event on the current stream (one stream for the whole loop), read when the
device has passed it. Spans tile the device's time: a step's first phase starts where the last phase of the
step before ended. So when the device runs dry, the idle time belongs to the phase in which the host kept it
waiting, and none is lost between phases or steps. Work between two steps (an evaluation, a save) is marked
as a phase of the step that follows.

`StepTiming.seconds` comes from the host's clock instead, so over a stretch of steps
`1 - sum(spans) / seconds` checks one clock against the other. In a single step they may differ, because the
host runs ahead of the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flatout.record import Span

# Memory is looked at in the first steps, then in every so many, a number that no period of steps divides.
FIRST_LOOKS, LOOK_EVERY = 16, 17
# The peak between the steps that were looked at.
UNKNOWN = ""


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """One measured step: `spans` in order of first appearance, micro-batches summed."""

    step: int
    seconds: float  # host clock, from the end of the step before (the first: from its beginning)
    spans: tuple[Span, ...]
    tokens: int | None = None
    peaks_gib: Mapping[str, float] = field(default_factory=dict)  # allocated memory by phase, if it was asked for


class _Clock(Protocol):
    """Takes stamps now that can be subtracted later."""

    def stamp(self) -> Any: ...

    def has_passed(self, stamp: Any) -> bool: ...

    def wait(self, stamp: Any) -> None: ...

    def seconds(self, start: Any, end: Any) -> float: ...

    def release(self, stamp: Any) -> None: ...


class _HostClock:
    def stamp(self) -> float:
        return time.perf_counter()

    def has_passed(self, stamp: float) -> bool:
        return True

    def wait(self, stamp: float) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def release(self, stamp: float) -> None:
        pass


class _CudaClock:
    """Timing events on the current stream; making one costs more than recording it, so they are used again."""

    def __init__(self) -> None:
        import torch

        self._event: Any = torch.cuda.Event
        self._free: list[Any] = []

    def stamp(self) -> Any:
        event = self._free.pop() if self._free else self._event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, stamp: Any) -> bool:
        return bool(stamp.query())

    def wait(self, stamp: Any) -> None:
        stamp.synchronize()  # host waits for the device: only at the end of a run

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000

    def release(self, stamp: Any) -> None:
        self._free.append(stamp)


class _CudaMemory:
    """The allocator's peak since the last call. A count on the host: nothing waits for the device."""

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda
        # The newest counters without their names, which take most of the time of `max_memory_allocated`.
        self._counters: Any = torch.cuda.memory.memory_stats_as_nested_dict

    def take_gib(self) -> float:
        peak = self._counters()["allocated_bytes"]["all"]["peak"]
        self._cuda.reset_peak_memory_stats()
        return float(peak) / 2**30


@dataclass(frozen=True, kw_only=True)
class _Mark:
    phase: str
    role: str
    start: Any


@dataclass(frozen=True, kw_only=True)
class _Ended:
    step: int
    seconds: float
    tokens: int | None
    start: Any
    marks: list[_Mark]
    end: Any
    peaks_gib: Mapping[str, float]


class Phases:
    """The stopwatch of one loop. `device` is where the work runs; not `enabled`, every call does nothing.

    With `memory` it also takes the peak of the device's memory in each phase of some steps: reading the allocator's
    counters takes the host tens of microseconds.
    """

    def __init__(self, *, device: str = "cpu", enabled: bool = True, memory: bool = False) -> None:
        self._enabled = enabled
        self._clock: _Clock = _CudaClock() if enabled and device.startswith("cuda") else _HostClock()
        self._memory = _CudaMemory() if enabled and memory and device.startswith("cuda") else None
        self._looked = 0
        self._looks = False  # at the memory of the open step
        self._peaks: dict[str, float] = {}
        # For whoever watches for a hang: the phase, and how often something moved.
        self.phase, self.moves = "", 0
        self._step = -1
        self._open = False
        self._start: Any = None  # where on the device's timeline the step before ended
        self._host_start = 0.0
        self._marks: list[_Mark] = []
        self._ended: deque[_Ended] = deque()

    def begin_step(self, step: int | None = None) -> None:
        """Open a step (unnamed: the one after the last). Beginning again before its end continues the same step."""
        if not self._enabled:
            return
        if not self._open:
            self._step = self._step + 1 if step is None else step
            self._open = True
            self._look()
        if self._start is None:
            self._start = self._clock.stamp()
            self._host_start = time.perf_counter()

    def mark(self, phase: str, *, role: str = "train") -> None:
        """Here the phase before ends and `phase` begins."""
        if not self._enabled:
            return
        if not self._open:
            raise RuntimeError(f"phase {phase!r} marked outside a step: call begin_step() first")
        self.phase, self.moves = phase, self.moves + 1
        if self._marks:
            self._take_peak()
        start = self._clock.stamp() if self._marks else self._start
        self._marks.append(_Mark(phase=phase, role=role, start=start))

    @property
    def step(self) -> int:
        """The step that is open, or the last one."""
        return self._step

    def end_step(self, *, tokens: int | None = None) -> None:
        if not self._enabled:
            return
        if not self._open:
            raise RuntimeError("end_step() without begin_step()")
        self._take_peak()
        end, host_end = self._clock.stamp(), time.perf_counter()
        self._ended.append(
            _Ended(
                step=self._step,
                seconds=host_end - self._host_start,
                tokens=tokens,
                start=self._start,
                marks=self._marks,
                end=end,
                peaks_gib=self._peaks,
            )
        )
        self._peaks = {}
        self._open, self._marks, self._start, self._host_start = False, [], end, host_end

    def _look(self) -> None:
        """Decides whether this step's memory is looked at; the peak until here belongs to no phase."""
        self._looks = self._memory is not None and (self._looked < FIRST_LOOKS or self._step % LOOK_EVERY == 0)
        if self._looks and self._memory is not None:
            self._looked += 1
            self._peaks[UNKNOWN] = self._memory.take_gib()

    def _take_peak(self) -> None:
        """Gives the peak since the last mark to the phase that ends here."""
        if self._looks and self._memory is not None and self._marks:
            mark, peak_gib = self._marks[-1], self._memory.take_gib()
            name = mark.phase if mark.role == "train" else f"{mark.role}/{mark.phase}"
            self._peaks[name] = max(self._peaks.get(name, 0.0), peak_gib)

    def ready(self) -> list[StepTiming]:
        """The steps the device has finished since the last call, in order; never waits."""
        timings = []
        while self._ended and self._clock.has_passed(self._ended[0].end):
            timings.append(self._read(self._ended.popleft()))
        return timings

    def flush(self) -> list[StepTiming]:
        """All ended steps that are left; waits for the device."""
        if self._ended:
            self._clock.wait(self._ended[-1].end)
        return self.ready()

    def _read(self, ended: _Ended) -> StepTiming:
        seconds: dict[tuple[str, str], float] = {}
        boundaries = [mark.start for mark in ended.marks[1:]] + [ended.end]
        for mark, end in zip(ended.marks, boundaries, strict=False):
            key = (mark.role, mark.phase)
            seconds[key] = seconds.get(key, 0.0) + self._clock.seconds(mark.start, end)
        # The end is the next step's start and is released with it.
        for stamp in (ended.start, *boundaries[:-1]):
            self._clock.release(stamp)
        return StepTiming(
            step=ended.step,
            seconds=ended.seconds,
            tokens=ended.tokens,
            peaks_gib=ended.peaks_gib,
            spans=tuple(Span(phase=phase, role=role, seconds=value) for (role, phase), value in seconds.items()),
        )
