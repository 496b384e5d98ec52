"""What started this process, torchrun, SLURM or `flatout launch`: the name of the job, its restarts, and its end."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from flatout.record import Run, redact

# Set by `flatout launch` for the processes it starts: the name of the job, and how often it was restarted.
JOB, RESTARTS = "FLATOUT_JOB", "FLATOUT_RESTARTS"
# A folder for the error messages of ranks, if the launcher cannot read what they print.
ERRORS = "FLATOUT_ERRORS"
_COUNTS = (RESTARTS, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_PR_SET_PDEATHSIG = 1


def job() -> str | None:
    """One name for all attempts of the same job; None if a person started this process."""
    if name := os.environ.get(JOB):
        return name
    if run := os.environ.get("TORCHELASTIC_RUN_ID"):
        # Run ids are used again by people, so the agent that started this process is part of the name.
        return f"torchrun-{run}-{_parent()}"
    if "SLURM_PROCID" in os.environ and (number := os.environ.get("SLURM_JOB_ID")):
        return f"slurm-{number}"
    return None


def _parent() -> str:
    pid = os.getppid()
    try:
        began = int(psutil.Process(pid).create_time())
    except psutil.Error:
        began = 0
    return f"{socket.gethostname()}-{pid}-{began}"


def restarts() -> int:
    """How often the launcher has restarted this job."""
    return max(int(text) if (text := os.environ.get(name, "")).isdecimal() else 0 for name in _COUNTS)


def continues(folder: os.PathLike[str] | str) -> bool:
    """Whether an earlier attempt of this job created the run in this folder, so that a restart resumes it."""
    name = job() if restarts() else None
    return name is not None and Run.is_at(str(folder)) and Run.open(str(folder)).environment.get("job") == name


def report_error(text: str) -> None:
    """Leaves the message with which this rank ends for its launcher, if that asked for it."""
    if folder := os.environ.get(ERRORS):
        with suppress(OSError):  # then only the rank's own output says it
            Path(folder, f"{restarts()}-{os.environ.get('RANK', '0')}").write_text(redact(text))


def end_with_launcher() -> None:
    """Asks the kernel to send SIGTERM when the launcher dies, so that no rank trains on alone.

    The run then stops as in a preemption: it saves, and exits with 75. SLURM ends its tasks by itself.
    """
    if JOB in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
