import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.insight import made
from tests.insight.browser import Browser

from flatout import cli
from flatout.record import Run

Flatout = Callable[..., tuple[int, str, str]]


@pytest.fixture
def flatout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Flatout:
    """The command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flatout", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def h200(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of 600 steps on an H200, with a spike of the loss at step 400; not to be changed."""
    return made.make(tmp_path_factory.mktemp("runs") / "h200", steps=600, spike_at=400)


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """20,000 steps, one of them a spike; not to be changed."""
    return made.make(tmp_path_factory.mktemp("runs") / "long", steps=20_000, spike_at=12_345)


@pytest.fixture
def bare(tmp_path: Path) -> Run:
    """What a foreign script leaves: no plan, no criteria, nothing known of the hardware."""
    return Run.create(
        tmp_path / "bare", config_text="script: train.py\n", config={}, plan={}, hardware={}, environment={}
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found
