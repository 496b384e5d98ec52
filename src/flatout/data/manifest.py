"""What a folder of shards says of itself: `manifest.json`, held to a schema and to its own numbers.

Whoever reads it takes nothing on trust: every count must fit the others, and the folder must be the part, training or
validation, that it is taken for. Manifests of earlier versions, which do not say the part, are still read.
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
    fingerprint: str  # over all that decides which ids a text gets
    vocab_size: int
    eos_id: int
    files: str | None = None  # over all of its files, the chat template included; None: written by an earlier version


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
    """The rows that were left out: how many, by reason, with the first places of each."""

    rows: int = 0  # all that were read, good ones included
    bad: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def summary(self) -> str:
        """In words; nothing where nothing was left out."""
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
    source: Mapping[str, str]  # what it was made from; `key` identifies it
    bad_rows: BadRows
    consumed: int  # source pieces behind these shards: where a restarted writer goes on
    beside: int  # shards of the other split that belong to these: later ones are written again
    role: Role | None = None  # None: written by an earlier version

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check_tokenizer(self, folder: Path | str, fingerprint: str, *, files: str | None = None) -> None:
        """Refuses another tokenizer than the one that made the tokens.

        `files`: of the tokenizer that is kept with the data, which must be the same in all its files.
        """
        facts = self.tokenizer
        if files is not None and facts.files is not None and files != facts.files:
            raise UsageError(
                f"the tokenizer kept with {folder} was changed since the tokens were made with it "
                f"({files[:12]}, not {facts.files[:12]}); put the old files back, or {way_out(Path(folder).parent)}"
            )
        if facts.fingerprint != fingerprint:
            raise UsageError(
                f"{folder} was made by the tokenizer {facts.name} ({facts.fingerprint[:12]}), not by the one "
                f"configured ({fingerprint[:12]}); set data.tokenizer to that one, or prepare the data again"
            )


def read_manifest(folder: Path, *, role: Role | None = None) -> Manifest | None:
    """The manifest of a folder, `None` where there is none; a damaged or newer one is refused.

    So is one of the other part than `role`, whose folders were exchanged.
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
            f"{folder} holds the {manifest.role} part of the data, not the {role} part: the folders were exchanged; "
            "put each back in its place, or prepare the data again"
        )
    return manifest


def _mistake(manifest: Manifest) -> str | None:
    """The first thing that cannot be, in words."""
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
        return f"the end mark {tokenizer.eos_id} is not one of {tokenizer.vocab_size} ids"
    if not 0 <= manifest.max_token_id < 1 << (8 * width):
        return f"token id {manifest.max_token_id} does not fit {manifest.dtype}"
    if "key" not in manifest.source:
        return "it does not say what it was made from"
    for index, shard in enumerate(shards):
        if shard.index not in (None, index):
            return f"shard {shard.index} stands in the place of shard {index}"
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
