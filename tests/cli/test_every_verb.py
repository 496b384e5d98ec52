"""Every verb of the command, once for real and with each number of arguments that its help promises.

What the verbs do is tested elsewhere. Here each must reach its end, because a name that is missing at run time, or an
option that one path does not pass on, shows only there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from tests import warm
from tests.recipes.conftest import CONFIG

from flatout.cli import app

TINY = CONFIG | {
    "model": {"layers": 1, "hidden": 16, "heads": 2},
    "train": {"batch_tokens": 128, "steps": 4, "lr": 3e-3, "warmup_steps": 1},
    "eval": {"every": 2, "tokens": 256},
}
# Its own teacher, which learns the form of an answer first.
SAMPLED = {
    "recipe": "rft",
    "model": {"layers": 1, "hidden": 16, "heads": 2},
    "data": {"tokenizer": "byte", "sequence_length": 512},
    "rft": {
        **{"task": "sums:train", "valid": "sums", "teach": "sums:train", "teach_steps": 1},
        **{"questions": 2, "valid_questions": 2, "oversample": 1},
    },
    "sample": {"max_tokens": 2},
    "train": {"batch_tokens": 512, "steps": 1, "lr": 1e-3, "warmup_steps": 0},
    "plan": {"precision": "fp32", "threads": 1},
}
ROWS = {
    "recipe": "sft",
    "model": {"layers": 1, "hidden": 16, "heads": 2},
    "data": {"source": "jsonl", "path": "rows.jsonl", "tokenizer": "byte", "sequence_length": 128, "valid_share": 0.25},
    "train": {"batch_tokens": 128, "steps": 1, "lr": 1e-3},
}
LOG = "step 1 loss 4.0 tokens/s 1000\nstep 2 loss 3.9 tokens/s 1000\nstep 3 loss 3.8 tokens/s 1000\n"

LINES = [
    ["examples"],
    ["examples", "pretrain-demo"],
    ["hardware"],
    ["plan", "tiny.yaml"],
    ["plan", "tiny.yaml", "train.lr=1e-3", "train.steps=3", "--on", "T4"],
    ["config", "schema"],
    ["config", "show", "tiny.yaml"],
    ["config", "show", "tiny.yaml", "train.lr=1e-3", "train.steps=3"],
    ["config", "validate", "tiny.yaml", "train.lr=1e-3"],
    ["data", "show", "rows.yaml"],
    ["data", "show", "rows.yaml", "data.sequence_length=64", "seed=1", "-n", "1"],
    ["data", "prepare", "notes.txt", "--to", "shards"],
    ["train", "tiny.yaml", "train.steps=2", "--run", "again"],
    ["train", "tiny.yaml", "--dry-run"],
    # Jobs that really start are in tests/test_launch.py, and two side by side in tests/test_launch_several.py.
    *(["launch", "tiny.yaml", "--on", on, "--dry-run"] for on in ("local", "torchrun", "slurm")),
    *(
        ["launch", "tiny.yaml", "faster.yaml", "seed=1", "--on", on, "--dry-run"]
        for on in ("local", "torchrun", "slurm")
    ),
    ["sample", "sampled.yaml", "--run", "samples"],
    ["export", "A", "--to", "model"],
    ["eval", "A", "--tasks", "sums", "--limit", "1", "--max-tokens", "1"],
    ["chat", "A", "--max-tokens", "1"],
    ["generate", "A", "one", "--max-tokens", "1"],
    ["generate", "A", "one", "two", "--max-tokens", "1"],
    ["doctor", "A"],
    ["doctor", "--log", "log.txt"],
    pytest.param(["doctor", "--steps", "3", "--", "python", "-c", "print()"], marks=pytest.mark.long),
    ["compare", "A", "B"],
    ["compare", "A", "B", "C"],
    ["report", "A"],
    ["report", "A", "B", "C", "-o", "all.html"],
    ["watch", "--once"],
    ["watch", "A", "--once"],
    ["watch", "A", "B", "C", "--once"],
    ["runs"],
    ["runs", "."],
    pytest.param(["tune", "tiny.yaml", "--trials", "2", "--run", "tuned"], marks=pytest.mark.long),
    pytest.param(
        ["ablate", "tiny.yaml", "--only", "data loader", "--blocks", "1", "--run", "ablated"], marks=pytest.mark.long
    ),
    pytest.param(["demo", "--quick", "--run", "demo"], marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With configurations, documents, a log, and three runs."""
    path = tmp_path_factory.mktemp("verbs")
    (path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (path / "faster.yaml").write_text(yaml.safe_dump(TINY | {"train": TINY["train"] | {"lr": 1e-2}}))  # type: ignore[operator]
    (path / "sampled.yaml").write_text(yaml.safe_dump(SAMPLED))
    (path / "rows.yaml").write_text(yaml.safe_dump(ROWS))
    (path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n' * 4)
    (path / "notes.txt").write_text("<|endoftext|>".join(f"{word} " * 50 for word in ("one", "two", "three")))
    (path / "log.txt").write_text(LOG)
    (path / "runs").mkdir()
    for name, lr in (("A", 1e-3), ("B", 2e-3), ("C", 3e-3)):
        done = warm.flatout("train", "tiny.yaml", f"train.lr={lr}", "--run", name, cwd=path)
        assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_verb_reaches_its_end(folder: Path, line: list[str]) -> None:
    done = warm.flatout(*line, cwd=folder)
    # A model that was hardly trained answers nothing.
    wanted = (4, "0 of 2 questions solved") if line[0] == "sample" else (0, "")
    assert done.returncode == wanted[0], done.stdout + done.stderr
    assert wanted[1] in done.stdout
    assert "Traceback" not in done.stderr


def _verbs(group: typer.Typer, *, under: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield (*under, command.name or command.callback.__name__)
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        assert inner.name is not None
        yield from _verbs(inner.typer_instance, under=(*under, inner.name))


def test_no_verb_is_left_out() -> None:
    lines = [line if isinstance(line, list) else line.values[0] for line in LINES]
    assert [verb for verb in _verbs(app) if not any(tuple(line[: len(verb)]) == verb for line in lines)] == []
