"""The models that the agent follows, in this process: parts, second models, several optimizers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.probe.agent.agent import Agent
from flatout.probe.agent.hooks import ERRORS, ImportHook
from flatout.probe.agent.replays import Replays
from flatout.probe.agent.settings import Settings


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An agent that follows this process until the test ends, and never stops it."""
    # Models that other tests of this process left behind must not take the place of a small one of this test.
    for most in ("MOST_MODELS", "MOST_PARTS"):
        monkeypatch.setattr(f"flatout.probe.agent.forwards.{most}", 10_000)
    asked = {"out": str(tmp_path), "steps": 1000, "seconds": 600.0, "stop": False, "look": False}
    found = Agent(Settings(json.dumps(asked)), ImportHook())
    found.settings.stop = False
    ERRORS.clear()
    found.on_torch(torch)
    found.settings.stop = True  # what a replay needs is kept
    yield found
    found.ended = True
    found.imports.wanted.clear()
    found.patches.undo()
    assert ERRORS == []


def lines(agent: Any, tmp_path: Path) -> list[dict[str, Any]]:
    agent.writer.write_ready(wait=True)
    (path,) = tmp_path.glob("steps-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_list_of_modules_that_is_never_called_is_followed_part_by_part(agent: Any, tmp_path: Path) -> None:
    layers = torch.nn.ModuleList([torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 16)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randint(0, 16, (2, 5))
        for layer in layers:
            x = layer(x)
        x.pow(2).mean().backward()
        optimizer.step()
    last = lines(agent, tmp_path)[-1]
    assert [micro["tokens"] for micro in last["micro"]] == [10], "three parts are one micro-batch"
    assert {"forward", "loss", "backward", "optimizer"} <= last["host"].keys()
    assert [type(module).__name__ for module, _, _ in agent.forwards.last] == ["Embedding", "Linear", "Linear"]
    replays = Replays(agent, optimizer)
    replays.calls, replays.mixed = agent.forwards.last, agent.forwards.mixed
    replays.replay()
    replays.replay(times=2)


def test_parts_of_a_root_that_is_never_called_are_followed(agent: Any, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model[1](model[0](torch.randn(2, 8))).mean().backward()
        optimizer.step()
    assert len(lines(agent, tmp_path)[-1]["micro"]) == 1


def test_a_step_is_a_round_of_all_optimizers(agent: Any, tmp_path: Path) -> None:
    """Two steps of the first for each of the second, and the second's model is trained, too."""
    critic, actor = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, actor))
    for _ in range(12):
        for model, optimizer in ((critic, first), (critic, first), (actor, second)):
            model(torch.randn(2, 8)).pow(2).mean().backward()
            optimizer.step()
    last = lines(agent, tmp_path)[-1]
    assert (last["stage"], len(last["micro"])) == ("timed", 3)
    assert agent.facts["model"]["matmul_weights"] == 8 * 8 + 4 * 8
    assert "reference" not in last["host"]


def test_a_second_model_is_no_training_forward(agent: Any, tmp_path: Path) -> None:
    model, reference = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(2, 8)
        with torch.no_grad():
            wanted = reference(x)
        (model(x) - wanted).pow(2).mean().backward()
        optimizer.step()
    last = lines(agent, tmp_path)[-1]
    assert len(last["micro"]) == 1
    assert {"reference", "forward", "loss", "backward"} <= last["host"].keys()


def test_the_weights_of_attention_are_counted(agent: Any, tmp_path: Path) -> None:
    attention = torch.nn.MultiheadAttention(8, 2)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    x = torch.randn(3, 2, 8)
    attention(x, x, x)[0].mean().backward()
    optimizer.step()
    assert agent.facts["model"]["matmul_weights"] == 4 * 8 * 8


def test_the_plain_path_of_torchs_own_attention_is_not_written_out_attention(agent: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    softmax = ["aten::_softmax", "[[2, 2, 8, 8]]", 4.0, 0.1]
    product = ["aten::bmm", "[[4, 8, 4], [4, 4, 8]]", 4.0, 0.1]
    for own, found in ((4.0, False), (0.0, True)):
        operators = [softmax, product, ["aten::_scaled_dot_product_attention_math", "[]", own, 0.1]]
        agent.facts["profile"] = {"operators": operators}
        replays = Replays(agent, optimizer)
        replays.attention()
        assert ("attention" in replays.found) == found
