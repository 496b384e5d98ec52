"""Files of questions and prompts that are damaged, hostile or no files: one sentence each, at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.errors import UsageError
from flatout.tasks import open_task

LONG = "9" * 5000
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE = "a: &a {k: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 10)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_what_is_no_file_is_told_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    takes = ["gsm8k:{}", "jsonl:{}", "choice:{}", "perplexity:{}", "units?prompt={}"]
    takes += ["guru:{}", "math500:{}", "arc-agi:{}", "wikitablequestions:{}"]
    specs = [spec.format(path) for spec in takes for path in (tmp_path / "pipe", "/dev/zero", tmp_path)]
    # In a process of its own: nothing in here could interrupt a read that waits.
    code = (
        "import sys\nfrom flatout.errors import UsageError\nfrom flatout.tasks import open_task\n"
        "for spec in sys.argv[1:]:\n    try: open_task(spec)\n    except UsageError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *specs], capture_output=True, text=True, timeout=120, check=True)
    said = done.stdout.splitlines()
    assert len(said) == len(specs)
    assert all(spec.partition(":" if ":" in spec else "=")[2] in line for spec, line in zip(specs, said, strict=True))


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"question":' * 100_000,
        f'{{"question": {LONG}, "answer": 1}}',
        '{"question": "\\ud800", "answer": "1"}',
        '{"question": ["?"], "answer": "1"}',
        '{"question": "?", "answer": {"a": 1}}',
        '"text"',
        "7",
    ],
)
def test_a_line_that_is_no_question_is_told(tmp_path: Path, line: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=r"q\.jsonl") as raised:
        open_task(f"jsonl:{path}")
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "choices",
    [
        {"text": 5, "label": ["A"]},
        {"text": "abc", "label": "abc"},
        {"text": ["a", "b"], "label": 3},
        {"text": ["a", None], "label": ["A", "B"]},
        ["a", ["b"]],
        ["a", {"text": "b"}],
        [{"text": ["a"]}, {"text": "b"}],
        ["a", "\ud800"],
        "ab",
        7,
        None,
    ],
)
def test_choices_of_a_wrong_kind_are_told(tmp_path: Path, choices: object) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"question": "Which?", "choices": choices, "answer": 0}) + "\n")
    with pytest.raises(UsageError, match=r"c\.jsonl"):
        open_task(f"choice:{path}")


@pytest.mark.parametrize(
    "text",
    [
        BOMB + "examples: [{question: *i, answer: x}]\n",
        MERGE + "examples: [{question: *i, answer: x}]\n",
        "question: &q [*q]\n",
        "system: " + "[" * 5_000,
        f"system: {LONG}",
        "system: 2024-13-45",
        "system: !!python/object:os.system x",
        "examples: [{question: [1], answer: {a: b}}]",
        "examples: 7",
        "? [a]\n: b",
    ],
)
def test_a_prompt_file_that_is_none_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompt.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"prompt\.yaml") as raised:
        open_task(f"units?prompt={path}")
    assert len(str(raised.value)) < 500


def test_a_home_of_nobody_is_told() -> None:
    with pytest.raises(UsageError, match="unknown user"):
        open_task("jsonl:~no-such-user-here/q.jsonl")
