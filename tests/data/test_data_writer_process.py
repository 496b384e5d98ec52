"""The process that writes a stream imports this package, whatever lies in the current folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flatout.config.settings import DataSettings
from flatout.data import prepare


def test_the_writer_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "numpy", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", os.environ.get("PYTHONPATH", "")]))
    root = tmp_path / "data"
    task = prepare.Task(
        settings=DataSettings(embedded_mb=1),
        seed=0,
        root=root,
        key="k",
        streaming=True,
        shard_tokens=1 << 16,
        since={"train": []},
    )
    process = prepare._spawn(task)
    process.wait(300)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert process.returncode == 0, prepare.writer_log(root).read_text()
