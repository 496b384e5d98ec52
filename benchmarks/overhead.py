"""The overhead of measuring: the probe and the monitor on and off, in interleaved blocks of steps, on one GPU.

    python -m benchmarks.overhead --blocks 12

Prints the mean cost as a share of step time with the upper end of its 95 % interval (paired blocks, Student's t).
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import Point, built, planned, random_batch
from benchmarks.results import FOLDER, Call, cost_results, git_commit, upper_95, write
from flatout.engine.step import Engine
from flatout.probe import Monitor, Phases


def block(engine: Engine, batch: Any, *, steps: int, on: bool) -> float:
    """Seconds of a block of steps."""
    engine.phases = Phases(device="cuda", enabled=on)
    with Monitor(on_sample=lambda _: None, gpu=0) if on else nullcontext():
        torch.cuda.synchronize()
        began = time.perf_counter()
        for step in range(steps):
            engine.begin_step(step)
            engine.phases.mark("data")
            engine.step(step, [batch])
            engine.phases.mark("record")
            engine.finished()
            engine.end_step()
        engine.finished(all=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "overhead.jsonl")
    options = parser.parse_args()
    point = Point(shape="124m", micro_batch=64, fp8=True)
    plan = planned(point)
    engine, batch = built(point, plan), random_batch(point, plan)
    block(engine, batch, steps=5, on=True)
    costs = []
    for i in range(options.blocks):
        order = (True, False) if i % 2 else (False, True)
        taken = {on: block(engine, batch, steps=options.steps, on=on) for on in order}
        costs.append(taken[True] / taken[False] - 1)
    mean, upper = statistics.fmean(costs), upper_95(costs)
    assert upper is not None, "a spread takes two pairs of blocks"
    print(f"{options.blocks} pairs of {options.steps} steps: {mean:+.3%}, upper 95 % bound {upper:+.3%}")
    call = Call(benchmark="overhead", commit=options.commit or git_commit())
    write(cost_results(call, point.variant, costs), options.to)


if __name__ == "__main__":
    main()
