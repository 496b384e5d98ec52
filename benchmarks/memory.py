"""Predicted and measured peak memory and speed of the step, over shapes, micro-batches and decisions, on one GPU.

    python -m benchmarks.memory --to benchmarks/results/memory-and-speed.jsonl

Engine steps on random tokens, clipping on: three to warm up, five timed. One line per point, then the results.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import FOLDER, Call, Result, git_commit, write
from flatout.config.settings import Compile, PlanSettings, Precision, Recompute, TrainSettings
from flatout.cost import GIB, ModelShape
from flatout.data.stream import Batch
from flatout.engine.prepare import prepare
from flatout.engine.ranks import Ranks
from flatout.engine.resolve import resolve
from flatout.engine.step import Engine
from flatout.hardware import detect
from flatout.model import Decoder
from flatout.optim import adamw, schedule
from flatout.plan import Job, Plan, decide
from flatout.probe import Phases

WARM, TIMED = 3, 5
SHAPES = {
    "124m": ModelShape(
        layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, intermediate=2048, vocab=50304, positions=1024
    ),
    "360m": ModelShape(
        layers=32,
        hidden=960,
        heads=15,
        kv_heads=5,
        head_dim=64,
        intermediate=2560,
        vocab=49152,
        positions=1024,
        tied=True,
    ),
    "1b": ModelShape(
        layers=16,
        hidden=2048,
        heads=32,
        kv_heads=8,
        head_dim=64,
        intermediate=8192,
        vocab=128256,
        positions=4096,
        tied=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    shape: str
    micro_batch: int
    accumulation: int = 1
    recompute: Recompute = "none"
    compile: Compile = "default"
    precision: Precision = "bf16"
    loss_chunk: int = 8192

    @property
    def variant(self) -> str:
        how = "eager" if self.compile == "none" else "compiled"
        size = f"{self.micro_batch}" if self.accumulation == 1 else f"{self.micro_batch}x{self.accumulation}"
        return f"flatout-{self.shape}-micro{size}-{self.recompute}-{how}-{self.precision}-chunk{self.loss_chunk}"


POINTS = [
    *(Point(shape="124m", micro_batch=size) for size in (8, 16, 32, 64)),
    Point(shape="124m", micro_batch=64, recompute="selective"),
    Point(shape="124m", micro_batch=64, recompute="full"),
    Point(shape="124m", micro_batch=16, compile="none"),
    Point(shape="124m", micro_batch=32, precision="fp32"),
    Point(shape="124m", micro_batch=64, loss_chunk=4096),
    Point(shape="124m", micro_batch=64, loss_chunk=16384),
    Point(shape="360m", micro_batch=32, accumulation=2),
    Point(shape="1b", micro_batch=2),
    Point(shape="1b", micro_batch=4, accumulation=2),
    Point(shape="1b", micro_batch=4, recompute="full"),
]


def planned(point: Point) -> Plan:
    shape = SHAPES[point.shape]
    pins = PlanSettings(
        micro_batch=point.micro_batch,
        recompute=point.recompute,
        compile=point.compile,
        precision=point.precision,
        loss_chunk=point.loss_chunk,
    )
    return decide(
        Job(
            shape=shape,
            hardware=detect(),
            sequence_length=shape.positions,
            batch_tokens=point.micro_batch * point.accumulation * shape.positions,
            num_ranks=1,
            pins=pins,
        )
    )


def measured(point: Point, plan: Plan) -> dict[str, float]:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    shape, length = plan.job.shape, plan.job.sequence_length
    active = resolve(plan, local_rank=0, deterministic=False)
    with torch.device(active.device):
        model = Decoder(shape, compute_dtype=active.dtype)
    model.initialise(0)
    train = TrainSettings(steps=WARM + TIMED)
    engine = Engine(
        model=model,
        optimizer=adamw(model, train, fused=active.fused_optimizer),
        schedule=schedule(train, total_steps=WARM + TIMED),
        active=active,
        ranks=Ranks(),
        phases=Phases(device="cuda"),
        rows=prepare(model, active=active, recompute=point.recompute),
        loss_chunk=point.loss_chunk,
        clip=1.0,
        seed=0,
    )
    tokens = torch.randint(shape.vocab, (point.micro_batch * length + 1,))
    batch = Batch(
        tokens=tokens[:-1],
        targets=tokens[1:].clone(),
        positions=torch.arange(length).repeat(point.micro_batch),
        cu_seqlens=None,
        num_sequences=point.micro_batch,
        sequence_length=length,
        num_target_tokens=len(tokens) - 1,
    )
    for step in range(WARM + TIMED):
        if step == WARM:
            torch.cuda.synchronize()
            began = time.perf_counter()
        engine.begin_step(step)
        engine.phases.mark("data")
        engine.step(step, [batch] * point.accumulation)
        engine.end_step()
        engine.finished()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / TIMED
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "tokens_per_s": plan.job.batch_tokens / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "memory-and-speed.jsonl")
    options = parser.parse_args()
    call = Call(benchmark="memory-and-speed", commit=options.commit or git_commit())
    results: list[Result] = []
    for point in POINTS:
        plan = planned(point)
        found = measured(point, plan)
        guess: dict[str, Any] = {
            "peak_gib": plan.predicted.peak_gib,
            "tokens_per_s": plan.predicted.tokens_per_s,
        }
        for metric, unit in (("peak_gib", "GiB"), ("tokens_per_s", "tokens/s")):
            results.append(call.result(variant=point.variant, metric=metric, unit=unit, values=[found[metric]]))
        print(point.variant, *(f"{m} {found[m]:,.2f} predicted {guess[m]:,.2f}" for m in found), flush=True)
    write(results, options.to)


if __name__ == "__main__":
    main()
