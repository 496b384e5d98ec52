from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.insight import made
from tests.insight.browser import Browser

from flatout.record import Run


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
