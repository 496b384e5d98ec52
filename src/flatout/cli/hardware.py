"""`flatout hardware`: what this machine can do, from the table of GPUs, from measurements and from self-tests."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.cli.shared import AsJson, out, print_json, require_torch

if TYPE_CHECKING:
    from flatout.hardware import Hardware


def hardware(
    measure: Annotated[bool, typer.Option("--measure", help="time matmuls per dtype and a memory copy here")] = False,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="compare every optional path with the reference on this device")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what this machine can do."""
    from flatout import hardware as facts
    from flatout.terminal import hardware_table, measured_table, selftest_table

    found = facts.detect()
    if measure or selftest:
        require_torch()
    measured = facts.measure(found) if measure else None
    checks = _selftest(found) if selftest else None
    if as_json:
        known = found.to_json()
        known |= {"measured": measured.to_json()} if measured else {}
        known |= {"selftest": checks} if checks is not None else {}
        print_json(known)
        return
    out.print(hardware_table(found))
    if measured:
        out.print("", measured_table(found, measured), *measured.notes, sep="\n")
    if checks is not None:
        out.print("", selftest_table(checks), sep="\n")


def _selftest(found: Hardware) -> list[dict[str, Any]]:
    import torch

    from flatout.engine.resolve import check_build
    from flatout.engine.selftest import selftest

    check_build(found)
    return [asdict(check) for check in selftest(torch.device("cuda" if found.gpu else "cpu"))]
