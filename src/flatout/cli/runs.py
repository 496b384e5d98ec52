"""`flatout runs`: lists the run folders in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.cli.shared import AsJson, escaped, file_path, out, print_json, warn


def runs(
    folder: Annotated[Path, typer.Argument(help="folder that holds run folders", parser=file_path)] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs: state, step, loss, speed; the newest first."""
    from flatout.insight import found

    listed = found.listed(folder)
    if as_json:
        print_json(found.to_json(listed))
    elif not listed:
        out.print(f"no run in {escaped(str(folder))}", highlight=False)
    else:
        out.print(found.runs_table(listed, width=out.width))
        warn(found.problems(listed))
