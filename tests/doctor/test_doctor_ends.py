"""The doctor ends in time, and with `stop` it leaves no process behind, however the script detached it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import warm

from flatout.insight import attach

HANG_S = 120.0
# The command, with little patience for scripts that do not end.
DOCTOR = """
import sys
from flatout.insight import attach
attach._GRACE_S = 0.5
from flatout.cli import main
sys.argv[:1] = ["flatout", "doctor"]
main()
"""
# A child, one in a session of its own, and one forked twice; each leaves its number. `stubborn` ones ignore SIGTERM.
SPAWNS = """
import os, signal, sys, time
def begin(name):
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(name + ".tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(name + ".tmp", name)
def child():
    if os.fork() == 0:
        begin("child.pid"); time.sleep(3600)
def session():
    if os.fork() == 0:
        os.setsid(); begin("session.pid"); time.sleep(3600)
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            begin("daemon.pid"); time.sleep(3600)
        os._exit(0)
for start in (child, session, daemon):
    start()
begin("script.pid")
while not all(os.path.exists(n + ".pid") for n in ("child", "session", "daemon")):
    time.sleep(0.01)
open("ready", "w").close()
"""
NAMES = ("script", "child", "session", "daemon")


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def until(condition: object) -> None:
    end = time.monotonic() + HANG_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for a script that leaves the numbers of its processes there; none of them outlives the test."""
    yield tmp_path
    for path in tmp_path.glob("*.pid"):
        if alive(int(path.read_text())):
            os.kill(int(path.read_text()), signal.SIGKILL)


def numbers(place: Path) -> dict[str, int]:
    return {name: int((place / f"{name}.pid").read_text()) for name in NAMES}


def started(place: Path, text: str, *arguments: str, options: tuple[str, ...] = ()) -> warm.Started:
    (place / "train.py").write_text(text)
    command = ("--run", str(place / "run"), *options, "--", sys.executable, "train.py", *arguments)
    return warm.Started(*command, cwd=place, script=DOCTOR)


def test_what_a_script_left_running_is_ended_and_nothing_else(place: Path) -> None:
    bystander = subprocess.Popen(["sleep", "3600"])
    try:
        doctor = started(place, SPAWNS, "stubborn")
        _, err = doctor.communicate(timeout=HANG_S)
        assert doctor.returncode == 4, err
        assert [name for name, process in numbers(place).items() if alive(process)] == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_doctor_that_is_told_to_end_ends_a_stubborn_script_too(place: Path, number: int) -> None:
    doctor = started(place, SPAWNS + "time.sleep(3600)\n", "stubborn")
    until((place / "ready").exists)
    doctor.send_signal(number)
    assert doctor.wait(HANG_S) == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    processes = numbers(place)
    if number == signal.SIGKILL:  # then nobody waits for the end of the others
        until(lambda: not any(map(alive, processes.values())))
    assert [name for name, process in processes.items() if alive(process)] == []


def test_the_whole_watch_has_a_limit_and_the_script_is_ended_at_it(place: Path) -> None:
    waits = "import os, time\nopen('script.pid', 'w').write(str(os.getpid()))\ntime.sleep(3600)\n"
    doctor = started(place, waits, options=("--seconds", "1"))
    _, err = doctor.communicate(timeout=HANG_S)
    assert doctor.returncode == 4
    assert "no optimizer step was observed in 1 s" in err
    assert not any(alive(int(path.read_text())) for path in place.glob("script.pid"))


def test_a_script_says_where_it_is(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "_GRACE_S", 0.5)
    monkeypatch.chdir(place)
    (place / "train.py").write_text(
        "import json, time\ndef loads():\n    open('ready', 'w').close()\n    time.sleep(3600)\nloads()\n"
    )
    asked, command = attach.Asked(), [sys.executable, "train.py"]
    with attach._Script(command, asked=asked, folder=tmp_path, mask=set()) as script:
        until((place / "ready").exists)
        found = script._main_thread()
    assert found is not None
    assert found.endswith(("train.py:3 in loads", "train.py:4 in loads"))


def test_a_script_that_continues_keeps_what_it_started(place: Path) -> None:
    doctor = started(place, SPAWNS + "sys.exit(7)\n", options=("--then", "continue"))
    doctor.communicate(timeout=HANG_S)
    assert doctor.returncode == 7
    assert [name for name, process in numbers(place).items() if alive(process)] == ["child", "session", "daemon"]


def test_output_without_a_line_end_passes_through_and_only_its_end_is_kept(place: Path) -> None:
    size = 48 << 20
    doctor = started(place, f"import os, sys\nos.write(2, b'\\xff\\x00')\nos.write(2, b'x' * {size})\nsys.exit(3)\n")
    doctor.wait(HANG_S)
    assert doctor.returncode == 4
    said = doctor._err.read_bytes()
    assert said.startswith(b"\xff\x00" + b"x" * size)
    assert len(said) < size + 100_000, "its last words are not all it ever said"


def test_a_number_that_means_another_process_by_now_is_not_signalled() -> None:
    from flatout.insight import supervisor

    other = subprocess.Popen(["sleep", "3600"])
    try:
        supervisor.send(other.pid, "12345", signal.SIGKILL)
        assert other.poll() is None
        found = supervisor._stat(other.pid)
        assert found is not None
        supervisor.send(other.pid, found[1], signal.SIGKILL)
        assert other.wait(HANG_S) == -signal.SIGKILL
    finally:
        other.kill()
        other.wait()


# Six steps, and then a generation that never ends.
GENERATES = """
import time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
open("ready", "w").close()
def generate():
    time.sleep(3600)
generate()
"""


def test_a_doctor_that_is_told_to_end_reports_what_it_has_seen(place: Path) -> None:
    doctor = started(place, GENERATES, options=("--json", str(place / "found.json"), "--steps", "7"))
    until((place / "ready").exists)
    doctor.send_signal(signal.SIGTERM)
    out, err = doctor.communicate(timeout=HANG_S)
    assert doctor.returncode == 130, err
    assert "Doctor" in out
    assert "limit" in (place / "found.json").read_text()


def test_what_takes_long_is_told_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    progress = attach._Progress(0.0)
    for now, seen in ((1.0, ("forward", 4)), (2.0, ("generate", 4)), (9.0, ("generate", 4)), (43.0, ("generate", 4))):
        progress.tell(seen, now=now)
    progress.tell(("forward", 5), now=44.0)
    assert capsys.readouterr().err == "flatout: still in generation, 41 s (4 optimizer steps so far)\n"
