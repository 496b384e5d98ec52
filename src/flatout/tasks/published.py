"""Published sets of questions in the files in which they are distributed: one reader and one table of formats."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout import files
from flatout.errors import UsageError
from flatout.tasks.base import Messages, user
from flatout.tasks.files import MOST_BYTES, Row, is_text, read_rows, read_text
from flatout.tasks.verifiers import VERIFIERS

TAGS = "Put the final answer in <answer> tags."
BOX = "Put the final answer within \\boxed{}."
SEVERAL = f"{TAGS} Separate several answers by |."
# SciBench's own rule.
SCIBENCH_TOLERANCE = 0.05
MOST_TABLE_BYTES = 16 << 20
_OPTION = re.compile(r"\([A-Z]\)")
_ESCAPE = re.compile(r"\\([np\\])")


@dataclass(frozen=True, kw_only=True)
class Item:
    text: str
    gold: Any
    verifier: str
    where: str


@dataclass(frozen=True, kw_only=True)
class Format:
    """`read` takes a file; of a folder, all files of the first pattern that finds any are read."""

    read: Callable[[Path], Iterator[Item]]
    patterns: tuple[str, ...]
    without: str = ""  # files of a folder whose names end so are left out


@dataclass(frozen=True, kw_only=True)
class Published:
    items: Sequence[Item]
    name: str

    @classmethod
    def open(cls, path: Path, name: str) -> Published:
        form = FORMATS[name]
        items = [item for file in _sources(path, form) for item in form.read(file)]
        for item in items:
            try:
                VERIFIERS[item.verifier].read(item.gold)
            except ValueError as error:
                raise UsageError(f"{item.where}: the answer {error}") from None
        if not items:
            raise UsageError(f"{path} has no questions")
        return cls(items=items, name=name)

    @property
    def size(self) -> int:
        return len(self.items)

    @property
    def maths(self) -> bool:
        return self.items[0].verifier == "math"

    def prompt(self, i: int) -> Messages:
        return [user(self.items[i].text)]

    def choices(self, i: int) -> None:
        return None

    def answer(self, completion: str) -> str | None:
        return VERIFIERS[self.items[0].verifier].answer(completion)

    def reward(self, i: int, completion: str) -> float:
        item = self.items[i]
        return VERIFIERS[item.verifier](item.gold, completion)


def _math500(path: Path) -> Iterator[Item]:
    for row in read_rows(path):
        text = f"{row.text('problem', 'question')}\n\n{BOX}"
        yield Item(text=text, gold=row.text("answer"), verifier="math", where=row.where)


def _cruxeval(path: Path) -> Iterator[Item]:
    for row in read_rows(path):
        text = (
            f"```python\n{row.text('code')}\n```\n\nWhat does f({row.text('input')}) return? Answer with a Python "
            f"literal. {TAGS}"
        )
        yield Item(text=text, gold=row.text("output"), verifier="literal", where=row.where)


def _codeio(path: Path) -> Iterator[Item]:
    """Programs with a recorded input and output. A file without them would need to run its programs."""
    for row in _zipped_rows(path) if path.suffix == ".gz" else read_rows(path):
        if "input" not in row.value or "output" not in row.value:
            raise UsageError(
                f"{row.where}: has no recorded input and output; its program would have to be run to get them, which "
                "this reader does not do"
            )
        described = "\n\n".join(
            row.text(key) for key in ("task_description", "input_output_spec") if is_text(row.value.get(key))
        )
        text = (
            f"{described}\n\n```python\n{row.text('code_sample', 'code')}\n```\n\nWhat does it return for the input "
            f'{json.dumps(row.value["input"])}? Answer with JSON in <answer> tags: {{"output": …}}'
        ).lstrip()
        yield Item(text=text, gold=json.dumps({"output": row.value["output"]}), verifier="json", where=row.where)


def _arc_agi(path: Path) -> Iterator[Item]:
    """{id: {train, test}}, or one such task; each test pair is a question."""
    value = files.parse_json(read_text(path), source=path)
    for name, task in {path.stem: value}.items() if "train" in value else value.items():
        where = f"{path}, {name}"
        shown = [_pair(pair, where=where) for pair in _list(task, "train", where=where)]
        examples = "\n\n".join(f"Input:\n{_grid_text(a)}\nOutput:\n{_grid_text(b)}" for a, b in shown)
        for given, wanted in (_pair(pair, where=where) for pair in _list(task, "test", where=where)):
            text = f"{examples}\n\nInput:\n{_grid_text(given)}\nWhat is its output? {TAGS}"
            yield Item(text=text, gold=wanted, verifier="grid", where=where)


def _bbh(path: Path) -> Iterator[Item]:
    value = files.parse_json(read_text(path), source=path)
    for i, example in enumerate(_list(value, "examples", where=f"{path}")):
        row = Row(value=example if isinstance(example, dict) else {}, where=f"{path}, example {i + 1}")
        target = row.text("target").strip()
        kind = "letter" if _OPTION.fullmatch(target) else "text"
        ask = "Put the letter of the right option in <answer> tags." if kind == "letter" else TAGS
        yield Item(text=f"{row.text('input')}\n\n{ask}", gold=target, verifier=kind, where=row.where)


def _wikitablequestions(path: Path) -> Iterator[Item]:
    """Tab-separated questions; their tables are in `csv`, or in csv_tables.zip, beside the file."""
    lines = [line.rstrip("\r") for line in read_text(path).rstrip("\n").split("\n")]
    if not lines or lines[0].split("\t") != ["id", "utterance", "context", "targetValue"]:
        raise UsageError(f"{path}: the first line must be id, utterance, context and targetValue, separated by tabs")
    with contextlib.closing(_Tables(path.parent)) as tables:
        yield from _table_questions(path, lines, tables)


def _table_questions(path: Path, lines: Sequence[str], tables: _Tables) -> Iterator[Item]:
    for n, line in enumerate(lines[1:], start=2):
        cells = line.split("\t")
        if len(cells) != 4:
            raise UsageError(f"{path}:{n}: has {len(cells)} cells, not 4")
        _, question, context, target = cells
        text = f"{tables.markdown(context)}\n\n{_unescaped(question)}\n{SEVERAL}"
        yield Item(
            text=text,
            gold=[_unescaped(one).replace("|", "/") for one in target.split("|")],
            verifier="table",
            where=f"{path}:{n}",
        )


def _tatqa(path: Path) -> Iterator[Item]:
    for row in read_rows(path):
        grid = row.value.get("table")
        lines = _list(grid, "table", where=row.where)
        shown = _markdown([[str(cell) for cell in line] for line in lines if isinstance(line, list)])
        words = "\n".join(
            str(one["text"]) for one in _list(row.value, "paragraphs", where=row.where) if isinstance(one, dict)
        )
        for one in _list(row.value, "questions", where=row.where):
            asked = Row(value=one if isinstance(one, dict) else {}, where=row.where)
            scale = asked.value.get("scale")
            unit = f" Give numbers in {scale}." if scale else ""
            text = f"{shown}\n\n{words}\n\n{asked.text('question')}{unit}\n{SEVERAL}"
            answer = asked.value.get("answer")
            gold = [one for one in answer if one != ""] if isinstance(answer, list) else answer
            yield Item(text=text, gold=gold, verifier="table", where=row.where)


def _scibench(path: Path) -> Iterator[Item]:
    for row in read_rows(path):
        unit = row.text("unit").strip() if is_text(row.value.get("unit")) else ""
        text = f"{row.text('problem_text').strip()}\n\n{f'Give the number in {unit}. ' if unit else ''}{TAGS}"
        gold = {"value": row.text("answer_number"), "tolerance": SCIBENCH_TOLERANCE}
        yield Item(text=text, gold=gold, verifier="number", where=row.where)


FORMATS = {
    "math500": Format(read=_math500, patterns=("test.jsonl",)),
    "cruxeval": Format(read=_cruxeval, patterns=("cruxeval.jsonl", "test.jsonl")),
    "codeio": Format(read=_codeio, patterns=("codeio*.jsonl", "codeio*.jsonl.gz")),
    "arc-agi": Format(read=_arc_agi, patterns=("evaluation.json", "*.json")),
    "bbh": Format(read=_bbh, patterns=("*.json",)),
    "wikitablequestions": Format(read=_wikitablequestions, patterns=("pristine-unseen-tables.tsv",)),
    "tatqa": Format(read=_tatqa, patterns=("tatqa_dataset_test_gold.json", "tatqa_dataset_dev.json")),
    "scibench": Format(read=_scibench, patterns=("*.json",), without="_sol.json"),
}


def _sources(path: Path, form: Format) -> list[Path]:
    if not path.is_dir():
        return [path]
    for pattern in form.patterns:
        if found := sorted(
            file for file in path.glob(pattern) if not form.without or not file.match(f"*{form.without}")
        ):
            return found
    raise UsageError(f"{path} has no {' or '.join(form.patterns)}: name the file")


class _Tables:
    """Tables by their path, from a folder or an archive."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, dict[str, str]()
        self._archive: zipfile.ZipFile | None = None
        if not (folder / "csv").is_dir() and (folder / "csv_tables.zip").is_file():
            try:
                self._archive = zipfile.ZipFile(folder / "csv_tables.zip")
            except (OSError, zipfile.BadZipFile) as error:
                raise UsageError(f"{folder / 'csv_tables.zip'} cannot be read: {error}") from None

    def markdown(self, name: str) -> str:
        if name not in self._known:
            rows = csv.reader(io.StringIO(self._text(name)), doublequote=False, escapechar="\\", strict=True)
            try:
                self._known[name] = _markdown([[" ".join(cell.split()) for cell in row] for row in rows])
            except csv.Error as error:
                raise UsageError(f"{self._folder / name} is not a CSV table: {error}") from None
        return self._known[name]

    def _text(self, name: str) -> str:
        if not re.fullmatch(r"csv/[0-9]+-csv/[0-9]+\.csv", name):
            raise UsageError(f"{name!r:.100} is not the path of a table, such as csv/203-csv/733.csv")
        if self._archive is None:
            return read_text(self._folder / name, limit=MOST_TABLE_BYTES)
        try:
            with self._archive.open(name) as member:
                return member.read(MOST_TABLE_BYTES).decode()
        except (
            KeyError,
            OSError,
            ValueError,
            NotImplementedError,
            RuntimeError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise UsageError(f"{self._archive.filename}: {name} cannot be read: {error}") from None

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()


def _zipped_rows(path: Path) -> list[Row]:
    """JSON lines in a gzip file."""
    rows: list[Row] = []
    try:
        with files.opened(path, limit=MOST_BYTES) as file, gzip.open(file) as inner:
            content = inner.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"{path} has more than {MOST_BYTES:,} bytes when unpacked")
        for n, line in enumerate(content.decode().split("\n"), start=1):
            if line.strip():
                rows.append(Row(value=files.parse_json(line, source=f"{path}:{n}"), where=f"{path}:{n}"))
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a gzip file of JSON lines: {error}") from None
    return rows


def _list(value: Any, key: str, *, where: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise UsageError(f"{where}: needs {key} as a list")
    return found


def _pair(value: Any, *, where: str) -> tuple[Any, Any]:
    pair = (value.get("input"), value.get("output")) if isinstance(value, dict) else (None, None)
    for grid in pair:
        try:
            VERIFIERS["grid"].read(grid)
        except ValueError as error:
            raise UsageError(f"{where}: input and output {error}") from None
    return pair


def _grid_text(grid: Sequence[Sequence[int]]) -> str:
    return "\n".join(" ".join(map(str, row)) for row in grid)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    rule = ["|" + "---|" * len(rows[0])] if rows else []
    return "\n".join([*lines[:1], *rule, *lines[1:]])


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: {"n": "\n", "p": "|", "\\": "\\"}[match[1]], text)
