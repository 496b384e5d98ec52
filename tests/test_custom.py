"""Functions of the user's own, named as MODULE:FUNCTION: objectives, tasks and rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flatout
from flatout import custom
from flatout.errors import UsageError
from flatout.record import Run
from flatout.tasks import Grader, open_task

TINY = {
    "model": {"layers": 1, "hidden": 32, "heads": 2},
    "data": {"source": "embedded", "embedded_mb": 0.1, "sequence_length": 64, "cache": "cache"},
    "train": {"batch_tokens": 256, "steps": 3},
    "plan": {"precision": "fp32", "threads": 1},
}
MINE = """
import torch

def plain(batch, head):
    return head.cross_entropy(batch.targets)

def twice(batch, head):
    loss = head.cross_entropy(batch.targets)
    return {"loss": 2 * loss, "plain": loss, "largest": head.hidden_NC.abs().max()}
twice.metrics = {"plain": "mean", "largest": "max"}

def odd(batch, head):
    return head.hidden_NC
def dead(batch, head):
    return torch.zeros(())
def wrong(batch, head):
    return head.cross_entropy(batch.targets)
wrong.metrics = {"loss": "median"}
def other(rows):
    return rows
number = 3

class Chess:
    def __init__(self, level): self.level = level
    def prompt(self, i): return f"Question {i} of level {self.level}"
    def reward(self, i, completion): return float(completion.strip() == str(i))
    def __len__(self): return 7

def chess(options):
    return Chess(int(options.get("level", 1)))

def nothing(options):
    return object()

def short(question, answer, completion):
    return max(0.0, 1 - len(completion) / 10) if answer in completion else 0.0

def far(question, answer, completion):
    return 7
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_an_objective_of_ones_own_is_trained(tmp_path: Path) -> None:
    flatout.train(TINY, run="usual")
    flatout.train(TINY, run="same", train={"objective": "mine:plain"})
    flatout.train(TINY, run="twice", train={"objective": "mine:twice"})
    usual, same, twice = (list(Run.open(name).steps()) for name in ("usual", "same", "twice"))
    assert [step.loss for step in same] == [step.loss for step in usual]
    assert twice[0].loss == pytest.approx(2 * (usual[0].loss or 0.0))
    assert twice[0].extra.metrics["plain"] == pytest.approx(usual[0].loss)
    assert twice[0].extra.metrics["largest"] > 0


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("mine", "is not MODULE:FUNCTION"),
        ("mine:missing", r"mine\.py has no function missing"),
        ("mine:number", "has no function number"),
        ("mine:other", "must take the keywords batch, head"),
        ("nowhere:loss", "nowhere cannot be imported: ModuleNotFoundError"),
        ("mine:odd", "loss is of shape"),
        ("mine:dead", "its loss has no gradient"),
        ("mine:wrong", "its metrics are"),
        ("os:system", "must take the keywords batch, head"),
    ],
)
def test_an_objective_that_cannot_be_used_is_told(objective: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        flatout.train(TINY, run="run", train={"objective": objective})


def test_an_objective_is_for_recipes_without_one() -> None:
    with pytest.raises(UsageError, match="works only with recipe pretrain or sft"):
        flatout.settings(TINY, recipe="dpo", train={"objective": "mine:plain"})


def test_a_task_of_ones_own() -> None:
    task = open_task("python:mine:chess?level=3")
    assert (task.name, task.size) == ("mine:chess", 7)
    assert task.prompt(2) == [{"role": "user", "content": "Question 2 of level 3"}]  # type: ignore[union-attr]
    with Grader("python:mine:chess") as grader:
        assert [grader.grade(2, text).reward for text in ("2", "3")] == [1.0, 0.0]
    for spec, words in {
        "python:mine:nothing": "has no prompt and no reward",
        "python:mine:chess?level=x": "ValueError: invalid literal",
        "python:mine:short": "must take the keywords options",
        "python:os:system": "must take the keywords options",
        "python:": "needs MODULE:FUNCTION",
    }.items():
        with pytest.raises(UsageError, match=words):
            open_task(spec)


def test_a_reward_of_ones_own() -> None:
    with Grader("jsonl:rows.jsonl?reward=mine:short") as grader:
        assert [grader.grade(0, text).reward for text in ("2", "it is 2", "3")] == pytest.approx([0.9, 0.3, 0.0])
    with pytest.raises(UsageError, match="must take the keywords question, answer, completion"):
        open_task("jsonl:rows.jsonl?reward=os:execl")
    with (
        pytest.raises(Exception, match="a reward of 7; it must be a number from 0 to 1"),
        Grader("jsonl:rows.jsonl?reward=mine:far") as grader,
    ):
        grader.grade(0, "2")


def test_names_are_checked_without_importing() -> None:
    assert custom.malformed("a.b:c") is None
    assert all(custom.malformed(name) for name in ("a", "a:", ":b", "a:b.c", "../a:b", "a b:c"))
