"""Runs a job by torchrun, on one node or, with a rendezvous, on several; translates its end into our exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from flatout.errors import PREEMPTED_EXIT, RunFailed, UsageError
from flatout.launch.job import Job
from flatout.record import Run
from flatout.record.events import Ended


def command(job: Job, *, rendezvous: str | None = None) -> list[str]:
    """The command of one node. `rendezvous` is HOST:PORT of the first node."""
    if job.nodes > 1 and rendezvous is None:
        raise UsageError(f"--nodes {job.nodes} needs --rendezvous HOST:PORT, the address of the first node")
    meet = ["--standalone"]
    if rendezvous is not None:
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous, "--rdzv-id", job.name]
    sizes = ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.ranks), "--max-restarts", str(job.restarts)]
    return [sys.executable, "-m", "torch.distributed.run", *sizes, *meet, *job.arguments]


def run(job: Job, *, rendezvous: str | None = None) -> int:
    """Runs torchrun on this node. It always ends with 1 when a rank failed or was preempted: the run knows better."""
    stopped: list[int] = []
    environment = {**os.environ, **job.environment(restart=0)}
    del environment["WORLD_SIZE"]
    process = subprocess.Popen(command(job, rendezvous=rendezvous), env=environment, start_new_session=True)

    def stop(number: int, _frame: FrameType | None) -> None:
        if not stopped and process.poll() is None:
            process.terminate()  # the only signal on which it ends its ranks and waits for them
        stopped.append(number)

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == 0:
        return 0
    return PREEMPTED_EXIT if stopped and _is_saved(job) else RunFailed.exit_code


def _is_saved(job: Job) -> bool:
    """Whether the run stopped because of a signal, with its state saved."""
    if not Run.is_at(job.folder):
        return False
    last = next((event for event in reversed(list(Run.open(job.folder).events())) if isinstance(event, Ended)), None)
    return last is not None and last.outcome.stopped_by.startswith("SIG") and last.outcome.saved_step == last.step
