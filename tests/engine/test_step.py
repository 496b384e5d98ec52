"""The step: the effective batch is exact, nothing non-finite gets in, and every fast path equals the plain one."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.config.settings import TrainSettings
from flatout.cost import Adapters, ModelShape
from flatout.data.stream import Batch
from flatout.engine.faults import OutOfMemory
from flatout.engine.prepare import prepare
from flatout.engine.ranks import Ranks
from flatout.engine.replay import Replay
from flatout.engine.resolve import Active
from flatout.engine.step import Engine, StepFacts
from flatout.model import Decoder, lora
from flatout.optim import FusedAdamW, adamw, schedule
from flatout.probe import Phases
from flatout.record import WARM_STEPS

T = 24
SHAPE = ModelShape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=64, vocab=61, positions=T)
ACTIVE = Active(
    device=torch.device("cpu"),
    dtype=torch.float32,
    attention="flash",
    repeat_kv=False,
    varlen=False,
    compile="none",
    fused_optimizer=True,
    facts={},
)


def build(
    *,
    active: Active = ACTIVE,
    recompute: str = "none",
    clip: float | None = 1.0,
    lr: float = 1e-2,
    adapters: Adapters | None = None,
) -> Engine:
    model = Decoder(SHAPE, compute_dtype=active.dtype).to(active.device)
    model.initialise(5)
    if adapters is not None:
        lora.freeze(model, device=active.device, base_bits=adapters.base_bits, seed=0)
        lora.attach(model, adapters, seed=1)
    train = TrainSettings(lr=lr, schedule="constant", weight_decay=0.1)
    head_loss, eight = prepare(model, active=active, recompute=recompute, loss_chunk=16)
    return Engine(
        model=model,
        optimizer=adamw(model, train, fused=active.fused_optimizer),
        schedule=schedule(train, total_steps=100),
        active=active,
        ranks=Ranks(),
        phases=Phases(device=active.device.type),
        head_loss=head_loss,
        eight=eight,
        batch_tokens=8 * T,
        clip=clip,
        seed=0,
    )


def documents(step: int) -> list[list[int]]:
    """Eight sequences cut into documents of unequal length."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = []
    for _ in range(8):
        row: list[int] = []
        while sum(row) < T:
            row.append(min(int(torch.randint(1, 12, (), generator=generator)), T - sum(row)))
        rows.append(row)
    return rows


def micro_batches(step: int, size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 7, (8, T), generator=generator)  # a few of the ids, so that there is something to learn
    batches = []
    for start in range(0, 8, size):
        rows = documents(step)[start : start + size]
        flat = [n for row in rows for n in row]
        ends = torch.tensor([0, *flat]).cumsum(0)
        targets = tokens[start : start + size].roll(-1, dims=1).flatten().clone()
        targets[ends[1:] - 1] = -100
        padded = torch.full((8 * T + 1,), size * T)
        padded[: len(ends)] = ends
        batches.append(
            Batch(
                tokens=tokens[start : start + size].flatten(),
                targets=targets,
                positions=torch.cat([torch.arange(n) for n in flat]),
                cu_seqlens=padded.int(),
                num_sequences=size,
                sequence_length=T,
                num_target_tokens=int((targets != -100).sum()),
            )
        )
    return batches


def train(engine: Engine, *, steps: int = 6, size: int = 4) -> list[StepFacts]:
    facts: list[StepFacts] = []
    for step in range(steps):
        engine.begin_step(step)
        engine.phases.mark("data")
        engine.step(step, micro_batches(step, size))
        facts += engine.finished()
        engine.end_step()
    return facts + engine.finished(all=True)


def fingerprint(engine: Engine) -> str:
    joined = b"".join(p.detach().cpu().numpy().tobytes() for p in engine.model.parameters())
    return hashlib.sha256(joined).hexdigest()


def test_the_effective_batch_is_the_same_however_it_is_cut() -> None:
    reference = train(build(), size=8)
    assert reference[-1].loss < reference[0].loss
    assert len({facts.target_tokens for facts in reference}) > 1, "documents of unequal length"
    for size in (1, 2, 4):
        cut = train(build(), size=size)
        for one, other in zip(reference, cut, strict=True):
            assert other.loss == pytest.approx(one.loss, abs=1e-5)
            assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(recompute: str) -> None:
    plain, recomputed = build(), build(recompute=recompute)
    assert [f.loss for f in train(plain)] == [f.loss for f in train(recomputed)]
    assert fingerprint(plain) == fingerprint(recomputed)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_fused_update_equals_the_plain_one(clip: float | None) -> None:
    fused = build(clip=clip)
    plain = build(active=replace(ACTIVE, fused_optimizer=False), clip=clip)
    for one, other in zip(train(fused), train(plain), strict=True):
        assert other.loss == pytest.approx(one.loss, abs=1e-6)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for one, other in zip(fused.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_clipping_clips() -> None:
    """With plain gradient descent in mind: the divided gradient has the norm that was asked for."""
    engine = build(clip=0.05)
    seen: list[float] = []
    assert isinstance(engine.optimizer, FusedAdamW)
    step = engine.optimizer.step

    def spy(*, lr: float, divisor: Tensor, skip: Tensor) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in engine.model.parameters()])
        seen.append(float(norm / divisor))
        step(lr=lr, divisor=divisor, skip=skip)

    engine.optimizer.step = spy  # type: ignore[method-assign]
    facts = train(engine, steps=2)
    assert all(f.grad_norm > 0.05 for f in facts)
    assert seen == pytest.approx([0.05, 0.05], rel=1e-5)


def poison_gradient(engine: Engine) -> None:
    next(engine.model.parameters()).register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), float("inf")))


def poison_loss(engine: Engine) -> None:
    plain = engine.head_loss
    engine.head_loss = lambda *inputs: plain(*inputs) * float("nan")


@pytest.mark.parametrize("poison", [poison_gradient, poison_loss])
@pytest.mark.parametrize("fused", [True, False])
def test_nothing_non_finite_gets_in(fused: bool, poison: Callable[[Engine], None]) -> None:
    engine = build(active=replace(ACTIVE, fused_optimizer=fused))
    train(engine, steps=2)
    before, moments = fingerprint(engine), [s["exp_avg"].clone() for s in engine.optimizer.state.values()]
    counts = [s["step"].item() for s in engine.optimizer.state.values()]
    poison(engine)
    facts = train(engine, steps=2)
    assert all(f.skipped for f in facts)
    assert fingerprint(engine) == before
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, engine.optimizer.state.values(), strict=True))
    assert counts == [s["step"].item() for s in engine.optimizer.state.values()]


def test_fp16_scales_the_loss_and_backs_off() -> None:
    engine = build(active=replace(ACTIVE, dtype=torch.float16))
    facts = train(engine, steps=4)
    assert [f.loss_scale for f in facts] == [65536.0] * 4
    reference = train(build(), steps=4)
    assert facts[-1].loss == pytest.approx(reference[-1].loss, abs=0.05)
    assert facts[0].grad_norm == pytest.approx(reference[0].grad_norm, rel=0.05), "the norm is unscaled"
    poison_gradient(engine)
    assert [f.loss_scale for f in train(engine, steps=2)] == [32768.0, 16384.0]


PHASES = {"data", "forward", "backward", "reduce", "optimize"}


def test_phases_account_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only moves in a forward pass and in an update, a second each."""
    now = 1.0

    def taking_a_second(work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def longer(*arguments: Any, **named: Any) -> torch.Tensor:
            nonlocal now
            now += 1.0
            return work(*arguments, **named)

        return longer

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(Engine, "_pass", taking_a_second(Engine._pass))
    monkeypatch.setattr(Engine, "_update", taking_a_second(Engine._update))
    for fact in train(build(), steps=5, size=4):  # two micro-batches
        spans = {span.phase: span.seconds for span in fact.spans}
        assert spans == dict.fromkeys(PHASES, 0.0) | {"forward": 2.0, "optimize": 1.0}
        assert fact.seconds == 3.0


@pytest.mark.gpu
def test_phases_account_for_the_step_on_a_gpu() -> None:
    # After the first steps, which build kernels: there host and device have met, as at the end.
    facts = train(build(active=replace(ACTIVE, device=torch.device("cuda"))), steps=40)[WARM_STEPS:]
    assert {span.phase for f in facts for span in f.spans} == PHASES
    attributed = sum(span.seconds for f in facts for span in f.spans)
    assert attributed == pytest.approx(sum(f.seconds for f in facts), rel=0.1)


def test_evaluation_is_the_mean_over_target_tokens() -> None:
    engine = build()
    together, apart = engine.evaluate(micro_batches(0, 8)), engine.evaluate(micro_batches(0, 1))
    assert together == pytest.approx(apart, abs=1e-5)
    assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_bf16_follows_the_plain_path(recompute: str) -> None:
    device = torch.device("cuda")
    plain = train(build(active=replace(ACTIVE, device=device)), steps=20)
    active = replace(ACTIVE, device=device, dtype=torch.bfloat16, compile="default", varlen=True)
    fast = train(build(active=active, recompute=recompute), steps=20)
    for one, other in zip(plain, fast, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=0.02)


def test_too_little_memory_to_record_is_not_the_batch_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def short() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", short)
    engine, plain = build(), build()
    engine.replay = Replay(engine.parameters)
    first, expected = train(engine, steps=1, size=8), train(plain, steps=2, size=8)
    assert not engine.replay, "a shape's first micro-batch runs as it is"
    engine.begin_step(1)
    with pytest.raises(OutOfMemory) as raised:
        engine.step(1, micro_batches(1, 8))
    assert raised.value.recorded
    assert engine.replay is None
    engine.step(1, micro_batches(1, 8))
    engine.end_step()
    assert [f.loss for f in (*first, *engine.finished(all=True))] == [f.loss for f in expected]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [4, 8])
def test_recorded_passes_are_the_same_passes(size: int) -> None:
    here = replace(ACTIVE, device=torch.device("cuda"), dtype=torch.bfloat16, varlen=True)
    as_they_come, whole = build(active=here), build(active=replace(here, graphs=True))
    for one, other in zip(train(as_they_come, steps=8, size=size), train(whole, steps=8, size=size), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-2)
    assert whole.replay, "passes were recorded"
    whole.forget()
    assert not whole.replay
    assert all(p.grad is None for p in whole.parameters)
    # And on from there: an abandoned step is taken again, in any size.
    one, other = train(as_they_come, steps=3, size=2), train(whole, steps=3, size=2)
    assert other[-1].loss == pytest.approx(one[-1].loss, rel=1e-3)
