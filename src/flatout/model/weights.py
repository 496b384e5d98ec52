"""Weights in and out of Hugging Face format. Their names exist only in this file.

Our `qkv` and `gate_up` are their projections stacked along the output, in that order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flatout.cost import ModelShape
from flatout.errors import UsageError
from flatout.hub import read_json
from flatout.model.decoder import Decoder

SHARD_BYTES = 4 * 2**30


def _parts(shape: ModelShape) -> dict[str, list[tuple[str, int | None]]]:
    """Our parameter to their tensors in stacking order, with the rows of each (None: all of them)."""
    q, kv, ff = shape.q_width, shape.kv_width, shape.intermediate
    table: dict[str, list[tuple[str, int | None]]] = {
        "embedding": [("model.embed_tokens.weight", None)],
        "norm": [("model.norm.weight", None)],
    }
    if not shape.tied:
        table["head"] = [("lm_head.weight", None)]
    for i in range(shape.layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        table |= {
            ours + "attention_norm": [(theirs + "input_layernorm.weight", None)],
            ours + "mlp_norm": [(theirs + "post_attention_layernorm.weight", None)],
            ours + "qkv": [(f"{attention}{p}_proj.weight", n) for p, n in (("q", q), ("k", kv), ("v", kv))],
            ours + "out": [(attention + "o_proj.weight", None)],
            ours + "gate_up": [(mlp + "gate_proj.weight", ff), (mlp + "up_proj.weight", ff)],
            ours + "down": [(mlp + "down_proj.weight", None)],
        }
        if shape.qkv_bias:
            table[ours + "qkv_bias"] = [(f"{attention}{p}_proj.bias", n) for p, n in (("q", q), ("k", kv), ("v", kv))]
        if shape.qk_norm:
            table[ours + "q_norm"] = [(attention + "q_norm.weight", None)]
            table[ours + "k_norm"] = [(attention + "k_norm.weight", None)]
    return table


def to_hf(state: Mapping[str, Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Our state under their names."""
    for ours, parts in _parts(shape).items():
        if len(parts) == 1:
            yield parts[0][0], state[ours]
        else:
            pieces = state[ours].split([rows or 0 for _, rows in parts])
            yield from zip((name for name, _ in parts), pieces, strict=True)


def load(folder: Path, *, compute_dtype: torch.dtype = torch.float32) -> Decoder:
    """Our decoder with the weights of a Hugging Face folder (config.json and safetensors, nothing else)."""
    shape = ModelShape.from_hf(read_json(folder / "config.json"))
    model = Decoder(shape, compute_dtype=compute_dtype)
    files = _tensor_files(folder)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for ours, parts in _parts(shape).items():
            pieces = [_read(files, name, folder) for name, _ in parts]
            value = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            if value.shape != parameters[ours].shape:
                raise UsageError(
                    f"{folder}: {parts[0][0]} gives shape {tuple(value.shape)}, "
                    f"config.json asks for {tuple(parameters[ours].shape)}"
                )
            parameters[ours].copy_(value)
    return model


def export(model: Decoder, folder: Path, *, dtype: torch.dtype = torch.bfloat16, **extra: Any) -> None:
    """A folder that `transformers.AutoModelForCausalLM.from_pretrained` loads; `extra` goes into config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach() for name, p in model.named_parameters()}
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in to_hf(state, model.shape):
        copy = tensor.to("cpu", dtype, copy=True).contiguous()
        size += copy.nbytes
        if size > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = copy.nbytes
        shards[-1][name] = copy
    index: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(t.nbytes for shard in shards for t in shard.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)
    config = hf_config(model.shape) | {"dtype": str(dtype).removeprefix("torch.")} | extra
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """The config.json that describes this shape to transformers."""
    if shape.qk_norm and shape.qkv_bias:
        raise UsageError(
            "qk_norm together with qkv_bias has no Hugging Face architecture: export needs one of them off"
        )
    kind, name = "llama", "LlamaForCausalLM"
    if shape.qk_norm:
        kind, name = "qwen3", "Qwen3ForCausalLM"
    elif shape.qkv_bias:
        kind, name = "qwen2", "Qwen2ForCausalLM"
        if shape.head_dim * shape.heads != shape.hidden:
            raise UsageError("qkv_bias with head_dim other than hidden / heads has no Hugging Face architecture")
    return {
        "architectures": [name],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
    }


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / Path(file).name for name, file in read_json(index)["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise UsageError(f"{folder} has no model.safetensors (pickled weights are not read)")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{single} is no readable safetensors file: {error}") from None


def _read(files: Mapping[str, Path], name: str, folder: Path) -> Tensor:
    if name not in files:
        raise UsageError(f"{folder} lacks the tensor {name} that its config.json implies")
    try:
        with safe_open(files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{files[name]}: {name} cannot be read: {error}") from None
