import pytest
import torch
import torch.nn.functional as F

from flatout.losses import linear_cross_entropy, linear_log_probs, row_loss


@pytest.mark.parametrize("chunk", [7, 16, 50, 64])
def test_equals_the_plain_loss_and_its_gradients(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 24, generator=generator, requires_grad=True)
    weight = torch.randn(33, 24, generator=generator, requires_grad=True)
    targets = torch.randint(0, 33, (50,), generator=generator)
    targets[::4] = -100
    plain = F.cross_entropy(hidden @ weight.t(), targets, ignore_index=-100, reduction="sum")
    plain_grads = torch.autograd.grad(plain / 37 * 1024, (hidden, weight))
    ours = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    our_grads = torch.autograd.grad(ours / 37 * 1024, (hidden, weight))
    torch.testing.assert_close(ours, plain)
    for one, other in zip(our_grads, plain_grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


def test_the_compiled_rows_equal_the_plain_ones() -> None:
    logits = torch.randn(9, 31, generator=torch.Generator().manual_seed(2))
    targets = torch.tensor([0, 30, -100, 5, 5, -100, 1, 2, 3])
    compiled = torch.compile(row_loss, fullgraph=True, dynamic=False, backend="aot_eager")
    for one, other in zip(compiled(logits.clone(), targets), row_loss(logits.clone(), targets), strict=True):
        torch.testing.assert_close(one, other)


def test_all_targets_ignored_is_zero_not_nan() -> None:
    hidden = torch.randn(8, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((8,), -100), chunk=4)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert hidden.grad.abs().max() == 0


def test_without_gradients_none_are_made() -> None:
    hidden, weight = torch.randn(8, 4), torch.randn(5, 4)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, torch.zeros(8, dtype=torch.long), chunk=4)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.t(), torch.zeros(8).long(), reduction="sum"))


def test_large_logits_stay_finite() -> None:
    hidden = torch.full((2, 4), 100.0, requires_grad=True)
    weight = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)) * 50
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 2]), chunk=2)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("chunk", [3, 8, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_by_chunks_equal_plain_ones_with_their_gradients(chunk: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, factor = (torch.randn(*size, generator=generator) for size in ((20, 6), (11, 6), (20,)))
    targets = torch.randint(0, 11, (20,), generator=generator)
    targets[::4] = -100
    trained = targets != -100
    found, expected = [], []
    for results, by_chunks in ((found, True), (expected, False)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if by_chunks:
            logp, entropy = linear_log_probs(h, w, targets, chunk=chunk, temperature=temperature)
        else:
            everything = (h @ w.t() / temperature).log_softmax(-1)
            logp = everything.gather(-1, targets.clamp(min=0)[:, None])[:, 0] * trained
            entropy = -(everything.exp() * everything).sum(-1) * trained
        # A function of the log-probabilities that is not linear, as a policy's loss.
        (logp.exp() * factor).sum().backward()
        results += [logp, entropy.detach(), h.grad, w.grad]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
