"""`flatout launch A B`: several jobs at a time, each with its own GPUs or cores, stopped together, compared at the end.

Most tests stand a script in for the launcher of each job: what it does is up to the test.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests import warm
from tests.command import Command, Done, flatout  # noqa: F401
from tests.hardware.test_detect import FOUR, Driver, gpu, mig
from tests.recipes.conftest import CONFIG

from flatout import gallery
from flatout.cli import launch as verb

# -m flatout launch CONFIG ... --run FOLDER ...
STAND_IN = """#!/bin/bash
name=$(basename "$4" .yaml)
while [ "$1" != --run ]; do shift; done
folder=$2
source "$0-$name"
"""
SEEN = 'echo "sees ${CUDA_VISIBLE_DEVICES-all}"'

Launch = Callable[..., Done]


@pytest.fixture
def jobs(flatout: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:  # noqa: F811
    """`flatout launch` of jobs that are shell scripts, each given by the name of its configuration."""

    def run(*options: str, cards: object = (), **scripts: str) -> Done:
        monkeypatch.setitem(sys.modules, "pynvml", Driver(cards))  # type: ignore[arg-type]
        (stand_in := tmp_path / "python").write_text(STAND_IN)
        stand_in.chmod(0o755)
        for name, script in scripts.items():
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(CONFIG))
            (tmp_path / f"python-{name}").write_text(script)
        monkeypatch.setattr(sys, "executable", str(stand_in))
        return flatout("launch", *(f"{name}.yaml" for name in scripts), *options)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return run


def sees(done: Done) -> dict[str, str]:
    return dict(re.findall(r"^(\w+) +\| sees (.*)$", done.out, re.MULTILINE))


QUARTERED = [gpu(0, divided=True, instances=tuple(mig(number) for number in range(4)))]
DIVIDED = [gpu(0, divided=True, instances=(mig(0), mig(1)))]


@pytest.mark.parametrize(
    ("cards", "visible", "options", "expected"),
    [
        (FOUR, None, (), {"a": "0,1", "b": "2,3"}),
        (FOUR, "GPU-3aaa-bbbb,1,0,2", (), {"a": "GPU-3aaa-bbbb,1", "b": "0,2"}),
        (FOUR, "2,3", (), {"a": "2", "b": "3"}),
        (FOUR, None, ("--ranks", "1"), {"a": "0", "b": "1"}),
        (FOUR, None, ("--ranks", "4"), {"a": "0,1,2,3", "b": "0,1,2,3"}),
        (FOUR, None, ("--jobs", "1"), {"a": "0,1,2,3", "b": "0,1,2,3"}),
        (FOUR[:1], None, (), {"a": "0", "b": "0"}),
        (DIVIDED, None, (), {"a": "MIG-0ccc", "b": "MIG-1ccc"}),
        # A process sees one instance, so more of them are no use to a job.
        (QUARTERED, None, (), {"a": "MIG-0ccc", "b": "MIG-1ccc"}),
        (FOUR, "", (), {"a": "", "b": ""}),
    ],
)
def test_each_job_sees_gpus_of_its_own(
    jobs: Launch,
    monkeypatch: pytest.MonkeyPatch,
    cards: object,
    visible: str | None,
    options: tuple[str, ...],
    expected: dict[str, str],
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    done = jobs(*options, cards=cards, a=SEEN, b=SEEN)
    assert sees(done) == expected


def test_one_job_has_as_many_ranks_as_cuda_would_show_gpus(jobs: Launch, tmp_path: Path) -> None:
    for cards, ranks in ((FOUR, 4), (DIVIDED, 1), ([], 1)):
        done = jobs("--on", "torchrun", "--dry-run", cards=cards, a=SEEN)
        assert f"--nproc-per-node {ranks} " in done.out


def test_what_would_run_where_is_shown_beforehand(jobs: Launch) -> None:
    for on in ("local", "torchrun"):
        done = jobs("--on", on, "--dry-run", cards=FOUR, a=SEEN, b=SEEN)
        assert done.code == 0, done.err
        first, second, compared = done.out.splitlines()
        assert first.startswith("CUDA_VISIBLE_DEVICES=0,1 ")
        assert second.startswith("CUDA_VISIBLE_DEVICES=2,3 ")
        assert ("torch.distributed.run" in first) is (on == "torchrun")
        assert re.fullmatch(r"flatout compare \S+/a \S+/b", compared)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--jobs", "3", "--ranks", "2"), "--jobs 3 of 2 ranks need 6 GPUs, and 4 can be seen here"),
        (("--run", "here"), "--run names one folder"),
        (("--nodes", "2"), "--on local is one machine"),
        (("--nodes", "2", "--on", "torchrun"), "takes one configuration at a time"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(jobs: Launch, options: tuple[str, ...], says: str) -> None:
    done = jobs(*options, cards=FOUR, a=SEEN, b=SEEN, c=SEEN)
    assert done.code == 2
    assert says in " ".join(done.err.split())
    assert "sees" not in done.out


def test_without_gpus_jobs_run_one_after_the_other_unless_asked(jobs: Launch, tmp_path: Path) -> None:
    done = jobs(a="sleep 0.2; touch over", b="[ -e over ] && echo sees the end of a")
    assert "2 jobs, 1 at a time: each uses the whole machine (--jobs 2 runs them side by side)" in done.out
    assert sees(done) == {"b": "the end of a"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_jobs_side_by_side_on_a_cpu_have_cores_of_their_own(jobs: Launch, tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    # Each waits for the other, which no two jobs in turn could do.
    meet = "touch {0}; until [ -e {1} ]; do sleep 0.02; done; echo sees $(grep Cpus_allowed_list /proc/self/status)"
    done = jobs("--jobs", "2", a=meet.format("a-runs", "b-runs"), b=meet.format("b-runs", "a-runs"))
    found = sees(done)
    assert sorted(found) == ["a", "b"]
    assert found["a"] != found["b"]
    assert os.sched_getaffinity(0) == cores


def test_two_files_of_one_name_get_two_folders(jobs: Launch, tmp_path: Path, flatout: Command) -> None:  # noqa: F811
    jobs(a='echo "sees $folder"', b=SEEN)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.yaml").write_text((tmp_path / "a.yaml").read_text())
    done = flatout("launch", "a.yaml", "other/a.yaml")
    folders = re.findall(r"sees (\S+)", done.out)
    assert [Path(folder).name for folder in folders] == ["a", "a-2"]


def test_a_job_that_is_killed_is_named_with_what_remains_possible(jobs: Launch) -> None:
    done = jobs("--jobs", "1", a="echo begun; kill -KILL $$", b="echo begun", c="echo error: no room; exit 3")
    assert done.code == 4
    assert "a | begun" in done.out
    assert "a was killed by SIGKILL" in done.out
    assert "b finished" in done.out
    assert "c failed with exit code 3: no room" in done.out
    again = re.findall(r"start it with: flatout launch (\w)\.yaml --run (runs/\S+) .*--resume", done.out)
    assert [name for name, _ in again] == ["a", "c"]
    assert re.search(
        r"compare them as far as they are, or again after that: flatout compare runs/\S+/a runs/\S+/b runs/\S+/c",
        done.out,
    )


def test_ctrl_c_stops_all_jobs_and_starts_no_more(jobs: Launch) -> None:
    stopped = "trap 'echo saved; exit 130' INT; touch {0}; {1} while true; do sleep 0.02; done"
    first = stopped.format("a-runs", "until [ -e b-runs ]; do sleep 0.02; done; kill -INT $PPID;")
    done = jobs("--ranks", "2", cards=FOUR, a=first, b=stopped.format("b-runs", ""), c="touch c-runs")
    assert done.code == 130
    assert {"a | saved", "b | saved"} <= set(done.out.splitlines())
    assert "a was stopped" in done.out
    assert "b was stopped" in done.out
    assert "c was not started" in done.out
    assert not Path("c-runs").exists()
    assert len(re.findall(r"flatout launch [abc].yaml .* --resume$", done.out, re.MULTILINE)) == 3


def test_a_terminal_shows_one_table_of_all_jobs(jobs: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb.out, "_force_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    shown = jobs(cards=FOUR, a=SEEN, b="echo '\033[2Jboo'; exit 4").out
    shown = re.sub(r"\033\[[0-9;?]*[mlhKA]", "", shown)
    assert re.search(r"job +on +state +step +loss +tokens/s +left", shown)
    assert re.search(r"a +GPUs 0,1 +finished", shown)
    assert re.search(r"b +GPUs 2,3 +failed with exit code 4", shown)
    assert "a | sees 0,1" in shown
    assert "\033[2J" not in shown, "what jobs print cannot move the cursor"


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that numbers jobs from 41; the file with a line for each call."""
    calls, stub = tmp_path / "calls", tmp_path / "bin" / "sbatch"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/bash\necho "$@" >> {calls}\necho $((40 + $(wc -l < {calls})))\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    return calls


def test_slurm_compares_when_all_jobs_have_ended(jobs: Launch, sbatch: Path, tmp_path: Path) -> None:
    done = jobs("--on", "slurm", "--gpus", "8", "--partition", "big", a=SEEN, b=SEEN)
    assert done.code == 0, done.err
    first, second, last = sbatch.read_text().splitlines()
    assert first.endswith("/a.sbatch")
    assert second.endswith("/b.sbatch")
    assert "--dependency=afterany:41:42 " in last
    text = Path(last.split()[-1]).read_text()
    (folder,) = (tmp_path / "runs").iterdir()
    assert text.splitlines()[-1].endswith(f"-m flatout compare {folder}/a {folder}/b")
    assert "#SBATCH --partition=big" in text.splitlines()
    assert "gpus" not in text
    assert f"job 43 compares them when all have ended, in {folder}/compare-a.out" in done.out


def test_slurm_shows_all_scripts_beforehand(jobs: Launch) -> None:
    done = jobs("--on", "slurm", "--dry-run", a=SEEN, b=SEEN)
    assert done.code == 0, done.err
    assert done.out.count("#!/bin/bash") == 3
    assert "flatout compare" in done.out


SMALL = (
    *("rl.teach=1", "rl.prompts=4", "rl.samples=2", "rl.critic_warmup=0", "rl.graders=1", "train.steps=4"),
    *(
        "train.warmup_steps=1",
        "model.hidden=32",
        "model.layers=1",
        "eval.every=null",
        "eval.tasks=[]",
        "save.every=null",
    ),
    "log.every=1",
)


def test_the_pair_of_examples_runs_to_the_comparison(tmp_path: Path) -> None:
    for name in ("mixed", "pcgrad"):
        (tmp_path / f"{name}.yaml").write_text(gallery.find(f"rl-guru-{name}-cpu").text)
    done = warm.flatout("launch", "mixed.yaml", "pcgrad.yaml", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (mixed,), (pcgrad,) = tmp_path.glob("runs/*/mixed"), tmp_path.glob("runs/*/pcgrad")
    out = done.stdout
    assert re.search(r"^mixed  \| .*step 4/4", out, re.MULTILINE)
    assert re.search(r"^pcgrad \| .*step 4/4", out, re.MULTILINE)
    compared = out[out.index("\nRuns") :]
    settings = compared[compared.index("Settings that differ") : compared.index("pcgrad against mixed:")]
    assert [line.split() for line in settings.splitlines()[1:] if line.strip()][1:] == [
        ["mtl.method", "mixed", "pcgrad"]
    ]
    assert re.search(r"state +Finished +Finished", compared)
    assert re.search(r"saves, at least 3 +\d: not met +\d: not met", compared)
    assert "Reward in the last tenth" in compared
    assert (mixed / "config.yaml").exists()
    assert (pcgrad / "config.yaml").exists()
