"""The doctor on planted GPU causes: is the cause named first, and was its gain estimated before it was measured?

    python -m benchmarks.doctor_gpu --to benchmarks/results/doctor-gpu.jsonl
    python -m benchmarks.doctor_gpu --causes fp32-matmul,host-sync --repeats 2

Each cause is `benchmarks/doctor_job.py CAUSE` under `flatout doctor --prove`. One line a cause as it comes, a table at
the end; lines are appended, so that a call that runs out of time has lost nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import Call, git_commit
from flatout.hardware import detect

ROOT = Path(__file__).parents[1]
# What is planted, and the cause the doctor must name for it; None is a healthy job.
PLANTED: dict[str, str | None] = {
    "healthy": None,
    "fp32-matmul": "fp32-matmul",
    "precision-inactive": "precision-inactive",
    "math-attention": "math-attention",
    "written-out-attention": "math-attention",
    "small-batch": "small-batch",
    "host-sync": "host-sync",
    "empty-cache": "empty-cache",
    "needless-recompute": "needless-recompute",
    "slow-optimizer": "slow-optimizer",
    "launch-blocking": "launch-blocking",
    "launch-bound": "launch-bound",
    "wrong-dtype": "wrong-dtype",
    "padding": "padding",
    "recompiles": "recompiles",
    "data-starvation": "data-starvation",
    "anomaly-mode": "anomaly-mode",
    "checkpointing": "checkpointing",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--causes", default=",".join(PLANTED))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-prove", action="store_true")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    call = Call(benchmark="doctor-gpu", commit=git_commit())
    rows = []
    for planted in options.causes.split(","):
        began = time.monotonic()
        found = examine(planted, options=options)
        row = {"call": call.id, "hardware": detect().gpu, "commit": call.commit, **judged(planted, found)}
        row["seconds"] = round(time.monotonic() - began, 1)
        rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if options.to is not None:
            with options.to.open("a") as file:
                file.write(line + "\n")
    print(table(rows))


def examine(planted: str, *, options: argparse.Namespace) -> dict[str, Any]:
    """What the doctor says of the job; its last words where it could not."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))),
        }
        if planted == "launch-blocking":
            environment["CUDA_LAUNCH_BLOCKING"] = "1"
        command = [sys.executable, "-m", "flatout", "doctor", "--steps", str(options.steps)]
        command += ["--seconds", str(options.seconds), "--repeats", str(options.repeats), "--json", str(target)]
        command += ["--run", f"{folder}/run", *([] if options.no_prove else ["--prove"])]
        command += ["--", sys.executable, str(ROOT / "benchmarks" / "doctor_job.py"), planted]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not target.exists():
            return {"findings": [], "verdict": f"exit {done.returncode}", "error": done.stderr[-2000:]}
        read: dict[str, Any] = json.loads(target.read_text())
        if done.returncode:
            read["error"] = done.stderr[-2000:]
        return read


def judged(planted: str, found: dict[str, Any]) -> dict[str, Any]:
    """Whether it was named first, and how the estimate compares with the proof."""
    wanted = PLANTED[planted]
    causes = [finding["cause"] for finding in found["findings"]]
    proof = next((p for p in found.get("proofs", []) if p["cause"] == wanted), None)
    gains = proof["gains"] if proof else []
    measured = sum(gains) / len(gains) if gains else None
    estimated = estimated_gain(found, wanted)
    near = None if measured is None or estimated is None else abs(estimated - measured) <= 0.25 * abs(measured)
    worth = [finding["cause"] for finding in found["findings"] if (finding["gain"] or 0) > 0.05]
    first = not worth if wanted is None else causes[:1] == [wanted]
    return {
        "planted": planted,
        "first": first,
        "causes": {finding["cause"]: finding["gain"] for finding in found["findings"]},
        "estimated": estimated,
        "measured": measured,
        "spread": [min(gains), max(gains)] if gains else None,
        "loss_difference": proof["loss_difference"] if proof else None,
        "within_a_quarter": near,
        "limit": found.get("limit"),
        "verdict": found["verdict"],
        "error": found.get("error"),
    }


def estimated_gain(found: dict[str, Any], cause: str | None) -> float | None:
    """What was estimated before the proof replaced it."""
    before = found.get("estimates", {})
    return before.get(cause) if cause else None


def table(rows: list[dict[str, Any]]) -> str:
    def percent(value: float | None) -> str:
        return "n/a" if value is None else f"{100 * value:.1f} %"

    lines = [
        "| planted | named first | estimated | measured | within a quarter | others |",
        "|---|---|--:|--:|---|---|",
    ]
    for row in rows:
        others = ", ".join(c for c in row["causes"] if c != PLANTED[row["planted"]])
        near = {True: "yes", False: "no", None: "n/a"}[row["within_a_quarter"]]
        said = "yes" if row["first"] else f"no: {row['verdict'][:60]}"
        lines.append(
            f"| {row['planted']} | {said} | {percent(row['estimated'])} | {percent(row['measured'])} | {near} "
            f"| {others} |"
        )
    first = sum(row["first"] for row in rows)
    near = sum(row["within_a_quarter"] is True for row in rows)
    lines.append(f"\nnamed first: {first} of {len(rows)}; estimated within a quarter of the measured gain: {near}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
