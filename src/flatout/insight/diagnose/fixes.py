"""The exact change for each cause, for the framework that runs the loop.

Hugging Face argument names differ between versions. The agent reports the names that the installed version knows, and
only those are suggested.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.insight.diagnose.observed import Observed

_TRAINERS = ("trainer", "trl")


def trainer(seen: Observed, *wanted: str) -> str | None:
    """`TrainingArguments(...)` with, for each argument, the first `name=value` alternative that the version knows."""
    if seen.framework not in _TRAINERS:
        return None
    known = seen.facts.get("trainer_arguments")
    parts = []
    for alternatives in wanted:
        options = alternatives.split("|")
        fitting = [o for o in options if known is None or o.split("=")[0] in known]
        if fitting:
            parts.append(fitting[0])
    return f"TrainingArguments({', '.join(parts)})" if parts else None


def by_framework(
    seen: Observed, *, torch: str, arguments: Sequence[str] = (), lightning: str = "", accelerate: str = ""
) -> str:
    """The change for the framework that runs the loop; plain torch if it has no specific one."""
    own = {"lightning": lightning, "accelerate": accelerate}.get(seen.framework)
    return (trainer(seen, *arguments) if arguments else None) or own or torch


def bf16(seen: Observed) -> str:
    return by_framework(
        seen,
        torch='with torch.autocast("cuda", dtype=torch.bfloat16): around the forward pass and the loss',
        arguments=("bf16=True",),
        lightning='Trainer(precision="bf16-mixed")',
        accelerate='Accelerator(mixed_precision="bf16")',
    )


def tf32(seen: Observed) -> str:
    return by_framework(
        seen, torch='torch.set_float32_matmul_precision("high") before the first step', arguments=("tf32=True",)
    )


def loader(seen: Observed, *, workers: int) -> str:
    pinned = ", pin_memory=True" if seen.on_gpu else ""
    return by_framework(
        seen,
        torch=f"DataLoader(..., num_workers={workers}, persistent_workers=True{pinned})",
        arguments=(
            f"dataloader_num_workers={workers}",
            "dataloader_persistent_workers=True",
            *(("dataloader_pin_memory=True",) if seen.on_gpu else ()),
        ),
    )


def fused_optimizer(seen: Observed) -> str:
    kind = seen.optimizer.get("class", "AdamW")
    known = kind if kind in ("Adam", "AdamW", "SGD") else "AdamW"
    return by_framework(
        seen,
        torch=f"torch.optim.{known}(parameters, ..., fused=True)",
        arguments=('optim="adamw_torch_fused"',),
        lightning=f"return torch.optim.{known}(self.parameters(), ..., fused=True) from configure_optimizers",
    )


def rarer(seen: Observed, what: str, *, times: int = 5) -> str:
    """The change that makes evaluating, saving or logging less frequent."""
    arguments = {
        "evaluation": (f"eval_steps={times}x what it is now",),
        "checkpointing": (f"save_steps={times}x what it is now", "save_only_model=True"),
        "logging": ("logging_steps=50",),
    }[what]
    lightning = {
        "evaluation": f"Trainer(val_check_interval={times}x what it is now)",
        "checkpointing": f"ModelCheckpoint(every_n_train_steps={times}x what it is now)",
        "logging": "Trainer(log_every_n_steps=50)",
    }[what]
    torch = {
        "evaluation": f"evaluate {times} times less often, or on fewer batches",
        "checkpointing": f"save {times} times less often, from a background thread, or only the weights",
        "logging": "log every 50th step; keep device values as tensors until then",
    }[what]
    return by_framework(seen, torch=torch, arguments=arguments, lightning=lightning)


def padding(seen: Observed) -> str:
    return by_framework(
        seen,
        torch="pad each batch to its own longest row and sort by length, or pack rows end to end with position ids",
        arguments=("train_sampling_strategy='group_by_length'|group_by_length=True",),
    ) + (
        "; tokenize without padding='max_length' and let DataCollatorWithPadding pad each batch"
        if seen.framework in _TRAINERS
        else ""
    )


def larger_batch(seen: Observed, *, rows: int, accumulation: int) -> str:
    kept = (
        f"and {accumulation} accumulation steps, so the effective batch stays the same"
        if accumulation >= 1 and seen.accumulation > 1
        else "and tune the learning rate again, because the effective batch grows"
    )
    torch = f"batch_size={rows} {kept}"
    accumulated = (f"gradient_accumulation_steps={accumulation}",) if seen.accumulation > 1 else ()
    own = trainer(seen, f"per_device_train_batch_size={rows}", *accumulated)
    return f"{own} {'' if accumulated else kept}".strip() if own else torch


def no_recompute(seen: Observed) -> str:
    return by_framework(
        seen,
        torch="call the block itself instead of torch.utils.checkpoint, or model.gradient_checkpointing_disable()",
        arguments=("gradient_checkpointing=False",),
    )


def no_sync(seen: Observed) -> str:
    return by_framework(
        seen,
        torch="with model.no_sync(): around forward and backward of every micro-batch but the last of a step",
        accelerate="Accelerator(gradient_accumulation_steps=N) and with accelerator.accumulate(model): per micro-batch",
    )


def attention(seen: Observed) -> str:
    if seen.model.get("attention") == "eager":
        return 'from_pretrained(..., attn_implementation="sdpa")'
    return "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) instead of the explicit softmax"


def anomaly(seen: Observed) -> str:
    return by_framework(
        seen,
        torch="remove torch.autograd.set_detect_anomaly(True) / detect_anomaly(); enable it only to find a NaN",
        lightning="Trainer(detect_anomaly=False)",
    )
