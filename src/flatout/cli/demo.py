"""`flatout demo`: the command; the demo itself is in `flatout.demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.cli.shared import file_path, new_folder, out, require_torch
from flatout.cli.train import exit_if_stopped
from flatout.errors import INTERRUPTED_EXIT, RunFailed


def demo(
    run: Annotated[
        Path | None, typer.Option(help="run folder (default: runs/demo-TIME)", parser=file_path, metavar="PATH")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="do not measure the fixes")] = False,
) -> None:
    """Diagnose a slow script, measure the fixes, and train the same model with flatout, in minutes on this machine."""
    require_torch()
    from flatout import demo as story

    folder = run or new_folder("demo")
    try:
        outcome = story.run(folder, console=out, repeats=0 if quick else story.REPEATS)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT) from None
    exit_if_stopped(outcome, folder)
    if not outcome.val_losses[-1] < outcome.val_losses[0]:
        raise RunFailed("the demo failed: its validation loss did not fall")
