from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.config.settings import DataSettings
from flatout.data import sources
from flatout.data.sources import Tally, read_documents
from flatout.errors import UsageError


def read(tally: Tally | None = None, **fields: Any) -> list[str]:
    settings = DataSettings(**{"max_bad_share": 1.0, **fields})
    found = read_documents(settings, which="train", seed=0, tally=tally or Tally.of(settings))
    texts, pieces = [], []
    for document in found:
        pieces.append(document.text)
        if document.ends:
            texts.append("".join(pieces))
            pieces = []
    assert not pieces
    return texts


def lenient() -> Tally:
    return Tally(on_bad_row="skip", max_bad_share=1.0)


OPENERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}


@pytest.mark.parametrize("suffix", OPENERS)
def test_text_is_split_at_the_separator(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    with OPENERS[suffix](path, "wb") as file:
        file.write("one\nmore\n<|endoftext|>\ntwo é\n<|endoftext|>\n\n<|endoftext|>three<|endoftext|>\n".encode())
    assert read(source="text", path=str(path)) == ["one\nmore", "two é", "three"]
    assert len(read(source="text", path=str(path), separator="\n\n")) == 2


def test_text_without_a_separator_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfall of it\n\nis one\n")
    assert read(source="text", path=str(tmp_path / "a.txt")) == ["all of it\n\nis one"]


@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n", "é"])
def test_long_text_is_streamed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 7)
    monkeypatch.setattr(sources, "PIECE_BYTES", 40)
    documents = ["word " * 30 + "x", "é" * 100 if separator != "é" else "e" * 100, "short", "世界" * 50]
    (tmp_path / "a.txt").write_text(separator.join(documents))
    assert read(source="text", path=str(tmp_path / "a.txt"), separator=separator) == documents


def test_invalid_utf8_costs_one_document_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good<|endoftext|>bad \xff\xfe<|endoftext|>fine")
    tally = lenient()
    assert read(tally, source="text", path=str(tmp_path)) == ["good", "fine"]
    assert tally.reasons == {"invalid UTF-8": 1}
    assert tally.examples == {"invalid UTF-8": [f"{tmp_path}/a.txt:2"]}


def test_a_broken_piece_does_not_join_two_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 10)
    monkeypatch.setattr(sources, "PIECE_BYTES", 20)
    (tmp_path / "a.txt").write_bytes(b"long enough to be cut in pieces \xff\xff\xff|second")
    texts = read(lenient(), source="text", path=str(tmp_path), separator="|")
    assert texts[-1] == "second"
    assert len(texts) == 2


BAD_LINES = {
    "invalid JSON": [b"{", b"nonsense", b'{"text": ' + b"9" * 5000 + b"}", b"[" * 100_000],
    "not an object": [b'"text"', b"[1]"],
    "missing field 'text'": [b'{"other": "x"}'],
    "not a string": [b'{"text": 3}', b'{"text": ["a"]}'],
    "null": [b'{"text": null}'],
    "empty": [b'{"text": ""}', b'{"text": " \\n"}'],
    "invalid UTF-8": [b'{"text": "\xff"}'],
    "invalid Unicode": [b'{"text": "\\ud800"}'],
}


@pytest.mark.parametrize("suffix", OPENERS)
def test_bad_json_rows_are_skipped_and_counted(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    lines, expected = [b'\xef\xbb\xbf{"text": "first"}', b""], {}
    for reason, bad in BAD_LINES.items():
        expected[reason] = [f"{path}:{len(lines) + i + 1}" for i in range(len(bad))]
        lines += [*bad, b'{"text": "good", "n": 1}']
    with OPENERS[suffix](path, "wb") as file:
        file.write(b"\n".join(lines))
    tally = lenient()
    assert read(tally, source="jsonl", path=str(tmp_path)) == ["first"] + ["good"] * len(BAD_LINES)
    assert tally.reasons == {reason: len(bad) for reason, bad in BAD_LINES.items()}
    assert tally.examples == {reason: places[:3] for reason, places in expected.items()}
    assert tally.rows == 1 + len(BAD_LINES) + sum(map(len, BAD_LINES.values()))


def test_strict_stops_at_the_first_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 1}\n{"text": "b"}\n')
    with pytest.raises(UsageError, match=r"a\.jsonl:2: not a string; .*on_bad_row: skip"):
        read(source="jsonl", path=str(tmp_path), on_bad_row="stop")


def test_too_many_bad_rows_stop_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 97 + "{\n" * 3)
    assert len(read(source="jsonl", path=str(tmp_path), max_bad_share=0.03)) == 97
    with pytest.raises(UsageError, match=r"3 of 100 rows .*\(0\.02\): 3 invalid JSON \(first: .*a\.jsonl:98, "):
        read(source="jsonl", path=str(tmp_path), max_bad_share=0.02)


def test_too_many_bad_rows_stop_early_in_a_long_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n" * 50_000)
    with pytest.raises(UsageError, match="1001 of 1001 rows"):
        read(source="jsonl", path=str(tmp_path), max_bad_share=0.5)


def test_a_large_row_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 10_000_000}))
    assert [len(text) for text in read(source="jsonl", path=str(tmp_path))] == [10_000_000]


def test_parquet_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    broken = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0\4\0\0\0"), pa.py_buffer(b"a\xff\xfeb")]
    )
    texts = pa.chunked_array([pa.array(["one", None, "", "two"]), broken])
    pq.write_table(pa.table({"text": texts, "n": range(7)}), tmp_path / "a.parquet")
    tally = lenient()
    assert read(tally, source="parquet", path=str(tmp_path)) == ["one", "two", "a", "b"]
    assert tally.reasons == {"null": 1, "empty": 1, "invalid UTF-8": 1}
    assert tally.examples["invalid UTF-8"] == [f"{tmp_path}/a.parquet:6"]
    tally = lenient()
    with pytest.raises(UsageError, match="no documents in"):
        read(tally, source="parquet", path=str(tmp_path), field="n")
    assert tally.reasons == {"not a string": 7}
    with pytest.raises(UsageError, match=r"no column 'body', only text, n; set data\.field"):
        read(source="parquet", path=str(tmp_path), field="body")


@pytest.mark.parametrize("name", ["a.parquet", "a.txt.gz", "a.txt.xz", "a.jsonl.gz"])
def test_a_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"row {i} {i * i}"} for i in range(5000)]
    path = tmp_path / name
    if name.endswith("parquet"):
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with OPENERS[path.suffix](path, "wt") as file:
            file.write("\n".join(map(json.dumps, rows)))
    path.write_bytes(path.read_bytes()[:-3000])
    source = name.split(".")[1].replace("txt", "text")
    with pytest.raises(UsageError, match=rf"{name} is damaged"):
        read(source=source, path=str(path))


def test_files_of_a_folder_and_a_glob_come_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "notes.md"):
        (tmp_path / name).write_text(name)
    assert read(source="text", path=str(tmp_path)) == ["a.txt", "b.txt", "sub/c.txt"]
    assert read(source="text", path=str(tmp_path / "*.txt")) == ["a.txt", "b.txt"]
    assert read(source="text", path=str(tmp_path / "**/c.txt")) == ["sub/c.txt"]
    assert read(source="text", path=str(tmp_path / "notes.md")) == ["notes.md"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"source": "text"}, r"data\.path is not set"),
        ({"source": "text", "path": "/nowhere/x.txt"}, "/nowhere/x.txt does not exist"),
        ({"source": "text", "path": "/nowhere/*.txt"}, "matches no file"),
        ({"source": "hf"}, r"data\.name is not set"),
        ({"source": "text", "path": __file__, "separator": ""}, r"data\.separator is empty"),
    ],
)
def test_a_wrong_path_is_explained(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(**fields)


def test_an_empty_corpus_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no \.txt"):
        read(source="text", path=str(tmp_path))
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n")
    with pytest.raises(UsageError, match=r"no documents in .*1 empty file \(first: .*a\.txt:1\)"):
        read(source="text", path=str(tmp_path))


def test_an_empty_file_among_others_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("text")
    tally = lenient()
    assert read(tally, source="text", path=str(tmp_path)) == ["text"]
    assert tally.reasons == {"empty file": 1}


def test_a_hugging_face_dataset_is_streamed(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text('{"body": "one"}\n{"body": ""}\n{"body": "two"}\n')
    tally = lenient()
    assert read(tally, source="hf", name=str(tmp_path), field="body") == ["one", "two"]
    assert tally.reasons == {"empty": 1}
    with pytest.raises(UsageError, match="nosplit"):
        read(source="hf", name=str(tmp_path), split="nosplit")


def test_real_files(real_data: Path) -> None:
    books = read(source="text", path=str(real_data / "gutenberg" / "valid.txt.xz"))
    assert len(books) > 5
    assert all("<|endoftext|>" not in book for book in books)
    rows = read(source="jsonl", path=str(real_data / "gsm8k" / "test.jsonl"), field="question")
    assert len(rows) == 1319
