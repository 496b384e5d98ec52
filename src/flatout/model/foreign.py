"""Any other causal language model, as transformers builds it, behind the interface of the training step.

The interface is `hidden`, `head_weight`, `blocks` and a `forward` that joins the first two in a head. Its batches are
rectangles, padded on the right: a causal model's tokens never attend to later ones, and padding has no targets. Packed
documents stay packed if the model keeps them apart by their positions, which is tried, and if that is less work; else
each becomes a row. 8 bits and the fused kernels of our own decoder are refused by name when planning. A head
that caps its logits is known (`cap`); any other that is more than one matmul is refused. Trainable weights are fp32 as
everywhere; here autocast casts them to the compute type. Dropout is off, as in our own decoder, so that a step is
the same each time, recomputed or not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatout import hub
from flatout.config.settings import Recompute
from flatout.cost import GIB, ModelShape
from flatout.errors import EnvironmentLacks, FlatoutError, UsageError, first_line
from flatout.model.attention import Attend, Padded, Rectangular
from flatout.model.weights import TensorFiles, refuse_quantised

if TYPE_CHECKING:
    Head = Callable[[Tensor, Tensor], Any]

# A head that is more than one matmul changes the logits by a larger share than rounding.
HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# Keys of config.json that make transformers load more than a model: code, other files, kernels that are downloaded.
UNHEARD = re.compile(
    r"auto_map|custom_\w+|configuration_files|transformers_weights|_name_or_path|_commit_hash|"
    r"_?(attn|experts)_implementation\w*|use_kernels|kernel_config"
)
# Keys of config.json that count modules or matrices, and the largest accepted value of each.
COUNTS = re.compile(r"(num|n)_\w*(layers?|heads?|experts?|blocks?|groups?)|(layers|heads|experts|blocks)\w*")
MOST_COUNTED, LARGEST_NUMBER = 2**14, 2**53
# Kinds of layers whose masks keep the documents of a row apart; chunked or compressed ones may count from its start.
PACKABLE = {"full_attention", "sliding_attention"}
# Bytes per token and channel that eager code keeps for a layer's backward pass, and those of a mask per pair of tokens.
KEPT_BYTES, MASK_BYTES = 34, 2
# Parameters beyond those in the files: tied tables, and parameters created when the model is built.
MOST_BESIDE_FILES = 4


class Foreign(nn.Module):
    """A transformers model behind the engine's interface. `config` is its original configuration, for export."""

    def __init__(
        self,
        inner: Any,
        *,
        shape: ModelShape,
        compute_dtype: torch.dtype,
        config: Any,
        code: Mapping[str, bytes] | None = None,
        trains: bool = True,
    ) -> None:
        super().__init__()
        self.inner, self.shape, self.compute_dtype = inner, shape, compute_dtype
        self.config, self.code = config, code or {}
        self.scale, self.cap = _logit_scale(config), _logit_cap(config)
        self.inner.train(trains)  # with dropout off; activation checkpointing needs it
        if trains:
            self._require_plain_head()

    @property
    def head_weight(self) -> Tensor:
        weight: Tensor = self.inner.get_output_embeddings().weight
        return weight

    @property
    def blocks(self) -> nn.ModuleList:
        lists = (m for m in self.inner.base_model.modules() if isinstance(m, nn.ModuleList))
        return next(found for found in lists if len(found) == self.shape.layers)

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The final hidden state of each token, for a head that is one matmul. Positions count from a row's start."""
        dtype = self.compute_dtype
        with self._autocast():
            if isinstance(attend, Rectangular):
                return self._body(tokens_N.view(attend.batch, -1)).flatten(0, 1).to(dtype)
            if not isinstance(attend, Padded):
                raise UsageError(f"{type(attend).__name__} attention is not available: {self.shape.foreign}")
            if attend.packed_rows and self._is_less_packed(attend, tokens=len(tokens_N)) and self.packs:
                rows = attend.packed_rows
                return self._body(tokens_N.view(rows, -1), positions_N.view(rows, -1)).flatten(0, 1).to(dtype)
            apart = tokens_N.new_zeros(attend.documents * attend.longest).index_copy(0, attend.places_N, tokens_N)
            hidden = self._body(apart.view(attend.documents, -1)).flatten(0, 1)
            return hidden.index_select(0, attend.places_N).to(dtype)

    def forward(self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, head: Head) -> Any:
        return head(self.hidden(tokens_N, positions_N, attend), self.head_weight)

    def recompute(self, mode: Recompute) -> None:
        """Enables or disables the model's own activation checkpointing."""
        if mode == "none":
            return
        if not self.inner.supports_gradient_checkpointing:
            raise UsageError(f"plan.recompute {mode}: {type(self.inner).__name__} cannot recompute: use none")
        # transformers 5.23 renamed it; both names take the arguments of torch.utils.checkpoint.
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        enable = getattr(self.inner, new if hasattr(self.inner, new) else old)
        enable({"use_reentrant": False})

    def export(self, folder: Path, *, dtype: torch.dtype, **extra: Any) -> None:
        """Writes a folder that `from_pretrained` loads, with the original names and configuration."""
        copied = copy.deepcopy(self.inner).to("cpu", dtype)
        copied.config = copy.deepcopy(self.config)
        copied.config.dtype = dtype
        for name, value in extra.items():
            setattr(copied.config, name, value)
        try:
            copied.save_pretrained(folder)
        except (ValueError, TypeError, RecursionError) as error:  # caused by settings in its generation_config.json
            raise UsageError(f"transformers cannot write this model: {first_line(error)}") from error
        for name, content in self.code.items():
            (folder / name).write_bytes(content)

    def _body(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        given = {} if positions_BT is None else {"position_ids": positions_BT}
        hidden: Tensor = self.inner.base_model(input_ids=tokens_BT, use_cache=False, **given).last_hidden_state
        return hidden if self.scale == 1.0 else hidden * self.scale

    def _autocast(self) -> torch.autocast:
        kind, dtype = self.head_weight.device.type, self.compute_dtype
        return torch.autocast(kind, dtype=dtype, enabled=dtype != torch.float32)

    def _is_less_packed(self, attend: Padded, *, tokens: int) -> bool:
        """Whether packed rows are less work than a row per document, and their mask does not take much more memory.

        A layer has about 12 C² weights. A token also attends to its row: to all of it under a mask, to half of it on
        average where causal attention needs no mask.
        """
        width, length, apart = self.shape.hidden, tokens // (attend.packed_rows or 1), attend.documents * attend.longest
        is_less = tokens * (12 * width + 2 * length) < apart * (12 * width + attend.longest)
        # A tenth of the activations, or what padding would take.
        spare = KEPT_BYTES * width * max(tokens // 10, apart - tokens)
        return is_less and MASK_BYTES * tokens * length <= spare

    @functools.cached_property
    @torch.no_grad()
    def packs(self) -> bool:
        """Whether documents in one row, each with positions from 0, are as they are in rows of their own."""
        config = _text(self.config)
        kinds = set(getattr(config, "layer_types", None) or ())
        if not kinds <= PACKABLE or getattr(config, "attention_chunk_size", None):
            return False
        length, device = min(431, self.shape.positions), self.head_weight.device
        cuts = (length // 3, length // 2)
        rows_BT = torch.arange(2 * length, device=device).view(2, length) % self.shape.vocab
        positions_BT = torch.stack([torch.cat([torch.arange(cut), torch.arange(length - cut)]) for cut in cuts])
        others_BT = rows_BT.clone()
        for row_T, cut in zip(others_BT, cuts, strict=True):
            row_T[:cut] = row_T[:cut].flip(0)
        try:
            with self._autocast():
                found, beside = (self._body(rows, positions_BT.to(device)) for rows in (rows_BT, others_BT))
                alone = [self._body(row_T[None, cut:])[0].float() for row_T, cut in zip(rows_BT, cuts, strict=True)]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model that takes no positions
            return False
        # Masked tokens have a weight of exactly 0, so the second document does not depend on the first at all.
        return all(
            torch.equal(one[cut:], other[cut:])
            and float((one[cut:].float() - own).norm() / own.norm()) <= HEAD_TOLERANCE[self.compute_dtype]
            for one, other, own, cut in zip(found, beside, alone, cuts, strict=True)
        )

    @torch.no_grad()
    def _require_plain_head(self) -> None:
        """Refuses a model whose logits are not `hidden @ weight.T`: the loss would be that of another model."""
        name, head = type(self.inner).__name__, self.inner.get_output_embeddings()
        if head is None or self.inner.base_model is self.inner:
            raise UsageError(f"{name} has no separate body and head, which the loss needs")
        tokens_BT = torch.arange(8, device=head.weight.device)[None] % self.shape.vocab
        theirs = self.inner(input_ids=tokens_BT, use_cache=False).logits.float()
        ours = (self._body(tokens_BT) @ head.weight.t()).float()
        ours = ours if self.cap is None else self.cap * torch.tanh(ours / self.cap)
        apart = float((ours - theirs).abs().max() / theirs.abs().max()) if ours.shape == theirs.shape else float("inf")
        if not apart <= HEAD_TOLERANCE[head.weight.dtype]:
            named = {"logit_scale", "logits_scaling", "lm_head_multiplier"}
            words = [f"{k} {v}" for k, v in _text(self.config).to_dict().items() if k in named and v]
            words += ["a bias"] if getattr(head, "bias", None) is not None else []
            raise UsageError(
                f"the head of {name} is more than one matmul ({', '.join(words) or 'by its own code'}): its logits "
                f"differ by {apart:.2g} of the largest, and training it here would minimise another loss"
            )


def load(
    folder: Path,
    *,
    shape: ModelShape,
    name: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    trust: str | None = None,
    random_seed: int | None = None,
    trains: bool = True,
) -> Foreign:
    """Loads the model of a folder, with its weights or, given a seed, with random ones. Never reads a pickle.

    `name` is the user's name for it, a folder or a name on the hub; `trust` is the pin for its code.
    """
    transformers = _transformers()
    raw = hub.read_json(folder / "config.json")
    refuse_quantised(raw, folder)
    code = _trusted_code(raw, folder, name=name or str(folder), trust=trust, transformers=transformers)
    _refuse_absurd(raw, folder)
    files = TensorFiles.of(folder) if random_seed is None else None
    options = {"trust_remote_code": bool(code), "local_files_only": True}
    try:
        with _staged(raw, folder, code=code, files=files) as stage:
            config = transformers.AutoConfig.from_pretrained(stage, **options)
            inner = _built(transformers, stage, _without_dropout(config), options, dtype, files, random_seed)
    except FlatoutError:
        raise
    except Exception as error:  # untrusted configurations and code may raise anything
        words = first_line(error)
        raise UsageError(f"transformers {transformers.__version__} cannot load {folder}: {words}") from error
    for module in inner.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return Foreign(inner.to(device), shape=shape, compute_dtype=compute_dtype, config=config, code=code, trains=trains)


def _built(
    transformers: Any,
    stage: Path,
    config: Any,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    files: TensorFiles | None,
    random_seed: int | None,
) -> Any:
    auto, trusted = transformers.AutoModelForCausalLM, options["trust_remote_code"]
    if files is not None or not trusted:  # trusted code may need real tensors to build itself
        with torch.device("meta"):
            sketch = auto.from_config(copy.deepcopy(config), trust_remote_code=trusted)
        _require_room(sum(p.numel() for p in sketch.parameters()), dtype=dtype, files=files)
    if files is None:
        assert random_seed is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random_seed)
            return auto.from_config(config, dtype=dtype, trust_remote_code=trusted)
    inner, report = auto.from_pretrained(
        stage, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
    )
    if missing := sorted(report["missing_keys"]):
        raise UsageError(f"{files.folder} lacks {', '.join(missing[:3])}, which its config.json implies")
    return inner


def _require_room(asked: int, *, dtype: torch.dtype, files: TensorFiles | None) -> None:
    """Refuses a configuration that needs more weights than the files or the memory can hold."""
    if files is not None and asked > MOST_BESIDE_FILES * files.num_elements:
        raise UsageError(
            f"{files.folder}: config.json needs {asked:,} weights, but the files have {files.num_elements:,}"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if files is None and asked * dtype.itemsize > memory:
        raise UsageError(
            f"a model of {asked:,} weights takes {asked * dtype.itemsize / GIB:.0f} GiB, but this machine has "
            f"{memory / GIB:.0f} GiB of memory"
        )


@contextlib.contextmanager
def _staged(
    raw: Mapping[str, Any], folder: Path, *, code: Mapping[str, bytes] | None, files: TensorFiles | None
) -> Iterator[Path]:
    """A temporary folder with only the checked files: transformers reads and imports only from there."""
    with tempfile.TemporaryDirectory(prefix="flatout-") as private:
        # Python identifies imported code by this name, which is the same each time for the same model.
        stage = Path(private) / (re.sub(r"\W", "_", folder.absolute().name) or "model")
        stage.mkdir()
        heard = {"auto_map": raw["auto_map"]} if code else {}
        (stage / "config.json").write_text(json.dumps({**_heard(raw), **heard}))
        if (folder / "generation_config.json").exists():
            generation = hub.read_json(folder / "generation_config.json")
            (stage / "generation_config.json").write_text(json.dumps(_heard(generation)))
        for file, content in (code or {}).items():
            (stage / file).write_bytes(content)
        if files is not None:
            files.link(stage)
        yield stage


def _heard(config: Any) -> Any:
    """A configuration without the ignored keys, at any depth."""
    if isinstance(config, list):
        return [_heard(one) for one in config]
    if not isinstance(config, dict):
        return config
    return {key: _heard(value) for key, value in config.items() if not UNHEARD.fullmatch(key)}


def _refuse_absurd(config: Any, folder: Path, key: str = "") -> None:
    """Refuses numbers in a configuration that would lead to endless work or fill the memory."""
    if isinstance(config, dict):
        for name, value in config.items():
            _refuse_absurd(value, folder, name)
    elif isinstance(config, list):
        for value in config:
            _refuse_absurd(value, folder, key)
    elif isinstance(config, (int, float)):
        most = MOST_COUNTED if COUNTS.fullmatch(key) else LARGEST_NUMBER
        if isinstance(config, int) and abs(config) > most:
            raise UsageError(f"{folder}: config.json: {key[:60]} is {shown(config)}, but must be at most {most}")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise EnvironmentLacks(
            "a model of another architecture than llama, mistral, qwen2 and qwen3 needs transformers: "
            "pip install 'flatout[hf]'"
        ) from None
    return transformers


def _trusted_code(
    raw: Mapping[str, Any], folder: Path, *, name: str, trust: str | None, transformers: Any
) -> Mapping[str, bytes] | None:
    """The model's own code, if it has some and the user's pin matches it; None: transformers' own."""
    kind, named = raw.get("model_type"), raw.get("auto_map")
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    native = isinstance(kind, str) and kind in known
    if not named and not native:
        raise UsageError(
            f"model_type {kind!r:.60} of {folder} is not a causal language model that transformers "
            f"{transformers.__version__} knows: try a newer version"
        )
    if not named or (native and trust is None):
        return None
    places = named.values() if isinstance(named, Mapping) else [named]
    for place in places:
        if not isinstance(place, str) or not re.fullmatch(r"\w+\.\w+", place):
            raise UsageError(
                f"{folder} would run {place!r:.100}, which is not a class in a file next to its config.json: code of "
                "another repository is never run"
            )
    code = hub.code_of(name, folder)
    if trust == code.pin:
        return code.files
    said = "" if trust is None else f", which {hub.TRUSTING} {trust} does not stand for"
    raise UsageError(
        f"{name} comes with Python code ({', '.join(code.files) or 'not fetched yet'}){said}. Read it, and to run it "
        f"say {hub.TRUSTING} {code.pin}"
    )


def _without_dropout(config: Any) -> Any:
    quiet = copy.deepcopy(config)
    for part in {id(part): part for part in (quiet, _text(quiet))}.values():
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return quiet


def _text(config: Any) -> Any:
    """The language model's part of a configuration that also has others."""
    return config.get_text_config()


def _logit_cap(config: Any) -> float | None:
    """The bound of the logits in Gemma 2: cap * tanh(logits / cap)."""
    cap = getattr(_text(config), "final_logit_softcapping", None)
    return float(cap) if isinstance(cap, (int, float)) and cap > 0 else None


def _logit_scale(config: Any) -> float:
    """The factor or divisor of the logits in Cohere and Granite."""
    text = _text(config)
    factor, divisor = getattr(text, "logit_scale", None), getattr(text, "logits_scaling", None)
    if isinstance(factor, (int, float)):
        return float(factor)
    return 1.0 / divisor if isinstance(divisor, (int, float)) and divisor else 1.0
