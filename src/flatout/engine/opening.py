"""A model to ask, by the name of a run folder, a Hugging Face folder or a name on the hub (`eval`, `chat`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from flatout import hub
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.engine.resolve import DTYPES
from flatout.engine.trained import open_trained
from flatout.errors import UsageError
from flatout.model import Decoder, Foreign, weights
from flatout.record import Run


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Ready to be asked: on its device, in the type it computes in."""

    name: str
    model: Decoder
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    run: Run | None
    step: int | None

    @property
    def where(self) -> str:
        name = next(name for name, dtype in DTYPES.items() if dtype == self.model.compute_dtype)
        return f"{self.model.embedding.device.type}, {name}"


def open_model(name: str, *, dtype: str | None = None, device: str | None = None) -> Opened:
    """`dtype` None: fp32 on a CPU; on a GPU bf16, or fp16 where it has no bf16 units."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is none of {', '.join(DTYPES)}")
    chosen = DTYPES[dtype or _natural(place)]
    if Run.is_at(name):
        run = Run.open(name)
        trained = open_trained(run)
        if isinstance(trained.model, Foreign):
            raise UsageError(f"{name} trained a model that runs behind an adapter: export it, and ask transformers")
        model: Decoder = trained.model
        tokenizer, step, stops = trained.tokenizer, trained.step, frozenset[int]()
    else:
        folder = _folder(name)
        model, step, run = weights.load(folder), None, None
        tokenizer = load_tokenizer(str(folder), documents=None, cache=folder)
        stops = _stop_ids(folder)
    model.eval().requires_grad_(False)
    return Opened(
        name=name,
        model=placed(model, device=place, dtype=chosen),
        tokenizer=tokenizer,
        stop_ids=stops | {tokenizer.eos_id},
        run=run,
        step=step,
    )


def placed(model: Decoder, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Weights in the compute type, so that no step casts them; rotary frequencies stay fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype)
    model.frequencies = model.frequencies.to(device)
    model.compute_dtype = dtype
    return model


def _natural(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def _folder(name: str) -> Path:
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise UsageError(f"{name} is neither a run folder nor a model folder: a model folder has a config.json")
    return hub.folder(name, weights=True)


def _stop_ids(folder: Path) -> frozenset[int]:
    """What the model's makers say ends a text: often more than the tokenizer's one."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        if (folder / file).is_file():
            value = hub.read_json(folder / file).get("eos_token_id")
            found |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return frozenset(found)
