"""Gradients summed over ranks, a bucket at a time."""

from __future__ import annotations

import pytest
import torch

from flatout.engine import ranks
from flatout.engine.ranks import Ranks, buckets


def gradients(*sizes: int) -> list[torch.Tensor]:
    return [torch.arange(float(size)) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), []),
        ((4,), [[4]]),
        ((4, 4), [[4, 4]]),  # exactly full
        ((4, 4, 1), [[4, 4], [1]]),
        ((1, 100, 1, 2), [[1], [100], [1, 2]]),  # larger than a bucket: alone
    ],
)
def test_buckets_hold_every_gradient_in_order(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], expected: list[list[int]]
) -> None:
    monkeypatch.setattr(ranks, "BUCKET_BYTES", 32)  # eight fp32 numbers
    assert [[len(one) for one in bucket] for bucket in buckets(gradients(*sizes))] == expected


def test_gradients_of_two_types_are_not_mixed() -> None:
    assert [len(bucket) for bucket in buckets([torch.ones(2), torch.ones(2).half(), torch.ones(2).half()])] == [1, 2]


def test_every_gradient_is_summed_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer with the same gradients; one of ours lies by columns."""
    sent: list[int] = []

    def doubled(tensor: torch.Tensor) -> None:
        sent.append(tensor.nbytes)
        tensor.mul_(2)

    monkeypatch.setattr(ranks, "BUCKET_BYTES", 32)
    monkeypatch.setattr(ranks.dist, "all_reduce", doubled)
    ours = [*gradients(3, 2, 20), torch.arange(40.0).view(8, 5).t(), torch.tensor(7.0)]
    before = [gradient.clone() for gradient in ours]
    Ranks(world=2).sum_gradients_(ours)
    assert all(torch.equal(one, 2 * was) for one, was in zip(ours, before, strict=True))
    assert sent == [20, 80, 160, 4]
    assert not ours[3].is_contiguous()
