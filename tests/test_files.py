"""Reads are bounded and stay in their folder, JSON is held to a schema, writes are whole and follow no link."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from flatout import files
from flatout.files import BadFile


@dataclass(frozen=True, kw_only=True)
class Inner:
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    inner: tuple[Inner, ...] = ()
    rate: float | None = None
    kind: Literal["a", "b"] = "a"
    sizes: Mapping[str, float] | None = None
    pair: tuple[int, int] = (0, 0)
    anything: Any = None


def test_a_value_that_fits_comes_back_as_the_dataclass() -> None:
    value = {"count": 1, "inner": [{"seconds": 2}], "rate": 0.5, "kind": "b", "sizes": {"x": 1}, "pair": [1, 2]}
    assert files.typed(Outer, value, source="f") == Outer(
        count=1, inner=(Inner(seconds=2),), rate=0.5, kind="b", sizes={"x": 1}, pair=(1, 2)
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "a list where an object is expected"),
        ({}, "count is missing"),
        ({"count": True}, "count: true where a whole number is expected"),
        ({"count": 1.5}, "count: 1.5 where a whole number"),
        ({"count": 10**30}, "count: "),
        ({"count": 1, "rate": "fast"}, "rate: 'fast' where a number is expected"),
        ({"count": 1, "kind": "c"}, "kind: 'c' where one of 'a', 'b' is expected"),
        ({"count": 1, "inner": [{"seconds": 1}, {"seconds": None}]}, "inner[1]: seconds: null where a number"),
        ({"count": 1, "sizes": {"x": "y"}}, "sizes: x: 'y' where a number is expected"),
        ({"count": 1, "pair": [1]}, "pair: 1 entries where 2 are expected"),
        ({"count": 1, "more": 1}, "more is unknown"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(value: Any, said: str) -> None:
    with pytest.raises(BadFile, match=r"^f\.json is not what flatout writes there: ") as caught:
        files.typed(Outer, value, source="f.json")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b"[1]", "holds a list where a JSON object is expected"),
        (b"null", "holds null"),
    ],
)
def test_json_that_is_no_object_is_a_sentence(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(BadFile, match=said):
        files.read_json(path)


def test_a_pipe_a_folder_and_a_device_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path / "pipe", "named pipe"), (tmp_path, "folder"), (Path("/dev/zero"), "device")):
        with pytest.raises(BadFile, match=said):
            files.read_bytes(path)
        with pytest.raises(BadFile, match=said):
            files.checked(path)


def test_a_file_above_its_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadFile, match="at most 1,000 are expected"):
        files.read_bytes(path, limit=1000)


def test_reading_takes_no_more_memory_than_the_file_needs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 20_000)
    tracemalloc.start()
    try:
        content = files.read_bytes(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(content)
    finally:
        tracemalloc.stop()
    assert content == path.read_bytes()


def test_links_that_leave_the_folder_are_refused_and_those_inside_are_read(tmp_path: Path) -> None:
    home, secret = tmp_path / "home", tmp_path / "secret"
    home.mkdir()
    secret.write_text("secret")
    (home / "real").write_text("mine")
    (home / "within").symlink_to("real")
    (home / "out").symlink_to(secret)
    (home / "folder").symlink_to(tmp_path)
    assert files.read_text(home / "within", root=home) == "mine"
    for path in (home / "out", home / "folder" / "secret", home / ".." / "secret"):
        with pytest.raises(BadFile, match="leaves"):
            files.read_text(path, root=home)
    with pytest.raises(BadFile, match="leaves"):
        files.write_atomic(home / "folder" / "new", b"", root=home)


def test_writing_replaces_a_link_and_leaves_its_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("before")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / f".link.{os.getpid()}.tmp").symlink_to(target)  # planted where the temporary file goes
    files.write_atomic(tmp_path / "link", b"new")
    assert target.read_text() == "before"
    assert (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink()


def test_appending_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("before")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(BadFile):
            files.open_for_appending(tmp_path / name)
    assert target.read_text() == "before"


def test_sweeping_removes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    (tmp_path / f".plan.json.{child}.tmp").write_text("torn")
    (tmp_path / f".plan.json.{os.getppid()}.tmp").write_text("being written")
    (tmp_path / "plan.json").write_text("whole")
    files.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".plan.json.{os.getppid()}.tmp", "plan.json"]
    files.sweep(tmp_path / "nowhere")


class View(TypedDict):
    count: files.Count
    share: NotRequired[files.Finite | None]


def test_a_view_checks_what_it_names_and_leaves_the_rest() -> None:
    value = {"count": 3, "more": object}
    assert files.typed(View, value, source="f") is value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "count is missing"),
        ({"count": -1}, "count: -1 where a count is expected"),
        ({"count": 1, "share": float("nan")}, "share: nan where a usual number is expected"),
        ({"count": 1, "share": 1e308}, "share: 1e+308 where"),
        ([], "a list where an object"),
    ],
)
def test_a_view_names_what_does_not_fit(value: Any, said: str) -> None:
    with pytest.raises(BadFile) as caught:
        files.typed(View, value, source="f")
    assert said in str(caught.value)
