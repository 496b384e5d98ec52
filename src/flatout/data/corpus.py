"""The data of one run, opened and verified: training data, held-out data, and their tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flatout.config.settings import DataSettings
from flatout.data.manifest import Manifest
from flatout.data.prepare import left_out_words, prepare, start_background
from flatout.data.shards import Shards
from flatout.data.tokenizer import Tokenizer
from flatout.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Corpus:
    train: Shards
    valid: Shards
    tokenizer: Tokenizer
    source: str

    @property
    def fingerprint(self) -> str:
        """One hash of the training data (see `Shards.fingerprint`). A checkpoint resumes only with the same data."""
        return self.train.fingerprint

    def check_vocab(self, vocab: int) -> None:
        """Refuses data with token ids outside the model's vocabulary."""
        for shards in (self.train, self.valid):
            shards.check_vocab(vocab)

    def describe(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "train_tokens": self.train.num_tokens,
            "valid_tokens": self.valid.num_tokens,
            "complete": self.train.complete,
            "tokenizer": self.tokenizer.name,
            "vocab": self.tokenizer.vocab_size,
            "fingerprint": self.fingerprint,
            "bad_rows": {name: asdict(manifest.bad_rows) for name, manifest in self._manifests.items()},
            "left_out": self.summary(),
        }

    def summary(self) -> str:
        """Describes the rows left out; empty if there are none. A stream counts only what was read so far."""
        return left_out_words(self._manifests.values())

    @property
    def _manifests(self) -> dict[str, Manifest]:
        """The manifests of both parts. Token files of other programs have no manifest."""
        found = {"train": self.train.manifest, "valid": self.valid.manifest}
        return {name: m for name, m in found.items() if m is not None and not (name == "valid" and m is found["train"])}


@contextmanager
def open_corpus(settings: DataSettings, *, seed: int) -> Iterator[Corpus]:
    """Opens the data, prepared first if necessary. A Hugging Face dataset is streamed into shards during training."""
    background = start_background(settings, seed=seed) if settings.source == "hf" else None
    try:
        prepared = background.prepared if background else prepare(settings, seed=seed)
        split = prepared.open()
        yield Corpus(
            train=split.train,
            valid=split.valid,
            tokenizer=prepared.tokenizer,
            source=settings.path or settings.name or settings.source,
        )
    finally:
        if background is not None:
            background.close()


# The options of `flatout data prepare` for the settings that its messages may name.
OPTIONS = {"path": "SOURCE", "name": "hf:NAME", "cache": "--to"} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("tokenizer", "field", "separator", "valid_path", "valid_share", "on_bad_row", "max_bad_share")
}
_SETTING = re.compile(r"(?<![\w./-])data\.([a-z_]+)(?:: (?=(?:skip|stop|byte)\b))?")


def as_options(message: str) -> str:
    """Replaces configuration settings in a message by the command's options."""

    def option(found: re.Match[str]) -> str:
        name = OPTIONS.get(found[1])
        return found[0] if name is None else f"{name} " if found[0].endswith(": ") else name

    return _SETTING.sub(option, message)


def settings_for(source: str, **values: Any) -> DataSettings:
    """The settings for one source on the command line: `embedded`, `hf:NAME`, or files, by their suffix."""
    if source == "embedded":
        return DataSettings(source="embedded", **values)
    if source.startswith("hf:"):
        return DataSettings(source="hf", name=source.removeprefix("hf:"), **values)
    given = Path(source).expanduser()
    names = [p.name for p in given.iterdir()] if given.is_dir() else [given.name]
    kinds: list[tuple[str, Literal["jsonl", "parquet", "text"]]] = [(".jsonl", "jsonl"), (".parquet", "parquet")]
    for ending, kind in [*kinds, (".txt", "text")]:
        if any(ending in name for name in names):
            return DataSettings(source=kind, path=source, **values)
    raise UsageError(f"{source!r} is not a source: give `embedded`, hf:NAME, or .txt, .jsonl or .parquet files")
