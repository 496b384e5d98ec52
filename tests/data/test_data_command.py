"""`flatout data prepare`, and what a run says of its data."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests import warm
from tests.command import Command

from flatout.config.settings import DataSettings
from flatout.data.prepare import start_background

TEXTS = [f"document number {i} says what it says" for i in range(200)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two hundred rows, and ten that cannot be read, from the 101st on."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    path.write_text("\n".join([*lines[:100], *["{broken"] * 10, *lines[100:]]) + "\n")
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


KILLED = """
import os, signal, sys
from pathlib import Path
from flatout.cli import main
from flatout.data import tokenizer
at, *arguments = sys.argv[1:]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if at == "training":
    tokenizer._training_sample = die
else:
    replace = Path.replace
    Path.replace = lambda self, to: die() if Path(to).name == at else replace(self, to)
sys.argv = ["flatout", *arguments]
main()
"""


@pytest.mark.parametrize(
    "at", ["training", "tokenizer_config.json", "tokenizer.json", "tokens-00000.bin", "manifest.json"]
)
def test_a_killed_preparation_goes_on_by_the_same_command(flatout: Command, tmp_path: Path, at: str) -> None:
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(TEXTS))
    arguments = ["data", "prepare", "a.txt", "--tokenizer", "bpe:300", "--to"]
    whole = flatout(*arguments, "whole")
    assert whole.code == 0, whole.err
    assert warm.Started(at, *arguments, "torn", cwd=tmp_path, script=KILLED).wait(timeout=120) == -signal.SIGKILL
    done = flatout(*arguments, "torn")
    assert done.code == 0, done.err
    assert tree(tmp_path / "torn") == tree(tmp_path / "whole")


def test_a_folder_of_others_is_left_alone(flatout: Command, rows: Path, tmp_path: Path) -> None:
    for name in ("mine/notes.txt", "theirs/train/data.csv", "locked/lock", "locked/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for folder in ("mine", "theirs", "locked"):
        before = tree(tmp_path / folder)
        done = flatout("data", "prepare", "embedded", "--to", folder)
        assert (done.code, tree(tmp_path / folder)) == (2, before)
        assert f"{folder} holds other files, and nothing is overwritten" in done.err


def test_files_of_another_tokenizer_do_not_stay(flatout: Command, tmp_path: Path) -> None:
    """Of a preparation that was interrupted, and is begun again with another one."""
    (tmp_path / "to" / "tokenizer").mkdir(parents=True)
    (tmp_path / "to" / "lock").touch()
    (tmp_path / "to" / "tokenizer" / "chat_template.jinja").write_text("of another")
    (tmp_path / "to" / "tokenizer" / ".tokenizer.json.1.tmp").write_text("half of it")
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(TEXTS))
    assert flatout("data", "prepare", "a.txt", "--to", "to", "--tokenizer", "bpe:300").code == 0
    assert sorted(file.name for file in (tmp_path / "to" / "tokenizer").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


# -- rows that are left out ---------------------------------------------------------------------------------


def test_every_option_that_a_message_names_exists(flatout: Command, rows: Path) -> None:
    """And works: what the message advises gets the data prepared."""
    shown = flatout("data", "prepare", "--help").out
    arguments = ["data", "prepare", "rows.jsonl", "--to", "to"]
    refused = flatout(*arguments)
    assert refused.code == 2
    assert "10 of 210 rows cannot be used" in refused.err
    for attempt in (
        arguments,
        [*arguments, "--on-bad-row", "stop"],
        [*arguments, "--valid-path", "nowhere.jsonl"],
        [*arguments, "--tokenizer", "bpe:1"],
        ["data", "prepare", "embedded", "--to", "to", "--valid-path", "rows.jsonl"],
        ["data", "prepare", "rows.jsonl", "--to", "rows.jsonl"],
        ["data", "prepare", "nowhere.jsonl", "--to", "to"],
    ):
        done = flatout(*attempt)
        assert done.code == 2, attempt
        assert not re.findall(r"data\.[a-z_]+", done.err.replace("data.parquet", "")), done.err
        for option in re.findall(r"--[a-z-]+", done.err):
            assert option in shown, (option, done.err)
    done = flatout(*arguments, "--max-bad-share", "0.05")
    assert done.code == 0, done.err


def test_the_settings_that_messages_name_have_options() -> None:
    """Every setting that the modules behind the command name in a text."""
    from flatout.data import corpus

    modules = ("sources", "prepare", "tokenizer", "writing", "manifest")
    text = "".join((Path(corpus.__file__).with_name(f"{name}.py")).read_text() for name in modules)
    named = {*re.findall(r"(?<![\w.])data\.([a-z_]+)", text)} & set(DataSettings.__dataclass_fields__)
    assert named <= set(corpus.OPTIONS)
    assert corpus.as_options("use data.on_bad_row: skip, data.tokenizer: x is wrong, /my/data.path/a") == (
        "use --on-bad-row skip, --tokenizer: x is wrong, /my/data.path/a"
    )


def test_the_command_says_what_it_left_out(flatout: Command, tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:100], "{broken", "[1]", *lines[100:]]))
    done = flatout("data", "prepare", "rows.jsonl", "--to", "to")
    assert done.code == 0, done.err
    said = "1 row: invalid JSON (first: rows.jsonl:101); 1 row: not an object (first: rows.jsonl:102)"
    assert f"left out: {said}\n" in done.out


def test_a_run_says_what_it_left_out(rows: Path, tmp_path: Path) -> None:
    config = {
        "recipe": "pretrain",
        "model": {"layers": 1, "hidden": 16, "heads": 2},
        "data": {"source": "jsonl", "path": str(rows), "sequence_length": 32, "max_bad_share": 0.1, "cache": "cache"},
        "train": {"batch_tokens": 128, "steps": 2},
        "eval": {"tokens": 32},
        "plan": {"precision": "fp32", "threads": 1},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config | {"data": config["data"] | {"valid_share": 0.1}}))
    done = warm.flatout("train", "tiny.yaml", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "left out: 10 rows: invalid JSON (first:" in said
    recorded = "".join(path.read_text() for path in (tmp_path / "run").rglob("*.jsonl"))
    assert f"{rows}:101" in recorded


# -- where nothing can be written ---------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_read_only_media(flatout: Command, tmp_path: Path) -> None:
    """What is there is used; what is not gets a sentence."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not available here")
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(TEXTS))
    arguments = ["data", "prepare", "a.txt", "--to"]
    assert flatout(*arguments, "disk/there").code == 0
    (disk / "begun").mkdir()
    (disk / "begun" / "lock").touch()

    def on_read_only_disk(to: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flatout", *arguments, to]
        script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", script, str(disk), *command], capture_output=True, text=True, cwd=tmp_path
        )

    done = on_read_only_disk("disk/there")
    assert done.returncode == 0, done.stderr
    for to in ("disk/new", "disk/begun"):
        done = on_read_only_disk(to)
        assert done.returncode == 3
        assert "Traceback" not in done.stderr
        assert f"{to} cannot be written (Read-only file system); set --to to a writable folder" in done.stderr


def test_a_writer_that_ended_well_leaves_no_log(rows: Path, tmp_path: Path) -> None:
    settings = DataSettings(source="jsonl", path=str(rows), max_bad_share=0.1, cache=str(tmp_path / "cache"))
    background = start_background(settings, seed=0, shard_tokens=500)
    background.prepared.open().train.wait_for(10**9)
    assert background.writer is not None
    assert background.writer.process is not None
    assert background.writer.process.wait(timeout=120) == 0
    assert sorted(file.name for file in background.prepared.train.parent.iterdir()) == [
        "lock",
        "tokenizer",
        "train",
        "valid",
    ]
