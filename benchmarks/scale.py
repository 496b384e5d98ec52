"""What sharding and saving cost on one GPU, and what one of many ranks holds.

    python -m benchmarks.scale fsdp        # a step with FSDP2 on one rank against none, in interleaved blocks
    python -m benchmarks.scale saves       # throughput with a save every 50 steps against none, and how long it blocks
    python -m benchmarks.scale simulate    # bytes of state on one of 8 to 256 ranks, in a fake process group; no GPU

`fsdp` and `saves` need a GPU and write to benchmarks/results/scale.jsonl.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import SHAPES, Point, built, planned, random_batch
from benchmarks.results import FOLDER, Call, git_commit, write
from flatout.config import from_mapping
from flatout.config.settings import PlanSettings, TrainSettings
from flatout.cost import GIB
from flatout.engine.ranks import Ranks
from flatout.engine.sharding import shard
from flatout.engine.step import Engine
from flatout.hardware import parse
from flatout.model import Decoder
from flatout.optim import adamw, local
from flatout.plan import Job
from flatout.plan.predict import memory_of, sized
from flatout.recipes import run
from flatout.record import Run
from flatout.record.events import Saved


def block(engine: Engine, batch: Any, *, steps: int) -> float:
    """Seconds of a block of steps."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in range(steps):
        engine.begin_step(step)
        engine.phases.mark("data")
        engine.step(step, [batch])
        engine.finished()
        engine.end_step()
    engine.finished(all=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def sharded(engine: Engine) -> Engine:
    """The same engine with its weights sharded over one rank."""
    ranks = Ranks()
    shard(engine.model, active=engine.active, ranks=ranks)
    return Engine(
        model=engine.model,
        optimizer=adamw(engine.model, TrainSettings(), fused=True),
        schedule=engine.schedule,
        active=engine.active,
        ranks=ranks,
        phases=engine.phases,
        head_loss=engine.head_loss,
        clip=engine.clip,
        seed=engine.seed,
        batch_tokens=1,
    )


def fsdp(options: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("nccl")
    point = Point(shape=options.shape, micro_batch=options.micro_batch)
    plan = planned(point)
    plan = replace(plan, decisions=replace(plan.decisions, graphs=False))
    batch = random_batch(point, plan)
    engines = {"none": built(point, plan), "full": sharded(built(point, plan))}
    for engine in engines.values():
        block(engine, batch, steps=5)
    costs = []
    for i in range(options.blocks):
        order = ("none", "full") if i % 2 else ("full", "none")
        taken = {name: block(engines[name], batch, steps=options.steps) for name in order}
        costs.append(taken["full"] / taken["none"] - 1)
    call = Call(benchmark="scale", commit=options.commit or git_commit())
    write([call.result(variant=f"fsdp-{options.shape}", metric="cost", unit="share of step", values=costs)], options.to)
    print(f"FSDP2 on one rank costs {statistics.median(costs):.2%} ({min(costs):.2%} to {max(costs):.2%})")
    dist.destroy_process_group()


def saves(options: argparse.Namespace) -> None:
    """A 0.5B model with AdamW, with and without saves; evaluations are off."""
    speeds: dict[str, list[float]] = {"none": [], "behind": []}
    blocked: list[float] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for i in range(options.repeats):
            for name in ("none", "behind") if i % 2 else ("behind", "none"):
                settings = from_mapping(
                    {
                        "model": {"layers": 24, "hidden": 1280, "heads": 20, "intermediate": 3456, "vocab": 32768},
                        "data": {"source": "embedded", "embedded_mb": 16.0, "sequence_length": 1024},
                        "train": {"batch_tokens": 131072, "steps": options.steps, "lr": 1e-4},
                        "save": {"every": 50 if name == "behind" else None},
                    }
                )
                path = Path(folder) / f"{name}-{i}"
                run(settings, folder=path)
                found = list(Run.open(path).latest_steps())[20:]
                # All time counts, that of saves too.
                speeds[name].append(sum(s.tokens for s in found) / sum(s.seconds for s in found))
                if name == "behind":
                    events = [e for e in Run.open(path).events() if isinstance(e, Saved)]
                    blocked += [e.blocked_s for e in events[:-1] if e.blocked_s is not None]
    losses = [1 - with_ / without for with_, without in zip(speeds["behind"], speeds["none"], strict=True)]
    call = Call(benchmark="scale", commit=options.commit or git_commit())
    rows = [
        call.result(variant="save-behind-0.5b", metric="loss", unit="share of throughput", values=losses),
        call.result(variant="save-behind-0.5b", metric="blocked", unit="s", values=blocked),
    ]
    write(rows, options.to)
    print(f"saves every 50 steps cost {statistics.median(losses):.2%} and block {max(blocked):.3f} s at most")


def state_bytes(shape_name: str, world: int) -> int:
    """Bytes of weights, gradients and moments on one rank, as FSDP2 divides them, without allocating any."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = Decoder(SHAPES[shape_name], compute_dtype=torch.bfloat16)
        active: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
        shard(model, active=active, ranks=Ranks(world=world))
        return sum(4 * 4 * local(parameter).numel() for parameter in model.parameters())


def simulate(options: argparse.Namespace) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for world in (8, 64, 256):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        held = state_bytes(options.shape, world)
        dist.destroy_process_group()
        shape = SHAPES[options.shape]
        job = Job(
            shape=shape,
            hardware=parse("A100-80GBx8"),
            sequence_length=shape.positions,
            batch_tokens=world * shape.positions,
            num_ranks=world,
            pins=PlanSettings(sharding="full"),
        )
        memory = memory_of(job, sized(job, 1, precision="bf16", path="eager", recompute="full"))
        state = memory.weights + memory.optimizer + 4 * shape.num_parameters / world
        print(
            f"{world} ranks: {held / GIB:.4f} GiB of state held, {state / GIB:.4f} predicted ({state / held - 1:+.1%})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fsdp", "saves", "simulate"])
    parser.add_argument("--shape", choices=list(SHAPES), default="124m")
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=None, help="saves: on the disk to measure")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "scale.jsonl")
    options = parser.parse_args()
    {"fsdp": fsdp, "saves": saves, "simulate": simulate}[options.what](options)


if __name__ == "__main__":
    main()
