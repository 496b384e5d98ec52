"""A recorded run of reinforcement learning: what the doctor and the report say of the parts of its step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flatout.cost import Flops, Rates
from flatout.record import Outcome, Run, Span, StepExtra, StepRecord
from flatout.record.events import Ended

PEAK = 1e12
FLOPS = Flops(forward=2e8, backward=4e8, recomputed=0.0, common=6e8, critic=5e8)
ACTOR = {"actor/forward": 0.1, "actor/backward": 0.18, "actor/optimize": 0.02}
CRITIC = {"critic/forward": 0.06, "critic/backward": 0.12, "critic/optimize": 0.02}
HEALTHY = {
    **{"data": 0.01, "sampler/sync": 0.01, "sampler/generate": 0.2, "grader/queue": 0.02, "grader/grade": 0.03},
    **{"reference/logprobs": 0.13, "critic/values": 0.1, **ACTOR, **CRITIC},
}


def span(phase: str, seconds: float) -> Span:
    role, _, name = phase.rpartition("/")
    return Span(phase=name, role=role or "train", seconds=seconds)


def recorded(
    folder: Path,
    *,
    spans: Mapping[str, float] = HEALTHY,
    tokens: int = 100,
    config: Mapping[str, Any] = {},
    profiled: range = range(0),
    memory: Mapping[str, float] = {},
) -> Run:
    rates = Rates(flops=FLOPS, peak_flops=PEAK).to_json()
    made: dict[str, Any] = {"config_text": "recipe: rl\n", "config": {"recipe": "rl", **config}, "environment": {}}
    run = Run.create(folder, **made, plan={"rates": rates, "decisions": {}}, hardware={"gpu": "H200"})
    with run.lock(), run.recorder() as recorder:
        for step in range(40):
            slow = step in profiled
            recorder.step(
                StepRecord(
                    attempt=recorder.attempt,
                    step=step,
                    time=float(step),
                    seconds=50.0 if slow else sum(spans.values()),
                    tokens=tokens,
                    padded_tokens=tokens,
                    loss=4.0 - step / 40,
                    spans=(span("profile", 50.0),) if slow else tuple(span(*item) for item in spans.items()),
                    memory={"peak_gib": 40.0, "total_gib": 80.0, **(memory if step == 0 else {})},
                    extra=StepExtra(profiled=slow),
                )
            )
        recorder.event(Ended(step=40, outcome=Outcome(stopped_by="end"), verdicts=()))
    return run


@pytest.fixture
def diagnosed(flatout: Any, tmp_path: Path) -> Any:
    def diagnose(**given: Any) -> Any:
        recorded(tmp_path / "run", **given)
        code, out, err = flatout("doctor", "run", "--json", "-")
        assert code == 0, err
        return json.loads(out)

    return diagnose


def test_passes_and_updates_are_not_a_problem(diagnosed: Any) -> None:
    found = diagnosed()
    assert found["findings"] == []
    assert found["limit"]["share"] == pytest.approx(FLOPS.common * 100 / 0.3 / PEAK)  # of the actor's own 0.3 s
    critic = FLOPS.critic * 100 / 0.2 / PEAK
    assert f"of the critic's {100 * critic:.1f} %" in found["limit"]["source"]


@pytest.mark.parametrize(
    ("cause", "change", "advice"),
    [
        ("data-starvation", {"data": 0.3}, "shorter prompts"),
        ("reward-bound", {"grader/queue": 0.3}, "rl.graders"),
        ("reward-bound", {"grader/grade": 0.3}, "rl.ahead=1 "),
        ("generation-bound", {"sampler/generate": 0.9}, "sample.max_tokens"),
    ],
)
def test_each_wait_has_its_cause(cause: str, change: dict[str, float], advice: str, diagnosed: Any) -> None:
    [finding] = diagnosed(spans={**HEALTHY, **change})["findings"]
    assert finding["cause"] == cause
    assert advice in finding["fix"]


def test_a_slow_update_is_told_from_a_long_generation(diagnosed: Any) -> None:
    causes = [
        finding["cause"] for finding in diagnosed(spans={**HEALTHY, "sampler/generate": 0.9}, tokens=5)["findings"]
    ]
    assert sorted(causes) == ["generation-bound", "low-mfu"]


def test_models_that_learn_in_one_graph_have_no_mfu_of_their_own(diagnosed: Any) -> None:
    joint = {**HEALTHY, "forward": 0.2, "backward": 0.3}
    assert diagnosed(spans=joint)["limit"]["share"] is None


def test_steps_under_the_profiler_do_not_count(flatout: Any, tmp_path: Path) -> None:
    plain = recorded(tmp_path / "plain")
    traced = recorded(tmp_path / "traced", profiled=range(10, 13))
    a, b = (json.loads(flatout("report", run.path, "--json")[1])[0] for run in (plain, traced))
    for key in ("tokens_per_s", "step_s", "mfu", "data_share", "actor_mfu", "critic_mfu"):
        assert b["figures"][key]["value"] == pytest.approx(a["figures"][key]["value"]), key
    assert [part["seconds"] for part in b["step_parts"]] == pytest.approx([part["seconds"] for part in a["step_parts"]])
    rates = {round(part["tokens_per_s"]) for part in b["history"] if part["tokens_per_s"] is not None}
    assert rates == {100}
    assert flatout("doctor", traced.path)[0] == 0
    assert "no problem found" in flatout("doctor", traced.path)[1]


def test_the_report_has_the_peak_memory_of_every_phase(flatout: Any, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", memory={"peak_gib/actor/backward": 40.0, "peak_gib/sampler/generate": 12.5})
    phases = {
        phase["name"]: phase["peak_gib"] for phase in json.loads(flatout("report", run.path, "--json")[1])[0]["phases"]
    }
    assert (phases["actor/backward"], phases["sampler/generate"], phases["data"]) == (40.0, 12.5, None)
    page = flatout("report", run.path, "-o", "-", "--format", "md")[1]
    assert "| phase | time | share | peak GiB |" in page
    assert "12.5 |" in page
    assert flatout("report", run.path)[0] == 0
    assert "peak GiB" in (run.path / "report.html").read_text()


def test_runs_of_different_recipes_stand_side_by_side(flatout: Any, tmp_path: Path, h200: Run) -> None:
    run = recorded(tmp_path / "run")
    code, out, err = flatout("report", run.path, h200.path, "-o", "-", "--format", "md")
    assert code == 0, err
    row = next(line for line in out.splitlines() if line.startswith("| MFU of the actor |"))
    assert row.endswith("| n/a |")
