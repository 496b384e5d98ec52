"""A window of steps under torch's profiler: a Chrome trace and a table of kernels in the run folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Profile:
    """Traces the steps from `first` to `last`, both included; None traces nothing."""

    def __init__(self, steps: tuple[int, int] | None, *, folder: Path, cuda: bool) -> None:
        self.steps, self.folder, self.cuda = steps, folder, cuda
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        if self.steps and step == self.steps[0]:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
            self._profile = profile(activities=activities)
            self._profile.start()

    def ends(self, step: int) -> bool:
        """Whether this was the last step of the trace."""
        return self._profile is not None and self.steps is not None and step >= self.steps[1]

    def write(self) -> None:
        assert self._profile is not None
        if self.cuda:
            torch.cuda.synchronize()  # the traced steps have to end inside the trace
        self._profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.folder / "trace.json.gz"))
        key = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        table = self._profile.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=80)
        (self.folder / "kernels.txt").write_text(table)
        self._profile = None
