"""Training with fused kernels against the plain path: by Triton's interpreter on a CPU, natively on a GPU."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")

from tests.engine import test_step
from tests.engine.test_step import ACTIVE, build, train

from flatout.cost import Adapters, ModelShape
from flatout.data.stream import Batch
from flatout.engine.checkpoint import Checkpoints, restore
from flatout.engine.prepare import HeadLoss, attend_for, prepare
from flatout.engine.resolve import Active
from flatout.engine.step import Engine
from flatout.kernels import rope, swiglu
from flatout.model import Decoder, Masked, Padded, Rectangular, Short, Sliding, Varlen, lora

ALL = {"fused_qkv": True, "fused_mlp": True, "fused_loss": True}


T = 8
SHAPE = ModelShape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocab=32, positions=T)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds a tile: few tokens, large tiles."""
    monkeypatch.setattr(test_step, "SHAPE", SHAPE)
    monkeypatch.setattr(test_step, "micro_batches", micro_batches)
    if not torch.cuda.is_available():
        monkeypatch.setattr(rope, "ROWS", 16)
        monkeypatch.setattr(swiglu, "ROWS", 16)
        monkeypatch.setattr(swiglu, "COLS", 64)


def micro_batches(step: int, size: int) -> list[Batch]:
    tokens = torch.randint(0, 5, (4, T + 1), generator=torch.Generator().manual_seed(step))
    return [
        Batch(
            tokens=tokens[i : i + size, :-1].flatten(),
            targets=tokens[i : i + size, 1:].flatten().clone(),
            positions=torch.arange(T).repeat(size),
            cu_seqlens=None,
            num_sequences=size,
            sequence_length=T,
            num_target_tokens=size * T,
        )
        for i in range(0, 4, size)
    ]


def active(**kernels: Any) -> Active:
    return replace(ACTIVE, **kernels)


@pytest.mark.parametrize(
    "kernels", [{"fused_qkv": True}, {"fused_mlp": True}, {"fused_loss": True}, ALL], ids=lambda k: "+".join(k)
)
def test_each_kernel_follows_the_plain_path(kernels: dict[str, bool]) -> None:
    plain, fused = train(build(), steps=4), train(build(active=active(**kernels)), steps=4)
    assert plain[-1].loss < plain[0].loss
    for one, other in zip(plain, fused, strict=True):
        assert other.loss == pytest.approx(one.loss, abs=2e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)


def test_kernels_and_full_recomputation_go_together() -> None:
    kept = train(build(active=active(**ALL)), steps=2)
    recomputed = train(build(active=active(**ALL), recompute="full"), steps=2)
    assert [f.loss for f in kept] == pytest.approx([f.loss for f in recomputed], abs=1e-6)


@pytest.mark.long
def test_eight_bits_learn_as_the_plain_path_does() -> None:
    plain, eight = train(build(), steps=10), train(build(active=active(**ALL, fp8=True)), steps=10)
    assert plain[-1].loss < 0.9 * plain[0].loss
    for one, other in zip(plain, eight, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=0.05)
    assert all(other.loss_scale is None for other in eight), "a fixed scale is no event"


def test_evaluation_with_eight_bits_is_that_of_the_weights() -> None:
    engine = build(active=active(**ALL, fp8=True))
    train(engine, steps=2)
    plain = build()
    with torch.no_grad():
        for one, other in zip(plain.model.parameters(), engine.model.parameters(), strict=True):
            one.copy_(other)
    batches = micro_batches(0, 4)
    assert engine.evaluate(batches) == pytest.approx(plain.evaluate(batches), abs=1e-5)


@pytest.mark.long
def test_eight_bit_scales_are_saved_and_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    def fresh() -> Engine:
        return build(active=active(**ALL, fp8=True))

    expected = train(fresh(), steps=5)
    first = fresh()
    train(first, steps=3)
    checkpoints = Checkpoints(tmp_path, identity="a", keep=2)
    checkpoints.save(3, model=first.model, optimizer=first.optimizer, state={})
    second = fresh()
    found, _ = checkpoints.latest()
    restore(found, model=second.model, optimizer=second.optimizer)
    facts = []
    for step in (3, 4):
        second.begin_step(step)
        second.step(step, micro_batches(step, 4))
        second.end_step()
        facts += second.finished(all=True)
    assert [f.loss for f in facts] == [f.loss for f in expected[3:]]
    assert [f.grad_norm for f in facts] == [f.grad_norm for f in expected[3:]]


def test_an_abandoned_step_leaves_no_trace_in_the_scales() -> None:
    engine = build(active=active(**ALL, fp8=True))
    engine.trial_pass(micro_batches(0, 4)[0])
    assert engine.eight.scales.amax.any()
    engine.forget()
    assert not engine.eight.scales.amax.any()
    assert all(p.grad is None for p in engine.model.parameters())
    fresh = train(build(active=engine.active), steps=2)
    assert [f.loss for f in train(engine, steps=2)] == [f.loss for f in fresh]


def test_weights_loaded_after_a_rehearsal_get_copies_of_their_own() -> None:
    engine = build(active=active(**ALL, fp8=True))
    engine.trial_pass(micro_batches(0, 4)[0])
    engine.forget()
    weight, copy = engine.model.blocks[0].qkv, engine.eight.qkv[0].weight
    with torch.no_grad():
        weight.mul_(-3.0)
    engine.eight.ready()
    # In the large: Triton's interpreter rounds a few values up to a power of two wrongly.
    copied = copy.both.rows.float() * copy.scale.inverse
    assert float(torch.cosine_similarity(copied.flatten(), weight.detach().flatten(), dim=0)) > 0.95


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_kernels_in_bf16_follow_the_plain_path(recompute: str) -> None:
    device = torch.device("cuda")
    plain = train(build(active=replace(ACTIVE, device=device)), steps=20)
    here = replace(active(**ALL), device=device, dtype=torch.bfloat16)
    for one, other in zip(plain, train(build(active=here, recompute=recompute), steps=20), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fused_qkv", "fused_mlp", "fused_loss"])
def test_one_kernel_and_the_compiler_share_a_block(kernel: str) -> None:
    device = torch.device("cuda")
    plain = train(build(active=replace(ACTIVE, device=device)), steps=10)
    here = replace(active(**{kernel: True}), device=device, dtype=torch.bfloat16, compile="default")
    for one, other in zip(plain, train(build(active=here), steps=10), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=0.02)


@pytest.mark.gpu
def test_a_steady_step_never_waits_for_the_device() -> None:
    here = replace(active(**ALL), device=torch.device("cuda"), dtype=torch.bfloat16)
    engine = build(active=here)
    train(engine, steps=4)
    # As the feed gives them: from pinned memory, so that the copy does not wait either.
    batches = [
        replace(b, tokens=b.tokens.pin_memory(), targets=b.targets.pin_memory(), positions=b.positions.pin_memory())
        for b in micro_batches(4, 4)
    ]  # fmt: skip
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as p:
        for step in range(4, 7):
            engine.begin_step(step)
            engine.step(step, batches)
            engine.end_step()
    names = [event.name for event in p.events()]
    assert any("cudaLaunchKernel" in name or "cuLaunchKernel" in name for name in names)
    # The profiler itself synchronises the device once, at its end.
    waits = [name for name in names if name in ("cudaStreamSynchronize", "aten::item", "aten::_local_scalar_dense")]
    assert waits == []


ADAPTERS = Adapters(rank=4, alpha=8.0)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """As in a run that collects garbage itself: what a recomputed pass leaves in cycles stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("adapters", "kernels"),
    [(ADAPTERS, ALL), (None, ALL), (None, {**ALL, "fp8": True})],
    ids=["adapters", "all weights", "8 bits"],
)
@pytest.mark.usefixtures("no_collections")
def test_recorded_passes_learn_the_same(adapters: Adapters | None, kernels: dict[str, bool], recompute: str) -> None:
    here = replace(active(**kernels), device=torch.device("cuda"), dtype=torch.bfloat16)
    as_they_come = train(build(active=here, adapters=adapters, recompute=recompute), steps=20, size=2)
    whole = build(active=replace(here, graphs=True), adapters=adapters, recompute=recompute)
    assert as_they_come[-1].loss < as_they_come[0].loss
    for one, other in zip(as_they_come, train(whole, steps=20, size=2), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=2e-2)
    assert whole.replay


@pytest.mark.gpu
def test_recorded_passes_over_thousands_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a real batch has: libraries take other ways then, the embedding's gradient for one."""
    length = 512

    def many(step: int, _size: int) -> list[Batch]:
        tokens = torch.randint(0, 32, (16, length + 1), generator=torch.Generator().manual_seed(step))
        return [
            Batch(
                tokens=part[:, :-1].flatten(),
                targets=part[:, 1:].flatten().clone(),
                positions=torch.arange(length).repeat(8),
                cu_seqlens=None,
                num_sequences=8,
                sequence_length=length,
                num_target_tokens=8 * length,
            )
            for part in tokens.split(8)
        ]

    monkeypatch.setattr(test_step, "SHAPE", replace(SHAPE, positions=length))
    monkeypatch.setattr(test_step, "micro_batches", many)
    here = replace(active(**ALL), device=torch.device("cuda"), dtype=torch.bfloat16)
    whole = build(active=replace(here, graphs=True))
    for one, other in zip(train(build(active=here), steps=10), train(whole, steps=10), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=2e-2)
    assert whole.replay


def test_short_documents_have_a_kernel_of_their_own() -> None:
    batch = replace(micro_batches(0, 4)[0], cu_seqlens=torch.tensor([0, 5, 32, 32], dtype=torch.int32), longest=27)
    packed = active(varlen=True)
    short = replace(packed, attention="short")
    assert isinstance(attend_for(batch, active=short), Short)
    assert isinstance(attend_for(replace(batch, longest=129), active=short), Varlen)
    assert isinstance(attend_for(batch, active=packed), Varlen)
    even = {"cu_seqlens": torch.tensor([0, 16, 32, 32], dtype=torch.int32), "longest": 16, "num_sequences": 1}
    apart = attend_for(replace(batch, **even, sequence_length=32), active=active())  # type: ignore[arg-type]
    assert isinstance(apart, Padded)
    assert apart.documents == 2, "empty ones are left out where counting them is free"
    assert isinstance(attend_for(batch, active=active()), Masked), "two of 27 make more scores than four of 8"


def test_a_window_that_is_shorter_than_the_sequences_slides() -> None:
    batch = micro_batches(0, 4)[0]
    length = batch.sequence_length
    slides = active(window=length - 1)
    assert attend_for(batch, active=active(window=length)) == Rectangular(batch=batch.num_sequences)
    assert attend_for(batch, active=slides) == Rectangular(batch=batch.num_sequences, window=length - 1)
    some = attend_for(batch, active=replace(slides, full_layers=1))
    assert isinstance(some, Sliding)
    assert (some.in_layer(0), some.in_layer(1)) == (some.full, some.within)
    kernel = attend_for(batch, active=replace(slides, varlen=True))
    assert isinstance(kernel, Varlen)
    assert (kernel.window, kernel.cu_seqlens.diff().tolist()) == (length - 1, [length] * batch.num_sequences)


def _head(head_loss: HeadLoss, targets: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return head_loss(hidden, weight, targets)


ALL_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
# As wide as they are, and the other way round than in any model we know: gaps are then elsewhere.
SQUARE = replace(SHAPE, intermediate=32)
ODD = replace(SHAPE, hidden=64, heads=2, intermediate=16)


@pytest.mark.parametrize(
    ("targets", "shape"), [(ALL_TARGETS, SHAPE), (("q", "down"), SHAPE), (ALL_TARGETS, SQUARE), (ALL_TARGETS, ODD)]
)
def test_adapters_in_the_fused_segments_follow_the_plain_path(targets: tuple[str, ...], shape: ModelShape) -> None:
    spec = Adapters(rank=4, alpha=8.0, targets=targets)
    results = []
    for kernels in ({}, ALL):
        chosen = active(**kernels)
        model = Decoder(shape).to(chosen.device)
        model.initialise(5)
        lora.freeze(model, device=chosen.device, base_bits=16, seed=0)
        lora.attach(model, spec, seed=1)
        with torch.no_grad():
            for _, b in lora.adapters(model).values():
                b.normal_(0.0, 0.3, generator=torch.Generator(device=b.device).manual_seed(b.numel()))
        head_loss, _ = prepare(model, active=chosen, recompute="none", loss_chunk=16)
        batch = micro_batches(0, 4)[0].to(chosen.device)
        head = partial(_head, head_loss, batch.targets)
        loss = model(batch.tokens, batch.positions, attend_for(batch, active=chosen), head)
        with torch.no_grad():  # as an evaluation might, between the passes
            model(batch.tokens, batch.positions, attend_for(batch, active=chosen), head)
        loss.backward()
        results.append((loss, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    (plain, expected), (fused, found) = results
    assert fused.item() == pytest.approx(plain.item(), abs=1e-4)
    assert len(expected) == 2 * 2 * (4 if len(targets) == 7 else 2)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-4, rtol=1e-3), name
