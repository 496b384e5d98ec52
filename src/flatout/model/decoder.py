"""The Llama/Qwen/SmolLM-family decoder: grouped heads, rotary positions, RMSNorm, SwiGLU.

It is token-flat: it takes N tokens with their positions and an `Attend`, and does not depend on the layout, whether
rectangles, packed documents or caches. Trainable weights stay fp32; `linear` casts them to the compute type where they
are used, so there is no autocast. A block passes on (residual, delta) rather than their sum, so that the addition fuses
with the next norm.

Legend: N tokens, C hidden width, H query heads, G key/value heads, D head width, F intermediate width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flatout.config.settings import Recompute
from flatout.cost import ModelShape
from flatout.model import rope
from flatout.model.attention import Attend, Sliding
from flatout.model.nf4 import Nf4, linear4

if TYPE_CHECKING:
    # (hidden_NC, head weight_VC) -> anything: losses by name, log-probabilities, logits.
    Head = Callable[[Tensor, Tensor], Any]

INIT_STD = 0.02

# The expensive operations: their results are kept when recomputation is selective.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _keep_expensive(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    keep = operation in _KEPT or str(operation).startswith("torch_attn._varlen_attn")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_expensive)


def linear(x: Tensor, weight: Tensor | Nf4, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Nf4):
        return linear4(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32 for any input type, as in Hugging Face's models."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def rotate(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotary positions, pairing dimension i with i + D/2 (the Hugging Face layout)."""
    first, second = x_NHD.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos_N1D - second * sin_N1D, second * cos_N1D + first * sin_N1D), dim=-1)
    return rotated.to(x_NHD.dtype)


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.q_width + 2 * shape.kv_width
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = nn.Parameter(torch.empty(width, shape.hidden))
        self.qkv_bias = nn.Parameter(torch.zeros(width)) if shape.qkv_bias else None
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim)) if shape.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim)) if shape.qk_norm else None
        self.out = nn.Parameter(torch.empty(shape.hidden, shape.q_width))
        self.out_bias = nn.Parameter(torch.zeros(shape.hidden)) if shape.out_bias else None
        self.mlp_norm = nn.Parameter(torch.ones(shape.hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * shape.intermediate, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.hidden, shape.intermediate))
        # Low-rank adapters by their projection, see `model.lora`.
        self.adapters = nn.ModuleDict()
        self.recompute: Recompute = "none"
        # Fused kernels for two segments of the body, set by `engine.prepare`.
        self.qkv_kernel: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
        self.mlp_kernel: Callable[..., tuple[Tensor, Tensor]] | None = None

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """`body`, its intermediates kept or recomputed in the backward pass."""
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.body(*inputs)
        # In the class, not around an instance, so that all blocks share one compiled graph. The RNG state is preserved
        # only for adapter dropout, because it cannot be read during CUDA graph capture.
        draws = any(adapter.dropout for adapter in self.adapters.values())
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
        if self.recompute == "selective":
            options["context_fn"] = selective_contexts
        kept: tuple[Tensor, Tensor] = checkpoint(self.body, *inputs, **options)
        return kept

    def body(
        self,
        residual_NC: Tensor,
        delta_NC: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        mix_NE: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`mix_NE` is the weight of each adapter of a bank for each token, see `model.lora`."""
        residual_NC, q_NHD, k_NGD, v_NGD = self.norm_qkv_rope(residual_NC, delta_NC, cos, sin, mix_NE)
        mixed_NHD = attend(q_NHD, k_NGD, v_NGD)
        delta_NC = self.project(mixed_NHD.flatten(1), "out", self.out_bias, mix_NE)
        return self.norm_mlp(residual_NC, delta_NC, mix_NE)

    def project(self, x: Tensor, name: str, bias: Tensor | None = None, mix_NE: Tensor | None = None) -> Tensor:
        """One of the four projections, with its adapter if it has one."""
        weight: Tensor | Nf4 = getattr(self, name)
        if name in self.adapters:
            out: Tensor = self.adapters[name](x, weight, bias, mix_NE)
            return out
        return linear(x, weight, bias)

    def low_rank(self, name: str, mix_NE: Tensor | None) -> tuple[Any, ...]:
        """(A, B, stacked weights, weights of a bank) of a projection's adapter, for the kernels; empty without one."""
        if not self.adapters:
            return ()
        if name not in self.adapters:
            return None, None, None, None
        adapter: Any = self.adapters[name]
        if adapter.is_off(mix_NE):
            return None, None, None, None
        assert adapter.stacked is not None, "kernels need an adapter with weights stacked by `lora.stack_weights`"
        return adapter.a, adapter.b, adapter.stacked, mix_NE

    def norm_qkv_rope(
        self, residual_NC: Tensor, delta_NC: Tensor | None, cos: Tensor, sin: Tensor, mix_NE: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream plus delta, and q, k, v with rotary positions."""
        if self.qkv_kernel is not None:
            weights = (self.attention_norm, self.qkv, self.qkv_bias, self.q_norm, self.k_norm)
            return self.qkv_kernel(residual_NC, delta_NC, *weights, cos, sin, *self.low_rank("qkv", mix_NE))
        s = self.shape
        if delta_NC is not None:
            residual_NC = residual_NC + delta_NC
        x_NC = rms_norm(residual_NC, self.attention_norm, s.norm_eps)
        heads = self.project(x_NC, "qkv", self.qkv_bias, mix_NE).view(x_NC.shape[0], -1, s.head_dim)
        q_NHD, k_NGD, v_NGD = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHD = rms_norm(q_NHD, self.q_norm, s.norm_eps)
            k_NGD = rms_norm(k_NGD, self.k_norm, s.norm_eps)
        return residual_NC, rotate(q_NHD, cos, sin), rotate(k_NGD, cos, sin), v_NGD

    def norm_mlp(self, residual_NC: Tensor, delta_NC: Tensor, mix_NE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The residual stream plus the attention output, and the output of the MLP."""
        if self.mlp_kernel is not None:
            lora = (*self.low_rank("gate_up", mix_NE), *self.low_rank("down", mix_NE))
            return self.mlp_kernel(residual_NC, delta_NC, self.mlp_norm, self.gate_up, self.down, *lora)
        residual_NC = residual_NC + delta_NC
        x_NC = rms_norm(residual_NC, self.mlp_norm, self.shape.norm_eps)
        gate_NF, up_NF = self.project(x_NC, "gate_up", mix_NE=mix_NE).chunk(2, dim=-1)
        return residual_NC, self.project(F.silu(gate_NF) * up_NF, "down", mix_NE=mix_NE)


class Decoder(nn.Module):
    def __init__(self, shape: ModelShape, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.embedding = nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = None if shape.tied else nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        # Chooses among the adapters of a bank, see `model.router`.
        self.router: nn.Module | None = None
        self.norm_kernel: Callable[..., Tensor] | None = None
        # The type of the residual stream, if kernels keep it in another than the compute type; see `sample.reader`.
        self.residual_dtype: torch.dtype | None = None
        self.frequencies: Tensor
        self.register_buffer("frequencies", rope.frequencies(shape).to(self.norm.device), persistent=False)
        self.amplitude = rope.amplitude(shape)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal weights; the two projections that write to the residual are scaled down with depth."""
        generator = torch.Generator(device=self.embedding.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            self.draw_(name, parameter, generator)
        self.frequencies.copy_(rope.frequencies(self.shape))

    def draw_(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Initialises one parameter randomly."""
        if name.endswith("norm"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            narrow = INIT_STD / (2 * self.shape.layers) ** 0.5
            parameter.normal_(0.0, narrow if name.endswith((".out", ".down")) else INIT_STD, generator=generator)

    def enter(self, tokens_N: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings in the compute type, and the cosine and sine of each token's position."""
        angles = positions_N[:, None, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.amplitude != 1.0:
            cos, sin = self.amplitude * cos, self.amplitude * sin
        return F.embedding(tokens_N, self.embedding).to(self.residual_dtype or self.compute_dtype), cos, sin

    def leave(self, residual_NC: Tensor, delta_NC: Tensor) -> Tensor:
        if self.norm_kernel is not None:
            return self.norm_kernel(residual_NC, delta_NC, self.norm)
        return rms_norm(residual_NC + delta_NC, self.norm, self.shape.norm_eps)

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, mix_NE: Tensor | None = None) -> Tensor:
        """The final, normalised hidden state of each token; under a bank, with the adapters weighted by `mix_NE`."""
        residual_NC, cos, sin = self.enter(tokens_N, positions_N)
        delta_NC: Tensor | None = None
        for layer, block in enumerate(self.blocks):
            within = attend.in_layer(layer) if isinstance(attend, Sliding) else attend
            residual_NC, delta_NC = block(residual_NC, delta_NC, cos, sin, within, mix_NE)
        assert delta_NC is not None
        return self.leave(residual_NC, delta_NC)

    def forward(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, head: Head, mix_NE: Tensor | None = None
    ) -> Any:
        """`head` gets the hidden states and the head's weight, so that the loss runs inside the root's forward."""
        hidden_NC = self.hidden(tokens_N, positions_N, attend, mix_NE)
        return head(hidden_NC, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding if self.head is None else self.head
