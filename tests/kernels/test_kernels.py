"""Every kernel against the plain path: by Triton's interpreter on a CPU, natively on a GPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")

from flatout.kernels import fp8, head, lowrank, norm, rope, rows, segments, swiglu
from flatout.losses import linear_cross_entropy, row_loss
from flatout.model import Masked, Short
from flatout.model.decoder import linear, rms_norm, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Activations beside 8-bit matmuls: as in training on a GPU; Triton's interpreter cuts bf16 off instead of rounding.
WIDE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return x.requires_grad_(grad)


def off(found: Tensor, expected: Tensor) -> float:
    """Relative difference."""
    a, b = found.detach().double(), expected.detach().double()
    return float((a - b).norm() / b.norm())


def scale(dtype: torch.dtype, value: float) -> fp8.Scale:
    one = torch.tensor(value, device=DEVICE)
    return fp8.Scale(dtype=dtype, scale=one, inverse=1 / one, amax=torch.zeros(4, device=DEVICE))


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize(("n", "c"), [(7, 48), (64, 96)])
def test_norm(with_delta: bool, n: int, c: int) -> None:
    residual, weight = random(n, c, grad=True), (1 + 0.1 * random(c, seed=1)).requires_grad_()
    delta = random(n, c, seed=2, grad=True) if with_delta else None
    summed = residual if delta is None else residual + delta
    expected = rms_norm(summed, weight, 1e-5)
    d_normed, d_summed = random(n, c, seed=3), random(n, c, seed=4)
    dx, dw = torch.autograd.grad([summed, expected], [residual, weight], [d_summed, d_normed])
    found_sum, found, rstd = norm.add_norm(residual.detach(), delta, weight.detach(), 1e-5)
    assert off(found_sum, summed) < 1e-6
    assert off(found, expected) < 1e-6
    given = (d_normed, d_summed, found_sum.detach(), rstd, weight.detach())
    found_dx, found_dw = norm.add_norm_backward(*given)
    assert found_dw is not None
    assert off(found_dx, dx) < 1e-6
    assert off(found_dw, dw) < 1e-6
    frozen, nothing = norm.add_norm_backward(*given, learns=False)
    assert torch.equal(frozen, found_dx)
    assert nothing is None


@torch.no_grad()
def test_a_residual_in_fp32_beside_16_bit_matmuls() -> None:
    n, c, heads, d, f = 7, 48, 3, 16, 64
    residual, delta, half = random(n, c), random(n, c, seed=2, dtype=torch.float16), torch.float16
    weight, qkv = 1 + 0.1 * random(c, seed=1), random(3 * heads * d, c, seed=3, dtype=half) / 8
    gate_up, down = random(2 * f, c, seed=4, dtype=half) / 8, random(c, f, seed=5, dtype=half) / 8
    turns = random(n, 1, d // 2, seed=6)
    exact = rms_norm(residual + delta.float(), weight, 1e-5)

    summed, normed, _ = norm.add_norm(residual, delta, weight, 1e-5, dtype=half)
    assert torch.equal(summed, residual + delta.float()), "nothing is rounded"
    assert normed.dtype == half
    assert off(normed, exact) < 1e-3
    assert segments.norm(residual, delta, weight, eps=1e-5, dtype=half).equal(normed)
    found, q, _, v = segments.norm_qkv_rope(
        residual, delta, weight, qkv, None, None, None, turns.cos(), turns.sin(), eps=1e-5, heads=heads, groups=heads,
        dtype=half,
    )  # fmt: skip
    heads_NHD = (exact @ qkv.float().t()).view(n, -1, d)
    assert found.equal(summed)
    assert {q.dtype, v.dtype} == {half}
    assert off(q, rotate(heads_NHD[:, :heads], turns.cos(), turns.sin())) < 2e-3
    assert off(v, heads_NHD[:, 2 * heads :]) < 2e-3
    found, out = segments.norm_mlp(residual, delta, weight, gate_up, down, eps=1e-5, dtype=half)
    gate, up = (exact @ gate_up.float().t()).chunk(2, dim=-1)
    assert found.equal(summed)
    assert out.dtype == half
    assert off(out, (F.silu(gate) * up) @ down.float().t()) < 3e-3


def test_norm_of_rows_with_gaps() -> None:
    n, c = 7, 48
    residual, delta, d_normed = (random(n, c, seed=seed) for seed in (0, 2, 3))
    weight = 1 + 0.1 * random(c, seed=1)
    summed, normed, rstd = norm.add_norm(residual, delta, weight, 1e-5)
    apart = [torch.full((n, c + 16), 9.0, device=DEVICE) for _ in range(3)]
    apart[0][:, :c], apart[1][:, :c] = delta, d_normed
    found_sum, found, found_rstd = norm.add_norm(residual, apart[0][:, :c], weight, 1e-5, into=apart[2])
    assert torch.equal(found_sum, summed)
    assert torch.equal(found, normed)
    assert torch.equal(found_rstd, rstd)
    assert torch.equal(apart[2], torch.cat((normed, torch.full((n, 16), 9.0, device=DEVICE)), dim=1))
    given = [norm.add_norm_backward(d, None, summed, rstd, weight) for d in (d_normed, apart[1][:, :c])]
    for expected, ours in zip(*given, strict=True):
        assert ours is not None
        assert expected is not None
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("columns", [16, 5])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (24, 24), (40, 24)])
def test_lowrank(inputs: int, outputs: int, columns: int) -> None:
    """In every layout: with room beside the input or not, in place or not, the weight at home or not."""
    n = 9
    sizes = ((n, inputs), (columns, inputs), (outputs, columns))
    x, a, b = (random(*size, seed=seed, grad=True) for seed, size in enumerate(sizes))
    weight, dy = random(outputs, inputs, seed=3), random(n, outputs, seed=4)
    expected = x @ weight.t() + 0.3 * (x @ a.t()) @ b.t()
    gradients = torch.autograd.grad(expected, [x, a, b], dy)
    given = [tensor.detach() for tensor in (x, a, b)]
    stacked = lowrank.Stacked(weight, [(outputs, 0)], rank=columns, scale=0.3)
    stacked.update(given[1][None], given[2][None])
    room = lowrank.input_buffer(given[0], stacked)
    assert (room is not None) == (outputs > inputs)
    assert torch.equal(stacked.weight, weight)
    layouts: list[dict[str, Any]] = [{}, {"in_place": True}, {"in_place": True, "both": stacked.both}]
    if room is not None:
        room[:, :inputs] = given[0]
        layouts.append({"buffer": room, "in_place": True, "both": stacked.both})
    for layout in layouts:
        taken = room[:, :inputs] if "buffer" in layout and room is not None else given[0]
        y, between = lowrank.forward(taken, weight, None, stacked.a, stacked.b, **layout)
        assert off(y, expected) < 1e-6
        at = (dy, taken, between, weight, stacked.a, stacked.b, torch.float32)
        dx, *learnt, d_mix = lowrank.backward(*at, both=layout.get("both"))
        d_a, d_b = stacked.gradients(*learnt)
        assert d_mix is None
        for ours, theirs in zip((dx, d_a[0], d_b[0]), gradients, strict=True):
            assert ours.shape == theirs.shape
            assert off(ours, theirs) < 1e-6


def test_an_adapter_of_some_parts_at_home() -> None:
    weight, a, b = random(12, 8), random(6, 8, seed=1), random(9, 3, seed=2)
    stacked = lowrank.Stacked(weight, [(4, 0), (3, None), (5, 1)], rank=3, scale=0.5)
    stacked.update(a[None], b[None])
    wide = torch.zeros(12, 6, device=DEVICE)
    wide[:4, :3], wide[7:, 3:] = 0.5 * b[:4], 0.5 * b[4:]
    assert torch.equal(stacked.b[:, :6], wide)
    assert not stacked.b[:, 6:].any()
    assert torch.equal(stacked.both, torch.cat((weight, stacked.b), dim=1))
    d_a, d_b = stacked.gradients(random(16, 8, seed=3), found := random(12, 16, seed=4))
    assert torch.equal(d_a[0], random(16, 8, seed=3)[:6])
    assert torch.equal(d_b[0], 0.5 * torch.cat((found[:4, :3], found[7:, 3:6])))


@pytest.mark.parametrize(("heads", "groups", "d"), [(4, 4, 16), (6, 2, 8)])
def test_rope(heads: int, groups: int, d: int) -> None:
    n, e = 9, d // 2
    qkv = random(n, (heads + 2 * groups) * d, grad=True)
    angles = random(n, 1, e, seed=1)
    cos, sin = angles.cos(), angles.sin()
    q, k, v = qkv.view(n, -1, d).split([heads, groups, groups], dim=1)
    plain = [rotate(q, cos, sin), rotate(k, cos, sin), v]
    gradients = [random(*x.shape, seed=i) for i, x in enumerate(plain)]
    (expected,) = torch.autograd.grad(plain, qkv, gradients)
    turned = qkv.detach().clone()
    rope.rotate_(turned, cos.view(n, e), sin.view(n, e), rotated_heads=heads + groups)
    assert off(turned, torch.cat([x.flatten(1) for x in plain], dim=1)) < 1e-6
    # As attention gives them: any layout with the head's width innermost, or even not that.
    gradients[0] = gradients[0].transpose(0, 1).contiguous().transpose(0, 1)
    gradients[1] = gradients[1].transpose(1, 2).contiguous().transpose(1, 2)
    assert off(rope.rotate_back(*gradients, cos.view(n, e), sin.view(n, e)), expected) < 1e-6


@pytest.mark.parametrize(("n", "f"), [(5, 40), (64, 128)])
def test_swiglu(n: int, f: int) -> None:
    both = random(n, 2 * f, grad=True)
    gate, up = both.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    dy = random(n, f, seed=1)
    (d_both,) = torch.autograd.grad(expected, both, dy)
    assert off(swiglu.swiglu(both.detach()), expected) < 1e-6
    assert off(swiglu.swiglu_backward(dy, both.detach()), d_both) < 1e-6


def targets_of(n: int, v: int) -> Tensor:
    targets = torch.randint(v, (n,), generator=torch.Generator().manual_seed(9))
    targets[::5] = -100
    return targets.to(DEVICE)


@pytest.mark.parametrize("v", [40, 5000])
def test_rows(v: int) -> None:
    logits, targets = 3 * random(11, v), targets_of(11, v)
    loss, gradient = row_loss(logits.clone(), targets)
    found_loss, found = rows.cross_entropy_(logits, targets)
    assert found.data_ptr() == logits.data_ptr()
    assert off(found_loss, loss) < 1e-6
    assert off(found, gradient) < 1e-5
    assert not found[targets == -100].any()


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize(("n", "m"), [(48, 80), (256, 192)])
def test_transposed_and_quantised(dtype: torch.dtype, n: int, m: int) -> None:
    x = random(n, m, dtype=dtype)
    s = scale(fp8.FORWARD, 16.0)
    both = fp8.quantise(x, s)
    assert float(s.amax.max()) == float(x.abs().max())
    expected = (x.float() * 16).clamp(-448, 448).to(fp8.FORWARD).float()
    assert off(both.rows.float(), expected) <= (0.0 if DEVICE == "cuda" else 0.1)
    assert torch.equal(both.cols.float(), both.rows.float().t())
    assert torch.equal(fp8.transposed(both.rows).float(), both.cols.float())


def test_saturates_instead_of_overflowing() -> None:
    s = scale(fp8.FORWARD, 1024.0)
    rows_ = fp8.quantise(random(16, 16), s).rows.float()
    assert torch.isfinite(rows_).all()
    assert rows_.abs().max() == 448


def test_scales_follow_what_was_seen_and_survive_what_is_not_finite() -> None:
    scales = fp8.Scales([fp8.FORWARD, fp8.BACKWARD, fp8.FORWARD], torch.device(DEVICE))
    fp8.quantise(3 * torch.ones(16, 16, device=DEVICE), scales[0])
    scales.amax[2, 0] = float("inf")
    scales.advance()
    # The largest power of two with 3 x scale x headroom within 448.
    assert [float(scales[i].scale) for i in range(3)] == [64.0, 1.0, 1.0]
    assert [float(scales[i].inverse) for i in range(3)] == [1 / 64, 1.0, 1.0]
    assert not scales.amax.any()
    # A spike is forgotten slowly, a larger value is taken in at once.
    fp8.quantise(30 * torch.ones(16, 16, device=DEVICE), scales[0])
    scales.advance()
    assert scales[0].scale == 4.0
    for _ in range(100):
        fp8.quantise(3 * torch.ones(16, 16, device=DEVICE), scales[0])
        scales.advance()
    assert scales[0].scale == 64.0


SHAPE = {"n": 32, "c": 64, "heads": 4, "groups": 2, "d": 16, "f": 96}


def qkv_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    s = SHAPE
    width = (s["heads"] + 2 * s["groups"]) * s["d"]
    return {
        "residual": random(s["n"], s["c"], dtype=dtype, grad=True),
        "delta": random(s["n"], s["c"], seed=1, dtype=dtype, grad=True),
        "norm": (1 + 0.1 * random(s["c"], seed=2)).requires_grad_(),
        "weight": (0.1 * random(width, s["c"], seed=3)).requires_grad_(),
        "bias": random(width, seed=4, grad=True),
        "q_norm": (1 + 0.1 * random(s["d"], seed=6)).requires_grad_(),
        "k_norm": (1 + 0.1 * random(s["d"], seed=7)).requires_grad_(),
    }


def angles() -> tuple[Tensor, Tensor]:
    a = random(SHAPE["n"], 1, SHAPE["d"] // 2, seed=5)
    return a.cos(), a.sin()


def plain_qkv(t: dict[str, Tensor], *, delta: bool, bias: bool, head_norms: bool = False) -> list[Tensor]:
    cos, sin = angles()
    summed = t["residual"] + t["delta"] if delta else t["residual"]
    x = rms_norm(summed, t["norm"], 1e-5)
    heads = linear(x, t["weight"], t["bias"] if bias else None).view(SHAPE["n"], -1, SHAPE["d"])
    q, k, v = heads.split([SHAPE["heads"], SHAPE["groups"], SHAPE["groups"]], dim=1)
    if head_norms:
        q, k = rms_norm(q, t["q_norm"], 1e-5), rms_norm(k, t["k_norm"], 1e-5)
    return [summed, rotate(q, cos, sin), rotate(k, cos, sin), v]


def fused_qkv(
    t: dict[str, Tensor], *, delta: bool, bias: bool, head_norms: bool = False, scales: segments.Qkv8 | None = None
) -> list[Tensor]:
    cos, sin = angles()
    return list(
        segments.norm_qkv_rope(
            t["residual"], t["delta"] if delta else None, t["norm"], t["weight"], t["bias"] if bias else None,
            t["q_norm"] if head_norms else None, t["k_norm"] if head_norms else None,
            cos, sin, eps=1e-5, heads=SHAPE["heads"], groups=SHAPE["groups"], scales=scales,
        )
    )  # fmt: skip


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    weights = [random(*x.shape, seed=20 + i, dtype=x.dtype) for i, x in enumerate(outputs)]
    return list(torch.autograd.grad(outputs, inputs, weights))


@pytest.mark.parametrize(
    ("delta", "bias", "head_norms"), [(True, True, False), (False, False, False), (True, False, True)]
)
def test_norm_qkv_rope(delta: bool, bias: bool, head_norms: bool) -> None:
    t = qkv_inputs(torch.float32)
    inputs = [t[k] for k in ("residual", "norm", "weight")] + [t["delta"]] * delta + [t["bias"]] * bias
    inputs += [t["q_norm"], t["k_norm"]] * head_norms
    asked = {"delta": delta, "bias": bias, "head_norms": head_norms}
    expected, found = plain_qkv(t, **asked), fused_qkv(t, **asked)
    for a, b in zip(found, expected, strict=True):
        assert off(a, b) < 1e-5
    for a, b in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert off(a, b) < 1e-5


def mlp_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    n, c, f = SHAPE["n"], SHAPE["c"], SHAPE["f"]
    return {
        "residual": random(n, c, dtype=dtype, grad=True),
        "delta": random(n, c, seed=1, dtype=dtype, grad=True),
        "norm": (1 + 0.1 * random(c, seed=2)).requires_grad_(),
        "gate_up": (0.1 * random(2 * f, c, seed=3)).requires_grad_(),
        "down": (0.1 * random(c, f, seed=4)).requires_grad_(),
    }


def plain_mlp(t: dict[str, Tensor]) -> list[Tensor]:
    summed = t["residual"] + t["delta"]
    gate, up = linear(rms_norm(summed, t["norm"], 1e-5), t["gate_up"]).chunk(2, dim=-1)
    return [summed, linear(F.silu(gate) * up, t["down"])]


def fused_mlp(t: dict[str, Tensor], scales: segments.Mlp8 | None = None) -> list[Tensor]:
    found = segments.norm_mlp(t["residual"], t["delta"], t["norm"], t["gate_up"], t["down"], eps=1e-5, scales=scales)
    return list(found)


def test_norm_mlp() -> None:
    t = mlp_inputs(torch.float32)
    expected, found = plain_mlp(t), fused_mlp(t)
    for a, b in zip(found, expected, strict=True):
        assert off(a, b) < 1e-5
    for a, b in zip(gradients(found, list(t.values())), gradients(expected, list(t.values())), strict=True):
        assert off(a, b) < 1e-5


def test_final_norm() -> None:
    t = mlp_inputs(torch.float32)
    inputs = [t["residual"], t["delta"], t["norm"]]
    expected = rms_norm(t["residual"] + t["delta"], t["norm"], 1e-5)
    found = segments.norm(t["residual"], t["delta"], t["norm"], eps=1e-5)
    assert off(found, expected) < 1e-6
    for a, b in zip(gradients([found], inputs), gradients([expected], inputs), strict=True):
        assert off(a, b) < 1e-5


# 8 bits: e4m3 rounds by at most 1/16 and e5m2 by 1/8, which averages out to a few percent of a matmul's result.
# Triton's interpreter cuts 8-bit values off instead of rounding them, so there the error has a bias.
EIGHT_BITS = 0.15 if DEVICE == "cuda" else 0.35


@pytest.mark.parametrize("head_norms", [True, False])
def test_qkv_in_8_bits_is_near_the_plain_path(head_norms: bool) -> None:
    t = qkv_inputs(WIDE)
    weight = fp8.Weight(t["weight"])
    fp8.Weight.refresh([t["weight"]], [weight])
    scales = segments.Qkv8(x=scale(fp8.FORWARD, 64.0), d_qkv=scale(fp8.BACKWARD, 1024.0), weight=weight)
    inputs = [t[k] for k in ("residual", "delta", "norm", "weight")]
    asked = {"delta": True, "bias": False, "head_norms": head_norms}
    expected, found = plain_qkv(t, **asked), fused_qkv(t, **asked, scales=scales)
    for a, b in zip(found, expected, strict=True):
        assert off(a, b) < EIGHT_BITS
    for a, b in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert off(a, b) < EIGHT_BITS
    assert scales.x.amax.max() > 0
    assert scales.d_qkv.amax.max() > 0
    with torch.no_grad():  # evaluation is not in 8 bits
        assert off(fused_qkv(t, **asked, scales=scales)[1], expected[1]) < 0.01


def test_mlp_in_8_bits_is_near_the_plain_path() -> None:
    t = mlp_inputs(WIDE)
    copies = [fp8.Weight(t["gate_up"]), fp8.Weight(t["down"])]
    fp8.Weight.refresh([t["gate_up"], t["down"]], copies)
    scales = segments.Mlp8(
        x=scale(fp8.FORWARD, 64.0), h=scale(fp8.FORWARD, 64.0), d_out=scale(fp8.BACKWARD, 1024.0),
        d_gate_up=scale(fp8.BACKWARD, 1024.0), gate_up=copies[0], down=copies[1],
    )  # fmt: skip
    expected, found = plain_mlp(t), fused_mlp(t, scales)
    for a, b in zip(found, expected, strict=True):
        assert off(a, b) < EIGHT_BITS
    for a, b in zip(gradients(found, list(t.values())), gradients(expected, list(t.values())), strict=True):
        assert off(a, b) < EIGHT_BITS


def test_loss_in_8_bits_is_near_the_plain_path() -> None:
    hidden, weight = random(32, 64, dtype=WIDE, grad=True), (0.1 * random(160, 64, seed=1)).requires_grad_()
    targets = targets_of(32, 160)
    expected = linear_cross_entropy(hidden, weight, targets, chunk=16) / 32
    eight = head.Head8(weight)
    fp8.Weight.refresh([weight], [eight.weight])
    found = head.linear_cross_entropy8(hidden, weight, targets, chunk=16, head=eight) / 32
    assert off(found, expected) < 0.01
    for a, b in zip(
        torch.autograd.grad(found, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight]), strict=True
    ):
        assert off(a, b) < EIGHT_BITS


@pytest.mark.parametrize(
    ("lengths", "heads", "groups", "d"),
    [([5, 1, 10], 3, 1, 16), ([33, 40, 23], 4, 2, 16), ([128, 70, 65, 64, 57], 2, 2, 32)],
)
def test_attention_inside_short_documents(lengths: list[int], heads: int, groups: int, d: int) -> None:
    n, longest = sum(lengths), max(lengths)
    # Views of one projection, and empty documents after the last, as in training.
    qkv = random(n, heads + 2 * groups, d)
    q, k, v = (x.detach().requires_grad_() for x in qkv.split([heads, groups, groups], dim=1))
    ends = torch.tensor([0, *lengths, 0, 0], dtype=torch.int32, device=DEVICE).cumsum(0).int()
    d_out = random(n, heads, d + 16, seed=1)[..., :d]
    results = []
    for attend in (Masked.of(ends[:-2], batch=1, length=n), Short(cu_seqlens=ends, longest=longest)):
        out = attend(q, k, v)
        results.append([out, *torch.autograd.grad(out, [q, k, v], d_out)])
    for expected, found in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert off(found, expected) < 1e-5
