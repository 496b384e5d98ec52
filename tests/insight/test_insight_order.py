"""Findings in the order of what their measurement gained, advice that fits the machine, and proofs that end in time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.insight.test_insight_diagnose import FACTS, seen

from flatout.insight import doctor, prove
from flatout.insight.attach import Asked, Watched
from flatout.insight.diagnose import diagnose
from flatout.insight.diagnose.observed import Observed
from flatout.record import Diagnosis, Finding

ON_CPU = {
    "device": None,
    "host": {"forward": 0.03, "backward": 0.04, "optimizer": 0.025, "other": 0.005},
    "micro": [{"rows": 16, "length": 128, "tokens": 2048, "real": 2048.0}],
}
AT_ONE_THREAD = {"threads": 1, "default_threads": 2, "cores": 2, "profile": None, "gpu": None}
SLOWER, NOISY = [1.9, 2.2, 2.1, 2.3], [-0.9, 0.8, -0.2, 0.5]
BUSY = [{"cpu": 1.0}]  # every core of the machine, by the monitor


def on_cpu(*, step: Mapping[str, Any] | None = None, **facts: Any) -> Observed:
    return seen(step={**ON_CPU, **(step or {})}, **{"profile": None, "gpu": None, **facts})


def causes(found: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.cause, finding.status) for finding in found.findings]


# -- what a measurement has refuted


def test_a_change_that_its_own_replay_shows_to_be_slower_is_refuted_and_last() -> None:
    replays = {"threads": [0.155, 1.405, SLOWER], "recompute": [0.1, 0.08, [-0.22] * 4]}
    for samples in ((), BUSY):
        found = diagnose(replace(on_cpu(**AT_ONE_THREAD, replays=replays), samples=samples))
        assert causes(found) == [("needless-recompute", "estimated"), ("few-threads", "refuted")]
        assert found.verdict.startswith("1 cause found, the largest is needless-recompute")


def test_a_refuted_cause_alone_is_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    found = diagnose(on_cpu(**AT_ONE_THREAD, replays={"threads": [0.155, 1.405, SLOWER]}))
    assert found.verdict.startswith("no problem found")
    assert "few-threads refuted by measurement" in found.verdict
    doctor.say(found, console=Console(width=200))
    said = capsys.readouterr().out
    assert "refuted: the change was measured, and it is slower" in said
    assert "155.00 ms as it was, 1405.00 ms with 2" in said


def test_a_refuted_fix_is_not_measured_again() -> None:
    watched = on_cpu(**AT_ONE_THREAD, replays={"threads": [0.155, 1.405, SLOWER]})
    assert prove.changes_for(diagnose(watched).findings[-1], watched) == []


def test_a_cause_that_takes_much_time_does_not_stand_before_one_whose_removal_gains_more() -> None:
    """On a busy machine the replay of the optimizer tells nothing, and nothing is made up in its place."""
    plain = {"1": {**FACTS["optimizers"]["1"], "fused": None}}
    slow = {"host": {"forward": 0.02, "backward": 0.03, "optimizer": 0.045, "other": 0.005}}
    replays = {"fused": [0.04, 0.041, NOISY], "recompute": [0.1, 0.08, [-0.22] * 4]}
    busy = replace(on_cpu(step=slow, optimizers=plain, replays=replays, cores=2), samples=BUSY)
    found = diagnose(busy)
    assert causes(found) == [("needless-recompute", "estimated"), ("slow-optimizer", "estimated")]
    assert found.findings[0].share is not None
    assert found.findings[1].share is not None
    assert found.findings[1].share > found.findings[0].share
    assert found.findings[1].gain is None


def test_a_fix_that_a_proof_shows_to_be_slower_is_refuted_and_last() -> None:
    found = diagnose(seen(compute_dtype="float32", replays={"bf16": [0.1, 0.02], "recompute": [0.1, 0.09]}))
    assert [finding.cause for finding in found.findings] == ["fp32-matmul", "needless-recompute"]
    slower = prove.Proof(cause="fp32-matmul", gains=(-0.31, -0.3, -0.32), loss_difference=0.0)
    proved = prove.measured(found, [slower])
    assert causes(proved) == [("needless-recompute", "estimated"), ("fp32-matmul", "refuted")]
    assert any("measured: -31.0 %" in line for line in proved.findings[1].evidence)


@pytest.mark.parametrize(("gains", "most"), [((-0.2, 0.1, -0.05), 0.3), ((-0.1, -0.2), 0.0)])
def test_an_estimate_that_a_noisy_proof_contradicts_does_not_stand(gains: tuple[float, ...], most: float) -> None:
    found = diagnose(seen(compute_dtype="float32", replays={"bf16": [0.1, 0.02]}))
    (finding,) = prove.measured(found, [prove.Proof(cause="fp32-matmul", gains=gains, loss_difference=None)]).findings
    assert finding.gain is not None
    assert finding.gain <= most < 0.7
    assert finding.status == "estimated"


# -- loader workers


def starved(*, workers: int, cores: int, batch: tuple[float, float] | None = None, **more: Any) -> Finding:
    loader = {"evaluating": False, "num_workers": workers, "pin_memory": False, "batch_size": 16, "dataset": "Rows"}
    step = {"host": {"data": 0.05, "forward": 0.02, "backward": 0.03}, "cpu_s": 0.02, **more}
    replays = {} if batch is None else {"batch-alone": list(batch)}
    found = diagnose(on_cpu(step=step, cores=cores, loaders=[loader], replays=replays))
    return next(finding for finding in found.findings if finding.cause == "data-starvation")


@pytest.mark.parametrize(
    ("workers", "cores", "batch", "advised"),
    [
        (0, 2, None, 2),
        (0, 1, None, 1),
        (0, 64, None, 8),
        (4, 2, None, 2),
        (4, 16, None, 8),
        (4, 2, (0.05, 0.0005), 0),  # tiny samples: handing them over takes longer than making them
        (4, 16, (0.05, 0.24), 5),
        (4, 2, (0.05, 0.24), 2),
    ],
)
def test_the_number_of_workers_fits_the_machine(
    workers: int, cores: int, batch: tuple[float, float] | None, advised: int
) -> None:
    fix = starved(workers=workers, cores=cores, batch=batch).fix
    assert re.search(r"num_workers=(\d+)", fix)[1] == str(advised)  # type: ignore[index]
    assert ("persistent_workers" in fix) == (advised > 0), "torch refuses it without workers"


def test_no_number_of_workers_gives_more_than_the_cores_have() -> None:
    """Two cores of CPU time a step: nothing is left for workers."""
    assert starved(workers=0, cores=2, cpu_s=0.19).gain == pytest.approx(0.05)
    assert starved(workers=0, cores=2, cpu_s=0.05).gain == pytest.approx(0.5)


def test_none_and_fewer_workers_are_tried() -> None:
    loader = {"evaluating": False, "num_workers": 4, "pin_memory": False, "batch_size": 16, "dataset": "Rows"}
    step = {"host": {"data": 0.05, "forward": 0.02, "backward": 0.03}}
    watched = on_cpu(step=step, cores=2, loaders=[loader], replays={})
    finding = next(finding for finding in diagnose(watched).findings if finding.cause == "data-starvation")
    tried = [change.switch["loader"] for change in prove.changes_for(finding, watched)]
    assert [loader["num_workers"] for loader in tried] == [2, 1, 0]
    assert [loader["persistent_workers"] for loader in tried] == [True, True, False]


# -- recomputation, and what is ruled out


def test_recomputation_is_found_where_its_replay_is_too_noisy() -> None:
    step = {"counts": {"recompute": 4, "recompute_s": 0.027}}
    found = diagnose(on_cpu(step=step, totals={"recompute": 40}, replays={"recompute": [0.1, 0.09, NOISY]}))
    (finding,) = found.findings
    assert (finding.cause, finding.gain) == ("needless-recompute", pytest.approx(0.27))
    assert "too noisy to tell" in " ".join(finding.evidence)


def test_recomputation_is_found_on_a_cpu_where_nothing_was_replayed() -> None:
    step = {"counts": {"recompute": 4, "recompute_s": 0.027}}
    (finding,) = diagnose(on_cpu(step=step, totals={"recompute": 40})).findings
    assert (finding.cause, finding.gain) == ("needless-recompute", pytest.approx(0.27))
    assert "was not tried" in finding.sentence


@pytest.mark.parametrize("replay", ["out of memory", [0.1, 0.1, [0.0] * 9], [0.1, 0.13, [0.25, 0.26, 0.27]]])
def test_recomputation_that_costs_nothing_or_is_needed_is_left_alone(replay: Any) -> None:
    step = {"counts": {"recompute": 4, "recompute_s": 0.027}}
    assert diagnose(on_cpu(step=step, totals={"recompute": 40}, replays={"recompute": replay})).findings == ()


def test_what_was_measured_as_a_gain_is_not_ruled_out() -> None:
    slow = {"micro": [{"rows": 16, "length": 64, "tokens": 1024, "real": 1024.0}]}
    (finding,) = diagnose(seen(step=slow, replays={"batch-2": [0.1, 0.143 / 2]})).findings
    assert finding.cause == "low-mfu"
    gains, ruled_out = finding.evidence[1:]
    assert "a larger batch, 28.5 % less time per token" in gains
    assert "larger batch" not in ruled_out


# -- proofs


class Runs:
    """Stands for runs of a script: each takes as long as its switch says, in one order on every machine."""

    def __init__(self, factor: Callable[[Mapping[str, Any]], float], noise: Iterator[float]) -> None:
        self.factor, self.noise, self.asked = factor, noise, []  # type: ignore[var-annotated]

    def __call__(self, command: Any, *, asked: Asked) -> Watched:
        self.asked.append(asked)
        seconds = 0.1 * self.factor(asked.switch) * next(self.noise)
        steps = [
            {**ON_CPU, "seconds": seconds, "step": i, "stage": "timed", "loss": 1.0, "host": {"forward": seconds}}
            for i in range(8)
        ]
        return Watched(returncode=0, stopped=True, facts={}, steps=steps, samples=(), crash=None)


def quiet() -> Iterator[float]:
    while True:
        yield from (1.0, 1.004, 0.998, 1.002, 0.997, 1.003, 1.001)


def noisy() -> Iterator[float]:
    while True:
        yield from (1.0, 2.1, 0.7, 1.4)


def proved(runs: Runs, watched: Observed, monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[Any, list[str]]:
    monkeypatch.setattr(prove, "watch", runs)
    said: list[str] = []
    diagnosis = diagnose(watched)
    proofs = prove.prove(["script"], diagnosis, seen=watched, asked=Asked(), say=said.append, **how)
    return prove.measured(diagnosis, proofs), said


def recomputing() -> Observed:
    return on_cpu(totals={"recompute": 40}, replays={"recompute": [0.1, 0.08, [-0.22] * 4]})


def test_a_proof_says_how_long_it_takes_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(lambda switch: 0.8 if switch else 1.0, quiet())
    found, said = proved(runs, recomputing(), monkeypatch, run_s=12.0)
    assert said[0].startswith("the proof takes about 1m48s: 9 runs of 12 s in 3 rounds")
    assert len(runs.asked) == 9
    assert all(asked.seconds <= 15 for asked in runs.asked), "a run of a proof is short, however slow the steps are"
    assert causes(found) == [("needless-recompute", "measured")]


def test_a_hopeless_proof_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unchanged script differs from itself by 40 %, and the fix is expected to save 14 %."""
    runs = Runs(lambda switch: 1.0, noisy())
    found, said = proved(runs, recomputing(), monkeypatch, repeats=5)
    assert len(runs.asked) == 3, "one round of five"
    assert "is not measured any longer: the unchanged script differs from itself by" in said[-1]
    (finding,) = found.findings
    assert finding.status == "estimated"
    assert "too noisy to tell" in finding.evidence[-1]


def test_the_time_goes_to_the_fix_that_can_still_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = on_cpu(
        totals={"recompute": 40, "anomaly": 9},
        replays={"recompute": [0.1, 0.09, [-0.1] * 4], "anomaly": [0.1, 0.02, [-1.6] * 4]},
    )

    def spread() -> Iterator[float]:  # unchanged, two fixes, both, unchanged again: 25 % apart
        while True:
            yield from (1.0, 1.0, 1.0, 1.0, 1.25)

    def factor(switch: Mapping[str, Any]) -> float:
        return 0.25 if "anomaly-off" in switch else 0.99 if switch else 1.0

    runs = Runs(factor, spread())
    found, _ = proved(runs, watched, monkeypatch)
    alone = [asked.switch for asked in runs.asked if asked.switch == {"no-recompute": True}]
    assert len(alone) == 1
    assert sum("anomaly-off" in asked.switch for asked in runs.asked) > 2
    assert found.findings[0].cause == "anomaly-mode"


def test_the_best_number_of_workers_is_the_one_that_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = {"evaluating": False, "num_workers": 4, "pin_memory": False, "batch_size": 16, "dataset": "Rows"}
    step = {"host": {"data": 0.05, "forward": 0.02, "backward": 0.03}}
    watched = on_cpu(step=step, cores=2, loaders=[loader], replays={})

    def factor(switch: Mapping[str, Any]) -> float:
        return {None: 1.0, 2: 1.09, 1: 0.9, 0: 0.6}[(switch.get("loader") or {}).get("num_workers")]

    found, said = proved(Runs(factor, quiet()), watched, monkeypatch)
    finding = next(finding for finding in found.findings if finding.cause == "data-starvation")
    assert finding.status == "measured"
    assert finding.gain == pytest.approx(0.4, abs=0.01)
    assert finding.fix == "DataLoader(..., num_workers=0)"
    assert "proof 1 of 3: data-starvation, 0 workers" in said
    assert math.isfinite(finding.gain or math.nan)
