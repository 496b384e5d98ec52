"""`examples/router-embedded.yaml`, all phases, three seeds: every task by the base, its own adapter, routed and joint.

    python -m benchmarks.router_embedded

A CPU is enough. No setting was chosen with these seeds. A gain is the mean over the seeds of the difference of two
scores on the same held-out questions. Its interval takes the two scores as independent, with the intervals of the run:
too wide, because they share their questions. `minutes` are those of the processors, for all seeds together.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.results import FOLDER, Call, Result, git_commit, table, write
from flatout import gallery
from flatout.record import Run
from flatout.record.routed import AdapterScore, PhaseScored

# Of two scores, the second should not be below the first; the first pair should differ by more than noise.
GAINS = {"own - base": ("base", "own"), "joint - routed": ("routed", "joint")}
ROUTED_RIGHT, MINUTES = 0.95, 12.0  # six minutes on two cores
# The normal quantile of a 95 % interval.
Z = 1.96


@dataclass(frozen=True, kw_only=True)
class Seed:
    scores: dict[tuple[str, str], AdapterScore]  # by task and how
    phases: dict[int, PhaseScored]
    minutes: float  # of the processors


def trained(seed: int, *, scratch: Path) -> Seed:
    """The run of this seed, made now unless it is there."""
    folder, log, used_s = (scratch / f"{seed}{ending}" for ending in ("", ".log", ".seconds"))
    command = [sys.executable, "-m", "flatout", "train", str(gallery.find("router-embedded").path)]
    if not used_s.exists():
        shutil.rmtree(folder, ignore_errors=True)  # what is left of a run that did not finish
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, f"seed={seed}", "--run", str(folder)], stdout=output, stderr=subprocess.STDOUT
            )
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"seed {seed}: exit {process.returncode}: {log.read_text()[-1500:]}")
        used_s.write_text(f"{used.ru_utime + used.ru_stime:.1f}")
    phases = {event.phase: event for event in Run.open(folder).events() if isinstance(event, PhaseScored)}
    scores = {(one.task, one.how): one for event in phases.values() for one in event.scores}
    return Seed(scores=scores, phases=phases, minutes=float(used_s.read_text()) / 60)


def gain(seeds: Sequence[Seed], task: str, before: str, after: str) -> tuple[float, float, float]:
    """The mean difference of two scores over the seeds, and its interval."""
    value = statistics.mean(seed.scores[task, after].value - seed.scores[task, before].value for seed in seeds)
    errors = [half_width(seed.scores[task, how]) for seed in seeds for how in (before, after)]
    half = math.sqrt(sum(error**2 for error in errors)) / len(seeds)
    return value, value - half, value + half


def half_width(score: AdapterScore) -> float:
    assert score.low is not None
    assert score.high is not None
    return (score.high - score.low) / 2


def rows_of(call: Call, seeds: Sequence[Seed]) -> list[Result]:
    rows = []
    for task, how in seeds[0].scores:
        values = [seed.scores[task, how].value for seed in seeds]
        rows.append(call.result(variant=task, metric=how, unit=seeds[0].scores[task, how].metric, values=values))
    for task in seeds[0].phases[1].names:
        for name, (before, after) in GAINS.items():
            value, low, high = gain(seeds, task, before, after)
            row = call.result(variant=task, metric=name, unit=seeds[0].scores[task, after].metric, values=[value])
            rows.append(replace(row, low=low, high=high, repeats=len(seeds)))
    for phase in (2, 3):
        values = [seed.phases[phase].routed_right or 0.0 for seed in seeds]
        metric, unit = f"to their own adapter, phase {phase}", "share of prompts"
        rows.append(call.result(variant="routing", metric=metric, unit=unit, values=values))
    return rows


def failures(rows: Sequence[Result]) -> list[str]:
    """What was not reached."""
    found = []
    for row in rows:
        if row.metric == "own - base" and row.low <= 0:
            found.append(f"{row.variant}: its own adapter is not above the base beyond noise")
        if row.metric == "joint - routed" and row.high < 0:
            found.append(f"{row.variant}: phase 3 is below phase 2 beyond noise")
        if row.variant == "routing" and row.low < ROUTED_RIGHT:
            found.append(f"routing, {row.metric}: {row.low:.1%} with one seed, below {ROUTED_RIGHT:.0%}")
        if row.metric == "minutes" and row.value >= MINUTES:
            found.append(f"{row.value:.1f} minutes, not below {MINUTES:.0f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="seeds at the same time")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, and use those that are there")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--to", type=Path, default=FOLDER / "router-embedded.jsonl")
    options = parser.parse_args()
    call = Call(benchmark="router-embedded", commit=options.commit or git_commit())
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.at_once) as threads:
        folder = options.keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        seeds = list(threads.map(lambda seed: trained(seed, scratch=folder), options.seeds))
    minutes = sum(seed.minutes for seed in seeds)
    rows = rows_of(call, seeds)
    rows.append(call.result(variant="time", metric="minutes", unit="processor minutes, all seeds", values=[minutes]))
    write(rows, options.to)
    print(table(rows))
    if missed := failures(rows):
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
