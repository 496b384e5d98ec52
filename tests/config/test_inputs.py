"""What a run reads is looked for with the configuration: by `config validate`, `train --dry-run` and `train` alike."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from tests.command import Command, flatout  # noqa: F401 a fixture

SMALL = "model: {layers: 1, hidden: 64, heads: 1, vocab: 320}\ntrain: {steps: 2}\n"
ROWS = '{"prompt": "a", "completion": "b"}\n' * 20
MISSING = {
    "data.path": ["data.source=jsonl", "data.path=no.jsonl"],
    "data.path: rows": ["recipe=sft", "data.source=jsonl", "data.path=no.jsonl"],
    "data.path: glob": ["data.source=text", "data.path=no/*.txt"],
    "data.path: tokens": ["data.source=tokens", "data.path=no"],
    "data.path: pairs": ["recipe=dpo", "data.path=no.jsonl"],
    "data.valid_path": ["data.source=text", "data.path=text.txt", "data.valid_path=no.txt"],
    "data.path: second source": ["recipe=sft", "data.sources=[{path: rows.jsonl}, {path: no.jsonl}]"],
    "data.path: split": ["recipe=sft", "data.source=jsonl", "data.path=some", "data.split=test"],
    "data.tokenizer": ["data.tokenizer=./no"],
    "no model": ["model=./no"],
    "no generator": ["recipe=rft", "rft.task=units:train", "rft.teach=units:train", "rft.generator=./no"],
    "lora.adapter": ["recipe=sft", "data.path=rows.jsonl", "lora.rank=2", "lora.adapter=no"],
    "lora.targets": ["recipe=sft", "data.path=rows.jsonl", "lora.rank=2", "lora.targets=no"],
    "eval.tasks": ["eval.tasks=jsonl:no.jsonl"],
    "rl.tasks": ["recipe=rl", "rl.tasks=[guru:no.jsonl]"],
    "rft.task": ["recipe=rft", "rft.task=jsonl:no.jsonl", "rft.valid=units", "rft.teach=units:train"],
    "rft.prompt": ["recipe=rft", "rft.task=units:train", "rft.teach=units:train", "rft.prompt=no.yaml"],
    "data.sources": ["recipe=router", "lora.rank=2", "router.teach_steps=2",
                     "data.sources=[{task: qa}, {task: summary, path: no.tsv}]"],
}  # fmt: skip
WORDS = {"no model": "the folder './no' does not exist", "no generator": "the folder './no' does not exist",
         "rft.prompt": "no.yaml", "data.path: split": "has no file of split 'test'"}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "run.yaml").write_text(SMALL)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "text.txt").write_text("one\n")
    (tmp_path / "some").mkdir()
    for name in ("train", "other"):
        (tmp_path / "some" / f"{name}.jsonl").write_text(ROWS)
    return "run.yaml"


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_refused_before_a_run(flatout: Command, config: str, tmp_path: Path, name: str) -> None:  # noqa: F811
    said = []
    for command in (["config", "validate"], ["train", "--dry-run", "--run", "run"], ["train", "--run", "run"]):
        done = flatout(*command, config, *MISSING[name])
        assert done.code in (2, 3), done.err
        assert WORDS.get(name, name.partition(":")[0]) in done.err
        said.append(done.err)
    assert len(set(said)) == 1
    assert not (tmp_path / "run").exists()


def test_what_is_there_is_valid(flatout: Command, config: str) -> None:  # noqa: F811
    for overrides in (
        ["data.source=text", "data.path=text.txt"],
        ["recipe=sft", "data.sources=[{path: rows.jsonl}, {path: some}]"],
        ["recipe=dpo", "data.path=rows.jsonl"],
        ["eval.tasks=[units, code]"],
        ["recipe=rl", "rl.tasks=['code:train?size=16', units]"],
    ):
        done = flatout("config", "validate", config, *overrides)
        assert (done.code, done.err) == (0, ""), overrides


def test_validation_runs_no_function_of_the_configuration(flatout: Command, config: str, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "mine.py").write_text("open('ran', 'w')\ndef task(**options): raise SystemExit\n")
    assert flatout("config", "validate", config, "eval.tasks=[python:mine:task]", "train.objective=mine:task").code == 0
    assert not (tmp_path / "ran").exists()


def test_a_dry_run_refuses_the_folder_of_another_run(flatout: Command, config: str, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "run").mkdir()
    for name in ("config.json", "plan.json", "hardware.json"):
        (tmp_path / "run" / name).write_text("{}")
    done = flatout("train", config, "--run", "run", "--dry-run")
    assert done.code == 2
    assert "choose another folder with --run" in done.err


def test_the_byte_tokenizer_needs_its_ids(flatout: Command, config: str) -> None:  # noqa: F811
    done = flatout("config", "validate", config, "model.vocab=256")
    assert done.code == 2
    assert "model.vocab: 256 is fewer than the 257 ids of the byte tokenizer; set at least 257" in done.err
    assert flatout("config", "validate", config, "model.vocab=257").code == 0


def test_a_full_disk_is_met_with_advice_that_is_not_followed_yet(
    flatout: Command,  # noqa: F811
    config: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    fewer, whole = "set save.weights_only=true", "save.keep=2"
    said = [flatout("train", config, "--dry-run", "save.keep=9").err]
    said += [flatout("train", config, "--dry-run", "save.keep=9", fewer.removeprefix("set ")).err]
    said += [flatout("train", config, "--dry-run", whole, fewer.removeprefix("set ")).err]
    assert [(fewer in one, whole in one) for one in said] == [(True, True), (False, True), (False, False)]
    assert all("free some space" in one and "choose another --run folder" in one for one in said)
