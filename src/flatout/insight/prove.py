"""Measures fixes on the script itself (`flatout doctor --prove`): the agent applies each fix that is a global switch.

The script runs again for a few steps: unchanged, with each fix alone, with all of them, and unchanged once more; the
next round runs the fixes in reverse. So drift affects all alike, and the two unchanged runs of a round show
how much the script differs from itself. `flatout.parity` decides whether a fix has an effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from flatout.insight.attach import Asked, Watched, watch
from flatout.insight.diagnose import fixes, ranked, verdict_of
from flatout.insight.diagnose.host import WORTH, cores_of, suited_workers
from flatout.insight.diagnose.observed import Observed, seconds_of
from flatout.parity import Difference, paired, typical
from flatout.record import Diagnosis, Finding, redact
from flatout.words import duration, percent

ALL_TOGETHER = "all together"
# A run of a proof times steps for no longer than this.
LONGEST_TIMED_S = 15.0
# Numbers of loader workers tried before one is measured in every round.
MOST_TRIED = 3
# These cost time in some steps only, which the median of the steps would not show: the whole run counts.
_IN_SOME_STEPS = ("evaluation", "checkpointing", "logging", "recompiles", "data-starvation", ALL_TOGETHER)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A fix as the agent applies it: switches in the process, variables in its environment."""

    switch: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str | None] = field(default_factory=dict)
    label: str = ""  # where there are several for one cause
    fix: str = ""  # the change to make, where it depends on the switch


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The measured effect of one fix. Gains are shares of the time per token, one per repeat."""

    cause: str
    gains: tuple[float, ...]
    loss_difference: float | None  # largest between steps of the same number
    problem: str | None = None  # how the script failed with the fix
    noise: float | None = None  # by how much the unchanged script typically differed from itself
    fix: str = ""  # the change that was measured, where several were tried
    stopped: str | None = None  # why it was not measured in further rounds
    verdict: str | None = field(init=False)
    interval: tuple[float, float] | None = field(init=False)  # of the gain, at 95 %

    def __post_init__(self) -> None:
        found = self.difference
        bounded = found is not None and found.verdict != "too few pairs"
        verdict = None if found is None else "too noisy to tell" if self.stopped else found.verdict
        object.__setattr__(self, "verdict", verdict)
        object.__setattr__(self, "interval", (1 - found.high, 1 - found.low) if found and bounded else None)

    @property
    def difference(self) -> Difference | None:
        if not self.gains:
            return None
        logs = [math.log1p(-gain) for gain in self.gains]
        floor = math.log1p(self.noise or 0.0)
        return paired([0.0] * len(logs), logs, looks=(len(logs),), margin=WORTH, floor=floor)

    @property
    def gain(self) -> float | None:
        return None if self.difference is None else 1 - self.difference.ratio

    @property
    def told(self) -> str:
        """How sure the gain is, in words."""
        if self.difference is None:
            return "n/a"
        if self.stopped is not None:
            return f"too noisy to tell: {self.stopped}"
        if self.interval is None:
            times = "1 repeat gives" if len(self.gains) == 1 else f"{len(self.gains)} repeats give"
            same = "" if self.noise is None else f"; the unchanged script differed from itself by {self.noise:.1%}"
            return f"{times} no interval{same}"
        low, high = self.interval
        return f"{self.verdict}: {low:.1%} to {high:.1%}"


def changes_for(finding: Finding, seen: Observed) -> list[Change]:
    """The switches that may fix this finding, the likeliest first; none if the fix is a code change."""
    if finding.status == "refuted":
        return []
    if finding.cause == "data-starvation":
        return _loaders(seen)
    make = _CHANGES.get(finding.cause)
    change = None if make is None else make(seen)
    return [] if change is None else [change]


def change_for(finding: Finding, seen: Observed) -> Change | None:
    """The likeliest switch that fixes this finding; None if the fix is a code change."""
    return next(iter(changes_for(finding, seen)), None)


def prove(
    command: Sequence[str],
    diagnosis: Diagnosis,
    *,
    seen: Observed,
    asked: Asked,
    repeats: int = 3,
    run_s: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Proof]:
    """Measures every fix that is a switch, and all of them together; `run_s` is the time of one run of the script."""
    able = {f.cause: several for f in diagnosis.findings if (several := changes_for(f, seen))}
    if not able:
        return []
    expected = {finding.cause: finding.gain for finding in diagnosis.findings}
    timed = replace(asked, then="stop", look=False, stdout_to_stderr=True, seconds=min(asked.seconds, LONGEST_TIMED_S))

    def run(change: Change) -> Watched:
        with_it = replace(timed, switch=change.switch, variables={**timed.variables, **change.variables})
        return _timed(command, with_it)

    num_tried = sum(len(several) for several in able.values() if len(several) > 1)
    num_fixes = len(able) + (len(able) > 1)
    say(announced(num_runs=num_tried + repeats * (num_fixes + 2), repeats=repeats, run_s=run_s))
    changes = {cause: _best(cause, several, run=run, say=say) for cause, several in able.items()}
    if len(changes) > 1:
        changes[ALL_TOGETHER] = _merged(list(changes.values()))
    rounds: list[tuple[list[Watched], dict[str, Watched]]] = []
    going = list(changes)
    stopped: dict[str, str] = {}
    for repeat in range(repeats):
        said = f"proof {repeat + 1} of {repeats}"
        say(f"{said}: unchanged")
        plain, changed = [run(Change())], {}
        for cause in going if repeat % 2 == 0 else reversed(going):
            say(f"{said}: {cause}{f', {changes[cause].label}' if changes[cause].label else ''}")
            changed[cause] = run(changes[cause])
        say(f"{said}: unchanged again")
        rounds.append(([*plain, run(Change())], changed))
        if repeat + 1 < repeats:
            proofs = [_proof(cause, rounds, change=changes[cause]) for cause in going]
            given_up = hopeless(proofs, expected=expected, rounds=repeat + 1)
            stopped |= given_up
            for cause, why in given_up.items():
                say(f"{cause} is not measured any longer: {why}")
            going = [cause for cause in going if cause not in stopped]
            if going in ([], [ALL_TOGETHER]):
                break
    return [_proof(cause, rounds, change=changes[cause], stopped=stopped.get(cause)) for cause in changes]


def announced(*, num_runs: int, repeats: int, run_s: float | None) -> str:
    """What a proof will take, before it starts."""
    if run_s is None:
        return f"the proof is {num_runs} short runs in {repeats} rounds, fewer where the machine is too noisy"
    told = f"the proof takes about {duration(num_runs * run_s)}: {num_runs} runs of {run_s:.0f} s in {repeats} rounds"
    return f"{told}; it stops early where the machine is too noisy, and Ctrl-C ends it"


def hopeless(proofs: Sequence[Proof], *, expected: Mapping[str, float | None], rounds: int) -> dict[str, str]:
    """The fixes whose effect further rounds cannot show, with the reason.

    The unchanged script differs from itself by more than the fix is expected to save, and by more than it has saved.
    After a single round, by twice as much, because one pair of runs may differ by chance.
    """
    single = max((gain for gain in expected.values() if gain is not None), default=None)
    found = {}
    for proof in proofs:
        hope = single if proof.cause == ALL_TOGETHER else expected.get(proof.cause)
        saving = max((value for value in (proof.gain, hope) if value is not None), default=None)
        effect = abs(proof.gain) if proof.gain is not None and saving == proof.gain else saving
        if proof.problem is not None and not proof.gains:
            found[proof.cause] = "it failed"
        elif proof.noise is None or effect is None:
            continue
        elif proof.noise > effect * (2 if rounds == 1 else 1):
            found[proof.cause] = (
                f"the unchanged script differs from itself by {proof.noise:.1%}, and the fix is expected to save "
                f"{percent(hope)} and saved {percent(proof.gain)}"
            )
    return found


def _best(
    cause: str, changes: Sequence[Change], *, run: Callable[[Change], Watched], say: Callable[[str], None]
) -> Change:
    """Of several ways to fix one cause the fastest in a single run each, or the likeliest if none ran."""
    if len(changes) == 1:
        return changes[0]
    times: dict[int, float] = {}
    for number, change in enumerate(changes):
        say(f"which is best for {cause}: {change.label}")
        if (log := log_time(run(change), cause=cause)) is not None:
            times[number] = log
    return changes[min(times, key=lambda number: times[number], default=0)]


def _timed(command: Sequence[str], asked: Asked) -> Watched:
    watched = watch(command, asked=asked)
    if watched.interrupted:  # the signal reached only this run of the script, and more would follow
        raise KeyboardInterrupt
    return watched


def measured(diagnosis: Diagnosis, proofs: Sequence[Proof]) -> Diagnosis:
    """The diagnosis with measured gains instead of estimated ones; the estimates are kept as evidence.

    A finding whose fix was shown to save less than is worth reporting is left out. Where the measurement was too noisy,
    or the repeats are too few for an interval, the estimate remains.
    """
    by_cause = {proof.cause: proof for proof in proofs}
    told_of: list[Finding] = []
    for finding in diagnosis.findings:
        proof = by_cause.get(finding.cause)
        if proof is None or proof.gain is None:
            told_of.append(finding)
        elif proof.verdict == "slower":
            told_of.append(replace(_noted(finding, proof), gain=0.0, status="refuted"))
        elif proof.interval is None or proof.interval[1] >= WORTH or finding.share is None:
            told_of.append(_noted(finding, proof))
    findings = ranked(told_of)
    verdict = verdict_of(findings, diagnosis.limit) if by_cause else diagnosis.verdict
    together = by_cause.get(ALL_TOGETHER)
    if together is not None and together.gain is not None and together.verdict == "faster":
        verdict += f"; all fixes that are switches save {together.gain:.1%} together (measured)"
    return replace(diagnosis, verdict=verdict, findings=findings)


def _noted(finding: Finding, proof: Proof) -> Finding:
    """The finding with what its proof measured. An unclear one leaves of the estimate what it does not contradict."""
    was = "unknown" if finding.gain is None else f"{finding.gain:.0%}"
    told = f"measured: {percent(proof.gain)} of the time per token ({proof.told}); estimated before: {was}"
    noted = replace(finding, evidence=(*finding.evidence, told), fix=proof.fix or finding.fix)
    if proof.verdict in ("faster", "slower"):
        return replace(noted, gain=proof.gain, status="measured")
    if finding.gain is None:
        return noted
    low, high = proof.interval or (-math.inf, max(0.0, *proof.gains) if len(proof.gains) > 1 else math.inf)
    return replace(noted, gain=max(0.0, min(max(finding.gain, low), high)))


def _proof(
    cause: str,
    every: Sequence[tuple[Sequence[Watched], Mapping[str, Watched]]],
    *,
    change: Change,
    stopped: str | None = None,
) -> Proof:
    rounds = [(plain, changed[cause]) for plain, changed in every if cause in changed]
    pairs, differences = [], []
    for plain, changed in rounds:
        known = [log for run in plain if (log := log_time(run, cause=cause)) is not None]
        now = log_time(changed, cause=cause)
        pairs.append((known, now))
        if known and now is not None:
            differences.extend(_loss_differences(plain[0], changed))
    problem = next((run.crash for _, run in rounds if run.crash), None)
    found = proof_of(cause, pairs, differences=differences, problem=problem.splitlines()[-1] if problem else None)
    return replace(found, fix=change.fix, stopped=stopped)


def proof_of(
    cause: str,
    rounds: Sequence[tuple[Sequence[float], float | None]],
    *,
    differences: Sequence[float],
    problem: str | None,
) -> Proof:
    """The proof from the logarithms of a round's times: those of the unchanged runs, and that of the changed one."""
    noise = [abs(known[1] - known[0]) for known, _ in rounds if len(known) == 2]
    return Proof(
        cause=cause,
        gains=tuple(1 - math.exp(now - fmean(known)) for known, now in rounds if known and now is not None),
        loss_difference=max(differences) if differences else None,
        problem=redact(problem) if problem else None,
        noise=math.expm1(median(noise)) if noise else None,
    )


def of_some_steps(cause: str) -> bool:
    """Whether the cause costs time in some steps only, so that all steps together are measured."""
    return cause in _IN_SOME_STEPS


def log_time(run: Watched, *, cause: str) -> float | None:
    """The logarithm of the seconds per token of a run's timed steps: of the typical step, or of all of them together.

    Rows count where no token ids were observed, and steps where there are not even rows.
    """
    steps = run.timed
    if len(steps) < 2:
        return None
    work = [_work(step) for step in steps]
    if not all(work):
        work = [1.0] * len(steps)
    seconds = [seconds_of(step) for step in steps]
    if of_some_steps(cause):
        return math.log(sum(seconds) / sum(work))
    return typical([taken / done for taken, done in zip(seconds, work, strict=True)])


def _work(step: Mapping[str, Any]) -> float:
    tokens = sum(m["real"] if m["real"] is not None else m["tokens"] or 0 for m in step["micro"])
    return float(tokens or sum(m["rows"] or 0 for m in step["micro"]))


def _loss_differences(before: Watched, after: Watched) -> list[float]:
    losses = {step["step"]: step["loss"] for step in before.steps}
    return [
        abs(step["loss"] - losses[step["step"]])
        for step in after.steps
        if step["loss"] is not None and losses.get(step["step"]) is not None
    ]


def _merged(changes: Sequence[Change]) -> Change:
    switch: dict[str, Any] = {}
    variables: dict[str, str | None] = {}
    for change in changes:
        for name, value in change.switch.items():
            both = isinstance(value, Mapping) and isinstance(switch.get(name), Mapping)
            switch[name] = {**switch[name], **value} if both else value
        variables |= change.variables
    return Change(switch=switch, variables=variables)


# -- the switch for each cause


def _loaders(seen: Observed) -> list[Change]:
    """The number of workers that is advised, and the others that are likely: fewer, and none."""
    loader = seen.loader
    if loader is None:
        return []
    now = loader["num_workers"]
    advised = suited_workers(seen, share=seen.activities.get("data", 0.0))
    likely = (advised, 1, min(advised, cores_of(seen)), *((0, now // 2) if now else ()))
    return [_with_workers(seen, workers) for workers in dict.fromkeys(likely) if workers != now][:MOST_TRIED]


def _with_workers(seen: Observed, workers: int) -> Change:
    pinned = {"pin_memory": True} if seen.on_gpu else {}
    alone = {} if workers else {"prefetch_factor": None, "timeout": 0}
    return Change(
        switch={"loader": {"num_workers": workers, "persistent_workers": workers > 0, **alone, **pinned}},
        label=f"{workers} worker{'s' * (workers != 1)}",
        fix=fixes.loader(seen, workers=workers),
    )


def _attention(seen: Observed) -> Change | None:
    if seen.model.get("attention") == "eager":
        return Change(switch={"attention": True, "sdpa": True})
    blocked = seen.on_gpu and not (seen.facts["flags"]["flash_sdp"] and seen.facts["flags"]["mem_efficient_sdp"])
    return Change(switch={"attention": True}) if blocked else None


def _fused(seen: Observed) -> Change | None:
    known = seen.optimizer.get("class") in ("Adam", "AdamW", "SGD") and seen.optimizer["module"].startswith("torch")
    return Change(switch={"fused": True}) if known else None


def _rarer(*arguments: str) -> Callable[[Observed], Change | None]:
    """Changes Trainer arguments that set an interval; other loops set it in their own code."""

    def make(seen: Observed) -> Change | None:
        known = seen.facts.get("trainer_arguments") or ()
        if seen.framework not in ("trainer", "trl"):
            return None
        return Change(switch={"trainer": {name: {"times": 5} for name in arguments if name in known}})

    return make


def _larger_batch(seen: Observed) -> Change | None:
    if seen.framework in ("trainer", "trl"):
        return Change(switch={"trainer": {"per_device_train_batch_size": {"times": 4}}})
    return Change(switch={"loader": {"batch_size": {"times": 4}}}) if seen.facts["loaders"] else None


def _cache(seen: Observed) -> Change | None:
    return Change(switch={"kv-cache": True}) if seen.facts["generations"] else None


def _debug(seen: Observed) -> Change:
    names = ("TORCH_DISTRIBUTED_DEBUG", "NCCL_DEBUG", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_LOGS")
    return Change(
        switch={"nondeterministic": True},
        variables=dict.fromkeys((*names, "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")),
    )


_CHANGES: Mapping[str, Callable[[Observed], Change | None]] = {
    "fp32-matmul": lambda _: Change(switch={"autocast": True}),
    "precision-inactive": lambda _: Change(switch={"autocast": True}),
    "wrong-dtype": lambda _: Change(switch={"no-double": True}),
    "math-attention": _attention,
    "small-batch": _larger_batch,
    "short-sequences": _larger_batch,
    "slow-optimizer": _fused,
    "needless-recompute": lambda _: Change(switch={"no-recompute": True}),
    "missing-no-sync": lambda seen: Change(switch={"no-sync": round(seen.accumulation)}),
    "empty-cache": lambda _: Change(switch={"empty-cache": True}),
    "anomaly-mode": lambda _: Change(switch={"anomaly-off": True}),
    "recompiles": lambda _: Change(switch={"dynamic": True}),
    "few-threads": lambda seen: Change(
        switch={"threads": seen.facts["default_threads"]}, variables={"OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None}
    ),
    "launch-blocking": lambda _: Change(variables={"CUDA_LAUNCH_BLOCKING": None}),
    "debug-flags": _debug,
    "no-kv-cache": _cache,
    "evaluation": _rarer("eval_steps"),
    "checkpointing": _rarer("save_steps"),
    "logging": _rarer("logging_steps"),
    "oom-risk": lambda _: Change(variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
}
