"""The parent of a watched script: starts it, and with `stop` makes sure that no process of the script outlives it.

`attach` runs this file by its path, with `-I -S`: standard library only, unaffected by the script's environment.
As a subreaper it inherits every process whose parent has died, even detached ones, so that all
descendants of the script can be found, and no other process is ever signalled. It reads lines from `attach`:

    15 0        send signal 15 to the script
    62 4711     send signal 62 to process 4711, if it is a descendant
    end         stop the script and all its descendants: SIGTERM, and SIGKILL after the grace period

If the pipe closes, the doctor is gone, and that means the same as `end`. One JSON line is sent back: the script's
return code, or why it could not be started, and the processes that could not be stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}
_POLL_S = 0.1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Supervisor:
    def __init__(self, command: list[str], *, control: int, grace_s: float, sweep: bool, mask: set[int]) -> None:
        self.control, self.grace_s, self.sweep = control, grace_s, sweep
        self.returncode: int | None = None
        libc = ctypes.CDLL(None, use_errno=True)
        if sweep:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})

        def ready() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        # Signals from the terminal reach the script directly; those sent to the doctor come through the pipe.
        self.script = subprocess.Popen(command, preexec_fn=ready)

    def run(self) -> list[int]:
        """Waits for the script, and with `sweep` stops its descendants; returns those that could not be stopped."""
        while self.returncode is None:
            self._wait()
            if self._told_to_end():
                return self.end()
        return self.end() if self.sweep else []

    def end(self) -> list[int]:
        """Stops everything that still runs."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            asked: set[tuple[int, str]] = set()
            last = time.monotonic() + self.grace_s
            while (left := descendants()) and time.monotonic() < last:
                for process, began in left.items() - asked:
                    send(process, began, number)
                asked |= left.items()
                self._wait()
        return sorted(descendants())

    def _wait(self) -> None:
        signal.sigtimedwait(PASSED_ON | {signal.SIGCHLD}, _POLL_S)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.script.pid:
                    self.returncode = os.waitstatus_to_exitcode(found[1])

    def _told_to_end(self) -> bool:
        if not select.select([self.control], [], [], 0)[0]:
            return False
        # A line is far shorter than a pipe's atomic write, so it arrives whole.
        for line in os.read(self.control, 4096).decode().splitlines() or ["end"]:
            if line == "end":
                return True
            number, process = map(int, line.split())
            if self.returncode is None and process == 0:
                os.kill(self.script.pid, number)  # not reaped yet, so the pid is still the script's
            elif process in (left := descendants()):
                send(process, left[process], number)
        return False


def descendants() -> dict[int, str]:
    """Every living descendant of this process with its start time, because a pid alone may be reused."""
    parents: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := _stat(int(name))) is not None:
            parents[int(name)] = found
    found_all: dict[int, str] = {}
    wanted = {os.getpid()}
    while wanted:
        wanted = {process for process, (parent, _) in parents.items() if parent in wanted}
        found_all |= {process: parents[process][1] for process in wanted}
    return found_all


def _stat(process: int) -> tuple[int, str] | None:
    """The parent and the start time of a process; None if it has ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    # The name in front may contain anything, even parentheses. A zombie counts as ended.
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), fields[19].decode())


def send(process: int, began: str, number: int) -> None:
    """Sends a signal to exactly this process: a pidfd pins it before its start time is checked again."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = _pidfd(process)
        try:
            if (found := _stat(process)) is None or found[1] != began:
                return
            if descriptor is None:
                os.kill(process, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _pidfd(process: int) -> int | None:
    """A pidfd of the process; None before Linux 5.3, or if a sandbox forbids it."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def main() -> None:
    control, status, grace_s, then, mask, *command = sys.argv[1:]
    try:
        supervisor = Supervisor(
            command,
            control=int(control),
            grace_s=float(grace_s),
            sweep=then == "stop",
            mask={int(number) for number in mask.split()},
        )
    except (OSError, ValueError) as error:
        told: dict[str, object] = {"error": getattr(error, "strerror", None) or str(error)}
    else:
        left = supervisor.run()
        told = {"returncode": supervisor.returncode, "left": left}
    with contextlib.suppress(BrokenPipeError):
        os.write(int(status), json.dumps(told).encode())


if __name__ == "__main__":
    main()
