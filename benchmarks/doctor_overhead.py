"""What watching costs a script outside the profiled window: the same loop with and without the agent, in turns.

    python -m benchmarks.doctor_overhead [--blocks 12] [--steps 150] [--device cuda]

Each block is a process of its own, timed by itself from its 20th step on. The agent stays in its timed stage all along,
stack samples included. Printed: the mean ratio of paired blocks and its upper 95 % bound.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOOP = """
import sys, time, torch
from torch import nn
steps, device = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
layer = lambda: nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(512, 256), *(layer() for _ in range(2)), nn.Linear(256, 512)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step in range(steps):
    if step == 20:
        if device == "cuda": torch.cuda.synchronize()
        began = time.perf_counter()
    ids = torch.randint(0, 512, (8, 129), device=device)
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if device == "cuda": torch.cuda.synchronize()
print((time.perf_counter() - began) / (steps - 20))
"""
# Student's t, one-sided 95 %, by degrees of freedom; beyond the table the normal's.
T95 = {9: 1.833, 10: 1.812, 11: 1.796, 12: 1.782, 14: 1.761, 15: 1.753, 19: 1.729, 24: 1.711, 29: 1.699}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    ratios = []
    for block in range(options.blocks):
        first = bool(block % 2)  # whoever is first in a pair changes, so that drift favours neither
        taken = {on: step_seconds(options, watched=on) for on in (first, not first)}
        ratios.append(taken[True] / taken[False])
        print(json.dumps({"block": block, "on_s": taken[True], "off_s": taken[False], "ratio": ratios[-1]}), flush=True)
    mean, spread = statistics.fmean(ratios), statistics.stdev(ratios)
    bound = mean + T95.get(len(ratios) - 1, 1.645) * spread / math.sqrt(len(ratios))
    print(f"overhead {100 * (mean - 1):+.2f} %, upper 95 % bound {100 * (bound - 1):+.2f} %, {len(ratios)} pairs")


def step_seconds(options: argparse.Namespace, *, watched: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if watched:
            environment["PYTHONPATH"] = str(ROOT / "src" / "flatout" / "probe" / "inject")
            told = {"out": folder, "steps": 10**9, "seconds": 10.0**9, "stop": False}
            environment["FLATOUT_AGENT"] = json.dumps(told)
        done = subprocess.run(
            [sys.executable, "-c", LOOP, str(options.steps), options.device],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout)


if __name__ == "__main__":
    main()
