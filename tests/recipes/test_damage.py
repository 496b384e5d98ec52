"""A run folder after damage: nothing in it is used without being checked, and what is not used is told."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from recipes_processes import events
from tests import warm
from tests.recipes.conftest import CONFIG

from flatout.config import load
from flatout.engine.checkpoint import Checkpoints, _digest
from flatout.errors import RunFailed
from flatout.recipes import pretrain
from flatout.record import Run

WEIGHTS = "weights-rank00000.safetensors"
QUICK = ["train.steps=2", "eval.every=null", "save.every=null", "save.best=false"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and a run with two checkpoints, the newer one the best."""
    folder = tmp_path_factory.mktemp("damage")
    values = CONFIG | {
        "model": {"layers": 1, "hidden": 16, "heads": 2},
        "data": CONFIG["data"] | {"cache": str(folder / "cache")},  # type: ignore[operator]
        "train": CONFIG["train"] | {"warmup_steps": 0},  # type: ignore[operator]
        "save": {"every": 6, "best": True},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    done = warm.flatout("train", "tiny.yaml", "--run", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "run/checkpoints/best").read_text() == "step-00000012\n"
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole / "run", tmp_path / "run"))


def resume(whole: Path, run: Path, *settings: str) -> tuple[int | None, str]:
    done = warm.flatout("train", "tiny.yaml", *settings, "--run", run, "--resume", cwd=whole)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_readers_tell_what_they_fall_back_to(run: Path, tmp_path: Path) -> None:
    flip(run / "checkpoints/step-00000012" / WEIGHTS)
    (tmp_path / "text.txt").write_text("One morning the fox went to the river. " * 5)
    export = warm.flatout("export", run, "--to", "hf", cwd=tmp_path)
    asked = warm.flatout("eval", run, "--tasks", "perplexity:text.txt", "--json", cwd=tmp_path)
    chat = warm.flatout("chat", run, cwd=tmp_path)
    for done in (export, asked, chat):
        assert done.returncode == 0, done.stderr
        assert f"step-00000012: {WEIGHTS} does not match its SHA-256" in done.stderr
        assert "Step 6 is used instead" in done.stderr
    document = json.loads(asked.stdout)
    assert document["step"] == 6
    assert WEIGHTS in document["notices"][0]


def test_the_best_checkpoint_is_exported_or_none(run: Path, tmp_path: Path) -> None:
    flip(run / "checkpoints/step-00000012" / WEIGHTS)
    done = warm.flatout("export", run, "--best", "--to", "hf", cwd=tmp_path)
    assert done.returncode == 2
    assert "the best checkpoint" in done.stderr
    assert f"{WEIGHTS} does not match its SHA-256" in done.stderr
    (run / "checkpoints/best").write_text("../../elsewhere\n")
    done = warm.flatout("export", run, "--best", "--to", "hf", cwd=tmp_path)
    assert done.returncode == 2
    assert "best does not name a checkpoint" in done.stderr


def test_a_resumed_run_sweeps_up_and_names_its_newest_checkpoint(whole: Path, run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "latest").write_text("step-00000099\n")
    (folder / "latest.tmp-0123abcd").write_text("step-00000099\n")
    (folder / "step-00000018.tmp-0123abcd").mkdir()
    (folder / "step-00000018.tmp-0123abcd" / WEIGHTS).write_bytes(b"x")
    code, said = resume(whole, run)
    assert code == 0, said
    assert (folder / "latest").read_text() == "step-00000012\n"
    assert sorted(p.name for p in folder.iterdir()) == ["best", "latest", "step-00000006", "step-00000012"]


def test_a_changed_tokenizer_is_refused_by_all(whole: Path, run: Path, tmp_path: Path) -> None:
    (run / "tokenizer/chat_template.jinja").write_text("{{ messages }}")
    asked = warm.flatout("eval", run, "--tasks", "units", "--limit", "1", "--max-tokens", "2", cwd=tmp_path)
    (run / "tokenizer/chat_template.jinja").unlink()
    config = run / "tokenizer/tokenizer_config.json"
    config.write_text(config.read_text().replace("PreTrained", "pretrained"))
    export = warm.flatout("export", run, "--to", "hf", cwd=tmp_path)
    code, said = resume(whole, run)
    assert (export.returncode, asked.returncode, code) == (2, 2, 2)
    for words in (export.stderr, asked.stderr, said):
        assert f"{run}/tokenizer was changed after step-00000012 was saved" in words
    shutil.rmtree(run / "tokenizer")
    code, said = resume(whole, run)
    assert code == 0, said
    assert warm.flatout("export", run, "--to", "hf", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("moment", ["first file", "temporary file", "folder beside it"])
def test_killed_while_the_tokenizer_was_saved_it_is_saved_again(
    whole: Path, run: Path, tmp_path: Path, moment: str
) -> None:
    shutil.rmtree(run / "checkpoints")
    folder = run / "tokenizer"
    if moment == "folder beside it":
        folder.rename(run / ".tokenizer.tmp")
    else:
        (folder / "tokenizer.json").unlink()
        if moment != "first file":
            (folder / "tokenizer_config.json").unlink()
        if moment == "temporary file":
            (folder / ".tokenizer_config.json.999999.tmp").write_text("{")
    code, said = resume(whole, run, *QUICK)
    assert code == 0, said
    export = warm.flatout("export", run, "--to", "hf", cwd=tmp_path)
    assert export.returncode == 0, export.stderr
    assert not list(run.rglob("*.tmp"))


def test_another_folder_in_the_tokenizers_place_is_left_alone(whole: Path, tmp_path: Path) -> None:
    mine = tmp_path / "run" / "tokenizer" / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    done = warm.flatout("train", "tiny.yaml", *QUICK, "--run", tmp_path / "run", cwd=whole)
    assert done.returncode == 2
    assert "thesis.txt, and nothing is overwritten" in done.stderr
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_scale": float("nan")},
        {"seconds": -1.0},
        {"val_losses": {"0": 1}},
        {"tokens": None},
    ],
)
def test_numbers_that_no_run_comes_to_are_named(whole: Path, run: Path, changes: dict[str, object]) -> None:
    path = run / "checkpoints/step-00000012/manifest.json"
    body = json.loads(path.read_text())
    del body["checksum"]
    body["state"] |= changes
    path.write_text(json.dumps(body | {"checksum": _digest(body)}))
    code, said = resume(whole, run, *QUICK, "train.steps=13")
    assert code == 2
    assert f"{path} " in said
    assert next(iter(changes)) in said


def start(config: Path, folder: Path, *overrides: str, resume: bool = False) -> None:
    settings = load(config, overrides=list(overrides)).settings
    pretrain.run(settings, folder=folder, resume=resume)


def test_a_checkpoint_of_another_run_of_the_same_shape_and_data_is_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "id", property(lambda self: f"id of {self.path.name}"), raising=False)
    config = whole / "tiny.yaml"
    start(config, tmp_path / "one", *QUICK)
    start(config, tmp_path / "other", *QUICK, "train.lr=1e-5")
    shutil.rmtree(tmp_path / "one/checkpoints/step-00000002")
    shutil.copytree(tmp_path / "other/checkpoints/step-00000002", tmp_path / "one/checkpoints/step-00000002")
    with pytest.raises(RunFailed, match="belongs to another run"):
        start(config, tmp_path / "one", *QUICK, resume=True)
    from flatout.engine.trained import open_trained

    with pytest.raises(Exception, match="belongs to another run"):
        open_trained(Run.open(tmp_path / "one"))


def test_other_validation_data_is_refused(whole: Path, tmp_path: Path) -> None:
    for name, count in (("train", 60), ("valid", 30), ("other", 40)):
        rows = ({"text": f"{name} {i}: the fox and the river, once more."} for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [*QUICK, "data.source=jsonl", f"data.path={tmp_path}/train.jsonl"]
    start(whole / "tiny.yaml", tmp_path / "run", *data, f"data.valid_path={tmp_path}/valid.jsonl")
    for swapped in ("other", "train"):
        with pytest.raises(RunFailed, match="other validation data"):
            start(
                whole / "tiny.yaml",
                tmp_path / "run",
                *data,
                f"data.valid_path={tmp_path}/{swapped}.jsonl",
                resume=True,
            )


@pytest.mark.parametrize("code", [errno.EACCES, errno.EFBIG, errno.EDQUOT])
def test_a_last_save_that_fails_is_told_as_what_it_is(
    code: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_args: object, **_how: object) -> Path:
        raise OSError(code, os.strerror(code), "weights")

    monkeypatch.setattr(Checkpoints, "write", failing)
    with pytest.raises(RunFailed, match=f"could not be saved: {os.strerror(code)}; nothing is saved"):
        start(whole / "tiny.yaml", tmp_path / "run", *QUICK)
    assert os.strerror(code) in str(events(tmp_path / "run", "save-failed")[-1]["error"])
