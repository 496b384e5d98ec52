"""How cost grows with the size of the model and the length of the sequence, on one GPU.

    python -m benchmarks.growth --to benchmarks/results/growth.jsonl

Every micro-batch has 32,768 tokens; FP8 matmuls are used where the plan chooses them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.memory import SHAPES, Point, measured, planned
from benchmarks.results import FOLDER, Call, Result, git_commit, table, write

TOKENS = 32768
LENGTHS = (512, 1024, 2048, 4096, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "growth.jsonl")
    options = parser.parse_args()
    call = Call(benchmark="growth", commit=options.commit or git_commit())
    results: list[Result] = []
    for shape in SHAPES:
        for length in LENGTHS:
            point = Point(shape=shape, micro_batch=TOKENS // length, length=length, fp8=True)
            plan = planned(point)
            runs = [measured(point, plan) for _ in range(options.repeats)]
            shares = [plan.rates.shares(tokens=run["tokens_per_s"], seconds=1.0).mfu_common or 0.0 for run in runs]
            values = {
                "tokens_per_s": ("tokens/s", [run["tokens_per_s"] for run in runs]),
                "peak_gib": ("GiB", [run["peak_gib"] for run in runs]),
                "mfu": ("share of the bf16 peak, 6N + 12LHT", shares),
            }
            for metric, (unit, seen) in values.items():
                results.append(call.result(variant=f"{shape}, T {length}", metric=metric, unit=unit, values=seen))
            print(f"{shape} T {length}: {results[-3].value:,.0f} tokens/s, {results[-2].value:.1f} GiB", flush=True)
            write(results[-3:], options.to)
    print(table(results))


if __name__ == "__main__":
    main()
