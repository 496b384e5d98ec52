"""Adapters on a model that transformers builds, by PEFT itself, so that every layer PEFT can adapt can be trained.

The base is frozen in the compute type, the adapters are fp32. The files are PEFT's own.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from flatout.cost import TARGETS, Adapters
from flatout.errors import EnvironmentLacks, UsageError, first_line
from flatout.model.foreign import Foreign

ADAPTER = "default"


def attach(model: Foreign, spec: Adapters, *, seed: int) -> None:
    """Freezes the model and puts fresh adapters on it, the same for the same seed."""
    peft = _peft()
    if spec.base_bits == 4:
        raise UsageError(f"lora.base 4-bit works only with flatout's own decoder: {model.shape.foreign}; use 16-bit")
    if spec.dropout:
        raise UsageError(f"lora.dropout works only with flatout's own decoder: {model.shape.foreign}; leave it at 0")
    targets = _targets(model, spec)
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=targets,
        use_rslora=spec.rslora,
        fan_in_fan_out=_is_transposed(model),
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(config, model.inner, adapter_name=ADAPTER)
    except (ValueError, TypeError) as error:
        raise UsageError(f"PEFT cannot put adapters on {type(model.inner).__name__}: {first_line(error)}") from None
    for module in model.inner.modules():
        if type(module) is peft.tuners.lora.Linear:  # autocast casts its inputs; PEFT would cast them to fp32 before
            module.cast_input_dtype_enabled = False
    for name, parameter in model.inner.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def save(model: Foreign, folder: Path, *, base: str | None) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` puts on the base model with equal logits."""
    peft = _peft()
    folder.mkdir(parents=True, exist_ok=True)
    state = peft.get_peft_model_state_dict(model.inner, adapter_name=ADAPTER)
    tensors = {f"base_model.model.{name}": value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    # PEFT's own words for what it adapted: the layers of `all-linear`, and the fused experts of a mixture.
    config = copy.deepcopy(model.inner.peft_config[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(folder)


def require_mergeable(model: Foreign) -> None:
    """Refuses adapters on experts that are stored as one matrix: there is no layer to add them to."""
    if any(type(module).__name__ == "ParamWrapper" for module in model.inner.modules()):
        raise UsageError(
            f"the adapters on the experts of {type(model.inner).__name__} cannot be merged: export without --merge, "
            "--merge, and merge with PEFT's merge_and_unload"
        )


def merge(model: Foreign) -> None:
    """Adds the adapters to the weights under them, and removes them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.inner.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            owner, _, leaf = name.rpartition(".")
            setattr(model.inner.get_submodule(owner), leaf, module.get_base_layer())
    for attribute in ("peft_config", "_hf_peft_config_loaded"):
        model.inner.__dict__.pop(attribute, None)


def _targets(model: Foreign, spec: Adapters) -> str | list[str]:
    if set(spec.targets) == set(TARGETS):
        return "all-linear"
    wanted = [f"{name}_proj" for name in spec.targets]
    linear = {name.rpartition(".")[2] for name, module in model.inner.named_modules() if _is_linear(module)}
    if missing := [name for name in wanted if name not in linear]:
        found = ", ".join(sorted(linear - {"lm_head"}))
        raise UsageError(
            f"lora.targets: {type(model.inner).__name__} has no {', '.join(missing)}, but {found}; use all-linear"
        )
    return wanted


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_transposed(model: Foreign) -> bool:
    """Whether the weights are stored as GPT-2 does, inputs first."""
    return any(type(module).__name__ == "Conv1D" for module in model.inner.modules())


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise EnvironmentLacks(
            "adapters on a model that transformers runs need peft: pip install 'flatout[hf]'"
        ) from None
    return peft
