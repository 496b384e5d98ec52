"""Runs the ranks of a job in Ray actors, which place them; each actor runs one rank process and ends with it.

Plain actors are used instead of Ray's own trainer: they start ten times as fast, and a death is seen in a second.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout.errors import INTERRUPTED_EXIT, PREEMPTED_EXIT, EnvironmentLacks, RunFailed
from flatout.launch.job import FINAL, Job, ended, exit_code_of, followed
from flatout.launch.local import GRACE_S, TAIL
from flatout.output import err
from flatout.tasks.workers import GRADERS, RAY

# Longer than an actor that lives needs to answer.
ANSWER_S = 60.0
POLL_S = 0.2


def run(job: Job, *, cpus: int, wait_s: float) -> int:
    """Runs the job on the Ray cluster in RAY_ADDRESS, or on one that is started on this machine.

    Fails if the cluster has no room for all ranks within `wait_s`.
    """
    with _token() as folder:
        try:
            import ray
        except ImportError:
            raise EnvironmentLacks("--on ray needs Ray: pip install 'flatout[ray]', or use --on torchrun") from None
        code, actors = 0, list[Any]()
        with _cluster(ray, job, cpus=cpus, folder=folder), _stop_requests() as stops:
            for restart in range(job.restarts + 1):
                if restart:
                    err.write(f"restart {restart} of {job.restarts}, from the last checkpoint\n")
                code = _attempt(ray, job, actors, cpus=cpus, wait_s=wait_s, restart=restart, stops=stops)
                if code in FINAL or stops:
                    break
    return code


@contextmanager
def _token() -> Iterator[Path | None]:
    """A folder for a private cluster, with a token that only this user can read; Ray looks for it when it is imported.

    None if RAY_ADDRESS names a cluster.
    """
    if os.environ.get("RAY_ADDRESS"):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="flatout-ray-") as name:  # short: a socket's path has at most 107 bytes
        token = Path(name) / "token"
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        yield Path(name)


@contextmanager
def _cluster(ray: Any, job: Job, *, cpus: int, folder: Path | None) -> Iterator[None]:
    """Connects to the named cluster, or starts a private one without a dashboard."""
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": address}
    if folder is not None:
        options = {"num_cpus": job.world * cpus, "_temp_dir": str(folder), "include_dashboard": False}
    try:
        ray.init(log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        where = f"no Ray cluster answers at {address}" if address else "Ray did not start on this machine"
        raise EnvironmentLacks(
            f"{where}: {str(error).splitlines()[0]}. `ray stop` ends a stale cluster, `ray status` shows one that "
            "runs, and without RAY_ADDRESS a private one is started"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Signals to this process, in order; the ranks are told about the first."""
    stops: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {n: signal.signal(n, lambda number, _frame: stops.append(number)) for n in numbers}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Actor:
    """One rank's process, on the machine where Ray placed this actor."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the actor

    def address(self) -> tuple[str, int]:
        """Where this machine is reached, and a free port on it."""
        from ray.util import get_node_ip_address

        host: str = get_node_ip_address()
        with socket.socket() as free:
            free.bind(("", 0))
            return host, free.getsockname()[1]

    def start(self, command: list[str], environment: dict[str, str], folder: str) -> int:
        self.said.truncate(0)
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=folder,
            stdout=self.said,
            stderr=self.said,
        )
        return self.process.pid

    def code(self) -> int | None:
        """The exit code; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def tail(self) -> str:
        """The last lines that the rank wrote."""
        self.said.seek(0)
        return "\n".join(self.said.read().decode(errors="replace").splitlines()[-TAIL:]) + "\n"

    def stop(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


def _attempt(ray: Any, job: Job, actors: list[Any], *, cpus: int, wait_s: float, restart: int, stops: list[int]) -> int:
    """Runs the ranks once. `actors` that live are used again, which is faster than new ones."""
    lost = ray.exceptions.RayActorError
    kind = ray.remote(Actor)
    gpus = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {}
    alive = [actor for actor in actors if _lives(ray, actor)]
    actors[:] = alive + [
        kind.options(num_cpus=cpus, max_restarts=0, **gpus).remote() for _ in range(job.world - len(alive))
    ]
    try:
        if not _placed(ray, actors, wait_s=wait_s, stops=stops):
            if stops:
                return INTERRUPTED_EXIT if stops[0] == signal.SIGINT else RunFailed.exit_code
            raise EnvironmentLacks(
                f"Ray found no room for {job.world} ranks of {cpus} CPUs within {wait_s:g} s: `ray status` shows "
                "what is in use; ask for fewer --ranks or --cpus, or wait longer with --wait SECONDS"
            )
        host, port = ray.get(actors[0].address.remote())
        shared = job.environment(restart=restart) | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        shared |= {GRADERS: "ray", "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        shared |= {name: os.environ[name] for name in RAY if name in os.environ and name not in shared}
        codes: list[int | None] = [None] * job.world
        gone = [False] * job.world
        for rank, actor in enumerate(actors):
            own = {"RANK": str(rank), "LOCAL_RANK": "0"}
            ray.get(actor.start.remote(job.command, shared | own, str(Path.cwd())))
        told, until = False, float("inf")
        while any(code is None for code in codes):
            time.sleep(POLL_S)
            for rank, actor in enumerate(actors):
                if codes[rank] is None:
                    try:
                        codes[rank] = ray.get(actor.code.remote())
                    except lost:
                        codes[rank], gone[rank] = -signal.SIGKILL, True
                    if codes[rank] not in (None, 0):
                        until = min(until, time.monotonic() + GRACE_S)
            if stops and not told:
                told = True
                for actor in actors:
                    actor.stop.remote(signal.SIGINT if stops[0] == signal.SIGINT else signal.SIGTERM)
            if time.monotonic() > until and not told:
                for actor in actors:
                    actor.kill.remote()
        code = exit_code_of([RunFailed.exit_code if one is None else one for one in codes])
        if any(gone) and not stops:
            code = RunFailed.exit_code  # the ranks stopped only because an actor was gone
        err.write(_explained(ray, actors, codes) if code not in FINAL else _said(ray, actors[0]))
        return code
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise


def _placed(ray: Any, actors: Sequence[Any], *, wait_s: float, stops: Sequence[int]) -> bool:
    """Whether all actors answer within the time; a signal ends the wait."""
    waiting, until = [actor.address.remote() for actor in actors], time.monotonic() + wait_s
    while waiting and not stops and time.monotonic() < until:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(1.0, until - time.monotonic()))
    return not waiting


def _lives(ray: Any, actor: Any) -> bool:
    try:
        ray.get(actor.address.remote(), timeout=ANSWER_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return False
    return True


def _said(ray: Any, actor: Any) -> str:
    """What a rank printed last; a rank whose actor is gone left nothing."""
    try:
        text: str = ray.get(actor.tail.remote())
    except ray.exceptions.RayActorError:
        return ""
    return text


def _explained(ray: Any, actors: list[Any], codes: list[int | None]) -> str:
    """Which rank failed first and how, its last lines at the end; as `local.explained` for processes."""
    failed = [(rank, code, _said(ray, actors[rank])) for rank, code in enumerate(codes) if code]
    # One that ended because another did says so; one that was told to stop has saved.
    by_itself = [each for each in failed if not followed(each[2]) and each[1] != PREEMPTED_EXIT]
    rank, code, said = (by_itself or failed)[0]
    return said + ended(rank, code) if code < 0 else ended(rank, code) + said
