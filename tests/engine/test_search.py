"""The search for the micro-batch: it keeps the batch, survives what does not fit, changes nothing, remembers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engine.test_step import SHAPE, T, build, fingerprint, micro_batches, train
from tests.test_cost import MIDDLE

from flatout.config.settings import PlanSettings
from flatout.cost import Adapters
from flatout.data.stream import Batch
from flatout.engine import search
from flatout.engine.ranks import Ranks
from flatout.engine.search import Trial
from flatout.engine.step import Engine
from flatout.errors import RunFailed
from flatout.hardware import named
from flatout.plan import Job, Plan, decide


def plan(*, sequences: int = 8, micro_batch: int = 4) -> Plan:
    job = Job(
        shape=SHAPE,
        hardware=named("H200"),
        sequence_length=T,
        batch_tokens=sequences * T,
        num_ranks=1,
        pins=PlanSettings(micro_batch=micro_batch, graphs=False),
    )
    return decide(job)


def batch_of(size: int) -> Batch:
    return micro_batches(0, size)[0]


def too_large(engine: Engine, limit: int) -> None:
    """As if the device could hold no more than `limit` sequences."""
    plain = engine.trial_pass

    def trial_pass(batch: Batch) -> None:
        if batch.num_sequences > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
        plain(batch)

    engine.trial_pass = trial_pass  # type: ignore[method-assign]


def test_candidates_divide_the_batch() -> None:
    assert search.candidates(plan(sequences=96, micro_batch=24)) == [24, 48, 12, 6]
    assert search.candidates(plan(sequences=8, micro_batch=8)) == [8, 4, 2]
    assert search.candidates(plan(sequences=7, micro_batch=7)) == [7, 1]
    assert search.candidates(plan(sequences=1, micro_batch=1)) == [1]


def test_all_candidates_are_measured_and_nothing_changes() -> None:
    engine = build()
    before = fingerprint(engine)
    trials = search.search(engine, plan(), Ranks(), batch_of)
    assert [trial.micro_batch for trial in trials] == [4, 8, 2, 1]
    assert all(trial.tokens_per_s and trial.tokens_per_s > 0 for trial in trials)
    assert fingerprint(engine) == before
    assert all(p.grad is None for p in engine.model.parameters())
    assert [f.loss for f in train(engine)] == [f.loss for f in train(build())]


def test_what_does_not_fit_is_left_out() -> None:
    engine = build()
    too_large(engine, limit=2)
    trials = search.search(engine, plan(), Ranks(), batch_of)
    assert {trial.micro_batch: trial.tokens_per_s is not None for trial in trials} == {
        4: False,
        8: False,
        2: True,
        1: True,
    }
    assert search.chosen(trials).micro_batch <= 2


def test_halves_are_tried_until_one_fits() -> None:
    engine = build()
    too_large(engine, limit=1)
    trials = search.search(engine, plan(micro_batch=8), Ranks(), batch_of)
    assert [trial.micro_batch for trial in trials] == [8, 4, 2, 1]
    assert search.chosen(trials).micro_batch == 1


def test_nothing_fits() -> None:
    engine = build()
    too_large(engine, limit=0)
    with pytest.raises(RunFailed, match=r"data\.sequence_length"):
        search.search(engine, plan(), Ranks(), batch_of)


def test_another_error_is_not_taken_for_a_shortage() -> None:
    engine = build()
    engine.trial_pass = lambda _: (_ for _ in ()).throw(RuntimeError("device-side assert"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="device-side assert"):
        search.search(engine, plan(), Ranks(), batch_of)


def trial(size: int, speed: float | None) -> Trial:
    return Trial(micro_batch=size, tokens_per_s=speed, first_s=0.0)


def test_the_smallest_of_the_fastest_is_chosen() -> None:
    assert search.chosen([trial(4, 100.0), trial(8, 100.5), trial(2, 80.0), trial(16, None)]).micro_batch == 4
    assert search.chosen([trial(4, 90.0), trial(8, 100.0)]).micro_batch == 8


def test_the_plan_keeps_the_batch_and_says_why() -> None:
    found = search.fitted(plan(), [trial(4, 100.0), trial(2, 1234.0), trial(8, None)], size=2, source="measured here")
    assert (found.decisions.micro_batch, found.decisions.accumulation) == (2, 4)
    assert found.reasons["micro_batch"] == "1,234 tokens/s forward and backward, measured here (4: 100, 8: did not fit)"


def test_what_the_engine_was_built_with_stays() -> None:
    adapted = decide(
        Job(
            shape=replace(MIDDLE, positions=2048),
            hardware=named("H200"),
            sequence_length=2048,
            batch_tokens=64 * 2048,
            num_ranks=1,
            adapters=Adapters(rank=16, alpha=64.0),
            pins=PlanSettings(micro_batch=32),
        )
    )
    assert adapted.decisions.graphs
    assert not adapted.with_pins(micro_batch=64).decisions.graphs
    assert search.candidates(adapted) == [32, 16, 8], "twice the size would only hide the host, and could not be kept"
    found = search.fitted(adapted, [trial(32, 100.0), trial(64, 101.0)], size=64, source="measured here")
    assert found.decisions.graphs
    assert found.reasons["graphs"] == adapted.reasons["graphs"]
    assert "without CUDA graphs" in found.reasons["micro_batch"]


def test_what_was_found_is_remembered_for_this_very_case(tmp_path: Path) -> None:
    key = search.key_of(plan())
    assert search.remembered(tmp_path, key) is None
    trials = [trial(4, 100.0), trial(8, None)]
    search.remember(tmp_path / "new", key, trials)
    assert search.remembered(tmp_path / "new", key) == trials
    # Pinning the size does not matter to the key; another batch does, and so does another decision.
    assert search.key_of(plan(micro_batch=2)) == key
    assert search.key_of(plan(sequences=16)) != key
    assert search.key_of(plan().with_pins(fused_optimizer=False)) != key


def written(**changes: object) -> str:
    trial = {"micro_batch": 4, "tokens_per_s": 100.0, "first_s": 0.0} | changes
    return json.dumps({"key": search.key_of(plan()), "trials": [trial]})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "7",
        "[]",
        '[{"micro_batch": 4}]',
        '[{"micro_batch": "4", "tokens_per_s": 1.0, "first_s": 0.0}]',
        '[{"micro_batch": 4, "tokens_per_s": "fast", "first_s": 0.0}]',
        '[{"micro_batch": 0, "tokens_per_s": 1.0, "first_s": 0.0}]',
        "[" * 100_000,
        json.dumps({"key": "of another case", "trials": [{"micro_batch": 4, "tokens_per_s": 1.0, "first_s": 0.0}]}),
        written(micro_batch=-1),
        written(micro_batch=True),
        written(tokens_per_s=float("nan")),
        written(tokens_per_s=float("inf")),
        written(first_s=None),
    ],
)
def test_a_broken_cache_is_searched_again(tmp_path: Path, content: str) -> None:
    key = search.key_of(plan())
    (tmp_path / f"{key[:32]}.json").write_text(content)
    assert search.remembered(tmp_path, key) is None


def test_a_cache_that_is_no_file_is_searched_again(tmp_path: Path) -> None:
    key = search.key_of(plan())
    (tmp_path / f"{key[:32]}.json").mkdir()
    assert search.remembered(tmp_path, key) is None


def test_the_longest_sequences_are_one_document_each() -> None:
    batch = search.longest(batch_of(4))
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.shape == batch_of(4).cu_seqlens.shape
    assert batch.cu_seqlens.unique().tolist() == [0, T, 2 * T, 3 * T, 4 * T]
    assert batch.positions.view(4, T)[2].tolist() == list(range(T))
