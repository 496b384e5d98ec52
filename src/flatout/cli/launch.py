"""`flatout launch`: the same training on several ranks of this machine, by torchrun, on Ray or on SLURM."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatout.cli.shared import RunFolder, new_folder, out, print_plain, require_torch
from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.launch import Job

Where = Literal["local", "torchrun", "ray", "slurm"]


def launch(
    configs: Annotated[list[str], typer.Argument(metavar="CONFIG... [KEY=VALUE...]", help="YAML files, overrides")],
    on: Annotated[str, typer.Option("--on", help="local, torchrun, ray or slurm")] = "local",
    run: RunFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --run")] = False,
    nodes: Annotated[int, typer.Option(help="machines", min=1)] = 1,
    ranks: Annotated[int | None, typer.Option(help="ranks on each machine (default: its GPUs, or 1)", min=1)] = None,
    restarts: Annotated[int, typer.Option(help="restarts from the last checkpoint after a failure", min=0)] = 3,
    rendezvous: Annotated[str | None, typer.Option(help="torchrun on several machines: HOST:PORT of the first")] = None,
    gpus: Annotated[int, typer.Option(help="slurm: GPUs of each machine", min=0)] = 0,
    cpus: Annotated[int, typer.Option(help="slurm and ray: CPUs of each rank", min=1)] = 4,
    memory: Annotated[str, typer.Option(help="slurm: memory of each machine; 0: all of it")] = "0",
    time: Annotated[str, typer.Option(help="slurm: time limit")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="slurm: partition")] = None,
    account: Annotated[str | None, typer.Option(help="slurm: account")] = None,
    container: Annotated[str | None, typer.Option(help="slurm: container image")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be started, and stop")] = False,
) -> None:
    """Train on several GPUs or machines; several configurations side by side, compared at the end."""
    from flatout.config import load
    from flatout.launch import Job

    if on not in ("local", "torchrun", "ray", "slurm"):
        raise UsageError(f"--on {on!r} must be local, torchrun, ray or slurm")
    files = [Path(text) for text in configs if "=" not in text]
    overrides = tuple(text for text in configs if "=" in text)
    if not files:
        raise UsageError("launch needs at least one configuration file")
    if run is not None and len(files) > 1:
        raise UsageError("--run names one folder: leave it out for several configurations")
    if resume and run is None:
        raise UsageError("--resume needs --run FOLDER: the folder of the run to continue")
    for file in files:
        load(file, overrides=list(overrides))  # mistakes are told before anything starts
    jobs = [
        Job(
            config=file.absolute(),
            folder=(run or new_folder(file.stem)).absolute(),
            overrides=overrides,
            resume=resume,
            nodes=nodes,
            ranks=ranks or (gpus if on == "slurm" and gpus else _gpus()) or 1,
            restarts=restarts,
        )
        for file in files
    ]
    if on == "slurm":
        from flatout.launch.slurm import Resources, script, submit

        resources = Resources(
            gpus=gpus, cpus=cpus, memory=memory, time=time, partition=partition, account=account, container=container
        )
        for job in jobs:
            if dry_run:
                sys.stdout.write(script(job, resources))
            else:
                print_plain(f"job {submit(job, resources)}: flatout watch {shlex.quote(str(job.folder))}")
        return
    require_torch()
    if len(jobs) > 1:
        raise typer.Exit(_side_by_side(jobs, on=on, restarts=restarts, dry_run=dry_run))
    raise typer.Exit(_start(jobs[0], on=on, rendezvous=rendezvous, cpus=cpus, dry_run=dry_run))


def _start(job: Job, *, on: str, rendezvous: str | None, cpus: int, dry_run: bool) -> int:
    from flatout.launch import local, torchrun

    if on == "local" and job.nodes > 1:
        raise UsageError("--on local is one machine: use torchrun, ray or slurm for several")
    if dry_run:
        print_plain(shlex.join(torchrun.command(job, rendezvous=rendezvous) if on == "torchrun" else job.command))
        return 0
    if on == "torchrun":
        return torchrun.run(job, rendezvous=rendezvous)
    if on == "ray":
        from flatout.launch.on_ray import run as run_on_ray

        return run_on_ray(job, cpus=cpus)
    return local.run(job)


def _side_by_side(jobs: list[Job], *, on: str, restarts: int, dry_run: bool) -> int:
    """Runs as many jobs at a time as there are GPUs for, one on a machine without, and compares them."""
    waiting, running, codes = list(jobs), list[tuple[subprocess.Popen[bytes], Job]](), dict[str, int]()
    slots = max(1, _gpus() // jobs[0].ranks)
    while waiting or running:
        while waiting and len(running) < slots:
            job = waiting.pop(0)
            command = [sys.executable, "-m", "flatout", "launch", str(job.config), *job.overrides, "--on", on]
            command += ["--run", str(job.folder), "--ranks", str(job.ranks), "--restarts", str(restarts)]
            running.append((subprocess.Popen([*command, *(["--dry-run"] if dry_run else [])]), job))
        process, job = running.pop(0)
        codes[job.name] = process.wait()
    if not dry_run and all(code == 0 for code in codes.values()):
        command = [sys.executable, "-m", "flatout", "compare", *(str(job.folder) for job in jobs)]
        return subprocess.run(command).returncode
    for name, code in codes.items():
        out.print(f"{name}: exit code {code}", highlight=False)
    return max(codes.values())


def _gpus() -> int:
    from flatout.hardware import detect

    return detect().num_gpus
