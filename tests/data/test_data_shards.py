from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_facts import FACTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.data import shards as module
from flatout.data.manifest import TokenizerFacts, read_manifest
from flatout.data.shards import Shards, ShardWriter
from flatout.errors import EnvironmentLacks, RunFailed, UsageError

LENGTHS = [5, 9, 2, 30, 4, 4, 17, 3, 26]
Make = Callable[..., Shards]


def expected(lengths: list[int]) -> np.ndarray:
    tokens = np.arange(sum(lengths)) % 251
    tokens[np.cumsum(lengths) - 1] = FACTS.eos_id
    return tokens


@pytest.mark.parametrize("shard_tokens", [1, 10, 40, 1 << 20])
def test_windows_cross_files(make_shards: Make, shard_tokens: int) -> None:
    shards = make_shards(LENGTHS, shard_tokens=shard_tokens)
    tokens, starts = expected(LENGTHS), np.cumsum(LENGTHS)
    assert shards.num_tokens == len(tokens) == 100
    for begin in range(0, 100, 7):
        for length in (1, 2, 13, 100 - begin):
            length = min(length, 100 - begin)
            assert shards.window(begin, length).tolist() == tokens[begin : begin + length].tolist()
            inside = starts[(starts > begin) & (starts < begin + length)] - begin
            assert shards.document_starts(begin, length).tolist() == inside.tolist()
    with pytest.raises(IndexError):
        shards.window(99, 2)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    shard_tokens=st.integers(1, 60),
    length=st.integers(1, 30),
)
def test_the_fullest_window_is_found(make_shards: Make, lengths: list[int], shard_tokens: int, length: int) -> None:
    shards = make_shards(lengths, shard_tokens=shard_tokens, name=str(abs(hash((*lengths, shard_tokens)))))
    segments = [
        1 + len(shards.document_starts(begin, min(length, shards.num_tokens - begin)))
        for begin in range(0, shards.num_tokens, length)
    ]
    assert shards.max_segments(length) == max(segments)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    shard_tokens=st.integers(1, 60),
    length=st.integers(1, 30),
)
def test_mean_context_is_what_counting_gives(
    make_shards: Make, lengths: list[int], shard_tokens: int, length: int
) -> None:
    shards = make_shards(lengths, shard_tokens=shard_tokens, name=str(abs(hash((*lengths, shard_tokens)))))
    seen = []
    for begin in range(0, shards.num_tokens - length, length):  # the token after the last window is its target
        starts = {0, *shards.document_starts(begin, length).tolist()}
        for i in range(length):
            seen.append(i - max(start for start in starts if start <= i) + 1)
    if seen:
        assert shards.mean_context(length) == pytest.approx(sum(seen) / len(seen))
    else:
        with pytest.raises(UsageError, match=f"one sequence needs {length + 1}"):
            shards.mean_context(length)


def test_mean_context_is_of_the_first_windows(make_shards: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_shards([2] * 20 + [100])
    monkeypatch.setattr(module, "MEASURED_WINDOWS", 4)
    assert shards.mean_context(10) == 1.5
    assert shards.part(40, 140).mean_context(10) == 5.5


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, tokenizer=replace(FACTS, vocab_size=1 << 17), source={"key": "k"})
    writer.append(np.array([1, 70_000]))
    writer.finish()
    assert (tmp_path / "tokens-00000.bin").read_bytes() == np.array([1, 70_000, 256], "<u4").tobytes()
    assert Shards.open(tmp_path).window(0, 3).tolist() == [1, 70_000, 256]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (flip, "has changed since it was written"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-8]), "says"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0\0"), "says"),
    "missing": (lambda path: path.unlink(), "is missing"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["tokens-00001.bin", "documents-00000.bin"])
def test_damage_is_found_and_named(make_shards: Make, tmp_path: Path, damage: str, name: str) -> None:
    make_shards(LENGTHS, shard_tokens=40)
    spoil, says = DAMAGE[damage]
    spoil(tmp_path / "shards" / name)
    with pytest.raises(UsageError, match=rf"{name} .*{says}.*prepare the data again"):
        Shards.open(tmp_path / "shards")


def test_swapped_shards_are_found(make_shards: Make, tmp_path: Path) -> None:
    make_shards([20, 20, 20], shard_tokens=20)
    first, second = (tmp_path / "shards" / f"tokens-0000{i}.bin" for i in (0, 1))
    first_content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(first_content)
    Shards.open(tmp_path / "shards", verify=False)
    with pytest.raises(UsageError, match=r"tokens-00000\.bin has changed"):
        Shards.open(tmp_path / "shards")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 99}, "has format 99, this version reads 1"),
        ({"tokens": 7}, "its numbers do not agree"),
        ({"dtype": "float32"}, "dtype: .float32. where one of"),
        ({"shards": [{"tokens": -1}]}, "shards.*is missing"),
        ({"shards": None}, "shards: null where a list"),
        ({"tokenizer": {"name": 1}}, "tokenizer: "),
        ({"surprise": 1}, "surprise is unknown"),
        ({"complete": False}, "incomplete"),
    ],
)
def test_a_wrong_manifest_is_refused(make_shards: Make, tmp_path: Path, change: dict[str, object], says: str) -> None:
    make_shards(LENGTHS)
    path = tmp_path / "shards" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=says):
        Shards.open(tmp_path / "shards")


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, "null"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match=r"has no manifest\.json"):
        Shards.open(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match=r"manifest\.json"):
        Shards.open(tmp_path)


def test_a_too_small_vocabulary_is_refused_with_the_place(make_shards: Make, tmp_path: Path) -> None:
    shards = make_shards([300], shard_tokens=100)
    shards.check_vocab(257)
    with pytest.raises(UsageError, match=r"tokens-00000\.bin: token 200 at position 200, but there are only 200 ids"):
        shards.check_vocab(200)
    np.save(tmp_path / "raw.npy", np.array([3, -1, 5]))
    with pytest.raises(UsageError, match=r"raw\.npy: token -1 at position 1"):
        Shards.raw([tmp_path / "raw.npy"], eos_id=None).check_vocab(10)


def test_another_tokenizer_is_refused(make_shards: Make, tmp_path: Path) -> None:
    shards = make_shards(LENGTHS)
    assert shards.check_tokenizer(FACTS.fingerprint) == "same"
    with pytest.raises(UsageError, match=r"byte \(ffffffffffff\), not by the configured one \(000000000000\)"):
        shards.check_tokenizer("0" * 64)
    np.save(tmp_path / "raw.npy", np.array([3]))
    assert Shards.raw([tmp_path / "raw.npy"], eos_id=None).check_tokenizer("0" * 64) == "unknown"


def test_raw_files_are_read_as_one_sequence(tmp_path: Path) -> None:
    tokens = expected(LENGTHS)
    tokens[:60].astype("<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", tokens[60:])
    (tmp_path / "empty.bin").touch()
    files = [tmp_path / "a.bin", tmp_path / "empty.bin", tmp_path / "b.npy"]
    shards = Shards.raw(files, eos_id=256)
    assert shards.window(0, 100).tolist() == tokens.tolist()
    assert shards.window(58, 4).tolist() == tokens[58:62].tolist()
    assert shards.document_starts(0, 100).tolist() == np.cumsum(LENGTHS)[:-1].tolist()
    with pytest.raises(UsageError, match="packing: concat"):
        Shards.raw(files, eos_id=None).document_starts(0, 100)


def test_raw_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "matrix.npy", np.zeros((3, 3), int))
    np.save(tmp_path / "pickle.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "torn.npy").write_bytes((tmp_path / "matrix.npy").read_bytes()[:50])
    for name in ("odd.bin", "float.npy", "matrix.npy", "pickle.npy", "torn.npy", "missing.bin"):
        with pytest.raises(UsageError, match=name):
            Shards.raw([tmp_path / name], eos_id=None)


def test_raw_files_are_known_by_their_content(tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> str:
        return Shards.raw(sorted(folder.iterdir()), eos_id=256).fingerprint

    there = tmp_path / "there"
    there.mkdir()
    tokens = expected(LENGTHS)
    tokens.astype("<u2").tofile(there / "a.bin")
    np.save(there / "b.npy", tokens)
    with (there / "c.bin").open("wb") as huge:
        huge.truncate(1 << 34)  # sparse: nothing is stored, and little of it read
    before = fingerprint(there)
    moved = there.rename(tmp_path / "moved")
    assert fingerprint(moved) == before
    seen = {before}
    for name in ("a.bin", "b.npy"):
        flip(moved / name)
        seen.add(fingerprint(moved))
    for position in (0, (1 << 34) - 1):
        with (moved / "c.bin").open("r+b") as huge:
            huge.seek(position)
            huge.write(b"x")
        seen.add(fingerprint(moved))
    with (moved / "c.bin").open("r+b") as huge:
        huge.truncate(1 << 33)
    assert len({*seen, fingerprint(moved)}) == 6


def test_any_change_of_a_file_of_four_megabytes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(4 << 20))
    before = Shards.raw([path], eos_id=256).fingerprint
    for position in range(0, 4 << 20, 99_991):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        now = Shards.raw([path], eos_id=256).fingerprint
        assert now != before
        before = now


def test_a_stream_is_known_by_where_it_comes_from(tmp_path: Path) -> None:
    def fingerprints(name: str, key: str, tokenizer: TokenizerFacts) -> list[str]:
        """While it is written, after it is, and of one that was open all the time."""
        writer = ShardWriter(tmp_path / name, tokenizer=tokenizer, source={"key": key}, streaming=True)
        writer.append(np.arange(9))
        writer.flush()
        growing = Shards.open(tmp_path / name)
        found = [growing.fingerprint]
        writer.append(np.arange(4))
        writer.finish()
        growing.wait_for(15)
        assert growing.complete
        return [*found, Shards.open(tmp_path / name).fingerprint, growing.fingerprint]

    same = fingerprints("same", "k", FACTS)
    assert len(set(same)) == 1
    assert same == fingerprints("moved", "k", FACTS)
    assert same[0] not in fingerprints("other", "o", FACTS)
    assert same[0] not in fingerprints("retold", "k", replace(FACTS, fingerprint="0" * 64))


def test_another_part_is_another_fingerprint(make_shards: Make) -> None:
    shards = make_shards(LENGTHS)
    assert shards.part(0, 90).fingerprint != shards.part(0, 80).fingerprint != shards.fingerprint
    assert shards.fingerprint == make_shards(LENGTHS, name="again").fingerprint
    assert shards.fingerprint != make_shards(LENGTHS[::-1], name="other").fingerprint


def test_a_part_is_a_sequence_of_its_own(make_shards: Make) -> None:
    shards = make_shards(LENGTHS, shard_tokens=30)
    tail = shards.part(41, 100)
    assert tail.num_tokens == 59
    assert tail.window(5, 20).tolist() == shards.window(46, 20).tolist()
    assert tail.document_starts(0, 59).tolist() == (shards.document_starts(0, 100) - 41)[3:].tolist()
    with pytest.raises(IndexError):
        tail.window(50, 10)


def test_growing_shards_are_taken_in(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "train", tokenizer=FACTS, source={"key": "k"}, streaming=True)
    writer.append(np.arange(9))
    writer.flush(consumed=1)
    shards = Shards.open(tmp_path / "train")
    assert (shards.num_tokens, shards.complete) == (10, False)
    writer.append(np.arange(4))
    writer.flush(consumed=2)
    shards.wait_for(15)
    assert shards.num_tokens == 15
    (tmp_path / "writer.log").write_text("noise\nthe disk is on fire\n")
    with pytest.raises(RunFailed, match=r"stopped at 15 tokens, but 16 are needed next: noise\nthe disk is on fire"):
        shards.wait_for(16)
    writer.finish(consumed=2)
    shards.wait_for(16)
    assert shards.complete


def test_a_new_shard_is_verified_too(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, tokenizer=FACTS, source={"key": "k"}, streaming=True)
    writer.append(np.arange(9))
    writer.flush()
    shards = Shards.open(tmp_path)
    writer.append(np.arange(9))
    writer.flush()
    flip(tmp_path / "tokens-00001.bin")
    with pytest.raises(UsageError, match=r"tokens-00001\.bin has changed"):
        shards.refresh()


def test_a_shard_is_on_disk_before_the_manifest_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, list[str]]] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, sorted(file.name for file in path.iterdir()) if path.is_dir() else []))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    folder = tmp_path / "train"
    writer = ShardWriter(folder, tokenizer=FACTS, source={"key": "k"})
    writer.append(np.arange(9))
    writer.flush()
    tokens, documents, manifest = "tokens-00000.bin", "documents-00000.bin", "manifest.json"
    assert [files for name, files in synced if name == "train"] == [
        [tokens],
        [documents, tokens],
        [documents, manifest, tokens],
    ]


def test_a_full_disk_is_what_the_environment_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path, tokenizer=FACTS, source={"key": "k"})
    writer.append(np.arange(9))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentLacks, match=r"no space left to write .*tokens-00000\.bin \(20 bytes\); free some"):
        writer.flush()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_half_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".tokens-00000.bin.123.tmp").write_bytes(b"half a shard")
    ShardWriter(tmp_path, tokenizer=FACTS, source={"key": "k"})
    assert list(tmp_path.iterdir()) == []


def test_a_writer_goes_on_where_it_was(tmp_path: Path) -> None:
    def writer(key: str = "k", **fields: int) -> ShardWriter:
        return ShardWriter(tmp_path, tokenizer=FACTS, source={"key": key}, **fields)

    first = writer()
    for consumed in (1, 2, 3):
        first.append(np.arange(consumed))
        first.flush(consumed=consumed)
    assert (writer().manifest.consumed, writer().num_tokens) == (3, 9)
    assert (len(writer(keep_shards=1).manifest.shards), writer(keep_shards=1).num_tokens) == (1, 2)
    assert writer("other").num_tokens == 0
    assert read_manifest(tmp_path) is None
