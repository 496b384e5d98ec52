import pytest
import torch

from flatout.cost import ModelShape
from flatout.engine import selftest


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test is about how fast a path is."""
    monkeypatch.setattr(selftest, "REPEATS", 1)


def test_every_path_of_this_device_is_usable() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checks = selftest.selftest(device)
    paths = {check.path for check in checks}
    assert {"attention: flash", "optimizer: fused AdamW", "recompute: full"} <= paths
    assert [check for check in checks if not check.usable] == []
    assert all(check.speedup is not None and check.speedup > 0 for check in checks)


def test_a_wrong_path_and_a_broken_one_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **_: object) -> torch.Tensor:
        return (hidden @ weight.t()).square().sum()

    def broken(*_args: object, **_kwargs: object) -> torch.optim.AdamW:
        raise RuntimeError("no such kernel\non this device")

    monkeypatch.setattr(selftest, "linear_cross_entropy", wrong)
    monkeypatch.setattr(selftest, "adamw", broken)
    trials = selftest._trials
    wanted = ("loss: ", "optimizer: ")
    monkeypatch.setattr(
        selftest, "_trials", lambda device: (one for one in trials(device) if one.path.startswith(wanted))
    )
    checks = {check.path: check for check in selftest.selftest(torch.device("cpu"))}
    loss = checks["loss: chunked linear cross-entropy"]
    assert not loss.usable
    assert "differs by more than" in loss.reason
    optimizer = checks["optimizer: fused AdamW"]
    assert (optimizer.usable, optimizer.difference, optimizer.speedup) == (False, None, None)
    assert optimizer.reason == "RuntimeError: no such kernel"


@pytest.mark.long
def test_drawn_tokens_are_those_of_softmax_and_search() -> None:
    pytest.importorskip("triton", reason="no Triton for this platform")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = ModelShape(layers=1, hidden=32, heads=2, kv_heads=2, head_dim=16, intermediate=32, vocab=48, positions=16)
    fast, plain = (selftest._draw(shape, torch.float32, device, kernel=kernel) for kernel in (True, False))
    (found,), (expected,) = fast(), plain()
    assert torch.allclose(found, expected, atol=1e-4)
    assert len(set(expected.tolist())) > 100, "rows draw by chances of their own"


def test_noise_is_not_called_a_speed_up() -> None:
    assert selftest.faster([2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.1, 0.9]) == (2.0, False)
    found, noise = selftest.faster([1.0, 1.2, 0.8, 1.1], [1.0, 1.0, 1.0, 1.0])
    assert noise
    assert found == pytest.approx(1.05)
    assert selftest.faster([0.5, 0.6, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0])[1] is False, "slower, and sure of it"
