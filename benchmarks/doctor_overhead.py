"""The doctor's overhead outside the profiled window: the same loop with and without the agent, in turn.

    python -m benchmarks.doctor_overhead [--device cuda] [--pairs 3] [--blocks 4] [--steps 40] [--budget 60]
    python -m benchmarks.doctor_overhead --device cuda --job 'trl=train.py --lr 1e-6'

A pair is two processes, one of them watched, that run one block of steps each in turn. Several pairs average out
differences between processes. The agent stays in its timed stage throughout, stack samples included. It prints a line
for each two blocks, then the mean ratio and its upper 95 % bound. On CUDA the loop makes implicit synchronisations an
error, so that one caused by the agent would show. With `--job` it is any script, in one process: the agent takes stack
samples and follows forward passes in every second window of 16 forward passes only, and windows next to each other are
compared if they have as many optimizer steps as most have. A job that generates is so compared within its steps: two
processes of TRL's GRPOTrainer differ by up to 14 %, and two steps of one process by up to 50 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import Call, cost_results, git_commit, upper_95, write

ROOT = Path(__file__).parents[1]
# A block for every line that comes in; the seconds a step took go out.
LOOP = """
import sys, time, torch
from torch import nn
steps, device = int(sys.argv[1]), sys.argv[2]
width, layers, rows, length = (768, 8, 8, 513) if device == "cuda" else (256, 2, 8, 129)
torch.manual_seed(0)
layer = lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(512, width), *(layer() for _ in range(layers)), nn.Linear(width, 512)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
def wait():
    if device == "cuda": torch.cuda.synchronize()
def block(steps):
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        ids = torch.randint(0, 512, (rows, length), device=device)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wait()
    return (time.perf_counter() - began) / steps
block(10)
if device == "cuda": torch.cuda.set_sync_debug_mode("error")
print("ready", flush=True)
for _ in sys.stdin:
    print(block(steps), flush=True)
"""

# A script, with the agent that sitecustomize has started on in every second window of forward passes.
WINDOW = 16
TOLD = "windows: watched or not, optimizer steps, seconds: "
TOGGLED = f"""
import atexit, json, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
agent, windows, calls, steps, began, watched = sys.modules["_flatout_agent"].AGENT, [], 0, 0, None, True
def after_step(*_):
    global steps
    steps += 1
    if agent.stage == "timed" and began is None and agent.forwards.roots:
        window()
        count(agent.forwards.roots[0])
def count(root):
    kind, call = type(root), type(root).__call__
    def counted(self, *args, **kwargs):
        global calls
        calls += self is root
        if calls == {WINDOW}:
            window()
        return call(self, *args, **kwargs)
    kind.__call__ = counted  # before the hooks of the call, which the agent's are among
def window():
    global calls, steps, began, watched
    now = time.perf_counter()
    if began is not None:
        windows.append((watched, steps, now - began))
        before, watched = watched, len(windows) % 4 in (0, 3)  # on, off, off, on: no rhythm of the job favours one
        if watched and not before:
            agent.sampler.start(agent.shortest_s)
            agent.forwards._follow_modules(agent.forwards.roots)
        elif before and not watched:
            agent.sampler.stop()
            while agent.forwards._undo:
                agent.forwards._undo.pop()()
    calls, steps, began = 0, 0, time.perf_counter()
register_optimizer_step_post_hook(after_step)
atexit.register(lambda: print({TOLD!r} + json.dumps(windows), flush=True))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--job", metavar="NAME=SCRIPT", help="a script and its arguments, instead of the loop")
    parser.add_argument("--budget", type=float, help="seconds after which no further block is begun")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    until = math.inf if options.budget is None else time.monotonic() + options.budget
    ratios: list[float] = jobs(options) if options.job is not None else []
    for pair in range(options.pairs if options.job is None else 0):
        if time.monotonic() > until:
            break
        with started(options, watched=True) as on, started(options, watched=False) as off:
            for process in (on, off):
                answer(process)
            for block in range(options.blocks):
                if time.monotonic() > until:
                    break
                # Whoever is first changes, so that drift favours neither.
                order = (on, off) if block % 2 else (off, on)
                taken = {process: float(ask(process)) for process in order}
                ratios.append(taken[on] / taken[off])
                line = {"pair": pair, "block": block, "on_s": taken[on], "off_s": taken[off], "ratio": ratios[-1]}
                print(json.dumps(line), flush=True)
    costs = [ratio - 1 for ratio in ratios]
    mean = statistics.fmean(costs) if costs else None
    print(json.dumps({"overhead": mean, "upper_95": upper_95(costs), "blocks": len(costs)}))
    if options.to is not None and costs:
        call = Call(benchmark="doctor-overhead", commit=options.commit or git_commit())
        variant = options.device if options.job is None else options.job.partition("=")[0]
        write(cost_results(call, variant, costs), options.to)


def jobs(options: argparse.Namespace) -> list[float]:
    """Runs the script once; in every second window of forward passes the agent looks away. Pairs are compared."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TOGGLED, *shlex.split(options.job.partition("=")[2])]
        done = subprocess.run(command, env=surroundings(Path(folder), watched=True), stdout=subprocess.PIPE, text=True)
    line = next((text for text in reversed(done.stdout.splitlines()) if text.startswith(TOLD)), None)
    if line is None or done.returncode:
        raise SystemExit(f"the job ended with {done.returncode} before a step was watched: {done.stdout[-300:]}")
    windows = json.loads(line.removeprefix(TOLD))
    print(json.dumps({"windows": windows}), flush=True)
    usual = statistics.mode(steps for _, steps, _ in windows)
    pairs = [two for two in zip(windows[::2], windows[1::2], strict=False) if two[0][1] == two[1][1] == usual]
    seconds = [{watched: taken for watched, _, taken in two} for two in pairs]
    return [pair[True] / pair[False] for pair in seconds]


def surroundings(folder: Path, *, watched: bool) -> dict[str, str]:
    """The environment of a process; a watched one gets the agent, which writes into `folder`."""
    if not watched:
        return dict(os.environ)
    inject = str(ROOT / "src" / "flatout" / "probe" / "inject")
    path = os.pathsep.join(filter(None, (inject, os.environ.get("PYTHONPATH"))))
    told = {"out": str(folder), "steps": 10**9, "seconds": 10.0**9, "stop": False}
    return {**os.environ, "PYTHONPATH": path, "FLATOUT_AGENT": json.dumps(told)}


@contextlib.contextmanager
def started(options: argparse.Namespace, *, watched: bool) -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryDirectory() as folder:
        environment = surroundings(Path(folder), watched=watched)
        command = [sys.executable, "-c", LOOP, str(options.steps), options.device]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            if watched:
                check(Path(folder))


def check(folder: Path) -> None:
    """Checks that the agent watched to the end without an error of its own."""
    (found,) = (json.loads(path.read_text()) for path in folder.glob("facts-*.json"))
    if found["errors"] or found["state"] != "ended":
        raise SystemExit(f"the agent {found['state']} with errors {found['errors']}")


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"the loop ended by itself, with exit code {process.wait()}")
    return line


if __name__ == "__main__":
    main()
