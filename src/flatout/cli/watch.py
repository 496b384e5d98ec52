"""`flatout watch`: shows runs, or this machine, in the terminal or as a live page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout import limits
from flatout.cli.shared import AsJson, file_path, out, print_json, print_plain
from flatout.errors import INTERRUPTED_EXIT

if TYPE_CHECKING:
    from flatout.record import Run


def watch(
    runs: Annotated[list[Path] | None, typer.Argument(help="run folders", metavar="[RUN...]", parser=file_path)] = None,
    web: Annotated[bool, typer.Option("--web", help="a live page on 127.0.0.1 instead of the terminal")] = False,
    once: Annotated[bool, typer.Option("--once", help="print once, then exit")] = False,
    interval: Annotated[float, typer.Option(help="seconds between updates", min=0.25, max=limits.SECONDS)] = 2.0,
    port: Annotated[
        int, typer.Option(help="port of the live page (default: any free one)", min=0, max=limits.PORT)
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Watch running or finished runs; without a name, the active runs in ./runs, or else this machine.

    A run folder that is not there yet is waited for.
    """
    from flatout.insight import watch as verb
    from flatout.insight.found import running
    from flatout.record import Run

    if not once and not as_json:
        _wait_for([run for run in runs or [] if not run.exists()])
    opened = [Run.open(run) for run in runs or []] if runs else running(Path("runs"))
    if as_json:
        print_json(verb.snapshot(opened))
    elif web:
        _serve(opened, port=port)
    else:
        verb.watch(opened, console=out, once=once, interval_s=interval)


def _wait_for(missing: list[Path]) -> None:
    """Returns when these are run folders."""
    import time

    from flatout.record import Run

    for path in missing:
        print_plain(f"waiting for {path}, which does not exist yet; Ctrl-C stops")
        try:
            while not Run.is_at(path):
                time.sleep(0.25)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED_EXIT) from None


def _serve(runs: list[Run], *, port: int) -> None:
    from flatout.insight.machine import sampling_machine
    from flatout.insight.web import Server, Site

    with sampling_machine(disk=runs[0].path if runs else Path(), interval_s=1.0) as sampler:
        server = Server(Site(runs, sampler), port=port)
        notice = "The page opens only on this machine and only with this full address. Ctrl-C stops the server."
        out.print(f"{server.url}\n{notice}", highlight=False, soft_wrap=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            server.server_close()
