"""Rows in the format of GURU: a chat prompt, and a right answer whose verifier follows from the data source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flatout import files
from flatout.errors import EnvironmentLacks, UsageError, first_line
from flatout.tasks import code, grade, sandbox
from flatout.tasks import judge as judging
from flatout.tasks.base import Messages
from flatout.tasks.files import Row, is_text, read_rows, text_of
from flatout.tasks.judge import Judge
from flatout.tasks.verifiers import MARKED, VERIFIERS

JUDGE, CODE = "judge", "code"
# The verifier of a data source, by how its name begins; `logic__` and `simulation__` before it do not count.
SOURCES = {
    "math": "math",
    "codegen": CODE,
    "codeio": "json",
    "cruxeval": CODE,
    "arcagi": "grid",
    "barc": "grid",
    "zebra_puzzle": "zebra",
    "ordering_puzzle": "ordering",
    "graph": "word",
    "table": "table",
    "stem__gpqa": "letter",
    "stem__supergpqa": "letter",
    "stem_web": JUDGE,
    "stem__web": JUDGE,
}
_DOMAIN = re.compile(r"(?:logic|simulation)__")
# The domain of a data source whose name does not say it.
DOMAINS = {"math": "math", "codegen": "codegen", "table": "table", "stem": "stem"}
DOMAINS |= dict.fromkeys(("codeio", "cruxeval"), "simulation")
DOMAINS |= dict.fromkeys(("arcagi", "barc", "zebra_puzzle", "ordering_puzzle", "graph"), "logic")
# The metric of a domain by its verifier; another one has rewards of 0 or 1.
METRICS = {CODE: "programs that pass", "zebra": "right cells"}
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Question:
    messages: Messages
    gold: Any  # for programs, the problem
    verifier: str
    question: str  # for a judge
    domain: str


@dataclass(frozen=True, kw_only=True)
class Guru:
    rows: Sequence[Question]
    judge: Judge | None
    name: str = "guru"

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.domain for row in self.rows))

    @property
    def metric(self) -> str:
        if len(self.kinds) == 1:
            [kind] = self.kinds
            return METRICS.get(kind, "accuracy")
        return "reward" if "zebra" in self.kinds else "accuracy"

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        verifier: str | None = None,
        judge: str | None = None,
        model: str | None = None,
        key: str | None = None,
        domain: str | None = None,
    ) -> Guru:
        """Of one `domain`, or of all that the file has."""
        asked = Judge.of(judge, model, key)
        rows = [_question(row, forced=verifier, judge=asked) for row in _rows(path)]
        if domain is None:
            return cls(rows=rows, judge=asked)
        own = [row for row in rows if row.domain == domain]
        if not own:
            there = ", ".join(dict.fromkeys(row.domain for row in rows))
            raise UsageError(f"domain={domain:.80}: {path} has only rows of {there}")
        return cls(rows=own, judge=asked, name=f"guru {domain}")

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def maths(self) -> bool:
        return "math" in self.kinds

    @cached_property
    def kinds(self) -> frozenset[str]:
        return frozenset(row.verifier for row in self.rows)

    @property
    def timeout_s(self) -> float | None:
        own = [code.TIMEOUT_S] if CODE in self.kinds else []
        return max([*own, *([judging.TIMEOUT_S] if JUDGE in self.kinds else [])], default=None)

    def prepare(self) -> None:
        if CODE in self.kinds:
            sandbox.prepare()

    def probe(self) -> None:
        row = next((row for row in self.rows if row.verifier == JUDGE), None)
        if row is not None:
            assert self.judge is not None
            self.judge.probe(row.question, row.gold)

    def prompt(self, i: int) -> Messages:
        return self.rows[i].messages

    def choices(self, i: int) -> None:
        return None

    def answer(self, completion: str) -> str | None:
        """Found by the verifier of any row."""
        found = (_answer(kind, completion) for kind in sorted(self.kinds))
        return next((answer for answer in found if answer is not None), None)

    def reward(self, i: int, completion: str) -> float:
        row = self.rows[i]
        if row.verifier == CODE:
            return float(row.gold.reward(completion))
        if row.verifier != JUDGE:
            return VERIFIERS[row.verifier](row.gold, completion)
        assert self.judge is not None
        return self.judge.reward(row.question, row.gold, _answer(JUDGE, completion))


def _answer(kind: str, completion: str) -> str | None:
    if kind == CODE:
        return code.program(completion)
    return grade.find(completion, MARKED) if kind == JUDGE else VERIFIERS[kind].answer(completion)


def source_verifier(source: str) -> str | None:
    """The name of the verifier of a data source; None if it is unknown."""
    bare = _DOMAIN.sub("", source, count=1)
    return next((name for prefix, name in SOURCES.items() if bare.startswith(prefix)), None)


def source_domain(source: str) -> str:
    """The domain of a data source: the part before `__`, or the one that its kind of question belongs to."""
    named, mark, _ = source.partition("__")
    if mark:
        return named
    return next((domain for prefix, domain in DOMAINS.items() if source.startswith(prefix)), source)


def _question(row: Row, *, forced: str | None, judge: Judge | None) -> Question:
    source = row.text("data_source")
    name = forced or source_verifier(source)
    known = [*VERIFIERS, CODE, JUDGE]
    if forced is not None and forced not in known:
        raise UsageError(f"verifier={forced:.80}: is unknown; use one of {', '.join(known)}")
    if name is None:
        raise UsageError(
            f"{row.where}: data_source {source!r:.100} is unknown; known are those that begin with "
            f"{', '.join(SOURCES)}; ?verifier=NAME grades all rows by one of {', '.join(known)}"
        )
    reward = row.value.get("reward_model")
    gold = reward.get("ground_truth") if isinstance(reward, dict) else None
    if gold is None or gold == "" or gold == []:
        raise UsageError(f"{row.where}: has no reward_model.ground_truth, so no answer to it can be graded")
    messages = _messages(row)
    extra = row.value.get("extra_info")
    asked, prefix = (extra.get("question"), extra.get("prefix")) if isinstance(extra, dict) else (None, None)
    question = asked if isinstance(asked, str) and asked else messages[-1]["content"]
    if name == JUDGE:
        if judge is None:
            raise UsageError(
                f"{row.where}: answers to {source:.100} are free text; name a judge: ?judge=URL&model=NAME"
            )
        if not is_text(gold):
            raise UsageError(f"{row.where}: ground_truth must be text or a number for a judge")
        gold = text_of(gold, where=row.where)
    elif name == CODE:
        gold = code.guru(gold, where=row.where, prefix=prefix if isinstance(prefix, str) else "")
    else:
        try:
            VERIFIERS[name].read(gold)
        except ValueError as error:
            raise UsageError(f"{row.where}: ground_truth {error} (verifier {name})") from None
    return Question(messages=messages, gold=gold, verifier=name, question=question, domain=source_domain(source))


def _messages(row: Row) -> Messages:
    """The prompt, which ends with the user's question."""
    value: Any = row.value.get("prompt")
    said = value if isinstance(value, list) and all(isinstance(one, dict) for one in value) else []
    known = all(one.get("role") in ROLES and isinstance(one.get("content"), str) for one in said)
    if not said or not known or said[-1]["role"] != "user":
        raise UsageError(f"{row.where}: prompt must be a list of messages with role and content, and end with a user")
    return [{"role": one["role"], "content": text_of(one["content"], where=row.where)} for one in said]


def _rows(path: Path) -> list[Row]:
    if path.suffix != ".parquet":
        return read_rows(path)
    try:
        files.checked(path)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise EnvironmentLacks(f"{path} is a Parquet file, which needs pyarrow: pip install 'flatout[hf]'") from None
    wanted = ["data_source", "prompt", "reward_model", "extra_info"]
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in wanted if name in file.schema_arrow.names]
            rows = file.read(columns=columns).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path} cannot be read as Parquet: {first_line(error)[:200]}") from None
    if not rows:
        raise UsageError(f"{path} has no questions")
    return [Row(value=value, where=f"{path}, row {i + 1}") for i, value in enumerate(rows)]
