"""Two ranks with sharded weights train as one process does; their checkpoints are resumed by any number of ranks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recipes import test_rl
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


def test_pretraining(flatout: Call, config: Path, tmp_path: Path) -> None:
    """Two micro-batches a step, so that gradients are reduced only after the second."""
    settings = (config, "train.steps=50", "plan.micro_batch=2", "eval.every=25")
    assert flatout("train", *settings, "--run", tmp_path / "one").returncode == 0
    two_ranks("train", *settings, SHARDED, "--run", tmp_path / "two", cwd=tmp_path)
    same(tmp_path / "one", tmp_path / "two", steps=50)
    ones, twos = events(tmp_path / "one", "eval"), events(tmp_path / "two", "eval")
    assert [e["val_loss"] for e in ones] == pytest.approx([e["val_loss"] for e in twos], abs=1e-5)
    newest = max((tmp_path / "two/checkpoints").glob("step-*"))
    assert sorted(path.name for path in newest.glob("weights-*")) == [
        "weights-rank00000.safetensors",
        "weights-rank00001.safetensors",
    ]
    plan = Run.open(tmp_path / "two").plan
    assert plan["decisions"]["sharding"] == "full"


@pytest.mark.parametrize("lora", [True, False])
def test_fine_tuning(lora: bool, flatout: Call, sft: Path, tmp_path: Path) -> None:
    whole = ["lora.rank=null", "lora.alpha=null"]
    settings = [sft, "train.steps=50", "plan.micro_batch=1", "train.lr=2e-3", *([] if lora else whole)]
    assert flatout("train", *settings, "--run", tmp_path / "one").returncode == 0
    two_ranks("train", *settings, SHARDED, "--run", tmp_path / "two", cwd=tmp_path)
    same(tmp_path / "one", tmp_path / "two", steps=50)


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
