"""Rows of prompts and answers to tokenized examples, once, kept in the cache: what recipe sft learns from.

    {"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}
    {"prompt": …, "completion": …}     texts, or lists of messages

A row that cannot be used is counted by reason with its place, as in `sources`; one that does not fit the window is
dropped, cut or refused as configured, and counted apart: it is no fault of the data.
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
from flatout.data.template import BadRow, Spoken, Template
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.data.tokens import npy_header
from flatout.data.writing import sweep, write, writer_lock
from flatout.errors import UsageError
from flatout.files import BadFile, opened, read_json, typed

FORMAT = 4
FACTS = "facts.json"
ENCODED_ROWS = 1024
PARTS: tuple[Which, ...] = ("train", "valid")

Draft = Spoken | tuple[str, str]  # a conversation, or a prompt and its completion


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Tokenized examples end to end; example i is [ends[i - 1], ends[i])."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]  # whether a token is to be learnt
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
        """Those that were saved; whatever else lies there is a BadFile."""
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
    """One array, stored as it is: nothing that would grow when it is read."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
        raise BadFile(path, f"is damaged: {name} is not stored as it was written")
    with archive.open(info) as file:
        found, count = npy_header(file, path=path)
        left = info.file_size - file.tell()
        if found != dtype or count * dtype.itemsize != left:
            raise BadFile(path, f"is damaged: {name} holds {count} of {found} in {left} bytes")
        return np.frombuffer(file.read(left), dtype)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the examples in a folder; written last, so that it vouches for them."""

    key: str
    fingerprints: Mapping[str, str]
    bad_rows: BadRows
    too_long: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The data of one sft run: examples to train on, held-out ones, their tokenizer, and what was left out."""

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
                f"the data has token id {largest}, the model's vocabulary ends at {vocab - 1}: "
                "use the tokenizer that belongs to the model"
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
        """What was left out, in words; nothing where nothing was."""
        words = [self.bad_rows.summary()] if self.bad_rows.bad else []
        words += [
            f"{count} too long for the window ({name.replace('_', ' ')})"
            for name, count in self.too_long.items()
            if count
        ]
        return "; ".join(words)


@contextmanager
def open_conversations(data: DataSettings, *, seed: int, tokenizer: str) -> Iterator[Conversations]:
    """Tokenized first where that was not done yet; every process of a run waits for the first and reads its work."""
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
        raise UsageError(f"{error}; remove {root}, and it is made again") from None
    for name in PARTS:
        if parts[name].fingerprint != facts.fingerprints.get(name) or facts.key != key:
            raise UsageError(f"{root}/{name}.npz is not what was written: remove {root}, and it is made again")
    yield Conversations(
        train=parts["train"],
        valid=parts["valid"],
        tokenizer=codec,
        source=describe_source(data, which="train"),
        bad_rows=facts.bad_rows,
        too_long=facts.too_long,
    )


def _key(data: DataSettings, tokenizer: Tokenizer, *, seed: int, since: Mapping[Which, list[Stamp]]) -> str:
    """One hash of all that decides the examples."""
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
    """A seeded share of the examples, one at least, where there are two."""
    order = np.random.default_rng(seed).permutation(count)
    held = np.zeros(count, np.bool_)
    held[order[: max(1, round(count * share)) if count > 1 else 0]] = True
    return held


class Encoder:
    """Rows to token ids with what is to be learnt of them, counting what cannot be."""

    def __init__(
        self, data: DataSettings, tokenizer: Tokenizer, *, since: Mapping[Which, list[Stamp]] | None = None
    ) -> None:
        self.data, self.tokenizer, self._since = data, tokenizer, since or {}
        self.tally = Tally.of(data)
        self.too_long = {"dropped": 0, "truncated": 0, "prompt_alone": 0}
        self._template: Template | None = None

    @property
    def template(self) -> Template:
        """Looked for when the first row needs it: texts need none."""
        if self._template is None:
            self._template = Template(self.tokenizer)
        return self._template

    def summary(self) -> str:
        words = [self.tally.summary()] if self.tally.num_bad else []
        words += [f"{count} too long ({name.replace('_', ' ')})" for name, count in self.too_long.items() if count]
        return "; ".join(words) or "none of them left out"

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
        """The example as far as the window holds it; None if nothing of it is to be learnt there."""
        # The last token is only a target, and takes no place.
        most = self.data.sequence_length + 1
        if len(ids) <= most:
            return ids, trained
        if self.data.too_long == "stop":
            raise UsageError(
                f"{where}: {len(ids) - 1} tokens, data.sequence_length is {most - 1}: raise it, or set data.too_long "
                "to drop or truncate"
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
        """The ids of each, and which are to be learnt."""
        talks = [draft for draft in drafts if isinstance(draft, Spoken)]
        spoken = iter(self.template.encode_batch(talks) if talks else [])
        plain = [draft for draft in drafts if not isinstance(draft, Spoken)]
        written = iter(self.tokenizer.encode_batch([text for pair in plain for text in pair]))
        encoded = []
        for draft in drafts:
            if isinstance(draft, Spoken):
                one = next(spoken)
                ids, trained = one.ids, one.answered
            else:
                before, after = [*self.tokenizer.begin_ids, *next(written)], [*next(written), self.tokenizer.eos_id]
                ids, trained = [*before, *after], [False] * len(before) + [True] * len(after)
            learnt = np.asarray(trained, np.bool_) | (self.data.train_on == "all")
            encoded.append((np.asarray(ids, np.int32), learnt))
        return encoded

    def draft(self, row: Any) -> Draft:
        """What a row says, in text: a conversation, or a prompt and its completion."""
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

    def _chat(self, messages: Any, *, given: int = 0) -> Spoken:
        """`given` messages at the beginning are a prompt: what the assistant says in them is not learnt."""
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise BadRow("messages are no list of objects")
        if self.data.system is not None and messages[0].get("role") != "system":
            messages, given = [{"role": "system", "content": self.data.system}, *messages], given and given + 1
        talk = self.template.spoken(messages, given=given)
        _require_unicode(talk.text)
        return talk


def _require_unicode(*texts: str) -> None:
    """JSON can spell half of a surrogate pair, which no tokenizer takes."""
    if not all(encodable(text) for text in texts):
        raise BadRow("invalid Unicode")
