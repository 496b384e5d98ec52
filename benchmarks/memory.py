"""Predicted and measured peak memory and speed of the step, over shapes, micro-batches and decisions, on one GPU.

    python -m benchmarks.memory --to benchmarks/results/memory-and-speed.jsonl

Engine steps on random tokens, clipping on: three to warm up, five timed.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, replace
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
from flatout.hardware import Hardware, detect, named
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
    compile: Compile = "none"
    precision: Precision = "bf16"
    loss_chunk: int = 8192
    fused: bool = True
    fp8: bool = False
    length: int | None = None  # of a sequence, where it is not the shape's own

    @property
    def model(self) -> ModelShape:
        shape = SHAPES[self.shape]
        return shape if self.length is None else replace(shape, positions=self.length)

    @property
    def variant(self) -> str:
        how = "fp8" if self.fp8 else "fused" if self.fused else "eager" if self.compile == "none" else "compiled"
        size = f"{self.micro_batch}" if self.accumulation == 1 else f"{self.micro_batch}x{self.accumulation}"
        name = self.shape if self.length is None else f"{self.shape}.{self.length}"
        return f"flatout-{name}-micro{size}-{self.recompute}-{how}-{self.precision}-chunk{self.loss_chunk}"


POINTS = [
    Point(shape="124m", micro_batch=8),
    Point(shape="124m", micro_batch=16),
    Point(shape="124m", micro_batch=32),
    Point(shape="124m", micro_batch=64),
    Point(shape="124m", micro_batch=64, recompute="full"),
    Point(shape="124m", micro_batch=16, fp8=True),
    Point(shape="124m", micro_batch=64, fp8=True),
    Point(shape="124m", micro_batch=64, fp8=True, recompute="full"),
    Point(shape="360m", micro_batch=32),
    Point(shape="360m", micro_batch=32, fp8=True),
    Point(shape="1b", micro_batch=4, accumulation=2),
    Point(shape="1b", micro_batch=8),
    Point(shape="1b", micro_batch=8, fp8=True),
    Point(shape="1b", micro_batch=4, fp8=True, recompute="full"),
    Point(shape="124m", micro_batch=64, fused=False, compile="default"),
    Point(shape="360m", micro_batch=16, recompute="full"),
    Point(shape="360m", micro_batch=8, fp8=True, recompute="full"),
    Point(shape="124m", micro_batch=6),
    Point(shape="124m", micro_batch=24, fp8=True),
    Point(shape="124m", micro_batch=16, length=2048, recompute="full"),
    Point(shape="360m", micro_batch=4, fp8=True),
    Point(shape="360m", micro_batch=4, length=4096),
    Point(shape="1b", micro_batch=2),
]


def planned(point: Point, *, hardware: Hardware | None = None) -> Plan:
    shape = point.model
    pins = PlanSettings(
        micro_batch=point.micro_batch,
        recompute=point.recompute,
        compile=point.compile,
        precision=point.precision,
        loss_chunk=point.loss_chunk,
        fused_qkv=point.fused,
        fused_mlp=point.fused,
        fused_loss=point.fused,
        fp8=point.fp8,
    )
    return decide(
        Job(
            shape=shape,
            hardware=hardware or detect(),
            sequence_length=shape.positions,
            batch_tokens=point.micro_batch * point.accumulation * shape.positions,
            num_ranks=1,
            pins=pins,
        )
    )


def built(point: Point, plan: Plan) -> Engine:
    """An engine with random weights, as a run builds it."""
    active = resolve(plan, local_rank=0, deterministic=False)
    with torch.device(active.device):
        model = Decoder(plan.job.shape, compute_dtype=active.dtype)
    model.initialise(0)
    train = TrainSettings(steps=1000)
    head_loss, eight = prepare(model, active=active, recompute=point.recompute, loss_chunk=point.loss_chunk)
    return Engine(
        model=model,
        optimizer=adamw(model, train, fused=active.fused_optimizer),
        schedule=schedule(train, total_steps=1000),
        active=active,
        ranks=Ranks(),
        phases=Phases(device="cuda"),
        head_loss=head_loss,
        eight=eight,
        batch_tokens=plan.job.batch_tokens,
        clip=1.0,
        seed=0,
    )


def random_batch(point: Point, plan: Plan) -> Batch:
    shape, length = plan.job.shape, plan.job.sequence_length
    tokens = torch.randint(shape.vocab, (point.micro_batch * length + 1,))
    return Batch(
        tokens=tokens[:-1],
        targets=tokens[1:].clone(),
        positions=torch.arange(length).repeat(point.micro_batch),
        cu_seqlens=None,
        num_sequences=point.micro_batch,
        sequence_length=length,
        num_target_tokens=len(tokens) - 1,
    )


def measured(point: Point, plan: Plan) -> dict[str, float]:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine, batch = built(point, plan), random_batch(point, plan)
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
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--to", type=Path, default=FOLDER / "memory-and-speed.jsonl")
    parser.add_argument("--predict", metavar="MACHINE", help="only predict, for a machine that need not be here")
    options = parser.parse_args()
    call = Call(benchmark="memory-and-speed", commit=options.commit or git_commit())
    for point in POINTS:
        if options.predict:
            guessed = planned(point, hardware=named(options.predict)).predicted
            print(f"{point.variant:48} {guessed.peak_gib:8.2f} GiB {guessed.tokens_per_s or 0:12,.0f} tokens/s")
            continue
        plan = planned(point)
        runs = [measured(point, plan) for _ in range(options.repeats)]
        results: list[Result] = []
        for metric, unit in (("peak_gib", "GiB"), ("tokens_per_s", "tokens/s")):
            values = [run[metric] for run in runs]
            results.append(call.result(variant=point.variant, metric=metric, unit=unit, values=values))
            guess: Any = getattr(plan.predicted, metric)
            results.append(call.result(variant=point.variant, metric=f"predicted_{metric}", unit=unit, values=[guess]))
            found = results[-2].value
            print(
                f"{point.variant:48} {metric:13} {found:12,.2f} predicted {guess:12,.2f} {guess / found - 1:+.1%}",
                flush=True,
            )
        # A call cut short keeps what it has.
        write(results, options.to)


if __name__ == "__main__":
    main()
