"""Keys set in a user's file: everything else of it stays, and an edit can be undone byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.config import edit
from flatout.errors import UsageError

VALUES = {"plan.micro_batch": 8, "plan.recompute": "none", "plan.graphs": True, "train.lr": 4e-05}


def with_values(given: Any, values: dict[str, Any]) -> Any:
    found = dict(given or {})
    for dotted, value in values.items():
        section, key = dotted.split(".")
        found[section] = {**(found.get(section) or {}), key: value}
    return found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "recipe: sft\n",
        "recipe: sft",  # no newline at the end
        "recipe: sft\r\nplan:\r\n  compile: none\r\n",
        "plan:\n  # why\n  micro_batch: 2  # by hand\n  compile: none\ntrain: {lr: 1.0e-3, steps: 5}\n",
        "plan: {micro_batch: 2, compile: none} # flow\n",
        "plan: {}\n",
        "plan:\n  # micro_batch: 4\ntrain:\n",
        "plan:\n  micro_batch:\n  tf32: true\n",
        "{recipe: sft, plan: {compile: none}}\n",
        "base: &b {compile: none}\nplan:\n  <<: *b\n  tf32: true\n",
        "plan: &p\n      micro_batch:    1\n      compile: 'none'\ntrain:\n lr: !!float 1\n# end\n",
        "plan:\n  recompute: >-\n    full\n  tf32: true\n",
        "plan:\n  tf32: true\ntrain: {}\n...\n",
        "--- # start\nplan:\n  tf32: true\n",
        "'plan':\n  \"tf32\": true\n",
        "äöü: ß 🎉\nplan:\n  tf32: true\n",
    ],
)
def test_only_the_keys_change(text: str) -> None:
    found = edit.edited(text, VALUES)
    assert yaml.safe_load(found) == with_values(yaml.safe_load(text), VALUES)
    for line in text.splitlines():
        if "#" in line:
            assert line.split("#", 1)[1] in found, "a comment was lost"


@pytest.mark.parametrize(
    "text",
    [
        "base: &b {compile: none}\nplan: *b\n",  # setting a key would change both
        "size: &s 4\nplan:\n  micro_batch: *s\n",
        "plan:\n  micro_batch: &s 4\nother: *s\n",
        "plan: fast\n",
        "- a list\n",
        "recipe: sft\n...\n",
    ],
)
def test_what_cannot_be_edited_safely_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"by hand|not a mapping"):
        edit.edited(text, {"plan.micro_batch": 8})


KEYS = st.sampled_from(["micro_batch", "compile", "tf32", "recompute", "note", "lr"])
SCALARS = st.one_of(st.integers(-5, 99), st.booleans(), st.sampled_from(["none", "full", "1.0e-3", "'a # b'"]))


@st.composite
def files(draw: st.DrawFn) -> str:
    """YAML as people write it: sections in any order, comments, odd indentation, flow and block, anchors."""
    lines = draw(st.lists(st.sampled_from(["# a comment", "", "   # indented comment"]), max_size=2))
    for section in draw(st.lists(st.sampled_from(["plan", "train", "model", "log"]), unique=True, max_size=4)):
        keys = draw(st.lists(KEYS, unique=True, min_size=1, max_size=4))
        pairs = [(key, str(draw(SCALARS)).lower()) for key in keys]
        anchor = draw(st.sampled_from(["", f" &{section}"]))
        if draw(st.booleans()):
            inner = ", ".join(f"{key}: {value}" for key, value in pairs)
            lines.append(f"{section}:{anchor} {{{inner}}}{draw(st.sampled_from(['', '  # why']))}")
            continue
        indent = " " * draw(st.integers(1, 6))
        lines.append(f"{section}:{anchor}{draw(st.sampled_from(['', ' # why']))}")
        for key, value in pairs:
            lines += draw(st.lists(st.just(f"{indent}# about {key}"), max_size=1))
            lines.append(f"{indent}{key}:{' ' * draw(st.integers(1, 3))}{value}{draw(st.sampled_from(['', ' # x']))}")
    end = draw(st.sampled_from(["\n", "\r\n"]))
    return end.join(lines) + draw(st.sampled_from(["", end]))


@settings(max_examples=200, deadline=None)
@given(text=files())
def test_apply_and_revert_leave_every_byte(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("edit") / "job.yaml"
    before = text.encode()
    path.write_bytes(before)
    kept = edit.apply(path, VALUES, note={})
    assert kept.read_bytes() == before
    assert yaml.safe_load(path.read_text()) == with_values(yaml.safe_load(text), VALUES)
    edit.apply(path, {"plan.micro_batch": 4}, note={})
    edit.revert(path)
    edit.revert(path)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    with pytest.raises(UsageError, match="no history"):
        edit.revert(path)


def test_a_file_that_was_changed_since_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("recipe: sft\n")
    edit.apply(path, {"plan.micro_batch": 4}, note={})
    path.write_text(path.read_text() + "# mine\n")
    with pytest.raises(UsageError, match="was changed after the edit"):
        edit.revert(path)
    assert "# mine" in path.read_text()


def test_comments_stay_with_their_keys() -> None:
    text = "plan:\n  # fp32 because bf16 diverged here\n  precision: fp32\ntrain: {lr: 1.0}\n"
    assert "# fp32 because bf16 diverged here\n  precision: fp32\n  micro_batch: 4\n" in edit.edited(
        text, {"plan.micro_batch": 4}
    )


def test_a_link_stays_a_link_and_permissions_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "job.yaml"
    real.write_text("recipe: sft\n")
    real.chmod(0o600)
    link.symlink_to(real)
    kept = edit.apply(link, {"plan.micro_batch": 4}, note={})
    assert link.is_symlink()
    assert "micro_batch: 4" in real.read_text()
    assert {real.stat().st_mode & 0o777, kept.stat().st_mode & 0o777} == {0o600}
    edit.revert(link)
    assert (link.is_symlink(), real.read_text(), real.stat().st_mode & 0o777) == (True, "recipe: sft\n", 0o600)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("recipe: sft\n")
    edit.apply(path, {"plan.micro_batch": 4}, note={})
    path.unlink()
    with pytest.raises(UsageError, match="does not exist"):
        edit.revert(path)


def test_a_history_that_lacks_a_part_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("seed: 1\n")
    edit.apply(path, VALUES, note={})
    after = path.read_bytes()
    (edit.history(path) / "0001.json").unlink()
    with pytest.raises(UsageError, match=r"0001\.json is missing, so nothing is reverted"):
        edit.revert(path)
    assert path.read_bytes() == after
    assert (edit.history(path) / "0001.yaml").read_text() == "seed: 1\n"
