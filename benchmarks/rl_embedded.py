"""`examples/rl-embedded.yaml` with GRPO and PPO, three seeds each: the mean reward at its start and at its end.

    python -m benchmarks.rl_embedded

A CPU is enough. The questions of each task come again in every two phases. The start is the first eight phases of
rollouts, the end the last eight. The interval is that of the difference, by the spread of the phases around the mean of
their own seed.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.results import FOLDER, Call, git_commit, table, write
from flatout import gallery
from flatout.record import Run
from flatout.record.rollouts import RolloutsGraded

# PPO trains its critic first, and takes smaller and more steps. The critic is on the policy's trunk: a larger value
# loss or learning rate overwrites what was taught.
ALGORITHMS = {
    "grpo": [],
    "ppo": ["rl.critic_warmup=10", "rl.value_weight=0.1", "rl.gae_lambda=1.0", "train.lr=4e-4", "train.steps=210"],
}
PHASES = 8
# The normal quantile of a 95 % interval.
Z = 1.96

Rewards = dict[str, list[float]]


def rewards_of(algorithm: str, seed: int, *, scratch: Path) -> Rewards:
    """The reward of each phase, by task."""
    folder, file = scratch / f"{algorithm}-{seed}", gallery.find("rl-embedded").path
    overrides = [f"rl.algorithm={algorithm}", f"seed={seed}", *ALGORITHMS[algorithm]]
    command = [sys.executable, "-m", "flatout", "train", str(file), *overrides, "--run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{folder.name}: exit {done.returncode}: {done.stderr.strip()[-1500:]}")
    phases = [event for event in Run.open(folder).events() if isinstance(event, RolloutsGraded)]
    names = [task.task for task in phases[0].tasks]
    return {name: [phase.tasks[at].reward or 0.0 for phase in phases] for at, name in enumerate(names)}


def gain(runs: list[list[float]]) -> tuple[float, float, float]:
    """The difference between the end and the start, and its interval."""
    starts, ends = [run[:PHASES] for run in runs], [run[-PHASES:] for run in runs]
    value = statistics.mean(map(statistics.mean, ends)) - statistics.mean(map(statistics.mean, starts))
    half = Z * math.sqrt(sum(statistics.variance(part) / PHASES for part in (*starts, *ends))) / len(runs)
    return value, value - half, value + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--commit", default=None)
    parser.add_argument("--to", type=Path, default=FOLDER / "rl-embedded.jsonl")
    options = parser.parse_args()
    call = Call(benchmark="rl-embedded", commit=options.commit or git_commit())
    jobs = list(product(options.algorithms, options.seeds))
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as threads:
        found = dict(zip(jobs, threads.map(lambda job: rewards_of(*job, scratch=Path(scratch)), jobs), strict=True))
    results = []
    for algorithm in options.algorithms:
        runs = [found[algorithm, seed] for seed in options.seeds]
        for task in runs[0]:
            variant, of_task = f"{algorithm} {task.partition(':')[0]}", [run[task] for run in runs]
            for metric, part in (("start", slice(PHASES)), ("end", slice(-PHASES, None))):
                values = [statistics.mean(run[part]) for run in of_task]
                results.append(call.result(variant=variant, metric=metric, unit="mean reward", values=values))
            value, low, high = gain(of_task)
            row = call.result(variant=variant, metric="gain", unit="mean reward", values=[value])
            results.append(replace(row, low=low, high=high, repeats=len(options.seeds)))
    write(results, options.to)
    print(table(results))


if __name__ == "__main__":
    main()
