"""Attacks on the command from outside: what a trial is, how it is run, and what it must not find.

A trial is a pure function of the seed, its kind and its number. It builds a folder of hostile files, runs commands in
it and fails on a traceback, a crash, code that ran, a hang, too much memory, a control character on the terminal, a
file that is lost, or a connection that is closed without a status.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests import warm

# For one command, on a machine that is busy with others.
HANG_S, MOST_RSS, MOST_VIRTUAL = 120.0, 3 << 30, 24 << 30
POLL_S = 0.02
# What the code of an attack would leave behind.
SENTINEL = "EXECUTED"
# `flatout eval` adds to these of a run.
GROWING = ("events.jsonl", ".lock")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_STARTING = threading.Lock()  # multiprocessing's bookkeeping is not for several threads


@dataclass(frozen=True, kw_only=True)
class Ended:
    argv: Sequence[str]
    code: int | None  # None: it hung
    out: str
    err: str
    peak_bytes: int
    seconds: float


@dataclass(kw_only=True)
class Trial:
    """One attack in its own folder; `ground` has sound artefacts to copy."""

    name: str
    folder: Path
    ground: Path
    random: random.Random
    faults: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    _kept: dict[Path, str] = field(default_factory=dict)
    _growing: dict[Path, bytes] = field(default_factory=dict)

    @property
    def sentinel(self) -> Path:
        return self.folder / SENTINEL

    def copy(self, name: str, to: str | None = None) -> Path:
        """A copy of a sound artefact."""
        source, target = self.ground / name, self.folder / (to or name)
        if source.is_dir():
            return Path(shutil.copytree(source, target, symlinks=True))
        return Path(shutil.copy(source, target))

    def write(self, name: str, content: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        return path

    def keep(self, path: Path) -> None:
        """Nothing in this file or folder may change, but for records at the end of a run's."""
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if not file.is_file() or file.is_symlink():
                continue
            if file.name in GROWING:
                self._growing[file] = file.read_bytes()
            else:
                self._kept[file] = _digest(file)

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def run(
        self,
        *arguments: object,
        typed: bytes = b"",
        environment: Mapping[str, str] = {},
        fresh: bool = False,
        shell: str = "",
        kill_s: float | None = None,
        hang_s: float = HANG_S,
    ) -> Ended:
        """`flatout ARGUMENTS`, checked. `fresh`: a new interpreter, whose output the `shell` may redirect. `kill_s`:
        it is killed after so long, which is no fault."""
        argv = [one for one in map(str, arguments) if _possible(one)]
        self.commands.append(f"flatout {' '.join(map(repr, argv))} {shell}")
        number = len(self.commands)
        files = [self.folder / f".{number}.{name}" for name in ("in", "out", "err")]
        files[0].write_bytes(typed)
        environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("FLATOUT", "PYTEST"))},
            **{"COLUMNS": "200", "HF_HUB_OFFLINE": "1", "FLATOUT_CACHE": str(self.ground / "cache")},
            **{"OMP_NUM_THREADS": "1", "HOME": str(self.folder), "TERM": "dumb", **environment},
        }
        started = time.monotonic()
        process = (_Fresh if fresh else _Warm)(argv, cwd=self.folder, environment=environ, files=files, shell=shell)
        peak, code = 0, None
        while True:
            code, since = process.poll(), time.monotonic() - started
            if code is not None:
                break
            peak = max(peak, process.rss())
            if kill_s is not None and since > kill_s:
                process.kill()
                break
            if peak > MOST_RSS or since > hang_s:
                process.kill()
                break
            time.sleep(POLL_S)
        process.kill()  # what it may have left behind
        out, err = (file.read_text(errors="surrogateescape") if file.exists() else "" for file in files[1:])
        ended = Ended(argv=argv, code=code, out=out, err=err, peak_bytes=peak, seconds=time.monotonic() - started)
        if not (kill_s is not None and code is None):
            self._judge(ended)
        return ended

    def _judge(self, ended: Ended) -> None:
        if ended.peak_bytes > MOST_RSS:
            self.fault(f"memory: over {MOST_RSS >> 20} MiB after {ended.seconds:.0f} s")
        elif ended.code is None:
            self.fault(f"hang: longer than {ended.seconds:.0f} s")
        elif ended.code < 0:
            self.fault(f"crash: ended by {signal.Signals(-ended.code).name}")
        for name, text in (("stdout", ended.out), ("stderr", ended.err)):
            if "Traceback (most recent call last)" in text or "Exception ignored" in text:
                last = [line for line in text.splitlines() if line.strip()][-1]
                self.fault(f"traceback on {name}: {last[:300]}")
            if found := UNPRINTABLE.search(text):
                near = text[max(0, found.start() - 30) : found.end() + 20]
                self.fault(f"control character {found[0]!r} on {name}: {near!r}")
        if ended.code == 1 and not self.faults and ended.argv[:1] != ["doctor"]:
            self.fault(f"exit code 1, which is for bugs: {ended.err[-300:]!r}")
        if self.sentinel.exists():
            self.fault("code ran")
            self.sentinel.unlink()

    def finish(self) -> None:
        for path, digest in self._kept.items():
            if not path.is_file():
                self.fault(f"lost: {path.relative_to(self.folder)}")
            elif _digest(path) != digest:
                self.fault(f"changed: {path.relative_to(self.folder)}")
        for path, begins in self._growing.items():
            if not path.is_file() or (path.suffix and not path.read_bytes().startswith(begins)):
                self.fault(f"lost: a part of {path.relative_to(self.folder)}")
        if list(self.folder.rglob(f"{SENTINEL}*")):
            self.fault("code ran")


def _possible(argument: str) -> bool:
    """Whether a process can be given this argument."""
    try:
        return "\0" not in argument and len(os.fsencode(argument)) < 120_000
    except UnicodeEncodeError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _group_rss(leader: int) -> int:
    """The memory of a session's processes, pages that they share with the server of the tests counted once at most."""
    total = 0
    try:
        main = psutil.Process(leader)
        for process in [main, *main.children(recursive=True)]:
            info = process.memory_info()
            total += max(0, info.rss - info.shared)
    except psutil.Error:
        pass
    return total


class _Warm:
    """Forked from the server of the tests, which has imported everything."""

    def __init__(
        self, argv: Sequence[str], *, cwd: Path, environment: Mapping[str, str], files: Sequence[Path], shell: str
    ) -> None:
        assert not shell, "what a shell redirects needs a fresh process"
        given = (["flatout", *argv], str(cwd), dict(environment), [str(file) for file in files], MOST_VIRTUAL)
        with _STARTING:
            self.process = warm.CONTEXT.Process(target=warm.attacked, args=given)
            self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        with _STARTING:
            return self.process.exitcode

    def rss(self) -> int:
        return _group_rss(self.pid)

    def kill(self) -> None:
        _end_session(self.pid)
        with _STARTING:
            self.process.join(10)


class _Fresh:
    def __init__(
        self, argv: Sequence[str], *, cwd: Path, environment: Mapping[str, str], files: Sequence[Path], shell: str
    ) -> None:
        command = ["sh", "-c", f'"$0" -m flatout "$@" {shell}', sys.executable, *argv]
        with files[0].open("rb") as typed, files[1].open("wb") as out, files[2].open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=dict(environment), stdin=typed, stdout=out, stderr=err, start_new_session=True
            )
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def rss(self) -> int:
        return _group_rss(self.pid)

    def kill(self) -> None:
        _end_session(self.pid)
        self.process.wait(10)


def _end_session(leader: int) -> None:
    """Ends the processes of a session that a trial has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


Attack = Callable[[Trial], None]


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    faults: Sequence[str]
    commands: Sequence[str]
    seconds: float


def attempt(name: str, attack: Attack, *, seed: int, ground: Path, folder: Path, keep: bool = False) -> Result:
    """One trial, in a folder that is removed if nothing was found."""
    home = folder / name.replace("/", "-")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    trial = Trial(name=name, folder=home, ground=ground, random=random.Random(f"{seed}/{name}"))
    started = time.monotonic()
    try:
        attack(trial)
        trial.finish()
    except Exception as error:  # a trial that cannot be carried out is a fault of its own, and the others go on
        trial.fault(f"the trial broke: {type(error).__name__}: {error}")
    if not (keep or trial.faults):
        shutil.rmtree(home, ignore_errors=True)
    return Result(name=name, faults=trial.faults, commands=trial.commands, seconds=time.monotonic() - started)
