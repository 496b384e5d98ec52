"""Tokenizes rows of prompts and answers once and caches the examples. They are the training data of recipe sft.

    {"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}
    {"prompt": …, "completion": …}     texts, or lists of messages

A row that cannot be used is counted by reason with its place, as in `sources`. A row that does not fit the window is
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
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.config.settings import DataSettings
from flatout.data.manifest import BadRows
from flatout.data.prepare import cache_folder
from flatout.data.sources import Stamp, Tally, Which, describe_source, encodable, read_rows, source_files, stamps
from flatout.data.template import BadRow, Conversation, Template
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.data.tokens import npy_header
from flatout.data.writing import sweep, write, writer_lock
from flatout.errors import UsageError
from flatout.files import BadFile, opened, read_json, typed

FORMAT = 4
FACTS = "facts.json"
ENCODED_ROWS = 1024
PARTS: tuple[Which, ...] = ("train", "valid")

Draft = Conversation | tuple[str, str]  # a conversation, or a prompt and its completion


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


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The data of one sft run: training and held-out examples, their tokenizer, and the rows left out."""

    train: Examples
    valid: Examples
    tokenizer: Tokenizer
    source: str
    bad_rows: BadRows
    too_long: Mapping[str, int]

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
        """Describes the rows left out; empty if there are none."""
        words = [self.bad_rows.summary()] if self.bad_rows.bad else []
        words += [
            f"{count} too long for the window ({name.replace('_', ' ')})"
            for name, count in self.too_long.items()
            if count
        ]
        return "; ".join(words)


@contextmanager
def open_conversations(data: DataSettings, *, seed: int, tokenizer: str) -> Iterator[Conversations]:
    """Opens the examples, tokenized first if necessary. The other ranks wait for the first and read its files."""
    codec = load_tokenizer(tokenizer, documents=None, cache=Path())
    since: dict[Which, list[Stamp]] = {"train": stamps(source_files(data, which="train"))}
    if data.valid_path:
        since["valid"] = stamps(source_files(data, which="valid"))
    key = _key(data, codec, seed=seed, since=since)
    root = cache_folder(data) / "sft" / key
    if not os.path.lexists(root / FACTS):
        with writer_lock(root, wait=True):
            if not os.path.lexists(root / FACTS):
                sweep(root)
                _write(root, data, codec, seed=seed, key=key, since=since)
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
        tokenizer=codec,
        source=describe_source(data, which="train"),
        bad_rows=facts.bad_rows,
        too_long=facts.too_long,
    )


def _key(data: DataSettings, tokenizer: Tokenizer, *, seed: int, since: Mapping[Which, list[Stamp]]) -> str:
    """One hash of everything that determines the examples."""
    names = (
        "source", "name", "subset", "split", "prompt_field", "completion_field", "messages_field", "as_chat", "system",
        "train_on", "too_long", "sequence_length", "valid_share", "on_bad_row", "max_bad_share",
    )  # fmt: skip
    kept = sorted(getattr(tokenizer, "files", {}).items())
    content = [FORMAT, seed, [getattr(data, name) for name in names], since, tokenizer.fingerprint, kept]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def _write(
    root: Path,
    data: DataSettings,
    tokenizer: Tokenizer,
    *,
    seed: int,
    key: str,
    since: Mapping[Which, list[Stamp]],
) -> None:
    encoder = Encoder(data, tokenizer, since=since)
    train = encoder.read("train")
    if data.valid_path:
        valid = encoder.read("valid")
    else:
        held = _held_out(len(train), share=data.valid_share, seed=seed)
        train, valid = train.part(~held), train.part(held)
    for name, part in (("train", train), ("valid", valid)):
        if not len(part):
            raise UsageError(
                f"no examples to {'train on' if name == 'train' else 'validate with'}: "
                f"{describe_source(data, which='train')} has {encoder.tally.rows} rows, {encoder.summary()}"
            )
        part.save(root / f"{name}.npz")
    facts = Facts(
        key=key,
        fingerprints={"train": train.fingerprint, "valid": valid.fingerprint},
        bad_rows=encoder.tally.facts(),
        too_long=encoder.too_long,
    )
    write(root / FACTS, json.dumps(asdict(facts), indent=1).encode())


def _held_out(count: int, *, share: float, seed: int) -> NDArray[np.bool_]:
    """A seeded share of the examples; at least one if there are two."""
    order = np.random.default_rng(seed).permutation(count)
    held = np.zeros(count, np.bool_)
    held[order[: max(1, round(count * share)) if count > 1 else 0]] = True
    return held


class Encoder:
    """Turns rows into token ids with a mask of trained tokens, and counts rows that cannot be used."""

    def __init__(
        self, data: DataSettings, tokenizer: Tokenizer, *, since: Mapping[Which, list[Stamp]] | None = None
    ) -> None:
        self.data, self.tokenizer, self._since = data, tokenizer, since or {}
        self.tally = Tally.of(data)
        self.too_long = {"dropped": 0, "truncated": 0, "prompt_alone": 0}
        self._template: Template | None = None

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

    def read(self, which: Which) -> Examples:
        examples = Examples.of(self._fitting(which))
        self.tally.check()
        return examples

    def _fitting(self, which: Which) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        rows = read_rows(self.data, which=which, tally=self.tally, since=self._since.get(which))
        while chunk := list(islice(rows, ENCODED_ROWS)):
            drafts: list[tuple[str, Draft]] = []
            for where, row in chunk:
                try:
                    drafts.append((where, self.draft(row)))
                except BadRow as error:
                    self.tally.bad(str(error), where=where)
            for (where, _), (ids, trained) in zip(drafts, self.encode([d for _, d in drafts]), strict=True):
                if not trained[1:].any():
                    self.tally.bad("nothing to learn", where=where)
                    continue
                self.tally.good()
                if (fitted := self._fit(ids, trained, where)) is not None:
                    yield fitted

    def _fit(
        self, ids: NDArray[np.int32], trained: NDArray[np.bool_], where: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]] | None:
        """The part of the example that fits the window; None if it has no trained token."""
        # The last token is only a target and takes no position.
        most = self.data.sequence_length + 1
        if len(ids) <= most:
            return ids, trained
        if self.data.too_long == "stop":
            raise UsageError(
                f"{where}: {len(ids) - 1} tokens, but data.sequence_length is {most - 1}: raise it, or set "
                "data.too_long to drop or truncate"
            )
        if not trained[1:most].any():
            self.too_long["prompt_alone"] += 1
            return None
        if self.data.too_long == "drop":
            self.too_long["dropped"] += 1
            return None
        self.too_long["truncated"] += 1
        return ids[:most], trained[:most]

    def encode(self, drafts: Sequence[Draft]) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """The ids of each, and which of them are trained on."""
        conversations = [draft for draft in drafts if isinstance(draft, Conversation)]
        encoded_chats = iter(self.template.encode_batch(conversations) if conversations else [])
        plain = [draft for draft in drafts if not isinstance(draft, Conversation)]
        texts = iter(self.tokenizer.encode_batch([text for pair in plain for text in pair]))
        encoded = []
        for draft in drafts:
            if isinstance(draft, Conversation):
                one = next(encoded_chats)
                ids, trained = one.ids, one.answered
            else:
                before, after = (
                    [*self.tokenizer.begin_ids, *next(texts)],
                    [*next(texts), self.tokenizer.eos_id],
                )
                ids, trained = [*before, *after], [False] * len(before) + [True] * len(after)
            mask = np.asarray(trained, np.bool_) | (self.data.train_on == "all")
            encoded.append((np.asarray(ids, np.int32), mask))
        return encoded

    def draft(self, row: Any) -> Draft:
        """The text of a row: a conversation, or a prompt and its completion."""
        data = self.data
        if not isinstance(row, dict):
            raise BadRow("not an object")
        if row.get(data.messages_field) is not None:
            return self._chat(row[data.messages_field])
        missing = [name for name in (data.prompt_field, data.completion_field) if row.get(name) is None]
        if len(missing) == 2:
            raise BadRow(f"neither {data.messages_field!r} nor {data.prompt_field!r} and {data.completion_field!r}")
        if missing:
            raise BadRow(f"missing field {missing[0]!r}")
        prompt, completion = row[data.prompt_field], row[data.completion_field]
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._chat([*prompt, *completion], given=len(prompt))
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise BadRow("prompt and completion are neither two texts nor two lists of messages")
        if not completion.strip():
            raise BadRow("an empty answer")
        if data.as_chat:
            return self._chat([{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}])
        _require_unicode(prompt, completion)
        return prompt, completion

    def _chat(self, messages: Any, *, given: int = 0) -> Conversation:
        """The first `given` messages are a prompt: assistant messages among them are not trained on."""
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise BadRow("messages are not a list of objects")
        if self.data.system is not None and messages[0].get("role") != "system":
            messages, given = [{"role": "system", "content": self.data.system}, *messages], given and given + 1
        chat = self.template.conversation(messages, given=given)
        _require_unicode(chat.text)
        return chat


def _require_unicode(*texts: str) -> None:
    """JSON can contain a lone surrogate, which no tokenizer accepts."""
    if not all(encodable(text) for text in texts):
        raise BadRow("invalid Unicode")
