"""The observations of a job that the rules use: shares of step time by phase and by host activity."""

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
from flatout.parity import FEWEST_PAIRS, paired

# In these phases the training thread's stack shows the activity; the other phases name it themselves.
_OPEN = ("other", "eval", "reference", "loss")
# In these, whatever has no name of its own is the work of the phase, and no wait for data.
_OWN_WORK = ("eval", "reference", "loss")
# Fewer stack samples than this are ignored.
_FEWEST_SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One watched job: the timed steps and the agent's facts of one rank, and the steps of all."""

    steps: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    hardware: Hardware
    samples: Sequence[Mapping[str, Any]] = field(default=())  # of the machine
    all_steps: Sequence[Mapping[str, Any]] = field(default=())  # including those that are not timed
    ranks: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # including this one
    straggler: Straggler | None = None  # set if this rank is the straggler
    no_replays: str = "the watch ended before the replays"  # why there are none, where there are none

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
        """Seconds by phase, on the device's clock if there is one, so that hidden waits cost nothing."""
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
        """How many of this job's cores other processes kept busy; None if it was not measured."""
        busy = [float(sample["cpu"]) for sample in self.samples if "cpu" in sample]
        if not busy:
            return None
        of_all = os.cpu_count() or 1
        own = sum(step.get("cpu_s") or 0.0 for step in self.steps) / self.seconds
        out_of_reach = max(0, of_all - self.cores)
        return max(0.0, sum(busy) / len(busy) * of_all - own * self.world - out_of_reach)

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes use the cores that replays with more threads would need."""
        return not self.on_gpu and (self.others_cores or 0.0) > 0.25 * self.cores

    # -- host activity

    @cached_property
    def activities(self) -> dict[str, float]:
        """Share of step time by host activity, outside the phases that name it themselves."""
        shares: defaultdict[str, float] = defaultdict(float)
        for phase in _OPEN:
            counts = self._counts(phase)
            total = sum(counts.values())
            if total < _FEWEST_SAMPLES:
                shares[phase if phase in _OWN_WORK else ""] += self.share(phase)
                continue
            for (kind, _), count in counts.items():
                # An evaluation's own data and its metrics are part of it, as is what a second model computes.
                known = kind if phase not in _OWN_WORK or kind in ("reward", "generate", "save", "log") else phase
                shares[known] += self.share(phase) * count / total
        for phase, kind in (("data", "data"), ("save", "save"), ("generate", "generate"), ("make", "make")):
            shares[kind] += self.share(phase)
        return dict(shares)

    def sites(self, kind: str, *phases: str, most: int = 2) -> list[str]:
        """The user's lines where the host was, most common first."""
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
        """Tokens of one rank, padding included; None if no token ids were observed."""
        counted = [m["tokens"] for m in self.micro if m["tokens"] is not None]
        return sum(counted) if counted else None

    @property
    def real_tokens(self) -> float | None:
        return None if self.tokens is None else _real_tokens(self.steps)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks; unobserved ranks are assumed to have the mean number of tokens."""
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
        """The number of cores that the job may use."""
        return int(self.facts["cores"])

    @property
    def framework(self) -> str:
        """Whose loop trains: trl, trainer, lightning, accelerate, litgpt, or torch for one of the user's."""
        return str(self.facts["framework"])

    @property
    def framework_version(self) -> str | None:
        name = {"trainer": "transformers"}.get(self.framework, self.framework)
        found = self.facts["torch"] if name == "torch" else self.facts["versions"].get(name)
        return None if found is None else str(found)

    @property
    def model(self) -> Mapping[str, Any]:
        return self.facts.get("model") or {}

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """The optimizer whose steps are counted."""
        return next(iter(self.facts["optimizers"].values()), {})

    @property
    def loader(self) -> Mapping[str, Any] | None:
        """The loader of the training batches, if there is one."""
        return next((found for found in self.facts["loaders"] if not found["evaluating"]), None)

    @property
    def profile(self) -> Mapping[str, Any]:
        return self.facts.get("profile") or {}

    @property
    def idle_share(self) -> float | None:
        """Share of step time in which the GPU is idle; kernel times are the same with and without the profiler."""
        busy = self.profile.get("busy_s")
        if not self.on_gpu or not busy:
            return None
        return max(0.0, 1.0 - float(busy) / self.step_s - self.paused_share)

    @property
    def paused_share(self) -> float:
        """Share of step time that was not profiled, because text was generated in it."""
        return float(self.profile.get("paused_s") or 0.0) / self.step_s

    @cached_property
    def losses(self) -> list[float]:
        """The loss of every watched step: the mean of its micro-batches."""
        return [step["loss"] for step in self.all_steps or self.steps if step["loss"] is not None]

    @cached_property
    def rates(self) -> list[float]:
        """The known learning rates of those steps."""
        return [step["lr"] for step in self.all_steps or self.steps if step.get("lr") is not None]

    def replay(self, name: str) -> tuple[float, float] | None:
        """Seconds of the last batch unchanged, and with one change."""
        found = (self.facts.get("replays") or {}).get(name)
        return (float(found[0]), float(found[1])) if isinstance(found, list) else None

    def replay_gain(self, name: str) -> float | None:
        """Share of step time that the change saves, from the forward and backward of the last batch."""
        found = self.replay(name)
        if found is None or found[0] <= 0:
            return None
        if not self.is_shown(name):
            return 0.0
        return (1 - found[1] / found[0]) * self.replayed_share(found[0])

    def is_shown(self, name: str) -> bool:
        """Whether the turns of a replay agree that the change saves time; true if they were not recorded."""
        found = (self.facts.get("replays") or {}).get(name)
        logs = found[2] if isinstance(found, list) and len(found) == 3 else None
        if not isinstance(logs, list):
            return True
        return self._verdict(logs) == "faster"

    def is_refuted(self, name: str) -> bool:
        """Whether the turns of a replay agree that the change costs time; false if they were not recorded."""
        found = (self.facts.get("replays") or {}).get(name)
        logs = found[2] if isinstance(found, list) and len(found) == 3 else None
        return isinstance(logs, list) and self._verdict(logs) == "slower"

    def is_open(self, name: str) -> bool:
        """Whether a replay was measured, and its turns disagree."""
        found = (self.facts.get("replays") or {}).get(name)
        logs = found[2] if isinstance(found, list) and len(found) == 3 else None
        return isinstance(logs, list) and self._verdict(logs) == "too noisy to tell"

    @staticmethod
    def _verdict(logs: Sequence[float]) -> str:
        if len(logs) >= FEWEST_PAIRS:
            return paired([0.0] * len(logs), logs, looks=(len(logs),)).verdict
        # Too few for an interval: all must agree.
        return "faster" if all(x < 0 for x in logs) else "slower" if all(x > 0 for x in logs) else "too noisy to tell"

    def replayed_share(self, seconds: float) -> float:
        """Share of step time that replays cover; with several ranks, without the gradient all-reduce."""
        if self.world == 1:
            return self.compute_share
        return min(self.compute_share, seconds * self.accumulation / self.step_s)

    def is_in_most_steps(self, name: str) -> bool:
        """Whether at least every second step counted this."""
        return 2 * self.steps_counting(name) >= len(self.steps)

    def steps_counting(self, name: str) -> int:
        return sum(step["counts"].get(name, 0) > 0 for step in self.steps)

    @property
    def loader_start_share(self) -> float:
        """Share of step time in which iterators over loaders start, where one starts in most steps."""
        if not self.is_in_most_steps("loader-starts"):
            return 0.0
        return sum(float(step["counts"].get("loader_start_s", 0.0)) for step in self.steps) / self.seconds

    def counts(self, name: str) -> int:
        return int(self.facts.get("totals", {}).get(name, 0))


def seconds_of(step: Mapping[str, Any]) -> float:
    """Seconds of a step on the device's clock if there is one, because the host runs ahead of the device."""
    return float(sum((step["device"] or {}).values()) or step["seconds"] or 0.0)


def _real_tokens(steps: Sequence[Mapping[str, Any]]) -> float:
    counted = [micro for step in steps for micro in step["micro"] if micro["tokens"] is not None]
    return float(sum(micro["tokens"] if micro["real"] is None else micro["real"] for micro in counted))


def short(site: str) -> str:
    """`file.py:12 in function`, without the folders."""
    path, _, rest = site.partition(":")
    return f"{PurePath(path).name}:{rest}"
