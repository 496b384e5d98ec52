"""Reads and writes weights in Hugging Face format. Its tensor names are used only in this file.

Our `qkv` and `gate_up` are their projections stacked along the output, in that order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flatout.cost import ModelShape
from flatout.errors import EnvironmentLacks, UsageError
from flatout.files import checked
from flatout.hub import read_json, root_of
from flatout.model import rope
from flatout.model.decoder import Decoder

SHARD_BYTES = 4 * 2**30
# The most rows by which a vocabulary may be padded, beyond twice the rows in the files.
MOST_PADDED = 1024
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _parts(shape: ModelShape) -> dict[str, list[tuple[str, int | None]]]:
    """Maps our parameters to their tensors in stacking order, with the rows of each (None: all of them)."""
    q, kv, ff = shape.q_width, shape.kv_width, shape.intermediate
    table: dict[str, list[tuple[str, int | None]]] = {
        "embedding": [(EMBEDDING, None)],
        "norm": [("model.norm.weight", None)],
    }
    if not shape.tied:
        table["head"] = [(HEAD, None)]
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
        if shape.out_bias:
            table[ours + "out_bias"] = [(attention + "o_proj.bias", None)]
        if shape.qk_norm:
            table[ours + "q_norm"] = [(attention + "q_norm.weight", None)]
            table[ours + "k_norm"] = [(attention + "k_norm.weight", None)]
    return table


def to_hf(state: Mapping[str, Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Our state under their names."""
    for ours, parts in _parts(shape).items():
        yield from _pieces(state[ours], parts)


def _pieces(tensor: Tensor, parts: list[tuple[str, int | None]]) -> list[tuple[str, Tensor]]:
    """Views of one of our tensors, each under the name of theirs."""
    if len(parts) == 1:
        return [(parts[0][0], tensor)]
    return list(zip((name for name, _ in parts), tensor.split([rows or 0 for _, rows in parts]), strict=True))


def load(
    folder: Path,
    *,
    shape: ModelShape | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    note: Callable[[str], None] = lambda text: None,
) -> Decoder:
    """Loads the weights of a Hugging Face folder (only config.json and safetensors) into our decoder.

    One tensor at a time goes from the file to the device, directly in its final type. Small deviations from
    config.json that have only one meaning are corrected and reported to `note`.
    """
    shape = shape or ModelShape.from_hf(read_json(folder / "config.json"))
    fill = filler(folder, shape=shape, note=note)
    with torch.device(device), default_dtype(dtype):
        model = Decoder(shape, compute_dtype=compute_dtype)
    model.frequencies.copy_(rope.frequencies(shape))  # from the host, as `initialise` has them
    for name, parameter in model.named_parameters():
        fill(name, parameter.data)
    return model


def filler(
    folder: Path, *, shape: ModelShape, note: Callable[[str], None] = lambda text: None
) -> Callable[[str, Tensor], None]:
    """Checks a folder against a shape, and returns a function that fills any of our parameters from it."""
    refuse_quantised(read_json(folder / "config.json"), folder)
    parts = _parts(shape)
    files = TensorFiles.of(folder)
    files.require([name for many in parts.values() for name, _ in many])
    with torch.device("meta"):  # every size is compared before memory is allocated
        for ours, parameter in Decoder(shape, compute_dtype=torch.float32).named_parameters():
            for name, piece in _pieces(parameter, parts[ours]):
                files.require_shape(name, piece.shape)
    if shape.tied:
        files.require_tied()
    elif HEAD not in files.file_of:
        note(f"{HEAD} is not in the files: the head starts as a copy of the embedding")

    def fill(ours: str, tensor: Tensor) -> None:
        for name, into in _pieces(tensor, parts[ours]):
            if name in (EMBEDDING, HEAD):
                _fill_rows(into, files.read(name), name=name, folder=folder, note=note)
            else:
                _fill(into, files.read(name), name=name, folder=folder)

    return fill


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Creates parameters directly in this type, never in a wider one first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def export(model: Decoder, folder: Path, *, dtype: torch.dtype = torch.bfloat16, **extra: Any) -> None:
    """Writes a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads; `extra` goes into config.json."""
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


def to_transformers(model: Decoder) -> Any:
    """The same weights, on the same device, in the model that transformers builds for this shape."""
    try:
        import transformers
    except ImportError:
        raise EnvironmentLacks("a model of transformers needs transformers: pip install 'flatout[hf]'") from None
    shape = model.shape
    config = transformers.AutoConfig.for_model(**hf_config(shape))
    with torch.device(model.embedding.device):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=model.compute_dtype)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    missing, unexpected = theirs.load_state_dict(dict(to_hf(state, shape)), strict=False)
    assert not unexpected
    assert set(missing) <= ({HEAD} if shape.tied else set())
    theirs.tie_weights()
    return theirs.eval()


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """The config.json that describes this shape to transformers."""
    kind, name = _architecture(shape)
    sliding: dict[str, Any] = {}
    if kind.startswith("qwen") and shape.window:
        layers = ["full_attention"] * shape.full_layers
        layers += ["sliding_attention"] * (shape.layers - shape.full_layers)
        sliding = {"use_sliding_window": True, "max_window_layers": shape.full_layers, "layer_types": layers}
    scaling: dict[str, Any] = shape.rope_scaling.to_json() if shape.rope_scaling else {"rope_type": "default"}
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
        "rope_parameters": {**scaling, "rope_theta": shape.rope_theta},
        # The same for versions of transformers that do not know `rope_parameters`.
        "rope_scaling": scaling if shape.rope_scaling else None,
        "sliding_window": shape.window,
        **sliding,
        "attention_bias": shape.out_bias,
    }


def _architecture(shape: ModelShape) -> tuple[str, str]:
    """The Hugging Face architecture of this shape; a shape without one is refused."""
    if shape.window and not shape.qk_norm and not shape.qkv_bias:
        return "mistral", "MistralForCausalLM"
    if shape.qk_norm:
        if shape.qkv_bias != shape.out_bias:
            raise UsageError(
                "qk_norm together with qkv_bias has no Hugging Face architecture: export needs one of them off"
            )
        return "qwen3", "Qwen3ForCausalLM"
    if shape.qkv_bias and not shape.out_bias:
        if shape.head_dim * shape.heads != shape.hidden:
            raise UsageError("qkv_bias with head_dim other than hidden / heads has no Hugging Face architecture")
        return "qwen2", "Qwen2ForCausalLM"
    return "llama", "LlamaForCausalLM"


def refuse_quantised(config: Mapping[str, Any], folder: Path) -> None:
    if quantised := config.get("quantization_config"):
        method = str(quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else quantised)[:60]
        raise UsageError(
            f"{folder} has weights quantised by {method}, which flatout does not read: give the original model"
        )


@dataclass(frozen=True, kw_only=True)
class TensorFiles:
    """Which safetensors file of a folder holds which tensor."""

    folder: Path
    file_of: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, folder: Path) -> TensorFiles:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if os.path.lexists(index):
            file_of = _listed(index)
            held: dict[str, tuple[int, ...]] = {}
            for path in sorted({*file_of.values()}):
                with opened(path) as file:  # a truncated file is reported before anything is read
                    held |= shapes_in(file)
            if absent := sorted(name for name in file_of if name not in held):
                raise UsageError(f"{index} lists the tensor{_several(absent)}, which none of its files has")
            return cls(folder=folder, file_of=file_of, shapes=held)
        if os.path.lexists(single):
            with opened(single) as file:
                shapes = shapes_in(file)
                return cls(folder=folder, file_of=dict.fromkeys(shapes, single), shapes=shapes)
        pickled = sorted(path.name for ending in ("bin", "pt", "pth") for path in folder.glob(f"*.{ending}"))
        but = f", only {', '.join(pickled[:3])}" if pickled else ""
        raise UsageError(
            f"{folder} has no model.safetensors{but}: pickled weights are not read, because opening them runs code; "
            "save the model as safetensors, as `save_pretrained` of transformers does"
        )

    def require(self, names: Sequence[str]) -> None:
        """Refuses a folder that lacks one of these tensors, or whose layers have an unknown one."""
        if missing := [name for name in names if name not in self.file_of and name != HEAD]:
            raise UsageError(f"{self.folder} lacks the tensor{_several(missing)} that its config.json implies")
        inside = (name for name in self.file_of if name.startswith("model.") and not name.endswith(".inv_freq"))
        if unknown := sorted({*inside} - {*names}):
            raise UsageError(f"{self.folder} has the tensor{_several(unknown)}, which its config.json does not imply")

    def require_shape(self, name: str, wanted: Sequence[int]) -> None:
        """Refuses a tensor that does not fit; a table with a row per token may be padded on either side."""
        name = EMBEDDING if name == HEAD and name not in self.file_of else name
        shape = self.shapes[name]
        table = name in (EMBEDDING, HEAD) and len(shape) == 2 and shape[0] > 0
        if tuple(wanted) != shape and not (table and shape[1] == wanted[1]):
            raise UsageError(f"{self.folder}: {name} has shape {shape}, but config.json needs {tuple(wanted)}")
        if table and wanted[0] > 2 * shape[0] + MOST_PADDED:
            raise UsageError(
                f"{self.folder}: {name} has {shape[0]} rows, but config.json a vocabulary of {wanted[0]}: "
                "that is more than padding"
            )

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def link(self, folder: Path) -> None:
        """Links these files, with an index of them, into a folder."""
        names = {path: f"model-{i:05}.safetensors" for i, path in enumerate(sorted({*self.file_of.values()}))}
        for path, name in names.items():
            (folder / name).symlink_to(path.resolve())
        index = {"metadata": {}, "weight_map": {tensor: names[path] for tensor, path in self.file_of.items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def require_tied(self) -> None:
        """Refuses a separate head if config.json says that it is tied to the embedding."""
        if HEAD in self.file_of and not torch.equal(self.read(HEAD), self.read(EMBEDDING)):
            raise UsageError(
                f"{self.folder}: config.json ties the head to the embedding, but {HEAD} differs from {EMBEDDING}: "
                'set "tie_word_embeddings" to false there to use both, or remove the wrong one'
            )

    def read(self, name: str) -> Tensor:
        """A tensor on the host, as it is in the file; a missing head is the embedding."""
        name = EMBEDDING if name == HEAD and name not in self.file_of else name
        with opened(self.file_of[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _listed(index: Path) -> dict[str, Path]:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UsageError(f"{index} has no weight_map, which says where each tensor is: download the model again")
    for file in {*map(str, listed.values())}:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UsageError(f"{index} names {file!r:.100}, which is not a safetensors file next to it")
    places = {name: index.parent / str(file) for name, file in listed.items()}
    if missing := sorted({path.name for path in places.values() if not os.path.lexists(path)}):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise UsageError(
            f"{index.parent} lacks {', '.join(missing[:5])}{more}, which {index.name} names: download the model again"
        )
    return places


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file of a model or an adapter; any fault is reported in one sentence."""
    try:
        with safe_open(checked(path, root=root_of(path)), framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise UsageError(f"{path} is a broken link: download it again") from None
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise UsageError(
            f"{path} is not a readable safetensors file ({size} bytes): {error}; download it again"
        ) from None


def shapes_in(file: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _several(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f" {shown}" if len(names) == 1 else f"s {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _fill(into: Tensor, tensor: Tensor, *, name: str, folder: Path) -> None:
    if tensor.shape != into.shape:
        raise UsageError(f"{folder}: {name} has shape {tuple(tensor.shape)}, config.json asks for {tuple(into.shape)}")
    if not tensor.is_floating_point():
        raise UsageError(f"{folder}: {name} is of type {tensor.dtype}: quantised weights are not read")
    into.copy_(tensor)


def _fill_rows(into: Tensor, tensor: Tensor, *, name: str, folder: Path, note: Callable[[str], None]) -> None:
    """Like `_fill`, for a table with a row per token, which may be padded in the file or in the model."""
    rows, vocab = tensor.shape[0], into.shape[0]
    both = min(rows, vocab)
    _fill(into[:both], tensor[:both], name=name, folder=folder)
    if rows > vocab:
        note(f"{name} has {rows} rows, but config.json a vocabulary of {vocab}: the last {rows - vocab} are left out")
    if rows < vocab:
        # The mean of all rows gives the mean of all logits, so an untrained token is never the likeliest.
        into[rows:] = tensor.float().mean(0).to(into.dtype)
        note(f"{name} has {rows} rows, but config.json a vocabulary of {vocab}: {vocab - rows} are the mean of all")
