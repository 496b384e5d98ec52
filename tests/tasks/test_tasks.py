"""Each task asks what its file says and pays for the right answer only; a broken file is told by its line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.errors import UsageError
from flatout.tasks import Texts, Worked, open_task, with_prompt
from flatout.tasks.files import Gsm8k, MultipleChoice
from flatout.tasks.sums import SIZES, Sums
from flatout.tasks.units import QUANTITIES, Units


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tasks_need_no_torch() -> None:
    code = "import sys, flatout.tasks, flatout.tasks.worker; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Unit conversion


def test_held_out_questions_are_not_trained_on() -> None:
    train, valid = (
        {(q.answer, q.text) for q in map(Units(split=split).question, range(1000))} for split in ("train", "valid")
    )
    assert not train & valid
    assert len(valid) > 950  # a few conversions may be asked in the same words twice


@given(st.integers(min_value=0, max_value=999))
def test_the_right_amount_is_worth_one_and_others_nothing(i: int) -> None:
    units = Units()
    want = units.question(i).answer
    assert units.reward(i, f"so <answer>{want:.5g}</answer>") == 1.0
    assert units.reward(i, f"so <answer>{want * 1.2:.6g}</answer>") == 0.0
    assert units.reward(i, f"{want:.5g}") == 0.0  # not in tags
    for split in ("train", "valid"):
        assert Units(split=split).reward(i, Units(split=split).solution(i)) == 1.0
    assert "e" not in units.solution(i).split("<answer>")[1].split("</answer>")[0]


def test_conversions_are_those_of_the_world() -> None:
    def converts(quantity: str, u: str, v: str) -> float:
        return QUANTITIES[quantity][u] / QUANTITIES[quantity][v]

    assert converts("time", "year", "day") == pytest.approx(365.2421988)
    assert converts("mass", "pound", "ounce") == pytest.approx(16)
    assert converts("volume", "US gallon", "US cup") == pytest.approx(16)
    assert converts("length", "mile", "foot") == pytest.approx(5280)
    assert converts("speed", "knot", "kilometre per hour") == pytest.approx(1.852)
    assert converts("data", "kB", "byte") == 1000


def test_endless_questions_never_end_and_are_never_held_out() -> None:
    endless, valid = Units(split="endless"), Units()
    assert endless.size is None
    assert endless.question(10**9) == endless.question(10**9)
    asked = {endless.question(i).answer for i in range(300)}
    assert len(asked) > 100
    texts = {valid.question(i).text for i in range(1000)}
    assert not any(endless.question(i).text in texts for i in range(300))


# Sums


def test_no_sum_is_in_two_splits_and_every_worked_solution_is_right() -> None:
    splits = {name: Sums(split=name) for name in SIZES}
    asked = {name: {tuple(sorted(task.numbers(i))) for i in range(task.size)} for name, task in splits.items()}
    assert sum(map(len, asked.values())) == len(set().union(*asked.values())) == sum(SIZES.values())
    shown = splits["shown"]
    assert isinstance(shown, Worked)
    assert all(shown.reward(i, shown.solution(i)) == 1.0 for i in range(shown.size))
    assert shown.reward(0, shown.solution(1)) == 0.0
    a, b = shown.numbers(0)
    assert shown.reward(0, f"{a + b}") == 0.0  # not in tags
    assert Sums(split="valid").prompt(0)[-1]["content"].endswith("= ?")


# Prompts


def test_a_prompt_of_ones_own_replaces_words_and_examples(tmp_path: Path) -> None:
    file = tmp_path / "prompt one.yaml"
    file.write_text("system: Be brief.\nquestion: 'Q: {question}'\nexamples: [{question: one, answer: two}]\n")
    spec = with_prompt("units:train", str(file))
    task, plain = open_task(spec), open_task("units:train")
    assert not isinstance(task, Texts)
    assert not isinstance(plain, Texts)
    question = plain.prompt(3)[-1]["content"]
    said = [(message["role"], message["content"]) for message in task.prompt(3)]
    assert said == [("system", "Be brief."), ("user", "Q: one"), ("assistant", "two"), ("user", f"Q: {question}")]
    bare = open_task(with_prompt("units:train", "bare"))
    assert not isinstance(bare, Texts)
    assert bare.prompt(3) == [{"role": "user", "content": question}]
    right = f"<answer>{Units(split='train').question(3).answer:.6g}</answer>"
    assert (task.reward(3, right), task.reward(4, right), task.size, task.name) == (1.0, 0.0, 1000, "units")
    assert with_prompt("jsonl:x?grader=math", "a b.yaml") == "jsonl:x?grader=math&prompt=a%20b.yaml"
    assert with_prompt("units", None) == "units"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("system: [", "not valid YAML"),
        ("shots: 3", "may have system, examples and question"),
        ("- one", "may have system, examples and question"),
        ("system: 3", "system must be a text"),
        ("examples: [{question: one}]", "each with question and answer"),
        ("question: What?", "must contain {question}"),
    ],
)
def test_a_broken_prompt_is_told(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(says)):
        open_task(with_prompt("units", str(tmp_path / "p.yaml")))


# GSM8K


@pytest.fixture
def gsm8k(tmp_path: Path) -> Gsm8k:
    path = write(tmp_path / "g.jsonl", {"question": "Six by seven?", "answer": "6*7=<<6*7=42>>42\n#### 1,042"})
    task = open_task(f"gsm8k:{path}")
    assert isinstance(task, Gsm8k)
    return task


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("#### 1042", 1),
        ("#### $1,042.00", 1),
        ("it is \\boxed{1042}", 1),
        ("<answer>1042</answer>", 1),
        ("so there are 1,042 of them.", 1),
        ("#### 1042\nor 7", 1),
        ("1042\n#### 7", 0),
        ("#### 1041.9", 0),
        ("", 0),
    ],
)
def test_gsm8k_answers(gsm8k: Gsm8k, completion: str, reward: int) -> None:
    assert gsm8k.reward(0, completion) == reward


def test_gsm8k_asks_and_solves(gsm8k: Gsm8k) -> None:
    assert gsm8k.prompt(0)[-1] == {"role": "user", "content": "Six by seven?"}
    assert gsm8k.solution(0) == "6*7=42\n#### 1,042"


# Multiple choice


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Which?", "choices": ["no", "yes"], "answer": 1},
        {"question": "Which?", "choices": ["no", "yes"], "answer": "B"},
        {"question": "Which?", "choices": {"text": ["no", "yes"], "label": ["1", "2"]}, "answerKey": "2"},
        {
            "question": {"stem": "Which?", "choices": [{"text": "no", "label": "A"}, {"text": "yes", "label": "B"}]},
            "answerKey": "B",
        },
        {
            "instruction": "Please choose the correct answer to the question: Which?\n\nAnswer1: no Answer2: yes"
            "\n\nAnswer format: answer1/answer2",
            "answer": "answer2",
        },
    ],
)
def test_every_layout_of_a_choice_is_the_same_question(tmp_path: Path, row: object) -> None:
    task = open_task(f"choice:{write(tmp_path / 'c.jsonl', row)}")
    assert isinstance(task, MultipleChoice)
    assert task.choices(0) == ("A", "B")
    assert task.prompt(0)[0]["content"].startswith("Which?\n\nA. no\nB. yes\n\n")
    assert [task.reward(0, text) for text in ("A", "B", "(b)", "<answer>B</answer>", "AB", "")] == [0, 1, 1, 1, 0, 0]
    words = open_task(f"choice:{tmp_path / 'c.jsonl'}?form=text")
    assert isinstance(words, MultipleChoice)
    assert words.choices(0) == ("no", "yes")
    assert words.prompt(0)[0]["content"] == "Which?"
    assert [words.reward(0, text) for text in ("no", "yes", "B", "")] == [0, 1, 0, 0]


# JSON lines


def test_jsonl_graders(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {"q": "2+2?", "a": 4}, {"q": "Capital?", "a": "Paris"})
    auto = open_task(f"jsonl:{path}?question=q&answer=a&tolerance=0.05")
    assert not isinstance(auto, Texts)
    assert [auto.reward(0, text) for text in ("<answer>4.1</answer>", "4", "<answer>4.3</answer>")] == [1, 1, 0]
    assert [auto.reward(1, text) for text in ("<answer>paris</answer>", "Well.\nParis.", "London")] == [1, 1, 0]
    exact = open_task(f"jsonl:{path}?question=q&answer=a&grader=exact")
    assert not isinstance(exact, Texts)
    assert [exact.reward(0, text) for text in ("<answer>4</answer>", "<answer>4.0</answer>")] == [1, 0]


# Mistakes


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("unit", "did you mean units?"),
        ("sudoku", "the known tasks are units, sums, math, logic"),
        ("units:test", "train, valid or endless"),
        ("units?shots=2", "it takes prompt"),
        ("gsm8k", "gsm8k:PATH"),
        ("gsm8k:nowhere.jsonl", "there is no file nowhere.jsonl"),
        ("jsonl:{good}?grader=eval", "one of auto, exact, number, math"),
        ("jsonl:{good}?tolerance=2", "from 0 to below 1"),
        ("jsonl:{good}?tolerence=2", "it takes question, answer, grader, tolerance"),
        ("jsonl:{good}?grader=number", "good.jsonl:2: the answer 'x' is not a number"),
        ("jsonl:{good}?question=nothing", "good.jsonl:1: needs nothing"),
        ("gsm8k:{good}", "good.jsonl:1: the answer does not end with ####"),
        ("choice:{good}", "good.jsonl:1: 0 options"),
        ("choice:{good}?form=roman", "form=roman: must be letters or text"),
        ("jsonl:{torn}", "torn.jsonl is not JSON lines or a JSON list"),
        ("jsonl:{list}", "list.json, entry 1: is a int"),
        ("jsonl:{empty}", "has no questions"),
        ("perplexity:{empty}", "has no"),
        ("mmlu-stem:{folder}", "no test.jsonl or test.json"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path: Path, spec: str, says: str) -> None:
    write(tmp_path / "good.jsonl", {"question": "1?", "answer": "1"}, {"question": "x?", "answer": "x"})
    (tmp_path / "torn.jsonl").write_text('{"question": "1?", "ans')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "empty.jsonl").write_text("")
    paths = {
        "good": tmp_path / "good.jsonl",
        "torn": tmp_path / "torn.jsonl",
        "list": tmp_path / "list.json",
        "empty": tmp_path / "empty.jsonl",
        "folder": tmp_path,
    }
    with pytest.raises(UsageError, match=re.escape(says)):
        open_task(spec.format(**paths))


# Real files, for those who have them


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("gsm8k:{0}/gsm8k", 1319),
        ("mmlu-stem:{0}/mmlu_stem", 3018),
        ("arc-challenge:{0}/arc_challenge", 1172),
        ("jsonl:{0}/math500?question=problem&grader=math", 500),
    ],
)
def test_real_files_are_read_and_their_own_answers_are_right(real_data: Path, spec: str, size: int) -> None:
    task = open_task(spec.format(real_data))
    assert not isinstance(task, Texts)
    assert task.size == size
    for i in range(0, size, 50):
        if isinstance(task, Gsm8k):
            assert task.reward(i, task.solution(i)) == 1.0
        elif isinstance(task, MultipleChoice):
            assert sum(task.reward(i, letter) for letter in task.choices(i)) == 1.0
        else:
            assert task.reward(i, f"\\boxed{{{task.gold(i)}}}") == 1.0  # type: ignore[attr-defined]
