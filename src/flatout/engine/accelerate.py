"""Fused segments and the fused loss in a live transformers model: `flatout.accelerate(model)`.

The modules of this one instance get a subclass of their class; `undo` gives them their class back. Weights stay the
parameters that they were, with the same names, so optimizers, checkpoints and `save_pretrained` notice nothing. The
weights of one fused projection are stored next to each other, as views of one matrix; where something moved them apart
again, they are joined in each pass. On a CPU the plain path of the same functions runs.

Legend: N tokens, C hidden width, H query heads, G key/value heads, D head width, F intermediate width, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.cost import ModelShape
from flatout.engine.resolve import no_triton, try_kernel
from flatout.errors import EnvironmentLacks, UsageError, first_line
from flatout.losses import IGNORED, linear_cross_entropy, row_loss
from flatout.model.decoder import linear, rms_norm, rotate
from flatout.words import counted

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# A fused layer is the same function, so it differs by rounding only.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
CHUNK_BYTES = 2**30  # of the logits that exist at a time
MARK = "_flatout"


@dataclass(kw_only=True)
class Accelerated:
    """What was changed in a model, and for the rest why not. `undo` restores the model."""

    changed: tuple[str, ...]
    why_not: dict[str, str]
    _modules: list[tuple[nn.Module, type]] = field(repr=False)
    _joined: list[list[nn.Parameter]] = field(repr=False)

    def undo(self) -> None:
        """Gives every module its class back, and every weight its own storage. A second call does nothing."""
        for module, original in self._modules:
            module.__class__ = original
            module.__dict__.pop(MARK, None)
        for parameters in self._joined:
            for parameter in parameters:
                parameter.data = parameter.data.clone()
        self._modules, self._joined = [], []

    def __str__(self) -> str:
        return "\n".join([*self.changed, *(f"not {name}: {why}" for name, why in self.why_not.items())])


class Paths:
    """Whether a kernel or its plain path runs on a device, tried once, when it is first needed there."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._problems: dict[tuple[str, torch.device, torch.dtype], str | None] = {}
        self._angles: tuple[Tensor, tuple[int, ...], tuple[Tensor, Tensor]] | None = None

    def problem(self, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the kernel does not run there."""
        key = (name, device, dtype)
        if key not in self._problems:
            # Under autocast, products of a kernel that is tried in fp32 would be in 16 bits.
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
                found = no_triton(device) or try_kernel(name, shape=self.shape, dtype=dtype, device=device)
            self._problems[key] = found
            if found and device.type == "cuda":
                warnings.warn(f"flatout.accelerate: the {name} kernel does not run here: {found}", stacklevel=2)
        return self._problems[key]

    def angles(self, cos: Tensor, sin: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`_flat` once for all layers of a pass, which get the same tensors."""
        size = tuple(hidden.shape[:2])
        if self._angles is None or self._angles[0] is not cos or self._angles[1] != size:
            self._angles = (cos, size, _flat(cos, sin, hidden))
        return self._angles[2]

    def fused(self, name: str, x: Tensor, dtype: torch.dtype) -> bool:
        return self.problem(name, x.device, dtype) is None


@dataclass(kw_only=True)
class Fused:
    """What a module needs beside its own attributes."""

    paths: Paths
    qkv: bool = False
    mlp: bool = False
    chunk: int = 0


def accelerate(model: Any, *, segments: bool = True, loss: bool = True) -> Accelerated:
    """Uses the fused segments and the fused loss in this instance of a Llama, Mistral, Qwen2 or Qwen3 of transformers.

    Call it when the model is on its device, after adapters were added and before it is wrapped or compiled. With labels
    and in training mode the model then returns its loss and no logits.
    """
    inner = _language_model(model)
    paths = Paths(_shape(inner))
    made = Accelerated(changed=(), why_not={}, _modules=[], _joined=[])
    changed: list[str] = []
    try:
        if segments:
            changed += _fuse_layers(inner, paths, made)
            changed += _fuse_norms(inner, paths, made)
            _require_same(inner)
        if loss:
            changed += _fuse_loss(inner, paths, made)
        if not changed:
            reasons = "; ".join(f"{name}: {why}" for name, why in made.why_not.items())
            raise UsageError(f"nothing in this {type(inner).__name__} can be accelerated: {reasons or 'nothing asked'}")
    except BaseException:
        made.undo()
        raise
    made.changed = tuple(changed)
    return made


def _language_model(model: Any) -> Any:
    """The transformers model inside, which PEFT may have wrapped; everything else is refused by name."""
    try:
        import transformers
    except ImportError:
        raise EnvironmentLacks("flatout.accelerate needs transformers: pip install 'flatout[hf]'") from None
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(inner).__name__
    known = [f"{family}ForCausalLM" for family in FAMILIES.values()]
    if isinstance(inner, nn.Module) and any(hasattr(module, MARK) for module in inner.modules()):
        raise UsageError("this model is accelerated already: call undo() of what flatout.accelerate returned first")
    if type(inner) not in [getattr(transformers, known_name) for known_name in known]:
        raise UsageError(
            f"flatout.accelerate knows {', '.join(known)} of transformers, but not {type(inner).__module__}.{name}: "
            "give it the model itself, before it is compiled or wrapped by anything but PEFT"
        )
    if len(set(getattr(inner, "hf_device_map", {}).values())) > 1:
        raise UsageError("this model is spread over several devices (hf_device_map): load it on one")
    empty = [name for name, parameter in inner.named_parameters() if parameter.is_meta or not parameter.numel()]
    if empty:
        raise UsageError(f"{empty[0]} has no values here (meta device or ZeRO-3): call it when the weights are loaded")
    return inner


def _shape(model: Any) -> ModelShape:
    config, attention = model.config, model.model.layers[0].self_attn
    return ModelShape(
        layers=len(model.model.layers),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        qk_norm=hasattr(attention, "q_norm"),
        qkv_bias=getattr(attention.q_proj, "bias", None) is not None,
        norm_eps=config.rms_norm_eps,
    )


def _fuse_layers(model: Any, paths: Paths, made: Accelerated) -> list[str]:
    """Fuses the segments of each layer where nothing else depends on the modules that are passed by."""
    count = {"qkv": 0, "mlp": 0}
    original = type(model.model.layers[0])
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        problem = None
        if type(layer) is not original or "forward" in layer.__dict__:
            problem = f"{type(layer).__name__} is not transformers' own layer"
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        head_norms = [attention.q_norm, attention.k_norm] if paths.shape.qk_norm else []
        no_qkv = problem or _no_bypass(qkv, [layer.input_layernorm, *head_norms], model)
        if no_qkv is None and len({linear.bias is None for linear in qkv}) > 1:
            no_qkv = "only some of q, k and v have a bias"
        no_mlp = problem or _no_bypass(
            [mlp.gate_proj, mlp.up_proj, mlp.down_proj], [layer.post_attention_layernorm], model
        )
        if no_mlp is None and any(part.bias is not None for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
            no_mlp = "its projections have biases"
        if no_mlp is None and model.config.hidden_act not in ("silu", "swish"):
            no_mlp = f"its activation is {model.config.hidden_act}, not silu"
        _note(made, "norm, qkv and rotary embeddings", no_qkv)
        _note(made, "norm and MLP", no_mlp)
        fused = Fused(paths=paths, qkv=no_qkv is None, mlp=no_mlp is None)
        if fused.qkv:
            count["qkv"] += 1
            _join(qkv, made)
            _become(attention, _Attention, made, Fused(paths=paths))
        if fused.mlp:
            count["mlp"] += 1
            _join([mlp.gate_proj, mlp.up_proj], made)
        if fused.qkv or fused.mlp:
            _become(layer, _Layer, made, fused)
    words = {"qkv": "norm, qkv projection and rotary embeddings", "mlp": "norm, gate, up, SwiGLU and down"}
    total = len(model.model.layers)
    dtype, device = model.model.layers[0].input_layernorm.weight.dtype, model.device
    return [
        f"{words[name]}: one function in {num} of {counted(total, 'layer')} ({_how(paths, name, device, dtype)})"
        for name, num in count.items()
        if num
    ]


def _fuse_norms(model: Any, paths: Paths, made: Accelerated) -> list[str]:
    """The norms that are not part of a segment."""
    norms = [model.model.norm]
    for layer in model.model.layers:
        fused = layer.__dict__.get(MARK)
        norms += [] if fused is not None and fused.qkv else [layer.input_layernorm]
        norms += [] if fused is not None and fused.mlp else [layer.post_attention_layernorm]
    own = f"{_family(model)}RMSNorm"
    plain = [norm for norm in norms if type(norm).__name__ == own and "forward" not in norm.__dict__]
    _note(made, "norms", f"{len(norms) - len(plain)} of them are not {own}" if len(plain) < len(norms) else None)
    for norm in plain:
        _become(norm, _Norm, made, Fused(paths=paths))
    dtype = model.model.norm.weight.dtype
    return [f"{counted(len(plain), 'norm')} ({_how(paths, 'mlp', model.device, dtype)})"] if plain else []


def _fuse_loss(model: Any, paths: Paths, made: Accelerated) -> list[str]:
    from transformers.loss.loss_utils import ForCausalLMLoss

    problem = _no_bypass([model.lm_head], [], model)
    if problem is None and model.lm_head.bias is not None:
        problem = "the head has a bias"
    if problem is None and model.loss_function is not ForCausalLMLoss:
        problem = f"its loss is {getattr(model.loss_function, '__name__', 'its own')}, not that of causal models"
    if problem is None and "forward" in model.__dict__:
        problem = "its forward was replaced by something else"
    _note(made, "loss", problem)
    if problem:
        return []
    weight = model.lm_head.weight
    chunk = max(1024, CHUNK_BYTES // (paths.shape.vocab * weight.element_size()) // 1024 * 1024)
    _become(model, _Model, made, Fused(paths=paths, chunk=chunk))
    return [f"head and loss: {chunk} rows of logits at a time ({_how(paths, 'loss', weight.device, weight.dtype)})"]


def _how(paths: Paths, name: str, device: torch.device, dtype: torch.dtype) -> str:
    problem = paths.problem(name, device, dtype)
    return "kernels" if problem is None else f"plain: {problem}"


def _note(made: Accelerated, what: str, problem: str | None) -> None:
    if problem is not None:
        made.why_not.setdefault(what, problem)


def _no_bypass(linears: Sequence[Any], norms: Sequence[Any], model: Any) -> str | None:
    """Why these modules cannot be passed by: something else would be left out with them."""
    for module in (*linears, *norms):
        kind = type(module)
        expected = kind is nn.Linear if module in linears else kind.__name__ == f"{_family(model)}RMSNorm"
        if not expected:
            return f"{kind.__module__}.{kind.__name__} is in the place of a plain module"
        if "forward" in module.__dict__:
            return f"the forward of a {kind.__name__} was replaced by something else"
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return f"a {kind.__name__} has hooks, which would not be called"
        if any(type(parameter.data) is not Tensor for parameter in module.parameters()):
            return f"the weights of a {kind.__name__} are distributed"
    if len({(module.weight.device, module.weight.dtype) for module in linears}) > 1:
        return "its weights differ in device or type"
    return None


def _family(model: Any) -> str:
    return FAMILIES[model.config.model_type]


def _become(module: nn.Module, mixin: Any, made: Accelerated, fused: Fused) -> None:
    """Gives one module a subclass of its class, and what that needs."""
    original = type(module)
    chosen: Any = original  # mypy does not take a class of modules for hashable
    module.__class__ = _subclass(chosen, mixin)
    module.__dict__[MARK] = fused
    made._modules.append((module, original))


@functools.cache
def _subclass(original: Any, mixin: Any) -> type:
    """With the name and the signature of the class: other code looks both up."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    same = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (original,), {**same, "_plain": original, "forward": forward})


def _join(linears: Sequence[nn.Linear], made: Accelerated) -> None:
    """Stores the weights of several projections next to each other, as views of one matrix."""
    for name in ("weight", "bias"):
        parameters = [getattr(linear, name) for linear in linears]
        if parameters[0] is None or len({id(parameter) for parameter in parameters}) < len(parameters):
            continue
        joined = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
        made._joined.append(parameters)


class _Joined(torch.autograd.Function):
    """Several matrices as one: a view where they are next to each other in memory, else a copy."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [len(part) for part in parts]
        first, total = parts[0].detach(), sum(len(part) for part in parts)
        if _adjacent(parts):
            return first.as_strided((total, *first.shape[1:]), first.stride())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradient.split(ctx.rows)
        return tuple(part if need else None for part, need in zip(parts, ctx.needs_input_grad, strict=True))


def _adjacent(parts: Sequence[Tensor]) -> bool:
    at = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or not part.is_contiguous():
            return False
        at += part.numel() * part.element_size()
    return len({part.untyped_storage().data_ptr() for part in parts}) == 1


def _joined(linears: Sequence[Any], name: str) -> Tensor | None:
    for module in linears:
        if type(module) is not nn.Linear:
            raise UsageError(
                f"a projection became {type(module).__name__} after flatout.accelerate: undo() first, then add "
                "adapters or quantise, then accelerate again"
            )
    parts = [getattr(module, name) for module in linears]
    if parts[0] is None:
        return None
    whole: Tensor = _Joined.apply(*parts)  # type: ignore[no-untyped-call]
    return whole


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _flat(cos: Tensor, sin: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """One row of angles per token; in transformers both halves of a head are there, and maybe one row per batch."""
    half = cos.shape[-1] // 2
    size = (*hidden.shape[:2], half)
    flat = [x[..., :half].float().expand(size).reshape(-1, 1, half).contiguous() for x in (cos, sin)]
    return flat[0], flat[1]


class _Attention:
    """`forward` of an attention module whose norm, projection and rotation are one function.

    With `norm`, which only an accelerated layer gives, the hidden states are those before that norm.
    """

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        *,
        norm: Any = None,
        **kwargs: Any,
    ) -> Any:
        if norm is None or position_embeddings is None:
            return self._plain.forward(
                self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
            )
        q, k, v = (x.transpose(1, 2) for x in _qkv(self, hidden_states, position_embeddings, norm))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        eager = sys.modules[self._plain.__module__].eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        dropout = self.attention_dropout if self.training else 0.0
        mixed, scores = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, sliding_window=window, **kwargs
        )
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1).contiguous()), scores


def _qkv(attention: Any, x_BTC: Tensor, angles: tuple[Tensor, Tensor], norm: Any) -> Iterator[Tensor]:
    """Queries, keys and values, each [B, T, heads, D]."""
    fused: Fused = attention._flatout
    shape, dtype = fused.paths.shape, _compute_dtype(x_BTC)
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight, bias = _joined(linears, "weight"), _joined(linears, "bias")
    assert weight is not None
    q_norm, k_norm = (attention.q_norm.weight, attention.k_norm.weight) if shape.qk_norm else (None, None)
    cos, sin = fused.paths.angles(*angles, x_BTC)
    x_NC = x_BTC.flatten(0, 1).contiguous()
    with torch.autocast(x_NC.device.type, enabled=False):
        if fused.paths.fused("qkv", x_NC, dtype):
            from flatout.kernels import segments

            found = segments.norm_qkv_rope(
                x_NC, None, norm.weight, weight, bias, q_norm, k_norm, cos, sin, eps=shape.norm_eps,
                heads=shape.heads, groups=shape.kv_heads, dtype=dtype,
            )[1:]  # fmt: skip
        else:
            heads = linear(rms_norm(x_NC, norm.weight, shape.norm_eps).to(dtype), weight, bias)
            parts = heads.view(len(x_NC), -1, shape.head_dim).split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
            q, k, v = parts
            if q_norm is not None and k_norm is not None:
                q, k = rms_norm(q, q_norm, shape.norm_eps), rms_norm(k, k_norm, shape.norm_eps)
            found = (rotate(q, cos, sin), rotate(k, cos, sin), v)
    return (part.unflatten(0, x_BTC.shape[:2]) for part in found)


class _Layer:
    """`forward` of a decoder layer with one or both segments fused."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values}
        given |= {"use_cache": use_cache, "position_embeddings": position_embeddings, **kwargs}
        if torch.compiler.is_compiling():  # the compiler fuses the plain layer itself
            plain: Tensor = self._plain.forward(self, hidden_states, **given)
            return plain
        fused: Fused = self._flatout
        if fused.qkv:
            delta, _ = self.self_attn(hidden_states=hidden_states, norm=self.input_layernorm, **given)
        else:
            delta, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
        if not fused.mlp:
            summed = hidden_states + delta
            whole: Tensor = summed + self.mlp(self.post_attention_layernorm(summed))
            return whole
        summed_NC, out_NC = _norm_mlp(self, hidden_states.flatten(0, 1).contiguous(), delta.flatten(0, 1).contiguous())
        return (summed_NC + out_NC).view_as(hidden_states)


def _norm_mlp(layer: Any, residual_NC: Tensor, delta_NC: Tensor) -> tuple[Tensor, Tensor]:
    fused: Fused = layer._flatout
    norm, mlp, eps = layer.post_attention_layernorm.weight, layer.mlp, fused.paths.shape.norm_eps
    gate_up = _joined((mlp.gate_proj, mlp.up_proj), "weight")
    _joined((mlp.down_proj,), "bias")  # is it still a plain projection?
    assert gate_up is not None
    dtype = _compute_dtype(residual_NC)
    with torch.autocast(residual_NC.device.type, enabled=False):
        if fused.paths.fused("mlp", residual_NC, dtype):
            from flatout.kernels import segments

            return segments.norm_mlp(residual_NC, delta_NC, norm, gate_up, mlp.down_proj.weight, eps=eps, dtype=dtype)
        summed_NC = residual_NC + delta_NC
        gate_NF, up_NF = linear(rms_norm(summed_NC, norm, eps).to(dtype), gate_up).chunk(2, dim=-1)
        return summed_NC, linear(F.silu(gate_NF) * up_NF, mlp.down_proj.weight)


class _Norm:
    """`forward` of an RMSNorm in one pass."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        fused: Fused = self._flatout
        if torch.compiler.is_compiling():
            plain: Tensor = self._plain.forward(self, hidden_states)
            return plain
        if not fused.paths.fused("mlp", hidden_states, hidden_states.dtype):
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        from flatout.kernels import segments

        x_NC = hidden_states.reshape(-1, hidden_states.shape[-1])
        return segments.norm(x_NC, None, self.weight, eps=self.variance_epsilon).view_as(hidden_states)


class _Model:
    """`forward` of the model with labels: the loss without the logits of all tokens, while it trains."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self._plain.forward).bind(self, *args, **kwargs).arguments
        given.pop("self")
        more = given.pop("kwargs", {})
        labels, keep = given.get("labels"), given.get("logits_to_keep", 0)
        whole = isinstance(keep, int) and keep == 0 and more.get("return_dict", True) is not False
        if labels is None or not self.training or not whole or torch.compiler.is_compiling():
            return self._plain.forward(self, **given, **more)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        body = {name: value for name, value in given.items() if name not in ("labels", "logits_to_keep")}
        out = self.model(**body, **more)
        return CausalLMOutputWithPast(
            loss=_loss(self, out.last_hidden_state, labels, more),
            logits=None,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )


def _loss(model: Any, hidden_BTC: Tensor, labels_BT: Tensor, more: Mapping[str, Any]) -> Tensor:
    """As transformers has it: shifted here unless `shift_labels` is given, over `num_items_in_batch` if it is known."""
    fused: Fused = model._flatout
    ignored = more.get("ignore_index", IGNORED)
    shifted = more.get("shift_labels")
    if shifted is None:
        shifted = F.pad(labels_BT, (0, 1), value=ignored)[..., 1:]
    targets_N = shifted.reshape(-1).to(hidden_BTC.device)
    if ignored != IGNORED:
        targets_N = torch.where(targets_N == ignored, IGNORED, targets_N)
    _joined((model.lm_head,), "bias")  # is it still a plain projection?
    dtype = _compute_dtype(hidden_BTC)
    with torch.autocast(hidden_BTC.device.type, enabled=False):
        hidden_NC, rows = hidden_BTC.flatten(0, 1).to(dtype), row_loss
        if fused.paths.fused("loss", hidden_NC, dtype):
            from flatout.kernels.rows import cross_entropy_ as rows
        total = linear_cross_entropy(hidden_NC, model.lm_head.weight, targets_N, chunk=fused.chunk, rows=rows)
    count = more.get("num_items_in_batch")
    if count is None:
        return total / (targets_N != IGNORED).sum()
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


@torch.no_grad()
def _require_same(model: Any) -> None:
    """Compares the first layer with the plain one on random states: a new transformers may compute something else."""
    layer = model.model.layers[0]
    if not hasattr(layer, MARK):
        return
    weight = layer.input_layernorm.weight
    generator = torch.Generator().manual_seed(0)
    # Small, so that the residual does not hide what is added to it: the norm does not depend on the scale.
    x = (0.02 * torch.randn(1, 16, len(weight), generator=generator)).to(weight.device, weight.dtype)
    positions = torch.arange(16, device=x.device)[None]
    options = {"position_ids": positions, "position_embeddings": model.model.rotary_emb(x, position_ids=positions)}
    training = layer.training
    layer.eval()  # no dropout
    try:
        with torch.autocast(x.device.type, enabled=False):
            expected, found = layer._plain.forward(layer, x, **options), layer(x, **options)
    except Exception as error:  # any error of another version is the answer
        raise UsageError(f"a fused {type(layer).__name__} does not run here: {first_line(error)}") from error
    finally:
        layer.train(training)
    apart = float((found - expected).float().norm() / (expected - x).float().norm())
    if not apart <= TOLERANCE.get(x.dtype, 1e-4):
        raise UsageError(
            f"a fused {type(layer).__name__} differs from the plain one by {apart:.2g}: transformers' version or this "
            "configuration computes something that flatout does not know"
        )
