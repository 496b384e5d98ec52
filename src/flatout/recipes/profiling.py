"""Runs a window of steps under torch's profiler: a Chrome trace and a table of kernels in the run folder."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from flatout.recipes.session import Session
from flatout.record.events import Profiled


class Profile:
    """Traces the steps from the first to the last given, both included; None traces nothing.

    A run that ends inside the window writes the trace so far: an open trace must not outlive it.
    """

    def __init__(self, steps: tuple[int, int] | None, *, session: Session) -> None:
        self.steps, self.session = steps, session
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Starts with the first step of the window, or later if a resumed run begins inside it."""
        if self._profile is None and self.steps and self.steps[0] <= step <= self.steps[1]:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

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

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        self.write()
