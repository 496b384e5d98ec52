"""Compares the speed of two commits, in turn, in one call.

    python -m benchmarks.against --trees 8c5f4e3=FOLDER abc1234=. --repeats 2

A tree is a checkout. Each measurement runs in a separate process with that tree's package and benchmarks:
tokens per second of `pretrain-124m`, of `lora-360m` and of `sample-360m`, and for `startup` the seconds from the
command to the end of the first step, with empty caches (`fresh`) and with filled ones (`warm`), and those of a save.
The order of the trees is reversed with every repeat.
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

from benchmarks.results import FOLDER, measuring

SPEED = {
    "pretrain": ["benchmarks.pretrain", "--steps", "40", "--repeats", "1"],
    "lora": ["benchmarks.lora", "--steps", "20", "--variants", "flatout", "--repeats", "1"],
    "sample": ["benchmarks.generate", "--repeats", "7"],  # each takes half a second: their median
}
FIGURE = {"pretrain": "tokens_per_s", "lora": "samples_per_s", "sample": "tokens_per_s"}
START = ["train.steps=6", "train.warmup_steps=2", "data.embedded_mb=24", "eval.every=null", "save.every=null"]


def environment(tree: Path, caches: Path) -> dict[str, str]:
    """The environment of a tree: its own code comes before installed packages, and its caches are separate."""
    paths = [str(tree / "src"), str(tree), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {"FLATOUT_CACHE": "data", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | {name: str(caches / of) for name, of in kept.items()}


def speed(name: str, tree: Path, caches: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        to = Path(scratch) / "found.jsonl"
        command = [sys.executable, "-m", *SPEED[name], "--commit", "none", "--to", str(to)]
        subprocess.run(command, check=True, cwd=tree, env=environment(tree, caches), stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in to.read_text().splitlines()]
    return {f"{name}_{FIGURE[name]}": next(row["value"] for row in rows if row["metric"] == FIGURE[name])}


def startup(tree: Path, caches: Path, example: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        run, began = Path(scratch) / "run", time.time()
        command = [sys.executable, "-m", "flatout", "train", example, *START, "--run", str(run)]
        subprocess.run(command, check=True, cwd=tree, env=environment(tree, caches), stdout=subprocess.DEVNULL)
        first = json.loads((run / "steps.jsonl").read_text().splitlines()[0])
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    at = {event["kind"]: event["time"] for event in events}
    return {"first_step_s": first["time"] - began, "save_s": at["save"] - at["eval"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs=2, required=True, metavar="COMMIT=FOLDER")
    parser.add_argument("--measure", nargs="+", choices=[*SPEED, "startup"], default=[*SPEED, "startup"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--example", default="examples/pretrain-124m.yaml", help="of startup")
    parser.add_argument("--to", type=Path, default=FOLDER / "against.jsonl")
    options = parser.parse_args()
    trees = {commit: Path(folder).absolute() for commit, folder in (tree.split("=") for tree in options.trees)}
    commits = list(trees)
    units = {f"{name}_{FIGURE[name]}": "1/s" for name in SPEED if name in options.measure}
    with tempfile.TemporaryDirectory() as scratch:
        if units:
            with measuring("against", commit=commits[-1], units=units, to=options.to) as measured:
                for repeat in range(options.repeats):
                    for commit in commits if repeat % 2 else reversed(commits):
                        found: dict[str, float] = {}
                        for name in (name for name in SPEED if name in options.measure):
                            found |= speed(name, trees[commit], Path(scratch) / commit)
                        measured[commit].append(found)
                        print(commit, repeat, found, flush=True)
        if "startup" in options.measure:
            seconds = {"first_step_s": "s", "save_s": "s"}
            with measuring("against", commit=commits[-1], units=seconds, to=options.to) as measured:
                for repeat in range(options.repeats):
                    for commit in commits if repeat % 2 else reversed(commits):
                        caches = Path(scratch) / f"{commit}-{repeat}"
                        for state in ("fresh", "warm"):
                            measured[f"{commit} {state}"].append(startup(trees[commit], caches, options.example))
                            print(commit, state, measured[f"{commit} {state}"][-1], flush=True)


if __name__ == "__main__":
    main()
