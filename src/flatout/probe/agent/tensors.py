"""Tensors in the arguments and results of a forward pass, read without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def tensors_of(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Named tensors in a forward's arguments."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        yield "", value
    elif depth < 3 and hasattr(value, "items"):
        for key, item in value.items():
            for name, tensor in tensors_of(item, depth + 1):
                yield name or str(key), tensor
    elif depth < 3 and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item, depth + 1)


def mapped(value: Any, function: Callable[[Any], Any], depth: int = 0) -> Any:
    """The same arguments with every tensor replaced."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return function(value)
    if depth < 3 and type(value) in (dict, list, tuple):
        if isinstance(value, dict):
            return {key: mapped(item, function, depth + 1) for key, item in value.items()}
        return type(value)([mapped(item, function, depth + 1) for item in value])
    return value


def detached(tensor: Any) -> Any:
    """The same values without the graph that made them; a gradient is computed for it where one was."""
    return tensor.detach().requires_grad_(tensor.requires_grad) if hasattr(tensor, "detach") else tensor


class Batch:
    """Token ids and mask found in a forward's arguments."""

    def __init__(self, torch: Any, args: Any, kwargs: Any) -> None:
        named = list(tensors_of([args, kwargs]))
        whole = (torch.int64, torch.int32, torch.int16, torch.uint8)
        ids = [t for name, t in named if name in ("input_ids", "tokens", "idx")]
        ids += [t for name, t in named if t.dtype in whole and t.dim() == 2 and "mask" not in name]
        self.ids = ids[0] if ids and ids[0].dim() == 2 else None
        masks = [t for name, t in named if name in ("attention_mask", "mask", "padding_mask")]
        fits = [m for m in masks if self.ids is not None and m.shape == self.ids.shape]
        self.mask = fits[0] if fits else None
        first = next((t for _, t in named if t.dim() > 0), None)
        self.rows = None if first is None else int(first.shape[0])
        self.length = None if self.ids is None else int(self.ids.shape[1])

    def real_tokens(self, pad_id: int | None) -> Any:
        """How many tokens are no padding, as a tensor that is read later: no wait for the device here."""
        ids = self.ids
        if ids is None:
            return None
        if self.mask is not None:
            return (self.mask != 0).sum()
        if pad_id is not None:
            # Padding is a run at an end of the row; the same id inside it is text.
            same = ids == pad_id
            ends = same.flip(1).cumprod(1).sum() + same.cumprod(1).sum()
            return ids.numel() - ends
        # Unknown: a row's last id, repeated from some point on. Text repeats an id once or twice, padding for long.
        run = (ids == ids[:, -1:]).flip(1).cumprod(1).sum(1)
        return ids.numel() - (run * (run > 4)).sum()


def number(value: Any) -> float | None:
    """A late read of a scalar; None for what is none."""
    if value is None:
        return None
    try:
        return float(value)
    except Exception:
        return None


def read_later(value: Any) -> Any:
    """A scalar on its way to the host: reading a device tensor itself would wait for all that is queued before it."""
    if not getattr(value, "is_cuda", False):
        return number(value)
    return value.to("cpu", non_blocking=True)  # into pinned memory; whole once the step's last event has passed


def scalar_loss(torch: Any, out: Any) -> Any:
    """Something to call backward on: the loss where the model gives one, else the mean of what it puts out."""
    loss = getattr(out, "loss", None)
    found = [loss] if loss is not None else [t for _, t in tensors_of(out if isinstance(out, (tuple, list)) else [out])]
    if not found and hasattr(out, "values"):
        found = [t for _, t in tensors_of(dict(out))]
    useful = [t for t in found if t.is_floating_point() and t.requires_grad]
    if not useful:
        return None
    return min(useful, key=lambda t: t.dim() > 0).float().mean()
