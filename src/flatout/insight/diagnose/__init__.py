"""Ranks the causes of slow training: `flatout doctor`.

Each rule checks one cause and reports nothing below a minimum share. Shares and gains are fractions of
step time; a gain is what the fix alone would save, so gains of several fixes do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flatout.insight.diagnose import device, health, host, loops
from flatout.insight.diagnose.limit import limit_of
from flatout.insight.diagnose.observed import Observed
from flatout.insight.diagnose.unexplained import far_below
from flatout.record import Diagnosis, Finding

CAUSES = (
    "data-starvation",
    "small-batch",
    "padding",
    "short-sequences",
    "fp32-matmul",
    "precision-inactive",
    "wrong-dtype",
    "math-attention",
    "launch-bound",
    "host-sync",
    "empty-cache",
    "recompiles",
    "needless-recompute",
    "slow-optimizer",
    "recreated-optimizer",
    "recreated-model",
    "recreated-loader",
    "missing-no-sync",
    "logging",
    "busy-thread",
    "evaluation",
    "checkpointing",
    "launch-blocking",
    "anomaly-mode",
    "debug-flags",
    "few-threads",
    "throttled",
    "no-kv-cache",
    "generation-batch",
    "generation-bound",
    "reward-bound",
    "offload",
    "oom-risk",
    "unstable-loss",
    "slow-convergence",
    "stalled",
    "speed-drop",
    "low-mfu",
)
# A run with one of these is lost, however fast it is.
FAILURES = ("unstable-loss", "recreated-model")
_RULES = (*host.ALL, *device.ALL, *loops.ALL, *health.ALL)


def diagnose(seen: Observed) -> Diagnosis:
    found = [finding for rule in _RULES if (finding := rule(seen)) is not None]
    limit = limit_of(seen)
    if (loop := loops.in_words(seen)) is not None:
        limit["loop"] = loop
    if (unexplained := far_below(limit["share"], found, seen)) is not None:
        found.append(unexplained)
    if seen.straggler is not None:
        found = [replace(finding, evidence=(*finding.evidence, seen.straggler.sentence)) for finding in found]
    findings = ranked(found)
    return Diagnosis(verdict=verdict_of(findings, limit), limit=limit, findings=findings)


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Failures first, then by gain, then those without a number; what its own measurement has refuted comes last."""

    def place(finding: Finding) -> tuple[bool, bool, bool, float, float]:
        known = finding.gain is not None
        failed = finding.cause in FAILURES
        return finding.status == "refuted", not failed, not known, -(finding.gain or 0.0), -(finding.share or 0.0)

    return tuple(sorted(findings, key=place))


def verdict_of(findings: tuple[Finding, ...], limit: Mapping[str, Any], *, of_predicted: float | None = None) -> str:
    """One line. `of_predicted` is the share of the predicted speed that was reached, where it is far below."""
    share = limit.get("share")
    near = "the limit is unknown" if share is None else f"{share:.1%} of the limit"
    refuted = [finding for finding in findings if finding.status == "refuted"]
    findings = tuple(finding for finding in findings if finding.status != "refuted")
    if not findings and of_predicted is not None:
        return f"no cause found, but only {of_predicted:.0%} of the predicted speed; {near}"
    if not findings:
        tried = f" ({', '.join(finding.cause for finding in refuted)} refuted by measurement)" if refuted else ""
        return f"no problem found, {near}{tried}"
    proven = [finding for finding in findings if finding.status == "measured" and (finding.gain or 0.0) > 0]
    first = proven[0] if proven and findings[0].cause not in FAILURES else findings[0]
    if first.cause == "low-mfu" and len(findings) == 1:
        return f"no cause found, but only {near}"
    number = f"{len(findings)} cause{'s' * (len(findings) > 1)} found"
    if first.gain is None:
        return f"{number}{': ' if len(findings) == 1 else ', the first is '}{first.cause}; {near}"
    if first.status == "measured":
        return f"{number}, the largest is {first.cause}, {first.gain:.1%} of step time (measured); {near}"
    return f"{number}, the largest is {first.cause}, about {first.gain:.0%} of step time; {near}"
