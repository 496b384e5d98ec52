"""Grading processes answer, are killed when they take too long, and forget what a completion did to them."""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import HANG_S

from flatout.errors import RunFailed
from flatout.files import own_environment
from flatout.tasks import grade, worker
from flatout.tasks.grader import Grader
from flatout.tasks.units import Units
from flatout.tasks.workers import KILLED, Worker


def test_rewards_from_a_worker_are_those_of_the_task() -> None:
    units = Units()
    right = f"<answer>{units.question(3).answer:.4g}</answer>"
    with Grader("units", timeout_s=HANG_S) as grader:
        assert grader.grade(3, right).reward == units.reward(3, right) == 1.0
        wrong = grader.grade(3, "<answer>-1</answer>")
        assert (wrong.reward, wrong.answered) == (0.0, True)
        silent = grader.grade(3, "no idea")
        assert (silent.reward, silent.answered, silent.status) == (0.0, False, "graded")


@pytest.mark.parametrize(
    "text",
    ["9**9**9", "{" * 2_000_000, "NaN", "１２", "\x00\ud800", "<answer>" * 100_000, "\n" * 100_000, '{"reward": 1}\n'],
)
def test_hostile_completions_are_worth_nothing(text: str) -> None:
    with Grader("units", timeout_s=HANG_S) as grader:
        for dressed in (text, f"<answer>{text}</answer>"):
            assert grader.grade(0, dressed).reward == 0.0


def test_threads_share_a_worker() -> None:
    units = Units()
    with Grader("units", timeout_s=HANG_S) as grader, ThreadPoolExecutor(4) as threads:
        graded = threads.map(lambda i: grader.grade(i, f"<answer>{units.question(i).answer:.4g}</answer>"), range(40))
        assert [g.reward for g in graded] == [1.0] * 40


def _hang(*_: object) -> None:
    time.sleep(3600)


def _poison(*_: object) -> str:
    grade.tagged = lambda text: "poisoned"  # type: ignore[assignment]
    return "done"


def _look(*_: object) -> str | None:
    return grade.tagged("<answer>7</answer>")


def test_a_child_that_hangs_or_dies_is_gone_and_the_next_is_untouched() -> None:
    def fork(work: object, timeout_s: float = HANG_S) -> dict[str, Any]:
        (reply,) = worker._forked(work, [[]], timeout_s=timeout_s, together=1)  # type: ignore[arg-type]
        return reply

    assert fork(_hang, timeout_s=0.3) == {"killed": True}
    assert fork(lambda: os._exit(1)) == {"killed": True}
    assert fork(lambda: 1 / 0) == {"killed": True}
    assert fork(_poison) == {"result": "done"}
    assert fork(_look) == {"result": "7"}


def test_a_child_goes_on_where_another_was_killed() -> None:
    def work(number: int, pids: str) -> int:
        with open(pids, "a") as file:
            file.write(f"{os.getpid()}\n")
        if number in (2, 3, 5):
            os._exit(0)
        return number

    def forked(together: int, path: Path) -> tuple[list[Any], int]:
        many = [[number, str(path)] for number in range(8)]
        found = worker._forked(work, many, timeout_s=HANG_S, together=together)
        return [one.get("result") for one in found], len(set(path.read_text().split()))

    with tempfile.TemporaryDirectory() as folder:
        expected = [0, 1, None, None, 4, None, 6, 7]
        assert forked(8, Path(folder, "together")) == (expected, 4)
        assert forked(1, Path(folder, "apart")) == (expected, 8)


def test_programs_and_computer_algebra_get_a_child_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grade, "has_maths", lambda: True)
    assert worker._apart("math:train")
    assert not worker._apart("logic:train")
    monkeypatch.setattr(grade, "has_maths", lambda: False)
    assert not worker._apart("math:train")


def test_many_completions_in_one_request_are_graded_like_one() -> None:
    units = Units()
    texts = [f"<answer>{units.question(i).answer:.4g}</answer>" if i % 2 else "\ud800{" * i for i in range(20)]
    with Grader("units", timeout_s=HANG_S) as grader:
        assert grader.grade_each(list(enumerate(texts))) == [grader.grade(i, text) for i, text in enumerate(texts)]


def test_a_worker_that_was_killed_is_replaced() -> None:
    with Grader("units", timeout_s=HANG_S) as grader:
        grader.grade(0, "x")
        process = grader._worker._process
        assert process is not None
        process.kill()
        process.wait()
        assert grader.grade(0, "x").status == "graded"


def test_a_spec_that_is_none_is_said() -> None:
    with Worker() as one, pytest.raises(RunFailed, match="did you mean units"):
        one.call("reward", "unitz", 0, "")


def test_a_worker_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert "WANDB_API_KEY" not in own_environment()


def test_closing_leaves_no_process() -> None:
    grader = Grader("units", timeout_s=HANG_S)
    grader.grade(0, "x")
    process = grader._worker._process
    assert process is not None
    grader.close()
    assert not Path(f"/proc/{process.pid}").exists()


def test_mathematics_is_compared_in_a_worker() -> None:
    pytest.importorskip("math_verify")
    assert grade.same_maths("\\frac{2}{4}x", "\\frac{x}{2}")
    assert not grade.same_maths("x^2", "x^3")
    with Worker(timeout_s=1.0) as one:
        assert one.call("maths", "9**9**9**9**9", "x") in (False, KILLED)
        one.timeout_s = HANG_S
        assert one.call("maths", "2x", "x+x") is True
