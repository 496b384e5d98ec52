"""`flatout train` and `flatout sample`: run a configuration file into a run folder, and exit with the right code."""

from __future__ import annotations

import glob
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout import recipes
from flatout.cli.shared import (
    Config,
    Overrides,
    RunFolder,
    Trust,
    Verbose,
    err,
    escaped,
    load_settings,
    new_folder,
    out,
    print_plain,
    require_torch,
    warn,
)
from flatout.errors import INTERRUPTED_EXIT, PREEMPTED_EXIT, RunFailed, UsageError

if TYPE_CHECKING:
    from flatout.config.settings import Settings
    from flatout.record import Outcome


def train(
    config: Config,
    overrides: Overrides = None,
    run: RunFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint in --run")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="plan and check the run, then stop")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 4 if the run misses one of its criteria")] = False,
    verbose: Verbose = False,
    trust: Trust = None,
) -> None:
    """Train from one configuration file into a measured, resumable run."""
    require_torch()
    settings = load_settings(config, overrides, trust=trust)
    folder = _run_folder(settings, run, config=config, resume=resume)
    if dry_run:
        # Imported late: torch takes seconds to import, and the user's mistakes are reported first.
        from flatout.recipes.setup import dry_run as checked_plan
        from flatout.record import redacted
        from flatout.terminal import plan_tables

        out.print(
            *plan_tables(redacted(checked_plan(settings, folder=folder, resume=resume).to_json()), verbose=verbose),
            sep="\n\n",
        )
        return
    outcome = _carry_out(recipes.run, settings, folder=folder, resume=resume, verbose=verbose)
    exit_if_stopped(outcome, folder, trust=trust)
    if strict:
        _require_criteria(settings, outcome)


def _require_criteria(settings: Settings, outcome: Outcome) -> None:
    """Fails if a criterion was missed, or could not be measured here."""
    from flatout.verdict import judge

    missed = [verdict for verdict in judge(settings.criteria, outcome) if verdict.met is not True]
    if missed:
        words = "; ".join(f"{one.criterion}: {one.got}, wanted {one.wanted}" for one in missed)
        raise RunFailed(f"the run is complete, but missed its criteria: {words}")


def sample(
    config: Config,
    overrides: Overrides = None,
    run: RunFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue with the first unfinished chunk in --run")] = False,
    trust: Trust = None,
) -> None:
    """Sample a task's questions and keep the correct answers: the first half of recipe rft, without training."""
    require_torch()
    from flatout.config.recipes import RECIPES, recipes_that

    settings = load_settings(config, overrides, trust=trust)
    if not RECIPES[settings.recipe].samples:
        able = recipes_that(lambda recipe: recipe.samples)
        raise UsageError(f"{config} has recipe {settings.recipe}, which samples nothing: use one of recipe {able}")
    folder = _run_folder(settings, run, config=config, resume=resume)
    from flatout.engine.ranks import from_environment
    from flatout.record import Run

    outcome = _carry_out(recipes.sample, settings, folder=folder, resume=resume)
    exit_if_stopped(outcome, folder, verb="sample", trust=trust)
    if not from_environment().first:
        return
    hint = json.dumps({"source": "jsonl", "path": str(Run.open(folder).samples_dir / "round-1.jsonl")})
    out.print(f"train on it with recipe sft and data: {hint}, or finish this run with\n  ", end="", highlight=False)
    print_plain(_resume_command("train", folder, trust=trust))


def _run_folder(settings: Settings, run: Path | None, *, config: Path, resume: bool) -> Path:
    run = run or (Path(settings.run) if settings.run else None)
    if run == Path():
        raise UsageError("--run is empty or the current folder: a run needs its own folder")
    if resume and run is None:
        raise UsageError("--resume needs --run FOLDER: the folder of the run to continue")
    if resume and run is not None and not run.exists() and os.environ.get("RANK", "0") == "0":
        warn([f"there is no run in {run} yet, so it starts from the beginning"])
    return run or _folder_of_job(config.stem) or new_folder(config.stem)


def _folder_of_job(stem: str) -> Path | None:
    """The folder that an earlier attempt of this job created, if a launcher restarted it without --run."""
    from flatout.probe import launched

    found = (folder for folder in sorted(Path("runs").glob(f"{glob.escape(stem)}-*"), reverse=True))
    return next((folder for folder in found if launched.continues(folder)), None) if launched.restarts() else None


def _carry_out(
    recipe: Callable[..., Outcome], settings: Settings, *, folder: Path, resume: bool, verbose: bool = False
) -> Outcome:
    from flatout.engine.ranks import from_environment
    from flatout.terminal import View

    sinks = [View(out, every=settings.log.every, verbose=verbose)] if from_environment().first else []
    try:
        return recipe(settings, folder=folder, resume=resume, sinks=sinks)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT) from None


def exit_if_stopped(outcome: Outcome, folder: Path, *, verb: str = "train", trust: str | None = None) -> None:
    """If a signal stopped the run: prints whether its state is saved and how to resume, and exits with its code."""
    if not outcome.stopped_by.startswith("SIG"):
        return
    from flatout.engine.ranks import from_environment

    ranks = from_environment()
    if ranks.first:
        safe = f"saved at step {outcome.steps}" if outcome.saved_step == outcome.steps else "nothing to save yet"
        if ranks.world > 1:
            begin = f"torchrun --nproc-per-node {ranks.world} -m flatout"
            command = f"{begin} {verb} {shlex.quote(f'{folder}/config.yaml')} {shlex.quote(f'run={folder}')} --resume"
            command += f" --trust-remote-code {shlex.quote(trust)}" if trust else ""
        else:
            command = _resume_command(verb, folder, trust=trust)
        err.print(f"{outcome.stopped_by}: {safe}. Resume with\n  {escaped(command)}", highlight=False, soft_wrap=True)
    raise typer.Exit(INTERRUPTED_EXIT if outcome.stopped_by == "SIGINT" else PREEMPTED_EXIT)


def _resume_command(verb: str, folder: Path, *, trust: str | None) -> str:
    trusting = f" --trust-remote-code {shlex.quote(trust)}" if trust else ""
    return f"flatout {verb} {shlex.quote(f'{folder}/config.yaml')} --run {shlex.quote(str(folder))} --resume{trusting}"
