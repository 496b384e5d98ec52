"""Loading: precedence, types, wording and line numbers of mistakes, and the way back to YAML."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from flatout.config import Settings, dump, from_mapping, keys, load, schema, show, to_mapping
from flatout.errors import UsageError

SMALL = """\
model: {layers: 2, hidden: 64, heads: 4}
train:
  steps: 10
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str | bytes, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def settings_of(path: Path, *overrides: str) -> Settings:
    return load(path, overrides=overrides, environ={}).settings


def mistakes_of(path: Path | None, *overrides: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load(path, overrides=overrides, environ=environ or {})
    return str(caught.value).splitlines()


def test_the_later_source_wins_and_is_recorded(write: Any) -> None:
    path = write(SMALL + "  lr: 1e-3\n  beta1: 0.8\n  beta2: 0.8\n")
    environ = {"FLATOUT__TRAIN__BETA1": "0.7", "flatout__train__Beta2": "0.7", "HOME": "/", "FLATOUT_LOG": "x"}
    loaded = load(path, overrides=["train.beta2=0.6", "seed=3", "seed=4"], environ=environ)

    train = loaded.settings.train
    assert (train.eps, train.lr, train.beta1, train.beta2) == (1e-8, 1e-3, 0.7, 0.6)
    assert loaded.settings.seed == 4
    expected = {
        "train.eps": "default",
        "train.lr": "file",
        "model.layers": "file",
        "train.beta1": "environment",
        "train.beta2": "command line",
        "seed": "command line",
    }
    assert {key: loaded.sources[key] for key in expected} == expected
    assert list(loaded.sources) == keys()


def test_the_process_environment_is_the_default(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT__PLAN__MICRO_BATCH", "4")
    assert load(write(SMALL)).settings.plan.micro_batch == 4


def test_no_file_is_needed() -> None:
    loaded = load(None, overrides=["model=some/name", "train.steps=5"], environ={})
    assert loaded.settings.model.name == "some/name"
    assert loaded.sources["model.name"] == "command line"


def test_mistakes_come_together_with_their_places(write: Any) -> None:
    path = write(
        "model: {layers: 2, hidden: 64, heads: 4}\n"
        "data:\n"
        "  sequence_length: 128\n"
        "  # a comment\n"
        "  sequence_length: 256\n"
        "train:\n"
        "  stpes: 10\n"
        "\n"
        "  lr: -1\n"
        "  batch_tokens: 1000\n"
        "plan: {precision: bf61}\n"
        "save: 5\n"
    )
    environ = {"FLATOUT__TRAIN__LRR": "1", "FLATOUT__TRAIN__BETA1": "1.5"}
    assert mistakes_of(path, "trian.eps=1", "train.lr", "train.clip=big", environ=environ) == [
        f"{path}: 11 mistakes",
        "line 5: data.sequence_length: given twice (line 3); keep one",
        "line 7: train.stpes: unknown key; did you mean train.steps?",
        "line 9: train.lr: -1 must be greater than 0 (peak learning rate)",
        "line 10: train.batch_tokens: 1000 is not a multiple of data.sequence_length (128); use 896 or 1024",
        "line 11: plan.precision: bf61 must be one of fp32, bf16, fp16, or null; did you mean bf16?",
        "line 12: save: 5 was given for a whole section; set its keys: every, keep, asynchronous, best, weights_only",
        "environment FLATOUT__TRAIN__LRR: train.lrr: unknown key; did you mean train.lr?",
        "environment FLATOUT__TRAIN__BETA1: train.beta1: 1.5 must be less than 1 (decay rate of AdamW's first moment)",
        "command line: trian.eps: unknown key; did you mean train.eps?",
        "command line: train.lr must be key=value, such as train.lr=3e-4",
        "command line: train.clip: big must be a number, or null (largest gradient norm; null for no clipping)",
    ]


def test_one_mistake_is_counted_in_the_singular(write: Any) -> None:
    path = write(SMALL + "  warmup_steps: 2.5\n")
    assert mistakes_of(path) == [
        f"{path}: 1 mistake",
        "line 4: train.warmup_steps: 2.5 must be a whole number (steps of linear warm-up)",
    ]


def test_a_rule_blames_the_source_that_broke_it(write: Any) -> None:
    assert mistakes_of(write(SMALL), "model.heads=3")[1:] == [
        "command line: model.hidden: 64 is not a multiple of model.heads (3); use 63 or 66, or set model.head_dim"
    ]


def test_an_override_mends_a_refused_value_of_the_file(write: Any) -> None:
    assert settings_of(write(SMALL + "  lr: -1\n"), "train.lr=1").train.lr == 1.0


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("train: {steps: 1, lr: 6e-4}", "train.lr", 6e-4),
        ("train: {tokens: 1e9}", "train.tokens", 1e9),
        ("train: {steps: 1e4}", "train.steps", 10_000),
        ("train: {steps: 1_000}", "train.steps", 1000),
        ("train: {steps: 010}", "train.steps", 10),  # YAML 1.1 would read octal
        ("train: {steps: 1, clip: null}", "train.clip", None),
        ("train: {steps: 1, clip: ~}", "train.clip", None),
        ("train: {steps: 1, clip: 2}", "train.clip", 2.0),
        ("log: {wandb: off}", "log.wandb", "off"),
        ("log: {name: no}", "log.name", "no"),
        ("log: {name: 007}", "log.name", "007"),
        ("log: {name: 2026-01-31}", "log.name", "2026-01-31"),
        ("log: {name: 12:30:45}", "log.name", "12:30:45"),
        ("log: {name: 'null'}", "log.name", "null"),
        ("data: {separator: =}", "data.separator", "="),
        ('data: {separator: "\\n"}', "data.separator", "\n"),
        ("log: {tensorboard: yes}", "log.tensorboard", True),
        ("data: {shuffle: off}", "data.shuffle", False),
        ("profile: {steps: [0, 0]}", "profile.steps", (0, 0)),
        ("profile:", "profile.steps", None),
        ("eval: {tasks: [units, 'gsm8k:a b.jsonl']}", "eval.tasks", ("units", "gsm8k:a b.jsonl")),
        ("eval: {tasks: 'units, jsonl:x'}", "eval.tasks", ("units", "jsonl:x")),
        ("eval: {tasks: []}", "eval.tasks", ()),
    ],
)
def test_a_scalar_is_read_by_the_type_of_its_key(write: Any, line: str, key: str, expected: Any) -> None:
    length = "" if line.startswith("train") else "train: {steps: 1}\n"
    loaded = load(write(f"model: some/name\n{length}{line}\n"), environ={})
    (value,) = [shown.value for shown in show(loaded) if shown.key == key]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("train.lr=3e-4", "train.lr", 3e-4),
        ("train.clip=null", "train.clip", None),
        ("log.wandb=off", "log.wandb", "off"),
        ("log.name=", "log.name", None),
        ("log.name=123", "log.name", "123"),
        ("log.name='null'", "log.name", "null"),
        ("data.path=[ab]*.txt", "data.path", "[ab]*.txt"),
        ("data.path=*.txt # no comment", "data.path", "*.txt # no comment"),
        ("data.path=a=b", "data.path", "a=b"),
        ('data.separator="\\n"', "data.separator", "\n"),
        ("profile.steps=[3, 4]", "profile.steps", (3, 4)),
        ("eval.tasks=units,jsonl:x?tolerance=0.1", "eval.tasks", ("units", "jsonl:x?tolerance=0.1")),
        ("model=other", "model.name", "other"),
        ("model.layers=3", "model.layers", 3),
    ],
)
def test_overrides_and_environment_read_alike(write: Any, override: str, key: str, expected: Any) -> None:
    name, _, text = override.partition("=")
    variable = "FLATOUT__" + name.replace(".", "__").upper()
    for loaded in (
        load(write(SMALL), overrides=[override], environ={}),
        load(write(SMALL), environ={variable: text}),
    ):
        assert [shown.value for shown in show(loaded) if shown.key == key] == [expected]


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("seed: true", "seed: true must be a whole number (random seed for weights, data order and sampling)"),
        ("seed: '1'", "seed: '1' must be a whole number (random seed for weights, data order and sampling)"),
        ("seed: null", "seed: null must be a whole number (random seed for weights, data order and sampling)"),
        ("seed: {a: 1}", "seed: a mapping must be a whole number (random seed for weights, data order and sampling)"),
        (
            "recipe: pretrian",
            "recipe: pretrian must be one of pretrain, sft, dpo, rft, rl, router; did you mean pretrain?",
        ),
        (
            "criteria: {mfu: 1.5}",
            "criteria.mfu: 1.5 must be at most 1 (at least this MFU, common convention (6N + 12LHT))",
        ),
        ("save: {keep: 1}", "save.keep: 1 must be at least 2 (checkpoints kept; never fewer than two verified ones)"),
        ("criteria: {hours: inf}", "criteria.hours: inf must be a finite number (finish within this many hours)"),
        ("criteria: {hours: 1e999}", "criteria.hours: 1e999 must be a finite number (finish within this many hours)"),
        (
            "plan: {tf32: maybe}",
            "plan.tf32: maybe must be true or false, or null (TF32 for the matmuls that stay in fp32)",
        ),
        ("eval: {tasks: {a: b}}", "eval.tasks: a mapping must be a list of texts such as [one, two]"),
        ("profile: {steps: 10}", "profile.steps: 10 must be a list of two whole numbers such as [10, 12], or null"),
        ("profile: {steps: [1, x, 3]}", "profile.steps: [1, x, 3] must be a list of two whole numbers"),
        ("profile: {steps: &a [*a, *a]}", "profile.steps: […, …] must be a list of two whole numbers"),
        ("data: {split: null}", "data.split: null must be text (split of the dataset; rows can be sliced"),
        ("data: [text]", "data: [text] was given for a whole section; set its keys: source, sources, path, name"),
        ("save.keep: 3", "save.keep: in a file, write keep under save:"),
        ("zzzzzz: 3", "zzzzzz: unknown key; known keys: model, data, train"),
        (
            "save: {qqqqqq: 3}",
            "save.qqqqqq: unknown key; known keys: save.every, save.keep, save.asynchronous, save.best, "
            "save.weights_only",
        ),
        ("? [a, b]\n: 1", "a key must be one word"),
        ("log: {name: !!python/name:os.system ''}", "log.name: the tag !!python/name:os.system is not allowed"),
        ("log: {name: !include other.yaml}", "log.name: the tag !include is not allowed; give a plain value"),
        ("seed: " + "9x" * 100, "seed: " + "9x" * 30 + "… must be a whole number"),
    ],
)
def test_mistakes_are_worded_for_people(write: Any, line: str, mistake: str) -> None:
    (said,) = mistakes_of(write(f"model: some/name\ntrain: {{steps: 1}}\n{line}\n"))[1:]
    assert said.startswith(f"line 3: {mistake}")


@pytest.mark.parametrize(
    ("override", "mistake"),
    [
        ("train=5", "train: 5 was given for a whole section; set its keys: batch_tokens, steps"),
        ("log.name='a", "log.name: 'a is not a complete value; check its quotes and brackets"),
        ("profile.steps=[1,", "profile.steps: [1, is not a complete value; check its quotes and brackets"),
        ("train.lr=", "train.lr: null must be a number (peak learning rate)"),
        ("train.=1", "train.: unknown key; known keys: train.batch_tokens"),
        ("=1", "'': unknown key; known keys: model, data"),
    ],
)
def test_overrides_are_refused_like_the_file(write: Any, override: str, mistake: str) -> None:
    (said,) = mistakes_of(write(SMALL), override)[1:]
    assert said.startswith(f"command line: {mistake}")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("FLATOUT_TRAIN_LR", "FLATOUT__TRAIN__LR"), ("flatout_plan_micro_batch", "FLATOUT__PLAN__MICRO_BATCH")],
)
def test_a_variable_with_single_underscores_is_not_ignored_in_silence(write: Any, name: str, meant: str) -> None:
    assert mistakes_of(write(SMALL), environ={name: "4", "FLATOUT_CACHE": "/tmp", "FLATOUT_OTHER": "1"})[1:] == [
        f"environment {name}: is not read; write {meant}=4, with two underscores"
    ]


def test_one_key_by_two_spellings_of_a_variable_is_refused(write: Any) -> None:
    environ = {"FLATOUT__SEED": "1", "FLATOUT__seed": "2"}
    assert mistakes_of(write(SMALL), environ=environ)[1:] == [
        "environment FLATOUT__seed: seed: also given by FLATOUT__SEED; unset one"
    ]


@pytest.mark.parametrize(
    ("content", "mistake"),
    [
        (b"", ": the file is empty; `flatout examples` lists"),
        (b"# only a comment\n", ": the file is empty; `flatout examples` lists"),
        (b"- a\n- b\n", ": must hold settings as `key: value` lines, but holds [a, b]"),
        (b"hello\n", ": must hold settings as `key: value` lines, but holds hello"),
        (b"train:\n  steps: 1\n bad: 2\n", ":3:2: not valid YAML: "),
        (b"train:\n\tsteps: 1\n", ":2:1: not valid YAML: "),
        (b"a: [1, 2\n", ":2:1: not valid YAML: "),
        (b"a: *nowhere\n", ":1:4: not valid YAML: found undefined alias"),
        (b"a: 1\n---\nb: 2\n", ":2:1: not valid YAML: but found another document"),
        (b"[" * 5000, ": not valid settings: nested too deeply"),
        (b"seed: 1\nlog: \xff\xfe\n", ": not a text file in UTF-8 (byte 0xff in line 2); give a YAML file"),
        ("seed: 1".encode("utf-16"), ": not a text file in UTF-8 (byte 0xff in line 1)"),
        (b"\x7fELF\x00\x01", ": not a YAML text file: unacceptable character #x007f"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(write: Any, content: bytes, mistake: str) -> None:
    path = write(content)
    (said,) = mistakes_of(path)
    assert said.startswith(f"{path}{mistake}")


def test_a_tab_is_told_apart(write: Any) -> None:
    assert mistakes_of(write("train:\n\tsteps: 1\n"))[0].endswith("indent with spaces, not tabs")


def test_a_byte_order_mark_is_no_obstacle(write: Any) -> None:
    assert settings_of(write(b"\xef\xbb\xbf" + SMALL.encode())).train.steps == 10


def test_a_missing_file_names_its_neighbours(write: Any, tmp_path: Path) -> None:
    near = write(SMALL, "small.yaml")
    assert mistakes_of(tmp_path / "smal.yaml") == [f"{tmp_path}/smal.yaml: no such file; did you mean {near}?"]
    assert mistakes_of(tmp_path / "small") == [f"{tmp_path}/small: no such file; did you mean {near}?"]
    assert mistakes_of(tmp_path / "other.yaml") == [f"{tmp_path}/other.yaml: no such file"]
    assert mistakes_of(tmp_path / "none" / "small.yaml") == [
        f"{tmp_path}/none/small.yaml: no such file; the folder {tmp_path}/none does not exist either"
    ]
    assert mistakes_of(tmp_path) == [f"{tmp_path}: a folder; name the YAML file in it: small.yaml"]


def test_the_bare_name_of_a_shipped_example_points_to_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
    if not shipped:
        pytest.skip("no examples in this checkout")
    monkeypatch.chdir(tmp_path)
    name = shipped[0].stem
    assert mistakes_of(Path(name)) == [
        f"{name}: no such file; {name} is a shipped example: `flatout examples {name} --to {name}.yaml` copies it"
    ]


CONFIGURATIONS: list[dict[str, Any]] = [
    {"model": "some/name", "train": {"steps": 10}},
    {
        "model": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "rope_theta": 1e6, "tied": True},
        "data": {"source": "text", "path": "[ab]*.txt", "separator": "\n\n", "subset": "null", "split": " a: b # c "},
        "train": {"tokens": 1e9, "lr": 3e-5, "clip": None, "eps": 1e-12},
        "plan": {"precision": "bf16", "micro_batch": 4, "tf32": False, "preset": "max", "memory_fraction": 0.9},
        "log": {"wandb": "off", "name": "1e3", "project": "größer"},
        "profile": {"steps": [10, 12]},
        "criteria": {"loss_falling": True, "mfu": 0.5},
    },
    {
        "recipe": "sft",
        "model": "some/name",
        "data": {"sources": [{"path": "a", "weight": 2, "split": "train[:50%]"}, {"name": "b/c", "weight": 1}]},
        "train": {"steps": 10},
    },
    {"seed": 2**40, "model": {"name": "~"}, "train": {"epochs": 0.25}, "log": {"name": "yes", "project": ""}},
]


@pytest.mark.parametrize("values", CONFIGURATIONS)
def test_a_dump_loads_back_equal(write: Any, values: dict[str, Any]) -> None:
    settings = from_mapping(values)
    text = dump(settings)
    assert settings_of(write(text)) == settings
    assert yaml.safe_load(text) == to_mapping(settings)  # any other YAML reader agrees
    assert from_mapping(json.loads(json.dumps(to_mapping(settings)))) == settings
    assert set(to_mapping(settings)) == {key.partition(".")[0] for key in keys()}


@effort(max_examples=50, deadline=None)
@given(name=st.text(), separator=st.text(), lr=st.floats(min_value=0, exclude_min=True, max_value=1e30))
def test_any_text_and_number_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, name: str, separator: str, lr: float
) -> None:
    values = {"model": "m", "train": {"steps": 1, "lr": lr}, "log": {"name": name}, "data": {"separator": separator}}
    settings = from_mapping(values)
    assert (settings.log.name, settings.data.separator, settings.train.lr) == (name, separator, lr)
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(dump(settings), encoding="utf-8", newline="")
    assert settings_of(path) == settings


def test_the_schema_holds_every_key_its_rules_and_its_help() -> None:
    document = schema()
    train = document["$defs"]["TrainSettings"]
    assert train["additionalProperties"] is False
    assert train["properties"]["lr"] | {"title": ""} == {
        "default": 6e-4,
        "description": "peak learning rate",
        "exclusiveMinimum": 0,
        "maximum": 1e30,
        "title": "",
        "type": "number",
    }
    assert {"type": "string"} in document["properties"]["model"]["anyOf"]
    names = []
    for name, entry in document["properties"].items():
        references = [entry, *entry.get("anyOf", [])]
        sections = [reference["$ref"].rpartition("/")[2] for reference in references if "$ref" in reference]
        names += [f"{name}.{leaf}" for section in sections for leaf in document["$defs"][section]["properties"]]
        names += [] if sections else [name]
    assert sorted(names) == sorted(keys())
    json.dumps(document)


def test_show_lists_every_key_with_source_and_help(write: Any) -> None:
    shown = show(load(write(SMALL), overrides=["train.lr=1e-3"], environ={}))
    assert [one.key for one in shown] == keys()
    assert ("train.lr", 1e-3, "command line", "peak learning rate") in [one[:4] for one in shown]
    assert ("train.steps", 10, "file", "length of the run in optimizer steps") in [one[:4] for one in shown]
    assert all(one.help for one in shown)


def test_importing_the_package_leaves_pydantic_and_torch_alone() -> None:
    code = "import sys, flatout.config; print([m for m in ('pydantic', 'torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_trust_in_code_is_read_from_no_source_and_written_to_none(write: Any) -> None:
    for value in ("true", "false", "1"):
        environ = {"FLATOUT__MODEL__TRUST_REMOTE_CODE": value}
        with pytest.raises(UsageError, match="trust is given on the command line only"):
            load(write(SMALL), environ=environ)
        with pytest.raises(UsageError, match="trust is given on the command line only"):
            load(write(SMALL), overrides=[f"model.trust_remote_code={value}"], environ={})
    settings = load(write(SMALL), environ={}).settings
    trusting = replace(settings, model=replace(settings.model, trust="0" * 64))
    assert "trust" not in dump(trusting)
    assert "trust" not in str(to_mapping(trusting))
    assert not any("trust" in key for key in keys())
