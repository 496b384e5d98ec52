"""Any other causal language model, as transformers builds it, behind what the training step asks of a model.

That is little: `hidden`, `head_weight`, `blocks` and a `forward` that joins the first two in a head. Its batches are
rectangles, padded on the right where texts are shorter: a causal model's tokens never see what comes after them, and
padding has no targets. Packing, 8 bits and the fused kernels of our own decoder are refused by name when planning.

Trainable weights are fp32 as everywhere; here autocast brings them to the compute type, since the code is not ours.
Dropout is off, as in our own decoder: a step is then the same each time, recomputed or not.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from flatout.config.settings import Recompute
from flatout.cost import ModelShape
from flatout.errors import EnvironmentLacks, UsageError, first_line
from flatout.hub import read_json
from flatout.model.attention import Attend, Rectangular
from flatout.model.weights import TensorFiles, refuse_quantised

if TYPE_CHECKING:
    Head = Callable[[Tensor, Tensor], Any]

# A head that is more than one matmul shows as a larger share of the logits than rounding is.
HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class Foreign(nn.Module):
    """A model of transformers as the engine sees models. `config` is its own, word for word, for export."""

    def __init__(
        self,
        inner: Any,
        *,
        shape: ModelShape,
        compute_dtype: torch.dtype,
        config: Any,
        code: Path | None = None,
        trains: bool = True,
    ) -> None:
        super().__init__()
        self.inner, self.shape, self.compute_dtype = inner, shape, compute_dtype
        self.config, self.code = config, code
        self.scale = _logit_scale(config)
        self.inner.train(trains)  # with dropout off; checkpointing asks for it
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
        if not isinstance(attend, Rectangular):
            raise UsageError(f"{type(attend).__name__} attention cannot be had: {self.shape.adapter}")
        device, dtype = tokens_N.device.type, self.compute_dtype
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            return self._body(tokens_N.view(attend.batch, -1)).flatten(0, 1).to(dtype)

    def forward(self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, head: Head) -> Any:
        return head(self.hidden(tokens_N, positions_N, attend), self.head_weight)

    def recompute(self, mode: Recompute) -> None:
        """Activations by the model's own checkpointing: all of them, or none."""
        if mode == "none":
            return
        if not self.inner.supports_gradient_checkpointing:
            raise UsageError(f"plan.recompute {mode}: {type(self.inner).__name__} cannot recompute: take none")
        self.inner.gradient_checkpointing_enable({"use_reentrant": False})

    def export(self, folder: Path, *, dtype: torch.dtype, **extra: Any) -> None:
        """The folder that `from_pretrained` loads, under the names and with the configuration it came with."""
        copied = copy.deepcopy(self.inner).to("cpu", dtype)
        copied.config = copy.deepcopy(self.config)
        copied.config.dtype = dtype
        for name, value in extra.items():
            setattr(copied.config, name, value)
        copied.save_pretrained(folder)
        for file in self.code.glob("*.py") if self.code else ():
            shutil.copy(file, folder)

    def _body(self, tokens_BT: Tensor) -> Tensor:
        hidden: Tensor = self.inner.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        return hidden if self.scale == 1.0 else hidden * self.scale

    @torch.no_grad()
    def _require_plain_head(self) -> None:
        """Refuses a model whose logits are not `hidden @ weight.T`: the loss would be of another model."""
        name, head = type(self.inner).__name__, self.inner.get_output_embeddings()
        if head is None or self.inner.base_model is self.inner:
            raise UsageError(f"{name} has no body and head that can be told apart, which the loss needs")
        tokens_BT = torch.arange(8, device=head.weight.device)[None] % self.shape.vocab
        theirs = self.inner(input_ids=tokens_BT, use_cache=False).logits.float()
        ours = (self._body(tokens_BT) @ head.weight.t()).float()
        apart = float((ours - theirs).abs().max() / theirs.abs().max()) if ours.shape == theirs.shape else float("inf")
        if not apart <= HEAD_TOLERANCE[head.weight.dtype]:
            named = {"final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"}
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
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    random_seed: int | None = None,
    trains: bool = True,
) -> Foreign:
    """The model of a folder, with its weights or, given a seed, with random ones. Never reads a pickle."""
    transformers = _transformers()
    raw = read_json(folder / "config.json")
    refuse_quantised(raw, folder)
    _refuse_code(raw, folder, trust=trust_remote_code, transformers=transformers)
    if random_seed is None:
        TensorFiles.of(folder)
    auto, options = transformers.AutoModelForCausalLM, {"trust_remote_code": trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **options)
        quiet = _without_dropout(config)
        if random_seed is None:
            inner, report = auto.from_pretrained(
                folder,
                config=quiet,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
            if missing := sorted(report["missing_keys"]):
                raise UsageError(f"{folder} lacks {', '.join(missing[:3])}, which its config.json implies")
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(random_seed)
                inner = auto.from_config(quiet, dtype=dtype, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        words = first_line(error)
        raise UsageError(f"transformers {transformers.__version__} cannot load {folder}: {words}") from error
    for module in inner.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    code = folder if trust_remote_code else None
    return Foreign(inner.to(device), shape=shape, compute_dtype=compute_dtype, config=config, code=code, trains=trains)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise EnvironmentLacks(
            "a model of another architecture than llama, mistral, qwen2 and qwen3 needs transformers: "
            "pip install 'flatout[hf]'"
        ) from None
    return transformers


def _refuse_code(raw: Mapping[str, Any], folder: Path, *, trust: bool, transformers: Any) -> None:
    """A model's own code runs only where it was asked for, and only the code that lies in its folder."""
    kind, code = raw.get("model_type"), raw.get("auto_map") or {}
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if elsewhere := [str(place) for place in code.values() if trust and "--" in str(place)]:
        raise UsageError(
            f"{folder} would run {elsewhere[0]}, code of another repository at no fixed commit: "
            "give a folder whose config.json names files beside it"
        )
    if trust or kind in known:
        return
    if code:
        raise UsageError(
            f"model_type {kind!r} of {folder} runs by Python code that comes with it: if you trust that code, set "
            "model.trust_remote_code: true, with model.revision pinned to a commit or a folder as model.name"
        )
    raise UsageError(
        f"model_type {kind!r} of {folder} is no causal language model that transformers {transformers.__version__} "
        "knows: a newer version may"
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


def _logit_scale(config: Any) -> float:
    """What Cohere and Granite multiply or divide their logits with."""
    text = _text(config)
    factor, divisor = getattr(text, "logit_scale", None), getattr(text, "logits_scaling", None)
    if isinstance(factor, (int, float)):
        return float(factor)
    return 1.0 / divisor if isinstance(divisor, (int, float)) and divisor else 1.0
