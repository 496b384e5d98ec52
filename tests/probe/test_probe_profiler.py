"""The agent's profiler, in this process: what it leaves out, and where it stops."""

import types
from typing import Any

import pytest
import torch

from flatout.probe.agent import profiler as module
from flatout.probe.agent.profiler import Profiler, add_self_times


def agent_of() -> Any:
    found = types.SimpleNamespace(torch=torch, facts={}, probing=False, stage="profiled")
    found.is_training_thread = lambda: not found.probing
    return found


def counts(agent: Any) -> dict[str, float]:
    """As they were recorded: the totals are scaled by the share of time that was."""
    found: dict[str, float] = {}
    for name, _, count, _ in agent.facts["profile"]["operators"]:
        found[name] = found.get(name, 0) + count * agent.facts["profile"]["covered"]
    return found


def test_operators_are_counted_with_their_shapes_and_own_times() -> None:
    agent = agent_of()
    profiler = Profiler(agent)
    profiler.begin()
    for _ in range(4):
        torch.softmax(torch.ones(2, 3, 5, 5), -1)
    profiler.end(2)
    shapes = {(name, shape): count for name, shape, count, _ in agent.facts["profile"]["operators"]}
    assert ("aten::_softmax", "[[2, 3, 5, 5]]") in shapes
    assert counts(agent)["aten::_softmax"] == pytest.approx(2)
    assert all(seconds >= 0 for *_, seconds in agent.facts["profile"]["operators"])


def test_nothing_is_recorded_while_text_is_generated() -> None:
    agent = agent_of()
    profiler = Profiler(agent)
    with profiler.paused():
        assert profiler.recordings == [], "no step is profiled yet"
    profiler.begin()
    torch.ones(2).exp()
    with profiler.paused():
        for _ in range(50):
            torch.ones(2).sin()
        with profiler.paused():
            torch.ones(2).sin()
        torch.ones(2).sin()
    torch.ones(2).exp()
    profiler.end(1)
    assert "aten::sin" not in counts(agent)
    assert counts(agent)["aten::exp"] == pytest.approx(2)
    assert agent.facts["profile"]["paused_s"] > 0


def test_the_events_that_are_read_have_a_limit_and_totals_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_EVENTS", 100)
    agent = agent_of()
    profiler = Profiler(agent)
    profiler.begin()
    for _ in range(1000):
        torch.ones(2).sin()
    profiler.end(1)
    assert agent.facts["profile"]["num_events"] >= 2000
    assert counts(agent)["aten::sin"] == pytest.approx(1000, rel=0.3)


def test_recording_stops_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RECORDED_S", 0.0)
    agent = agent_of()
    profiler = Profiler(agent)
    profiler.begin()
    torch.ones(2).exp()
    profiler.check()
    torch.ones(2).sin()
    profiler.end(1)
    assert "aten::exp" in counts(agent)
    assert "aten::sin" not in counts(agent)


def test_an_operator_inside_another_is_taken_off_its_time() -> None:
    found: dict[tuple[str, str], list[float]] = {(name, ""): [0, 0.0] for name in ("outer", "inner", "deep", "next")}
    spans = [(0, -1000, "outer", ""), (100, -500, "inner", ""), (200, -100, "deep", ""), (1000, -50, "next", "")]
    add_self_times(spans, found)
    assert {name: value for (name, _), value in found.items()} == {
        "outer": [1, 0.5],
        "inner": [1, 0.4],
        "deep": [1, 0.1],
        "next": [1, 0.05],
    }
