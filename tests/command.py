"""The command in the test's own process: a fixture for tests that read what it prints and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flatout import cli


@dataclass(frozen=True, kw_only=True)
class Done:
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def flatout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs in an empty folder, with a wide page so that tables do not wrap."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["flatout", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        out, err = capsys.readouterr()
        return Done(code=code, out=out, err=err)

    return run
