"""Generated questions: the same in every process, never in two splits, right solutions, harder by level."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from flatout.config.tasks import TAKES, held_out
from flatout.errors import UsageError
from flatout.tasks import Grader, Levelled, Texts, Worked, open_task
from flatout.tasks.domains import DOMAINS, LEVELS, Generated

FINGERPRINT = (
    "import hashlib\nfrom flatout.tasks.domains import DOMAINS, Generated\nfound = hashlib.sha256()\n"
    "for name in DOMAINS:\n    for split in ('train', 'valid'):\n        task = Generated(name=name, split=split)\n"
    "        for i in range(60):\n            found.update(f'{task.question(i).text}{task.solution(i)}'.encode())\n"
    "print(found.hexdigest())\n"
)


def test_an_index_means_the_same_question_in_every_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "12345")
    }
    # Written down, so that another version of Python or of the generators that asks something else is noticed.
    assert found == {"c2d822a5ef02ca2587e34a4987a56a528c73892b939c0265f0e52557dcb47da7\n"}


@pytest.mark.parametrize("name", DOMAINS)
def test_the_worked_solution_is_right_and_another_answer_is_not(name: str) -> None:
    for split, count in (("train", 300), ("valid", 200)):
        task = Generated(name=name, split=split)
        assert isinstance(task, Worked)
        for i in range(count):
            assert task.reward(i, task.solution(i)) == 1.0, task.question(i)
            assert task.answer(task.solution(i)) is not None
            for wrong in (
                "<answer>zz</answer>",
                "",
                f"{task.question(i).text}",
                "<answer></answer>",
                "<answer>-987654321</answer>",
            ):
                assert task.reward(i, wrong) == 0.0, (wrong, task.question(i))


@pytest.mark.parametrize("name", DOMAINS)
def test_the_solution_of_another_question_is_rarely_right(name: str) -> None:
    """Yes or no, a letter and a short number are the same for many questions; most are not."""
    task = Generated(name=name, split="train")
    right = sum(task.reward(i, task.solution(i + 5)) == 1.0 for i in range(300))
    assert right < 100


@pytest.mark.parametrize("level", [None, *range(1, LEVELS + 1)])
@pytest.mark.parametrize("name", DOMAINS)
def test_no_question_is_in_both_splits(name: str, level: int | None) -> None:
    train, valid = (Generated(name=name, split=split, level=level) for split in ("train", "valid"))
    assert train.size is None
    held = [" ".join(sorted(valid.question(i).text.split())) for i in range(valid.size or 0)]
    assert len(set(held)) == len(held) == 200
    assert not {" ".join(sorted(train.question(i).text.split())) for i in range(300)} & set(held)


@pytest.mark.parametrize("name", DOMAINS)
def test_levels_get_longer_and_an_index_has_one(name: str) -> None:
    lengths = []
    for level in range(1, LEVELS + 1):
        task = Generated(name=name, split="train", level=level)
        asked = [task.question(i) for i in range(200)]
        lengths.append(sum(len(made.text) + len(made.solution) for made in asked))
        assert len({made.text for made in asked}) > 150
        if level == 1:  # short enough for a tiny model that is trained from scratch
            assert max(len(made.text) for made in asked) <= 100
            assert max(len(made.solution) for made in asked) <= 45
    assert lengths == sorted(lengths)
    mixed = Generated(name=name, split="train")
    assert isinstance(mixed, Levelled)
    assert [mixed.difficulty(i) for i in range(6)] == [1, 2, 3, 4, 5, 1]
    assert Generated(name=name, level=3).difficulty(0) == 3


def test_questions_never_end() -> None:
    task = Generated(name="math", split="train")
    assert task.question(10**12) == task.question(10**12)
    with pytest.raises(IndexError):
        Generated(name="math").question(200)
    short, held = (open_task(f"math{split}?size=3") for split in (":train", ""))
    assert (short.size, held.size, open_task("math?size=999").size) == (3, 3, 200)
    assert short.prompt(2) == task.prompt(2)  # type: ignore[union-attr]


def test_partial_credit_is_the_share_of_right_cells() -> None:
    task = Generated(name="logic", split="train", level=4)
    i = next(i for i in range(50) if task.question(i).verifier == "zebra")
    rows = [list(row) for row in task.question(i).gold["rows"]]
    rows[0][0], rows[1][0] = rows[1][0], rows[0][0]
    assert task.reward(i, f"<answer>{rows}</answer>") == pytest.approx(4 / 6)


def test_only_mathematics_and_tables_accept_a_box() -> None:
    for name in DOMAINS:
        task = Generated(name=name, level=1)
        boxed = task.solution(0).replace("<answer>", "\\boxed{").replace("</answer>", "}")
        assert task.reward(0, boxed) == float(name in ("math", "table"))


@pytest.mark.parametrize("name", DOMAINS)
def test_a_domain_is_opened_by_its_spec_and_graded_in_a_worker(name: str) -> None:
    assert name in TAKES
    task = open_task(f"{name}:train?level=2")
    assert not isinstance(task, Texts)
    assert held_out(f"{name}:train?level=2") == f"{name}?level=2"
    assert held_out(name) is None
    bare = open_task(f"{name}?prompt=bare")
    assert not isinstance(bare, Texts)
    assert len(bare.prompt(0)) == 1
    assert isinstance(bare, Levelled)
    assert isinstance(task, Worked)
    with Grader(f"{name}:train?level=2", timeout_s=60) as grader:
        assert grader.grade(7, task.solution(7)).reward == 1.0
        assert grader.grade(7, "<answer>zz</answer>").reward == 0.0


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("math:test", "the split must be train or valid"),
        ("logic?level=6", "level=6: must be a whole number from 1 to 5"),
        ("stem?level=", "level=: must be a whole number"),
        ("table?size=0", "size=0: must be a number of questions"),
        ("table?sizes=3", "option 'sizes' is unknown; it takes level, size, shots, prompt"),
        ("table?shots=17", "shots=17: must be a number of examples from 0 to 16"),
    ],
)
def test_mistakes_in_a_spec_are_reported(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_task(spec)


def test_held_out_questions_are_an_eighth() -> None:
    """The rule that splits them, written a second time."""
    task = Generated(name="stem", split="train", level=5)
    for i in range(50):
        words = " ".join(sorted(task.question(i).text.split()))
        assert hashlib.sha256(words.encode()).digest()[0] % 8 != 0


@pytest.mark.parametrize("name", DOMAINS)
def test_solved_examples_come_before_the_question(name: str) -> None:
    plain, shown = open_task(f"{name}?level=2"), open_task(f"{name}?level=2&shots=5")
    assert shown.prompt(7)[0] == plain.prompt(7)[0]
    assert shown.prompt(7)[-1] == plain.prompt(7)[-1]
    examples = shown.prompt(7)[1:-1]
    assert [one["role"] for one in examples] == ["user", "assistant"] * 5
    assert examples == shown.prompt(9)[1:-1], "the sampler reads what prompts have in common once"
    held_out = {plain.prompt(i)[-1]["content"] for i in range(200)}
    asked = {one["content"] for one in examples[::2]}
    assert len(asked) == 5
    assert not asked & held_out
    assert all(shown.answer(one["content"]) is not None for one in examples[1::2])
    levels = [len(open_task(f"{name}?shots=1").prompt(i)) for i in range(5)]
    assert levels == [len(plain.prompt(0)) + 2] * 5
