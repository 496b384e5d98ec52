"""Run folders whose files hold wrong types, links or nothing to write to: one sentence that names the file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tests.insight import made
from tests.insight.conftest import Flatout

from flatout.insight.machine import MachineSampler
from flatout.record import Diagnosis, Finding, Run

TASK = {
    "task": "sums",
    "spec": "sums",
    "metric": "accuracy",
    "value": 0.5,
    "low": 0.4,
    "high": 0.6,
    "n": 9,
    "samples": 1,
}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with all kinds of files, as versions without checksums made them; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "older"
    run = made.make(folder, steps=16)
    with run.recorder() as recorder:
        for step in (10, 20, 30, 40):
            recorder.event("eval", step=step, val_loss=3.0 - step / 100)
        recorder.event("tasks", step=40, tasks=[TASK])
        recorder.event("oom", step=41, micro_batch=4, now=2, error="full")
        recorder.event("lines_dropped", num_lines=3)
        recorder.sample(made.h200_sample(made.BEGAN + 1, step=11))
    finding = Finding(cause="c", sentence="s", share=0.1, gain=0.2, status="estimated", evidence=("e",), fix="f")
    run.write_diagnosis(Diagnosis(verdict="v", limit={"share": 0.4, "tokens_per_s": 1.0}, findings=(finding,)))
    for name in ("plan.json", "hardware.json", "env.json"):
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in value.items() if k not in ("checksum", "run_id")}))
    return folder


@pytest.fixture
def damaged(older: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(MachineSampler, "second", MachineSampler.latest)  # nothing here is about the machine
    return Path(shutil.copytree(older, tmp_path / "run"))


def put(path: Path, *keys: str | int, value: Any, kind: str | None = None) -> None:
    """Writes another value into a JSON file; of lines into the last, or the last event of a kind."""
    *before, last = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    after: list[str] = []
    while kind is not None and json.loads(last)["kind"] != kind:
        after.insert(0, last)
        last = before.pop()
    whole = inner = json.loads(last)
    for key in keys[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text("\n".join([*before, json.dumps(whole), *after]) + "\n")


NAN = float("nan")
# File, event, place, value. A value of ... takes the key away.
DAMAGE: list[tuple[str, str | None, tuple[str | int, ...], Any]] = [
    *(("steps.jsonl", None, ("seconds",), value) for value in ("0.1", None, True, NAN, 10**400, [0.1], ..., 1e308)),
    *(("steps.jsonl", None, ("step",), value) for value in ("3", -1, 10**30, ...)),
    *(("steps.jsonl", None, ("loss",), value) for value in ("low", True, [1.0])),
    ("steps.jsonl", None, ("tokens",), None),
    ("steps.jsonl", None, ("spans",), {"forward": 1}),
    ("steps.jsonl", None, ("spans", 0, "seconds"), "fast"),
    ("steps.jsonl", None, ("memory", "peak_gib"), "much"),
    ("steps.jsonl", None, ("utilisation", "gpu"), "busy"),
    ("steps.jsonl", None, ("extra", "lr"), 10**400),
    ("events.jsonl", "eval", ("data", "val_loss"), "low"),
    ("events.jsonl", "eval", ("data", "val_loss"), ...),
    ("events.jsonl", "eval", ("data",), [1]),
    ("events.jsonl", "eval", ("time",), "today"),
    ("events.jsonl", "start", ("data", "total_steps"), "all"),
    ("events.jsonl", "attempt", ("data", "pid"), -5),
    ("events.jsonl", "active", ("data", "attention"), {"a": 1}),
    ("events.jsonl", "plan", ("data", "rates", "flops"), None),
    ("events.jsonl", "plan", ("data", "predicted", "memory_gib"), 3),
    ("events.jsonl", "plan", ("data", "decisions", "fp8"), "yes"),
    *(("events.jsonl", "hardware", ("data", "bandwidth"), value) for value in ("fast", -1, NAN)),
    ("events.jsonl", "hardware", ("data", "peak_flops"), None),
    ("events.jsonl", "hardware", ("data", "peak_flops", "fp8"), [1]),
    ("events.jsonl", "end", ("data", "outcome"), "good"),
    ("events.jsonl", "end", ("data", "verdicts"), [{"met": "yes"}]),
    ("events.jsonl", "tasks", ("data", "tasks", 0, "value"), "half"),
    ("events.jsonl", "oom", ("data", "now"), ...),
    ("events.jsonl", "lines_dropped", ("data", "num_lines"), "3"),
    ("events.jsonl", "save", ("data", "checkpoint"), ...),
    *(("monitor.jsonl", None, ("time",), value) for value in ("noon", NAN, ...)),
    ("monitor.jsonl", None, ("gpus",), {"0": 1}),
    ("monitor.jsonl", None, ("gpus", 0, "index"), ...),
    ("monitor.jsonl", None, ("gpus", 0, "busy"), ["x"]),
    ("monitor.jsonl", None, ("gpus", 0, "throttle"), "power"),
    ("plan.json", None, ("rates",), 1),
    ("plan.json", None, ("rates", "flops", "forward"), 0),
    ("plan.json", None, ("decisions", "workers"), "two"),
    ("config.json", None, ("criteria",), [1]),
    ("config.json", None, ("target",), "low"),
    ("findings.json", None, ("limit", "share"), "all"),
    ("findings.json", None, ("findings", 0, "gain"), "much"),
    ("findings.json", None, ("findings",), None),
]  # fmt: skip
# Which command cannot notice: it does not read the file, or takes the same facts from another one.
UNREAD = {
    ("doctor", "findings.json"),
    ("report", "plan.json"),
    ("watch", "plan.json"),
}


@pytest.mark.parametrize(("name", "kind", "keys", "value"), DAMAGE, ids=lambda part: str(part)[:24])
def test_a_wrong_type_is_named_with_its_file(
    flatout: Flatout, damaged: Path, name: str, kind: str | None, keys: tuple[str | int, ...], value: Any
) -> None:
    put(damaged / name, *keys, value=value, kind=kind)
    for command in (["report", damaged, "--json"], ["watch", damaged, "--json"], ["doctor", damaged]):
        code, out, err = flatout(*command)
        assert "Traceback" not in err
        if code or (command[0], name) not in UNREAD:
            assert code == 2, out
            assert f"{damaged / name}" in err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seconds", "x"), ("num_steps", 0), ("loss", "low"), ("tokens", None), ("end_byte", -1), ("fastest_s", 0.0),
        ("spans", {}), ("memory", {"peak_gib": NAN}), ("first_step", 10**30),
    ],
)  # fmt: skip
def test_damaged_roll_ups_are_made_again_from_the_steps(
    flatout: Flatout, older: Path, damaged: Path, key: str, value: Any
) -> None:
    put(damaged / "steps.rollup.jsonl", key, value=value)
    whole, found = (json.loads(flatout("report", folder, "--json")[1])[0] for folder in (older, damaged))
    assert found["figures"] == whole["figures"]
    assert flatout("doctor", damaged)[0] == 0


@pytest.mark.parametrize("name", ["hardware.json", "env.json", "config.json", "plan.json"])
def test_facts_nested_without_end_are_refused(flatout: Flatout, damaged: Path, name: str) -> None:
    (damaged / name).write_text('{"a":' * 900 + "1" + "}" * 900)
    code, _, err = flatout("report", damaged)
    assert code == 2
    assert re.search(rf"{damaged / name} is .*nested", err)


def test_criteria_of_another_type_are_refused(flatout: Flatout, tmp_path: Path) -> None:
    run = made.make(tmp_path / "run", steps=12, ended=False, config={"criteria": {"mfu": "high"}})
    code, _, err = flatout("report", run.path)
    assert code == 2
    assert "config.json, section criteria, is not what flatout writes there: mfu: 'high'" in err


def test_losses_that_are_no_numbers_are_reported(flatout: Flatout, tmp_path: Path) -> None:
    run = made.make(tmp_path / "run", steps=12)
    with run.recorder() as recorder:
        recorder.event("eval", step=3, val_loss=NAN)
        recorder.event("eval", step=4, val_loss=float("inf"))
        recorder.event("eval", step=5, val_loss=1e308)
        recorder.step(replace(list(run.steps())[-1], step=12, attempt=2, loss=1e308))
        recorder.event("tasks", step=12, tasks=[TASK | {"value": float("inf"), "low": 3.0, "high": float("inf")}])
    assert "Not finite in 1 places" in flatout("report", run.path, "-o", "-")[1]
    assert flatout("doctor", run.path)[0] == 0


def test_the_live_page_says_which_file_is_damaged(damaged: Path) -> None:
    from threading import Thread

    from flatout.insight.machine import sampling_machine
    from flatout.insight.web import Server, Site

    put(damaged / "steps.jsonl", "seconds", value="fast")
    with sampling_machine(disk=damaged, interval_s=1.0) as sampler:
        server = Server(Site([Run.open(damaged)], sampler))
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(HTTPError) as caught:
                urlopen(server.url, timeout=60)
            assert "steps.jsonl, the line at byte" in caught.value.read().decode()
        finally:
            server.shutdown()
            server.server_close()


# ---- links


@pytest.mark.parametrize("name", [".lock", "report.html", "findings.json", "steps.rollup.jsonl"])
def test_no_link_is_written_through(flatout: Flatout, tmp_path: Path, name: str) -> None:
    run = made.make(tmp_path / "run", steps=300).path
    (run / "steps.rollup.jsonl").unlink()  # so that roll-ups would be saved, under the lock
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(mine)
    for arguments in (["report", run], ["doctor", run], ["watch", run, "--once"]):
        flatout(*arguments)
    assert mine.read_text() == "mine"
    assert (run / name).is_symlink()


@pytest.mark.parametrize("name", ["config.yaml", "config.json", "plan.json", "hardware.json", "env.json",
    "events.jsonl", "steps.jsonl", "monitor.jsonl", "findings.json"])  # fmt: skip
def test_no_link_is_read_out_of_the_folder(flatout: Flatout, damaged: Path, tmp_path: Path, name: str) -> None:
    (damaged / name).rename(tmp_path / "elsewhere")
    (damaged / name).symlink_to(tmp_path / "elsewhere")
    code, _, err = flatout("report", damaged)
    assert code == 2
    assert f"{damaged / name} is a symbolic link that leaves {damaged}" in err
    assert not (damaged / "report.html").exists()


def test_a_run_folder_behind_a_link_is_fine(flatout: Flatout, damaged: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(damaged)
    assert flatout("report", tmp_path / "link")[0] == 0
    assert (damaged / "report.html").is_file()


def test_a_report_never_replaces_a_device(flatout: Flatout, damaged: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.md"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # whoever writes to it need not wait
    code, _, err = flatout("report", damaged, "-o", pipe)
    os.close(reader)
    assert code == 2
    assert "is not a regular file" in err
    assert pipe.is_fifo()


# ---- a folder that cannot be written


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"
"""


@pytest.fixture
def on_read_only(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`flatout ARGUMENTS` in a namespace where the folder `run` is mounted read-only."""
    run = made.make(tmp_path / "run", steps=300)
    run.file("rollups", 0).unlink()  # there is something to write
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh", str(run.path)]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a folder read-only")

    def flatout(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [*unshare, sys.executable, "-m", "flatout", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    return flatout


def test_a_read_only_run_is_read_and_what_must_be_written_says_so(
    on_read_only: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    report = on_read_only("report", "run")
    assert report.returncode == 3, report.stderr
    assert "run/report.html cannot be written: Read-only file system" in report.stderr
    assert on_read_only("report", "run", "-o", "elsewhere.html").returncode == 0
    assert on_read_only("watch", "run", "--json").returncode == 0
    doctor = on_read_only("doctor", "run")
    assert doctor.returncode == 0, doctor.stderr
    assert "Doctor" in doctor.stdout
    assert "not saved in the run" in doctor.stderr
    assert not any((tmp_path / "run").glob("*.rollup.jsonl"))
