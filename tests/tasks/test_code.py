"""Code tasks: their solutions are right, other programs are not, and files are read as they are published."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import HANG_S

from flatout.errors import EnvironmentLacks, UsageError
from flatout.tasks import Grader, open_task, sandbox
from flatout.tasks.code import LEVELS, VALID, Code, Problem, Written, as_problem, guru, program
from flatout.tasks.sandbox import client

pytestmark = pytest.mark.usefixtures("sandboxed")


@pytest.fixture(scope="module", autouse=True)
def _shared() -> Iterator[None]:
    yield
    if client._shared is not None:
        client._shared.close()
        client._shared = None


def reward(problem: Problem, code: str) -> float:
    return problem.reward(f"```python\n{code}\n```", wall_s=HANG_S)


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("First\n```\na\n```\nthen\n```py\nb\n```\nDone.", "b\n"),
        ("<think>```python\nno\n```</think>x = 2", "x = 2"),
        ("<think>```python\nno\n```", None),
        ("```python\nx = 3", "x = 3"),
        ("x = 4", "x = 4"),
        ("", None),
        ("``````", None),
    ],
)
def test_the_program_is_the_last_block(completion: str, code: str | None) -> None:
    assert program(completion) == code


# -- generated ----------------------------------------------------------------------------------------------


def test_every_step_is_done_as_its_code_says() -> None:
    task, seen = Code(split="train"), set()
    for i in range(40):
        assert reward(task.problem(i), program(task.solution(i)) or "") == 1.0
        seen |= {step[0] for step, _ in task._made(i).steps}
    assert len(seen) == 14 + 5  # all of them have been used


def test_another_solution_or_a_constant_is_worth_nothing() -> None:
    task = Code()
    for i in range(5):
        assert task.reward(i, task.solution(i + 7)) == 0.0
        constant = task.problem(i).calls[0].value
        assert task.reward(i, f"```python\ndef f(xs): return {constant!r}\n```") == 0.0


def test_splits_share_no_function_and_questions_stay_the_same() -> None:
    held_out, train = Code(), Code(split="train")
    assert (held_out.size, train.size) == (VALID, None)
    assert not {held_out.solution(i) for i in range(VALID)} & {train.solution(i) for i in range(3 * VALID)}
    assert train.prompt(10**9) == Code(split="train").prompt(10**9)
    assert [len(held_out._made(i).steps) - 1 for i in range(LEVELS)] == [1, 2, 3, 4, 5]
    assert len(Code(level=3)._made(0).steps) == 4
    with pytest.raises(IndexError):
        held_out.prompt(VALID)


def test_solved_examples_come_before_the_question() -> None:
    plain, shown = Code(level=2), Code(level=2, shots=3)
    *examples, asked = shown.prompt(4)
    assert asked == plain.prompt(4)[-1]
    assert [one["role"] for one in examples] == ["user", "assistant"] * 3
    assert examples == shown.prompt(5)[:-1]
    assert not {one["content"] for one in examples[1::2]} & {plain.solution(i) for i in range(VALID)}


def test_hidden_tests_are_not_in_the_prompt() -> None:
    task = Code()
    asked, calls = task.prompt(0)[-1]["content"], task.problem(0).calls
    assert [str(call.args[0]) in asked for call in calls[:-1]] == [True, True] + [False] * (len(calls) - 3)


def test_the_grader_runs_programs_and_keeps_one_sandbox() -> None:
    task = open_task("code:train?level=2")
    assert isinstance(task, Code)
    with Grader("code:train?level=2&prompt=bare") as grader:
        assert grader.grade(3, task.solution(3)).reward == 1.0
        assert grader.grade(3, "```python\nimport os\nos._exit(0)\n```").reward == 0.0
        silent = grader.grade(3, "")
        assert (silent.reward, silent.answered, silent.status) == (0.0, False, "graded")
        assert grader.grade(3, task.solution(3)).reward == 1.0


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("code:test", "train or valid"),
        ("code?level=6", "from 1 to 5"),
        ("code?sise=3", "unknown"),
        ("mbpp", "a file of"),
    ],
)
def test_a_bad_spec_is_refused(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_task(spec)


def test_no_task_opens_without_a_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lacking() -> None:
        raise EnvironmentLacks("no namespaces")

    monkeypatch.setattr(sandbox, "check", lacking)
    (tmp_path / "rows.jsonl").write_text("{}")
    for spec in ("code", f"mbpp:{tmp_path}/rows.jsonl", f"humaneval:{tmp_path}/rows.jsonl"):
        with pytest.raises(EnvironmentLacks, match="no namespaces"):
            open_task(spec)


# -- files --------------------------------------------------------------------------------------------------

MBPP = [
    {
        "text": "Add.",
        "code": "def add(a, b):\r\n    return a + b",
        "test_setup_code": "",
        "test_list": ["assert add(1, 2) == 3", "assert add([1], b=[2]) == [1, 2]"],
    },
    {
        "text": "Set.",
        "code": "def some(xs):\r\n    return list(xs)",
        "test_list": ["assert set(some((1, 2))) == {2, 1}", "assert math.isclose(some([1.5])[0], 1.5)"],
        "test_imports": ["import math"],
    },
    {
        "text": "Size.",
        "code": "import sys\ndef size(x): return sys.getsizeof(x)",
        "test_list": ["assert size(()) == sys.getsizeof(())"],
    },
    {"text": "Sum.", "code": "def sum(a, b):\r\n    return a * b", "test_list": ["assert sum(3, 4) == 12"]},
    {
        "text": "Tree.",
        "code": "class Node: pass\ndef depth(n): return 1",
        "test_setup_code": "root = Node()",
        "test_list": ["assert depth(root) == 1"],
    },
]


@pytest.fixture
def mbpp(tmp_path: Path) -> Written:
    path = tmp_path / "mbpp.jsonl"
    path.write_bytes("\r\n".join(json.dumps(row) for row in MBPP).encode())
    task = open_task(f"mbpp:{path}?shown=first")
    assert isinstance(task, Written)
    return task


def test_mbpp_is_read_and_its_solutions_are_right(mbpp: Written) -> None:
    assert mbpp.size == 4
    assert [bool(problem.tests) for problem in mbpp.problems] == [False, True, True, False]
    assert [mbpp.reward(i, mbpp.solution(i)) for i in range(4)] == [1.0] * 4
    assert [mbpp.reward(i, mbpp.solution(1 - i)) for i in range(2)] == [0.0] * 2
    assert "\r" not in mbpp.solution(0)
    assert "add(1, 2) == 3" in mbpp.prompt(0)[0]["content"]
    assert "b=[2]" not in mbpp.prompt(0)[0]["content"]


def test_a_problem_that_needs_more_of_a_program_is_left_out_by_name(mbpp: Written) -> None:
    (why,) = mbpp.left_out
    assert ":5: its tests must use one function of the program, not Node, depth" in why


HUMANEVAL = {
    "prompt": 'import math\n\n\ndef twice(x):\n    return 2 * x\n\n\ndef half(x):\n    """The half of x.\n    """\n',
    "canonical_solution": "    return x / 2\n",
    "entry_point": "half",
}


@pytest.mark.parametrize(
    "test",
    [
        "METADATA = {}\n\n\ndef check(candidate):\n    assert True, 'x'\n    assert candidate(3) == 1.5, 'y'\n",
        "def check(candidate):\n    for n in range(9):\n        assert candidate(twice(n)) == half(2 * n) == n\n",
    ],
)
def test_humaneval_is_read_and_its_solution_is_right(test: str, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps(HUMANEVAL | {"test": test}))
    task = open_task(f"humaneval:{tmp_path}")
    assert isinstance(task, Written)
    assert bool(task.problems[0].calls) == ("METADATA" in test)
    assert task.reward(0, task.solution(0)) == 1.0
    assert task.reward(0, HUMANEVAL["canonical_solution"]) == 1.0  # only the body, as a base model continues
    assert task.reward(0, "def half(x): return 2 * x") == 0.0
    # The author's helper is the author's, whatever the program makes of it.
    assert task.reward(0, "def half(x): return 0\ndef twice(x): return 0") == 0.0


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("assert f(", "not Python"),
        ("", "not none"),
        ("assert same(f(1), 2)", "not f, same"),
        ("assert f(1) == 1\nassert g(1) == 1", "not f, g"),
    ],
)
def test_tests_that_cannot_judge_are_refused(tests: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        as_problem(tests, where="row 1")


def test_arguments_in_a_dictionary_are_left_to_the_tests_themselves() -> None:
    problem = as_problem("assert f(**{'a': 1}) == 1", where="row 1")
    assert problem.tests
    assert reward(problem, "def f(a): return a") == 1.0


@pytest.mark.parametrize(
    ("spec", "size"),
    [("mbpp:{0}/mbpp/mbpp.jsonl", 971), ("mbpp:{0}/mbpp/sanitized-mbpp.json", 427), ("humaneval:{0}/humaneval", 164)],
)
def test_real_files_are_read_and_their_own_solutions_are_right(real_data: Path, spec: str, size: int) -> None:
    if not (real_data / spec.partition("/")[2].partition("/")[0]).is_dir():
        pytest.skip("not among the real data")
    task = open_task(spec.format(real_data) + ("/HumanEval.jsonl" if spec.startswith("humaneval") else ""))
    assert isinstance(task, Written)
    assert task.size == size
    assert [i for i in range(0, size, 20) if task.reward(i, task.solution(i)) != 1.0] == []


# -- GURU ---------------------------------------------------------------------------------------------------


def test_guru_inputs_and_outputs() -> None:
    problem = guru(json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["0.5\n", "0.75\n"]}), where="row 1")
    assert reward(problem, "a, b = map(int, input().split())\nprint(a / b + 1e-8)") == 1.0
    assert reward(problem, "print(0.5)") == 0.0  # one of two
    assert reward(problem, "import sys\nprint(eval(sys.stdin.read().replace(' ', '/')))") == 1.0


def test_guru_functional_tests_of_a_class() -> None:
    tests = "def check(candidate):\n    assert candidate(nums=[1, 2]) == 3\n\ncheck(Solution().total)"
    problem = guru(json.dumps({"functional": tests}), where="row 1", prefix="from typing import *")
    assert reward(problem, "class Solution:\n    def total(self, nums: List[int]): return sum(nums)") == 1.0
    assert reward(problem, "class Solution:\n    def total(self, nums: List[int]): return 0") == 0.0
    assert reward(problem, "class Solution:\n    __getattr__ = lambda self, name: lambda **k: True") == 0.0


@pytest.mark.parametrize(
    "truth",
    [
        *("", "[]", "{", "[" * 10**6, '{"pytest": "x"}', '{"inputs": [], "outputs": []}'),
        *(
            '{"inputs": ["1"], "outputs": []}',
            '{"inputs": ["1"], "outputs": [""]}',
            '{"inputs": [1], "outputs": ["1"]}',
        ),
    ],
    ids=range(9),
)
def test_other_ground_truth_is_refused(truth: str) -> None:
    with pytest.raises(UsageError, match="row 1"):
        guru(truth, where="row 1")


def test_programs_too_can_be_as_many_as_one_says() -> None:
    first, endless = open_task("code:train?size=16&shots=2"), open_task("code:train?shots=2")
    assert isinstance(first, Code)
    assert isinstance(endless, Code)
    assert (first.size, endless.size, open_task("code?size=7").size) == (16, None, 7)
    assert [first.prompt(i) for i in range(16)] == [endless.prompt(i) for i in range(16)]
    with pytest.raises(IndexError):
        first.prompt(16)
    with pytest.raises(UsageError, match="must be a number of questions"):
        open_task("code:train?size=0")
