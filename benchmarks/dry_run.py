"""One step of one of many ranks without a GPU: the peak of its memory beside the plan's, and what it exchanges.

    python -m benchmarks.dry_run              # 8 GPUs, and full fine-tuning of 7B on 8 to 256
    python -m benchmarks.dry_run --tiny

The ranks are those of torch's fake process group, whose collectives move nothing, and tensors have no memory (fake
tensors), but all operations of forward pass, backward pass and update run, and torch's tracker counts the bytes that
live at any time. Kernels are the plain ones on both sides, because Triton's cannot run this way.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.scale import TINY, Case, random_batch
from flatout.config.settings import PlanSettings, Recompute, Sharding, TrainSettings
from flatout.cost import GIB, Adapters, ModelShape
from flatout.engine.prepare import prepare
from flatout.engine.ranks import Ranks
from flatout.engine.resolve import Active
from flatout.engine.sharding import shard
from flatout.engine.step import Engine
from flatout.hardware import parse
from flatout.model import Decoder, load_adapted
from flatout.optim import adamw, schedule
from flatout.plan import Job, Plan, decide
from flatout.probe import Phases

# Qwen2.5-7B, the model of examples/rl-guru-pcgrad.yaml.
SEVEN = ModelShape(
    layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064, positions=2048,
    qkv_bias=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Dry:
    """A rank's part of a step."""

    shape: ModelShape
    sharding: Sharding
    world: int
    micro_batch: int = 1
    accumulation: int = 1
    rank: int | None = None  # of adapters
    recompute: Recompute = "full"

    @property
    def name(self) -> str:
        what = "all weights" if self.rank is None else f"adapters of rank {self.rank}"
        held = "sharded" if self.sharding == "full" else "copies"
        size = f"{self.micro_batch} x {self.accumulation} sequences, recomputation {self.recompute}"
        return f"{self.shape.num_parameters / 1e9:.1f}B, {what}, {held} on {self.world} ranks, {size}"


def planned(case: Dry) -> Plan:
    pins = PlanSettings(
        micro_batch=case.micro_batch,
        recompute=case.recompute,
        sharding=case.sharding,
        precision="bf16",
        compile="none",
        fused_qkv=False,
        fused_mlp=False,
        fused_loss=False,
        fp8=False,
        graphs=False,
        preset="max",
    )
    return decide(
        Job(
            shape=case.shape,
            hardware=parse(f"A100-80GBx{case.world}"),
            sequence_length=case.shape.positions,
            batch_tokens=case.world * case.micro_batch * case.accumulation * case.shape.positions,
            num_ranks=case.world,
            pins=pins,
            adapters=None if case.rank is None else Adapters(rank=case.rank, alpha=2 * case.rank),
        )
    )


class Collectives(TorchDispatchMode):
    """Counts what is exchanged, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name() if hasattr(func, "name") else str(func)
        if name.startswith(("c10d::", "_c10d_functional::")):
            self.seen[name.split("::")[1].removesuffix("_")] += 1
        return func(*args, **(kwargs or {}))


def dry_run(case: Dry) -> tuple[float, Counter[str]]:
    """The peak in GiB of the second step, and the collectives of both."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plan = planned(case)
    cpu = torch.device("cpu")
    active = Active(
        device=cpu,
        dtype=torch.bfloat16,
        attention="flash",
        repeat_kv=False,
        varlen=False,
        compile="none",
        fused_optimizer=True,
        facts={},
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world)
    tracker, exchanged = MemTracker(), Collectives()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), tracker, exchanged:
            if plan.job.adapters is None:
                model = Decoder(case.shape, compute_dtype=active.dtype)
            else:
                adapted = load_adapted(
                    None, plan.job.adapters, shape=case.shape, device=cpu, compute_dtype=active.dtype, seed=0
                )
                assert isinstance(adapted, Decoder)
                model = adapted
            head_loss, _ = prepare(model, active=active, recompute=case.recompute, loss_chunk=plan.decisions.loss_chunk)
            if case.sharding == "full":
                shard(model, active=active, ranks=Ranks(world=case.world))
            train = TrainSettings(steps=10)
            engine = Engine(
                model=model,
                optimizer=adamw(model, train, fused=True),
                schedule=schedule(train, total_steps=10),
                active=active,
                ranks=Ranks(),  # what hosts agree on is not simulated
                phases=Phases(device="cpu"),
                head_loss=head_loss,
                batch_tokens=plan.job.batch_tokens,
                clip=1.0,
                seed=0,
            )
            batches = [random_batch(Case(shape=case.shape, micro_batch=case.micro_batch, accumulation=1))]
            batches *= case.accumulation
            for step in range(2):
                if step:
                    tracker.reset_mod_stats()
                engine.begin_step(step)
                engine.step(step, batches)
                engine.end_step()
        peak = max(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())
        return peak / GIB, exchanged.seen
    finally:
        dist.destroy_process_group()


CASES = [
    Dry(shape=SEVEN, sharding="none", world=8, rank=32, micro_batch=4, accumulation=2, recompute="none"),
    Dry(shape=SEVEN, sharding="none", world=8, rank=32, micro_batch=4, accumulation=2),
    Dry(shape=SEVEN, sharding="full", world=8, rank=32, micro_batch=4, accumulation=2),
    *(Dry(shape=SEVEN, sharding="full", world=world, micro_batch=2) for world in (8, 64, 256)),
    Dry(shape=SEVEN, sharding="full", world=8, accumulation=2),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small shape")
    parser.add_argument("--only", type=int, default=None, help="number of a case")
    options = parser.parse_args()
    for number, case in enumerate(CASES):
        if options.only not in (None, number):
            continue
        case = replace(case, shape=TINY) if options.tiny else case
        began = time.perf_counter()
        peak, exchanged = dry_run(case)
        predicted = planned(case).predicted.peak_gib
        print(f"{case.name}: {peak:.2f} GiB held, {predicted:.2f} predicted ({predicted / peak - 1:+.1%})")
        print(f"  two steps exchange {dict(exchanged)}; {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
