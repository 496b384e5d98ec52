"""Real ablations of a switch that does nothing: how often is it called faster or slower?

    python -m benchmarks.same_twice --times 20

Each is `flatout ablate` on a small job with a switch that changes only the name of the run, with its own seeds: four
blocks of real processes. Its three comparisons (alone, without, and the plan with its starting point) share their
trials, so an ablation is one A/A test. A CPU is enough, busy or not; at a level of 5 %, one of 20 may be called
different by chance.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from benchmarks.results import FOLDER, Call, git_commit, table, write
from flatout.insight.ablate import ablate
from flatout.insight.switches import Switch
from flatout.insight.trials import Trials

CONFIG = """recipe: pretrain
model: {layers: 2, hidden: 128, heads: 4}
data: {source: embedded, embedded_mb: 1, sequence_length: 128, tokenizer: byte}
train: {batch_tokens: 2048, steps: 200, lr: 1.0e-3}
"""
NOTHING = Switch(name="nothing", task="", claim="none", before={"log.name": "before"}, after={"log.name": "after"})


def verdicts(number: int, folder: Path) -> dict[str, str]:
    """Of one ablation, by comparison."""
    (file := folder / "job.yaml").write_text(CONFIG)
    trials = Trials(file, [f"seed={1000 * (number + 1)}"], folder=folder / "trials")
    return {row.name: row.verdict for row in ablate(trials, switches=[NOTHING]).rows if row.reference is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first, to go on after a break")
    parser.add_argument("--to", type=Path, default=FOLDER / "same-twice.jsonl")
    options = parser.parse_args()
    called: Counter[tuple[str, str]] = Counter()
    for number in range(options.first, options.first + options.times):
        with tempfile.TemporaryDirectory() as folder:
            found = verdicts(number, Path(folder))
        print(number, found, flush=True)
        called.update(found.items())
    call = Call(benchmark="same-twice", commit=git_commit())
    rows = []
    for name in sorted({name for name, _ in called}):
        wrong = sum(count for (of, verdict), count in called.items() if of == name and verdict in ("faster", "slower"))
        share = call.result(
            variant=name, metric="called different", unit="share of ablations", values=[wrong / options.times]
        )
        rows.append(replace(share, repeats=options.times))
    write(rows, options.to)
    print(table(rows))


if __name__ == "__main__":
    main()
