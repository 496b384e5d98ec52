"""Two steps under torch's profiler, with the calls that bring a value to the host."""

from __future__ import annotations

import functools
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .stacks import user_site

if TYPE_CHECKING:
    from .agent import Agent

WAITS = re.compile(r"Synchronize|Malloc|Free|Memcpy(?!Async)")
ATTENTION = re.compile(r"softmax|scaled_dot_product|bmm|attention")


class Profiler:
    """Runs torch's profiler over some steps, and times the calls that wait for the device."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.sync_sites: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self._running: Any = None
        self._began = 0.0

    def begin(self) -> None:
        # autograd's own front to the same profiler: torch.profiler's would import dynamo and inductor first.
        on_gpu = bool(self.agent.facts.get("cuda_used"))
        if on_gpu:
            self._watch_syncs()
        profile = self.agent.torch.autograd.profiler.profile
        # Without use_kineto this front times operators by CUDA events, and sees no kernel at all.
        self._running = profile(record_shapes=True, use_device="cuda" if on_gpu else None, use_kineto=True)
        self._running.__enter__()
        self._began = time.perf_counter()

    def _watch_syncs(self) -> None:
        """Time the calls that bring a value to the host, with the line that makes them."""
        tensor = self.agent.torch.Tensor
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"):
            self.agent.patches.replace(tensor, name, functools.partial(self._sync, f"Tensor.{name}"))
        self.agent.patches.replace(
            self.agent.torch.cuda, "synchronize", functools.partial(self._sync, "torch.cuda.synchronize")
        )

    def _sync(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            on_device = name == "torch.cuda.synchronize" or getattr(args[0], "is_cuda", False)
            if not on_device or not self.agent.is_training_thread() or self.agent.stage != "profiled":
                return original(*args, **kwargs)
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seen = self.sync_sites[f"{name} at {user_site(2)}"]
                seen[0] += 1
                seen[1] += time.perf_counter() - began

        return wrapped

    def end(self, steps: int) -> None:
        if self._running is None:
            return
        seconds = time.perf_counter() - self._began
        profiler, self._running = self._running, None
        # It waits for the device as it ends, which is no wait of the script's.
        before, self.agent.probing = self.agent.probing, True
        try:
            profiler.__exit__(None, None, None)
        finally:
            self.agent.probing = before
        self.agent.facts["profile"] = summary_of(profiler, seconds=seconds, steps=steps)
        self.agent.facts["syncs"] = [
            {"site": site, "count": count / steps, "seconds": spent / steps}
            for site, (count, spent) in sorted(self.sync_sites.items(), key=lambda s: -s[1][1])[:12]
        ]


def summary_of(profiler: Any, *, seconds: float, steps: int) -> dict[str, Any]:
    """What a profiled stretch says, per step: operators on the host, kernels on the device, why the device waited."""
    operators: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy: list[tuple[float, float]] = []
    calls: list[tuple[float, float, str]] = []
    for event in profiler.function_events:
        start, end = event.time_range.start, event.time_range.end
        if "cuda" in str(event.device_type).lower():
            if not getattr(event, "is_user_annotation", False) and not event.name.startswith(
                ("aten::", "ProfilerStep", "Optimizer.", "##", "enumerate(")
            ):
                kernels[event.name][0] += 1
                kernels[event.name][1] += end - start
                busy.append((start, end))
        else:
            shapes = json.dumps([s for s in (event.input_shapes or []) if s][:3])
            operators[(event.name, shapes)][0] += 1
            operators[(event.name, shapes)][1] += event.self_cpu_time_total
            if event.name.startswith("cuda") and WAITS.search(event.name):
                calls.append((start, end, event.name))
    top = sorted(operators.items(), key=lambda o: -o[1][1])
    chosen = top[:60] + [o for o in top[60:] if ATTENTION.search(o[0][0])][:20]
    return {
        "seconds": seconds / steps,
        "num_operators": sum(c for (n, _), (c, _) in operators.items() if n.startswith("aten::")) / steps,
        "operators": [[name, shapes, c / steps, us / 1e6 / steps] for (name, shapes), (c, us) in chosen],
        "kernels": [
            [name[:160], c / steps, us / 1e6 / steps]
            for name, (c, us) in sorted(kernels.items(), key=lambda k: -k[1][1])[:60]
        ],
        "num_kernels": sum(c for c, _ in kernels.values()) / steps,
        "busy_s": covered(busy) / 1e6 / steps,
        "waits": {name: us / 1e6 / steps for name, us in waits_of(busy, calls).items()},
        "copies_pageable_s": sum(us for n, (_, us) in kernels.items() if "HtoD" in n and "Pageable" in n) / 1e6 / steps,
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def waits_of(busy: list[tuple[float, float]], calls: list[tuple[float, float, str]]) -> dict[str, float]:
    """The device's idle microseconds by what the host did: asked for memory, waited for a value, or was too slow."""
    found: dict[str, float] = defaultdict(float)
    calls = sorted(calls)
    reach, index = None, 0
    for start, end in sorted(busy):
        if reach is not None and start > reach:
            while index < len(calls) and calls[index][1] < reach - 100:
                index += 1
            inside = [c for c in calls[index : index + 64] if c[0] < start and c[1] > reach - 100]
            asked = [(max(0.0, min(e, start) - max(b, reach)), n) for b, e, n in inside if "Malloc" in n or "Free" in n]
            memory = sum(us for us, _ in asked)
            rest = start - reach - memory
            found["memory"] += memory
            found["malloc"] += sum(us for us, name in asked if "Malloc" in name)
            # After a synchronisation the host starts launching again: the queue was empty because of it.
            found["sync" if any("Malloc" not in c[2] and "Free" not in c[2] for c in inside) else "launch"] += rest
        reach = end if reach is None else max(reach, end)
    return dict(found)
