"""How a run folder comes to be, who may change it, and what tells it from others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import UsageError
from flatout.record import Run

PARTS: dict[str, Any] = {"config": {}, "plan": {"decisions": {"workers": 2}}, "hardware": {}, "environment": {}}
FOLDERS = ["checkpoints_dir", "tokenizer_dir", "samples_dir", "profile_dir", "trackers_dir"]

# Makes a run, and is killed in the middle: right before or right after the rename that is told by its number.
KILLED = """
    import os, signal, sys
    from pathlib import Path
    from flatout.record import Run
    left, when = int(sys.argv[2]), sys.argv[3]
    rename, lock = Path.replace, Run.lock
    def killed(self, target):
        global left
        if not self.name.endswith(".tmp"):
            return rename(self, target)
        left -= 1
        if left == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(self, target)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    Path.replace = killed
    if left == 0:
        os.mkdir(sys.argv[1])
        if when == "after":
            open(sys.argv[1] + "/.lock", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    Run.create(sys.argv[1], config_text="a", config={}, plan={"decisions": {}}, hardware={}, environment={})
"""


def killed_while_making(folder: Path, *, rename: int, when: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(rename), when])
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rename", [1, 2, 3, 4, 5])
def test_a_run_killed_while_its_folder_was_made_is_made_again(tmp_path: Path, rename: int, when: str) -> None:
    folder = tmp_path / "run"
    killed_while_making(folder, rename=rename, when=when)
    if (rename, when) == (5, "after"):  # it was whole
        with pytest.raises(UsageError, match="already holds a run"):
            Run.create(folder, config_text="b", **PARTS)
        return
    run = Run.create(folder, config_text="b", **PARTS)
    assert run.config_text == "b"
    assert run.plan == PARTS["plan"]
    with run.lock(), run.recorder():
        pass
    assert not list(folder.glob(".*.tmp")), "what the killed writer left is swept away"


@pytest.mark.parametrize(
    ("files", "begun"),
    [
        (None, False),  # no folder at all
        ([], True),
        ([".lock"], True),
        ([".lock", ".plan.json.1.tmp"], True),
        (["notes.txt"], False),
        (["config.json"], False),  # of a model, say
        (["plan.json"], False),  # somebody's own
        (["steps.jsonl"], False),
    ],
)
def test_only_what_a_kill_leaves_is_made_again_by_resume(tmp_path: Path, files: list[str] | None, begun: bool) -> None:
    folder = tmp_path / "run"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
    assert Run.is_half_made(folder) is begun


@pytest.mark.parametrize("name", ["config.json", "plan.json", "env.json"])
def test_files_of_others_are_never_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(UsageError, match="nothing is overwritten"):
        Run.create(tmp_path, config_text="", **PARTS)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, '{"mine": 1}')]


def test_a_run_that_lost_its_config_is_not_taken_for_one_that_never_began(run: Run, make_step: Any) -> None:
    with run.recorder() as recorder:
        recorder.step(make_step(0))
    (run.path / "config.yaml").unlink()
    assert not Run.is_half_made(run.path)
    with pytest.raises(UsageError, match="nothing is overwritten"):
        Run.create(run.path, config_text="", **PARTS)


# Makes a run, and waits with its first file written until it is told to go on.
SLOW = """
    import sys
    from pathlib import Path
    from flatout.record import Run
    rename, told = Path.replace, []
    def replace(self, target):
        if not told:
            told.append(print("writing", flush=True))
            sys.stdin.readline()
        return rename(self, target)
    Path.replace = replace
    Run.create(sys.argv[1], config_text="theirs", config={}, plan={"by": "them"}, hardware={}, environment={})
"""


def test_of_two_that_begin_at_once_one_writes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert first.stdout is not None
    assert first.stdout.readline() == "writing\n"
    try:
        with pytest.raises(UsageError, match=rf"already in use by pid {first.pid}"):
            Run.create(folder, config_text="ours", **PARTS)
    finally:
        first.communicate("go on\n", timeout=60)
    assert first.returncode == 0
    with pytest.raises(UsageError, match="already holds a run"):
        Run.create(folder, config_text="ours", **PARTS)
    run = Run.open(folder)
    assert (run.config_text, run.plan) == ("theirs", {"by": "them"})


def test_a_new_run_is_locked_until_its_block_ends(tmp_path: Path) -> None:
    with Run.created(tmp_path / "run", config_text="", **PARTS) as run:
        with pytest.raises(UsageError, match="already in use"), run.lock():
            pass
        assert Run.open(run.path) == run
    with run.lock():
        pass


# ---- links


@pytest.mark.parametrize("name", ["report_path", *FOLDERS])
def test_no_path_leads_out_of_the_folder(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = getattr(run, name)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=rf"{path} is a symbolic link that leaves {run.path}"):
        getattr(run, name)


def test_a_stage_is_not_trained_elsewhere(run: Run, tmp_path: Path) -> None:
    (run.path / "taught").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="taught is a symbolic link that leaves"):
        run.stage_dir("taught")


@pytest.mark.parametrize("what", ["steps", "events", "monitor", "rollups"])
def test_nothing_is_recorded_through_a_link(run: Run, tmp_path: Path, what: Any) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    run.file(what, 0).symlink_to(mine)
    with pytest.raises(UsageError, match="symbolic link that leaves"):
        run.recorder()
    assert mine.read_text() == "mine\n"


@pytest.mark.parametrize("kind", ["link inside", "pipe"])
def test_the_lock_is_a_file_of_its_own(run: Run, kind: str) -> None:
    (run.path / ".lock").unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run.path / ".lock")
    else:
        (run.path / ".lock").symlink_to(run.path / "config.yaml")
    with pytest.raises(UsageError, match=r"\.lock is"), run.lock():
        pass
    assert run.config_text == "recipe: pretrain\n"


# ---- who it is, and whether it is as it was written


def test_every_run_has_an_id_of_its_own(run: Run, tmp_path: Path) -> None:
    other = Run.create(tmp_path / "other", config_text="", **PARTS)
    assert run.id is not None
    assert other.id is not None
    assert len(run.id) == 32
    assert int(run.id, 16) >= 0
    assert run.id != other.id
    assert json.loads((run.path / "env.json").read_text())["run_id"] == run.id
    run.replan({"micro_batch": 8})
    assert Run.open(run.path).id == run.id


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: one for key, one in value.items() if one is not ...}, indent=4))


@pytest.mark.parametrize(("name", "read"), [("plan", "plan"), ("hardware", "hardware"), ("env", "environment")])
@pytest.mark.parametrize("how", ["added", "without its checksum", "with another checksum"])
def test_an_edited_file_is_refused_with_the_way_out(run: Run, name: str, read: str, how: str) -> None:
    path = run.path / f"{name}.json"
    edit(path)
    getattr(run, read)  # set in another way, it is still the same
    checksum = {"added": {}, "without its checksum": {"checksum": ...}, "with another checksum": {"checksum": "0"}}[how]
    edit(path, more=1, **checksum)
    with pytest.raises(UsageError, match=rf"{path}.*restore it, or start again in another folder") as caught:
        getattr(run, read)
    assert ("set plan.KEY in the configuration" in str(caught.value)) is (name == "plan")


def test_a_plan_that_is_made_anew_is_sealed_anew(run: Run) -> None:
    run.replan({"micro_batch": 8, "hours": float("inf")})
    assert run.plan == {"micro_batch": 8, "hours": float("inf")}
    edit(run.path / "plan.json", micro_batch=16)
    with pytest.raises(UsageError, match="was changed after flatout wrote it"):
        _ = run.plan


def test_a_run_of_a_version_without_checksums_is_still_read(run: Run) -> None:
    for name in ("plan", "hardware", "env"):
        edit(run.path / f"{name}.json", checksum=..., run_id=...)
    assert run.plan == {"micro_batch": 4}
    assert run.environment == {"python": "3.11"}
    assert run.id is None


def test_temporary_files_of_the_living_stay(run: Run) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = [run.path / f".steps.rollup.jsonl.{pid}.tmp" for pid in (dead.pid, os.getppid())]
    for path in left:
        path.write_text("half")
    with run.lock(), run.recorder():
        pass
    assert [path.exists() for path in left] == [False, True]


def test_files_in_each_others_place_are_refused(run: Run) -> None:
    hardware, environment = run.path / "hardware.json", run.path / "env.json"
    mine, theirs = hardware.read_bytes(), environment.read_bytes()
    hardware.write_bytes(theirs)
    environment.write_bytes(mine)
    for read in (lambda: run.hardware, lambda: run.environment):
        with pytest.raises(UsageError, match=r"(hardware|env)\.json was changed after flatout wrote it"):
            read()
