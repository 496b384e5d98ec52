"""`flatout doctor`: finds out why training is slow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from flatout import limits
from flatout.cli.shared import err, file_path, new_folder, out, path_text
from flatout.errors import INTERRUPTED_EXIT


class OptionsAnywhere(TyperCommand):
    """Takes options on both sides of a run folder. Those behind a script's command are the script's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        what = given.get("what") or []
        ctx.allow_interspersed_args = bool(what) and os.path.isdir(what[0])
        return super().parse_args(ctx, args)


def doctor(
    what: Annotated[list[str] | None, typer.Argument(help="a run folder, or -- and the command of a script")] = None,
    steps: Annotated[int, typer.Option(help="optimizer steps to watch, warm-up included", max=limits.STEPS)] = 20,
    seconds: Annotated[
        float,
        typer.Option(
            help="stop watching this many seconds after the script starts, however far it got", max=limits.SECONDS
        ),
    ] = 600.0,
    window: Annotated[
        float,
        typer.Option(
            help="time steps for at most this many seconds after warm-up; replays add up to a third", max=limits.SECONDS
        ),
    ] = 60.0,
    then: Annotated[str, typer.Option(help="afterwards: stop the script, or let it continue")] = "stop",
    run: Annotated[
        Path | None,
        typer.Option(help="run folder to write (default: runs/doctor-TIME)", parser=file_path, metavar="PATH"),
    ] = None,
    json_to: Annotated[
        str | None,
        typer.Option("--json", help="file for the diagnosis, or - for stdout", parser=path_text, metavar="TEXT"),
    ] = None,
    proving: Annotated[bool, typer.Option("--prove", help="measure each fix that is a switch or a setting")] = False,
    repeats: Annotated[
        int, typer.Option(help="with --prove: how many times each fix is measured", min=1, max=limits.REPEATS)
    ] = 3,
    config: Annotated[
        Path | None,
        typer.Option(
            help="with RUN --prove: the configuration to train again for a few steps", parser=file_path, metavar="PATH"
        ),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="diagnose the training log of another tool", parser=file_path, metavar="PATH")
    ] = None,
    on: Annotated[str | None, typer.Option("--on", help="with --log: the machine it ran on, such as H100x8")] = None,
    params: Annotated[str | None, typer.Option(help="with --log: size of the model, such as 124M")] = None,
    target_loss: Annotated[
        float | None, typer.Option(help="with --log: estimate when the loss reaches this value")
    ] = None,
) -> None:
    """Find out why training is slow: an unchanged PyTorch script, a run folder, or a log."""
    from flatout.insight import doctor as verb

    try:
        exit_code = verb.main(
            what or [],
            asked=verb.asked_for(steps=steps, seconds=seconds, window=window, then=then, json_to=json_to),
            folder=run or new_folder("doctor"),
            consoles=(out, err),
            json_to=json_to,
            proving=proving,
            repeats=repeats,
            config=config,
            log=log,
            on=on,
            params=params,
            target_loss=target_loss,
        )
    except KeyboardInterrupt:
        exit_code = INTERRUPTED_EXIT
    raise typer.Exit(exit_code)
