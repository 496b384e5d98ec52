"""The operations of each phase of a training step, and the fewest bytes that it moves: what a roofline is drawn from.

A phase moves its inputs and outputs once: weights, the activations that the backward pass needs, logits, gradients,
moments. What single kernels read and write beside that stays out, so a phase's true intensity is at most this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flatout.cost import (
    ADDED_BYTES,
    BYTES,
    EIGHT_BYTES,
    LOGIT_PASSES,
    UPDATE_BYTES,
    Adapters,
    BlockPath,
    Flops,
    ModelShape,
    activation_bytes,
)

# AdamW with clipping, operations a weight: both moments, their corrections, the root, the decay, and the norm.
UPDATE_FLOPS = 18


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations, and the bytes that are moved for them."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


def phase_work(
    shape: ModelShape,
    *,
    flops: Flops,
    tokens: float,
    targets: float,
    micro_batches: int,
    precision: str,
    recompute: str,
    path: BlockPath,
    adapters: Adapters | None = None,
) -> Mapping[str, Work]:
    """A step of one device with the cross-entropy, by phase. The loss covers `targets` of the tokens.

    The gradients of the head are computed in the forward pass, while the logits exist.
    """
    width, learns = BYTES[precision], adapters is None
    trained = shape.num_parameters if adapters is None else adapters.num_parameters(shape)
    weights = shape.matmul_weights * (1 if path == "fp8" else width)
    if adapters is not None:
        weights = int(adapters.base_bytes(shape, precision=precision)) + width * trained
    head = 2 * shape.vocab * shape.hidden
    head_backward = head * (2 if learns else 1)
    kept = shape.layers * activation_bytes(shape, precision=precision, recompute=recompute, path=path)
    forward = Work(
        flops=tokens * (flops.forward - head) + targets * (head + head_backward),
        bytes=micro_batches * weights + tokens * kept + targets * LOGIT_PASSES[path] * width * shape.vocab,
    )
    again = 0
    if flops.recomputed:  # what a block computes again is written and read
        again = 2 * shape.layers * activation_bytes(shape, precision=precision, recompute="none", path=path)
    gradients = trained * (ADDED_BYTES if micro_batches > 1 else 4)
    backward = Work(
        flops=tokens * (flops.backward + flops.recomputed - head_backward),
        bytes=micro_batches * (weights * (2 if again else 1) + gradients) + tokens * (kept + again),
    )
    eight = EIGHT_BYTES * shape.matmul_weights if path == "fp8" else 0
    optimize = Work(flops=UPDATE_FLOPS * trained, bytes=UPDATE_BYTES * trained + eight)
    return {"forward": forward, "backward": backward, "optimize": optimize}
