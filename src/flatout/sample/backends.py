"""Who samples: our own sampler on our own decoder, `generate` of transformers on any model, or vLLM."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from pathlib import Path
from typing import Literal, Protocol, get_args

from flatout.cost import Adapters
from flatout.data.tokenizer import Tokenizer
from flatout.errors import UsageError
from flatout.model import Decoder, Foreign, Model, lora, peft, weights
from flatout.model.loading import export_model
from flatout.sample.generate import Generator
from flatout.sample.hf import HuggingFace
from flatout.sample.request import Sampler
from flatout.sample.vllm import Vllm, imported

Backend = Literal["auto", "flatout", "hf", "vllm"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class Askable(Protocol):
    """What a sampler is made of; a model that is being trained has no folder."""

    @property
    def model(self) -> Model: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def folder(self) -> Path | None:
        """Hugging Face's, with these very weights, or those under the adapters."""
        ...

    @property
    def adapters(self) -> Adapters | None: ...


def backend_of(name: str) -> Backend:
    """A backend by its name; whether it can be had here is told before a model is loaded."""
    for known in BACKENDS:
        if name == known:
            if known == "vllm":
                imported()
            return known
    raise UsageError(f"--backend {name!r} must be one of {', '.join(BACKENDS)}")


def sampler_of(opened: Askable, *, backend: Backend = "auto", rows: int | None = None) -> Sampler:
    """`auto`: ours for our decoder, transformers' for what only that can run."""
    model, tokenizer = opened.model, opened.tokenizer
    if backend == "vllm":
        return _vllm(opened, rows=rows)
    if isinstance(model, Foreign):
        if backend == "flatout":
            raise UsageError(f"--backend flatout runs our own decoder only, take hf: {model.shape.foreign}")
        return HuggingFace(
            model.inner, tokenizer, window=model.shape.positions, compute_dtype=model.compute_dtype, rows=rows
        )
    if backend == "hf":
        return HuggingFace(weights.to_transformers(_merged(model)), tokenizer, window=model.shape.positions, rows=rows)
    return Generator(model, tokenizer, rows=rows)


def _merged(model: Decoder) -> Decoder:
    """A copy without adapters, as transformers knows none of ours."""
    plain = copy.deepcopy(model)
    lora.merge(plain)
    return plain


def _vllm(opened: Askable, *, rows: int | None) -> Sampler:
    """On the folder the weights came from; what has none is written to one that goes with this process."""
    model, adapters, folder, adapter = opened.model, opened.adapters, opened.folder, None
    dtype = str(model.compute_dtype).removeprefix("torch.")
    if folder is None:
        folder = _passing()
        export_model(model, folder, dtype=model.compute_dtype, eos_token_id=opened.tokenizer.eos_id)
        opened.tokenizer.save(folder)
    elif adapters is not None and isinstance(model, Decoder):
        adapter = _passing()
        peft.save(model, adapter, adapters, base=str(folder), fingerprint=None)
    return Vllm(
        folder,
        opened.tokenizer,
        window=model.shape.positions,
        vocab=model.shape.vocab,
        dtype=dtype,
        adapter=adapter,
        rank=adapters.rank if adapters else None,
        rows=rows,
    )


def _passing() -> Path:
    """A folder that is gone when this process is."""
    folder = tempfile.mkdtemp(prefix="flatout-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
