"""Tests whether every optional path works on this device, and how fast it is: `flatout hardware --selftest`.

Each path runs forward and backward on the same inputs as the plain path it replaces. The results are the relative
difference and the time of both. A path that raises or differs too much is reported as unusable, with the reason.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatout.config.settings import Recompute, TrainSettings
from flatout.cost import Adapters, ModelShape
from flatout.engine.prepare import prepare
from flatout.engine.resolve import Active
from flatout.errors import first_line
from flatout.kernels.uniform import uniform
from flatout.losses import linear_cross_entropy, row_loss
from flatout.model import Attend, Block, Decoder, Masked, Padded, Rectangular, Short, Varlen
from flatout.model.decoder import linear
from flatout.model.lora import Adapter
from flatout.optim import FusedAdamW, adamw

# A larger relative difference than this is an error and not rounding.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
EIGHT_BIT_TOLERANCE = 0.15
REPEATS = 5
# Steps after which delayed scales have adapted to every matrix of a block, from the last to the first.
SETTLING = 6

Work = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Check:
    path: str
    against: str
    usable: bool
    difference: float | None = None
    speedup: float | None = None
    noise: bool = False  # whether the repeats disagree on which of the two is faster
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class _Trial:
    path: str
    against: str
    fast: Work
    plain: Work
    tolerance: float


def selftest(device: torch.device) -> list[Check]:
    """Tests all optional paths on this device in turn. Takes seconds, or a minute with a compiler."""
    checks = []
    for trial in _trials(device):
        try:
            found, expected = trial.fast(), trial.plain()
            difference = max(_difference(a, b) for a, b in zip(found, expected, strict=True))
            speedup, noise = faster(*_in_turns(trial.plain, trial.fast, device))
        except Exception as error:  # any error of a path on this device is the answer
            reason = f"{type(error).__name__}: {first_line(error)}"
            checks.append(Check(path=trial.path, against=trial.against, usable=False, reason=reason[:160]))
            continue
        usable = difference <= trial.tolerance
        reason = "" if usable else f"differs by more than {trial.tolerance:g}"
        checks.append(
            Check(
                path=trial.path,
                against=trial.against,
                usable=usable,
                difference=difference,
                speedup=speedup,
                noise=noise,
                reason=reason,
            )
        )
    return checks


def _trials(device: torch.device) -> Iterator[_Trial]:
    on_gpu = device.type == "cuda"
    length, batch = (1024, 4) if on_gpu else (128, 2)
    dtype = torch.float32
    if on_gpu:
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    shape = ModelShape(
        layers=1, hidden=768, heads=12, kv_heads=12, head_dim=64, intermediate=2048, vocab=8192, positions=length
    )
    rectangle, tokens = Rectangular(batch=batch), batch * length
    limit = TOLERANCE[dtype]

    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        name = backend.name.removesuffix("_ATTENTION").lower()
        if on_gpu or name == "flash":
            yield _Trial(
                path=f"attention: {name}",
                against="math",
                fast=_attention(shape, rectangle, tokens, dtype, device, backend),
                plain=_attention(shape, rectangle, tokens, dtype, device, SDPBackend.MATH),
                tolerance=limit,
            )
    ends = torch.arange(0, tokens + 1, length // 4, dtype=torch.int32, device=device)
    padded = Padded.of(ends, tokens=tokens, longest=length // 4)
    masked = _attention(shape, Masked.of(ends, batch=batch, length=length), tokens, dtype, device, None)
    yield _Trial(
        path="packed documents: padded",
        against="mask",
        fast=_attention(shape, padded, tokens, dtype, device, None),
        plain=masked,
        tolerance=limit,
    )
    if on_gpu:
        yield _Trial(
            path="packed documents: variable-length flash",
            against="mask",
            fast=_attention(shape, Varlen(cu_seqlens=ends, longest=length), tokens, dtype, device, None),
            plain=masked,
            tolerance=limit,
        )
        short, few = torch.arange(0, tokens + 1, 64, dtype=torch.int32, device=device), 64
        yield _Trial(
            path="packed documents: short ones",
            against="variable-length flash",
            fast=_attention(shape, Short(cu_seqlens=short, longest=few), tokens, dtype, device, None),
            plain=_attention(shape, Varlen(cu_seqlens=short, longest=few), tokens, dtype, device, None),
            tolerance=limit,
        )
        yield _Trial(
            path=f"precision: {str(dtype).removeprefix('torch.')}",
            against="float32",
            fast=_block(shape, batch, length, dtype, device),
            plain=_block(shape, batch, length, torch.float32, device),
            tolerance=limit,
        )
    yield _Trial(
        path="loss: chunked linear cross-entropy",
        against="all logits at once",
        fast=_loss(shape, tokens, dtype, device, chunk=tokens // 2),
        plain=_plain_loss(shape, tokens, dtype, device),
        tolerance=limit,
    )
    yield _Trial(
        path="adapters: on a frozen projection",
        against="W x + scale B (A x)",
        fast=_adapted(shape, tokens, dtype, device, plain=False),
        plain=_adapted(shape, tokens, dtype, device, plain=True),
        tolerance=limit,
    )
    yield _Trial(
        path="optimizer: fused AdamW",
        against="one operation at a time",
        fast=_update(shape, device, fused=True),
        plain=_update(shape, device, fused=False),
        tolerance=TOLERANCE[torch.float32],
    )
    modes: tuple[Recompute, ...] = ("selective", "full")
    for mode in modes:
        yield _Trial(
            path=f"recompute: {mode}",
            against="none",
            fast=_block(shape, batch, length, dtype, device, recompute=mode),
            plain=_block(shape, batch, length, dtype, device),
            tolerance=limit,
        )
    if on_gpu:
        for name, title in (("fused_qkv", "norm, qkv, rotary"), ("fused_mlp", "norm, MLP")):
            yield _Trial(
                path=f"kernel: {title}",
                against="plain",
                fast=_block(shape, batch, length, dtype, device, kernels=(name,)),
                plain=_block(shape, batch, length, dtype, device),
                tolerance=limit,
            )
        yield _Trial(
            path="kernel: cross-entropy",
            against="plain",
            fast=_kernel_loss(shape, tokens, dtype, device),
            plain=_plain_loss(shape, tokens, dtype, device),
            tolerance=limit,
        )
        yield _Trial(
            path="kernel: decode attention over shared prompts",
            against="each row alone",
            fast=_decode(shape, dtype, device, kernel=True),
            plain=_decode(shape, dtype, device, kernel=False),
            tolerance=limit,
        )
        yield _Trial(
            path="kernel: sample a token",
            against="softmax and search",
            fast=_draw(shape, dtype, device, kernel=True),
            plain=_draw(shape, dtype, device, kernel=False),
            tolerance=limit,
        )
        yield _Trial(
            path="8-bit matmuls: one block",
            against="kernels in 16 bits",
            fast=_block(shape, batch, length, dtype, device, kernels=("fused_qkv", "fused_mlp", "fp8")),
            plain=_block(shape, batch, length, dtype, device, kernels=("fused_qkv", "fused_mlp")),
            tolerance=EIGHT_BIT_TOLERANCE,
        )
        yield _Trial(
            path="compile: one block",
            against="eager",
            fast=_block(shape, batch, length, dtype, device, compiled=True),
            plain=_block(shape, batch, length, dtype, device),
            tolerance=limit,
        )


def _attention(
    shape: ModelShape,
    attend: Attend,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: SDPBackend | None,
) -> Work:
    inputs = [
        _random((tokens, shape.heads, shape.head_dim), seed=i, dtype=dtype, device=device).requires_grad_()
        for i in range(3)
    ]

    def work() -> Sequence[Tensor]:
        with _only(backend):
            out = attend(*inputs)
            return [out, *torch.autograd.grad(out.float().square().mean(), inputs)]

    return work


def _decode(shape: ModelShape, dtype: torch.dtype, device: torch.device, *, kernel: bool) -> Work:
    """One token of each of 256 rows, 16 per prompt of 128 tokens, each with 64 tokens of its own."""
    rows, together, prompt, own = 256, 16, 128, 64
    groups, width = shape.heads // shape.kv_heads, shape.head_dim
    k, v = (
        _random((shape.kv_heads, rows * own + rows // together * prompt, width), seed=i, dtype=dtype, device=device)
        for i in range(2)
    )
    q = _random((rows, shape.heads, width), seed=2, dtype=dtype, device=device)
    index = torch.arange(rows, device=device)
    starts = rows * own + torch.arange(rows // together, device=device) * prompt

    def fast() -> Sequence[Tensor]:
        from flatout.kernels.decode import Partial, Tiles, read

        def full(like: Tensor, value: int) -> Tensor:
            return torch.full_like(like, value, dtype=torch.int32)

        shared, alone = index.view(-1, together).int(), index.view(-1, 1).int()
        ranges = [
            Tiles(queries_TQ=shared, seen_TQ=full(shared, prompt), starts_T=starts),
            Tiles(queries_TQ=alone, seen_TQ=full(alone, own), starts_T=index * own),
        ]
        partial = Partial.make(queries=rows, heads=shape.heads, head_dim=width, device=device)
        return [read(q, k, v, ranges, partial=partial)]

    def plain() -> Sequence[Tensor]:
        places = torch.cat(
            (
                starts[index // together, None] + torch.arange(prompt, device=device),
                index[:, None] * own + torch.arange(own, device=device),
            ),
            dim=1,
        )
        keys, values = (x[:, places].transpose(0, 1).repeat_interleave(groups, dim=1) for x in (k, v))
        return [F.scaled_dot_product_attention(q[:, :, None], keys, values)[:, :, 0]]

    return fast if kernel else plain


def _draw(shape: ModelShape, dtype: torch.dtype, device: torch.device, *, kernel: bool) -> Work:
    """The log-probability of one sampled token in each of 256 rows, where only a few tokens are likely."""
    rows = 256
    logits = 10 * _random((rows, shape.vocab), seed=0, dtype=dtype, device=device)
    index = torch.arange(rows, device=device)

    def fast() -> Sequence[Tensor]:
        from flatout.kernels.draw import draw_

        token, position, count, alive, limit = (torch.full_like(index, n) for n in (0, 0, 0, 1, 2))
        ids, logprobs = torch.zeros(rows, 1, dtype=torch.long, device=device), torch.zeros(rows, 1, device=device)
        state = (token, position, count, alive, limit, ids, logprobs)
        nothing = torch.full_like(index[:1], -1)
        asked = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_tokens": 0}
        draw_(logits, index, index, nothing, state, known=shape.vocab, **asked)  # type: ignore[arg-type]
        return [logprobs[:, 0]]

    def plain() -> Sequence[Tensor]:
        until = (logits.float() / 0.7).softmax(-1).double().cumsum(-1)
        found = torch.searchsorted(until, uniform(index, 0 * index)[:, None] * until[:, -1:], right=True)
        return [logits.float().log_softmax(-1).gather(-1, found.clamp(max=shape.vocab - 1))[:, 0]]

    return fast if kernel else plain


@contextmanager
def _only(backend: SDPBackend | None) -> Iterator[None]:
    if backend is None:
        yield
    else:
        with sdpa_kernel(backend):
            yield


def _block(
    shape: ModelShape,
    batch: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    recompute: Recompute = "none",
    compiled: bool = False,
    kernels: tuple[str, ...] = (),
) -> Work:
    model = Decoder(shape, compute_dtype=dtype).to(device)
    model.initialise(0)
    _, eight = prepare(model, active=_active(dtype, device, kernels), recompute=recompute, loss_chunk=1)
    block = model.blocks[0]
    assert isinstance(block, Block)
    if compiled:
        block.compile(fullgraph=True, dynamic=False)
    residual = _random((batch * length, shape.hidden), seed=3, dtype=dtype, device=device).requires_grad_()
    positions = torch.arange(length, device=device).repeat(batch)
    tokens = torch.zeros(batch * length, dtype=torch.long, device=device)

    def work() -> Sequence[Tensor]:
        _, cos, sin = model.enter(tokens, positions)
        carried, delta = block(residual, None, cos, sin, Rectangular(batch=batch))
        loss = (carried + delta).float().square().mean()
        return [(carried + delta).detach(), *torch.autograd.grad(loss, [residual, *block.parameters()])]

    if eight is None:
        return work

    left = SETTLING

    def settled() -> Sequence[Tensor]:
        nonlocal left
        for _ in range(left):
            eight.ready()
            work()
            eight.updated()
        left = 0
        return work()

    return settled


def _active(dtype: torch.dtype, device: torch.device, kernels: tuple[str, ...]) -> Active:
    """The plain path with some kernels in it."""
    plain = Active(
        device=device,
        dtype=dtype,
        attention="math",
        repeat_kv=False,
        varlen=False,
        compile="none",
        fused_optimizer=True,
        facts={},
    )
    switches: dict[str, Any] = dict.fromkeys(kernels, True)
    return replace(plain, **switches)


def _head(shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    hidden = _random((tokens, shape.hidden), seed=4, dtype=dtype, device=device).requires_grad_()
    weight = (0.02 * _random((shape.vocab, shape.hidden), seed=5, dtype=torch.float32, device=device)).requires_grad_()
    targets = torch.randint(shape.vocab, (tokens,), generator=torch.Generator().manual_seed(6)).to(device)
    return hidden, weight, targets


def _loss(shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device, *, chunk: int) -> Work:
    hidden, weight, targets = _head(shape, tokens, dtype, device)

    def work() -> Sequence[Tensor]:
        loss = linear_cross_entropy(hidden, weight, targets, chunk=chunk, rows=row_loss) / tokens
        return [loss, *torch.autograd.grad(loss, [hidden, weight])]

    return work


def _plain_loss(shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device) -> Work:
    hidden, weight, targets = _head(shape, tokens, dtype, device)

    def work() -> Sequence[Tensor]:
        loss = F.cross_entropy((hidden @ weight.to(dtype).t()).float(), targets)
        return [loss, *torch.autograd.grad(loss, [hidden, weight])]

    return work


def _kernel_loss(shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device) -> Work:
    from flatout.kernels.rows import cross_entropy_

    hidden, weight, targets = _head(shape, tokens, dtype, device)

    def work() -> Sequence[Tensor]:
        loss = linear_cross_entropy(hidden, weight, targets, chunk=tokens, rows=cross_entropy_) / tokens
        return [loss, *torch.autograd.grad(loss, [hidden, weight])]

    return work


def _adapted(shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device, *, plain: bool) -> Work:
    """Gate and up with adapters on both, by the adapter's path or by the plain formula."""
    spec = Adapters(rank=16, alpha=32.0)
    adapter = Adapter(spec, shape, group="gate_up").to(device)
    with torch.no_grad():
        for seed, matrix in enumerate((adapter.a, adapter.b)):
            matrix.copy_(_random(tuple(matrix.shape), seed=seed, dtype=torch.float32, device=device) * 0.05)
    weight = 0.05 * _random((2 * shape.intermediate, shape.hidden), seed=2, dtype=dtype, device=device)
    x = _random((tokens, shape.hidden), seed=3, dtype=dtype, device=device).requires_grad_()

    def work() -> Sequence[Tensor]:
        if plain:
            y = F.linear(x, weight)
            parts = [spec.scale * linear(linear(x, a), b) for a, b in adapter.pairs().values()]
            y = y + torch.cat(parts, dim=1)
        else:
            y = adapter(x, weight, None)
        return [y, *torch.autograd.grad(y.float().square().mean(), [x, adapter.a, adapter.b])]

    return work


def _update(shape: ModelShape, device: torch.device, *, fused: bool) -> Work:
    def work() -> Sequence[Tensor]:
        model = Decoder(shape).to(device)
        model.initialise(0)
        optimizer = adamw(model, TrainSettings(lr=1e-3), fused=fused)
        one, zero = torch.ones((), device=device), torch.zeros((), device=device)
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = _random(tuple(parameter.shape), seed=i, dtype=torch.float32, device=device)
        for _ in range(3):
            if isinstance(optimizer, FusedAdamW):
                optimizer.step(lr=1e-3, divisor=one, skip=zero)
            else:
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    return work


def _random(size: tuple[int, ...], *, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the expected result; a NaN is an infinite difference."""
    a, b = found.detach().double(), expected.detach().double()
    share = float((a - b).norm() / b.norm().clamp(min=1e-12))
    return share if share == share else float("inf")


def faster(plain_s: Sequence[float], fast_s: Sequence[float]) -> tuple[float, bool]:
    """How many times as fast the second is, by the median of pairs; and whether that is noise.

    It is noise where a quarter of the pairs or more say the contrary of the others.
    """
    ratios = sorted(plain / fast for plain, fast in zip(plain_s, fast_s, strict=True))
    found = statistics.median(ratios)
    contrary = sum((ratio > 1) != (found > 1) for ratio in ratios)
    return found, 4 * contrary >= len(ratios) and len(ratios) > 1


def _in_turns(plain: Work, fast: Work, device: torch.device) -> tuple[list[float], list[float]]:
    """Times of both, in pairs whose order alternates, so that what else the machine does meets both alike."""
    taken: dict[int, list[float]] = {0: [], 1: []}
    for repeat in range(REPEATS):
        for which in (0, 1) if repeat % 2 == 0 else (1, 0):
            taken[which].append(_seconds((plain, fast)[which], device))
    return taken[0], taken[1]


def _seconds(work: Work, device: torch.device) -> float:
    """Waits for the device."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
