from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flatout import gallery
from flatout.config import load
from flatout.errors import UsageError

NAMES = [example.name for example in gallery.examples()]


def test_the_examples_come_sorted_and_titled() -> None:
    assert sorted(NAMES) == NAMES
    assert {"pretrain-124m", "pretrain-demo"} <= set(NAMES)
    for example in gallery.examples():
        assert example.text.startswith(f"# {example.title}\n"), example.name


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_a_valid_configuration(name: str) -> None:
    loaded = load(gallery.find(name).path, environ={})
    assert loaded.settings.recipe == name.split("-")[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_leaves_speed_to_the_default_preset(name: str) -> None:
    loaded = load(gallery.find(name).path, environ={})
    assert loaded.settings.plan.preset == "balanced"


@pytest.mark.parametrize("size", ["", "-cpu"])
def test_both_experiments_on_guru_differ_only_in_their_method(size: str) -> None:
    mixed, combined = (
        load(gallery.find(f"rl-guru-{name}{size}").path, environ={}).settings for name in ("mixed", "pcgrad")
    )
    assert (mixed.rl.algorithm, mixed.rl.critic, mixed.rl.samples) == ("ppo", "own", 4)
    assert combined.mtl.method == "pcgrad"
    assert replace(combined, mtl=mixed.mtl) == mixed


def test_an_example_is_found_with_or_without_its_ending() -> None:
    assert gallery.find("pretrain-demo") == gallery.find("pretrain-demo.yaml")
    with pytest.raises(UsageError) as refused:
        gallery.find("pretrain-dmeo")
    assert str(refused.value) == f"there is no example 'pretrain-dmeo': choose one of {', '.join(NAMES)}"


def test_a_wheel_carries_its_own_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "flatout"
    package.mkdir(parents=True)
    monkeypatch.setattr(gallery, "__file__", str(package / "gallery.py"))
    assert gallery.folder() == tmp_path / "examples"
    (package / "examples").mkdir()
    assert gallery.folder() == package / "examples"
