"""Is the micro-batch that flatout finds the fastest? Compares a manual sweep with the search, on one GPU.

python -m benchmarks.micro_batch
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.memory import Point, built, measured, planned, random_batch
from benchmarks.results import FOLDER, Call, git_commit, write
from flatout.engine import search
from flatout.engine.ranks import Ranks
from flatout.plan import decide

SEQUENCES = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "micro-batch.jsonl")
    options = parser.parse_args()
    call = Call(benchmark="micro-batch", commit=options.commit or git_commit())
    results, swept = [], {}
    for size in (8, 16, 32, 64, 128, 256):
        point = Point(shape="124m", micro_batch=size, accumulation=SEQUENCES // size, fp8=True)
        swept[size] = measured(point, planned(point))["tokens_per_s"]
        print(f"micro-batch {size}: {swept[size]:,.0f} tokens/s", flush=True)
        results.append(
            call.result(variant=f"pinned-{size}", metric="tokens_per_s", unit="tokens/s", values=[swept[size]])
        )
    point = Point(shape="124m", micro_batch=64, accumulation=SEQUENCES // 64, fp8=True)
    pinned = planned(point)
    plan = decide(replace(pinned.job, pins=replace(pinned.job.pins, micro_batch=None)))
    engine = built(point, plan)
    began = time.perf_counter()
    trials = search.search(engine, plan, Ranks(), lambda size: random_batch(replace(point, micro_batch=size), plan))
    seconds = time.perf_counter() - began
    size = search.chosen(trials).micro_batch
    share = swept[size] / max(swept.values())
    print(f"found {size} in {seconds:.1f} s: {share:.1%} of the best by hand; {trials}")
    results += [
        call.result(variant="auto", metric="micro_batch", unit="sequences", values=[size]),
        call.result(variant="auto", metric="share_of_best", unit="share", values=[share]),
        call.result(variant="auto", metric="seconds", unit="s", values=[seconds]),
    ]
    write(results, options.to)
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
