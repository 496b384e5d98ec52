"""`flatout examples`: the configurations that ship with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.cli.shared import escaped, file_path, out, print_plain
from flatout.errors import UsageError
from flatout.output import write_file


def _names(incomplete: str) -> list[str]:
    from flatout import gallery

    return [example.name for example in gallery.examples() if example.name.startswith(incomplete)]


def examples(
    name: Annotated[str | None, typer.Argument(help="example to print or copy", autocompletion=_names)] = None,
    to: Annotated[Path | None, typer.Option(help="file to write it to", parser=file_path, metavar="PATH")] = None,
) -> None:
    """List the shipped configurations, print one, or copy it to a file."""
    from flatout import gallery

    if name is None:
        for example in gallery.examples():
            out.print(f"[bold]{example.name}[/]  {escaped(example.title)}", highlight=False)
        out.print("\nPrint one: flatout examples NAME; copy it: flatout examples NAME --to FILE", style="dim")
        return
    text = gallery.find(name).text
    if to is None:
        out.write(text)
    elif to.exists():
        raise UsageError(f"{to} exists and is not overwritten: choose another file")
    elif not to.parent.is_dir():
        raise UsageError(f"{to} cannot be written: there is no folder {to.parent}")
    else:
        write_file(to, text, option="--to")
        print_plain(f"wrote {to}")
