"""What if: the script's last batch, replayed with one thing changed at a time."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .facts import matmul_precision
from .hooks import quietly
from .switches import Switches
from .tensors import Batch, detached, mapped, scalar_loss, tensors_of

if TYPE_CHECKING:
    from .agent import Agent

MOST_BATCHES = 5  # made without workers
ENOUGH_TOKENS = 2048  # in a micro-batch on a GPU: thin work is no matter of the batch from there on


def unwrapped(module: Any) -> Any:
    """The module inside DistributedDataParallel, which would reduce gradients."""
    return module.module if hasattr(module, "require_backward_grad_sync") else module


class Replays:
    """The last batch, forward and backward again, with one thing changed at a time.

    Only when the script is stopped afterwards: gradients and random numbers are not what they were.
    """

    def __init__(self, agent: Agent, optimizer: Any) -> None:
        self.agent, self.torch, self.optimizer = agent, agent.torch, optimizer
        self.found: dict[str, Any] = {}
        self.logs: list[float] = []  # of the last comparison
        self.replay_s = agent.settings.replay_s
        self.deadline = time.perf_counter() + agent.settings.replays_s
        self.device = agent.facts.get("device") or "cpu"
        self.anomaly = bool(agent.facts.get("anomaly"))

    def run(self) -> None:
        agent = self.agent
        agent.facts["replays"] = self.found
        self.found["matmul_flops"] = quietly(self.matmul_peak)()
        quietly(self.optimizers)()
        quietly(self.attention)()
        quietly(self.batches)()
        # Without a backward pass of torch.autograd, what was called last.
        calls = agent.forwards.last or agent.forwards.calls
        if not calls or agent.facts["model"]["compiled"]:
            return  # compiled code would be recompiled for every change
        self.mixed = agent.forwards.mixed
        if any(self.is_sharded(module) for module, _, _ in calls):
            return  # a collective that the other ranks do not join would hang
        self.synced = calls[0][0]
        self.calls = [(unwrapped(module), args, kwargs) for module, args, kwargs in calls]
        doubles = "float64" in agent.facts["model"]["dtypes"]
        for question in (self.no_sync, self.switches, self.precision, self.single if doubles else self.larger_batch):
            quietly(question)()

    @staticmethod
    def is_sharded(module: Any) -> bool:
        return "FullyShardedDataParallel" in type(module).__name__ or "FSDP" in type(module).__name__

    # -- the machinery

    def replay(self, module: Any = None, times: int = 1) -> None:
        """One micro-batch: each part that the script called, forward and backward, with the inputs it had."""
        for part, args, kwargs in self.calls:
            self.replay_part(module or part, args, kwargs, times=times)

    def replay_part(self, module: Any, args: Any, kwargs: Any, *, times: int) -> None:
        torch = self.torch
        rows = next((t.shape[0] for _, t in tensors_of([args, kwargs]) if t.dim() > 0), None)

        def grown(tensor: Any) -> Any:
            if times > 1 and tensor.dim() > 0 and tensor.shape[0] == rows:
                return torch.cat([tensor] * times)
            return tensor

        args, kwargs = mapped(list(args), grown), mapped(dict(kwargs), grown)
        on, dtype = self.mixed
        with torch.enable_grad(), torch.autocast(self.device, dtype=dtype, enabled=on):
            loss = scalar_loss(torch, module(*args, **kwargs))
        if loss is not None:
            loss.backward()

    def timed(self, call: Callable[[], None]) -> float:
        cuda = self.device == "cuda"
        if cuda:
            self.torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if cuda:
            self.torch.cuda.synchronize()
        return time.perf_counter() - began

    def compare(self, plain_call: Callable[[], None], changed: Callable[[], None]) -> tuple[float, float] | None:
        """Best seconds of either, in ABBA order so that a busy machine slows both; `logs` has each turn's ratio."""
        best, self.logs = [float("inf"), float("inf")], []
        began = time.perf_counter()
        for turn in range(10):
            calls = [(0, plain_call), (1, changed)]
            taken = {which: self.timed(call) for which, call in (calls if turn % 2 else reversed(calls))}
            if turn > 0:  # the first turn warms up
                best = [min(best[which], taken[which]) for which in (0, 1)]
                self.logs.append(math.log(taken[1] / taken[0]))
            spent = time.perf_counter() - began
            if (turn >= 3 and spent > self.replay_s) or (turn >= 2 and spent > 5 * self.replay_s):
                break
        return None if float("inf") in best else (best[0], best[1])

    def measure(self, name: str, change: Callable[[], Any], times: int = 1) -> None:
        """Compare a plain replay with one inside `change()`."""
        if time.perf_counter() > self.deadline:
            return

        def changed() -> None:
            with self.state(anomaly=self.anomaly), change():
                self.replay(times=times)

        try:
            taken = self.compare(self.replay_unchanged, changed)
        except self.torch.cuda.OutOfMemoryError:
            self.found[name] = "out of memory"
            self.torch.cuda.empty_cache()
            return
        if taken:
            self.found[name] = [taken[0], taken[1] / times, [log - math.log(times) for log in self.logs]]

    def replay_unchanged(self) -> None:
        with self.state(anomaly=self.anomaly):
            self.replay()

    @contextlib.contextmanager
    def state(self, anomaly: bool) -> Iterator[None]:
        before = self.torch.is_anomaly_enabled()
        self.torch.autograd.set_detect_anomaly(anomaly)
        try:
            yield
        finally:
            self.torch.autograd.set_detect_anomaly(before)

    # -- the questions

    def no_sync(self) -> None:
        if self.synced is self.calls[0][0] or len(self.calls) > 1 or self.agent.facts["accumulation"] < 2:
            return
        # Fixed counts: every rank must take part in the same collectives.
        best: dict[bool, float] = {True: float("inf"), False: float("inf")}
        for _ in range(6):
            for sync in (True, False):
                with contextlib.nullcontext() if sync else self.synced.no_sync():
                    best[sync] = min(best[sync], self.timed(lambda: self.replay(self.synced)))
        self.found["no-sync"] = [best[True], best[False]]

    def switches(self) -> None:
        torch, facts = self.torch, self.agent.facts
        if facts.get("anomaly"):
            self.measure("anomaly", lambda: self.state(anomaly=False))
        if facts.get("recomputing"):
            self.measure("recompute", self.without_recompute)
        if self.device == "cpu" and torch.get_num_threads() < facts["default_threads"]:
            self.measure("threads", self.all_threads)
        if torch.are_deterministic_algorithms_enabled():
            self.measure("deterministic", self.nondeterministic)
        if self.device == "cuda" and not (
            torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
        ):
            self.measure("attention-backends", self.all_backends)

    def precision(self) -> None:
        torch, facts = self.torch, self.agent.facts
        if self.device != "cuda" or torch.cuda.get_device_capability()[0] < 8:
            return
        if facts.get("compute_dtype", "float32") == "float32":
            if matmul_precision(torch) == "highest":
                self.measure("tf32", self.tf32)
            self.measure("bf16", self.in_bf16)

    def larger_batch(self) -> None:
        ids = Batch(self.torch, *self.calls[0][1:]).ids
        if self.device == "cuda" and ids is not None and ids.numel() >= ENOUGH_TOKENS:
            return
        self.anomaly = False  # what a stack for every operation costs is not the batch's fault
        for times in (2, 4):
            self.measure(f"batch-{times}", contextlib.nullcontext, times=times)

    def single(self) -> None:
        """float64 to float32; last, because the module stays that way."""
        torch = self.torch
        plain_s = self.compare(self.replay_unchanged, self.replay_unchanged)
        torch.set_default_dtype(torch.float32)

        def single(tensor: Any) -> Any:
            return detached(tensor.float()) if tensor.is_floating_point() else tensor

        self.calls = [
            (module.float(), mapped(list(args), single), mapped(dict(kwargs), single))
            for module, args, kwargs in self.calls
        ]
        single_s = self.compare(self.replay_unchanged, self.replay_unchanged)
        if plain_s and single_s:
            self.found["single"] = [min(plain_s), min(single_s)]

    @contextlib.contextmanager
    def without_recompute(self) -> Iterator[None]:
        self.agent.facts["replay_without_recompute"] = True
        try:
            yield
        finally:
            del self.agent.facts["replay_without_recompute"]

    @contextlib.contextmanager
    def all_threads(self) -> Iterator[None]:
        before = self.torch.get_num_threads()
        self.torch.set_num_threads(self.agent.facts["default_threads"])
        try:
            yield
        finally:
            self.torch.set_num_threads(before)

    @contextlib.contextmanager
    def nondeterministic(self) -> Iterator[None]:
        self.torch.use_deterministic_algorithms(False)
        try:
            yield
        finally:
            self.torch.use_deterministic_algorithms(True)

    @contextlib.contextmanager
    def in_bf16(self) -> Iterator[None]:
        before, self.mixed = self.mixed, (True, self.torch.bfloat16)
        try:
            yield
        finally:
            self.mixed = before

    @contextlib.contextmanager
    def tf32(self) -> Iterator[None]:
        before = matmul_precision(self.torch)
        self.torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            self.torch.set_float32_matmul_precision(before)

    @contextlib.contextmanager
    def all_backends(self) -> Iterator[None]:
        cuda = self.torch.backends.cuda
        before = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
        Switches.attention_backends(self.torch)
        try:
            yield
        finally:
            cuda.enable_flash_sdp(before[0])
            cuda.enable_mem_efficient_sdp(before[1])
            cuda.enable_math_sdp(before[2])

    def matmul_peak(self) -> float:
        """Operations a second of a large product, as the ceiling where no datasheet is at hand."""
        torch = self.torch
        side = 4096 if self.device == "cuda" else 1024
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.float32) for _ in range(2))
        best = min(self.timed(lambda: torch.mm(a, b)) for _ in range(4))
        if self.device == "cpu" and self.agent.facts.get("compute_dtype") == "bfloat16":
            half = [a.bfloat16(), b.bfloat16()]
            taken = self.compare(lambda: torch.mm(*half), lambda: torch.mm(a, b))
            if taken:
                self.found["float32_product"] = [*taken, self.logs]
        return float(2 * side**3 / best)

    def optimizers(self) -> None:
        """A sample of the parameters copied and stepped by such an optimizer, and by the fused one."""
        torch = self.torch
        if self.optimizer is None:
            return
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        group = self.optimizer.param_groups[0]
        state: dict[str, Any] = next(iter(self.optimizer.state.values()), {}) if self.optimizer.state else {}
        if group.get("fused") or "exp_avg" not in state:
            return
        sample: list[Any] = []
        room = 30_000_000
        if self.device == "cuda":  # all of them, where there is room for two copies: small tensors cost launches
            room = min(500_000_000, self.torch.cuda.mem_get_info()[0] // 64)
        for parameter in parameters[:512]:
            room -= parameter.numel()
            if room < 0 and sample:
                break
            sample.append(parameter)

        def optimizer_of(kind: Any, **how: Any) -> Any:
            clones = [torch.nn.Parameter(p.detach().clone()) for p in sample]
            for clone in clones:
                clone.grad = torch.zeros_like(clone)
            return kind(clones, lr=1e-4, **how)

        kind = type(self.optimizer)
        known = kind.__module__.startswith("torch.optim")
        try:
            plain_one = optimizer_of(kind, foreach=group.get("foreach")) if known else optimizer_of(kind)
            fused_one = optimizer_of(torch.optim.AdamW, fused=True)
        except (TypeError, RuntimeError):
            return
        taken = self.compare(lambda: plain_one.step(), lambda: fused_one.step())
        if taken:
            self.found["fused"] = [*taken, self.logs]

    def batches(self) -> None:
        """What the loader's workers do, done in this process: seconds waited for a batch, and to make one."""
        hooks = self.agent.hooks
        loader = hooks.loader()
        if not hooks.num_batches or not getattr(loader, "num_workers", 0) or loader.batch_sampler is None:
            return
        made: list[float] = []
        began = time.perf_counter()
        for rows in loader.batch_sampler:
            taken_s = self.timed(lambda rows=rows: loader.collate_fn([loader.dataset[row] for row in rows]))  # type: ignore[misc]
            made.append(taken_s)
            if len(made) == MOST_BATCHES or time.perf_counter() - began > self.replay_s:
                break
        self.found["batch-alone"] = [hooks.waited_s / hooks.num_batches, min(made)]

    def attention(self) -> None:
        """Attention written out as products and a softmax, against the fused operator, in the shapes that were seen."""
        torch = self.torch
        shapes = Counter[tuple[int, ...]]()
        own = 0.0  # the softmax of torch's own attention, where it takes its plain path
        for name, text, count, _ in (self.agent.facts.get("profile") or {}).get("operators", []):
            first = (json.loads(text) or [[]])[0]
            if name == "aten::_softmax" and len(first) in (3, 4) and first[-1] == first[-2] and first[-1] > 1:
                shapes[tuple(first)] += count
            elif name == "aten::_scaled_dot_product_attention_math":
                own += count
        if not shapes:
            return
        shape, count = shapes.most_common(1)[0]
        count -= own
        if count < 0.5:
            return
        width = self.head_width(shape)
        if width is None:
            return
        dtype = getattr(torch, self.agent.facts.get("compute_dtype", "float32"))
        q, k, v = (
            torch.randn(*shape[:-1], width, device=self.device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        mask = torch.ones(shape[-2], shape[-1], device=self.device, dtype=torch.bool).tril()

        on, mixed = self.agent.forwards.mixed

        def written_out() -> None:
            scores = (q @ k.transpose(-2, -1) * width**-0.5).masked_fill(~mask, float("-inf"))
            (torch.softmax(scores, -1) @ v).sum().backward()

        def fused() -> None:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        with torch.autocast(self.device, dtype=mixed, enabled=on):  # where it is on, a softmax is in float32
            taken = self.compare(written_out, fused)
        if taken:
            self.found["attention"] = [taken[0], taken[1], count, list(shape)]

    def head_width(self, shape: tuple[int, ...]) -> int | None:
        """The width of a head, from the product that made the scores."""
        heads = 1
        for size in shape[:-2]:
            heads *= size
        for name, text, _, _ in self.agent.facts["profile"]["operators"]:
            shapes = json.loads(text)
            if name == "aten::bmm" and len(shapes) >= 2 and len(shapes[0]) == 3:
                (batch, rows, inner), (_, _, columns) = shapes[0], shapes[1]
                if batch == heads and rows == shape[-2] and columns == shape[-1]:
                    return int(inner)
        return None
