"""The operations of each phase of a training step, and the bytes that it must move: what a roofline is drawn from.

A phase reads its inputs and writes its outputs: weights, the activations that the backward pass needs, logits,
gradients, moments. What its kernels read and write beside that is left out, so it never moves fewer bytes than these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flatout.cost import BYTES, NF4_BYTES, Adapters, BlockPath, Flops, ModelShape, activation_bytes

# AdamW with clipping, for each weight: both moments, their corrections, the root, the decay, and the norm.
UPDATE_FLOPS = 18
# It reads the gradient for the norm; then gradient, weight and moments; and writes the weight and the moments.
UPDATE_BYTES = 4 + 16 + 12
# Copies in 8 bits, by rows and by columns, are made of the fp32 weight.
EIGHT_BYTES = 4 + 2
# Logits are written and read, and so is their gradient.
LOGIT_PASSES = 4


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations, and the bytes that must be moved for them."""

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
    update_ranks: int = 1,
) -> Mapping[str, Work]:
    """A step of one device with the cross-entropy, by phase. The loss covers `targets` of the tokens.

    The gradients of the head are computed in the forward pass, while the logits exist. `update_ranks` divide the
    update among themselves.
    """
    width, head = BYTES[precision], shape.vocab * shape.hidden
    trained = shape.num_parameters if adapters is None else adapters.num_parameters(shape)
    blocks, heads = _weight_bytes(shape, width=width, path=path, adapters=adapters)
    # The first gradient of a weight is written; those of further micro-batches are added to it.
    each_gradient = 4 + 8 * (micro_batches - 1)
    head_gradient = head if adapters is None else 0
    head_flops, head_backward = 2 * head, 2 * (head + head_gradient)

    def kept(recompute: str) -> int:
        return shape.layers * activation_bytes(shape, precision=precision, recompute=recompute, path=path)

    # Recomputation reads the weights again, writes the activations that were not kept, and reads them.
    again = 2 * kept("none") if flops.recomputed else 0
    eight = EIGHT_BYTES * shape.layers * shape.block_matmul_weights if path == "fp8" else 0
    return {
        "forward": Work(
            flops=tokens * (flops.forward - head_flops) + targets * (head_flops + head_backward),
            bytes=micro_batches * (blocks + heads)
            + each_gradient * head_gradient
            + tokens * kept(recompute)
            + targets * LOGIT_PASSES * width * shape.vocab,
        ),
        "backward": Work(
            flops=tokens * (flops.backward + flops.recomputed - head_backward),
            bytes=micro_batches * blocks * (2 if again else 1)
            + each_gradient * (trained - head_gradient)
            + tokens * (kept(recompute) + again),
        ),
        "optimize": Work(
            flops=UPDATE_FLOPS * trained / update_ranks, bytes=(UPDATE_BYTES * trained + eight) / update_ranks
        ),
    }


def _weight_bytes(shape: ModelShape, *, width: int, path: BlockPath, adapters: Adapters | None) -> tuple[float, float]:
    """What reading the weights of the blocks takes, and those of the head."""
    blocks, head = shape.layers * shape.block_matmul_weights, shape.vocab * shape.hidden
    if path == "fp8":
        wide = shape.layers * shape.hidden * shape.q_width  # the attention's output projection stays in 16 bits
        return blocks + (width - 1) * wide, head
    if adapters is None:
        return width * blocks, width * head
    base = NF4_BYTES if adapters.base_bits == 4 else width
    return base * blocks + width * adapters.num_parameters(shape), width * head
