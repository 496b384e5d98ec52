"""Page-locked memory for the copies of a GPU: prepared before the first save, and done without where it cannot be."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flatout.engine.pieces import Staging
from flatout.engine.ranks import Ranks
from flatout.recipes.saving import Saving


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves of a model whose device is said to be a GPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    found = Saving.__new__(Saving)
    active = SimpleNamespace(device=torch.device("cuda"))
    engine = SimpleNamespace(active=active, model=model, optimizer=optimizer, sharded=False, copied=None)
    told: list[str] = []
    session = SimpleNamespace(recorder=SimpleNamespace(event=lambda event: told.append(event.text)))
    attributes = {"engine": engine, "session": session, "ranks": Ranks(), "told": told, "weights_only": False}
    attributes |= {"asynchronous": True, "_staging": Staging(), "_reserved": None, "_pending": None}
    attributes |= {"_periodic": True, "_thread": ThreadPoolExecutor(1)}
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def trained(saving: Any) -> None:
    saving.engine.model(torch.ones(2, 4)).sum().backward()
    saving.engine.optimizer.step()


def test_memory_is_reserved_once_after_the_first_step(saving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[str]] = []
    monkeypatch.setattr(Staging, "reserve", lambda self, groups: asked.append({n for g in groups.values() for n in g}))
    saving.poll()
    assert saving._reserved is None, "the optimizer has no state yet"
    trained(saving)
    for _ in range(3):
        saving.poll()
    saving._reserved.result()
    assert len(asked) == 1
    assert {"weight", "exp_avg.weight"} <= asked[0]


@pytest.mark.parametrize("change", [{"asynchronous": False}, {"_periodic": False}])
def test_nothing_is_reserved_for_saves_that_are_waited_for(saving: Any, change: dict[str, Any]) -> None:
    vars(saving).update(change)
    trained(saving)
    saving.poll()
    assert saving._reserved is None


def test_without_memory_training_waits_for_its_saves(saving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Staging, groups: Any) -> None:
        raise RuntimeError("0.0 GiB are free")

    monkeypatch.setattr(Staging, "reserve", refuse)
    trained(saving)
    saving.poll()
    copies, copied = saving._copies(wait=False)
    assert copied is None
    assert torch.equal(copies["weights-rank00000.safetensors"]["weight"].tensor, saving.engine.model.weight)
    assert (saving.asynchronous, saving._reserved) == (False, None)
    assert "the host has no memory for a copy (0.0 GiB are free)" in saving.told[0]


def test_a_save_that_is_waited_for_does_not_wait_for_memory(saving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run is preempted in its first steps."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(self: Staging, groups: Any) -> None:
        begun.set()
        go_on.wait()

    monkeypatch.setattr(Staging, "reserve", slow)
    trained(saving)
    saving.poll()
    begun.wait()
    copies, copied = saving._copies(wait=True)
    assert copied is None
    assert set(copies) == {"weights-rank00000.safetensors", "optimizer-rank00000.safetensors"}
    assert saving._staging.cancelled
    go_on.set()


def test_a_cancelled_reservation_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, taken = Staging(), list[str]()
    monkeypatch.setattr(Staging, "_buffer", lambda self, file, name, tensor: taken.append(name))
    piece = SimpleNamespace(tensor=torch.ones(2).as_subclass(_OnGpu))
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    staging.reserve({"file": {"a": piece}})  # type: ignore[dict-item]
    staging.cancelled = True
    staging.reserve({"file": {"b": piece}})  # type: ignore[dict-item]
    assert taken == ["a"]


class _OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]
