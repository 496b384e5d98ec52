"""`flatout report`: writes runs as one HTML file, as Markdown or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.cli.shared import AsJson, file_path, out, print_plain
from flatout.errors import UsageError


def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders", metavar="RUN...", parser=file_path)],
    to: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="file to write, - for the terminal (default: RUN/report.html)",
            parser=file_path,
            metavar="PATH",
        ),
    ] = None,
    format: Annotated[str | None, typer.Option(help="html, md or json (default: by the file's name, or html)")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a report: one self-contained HTML file, Markdown or JSON. Several runs are shown side by side."""
    from flatout.insight import report as verb
    from flatout.output import write_file
    from flatout.record import Run

    opened = [Run.open(run) for run in runs]
    chosen = "json" if as_json else format or (to.suffix.lstrip(".") if to and to.suffix else "html")
    known = next((name for name in verb.FORMATS if name == chosen), None)
    if known is None:
        raise UsageError(f"--format {chosen!r} must be one of {', '.join(verb.FORMATS)}")
    if to is None and known == "html" and len(opened) > 1:
        raise UsageError("a report of several runs has no default file: choose one with -o FILE")
    text = verb.render(opened, format=known)
    if to is None and known == "html":
        to = opened[0].report_path
    if to is None or to == Path("-"):
        out.write(text)
    elif not to.parent.is_dir():
        raise UsageError(f"{to} cannot be written: there is no folder {to.parent}")
    elif to.exists() and not to.is_file():  # a device or a pipe, which must not be replaced
        raise UsageError(f"{to} is not a regular file and is not overwritten: -o - writes to the terminal")
    else:
        write_file(to, text, option="-o")
        print_plain(f"wrote {to}")
