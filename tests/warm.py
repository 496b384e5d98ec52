"""`flatout ARGUMENTS`, or a script, in a process of its own that need not import torch: it is forked from one that has.

Everything a process has is real: its exit code, its signals, its end. The server it comes from imports and never
computes, so that no thread is lost in the fork.
"""

import atexit
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import HANG_S

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed", "transformers.models.auto.modeling_auto"),
        *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
        *("flatout.cli", "flatout.recipes.pretrain", "flatout.recipes.sft", "flatout.recipes.rft", "flatout.evaluate"),
    ]
)


class Started:
    """As much of `subprocess.Popen` as the tests use; what it prints goes to files."""

    def __init__(
        self,
        *arguments: object,
        cwd: Path,
        script: str | None = None,
        environment: Mapping[str, str] = {},
        stdout: str | None = None,
    ) -> None:
        """`stdout`: another file, or "closed", or "pipe" for one that nobody reads."""
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err, code = (Path(self._folder.name) / name for name in ("out", "err", "script.py"))
        if script is not None:
            code.write_text(script)
        argv = ["flatout" if script is None else str(code), *map(str, arguments)]
        self._process = CONTEXT.Process(
            target=_command,
            args=(argv, str(cwd), {**os.environ, **environment}, [stdout or str(self._out), str(self._err)]),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = HANG_S) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.send_signal(signal.SIGKILL)
            raise subprocess.TimeoutExpired("flatout", timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = HANG_S) -> tuple[str, str]:
        self.wait(timeout)
        return self.so_far(), self._err.read_text()

    def said(self) -> str:
        """What it has printed as errors and notes."""
        return self._err.read_text(errors="replace") if self._err.exists() else ""

    def so_far(self) -> str:
        """What it has printed."""
        return self._out.read_text() if self._out.exists() else ""


def two_ranks(*arguments: object, cwd: Path, script: str | None = None) -> None:
    """The command on two ranks, as torchrun would start them; both must end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        Started(*arguments, cwd=cwd, script=script, environment=shared | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(said)


def flatout(*arguments: object, cwd: Path, stdout: str | None = None) -> subprocess.CompletedProcess[str]:
    started = Started(*arguments, cwd=cwd, stdout=stdout)
    out, err = started.communicate()
    return subprocess.CompletedProcess(list(arguments), started.wait(), out, err)


def _unread_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def attacked(argv: list[str], cwd: str, environment: dict[str, str], files: list[str], most_bytes: int) -> None:
    """The command in a session of its own, which can be ended as a whole, with an end to its memory; `files` are its
    input and its output."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(files[0], os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 it stays open
    _command(argv, cwd, environment, files[1:])


def _command(argv: list[str], cwd: str, environment: dict[str, str], files: list[str]) -> None:
    gc.freeze()  # the server's imports: a million objects that no collection of this process need look at
    for number, path in enumerate(files, start=1):
        os.dup2(
            _unread_pipe()
            if path == "pipe"
            else os.open(os.devnull if path == "closed" else path, os.O_WRONLY | os.O_CREAT, 0o600),
            number,
        )
    if files[0] == "closed":
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]  # as Python starts then
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    try:
        if argv[0] == "flatout":
            runpy.run_module("flatout", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        # A forked process ends without these.
        atexit._run_exitfuncs()
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.stderr.flush()
