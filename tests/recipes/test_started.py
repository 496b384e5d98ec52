"""A run as the model of another run: the same weights as those of its export, whatever the recipe."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes_processes import trajectory
from tests.data.talks import tokenizer_folder, write_rows
from tests.recipes import test_rft

from flatout import recipes
from flatout.config import from_mapping
from flatout.engine.opening import open_model
from flatout.errors import UsageError
from flatout.hardware import parse
from flatout.plan import decide, job_of
from flatout.record import Run


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tokenizer_folder(tmp_path_factory.mktemp("foreign") / "gpt2")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=320, n_positions=128)).save_pretrained(folder)
    return folder


def settings_of(model: Path, tmp_path: Path, **changes: Any) -> Any:
    rows = write_rows(tmp_path / "rows.jsonl", count=40)
    values = {
        "recipe": "sft",
        "model": str(model),
        "data": {"path": str(rows), "sequence_length": 128, "valid_share": 0.1, "cache": str(tmp_path / "cache")},
        "train": {"batch_tokens": 512, "steps": 3, "lr": 1e-3},
        "plan": {"precision": "fp32", "threads": 1},
    }
    return from_mapping(values | changes)


@pytest.mark.parametrize("kind", ["base", "foreign"])
@pytest.mark.parametrize("rank", [pytest.param(None, marks=pytest.mark.long), 4])
def test_it_starts_where_the_run_ended(
    kind: str, rank: int | None, request: pytest.FixtureRequest, tmp_path: Path, flatout: Callable[..., Any]
) -> None:
    model: Path = request.getfixturevalue(kind)
    recipes.run(settings_of(model, tmp_path, lora={"rank": rank}), folder=tmp_path / "first")
    merged = ["--merge"] if rank else []
    done = flatout("export", tmp_path / "first", "--to", tmp_path / "export", "--dtype", "fp32", *merged)
    assert done.returncode == 0, done.stderr

    for name in ("first", "export"):
        recipes.run(settings_of(tmp_path / name, tmp_path, lora={"rank": None}), folder=tmp_path / f"from-{name}")
    assert trajectory(tmp_path / "from-first") == trajectory(tmp_path / "from-export")
    [written] = (path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir())
    assert Run.open(tmp_path / "from-first").config["model"]["name"] == str(written)

    before = {path: path.stat().st_mtime_ns for path in written.iterdir()}
    again = settings_of(tmp_path / "first", tmp_path, lora={"rank": 2})
    recipes.run(again, folder=tmp_path / "adapters")
    assert {path: path.stat().st_mtime_ns for path in written.iterdir()} == before

    weights = written / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UsageError, match=r"model\.safetensors .*remove the folder, and it is rebuilt"):
        recipes.run(again, folder=tmp_path / "flipped")


def test_an_adapter_names_its_base_for_people_elsewhere(
    base: Path, tmp_path: Path, flatout: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    shutil.copytree(base, snapshot)
    named = {"of-hub": snapshot, "of-folder": base, "of-run": tmp_path / "of-folder"}
    bases = {}
    for name, model in named.items():
        recipes.run(settings_of(model, tmp_path, lora={"rank": 2}), folder=tmp_path / name)
        done = flatout("export", tmp_path / name, "--to", tmp_path / "out" / name)
        assert done.returncode == 0, done.stderr
        bases[name] = json.loads((tmp_path / "out" / name / "adapter_config.json").read_text())[
            "base_model_name_or_path"
        ]
    relative = os.path.relpath(base, tmp_path / "out" / "of-folder")
    assert bases == {"of-hub": "org/tiny", "of-folder": relative, "of-run": "base"}
    umask = os.umask(0)
    os.umask(umask)
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in written} == {0o666 & ~umask}
    # From any folder, and without the cache.
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.chdir("/")
    assert open_model(str(tmp_path / "out" / "of-folder")).folder is not None
    shutil.move(tmp_path / "out" / "of-run", tmp_path / "moved")
    assert open_model(str(tmp_path / "moved")).folder == tmp_path / "moved" / "base"


def test_it_is_planned_without_its_weights(base: Path, tmp_path: Path) -> None:
    recipes.run(settings_of(base, tmp_path), folder=tmp_path / "first")
    known = decide(job_of(settings_of(base, tmp_path), hardware=parse("H100"), num_ranks=1))
    for weights in (tmp_path / "first" / "checkpoints").rglob("*.safetensors"):
        weights.unlink()
    planned = decide(job_of(settings_of(tmp_path / "first", tmp_path), hardware=parse("H100"), num_ranks=1))
    assert planned.job.shape == known.job.shape


def test_a_damaged_newest_checkpoint_is_refused(base: Path, tmp_path: Path) -> None:
    recipes.run(settings_of(base, tmp_path, save={"every": 1}), folder=tmp_path / "first")
    newest = max((tmp_path / "first" / "checkpoints").glob("step-*"))
    file = next(newest.glob("weights*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(UsageError, match=r"step-00000003.* Step 2 is used instead: to start from that step"):
        recipes.run(settings_of(tmp_path / "first", tmp_path), folder=tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_rejection_sampling_on_a_foreign_model(foreign: Path, tmp_path: Path, flatout: Callable[..., Any]) -> None:
    values = test_rft.config(tmp_path) | {"model": str(foreign)}
    values["data"] = {"sequence_length": 48, "cache": str(tmp_path / "cache")}
    done = flatout("train", test_rft.write(tmp_path / "rft.yaml", values), "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    counts = next(event.data for event in Run.open(tmp_path / "run").events() if event.kind == "dataset")
    assert len(test_rft.rows_of(tmp_path / "run")) == counts["kept"] > 0
