"""Fused kernels for the segments of a decoder, each with a plain path it is tested equal to.

    norm.py     residual addition and RMSNorm, forward and backward in one pass each
    rope.py     query/key norms and rotary positions, in place
    lowrank.py  a frozen projection and its adapter, by library matmuls
    swiglu.py   silu(gate) * up and its gradient
    rows.py     cross-entropy of rows of logits and its gradient
    fp8.py      8-bit copies of matrices, their scales, and the matmuls on them
    segments.py what a block is made of: norm to qkv to rotary positions; norm to MLP
    head.py     the head's matmul and the loss

Nothing here is imported unless `engine.resolve` found that the device can run it. Kernels are written in Triton,
run eagerly, and need no compiler pass around them: with them there is nothing left to fuse in a block.
"""
