"""Writes a job as a SLURM batch script, one task per rank, and submits it. Preempted after a save, it requeues itself.

`srun` starts the ranks instead of torchrun, because torchrun turns the exit code 75 of a preempted rank into 1.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout import files
from flatout.errors import EnvironmentLacks, UsageError
from flatout.launch.job import FINAL, Job
from flatout.probe.launched import JOB, RESTARTS

# Values of #SBATCH lines cannot be quoted: anything else is refused.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@%+=,-]*")


@dataclass(frozen=True, kw_only=True)
class Resources:
    gpus: int = 0  # on each node
    cpus: int = 4  # of each rank
    memory: str = "0"  # of each node; 0: all of it
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    warning_s: int = 120  # before the end of the time, the ranks are told to save
    container: str | None = None


def _directives(values: Mapping[str, str | None]) -> list[str]:
    for name, value in values.items():
        if value is not None and not _PLAIN.fullmatch(value.removeprefix("/")):
            raise UsageError(
                f"{value!r} cannot be written as #SBATCH --{name}: use letters, digits and . _ : / @ % + = , - only"
            )
    return [f"#SBATCH --{name}={value}" for name, value in values.items() if value is not None]


def script(job: Job, resources: Resources) -> str:
    """The batch script. Everything that is not ours is quoted, or refused where it cannot be."""
    folder = job.folder.absolute()
    directives = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ranks),
        "gpus-per-node": str(resources.gpus) if resources.gpus else None,
        "cpus-per-task": str(resources.cpus),
        "mem": resources.memory,
        "time": resources.time,
        "partition": resources.partition,
        "account": resources.account,
        "signal": f"USR2@{resources.warning_s}",
        "output": f"{folder}-%j.out",
    }
    lines = _directives(directives)
    container = "" if resources.container is None else f" --container-image={shlex.quote(resources.container)}"
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
            "",
            "# The ranks meet at the first node. A requeued job keeps its id, and by it the ranks resume the run.",
            'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
            'WORLD_SIZE="$SLURM_NTASKS"',
            f'{JOB}="slurm-$SLURM_JOB_ID"',
            f"export MASTER_ADDR WORLD_SIZE {JOB}",
            "",
            "# Whether something listens on the port; this shell runs on the first node, too.",
            'is_taken() { (exec 3<> "/dev/tcp/$1/$MASTER_PORT") 2> /dev/null; }',
            "",
            "# Signals are for the ranks, which save. This shell waits for them.",
            "trap : TERM USR1 USR2",
            f"cd {shlex.quote(str(Path.cwd()))} || exit 3",
            f"for restart in {{0..{job.restarts}}}; do",
            f'  export {RESTARTS}="$((${{SLURM_RESTART_COUNT:-0}} + restart))"',
            '  export MASTER_PORT="$((20000 + (SLURM_JOB_ID + restart) % 12000))"',
            '  while is_taken 127.0.0.1 || is_taken "$MASTER_ADDR"; do',
            '    MASTER_PORT="$((MASTER_PORT + 1))"',
            "  done",
            "  # shellcheck disable=SC2016  # expanded by each task",
            f"  srun --kill-on-bad-exit=0{container} bash -c \\",
            '    \'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"; exec "$@"\' rank \\',
            f"    {shlex.join(job.command)}",
            "  code=$?",
            "  # Any other end is a failure, after which the ranks go on from the last checkpoint.",
            f'  case "$code" in {"|".join(map(str, FINAL))}) break ;; esac',
            "done",
            "",
            "# 75: stopped after a complete save. A job that somebody cancelled stays so.",
            'if [ "$code" -eq 75 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def comparing_script(jobs: Sequence[Job], resources: Resources) -> str:
    """The batch script that compares the runs of several jobs; what there is of them, if one failed."""
    directives = {
        "job-name": f"compare-{jobs[0].name}",
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": "1",
        "time": "00:30:00",
        "partition": resources.partition,
        "account": resources.account,
        "output": str(comparison(jobs, ".out")),
    }
    container = () if resources.container is None else ("srun", f"--container-image={resources.container}")
    compared = shlex.join([*container, sys.executable, "-m", "flatout", "compare", *(str(job.folder) for job in jobs)])
    return "\n".join(
        ["#!/bin/bash", *_directives(directives), "", f"cd {shlex.quote(str(Path.cwd()))} || exit 3", compared, ""]
    )


def comparison(jobs: Sequence[Job], suffix: str) -> Path:
    """A file of the job that compares, beside the first run folder."""
    return jobs[0].folder.absolute().with_name(f"compare-{jobs[0].folder.name}{suffix}")


def submit(job: Job, resources: Resources) -> str:
    """Submits the script, which stays beside the run folder, and returns the id of the job."""
    return _submitted(job.folder.absolute().with_name(f"{job.folder.name}.sbatch"), script(job, resources))


def submit_comparison(jobs: Sequence[Job], resources: Resources, *, after: Sequence[str]) -> str:
    """Submits the comparison of several jobs, which starts when all have ended, however they ended."""
    options = [f"--dependency=afterany:{':'.join(after)}"]
    return _submitted(comparison(jobs, ".sbatch"), comparing_script(jobs, resources), options)


def _submitted(path: Path, text: str, options: Sequence[str] = ()) -> str:
    """The id of the job that runs the script at this path from now on."""
    if shutil.which("sbatch") is None:
        raise EnvironmentLacks("there is no sbatch on this machine: submit from a login node, or look with --dry-run")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, text.encode())
    done = subprocess.run(["sbatch", "--parsable", *options, str(path)], capture_output=True, text=True)
    number = done.stdout.strip().partition(";")[0]
    if done.returncode != 0 or not number.isdecimal():
        said = (done.stderr or done.stdout).strip()
        raise EnvironmentLacks(f"sbatch refused {path}: {said}")
    files.write_atomic(path.with_suffix(".job"), f"{number}\n".encode())
    return number
