"""The `manifest.json` of a folder of shards, checked against a schema and for consistent numbers.

Nothing is trusted unchecked: every count must fit the others, and the folder must be the expected part, training or
validation. Manifests of earlier versions, which do not name the part, are still read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatout.errors import UsageError
from flatout.files import BadFile, read_json, typed

FORMAT = 1
MANIFEST = "manifest.json"
LARGEST = 1 << 48  # more tokens, or bytes, than any disk holds
_SHA256 = re.compile(r"[0-9a-f]{64}")

Role = Literal["train", "valid"]


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    name: str
    fingerprint: str  # over everything that determines the ids of a text
    vocab_size: int
    eos_id: int
    files: str | None = None  # over all files, including the chat template; None: written by an earlier version


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    tokens: int
    documents: int
    tokens_bytes: int
    documents_bytes: int
    tokens_sha256: str
    documents_sha256: str
    index: int | None = None  # None: written by an earlier version


@dataclass(frozen=True, kw_only=True)
class BadRows:
    """The number of rows that were left out, by reason, with the first places of each."""

    rows: int = 0  # all rows read, including good ones
    bad: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def summary(self) -> str:
        """Describes the rows left out; empty if there are none."""
        places = {why: self.examples.get(why) or ("unknown place",) for why in self.reasons}
        return "; ".join(
            f"{count} row{'' if count == 1 else 's'}: {why} (first: {places[why][0]})"
            for why, count in self.reasons.items()
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    format: int = FORMAT
    complete: bool
    streaming: bool  # written while it is read: windows are then shuffled in blocks, in the order they arrive
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerFacts
    shard_tokens: int
    tokens: int
    documents: int
    max_token_id: int
    shards: tuple[ShardFacts, ...]
    source: Mapping[str, str]  # the source of the data; `key` identifies it
    bad_rows: BadRows
    consumed: int  # source pieces in these shards: where a restarted writer continues
    beside: int  # shards of the other split that belong to these: later ones are rewritten
    role: Role | None = None  # None: written by an earlier version

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check_tokenizer(self, folder: Path | str, fingerprint: str, *, files: str | None = None) -> None:
        """Refuses any tokenizer but the one that made the tokens.

        `files` is the fingerprint of the tokenizer saved with the data, all of whose files must be unchanged.
        """
        facts = self.tokenizer
        if files is not None and facts.files is not None and files != facts.files:
            raise UsageError(
                f"the tokenizer saved with {folder} was changed after the tokens were made with it "
                f"({files[:12]}, not {facts.files[:12]}); restore the old files, or {way_out(Path(folder).parent)}"
            )
        if facts.fingerprint != fingerprint:
            raise UsageError(
                f"{folder} was made by the tokenizer {facts.name} ({facts.fingerprint[:12]}), not by the "
                f"configured one ({fingerprint[:12]}); set data.tokenizer to that one, or prepare the data again"
            )


def read_manifest(folder: Path, *, role: Role | None = None) -> Manifest | None:
    """The manifest of a folder, or `None`; a damaged or newer one is refused.

    A manifest of the other part than `role` is refused too: the folders were swapped.
    """
    path = folder / MANIFEST
    try:
        raw = read_json(path, root=folder)
        if raw.get("format") != FORMAT:
            raise BadFile(path, f"has format {str(raw.get('format'))[:20]}, this version reads {FORMAT}")
        manifest = typed(Manifest, raw, source=path)
    except FileNotFoundError:
        return None
    except BadFile as error:
        raise UsageError(f"{error}; {way_out(folder)}") from None
    if mistake := _mistake(manifest):
        raise UsageError(f"{path} is damaged: {mistake}; {way_out(folder)}")
    if role is not None and manifest.role not in (None, role):
        raise UsageError(
            f"{folder} holds the {manifest.role} part of the data, not the {role} part: the folders were swapped; "
            "put each back in its place, or prepare the data again"
        )
    return manifest


def _mistake(manifest: Manifest) -> str | None:
    """Describes the first inconsistency, or None."""
    tokenizer, shards = manifest.tokenizer, manifest.shards
    width = {"uint16": 2, "uint32": 4}[manifest.dtype]
    counts = [manifest.tokens, manifest.documents, manifest.consumed, manifest.beside, manifest.bad_rows.bad]
    if not all(
        0 <= count <= LARGEST for count in [*counts, manifest.bad_rows.rows, *manifest.bad_rows.reasons.values()]
    ):
        return "a count is negative or too large"
    if not 1 <= manifest.shard_tokens <= LARGEST:
        return f"shard_tokens is {manifest.shard_tokens}"
    if not (1 <= tokenizer.vocab_size <= 1 << 32 and 0 <= tokenizer.eos_id < tokenizer.vocab_size):
        return f"the EOS id {tokenizer.eos_id} is not below the vocabulary size {tokenizer.vocab_size}"
    if not 0 <= manifest.max_token_id < 1 << (8 * width):
        return f"token id {manifest.max_token_id} does not fit {manifest.dtype}"
    if "key" not in manifest.source:
        return "it does not name its source"
    for index, shard in enumerate(shards):
        if shard.index not in (None, index):
            return f"shard {shard.index} is in the place of shard {index}"
        if not (0 < shard.tokens <= LARGEST and 0 <= shard.documents <= shard.tokens):
            return f"shard {index} has {shard.tokens} tokens in {shard.documents} documents"
        if shard.tokens_bytes != shard.tokens * width or shard.documents_bytes != shard.documents * 8:
            return f"shard {index}: its numbers do not agree"
        if not (_SHA256.fullmatch(shard.tokens_sha256) and _SHA256.fullmatch(shard.documents_sha256)):
            return f"shard {index} has a checksum that is not a sha256"
    if manifest.tokens != sum(shard.tokens for shard in shards):
        return "its numbers do not agree"
    if manifest.documents != sum(shard.documents for shard in shards):
        return "its numbers do not agree"
    return None


def way_out(folder: Path) -> str:
    return f"remove {folder} and prepare the data again"
