"""Data that is damaged, exchanged, changed while it is read, or made to harm: named and refused, never used."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_facts import FACTS
from tests.data.talks import tokenizer_folder, write_rows

from flatout.config.settings import DataSettings
from flatout.data import examples, sources
from flatout.data import prepare as preparing
from flatout.data.examples import Encoder, Examples, open_conversations
from flatout.data.prepare import describe, prepare
from flatout.data.rows import read_rows, sources_of
from flatout.data.shards import Shards, ShardWriter
from flatout.data.sources import Tally, read_documents
from flatout.errors import UsageError

TEXTS = [f"document number {i} says what it says" for i in range(300)]
HANG_S = 120  # a guard: nothing here takes a fraction of it


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def settings(rows: Path, tmp_path: Path) -> DataSettings:
    return DataSettings(
        source="jsonl", path=str(rows), tokenizer="bpe:300", valid_share=0.1, cache=str(tmp_path / "cache")
    )


def script(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what it is about would hang or kill it."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


# -- the tokenizer that made the tokens ---------------------------------------------------------------------


def changed_vocabulary(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocabulary = raw["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(raw))


def changed_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.mark.parametrize("change", [changed_vocabulary, changed_template])
def test_a_tokenizer_that_was_changed_in_the_cache_is_refused(
    settings: DataSettings, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    prepared = prepare(settings, seed=0)
    change(prepared.train.parent / "tokenizer")
    says = rf"tokenizer saved with {prepared.train} was changed .*; restore the old files, or remove .*"
    with pytest.raises(UsageError, match=says):
        prepare(settings, seed=0).open()
    with pytest.raises(UsageError, match=says):
        prepare(DataSettings(source="tokens", path=str(prepared.train.parent)), seed=0)


def test_an_interrupted_preparation_does_not_go_on_with_another_tokenizer(
    settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "SHARD_TOKENS", 500)
    monkeypatch.setattr(preparing, "ENCODE_DOCUMENTS", 10)

    def stop(_bytes: int, tokens: int) -> None:
        if tokens > 2000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(settings, seed=0, to=tmp_path / "to", progress=stop)
    changed_vocabulary(tmp_path / "to" / "tokenizer")
    with pytest.raises(UsageError, match="was changed after the tokens were made"):
        prepare(settings, seed=0, to=tmp_path / "to")


# -- each part in its place ---------------------------------------------------------------------------------


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def test_exchanged_parts_are_refused(settings: DataSettings, tmp_path: Path) -> None:
    to = tmp_path / "to"
    prepare(settings, seed=0, to=to)
    exchange(to / "train", to / "valid")
    says = "holds the valid part of the data, not the train part: the folders were swapped"
    for use in (
        lambda: prepare(settings, seed=0, to=to),
        lambda: prepare(DataSettings(source="tokens", path=str(to)), seed=0),
        lambda: describe(to),
    ):
        with pytest.raises(UsageError, match=says):
            use()


def test_a_part_may_be_named_for_any_use(settings: DataSettings, tmp_path: Path) -> None:
    to = tmp_path / "to"
    made = prepare(settings, seed=0, to=to)
    given = DataSettings(source="tokens", path=str(to / "valid"), valid_path=str(to / "train"))
    split = prepare(given, seed=0).open()
    assert split.train.num_tokens == made.open().valid.num_tokens


def test_shards_exchanged_with_their_entries_are_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "train", tokenizer=FACTS, source={"key": "k"})
    for low in (0, 100):
        writer.append(np.arange(low, low + 50))
        writer.flush()
    writer.finish()
    for kind in ("tokens", "documents"):
        exchange(tmp_path / "train" / f"{kind}-00000.bin", tmp_path / "train" / f"{kind}-00001.bin")
    path = tmp_path / "train" / "manifest.json"
    raw = json.loads(path.read_text())
    raw["shards"].reverse()
    path.write_text(json.dumps(raw))
    with pytest.raises(UsageError, match="shard 1 is in the place of shard 0"):
        Shards.open(tmp_path / "train")


def test_manifests_of_earlier_versions_are_read(settings: DataSettings, tmp_path: Path) -> None:
    to = tmp_path / "to"
    tokens = prepare(settings, seed=0, to=to).open().train.num_tokens
    for path in to.glob("*/manifest.json"):
        raw = json.loads(path.read_text())
        del raw["role"], raw["tokenizer"]["files"]
        for shard in raw["shards"]:
            del shard["index"]
        path.write_text(json.dumps(raw | {"bad_rows": {}}))
    assert prepare(settings, seed=0, to=to).reused
    assert prepare(DataSettings(source="tokens", path=str(to)), seed=0).open().train.num_tokens == tokens


# -- sources that change ------------------------------------------------------------------------------------


def grow(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    """By another file of the same size and time."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"says", b"asks"))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", [grow, cut, replaced])
def test_a_source_that_changes_while_it_is_read_is_named(
    settings: DataSettings, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(preparing, "SHARD_TOKENS", 500)
    monkeypatch.setattr(preparing, "ENCODE_DOCUMENTS", 10)
    changes = iter([change])

    def progress(_bytes: int, tokens: int) -> None:
        for change in changes:
            change(rows)

    with pytest.raises(UsageError, match=r"rows\.jsonl was changed while the data was prepared from it"):
        prepare(settings, seed=0, to=tmp_path / "to", progress=progress)
    with pytest.raises(UsageError, match=r"has no manifest\.json"):
        Shards.open(tmp_path / "to" / "train")
    # The same command works on what is there now, and nothing of before is left in it.
    prepare(settings, seed=0, to=tmp_path / "to")
    prepare(settings, seed=0, to=tmp_path / "afresh")
    for path in (tmp_path / "afresh").glob("*/*.bin"):
        assert path.read_bytes() == (tmp_path / "to" / path.parent.name / path.name).read_bytes()


def test_conversations_that_change_while_they_are_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "talks.jsonl", count=60)
    monkeypatch.setattr(examples, "ENCODED_ROWS", 10)
    encode, changes = Encoder.encode, iter([grow])

    def encode_and_change(self: Encoder, drafts: Any) -> Any:
        for change in changes:
            change(path)
        return encode(self, drafts)

    monkeypatch.setattr(Encoder, "encode", encode_and_change)
    data = DataSettings(source="jsonl", path=str(path), sequence_length=64, cache=str(tmp_path / "cache"))
    folder = tokenizer_folder(tmp_path / "tokenizer")
    with (
        pytest.raises(UsageError, match=r"talks\.jsonl was changed while"),
        open_conversations(data, seed=0, tokenizer=str(folder)),
    ):
        pass
    assert not list((tmp_path / "cache").glob("sft/*/*.npz"))


# -- files that are cut while a run reads them --------------------------------------------------------------

CUT = """
import os, sys
from pathlib import Path
from flatout.data.shards import Shards
from flatout.errors import FlatoutError
path = Path(sys.argv[1])
shards = Shards.open(path) if path.is_dir() else Shards.raw([path], eos_id=0)
shards.window(500_000, 1000).sum(), shards.document_starts(500_000, 1000)
os.truncate(sys.argv[2], 8192)
try:
    shards.window(500_000, 1000).sum(), shards.document_starts(500_000, 1000)
except FlatoutError as error:
    print(error.exit_code, error)
"""


@pytest.mark.parametrize("kind", ["a.bin", "a.npy", "tokens-00000.bin", "documents-00000.bin"])
def test_a_file_cut_during_training_is_a_failed_run_that_names_it(tmp_path: Path, kind: str) -> None:
    tokens = np.arange(600_000) % 100
    path = tmp_path / kind
    if "-" in kind:
        writer = ShardWriter(tmp_path / "shards", tokenizer=FACTS, source={"key": "k"})
        for begin in range(0, 600_000, 10):
            writer.append(tokens[begin : begin + 9])
        writer.finish()
        path = tmp_path / "shards" / kind
    elif kind.endswith("npy"):
        np.save(path, tokens.astype(np.uint16))
    else:
        tokens.astype("<u2").tofile(path)
    done = script(CUT, path.parent if "-" in kind else path, path)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.startswith(f"4 {path} was truncated while it was in use")


# -- rows and files that would not fit into memory ----------------------------------------------------------


def read(path: Path, tally: Tally, **fields: Any) -> list[str]:
    settings = DataSettings(path=str(path), **fields)
    return [document.text for document in read_documents(settings, which="train", seed=0, tally=tally)]


def lenient() -> Tally:
    return Tally(on_bad_row="skip", max_bad_share=1.0)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_a_line_that_is_too_long_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(sources, "ROW_BYTES", 1000, raising=False)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 64)
    path = tmp_path / f"a.jsonl{suffix}"
    lines = ['{"text": "one"}', json.dumps({"text": "x" * 5000}), '{"text": "two"}', json.dumps({"text": "x" * 1000})]
    write = {"": open, ".gz": gzip.open, ".xz": lzma.open}[suffix]
    with write(path, "wt") as file:
        file.write("\n".join(lines))
    tally = lenient()
    assert read(path, tally, source="jsonl") == ["one", "two"]
    assert list(tally.examples.values()) == [[f"{path}:2", f"{path}:4"]]
    strict = Tally(on_bad_row="stop", max_bad_share=1.0)
    with pytest.raises(UsageError, match=r"a\.jsonl.*:2: longer than"):
        read(path, strict, source="jsonl")


LONG = """
import resource, sys
from flatout.config.settings import DataSettings
from flatout.data.sources import Tally, read_documents
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (400 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
settings = DataSettings(source="jsonl", path=sys.argv[1])
tally = Tally(on_bad_row="skip", max_bad_share=1.0)
print([d.text for d in read_documents(settings, which="train", seed=0, tally=tally)], tally.reasons)
"""


def test_a_line_larger_than_the_memory_costs_no_more_than_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "one"}\n')
        file.truncate(600 << 20)  # sparse: one long line
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"text": "two"}\n')
    done = script(LONG, path)
    assert done.stdout.strip() == "['one', 'two'] {'longer than 64 MiB': 1}", done.stderr


def test_a_parquet_text_that_is_too_long_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(sources, "ROW_BYTES", 1000, raising=False)
    pq.write_table(pa.table({"text": ["one", "x" * 5000, "two"]}), tmp_path / "a.parquet")
    tally = lenient()
    assert read(tmp_path / "a.parquet", tally, source="parquet") == ["one", "two"]
    assert list(tally.examples.values()) == [[f"{tmp_path}/a.parquet:2"]]
    tally, settings = lenient(), DataSettings(source="parquet", path=str(tmp_path / "a.parquet"))
    (source,) = sources_of(settings, which="train")
    found = [row for _, row in read_rows(source, tally=tally)]
    assert found == [{"text": "one"}, {"text": "two"}]
    assert tally.num_bad == 1


REPEATED = """
import itertools, resource, sys
from flatout.config.settings import DataSettings
from flatout.data.sources import Tally, read_documents
import pyarrow.parquet
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
settings = DataSettings(source="parquet", path=sys.argv[1])
tally = Tally(on_bad_row="skip", max_bad_share=1.0)
rows = read_documents(settings, which="train", seed=0, tally=tally)
print([len(d.text) for d in itertools.islice(rows, 3)])
"""


def test_a_text_that_parquet_stores_once_for_many_rows_is_not_held_for_all_of_them(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(60_000, np.int32)), pa.array(["x" * 1_000_000]))
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 1_000_000
    done = script(REPEATED, tmp_path / "a.parquet")
    assert done.stdout.strip() == "[1000000, 1000000, 1000000]", done.stderr


def test_an_xz_file_that_asks_for_too_much_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"text"))
    assert read(tmp_path / "a.txt.xz", lenient(), source="text") == ["text"]
    monkeypatch.setattr(sources, "XZ_MEMORY_BYTES", 1 << 20, raising=False)
    with pytest.raises(UsageError, match=r"a\.txt\.xz is damaged \(Memory usage limit"):
        read(tmp_path / "a.txt.xz", lenient(), source="text")


def test_an_xz_file_of_several_streams_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"one ") + b"\0" * 8 + lzma.compress(b"two ") + lzma.compress(b"three") + b"\0" * 4)
    assert read(path, lenient(), source="text") == ["one two three"]


def test_bytes_that_are_no_text_are_handed_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(sources, "CHUNK_BYTES", 100)
    monkeypatch.setattr(sources, "PIECE_BYTES", 200)
    pieces = list(sources._split(io.BytesIO(b"\x80" * 10_000), separator=b"|"))
    assert sum(len(piece) for piece, _ in pieces) == 10_000
    assert max(len(piece) for piece, _ in pieces) <= 400


# -- what is no regular file, or lies elsewhere -------------------------------------------------------------

PIPES = """
import os, shutil, sys
from pathlib import Path
from flatout.config.settings import DataSettings
from flatout.data.prepare import prepare
from flatout.data.shards import Shards
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import UsageError
folder, good = Path(sys.argv[1]), Path(sys.argv[2])
def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path
def tried(work):
    try:
        work()
        print("used")
    except UsageError as error:
        print(error)
for name in ("a.jsonl", "a.txt.gz", "a.parquet", "a.bin", "a.npy"):
    kind = {"jsonl": "jsonl", "txt": "text", "parquet": "parquet"}.get(name.split(".")[1], "tokens")
    path = str(pipe(folder / name))
    tried(lambda: prepare(DataSettings(source=kind, path=path, cache=str(folder / "cache")), seed=0))
    tried(lambda: prepare(DataSettings(source=kind, path=str(folder), cache=str(folder / "cache")), seed=0))
    os.unlink(path)
tried(lambda: load_tokenizer(str(pipe(folder / "tokenizer.json")), documents=None, cache=folder))
tried(lambda: load_tokenizer(str(folder), documents=None, cache=folder))
for name in ("tokens-00000.bin", "documents-00000.bin", "manifest.json"):
    pipe(good / "train" / name)
    tried(lambda: Shards.open(good / "train", verify=False))
    tried(lambda: prepare(DataSettings(source="tokens", path=str(good)), seed=0).open())
pipe(folder / "lock")
tried(lambda: prepare(DataSettings(embedded_mb=0.01), seed=0, to=folder))
"""


def test_named_pipes_are_refused_and_never_waited_for(settings: DataSettings, tmp_path: Path) -> None:
    prepare(settings, seed=0, to=tmp_path / "good")
    (tmp_path / "pipes").mkdir()
    done = script(PIPES, tmp_path / "pipes", tmp_path / "good")
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 19
    for answer in answers:
        assert "pipe" in answer or "not a regular file" in answer or "holds other files" in answer, answer


@pytest.mark.parametrize("name", ["train/manifest.json", "valid/tokens-00000.bin", "tokenizer/tokenizer.json", "train"])
def test_links_that_leave_a_prepared_folder_are_refused(settings: DataSettings, tmp_path: Path, name: str) -> None:
    to = tmp_path / "to"
    prepare(settings, seed=0, to=to)
    (to / name).rename(tmp_path / "elsewhere")
    (to / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"is a symbolic link that leaves"):
        prepare(DataSettings(source="tokens", path=str(to)), seed=0).open()


def test_a_source_and_a_prepared_folder_may_themselves_be_links(
    settings: DataSettings, rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "link.jsonl").symlink_to(rows)
    (tmp_path / "real").mkdir()
    (tmp_path / "to").symlink_to(tmp_path / "real")
    linked = DataSettings(source="jsonl", path=str(tmp_path / "link.jsonl"))
    prepare(linked, seed=0, to=tmp_path / "to")
    assert prepare(DataSettings(source="tokens", path=str(tmp_path / "to")), seed=0).open().train.num_tokens


# -- damaged manifests and caches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"documents": 7},
        {"consumed": -1},
        {"beside": "many"},
        {"complete": "no"},
        {"shard_tokens": 0},
        {"max_token_id": -3},
        {"max_token_id": 10**6},
        {"source": {}},
        {"source": []},
        {"bad_rows": [1]},
        {"bad_rows": {"rows": -1}},
        {"role": "test"},
        {"tokenizer": {"name": "byte", "fingerprint": "f", "vocab_size": "many", "eos_id": 256}},
        {"tokenizer": {"name": "byte", "fingerprint": "f", "vocab_size": 257, "eos_id": 10**9}},
        {"tokenizer": {"name": "byte", "fingerprint": "f", "vocab_size": 10**30, "eos_id": 256}},
    ],
)
def test_a_manifest_with_impossible_values_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    writer = ShardWriter(tmp_path / "train", tokenizer=FACTS, source={"key": "k"})
    writer.append(np.arange(50))
    writer.finish()
    path = tmp_path / "train" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=r"manifest\.json is .*prepare the data again"):
        Shards.open(tmp_path / "train", verify=False)


@pytest.mark.parametrize("ends", [[5, 3, 51], [0, 10, 51], [-4, 10, 51], [5, 10, 52]])
def test_documents_that_cannot_end_there_are_refused(tmp_path: Path, ends: list[int]) -> None:
    import hashlib

    writer = ShardWriter(tmp_path / "train", tokenizer=FACTS, source={"key": "k"})
    for length in (5, 20, 23):
        writer.append(np.arange(length))
    writer.finish()
    content = np.array(ends, "<i8").tobytes()
    (tmp_path / "train" / "documents-00000.bin").write_bytes(content)
    path = tmp_path / "train" / "manifest.json"
    raw = json.loads(path.read_text())
    raw["shards"][0]["documents_sha256"] = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(raw))
    with pytest.raises(UsageError, match=r"documents-00000\.bin does not hold the ends of documents"):
        Shards.open(tmp_path / "train").document_starts(0, 51)


@pytest.fixture(scope="module")
def kept_talks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataSettings, Path]:
    """A cache with prepared examples, the settings they belong to, and their tokenizer."""
    folder = tmp_path_factory.mktemp("kept")
    tokenizer = tokenizer_folder(folder / "tokenizer")
    rows = write_rows(folder / "talks.jsonl", count=20)
    data = DataSettings(source="jsonl", path=str(rows), sequence_length=64, cache=str(folder / "cache"))
    with open_conversations(data, seed=0, tokenizer=str(tokenizer)):
        return folder / "cache", data, tokenizer


def saved(path: Path, **arrays: Any) -> None:
    """The same examples with other arrays."""
    with np.load(path) as kept:
        np.savez(path, **{name: kept[name] for name in kept.files} | arrays)


def compressed(path: Path) -> None:
    with np.load(path) as kept:
        arrays = dict(kept)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.save(file, array)


def huge(path: Path) -> None:
    """A header that promises more than there is."""
    header = {"descr": "<i4", "fortran_order": False, "shape": (10**12,)}
    with zipfile.ZipFile(path, "w") as archive, archive.open("tokens.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cut": ("train.npz", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "empty": ("train.npz", lambda path: path.write_bytes(b"")),
    "another kind of file": ("train.npz", lambda path: np.save(path.open("wb"), np.arange(3))),
    "missing": ("valid.npz", lambda path: path.unlink()),
    "an array less": ("valid.npz", lambda path: np.savez(path, tokens=np.arange(3, dtype=np.int32))),
    "fractions": ("train.npz", lambda path: saved(path, tokens=np.zeros(5))),
    "objects": ("train.npz", lambda path: saved(path, tokens=np.array([{}], object))),
    "a matrix": ("train.npz", lambda path: saved(path, tokens=np.zeros((2, 3), np.int32))),
    "ends beyond the tokens": ("train.npz", lambda path: saved(path, ends=np.array([10**9]))),
    "ends backwards": ("train.npz", lambda path: saved(path, ends=np.array([5, 3, 1]))),
    "compressed": ("train.npz", compressed),
    "a promise of much": ("train.npz", huge),
    "facts cut": ("facts.json", lambda path: os.truncate(path, 20)),
    "facts that are a list": ("facts.json", lambda path: path.write_text("[]")),
    "facts that are deep": ("facts.json", lambda path: path.write_text("[" * 100_000)),
    "facts of other types": ("facts.json", lambda path: path.write_text('{"fingerprints": 1, "bad_rows": 2}')),
    "facts of elsewhere": (
        "facts.json",
        lambda path: path.write_text(path.read_text().replace('"key": "', '"key": "0')),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_examples_are_named_with_the_way_out(
    kept_talks: tuple[Path, DataSettings, Path], tmp_path: Path, damage: str
) -> None:
    cache, data, tokenizer = kept_talks
    from dataclasses import replace

    shutil.copytree(cache, tmp_path / "cache")
    data = replace(data, cache=str(tmp_path / "cache"))
    (root,) = (tmp_path / "cache" / "sft").iterdir()
    name, spoil = DAMAGE[damage]
    spoil(root / name)
    with (
        pytest.raises(UsageError, match=rf"{root}/.*remove {root}, and it is rebuilt"),
        open_conversations(data, seed=0, tokenizer=str(tokenizer)),
    ):
        pass
    shutil.rmtree(root)
    with open_conversations(data, seed=0, tokenizer=str(tokenizer)) as talks:
        assert isinstance(talks.train, Examples)
