"""The data of one run, opened and verified: what to train on, what is held out, and their tokenizer."""

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
        """One hash of what is trained on, see `Shards.fingerprint`: a checkpoint goes on with the same data only."""
        return self.train.fingerprint

    def check_vocab(self, vocab: int) -> None:
        """Refuses data with ids the model has no row for."""
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
        """What was left out, in words; nothing where nothing was. Of a stream, up to what was read of it."""
        return left_out_words(self._manifests.values())

    @property
    def _manifests(self) -> dict[str, Manifest]:
        """What says how the parts were made; nothing does of token files of other programs."""
        found = {"train": self.train.manifest, "valid": self.valid.manifest}
        return {name: m for name, m in found.items() if m is not None and not (name == "valid" and m is found["train"])}


@contextmanager
def open_corpus(settings: DataSettings, *, seed: int) -> Iterator[Corpus]:
    """Prepared first where it is not yet; a Hugging Face dataset is streamed into shards while training goes on."""
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


# What `flatout data prepare` calls the settings that its messages may name.
OPTIONS = {"path": "SOURCE", "name": "hf:NAME", "cache": "--to"} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("tokenizer", "field", "separator", "valid_path", "valid_share", "on_bad_row", "max_bad_share")
}
_SETTING = re.compile(r"(?<![\w./-])data\.([a-z_]+)(?:: (?=(?:skip|stop|byte)\b))?")


def as_options(message: str) -> str:
    """A message with the options of the command in place of the settings of a configuration."""

    def option(found: re.Match[str]) -> str:
        name = OPTIONS.get(found[1])
        return found[0] if name is None else f"{name} " if found[0].endswith(": ") else name

    return _SETTING.sub(option, message)


def settings_for(source: str, **values: Any) -> DataSettings:
    """The settings behind one word on the command line: `embedded`, `hf:NAME`, or files known by their ending."""
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
    raise UsageError(f"{source!r} is neither `embedded`, nor hf:NAME, nor .txt, .jsonl or .parquet files")
