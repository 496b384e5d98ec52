"""Output that cannot be written: one clear error, no traceback, and what the command did is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import yaml
from tests import warm
from tests.command import Command
from tests.data.talks import tokenizer_folder
from tests.insight import made

from flatout.config import edit
from flatout.insight import ablate
from flatout.record import Run

CONFIG = {
    "recipe": "pretrain",
    "model": {"layers": 1, "hidden": 16, "heads": 2},
    "data": {"source": "embedded", "embedded_mb": 0.3, "sequence_length": 64, "valid_share": 0.05},
    "train": {"batch_tokens": 512, "steps": 2, "lr": 3e-3, "warmup_steps": 0},
    "plan": {"precision": "fp32", "threads": 1},
}
QUESTIONS = [{"question": f"{number}?", "answer": f"#### {number % 10}"} for number in range(100, 124)]
SAMPLING = {
    "recipe": "rft",
    "model": {"layers": 1, "hidden": 16, "heads": 2},
    "data": {"tokenizer": "byte", "sequence_length": 48},
    "rft": {
        **{"teach": "gsm8k:rows.jsonl", "task": "gsm8k:rows.jsonl", "valid": "gsm8k:rows.jsonl"},
        **{"teach_steps": 40, "teach_lr": 6e-3, "prompt": "bare", "oversample": 16, "first": 2},
    },
    "sample": {"max_tokens": 2, "rows": 16},
    "train": {"batch_tokens": 480, "steps": 1},
    "lora": {"rank": None},
    "plan": {"precision": "fp32", "threads": 1},
}
KINDS = ("full", "closed", "unread")
# Every verb, in a form that prints its result to stdout.
VERBS = {
    "version": "--version",
    "demo": "demo",
    "examples": "examples",
    "example": "examples sft-h100",
    "hardware": "hardware",
    "hardware json": "hardware --json",
    "plan": "plan tiny.yaml",
    "plan json": "plan tiny.yaml --json",
    "train dry run": "train tiny.yaml --dry-run",
    "launch": "launch tiny.yaml --on slurm --dry-run",
    "export": "export trained --to exported",
    "doctor run": "doctor made",
    "generate": "generate trained hello --max-tokens 1",
    "generate lines": "generate trained hello two --max-tokens 1",
    "doctor json": "doctor made --json -",
    "doctor log": "doctor --log train.log",
    "eval": "eval trained --tasks units --limit 1 --max-tokens 1",
    "chat": "chat trained --max-tokens 2",
    "tune": "tune tuned.yaml --revert",
    "compare": "compare made trained",
    "report": "report made -o -",
    "report file": "report made",
    "watch": "watch made --once",
    "watch lines": "watch made",
    "watch json": "watch made --json",
    "runs": "runs .",
    "runs json": "runs . --json",
    "data prepare": "data prepare rows.jsonl --field question --to shards",
    "data show": "data show sft.yaml",
    "config schema": "config schema",
    "config show": "config show tiny.yaml",
    "config validate": "config validate tiny.yaml",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with configurations, a log and runs."""
    folder = tmp_path_factory.mktemp("output")
    data = CONFIG["data"] | {"cache": str(folder / "cache")}  # type: ignore[operator]
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG | {"data": data}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / "train.log").write_text("".join(f"step {i} | loss: {3 - i / 9:.3f} | tok/s: 500\n" for i in range(9)))
    sft = {"source": "jsonl", "path": "rows.jsonl", "sequence_length": 64}
    (folder / "sft.yaml").write_text(
        yaml.safe_dump({"recipe": "sft", "model": "base", "data": sft, "train": {"steps": 1}})
    )
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "vocab_size": 320}
    shape |= {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tokenizer_folder(folder / "base") / "config.json").write_text(json.dumps(shape))
    made.make(folder / "made", steps=20)
    done = warm.flatout("train", "tiny.yaml", "--run", "trained", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def taking_nothing(kind: str) -> Iterator[IO[str] | None]:
    if kind == "closed":
        yield None
        return
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") if kind == "full" else os.fdopen(write, "w") as file:
        yield file


def process(*arguments: object, cwd: Path, kind: str) -> subprocess.CompletedProcess[str]:
    return warm.flatout(*arguments, cwd=cwd, stdout={"full": "/dev/full", "unread": "pipe"}.get(kind, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_reports_a_stdout_that_takes_nothing(
    verb: str, kind: str, flatout: Command, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for file in place.iterdir():
        (tmp_path / file.name).symlink_to(file)
    if verb == "tune":
        (tmp_path / "tuned.yaml").write_text((place / "tiny.yaml").read_text())
        edit.apply(tmp_path / "tuned.yaml", {"train.lr": 1e-3}, note={})
    question = tmp_path / "question"
    question.write_text("hello\n")
    with question.open() as stdin, taking_nothing(kind) as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(sys, "stdout", stdout)
        done = flatout(*VERBS[verb].split())
    assert "Traceback" not in done.err
    said = {"full": "stdout cannot be written: No space left on device", "closed": "stdout is closed"}
    assert done.code == (141 if kind == "unread" else 3), done.err
    assert said.get(kind, "") in done.err
    if kind == "unread":
        assert "error" not in done.err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["config schema", "runs ."])
def test_nothing_is_printed_at_the_end_of_the_process_either(kind: str, verb: str, place: Path) -> None:
    done = process(*verb.split(), cwd=place, kind=kind)
    assert done.returncode == (141 if kind == "unread" else 3)
    assert len(done.stderr.splitlines()) == (0 if kind == "unread" else 1)


def test_the_help_page_on_a_full_disk_is_an_error_too(place: Path) -> None:
    done = process("--help", cwd=place, kind="full")
    assert done.returncode == 3
    assert (
        done.stderr == "error: a file or the output cannot be written: No space left on device: free some space, or "
        "choose another place\n"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_goes_on_without_its_output(kind: str, place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = process("train", "tiny.yaml", "--run", run, cwd=place, kind=kind)
    assert done.returncode == 0, done.stderr
    assert "View failed and is switched off: stdout" in done.stderr
    assert len(list(Run.open(run).steps())) == 2
    assert list((run / "checkpoints").glob("step-*"))


def test_sampling_goes_on_and_then_says_that_its_hint_is_lost(place: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to(place / "rows.jsonl")
    (tmp_path / "rft.yaml").write_text(yaml.safe_dump(SAMPLING))
    done = process("sample", "rft.yaml", "--run", "run", cwd=tmp_path, kind="full")
    assert "Traceback" not in done.stderr
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(
    "words",
    ["doctor made --json /dev/full", "doctor --log train.log --json /dev/full"],
)
def test_a_file_that_was_asked_for_on_a_full_disk(words: str, flatout: Command, place: Path, tmp_path: Path) -> None:
    for file in place.iterdir():
        (tmp_path / file.name).symlink_to(file)
    done = flatout(*words.split())
    assert done.code == 3
    assert done.err.startswith("error: --json /dev/full cannot be written: No space left on device")
    assert Path("/dev/full").is_char_device()


def test_an_earlier_file_stays_whole_where_a_new_one_does_not_fit(
    flatout: Command, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made").symlink_to(place / "made")
    (tmp_path / "found.json").write_text("earlier")
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    done = flatout("doctor", "made", "--json", "found.json")
    assert done.code == 3
    assert "found.json cannot be written: No space left on device" in done.err
    assert (tmp_path / "found.json").read_text() == "earlier"


@pytest.mark.parametrize("words", ["plan missing.yaml", "examples missing", "doctor --log missing.log"])
def test_an_error_keeps_its_exit_code_where_it_cannot_be_printed(
    words: str, flatout: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in KINDS:
        with taking_nothing(kind) as stderr, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            assert flatout(*words.split()).code == 2


@pytest.mark.long
@pytest.mark.parametrize("verb", ["ablate --table alone --blocks 1 --only", "tune --trials 2"])
def test_a_search_is_kept_where_its_tables_cannot_be_printed(verb: str, place: Path, tmp_path: Path) -> None:
    only = [next(switch.name for switch in ablate.SWITCHES if switch.name == "data loader")] * verb.endswith("--only")
    words = [*verb.split(), *only, place / "tiny.yaml", "--run", tmp_path / "search"]
    done = process(*words, cwd=place, kind="full")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "search").glob("*.json"))


# -- text from outside

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b1A\u202e[/bold][link=file:///etc/passwd]\x08\r"
READERS = [
    *(
        "doctor strange",
        "watch strange --once",
        "watch strange",
        "runs .",
        "compare strange made",
        "report strange -o -",
    ),
    *(
        "config show strange.yaml",
        "doctor --log strange.log",
        "data show sft.yaml",
        "examples strange",
        "plan strange.yaml",
    ),
]


def spoiled(value: object) -> object:
    """The same JSON with something to harm a terminal in each text."""
    if isinstance(value, dict):
        return {key: part if key == "kind" else spoiled(part) for key, part in value.items()}
    if isinstance(value, list):
        return [spoiled(part) for part in value]
    return value + HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize("words", READERS)
@pytest.mark.parametrize("files", [("events.jsonl",), ("config.json", "env.json"), ("hardware.json", "plan.json")])
def test_no_control_character_from_outside_is_printed(
    words: str, files: tuple[str, ...], flatout: Command, place: Path, tmp_path: Path
) -> None:
    for file in place.iterdir():
        (tmp_path / file.name).symlink_to(file)
    strange = Path(shutil.copytree(place / "made", tmp_path / "strange"))
    for name in files:
        lines = (strange / name).read_text().splitlines() if name.endswith("l") else [(strange / name).read_text()]
        (strange / name).write_text("".join(json.dumps(spoiled(json.loads(line))) + "\n" for line in lines))
    (tmp_path / "strange.yaml").write_text(f"run: {json.dumps(HOSTILE)}\nmodel: {json.dumps('x' + HOSTILE)}\n")
    (tmp_path / "strange.log").write_text(f"{HOSTILE}step: 1 loss: 3.1 {HOSTILE} tok/s: 5\n" * 9)
    (tmp_path / "rows.jsonl").unlink()
    rows = [{"question": f"1{HOSTILE}?", "answer": HOSTILE}] * 20
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = flatout(*words.split())
    assert done.out + done.err
    assert "Traceback" not in done.err
    assert not set(HOSTILE[:1] + "\x07\x08\r\x9b\u202e") & set(done.out + done.err)


def test_what_a_run_says_is_shown_without_its_control_characters(flatout: Command, place: Path, tmp_path: Path) -> None:
    config = {"recipe": "pretrain" + HOSTILE, "train": {"lr": 1e-3}}
    made.make(tmp_path / "strange", steps=20, config=config)
    with (tmp_path / "strange" / "events.jsonl").open("a") as file:
        data = {"message": f"look {HOSTILE} here"}
        file.write(json.dumps({"attempt": 1, "time": 1.8e9, "kind": "warning", "step": 3, "data": data}) + "\n")
    for words in ("doctor strange", "watch strange --once", "runs ."):
        done = flatout(*words.split())
        assert done.code == 0, done.err
        assert "\x1b" not in done.out
    assert "pretrain\ufffd]0;owned" in done.out.replace("\n", "")
