"""Recipe rft end to end on one GPU: unit conversion with real weights, seconds of each part, accuracy before and after.

    python -m benchmarks.rft FOLDER                       # a model folder, such as SmolLM2-135M-Instruct's
    python -m benchmarks.rft FOLDER --gsm8k test.jsonl    # also accuracy on word problems, before and after

It runs the command itself, `flatout train` with `recipe: rft`, and reads its run folder: `adaptive` stops early on
solved questions, `fixed` takes all samples of every question, as the guides do. Low and high are the 95 % interval for
accuracies and their difference, and the lowest and highest repeat for everything else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, Call, Result, git_commit, table, write
from flatout.record import Run

VARIANTS = {"adaptive": [], "fixed": ["rft.adaptive=false"]}
UNITS = {
    "whole_s": "s",
    "generate_s": "s",
    "train_s": "s",
    "tokens_per_s": "generated tokens/s",
    "samples": "samples",
    "kept": "rows",
    "success_rate": "share of questions",
}
INTERVALS = ("before", "after", "gain", "gsm8k_before", "gsm8k_after", "gsm8k_gain")


def config(path: Path, *, model: str, oversample: int, questions: int | None) -> Path:
    asked = "" if questions is None else f", questions: {questions}, valid_questions: {questions}"
    path.write_text(
        f"recipe: rft\nmodel: {model}\n"
        f'rft: {{task: "units:train", oversample: {oversample}, keep: 2{asked}}}\n'
        "sample: {temperature: 0.7, max_tokens: 120}\n"
        f"data: {{sequence_length: 2048, valid_share: 0.02, cache: {path.parent}/cache}}\n"
        "train: {batch_tokens: 4096, epochs: 6, lr: 1.0e-3, warmup_steps: 10, weight_decay: 0.0, beta2: 0.99}\n"
        "lora: {rank: 16, alpha: 64}\nsave: {weights_only: true}\n"
    )
    return path


def trained(file: Path, overrides: list[str], *, folder: Path) -> float:
    """Runs the command once. Returns its seconds, measured from outside."""
    began = time.monotonic()
    command = [sys.executable, "-m", "flatout", "train", str(file), *overrides, "--run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{folder.name}: exit {done.returncode}: {done.stderr.strip()[-800:]}")
    print(done.stdout[-3000:], flush=True)
    return time.monotonic() - began


def ours(file: Path, overrides: list[str], *, folder: Path) -> dict[str, Any]:
    """A run's own figures."""
    whole_s = trained(file, overrides, folder=folder)
    events = {event.kind: event.data for event in Run.open(folder).events()}
    dataset, verdict, end = events["dataset"], events["rft"], events["end"]["outcome"]
    ends = dict(zip(("before", "after"), zip(verdict["accuracy"], verdict["intervals"], strict=True), strict=True))
    return {
        "whole_s": whole_s,
        "generate_s": dataset["seconds"],
        "train_s": end["hours"] * 3600,
        "tokens_per_s": dataset["tokens_per_s"],
        "samples": dataset["samples"],
        "kept": dataset["kept"],
        "success_rate": dataset["success_rate"],
        **{name: (value, *interval) for name, (value, interval) in ends.items()},
        "gain": tuple(verdict["difference"][key] for key in ("value", "low", "high")),
    }


def asked_both(model: str, run: Path, task: str, *, limit: int, name: str) -> dict[str, Any]:
    """The share of the same questions answered rightly before and after training, each with its interval."""
    command = [sys.executable, "-m", "flatout", "eval", model, "--against", str(run), "--tasks", task]
    done = subprocess.run([*command, "--limit", str(limit), "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    before, after = (document["tasks"][0] for document in found["models"])
    named = {f"{name}before": before, f"{name}after": after, f"{name}gain": found["differences"][0]}
    return {name: (one["value"], one["low"], one["high"]) for name, one in named.items()}


def results(call: Call, variant: str, runs: list[dict[str, Any]]) -> list[Result]:
    """Times over the repeats; accuracies of the first repeat, because every repeat samples the same."""
    rows = [call.result(variant=variant, metric=m, unit=u, values=[run[m] for run in runs]) for m, u in UNITS.items()]
    for name in (name for name in INTERVALS if name in runs[0]):
        value, low, high = runs[0][name]
        rows.append(call.share(variant=variant, metric=name, value=value, low=low, high=high))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("--oversample", type=int, default=30)
    parser.add_argument("--questions", type=int, default=None, help="fewer, to try the script on a CPU")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--gsm8k", type=Path, default=None)
    parser.add_argument("--limit", type=int, default=200, help="questions of --gsm8k")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "rft.jsonl")
    options = parser.parse_args()

    call = Call(benchmark="rft-units", commit=options.commit or git_commit())
    found: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        file = config(
            scratch / "rft.yaml", model=options.model, oversample=options.oversample, questions=options.questions
        )
        for variant in options.variants.split(","):
            runs = []
            for repeat in range(options.repeats):
                folder = scratch / f"{variant}-{repeat}"
                runs.append(ours(file, [*VARIANTS[variant], *options.set], folder=folder))
            if options.gsm8k is not None:
                task = f"gsm8k:{options.gsm8k}"
                runs[0] |= asked_both(options.model, folder, task, limit=options.limit, name="gsm8k_")
            found += results(call, variant, runs)
    write(found, options.to)
    print(table(found))


if __name__ == "__main__":
    main()
