"""The cost of a run in the sandbox against a plain fork, in turns, and the runs per second of several processes.

python -m benchmarks.sandbox --runs 200 --processes 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

from flatout.tasks.sandbox import Call, Sandbox

PROGRAM = "def f(xs):\n    return sorted(set(xs))\n"
CALLS = [Call(args=([3, 1, 3, n],), value=sorted({3, 1, n})) for n in range(5)]


def plain() -> bool:
    """The same work in a forked child that nothing holds."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        names: dict[str, Callable[..., object]] = {}
        exec(PROGRAM, names)  # noqa: S102 our own program
        os.write(writing, b"1" if all(names["f"](*call.args) == call.value for call in CALLS) else b"0")
        os._exit(0)
    os.close(writing)
    right = os.read(reading, 1) == b"1"
    os.close(reading)
    os.waitpid(child, 0)
    return right


def timed(work: Callable[[], bool]) -> float:
    began = time.perf_counter()
    assert work()
    return (time.perf_counter() - began) * 1e3


def run(box: Sandbox) -> bool:
    return box.returns(PROGRAM, "f", CALLS, end=time.monotonic() + 60)


def rate(processes: int, runs: int) -> float:
    """Runs per second of processes that have a sandbox each, all started before the clock."""
    (ready, told), (go, tell) = os.pipe(), os.pipe()
    children = []
    for _ in range(processes):
        children.append(os.fork())
        if children[-1] == 0:
            os.close(tell)
            with Sandbox() as box:
                run(box)
                os.write(told, b".")
                os.read(go, 1)  # the end of the pipe
                for _ in range(runs):
                    run(box)
                os.write(told, b".")
            os._exit(0)
    for _ in children:
        os.read(ready, 1)
    began = time.perf_counter()
    os.close(tell)
    for _ in children:
        os.read(ready, 1)
    taken = time.perf_counter() - began
    for child in children:
        os.waitpid(child, 0)
    return processes * runs / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    with Sandbox() as box:
        run(box), plain()
        pairs = [(timed(lambda: run(box)), timed(plain)) for _ in range(options.runs)]
    for name, times in zip(
        ("sandbox", "plain fork", "added"), [*zip(*pairs, strict=True), [a - b for a, b in pairs]], strict=True
    ):
        print(f"{name:10}  median {statistics.median(times):6.2f} ms, least {min(times):6.2f} ms")
    print(f"{rate(options.processes, options.runs):.0f} runs a second in {options.processes} processes")


if __name__ == "__main__":
    main()
