"""`flatout launch`: the same training on several ranks of this machine, by torchrun, on Ray or on SLURM."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from flatout import limits
from flatout.cli.shared import RunFolder, file_path, new_folder, out, print_plain, require_torch
from flatout.errors import UsageError
from flatout.launch import Job
from flatout.launch.several import Member, Place, places, ranks_each
from flatout.launch.slurm import Resources

if TYPE_CHECKING:
    from flatout.insight.jobs import JobRow

Where = Literal["local", "torchrun", "ray", "slurm"]


def launch(
    configs: Annotated[list[str], typer.Argument(metavar="CONFIG... [KEY=VALUE...]", help="YAML files, overrides")],
    on: Annotated[str, typer.Option("--on", help="local, torchrun, ray or slurm")] = "local",
    run: RunFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --run")] = False,
    nodes: Annotated[int, typer.Option(help="machines", min=1, max=limits.RANKS)] = 1,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="ranks on each machine (default: one per GPU, shared among the configurations)",
            min=1,
            max=limits.PROCESSES,
        ),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            help="configurations that run at a time (default: as many as there are GPUs for, or 1)",
            min=1,
            max=limits.PROCESSES,
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="restarts from the last checkpoint after a failure", min=0, max=limits.STEPS)
    ] = 3,
    rendezvous: Annotated[str | None, typer.Option(help="torchrun on several machines: HOST:PORT of the first")] = None,
    gpus: Annotated[int, typer.Option(help="slurm: GPUs of each machine", min=0, max=limits.PROCESSES)] = 0,
    cpus: Annotated[int, typer.Option(help="slurm and ray: CPUs of each rank", min=1, max=limits.THREADS)] = 4,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait", help="ray: seconds to wait until there is room for all ranks", min=1.0, max=limits.SECONDS
        ),
    ] = 60.0,
    memory: Annotated[str, typer.Option(help="slurm: memory of each machine; 0: all of it")] = "0",
    time: Annotated[str, typer.Option(help="slurm: time limit")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="slurm: partition")] = None,
    account: Annotated[str | None, typer.Option(help="slurm: account")] = None,
    container: Annotated[str | None, typer.Option(help="slurm: container image")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be started, and stop")] = False,
) -> None:
    """Train on several GPUs or machines; several configurations side by side, compared at the end."""
    from flatout.config import load
    from flatout.probe.launched import end_with_launcher

    end_with_launcher()
    files = [file_path(text) for text in configs if "=" not in text]
    overrides = tuple(text for text in configs if "=" in text)
    _check(files, on=on, run=run, resume=resume, nodes=nodes)
    for file in files:
        load(file, overrides=list(overrides))  # mistakes are told before anything starts
    devices = _devices(on)
    at_a_time = min(at_once or len(files), len(files))
    each = ranks or (gpus if on == "slurm" else ranks_each(devices=devices, jobs=at_a_time)) or 1
    folders = _folders(files, run)
    jobs = [
        Job(
            config=file.absolute(),
            folder=folder.absolute(),
            overrides=overrides,
            resume=resume,
            nodes=nodes,
            ranks=each,
            restarts=restarts,
        )
        for file, folder in zip(files, folders, strict=True)
    ]
    if on == "slurm":
        resources = Resources(
            gpus=gpus, cpus=cpus, memory=memory, time=time, partition=partition, account=account, container=container
        )
        _submit(jobs, resources, dry_run=dry_run)
        return
    require_torch()
    if len(jobs) == 1:
        raise typer.Exit(
            _start(jobs[0], on=on, rendezvous=rendezvous, cpus=cpus, wait_s=wait_s, dry_run=dry_run, place=Place())
        )
    if on == "ray" and os.environ.get("RAY_ADDRESS"):  # the cluster has its own cores and GPUs
        room = [Place()] * (at_a_time if at_once else 1)
    else:
        cores = sorted(os.sched_getaffinity(0))
        room = places(devices=devices, cores=cores, ranks=each, jobs=len(jobs), at_once=at_once and at_a_time)
    if dry_run:
        for job, place in zip(jobs, room * len(jobs), strict=False):
            _start(job, on=on, rendezvous=None, cpus=cpus, wait_s=wait_s, dry_run=True, place=place)
        print_plain(shlex.join(["flatout", "compare", *(str(job.folder) for job in jobs)]))
        return
    options = ["--on", on, "--restarts", str(restarts), *(["--nodes", str(nodes)] if nodes > 1 else [])]
    options += ["--cpus", str(cpus), "--wait", f"{wait_s:g}"] if on == "ray" else []
    raise typer.Exit(_side_by_side(jobs, options=options, room=room))


def _check(files: Sequence[Path], *, on: str, run: Path | None, resume: bool, nodes: int) -> None:
    if on not in get_args(Where):
        raise UsageError(f"--on {on!r} must be local, torchrun, ray or slurm")
    if not files:
        raise UsageError("launch needs at least one configuration file")
    if run is not None and len(files) > 1:
        raise UsageError("--run names one folder: leave it out for several configurations")
    if resume and run is None:
        raise UsageError("--resume needs --run FOLDER: the folder of the run to continue")
    if on == "local" and nodes > 1:
        raise UsageError("--on local is one machine: use torchrun, ray or slurm for several")
    if on == "torchrun" and nodes > 1 and len(files) > 1:
        raise UsageError(
            "torchrun on several machines takes one configuration at a time: launch each with a --run FOLDER that all "
            "machines can see, and then compare them with `flatout compare FOLDER FOLDER`"
        )


def _folders(files: Sequence[Path], run: Path | None) -> list[Path]:
    """The run folders. Those of several configurations lie in one folder, each under a name of its own."""
    if len(files) == 1:
        return [run or new_folder(files[0].stem)]
    group, folders = new_folder("launch"), list[Path]()
    for file in files:
        names = itertools.chain([file.stem], (f"{file.stem}-{number}" for number in itertools.count(2)))
        folders.append(next(group / name for name in names if group / name not in folders))
    return folders


def _devices(on: str) -> list[str]:
    """The GPUs of this machine that jobs may be given. A named Ray cluster places ranks itself."""
    from flatout.hardware import devices

    return [] if on == "slurm" or (on == "ray" and os.environ.get("RAY_ADDRESS")) else devices()


def _start(job: Job, *, on: str, rendezvous: str | None, cpus: int, wait_s: float, dry_run: bool, place: Place) -> int:
    from flatout.launch import local, torchrun

    if dry_run:
        line = torchrun.command(job, rendezvous=rendezvous) if on == "torchrun" else job.command
        print_plain(shlex.join([*(f"{name}={value}" for name, value in place.environment.items()), *line]))
        return 0
    if on == "torchrun":
        return torchrun.run(job, rendezvous=rendezvous)
    if on == "ray":
        from flatout.launch.on_ray import run as run_on_ray

        return run_on_ray(job, cpus=cpus, wait_s=wait_s)
    return local.run(job)


# -- SLURM


def _submit(jobs: Sequence[Job], resources: Resources, *, dry_run: bool) -> None:
    """Submits each job, and one that compares several when all have ended."""
    from flatout.launch import slurm

    if dry_run:
        for job in jobs:
            out.write(slurm.script(job, resources))
        if len(jobs) > 1:
            out.write(slurm.comparing_script(jobs, resources))
        return
    ids = []
    for job in jobs:
        ids.append(slurm.submit(job, resources))
        print_plain(f"job {ids[-1]}: flatout watch {shlex.quote(str(job.folder))}")
    if len(jobs) > 1:
        last = slurm.submit_comparison(jobs, resources, after=ids)
        print_plain(f"job {last} compares them when all have ended, in {slurm.comparison(jobs, '.out')}")


# -- several jobs on this machine


def _side_by_side(jobs: Sequence[Job], *, options: Sequence[str], room: Sequence[Place]) -> int:
    """Runs the jobs, each by a launcher of its own, and compares those that finished."""
    from flatout.insight.jobs import Board
    from flatout.launch import several

    members = [Member(name=job.folder.name, job=job) for job in jobs]
    width = max(len(member.name) for member in members)
    print_plain(_announcement(members, room))
    for member in members:
        member.command = [sys.executable, "-m", "flatout", *_arguments(member.job, options)]
    if out.is_terminal:
        os.environ["COLUMNS"] = str(max(80, out.width - width - 3))
    with Board(out) as board:
        code = several.run(
            members,
            places=room,
            say=lambda line: board.say(f"{line.member.name:{width}} | {line.text}"),
            show=lambda: board.show([_row(member) for member in members]),
        )
    _conclude(members, options=options)
    return code


def _arguments(job: Job, options: Sequence[str]) -> list[str]:
    """Of `flatout`, to launch one of the jobs alone."""
    return [
        *("launch", str(_short(job.config)), *job.overrides, "--run", str(_short(job.folder))),
        *("--ranks", str(job.ranks), *options),
    ]


def _announcement(members: Sequence[Member], room: Sequence[Place]) -> str:
    head = f"{len(members)} jobs, {len(room)} at a time"
    if any(place.devices or place.cores for place in room):
        return f"{head}: on {', on '.join(map(str, room))}"
    return f"{head}: each uses the whole machine (--jobs {len(members)} runs them side by side)"


def _row(member: Member) -> JobRow:
    from flatout.insight.jobs import JobRow

    place = "" if member.place is None else str(member.place)
    waits = "waiting" if member.place is None else "running"
    return JobRow(
        name=member.name,
        folder=member.job.folder,
        place=place,
        state=waits if member.code is None else member.ending,
        over=member.code is not None,
    )


def _conclude(members: Sequence[Member], *, options: Sequence[str]) -> None:
    """How each job ended, how those that did not finish go on, and the comparison of those that did."""
    from flatout.cli.compare import compare
    from flatout.insight.jobs import standing

    for member in members:
        stands = standing(member.job.folder)
        print_plain(": ".join(filter(None, [f"{member.name} {member.ending}", stands, member.reason])))
        if member.code != 0:
            again = ["flatout", *_arguments(member.job, options), "--resume"]
            print_plain(f"  {'continue' if stands else 'start it'} with: {shlex.join(again)}")
    finished = [_short(member.job.folder) for member in members if member.code == 0]
    if len(finished) > 1:
        out.print()
        try:
            compare(runs=finished, price=None, loss_margin=0.01, as_json=False)
        except UsageError as error:
            print_plain(f"no comparison: {error}")
    if len(finished) < len(members):
        folders = [str(_short(member.job.folder)) for member in members]
        print_plain(
            f"compare them as far as they are, or again after that: {shlex.join(['flatout', 'compare', *folders])}"
        )


def _short(path: Path) -> Path:
    """The path as it would be typed here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
