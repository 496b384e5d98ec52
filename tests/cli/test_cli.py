"""The command as a user meets it: what it prints, what it exits with, and never a traceback for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.command import Command, Done
from tests.waiting import HANG_S

from flatout import __version__, gallery
from flatout.cli import shared
from flatout.config import keys
from flatout.hardware import names

EXAMPLE = str(gallery.find("pretrain-124m").path)
DEMO = str(gallery.find("pretrain-demo").path)


def process(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=HANG_S
    )


def mistake(done: Done, says: str, *, code: int = 2) -> None:
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert says in done.err


# As a process


def test_a_cpu_is_estimated_once_it_was_measured(
    flatout: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    unknown = flatout("plan", DEMO, "--on", "CPU")
    assert "the peak of this CPU was not measured yet" in " ".join(unknown.out.split())
    here = json.loads(flatout("plan", DEMO, "--json").out)
    there = json.loads(flatout("plan", DEMO, "--on", "CPU", "--json").out)
    assert here["predicted"]["tokens_per_s"] > 0
    assert there["predicted"]["tokens_per_s"] > 0
    assert there["rates"]["peak_source"] == "measured"
    assert there["job"]["device"] == "cpu"


SFT = """recipe: sft
model: {layers: 12, hidden: 768, heads: 12, vocab: 50304}
data: {source: jsonl, path: rows.jsonl, sequence_length: 512, tokenizer: byte}
train: {batch_tokens: 16384, steps: 100}
lora: {rank: 16}
"""


def test_the_plan_says_what_a_preset_sets_and_what_it_changes(flatout: Command, tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(SFT)

    def plan(*words: str) -> tuple[str, dict[str, Any]]:
        lines = " ".join(flatout("plan", str(config), *words).out.split())
        return lines, json.loads(flatout("plan", str(config), *words, "--json").out)

    lines, made = plan("plan.preset=safe", "--on", "T4")
    assert made["reasons"]["recompute"] == "set by preset safe"
    assert "recompute full set by preset safe" in lines
    assert "pinned in the configuration" not in lines
    slower = made["predicted"]["tokens_per_s"] / made["balanced"]["tokens_per_s"]
    assert f"preset safe predicted {slower:.2f} times as fast as balanced" in lines
    assert "recompute full (balanced: none)" in lines
    lines, made = plan("plan.preset=safe", "plan.recompute=full", "--on", "T4")
    assert made["reasons"]["recompute"] == "pinned in the configuration"
    lines, made = plan("plan.preset=max", "--on", "CPU")
    assert made["reasons"]["prefetch"] == "set by preset max"
    lines, made = plan("plan.preset=max", "plan.memory_fraction=0.9", "--on", "A100-80GB")
    assert made["balanced"]["changes"] == {}
    assert "preset max changes nothing here: balanced makes the same decisions" in lines
    lines, made = plan("--on", "T4")
    assert made["balanced"] is None
    assert " preset " not in lines


def test_a_plan_can_be_piped() -> None:
    planned = process("flatout", "plan", EXAMPLE, "--on", "A100-80GBx8", "--json")
    assert (planned.returncode, planned.stderr) == (0, "")
    read = process("json.tool", stdin=planned.stdout)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout)["job"]["num_ranks"] == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", EXAMPLE, "--on", "H20"], "'H20' is not in the table of machines: did you mean H200"),
        (["train", EXAMPLE, "train.btach_tokens=1"], "did you mean train.batch_tokens?"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(arguments: list[str], says: str) -> None:
    done = process("flatout", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_training_without_torch_says_how_to_get_it() -> None:
    program = f"""
import sys
sys.modules["torch"] = None  # importing it now fails, and it cannot be found
from flatout.cli import main
sys.argv = ["flatout", "train", {DEMO!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("error: training needs torch: pip install 'flatout[train]'")


def test_too_little_host_memory_is_one_message() -> None:
    program = """
import sys
from flatout import recipes
def run(*_, **__):
    bytearray(1 << 60)
recipes.run = run
from flatout.cli import main
sys.argv = ["flatout", "train", sys.argv[1]]
main()
"""
    done = subprocess.run([sys.executable, "-c", program, DEMO], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr.splitlines()[-1].startswith("error: out of host memory")
    assert "Traceback" not in done.stderr


# Words of its own


def test_the_version(flatout: Command) -> None:
    assert flatout("--version") == Done(code=0, out=f"flatout {__version__}\n", err="")


def test_help_names_every_verb(flatout: Command) -> None:
    done = flatout("--help")
    assert done.code == 0
    for verb in ("demo", "examples", "hardware", "plan", "train", "export", "report", "watch", "data", "config"):
        assert verb in done.out


@pytest.mark.parametrize("arguments", [["plan"], ["trian"], ["plan", EXAMPLE, "--onn", "T4"]])
def test_bad_usage_is_exit_code_2(flatout: Command, arguments: list[str]) -> None:
    done = flatout(*arguments)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.err


# hardware, plan


def test_hardware(flatout: Command) -> None:
    facts = json.loads(flatout("hardware", "--json").out)
    assert facts["num_cpus"] >= 1
    assert facts["ram_gib"] > 0
    assert facts["num_gpus"] >= 0
    page = flatout("hardware")
    assert page.code == 0
    assert f"{facts['num_cpus']} cores" in page.out


@pytest.mark.parametrize("name", names())
def test_a_plan_for_each_machine(flatout: Command, name: str) -> None:
    plan = json.loads(flatout("plan", EXAMPLE, "--on", name, "--json").out)
    assert {"decisions", "reasons", "predicted"} <= set(plan)
    assert set(plan["decisions"]) == set(plan["reasons"])
    assert plan["job"]["hardware"] == name


def test_a_plan_for_people(flatout: Command) -> None:
    done = flatout("plan", EXAMPLE, "plan.micro_batch=32", "--on", "H200x8")
    assert done.code == 0
    assert f"{EXAMPLE} on 8 x H200" in done.out
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "micro_batch 32 pinned in the configuration" in lines
    assert "precision bf16 SM 9.0 has bf16 tensor cores; no loss scaling needed" in lines


def test_a_plan_for_this_machine(flatout: Command) -> None:
    done = flatout("plan", DEMO)
    assert done.code == 0
    assert "peak memory" in done.out


def test_the_environment_overrides_the_file(flatout: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT__TRAIN__BATCH_TOKENS", "65536")
    assert json.loads(flatout("plan", EXAMPLE, "--on", "T4", "--json").out)["job"]["batch_tokens"] == 65536


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--on", "[red]x[/]"], "'[red]x[/]' is not in the table"),
        (["--on", "A100"], "choose one of A100-40GB"),
        (["--on", "T4", "plan.micro_batch=3"], "choose one of 1, 2, 4, 8"),
        (["--on", "T4", "plan.accumulation=1000"], "plan.accumulation 1000 does not divide the 512 sequences"),
        (["--on", "T4x3"], "3 ranks cannot share evenly"),
        (["--on", "T4", "model.hidden=8192", "model.heads=64", "model.layers=40"], "of 14.6 GiB"),
        (["--on", "T4", "model=./nowhere"], "model: the folder './nowhere' does not exist"),
        (["--on", "T4", "data.tokenizer=./nowhere", "model.vocab=null"], "./nowhere"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(flatout: Command, arguments: list[str], says: str) -> None:
    mistake(flatout("plan", EXAMPLE, *arguments), says)


# config


def test_config_show_says_where_each_value_is_from(flatout: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT__TRAIN__CLIP", "0.5")
    rows = json.loads(flatout("config", "show", EXAMPLE, "train.lr=1e-3", "--json").out)
    assert list(rows) == keys()
    assert rows["train.lr"] == {"value": 1e-3, "source": "command line"}
    assert rows["train.clip"] == {"value": 0.5, "source": "environment"}
    assert rows["model.layers"] == {"value": 12, "source": "file"}
    assert rows["train.beta1"] == {"value": 0.9, "source": "default"}

    page = flatout("config", "show", EXAMPLE, "train.lr=1e-3", "log.name=[red]x[/]").out
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert "train.lr 0.001 command line peak learning rate" in lines
    assert "train.clip 0.5 environment largest gradient norm; null for no clipping" in lines
    assert any(line.startswith("log.name [red]x[/] command line") for line in lines)


@pytest.mark.parametrize("name", [example.name for example in gallery.examples()])
def test_every_shipped_example_is_good(flatout: Command, name: str) -> None:
    path = str(gallery.find(name).path)
    done = flatout("config", "validate", path)
    # What the reader has to bring is missing here, and named.
    lacking = ("does not exist", "there is no file")
    assert done == Done(code=0, out=f"{path}: valid\n", err="") or (
        done.code == 2 and any(w in done.err for w in lacking)
    )


def test_all_mistakes_of_a_configuration_come_at_once(flatout: Command, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {layers: 2, hidden: 64, haeds: 2}\ntrain: {steps: -1}\n")
    done = flatout("config", "validate", str(file))
    mistake(done, "did you mean model.heads?")
    assert "train.steps: -1 must be greater than 0" in done.err


def test_the_schema_is_json_and_knows_every_section(flatout: Command) -> None:
    schema = json.loads(flatout("config", "schema").out)
    assert schema["type"] == "object"
    assert {key.split(".")[0] for key in keys()} == set(schema["properties"])


# examples


def test_examples_are_listed_printed_and_copied(flatout: Command, tmp_path: Path) -> None:
    listed = flatout("examples").out
    for example in gallery.examples():
        assert f"{example.name}  {example.title}" in listed
    assert flatout("examples", "pretrain-124m").out == Path(EXAMPLE).read_text()

    done = flatout("examples", "pretrain-124m", "--to", "mine.yaml")
    assert done == Done(code=0, out="wrote mine.yaml\n", err="")
    copy = tmp_path / "mine.yaml"
    assert yaml.safe_load(copy.read_text()) == yaml.safe_load(Path(EXAMPLE).read_text())


def test_an_example_overwrites_nothing(flatout: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("precious")
    mistake(flatout("examples", "pretrain-124m", "--to", "mine.yaml"), "mine.yaml exists and is not overwritten")
    assert (tmp_path / "mine.yaml").read_text() == "precious"
    mistake(flatout("examples", "pretrain-124m", "--to", "no/such/mine.yaml"), "there is no folder no/such")
    mistake(flatout("examples", "nope"), "choose one of pretrain-124m")


# data


def test_data_is_prepared_and_counted(flatout: Command, tmp_path: Path) -> None:
    texts = [f"document {n} says hello" for n in range(50)]
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    arguments = ["data", "prepare", str(source), "--field", "body", "--valid-share", "0.2"]

    facts = json.loads(flatout(*arguments, "--to", "shards", "--json").out)
    parts = [facts["train"], facts["valid"]]
    assert all(part["documents"] > 0 for part in parts)
    assert sum(part["documents"] for part in parts) == 50
    # One id a byte, and one between documents.
    assert sum(part["tokens"] for part in parts) == sum(len(text) + 1 for text in texts)

    page = flatout(*arguments, "--to", "again")
    assert page.code == 0
    assert 'train on it: data: {"source": "tokens", "path": "again"}' in page.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["picture.png"], "'picture.png' is not a source: give `embedded`, hf:NAME"),
        (["embedded", "--valid-share", "2"], "--valid-share 2 must be above 0 and below 0.5"),
    ],
)
def test_data_that_cannot_be_prepared(flatout: Command, tmp_path: Path, arguments: list[str], says: str) -> None:
    mistake(flatout("data", "prepare", *arguments, "--to", "shards"), says)
    assert not (tmp_path / "shards").exists()


# train, export


def test_a_dry_run_plans_and_leaves_nothing(flatout: Command, tmp_path: Path) -> None:
    done = flatout("train", DEMO, "--dry-run", "--run", "here")
    assert done.code == 0
    assert "micro_batch" in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["train", DEMO, "--resume"], "--resume needs --run FOLDER"),
        (["train", DEMO, "train.steps=none"], "train.steps"),
        (["export", "nowhere", "--to", "model"], "nowhere is not a run folder"),
        (["export", "nowhere", "--to", "model", "--dtype", "int4"], "--dtype 'int4' must be one of"),
        (["export", "nowhere", "--to", DEMO], "is not an empty folder, and nothing is overwritten"),
        (["export", "nowhere", "--to", str(gallery.folder())], "is not an empty folder, and nothing is overwritten"),
    ],
)
def test_a_run_that_cannot_be_is_refused(flatout: Command, tmp_path: Path, arguments: list[str], says: str) -> None:
    mistake(flatout(*arguments), says)
    assert list(tmp_path.iterdir()) == []


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shared.time, "strftime", lambda _: "20260131-094500")
    found = []
    for _ in range(3):
        found.append(shared.new_folder("tiny"))
        found[-1].mkdir(parents=True)
    assert [folder.name for folder in found] == [f"tiny-20260131-094500{end}" for end in ("", "-2", "-3")]


def test_completion_knows_keys_and_examples() -> None:
    from flatout.cli.examples import _names
    from flatout.cli.shared import _keys

    assert "train.lr=" in _keys("train.l")
    assert all(key.startswith("data.") for key in _keys("data."))
    assert "pretrain-124m" in _names("pretrain-1")
