"""`flatout launch`: ranks that start, restart and end together; scripts for SLURM that nobody can inject into."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest
import yaml
from tests.command import Command, flatout  # noqa: F401
from tests.faults.kills import JOBS
from tests.recipes.conftest import CONFIG
from tests.recipes.recipes_processes import events, trajectory, wait_for_step
from tests.waiting import wait_until
from tests.warm import two_ranks

from flatout.errors import UsageError
from flatout.launch import Job, exit_code_of
from flatout.launch.local import Rank, explained
from flatout.launch.slurm import Resources, script
from flatout.launch.torchrun import _first_error, command


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([130, 130], 130),
        ([2, 2], 2),
        ([4, -9], 4),
        ([0, -9], 4),
        ([75, -9], 75),
        ([1, 4], 4),
    ],
)
def test_one_exit_code_of_many(codes: list[int], expected: int) -> None:
    assert exit_code_of(codes) == expected


def test_the_first_failure_comes_last() -> None:
    def rank(number: int, code: int, *lines: str) -> Rank:
        process = subprocess.Popen([sys.executable, "-c", "pass"], stderr=subprocess.PIPE)
        process.wait()
        process.returncode = code
        found = Rank(number=number, process=process)
        found.lines.extend(lines)
        return found

    followed = rank(0, 4, "error: rank 0 lost the connection to another rank\n")
    assert explained([followed, rank(1, -9)]) == "rank 1 was killed by SIGKILL first\n"
    assert explained([followed, rank(1, 1, "Traceback\n", "ValueError: x\n")]).endswith("ValueError: x\n")


# -- SLURM


def job(**changes: object) -> Job:
    known: dict[str, object] = {"config": Path("/data/a.yaml"), "folder": Path("/runs/a"), "ranks": 8, "nodes": 2}
    return Job(**(known | changes))  # type: ignore[arg-type]


def test_a_readable_script() -> None:
    text = script(job(), Resources(gpus=8, partition="gpu"))
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=/runs/a-%j.out",
        "#SBATCH --partition=gpu",
    ):
        assert line in text.splitlines()
    assert text.index("#SBATCH --requeue") < text.index("MASTER_ADDR"), "directives after the first command are ignored"


def test_ranks_meet_on_a_port_that_is_free(tmp_path: Path) -> None:
    (path := tmp_path / "script").write_text(script(job(), Resources()))
    for tool, body in {"srun": 'echo "$MASTER_PORT" > port', "scontrol": "echo here", "squeue": ":"}.items():
        (stub := tmp_path / tool).write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)

    def chosen(port: int) -> int:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": str(port - 20000 + 12000)}
        text = path.read_text().replace(f"cd {Path.cwd()}", f"cd {tmp_path}")
        done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int((tmp_path / "port").read_text())

    def answers(port: int) -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", port)) == 0

    port = next(port for port in range(20000, 32000) if not answers(port))
    assert chosen(port) == port
    with socket.create_server(("127.0.0.1", port)):
        assert chosen(port) > port


HOSTILE = [
    "a b",
    "a;touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "a\n#SBATCH --uid=0",
    "a'b",
    'a"b',
    "-x",
    "a\\",
    "*",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_injected(name: str, tmp_path: Path) -> None:
    """Names are quoted in commands; a directive, which cannot be quoted, refuses them."""
    quoted = script(
        job(config=Path("/data") / f"{name}.yaml", overrides=(f"log.name={name}",)), Resources(container=name)
    )
    path = tmp_path / "script"
    path.write_text(quoted)
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert not [line for line in quoted.splitlines() if line.startswith("#SBATCH --uid")] or "\n#SBATCH" in name
    for changes in ({"partition": name}, {"account": name}, {"time": name}, {"memory": name}):
        with pytest.raises(UsageError, match="cannot be written as #SBATCH"):
            script(job(), Resources(**changes))  # type: ignore[arg-type]
    if name != "-x":  # nothing is wrong with x-x
        with pytest.raises(UsageError, match="#SBATCH --output"):
            script(job(folder=Path("/runs") / f"x{name}"), Resources())
    # Executed with everything stubbed, it runs no command of the name's.
    stub = tmp_path / "bin"
    stub.mkdir()
    for tool in ("srun", "scontrol", "squeue"):
        (stub / tool).write_text(
            '#!/bin/bash\nprintf "%s\\n" "$@" > srun.args\n' if tool == "srun" else "#!/bin/bash\n"
        )
        (stub / tool).chmod(0o755)
    environment = {
        "PATH": f"{stub}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n",
        "SLURM_NTASKS": "1",
    }
    text = quoted.replace(f"cd {Path.cwd()}", f"cd {tmp_path}")
    subprocess.run(["bash", "-c", text], env=environment, cwd=tmp_path, check=True)
    assert not (tmp_path / "pwned").exists()
    assert f"log.name={name}" in (tmp_path / "srun.args").read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_agrees(tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(script(job(), Resources(gpus=8, container="image")))
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_dry_run_prints_the_script_and_starts_nothing(flatout: Command, config: Path) -> None:  # noqa: F811
    done = flatout("launch", str(config), "train.steps=5", "--on", "slurm", "--ranks", "2", "--dry-run")
    assert done.code == 0
    assert done.out.startswith("#!/bin/bash\n#SBATCH --job-name=tiny-")
    assert not list(config.parent.glob("runs/*"))


def test_a_mistake_is_told_before_anything_starts(flatout: Command, config: Path) -> None:  # noqa: F811
    done = flatout("launch", str(config), "train.stebs=5", "--on", "slurm")
    assert done.code == 2
    assert "train.steps" in done.err
    assert flatout("launch", str(config), "--on", "moon").code == 2
    assert flatout("launch", str(config), "--on", "torchrun", "--nodes", "2", "--dry-run").code == 2


@pytest.mark.long
def test_a_stand_in_cluster_preempts_and_requeues(config: Path, tmp_path: Path) -> None:
    """`sbatch`, `srun` and `scontrol` of a few lines: the job is told to save, exits with 75, and resumes."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    tools = {
        "sbatch": 'cp "$2" job.sh; echo 41',
        "scontrol": '[ "$1" = requeue ] && echo "$2" >> requeued || echo 127.0.0.1',
        "squeue": "echo RUNNING",
        "srun": 'shift 1\nSLURM_PROCID=0 SLURM_LOCALID=0 "$@" & child=$!\n'
        "trap 'kill -USR2 $child' USR2\nwait $child; code=$?\n"
        "while kill -0 $child 2>/dev/null; do wait $child; code=$?; done; exit $code",
    }
    for name, body in tools.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}
    run = tmp_path / "run"
    submitted = subprocess.run(
        [sys.executable, "-m", "flatout", "launch", config, "train.steps=1000000", "--on", "slurm", "--run", run],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stderr
    assert submitted.stdout.startswith("job 41: ")
    assert (tmp_path / "run.job").read_text() == "41\n"
    slurm = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n", "SLURM_NTASKS": "1"}
    first = subprocess.Popen(["bash", tmp_path / "job.sh"], env=environment | slurm, cwd=tmp_path)
    wait_for_step(run, 3, first)
    (tasks,) = [p for p in psutil.Process(first.pid).children() if "srun" in " ".join(p.cmdline())]
    tasks.send_signal(signal.SIGUSR2)
    assert first.wait() == 75
    assert (tmp_path / "requeued").read_text() == "41\n"
    (ended,) = events(run, "end")
    text = (tmp_path / "job.sh").read_text().replace("train.steps=1000000", f"train.steps={ended['step'] + 3}")
    again = subprocess.run(["bash", "-c", text], env=environment | slurm | {"SLURM_RESTART_COUNT": "1"}, cwd=tmp_path)
    assert again.returncode == 0
    assert [e["step"] for e in events(run, "resume")] == [ended["step"]]
    assert [step for step, *_ in trajectory(run)] == list(range(ended["step"] + 3))


# -- two real ranks


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


def launched(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "flatout", "launch", *map(str, arguments)]
    with (cwd / "said").open("w") as said:
        return subprocess.Popen(line, stdout=said, stderr=said, text=True, cwd=cwd)


def ranks_of(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if (
                "train" in child.cmdline()
                and "flatout" in child.cmdline()
                and "torch.distributed.run" not in child.cmdline()
            ):
                found[child.environ()["RANK"]] = child
    return found


def test_a_killed_rank_is_restarted_and_a_signal_preempts(
    config: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    run = tmp_path / "run"
    process = launched(config, "train.steps=1000000", "save.every=5", "--ranks", 2, "--run", run, cwd=tmp_path)
    started.append(process)
    wait_for_step(run, 12, process)
    first = ranks_of(process)
    assert sorted(first) == ["0", "1"]
    first["1"].kill()
    wait_until(lambda: events(run, "resume"), process=process)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in first.values())
    assert "rank 1 was killed by SIGKILL first\nrestart 1 of 3" in (tmp_path / "said").read_text()
    second = ranks_of(process)
    at = events(run, "resume")[0]["step"]
    wait_for_step(run, at + 20, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 75, (tmp_path / "said").read_text()[-3000:]
    wait_until(lambda: not any(psutil.pid_exists(rank.pid) for rank in second.values()))
    (ended,) = events(run, "end")
    assert max(int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")) == ended["step"]


def test_a_single_rank_ends_with_its_launcher(
    config: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    run = tmp_path / "run"
    process = launched(config, "train.steps=1000000", "--ranks", 1, "--run", run, cwd=tmp_path)
    started.append(process)
    wait_for_step(run, 3, process)
    ranks = ranks_of(process)
    process.kill()
    process.wait()
    wait_until(lambda: not any(psutil.pid_exists(rank.pid) for rank in ranks.values()))
    (ended,) = events(run, "end")
    assert max(int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")) == ended["step"]


def test_torchrun_trains_and_is_preempted_with_75(
    config: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    run = tmp_path / "run"
    process = launched(config, "train.steps=1000000", "--on", "torchrun", "--ranks", 2, "--run", run, cwd=tmp_path)
    started.append(process)
    wait_for_step(run, 3, process)
    ranks = ranks_of(process)
    assert sorted(ranks) == ["0", "1"]
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 75, (tmp_path / "said").read_text()[-3000:]
    assert not any(psutil.pid_exists(rank.pid) for rank in ranks.values())


def test_the_first_error_under_torchrun_comes_last(config: Path, tmp_path: Path) -> None:
    """torchrun ends with a report of its own, which says nothing of the cause."""
    (tmp_path / "broken.py").write_text(
        "import os, time\n"
        "def objective(batch, head):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('the cause')\n"
        "    return {'loss': head.cross_entropy(batch.targets)}\n"
    )
    options = ("--on", "torchrun", "--ranks", 2, "--restarts", 1, "--run", tmp_path / "run")
    process = launched(config, "train.objective=broken:objective", *options, cwd=tmp_path)
    assert process.wait() == 4
    said = (tmp_path / "said").read_text()
    assert said.endswith("ValueError: the cause\n"), said[-3000:]
    assert "rank 1 failed first\nTraceback" in said


def test_a_rank_that_followed_another_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "0-1").write_text("ValueError: of an earlier attempt\n")
    (tmp_path / "1-0").write_text("error: rank 0 lost the connection to another rank, which ended first\n")
    assert _first_error(tmp_path) == "", "the rank that was killed could not say anything"
    (tmp_path / "1-1").write_text("ValueError: the cause\n")
    assert _first_error(tmp_path) == "rank 1 failed first\nValueError: the cause\n"


def test_torchrun_on_two_nodes_meets_at_the_first() -> None:
    text = command(job(restarts=2), rendezvous="host:29500")
    assert text[text.index("--rdzv-endpoint") + 1] == "host:29500"
    assert text[text.index("--nnodes") + 1] == "2"
    assert text[text.index("--max-restarts") + 1] == "2"


def on_ray(*arguments: object, run: Path, cwd: Path) -> subprocess.Popen[str]:
    pytest.importorskip("ray", reason="Ray is not installed")
    return launched(*arguments, "--on", "ray", "--ranks", 2, "--cpus", 1, "--run", run, cwd=cwd)


def ray_processes() -> dict[int, str]:
    """All actors and daemons of Ray on this machine, by id."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if line.startswith("ray::") or "/raylet" in line or "gcs_server" in line:
                found[process.pid] = line
    return found


@pytest.mark.parametrize("actor", [False, pytest.param(True, marks=pytest.mark.long)], ids=["rank", "actor"])
def test_ray_survives_a_kill_and_is_preempted(
    actor: bool, config: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """SIGKILL to a rank, or to the actor that it runs in: training goes on from a checkpoint, and nobody is left."""
    run, before = tmp_path / "run", set(ray_processes())
    process = on_ray(config, "train.steps=1000000", "save.every=5", run=run, cwd=tmp_path)
    started.append(process)
    wait_for_step(run, 12, process)
    ranks = {p.environ()["RANK"]: p for p in psutil.process_iter() if _is_rank(p, run)}
    assert sorted(ranks) == ["0", "1"]
    parent = ranks["1"].parent()
    assert parent is not None
    assert parent.cmdline()[0].startswith("ray::Actor")
    (parent if actor else ranks["1"]).kill()
    wait_until(lambda: events(run, "resume"), process=process)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks.values())
    wait_for_step(run, events(run, "resume")[0]["step"] + 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, (tmp_path / "said").read_text()[-3000:]
    said = (tmp_path / "said").read_text()
    assert "rank 1 was killed by SIGKILL first\nrestart 1 of 3" in said
    wait_until(lambda: not set(ray_processes()) - before)
    assert not [p for p in psutil.process_iter() if _is_rank(p, run)]


@pytest.mark.long
def test_ray_actors_grade(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """The rewards are those of graders on this machine, so that the training is the same."""
    JOBS["rl"].give(tmp_path)
    run, seen = tmp_path / "run", set[str]()
    process = on_ray(tmp_path / "job.yaml", "train.steps=4", run=run, cwd=tmp_path)
    started.append(process)

    def over() -> bool:
        time.sleep(0.5)  # looking at all processes takes long
        for worker in psutil.process_iter():
            with suppress(psutil.Error):
                parent = worker.parent()
                if "flatout.tasks.worker" not in worker.cmdline() or parent is None:
                    continue
                if (line := parent.cmdline()) and line[0].startswith("ray::"):
                    seen.add(line[0].partition(".")[0])
                elif _is_rank(parent, run):
                    seen.add("rank")
        return process.poll() is not None

    wait_until(over)
    assert process.wait() == 0, (tmp_path / "said").read_text()[-3000:]
    assert seen == {"ray::Served"}
    two_ranks("train", tmp_path / "job.yaml", "train.steps=4", "--run", tmp_path / "here", cwd=tmp_path)
    assert trajectory(run) == trajectory(tmp_path / "here")


def test_without_ray_the_way_out_is_told(
    config: Path,
    flatout: Command,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = flatout("launch", str(config), "--on", "ray", "--ranks", "2")
    assert done.code == 3
    assert "pip install" in done.err


def test_how_long_ray_is_waited_for_is_a_setting(
    config: Path,
    flatout: Command,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = MagicMock()  # a cluster that has no room for any actor
    ray.exceptions.RayActorError = ConnectionError
    ray.wait = lambda waiting, *, num_returns, timeout: time.sleep(timeout) or ([], waiting)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "a cluster")
    done = flatout("launch", str(config), "--on", "ray", "--ranks", "2", "--wait", "1.1")
    assert done.code == 3
    said = " ".join(done.err.split())
    assert "no room for 2 ranks of 4 CPUs within 1.1 s" in said
    assert "wait longer with --wait SECONDS" in said


def _is_rank(process: psutil.Process, run: Path) -> bool:
    with suppress(psutil.Error):
        return f"run={run}" in process.cmdline() and "RANK" in process.environ()
    return False
