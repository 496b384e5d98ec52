"""Two steps under torch's profiler, with the calls that bring a value to the host."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .hooks import quietly
from .stacks import user_site

if TYPE_CHECKING:
    from .agent import Agent

WAITS = re.compile(r"Synchronize|Malloc|Free|Memcpy(?!Async)")
ATTENTION = re.compile(r"softmax|scaled_dot_product|bmm|attention")
# Recording and reading an event takes tens of microseconds, so both are limited; totals are scaled up.
MOST_RECORDED_S, MOST_EVENTS = 4.0, 200_000
# Of the profiler itself, or of memory.
OWN_EVENTS = ("[", "profiler::", "ProfilerStep", "PyTorch Profiler")


class Profiler:
    """Runs torch's profiler over some steps, and times the calls that wait for the device.

    It pauses while text is generated, because one call launches as many operators as a hundred training steps, and it
    stops recording after a few seconds. A pause ends one recording, and the next one begins after it.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.sync_sites: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self.wanted = False  # between begin() and end()
        self.recordings: list[Any] = []
        self.recorded_s = self.paused_s = self._own_s = 0.0  # the last is for starting and stopping
        self._began = self._since = self._pause_began = 0.0
        self._running: Any = None
        self._paused = False

    def begin(self) -> None:
        # autograd's own front to the same profiler: torch.profiler's would import dynamo and inductor first.
        if self.agent.facts.get("cuda_used"):
            self._watch_syncs()
        self._record()
        self.wanted, self._began, self._own_s = True, self._since, 0.0

    def _record(self) -> None:
        began = time.perf_counter()
        profile = self.agent.torch.autograd.profiler.profile
        device = "cuda" if self.agent.facts.get("cuda_used") else None
        # Without use_kineto this front times operators by CUDA events, and sees no kernel at all.
        self._running = profile(record_shapes=True, use_device=device, use_kineto=True)
        self._running.__enter__()
        self._since = time.perf_counter()
        self._own_s += self._since - began

    def _stop(self) -> None:
        if self._running is None:
            return
        began = time.perf_counter()
        self.recorded_s += began - self._since
        profiler, self._running = self._running, None
        # It waits for the device as it ends, which is no wait of the script's.
        before, self.agent.probing = self.agent.probing, True
        try:
            profiler.__exit__(None, None, None)
        finally:
            self.agent.probing = before
        self.recordings.append(profiler)
        self._own_s += time.perf_counter() - began

    def check(self) -> None:
        """Stops recording once enough is recorded; called where a phase begins."""
        if self._running is not None and time.perf_counter() - self._since + self.recorded_s > MOST_RECORDED_S:
            self._stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing inside; does nothing while no step is profiled, or inside another pause."""
        if not self.pause():
            yield
            return
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> bool:
        """Returns whether this call began the pause."""
        if not self.wanted or self._paused or not self.agent.is_training_thread():
            return False
        self._paused = True
        quietly(self._stop)()
        self._pause_began = time.perf_counter()
        return True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.paused_s += time.perf_counter() - self._pause_began
            if self.wanted and self.recorded_s < MOST_RECORDED_S:
                quietly(self._record)()

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
        if not self.wanted:
            return
        self.wanted = False
        self._stop()
        seconds = time.perf_counter() - self._began - self._own_s
        if self._paused:  # the script ended inside the pause
            self._paused = False
            self.paused_s += time.perf_counter() - self._pause_began
        recordings = [profiler.kineto_results.events() for profiler in self.recordings]
        self.recordings = []
        # What was neither recorded nor paused is taken to be like the recorded part.
        covered = min(1.0, self.recorded_s / max(1e-9, seconds - self.paused_s))
        self.agent.facts["profile"] = summary_of(
            recordings, seconds=seconds, steps=steps, covered=covered, paused_s=self.paused_s
        )
        self.agent.facts["syncs"] = [
            {"site": site, "count": count / steps, "seconds": spent / steps}
            for site, (count, spent) in sorted(self.sync_sites.items(), key=lambda s: -s[1][1])[:12]
        ]


def summary_of(
    recordings: list[Any], *, seconds: float, steps: float, covered: float = 1.0, paused_s: float = 0.0
) -> dict[str, Any]:
    """What profiled steps say, per step: operators on the host, kernels on the device, why the device waited.

    Reads the profiler's raw events: torch's own list of them takes ten times the time and the memory.
    """
    operators: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy: list[tuple[float, float]] = []
    waits: dict[str, float] = defaultdict(float)
    shapes_of: dict[str, str] = {}
    total = sum(map(len, recordings))
    left = MOST_EVENTS
    for events in recordings:
        calls: list[tuple[float, float, str]] = []
        here: list[tuple[float, float]] = []
        host: dict[int, list[tuple[int, int, str, str]]] = defaultdict(list)
        for event in events[:left]:
            name, start, length = event.name(), event.start_ns(), event.duration_ns()
            if name.startswith(OWN_EVENTS):
                continue
            if "CUDA" in str(event.device_type()):
                annotation = getattr(event, "is_user_annotation", None)
                if not (annotation is not None and annotation()) and not name.startswith(
                    ("aten::", "Optimizer.", "##", "enumerate(")
                ):
                    kernels[name][0] += 1
                    kernels[name][1] += length / 1e3
                    here.append((start / 1e3, (start + length) / 1e3))
            elif not event.is_async():
                shapes = str([s for s in (event.shapes() or []) if s][:3])
                host[event.start_thread_id()].append((start, -length, name, shapes_of.setdefault(shapes, shapes)))
                if name.startswith("cuda") and WAITS.search(name):
                    calls.append((start / 1e3, (start + length) / 1e3, name))
        left = max(0, left - len(events))
        for thread in host.values():
            add_self_times(thread, operators)
        for name, us in waits_of(here, calls).items():
            waits[name] += us
        busy += here
    asked = steps
    steps *= covered * min(1.0, MOST_EVENTS / max(1, total)) or 1.0
    top = sorted(operators.items(), key=lambda o: -o[1][1])
    chosen = top[:60] + [o for o in top[60:] if ATTENTION.search(o[0][0])][:20]
    return {
        "seconds": seconds / asked,
        "paused_s": paused_s / asked,
        "num_events": total,
        "covered": covered,
        "num_operators": sum(c for (n, _), (c, _) in operators.items() if n.startswith("aten::")) / steps,
        "operators": [[name, shapes, c / steps, us / 1e6 / steps] for (name, shapes), (c, us) in chosen],
        "kernels": [
            [name[:160], c / steps, us / 1e6 / steps]
            for name, (c, us) in sorted(kernels.items(), key=lambda k: -k[1][1])[:60]
        ],
        "num_kernels": sum(c for c, _ in kernels.values()) / steps,
        "busy_s": union(busy) / 1e6 / steps,
        "waits": {name: us / 1e6 / steps for name, us in waits.items()},
        "copies_pageable_s": sum(us for n, (_, us) in kernels.items() if "HtoD" in n and "Pageable" in n) / 1e6 / steps,
    }


def add_self_times(thread: list[tuple[int, int, str, str]], operators: dict[tuple[str, str], list[float]]) -> None:
    """Adds one thread's operators: how often each ran, and its microseconds without those of the operators inside."""
    inside: list[tuple[int, str, str]] = []  # end, name, shapes of what runs now, the outermost first
    for start, negative, name, shapes in sorted(thread):
        while inside and inside[-1][0] <= start:
            inside.pop()
        found = operators[(name, shapes)]
        found[0] += not inside or inside[-1][1] != name  # a wrapper of the same name is one operator
        found[1] -= negative / 1e3
        if inside:
            operators[(inside[-1][1], inside[-1][2])][1] += negative / 1e3
        inside.append((start - negative, name, shapes))


def union(spans: list[tuple[float, float]]) -> float:
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
