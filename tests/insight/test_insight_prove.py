"""Proofs on made measurements: the order of the runs, what noise is called, and what remains of a finding."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from flatout.insight import prove as module
from flatout.insight.attach import Asked, Watched
from flatout.insight.prove import ALL_TOGETHER, Proof, log_time, measured, prove
from flatout.record import Diagnosis, Finding

SHARE = {"share": 0.3, "gain": 0.3, "status": "estimated", "evidence": (), "fix": "change it"}


def finding(cause: str) -> Finding:
    return Finding(cause=cause, sentence="Slow.", **SHARE)  # type: ignore[arg-type]


def a_run(seconds: Sequence[float], *, tokens: int | None = 100, rows: int | None = 4) -> Watched:
    micro = [{"tokens": tokens, "real": None, "rows": rows, "length": 25}]
    steps = [
        {"step": i, "stage": "timed", "seconds": s, "device": {}, "host": {}, "micro": micro, "loss": 1.0}
        for i, s in enumerate(seconds)
    ]
    return Watched(returncode=0, stopped=True, facts={}, steps=steps, samples=(), crash=None)


class Machine:
    """Steps of a second; a machine that drifts and is noisy, and fixes that save a share."""

    def __init__(self, *, saves: dict[str, float], noise: float = 0.0, drift: float = 0.0, seed: int = 0) -> None:
        self.saves, self.noise, self.drift, self.random = saves, noise, drift, random.Random(seed)
        self.order: list[str] = []

    def watch(self, command: Sequence[str], *, asked: Asked) -> Watched:
        switched = "+".join(sorted(asked.switch)) or "unchanged"
        level = math.exp(self.drift * len(self.order) + self.random.gauss(0, self.noise))
        self.order.append(switched)
        level *= math.prod(1 - self.saves.get(name, 0.0) for name in asked.switch)
        return a_run([level * math.exp(self.random.gauss(0, 0.02)) for _ in range(12)])


def proved(machine: Machine, monkeypatch: pytest.MonkeyPatch, *causes: str, repeats: int) -> dict[str, Proof]:
    monkeypatch.setattr(module, "watch", machine.watch)
    diagnosis = Diagnosis(verdict="", limit={}, findings=tuple(map(finding, causes)))
    seen: Any = None  # the switches of these causes need no observation
    found = prove(["python"], diagnosis, seen=seen, asked=Asked(), repeats=repeats)
    return {proof.cause: proof for proof in found}


def test_a_round_begins_and_ends_unchanged_and_the_next_one_is_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(saves={})
    proved(machine, monkeypatch, "anomaly-mode", "empty-cache", repeats=2)
    one, two, both = "anomaly-off", "empty-cache", "anomaly-off+empty-cache"
    assert machine.order == ["unchanged", one, two, both, "unchanged", "unchanged", both, two, one, "unchanged"]


@pytest.mark.parametrize("drift", [0.0, 0.03])
def test_a_fix_that_does_nothing_is_rarely_proved(monkeypatch: pytest.MonkeyPatch, drift: float) -> None:
    proofs = [
        proved(Machine(saves={}, noise=0.1, drift=drift, seed=seed), monkeypatch, "empty-cache", repeats=3)
        for seed in range(200)
    ]
    assert sum(proof["empty-cache"].verdict in ("faster", "slower") for proof in proofs) <= 10


def test_a_fix_that_saves_is_proved_on_a_drifting_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(saves={"empty-cache": 0.2, "anomaly-off": 0.5}, noise=0.01, drift=0.02)
    found = proved(machine, monkeypatch, "anomaly-mode", "empty-cache", repeats=4)
    assert {proof.verdict for proof in found.values()} == {"faster"}
    assert found["empty-cache"].gain == pytest.approx(0.2, abs=0.03)
    assert found[ALL_TOGETHER].gain == pytest.approx(0.6, abs=0.03)
    assert found["empty-cache"].noise == pytest.approx(0.08, abs=0.05)


@pytest.mark.parametrize("repeats", [1, 2])
def test_too_few_repeats_are_said_to_give_no_interval(repeats: int) -> None:
    proof = Proof(cause="empty-cache", gains=(0.2,) * repeats, loss_difference=None, noise=0.08)
    assert (proof.interval, proof.verdict) == (None, "too few pairs")
    assert "no interval; the unchanged script differed from itself by 8.0%" in proof.told


def test_one_slow_run_cannot_outweigh_all_others() -> None:
    """The mean of ratios has no lower bound: one run ten times as slow would be a loss of 300 %."""
    proof = Proof(cause="empty-cache", gains=(0.1, 0.1, -9.0), loss_difference=None)
    assert proof.gain is not None
    assert proof.gain > -1.1
    assert proof.verdict == "too noisy to tell"


def after(proof: Proof) -> tuple[Finding, ...]:
    return measured(Diagnosis(verdict="", limit={}, findings=(finding("empty-cache"),)), [proof]).findings


def test_what_saves_nothing_is_no_finding_any_more() -> None:
    assert after(Proof(cause="empty-cache", gains=(0.001, -0.002, 0.001), loss_difference=None)) == ()


def test_what_makes_it_slower_is_refuted() -> None:
    (refuted,) = after(Proof(cause="empty-cache", gains=(-0.3, -0.31, -0.32), loss_difference=None))
    assert (refuted.status, refuted.gain) == ("refuted", 0.0)


def test_noise_leaves_the_estimate_and_says_so() -> None:
    (kept,) = after(Proof(cause="empty-cache", gains=(-0.39, 0.1, 0.2), loss_difference=None))
    assert (kept.status, kept.gain) == ("estimated", 0.3)
    assert "too noisy to tell" in kept.evidence[-1]


@pytest.mark.parametrize(("gains", "left"), [((0.2,), 0.3), ((0.35, 0.4), 0.3), ((-0.002, 0.001), 0.001)])
def test_two_repeats_prove_nothing_and_limit_the_estimate(gains: tuple[float, ...], left: float) -> None:
    (kept,) = after(Proof(cause="empty-cache", gains=gains, loss_difference=None))
    assert (kept.status, kept.gain) == ("estimated", left)
    assert "no interval" in kept.evidence[-1]


@pytest.mark.parametrize(("gains", "told"), [((0.4, 0.41, 0.4), True), ((0.4, 0.41), False), ((0.4, -0.3, 0.1), False)])
def test_the_headline_has_what_all_fixes_save_if_it_is_shown(gains: tuple[float, ...], told: bool) -> None:
    proofs = [Proof(cause=cause, gains=gains, loss_difference=None) for cause in ("empty-cache", ALL_TOGETHER)]
    found = measured(Diagnosis(verdict="", limit={}, findings=(finding("empty-cache"),)), proofs)
    assert ("together (measured)" in found.verdict) == told


def test_what_occurs_in_some_steps_counts_over_the_whole_run() -> None:
    saving = a_run([1.0] * 9 + [11.0])
    assert log_time(saving, cause="checkpointing") == pytest.approx(math.log(2.0 / 100))
    assert log_time(saving, cause="anomaly-mode") == pytest.approx(math.log(1.0 / 100))


def test_rows_are_the_work_where_there_are_no_tokens() -> None:
    small, large = a_run([1.0] * 4, tokens=None, rows=4), a_run([2.0] * 4, tokens=None, rows=16)
    assert log_time(large, cause="small-batch") == pytest.approx(log_time(small, cause="small-batch") - math.log(2))
    assert log_time(a_run([1.0]), cause="small-batch") is None
