import pytest
import torch

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
    checks = {check.path: check for check in selftest.selftest(torch.device("cpu"))}
    loss = checks["loss: chunked linear cross-entropy"]
    assert not loss.usable
    assert "differs by more than" in loss.reason
    optimizer = checks["optimizer: fused AdamW"]
    assert (optimizer.usable, optimizer.difference, optimizer.speedup) == (False, None, None)
    assert optimizer.reason == "RuntimeError: no such kernel"
