"""Published sets are read as distributed. Small files of each kind, and the real ones where they are available."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import UsageError
from flatout.tasks import open_task
from flatout.tasks.published import Item, Published

SIZES = {
    "math500:math500": 500,
    "cruxeval:cruxeval": 800,
    "arc-agi:arc_agi": 419,
    "arc-agi:arc_agi/training.json": 416,
    "bbh:bbh": 6511,
    "wikitablequestions:wikitablequestions": 4344,
    "tatqa:tatqa": 1663,
    "tatqa:tatqa/tatqa_dataset_dev.json": 1668,
    "scibench:scibench": 580,
}


def opened(spec: str) -> Published:
    task = open_task(spec)
    assert isinstance(task, Published)
    return task


def written(item: Item) -> str:
    """The right answer as a model would write it."""
    gold = item.gold
    if item.verifier == "number":
        gold = gold["value"]
    elif item.verifier == "grid":
        gold = "\n".join(" ".join(map(str, line)) for line in gold)
    elif item.verifier == "table" and isinstance(gold, list):
        gold = "|".join(map(str, gold))
    return f"<answer>{gold}</answer>"


@pytest.mark.parametrize("spec", SIZES)
def test_the_real_files_are_read_whole_and_their_own_answers_are_right(real_data: Path, spec: str) -> None:
    name, _, path = spec.partition(":")
    task = opened(f"{name}:{real_data / path}")
    assert task.size == SIZES[spec]
    step = max(1, task.size // 300)
    for i in range(0, task.size, step):
        assert task.reward(i, written(task.items[i])) == 1.0, task.items[i]
        assert task.reward(i, "<answer>zz</answer>") == 0.0
        assert task.prompt(i)[0]["content"].strip()


def test_recorded_outputs_are_needed_to_ask_for_them(real_data: Path) -> None:
    with pytest.raises(UsageError, match=r"codeio\.jsonl\.gz:1: has no recorded input and output"):
        open_task(f"codeio:{real_data / 'codeio'}")


def _lines(path: Path, *rows: object) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))


def _math500(folder: Path) -> None:
    _lines(folder / "test.jsonl", {"problem": "1 + 1?", "answer": "2", "solution": "…"})


def _cruxeval(folder: Path) -> None:
    _lines(folder / "cruxeval.jsonl", {"code": "def f(x):\n    return (x, 'a')", "input": "1", "output": "(1, 'a')"})


def _codeio(folder: Path) -> None:
    row = {"task_description": "Doubles.", "code_sample": "def main(x): ...", "input": {"x": 2}, "output": {"y": 4}}
    (folder / "codeio.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))


def _arc(folder: Path) -> None:
    pair = {"input": [[1, 0]], "output": [[0, 1]]}
    (folder / "evaluation.json").write_text(json.dumps({"abc": {"train": [pair], "test": [pair]}}))


def _bbh(folder: Path) -> None:
    examples = [{"input": "Which? (A) x (B) y", "target": "(B)"}, {"input": "True or not", "target": "True"}]
    (folder / "task.json").write_text(json.dumps({"canary": "…", "examples": examples}))


def _wikitablequestions(folder: Path) -> None:
    lines = ["id\tutterance\tcontext\ttargetValue", "nu-0\twho won?\tcsv/203-csv/7.csv\tAnn|Bob \\p Co"]
    (folder / "pristine-unseen-tables.tsv").write_text("\n".join(lines) + "\n")
    with zipfile.ZipFile(folder / "csv_tables.zip", "w") as archive:
        archive.writestr("csv/203-csv/7.csv", '"Name","Time"\n"Ann","5\' 10\\""\n"Bob | Co","x\ny"\n')


def _tatqa(folder: Path) -> None:
    question = {"question": "Change?", "answer": -3.14, "scale": "million", "answer_type": "arithmetic"}
    row = {"table": {"table": [["", "2019"], ["Sales", "(3.1)"]]}, "paragraphs": [{"text": "Words."}]}
    (folder / "tatqa_dataset_dev.json").write_text(json.dumps([row | {"questions": [question]}]))


def _scibench(folder: Path) -> None:
    row = {"problem_text": "How fast?", "answer_number": "+9.8", "unit": "m/s"}
    (folder / "class.json").write_text(json.dumps([row]))
    (folder / "class_sol.json").write_text(json.dumps([row, row]))


@pytest.mark.parametrize(
    ("name", "make", "right", "near", "asks"),
    [
        ("math500", _math500, "\\boxed{2}", "\\boxed{3}", "1 + 1?"),
        ("cruxeval", _cruxeval, "<answer>(1, 'a')</answer>", "<answer>[1, 'a']</answer>", "What does f(1) return?"),
        ("codeio", _codeio, '<answer>{"output": {"y": 4}}</answer>', '<answer>{"y": 5}</answer>', '{"x": 2}'),
        ("arc-agi", _arc, "<answer>0 1</answer>", "<answer>1 0</answer>", "Input:\n1 0\nOutput:\n0 1"),
        ("bbh", _bbh, "<answer>B</answer>", "<answer>(A)</answer>", "letter of the right option"),
        (
            "wikitablequestions",
            _wikitablequestions,
            "<answer>bob / co|Ann</answer>",
            "<answer>Ann</answer>",
            "| Ann | 5' 10\" |",
        ),
        ("tatqa", _tatqa, "<answer>-3.14</answer>", "<answer>3.14</answer>", "Give numbers in million."),
        ("scibench", _scibench, "<answer>9.6 m/s</answer>", "<answer>9.0</answer>", "Give the number in m/s."),
    ],
)
def test_a_small_file_of_each_kind(
    tmp_path: Path, name: str, make: Callable[[Path], None], right: str, near: str, asks: str
) -> None:
    make(tmp_path)
    task = opened(f"{name}:{tmp_path}")
    assert task.size == (2 if name == "bbh" else 1)
    assert asks in task.prompt(0)[0]["content"]
    assert (task.reward(0, right), task.reward(0, near)) == (1.0, 0.0)
    assert task.answer(right) is not None


@pytest.mark.parametrize(
    ("name", "file", "content", "says"),
    [
        ("math500", "test.jsonl", '{"problem": "?"}', r"test\.jsonl:1: needs answer"),
        ("cruxeval", "cruxeval.jsonl", '{"code": "c", "input": "1", "output": "f(2)"}', "the answer must be a Python"),
        ("arc-agi", "evaluation.json", '{"a": {"train": [], "test": [{"input": [[1]]}]}}', "must be a grid"),
        ("arc-agi", "evaluation.json", "[1]", "JSON object"),
        ("bbh", "x.json", '{"examples": [1]}', "example 1: needs target"),
        ("bbh", "x.json", '{"examples": 1}', "needs examples as a list"),
        ("wikitablequestions", "pristine-unseen-tables.tsv", "a\tb", "the first line must be"),
        ("tatqa", "tatqa_dataset_dev.json", '[{"table": 1}]', "needs table as a list"),
        ("scibench", "a.json", '[{"problem_text": "?", "answer_number": "ten"}]', "the answer must be a number"),
        ("codeio", "codeio.jsonl.gz", "not gzip", "Not a gzipped file"),
    ],
)
def test_a_file_of_another_shape_is_reported(tmp_path: Path, name: str, file: str, content: str, says: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(UsageError, match=says):
        open_task(f"{name}:{tmp_path}")


def test_a_table_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    lines: list[Any] = ["id\tutterance\tcontext\ttargetValue", "nu-0\twho?\t../../secret.csv\tAnn"]
    (tmp_path / "pristine-unseen-tables.tsv").write_text("\n".join(lines))
    with pytest.raises(UsageError, match="is not the path of a table"):
        open_task(f"wikitablequestions:{tmp_path}")
    with pytest.raises(UsageError, match=r"has no pristine-unseen-tables\.tsv: name the file"):
        open_task(f"wikitablequestions:{tmp_path.parent}")
