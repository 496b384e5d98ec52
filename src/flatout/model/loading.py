"""Loads models with their weights, for every recipe and command.

Models are random, by the configuration's numbers; or from a folder or the hub in our decoder; or, if that cannot run
the architecture, as transformers builds them. The plan decides which: `shape.foreign` says why it is not ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flatout import hub
from flatout.config.settings import ModelSettings
from flatout.cost import Adapters, ModelShape
from flatout.errors import UsageError
from flatout.model import foreign, foreign_lora, lora, rope, weights
from flatout.model.decoder import Decoder
from flatout.model.foreign import Foreign
from flatout.plan import named_shape

Model = Decoder | Foreign


def load_model(
    model: ModelSettings,
    *,
    shape: ModelShape | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    trains: bool = True,
    note: Callable[[str], None] = lambda text: None,
) -> Model:
    """The model that a configuration names, its weights on the device in `dtype`: fp32 to train them, bf16 frozen.

    Without a shape, the model's config.json gives it. `note` gets a notice about each correction while loading. A model
    for inference only (`trains` false) may have any head.
    """
    shape = shape or named_shape(model)
    if model.name is None or (model.weights == "random" and not shape.foreign):
        return _random(shape, device=device, dtype=dtype, compute_dtype=compute_dtype, seed=seed)
    load = model.weights == "load"
    folder = hub.folder(model.name, weights=load, revision=model.revision, trust=model.trust)
    if shape.foreign:
        return foreign.load(
            folder,
            name=model.name,
            shape=shape,
            device=device,
            dtype=dtype,
            compute_dtype=compute_dtype,
            trust=model.trust,
            random_seed=None if load else seed,
            trains=trains,
        )
    return weights.load(folder, shape=shape, device=device, dtype=dtype, compute_dtype=compute_dtype, note=note)


def load_adapted(
    folder: Path | None,
    spec: Adapters,
    *,
    shape: ModelShape,
    device: torch.device,
    compute_dtype: torch.dtype,
    seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
    name: str | None = None,
    trust: str | None = None,
) -> Model:
    """Fresh adapters on the frozen weights of a folder, or on random ones.

    Every weight goes from its file to the device directly in its final type: no wider copy ever exists.
    """
    if shape.foreign:
        if folder is None:
            raise UsageError(f"adapters on random weights work only with flatout's own decoder: {shape.foreign}")
        adapted = foreign.load(
            folder,
            name=name,
            shape=shape,
            trust=trust,
            device=device,
            dtype=compute_dtype,
            compute_dtype=compute_dtype,
        )
        foreign_lora.attach(adapted, spec, seed=seed)
        return adapted.to(device)
    fill = None if folder is None else weights.filler(folder, shape=shape, note=note)
    model = lora.meta_decoder(shape, compute_dtype=compute_dtype)
    lora.freeze(model, device=device, base_bits=spec.base_bits, seed=seed, fill=fill)
    lora.attach(model, spec, seed=seed)
    return model


def empty_model(
    model: ModelSettings,
    *,
    shape: ModelShape,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """The model without its weights, to load a checkpoint into."""
    if not shape.foreign:
        with torch.device(device), weights.default_dtype(dtype):
            decoder = Decoder(shape, compute_dtype=dtype)
        decoder.frequencies.copy_(rope.frequencies(shape))
        return decoder
    settings = ModelSettings(name=model.name, weights="random", revision=model.revision, trust=model.trust)
    return load_model(settings, shape=shape, device=device, dtype=dtype, compute_dtype=dtype)


def export_model(model: Model, folder: Path, *, dtype: torch.dtype = torch.bfloat16, **extra: Any) -> None:
    """Writes a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads; `extra` goes into config.json."""
    if isinstance(model, Foreign):
        model.export(folder, dtype=dtype, **extra)
    else:
        weights.export(model, folder, dtype=dtype, **extra)


def _random(
    shape: ModelShape, *, device: torch.device | str, dtype: torch.dtype, compute_dtype: torch.dtype, seed: int
) -> Decoder:
    with torch.device(device), weights.default_dtype(dtype):
        model = Decoder(shape, compute_dtype=compute_dtype)
    model.initialise(seed)
    return model
