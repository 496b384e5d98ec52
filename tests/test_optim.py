import subprocess
import sys

import pytest
import torch
from torch import nn

from flatout.config.settings import TrainSettings
from flatout.optim import FusedAdamW, adamw, schedule


def test_cosine_warms_up_and_ends_at_the_floor() -> None:
    rate = schedule(TrainSettings(lr=1.0, warmup_steps=10, min_lr_ratio=0.1), total_steps=100)
    assert rate(0) == pytest.approx(1 / 11)
    assert rate(10) == pytest.approx(1.0)
    assert rate(99) == pytest.approx(0.1)
    values = [rate(step) for step in range(10, 100)]
    assert values == sorted(values, reverse=True)


def test_wsd_is_flat_then_falls_linearly() -> None:
    train = TrainSettings(lr=1.0, warmup_steps=5, schedule="wsd", decay_share=0.2, min_lr_ratio=0.0)
    rate = schedule(train, total_steps=100)
    assert rate(5) == rate(50) == rate(79) == 1.0
    assert rate(89) == pytest.approx(0.5)
    assert rate(99) == 0.0


def test_constant_stays() -> None:
    rate = schedule(TrainSettings(lr=0.5, schedule="constant"), total_steps=10)
    assert {rate(step) for step in range(10)} == {0.5}


def test_first_steps_have_a_peak_of_their_own() -> None:
    train = TrainSettings(lr=0.5, schedule="constant", warmup_steps=2)
    rate = schedule(train, total_steps=30, first=(20, 4.0))
    alone = schedule(TrainSettings(lr=4.0, warmup_steps=2, schedule="cosine"), total_steps=20)
    assert [rate(step) for step in range(20)] == [alone(step) for step in range(20)]
    assert [rate(step) for step in range(20, 30)] == pytest.approx([0.5 / 3, 1 / 3, *[0.5] * 8])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_fused_update_is_torchs_own_to_the_bit(device: str) -> None:
    """Also where a step is skipped, gradients are scaled, and one parameter has none."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(device)

    train = TrainSettings(lr=1e-2, weight_decay=0.1)
    ours, theirs = network(), network()
    own = adamw(ours, train, fused=True)
    assert isinstance(own, FusedAdamW)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    library = torch.optim.AdamW(groups, lr=1e-2, betas=(train.beta1, train.beta2), eps=train.eps, fused=True)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for mine, other in list(zip(ours.parameters(), theirs.parameters(), strict=True))[:-1]:
            mine.grad = torch.randn(mine.shape, generator=generator).to(device)
            other.grad = mine.grad.clone()
        divisor, skip = torch.tensor(4.0, device=device), torch.tensor(float(step == 3), device=device)
        own.step(lr=1e-2 / (step + 1), divisor=divisor, skip=skip)
        library.grad_scale, library.found_inf = divisor, skip  # type: ignore[attr-defined]
        for group in library.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        library.step()
        own.zero_grad(set_to_none=step % 2 == 0)
        library.zero_grad(set_to_none=step % 2 == 0)
    for mine, other in list(zip(ours.parameters(), theirs.parameters(), strict=True))[:-1]:
        assert torch.equal(mine, other)
        for name, value in library.state[other].items():
            assert torch.equal(own.state[mine][name], value), name


def test_training_starts_without_importing_the_compiler() -> None:
    """It takes seconds, which every start would wait for."""
    code = "import sys, flatout.recipes.pretrain, flatout.recipes.sft; raise SystemExit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
