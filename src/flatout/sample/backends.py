"""The sampling backends: our own sampler on our own decoder, `generate` of transformers on any model, or vLLM."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, get_args

from torch import Tensor

from flatout.cost import Adapters
from flatout.data.tokenizer import Tokenizer
from flatout.errors import UsageError
from flatout.model import Decoder, Foreign, Model, lora, peft, weights
from flatout.model.loading import export_model
from flatout.sample.generate import Generator
from flatout.sample.hf import HuggingFace
from flatout.sample.request import Sampler, Sampling, Watch, unwatched
from flatout.sample.routed import RoutedSampler
from flatout.sample.vllm import Vllm, check_sampling, check_vocabulary, imported

Backend = Literal["auto", "flatout", "hf", "vllm"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class SampledModel(Protocol):
    """A model that can be sampled; a model that is being trained has no folder."""

    @property
    def model(self) -> Model: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def folder(self) -> Path | None:
        """The Hugging Face folder of these weights, or of the base under the adapters."""
        ...

    @property
    def adapters(self) -> Adapters | None: ...


def backend_of(name: str, *, sampling: Sampling | None = None) -> Backend:
    """A backend by its name. Raises before a model is loaded if it is not available here or cannot sample so."""
    for known in BACKENDS:
        if name == known:
            if known == "vllm":
                imported()
                if sampling is not None:
                    check_sampling(sampling)
            return known
    raise UsageError(f"--backend {name!r} must be one of {', '.join(BACKENDS)}")


def vocabulary_check(backend: Backend) -> Callable[[Tokenizer, int], None]:
    """What refuses a tokenizer and a number of ids that a backend cannot sample, before a model is loaded."""
    return (lambda tokenizer, vocab: check_vocabulary(tokenizer, vocab=vocab)) if backend == "vllm" else _any_vocabulary


def _any_vocabulary(tokenizer: Tokenizer, vocab: int) -> None:
    pass


def sampler_of(
    opened: SampledModel,
    *,
    backend: Backend = "auto",
    rows: int | None = None,
    memory: float | None = None,
    watch: Watch = unwatched,
) -> Sampler:
    """`auto` is our sampler for our decoder, and transformers for all other models. `memory` is for vLLM.

    Our own sampler reads the weights again before every use, and so does vLLM where a share of memory is given.
    """
    model, tokenizer = opened.model, opened.tokenizer
    if isinstance(model, Decoder) and model.router is not None:
        if backend in ("hf", "vllm"):
            raise UsageError(
                f"--backend {backend} cannot route among adapters: use flatout, or choose one by --adapter"
            )
        return RoutedSampler(model, tokenizer, rows=rows)
    if backend == "vllm":
        return _vllm(opened, rows=rows, memory=memory, watch=watch)
    if isinstance(model, Foreign):
        if backend == "flatout":
            raise UsageError(f"--backend flatout runs only flatout's own decoder, use hf: {model.shape.foreign}")
        return HuggingFace(
            model.inner, tokenizer, window=model.shape.positions, compute_dtype=model.compute_dtype, rows=rows
        )
    if backend == "hf":
        return HuggingFace(weights.to_transformers(_merged(model)), tokenizer, window=model.shape.positions, rows=rows)
    return Generator(model, tokenizer, rows=rows, watch=watch)


def _merged(model: Decoder) -> Decoder:
    """A copy with merged adapters, because transformers cannot run ours."""
    plain = copy.deepcopy(model)
    lora.merge(plain)
    return plain


def _plain(model: Model) -> Model:
    """The model itself, or a copy with merged adapters where it has some."""
    return _merged(model) if isinstance(model, Decoder) and lora.adapters(model) else model


def _live(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The present weights by Hugging Face's names, with merged adapters."""
    plain = _plain(model)
    assert isinstance(plain, Decoder)
    yield from weights.to_hf({name: tensor.detach() for name, tensor in plain.state_dict().items()}, plain.shape)


def _vllm(opened: SampledModel, *, rows: int | None, memory: float | None, watch: Watch) -> Sampler:
    """vLLM on the folder of the weights; weights without a folder are written to a temporary one."""
    model, adapters, folder, adapter = opened.model, opened.adapters, opened.folder, None
    dtype = str(model.compute_dtype).removeprefix("torch.")
    if folder is None:
        folder = _temporary_folder()
        export_model(_plain(model), folder, dtype=model.compute_dtype, eos_token_id=opened.tokenizer.eos_id)
        opened.tokenizer.save(folder)
    elif adapters is not None and isinstance(model, Decoder):
        adapter = _temporary_folder()
        peft.save(model, adapter, adapters, base=str(folder), fingerprint=None)
    return Vllm(
        folder,
        opened.tokenizer,
        window=model.shape.positions,
        vocab=model.shape.vocab,
        dtype=dtype,
        adapter=adapter,
        watch=watch,
        rank=adapters.rank if adapters else None,
        rows=rows,
        memory=memory,
        follow=None if memory is None else partial(_live, model),
    )


def _temporary_folder() -> Path:
    """A temporary folder that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="flatout-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
