"""Tasks from files: GSM8K, multiple choice, any JSON lines with questions and answers, and plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout import custom, files
from flatout.errors import UsageError
from flatout.tasks import grade
from flatout.tasks import judge as judging
from flatout.tasks.base import Messages, assistant, user
from flatout.tasks.judge import Judge
from flatout.tasks.own import checked

LETTERS = "ABCDEFGHIJ"
# The largest published sets of questions have a few hundred megabytes.
MOST_BYTES = 2 << 30
_NUMBERED = re.compile(r"Answer([0-9]): ")
_CALCULATOR = re.compile(r"<<[^<>]*>>")

# Our own examples. They show the answer format rather than explaining it.
GSM8K_EXAMPLES = (
    (
        "A baker fills 6 trays with 8 rolls each and sells 30 rolls before noon. How many rolls are left?",
        "There are 6 * 8 = 48 rolls.\nAfter selling 30 there are 48 - 30 = 18 left.\n#### 18",
    ),
    (
        "Mira saves $4 a week for 9 weeks and then spends half of it. How much does she still have?",
        "She saves 4 * 9 = 36 dollars.\nHalf of it is 36 / 2 = 18 dollars.\n#### 18",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a file, with its place."""

    value: Mapping[str, Any]
    where: str

    def text(self, *keys: str) -> str:
        """The first of these fields that exists, as text."""
        for key in keys:
            if is_text(value := self.value.get(key)):
                return text_of(value, where=f"{self.where}, {key}")
        has = ", ".join(self.value)
        raise UsageError(f"{self.where}: needs {' or '.join(keys)} as text or a number; has {has[:200]}")


def is_text(value: object) -> bool:
    """Whether it is text, or a number that can be used as text."""
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def text_of(value: object, *, where: str) -> str:
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where}: has a lone surrogate, which is not valid text") from None
    return text


def read_rows(path: Path) -> list[Row]:
    """JSON lines, or one JSON list."""
    text = read_text(path)
    try:
        if text.lstrip().startswith("["):
            values = [(f"{path}, entry {i + 1}", value) for i, value in enumerate(json.loads(text))]
        else:
            values = [(f"{path}:{i + 1}", json.loads(line)) for i, line in enumerate(text.split("\n")) if line.strip()]
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}"[:200]
        raise UsageError(f"{path} is not JSON lines or a JSON list: {why}") from None
    for where, value in values:
        if not isinstance(value, dict):
            raise UsageError(f"{where}: is a {type(value).__name__}, not an object")
    if not values:
        raise UsageError(f"{path} has no questions")
    return [Row(value=value, where=where) for where, value in values]


def read_text(path: Path, *, limit: int = MOST_BYTES) -> str:
    try:
        return files.read_text(path, limit=limit)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None


def test_file(path: Path) -> Path:
    """The file itself, or the test file of a folder."""
    if not path.is_dir():
        return path
    for name in ("test.jsonl", "test.json"):
        if (path / name).is_file():
            return path / name
    raise UsageError(f"{path} has no test.jsonl or test.json: name the file")


@dataclass(frozen=True, kw_only=True)
class Gsm8k:
    """Grade-school word problems: `question`, and `answer` that ends with #### and the number."""

    rows: Sequence[Row]
    name: str = "gsm8k"

    @classmethod
    def open(cls, path: Path) -> Gsm8k:
        task = cls(rows=read_rows(test_file(path)))
        for i, row in enumerate(task.rows):
            row.text("question")
            if task.gold(i) is None:
                raise UsageError(f"{row.where}: the answer does not end with #### and a number")
        return task

    @property
    def size(self) -> int:
        return len(self.rows)

    def gold(self, i: int) -> float | None:
        found = grade.hashed(self.rows[i].text("answer"))
        return None if found is None else grade.number(found)

    def solution(self, i: int) -> str:
        """The worked answer without its calculator annotations, as a model should write it."""
        return _CALCULATOR.sub("", self.rows[i].text("answer"))

    def prompt(self, i: int) -> Messages:
        examples = [message for q, a in GSM8K_EXAMPLES for message in (user(q), assistant(a))]
        return [*examples, user(self.rows[i].text("question"))]

    def choices(self, i: int) -> None:
        return None

    def answer(self, completion: str) -> str | None:
        return grade.find(completion, grade.EXPLICIT)

    def reward(self, i: int, completion: str) -> float:
        """Without a marked answer, the last number counts."""
        found = grade.find(completion, (*grade.EXPLICIT, grade.last_number))
        got, want = None if found is None else grade.amount(found), self.gold(i)
        return float(got is not None and want is not None and grade.close(got, want))


@dataclass(frozen=True, kw_only=True)
class Choice:
    question: str
    options: tuple[str, ...]
    right: int


@dataclass(frozen=True, kw_only=True)
class MultipleChoice:
    """The options are listed in the question with letters; the likeliest letter is the answer.

    With `form` text only the question is given, and the likeliest option text is the answer: small models prefer some
    letters whatever the options say.
    """

    rows: Sequence[Choice]
    name: str
    form: str = "letters"

    @classmethod
    def open(cls, path: Path, name: str, *, form: str = "letters") -> MultipleChoice:
        if form not in ("letters", "text"):
            raise UsageError(f"form={form}: must be letters or text")
        return cls(rows=[_choice(row) for row in read_rows(test_file(path))], name=name, form=form)

    @property
    def size(self) -> int:
        return len(self.rows)

    def prompt(self, i: int) -> Messages:
        row = self.rows[i]
        if self.form == "text":
            return [user(row.question)]
        options = "\n".join(f"{LETTERS[at]}. {option}" for at, option in enumerate(row.options))
        return [user(f"{row.question}\n\n{options}\n\nAnswer with the letter of the right option.")]

    def choices(self, i: int) -> Sequence[str]:
        options = self.rows[i].options
        return options if self.form == "text" else tuple(LETTERS[: len(options)])

    def answer(self, completion: str) -> str | None:
        found = grade.find(completion, (grade.tagged, grade.boxed, grade.last_line))
        if self.form == "text":
            return found
        letter = (found or "").strip(" .()*").upper()
        return letter if len(letter) == 1 and letter in LETTERS else None

    def reward(self, i: int, completion: str) -> float:
        got, row = self.answer(completion), self.rows[i]
        if self.form == "text":
            return float(got is not None and grade.same_text(got, row.options[row.right]))
        return float(got == LETTERS[row.right])


def _choice(row: Row) -> Choice:
    """Parses a question in any of the formats in which MMLU and ARC are distributed."""
    value = row.value
    if "instruction" in value:  # options inside the text, the answer as `answer3`
        head, *_ = row.text("instruction").partition("\n\nAnswer format:")
        question, *parts = _NUMBERED.split(head)
        question = question.removeprefix("Please choose the correct answer to the question:")
        options, labels = parts[1::2], [f"answer{n}" for n in parts[0::2]]
        right: object = row.text("answer")
    else:
        inner = value["question"] if isinstance(value.get("question"), dict) else value
        question = Row(value=inner, where=row.where).text("question", "stem")
        options, labels = _options(inner.get("choices", value.get("choices")), where=row.where)
        right = value.get("answerKey", value.get("answer"))
    at = right if isinstance(right, int) and not isinstance(right, bool) else None
    if at is None and str(right) in labels:
        at = labels.index(str(right))
    if at is None or not 0 <= at < len(options) or not 2 <= len(options) <= len(LETTERS):
        raise UsageError(
            f"{row.where}: {len(options)} options with answer {repr(right)[:80]}; needs 2 to {len(LETTERS)} and one of "
            "them"
        )
    return Choice(question=question.strip(), options=tuple(option.strip() for option in options), right=at)


def _options(value: object, *, where: str) -> tuple[list[str], list[str]]:
    """Options and their labels, from a list of texts, of {text, label}, or {text: [...], label: [...]}."""
    texts: object
    labels: object
    if isinstance(value, dict):
        texts, labels = value.get("text"), value.get("label", [])
    elif isinstance(value, list) and value and all(isinstance(option, dict) for option in value):
        texts, labels = [option.get("text") for option in value], [option.get("label", "") for option in value]
    else:
        texts = [] if value is None else value
        labels = list(LETTERS[: len(texts)]) if isinstance(texts, list) else []
    for found in (texts, labels):
        if not isinstance(found, list) or not all(map(is_text, found)):
            raise UsageError(f"{where}: choices must be a list of texts, a list of objects with text and label, or one")
    assert isinstance(texts, list)
    assert isinstance(labels, list)
    return [text_of(text, where=where) for text in texts], [text_of(label, where=where) for label in labels]


GRADERS = ("auto", "exact", "number", "math")


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """Questions with answers in any file: `question` and `answer`, or the fields named in the spec.

    Graded exactly, as a number within `tolerance` (relative), or as mathematics; auto grades an answer as a number if
    it is one, and as text otherwise. With a judge, a language model decides; with `reward=MODULE:FUNCTION`, a function
    that is called with question, answer and completion.
    """

    rows: Sequence[Row]
    question: str
    key: str
    grader: str
    tolerance: float
    judge: Judge | None = None
    own: Callable[..., Any] | None = None  # a reward of the user's
    solution: Callable[[int], str] | None = None  # see `base.Worked`
    name: str = "jsonl"

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        question: str = "question",
        answer: str = "answer",
        grader: str = "auto",
        tolerance: str = "0",
        judge: str | None = None,
        model: str | None = None,
        key: str | None = None,
        reward: str | None = None,
        solution: str | None = None,
    ) -> JsonLines:
        """`solution` names the field with the worked solution, which ends with the answer as a model should mark it."""
        takes = ("question", "answer", "completion")
        own = None if reward is None else custom.function(reward, what=f"reward={reward}", keywords=takes)
        asked = Judge.of(judge, model, key)
        if grader not in GRADERS:
            raise UsageError(f"grader={grader}: must be one of {', '.join(GRADERS)}")
        within = grade.number(tolerance)
        if within is None or not 0 <= within < 1:
            raise UsageError(f"tolerance={tolerance}: must be a share of the answer, from 0 to below 1, such as 0.05")
        rows = read_rows(test_file(path))
        for row in rows:
            row.text(question), row.text(answer)
            if grader == "number" and grade.number(row.text(answer)) is None:
                raise UsageError(f"{row.where}: the answer {row.text(answer)!r} is not a number; use another grader")
            if solution is not None:
                row.text(solution)
        return cls(
            rows=rows,
            question=question,
            key=answer,
            grader=grader,
            tolerance=within,
            judge=asked,
            own=own,
            solution=None if solution is None else lambda i: rows[i].text(solution),
        )

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def maths(self) -> bool:
        return self.grader == "math"

    @property
    def timeout_s(self) -> float | None:
        return None if self.judge is None else judging.TIMEOUT_S

    def probe(self) -> None:
        if self.judge is not None:
            self.judge.probe(self.rows[0].text(self.question), self.gold(0))

    def gold(self, i: int) -> str:
        text = self.rows[i].text(self.key)
        return grade.hashed(text) or text

    def prompt(self, i: int) -> Messages:
        form = "within \\boxed{}" if self.maths else "in <answer> tags, as in <answer>42</answer>"
        return [user(f"{self.rows[i].text(self.question)}\n\nPut the final answer {form}.")]

    def choices(self, i: int) -> None:
        return None

    def answer(self, completion: str) -> str | None:
        return grade.find(completion, grade.EXPLICIT)

    def reward(self, i: int, completion: str) -> float:
        """Without a marked answer, the last line counts, but a judge sees only marked answers."""
        if self.own is not None:
            given = {"question": self.rows[i].text(self.question), "answer": self.gold(i), "completion": completion}
            return checked(self.own(**given), f"reward of {self.name}")
        if self.judge is not None:
            return self.judge.reward(self.rows[i].text(self.question), self.gold(i), self.answer(completion))
        got = grade.find(completion, (*grade.EXPLICIT, grade.last_line))
        return float(got is not None and self._same(got, self.gold(i)))

    def _same(self, got: str, want: str) -> bool:
        if self.maths:
            return grade.same_maths(got, want)
        gold = None if self.grader == "exact" else grade.number(want)
        if gold is None:
            return grade.same_text(got, want)
        value = grade.amount(got)
        return value is not None and grade.close(value, gold, relative=self.tolerance)


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """Documents of a text file, of JSON lines with `text`, or separated by <|endoftext|>."""

    texts: Sequence[str]
    name: str = "perplexity"

    @classmethod
    def open(cls, path: Path) -> PlainText:
        if path.suffix in (".jsonl", ".json"):
            texts = [row.text("text") for row in read_rows(path)]
        else:
            texts = read_text(path).split("<|endoftext|>")
        texts = [text for text in texts if text.strip()]
        if not texts:
            raise UsageError(f"{path} has no text")
        return cls(texts=texts)

    @property
    def size(self) -> int:
        return len(self.texts)

    def text(self, i: int) -> str:
        return self.texts[i]
