"""Tokenizes rows of prompts and answers once and caches the examples. They are the training data of recipe sft.

`formats` says what a row means, `rows` reads it. A row that cannot be used is counted by reason with its place, as in
`sources`. Fields that no format uses are counted too. A row that does not fit the window is
dropped, cut or refused as configured, and counted separately.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.config.settings import DataSettings, RowFormat, SourceSettings
from flatout.data import formats
from flatout.data.formats import Ids, Pair, Pieces
from flatout.data.forms import form_of
from flatout.data.manifest import BadRows
from flatout.data.prepare import cache_folder
from flatout.data.rows import files_of, read_rows, sources_of
from flatout.data.sources import Stamp, Tally, Which, encodable, stamps
from flatout.data.template import BadRow, Conversation, Template, Turns
from flatout.data.tokenizer import Tokenizer, load_tokenizer, with_form
from flatout.data.tokens import npy_header
from flatout.data.writing import sweep, write, writer_lock
from flatout.errors import UsageError
from flatout.files import BadFile, opened, read_json, typed

FORMAT = 6
FACTS = "facts.json"
ENCODED_ROWS, ENCODED_CHARACTERS = 1024, 1 << 21
PARTS: tuple[Which, ...] = ("train", "valid")

Draft = Conversation | Pieces | Ids
Encoded = tuple[NDArray[np.int32], NDArray[np.bool_]]  # ids, and which of them are learnt
Since = Mapping[Which, list[list[Stamp]]]  # the files of every source at the start
MOST_REASONS = 50  # that a bad row may have; rows with ever new keys are counted together


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Tokenized examples, concatenated; example i is [ends[i - 1], ends[i])."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]  # whether a token is trained on
    ends: NDArray[np.int64]
    # One value for each token, for objectives that need them: old log-probability, advantage, weight. Never saved.
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    @property
    def trained_counts(self) -> NDArray[np.int64]:
        """How many tokens of each example are trained on."""
        summed = np.concatenate([[0], np.cumsum(self.trained)])
        found: NDArray[np.int64] = summed[self.ends] - summed[self.ends - self.lengths]
        return found

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for array in (self.tokens, self.trained, self.ends):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @classmethod
    def of(cls, rows: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> Examples:
        pairs = list(rows)
        none = (np.zeros(0, np.int32), np.zeros(0, np.bool_))
        return cls(
            tokens=np.concatenate([none[0], *(ids for ids, _ in pairs)]).astype(np.int32),
            trained=np.concatenate([none[1], *(trained for _, trained in pairs)]).astype(np.bool_),
            ends=np.cumsum([len(ids) for ids, _ in pairs], dtype=np.int64),
        )

    def part(self, chosen: NDArray[np.bool_]) -> Examples:
        """Some of them, in the same order."""
        each = np.repeat(chosen, self.lengths)
        return Examples(
            tokens=self.tokens[each],
            trained=self.trained[each],
            ends=np.cumsum(self.lengths[chosen], dtype=np.int64),
            columns={name: values[each] for name, values in self.columns.items()},
        )

    def save(self, path: Path) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, tokens=self.tokens, trained=self.trained, ends=self.ends)
        write(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> Examples:
        """Reads saved examples; raises BadFile for anything else at that path."""
        try:
            with opened(path, root=path.parent) as file, zipfile.ZipFile(file) as archive:
                size = os.fstat(file.fileno()).st_size
                found = cls(
                    tokens=_member(archive, "tokens", np.dtype(np.int32), path=path, most=size),
                    trained=_member(archive, "trained", np.dtype(np.bool_), path=path, most=size),
                    ends=_member(archive, "ends", np.dtype(np.int64), path=path, most=size),
                )
        except FileNotFoundError:
            raise BadFile(path, "is missing") from None
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, KeyError, ValueError) as error:
            raise BadFile(path, f"is damaged ({error})") from None
        count, ends = len(found.tokens), found.ends
        if len(found.trained) != count or (ends[-1] if len(ends) else 0) != count or (found.lengths <= 0).any():
            raise BadFile(path, "is damaged: its examples do not end where its tokens do")
        return found


def _member(archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], *, path: Path, most: int) -> NDArray[Any]:
    """Reads one array, which must be stored uncompressed, so that it cannot expand beyond the file's size."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
        raise BadFile(path, f"is damaged: {name} is not stored as it was written")
    with archive.open(info) as file:
        found, count = npy_header(file, path=path)
        left = info.file_size - file.tell()
        if found != dtype or count * dtype.itemsize != left:
            raise BadFile(path, f"is damaged: {name} declares {count} numbers of type {found} in {left} bytes")
        return np.frombuffer(file.read(left), dtype)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about the examples in a folder. They are written last, so their presence means that the folder is whole."""

    key: str
    fingerprints: Mapping[str, str]
    bad_rows: BadRows
    too_long: Mapping[str, int]
    counts: Mapping[str, tuple[int, ...]]  # examples of each source, in the training and the validation data
    formats: tuple[Mapping[str, int], ...]  # rows of each source by their format
    unused: tuple[Mapping[str, int], ...]  # rows of each source that have a field which is not used
    form: str | None  # the plain-text form that most prompts have


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The data of one sft run: training and held-out examples, their tokenizer, and the rows left out."""

    train: Examples
    valid: Examples
    tokenizer: Tokenizer
    sources: tuple[SourceSettings, ...]
    facts: Facts

    @property
    def source(self) -> str:
        return ", ".join(
            f"{source.label} ({', '.join(found)})" if found else source.label
            for source, found in zip(self.sources, self.facts.formats, strict=True)
        )

    @property
    def bad_rows(self) -> BadRows:
        return self.facts.bad_rows

    @property
    def too_long(self) -> Mapping[str, int]:
        return self.facts.too_long

    @property
    def counts(self) -> tuple[int, ...]:
        """Training examples of each source, in the order of `train`."""
        return self.facts.counts["train"]

    @property
    def fingerprint(self) -> str:
        return self.train.fingerprint

    def check_vocab(self, vocab: int) -> None:
        largest = max(int(part.tokens.max(initial=0)) for part in (self.train, self.valid))
        if largest >= vocab:
            raise UsageError(
                f"the data has token id {largest}, but the model's vocabulary ends at {vocab - 1}: "
                "use the model's own tokenizer"
            )

    def describe(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "train_tokens": len(self.train.tokens),
            "valid_tokens": len(self.valid.tokens),
            "train_examples": len(self.train),
            "valid_examples": len(self.valid),
            "trained_tokens": int(self.train.trained.sum()),
            "complete": True,
            "tokenizer": self.tokenizer.name,
            "vocab": self.tokenizer.vocab_size,
            "fingerprint": self.fingerprint,
            "bad_rows": asdict(self.bad_rows),
            "too_long": dict(self.too_long),
            "left_out": self.summary(),
        }

    def summary(self) -> str:
        """Describes the rows and fields left out; empty if there are none."""
        words = [self.bad_rows.summary()] if self.bad_rows.bad else []
        words += unused_words(self.sources, self.facts.unused)
        words += [
            f"{count} too long for the window ({name.replace('_', ' ')})"
            for name, count in self.too_long.items()
            if count
        ]
        return "; ".join(words)


@contextmanager
def open_conversations(
    data: DataSettings, *, seed: int, tokenizer: str, pairs: bool = False
) -> Iterator[Conversations]:
    """Opens the examples, or pairs of them, tokenized first if necessary. The other ranks wait for the first."""
    codec = load_tokenizer(tokenizer, documents=None, cache=Path())
    sources: dict[Which, tuple[SourceSettings, ...]] = {which: sources_of(data, which=which) for which in PARTS}
    since = {which: [stamps(files_of(source)) for source in sources[which]] for which in PARTS}
    key = _key(data, codec, seed=seed, since=since, pairs=pairs)
    root = cache_folder(data) / "sft" / key
    if not os.path.lexists(root / FACTS):
        with writer_lock(root, wait=True):
            if not os.path.lexists(root / FACTS):
                sweep(root)
                _write(root, data, codec, seed=seed, key=key, since=since, pairs=pairs)
    try:
        facts = typed(Facts, read_json(root / FACTS, root=root), source=root / FACTS)
        parts = {name: Examples.load(root / f"{name}.npz") for name in PARTS}
    except BadFile as error:
        raise UsageError(f"{error}; remove {root}, and it is rebuilt") from None
    for name in PARTS:
        if parts[name].fingerprint != facts.fingerprints.get(name) or facts.key != key:
            raise UsageError(f"{root}/{name}.npz was changed after it was written: remove {root}, and it is rebuilt")
    yield Conversations(
        train=parts["train"],
        valid=parts["valid"],
        tokenizer=with_form(codec, facts.form),
        sources=sources["train"],
        facts=facts,
    )


def _key(data: DataSettings, tokenizer: Tokenizer, *, seed: int, since: Since, pairs: bool) -> str:
    """One hash of everything that determines the examples."""
    names = (
        "source", "name", "subset", "split", "format", "prompt_field", "completion_field", "messages_field", "template",
        "as_chat", "system", "train_on", "too_long", "sequence_length", "valid_share", "valid_name", "valid_split",
        "on_bad_row", "max_bad_share",
    )  # fmt: skip
    kept = sorted(getattr(tokenizer, "files", {}).items())
    sources = [asdict(source) for source in data.sources]
    content = [FORMAT, seed, pairs, [getattr(data, n) for n in names], sources, since, tokenizer.fingerprint, kept]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def _write(
    root: Path, data: DataSettings, tokenizer: Tokenizer, *, seed: int, key: str, since: Since, pairs: bool
) -> None:
    encoder = Encoder(data, tokenizer, since=since, pairs=pairs)
    train, counts = encoder.read("train")
    if sources_of(data, which="valid"):
        valid, valid_counts = encoder.read("valid")
    else:
        unit = 2 if pairs else 1  # the two answers of a pair stay together
        held = [_held_out(count // unit, share=data.valid_share, seed=seed) for count in counts]
        chosen = np.repeat(np.concatenate(held), unit)
        valid_counts = tuple(int(part.sum()) * unit for part in held)
        counts = tuple(count - kept for count, kept in zip(counts, valid_counts, strict=True))
        train, valid = train.part(~chosen), train.part(chosen)
    for name, part in (("train", train), ("valid", valid)):
        if not len(part):
            labels = ", ".join(source.label for source in sources_of(data, which="train"))
            raise UsageError(
                f"no examples to {'train on' if name == 'train' else 'validate with'}: "
                f"{labels} has {encoder.tally.rows} rows, {encoder.summary()}"
            )
        part.save(root / f"{name}.npz")
    facts = Facts(
        key=key,
        fingerprints={"train": train.fingerprint, "valid": valid.fingerprint},
        bad_rows=encoder.tally.facts(),
        too_long=encoder.too_long,
        counts={"train": counts, "valid": valid_counts},
        formats=tuple(encoder.formats),
        unused=tuple(encoder.unused),
        form=encoder.form,
    )
    write(root / FACTS, json.dumps(asdict(facts), indent=1).encode())


def unused_words(sources: Sequence[SourceSettings], unused: Sequence[Mapping[str, int]]) -> list[str]:
    """Names the fields of rows that are not used, for each source that has some."""
    words = []
    for source, fields in zip(sources, unused, strict=True):
        if fields:
            most = sorted(fields.items(), key=lambda item: (-item[1], item[0]))
            shown = ", ".join(f"{name!r} in {count:,} rows" for name, count in most[:6])
            more = f" and {len(most) - 6} more" if len(most) > 6 else ""
            words.append(f"fields of {source.label} that are not used: {shown}{more}")
    return words


def _held_out(count: int, *, share: float, seed: int) -> NDArray[np.bool_]:
    """A seeded share of the examples; at least one if there are two."""
    order = np.random.default_rng(seed).permutation(count)
    held = np.zeros(count, np.bool_)
    held[order[: max(1, round(count * share)) if count > 1 else 0]] = True
    return held


class Encoder:
    """Turns rows into token ids with a mask of trained tokens, and counts rows and fields that are not used.

    With `pairs` a row has two answers, which become two examples, one after the other.
    """

    def __init__(
        self, data: DataSettings, tokenizer: Tokenizer, *, since: Since | None = None, pairs: bool = False
    ) -> None:
        self.data, self.tokenizer, self.pairs, self._since = data, tokenizer, pairs, since or {}
        self.tally = Tally.of(data)
        self.too_long = {"dropped": 0, "truncated": 0, "prompt_alone": 0}
        # Of the training sources: rows by format, and rows by fields that are not used.
        count = len(sources_of(data, which="train"))
        self.formats: list[dict[str, int]] = [{} for _ in range(count)]
        self.unused: list[dict[str, int]] = [{} for _ in range(count)]
        self._forms: dict[str | None, int] = {}  # training rows by the form of their prompt
        self._template: Template | None = None

    @property
    def form(self) -> str | None:
        """The form of more than half of the training rows."""
        form, count = max(self._forms.items(), key=lambda item: item[1], default=(None, 0))
        return form if 2 * count > sum(self._forms.values()) else None

    @property
    def template(self) -> Template:
        """Loaded when the first conversation needs it; plain texts need no template."""
        if self._template is None:
            self._template = Template(self.tokenizer)
        return self._template

    def summary(self) -> str:
        words = [self.tally.summary()] if self.tally.num_bad else []
        words += [f"{count} too long ({name.replace('_', ' ')})" for name, count in self.too_long.items() if count]
        return "; ".join(words) or "and no row was left out"

    def read(self, which: Which) -> tuple[Examples, tuple[int, ...]]:
        """The examples of all sources, one source after the other, and how many each of them has."""
        found: list[Encoded] = []
        counts = []
        for number, source in enumerate(sources_of(self.data, which=which)):
            before = len(found)
            found += self._fitting(source, number=number, which=which)
            counts.append(len(found) - before)
        self.tally.check()
        return Examples.of(found), tuple(counts)

    def rows(self, source: SourceSettings, *, number: int = 0, which: Which = "train") -> Iterator[tuple[str, Any]]:
        since = self._since.get(which)
        kind = self.data.source if self.data.source in ("jsonl", "parquet") else None
        return read_rows(source, tally=self.tally, kind=kind, since=since[number] if since else None)

    def _fitting(self, source: SourceSettings, *, number: int, which: Which) -> Iterator[Encoded]:
        rows = self.rows(source, number=number, which=which)
        for chunk in _chunks(self._meanings(rows, source)):
            drafted = iter(self._drafted([part for one in chunk for part in one.parts]))
            drafts: list[tuple[str, Draft]] = []
            for one in chunk:
                parts = [next(drafted) for _ in one.parts]
                if bad := [part for part in parts if isinstance(part, BadRow)]:
                    self._bad(str(bad[0]), one.where)
                    continue
                if which == "train":
                    self._count(one, number)
                drafts += [(one.where, part) for part in parts if not isinstance(part, BadRow)]
            encoded = iter(zip(drafts, self.encode([d for _, d in drafts]), strict=True))
            for (where, _), first in encoded:
                answers = [first, next(encoded)[1]] if self.pairs else [first]
                if not all(trained[1:].any() for _, trained in answers):
                    self.tally.bad("nothing to learn", where=where)
                    continue
                self.tally.good()
                yield from self._fit_all(answers, where)

    def _bad(self, reason: str, where: str) -> None:
        known = reason in self.tally.reasons or len(self.tally.reasons) < MOST_REASONS
        self.tally.bad(reason if known else "another reason", where=where)

    def _fit_all(self, answers: Sequence[Encoded], where: str) -> list[Encoded]:
        """Both answers of a pair, or neither."""
        room = self.data.sequence_length // len(answers)
        if sum(len(ids) - 1 for ids, _ in answers) <= self.data.sequence_length:
            return list(answers)
        fitted = [self._fit(ids, trained, where, room=room) for ids, trained in answers]
        return [one for one in fitted if one is not None] if all(one is not None for one in fitted) else []

    def _fit(self, ids: NDArray[np.int32], trained: NDArray[np.bool_], where: str, *, room: int) -> Encoded | None:
        """The part of the example that fits the window; None if it has no trained token."""
        # The last token is only a target and takes no position.
        most = room + 1
        if len(ids) <= most:
            return (ids, trained) if self.data.too_long == "truncate" else None
        if self.data.too_long == "stop":
            both = " for both answers of a pair" if self.pairs else ""
            raise UsageError(
                f"{where}: {len(ids) - 1} tokens, but data.sequence_length is {self.data.sequence_length}{both}: raise "
                "it, or set data.too_long to drop or truncate"
            )
        if not trained[1:most].any():
            self.too_long["prompt_alone"] += 1
            return None
        if self.data.too_long == "drop":
            self.too_long["dropped"] += 1
            return None
        self.too_long["truncated"] += 1
        return ids[:most], trained[:most]

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded]:
        """The ids of each, and which of them are trained on."""
        conversations = [draft for draft in drafts if isinstance(draft, Conversation)]
        encoded_chats = iter(self.template.encode_batch(conversations) if conversations else [])
        pieces = [draft for draft in drafts if isinstance(draft, Pieces)]
        texts = iter(self.tokenizer.encode_batch([text for draft in pieces for text, _ in draft.texts]))
        encoded = []
        for draft in drafts:
            ids: list[int] = []
            trained: list[bool] = []
            if isinstance(draft, Conversation):
                one = next(encoded_chats)
                ids, trained = one.ids, one.answered
            elif isinstance(draft, Ids):
                ids, trained = list(draft.ids), list(draft.learnt)
            else:
                begin, end = (self.tokenizer.begin_ids, [self.tokenizer.eos_id]) if draft.closed else ([], [])
                ids, trained = [*begin], [False] * len(begin)
                for _, learnt in draft.texts:
                    found = next(texts)
                    ids += found
                    trained += [learnt] * len(found)
                ids, trained = [*ids, *end], [*trained, *([True] * len(end))]
            mask = np.asarray(trained, np.bool_) | (self.data.train_on == "all")
            encoded.append((np.asarray(ids, np.int32), mask))
        return encoded

    def draft(self, row: Any, *, format: RowFormat | None = None) -> Draft:
        """What is learnt from a row of one example."""
        meaning = self.meaning(row, format=format or self.data.format).meaning
        assert not isinstance(meaning, Pair)
        [found] = self._drafted([meaning])
        if isinstance(found, BadRow):
            raise found
        return found

    def meaning(self, row: Any, *, format: RowFormat | None = None) -> formats.Read:
        read = formats.read(row, self.data, format=format, chat=self.tokenizer.has_template)
        if isinstance(read.meaning, Pair) != self.pairs:
            if self.pairs:
                raise BadRow(f"{read.format}: no 'chosen' and 'rejected', which recipe dpo compares")
            raise BadRow("preference: two answers to compare; train on them with recipe: dpo")
        return read

    def _meanings(self, rows: Iterable[tuple[str, Any]], source: SourceSettings) -> Iterator[_Row]:
        for where, row in rows:
            try:
                yield _Row(where=where, row=row, read=self.meaning(row, format=source.format))
            except BadRow as error:
                self._bad(str(error), where)

    def _count(self, one: _Row, number: int) -> None:
        """Counts the format and the form of a row, and its fields that are not used."""
        read, unused = one.read, self.unused[number]
        self._forms[one.form] = self._forms.get(one.form, 0) + 1
        self.formats[number][read.format] = self.formats[number].get(read.format, 0) + 1
        for key in (k for k, value in one.row.items() if k not in read.used and value not in (None, "", [], {})):
            if key in unused or len(unused) < MOST_REASONS:
                unused[str(key)[:40]] = unused.get(str(key)[:40], 0) + 1

    def _drafted(self, parts: Sequence[formats.Part]) -> list[Draft | BadRow]:
        """All conversations are rendered together, which is faster."""
        turns = [self._with_system(part) for part in parts if isinstance(part, Turns)]
        rendered = iter(self.template.conversations(turns) if turns else ())
        found: list[Draft | BadRow] = [next(rendered) if isinstance(part, Turns) else part for part in parts]
        return [one if _has_unicode(one) else BadRow("invalid Unicode") for one in found]

    def _with_system(self, turns: Turns) -> Turns:
        if self.data.system is None or turns.messages[0].get("role") == "system":
            return turns
        messages = [{"role": "system", "content": self.data.system}, *turns.messages]
        return replace(turns, messages=messages, given=turns.given and turns.given + 1)


@dataclass(frozen=True, kw_only=True)
class _Row:
    where: str
    row: Mapping[str, Any]
    read: formats.Read

    @property
    def parts(self) -> tuple[formats.Part, ...]:
        meaning = self.read.meaning
        return (meaning.chosen, meaning.rejected) if isinstance(meaning, Pair) else (meaning,)

    @property
    def form(self) -> str | None:
        """The form of a prompt that is continued as plain text."""
        part = self.parts[0]
        return form_of("".join(text for text, learnt in part.texts if not learnt)) if isinstance(part, Pieces) else None

    @property
    def size(self) -> int:
        """About how many characters it has; a token that is given counts as one."""
        return sum(_size(part) for part in self.parts)


def _size(part: formats.Part) -> int:
    if isinstance(part, Turns):
        return sum(len(str(message.get("content"))) for message in part.messages)
    return sum(len(text) for text, _ in part.texts) if isinstance(part, Pieces) else len(part.ids)


def _chunks(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Rows to encode together: tokenizing takes hundreds of bytes for each character."""
    chunk: list[_Row] = []
    size = 0
    for row in rows:
        if chunk and (len(chunk) == ENCODED_ROWS or size + row.size > ENCODED_CHARACTERS):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row.size
    if chunk:
        yield chunk


def _has_unicode(draft: Draft | BadRow) -> bool:
    """JSON can contain a lone surrogate, which no tokenizer accepts."""
    if isinstance(draft, Conversation):
        return encodable(draft.text)
    return all(encodable(text) for text, _ in draft.texts) if isinstance(draft, Pieces) else True
