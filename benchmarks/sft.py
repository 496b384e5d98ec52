"""Adapters on real weights, on one GPU: held-out loss and accuracy before and after, with their intervals.

    python -m benchmarks.sft FOLDER                          # unit conversion, worked solutions of our own
    python -m benchmarks.sft FOLDER --gsm8k DATA/gsm8k       # and word problems: its train.jsonl and test.jsonl

Ours are the commands themselves, `flatout train` with `recipe: sft` and `flatout eval MODEL --against RUN`. Accuracies
and their difference, paired by question, have their 95 % interval as low and high.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, Call, Result, git_commit, table, write
from benchmarks.rft import asked_both, trained
from flatout.record import Run
from flatout.tasks import Worked, open_task

UNITS = {"whole_s": "s", "loss_before": "nats a token", "loss_after": "nats a token"}


def write_rows(path: Path, task: str, *, limit: int | None) -> Path:
    """The questions of a task as they are asked, each with its worked solution."""
    asked: Any = open_task(task)
    assert isinstance(asked, Worked)
    with path.open("w") as file:
        for i in range(min(asked.size, limit or asked.size)):
            said = {"role": "assistant", "content": asked.solution(i)}
            file.write(json.dumps({"prompt": list(asked.prompt(i)), "completion": [said]}) + "\n")
    return path


def config(path: Path, *, model: str, rows: Path, epochs: int) -> Path:
    path.write_text(
        f"recipe: sft\nmodel: {model}\n"
        f"data: {{source: jsonl, path: {rows}, sequence_length: 2048, valid_share: 0.05, cache: {path.parent}/cache}}\n"
        f"train: {{batch_tokens: 8192, epochs: {epochs}, lr: 1.0e-3, warmup_steps: 10, weight_decay: 0.0, "
        "beta2: 0.99}\n"
        "lora: {rank: 16, alpha: 64}\neval: {every: 100000, tokens: 32768}\nsave: {weights_only: true}\n"
    )
    return path


def ours(file: Path, overrides: list[str], *, folder: Path) -> dict[str, Any]:
    whole_s = trained(file, overrides, folder=folder)
    losses = [event.data["val_loss"] for event in Run.open(folder).events() if event.kind == "eval"]
    return {"whole_s": whole_s, "loss_before": losses[0], "loss_after": losses[-1]}


def results(call: Call, variant: str, found: dict[str, Any]) -> list[Result]:
    rows = [call.result(variant=variant, metric=m, unit=u, values=[found[m]]) for m, u in UNITS.items()]
    for name in ("before", "after", "gain"):
        value, low, high = found[name]
        rows.append(call.share(variant=variant, metric=name, value=value, low=low, high=high))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("--gsm8k", type=Path, default=None, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--rows", type=int, default=None, help="fewer, to try the script on a CPU")
    parser.add_argument("--limit", type=int, default=1000, help="questions that are measured")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "sft.jsonl")
    options = parser.parse_args()

    jobs = {"units": ("units:train", "units", 6)}
    if options.gsm8k is not None:
        train, test = (f"gsm8k:{options.gsm8k}/{name}.jsonl" for name in ("train", "test"))
        jobs["gsm8k"] = (train, test, 2)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for variant, (learnt, measured, epochs) in jobs.items():
            rows = write_rows(scratch / f"{variant}.jsonl", learnt, limit=options.rows)
            file = config(scratch / f"{variant}.yaml", model=options.model, rows=rows, epochs=epochs)
            told = ours(file, options.set, folder=scratch / variant)
            told |= asked_both(options.model, scratch / variant, measured, limit=options.limit, name="")
            call = Call(benchmark="sft", commit=options.commit or git_commit())
            found = results(call, variant, told)
            write(found, options.to)
            print(table(found), flush=True)


if __name__ == "__main__":
    main()
