"""The two fused segments of a block, each a function with a hand-written gradient.

`norm_qkv_rope`: residual addition, RMSNorm, the qkv projection, rotary positions.
`norm_mlp`: residual addition, RMSNorm, gate and up, SwiGLU, down.

Each uses the compute type of the activations, or 8 bits for its matmuls when given the scales. Attention and its output
projection, which are between them, are left to the libraries.

Legend: N tokens, C hidden width, H query heads, G key/value heads, D head width, F intermediate width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.kernels import fp8, lowrank
from flatout.kernels.lowrank import weight_gradient
from flatout.kernels.norm import add_norm, add_norm_backward
from flatout.kernels.rope import norm_rotate, norm_rotate_back_, rotate_, rotate_back
from flatout.kernels.swiglu import swiglu, swiglu_backward


@dataclass(frozen=True, kw_only=True)
class Qkv8:
    """The scales and weights of the first segment for 8-bit matmuls."""

    x: fp8.Scale
    d_qkv: fp8.Scale
    weight: fp8.Weight


@dataclass(frozen=True, kw_only=True)
class Mlp8:
    """The scales and weights of the second segment for 8-bit matmuls."""

    x: fp8.Scale
    h: fp8.Scale
    d_out: fp8.Scale
    d_gate_up: fp8.Scale
    gate_up: fp8.Weight
    down: fp8.Weight


def _project(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Any, b: Any, stacked: lowrank.Stacked | None,
    mixed: lowrank.Mixed | None, *, buffer: Tensor | None = None, gaps: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """A projection, with its adapter if it has one; x A' of the adapter; the weight to save for the backward pass.

    `gaps` allows gaps after the rows of the result. A stacked weight is not saved: updates of the adapter next to it
    would count as in-place changes of it.
    """
    if stacked is None:
        return torch.nn.functional.linear(x, weight, bias), None, weight
    stacked.update(a, b)
    y, between = lowrank.forward(
        x, stacked.weight, bias, stacked.a, stacked.b, both=stacked.both, buffer=buffer, in_place=gaps, mixed=mixed
    )
    return y, between, None


def _mixed(mix: Tensor | None, a: Tensor | None, x: Tensor, *, learns: bool = False) -> lowrank.Mixed | None:
    """The weights of a bank's adapters, if the projection has one."""
    if mix is None or a is None:
        return None
    return lowrank.Mixed(mix, columns=a.shape[0] * a.shape[1], dtype=x.dtype, learns=learns)


def _project_back(
    dy: Tensor, x: Tensor, weight: Tensor | None, between: Tensor | None, stacked: lowrank.Stacked | None, kind: Any,
    mix: Tensor | None = None, raw: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of (x, the weight unless it is frozen, the adapter's two matrices if it has one, a bank's weights)."""
    if weight is None:
        assert stacked is not None
        assert between is not None
        mixed = None if mix is None else lowrank.Mixed(mix, columns=stacked.columns, dtype=x.dtype)
        dx, *found, d_mix = lowrank.backward(
            dy, x, between, stacked.weight, stacked.a, stacked.b, torch.float32, both=stacked.both, mixed=mixed, raw=raw
        )
        return dx, None, *stacked.gradients(*found), d_mix
    return dy @ weight, (None if kind is None else weight_gradient(dy, x, kind)), None, None, None


class _NormQkvRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor | None, norm: Tensor, weight: Tensor, bias: Tensor | None,
        q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, heads: int, groups: int,
        scales: Qkv8 | None, a: Tensor | None, b: Tensor | None, stacked: lowrank.Stacked | None, mix: Tensor | None,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:  # fmt: skip
        buffer = lowrank.input_buffer(residual, stacked)
        fp8_x = None if scales is None else scales.x
        summed, x, rstd = add_norm(residual, delta, norm, eps, into=buffer, fp8=fp8_x, dtype=dtype)
        if scales is None:
            cast = weight.to(x.dtype)
            bias_M = None if bias is None else bias.to(x.dtype)
            mixed = _mixed(mix, a, x, learns=ctx.needs_input_grad[16])
            qkv, between, cast = _project(x, cast, bias_M, a, b, stacked, mixed, buffer=buffer)
            kept = [x, cast, between, mix, mixed.raw if mixed else None]
        else:
            both = scales.weight.both
            qkv = fp8.matmul(x, both.rows, scales.x.inverse, both.inverse, dtype=residual.dtype, fast=True)
            kept = [fp8.transposed(x)]
        d = 2 * cos.shape[-1]
        parts = qkv.view(qkv.shape[0], -1, d).split([heads, groups, groups], dim=1)
        if q_norm is not None and k_norm is not None:
            turned, head_rstd = norm_rotate(qkv, q_norm, k_norm, cos, sin, eps, heads=heads, groups=groups)
            q, k = turned.view(qkv.shape[0], -1, d).split([heads, groups], dim=1)
            v = parts[2]
            kept += [qkv, head_rstd, q_norm, k_norm]
        else:
            rotate_(qkv, cos, sin, rotated_heads=heads + groups)
            q, k, v = parts
        ctx.save_for_backward(summed, rstd, norm, cos, sin, *kept)
        ctx.set_materialize_grads(False)
        trained = ctx.needs_input_grad
        ctx.scales, ctx.stacked = scales, stacked
        ctx.types = (weight.dtype if trained[3] else None, bias.dtype if bias is not None and trained[4] else None)
        ctx.has_delta, ctx.has_head_norms, ctx.heads, ctx.groups = delta is not None, q_norm is not None, heads, groups
        return (summed if delta is not None else None), q, k, v

    @staticmethod
    def backward(ctx: Any, d_summed: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
        summed, rstd, norm, cos, sin, *kept = ctx.saved_tensors
        scales, (weight_type, bias_type) = ctx.scales, ctx.types
        # With head norms the rotation is undone first, and 8 bits come after them.
        at_once = None if scales is None or ctx.has_head_norms else scales.d_qkv
        d_qkv = rotate_back(dq, dk, dv, cos, sin, fp8=at_once)
        d_q_norm = d_k_norm = d_bias = d_a = d_b = d_mix = None
        if ctx.has_head_norms:
            *kept, qkv, head_rstd, q_norm, k_norm = kept
            d_q_norm, d_k_norm = norm_rotate_back_(
                d_qkv, qkv, head_rstd, q_norm, k_norm, heads=ctx.heads, groups=ctx.groups
            )
        if scales is None:
            x, cast, between, mix, raw = kept
            dx, d_weight, d_a, d_b, d_mix = _project_back(d_qkv, x, cast, between, ctx.stacked, weight_type, mix, raw)
            if bias_type is not None:
                d_bias = d_qkv.sum(0, dtype=torch.float32).to(bias_type)
        else:
            (x_cols,) = kept
            both, inverse = scales.weight.both, scales.d_qkv.inverse
            if at_once is None:
                quantised = fp8.quantise(d_qkv, scales.d_qkv)
                d_rows, d_cols = quantised.rows, quantised.cols
            else:
                d_rows, d_cols = d_qkv, fp8.transposed(d_qkv)
            dx = fp8.matmul(d_rows, both.cols, inverse, both.inverse, dtype=summed.dtype, fast=True)
            d_weight = fp8.matmul(d_cols, x_cols, inverse, scales.x.inverse, dtype=weight_type, fast=False)
        d_input, d_norm = add_norm_backward(dx, d_summed, summed, rstd, norm, learns=ctx.needs_input_grad[2])
        d_delta = d_input if ctx.has_delta else None
        rest = (None,) * 6  # cos, sin, eps, heads, groups, scales
        return d_input, d_delta, d_norm, d_weight, d_bias, d_q_norm, d_k_norm, *rest, d_a, d_b, None, d_mix, None


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float,
        scales: Mlp8 | None, a1: Tensor | None, b1: Tensor | None, stacked1: lowrank.Stacked | None,
        mix1: Tensor | None, a2: Tensor | None, b2: Tensor | None, stacked2: lowrank.Stacked | None,
        mix2: Tensor | None, dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        buffer = lowrank.input_buffer(residual, stacked1)
        fp8_x = None if scales is None else scales.x
        summed, x, rstd = add_norm(residual, delta, norm, eps, into=buffer, fp8=fp8_x, dtype=dtype)
        if scales is None:
            wide, narrow = gate_up.to(x.dtype), down.to(x.dtype)
            mixed1 = _mixed(mix1, a1, x, learns=ctx.needs_input_grad[10])
            mixed2 = _mixed(mix2, a2, x, learns=ctx.needs_input_grad[14])
            hidden, between1, wide = _project(x, wide, None, a1, b1, stacked1, mixed1, buffer=buffer)
            h = swiglu(hidden)
            out, between2, narrow = _project(h, narrow, None, a2, b2, stacked2, mixed2, gaps=True)
            bank = (mix1, mix2, mixed1.raw if mixed1 else None, mixed2.raw if mixed2 else None)
            ctx.save_for_backward(summed, rstd, norm, x, hidden, h, wide, narrow, between1, between2, *bank)
        else:
            w, n, dtype = scales.gate_up.both, scales.down.both, residual.dtype
            hidden = fp8.matmul(x, w.rows, scales.x.inverse, w.inverse, dtype=dtype, fast=True)
            h = swiglu(hidden, fp8=scales.h)
            out = fp8.matmul(h, n.rows, scales.h.inverse, n.inverse, dtype=dtype, fast=True)
            ctx.save_for_backward(summed, rstd, norm, fp8.transposed(x), hidden, fp8.transposed(h))
        trained = ctx.needs_input_grad
        ctx.types = (gate_up.dtype if trained[3] else None, down.dtype if trained[4] else None)
        ctx.scales, ctx.stacked = scales, (stacked1, stacked2)
        ctx.set_materialize_grads(False)
        return summed, out

    @staticmethod
    def backward(ctx: Any, d_summed: Tensor | None, d_out: Tensor) -> tuple[Any, ...]:
        scales, (wide_type, narrow_type) = ctx.scales, ctx.types
        low1: list[Tensor | None] = [None] * 3
        low2: list[Tensor | None] = [None] * 3
        if scales is None:
            summed, rstd, norm, x, hidden, h, wide, narrow, between1, between2, *bank = ctx.saved_tensors
            mix1, mix2, raw1, raw2 = bank
            dh, d_down, *low2 = _project_back(d_out, h, narrow, between2, ctx.stacked[1], narrow_type, mix2, raw2)
            d_hidden = swiglu_backward(dh.contiguous(), hidden)
            dx, d_gate_up, *low1 = _project_back(d_hidden, x, wide, between1, ctx.stacked[0], wide_type, mix1, raw1)
        else:
            summed, rstd, norm, x_cols, hidden, h_cols = ctx.saved_tensors
            w, n, dtype = scales.gate_up.both, scales.down.both, summed.dtype
            d8 = fp8.quantise(d_out, scales.d_out)
            dh = fp8.matmul(d8.rows, n.cols, d8.inverse, n.inverse, dtype=dtype, fast=True)
            d_down = fp8.matmul(d8.cols, h_cols, d8.inverse, scales.h.inverse, dtype=narrow_type, fast=False)
            g, g_inverse = swiglu_backward(dh, hidden, fp8=scales.d_gate_up), scales.d_gate_up.inverse
            dx = fp8.matmul(g, w.cols, g_inverse, w.inverse, dtype=dtype, fast=True)
            d_gate_up = fp8.matmul(fp8.transposed(g), x_cols, g_inverse, scales.x.inverse, dtype=wide_type, fast=False)
        d_input, d_norm = add_norm_backward(dx, d_summed, summed, rstd, norm, learns=ctx.needs_input_grad[2])
        (d_a1, d_b1, d_mix1), (d_a2, d_b2, d_mix2) = low1, low2
        adapters = (d_a1, d_b1, None, d_mix1, d_a2, d_b2, None, d_mix2)
        return d_input, d_input, d_norm, d_gate_up, d_down, None, None, *adapters, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, dtype: torch.dtype | None
    ) -> Tensor:
        summed, x, rstd = add_norm(residual, delta, norm, eps, dtype=dtype)
        ctx.save_for_backward(summed, rstd, norm)
        ctx.has_delta = delta is not None
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        summed, rstd, norm = ctx.saved_tensors
        d_input, d_norm = add_norm_backward(dx.contiguous(), None, summed, rstd, norm, learns=ctx.needs_input_grad[2])
        return d_input, (d_input if ctx.has_delta else None), d_norm, None, None


def norm_qkv_rope(
    residual_NC: Tensor,
    delta_NC: Tensor | None,
    norm_C: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    stacked: lowrank.Stacked | None = None,
    mix_NE: Tensor | None = None,
    *,
    eps: float,
    heads: int,
    groups: int,
    scales: Qkv8 | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(residual + delta, q_NHD, k_NGD, v_NGD); views of the projection, or copies if q and k are normed.

    `a`, `b`, `stacked` and `mix_NE` are the projection's adapter or bank, see `lowrank`; a frozen weight gets no
    gradient. `dtype` is that of the matmuls if the residual has another.
    """
    n = residual_NC.shape[0]
    summed, q, k, v = _NormQkvRope.apply(
        residual_NC, delta_NC, norm_C, weight, bias, q_norm_D, k_norm_D, cos.view(n, -1), sin.view(n, -1), eps, heads,
        groups, scales if torch.is_grad_enabled() else None, a, b, stacked, mix_NE, dtype,
    )  # fmt: skip
    return (residual_NC if summed is None else summed), q, k, v


def norm_mlp(
    residual_NC: Tensor,
    delta_NC: Tensor,
    norm_C: Tensor,
    gate_up: Tensor,
    down: Tensor,
    a1: Tensor | None = None,
    b1: Tensor | None = None,
    stacked1: lowrank.Stacked | None = None,
    mix1_NE: Tensor | None = None,
    a2: Tensor | None = None,
    b2: Tensor | None = None,
    stacked2: lowrank.Stacked | None = None,
    mix2_NE: Tensor | None = None,
    *,
    eps: float,
    scales: Mlp8 | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(residual + delta, the MLP of its norm); adapters of gate and up first, then down's."""
    scales = scales if torch.is_grad_enabled() else None
    low = (a1, b1, stacked1, mix1_NE, a2, b2, stacked2, mix2_NE)
    summed, out = _NormMlp.apply(residual_NC, delta_NC, norm_C, gate_up, down, eps, scales, *low, dtype)
    return summed, out


def norm(
    residual_NC: Tensor, delta_NC: Tensor | None, norm_C: Tensor, *, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """RMSNorm of residual + delta, as at the end of a model."""
    x: Tensor = _Norm.apply(residual_NC, delta_NC, norm_C, eps, dtype)
    return x
