"""GPU tests are skipped where there is none, and no test reads or writes the user's own cache."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A slow machine is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Wide enough that no table wraps, wherever the tests run.
os.environ["COLUMNS"] = "200"
# A runner in a shell's background is started deaf to Ctrl-C, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same goes for nohup and SIGHUP.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Without a GPU, kernels run by Triton's interpreter; it looks once, when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


SHARED_RUNS = (
    "tests/insight/test_insight_browser.py",
    "tests/recipes/test_rft.py",
    "tests/recipes/test_router.py",
    "tests/test_demo.py",
    "tests/test_hostile_artefacts.py",
)


def pytest_configure() -> None:
    """A worker keeps to its cores, so that what its tests start takes one thread each.

    With more workers than cores several share one: a core works while one of its tests waits.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = cores[int(worker) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
        os.sched_setaffinity(0, own or [cores[int(worker) % len(cores)]])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker that is free takes the next test; files whose tests share a run or a browser come first, and stay whole.

    Not by `xdist_group`: xdist 3.8 marks the group in a field that pytest 9 does not read any more.
    """
    from xdist.scheduler import LoadScopeScheduling

    class OneByOne(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return file if file in SHARED_RUNS else nodeid

    return OneByOne(config, log)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets, for those who have it."""
    folder = os.environ.get("FLATOUT_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FLATOUT_TEST_DATA names no folder of real data")
    return Path(folder)
