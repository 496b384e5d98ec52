"""Watching: in 80 columns, in a pipe, as JSON; it ends with the runs or with Ctrl-C, and leaves them alone."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from tests.insight import made
from tests.waiting import HANG_S

from flatout.errors import UsageError
from flatout.insight import watch
from flatout.insight.machine import Machine
from flatout.insight.story import tell
from flatout.output import out
from flatout.record import Run, StepRecord
from flatout.record.events import MemoryRanOut

MACHINE = Machine(sample=made.h200_sample(1.0, step=11), disk_free_gib=100.0, disk_total_gib=252.0)


def shown(*runs: Run, machine: Machine = MACHINE, width: int = 80, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    console.print(watch.view([tell(run) for run in runs], machine, console=console))
    return console.file.getvalue()


def flatout(*arguments: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flatout", "watch", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_eighty_columns_are_enough(h200: Run):
    text = shown(h200)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("Finished, step 600/600", "loss", "lr 6.00e-04", "tok/s", "it/s", "MFU", "phases  ", "criteria"):
        assert word in text


def test_a_gpu_is_one_line_in_eighty_columns(h200: Run):
    rows = [row for row in shown(h200).splitlines() if row.startswith(("GPU ", "0 "))]
    assert rows[0].split() == (
        ["GPU", "memory", "GiB", "busy", "SM", "tensor", "DRAM", "W", "temp", "MHz", "throttled"]
    )
    assert rows[1].split()[:3] == ["0", "29/140", "21%"]
    assert rows[1].split()[-4:] == ["58", "1860", "power", "cap"]


def test_what_is_not_known_of_a_gpu_is_na():
    text = shown(machine=Machine(sample={"gpus": [{"index": 0}]}))
    (row,) = [row for row in text.splitlines() if row.startswith("0 ")]
    assert row.split()[1:] == ["n/a"] * 9


def test_a_machine_without_gpus_says_so():
    assert "no GPU is visible to NVML here" in shown(machine=Machine(sample={"cpu": 0.25}))


def test_a_run_elsewhere_shows_its_own_machine(bare: Run):
    now = time.time()
    with bare.file("events", 0).open("a") as file:
        line = {"attempt": 1, "time": now, "kind": "attempt", "step": None, "data": {"pid": 1, "host": "elsewhere"}}
        file.write(json.dumps(line) + "\n")
    bare.file("monitor", 0).write_text(json.dumps(made.h200_sample(now, step=11)) + "\n")
    text = shown(bare, machine=Machine(sample={"cpu": 0.25}))
    assert "Running on elsewhere" in text
    assert text.index("elsewhere  CPU 10.0 %") < text.index("29/140") < text.index("this machine  CPU 25.0 %")


def test_findings_come_with_what_to_do(tmp_path: Path):
    run = made.make(tmp_path / "run", steps=20)
    run.note(MemoryRanOut(step=3, micro_batch=4, now=2))
    assert "! The run ran out of memory once, and the micro-batch was halved. -> plan.micro_batch=2" in shown(
        run, width=200
    )


def test_names_cannot_write_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name = "\x1b]0;owned\x07\x1b[2J[bold red]run[red]"
    run = Run.create(tmp_path / name, config_text="", config={}, plan={}, hardware={}, environment={})
    with run.recorder() as recorder:
        recorder.event("end", step=0, outcome={"stopped_by": "\x1b[31mSIGTERM"}, verdicts=[])
    for once in (True, False):
        watch.watch([run], console=out, once=once)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "[bold red]run[red]" in text


def test_a_curve_in_one_line():
    assert watch.spark([1.0, None, 3.0, 2.0]) == "▁ █▄"
    assert watch.spark([2.0, 2.0]) == "▁▁"
    assert watch.spark([]) == watch.spark([None]) == ""


def test_a_curve_only_where_the_terminal_can_write_it(h200: Run):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=80)
    console.print(watch.view([tell(h200)], Machine(sample={}), console=console))
    file.flush()
    assert b"loss" in file.buffer.getvalue()


# As a command


def test_in_a_pipe_it_is_one_plain_line_a_look_and_ends_with_the_run(h200: Run):
    out, err = flatout(str(h200.path)).communicate(timeout=HANG_S)
    (line,) = out.splitlines()
    assert line.startswith("h200: Finished, step 600/600  loss ")
    assert ("\x1b" not in line, err) == (True, "")


def test_json_is_one_look(h200: Run):
    process = flatout(str(h200.path), "--json")
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, "")
    seen = json.loads(out)
    assert seen["machine"]["ram_total_gib"] > 0
    assert seen["runs"][0]["figures"]["steps"]["value"] == 600
    assert "history" not in seen["runs"][0]


def test_without_a_run_it_watches_the_machine_until_it_is_interrupted():
    process = flatout("--interval", "0.25")
    assert process.stdout is not None
    assert "RAM" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, "")


def test_in_a_terminal_it_draws_and_leaves_cleanly(bare: Run):
    with bare.recorder() as recorder:  # this process is the run, and goes on
        recorder.step(StepRecord(attempt=1, step=0, time=time.time(), seconds=0.5, tokens=9, padded_tokens=9, loss=2.0))
        screen, other = os.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "flatout", "watch", str(bare.path)],
            stdout=other,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        )
        os.close(other)
        drawn = b""
        while b"this machine" not in drawn:
            drawn += os.read(screen, 4096)
        process.send_signal(signal.SIGINT)
        while True:  # to the end, which is an error on a terminal
            try:
                drawn += os.read(screen, 4096)
            except OSError:
                break
        assert (process.wait(timeout=HANG_S), process.stderr.read()) == (0, b"")
        os.close(screen)
    assert b"Running, step 1" in drawn
    assert drawn.rstrip().endswith(b"\x1b[?25h")  # the cursor is back


def test_a_folder_that_is_no_run_is_a_mistake(tmp_path: Path):
    process = flatout(str(tmp_path))
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (2, "")
    assert "is not a run folder" in err


def test_reading_changes_nothing_in_the_folder_of_a_live_run(tmp_path: Path):
    run = made.make(tmp_path / "run", steps=300, ended=False)

    def state() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in run.path.iterdir() if path.name != ".lock"}

    before = state()
    with run.lock():
        shown(run)
        watch.snapshot([run])
    assert state() == before


@pytest.mark.parametrize("verb", ["watch", "report"])
def test_reading_needs_no_torch(h200: Run, verb: str):
    program = f"""
import sys
sys.modules["torch"] = sys.modules["numpy"] = None  # importing them now fails
from flatout.cli import main
sys.argv = ["flatout", {verb!r}, {str(h200.path)!r}, {"--once" if verb == "watch" else "-o-"!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "h200" in done.stdout


def test_a_folder_that_goes_away_is_named(bare: Run):
    reader = watch.Reader(bare)
    reader.read()
    shutil.rmtree(bare.path)
    with pytest.raises(UsageError, match="is no longer a run folder"):
        reader.read()
