"""Runs a job by torchrun, on one node or, with a rendezvous, on several; translates its end into our exit codes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import psutil

from flatout.errors import PREEMPTED_EXIT, RunFailed, UsageError
from flatout.launch.job import Job, followed
from flatout.output import err
from flatout.probe.launched import ERRORS
from flatout.record import Run
from flatout.record.events import Ended


def command(job: Job, *, rendezvous: str | None = None) -> list[str]:
    """The command of one node. `rendezvous` is HOST:PORT of the first node."""
    if job.nodes > 1 and rendezvous is None:
        raise UsageError(f"--nodes {job.nodes} needs --rendezvous HOST:PORT, the address of the first node")
    meet = ["--standalone"]
    if rendezvous is not None:
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous, "--rdzv-id", job.name]
        if (here := _reached(rendezvous)) is not None:
            meet += ["--rdzv-conf", f"is_host={str(here.is_meeting_point).lower()}", "--local-addr", here.address]
    sizes = ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.ranks), "--max-restarts", str(job.restarts)]
    return [sys.executable, "-m", "torch.distributed.run", *sizes, *meet, *job.arguments]


@dataclass(frozen=True, kw_only=True)
class Here:
    """This machine as the others reach it. torchrun and gloo look only at what its host name stands for."""

    address: str
    interface: str
    is_meeting_point: bool


def _reached(rendezvous: str) -> Here | None:
    """None if the rendezvous is not known from here; torchrun then decides, and says so if it cannot."""
    try:
        meeting = socket.gethostbyname(rendezvous.rpartition(":")[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((meeting, 9))  # sends nothing
            address = route.getsockname()[0]
    except OSError:
        return None
    known = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if address not in known:
        return None
    # A machine reaches its own addresses by the loopback device, but from the address itself.
    return Here(address=address, interface=known[address], is_meeting_point=meeting in known)


def run(job: Job, *, rendezvous: str | None = None) -> int:
    """Runs torchrun on this node. After its own report of a failure comes the error of the rank that failed first."""
    with TemporaryDirectory(prefix="flatout-") as errors:
        code = _run(job, rendezvous=rendezvous, errors=errors)
        if code == RunFailed.exit_code:
            err.write(_first_error(Path(errors)))
        return code


def _first_error(folder: Path) -> str:
    """The error of the last attempt that came first, of a rank that did not only follow another."""
    attempts: dict[int, list[Path]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        attempts.setdefault(int(path.name.partition("-")[0]), []).append(path)
    for path in attempts[max(attempts)] if attempts else ():
        if not followed(text := path.read_text()):
            return f"rank {path.name.partition('-')[2]} failed first\n{text}"
    return ""  # a rank that was killed leaves none: torchrun's report names it


def _run(job: Job, *, rendezvous: str | None, errors: str) -> int:
    """torchrun always ends with 1 when a rank failed or was preempted: the run knows better."""
    stopped: list[int] = []
    environment = {**os.environ, **job.environment(restart=0), ERRORS: errors}
    del environment["WORLD_SIZE"]
    if rendezvous is not None and job.nodes > 1 and (here := _reached(rendezvous)) is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", here.interface)
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
