"""One line per measured figure, with everything needed to assess it or to measure it again."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flatout.hardware import detect

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "transformers", "vllm", "flatout")


@dataclass(frozen=True, kw_only=True)
class Result:
    benchmark: str
    variant: str
    metric: str
    unit: str
    value: float
    low: float
    high: float
    repeats: int
    hardware: str
    versions: dict[str, str]
    commit: str
    command: str
    call: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """Everything measured in one call shares its id, hardware, versions and commit.

    Commands that run one after the other on one machine are one call, if BENCHMARK_CALL names it.
    """

    benchmark: str
    commit: str
    command: str = field(default_factory=lambda: command_line(sys.argv))
    id: str = field(default_factory=lambda: os.environ.get("BENCHMARK_CALL") or uuid.uuid4().hex[:8])

    def result(self, *, variant: str, metric: str, unit: str, values: Sequence[float]) -> Result:
        """The median of the repeats, with the lowest and the highest."""
        return Result(
            benchmark=self.benchmark,
            variant=variant,
            metric=metric,
            unit=unit,
            value=statistics.median(values),
            low=min(values),
            high=max(values),
            repeats=len(values),
            hardware=hardware_name(),
            versions=versions(),
            commit=self.commit,
            command=self.command,
            call=self.id,
            date=date.today().isoformat(),
        )

    def share(self, *, variant: str, metric: str, value: float, low: float, high: float) -> Result:
        """A share of questions, with its 95 % interval as the spread."""
        row = self.result(variant=variant, metric=metric, unit="share of questions", values=[value])
        return replace(row, low=low, high=high)


@contextmanager
def measuring(
    benchmark: str, *, commit: str | None, units: Mapping[str, str], to: Path | None
) -> Iterator[dict[str, list[dict[str, float]]]]:
    """Repeats by variant and metric, to be filled in; written and printed at the end, also after an early SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    measured: dict[str, list[dict[str, float]]] = defaultdict(list)
    try:
        yield measured
    finally:
        call = Call(benchmark=benchmark, commit=commit or git_commit())
        results = [
            call.result(variant=variant, metric=metric, unit=unit, values=[run[metric] for run in runs])
            for variant, runs in measured.items()
            for metric, unit in units.items()
            if runs
        ]
        if to is not None:
            write(results, to)
        print(table(results), flush=True)
        signal.signal(signal.SIGTERM, before)


def write(results: Sequence[Result], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        for result in results:
            lines.write(json.dumps(asdict(result)) + "\n")


def table(results: Sequence[Result]) -> str:
    """Markdown: one row per variant, one column per metric."""
    metrics = list(dict.fromkeys(r.metric for r in results))
    variants = list(dict.fromkeys(r.variant for r in results))
    found = {(r.variant, r.metric): r for r in results}
    lines = ["| variant | " + " | ".join(metrics) + " |", "|---|" + "--:|" * len(metrics)]
    for variant in variants:
        cells = [_cell(found.get((variant, metric))) for metric in metrics]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(result: Result | None) -> str:
    if result is None:
        return "n/a"
    digits = ",.0f" if result.value >= 1000 else ".4g"
    return f"{result.value:{digits}} ({result.low:{digits}} to {result.high:{digits}})"


def command_line(arguments: Sequence[str]) -> str:
    """The command that measures this again, without the folders of files."""
    kept = [Path(a).name if os.sep in a and Path(a).exists() else a for a in arguments[1:]]
    for where in ("--to", "--tables", "--keep"):
        if where in kept:
            del kept[kept.index(where) : kept.index(where) + 2]
    return " ".join([f"python -m benchmarks.{Path(arguments[0]).stem}", *kept])


# Student's t, one-sided 95 %, by degrees of freedom.
T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 10: 1.812, 11: 1.796}
T95 |= {12: 1.782, 13: 1.771, 14: 1.761, 15: 1.753, 16: 1.746, 17: 1.740, 18: 1.734, 19: 1.729, 24: 1.711, 29: 1.699}


def upper_95(values: Sequence[float]) -> float | None:
    """The upper 95 % bound of the mean of the values; None for fewer than two."""
    if len(values) < 2:
        return None
    # Between two entries of the table the smaller number of degrees, which is the wider bound.
    t = T95[max(degrees for degrees in T95 if degrees < len(values))]
    return statistics.fmean(values) + t * statistics.stdev(values) / math.sqrt(len(values))


def cost_results(call: Call, variant: str, costs: Sequence[float]) -> list[Result]:
    """The overhead of measuring, by pairs of blocks, and its upper bound."""
    rows = [call.result(variant=variant, metric="cost", unit="share of step time, by pair", values=costs)]
    if (upper := upper_95(costs)) is not None:
        rows.append(call.result(variant=variant, metric="upper_95_bound", unit="share of step time", values=[upper]))
    return rows


def read(file: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()]


def hardware_name() -> str:
    found = detect()
    return found.gpu or f"CPU, {found.num_cpus} cores"


def versions() -> dict[str, str]:
    known = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            continue
    return known


def git_commit() -> str:
    """The commit of this checkout, marked if files differ from it; `unknown` outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "src"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
