"""Opens a model for inference: a run folder, a Hugging Face or PEFT folder, or a name on the hub (`eval`, `chat`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flatout import hub
from flatout.config.settings import ModelSettings
from flatout.cost import Adapters, ModelShape
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.engine.resolve import DTYPES
from flatout.engine.trained import open_trained
from flatout.errors import FlatoutError, UsageError
from flatout.model import Decoder, Model, load_adapted, load_model, lora, peft
from flatout.plan import model_settings, named_shape
from flatout.record import Run

# The name that means no adapter.
BASE = "base"
# Refuses a tokenizer and a number of ids before the weights are read.
VocabularyCheck = Callable[[Tokenizer, int], None]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model that is ready for inference, on its device and in its compute type."""

    name: str
    model: Model
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    run: Run | None = None
    step: int | None = None
    checksum: str | None = None  # of the checkpoint of a run
    notices: tuple[str, ...] = ()  # checkpoints that were not used, and why
    folder: Path | None = None  # the Hugging Face folder of these weights, or of the base under the adapters
    adapters: Adapters | None = None
    backend: str = "auto"

    @property
    def where(self) -> str:
        name = next(name for name, dtype in DTYPES.items() if dtype == self.model.compute_dtype)
        place = self.model.head_weight.device.type
        return f"{'vLLM' if self.backend == 'vllm' else place}, {name}"


def open_model(
    name: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    backend: str = "auto",
    trust: str | None = None,
    adapter: str | None = None,
    bank: bool = False,
    check: VocabularyCheck = lambda tokenizer, vocab: None,
) -> Opened:
    """`dtype` None: fp32 on a CPU; on a GPU bf16, or fp16 where it has no bf16 units.

    `trust` is the user's pin for code that comes with the model; no opened file can supply it.
    For `backend` vllm, which reads the weights itself, the model stays on the host.
    `adapter` is one of a bank, or `base`; without it, the bank's router chooses. `bank` takes one without a router too.
    `check` sees a published model's tokenizer and number of ids before its weights are read.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} must be one of {', '.join(DTYPES)}")
    chosen = DTYPES[dtype or _natural(place)]
    place = torch.device("cpu") if backend == "vllm" else place
    if Run.is_named_by(name):
        opened = _trained(name, place, chosen, trust)
    elif (Path(name) / peft.CONFIG).is_file() and not (Path(name) / "config.json").is_file():
        opened = _adapter(name, place, chosen)
    else:
        opened = _published(name, place, chosen, trust, check)
    opened = opened if bank else _of_bank(opened, adapter)
    opened.model.eval().requires_grad_(False)
    return replace(opened, backend=backend)


def _of_bank(opened: Opened, adapter: str | None) -> Opened:
    """A bank with its router, or one adapter of it alone."""
    model = opened.model
    names = lora.names_of(model) if isinstance(model, Decoder) else ()
    if not isinstance(model, Decoder) or not names:
        if adapter is not None:
            raise UsageError(f"--adapter {adapter}: {opened.name} has no named adapters; remove the option")
        return opened
    if adapter is None:
        if model.router is None:
            raise UsageError(
                f"{opened.name} has adapters but no router yet: train phase 2, or choose one with --adapter: "
                f"{', '.join([*names, BASE])}"
            )
        return opened
    if adapter not in (*names, BASE):
        raise UsageError(f"--adapter {adapter!r:.80}: {opened.name} has {', '.join([*names, BASE])}")
    alone = lora.alone(model, None if adapter == BASE else names.index(adapter))
    spec = None if adapter == BASE or opened.adapters is None else replace(opened.adapters, names=())
    return replace(opened, model=alone, adapters=spec)


def stop_ids(model: ModelSettings, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end an answer: the tokenizer's EOS, and those that the published base model names."""
    found: frozenset[int] = frozenset()
    if model.name is not None:
        with suppress(FlatoutError):  # the base may be gone: a run that has all weights does not need it
            found = _stop_ids(hub.folder(model.name, weights=False, revision=model.revision))
    return found | {tokenizer.eos_id}


def _trained(name: str, device: torch.device, dtype: torch.dtype, trust: str | None) -> Opened:
    """The newest checkpoint of a run. Adapters are put on the base they were trained on, in 4 bits if it was."""
    run = Run.open(name)
    trained = open_trained(run, device=device, dtype=dtype, as_trained=True, trust=trust)
    settings, adapters = model_settings(run), trained.adapters
    return Opened(
        name=name,
        model=trained.model,
        tokenizer=trained.tokenizer,
        stop_ids=stop_ids(settings, trained.tokenizer),
        run=run,
        step=trained.step,
        checksum=trained.checksum,
        notices=trained.notices,
        folder=hub.folder(trained.base, weights=True, revision=settings.revision)
        if adapters and trained.base
        else None,
        adapters=adapters,
    )


def _adapter(name: str, device: torch.device, dtype: torch.dtype) -> Opened:
    """A PEFT adapter on the base it names."""
    folder, spec = Path(name), peft.read(Path(name))
    base = hub.read_json(folder / peft.CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UsageError(f"{folder / peft.CONFIG} names no base_model_name_or_path: put the folder of its base there")
    if os.path.isdir(folder / base):  # as `flatout export` names it
        base = str(folder / base)
    under, shape = hub.folder(base, weights=True), named_shape(ModelSettings(name=base))
    if shape.foreign:
        raise UsageError(f"{name} is an adapter on {base}, but adapters need flatout's own decoder: {shape.foreign}")
    model = load_adapted(under, spec, shape=shape, device=device, compute_dtype=dtype)
    assert isinstance(model, Decoder)
    peft.load(model, folder, spec, base=peft.fingerprint(under))
    own = (folder / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(str(folder if own else under), documents=None, cache=folder)
    stops = _stop_ids(under) | {tokenizer.eos_id}
    return Opened(name=name, model=model, tokenizer=tokenizer, stop_ids=stops, folder=under, adapters=spec)


def _published(
    name: str, device: torch.device, dtype: torch.dtype, trust: str | None, check: VocabularyCheck
) -> Opened:
    """Our decoder where it runs the architecture, else the model as transformers builds it."""
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise UsageError(f"{name} is not a run folder, and not a model folder: a model folder has a config.json")
    folder = hub.folder(name, weights=True, trust=trust)
    shape = ModelShape.of_config(hub.read_json(folder / "config.json"))
    tokenizer = load_tokenizer(str(folder), documents=None, cache=folder)
    check(tokenizer, shape.vocab)
    settings = ModelSettings(name=name, revision=None if hub.is_here(name) else folder.name, trust=trust)
    model = load_model(settings, shape=shape, device=device, dtype=dtype, compute_dtype=dtype, trains=False)
    stops = _stop_ids(folder) | {tokenizer.eos_id}
    return Opened(name=name, model=model, tokenizer=tokenizer, stop_ids=stops, folder=folder)


def _natural(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def _stop_ids(folder: Path) -> frozenset[int]:
    """The EOS ids that the published model names, often more than the tokenizer's one."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        if (folder / file).is_file():
            value = hub.read_json(folder / file).get("eos_token_id")
            named = value if isinstance(value, list) else [value]
            found |= {i for i in named if isinstance(i, int) and 0 <= i < 2**31}
    return frozenset(found)
