"""A grader that cannot work is an error with its last words; only a completion that was killed is worth nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from flatout.data.tokenizer import ByteTokenizer
from flatout.errors import EnvironmentLacks, FlatoutError, RunFailed
from flatout.evaluate import evaluate
from flatout.recipes.sampling import Graders
from flatout.sample import Completion, Sampling
from flatout.tasks import Grader
from flatout.tasks.units import Units

RIGHT = f"<answer>{Units().question(0).answer:.5g}</answer>"
GRADED = '{"replies": [{"result": {"reward": 0, "answered": false}}]}'
KILLED = '{"replies": [{"killed": true}]}'

Stand = Callable[[str], None]


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Puts a shell script in the place of the Python that grades."""

    def put(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return put


class Silent:
    """A sampler whose every completion is empty."""

    window = 4096

    def generate(self, prompts: Sequence[object], *, samples: int = 1, **_: object) -> Iterator[Completion]:
        for i in range(len(prompts)):
            yield Completion(prompt=i, sample=0, ids=(), logprobs=(), status="stopped")


def measured() -> object:
    sampling = Sampling(max_tokens=8)
    [score] = evaluate(["units"], sampler=Silent(), tokenizer=ByteTokenizer(), sampling=sampling, limit=3)  # type: ignore[arg-type]
    return score


@pytest.mark.parametrize("path", [None, "", "."])
def test_nothing_is_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    for name in ("resource", "select", "sitecustomize", "yaml"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path)
    if path is not None:
        monkeypatch.setattr(sys, "path", [path, str(tmp_path), *sys.path])
    with Grader("units") as grader:
        assert grader.grade(0, RIGHT).reward == 1.0
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_a_worker_that_dies_at_its_start_is_an_error_with_its_last_words(stand: Stand) -> None:
    stand("echo 'ImportError: libstdc++ is missing' >&2; exit 3")
    with pytest.raises(RunFailed, match=r"ended with exit code 3[\s\S]*libstdc\+\+ is missing"):
        measured()
    with Graders("units", count=1) as graders, pytest.raises(RunFailed, match="is missing"):
        graders.grade(0, RIGHT).result()


def test_the_last_words_are_bounded(stand: Stand) -> None:
    stand("yes loud | head -c 3000000 >&2; echo the end >&2; exit 1")
    with Grader("units") as grader, pytest.raises(RunFailed, match="the end") as raised:
        grader.grade(0, RIGHT)
    assert len(str(raised.value)) < 4000


def test_a_worker_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with Grader("units") as grader, pytest.raises(EnvironmentLacks, match="cannot be started: No such file"):
        grader.grade(0, RIGHT)


def test_a_task_that_the_worker_cannot_open_is_told(tmp_path: Path) -> None:
    with Grader(f"gsm8k:{tmp_path / 'gone.jsonl'}") as grader, pytest.raises(FlatoutError, match="there is no file"):
        grader.grade(0, RIGHT)


def test_a_grader_that_is_killed_at_a_trivial_answer_too_is_an_error(stand: Stand) -> None:
    stand(f"echo MemoryError >&2; while read line; do echo '{KILLED}'; done")
    with pytest.raises(RunFailed, match=r"even a trivial answer[\s\S]*MemoryError"):
        measured()


@pytest.mark.parametrize(
    "reply",
    [
        "[]",
        '"done"',
        "{}",
        "no JSON",
        "[" * 5000,
        '{"replies": 1}',
        '{"replies": []}',
        '{"replies": [{}]}',
        '{"replies": [{"killed": true}, {"killed": true}]}',
        '{"replies": [{"result": 7}]}',
        '{"replies": [{"result": {"reward": "1", "answered": true}}]}',
        '{"replies": [{"result": {"reward": NaN, "answered": true}}]}',
        '{"replies": [{"result": {"reward": 1, "answered": 1}}]}',
    ],
)
def test_a_reply_that_is_not_expected_is_an_error(stand: Stand, reply: str) -> None:
    stand(f"while read line; do echo '{reply}'; done")
    with Grader("units") as grader, pytest.raises(RunFailed):
        grader.grade(0, RIGHT)


def test_a_reply_without_an_end_is_an_error(stand: Stand) -> None:
    stand("read line; yes | tr -d '\\n'")
    with Grader("units") as grader, pytest.raises(RunFailed, match="more than"):
        grader.grade(0, RIGHT)


def test_many_killed_completions_are_no_plain_accuracy(stand: Stand) -> None:
    stand(
        'while read line; do case "$line" in '
        f"*'\"op\": \"probe\"'*) echo '{GRADED}';; *) echo '{KILLED}';; esac; done"
    )
    score = measured()
    assert (score.value, score.metric) == (0.0, "accuracy, 100 % not graded")  # type: ignore[attr-defined]


def test_a_request_of_any_size_and_numbers_of_thousands_of_digits_are_fine() -> None:
    with Grader("units") as grader:
        for text in ("9" * 60_000, f"<answer>{'9' * 5000}</answer>", "\u2028\x00" * 30_000):
            assert grader.grade(0, text).status == "graded"
