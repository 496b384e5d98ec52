"""Where the time of a step goes, by class of kernel, on one GPU.

python -m benchmarks.profile_step --fp8
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory import Point, built, planned, random_batch
from benchmarks.results import FOLDER, Call, git_commit, write

STEPS = 3
# The first class whose words a kernel's name has.
CLASSES = {
    "matmul, 8 bits": ("nvjet_sm90_q",),
    "matmul, 16 bits": ("nvjet", "gemm", "cutlass"),
    "attention": ("sdpa", "flash", "cudnn"),
    "residual and norm": ("_norm_", "reduce_kernel"),
    "SwiGLU": ("_swiglu_",),
    "rotary positions": ("_rotate",),
    "cross-entropy": ("_rows", "_gradient8"),
    "8-bit copies": ("_quantise", "_transpose"),
    "optimizer and clipping": ("multi_tensor_apply", "FusedAdam"),
    "embedding": ("gather", "grad_weight", "scatter", "Sort", "embedding"),
}


def class_of(name: str) -> str:
    return next((title for title, words in CLASSES.items() if any(word in name for word in words)), "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="124m")
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "profile.jsonl")
    options = parser.parse_args()
    point = Point(shape=options.shape, micro_batch=options.micro_batch, fp8=options.fp8)
    plan = planned(point)
    engine, batch = built(point, plan), random_batch(point, plan)

    def step(i: int) -> None:
        engine.begin_step(i)
        engine.phases.mark("data")
        engine.step(i, [batch])
        engine.end_step()
        engine.finished()

    for i in range(3):
        step(i)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for i in range(STEPS):
            step(3 + i)
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in trace.events():
        spent[class_of(event.name)] += event.device_time / 1000 / STEPS
    call = Call(benchmark="profile", commit=options.commit or git_commit())
    total = sum(spent.values())
    print(f"{point.variant}: {total:.1f} ms of kernels a step")
    for title, ms in spent.most_common():
        print(f"| {title} | {ms:.2f} | {ms / total:.1%} |")
    results = [
        call.result(variant=point.variant, metric=title, unit="ms a step", values=[ms]) for title, ms in spent.items()
    ]
    write(results, options.to)


if __name__ == "__main__":
    main()
