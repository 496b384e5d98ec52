"""What was seen of a job, as the rules ask for it: shares of step time, by phase and by what the host was at."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import Any

from flatout.hardware import Hardware
from flatout.insight.diagnose.ranks import Straggler

# In these phases the training thread's stack says what it was at; the other phases speak for themselves.
_OPEN = ("other", "eval", "reference")
# Fewer looks at the stack than these say nothing.
_FEWEST_SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One watched job: the timed steps and the agent's facts of one rank, and the steps of all."""

    steps: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    hardware: Hardware
    samples: Sequence[Mapping[str, Any]] = field(default=())  # of the machine
    all_steps: Sequence[Mapping[str, Any]] = field(default=())  # those that are not timed, too
    ranks: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # this one among them
    straggler: Straggler | None = None  # this rank, where the others wait for it

    # -- time

    @cached_property
    def seconds(self) -> float:
        return sum(map(seconds_of, self.steps))

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.steps)

    @cached_property
    def on_gpu(self) -> bool:
        return any(step["device"] for step in self.steps)

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds by phase: the device's where there is one, so that a wait it never noticed costs nothing."""
        total: Counter[str] = Counter()
        for step in self.steps:
            total.update(step["device"] or step["host"])
        return dict(total)

    def share(self, *phases: str) -> float:
        return sum(self.phases.get(phase, 0.0) for phase in phases) / self.seconds

    @property
    def compute_share(self) -> float:
        return self.share("forward", "backward")

    def steps_with(self, phase: str) -> int:
        return sum((step["device"] or step["host"]).get(phase, 0.0) > 1e-4 for step in self.steps)

    @property
    def others_cores(self) -> float | None:
        """Of the cores this job may use, those that other processes kept busy; None where nobody looked."""
        busy = [float(sample["cpu"]) for sample in self.samples if "cpu" in sample]
        if not busy:
            return None
        of_all = os.cpu_count() or 1
        own = sum(step.get("cpu_s") or 0.0 for step in self.steps) / self.seconds
        out_of_reach = max(0, of_all - self.cores)
        return max(0.0, sum(busy) / len(busy) * of_all - own * self.world - out_of_reach)

    @property
    def is_disturbed(self) -> bool:
        """Whether replays on more threads say nothing here, because the cores for them are taken."""
        return not self.on_gpu and (self.others_cores or 0.0) > 0.25 * self.cores

    # -- where the host was

    @cached_property
    def activities(self) -> dict[str, float]:
        """Share of step time by what the host was at outside the phases that speak for themselves."""
        shares: defaultdict[str, float] = defaultdict(float)
        for phase in _OPEN:
            counts = self._counts(phase)
            total = sum(counts.values())
            if total < _FEWEST_SAMPLES:
                shares["eval" if phase == "eval" else ""] += self.share(phase)
                continue
            for (kind, _), count in counts.items():
                # An evaluation's own data and its metrics are part of it.
                known = kind if phase != "eval" or kind in ("reward", "generate", "save", "log") else "eval"
                shares[known] += self.share(phase) * count / total
        for phase, kind in (("data", "data"), ("save", "save"), ("generate", "generate")):
            shares[kind] += self.share(phase)
        return dict(shares)

    def sites(self, kind: str, *phases: str, most: int = 2) -> list[str]:
        """The user's lines the host was at, the commonest first."""
        found: Counter[str] = Counter()
        for phase, sampled_kind, site, count in self.facts["samples"]:
            if site and (phase in phases or (phase in _OPEN and sampled_kind == kind)):
                found[short(site)] += count
        return [site for site, _ in found.most_common(most)]

    def _counts(self, phase: str) -> Counter[tuple[str, str]]:
        found: Counter[tuple[str, str]] = Counter()
        for sampled, kind, site, count in self.facts["samples"]:
            if sampled == phase:
                found[(kind, site)] += count
        return found

    # -- the batch

    @cached_property
    def micro(self) -> list[Mapping[str, Any]]:
        return [micro for step in self.steps for micro in step["micro"]]

    @property
    def accumulation(self) -> float:
        return max(1.0, len(self.micro) / len(self.steps))

    @property
    def tokens(self) -> int | None:
        """Of one rank, padding included; None where no token ids were seen."""
        counted = [m["tokens"] for m in self.micro if m["tokens"] is not None]
        return sum(counted) if counted else None

    @property
    def real_tokens(self) -> float | None:
        return None if self.tokens is None else _real_tokens(self.steps)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks; those that were not seen are taken to have had as many tokens as the others."""
        ranks = list(self.ranks.values()) or [self.steps]
        a_step = sum(_real_tokens(steps) / len(steps) for steps in ranks) * self.world / len(ranks)
        return a_step / self.step_s if a_step and self.seconds else None

    @property
    def length(self) -> float | None:
        lengths = [m["length"] for m in self.micro if m["length"]]
        return sum(lengths) / len(lengths) if lengths else None

    @property
    def rows(self) -> float | None:
        rows = [m["rows"] for m in self.micro if m["rows"]]
        return sum(rows) / len(rows) if rows else None

    # -- facts

    @property
    def world(self) -> int:
        return int(self.facts["world"])

    @property
    def cores(self) -> int:
        """Those the job may use."""
        return int(self.facts["cores"])

    @property
    def framework(self) -> str:
        return str(self.facts["framework"])

    @property
    def model(self) -> Mapping[str, Any]:
        return self.facts.get("model") or {}

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """The one whose steps are the beat."""
        return next(iter(self.facts["optimizers"].values()), {})

    @property
    def profile(self) -> Mapping[str, Any]:
        return self.facts.get("profile") or {}

    @property
    def idle_share(self) -> float | None:
        """Share of step time without work for the GPU; its kernels are as long under the profiler as without."""
        busy = self.profile.get("busy_s")
        if not self.on_gpu or not busy:
            return None
        return max(0.0, 1.0 - float(busy) / self.step_s)

    @cached_property
    def losses(self) -> list[float]:
        """One for every step that was watched; the mean of its micro-batches."""
        return [step["loss"] for step in self.all_steps or self.steps if step["loss"] is not None]

    @cached_property
    def rates(self) -> list[float]:
        """The learning rates of those steps, where they are known."""
        return [step["lr"] for step in self.all_steps or self.steps if step.get("lr") is not None]

    def replay(self, name: str) -> tuple[float, float] | None:
        """Seconds of the last batch as it was, and with one thing changed."""
        found = (self.facts.get("replays") or {}).get(name)
        return (float(found[0]), float(found[1])) if isinstance(found, list) else None

    def replay_gain(self, name: str) -> float | None:
        """Share of step time that the change saves, from the forward and backward of the last batch."""
        found = self.replay(name)
        if found is None or found[0] <= 0:
            return None
        return (1 - found[1] / found[0]) * self.replayed_share(found[0])

    def replayed_share(self, seconds: float) -> float:
        """Share of step time that replays stand for; with several ranks, without the sums of their gradients."""
        if self.world == 1:
            return self.compute_share
        return min(self.compute_share, seconds * self.accumulation / self.step_s)

    def counts(self, name: str) -> int:
        return int(self.facts.get("totals", {}).get(name, 0))


def seconds_of(step: Mapping[str, Any]) -> float:
    """By the device's clock where there is one: the host's runs ahead of it, and further as steps go by."""
    return float(sum((step["device"] or {}).values()) or step["seconds"] or 0.0)


def _real_tokens(steps: Sequence[Mapping[str, Any]]) -> float:
    counted = [micro for step in steps for micro in step["micro"] if micro["tokens"] is not None]
    return float(sum(micro["tokens"] if micro["real"] is None else micro["real"] for micro in counted))


def short(site: str) -> str:
    """`file.py:12 in function`, without the folders."""
    path, _, rest = site.partition(":")
    return f"{PurePath(path).name}:{rest}"
