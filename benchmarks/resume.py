"""Compares a run that is killed and resumed with one that is not: are the weights the same, bit for bit?

    python -m benchmarks.resume examples/pretrain-124m.yaml train.deterministic=true

The run is killed by SIGKILL after its first checkpoint, in the middle of a later step, and resumed by the same command
with --resume. `bit_equal` is 1 if all tensors of the last checkpoints of both runs, weights and optimizer, are equal.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import FOLDER, measuring

STEPS, EVERY = 30, 10


def command(config: str, overrides: list[str], run: Path, *more: str) -> list[str]:
    common = [f"train.steps={STEPS}", f"save.every={EVERY}", "train.warmup_steps=3", "eval.every=null"]
    return [sys.executable, "-m", "flatout", "train", config, *common, *overrides, "--run", str(run), *more]


def killed(config: str, overrides: list[str], run: Path) -> int:
    """Kills the run once a step after the first checkpoint is recorded. Returns that step."""
    process = subprocess.Popen(command(config, overrides, run), stdout=subprocess.DEVNULL)
    while process.poll() is None:
        steps = (run / "steps.jsonl").read_text().splitlines() if (run / "steps.jsonl").exists() else []
        last = json.loads(steps[-2])["step"] if len(steps) > 1 else 0
        if last > EVERY and (run / "checkpoints" / "latest").exists():
            process.send_signal(signal.SIGKILL)
            process.wait()
            return int(last)
        time.sleep(0.05)
    raise SystemExit("the run ended before it was killed: give it more steps")


def hashes(run: Path) -> dict[str, str]:
    manifest = json.loads((max((run / "checkpoints").glob("step-*")) / "manifest.json").read_text())
    return {
        f"{file} {name}": tensor["sha256"]
        for file, facts in manifest["files"].items()
        for name, tensor in facts["tensors"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "resume.jsonl")
    options = parser.parse_args()
    units = {"bit_equal": "1: all tensors", "tensors": "compared", "killed_at": "step"}
    with (
        tempfile.TemporaryDirectory() as scratch,
        measuring("resume", commit=options.commit, units=units, to=options.to) as measured,
    ):
        whole, cut = Path(scratch) / "whole", Path(scratch) / "cut"
        subprocess.run(command(options.config, options.overrides, whole), check=True, stdout=subprocess.DEVNULL)
        step = killed(options.config, options.overrides, cut)
        again = command(options.config, options.overrides, cut, "--resume")
        subprocess.run(again, check=True, stdout=subprocess.DEVNULL)
        found, expected = hashes(cut), hashes(whole)
        measured[Path(options.config).stem].append(
            {"bit_equal": float(found == expected), "tensors": float(len(expected)), "killed_at": float(step)}
        )


if __name__ == "__main__":
    main()
