"""Tests that run programs are skipped, with the reason, where the kernel cannot provide the sandbox."""

import pytest

from flatout.errors import EnvironmentLacks
from flatout.tasks import sandbox


@pytest.fixture(scope="session")
def sandboxed() -> None:
    try:
        sandbox.check()
    except EnvironmentLacks as error:
        pytest.skip(str(error))
