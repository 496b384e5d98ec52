"""A user's mistake: a clear message, the right exit code, no traceback, and nothing trained."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flatout.record import Run

Call = Callable[..., subprocess.CompletedProcess[str]]


def refused(done: subprocess.CompletedProcess[str], *, code: int, words: list[str]) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, f"{word!r} is not in: {done.stderr}"
    assert "step 1/" not in done.stdout


def text_corpus(folder: Path) -> Path:
    path = folder / "corpus.txt"
    path.write_text("<|endoftext|>".join(f"This is document number {i}, and it says so." for i in range(400)))
    return path


def test_missing_file(flatout: Call, config: Path, tmp_path: Path) -> None:
    done = flatout("train", config, "data.source=text", "data.path=nowhere.txt")
    refused(done, code=2, words=["nowhere.txt"])


def test_empty_corpus(flatout: Call, config: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused(flatout("train", config, "data.source=text", "data.path=empty.txt"), code=2, words=["empty.txt"])


def test_corpus_shorter_than_a_sequence(flatout: Call, config: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A few words.<|endoftext|>And a few more.")
    done = flatout("train", config, "data.source=text", "data.path=short.txt")
    refused(done, code=2, words=["tokens", "sequence_length"])


def test_token_id_beyond_the_vocabulary(flatout: Call, config: Path, tmp_path: Path) -> None:
    ids = np.arange(20000, dtype=np.uint16) % 250
    ids[12345] = 4000
    ids.tofile(tmp_path / "tokens.bin")
    tokenizer = {"model": {"type": "BPE", "vocab": {f"w{i}": i for i in range(5000)} | {"</s>": 5000}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = flatout(
        "train", config, "model.vocab=256", "data.source=tokens", "data.path=tokens.bin",
        "data.tokenizer=tokenizer.json",
    )  # fmt: skip
    refused(done, code=2, words=["4000", "256"])


@pytest.fixture
def prepared(flatout: Call, tmp_path: Path) -> Path:
    text_corpus(tmp_path)
    done = flatout("data", "prepare", "corpus.txt", "--to", "shards", "--valid-share", "0.05")
    assert done.returncode == 0, done.stderr
    return tmp_path / "shards"


def test_tampered_shard(flatout: Call, config: Path, prepared: Path) -> None:
    shard = next((prepared / "train").glob("tokens-*.bin"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    done = flatout("train", config, "data.source=tokens", f"data.path={prepared}")
    refused(done, code=2, words=[shard.name, "prepare"])


def test_tokenizer_mismatch(flatout: Call, config: Path, prepared: Path, tmp_path: Path) -> None:
    other = flatout("data", "prepare", "corpus.txt", "--to", "other", "--tokenizer", "bpe:300")
    assert other.returncode == 0, other.stderr
    done = flatout(
        "train", config, "data.source=tokens", f"data.path={prepared}",
        f"data.tokenizer={tmp_path / 'other' / 'tokenizer'}",
    )  # fmt: skip
    refused(done, code=2, words=["tokenizer"])


def test_batch_not_divisible(flatout: Call, config: Path) -> None:
    done = flatout("train", config, "train.batch_tokens=1000")
    refused(done, code=2, words=["1000", "64", "960", "1024"])
    done = flatout("train", config, "plan.micro_batch=3")
    refused(done, code=2, words=["3", "8 sequences"])


def test_sequence_longer_than_positions(flatout: Call, config: Path) -> None:
    done = flatout("train", config, "model.positions=32")
    refused(done, code=2, words=["64", "32", "positions"])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_no_space_on_disk(config: Path, tmp_path: Path) -> None:
    """A real file system of 1 MiB, in a mount namespace of its own."""
    small = tmp_path / "small"
    small.mkdir()
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {small} && exec {sys.executable} -m flatout train {config} "
        f"model.hidden=256 --run {small}/run"
    )
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("mount namespaces are not available here")
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    refused(done, code=3, words=["GiB", "free"])


def test_unwritable_run_folder(flatout: Call, config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = flatout("train", config, "--run", tmp_path / "file" / "run")
    refused(done, code=3, words=["file"])


def test_run_folder_in_use(flatout: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert flatout("train", config, "--run", run).returncode == 0
    with Run.open(run).lock():
        done = flatout("train", config, "train.steps=20", "--run", run, "--resume")
    refused(done, code=2, words=["in use", str(os.getpid())])


def test_several_mistakes_come_in_one_message(flatout: Call, config: Path) -> None:
    done = flatout("train", config, "train.stpes=5", "train.lr=-1", "plan.precision=bf61")
    refused(done, code=2, words=["3 mistakes", "train.steps", "greater than 0", "bf16"])


def test_model_that_cannot_fit(flatout: Call, config: Path) -> None:
    done = flatout("train", config, "model.layers=400", "model.hidden=8192", "model.heads=64")
    refused(done, code=2, words=["GiB", "micro-batch 1"])
