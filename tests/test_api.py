"""The Python API: every block of docs/python.md runs, the names are typed from outside, and mistakes are told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flatout
from flatout.errors import UsageError

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
TINY = {
    "model": {"layers": 1, "hidden": 32, "heads": 2},
    "data": {"source": "embedded", "embedded_mb": 0.1, "sequence_length": 64},
    "train": {"batch_tokens": 256, "steps": 3},
}


def test_the_names_are_listed() -> None:
    assert dir(flatout) == sorted(flatout.__all__)
    assert all(getattr(flatout, name) is not None for name in dir(flatout))


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_of_the_page_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/python.md", "exec"), {})  # noqa: S102


def test_the_page_has_a_block_for_every_function() -> None:
    text = "\n".join(BLOCKS) + (ROOT / "docs" / "python.md").read_text()
    for name in flatout.__all__:
        assert name == "__version__" or f"flatout.{name}(" in text or f"flatout.{name}." in text, name


def test_importing_needs_no_torch() -> None:
    code = "import flatout, sys; flatout.settings; flatout.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_overrides_and_mistakes(tmp_path: Path) -> None:
    found = flatout.settings(TINY, seed=5, train={"lr": 1e-4})
    assert (found.seed, found.train.lr, found.train.steps) == (5, 1e-4, 3)
    assert flatout.settings(found, train={"steps": 9}).train.steps == 9
    assert TINY["train"] == {"batch_tokens": 256, "steps": 3}, "the mapping given is not changed"
    import yaml

    (tmp_path / "c.yaml").write_text(yaml.safe_dump(TINY))
    of_file = flatout.settings(
        tmp_path / "c.yaml", train={"clip": None}, data={"separator": "yes"}, plan={"tf32": True}
    )
    assert (of_file.train.clip, of_file.data.separator, of_file.plan.tf32) == (None, "yes", True)
    with pytest.raises(UsageError, match=r"train\.lrr: unknown key; did you mean train\.lr"):
        flatout.settings(TINY, train={"lrr": 1})
    with pytest.raises(UsageError, match="no run folder"):
        flatout.train(TINY)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(UsageError, match="is not empty"):
        flatout.train(TINY, run=tmp_path / "full")
    with pytest.raises(UsageError, match="do not fit"):
        flatout.linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 6), torch.zeros(3, dtype=torch.long))
    with pytest.raises(UsageError, match="does not fit a sequence"):
        flatout.pack([9], capacity=8)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flatout.nothing  # type: ignore[attr-defined]


OUTSIDE = """
import torch
import flatout
from flatout.plan import Plan

plan: Plan = flatout.plan({}, on="A100-80GB")
loss: torch.Tensor = flatout.linear_cross_entropy(torch.zeros(1), torch.zeros(1), torch.zeros(1), reduction="sum")
bins: list[list[int]] = flatout.pack([1], capacity=2)
changed: tuple[str, ...] = flatout.accelerate(torch.nn.Linear(1, 1)).changed
with flatout.Meter("runs/mine", torch.nn.Linear(1, 1)) as meter:
    meter.step(tokens=1, loss=loss)
callback: flatout.hf.Callback = flatout.hf.Callback("runs/mine")
reveal_type(flatout.train("c.yaml").steps)
"""


@pytest.mark.long
def test_the_names_are_typed_from_outside(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(OUTSIDE)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "outside.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Revealed type is "int"' in done.stdout or "builtins.int" in done.stdout
