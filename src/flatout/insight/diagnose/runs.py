"""What a run folder of ours tells (`flatout doctor RUN`): from its phases, memory, losses and events."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flatout.cost import Rates
from flatout.errors import UsageError
from flatout.insight.diagnose import ranked, verdict_of
from flatout.insight.diagnose.health import loss_finding, throttle_finding
from flatout.insight.diagnose.host import RARER, WORTH, _finding
from flatout.record import Diagnosis, Evaluated, Event, Finding, MemoryRanOut, Rollup, Run, Saved, Started

# Phases that are not training.
_BESIDE = ("eval", "save", "profile")


def diagnose(run: Run) -> Diagnosis:
    """Our own runs are looked at; a watched script keeps what was said when it was watched."""
    if run.plan.get("foreign"):
        if (said := run.diagnosis) is not None:
            return said
        raise UsageError(f"{run.path} is of a script that was watched, but not to its end: watch it again")
    parts = run.latest_rollups()
    if not parts or sum(part.num_steps for part in parts) < 4:
        raise UsageError(f"{run.path} has too few steps to say anything: let it train longer")
    seen = _Seen.of(parts)
    events = list(run.events())
    limit = _limit(run, seen)
    findings = ranked(_findings(run, seen, parts, events))
    return Diagnosis(verdict=verdict_of(findings, limit), limit=limit, findings=findings)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Sums over the run."""

    steps: int
    seconds: float
    tokens: int
    padded_tokens: int
    spans: dict[str, float]
    peak_gib: float | None
    total_gib: float | None

    @classmethod
    def of(cls, parts: list[Rollup]) -> _Seen:
        spans: dict[str, float] = defaultdict(float)
        for part in parts:
            for phase, seconds in part.spans.items():
                spans[phase] += seconds
        peaks = [part.memory["peak_gib"] for part in parts if "peak_gib" in part.memory]
        totals = [part.memory["total_gib"] for part in parts if "total_gib" in part.memory]
        return cls(
            steps=sum(part.num_steps for part in parts),
            seconds=sum(part.seconds for part in parts),
            tokens=sum(part.tokens for part in parts),
            padded_tokens=sum(part.padded_tokens for part in parts),
            spans=dict(spans),
            peak_gib=max(peaks) if peaks else None,
            total_gib=max(totals) if totals else None,
        )

    def share(self, phase: str) -> float:
        return self.spans.get(phase, 0.0) / max(self.seconds, 1e-9)

    @property
    def training_s(self) -> float:
        return self.seconds - sum(self.spans.get(phase, 0.0) for phase in _BESIDE)


def _limit(run: Run, seen: _Seen) -> dict[str, Any]:
    plan = run.plan
    if "rates" not in plan:
        raise UsageError(f"{run.path}/plan.json holds no rates to judge the speed by: it is no plan of flatout's")
    rates = Rates.from_json(plan["rates"])
    speed = seen.tokens / seen.training_s if seen.training_s > 0 else None
    peak = rates.peak_flops
    ceiling = None if not peak else peak * rates.num_devices / rates.flops.done
    return {
        "tokens_per_s": speed,
        "ceiling_tokens_per_s": ceiling,
        "share": None if ceiling is None or speed is None else speed / ceiling,
        "peak_flops": peak,
        "flops_per_token": rates.flops.done,
        "source": "the plan's peak" if peak else "the device has no peak in the table",
        "model": "the plan's shape",
    }


def _findings(run: Run, seen: _Seen, parts: list[Rollup], events: list[Event]) -> Iterable[Finding]:
    data, evaluation, saving = seen.share("data"), seen.share("eval"), seen.share("save")
    decided = run.plan.get("decisions", {})
    if data >= WORTH:
        workers = decided.get("workers")
        yield _finding(
            "data-starvation",
            "Training waits for its next batch.",
            data,
            data,
            [f"phase data is {data:.1%} of {seen.seconds:.0f} s (steps.jsonl)", f"{workers} loader workers planned"],
            f"plan.workers={2 * (workers or 1)}, or `flatout data prepare` once, so that shards are read as they are",
        )
    if evaluation >= 0.1:
        yield _finding(
            "evaluation",
            f"Evaluation takes {evaluation:.0%} of the run.",
            evaluation,
            evaluation * (1 - 1 / RARER),
            [f"phase eval, {sum(isinstance(event, Evaluated) for event in events)} evaluations in {seen.steps} steps"],
            "eval.every five times as large, or fewer batches",
        )
    if saving >= WORTH:
        yield _finding(
            "checkpointing",
            f"Saving takes {saving:.0%} of the run.",
            saving,
            saving * (1 - 1 / RARER),
            [f"phase save, {sum(isinstance(event, Saved) for event in events)} saves in {seen.steps} steps"],
            "save.every five times as large",
        )
    padded = 1 - seen.tokens / seen.padded_tokens if seen.padded_tokens else 0.0
    if padded >= 0.15:
        yield _finding(
            "padding",
            f"{padded:.0%} of the tokens computed are padding.",
            padded,
            padded,
            [f"{seen.tokens:,} of {seen.padded_tokens:,} tokens are real"],
            "data.packing=true",
        )
    rest = 1 - sum(seen.spans.values()) / max(seen.seconds, 1e-9)
    if rest >= 0.1:
        yield _finding(
            "host-sync",
            f"{rest:.0%} of the time belongs to no phase: the host did something between two steps.",
            rest,
            None,
            ["seconds of the steps against the sum of their phases"],
            "profile.steps=[10, 12] writes a trace that shows it",
        )
    yield from _by_memory(seen, decided)
    losses = [part.loss for part in parts if part.loss is not None]
    if any(part.num_non_finite for part in parts):
        bad = sum(part.num_non_finite for part in parts)
        yield _finding(
            "unstable-loss",
            f"{bad} of {seen.steps} losses were no numbers.",
            bad / seen.steps,
            bad / seen.steps,
            ["losses in steps.jsonl"],
            "as advice: a tenth of train.lr, a longer warm-up, train.clip=1.0",
        )
    elif len(losses) < 6 and seen.steps <= 20000:
        yield from _maybe(
            loss_finding([s.loss for s in run.latest_steps() if s.loss is not None], clipped=None, lr=None)
        )
    else:
        yield from _maybe(loss_finding(losses, clipped=None, lr=None))
    yield from _maybe(_late(run, events))
    yield from _maybe(throttle_finding(list(run.samples())))
    recompiled = [part.extra["recompiles"] * part.num_steps for part in parts if part.extra.get("recompiles")]
    if sum(recompiled) > 2:
        yield _finding(
            "recompiles",
            "Blocks were compiled more than once.",
            None,
            None,
            [f"{sum(recompiled):.0f} recompilations in {seen.steps} steps"],
            "keep shapes fixed: data.packing=true, or plan.compile=false",
        )
    if ooms := [event for event in events if isinstance(event, MemoryRanOut)]:
        yield _finding(
            "oom-risk",
            f"Memory ran out {len(ooms)} times and the micro-batch was halved.",
            None,
            None,
            [f"step {event.step}: {event.micro_batch} to {event.now}" for event in ooms[:3]],
            f"plan.micro_batch={ooms[-1].now} from the start",
        )


def _late(run: Run, events: list[Event]) -> Finding | None:
    """The target is out of reach even if the loss went on falling as it lately did, which losses do not."""
    target = (run.config.get("target") or {}).get("val_loss")
    total = next((event.total_steps for event in reversed(events) if isinstance(event, Started)), None)
    losses = {event.step: event.val_loss for event in events if isinstance(event, Evaluated) and event.step}
    seen = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    steps = sorted(seen)
    if target is None or total is None or len(steps) < 4 or min(seen.values()) <= target:
        return None
    then, now = steps[len(steps) // 2 - 1], steps[-1]
    fall = (seen[then] - seen[now]) / (now - then)
    needed = math.inf if fall <= 0 else (seen[now] - target) / fall
    if needed <= total - now:
        return None
    train = run.config.get("train") or {}
    speed = "it does not fall any more" if fall <= 0 else f"at the speed since step {then} it needs {needed:,.0f} more"
    return _finding(
        "slow-convergence",
        f"The validation loss will not reach its target of {target:g} in this run.",
        None,
        None,
        [
            f"{seen[now]:.4g} at step {now:,} of {total:,}, {seen[then]:.4g} at step {then:,}; {speed}",
            ", ".join(
                f"train.{name}={train[name]}" for name in ("lr", "warmup_steps", "batch_tokens") if name in train
            ),
        ],
        "as advice: a larger train.lr after some hundred train.warmup_steps, a smaller train.batch_tokens, more steps",
    )


def _by_memory(seen: _Seen, decided: Any) -> Iterable[Finding]:
    if seen.peak_gib is None or not seen.total_gib:
        return
    used = seen.peak_gib / seen.total_gib
    if used > 0.95:
        yield _finding(
            "oom-risk",
            f"Memory is {used:.0%} used at the peak.",
            None,
            None,
            [f"{seen.peak_gib:.1f} of {seen.total_gib:.1f} GiB (steps.jsonl)"],
            "plan.preset=balanced, or a smaller plan.micro_batch",
        )
    elif used < 0.5 and decided.get("recompute") not in (None, "none"):
        yield _finding(
            "needless-recompute",
            f"Activations are recomputed though only {used:.0%} of memory is used.",
            None,
            None,
            [f"plan.recompute={decided['recompute']}, peak {seen.peak_gib:.1f} of {seen.total_gib:.1f} GiB"],
            "plan.recompute=none",
        )
    elif used < 0.5 and (decided.get("accumulation") or 1) > 1:
        yield _finding(
            "small-batch",
            f"Only {used:.0%} of memory is used while {decided['accumulation']} micro-batches make a step.",
            None,
            None,
            [f"plan.micro_batch={decided.get('micro_batch')}, peak {seen.peak_gib:.1f} of {seen.total_gib:.1f} GiB"],
            "a larger plan.micro_batch; the effective batch stays",
        )


def _maybe(finding: Finding | None) -> Iterable[Finding]:
    return () if finding is None else (finding,)
