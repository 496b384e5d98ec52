"""On a GPU, watching must not make the host wait for the device."""

from argparse import Namespace

import pytest
from benchmarks.doctor_overhead import answer, ask, started


@pytest.mark.gpu
def test_watching_adds_no_wait_for_the_device() -> None:
    """The loop turns any implicit wait into an error; one of the agent's own ends `started` with what it was."""
    with started(Namespace(steps=20, device="cuda"), watched=True) as process:
        assert answer(process) == "ready\n"
        assert float(ask(process)) > 0
