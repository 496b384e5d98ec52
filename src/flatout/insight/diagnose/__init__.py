"""Ranks the causes of slow training: `flatout doctor`.

Each rule checks one cause and reports nothing below a minimum share. Shares and gains are fractions of
step time; a gain is what the fix alone would save, so gains of several fixes do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flatout.insight.diagnose import device, health, host
from flatout.insight.diagnose.limit import limit_of
from flatout.insight.diagnose.observed import Observed
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
    "missing-no-sync",
    "logging",
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
)
_RULES = (*host.ALL, *device.ALL, *health.ALL)


def diagnose(seen: Observed) -> Diagnosis:
    found = [finding for rule in _RULES if (finding := rule(seen)) is not None]
    if seen.straggler is not None:
        found = [replace(finding, evidence=(*finding.evidence, seen.straggler.sentence)) for finding in found]
    findings = ranked(found)
    limit = limit_of(seen)
    return Diagnosis(verdict=verdict_of(findings, limit), limit=limit, findings=findings)


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings with the largest gain first; those without a number come last."""
    return tuple(sorted(findings, key=lambda f: (f.gain is None, -(f.gain or 0.0), -(f.share or 0.0))))


def verdict_of(findings: tuple[Finding, ...], limit: Mapping[str, Any]) -> str:
    share = limit.get("share")
    near = "the limit is unknown" if share is None else f"{share:.1%} of the limit"
    if not findings:
        return f"no problem found, {near}"
    first = findings[0]
    saves = "" if first.gain is None else f", about {first.gain:.0%} of step time"
    return f"{len(findings)} cause{'s' * (len(findings) > 1)} found, the largest is {first.cause}{saves}; {near}"
