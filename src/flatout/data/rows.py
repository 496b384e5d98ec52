"""Rows of any source: files of any kind, folders, globs and Hugging Face datasets, whole or in slices.

The suffix of a file says how to read it. What a row means is the matter of `formats`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from flatout.config import slices
from flatout.config.settings import DataSettings, SourceSettings
from flatout.data import tables
from flatout.data.sources import (
    Stamp,
    Tally,
    Which,
    find_files,
    hf_rows,
    json_rows,
    open_hf,
    reading,
    stamped,
)
from flatout.errors import UsageError

KINDS = {
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.xz"),
    "json": (".json", ".json.gz", ".json.xz"),
    "csv": (".csv", ".csv.gz", ".csv.xz"),
    "tsv": (".tsv", ".tsv.gz", ".tsv.xz"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
SUFFIXES = tuple(suffix for suffixes in KINDS.values() for suffix in suffixes)
# Files that describe a dataset and hold no rows of it.
DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
# Names of the same split.
SPLITS = ({"train", "training"}, {"test"}, {"valid", "validation", "val", "dev", "eval"})

Row = tuple[str, Any]  # its place, and its value


def sources_of(data: DataSettings, *, which: Which) -> tuple[SourceSettings, ...]:
    """The sources of the training data, or of the validation data if it has its own."""
    one = SourceSettings(
        path=data.path,
        name=None if data.path else data.name,
        subset=None if data.path else data.subset,
        split=data.split,
        format=data.format,
    )
    train = data.sources or (one,)
    if which == "train":
        return train
    if data.valid_path or data.valid_name:
        split = data.valid_split or "train"
        return (SourceSettings(path=data.valid_path, name=data.valid_name, split=split, format=data.format),)
    return (replace(train[0], split=data.valid_split, size=None, weight=None),) if data.valid_split else ()


def files_of(source: SourceSettings) -> list[Path]:
    """The files of a source in the order in which they are read; none for a Hugging Face dataset.

    Where files are named for their splits, such as `test.jsonl`, those of the split are read and the others are not.
    """
    if source.path is None:
        return []
    found = [f for f in find_files(source.path, key="path", suffixes=SUFFIXES) if f.name not in DESCRIPTIONS]
    name = _split_of(source).name
    if len(found) == 1 and name == "train":
        return found
    top = Path(source.path).expanduser()
    marks = {file: _split_named(file, top) for file in found}
    wanted = next((names for names in SPLITS if name in names), {name})
    of_split = [file for file, mark in marks.items() if (mark is not None and mark in wanted) or _begins(file, name)]
    if name == "train" and not of_split:
        of_split = [file for file, mark in marks.items() if mark is None]
    if not of_split:
        names = ", ".join(file.name for file in found[:5])
        raise UsageError(f"data.path: {source.path} has no file of split {name!r}, only {names}; name another split")
    return of_split


def read_rows(
    source: SourceSettings, *, tally: Tally, kind: str | None = None, since: Sequence[Stamp] | None = None
) -> Iterator[Row]:
    """The rows of a source's slice, at most `size` of them. The caller counts the good ones.

    `kind` reads all files alike, whatever their suffix. The files must match the stamps in `since` and stay unchanged.
    """
    split = _split_of(source)
    total = _count(source, kind=kind, since=since) if split.needs_total else None
    low, high = split.bounds(total)
    if source.size is not None:
        high = low + source.size if high is None else min(high, low + source.size)
    if high is not None and high <= low:
        raise UsageError(f"{source.label}: split {source.split} is empty: it ends before row {low + 1}")
    yield from islice(_all_rows(source, kind=kind, tally=tally, since=since), low, high)


def _all_rows(
    source: SourceSettings, *, tally: Tally, kind: str | None, since: Sequence[Stamp] | None
) -> Iterator[Row]:
    if source.path is None:
        assert source.name is not None
        yield from hf_rows(open_hf(source.name, source.subset, split=_split_of(source).name))
        return
    for path, stamp in stamped(files_of(source), since=since):
        with reading(path, stamp=stamp) as stream:
            match kind or _kind_of(path):
                case "parquet":
                    yield from tables.parquet(path, tally=tally)
                case "arrow":
                    yield from tables.arrow(path, tally=tally)
                case "csv":
                    yield from tables.csv_file(stream, path, tally=tally, delimiter=",")
                case "tsv":
                    yield from tables.csv_file(stream, path, tally=tally, delimiter="\t")
                case "json":
                    yield from tables.json_file(stream, path, tally=tally)
                case _:
                    yield from json_rows(stream, path, tally=tally)


def _count(source: SourceSettings, *, kind: str | None, since: Sequence[Stamp] | None) -> int:
    """How many rows there are; a slice in per cent needs it."""
    if source.path is None:
        assert source.name is not None
        found = open_hf(source.name, source.subset, split=_split_of(source).name).num_rows
        if found is not None:
            return found
    tally = Tally(on_bad_row="skip", max_bad_share=1.0)
    return sum(1 for _ in _all_rows(source, kind=kind, tally=tally, since=since))


def _split_of(source: SourceSettings) -> slices.Slice:
    found = slices.parsed(source.split)
    assert found is not None, source.split
    return found


def _kind_of(path: Path) -> str:
    for kind, suffixes in KINDS.items():
        if path.name.lower().endswith(suffixes):
            return kind
    raise UsageError(
        f"data.path: {path} has none of the suffixes {', '.join(SUFFIXES)}; rename it, or set data.source to jsonl or "
        "parquet"
    )


def _split_named(file: Path, top: Path) -> str | None:
    """The split that a file or a folder above it is named for."""
    inside = file.relative_to(top).parts if top.is_dir() else (file.name,)
    known = set().union(*SPLITS)
    for part in reversed(inside):
        word = re.split(r"[-_.\d]", part, maxsplit=1)[0].lower()
        if word in known:
            return word
    return None


def _begins(file: Path, name: str) -> bool:
    return re.match(rf"{re.escape(name)}([-_.]|$)", file.name) is not None
