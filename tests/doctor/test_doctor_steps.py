"""Steps are recognised by what happens, backward passes and then parameters that change, in loops of every shape."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from doctoring import SRC, doctor
from tests import warm

STEPS = 10
# What `flatout doctor` starts in the script's Python, in a process that need not import torch.
AGENT = f"""
import runpy, sys, torch
runpy.run_path({str(SRC / "flatout" / "probe" / "inject" / "sitecustomize.py")!r})
agent = sys.modules["_flatout_agent"].AGENT
"""
MODEL = """
done = 0
def small():
    return torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 32), torch.nn.Tanh(),
                               torch.nn.Linear(32, 64))
def loss_of(model):
    ids = torch.randint(0, 64, (4, 9))
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
def raw_loss(w, v):
    return (torch.randn(8, 16) @ w).tanh().matmul(v).pow(2).mean()
"""
END = """
finally:
    sys.stdout.write(f"{done} updates\\n")
"""
NEW_OPTIMIZER = """
model = small()
for _ in range(1000):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model).backward()
    done += 1
    optimizer.step()
"""
NEW_OPTIMIZER_AND_SCHEDULER = """
model = small()
for _ in range(1000):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loss_of(model).backward()
    done += 1
    optimizer.step()
    scheduler.step()
"""
NEW_MODEL = """
for _ in range(1000):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model).backward()
    done += 1
    optimizer.step()
"""
EVERY_MODEL_KEPT = """
kept = []
for _ in range(1000):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept.append((model, optimizer))
    loss_of(model).backward()
    done += 1
    optimizer.step()
"""
MODELS_OF_MANY_SIZES = """
for number in range(1000):
    model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64 + number), torch.nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model).backward()
    done += 1
    optimizer.step()
"""
BY_HAND = """
model = small()
for _ in range(1000):
    loss_of(model).backward()
    done += 1
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
            p.grad = None
"""
BY_HAND_ACCUMULATED = """
model = small()
for _ in range(1000):
    for _ in range(3):
        (loss_of(model) / 3).backward()
    done += 1
    for p in model.parameters():
        p.data -= 0.01 * p.grad.data
        p.grad.zero_()
"""
REPLACED = """
w, v = torch.randn(16, 32), torch.randn(32, 4)
for _ in range(1000):
    w, v = w.detach().requires_grad_(), v.detach().requires_grad_()
    by_w, by_v = torch.autograd.grad(raw_loss(w, v), (w, v))
    done += 1
    w, v = w - 0.01 * by_w, v - 0.01 * by_v
"""
RAW_TENSORS = """
w, v = torch.randn(16, 32, requires_grad=True), torch.randn(32, 4, requires_grad=True)
for _ in range(1000):
    raw_loss(w, v).backward()
    done += 1
    for p in (w, v):
        p.data = p.data - 0.01 * p.grad
        p.grad = None
"""
OWN_CLASS = """
class Momentum:
    def __init__(self, parameters):
        self.parameters = [(p, torch.zeros_like(p)) for p in parameters]
    @torch.no_grad()
    def step(self):
        for p, m in self.parameters:
            m.mul_(0.9).add_(p.grad)
            p.sub_(0.01 * m)
            p.grad = None
model = small()
optimizer = Momentum(model.parameters())
for _ in range(1000):
    loss_of(model).backward()
    done += 1
    optimizer.step()
"""
TWO_BY_HAND = """
first, second = small(), small()
for _ in range(1000):
    for model in (first, second):
        loss_of(model).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None
    done += 1
"""
IN_BACKWARD = """
model = small()
optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}
def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
for _ in range(1000):
    done += 1
    loss_of(model).backward()
"""
THREE_OPTIMIZERS = """
models = [small() for _ in range(3)]
optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
for _ in range(1000):
    done += 1
    for model, optimizer in zip(models, optimizers):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SECOND_PHASE = """
for number in range(2):
    model = small()
    optimizer = (torch.optim.AdamW, torch.optim.SGD)[number](model.parameters(), lr=1e-3)
    for _ in range((12, 1000)[number]):
        loss_of(model).backward()
        done += 1
        optimizer.step()
        optimizer.zero_grad()
"""
BY_HAND_FIRST = """
model = small()
for _ in range(4):
    loss_of(model).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
            p.grad = None
    done += 1
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(1000):
    loss_of(model).backward()
    done += 1
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop, how many forward passes a step of it has, and how many steps more than asked it may take to find out."""

    text: str
    micro: int = 1
    more: int = 0
    own: bool = False
    remade: str = ""
    steps: int = STEPS


LOOPS = {
    "a new optimizer": Loop(text=NEW_OPTIMIZER, remade="optimizer"),
    "a new optimizer and scheduler": Loop(text=NEW_OPTIMIZER_AND_SCHEDULER, remade="optimizer", more=9),
    "a new model": Loop(text=NEW_MODEL, remade="model", more=9),
    "a new model, all of them kept": Loop(text=EVERY_MODEL_KEPT, remade="model", more=10),
    "models of many sizes": Loop(text=MODELS_OF_MANY_SIZES, remade="model", more=9),
    "by hand": Loop(text=BY_HAND, own=True),
    "by hand, accumulated": Loop(text=BY_HAND_ACCUMULATED, micro=3, own=True),
    "new tensors": Loop(text=REPLACED, micro=0, own=True),
    "tensors without a module": Loop(text=RAW_TENSORS, micro=0, own=True),
    "a class of its own": Loop(text=OWN_CLASS, own=True),
    "two models by hand": Loop(text=TWO_BY_HAND, micro=2, more=3, own=True),
    "in the backward pass": Loop(text=IN_BACKWARD),
    "three optimizers": Loop(text=THREE_OPTIMIZERS, micro=3, more=3),
    "a second phase": Loop(text=SECOND_PHASE, more=30, steps=16),
    "by hand, then an optimizer": Loop(text=BY_HAND_FIRST, more=5),
}


def watched(loop: str, folder: Path, *, steps: int = STEPS, look: bool = False) -> tuple[Any, list[Any], str]:
    """The agent's facts and steps, and what the script printed."""
    out = folder / "out"
    out.mkdir()
    asked = {"out": str(out), "steps": steps, "seconds": 60.0, "stop": True, "look": look}
    indented = "\n".join(f"    {line}" for line in loop.splitlines())
    script = warm.Started(
        cwd=folder, script=AGENT + MODEL + "try:\n" + indented + END, environment={"FLATOUT_AGENT": json.dumps(asked)}
    )
    said, err = script.communicate()
    assert script.wait() == 0, err
    (facts,), (lines,) = list(out.glob("facts-*.json")), list(out.glob("steps-*.jsonl"))
    return json.loads(facts.read_text()), [json.loads(line) for line in lines.read_text().splitlines()], said


@pytest.mark.parametrize("name", LOOPS)
def test_the_steps_of_a_loop_are_counted(name: str, tmp_path: Path) -> None:
    loop = LOOPS[name]
    facts, steps, said = watched(loop.text, tmp_path, steps=loop.steps)
    assert (facts["state"], facts["errors"]) == ("stopped", [])
    assert loop.steps <= len(steps) <= loop.steps + loop.more
    updates = int(said.split()[0])
    assert len(steps) - 1 <= updates <= len(steps) + loop.more, "a step is an update"
    timed = [step for step in steps if step["stage"] == "timed"]
    assert {len(step["micro"]) for step in timed[-4:]} == {loop.micro}
    assert all(step["loss"] is not None and step["seconds"] > 0 for step in timed)
    shape = facts.get("loop") or {}
    assert bool(shape.get("own_code")) == loop.own
    assert list(shape.get("remade", {})) == [loop.remade] * bool(loop.remade)
    if loop.own:
        assert "script.py" in shape["updated_at"]


def test_an_own_update_is_timed_apart_from_the_backward_pass(tmp_path: Path) -> None:
    """And the last batch of such a loop is replayed like any other."""
    facts, steps, _ = watched(OWN_CLASS, tmp_path, look=True)
    assert facts["errors"] == []
    timed = [step for step in steps if step["stage"] == "timed"]
    assert all(step["host"]["optimizer"] > 0 and step["host"]["backward"] > 0 for step in timed)
    assert facts["model"]["class"] == "Sequential"
    assert "batch-2" in facts["replays"]


def test_one_optimizer_is_no_unusual_loop(tmp_path: Path) -> None:
    facts, _, _ = watched(SECOND_PHASE.replace("range(2)", "range(1)").replace("12,", "1000,"), tmp_path)
    assert "loop" not in facts


# -- the command


def test_a_script_that_makes_a_new_optimizer_every_step_is_diagnosed_and_stopped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys, torch\n" + MODEL + NEW_OPTIMIZER + "print('ran to the end')\n")
    found = tmp_path / "found.json"
    asked = ("--steps", "12", "--run", str(tmp_path / "run"), "--json", str(found))
    done = doctor(*asked, "--", sys.executable, str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stderr.decode()
    assert b"ran to the end" not in done.stdout
    read = json.loads(found.read_text())
    assert "recreated-optimizer" in [finding["cause"] for finding in read["findings"]]
    assert "a new optimizer was made" in read["limit"]["loop"]
    assert b"the loop: a new optimizer" in done.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import torch", "was imported, but no backward pass was run"),
        (
            "import torch; torch.ones(1, requires_grad=True).sum().backward()",
            "ran 1 backward pass, and no parameter that they reach was changed",
        ),
    ],
)
@pytest.mark.long
def test_a_script_without_a_step_is_told_what_it_did(text: str, told: str, tmp_path: Path) -> None:
    done = doctor("--run", str(tmp_path / "run"), "--", sys.executable, "-c", text)
    assert done.returncode == 4
    assert told in done.stderr.decode()
