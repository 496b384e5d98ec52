"""A bank of adapters: one pass over documents of many tasks equals a pass over each document with its own adapter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.cost import Adapters, ModelShape
from flatout.model import Attend, Decoder, Masked, Padded, Rectangular, lora
from flatout.model.nf4 import Nf4

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=96, positions=64)
BANK = Adapters(rank=4, alpha=8.0, names=("one", "two", "three"))
CPU = torch.device("cpu")
LENGTHS = (7, 12, 3, 9, 8, 9)
OWN = (0, 2, 1, 0, 1, 2)


def bank(spec: Adapters = BANK) -> Decoder:
    model = Decoder(SHAPE)
    model.initialise(3)
    lora.freeze(model, device=CPU, base_bits=spec.base_bits, seed=0)
    lora.attach(model, spec, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for which in range(spec.count):
            for _, b in lora.adapters(model, which).values():
                b.normal_(0.0, 0.1, generator=generator)
    return model


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 96, (length,), generator=generator) for length in lengths]


def weights_of(routing: str) -> Tensor:
    """The weight of each adapter for each document, with a gradient unless the routing is given."""
    own = torch.nn.functional.one_hot(torch.tensor(OWN), BANK.count).float()
    if routing == "oracle":
        return own
    logits = torch.randn(len(OWN), BANK.count, generator=torch.Generator().manual_seed(5))
    soft = logits.softmax(-1)
    if routing == "hard":  # straight through: the choice in the forward pass, the probabilities' gradient
        soft = torch.nn.functional.one_hot(soft.argmax(-1), BANK.count) + soft - soft.detach()
    return soft.detach().requires_grad_()


def in_one_pass(model: Decoder, mix: Tensor, layout: str) -> list[Tensor]:
    docs = documents()
    lengths = [len(doc) for doc in docs]
    if layout == "padded":  # to rectangles, one document in each row
        longest = max(lengths)
        tokens = torch.stack([torch.nn.functional.pad(doc, (0, longest - len(doc))) for doc in docs]).flatten()
        positions = torch.arange(longest).repeat(len(docs))
        attend: Attend = Rectangular(batch=len(docs))
        mix_NE = mix.repeat_interleave(longest, dim=0)
        hidden = model.hidden(tokens, positions, attend, mix_NE).view(len(docs), longest, -1)
        return [row[:length] for row, length in zip(hidden, lengths, strict=True)]
    tokens, positions = torch.cat(docs), torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    attend = Masked.of(ends, batch=1, length=len(tokens))
    if layout == "packed apart":
        attend = Padded.of(ends, tokens=len(tokens), longest=max(lengths), trim=True)
    mix_NE = mix.repeat_interleave(torch.tensor(lengths), dim=0)
    return list(model.hidden(tokens, positions, attend, mix_NE).split(lengths))


def one_by_one(model: Decoder, mix: Tensor) -> list[Tensor]:
    """Each document alone, through a plain model whose weights hold the document's mix of adapters."""
    found = []
    for doc, weights in zip(documents(), mix, strict=True):
        values: dict[str, Any] = dict(model.named_parameters())
        plain = Decoder(SHAPE)
        plain.frequencies = model.frequencies
        for i, block in enumerate(model.blocks):
            for group in lora.GROUPS:
                adapter, weight = block.adapters[group], getattr(block, group)
                dense = weight.dense(torch.float32) if isinstance(weight, Nf4) else weight
                for e in range(BANK.count):
                    dense = dense + weights[e] * adapter.scale * (adapter._wide(adapter.b[e]) @ adapter.a[e])
                values[f"blocks.{i}.{group}"] = dense
        mine = {name: values[name] for name, _ in plain.named_parameters()}
        call = (doc, torch.arange(len(doc)), Rectangular(batch=1), lambda hidden, _: hidden)
        found.append(torch.func.functional_call(plain, mine, call))
    return found


def gradients(found: list[Tensor], model: Decoder, mix: Tensor) -> dict[str, Tensor]:
    loss = sum((hidden.square() * torch.linspace(0, 1, hidden.shape[1])).sum() for hidden in found)
    learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}
    learnt |= {"mix": mix} if mix.requires_grad else {}
    return dict(zip(learnt, torch.autograd.grad(loss, list(learnt.values())), strict=True))  # type: ignore[arg-type]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


@pytest.mark.parametrize("base_bits", [16, 4])
@pytest.mark.parametrize("layout", ["padded", "packed", "packed apart"])
@pytest.mark.parametrize("routing", ["oracle", "hard", "soft"])
def test_a_mixed_pass_equals_one_by_one(routing: str, layout: str, base_bits: int) -> None:
    model, mix = bank(replace(BANK, base_bits=base_bits)), weights_of(routing)
    found, expected = in_one_pass(model, mix, layout), one_by_one(model, mix)
    assert max(relative(*pair) for pair in zip(found, expected, strict=True)) < 1e-5
    ours, theirs = gradients(found, model, mix), gradients(expected, model, mix)
    assert set(ours) == set(theirs)
    assert ("mix" in ours) == (routing != "oracle")
    assert max(relative(ours[name], theirs[name]) for name in ours) < 1e-5


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("routing", ["oracle", "hard", "soft"])
def test_the_kernels_equal_one_by_one(routing: str, recompute: Any) -> None:
    pytest.importorskip("triton")
    from functools import partial

    from flatout.kernels import segments

    model, mix = bank(), weights_of(routing)
    expected = one_by_one(model, mix)
    theirs = gradients(expected, model, mix)
    for block in model.blocks:
        block.recompute = recompute
        lora.stack_weights(block, "qkv", "gate_up", "down")
        block.qkv_kernel = partial(segments.norm_qkv_rope, eps=SHAPE.norm_eps, heads=4, groups=2)
        block.mlp_kernel = partial(segments.norm_mlp, eps=SHAPE.norm_eps)
    model.norm_kernel = partial(segments.norm, eps=SHAPE.norm_eps)
    found = in_one_pass(model, mix, "packed")
    assert max(relative(*pair) for pair in zip(found, expected, strict=True)) < 1e-5
    ours = gradients(found, model, mix)
    assert max(relative(ours[name], theirs[name]) for name in theirs) < 1e-5
    with torch.no_grad():  # without weights the bank is off, also beside stacked weights
        doc = documents()[0]
        off = model.hidden(doc, torch.arange(len(doc)), Rectangular(batch=1))
        plain = lora.alone(bank(), None).hidden(doc, torch.arange(len(doc)), Rectangular(batch=1))
    assert relative(off, plain) < 1e-5


def test_one_adapter_alone_is_that_of_the_bank() -> None:
    model, doc = bank(), documents()[1]
    at = (doc, torch.arange(len(doc)), Rectangular(batch=1))
    for which in range(BANK.count):
        mix = torch.nn.functional.one_hot(torch.full((len(doc),), which), BANK.count).float()
        alone = lora.alone(model, which)
        assert torch.allclose(alone.hidden(*at), model.hidden(*at, mix), atol=1e-6)
        assert not any(p.requires_grad for name, p in alone.named_parameters() if ".adapters." in name)
    with torch.no_grad():  # it follows the bank as it learns
        model.blocks[0].adapters["down"].b += 1.0
    mix = torch.nn.functional.one_hot(torch.zeros(len(doc), dtype=torch.int64), BANK.count).float()
    assert torch.allclose(lora.alone(model, 0).hidden(*at), model.hidden(*at, mix), atol=1e-5)


def test_dropout_of_a_bank_is_weighted_too() -> None:
    model, doc = bank(replace(BANK, dropout=1e-9)), documents()[1]
    at = (doc, torch.arange(len(doc)), Rectangular(batch=1))
    mix = torch.full((len(doc), BANK.count), 0.2)
    assert torch.allclose(model.hidden(*at, mix), bank().hidden(*at, mix), atol=1e-5)
