"""What sharding and saving cost on one GPU.

On an H200, three commands of two to five minutes; each adds its figures to benchmarks/results/scale.jsonl:

    python -m benchmarks.scale fsdp
    python -m benchmarks.scale fsdp --shape 8b
    python -m benchmarks.scale saves --folder DIR      # DIR: on the disk to measure, 20 GB free

`fsdp` compares one step by FSDP2 on one rank (`full`) with the same kernels without it (`none`), and with what the plan
chooses for one rank, FP8 and CUDA graphs included (`plan`), in blocks of interleaved order. Shape 124m is pretrained
with the batch of examples/pretrain-124m.yaml; of shape 8b adapters of rank 16 are trained. `saves` trains a 0.5B model
with AdamW and saves after every second block of 50 steps: a block with a save against the block after it.

`--tiny` runs the same code in seconds on a CPU; its figures mean nothing and are not written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import SHAPES
from benchmarks.results import FOLDER, Call, Result, cost_results, git_commit, write
from flatout.config import from_mapping
from flatout.config.settings import PlanSettings, TrainSettings
from flatout.cost import Adapters, ModelShape
from flatout.data.stream import Batch
from flatout.engine.prepare import prepare
from flatout.engine.ranks import Ranks
from flatout.engine.resolve import resolve
from flatout.engine.sharding import shard
from flatout.engine.step import Engine
from flatout.hardware import detect
from flatout.launch.local import free_port
from flatout.model import Decoder, load_adapted
from flatout.optim import adamw, schedule
from flatout.plan import Job, Plan, decide
from flatout.probe import Phases
from flatout.recipes import run
from flatout.record import Run
from flatout.record.events import Saved

WARM = 5
TINY = ModelShape(layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, intermediate=64, vocab=256, positions=32)
EIGHT = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, positions=2048
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained: the micro-batches of a step, and the rank of adapters if only these are trained."""

    shape: ModelShape
    micro_batch: int
    accumulation: int
    rank: int | None = None


CASES = {
    "124m": Case(shape=SHAPES["124m"], micro_batch=64, accumulation=8),
    "8b": Case(shape=EIGHT, micro_batch=4, accumulation=2, rank=16),
    "tiny": Case(shape=TINY, micro_batch=2, accumulation=2),
    "tiny-adapters": Case(shape=TINY, micro_batch=2, accumulation=2, rank=4),
}


# -- FSDP2 on one rank


def planned(case: Case, *, same: bool) -> Plan:
    """The plan for one rank. `same`: only with what sharded weights allow."""
    pins = PlanSettings(micro_batch=case.micro_batch, memory_fraction=0.4)  # of the device, which the engines share
    if same:
        pins = replace(pins, fp8=False, graphs=False)
        pins = pins if case.rank is None else replace(pins, fused_qkv=False, fused_mlp=False)
    return decide(
        Job(
            shape=case.shape,
            hardware=detect(),
            sequence_length=case.shape.positions,
            batch_tokens=case.micro_batch * case.accumulation * case.shape.positions,
            num_ranks=1,
            pins=pins,
            adapters=None if case.rank is None else Adapters(rank=case.rank, alpha=2 * case.rank),
        )
    )


def built(plan: Plan, *, sharded: bool) -> Engine:
    """An engine with random weights, as a run builds it."""
    active = resolve(plan, local_rank=0, deterministic=False)
    job, train, ranks = plan.job, TrainSettings(steps=1000), Ranks()
    if job.adapters is None:
        with torch.device(active.device):
            model = Decoder(job.shape, compute_dtype=active.dtype)
        model.initialise(0)
    else:
        adapted = load_adapted(
            None, job.adapters, shape=job.shape, device=active.device, compute_dtype=active.dtype, seed=0
        )
        assert isinstance(adapted, Decoder)
        model = adapted
    chunk = plan.decisions.loss_chunk
    head_loss, eight = prepare(model, active=active, recompute=plan.decisions.recompute, loss_chunk=chunk)
    if sharded:
        shard(model, active=active, ranks=ranks)
    return Engine(
        model=model,
        optimizer=adamw(model, train, fused=active.fused_optimizer or sharded),
        schedule=schedule(train, total_steps=1000),
        active=active,
        ranks=ranks,
        phases=Phases(device=active.device.type),
        head_loss=head_loss,
        eight=eight,
        batch_tokens=job.batch_tokens,
        clip=1.0,
        seed=0,
    )


def random_batch(case: Case) -> Batch:
    length = case.shape.positions
    tokens = torch.randint(case.shape.vocab, (case.micro_batch * length + 1,))
    return Batch(
        tokens=tokens[:-1],
        targets=tokens[1:].clone(),
        positions=torch.arange(length).repeat(case.micro_batch),
        cu_seqlens=None,
        num_sequences=case.micro_batch,
        sequence_length=length,
        num_target_tokens=len(tokens) - 1,
    )


def block(engine: Engine, batches: list[Batch], *, steps: int) -> float:
    """Seconds of a block of steps."""
    engine.wait()
    began = time.perf_counter()
    for step in range(steps):
        engine.begin_step(step)
        engine.phases.mark("data")
        engine.step(step, batches)
        engine.end_step()
        engine.finished()
    engine.finished(all=True)
    engine.wait()
    return time.perf_counter() - began


def fsdp(options: argparse.Namespace) -> list[Result]:
    case = CASES[options.shape]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        same, best = planned(case, same=True), planned(case, same=False)
        engines = {
            "none": built(same, sharded=False),
            "full": built(same, sharded=True),
            "plan": built(best, sharded=False),
        }
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(1.0)  # each plan has limited the process to its own share
        batches = [random_batch(case)] * case.accumulation
        for engine in engines.values():
            block(engine, batches, steps=WARM)
        names, taken = list(engines), dict[str, list[float]]()
        for i in range(options.blocks):
            # Forwards, then backwards: a drift of the clock costs all of them the same.
            for name in names if i % 2 else reversed(names):
                seconds = block(engines[name], batches, steps=options.steps) / options.steps
                taken.setdefault(name, []).append(seconds)
                print(f"block {i + 1}, {name}: {seconds * 1000:.1f} ms a step", flush=True)
    finally:
        dist.destroy_process_group()
    for name, seconds in taken.items():
        print(f"{options.shape} {name}: {statistics.median(seconds) * 1000:.2f} ms a step")
    call = Call(benchmark="scale", commit=options.commit or git_commit())
    rows = [
        call.result(variant=f"fsdp-{options.shape}-{name}", metric="step", unit="s", values=seconds)
        for name, seconds in taken.items()
    ]
    for other in ("none", "plan"):
        costs = [a / b - 1 for a, b in zip(taken["full"], taken[other], strict=True)]
        print(f"{options.shape}: full against {other} {statistics.median(costs):+.2%}")
        rows += cost_results(call, f"fsdp-{options.shape}-against-{other}", costs)
    return rows


# -- asynchronous saves


def saves(options: argparse.Namespace) -> list[Result]:
    every = 5 if options.tiny else 50
    model: dict[str, Any] = {"layers": 24, "hidden": 1280, "heads": 20, "intermediate": 3456, "vocab": 32768}
    data: dict[str, Any] = {"source": "embedded", "embedded_mb": 16.0, "sequence_length": 1024}
    batch = {"tokens": 65536, "micro": 32}
    if options.tiny:
        model = {"layers": 2, "hidden": 32, "heads": 2}
        data = {"source": "embedded", "embedded_mb": 0.2, "tokenizer": "byte", "sequence_length": 32}
        batch = {"tokens": 128, "micro": 4}
    settings = from_mapping(
        {
            "model": model,
            "data": data,
            "train": {"batch_tokens": batch["tokens"], "steps": 2 * every * (options.pairs + 1), "lr": 1e-4},
            "plan": {"micro_batch": batch["micro"]},
            "eval": {"every": None},
            "save": {"every": 2 * every, "keep": 2},
        }
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name) / "run"
        run(settings, folder=folder)
        # The time of a save counts towards the step that follows it.
        seconds = {record.step: record.seconds for record in Run.open(folder).latest_steps()}
        # Without the last save, which is waited for.
        saved = [event for event in Run.open(folder).events() if isinstance(event, Saved)][:-1]
    costs, alone = [], []
    for event in saved:
        after, rest = range(event.step, event.step + every), range(event.step + every, event.step + 2 * every)
        with_save, without = (sum(seconds[step] for step in block) for block in (after, rest))
        costs.append(with_save / without - 1)
        alone.append((event.seconds or 0.0) < with_save)
    # Once a run, page-locked memory for the copies is reserved in the background, in its first steps.
    first, later = range(WARM, every), range(2 * every - (every - WARM), 2 * every)
    reserved = sum(seconds[step] for step in first) - sum(seconds[step] for step in later)
    print(f"steps {WARM} to {every} took {reserved:+.2f} s more than as many later ones")
    blocked, wrote = [e.blocked_s or 0.0 for e in saved], [e.seconds or 0.0 for e in saved]
    print(f"a save every {every} steps costs {statistics.median(costs):+.2%} and blocks {max(blocked):.3f} s at most")
    print(f"writing took {max(wrote):.1f} s at most, {sum(alone)} of {len(alone)} within their block")
    if not all(alone):
        print("a save that is written for longer than its block also slows the block it is compared with")
    call = Call(benchmark="scale", commit=options.commit or git_commit())
    return [
        *cost_results(call, "asynchronous-save-0.5b", costs),
        call.result(variant="asynchronous-save-0.5b", metric="blocked", unit="s", values=blocked),
        call.result(variant="asynchronous-save-0.5b", metric="written", unit="s", values=wrote),
        call.result(variant="asynchronous-save-0.5b", metric="reserved", unit="s", values=[reserved]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fsdp", "saves"])
    parser.add_argument("--shape", choices=["124m", "8b"], default="124m")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="of a block of fsdp")
    parser.add_argument("--pairs", type=int, default=5, help="of blocks of saves")
    parser.add_argument("--folder", type=Path, default=None, help="saves: on the disk to measure")
    parser.add_argument("--tiny", action="store_true", help="try the script on a CPU")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "scale.jsonl")
    options = parser.parse_args()
    if options.tiny:
        options.shape = "tiny" if options.shape == "124m" else "tiny-adapters"
        options.blocks, options.steps, options.pairs = 2, 2, 2
    rows = {"fsdp": fsdp, "saves": saves}[options.what](options)
    if not options.tiny:
        write(rows, options.to)


if __name__ == "__main__":
    main()
