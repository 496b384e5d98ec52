"""The rules between settings: each breach is named, its neighbours pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flatout.cli import app
from flatout.config import from_mapping, load, show
from flatout.errors import UsageError

SHAPE = {"layers": 2, "hidden": 64, "heads": 4}


def check(changes: dict[str, Any]) -> list[str]:
    """The mistakes of a small valid configuration after dotted changes (None removes)."""
    values: dict[str, dict[str, Any]] = {
        "model": dict(SHAPE),
        "data": {"sequence_length": 128},
        "train": {"steps": 10, "batch_tokens": 1024},
    }
    for key, value in changes.items():
        section, _, leaf = key.partition(".")
        values.setdefault(section, {})[leaf] = value
    try:
        from_mapping(values)
    except UsageError as error:
        return str(error).splitlines()[1:]
    return []


def test_the_small_configuration_is_valid() -> None:
    assert check({}) == []


@pytest.mark.parametrize(
    ("changes", "mistake"),
    [
        (
            {"train.steps": None},
            "train.steps: the run has no length; set one of train.steps, train.epochs or train.tokens",
        ),
        ({"train.tokens": 1e9}, "train.steps: the run has 2 lengths (train.steps, train.tokens); keep one"),
        (
            {"model.heads": None},
            "model.heads: missing; set model.name, or all of model.layers, model.hidden and model.heads",
        ),
        (
            {"model.hidden": 66},
            "model.hidden: 66 is not a multiple of model.heads (4); use 64 or 68, or set model.head_dim",
        ),
        ({"model.hidden": 60}, "model.hidden: heads have width 15; rotary embeddings need an even width"),
        ({"model.head_dim": 15}, "model.head_dim: heads have width 15; rotary embeddings need an even width"),
        ({"model.kv_heads": 3}, "model.kv_heads: 3 must divide model.heads (4)"),
        (
            {"model.revision": "main"},
            "model.revision: main works only with model.name; set model.name",
        ),
        (
            {"model.trust_remote_code": True},
            "model.trust_remote_code: trust is given on the command line only, each time: --trust-remote-code PIN; "
            "remove it here",
        ),
        (
            {"train.batch_tokens": 1000},
            "train.batch_tokens: 1000 is not a multiple of data.sequence_length (128); use 896 or 1024",
        ),
        (
            {"train.batch_tokens": 100},
            "train.batch_tokens: 100 is not a multiple of data.sequence_length (128); use 128",
        ),
        ({"model.positions": 64}, "data.sequence_length: 128 must be at most model.positions (64)"),
        ({"data.source": "jsonl"}, "data.path: missing; data.source jsonl needs a file, folder or glob to read"),
        ({"data.source": "hf"}, "data.name: missing; data.source hf needs the dataset's name"),
        ({"train.warmup_steps": 10}, "train.warmup_steps: 10 must be less than train.steps (10)"),
        (
            {"profile.steps": [12, 10]},
            "profile.steps: [12, 10] must be the first and the last step, in this order, counted from 0",
        ),
        ({"eval.patience": 2}, "eval.patience: needs evaluations during the run; set eval.every"),
        ({"target.val_loss": 3.0}, "target.val_loss: needs evaluations during the run; set eval.every"),
        (
            {"plan.micro_batch": 3, "plan.accumulation": 2},
            "plan.accumulation: plan.micro_batch 3 × plan.accumulation 2 must divide the 8 sequences of a step "
            "(train.batch_tokens / data.sequence_length)",
        ),
    ],
)
def test_a_broken_rule_is_the_one_mistake(changes: dict[str, Any], mistake: str) -> None:
    assert check(changes) == [mistake]


@pytest.mark.parametrize(
    "changes",
    [
        {"train.steps": None, "train.epochs": 0.5},
        {"model.hidden": 66, "model.head_dim": 16},
        {"model.name": "some/model", "model.layers": None, "model.hidden": None, "model.heads": None},
        {
            "model.name": "bare",
            "model.revision": "v2",
            "model.trust_remote_code": False,  # as older versions recorded it
            "model.layers": None,
            "model.hidden": None,
            "model.heads": None,
        },
        {"model.positions": 128},
        {"data.source": "text", "data.path": "corpus"},
        {"train.warmup_steps": 9},
        {"train.steps": None, "train.epochs": 1, "train.warmup_steps": 1000},
        {"profile.steps": [3, 3]},
        {"eval.patience": 2, "target.val_loss": 3.0, "eval.every": 5},
        {"plan.micro_batch": 2, "plan.accumulation": 2},
    ],
)
def test_what_keeps_to_the_rules_passes(changes: dict[str, Any]) -> None:
    assert check(changes) == []


def test_several_broken_rules_come_together() -> None:
    assert len(check({"model.kv_heads": 3, "train.batch_tokens": 1000, "eval.patience": 1})) == 3


def test_a_rule_is_silent_about_a_value_that_is_already_refused() -> None:
    assert check({"train.steps": -5}) == [
        "train.steps: -5 must be greater than 0 (length of the run in optimizer steps)"
    ]
    assert check({"train.steps": None, "train.stpes": 5}) == ["train.stpes: unknown key; did you mean train.steps?"]


def _sft(**sections: object) -> dict[str, object]:
    base = {"recipe": "sft", "model": {"layers": 2, "hidden": 64, "heads": 4}, "train": {"epochs": 1}}
    return {**base, "data": {"source": "jsonl", "path": "x.jsonl"}, **sections}


def test_a_named_preset_sets_what_the_guide_sets_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(_sft()))
    for preset, expected in {
        "safe": {"plan.recompute": "full", "plan.compile": "none", "log.every": 50, "train.warmup_steps": 0},
        "max": {"plan.recompute": None, "plan.compile": None, "log.every": 50, "train.warmup_steps": 50},
    }.items():
        shown = {row.key: row for row in show(load(file, overrides=[f"plan.preset={preset}"], environ={}))}
        assert {key: shown[key].value for key in expected} == expected
        assert (shown["log.every"].source, shown["log.every"].label) == ("preset", f"preset {preset}")
    given = load(file, overrides=["plan.preset=safe", "log.every=7", "plan.recompute=none"], environ={})
    assert (given.settings.log.every, given.settings.plan.recompute) == (7, "none")
    assert given.sources["log.every"] == "command line"
    short = load(file, overrides=["plan.preset=max", "train.epochs=null", "train.steps=20"], environ={})
    assert short.settings.train.warmup_steps == 0
    # Not named, or another recipe: nothing but the plan's own decisions.
    assert load(file, environ={}).settings.log.every == 10


def test_checkpoints_are_saved_every_so_many_steps_or_every_epoch(tmp_path: Path) -> None:
    base = {"recipe": "rl", "model": SHAPE, "data": {"sequence_length": 1024}}
    file = tmp_path / "rl.yaml"
    file.write_text(yaml.safe_dump({**base, "rl": {"tasks": ["logic"]}, "train": {"steps": 4}, "save": {"every": 2}}))
    assert load(file, environ={}).settings.save.every == 2
    assert load(file, overrides=["save.every=epoch"], environ={}).settings.save.every == "epoch"
    for value, told in {
        "epok": "save.every: epok must be a whole number or epoch, or null",
        "0": "save.every: 0 must be greater than 0",
    }.items():
        with pytest.raises(UsageError, match=told):
            load(file, overrides=[f"save.every={value}"], environ={})


# What the guide sets by `TrainingArguments` and beside them, with the value and the source `config show` gives it.
GUIDE = {
    "plan.precision": (("auto", "plan"), ("auto", "plan")),
    "plan.recompute": (("full", "preset"), ("auto", "plan")),
    "plan.workers": (("auto", "plan"), ("auto", "plan")),
    "plan.pin_memory": (("auto", "plan"), ("auto", "plan")),
    "plan.prefetch": (("auto", "plan"), ("2", "preset")),
    "plan.micro_batch": (("auto", "plan"), ("auto", "plan")),
    "plan.accumulation": (("auto", "plan"), ("auto", "plan")),
    "plan.compile": (("none", "preset"), ("auto", "plan")),
    "plan.fused_optimizer": (("True", "preset"), ("True", "preset")),
    "plan.tf32": (("auto", "plan"), ("auto", "plan")),
    "save.keep": (("2", "preset"), ("2", "preset")),
    "save.weights_only": (("False", "default"), ("False", "default")),
    "log.every": (("50", "preset"), ("50", "preset")),
    "log.tensorboard": (("False", "default"), ("False", "default")),
    "train.schedule": (("cosine", "preset"), ("cosine", "preset")),
    "train.warmup_steps": (("0", "default"), ("50", "preset")),
    "train.clip": (("1.0", "preset"), ("1.0", "preset")),
    "train.batch_tokens": (("65536", "default"), ("65536", "default")),
    "train.epochs": (("1.0", "file"), ("1.0", "file")),
    "train.lr": (("0.0006", "default"), ("0.0006", "default")),
}


@pytest.mark.parametrize(("at", "preset"), enumerate(["safe", "max"]))
def test_every_setting_of_the_guide_is_shown_with_its_source(tmp_path: Path, at: int, preset: str) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(_sft(plan={"preset": preset})))
    shown = CliRunner().invoke(app, ["config", "show", str(file)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    rows = {words[0]: tuple(words[1:3]) for line in shown.output.splitlines() if len(words := line.split()) > 3}
    assert f" preset {preset} " in shown.output
    assert {key: rows[key] for key in GUIDE} == {key: both[at] for key, both in GUIDE.items()}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"eval": {"tasks": ["perplexity:x.txt"], "criterion": "tasks"}}, "no task in eval.tasks has answers to score"),
        ({"eval": {"task_limit": 5}}, "eval.task_limit: 5 works only with eval.tasks; set it, such as [units]"),
        ({"eval": {"tasks": ["units"], "criterion": "tasks"}, "save": {"best": True}}, "save.best: needs evaluations"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout: 0.1 works only with adapters; set lora.rank"),
        ({"data": {"source": "text", "path": "x"}}, "text has no rows; recipe sft takes jsonl, parquet or hf"),
        ({"data": {"path": "x", "valid_path": "z", "valid_name": "y"}}, "z conflicts with data.valid_name (y)"),
        ({"data": {"source": "embedded"}}, "recipe sft reads rows: set data.path, data.name or data.sources"),
        ({"data": {"path": "x", "split": "train[:5"}}, "data.split: 'train[:5' is not a split; write train"),
        ({"data": {"path": "x", "split": "train[9:5]"}}, "'train[9:5]' is empty"),
        ({"data": {"path": "x", "valid_split": "train[:200%]"}}, "a share outside -100% to 100%"),
        ({"data": {"path": "x", "sources": [{"path": "y"}]}}, "x conflicts with data.sources, whose items name their"),
        ({"data": {"sources": [{"path": "y", "weight": 1}, {"path": "z"}]}}, "item 1 has no weight, but others have"),
        ({"data": {"sources": [{"weight": 1}]}}, "item 0 has neither path nor name"),
        ({"data": {"sources": [{"path": "y", "split": "a b"}]}}, "item 0: split 'a b' is not a split"),
        ({"data": {"sources": [{"path": "y", "weight": 0}]}}, "data.sources[0].weight: 0.0 must be greater than 0"),
        ({"data": {"sources": [{"path": "y", "wieght": 1}]}}, "unknown key wieght; did you mean weight?"),
        ({"data": {"sources": ["y"]}}, "item 0 is y; give it keys: path, name"),
        ({"data": {"sources": "y"}}, "data.sources: y must be a list of items with the keys path, name"),
        ({"data": {"path": "x", "format": "alpacca"}}, "did you mean alpaca?"),
        ({"data": {"path": "x", "format": "text", "template": "{{ a }}"}}, "text conflicts with data.template"),
        ({"save": {"best": True}}, "save.best: needs evaluations during the run; set eval.every"),
        ({"recipe": "pretrain", "lora": {"rank": 4}}, "lora.rank: 4 works only with recipe sft or dpo or rft"),
        (
            {"recipe": "pretrain", "data": {"source": "jsonl", "path": "x", "as_chat": True}},
            "works only with recipe sft",
        ),
    ],
)
def test_settings_of_fine_tuning_go_together(sections: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        from_mapping(_sft(**sections))
    assert words in str(refused.value)


def test_tasks_alone_can_be_what_a_run_goes_by() -> None:
    asked = {"tasks": ["units"], "tasks_every": 5, "criterion": "tasks", "patience": 2}
    assert from_mapping(_sft(eval=asked, save={"best": True})).eval.tasks == ("units",)


def _rft(**sections: object) -> dict[str, object]:
    return {"recipe": "rft", "model": {"name": "m"}, "rft": {"task": "units:train"}, "train": {"epochs": 1}, **sections}


def test_sampling_presets_are_the_guides_and_adapters_are_trained_unless_refused(tmp_path: Path) -> None:
    file = tmp_path / "rft.yaml"
    file.write_text(yaml.safe_dump(_rft()))
    for preset, expected in {"quality": (50, 0.5), "balanced": (30, 0.7), "speed": (20, 0.9)}.items():
        loaded = load(file, overrides=[f"sample.preset={preset}"], environ={})
        assert (loaded.settings.rft.oversample, loaded.settings.sample.temperature) == expected
        assert loaded.sources["rft.oversample"] == "preset"
    given = load(file, overrides=["sample.preset=speed"], environ={"FLATOUT__RFT__OVERSAMPLE": "12"})
    assert (given.settings.rft.oversample, given.sources["rft.oversample"]) == (12, "environment")
    assert (given.settings.lora.rank, given.settings.lora.alpha) == (16, 64.0)
    whole = load(file, overrides=["lora.rank=null"], environ={}).settings.lora
    assert (whole.rank, whole.alpha) == (None, None)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rft": {}}, "rft.task: missing; name a task"),
        ({"rft": {"task": "unitz:train"}}, "rft.task: task 'unitz' is unknown: did you mean units?"),
        ({"rft": {"task": "gsm8k:x"}}, "rft.valid: missing; gsm8k:x has no held-out split"),
        ({"data": {"source": "jsonl", "path": "x"}}, "data.path: x works only with other recipes"),
        ({"data": {"tokenizer": "bpe:300"}}, "bpe:300 conflicts with model.name, which has its own tokenizer"),
        ({"model": {"layers": 2, "hidden": 64, "heads": 4}}, "random weights solve nothing: set model.name"),
        ({"sample": {"temperature": 0}}, "at 0 all 30 samples of a question are identical"),
        ({"sample": {"min_tokens": 200}}, "sample.min_tokens: 200 must be at most sample.max_tokens (120)"),
        ({"rft": {"keep": 31}}, "rft.keep: 31 must be at most rft.oversample (30)"),
        ({"recipe": "pretrain", "rft": {"keep": 4}}, "rft.keep: 4 works only with recipe rft"),
    ],
)
def test_settings_of_sampling_go_together(sections: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        from_mapping(_rft(**sections))
    assert words in str(refused.value)
