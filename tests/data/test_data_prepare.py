from __future__ import annotations

import gzip
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import HANG_S, wait_until

from flatout.config.settings import DataSettings
from flatout.data import prepare as module
from flatout.data import sources
from flatout.data.embedded import documents
from flatout.data.manifest import read_manifest
from flatout.data.prepare import Background, Prepared, Task, describe, prepare, start_background
from flatout.data.shards import Shards
from flatout.data.stream import Stream
from flatout.data.writing import writer_is_alive, writer_log
from flatout.errors import RunFailed, UsageError

CORPUS = list(documents(3, 0.3))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS))
    return path


@pytest.fixture
def cached(tmp_path: Path) -> Callable[..., DataSettings]:
    return lambda **fields: DataSettings(cache=str(tmp_path / "cache"), **fields)


def texts(folder: Path, prepared: Prepared) -> list[str]:
    """What the shards of a folder say, document by document."""
    shards = Shards.open(folder)
    ends = np.append(shards.document_starts(0, shards.num_tokens), shards.num_tokens).tolist()
    decode = prepared.tokenizer.decode
    assert all(shards.window(end - 1, 1)[0] == prepared.tokenizer.eos_id for end in ends)
    return [decode(shards.window(begin, end - 1 - begin)) for begin, end in zip([0, *ends], ends, strict=False)]


def content(root: Path) -> dict[str, str]:
    files = sorted(root.glob("*/*.bin")) + sorted(root.glob("*/tokenizer.json"))
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:400"])
def test_every_document_ends_up_on_one_side(rows: Path, cached: Any, tokenizer: str) -> None:
    settings = cached(source="jsonl", path=str(rows), tokenizer=tokenizer, valid_share=0.1)
    prepared = prepare(settings, seed=0)
    train, valid = texts(prepared.train, prepared), texts(prepared.valid, prepared)
    assert not prepared.reused
    assert sorted(train + valid) == sorted(CORPUS)
    assert [text for text in CORPUS if text in set(train)] == train  # in order
    assert 0.05 * len(CORPUS) < len(valid) < 0.16 * len(CORPUS)
    again = prepare(settings, seed=0)
    assert again.reused
    assert again.tokenizer.fingerprint == prepared.tokenizer.fingerprint
    split = again.open()
    assert split.train.check_tokenizer(again.tokenizer.fingerprint) == "same"


def test_the_split_depends_on_the_seed(rows: Path, cached: Any) -> None:
    settings = cached(source="jsonl", path=str(rows), valid_share=0.2)
    one, two = prepare(settings, seed=1), prepare(settings, seed=2)
    assert one.train != two.train
    assert set(texts(one.valid, one)) != set(texts(two.valid, two))


@pytest.mark.parametrize("share", [0.01, 0.49])
def test_two_documents_are_one_on_each_side(tmp_path: Path, cached: Any, share: float) -> None:
    (tmp_path / "a.txt").write_text("first<|endoftext|>second")
    prepared = prepare(cached(source="text", path=str(tmp_path / "a.txt"), valid_share=share), seed=0)
    assert (texts(prepared.train, prepared), texts(prepared.valid, prepared)) == (["second"], ["first"])


def test_of_an_only_document_the_tail_is_held_out(tmp_path: Path, cached: Any) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    prepared = prepare(cached(source="text", path=str(tmp_path / "a.txt"), valid_share=0.1), seed=0)
    assert texts(prepared.train, prepared) == ["0123456789" * 9]
    assert texts(prepared.valid, prepared) == ["0123456789"]


@pytest.mark.parametrize("others", [[], ["a second one", "a third one"]])
def test_a_first_document_larger_than_a_shard_is_held_out_in_part(
    tmp_path: Path, cached: Any, monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    monkeypatch.setattr(module, "SHARD_TOKENS", 20_000)
    monkeypatch.setattr(module, "ENCODE_CHARACTERS", 5_000)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1_000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 3_000)
    text = " ".join(map(str, range(30_000)))
    (tmp_path / "a.txt").write_text("<|endoftext|>".join([text, *others]))
    settings = cached(source="text", path=str(tmp_path / "a.txt"), valid_share=0.1)
    prepared = prepare(settings, seed=0, to=tmp_path / "whole")
    train, valid = texts(prepared.train, prepared), texts(prepared.valid, prepared)
    if others:
        assert train.pop() + train.pop() == "a third one" + "a second one"
    assert "".join(part for pair in zip(train, valid, strict=True) for part in pair) == text
    assert sum(map(len, valid)) == pytest.approx(0.1 * len(text), abs=len(valid))
    manifest = read_manifest(prepared.train)
    assert manifest is not None
    assert max(shard.tokens for shard in manifest.shards) < 3 * 20_000  # it was never held as a whole

    def stop(num_bytes: int, num_tokens: int) -> None:
        if num_tokens > 90_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(settings, seed=0, to=tmp_path / "torn", progress=stop)
    torn = read_manifest(tmp_path / "torn" / "train")
    assert torn is not None
    assert torn.consumed > 0
    prepare(settings, seed=0, to=tmp_path / "torn")
    assert content(tmp_path / "torn") == content(tmp_path / "whole")


def test_a_folder_that_cannot_be_written_is_said_by_the_name_it_was_given_under(tmp_path: Path, cached: Any) -> None:
    (tmp_path / "file").touch()
    for to in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"file.* --to needs a folder") as caught:
            prepare(cached(embedded_mb=0.01), seed=0, to=to)
        assert "data.cache" not in str(caught.value)
    with pytest.raises(UsageError, match=r"file.* data\.cache needs a folder"):
        prepare(DataSettings(embedded_mb=0.01, cache=str(tmp_path / "file")), seed=0)


def test_own_validation_data_takes_nothing_from_training(rows: Path, tmp_path: Path, cached: Any) -> None:
    other = tmp_path / "valid.jsonl"
    other.write_text('{"text": "held out"}\n')
    prepared = prepare(cached(source="jsonl", path=str(rows), valid_path=str(other)), seed=0)
    assert texts(prepared.train, prepared) == CORPUS
    assert texts(prepared.valid, prepared) == ["held out"]
    with pytest.raises(UsageError, match="valid_path is for files"):
        prepare(cached(valid_path=str(other)), seed=0)


def test_changed_settings_or_files_are_prepared_anew(rows: Path, cached: Any) -> None:
    fields = {"source": "jsonl", "path": str(rows)}
    folders = {prepare(cached(**fields), seed=0).train}
    for change in ({"tokenizer": "bpe:300"}, {"valid_share": 0.3}, {"max_bad_share": 0.5}):
        folders.add(prepare(cached(**fields | change), seed=0).train)
    rows.write_text('{"text": "changed"}\n{"text": "changed more"}\n')
    folders.add(prepare(cached(**fields), seed=0).train)
    assert len(folders) == 5
    for same in ({"sequence_length": 7}, {"packing": "documents"}, {"shuffle": False}):
        assert prepare(cached(**fields | same), seed=0).reused


def test_bad_rows_are_in_the_manifest(rows: Path, tmp_path: Path, cached: Any) -> None:
    with rows.open("a") as file:
        file.write("{broken\n")
    prepared = prepare(cached(source="jsonl", path=str(rows)), seed=0, to=tmp_path / "to")
    found = describe(tmp_path / "to")["train"]["bad_rows"]
    assert found["bad"] == 1
    assert found["examples"] == {"invalid JSON": (f"{rows}:{len(CORPUS) + 1}",)}
    with pytest.raises(UsageError, match="rows cannot be used"):
        prepare(cached(source="jsonl", path=str(rows), max_bad_share=0.0), seed=0)
    assert prepared.train == tmp_path / "to" / "train"


def test_a_folder_is_reused_for_the_same_and_refused_for_other_data(rows: Path, tmp_path: Path, cached: Any) -> None:
    settings = cached(source="jsonl", path=str(rows))
    seen: list[tuple[int, int]] = []
    prepare(settings, seed=0, to=tmp_path / "to", progress=lambda *numbers: seen.append(numbers))
    assert seen[-1] == (sum(map(len, CORPUS)), sum(map(len, CORPUS)))
    assert prepare(settings, seed=0, to=tmp_path / "to").reused
    with pytest.raises(UsageError, match="holds data prepared with other settings"):
        prepare(settings, seed=1, to=tmp_path / "to")


def test_describe_counts(rows: Path, tmp_path: Path, cached: Any) -> None:
    prepare(cached(source="jsonl", path=str(rows)), seed=0, to=tmp_path / "to")
    found = describe(tmp_path / "to")
    assert found["train"]["documents"] + found["valid"]["documents"] == len(CORPUS)
    assert found["train"]["tokens"] + found["valid"]["tokens"] == sum(len(text) + 1 for text in CORPUS)
    assert (found["train"]["tokenizer"], found["train"]["vocab_size"]) == ("byte", 257)
    assert describe(tmp_path / "to" / "train")["tokens"] == found["train"]
    with pytest.raises(UsageError, match="no prepared data"):
        describe(tmp_path)


def test_embedded_is_the_default(cached: Any) -> None:
    prepared = prepare(cached(embedded_mb=0.1), seed=5)
    assert sorted(texts(prepared.train, prepared) + texts(prepared.valid, prepared)) == sorted(documents(5, 0.1))


def test_two_processes_at_once_do_not_hurt_each_other(rows: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from flatout.config.settings import DataSettings; from flatout.data.prepare import prepare\n"
        "s = DataSettings(source='jsonl', path=sys.argv[1], cache=sys.argv[2], tokenizer='bpe:300')\n"
        "p = prepare(s, seed=0); p.open(); print(p.train, p.reused)"
    )
    command = [sys.executable, "-c", code, str(rows), str(tmp_path / "cache")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=HANG_S)[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len({folder for folder, _ in said}) == 1
    assert sorted(reused for _, reused in said) == ["False", "True", "True"]


def test_an_interrupted_preparation_goes_on(rows: Path, tmp_path: Path, cached: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "SHARD_TOKENS", 20_000)
    monkeypatch.setattr(module, "ENCODE_DOCUMENTS", 10)
    settings = cached(source="jsonl", path=str(rows), tokenizer="bpe:300", valid_share=0.2)
    prepare(settings, seed=0, to=tmp_path / "whole")

    def stop(num_bytes: int, num_tokens: int) -> None:
        if num_tokens > 60_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(settings, seed=0, to=tmp_path / "torn", progress=stop)
    torn = read_manifest(tmp_path / "torn" / "train")
    assert torn is not None
    assert len(torn.shards) >= 2
    assert not torn.complete
    with pytest.raises(UsageError, match="incomplete"):
        Shards.open(tmp_path / "torn" / "train")
    assert not prepare(settings, seed=0, to=tmp_path / "torn").reused
    assert content(tmp_path / "torn") == content(tmp_path / "whole")


# -- tokens ------------------------------------------------------------------------------------------------


def test_prepared_folders_are_a_source(rows: Path, tmp_path: Path, cached: Any) -> None:
    made = prepare(cached(source="jsonl", path=str(rows), tokenizer="bpe:300"), seed=0, to=tmp_path / "to")
    for fields in ({}, {"tokenizer": "bpe:300"}, {"tokenizer": str(tmp_path / "to" / "tokenizer")}):
        given = prepare(cached(source="tokens", path=str(tmp_path / "to"), **fields), seed=0)
        assert (given.train, given.valid) == (made.train, made.valid)
        assert given.tokenizer.fingerprint == made.tokenizer.fingerprint
    other = prepare(cached(source="jsonl", path=str(rows), tokenizer="bpe:320"), seed=0)
    with pytest.raises(UsageError, match="was made by the tokenizer bpe:300"):
        prepare(cached(source="tokens", path=str(made.train), tokenizer=str(other.train.parent / "tokenizer")), seed=0)
    with pytest.raises(UsageError, match="already prepared"):
        prepare(cached(source="tokens", path=str(tmp_path / "to")), seed=0, to=tmp_path / "more")


def test_raw_tokens_are_a_source_with_their_tail_held_out(tmp_path: Path, cached: Any) -> None:
    tokens = np.arange(1000) % 256
    tokens.astype("<u2").tofile(tmp_path / "a.bin")
    given = prepare(cached(source="tokens", path=str(tmp_path / "*.bin"), valid_share=0.1), seed=0)
    split = given.open()
    assert split.train.window(0, 900).tolist() == tokens[:900].tolist()
    assert split.valid.window(0, 100).tolist() == tokens[900:].tolist()
    np.save(tmp_path / "v.npy", tokens[:50])
    fields = {"source": "tokens", "path": str(tmp_path / "a.bin"), "valid_path": str(tmp_path / "v.npy")}
    split = prepare(cached(**fields), seed=0).open()
    assert (split.train.num_tokens, split.valid.num_tokens) == (1000, 50)


def test_raw_tokens_of_another_tokenizer_are_refused(tmp_path: Path, cached: Any) -> None:
    np.array([5, 50256, 7], "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(UsageError, match=r"a\.bin: token 50256 at position 1, but there are only 257 ids"):
        prepare(cached(source="tokens", path=str(tmp_path / "a.bin")), seed=0)
    with pytest.raises(UsageError, match="does not exist"):
        prepare(cached(source="tokens", path=str(tmp_path / "b.bin")), seed=0)


# -- in the background -------------------------------------------------------------------------------------


def test_background_writes_what_the_foreground_would(rows: Path, cached: Any) -> None:
    settings = cached(source="jsonl", path=str(rows), tokenizer="bpe:300", valid_share=0.1)
    background = start_background(settings, seed=0, shard_tokens=20_000)
    split = background.prepared.open()
    assert split.train.num_tokens >= 20_000
    split.train.wait_for(10**9)
    assert split.train.complete
    assert writer_of(background).wait(timeout=HANG_S) == 0
    foreground = prepare(settings, seed=0)
    assert texts(background.prepared.train, background.prepared) == texts(foreground.train, foreground)
    assert texts(background.prepared.valid, background.prepared) == texts(foreground.valid, foreground)
    again = start_background(settings, seed=0, shard_tokens=20_000)
    assert again.writer is None
    assert again.prepared.reused


def writer_of(background: Background) -> subprocess.Popen[str]:
    assert background.writer is not None
    assert background.writer.process is not None
    return background.writer.process


HELD = """
import os, sys, time
from flatout.data import prepare
read = prepare.read_documents
def held(*arguments, **options):
    for number, document in enumerate(read(*arguments, **options)):
        while number == 10_000 and not os.path.exists(sys.argv[1]):
            time.sleep(0.02)
        yield document
prepare.read_documents = held
raise SystemExit(prepare.main())
"""


class Held:
    """Rows of which a writer gets half, and the rest when it is let go."""

    def __init__(self, folder: Path) -> None:
        self.path, self.gate = folder / "held.jsonl", folder / "gate"
        self.path.write_bytes(b"".join(b'{"text": "row number %d of many"}\n' % i for i in range(20_000)))
        self.writer = (sys.executable, "-c", HELD, str(self.gate))

    def let_go(self) -> None:
        self.gate.touch()


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    rows = Held(tmp_path)
    monkeypatch.setattr(module, "WRITER", rows.writer)
    yield rows
    rows.let_go()


def test_a_killed_writer_is_noticed_and_a_new_one_goes_on(held: Held, tmp_path: Path, cached: Any) -> None:
    settings = cached(source="jsonl", path=str(held.path), valid_share=0.1)
    background = start_background(settings, seed=0, shard_tokens=20_000)
    root = background.prepared.train.parent
    assert writer_is_alive(root)
    shards = Shards.open(background.prepared.train)
    stream = Stream(shards, sequence_length=64, batch_sequences=8, seed=0, packing="documents", shuffle=True)
    before = [stream.step_arrays(step).tokens for step in range(60)]

    writer_of(background).send_signal(signal.SIGKILL)
    writer_of(background).wait()
    with pytest.raises(RunFailed, match=r"stopped at \d+ tokens, .* probably killed"):
        shards.wait_for(10**9)

    held.let_go()
    restarted = start_background(settings, seed=0, shard_tokens=20_000)
    shards.wait_for(10**9)  # a reader that was there before sees the rest, too
    assert writer_of(restarted).wait(timeout=HANG_S) == 0
    resumed = restarted.prepared.open().train
    assert resumed.num_tokens == shards.num_tokens
    stream = Stream(resumed, sequence_length=64, batch_sequences=8, seed=0, packing="documents", shuffle=True)
    for step, tokens in enumerate(before):
        assert np.array_equal(stream.step_arrays(step).tokens, tokens)

    (tmp_path / "whole.jsonl").write_bytes(held.path.read_bytes())
    whole = cached(source="jsonl", path=str(tmp_path / "whole.jsonl"), valid_share=0.1)
    uninterrupted = start_background(whole, seed=0, shard_tokens=20_000)
    assert writer_of(uninterrupted).wait(timeout=HANG_S) == 0
    assert content(root) == content(uninterrupted.prepared.train.parent)


def test_a_second_run_shares_the_writer_and_outlives_it(held: Held, cached: Any) -> None:
    settings = cached(source="jsonl", path=str(held.path))
    first = start_background(settings, seed=0, shard_tokens=20_000)
    second = start_background(settings, seed=0, shard_tokens=20_000)
    assert second.writer is not None
    assert second.writer.process is None
    shards = second.prepared.open().train
    root = first.prepared.train.parent
    assert writer_of(first).poll() is None
    first.close()
    assert not writer_is_alive(root)

    held.let_go()
    with ThreadPoolExecutor(4) as workers:  # as those of a feed, all of which miss the same shards
        list(workers.map(shards.wait_for, [10**9] * 4))
    assert shards.complete
    assert writer_of(second).wait(timeout=HANG_S) == 0
    found = describe(root)
    assert found["train"]["documents"] + found["valid"]["documents"] == 20_000


@pytest.fixture
def stuck(held: Held, cached: Any) -> Iterator[Background]:
    """A stream whose writer was killed after its first shards."""
    background = start_background(cached(source="jsonl", path=str(held.path)), seed=0, shard_tokens=20_000)
    writer_of(background).kill()
    writer_of(background).wait()
    yield background
    background.close()


@pytest.mark.parametrize(("code", "starts"), [(3, 3), (4, 3), (2, 1)])
def test_a_writer_that_fails_again_and_again_is_given_up(
    stuck: Background, monkeypatch: pytest.MonkeyPatch, code: int, starts: int
) -> None:
    started: list[subprocess.Popen[str]] = []

    def spawn(task: Task) -> subprocess.Popen[str]:
        with writer_log(task.root).open("w") as log:
            failing = f"import sys; print('no luck, time {len(started) + 1}'); sys.exit({code})"
            started.append(subprocess.Popen([sys.executable, "-c", failing], stdout=log, text=True))
        return started[-1]

    monkeypatch.setattr(module, "_spawn", spawn)
    with pytest.raises(RunFailed, match=rf"stopped at \d+ tokens, .*: no luck, time {starts}\n"):
        stuck.prepared.open().train.wait_for(10**9)
    assert [process.wait() for process in started] == [code] * starts


def test_a_closed_run_starts_no_writer(stuck: Background) -> None:
    shards = stuck.prepared.open().train
    stuck.close()
    with pytest.raises(RunFailed, match="stopped at"):
        shards.wait_for(10**9)
    assert not writer_is_alive(stuck.prepared.train.parent)


def test_an_orphaned_writer_ends(held: Held, tmp_path: Path) -> None:
    code = (
        "import json, sys; from flatout.config.settings import DataSettings; from flatout.data import prepare\n"
        "s = DataSettings(source='jsonl', path=sys.argv[1], cache=sys.argv[2])\n"
        "prepare.WRITER = json.loads(sys.argv[3])\n"
        "b = prepare.start_background(s, seed=0, shard_tokens=20_000); print(b.prepared.train.parent)"
    )
    command = [sys.executable, "-c", code, str(held.path), str(tmp_path / "cache"), json.dumps(held.writer)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    root = Path(done.stdout.strip())
    held.let_go()
    wait_until(lambda: not writer_is_alive(root))
    manifest = read_manifest(root / "train")
    assert manifest is not None
    assert not manifest.complete
    assert "has ended" in (root / "writer.log").read_text()


def test_what_stops_the_writer_at_once_is_told(tmp_path: Path, cached: Any) -> None:
    bad = tmp_path / "bad.jsonl.gz"
    bad.write_bytes(gzip.compress(b'{"text": "x"}\n' * 100)[:-12])
    with pytest.raises(UsageError, match=r"could not be prepared: .*bad\.jsonl\.gz is damaged"):
        start_background(cached(source="jsonl", path=str(bad)), seed=0)


def test_the_writer_needs_neither_pydantic_nor_torch() -> None:
    code = "import sys, flatout.data.prepare; print(sorted({'pydantic', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
def test_a_real_dataset_route(tmp_path: Path, cached: Any) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS))
    background = start_background(cached(source="hf", name=str(folder)), seed=0, shard_tokens=50_000)
    split = background.prepared.open()
    fingerprint = split.train.fingerprint
    split.train.wait_for(10**9)
    assert split.train.complete
    again = start_background(cached(source="hf", name=str(folder)), seed=0, shard_tokens=50_000)
    assert again.prepared.open().train.fingerprint == fingerprint
    assert describe(background.prepared.train.parent)["train"]["bad_rows"]["rows"] == len(CORPUS)
