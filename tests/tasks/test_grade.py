"""Answers are found and compared as meant, and hostile text gets nothing: no crash, no hang, no evaluation."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.tasks import grade

HOSTILE = [
    "9**9**9",
    "__import__('os').system('touch HACKED')",
    "NaN",
    "nan",
    "inf",
    "-Infinity",
    "1e999",
    "１２",
    "1２",
    "٣",
    "0x10",
    "1_000",
    "1,23",
    "12/0",
    "1/2/3",
    "\\frac{1}{0}",
    "\\frac{\\frac{1}{2}}{3}",
    "{" * 5000,
    "\\frac{" * 5000 + "1" + "}" * 5000,
    "9" * 5000,
    "-",
    ".",
    "",
    "\x00",
    "\ud800",
]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42.0),
        ("-3.5", -3.5),
        ("1,234,567.8", 1234567.8),
        ("$18", 18.0),
        ("\\$18", 18.0),
        ("12 %", 12.0),
        ("12\\%", 12.0),
        ("7.", 7.0),
        (".5", 0.5),
        ("3e8", 3e8),
        ("3/4", 0.75),
        ("-\\frac{3}{4}", -0.75),
        ("\\dfrac{1}{2}", 0.5),
        ("$\\frac{1}{2}$", 0.5),
    ],
)
def test_numbers_are_read(text: str, value: float) -> None:
    assert grade.number(text) == value


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_number_is_none(text: str) -> None:
    assert grade.number(text) is None


@pytest.mark.parametrize("text", ["9**9**9", "2 or 3", "1２ apples", "nothing", "5" * 500])
def test_an_amount_is_the_only_number_or_none(text: str) -> None:
    assert grade.amount("about 3.5 miles") == 3.5
    assert grade.amount(text) is None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_as_python_writes_it_comes_back(value: float) -> None:
    assert grade.number(repr(value)) == value


@given(st.integers(min_value=-(10**15), max_value=10**15))
def test_thousands_may_be_parted(value: int) -> None:
    assert grade.number(f"{value:,}") == value


@given(st.text())
def test_any_text_is_looked_at_without_harm(text: str) -> None:
    found = grade.number(text)
    assert found is None or math.isfinite(found)
    for finder in (*grade.EXPLICIT, grade.last_number, grade.last_line):
        answer = finder(text)
        assert answer is None or answer in text
    grade.amount(text), grade.same_text(text, "x"), grade.find(text, grade.EXPLICIT)


@given(st.text(alphabet="<>/answer{}\\boxed#0123456789., \n", max_size=200), st.text(alphabet="0123456789", min_size=1))
def test_the_last_marked_answer_counts_whatever_came_before(noise: str, answer: str) -> None:
    assert grade.tagged(f"{noise}<answer>{answer}</answer>") == answer
    assert grade.boxed(f"{noise}\\boxed{{{answer}}}") == answer
    assert grade.hashed(f"{noise}#### {answer}\n") == answer


def test_nested_and_broken_marks() -> None:
    assert grade.tagged("<answer><answer>7</answer>") == "7"
    assert grade.tagged("<answer>7") is None
    assert grade.tagged("7</answer>") is None
    assert grade.boxed("\\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert grade.boxed("\\boxed{{{") is None
    assert grade.hashed("####") is None
    assert grade.hashed("#### 18\nmore") == "18"


def test_thinking_is_no_answer() -> None:
    assert grade.find("<think><answer>1</answer></think><answer>2</answer>", [grade.tagged]) == "2"
    assert grade.find("<think><answer>1</answer>", [grade.tagged]) is None


def test_only_the_end_of_megabytes_is_looked_at() -> None:
    assert grade.find("{" * 3_000_000 + "<answer>7</answer>", grade.EXPLICIT) == "7"
    assert grade.find("<answer>7</answer>" + " " * 3_000_000, grade.EXPLICIT) is None
    assert grade.last_number("1," * 30_000 + "5") == "5"


def test_texts_are_the_same_but_for_dress() -> None:
    assert grade.same_text("  The  Cat.", "the cat")
    assert not grade.same_text("the cat", "a cat")


def test_tolerances() -> None:
    assert grade.close(104.9, 100, relative=0.05)
    assert not grade.close(105.1, 100, relative=0.05)
    assert not grade.close(math.nan, 1.0)
    assert not grade.close(math.inf, 1.0, relative=0.5)


@pytest.mark.parametrize(("got", "want"), [("\\dfrac12", "\\frac12"), ("0.5", "\\frac{1}{2}"), ("\\text{yes}", "yes")])
def test_formulas_are_the_same_as_text_or_numbers(got: str, want: str) -> None:
    assert grade.same_maths(got, want)


@pytest.mark.parametrize("got", ["x" * 100_000, "", "\\boxed{"])
def test_formulas_too_long_or_empty_are_wrong(got: str) -> None:
    assert not grade.same_maths(got, "x^2")
