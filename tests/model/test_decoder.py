"""Packed documents see only themselves, whichever path computes them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from flatout.cost import ModelShape
from flatout.model import Attend, Decoder, Masked, Padded, Rectangular, Short, Sliding, Varlen

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=90, positions=48)
LENGTHS = [[5, 13, 30], [48], [1, 1, 20, 26]]


def build(shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    model = Decoder(shape, compute_dtype=dtype).to(device)
    model.initialise(0)
    for parameter in model.parameters():
        parameter.data *= 3
    return model


def packed(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat = [n for row in LENGTHS for n in row]
    ends = torch.tensor([0, *flat], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    padded = torch.cat([ends, ends[-1:].repeat(5)])
    positions = torch.cat([torch.arange(n) for n in flat])
    tokens = torch.randint(0, SHAPE.vocab, (int(ends[-1]),), generator=torch.Generator().manual_seed(7))
    return tokens.to(device), positions.to(device), padded.to(device)


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden @ weight.to(hidden.dtype).t()


def alone(model: Decoder, tokens: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Each document in a forward pass of its own."""
    parts = []
    for document in tokens.split([n for row in LENGTHS for n in row]):
        positions = torch.arange(len(document), device=tokens.device)
        parts.append(model(document, positions, Rectangular(batch=1, window=window), logits))
    return torch.cat(parts)


def plain_attends(ends: torch.Tensor, window: int | None = None) -> list[Attend]:
    """Those for packed documents that run anywhere; empty documents may follow the last."""
    more = torch.cat((ends, ends[-1:], ends[-1:]))
    padded = [Padded.of(more, tokens=int(ends[-1]), longest=48, trim=trim, window=window) for trim in (False, True)]
    return [Masked.of(ends, batch=len(LENGTHS), length=48, window=window), *padded]


ATTENDS = pytest.mark.parametrize("which", [0, 1, 2], ids=["masked", "padded", "trimmed"])


@ATTENDS
@pytest.mark.parametrize("window", [None, 5])
def test_a_packed_document_has_the_logits_it_has_alone(which: int, window: int | None) -> None:
    model = build()
    tokens, positions, ends = packed()
    attend = plain_attends(ends, window)[which]
    with torch.no_grad():
        together = model(tokens, positions, attend, logits)
        apart = alone(model, tokens, window)
        mixed = model(tokens, positions, Rectangular(batch=len(LENGTHS)), logits)
    assert (together - apart).abs().max() < 1e-4
    assert (mixed - apart).abs().max() > 1e-2, "without the mask documents do see each other"


@ATTENDS
@pytest.mark.parametrize("window", [None, 5])
def test_gradients_of_packed_documents_equal_those_alone(which: int, window: int | None) -> None:
    tokens, positions, ends = packed()
    gradients = []
    for run in (
        lambda m: m(tokens, positions, plain_attends(ends, window)[which], logits),
        lambda m: alone(m, tokens, window),
    ):
        model = build()
        run(model).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_initialisation_is_seeded_and_scaled() -> None:
    one, same, other = build(), build(), Decoder(SHAPE)
    other.initialise(1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.embedding, other.embedding)
    block = other.blocks[0]
    assert block.qkv.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.down.std().item() == pytest.approx(0.02 / (2 * SHAPE.layers) ** 0.5, rel=0.05)


def test_a_block_compiles_whole_with_every_attend() -> None:
    tokens, positions, ends = packed()
    rectangular = Rectangular(batch=len(LENGTHS))
    within = replace(rectangular, window=5)
    sliding = Sliding(full=rectangular, within=within, full_layers=1)
    for attend in (rectangular, within, sliding, *plain_attends(ends)):
        model = build()
        torch.compiler.reset()  # graphs of one class's blocks are counted together, whichever test made them
        with torch.no_grad():
            plain = model(tokens, positions, attend, logits)
            for block in model.blocks:
                block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
            compiled = model(tokens, positions, attend, logits)
        torch.testing.assert_close(plain, compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [Varlen, Short, partial(Varlen, window=5)], ids=["varlen", "short", "window"])
def test_the_kernels_for_packed_documents_equal_the_mask(kernel: Callable[..., Varlen | Short]) -> None:
    model = build(dtype=torch.bfloat16, device="cuda")
    tokens, positions, ends = packed("cuda")
    outputs, gradients = [], []
    fast = kernel(cu_seqlens=ends, longest=48)
    masked = Masked.of(ends, batch=len(LENGTHS), length=48, window=getattr(fast, "window", None))
    for attend in (masked, fast):
        model.zero_grad()
        out = model(tokens, positions, attend, logits)
        out.float().square().mean().backward()
        outputs.append(out.float())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (outputs[0] - outputs[1]).norm() / outputs[0].norm() < 1e-2
    assert (gradients[0] - gradients[1]).norm() / gradients[0].norm() < 2e-2


@pytest.mark.long
def test_a_compiled_block_has_the_gradients_of_a_plain_one() -> None:
    tokens, positions, _ = packed()
    gradients = []
    for compiled in (False, True):
        model = build()
        torch.compiler.reset()
        if compiled:
            for block in model.blocks:
                block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        model(tokens, positions, Rectangular(batch=len(LENGTHS)), logits).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gradient_with_gaps_does_not_spoil_later_ones(device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    for gap in (16, 0):
        inputs = [torch.randn(16, heads, 16, generator=generator).to(device, dtype) for heads in (2, 1, 1)]
        given = torch.randn(16, 32 + gap, generator=generator).to(device, dtype)[:, :32].unflatten(1, (2, 16))
        found = []
        for kind in (dtype, torch.float32):
            leaves = [x.to(kind).detach().requires_grad_() for x in inputs]
            Rectangular(batch=2, repeat_kv=True)(*leaves).backward(given if kind == dtype else given.float())
            found.append(torch.cat([x.grad.float().flatten() for x in leaves]))
        assert (found[0] - found[1]).norm() / found[1].norm() < 2e-2, gap
