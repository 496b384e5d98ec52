from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from tests.waiting import HANG_S, wait_until

from flatout.data import feed as module
from flatout.data.feed import Feed, Staging
from flatout.data.stream import Batch
from flatout.errors import EnvironmentLacks, RunFailed


def batch(value: int, *, size: int = 8, segments: bool = False) -> Batch:
    column = torch.full((size,), value)
    return Batch(
        tokens=column,
        targets=column + 1,
        positions=column + 2,
        cu_seqlens=torch.full((4,), value, dtype=torch.int32) if segments else None,
        num_sequences=1,
        sequence_length=size,
        num_target_tokens=value,
    )


def steps(feed: Feed) -> list[int]:
    return [int(batches[0].tokens[0]) for batches in feed]


def let_run_ahead(feed: Feed) -> None:
    """Until the workers have made all the steps they may."""
    assert feed._stop is not None
    last = min(feed._stop, feed._taken + feed._ahead)
    wait_until(lambda: all(step in feed._ready for step in range(feed._taken, last)))


def delayed(step: int) -> list[Batch]:
    time.sleep(random.Random(step).random() * 0.01)
    return [batch(step)]


@pytest.mark.parametrize("workers", [0, 1, 2, 7])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_steps_come_in_order_whatever_the_workers_do(workers: int, prefetch: int) -> None:
    with Feed(delayed, start=5, stop=45, workers=workers, prefetch=prefetch, pin=False) as feed:
        assert steps(feed) == list(range(5, 45))


def test_workers_stay_within_the_prefetch() -> None:
    lock = threading.Lock()
    asked: list[int] = []

    def make(step: int) -> list[Batch]:
        with lock:
            asked.append(step)
        return [batch(step)]

    with Feed(make, start=0, stop=None, workers=3, prefetch=4, pin=False) as feed:
        for taken in range(10):
            next(feed)
            with lock:
                assert max(asked) <= taken + 4
        wait_until(lambda: len(asked) == 14)
    assert sorted(asked) == list(range(14))


@pytest.mark.parametrize("added", [0, 3])
def test_every_worker_has_a_step_to_work_on(added: int) -> None:
    together = threading.Barrier(4, timeout=HANG_S)

    def make(step: int) -> list[Batch]:
        together.wait()  # breaks unless four steps are in the making at once
        return [batch(step)]

    with Feed(make, start=0, stop=12, workers=4 - added, prefetch=1, pin=False) as feed:
        for _ in range(added):
            feed.add_worker()
        assert feed.num_workers == 4
        assert steps(feed) == list(range(12))


def test_a_worker_can_be_added_where_there_was_none() -> None:
    caller = threading.get_ident()
    made: list[tuple[int, bool]] = []

    def make(step: int) -> list[Batch]:
        made.append((step, threading.get_ident() == caller))
        return [batch(step)]

    with Feed(make, start=0, stop=8, workers=0, prefetch=2, pin=False) as feed:
        for _ in range(3):
            next(feed)
        feed.add_worker()
        assert steps(feed) == list(range(3, 8))
    assert made == [(step, step < 3) for step in range(8)]


def test_staged_steps_stay_untouched_while_workers_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "Staging", lambda num_slots, *, pin: Staging(num_slots, pin=False))
    prefetch = 2
    held: list[tuple[int, Batch]] = []
    addresses: list[int] = []
    with Feed(delayed, start=0, stop=90, workers=1, prefetch=prefetch, pin=True) as feed:
        for step, [staged] in enumerate(feed):
            if step % 10 == 9:
                feed.add_worker()
            held = [*held, (step, staged)][-(prefetch + 2) :]
            addresses.append(staged.tokens.data_ptr())
            let_run_ahead(feed)
            for number, earlier in held:
                assert earlier.tokens.tolist() == [number] * 8
    assert len(addresses) == 90
    assert len(set(addresses)) <= 2 * 9 + prefetch + 2  # nine workers ahead, and as many that came out of turn


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_surface_as_they_are_at_their_step(workers: int) -> None:
    error = RunFailed("the data is gone")

    def make(step: int) -> list[Batch]:
        if step == 3:
            raise error
        return [batch(step)]

    feed = Feed(make, start=0, stop=10, workers=workers, prefetch=5, pin=False)
    assert [int(next(feed)[0].tokens[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RunFailed) as caught:
        next(feed)
    assert caught.value is error
    feed.close()


def test_close_stops_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_S", HANG_S)
    before = threading.active_count()
    feed = Feed(delayed, start=0, stop=None, workers=4, prefetch=2, pin=False)
    next(feed)
    assert threading.active_count() == before + 4
    feed.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        next(feed)


def test_the_end_is_the_end() -> None:
    feed = Feed(delayed, start=3, stop=3, workers=2, prefetch=2, pin=False)
    assert steps(feed) == []
    feed.close()


@pytest.mark.parametrize("segments", [False, True])
def test_staging_reuses_its_memory_after_a_round(segments: bool) -> None:
    staging = Staging(3, pin=False)
    addresses: list[tuple[int, ...]] = []
    for step in range(9):
        given = [batch(10 * step + i, segments=segments) for i in range(2)]
        staged = staging.stage(step, given)
        for got, wanted in zip(staged, given, strict=True):
            assert torch.equal(got.tokens, wanted.tokens)
            assert torch.equal(got.targets, wanted.targets)
            assert torch.equal(got.positions, wanted.positions)
            assert got.num_target_tokens == wanted.num_target_tokens
            assert (got.cu_seqlens is None) == (wanted.cu_seqlens is None)
            if got.cu_seqlens is not None and wanted.cu_seqlens is not None:
                assert torch.equal(got.cu_seqlens, wanted.cu_seqlens)
        addresses.append(tuple(got.tokens.data_ptr() for got in staged))
    assert addresses[:3] == addresses[3:6] == addresses[6:]
    assert len({pointer for slot in addresses for pointer in slot}) == 6


def test_staging_grows_without_touching_what_is_held() -> None:
    staging = Staging(3, pin=False)
    held: list[tuple[int, Batch]] = []
    for step in range(20):
        if step == 7:
            staging.num_slots = 5
        held.append((step, staging.stage(step, [batch(step)])[0]))
        num_kept = 3 if step < 7 else min(5, step - 3)  # step 6 took the place of step 3
        for number, earlier in held[-num_kept:]:
            assert earlier.tokens.tolist() == [number] * 8
    assert len({earlier.tokens.data_ptr() for _, earlier in held}) == 5


def test_staging_follows_a_change_of_shape() -> None:
    staging = Staging(1, pin=False)
    staging.stage(0, [batch(1)])
    [staged] = staging.stage(1, [batch(2, size=16)])
    assert staged.tokens.tolist() == [2] * 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_pinning_without_a_device_is_explained() -> None:
    with pytest.raises(EnvironmentLacks, match="pin_memory: false"):
        Feed(delayed, start=0, stop=1, workers=0, prefetch=1, pin=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_steps_stay_untouched_for_as_long_as_promised() -> None:
    prefetch = 2
    held: list[tuple[int, Batch]] = []
    with Feed(delayed, start=0, stop=60, workers=4, prefetch=prefetch, pin=True) as feed:
        for step, [staged] in enumerate(feed):
            assert staged.tokens.is_pinned()
            held = [*held, (step, staged)][-(prefetch + 2) :]
            let_run_ahead(feed)
            for number, earlier in held:
                assert earlier.tokens.tolist() == [number] * 8
            assert staged.to("cuda").tokens.tolist() == [step] * 8
