"""Pure loss functions over hidden states and the head's weight.

Legend: N tokens, C hidden width, V vocabulary, R rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORED = -100

# (logits_RV, targets_R) -> (summed loss, gradient of the logits)
RowLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def row_loss(logits_RV: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over rows, and softmax - one-hot; ignored rows give zero in both."""
    trained = (targets_R != IGNORED)[:, None]
    index = targets_R.clamp(min=0)[:, None]
    if torch.compiler.is_compiling():
        # One fused pass; a scatter would split it and write the fp32 logits out.
        x = logits_RV.float()
        log_norm = x.logsumexp(dim=-1, keepdim=True)
        loss = torch.where(trained, log_norm - x.gather(-1, index), 0.0).sum()
        gradient = (x - log_norm).exp() - (torch.arange(x.shape[-1], device=x.device) == index).float()
        return loss, (gradient * trained).to(logits_RV.dtype)
    # In place: one fp32 buffer of rows x vocabulary instead of five.
    log_p = logits_RV.log_softmax(dim=-1, dtype=torch.float32)
    loss = torch.where(trained, -log_p.gather(-1, index), 0.0).sum()
    gradient = log_p.exp_()
    gradient.scatter_add_(-1, index, torch.full_like(index, -1.0, dtype=torch.float32))
    return loss, gradient.mul_(trained).to(logits_RV.dtype)


def capped(rows: RowLoss, cap: float) -> RowLoss:
    """The loss of logits that are bounded first, as in Gemma 2: cap * tanh(logits / cap)."""

    def row_loss_capped(logits_RV: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        ratio = torch.tanh(logits_RV.float() / cap)
        loss, gradient = rows((cap * ratio).to(logits_RV.dtype), targets_R)
        return loss, (gradient * (1 - ratio**2)).to(logits_RV.dtype)

    return row_loss_capped


class _LinearCrossEntropy(torch.autograd.Function):
    """The head's matmul and cross-entropy, one chunk of rows at a time, so that all logits never exist at once.

    The gradients are computed in the forward pass, while a chunk's logits exist, and scaled in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunk: int, rows: RowLoss) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        weight = weight_VC.to(hidden_NC.dtype)
        grad_hidden = torch.empty_like(hidden_NC) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VC) if need_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_NC.device)
        for start in range(0, hidden_NC.shape[0], chunk):
            part = slice(start, start + chunk)
            hidden = hidden_NC[part]
            loss, gradient = rows(hidden @ weight.t(), targets_N[part])
            total += loss
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += gradient.t() @ hidden
            del gradient  # before the next chunk's logits are allocated
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # Scaled in place, because nothing else uses them. The factor stays on the device.
        grad_hidden = None if grad_hidden is None else grad_hidden.mul_(grad_total)
        grad_weight = None if grad_weight is None else grad_weight.mul_(grad_total)
        return grad_hidden, grad_weight, None, None, None


def linear_cross_entropy(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, *, chunk: int, rows: RowLoss = row_loss
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T` against the targets, summed over the targets that are not -100."""
    total: Tensor = _LinearCrossEntropy.apply(hidden_NC, weight_VC, targets_N, chunk, rows)  # type: ignore[no-untyped-call]
    return total


class _LinearLogProbs(torch.autograd.Function):
    """The head's matmul and the log-probability of each target, one chunk of rows at a time.

    The backward pass computes each chunk's logits again: what multiplies a log-probability is only known then.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunk: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        weight, rows = weight_VC.to(hidden_NC.dtype), hidden_NC.shape[0]
        logp, log_norm, entropy = (torch.empty(rows, device=hidden_NC.device) for _ in range(3))
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            x = (hidden_NC[part] @ weight.t()).float() / temperature
            log_norm[part] = x.logsumexp(dim=-1)
            logp[part] = x.gather(-1, targets_N[part].clamp(min=0)[:, None])[:, 0] - log_norm[part]
            x -= log_norm[part, None]
            entropy[part] = -(x.exp() * x).sum(dim=-1)
            del x
        trained = targets_N != IGNORED
        ctx.save_for_backward(hidden_NC, weight_VC, targets_N, log_norm)
        ctx.chunk, ctx.temperature = chunk, temperature
        entropy = torch.where(trained, entropy, 0.0)
        ctx.mark_non_differentiable(entropy)
        return torch.where(trained, logp, 0.0), entropy

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NC, weight_VC, targets_N, log_norm = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        weight = weight_VC.to(hidden_NC.dtype)
        grad_hidden = torch.empty_like(hidden_NC) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VC) if need_weight else None
        scale = torch.where(targets_N != IGNORED, grad_N, 0.0) / ctx.temperature
        for start in range(0, hidden_NC.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden = hidden_NC[part]
            x = (hidden @ weight.t()).float() / ctx.temperature
            gradient = (x - log_norm[part, None]).exp_().neg_()
            index = targets_N[part].clamp(min=0)[:, None]
            gradient.scatter_add_(-1, index, torch.ones_like(index, dtype=torch.float32))
            d_logits = gradient.mul_(scale[part, None]).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(d_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += d_logits.t() @ hidden
            del x, gradient, d_logits
        return grad_hidden, grad_weight, None, None, None


def linear_log_probs(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, *, chunk: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The log-probability of each target under `softmax(hidden @ weight.T / temperature)`, and the entropy there.

    Both are 0 where the target is -100. Only the log-probability has a gradient.
    """
    found: tuple[Tensor, Tensor] = _LinearLogProbs.apply(hidden_NC, weight_VC, targets_N, chunk, temperature)  # type: ignore[no-untyped-call]
    return found
