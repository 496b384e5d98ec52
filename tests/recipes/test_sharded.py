"""Two ranks with sharded weights train as one process does; their checkpoints are resumed by any number of ranks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recipes import test_rl, test_router
from tests.recipes.recipes_processes import events, trajectory
from tests.warm import two_ranks

from flatout.recipes import run
from flatout.record import Run

Call = Callable[..., subprocess.CompletedProcess[str]]
SHARDED = "plan.sharding=full"


def same(one: Path, two: Path, *, steps: int, loss: float = 1e-5, norm: float = 1e-3) -> None:
    ones, twos = trajectory(one), trajectory(two)
    assert len(ones) == len(twos) == steps
    for (step, a, norm_a, _), (_, b, norm_b, _) in zip(ones, twos, strict=True):
        assert b == pytest.approx(a, abs=loss), f"step {step}"
        assert norm_b == pytest.approx(norm_a, rel=norm), f"step {step}"


STEPS = pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.long)])


@STEPS
def test_pretraining(steps: int, flatout: Call, config: Path, tmp_path: Path) -> None:
    """Two micro-batches a step, so that gradients are reduced only after the second."""
    settings = (config, f"train.steps={steps}", "plan.micro_batch=2", "eval.every=5")
    assert flatout("train", *settings, "--run", tmp_path / "one").returncode == 0
    two_ranks("train", *settings, SHARDED, "--run", tmp_path / "two", cwd=tmp_path)
    same(tmp_path / "one", tmp_path / "two", steps=steps)
    ones, twos = events(tmp_path / "one", "eval"), events(tmp_path / "two", "eval")
    assert [e["val_loss"] for e in ones] == pytest.approx([e["val_loss"] for e in twos], abs=1e-5)
    newest = max((tmp_path / "two/checkpoints").glob("step-*"))
    assert sorted(path.name for path in newest.glob("weights-*")) == [
        "weights-rank00000.safetensors",
        "weights-rank00001.safetensors",
    ]
    plan = Run.open(tmp_path / "two").plan
    assert plan["decisions"]["sharding"] == "full"


@STEPS
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all"])
def test_fine_tuning(lora: bool, steps: int, flatout: Call, sft: Path, tmp_path: Path) -> None:
    whole = ["lora.rank=null", "lora.alpha=null"]
    settings = [sft, f"train.steps={steps}", "plan.micro_batch=1", "train.lr=2e-3", *([] if lora else whole)]
    assert flatout("train", *settings, "--run", tmp_path / "one").returncode == 0
    two_ranks("train", *settings, SHARDED, "--run", tmp_path / "two", cwd=tmp_path)
    same(tmp_path / "one", tmp_path / "two", steps=steps)


PCGRAD = {"rl": {"prompts": 8, "updates": 1}, "mtl": {"method": "pcgrad"}}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(PCGRAD | {"train": {"steps": 4, "lr": 1e-4}}, id="pcgrad"),
        pytest.param(PCGRAD | {"train": {"steps": 50, "lr": 1e-4}}, id="pcgrad-50", marks=pytest.mark.long),
        pytest.param({"train": {"steps": 50, "lr": 1e-4}}, id="grpo-50", marks=pytest.mark.long),
        # The second rank has no prompt of the first update, and the critic is sharded too.
        pytest.param(
            {
                "rl": {"algorithm": "ppo", "samples": 2, "critic": "own"},
                "mtl": {"method": "equal"},
                "train": {"steps": 4, "lr": 1e-4},
            },
            id="ppo",
        ),
    ],
)
def test_reinforcement_learning(changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank samples its prompts from gathered weights; dot products of gradients are summed over shards."""
    test_rl.letters.__wrapped__(monkeypatch)
    run(test_rl.settings(**changes, plan={"micro_batch": 1}), folder=tmp_path / "one")
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.recipes import test_sharded\n"
        "test_sharded.one_rank(sys.argv[1], sys.argv[2])\n"
    )
    two_ranks(str(tmp_path / "two"), json.dumps(changes), cwd=tmp_path, script=script)
    same(tmp_path / "one", tmp_path / "two", steps=changes["train"]["steps"], norm=1e-2)


def one_rank(folder: str, changes: str) -> None:
    """The body of one of two processes."""
    torch.set_num_threads(1)
    test_rl.letters.__wrapped__(pytest.MonkeyPatch())
    run(test_rl.settings(**json.loads(changes), plan={"micro_batch": 1, "sharding": "full"}), folder=Path(folder))


@pytest.mark.parametrize("sharding", ["full", "none"])
@STEPS
def test_a_router(sharding: str, steps: int, flatout: Call, tmp_path: Path) -> None:
    """All phases. Balance and consistency are of the documents of a micro-batch, so it is the same one."""
    lengths = {"teach_steps": steps, "router_steps": steps, "joint_steps": steps}
    values = test_router.changed(router=lengths, train={"steps": steps}, plan={"micro_batch": 2})
    job = test_router.written(tmp_path, values)
    assert flatout("train", job, "--run", tmp_path / "one").returncode == 0
    two_ranks("train", job, f"plan.sharding={sharding}", "--run", tmp_path / "two", cwd=tmp_path)
    for phase in ("taught", "phase-1", "phase-2", "."):
        same(tmp_path / "one" / phase, tmp_path / "two" / phase, steps=steps, norm=1e-2)
        ones, twos = events(tmp_path / "one" / phase, "eval"), events(tmp_path / "two" / phase, "eval")
        assert [e["val_loss"] for e in ones] == pytest.approx([e["val_loss"] for e in twos], abs=1e-5)
    scored = [[(e["phase"], e.get("confusion")) for e in events(tmp_path / run, "phase")] for run in ("one", "two")]
    assert scored[0] == scored[1]
    assert len(scored[0]) == 3


def test_the_phases_of_a_router_on_two_ranks_and_on_one(flatout: Call, tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    job = test_router.written(tmp_path, test_router.changed(plan={"micro_batch": 2}))
    assert flatout("train", job, "--run", whole).returncode == 0
    two_ranks("train", job, SHARDED, "router.phase=1", "--run", folder, cwd=tmp_path)
    start = f"router.start={folder}"
    alone = flatout("train", job, "router.phase=2", "router.teach_steps=null", start, "--run", tmp_path / "second")
    assert alone.returncode == 0, alone.stderr
    start = f"router.start={tmp_path / 'second'}"
    last = tmp_path / "third"
    two_ranks("train", job, SHARDED, "router.phase=3", "router.teach_steps=null", start, "--run", last, cwd=tmp_path)
    for phase, other in (("phase-1", folder), ("phase-2", tmp_path / "second"), (".", last)):
        same(whole / phase, other, steps=4, norm=1e-2)


def test_saved_on_two_resumed_on_one_and_back(flatout: Call, config: Path, tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    steps = [(config, f"train.steps={n}", "train.schedule=constant", "--run", folder) for n in (4, 8, 12)]
    assert flatout("train", *steps[2][:3], "--run", whole).returncode == 0
    two_ranks("train", *steps[0], SHARDED, cwd=tmp_path)
    alone = flatout("train", *steps[1], "--resume")
    assert alone.returncode == 0, alone.stderr
    two_ranks("train", *steps[2], SHARDED, "--resume", cwd=tmp_path)
    same(whole, folder, steps=12)
    assert [e["step"] for e in events(folder, "resume")] == [4, 8]
    # Export gathers.
    done = flatout("export", folder, "--to", tmp_path / "exported")
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_sharded_is_refused(flatout: Call, config: Path, sft: Path, tmp_path: Path) -> None:
    alone = flatout("train", config, SHARDED, "--run", tmp_path / "run")
    assert alone.returncode == 2
    assert "does not work with one rank" in alone.stderr
