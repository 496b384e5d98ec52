"""Two ranks with sharded weights train as one process does; their checkpoints are resumed by any number of ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.recipes.recipes_processes import events, trajectory
from tests.warm import two_ranks

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
    settings = [sft, "train.steps=50", "plan.micro_batch=1", *([] if lora else ["lora.rank=null", "train.lr=2e-3"])]
    assert flatout("train", *settings, "--run", tmp_path / "one").returncode == 0
    two_ranks("train", *settings, SHARDED, "--run", tmp_path / "two", cwd=tmp_path)
    same(tmp_path / "one", tmp_path / "two", steps=50)


def rl_config(tmp_path: Path, *, method: str) -> Path:
    path = tmp_path / "rl.yaml"
    settings = {
        "recipe": "rl",
        "model": {"layers": 2, "hidden": 32, "heads": 2},
        "data": {"sequence_length": 96},
        "rl": {
            "tasks": ["sums:easy?prompt=bare", "units:train?prompt=bare"],
            "prompts": 8, "samples": 4, "updates": 2, "teach": 2, "graders": 1,
        },
        "mtl": {"method": method},
        "sample": {"max_tokens": 8},
        "train": {"steps": 50, "lr": 1e-4, "weight_decay": 0.0},
        "plan": {"precision": "fp32", "threads": 1},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.parametrize("method", ["mixed", "pcgrad"])
def test_reinforcement_learning(method: str, flatout: Call, tmp_path: Path) -> None:
    """Each rank samples its prompts from gathered weights; dot products of gradients are summed over shards."""
    settings = rl_config(tmp_path, method=method)
    alone = flatout("train", settings, "--run", tmp_path / "one")
    assert alone.returncode == 0, alone.stderr
    two_ranks("train", settings, SHARDED, "--run", tmp_path / "two", cwd=tmp_path)
    same(tmp_path / "one", tmp_path / "two", steps=50, norm=1e-2)


def test_saved_on_two_resumed_on_one_and_back(flatout: Call, config: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert flatout("train", config, "train.steps=12", "--run", whole).returncode == 0
    steps = [(config, f"train.steps={n}", "train.schedule=constant", "--run", run) for n in (4, 8, 12)]
    assert flatout("train", config, "train.steps=12", "train.schedule=constant", "--run", whole / "c").returncode == 0
    two_ranks("train", *steps[0], SHARDED, cwd=tmp_path)
    alone = flatout("train", *steps[1], "--resume")
    assert alone.returncode == 0, alone.stderr
    two_ranks("train", *steps[2], SHARDED, "--resume", cwd=tmp_path)
    same(whole / "c", run, steps=12)
    assert [e["step"] for e in events(run, "resume")] == [4, 8]
    # Export gathers.
    done = flatout("export", run, "--to", tmp_path / "exported")
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_sharded_is_refused(flatout: Call, config: Path, sft: Path, tmp_path: Path) -> None:
    alone = flatout("train", config, SHARDED, "--run", tmp_path / "run")
    assert alone.returncode == 2
    assert "does not work with one rank" in alone.stderr
