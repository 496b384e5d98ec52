"""Runs a window of steps under torch's profiler: a Chrome trace and a table of kernels in the run folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from flatout.engine.ran import Calls, paths
from flatout.plan import Decisions
from flatout.recipes.session import Session
from flatout.record.events import PathsRan, Profiled


def _started(activities: Sequence[ProfilerActivity]) -> profile:
    """A running profile, which says nothing of itself on stderr."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    found = profile(activities=activities, record_shapes=True, acc_events=False)
    found.start()
    return found


class Witness:
    """Reads from one of the first steps which kernels it called, on the host's side only: that costs milliseconds.

    It is a step of the warm-up, which no speed counts.
    """

    def __init__(self, step: int | None, *, decisions: Decisions, on_gpu: bool, session: Session) -> None:
        """Looks at `step`; None looks at none."""
        self.step, self.decisions, self.on_gpu, self.session = step, decisions, on_gpu, session
        self._profile: profile | None = None

    def before(self, step: int, *, traced: bool) -> None:
        """Starts with its step, unless that is traced anyway, by us or by another tool such as the doctor."""
        busy = traced or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if step == self.step and self._profile is None and not busy:
            self._profile = _started([ProfilerActivity.CPU])

    def after(self) -> None:
        """Records what was called; nothing where it was not looking."""
        if self._profile is None:
            return
        seen, self._profile, self.step = self._profile, None, None
        seen.stop()
        self.record(seen)

    def record(self, seen: profile) -> None:
        found = paths(Calls.of(_events(seen)), self.decisions, on_gpu=self.on_gpu)
        self.session.recorder.event(PathsRan(facts={name: asdict(path) for name, path in found.items()}))

    def close(self) -> None:
        """Ends a profile that a failing step left open."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


def _events(seen: profile) -> Iterable[Any]:
    """The raw events, as torch's own objects for them take a hundred times longer to make."""
    inner = seen.profiler
    results = None if inner is None else inner.kineto_results
    return [] if results is None else results.events()


class Profile:
    """Traces the steps from the first to the last given, both included; None traces nothing.

    A run that ends inside the window writes the trace so far: an open trace must not outlive it.
    """

    def __init__(self, steps: tuple[int, int] | None, *, session: Session, witness: Witness) -> None:
        self.steps, self.session, self.witness = steps, session, witness
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Starts with the first step of the window, or later if a resumed run begins inside it."""
        if self._profile is None and self.steps and self.steps[0] <= step <= self.steps[1]:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = _started(activities)

    @property
    def traces(self) -> bool:
        return self._profile is not None

    def ends(self, step: int) -> bool:
        """Whether this was the last step of the trace."""
        return self._profile is not None and self.steps is not None and step >= self.steps[1]

    def write(self, step: int | None = None) -> None:
        if self._profile is None:
            return
        traced, self._profile = self._profile, None
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()  # the traced steps have to end inside the trace
        traced.stop()
        folder = self.session.run.profile_dir
        folder.mkdir(parents=True, exist_ok=True)
        trace, kernels = folder / "trace.json.gz", folder / "kernels.txt"
        for path in (trace, kernels):
            path.unlink(missing_ok=True)  # a link there would be written through
        traced.export_chrome_trace(str(trace))
        key = "self_device_time_total" if cuda else "self_cpu_time_total"
        table = traced.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=80)
        kernels.write_text(table)
        self.session.recorder.event(Profiled(step=step, folder=str(folder)))
        self.witness.record(traced)

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        self.write()
