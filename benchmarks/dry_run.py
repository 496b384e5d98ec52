"""One step of one of many ranks without a GPU: the peak of its memory beside the plan's, and what it exchanges.

    python -m benchmarks.dry_run              # 8 GPUs, and full fine-tuning of 7B on 8 to 256
    python -m benchmarks.dry_run --tiny

The ranks are those of torch's fake process group, whose collectives move nothing, and tensors have no memory (fake
tensors), but all operations of forward pass, backward pass and update run, and the bytes that live at any time are
counted. Kernels are the plain ones on both sides, because Triton's cannot run this way.
"""

from __future__ import annotations

import argparse
import time
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

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
from flatout.optim import adamw, local, schedule
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


class Tracker(TorchDispatchMode):
    """The bytes of all storages that live, at most, and how often each collective was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}

    def hold(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            self._resized(local(tensor).untyped_storage())

    def _resized(self, storage: Any) -> None:
        key = storage._cdata

        def gone(_: Any) -> None:
            del self._sizes[key], self._references[key]

        if key not in self._references:
            self._references[key] = weakref.ref(storage, gone)
        self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, sum(self._sizes.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            self.seen[name.removeprefix("c10d::").strip("_")] += 1
        found = func(*args, **(kwargs or {}))
        tree_map(self.hold, found)
        return found

    def __enter__(self) -> Tracker:
        # FSDP2 frees what it has gathered by a call that is no operation.
        plain = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            found = plain(storage, size)
            self._resized(storage)
            return found

        self._patched = patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patched.start()
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._patched.stop()


def dry_run(case: Dry) -> tuple[float, Counter[str]]:
    """The peak in GiB, and the collectives of two steps."""
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
    mesh = init_device_mesh("cpu", (case.world,))
    tracker = Tracker()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            if plan.job.adapters is None:
                model = Decoder(case.shape, compute_dtype=active.dtype)
            else:
                # All is on one device, and torch cannot move parameters that are fake.
                with patch.object(torch.nn.Module, "to", lambda self, *_: self):
                    adapted = load_adapted(
                        None, plan.job.adapters, shape=case.shape, device=cpu, compute_dtype=active.dtype, seed=0
                    )
                assert isinstance(adapted, Decoder)
                model = adapted
            head_loss, _ = prepare(model, active=active, recompute=case.recompute, loss_chunk=plan.decisions.loss_chunk)
            if case.sharding == "full":
                shard(model, active=active, ranks=Ranks(world=case.world), mesh=mesh)
            train = TrainSettings(steps=10)
            optimizer = adamw(model, train, fused=True)
            engine = Engine(
                model=model,
                optimizer=optimizer,
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
            for tensor in (*model.state_dict().values(), *(t for of in optimizer.state.values() for t in of.values())):
                tracker.hold(tensor)
            with tracker:
                for step in range(2):
                    engine.begin_step(step)
                    engine.step(step, batches)
                    engine.end_step()
        return tracker.peak / GIB, tracker.seen
    finally:
        dist.destroy_process_group()


CASES = [
    Dry(shape=SEVEN, sharding="none", world=8, rank=32, micro_batch=2, accumulation=2, recompute="none"),
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
