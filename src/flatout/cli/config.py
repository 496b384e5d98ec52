"""`flatout config`: shows and checks a configuration, and prints its JSON Schema."""

from __future__ import annotations

import json

import typer

from flatout.cli.shared import AsJson, Config, Overrides, Trust, escaped, load_settings, out, print_json, print_plain

app = typer.Typer(help="Show and check a configuration.", no_args_is_help=True)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a configuration."""
    from flatout.config import schema as json_schema

    out.write(json.dumps(json_schema(), indent=2) + "\n")  # not masked: the name of a secret is not a secret


@app.command()
def show(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print every setting with its value and source."""
    from flatout.config import load
    from flatout.config import show as rows_of
    from flatout.record import redacted
    from flatout.terminal import table

    rows = rows_of(load(config, overrides=overrides or []))
    values = redacted({row.key: row.value for row in rows})  # masked by the name of the setting too
    if as_json:
        labels = {row.key: {"label": row.label} for row in rows if row.label != row.source}
        print_json(
            {row.key: {"value": values[row.key], "source": row.source} | labels.get(row.key, {}) for row in rows}
        )
        return
    drawn = table("", "setting", "value", "from", "description")
    for row in rows:
        style = "" if row.source == "default" else "bold"
        shown, source = "" if row.value is None else str(values[row.key]), row.label
        if row.value is None and row.key.startswith("plan."):
            shown, source = "auto", "plan"  # `flatout plan` prints the planned value and the reason
        drawn.add_row(row.key, f"[{style}]{escaped(shown)}[/]" if style else escaped(shown), source, escaped(row.help))
    out.print(drawn)


@app.command()
def validate(config: Config, overrides: Overrides = None, trust: Trust = None) -> None:
    """Check a configuration and the files it names; all mistakes in it come in one message."""
    from flatout.recipes.inputs import check_inputs

    check_inputs(load_settings(config, overrides, trust=trust))
    print_plain(f"{config}: valid")
