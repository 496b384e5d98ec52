"""`flatout plan`: how a run would use a machine. Needs neither torch nor the machine."""

from __future__ import annotations

from typing import Annotated

import typer

from flatout.cli.shared import AsJson, Config, Overrides, Trust, Verbose, escaped, load_settings, out, print_json


def plan(
    config: Config,
    overrides: Overrides = None,
    on: Annotated[
        str | None,
        typer.Option("--on", help="a machine from the table, such as A100-80GBx8; CPU: this one, without its GPUs"),
    ] = None,
    trust: Trust = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Plan how a run uses this machine or a named one, with reasons and predictions. Needs no torch."""
    from flatout import hardware
    from flatout.files import cache_folder
    from flatout.plan import decide, job_of
    from flatout.record import redacted
    from flatout.terminal import plan_tables

    settings = load_settings(config, overrides, trust=trust)
    machine = hardware.detect() if on is None else hardware.parse(on)
    if machine == hardware.named("CPU"):
        machine = hardware.host()
    # A machine that was named is planned for without torch, which measuring needs.
    machine = hardware.with_cpu_facts(machine, cache=cache_folder(), remembered=on is not None)
    num_ranks = max(1, machine.num_gpus)
    made = decide(job_of(settings, hardware=machine, num_ranks=num_ranks))
    if as_json:
        print_json(made.to_json())
        return
    where = machine.name or machine.gpu or "CPU"
    out.print(f"[bold]{escaped(str(config))}[/] on {num_ranks} x {where}\n", highlight=False)
    out.print(*plan_tables(redacted(made.to_json()), verbose=verbose), sep="\n\n")
