from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_facts import FACTS
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.shards import Shards, ShardWriter
from flatout.data.stream import NOT_TRAINED, Batch, Stream, permute
from flatout.errors import RunFailed, UsageError

Make = Callable[..., Shards]
COLUMNS = ("tokens", "targets", "positions")


def lengths(total: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    found: list[int] = []
    while sum(found) < total:
        found.append(int(rng.integers(2, 60)))
    return found


def stream(shards: Shards, **fields: Any) -> Stream:
    given = {"sequence_length": 16, "batch_sequences": 12, "seed": 0, "packing": "concat", "shuffle": True}
    return Stream(shards, **(given | fields))


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**9))
def test_permute_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(size), size, key=(seed, epoch, 0)).tolist()) == list(range(size))


def test_permute_is_pinned() -> None:
    """Runs of earlier versions must resume on the same data."""
    assert permute(np.arange(10), 10, key=(0, 0, 0)).tolist() == [9, 2, 6, 1, 5, 4, 0, 8, 3, 7]


def test_permute_works_on_huge_ranges_and_looks_random() -> None:
    size = 10**12 + 7
    found = permute(np.arange(20_000), size, key=(1, 2, 3))
    assert len(set(found.tolist())) == 20_000
    assert 0 <= found.min() < 0.001 * size
    assert 0.999 * size < found.max() < size
    assert abs(found.mean() / size - 0.5) < 0.01
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_ranks_and_micro_batches_make_up_the_same_batch(make_shards: Make, packing: str) -> None:
    made = stream(make_shards(lengths(3000), shard_tokens=500), packing=packing)
    for step in (0, 5, 40):
        [whole] = made.micro_batches(step, micro_batch=12)
        for world in (1, 2, 3, 4, 6, 12):
            for micro_batch in (size for size in range(1, 13) if (12 // world) % size == 0):
                parts = [
                    batch
                    for rank in range(world)
                    for batch in made.micro_batches(step, rank=rank, world=world, micro_batch=micro_batch)
                ]
                for column in COLUMNS:
                    joined = torch.cat([getattr(part, column) for part in parts])
                    assert torch.equal(joined, getattr(whole, column))
                assert sum(part.num_target_tokens for part in parts) == whole.num_target_tokens
                assert sum(part.num_sequences for part in parts) == 12


def test_an_epoch_visits_each_window_once(make_shards: Make) -> None:
    made = stream(make_shards(lengths(3000)))
    count = made.num_sequences
    assert count == (made.shards.num_tokens - 1) // 16
    assert made.steps_per_epoch == pytest.approx(count / 12)
    visited = np.concatenate([made.step_arrays(step).windows for step in range(3 * count // 12 + 1)])
    epochs = [visited[i * count : (i + 1) * count].tolist() for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(count))
        assert epoch != list(range(count))
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_depends_on_the_seed_alone(make_shards: Make) -> None:
    shards = make_shards(lengths(3000))
    first, same, other = stream(shards, seed=1), stream(shards, seed=1), stream(shards, seed=2)
    later = first.step_arrays(7).tokens  # asked for first: no state is built up on the way
    for step in range(10):
        assert np.array_equal(first.step_arrays(step).tokens, same.step_arrays(step).tokens)
        assert not np.array_equal(first.step_arrays(step).windows, other.step_arrays(step).windows)
    assert np.array_equal(later, same.step_arrays(7).tokens)


def test_without_shuffle_windows_come_in_order(make_shards: Make) -> None:
    made = stream(make_shards(lengths(3000)), shuffle=False)
    assert made.step_arrays(2).windows.tolist() == list(range(24, 36))
    count = made.num_sequences or 0
    wrapped = made.step_arrays(count // 12).windows.tolist()
    assert wrapped[-1] == 11 - count % 12


def test_concat_is_plain_concatenation(make_shards: Make) -> None:
    shards = make_shards(lengths(3000), shard_tokens=100)
    [batch] = stream(shards, shuffle=False, batch_sequences=5).micro_batches(3, micro_batch=5)
    begin = 3 * 5 * 16
    assert batch.tokens.tolist() == shards.window(begin, 80).tolist()
    assert batch.targets.tolist() == shards.window(begin + 1, 80).tolist()
    assert batch.positions.tolist() == list(range(16)) * 5
    assert batch.cu_seqlens is None
    assert batch.num_target_tokens == 80
    assert {batch.tokens.dtype, batch.targets.dtype, batch.positions.dtype} == {torch.int64}


def by_hand(shards: Shards, window: int, length: int) -> tuple[list[int], list[int], list[int]]:
    """Targets, positions and segment begins of one window, token by token."""
    tokens = shards.window(window * length, length + 1).tolist()
    targets, positions, begins, position = [], [], [], 0
    for i in range(length):
        if i and tokens[i - 1] == FACTS.eos_id:
            position = 0
        if position == 0:
            begins.append(i)
        positions.append(position)
        position += 1
        targets.append(NOT_TRAINED if tokens[i] == FACTS.eos_id else tokens[i + 1])
    return targets, positions, begins


def test_documents_do_not_see_one_another(make_shards: Make) -> None:
    shards = make_shards(lengths(3000), shard_tokens=100)
    made = stream(shards, packing="documents")
    sizes = set()
    for step in range(30):
        windows = made.step_arrays(step).windows.tolist()
        for number, batch in enumerate(made.micro_batches(step, micro_batch=4)):
            targets, positions, begins = [], [], []
            for row, window in enumerate(windows[4 * number : 4 * number + 4]):
                hand = by_hand(shards, window, 16)
                targets += hand[0]
                positions += hand[1]
                begins += [row * 16 + begin for begin in hand[2]]
            assert batch.targets.tolist() == targets
            assert batch.positions.tolist() == positions
            assert batch.num_target_tokens == sum(target != NOT_TRAINED for target in targets)
            assert batch.cu_seqlens is not None
            assert batch.cu_seqlens.dtype == torch.int32
            sizes.add(len(batch.cu_seqlens))
            padding = len(batch.cu_seqlens) - len(begins)
            assert batch.cu_seqlens.tolist() == begins + [64] * padding
            assert padding >= 1
    assert len(sizes) == 1
    assert (sizes.pop() - 1) % 8 == 0


def test_too_many_documents_for_the_fixed_shape_are_refused(make_shards: Make) -> None:
    made = stream(make_shards([2] * 500), packing="documents", max_documents=2)
    with pytest.raises(RunFailed, match="allow more than 2 per sequence"):
        made.micro_batches(0, micro_batch=4)


def test_a_corpus_smaller_than_a_window_is_refused(make_shards: Make) -> None:
    with pytest.raises(UsageError, match=r"has 16 tokens, but one sequence needs 17; shorten data\.sequence_length"):
        stream(make_shards([16], name="small"))
    made = stream(make_shards([17], name="enough"))
    assert made.num_sequences == 1
    assert made.step_arrays(0).windows.tolist() == [0] * 12


def test_uneven_splits_are_refused(make_shards: Make) -> None:
    made = stream(make_shards(lengths(3000)))
    with pytest.raises(UsageError, match="12 sequences cannot be split evenly over 5 ranks"):
        made.step_arrays(0, world=5)
    with pytest.raises(UsageError, match="6 sequences of a rank cannot be split evenly into micro-batches of 4"):
        made.micro_batches(0, world=2, micro_batch=4)


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_a_growing_corpus_gives_the_same_steps_as_the_finished_one(tmp_path: Path, packing: str) -> None:
    writer = ShardWriter(tmp_path, tokenizer=FACTS, source={"key": "k"}, streaming=True, shard_tokens=400)
    rng = np.random.default_rng(0)

    def grow() -> None:
        while writer.pending_tokens < 400:
            writer.append(rng.integers(0, 256, int(rng.integers(3, 50))))
        writer.flush()

    grow()
    growing = stream(Shards.open(tmp_path), packing=packing, max_documents=17)
    assert growing.num_sequences is None
    assert growing.steps_per_epoch is None
    seen: list[Batch] = []
    for _ in range(4):  # a block is 24 windows, two steps: each needs no more than the shards so far
        seen += [growing.micro_batches(len(seen) + i, micro_batch=12)[0] for i in range(2)]
        grow()
    writer.finish()
    finished = stream(Shards.open(tmp_path), packing=packing, max_documents=17)
    for step, batch in enumerate(seen):
        [again] = finished.micro_batches(step, micro_batch=12)
        assert all(torch.equal(getattr(again, column), getattr(batch, column)) for column in COLUMNS)
    count = finished.num_sequences or 0
    assert sorted(finished.windows(np.arange(count)).tolist()) == list(range(count))
    assert sorted(growing.windows(np.arange(count, 2 * count)).tolist()) == list(range(count))


def test_in_order_a_growing_corpus_is_read_up_to_its_end(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, tokenizer=FACTS, source={"key": "k"}, streaming=True, shard_tokens=10_000)
    writer.append(np.arange(200) % 251)
    writer.flush()
    made = stream(Shards.open(tmp_path), shuffle=False)
    assert made.step_arrays(0).windows.tolist() == list(range(12))  # 193 of 201 tokens
    with pytest.raises(RunFailed, match="stopped at 201 tokens, but 385 are needed next"):
        made.step_arrays(1)


def test_a_batch_moves_whole(make_shards: Make) -> None:
    [batch] = stream(make_shards(lengths(3000)), packing="documents").micro_batches(0, micro_batch=12)
    moved = batch.to("meta")
    assert {t.device.type for t in (moved.tokens, moved.targets, moved.positions, moved.cu_seqlens)} == {"meta"}  # type: ignore[union-attr]
    assert moved.num_target_tokens == batch.num_target_tokens
