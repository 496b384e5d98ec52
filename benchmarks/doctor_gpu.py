"""Runs the doctor on planted GPU causes: is the cause named first, and is its estimated gain near the measured one?

    python -m benchmarks.doctor_gpu --budget 280 --to benchmarks/results/doctor-gpu.jsonl
    python -m benchmarks.doctor_gpu --causes fp32-matmul,host-sync --repeats 2
    python -m benchmarks.doctor_gpu --causes none --tables docs/doctor --script 'trainer=python train.py --lr 3e-4'

Each cause is `benchmarks/doctor_job.py CAUSE`, examined once; its fix, if it is a switch, is then measured by runs with
and without it in turn. Each cause appends one line to `--to` when it is done, so a call that is cut short keeps its
results; causes whose fix can be measured come first. `--script NAME=COMMAND` examines any script and writes the
doctor's table to NAME.md in `--tables`; COMMAND may be `bash -c 'cd FOLDER && python train.py'`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.results import Call, git_commit, hardware_name, versions
from flatout.insight.attach import Asked
from flatout.insight.doctor import Examined, limit_line, look
from flatout.insight.prove import Proof, prove

JOB = Path(__file__).with_name("doctor_job.py")
# What is planted, and the cause the doctor must name for it; None is a healthy job. Switches first, compilation last.
PLANTED: dict[str, str | None] = {
    "fp32-matmul": "fp32-matmul",
    "needless-recompute": "needless-recompute",
    "slow-optimizer": "slow-optimizer",
    "data-starvation": "data-starvation",
    "math-attention": "math-attention",
    "small-batch": "small-batch",
    "empty-cache": "empty-cache",
    "launch-blocking": "launch-blocking",
    "anomaly-mode": "anomaly-mode",
    "precision-inactive": "precision-inactive",
    "wrong-dtype": "wrong-dtype",
    "host-sync": "host-sync",
    "healthy": None,
    "padding": "padding",
    "launch-bound": "launch-bound",
    "written-out-attention": "math-attention",
    "checkpointing": "checkpointing",
    "recompiles": "recompiles",
}


class Budget:
    """Seconds that may be spent; work that would take longer than the rest is not started."""

    def __init__(self, seconds: float | None) -> None:
        self.until = None if seconds is None else time.monotonic() + seconds

    def allows(self, seconds: float) -> bool:
        return self.until is None or time.monotonic() + seconds <= self.until


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    call = Call(benchmark="doctor-gpu", commit=options.commit or git_commit())
    about = {"call": call.id, "hardware": hardware_name(), "versions": versions(), "commit": call.commit}
    about |= {"command": call.command, "date": date.today().isoformat()}
    budget = Budget(options.budget)
    rows, left, longest_s = [], [], 15.0
    for planted in options.causes:
        if not budget.allows(longest_s):
            left.append(planted)
            continue
        began = time.monotonic()
        row = {**about, **examined(planted, options=options, budget=budget)}
        row["seconds"] = round(time.monotonic() - began, 1)
        longest_s = max(longest_s, row["look_s"] or 0.0)
        rows.append(row)
        keep(row, to=options.to)
    for name, command in options.scripts:
        if not budget.allows(longest_s):
            left.append(name)
            continue
        row = {**about, **written(name, command, options=options)}
        keep(row, to=options.to)
    if rows:
        print(table(rows))
    if left:
        print(f"no time was left for {', '.join(left)}")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--causes", default=",".join(PLANTED), help="with commas between; none for scripts alone")
    parser.add_argument("--script", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--tables", type=Path, default=Path(), help="folder for the scripts' tables")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--budget", type=float, help="seconds in which all of it must be done")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-prove", action="store_true")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args(arguments)
    options.causes = [] if options.causes == "none" else options.causes.split(",")
    options.scripts = [(name, shlex.split(command)) for name, _, command in (s.partition("=") for s in options.script)]
    if unknown := [cause for cause in options.causes if cause not in PLANTED]:
        parser.error(f"unknown causes {', '.join(unknown)}: {', '.join(PLANTED)} can be planted")
    if bad := [name for name, command in options.scripts if not name or not command]:
        parser.error(f"--script {bad[0]!r} is not NAME=COMMAND")
    return options


def keep(row: dict[str, Any], *, to: Path | None) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    if to is not None:
        with to.open("a") as file:
            file.write(line + "\n")


def examined(planted: str, *, options: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    """Examines the job once, and measures its fix if there is time."""
    command = [sys.executable, str(JOB), planted, "100000", options.device]
    variables = {"CUDA_LAUNCH_BLOCKING": "1"} if planted == "launch-blocking" else {}
    asked = Asked(steps=options.steps, seconds=options.seconds, variables=variables, quiet=True, limit_s=90)
    began = time.monotonic()
    try:
        looked = looked_at(command, asked)
    except Exception as error:  # one broken job must not cost the others
        return judged(planted, None, proofs=[], look_s=None, error=f"{type(error).__name__}: {error}"[-2000:])
    look_s = time.monotonic() - began
    wanted = [finding for finding in looked.diagnosis.findings if finding.cause == PLANTED[planted]]
    proofs: list[Proof] = []
    # A proof is two runs without replays.
    if wanted and looked.seen is not None and not options.no_prove and budget.allows(2 * options.repeats * look_s):
        only = replace(looked.diagnosis, findings=tuple(wanted))
        proofs = prove(command, only, seen=looked.seen, asked=asked, repeats=options.repeats)
    return judged(planted, looked, proofs=proofs, look_s=look_s)


def looked_at(command: Sequence[str], asked: Asked) -> Examined:
    with tempfile.TemporaryDirectory() as folder:
        looked = look(command, asked=asked, folder=Path(folder) / "run")
        looked.check()
        return looked


def judged(
    planted: str, looked: Examined | None, *, proofs: Sequence[Proof], look_s: float | None, error: str | None = None
) -> dict[str, Any]:
    """Whether the cause was named first, and how the estimate compares with the measurement."""
    wanted = PLANTED[planted]
    findings = looked.diagnosis.findings if looked is not None else ()
    gains = {finding.cause: finding.gain for finding in findings}
    estimated = gains.get(wanted) if wanted is not None else None
    proof = proofs[0] if proofs else None
    measured = proof.gain if proof is not None else None
    near = None if measured is None or estimated is None else abs(estimated - measured) <= 0.25 * abs(measured)
    healthy = looked is not None and not any((gain or 0.0) > 0.05 for gain in gains.values())
    return {
        "planted": planted,
        "first": healthy if wanted is None else list(gains)[:1] == [wanted],
        "causes": gains,
        "evidence": list(findings[0].evidence) if findings else [],
        "estimated": estimated,
        "measured": measured,
        "spread": [min(proof.gains), max(proof.gains)] if proof is not None and proof.gains else None,
        "loss_difference": proof.loss_difference if proof is not None else None,
        "within_a_quarter": near,
        "limit": looked.diagnosis.limit if looked is not None else None,
        "verdict": looked.diagnosis.verdict if looked is not None else None,
        "look_s": look_s,
        "error": error or (proof.problem if proof is not None else None),
    }


def written(name: str, command: Sequence[str], *, options: argparse.Namespace) -> dict[str, Any]:
    """Examines a script and writes the doctor's table of it."""
    asked = Asked(steps=options.steps, seconds=options.seconds, stdout_to_stderr=True, limit_s=240)
    try:
        looked = looked_at(command, asked)
    except Exception as error:
        return {"script": name, "error": str(error)[-2000:]}
    target = options.tables / f"{name}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(findings_table(looked))
    return {"script": name, "table": target.name, "error": None, **asdict(looked.diagnosis)}


def findings_table(looked: Examined) -> str:
    def cell(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|")

    found = looked.diagnosis
    lines = [found.verdict, "", limit_line(found.limit), ""]
    if found.findings:
        lines += ["| cause | costs | a fix saves | evidence | change |", "|---|--:|--:|---|---|"]
    for finding in found.findings:
        cells = (finding.cause, percent(finding.share), f"{percent(finding.gain)} ({finding.status})")
        lines.append(f"| {' | '.join(cells)} | {cell('; '.join(finding.evidence))} | {cell(finding.fix)} |")
    return "\n".join(lines) + "\n"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| planted | named first | estimated | measured | within a quarter | others |",
        "|---|---|--:|--:|---|---|",
    ]
    for row in rows:
        others = ", ".join(c for c in row["causes"] if c != PLANTED[row["planted"]])
        near = {True: "yes", False: "no", None: "n/a"}[row["within_a_quarter"]]
        said = "yes" if row["first"] else f"no: {(row['verdict'] or row['error'] or '').splitlines()[0][:60]}"
        lines.append(
            f"| {row['planted']} | {said} | {percent(row['estimated'])} | {percent(row['measured'])} | {near} "
            f"| {others} |"
        )
    first = sum(row["first"] for row in rows)
    near_ones = sum(row["within_a_quarter"] is True for row in rows)
    proved = sum(row["measured"] is not None for row in rows)
    lines += [
        "",
        f"named first: {first} of {len(rows)}; estimated within a quarter of the measured: {near_ones} of {proved}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
