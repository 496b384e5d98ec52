"""The losses of a step: one per micro-batch, and whether they are parts of a mean already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .hooks import quietly
from .tensors import read_later

if TYPE_CHECKING:
    from .agent import Agent


class Losses:
    """What the script calls backward on, one value a micro-batch."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.values: list[Any] = []
        self.scalings: list[list[float]] = []  # of those losses, while warming up
        self.unscaled: tuple[Any, Any] = (None, None)  # what a GradScaler gave, and from what
        self.in_parts = False  # losses of micro-batches are parts of their mean already, and add up to it

    @quietly
    def note(self, tensors: Any) -> None:
        first = tensors if hasattr(tensors, "detach") else next(iter(tensors), None)
        scaled, plain_loss = self.unscaled
        self.unscaled = (None, None)
        if first is not None and first is scaled:
            first = plain_loss
        if first is not None and first.numel() == 1 and self.agent.is_training_thread() and len(self.values) < 4096:
            self.values.append(read_later(first.detach()))
            if self.agent.stage in ("waiting", "warm"):
                self.scalings.append(scalings_of(first))

    def take(self) -> list[Any]:
        """The losses of the step that ends; while warming up, whether they are divided by their number is found.

        Frameworks and most loops divide the loss by the number of micro-batches.
        """
        count = len(self.values)
        if count > 1 and len(self.scalings) == count:
            self.in_parts |= all(any(abs(by * count - 1) < 1e-3 for by in found) for found in self.scalings)
        taken, self.values, self.scalings = self.values, [], []
        return taken


def scalings_of(loss: Any) -> list[float]:
    """By how much a loss was scaled just before its backward pass: after the last operation, the last two, and so on.

    Only constants on the host count: reading another would wait for the device.
    """
    found: list[float] = []
    node = loss.grad_fn
    while node is not None and len(found) < 4 and node.name() in ("DivBackward0", "MulBackward0"):
        other = node._saved_other
        if other is None or other.is_cuda or other.requires_grad or other.numel() != 1 or not float(other):
            break
        by = 1 / float(other) if node.name().startswith("Div") else float(other)
        found.append(by * (found[-1] if found else 1.0))
        node = node.next_functions[0][0]
    return found
