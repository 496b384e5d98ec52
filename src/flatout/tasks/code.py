"""Programs: generated problems, MBPP and HumanEval from files, and the code problems of GURU.

A completion's program runs in the sandbox. A problem's tests either are calls with the values they must return, which
are compared here, or are code, which runs in a sandbox apart from the program. All of them must pass.
"""

from __future__ import annotations

import ast
import builtins
import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from flatout.errors import UsageError
from flatout.tasks import grade, sandbox
from flatout.tasks.base import Messages, assistant, user
from flatout.tasks.files import Row, read_rows, test_file
from flatout.tasks.language import in_part
from flatout.tasks.prompts import shots_of, size_of
from flatout.tasks.sandbox import Call

# For all tests of a completion. The process that grades it may take a little longer.
WALL_S, TIMEOUT_S = 10.0, 15.0
FORM = "Answer with the whole function in a ```python block."


def program(completion: str) -> str | None:
    """The last fenced block after the thinking, or all of the text after it; None if there is no text."""
    parts = (text := grade.after_thought(grade.tail(completion))).split("```")
    block = parts[len(parts) // 2 * 2 - 1].partition("\n")[2] if len(parts) > 1 else text
    return block if block.strip() else None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a program must do. `before` is the author's code that it continues; `tests` is code if they are no calls."""

    name: str
    before: str = ""
    calls: Sequence[Call] = ()
    tests: str = ""
    outputs: Sequence[tuple[str, str]] = ()  # what is typed, and what must be printed

    def reward(self, completion: str, *, wall_s: float = WALL_S) -> float:
        if (code := program(completion)) is None:
            return 0.0
        end, box, code = time.monotonic() + wall_s, sandbox.shared(), self.before + code
        try:
            if self.outputs:
                pairs = self.outputs
                return float(all(sandbox.same_output(box.output(code, typed, end=end), out) for typed, out in pairs))
            if self.tests:
                return float(box.passes(code, self.name, self.tests, before=self.before, end=end))
            return float(box.returns(code, self.name, self.calls, end=end))
        except sandbox.Stopped:
            return 0.0


class SeveralNames(UsageError):
    """Tests that need more of a program than one function; with two, one could vouch for the other."""


class _Task:
    """What all tasks with programs share."""

    timeout_s = TIMEOUT_S

    def problem(self, i: int) -> Problem:
        raise NotImplementedError

    def choices(self, i: int) -> None:
        return None

    def answer(self, completion: str) -> str | None:
        return program(completion)

    def reward(self, i: int, completion: str) -> float:
        return self.problem(i).reward(completion)

    def prepare(self) -> None:
        """Before the fork: every completion of a grading process uses one sandbox."""
        sandbox.prepare()


# -- tests as code ------------------------------------------------------------------------------------------


def as_problem(tests: str, *, where: str, before: str = "", name: str | None = None) -> Problem:
    """The problem of tests that assert what one function, or one class, of the program does."""
    try:
        tree, prelude = ast.parse(tests), ast.parse(before)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: its tests are not Python: {error}") from None
    bound = set(dir(builtins))
    for node in (*ast.walk(tree), *ast.walk(prelude)):
        match node:
            case ast.FunctionDef(one) | ast.ClassDef(one) | ast.arg(one) | ast.Name(one, ast.Store()):
                bound.add(one)
            case ast.alias(one, renamed):
                bound.add((renamed or one).partition(".")[0])
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    free = sorted(set(used) - bound - {name})
    modules = [one for one in free if one in sys.stdlib_module_names]
    names = [one for one in free if one not in modules] + ([name] if name else [])
    if not names and tree.body and isinstance(tree.body[-1], ast.Assert):  # it has the name of a built-in function
        names = used[-1:]
    if len(names) != 1:
        raise SeveralNames(f"{where}: its tests must use one function of the program, not {', '.join(names) or 'none'}")
    calls = _calls(tree, names[0])
    if calls is not None:
        return Problem(name=names[0], before=before, calls=calls)
    return Problem(name=names[0], before=before, tests="".join(f"import {one}\n" for one in modules) + tests)


def _calls(tree: ast.Module, name: str) -> list[Call] | None:
    """The tests as calls, if each is `assert f(literals) == literal`; also inside a function that is called with f."""
    body, passed = tree.body, name
    match tree.body:
        case [*given, ast.FunctionDef() as check, ast.Expr(ast.Call(ast.Name(called), [target], []))] if (
            called == check.name and len(check.args.args) == 1 and all(isinstance(one, ast.Assign) for one in given)
        ):
            if not (isinstance(target, ast.Name) and target.id == name):
                return None
            body, passed = check.body, check.args.args[0].arg
    calls = []
    for statement in body:
        match statement:
            case ast.Assert(ast.Constant(True)):
                pass
            case ast.Assert(ast.Compare(ast.Call(ast.Name(called), args, named), [ast.Eq()], [value])) if (
                called == passed
            ):
                try:
                    arguments = tuple(map(ast.literal_eval, args))
                    by_name = {one.arg or "**": ast.literal_eval(one.value) for one in named}
                    calls.append(Call(args=arguments, named=by_name, value=ast.literal_eval(value)))
                except (ValueError, TypeError, SyntaxError, RecursionError):
                    return None
                if "**" in by_name:
                    return None
            case _:
                return None
    return calls or None


# -- files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Written(_Task):
    """Problems of a file. Those that the sandbox cannot judge are left out."""

    name: str
    problems: Sequence[Problem]
    prompts: Sequence[str]
    solutions: Sequence[str]
    left_out: Sequence[str] = ()  # where they are, and why

    @property
    def size(self) -> int:
        return len(self.problems)

    def problem(self, i: int) -> Problem:
        return self.problems[i]

    def prompt(self, i: int) -> Messages:
        return [user(self.prompts[i])]

    def solution(self, i: int) -> str:
        return fenced(self.solutions[i])


def fenced(code: str) -> str:
    return f"```python\n{code.strip(chr(10))}\n```"


def mbpp(path: Path, *, shown: str = "all", part: str = "all", share: str = "10") -> Written:
    """MBPP in either of its files. Of the tests, all are in the prompt as usual, or only the first."""
    sandbox.check()
    if shown not in ("all", "first"):
        raise UsageError(f"shown={shown}: must be all or first")
    problems, prompts, solutions, left_out = [], [], [], []
    for row in read_rows(test_file(path)):
        tests, imports = _texts(row, "test_list"), _texts(row, "test_imports", needed=False)
        setup = str(row.value.get("test_setup_code") or "")
        try:
            problems.append(as_problem(_lines("\n".join([*imports, setup, *tests])), where=row.where))
        except SeveralNames as error:
            left_out.append(str(error))
            continue
        seen = "\n".join(tests if shown == "all" else tests[:1])
        prompts.append(f"{row.text('text', 'prompt')}\n\nThe function must pass these tests:\n{seen}\n\n{FORM}")
        solutions.append(_lines(row.text("code")))
    if not problems:
        raise UsageError(f"{path} has no problem that can be judged: {left_out[0]}")
    return _part(
        Written(name="mbpp", problems=problems, prompts=prompts, solutions=solutions, left_out=left_out), part, share
    )


def _part(task: Written, part: str, share: str) -> Written:
    """Some of the problems, as of the other tasks that are read from files."""
    chosen = in_part(task.prompts, part=part, share=share)
    if not chosen:
        raise UsageError(f"{task.name} has no problem in part {part}")
    taken = {name: [getattr(task, name)[i] for i in chosen] for name in ("problems", "prompts", "solutions")}
    return replace(task, **taken)  # type: ignore[arg-type]


def humaneval(path: Path, *, part: str = "all", share: str = "10") -> Written:
    sandbox.check()
    rows, problems, prompts, solutions = read_rows(test_file(path)), [], [], []
    for row in rows:
        begun, name = _lines(row.text("prompt")), row.text("entry_point")
        tests = f"{_lines(row.text('test'))}\n\ncheck({name})\n"
        problems.append(as_problem(tests, where=row.where, before=begun, name=name))
        prompts.append(f"Complete this function.\n\n{fenced(begun)}\n\n{FORM}")
        solutions.append(begun + _lines(row.text("canonical_solution")))
    return _part(Written(name="humaneval", problems=problems, prompts=prompts, solutions=solutions), part, share)


def _texts(row: Row, key: str, *, needed: bool = True) -> list[str]:
    value = row.value.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value) or (needed and not value):
        raise UsageError(f"{row.where}: {key} must be a list of texts")
    return value


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n")


def guru(truth: str, *, where: str, prefix: str = "") -> Problem:
    """The problem of GURU's `ground_truth`: functional tests, or inputs and outputs. Programs continue `prefix`."""
    try:
        value = json.loads(truth)
    except (ValueError, RecursionError):
        value = None
    match value:
        case {"functional": str(tests)}:
            return as_problem(_lines(tests), where=where, before=prefix + "\n" if prefix else "")
        case {"inputs": [_, *_] as typed, "outputs": [_, *_] as printed} if len(typed) == len(printed):
            if all(isinstance(text, str) for text in [*typed, *printed]) and any(text.strip() for text in printed):
                return Problem(
                    name="", before=prefix + "\n" if prefix else "", outputs=list(zip(typed, printed, strict=True))
                )
    raise UsageError(
        f"{where}: the ground truth must be JSON with functional, or with inputs and as many outputs, as texts"
    )


# -- generated problems -------------------------------------------------------------------------------------

VALID, LEVELS, SEED, HIDDEN = 500, 5, 20260301, 8
# Solved examples in prompts are the questions of `train` from this one on.
FIRST_SHOWN = 10**9


# A change of the list `xs` by a number k: in words, as code, and as it is done here.
Step = tuple[str, str, Callable[[list[int], int], Any]]
STEPS: tuple[Step, ...] = (
    ("add {k} to every number", "[x + {k} for x in xs]", lambda xs, k: [x + k for x in xs]),
    ("multiply every number by {k}", "[x * {k} for x in xs]", lambda xs, k: [x * k for x in xs]),
    ("keep the numbers above {k}", "[x for x in xs if x > {k}]", lambda xs, k: [x for x in xs if x > k]),
    ("keep the multiples of {k}", "[x for x in xs if x % {k} == 0]", lambda xs, k: [x for x in xs if x % k == 0]),
    ("replace every number above {k} by {k}", "[min(x, {k}) for x in xs]", lambda xs, k: [min(x, k) for x in xs]),
    ("keep the first {k} numbers", "xs[:{k}]", lambda xs, k: xs[:k]),
    ("remove the first {k} numbers", "xs[{k}:]", lambda xs, k: xs[k:]),
    ("keep the first number and every {k}th after it", "xs[::{k}]", lambda xs, k: xs[::k]),
    ("move the first {k} numbers to the end", "xs[{k}:] + xs[:{k}]", lambda xs, k: xs[k:] + xs[:k]),
    ("sort the numbers from small to large", "sorted(xs)", lambda xs, k: sorted(xs)),
    ("reverse the order", "xs[::-1]", lambda xs, k: xs[::-1]),
    ("of equal numbers, keep only the first", "list(dict.fromkeys(xs))", lambda xs, k: list(dict.fromkeys(xs))),
    (
        "replace every number by the sum of all numbers up to and including it",
        "[sum(xs[: i + 1]) for i in range(len(xs))]",
        lambda xs, k: list(accumulate(xs)),
    ),
    (
        "replace the numbers by the differences of neighbours, the later minus the earlier",
        "[b - a for a, b in zip(xs, xs[1:])]",
        lambda xs, k: [b - a for a, b in pairwise(xs)],
    ),
)
ENDS: tuple[Step, ...] = (
    ("return the list", "xs", lambda xs, k: xs),
    ("return the sum", "sum(xs)", lambda xs, k: sum(xs)),
    ("return how many numbers are left", "len(xs)", lambda xs, k: len(xs)),
    (
        "return the largest number, or None if there is none",
        "max(xs, default=None)",
        lambda xs, k: max(xs, default=None),
    ),
    ("return the numbers as text, joined by commas", "','.join(map(str, xs))", lambda xs, k: ",".join(map(str, xs))),
)


@dataclass(frozen=True, kw_only=True)
class Code(_Task):
    """A function of a list in one to five steps. `train` is endless, `valid` has other functions."""

    split: str = "valid"
    level: int | None = None  # None: all levels in turn
    most: int | None = None  # questions; None: all
    shots: int = 0  # solved examples before each question
    form: str = "full"  # short: without examples and fences, for models that are trained from scratch
    name: str = "code"

    @classmethod
    def open(
        cls, split: str, *, level: str = "all", size: str | None = None, shots: str = "0", form: str = "full"
    ) -> Code:
        if split not in ("train", "valid"):
            raise UsageError(f"code:{split}: the split must be train or valid")
        if level not in ("all", *map(str, range(1, LEVELS + 1))):
            raise UsageError(f"level={level}: must be all, or from 1 to {LEVELS}")
        if form not in ("full", "short"):
            raise UsageError(f"form={form:.80}: must be full or short")
        sandbox.check()
        chosen = None if level == "all" else int(level)
        return cls(split=split, level=chosen, most=size_of(size), shots=shots_of(shots), form=form)

    @property
    def size(self) -> int | None:
        return min(self.most or VALID, VALID) if self.split == "valid" else self.most

    def prompt(self, i: int) -> Messages:
        shown = replace(
            self, split="train", most=None, level=self.level or i % LEVELS + 1
        )  # the same for all of a level
        examples = range(FIRST_SHOWN, FIRST_SHOWN + self.shots)
        before = [said for k in examples for said in (user(shown._asked(k)), assistant(shown.solution(k)))]
        return [*before, user(self._asked(i))]

    def _asked(self, i: int) -> str:
        made = self._made(i)
        words = [said.format(k=k) for (said, _, _), k in made.steps]
        if self.form == "short":
            return f"Python f(xs): {', '.join(words)}"
        ordered = "\n".join(f"{n}. {one[0].upper()}{one[1:]}." for n, one in enumerate(words, 1))
        examples = "\n".join(f"f({call.args[0]}) == {call.value!r}" for call in made.calls[:2])
        asked = f"Write a Python function f(xs) that takes a list of whole numbers.\n{ordered}"
        return f"{asked}\n\nExamples:\n{examples}\n\n{FORM}"

    def solution(self, i: int) -> str:
        *lines, last = [code.format(k=k) for (_, code, _), k in self._made(i).steps]
        code = f"def f(xs):\n{''.join(f'    xs = {line}{chr(10)}' for line in lines)}    return {last}"
        return code if self.form == "short" else fenced(code)

    def reward(self, i: int, completion: str) -> float:
        # Without fences, the space after `Answer:` would be an indentation.
        return self.problem(i).reward(completion.strip() if self.form == "short" else completion)

    def problem(self, i: int) -> Problem:
        return Problem(name="f", calls=self._made(i).calls)

    def _made(self, i: int) -> _Made:
        if i < 0 or (self.size is not None and i >= self.size):
            raise IndexError(i)
        return _make(self.split, self.level or i % LEVELS + 1, i)


@dataclass(frozen=True, kw_only=True)
class _Made:
    steps: Sequence[tuple[Step, int]]
    calls: Sequence[Call]


@lru_cache(4096)
def _make(split: str, level: int, i: int) -> _Made:
    """Steps that belong to this split by their checksum, so that no function is in both."""
    chance = random.Random(f"{SEED}/{split}/{level}/{i}")
    while True:
        steps = [(step, chance.randint(2, 6)) for step in chance.sample(STEPS, level)] + [(chance.choice(ENDS), 0)]
        written = "\n".join(code.format(k=k) for (_, code, _), k in steps)
        lists = [[chance.randint(-9, 19) for _ in range(chance.randint(4, 9))] for _ in range(2 + HIDDEN)]
        calls = [Call(args=(xs,), value=_done(steps, xs)) for xs in [*lists, []]]
        # A function that nearly always returns the same value would reward a constant.
        varied = len({repr(call.value) for call in calls}) >= 5
        if varied and (zlib.crc32(written.encode()) % 5 == 0) == (split == "valid"):
            return _Made(steps=steps, calls=calls)


def _done(steps: Sequence[tuple[Step, int]], value: Any) -> Any:
    for (_, _, done), k in steps:
        value = done(value, k)
    return value
