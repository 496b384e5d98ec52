"""Reads and writes PEFT's adapter files: `adapter_config.json` and `adapter_model.safetensors`.

`flatout export RUN --to DIR` writes them, `lora.adapter: DIR` starts from them. Safetensors and JSON only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from flatout import files
from flatout.cost import TARGETS, Adapters
from flatout.errors import UsageError
from flatout.hub import read_json, root_of
from flatout.model import lora, weights
from flatout.model.decoder import Decoder

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MODULES = {name: f"{'self_attn' if name in 'qkvo' else 'mlp'}.{name}_proj" for name in TARGETS}
_NAME = re.compile(r"base_model\.model\.model\.layers\.([0-9]{1,5})\.\w+\.(\w+)_proj\.lora_([AB])\.weight")
# PEFT settings that our adapters do not support, with the value that leaves them off.
UNSUPPORTED = {
    "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "layers_to_transform": None, "fan_in_fan_out": False, "trainable_token_indices": None, "layer_replication": None,
}  # fmt: skip
SAMPLED_BLOCKS, BLOCK_BYTES = 64, 1 << 16
_CHECKSUM = "flatout_sha256"


def save(
    model: Decoder, folder: Path, spec: Adapters, *, base: str | None, fingerprint: str | None, which: int = 0
) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` puts on the base model with equal logits.

    `which` is the adapter of a bank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in lora.adapters(model, which).items():
        layer, _, target = name.partition(".")
        prefix = f"base_model.model.model.layers.{layer}.{MODULES[target]}"
        tensors[f"{prefix}.lora_A.weight"] = a.detach().cpu().contiguous()
        tensors[f"{prefix}.lora_B.weight"] = b.detach().cpu().contiguous()
    # PEFT ignores unknown keys here; ours identify the base and detect damaged tensors.
    metadata = {"format": "pt", _CHECKSUM: _checksum(tensors)} | ({"flatout_base": fingerprint} if fingerprint else {})
    save_file(tensors, folder / TENSORS, metadata=metadata)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rslora,
        "target_modules": [f"{name}_proj" for name in spec.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2))


def read(folder: Path) -> Adapters:
    """The kind of adapters in a folder; unsupported settings are refused by name."""
    config = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        kind = repr(config.get("peft_type"))[:60]
        raise UsageError(f"{folder / CONFIG}: peft_type {kind} is not LORA, the only supported type")
    asked = [name for name, nothing in UNSUPPORTED.items() if (config.get(name) or nothing) != nothing]
    if asked:
        raise UsageError(f"{folder / CONFIG} sets {', '.join(asked)}, which flatout's adapters do not support")
    if missing := [name for name in ("r", "lora_alpha") if config.get(name) is None]:
        raise UsageError(f"{folder / CONFIG} does not set {' and '.join(missing)}, which its adapters need")
    names = _names(folder)
    found = {target for _, target, _ in names}
    try:
        spec = Adapters(
            rank=config["r"],
            alpha=config["lora_alpha"],
            targets=tuple(name for name in TARGETS if name in found),
            dropout=0.0 if config.get("lora_dropout") is None else config["lora_dropout"],
            rslora=False if config.get("use_rslora") is None else config["use_rslora"],
        )
    except UsageError as error:
        raise UsageError(f"{folder / CONFIG}: {error}") from None
    _require_rank(folder, names, rank=spec.rank)
    return spec


@torch.no_grad()
def load(model: Decoder, folder: Path, spec: Adapters, *, base: str | None, which: int = 0) -> None:
    """Loads a folder's adapters into a model with the same kind of adapters; nothing changes unless all fit.

    `which` is the adapter of a bank that they become.
    """
    theirs = read(folder)
    for name in ("rank", "targets", "rslora", "alpha"):
        if getattr(theirs, name) != getattr(spec, name):
            raise UsageError(
                f"{folder} has adapters of {name} {getattr(theirs, name)}, but this run has {getattr(spec, name)}: "
                f"set lora.{name} to the adapter's value"
            )
    ours = lora.adapters(model, which)
    names = _names(folder)
    wanted = {(int(layer), target) for layer, _, target in (key.partition(".") for key in ours)}
    if {(layer, target) for layer, target, _ in names} != wanted:
        raise UsageError(
            f"{folder} is an adapter of another base: it has {1 + max(layer for layer, _, _ in names)} layers, "
            f"the model has {model.shape.layers}"
        )
    if len(names) != 2 * len(wanted):
        raise UsageError(f"{folder / TENSORS} has {len(names)} matrices, but {len(wanted)} adapters need two each")
    values: dict[tuple[int, str, str], Tensor] = {}
    with weights.opened(folder / TENSORS) as file:
        metadata = file.metadata() or {}
        made_for = metadata.get("flatout_base")
        if made_for is not None and base is not None and made_for != base:
            raise UsageError(f"{folder} is an adapter of another base: its weights are not those of this model")
        for key, name in names.items():
            values[key] = file.get_tensor(name)
    checksum = _checksum({name: values[key] for key, name in names.items()})
    if metadata.get(_CHECKSUM, checksum) != checksum:
        raise UsageError(f"{folder / TENSORS} was changed after it was exported: export the adapter again")
    for (layer, target, side), value in values.items():
        into = ours[f"{layer}.{target}"][side == "B"]
        if into.shape != value.shape:
            raise UsageError(
                f"{folder} is an adapter of another base: {names[layer, target, side]} is {tuple(value.shape)}, "
                f"this model needs {tuple(into.shape)}"
            )
        if not value.is_floating_point() or not value.isfinite().all():
            kind = "of infinite or missing numbers" if value.is_floating_point() else f"of type {value.dtype}"
            raise UsageError(f"{folder / TENSORS}: {names[layer, target, side]} is {kind}: nothing can be added to it")
    for (layer, target, side), value in values.items():
        ours[f"{layer}.{target}"][side == "B"].copy_(value)


def fingerprint(folder: Path) -> str:
    """One hash of a model's weights, from samples of every file: enough to distinguish base models."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with files.opened(path, root=root_of(path)) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size}".encode())
            for i in range(SAMPLED_BLOCKS):
                file.seek(i * max(0, size - BLOCK_BYTES) // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _names(folder: Path) -> dict[tuple[int, str, str], str]:
    """(layer, target, A or B) to their tensor's name."""
    if not os.path.lexists(folder / TENSORS):
        raise UsageError(f"{folder} has no {TENSORS} (pickled adapters are not read)")
    with weights.opened(folder / TENSORS) as file:
        keys = list(file.keys())
    found = {}
    for key in keys:
        match = _NAME.fullmatch(key)
        if match is None or match[2] not in TARGETS:
            raise UsageError(
                f"{folder / TENSORS}: {key[:100]} matches no target of this decoder: targets are {', '.join(TARGETS)}"
            )
        found[int(match[1]), match[2], match[3]] = key
    if not found:
        raise UsageError(f"{folder / TENSORS} has no adapter")
    return found


def _require_rank(folder: Path, names: dict[tuple[int, str, str], str], *, rank: int) -> None:
    """Refuses a rank that the file's matrices do not have, before memory is allocated for that rank."""
    with weights.opened(folder / TENSORS) as file:
        shapes = weights.shapes_in(file)
    for (_, _, side), name in names.items():
        shape = shapes[name]
        if len(shape) != 2 or shape[side == "B"] != rank:
            raise UsageError(f"{folder / CONFIG} says r {rank}, but {name} in {TENSORS} has shape {shape}")
