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
    if not parts:
        return None
    if seen.framework == "trl":  # its trainers insist on classes of their own, which take the same arguments
        return f"{', '.join(parts)} in SFTConfig(...), GRPOConfig(...) or the trainer's own configuration"
    return f"TrainingArguments({', '.join(parts)})"


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


def fp16(seen: Observed) -> str:
    return by_framework(
        seen,
        torch='with torch.autocast("cuda", dtype=torch.float16): around the forward pass, and torch.amp.GradScaler()',
        arguments=("fp16=True",),
        lightning='Trainer(precision="16-mixed")',
        accelerate='Accelerator(mixed_precision="fp16")',
    )


def tf32(seen: Observed) -> str:
    return by_framework(
        seen, torch='torch.set_float32_matmul_precision("high") before the first step', arguments=("tf32=True",)
    )


def loader(seen: Observed, *, workers: int) -> str:
    pinned = ", pin_memory=True" if seen.on_gpu else ""
    kept = ", persistent_workers=True" if workers else ""
    return by_framework(
        seen,
        torch=f"DataLoader(..., num_workers={workers}{kept}{pinned})",
        arguments=(
            f"dataloader_num_workers={workers}",
            f"dataloader_persistent_workers={workers > 0}",
            *(("dataloader_pin_memory=True",) if seen.on_gpu else ()),
        ),
    )


def fused_optimizer(seen: Observed) -> str:
    kind = seen.optimizer.get("class", "AdamW")
    if kind not in ("Adam", "AdamW", "SGD"):
        return f"a fused or foreach version of {kind}, if there is one; another optimizer would train differently"
    return by_framework(
        seen,
        torch=f"torch.optim.{kind}(parameters, ..., fused=True)",
        arguments=('optim="adamw_torch_fused"',) if kind == "AdamW" else (),
        lightning=f"return torch.optim.{kind}(self.parameters(), ..., fused=True) from configure_optimizers",
    )


def rarer(seen: Observed, what: str, *, times: int = 5) -> str:
    """The change that makes evaluating, saving or logging less frequent."""
    arguments = {
        "evaluation": ("eval_strategy='steps'|evaluation_strategy='steps'", "eval_steps=N"),
        "checkpointing": ("save_strategy='steps'", "save_steps=N"),
        "logging": ("logging_steps=50",),
    }[what]
    lightning = {
        "evaluation": "Trainer(val_check_interval=N, check_val_every_n_epoch=None)",
        "checkpointing": "Trainer(callbacks=[ModelCheckpoint(every_n_train_steps=N)])",
        "logging": "Trainer(log_every_n_steps=50)",
    }[what]
    torch = {
        "evaluation": f"evaluate {times} times less often, or on fewer batches",
        "checkpointing": f"save {times} times less often, from a background thread, or only the weights",
        "logging": "log every 50th step; keep device values as tensors until then",
    }[what]
    said = by_framework(seen, torch=torch, arguments=arguments, lightning=lightning)
    if "=N" in said:
        said += f", with N {times} times the current interval"
    if seen.framework in _TRAINERS and what == "evaluation":
        said += "; with load_best_model_at_end, save_steps must be a multiple of eval_steps"
    return said


def padding(seen: Observed) -> str:
    said = by_framework(
        seen,
        torch="pad each batch to its own longest row and sort by length, or pack rows end to end with position ids",
        arguments=("train_sampling_strategy='group_by_length'|group_by_length=True",),
    )
    if seen.framework not in _TRAINERS:
        return said
    return f"{said}; tokenize without padding='max_length', and let the collator pad each batch: {_collator(seen)}"


def _collator(seen: Observed) -> str:
    """A collator that keeps the loss: not every one makes labels, or pads them."""
    kind = str(seen.model.get("class"))
    if kind.endswith("ForMaskedLM"):
        return "DataCollatorForLanguageModeling(tokenizer) makes the labels"
    if kind.endswith(("ForSequenceClassification", "ForMultipleChoice")):
        return "DataCollatorWithPadding(tokenizer)"
    if kind.endswith("ForTokenClassification"):
        return "DataCollatorForTokenClassification(tokenizer) also pads the labels"
    return (
        "DataCollatorForLanguageModeling(tokenizer, mlm=False) makes the labels; if the rows have labels, "
        "DataCollatorForSeq2Seq(tokenizer) pads them"
    )


def larger_batch(seen: Observed, *, rows: int, accumulation: int) -> str:
    accumulated = accumulation >= 1 and seen.accumulation > 1
    kept = (
        f"and {accumulation} accumulation steps, so the effective batch stays the same"
        if accumulated
        else "and tune the learning rate again, because the effective batch grows"
    )
    own = trainer(
        seen,
        f"per_device_train_batch_size={rows}",
        *((f"gradient_accumulation_steps={accumulation}",) if accumulated else ()),
    )
    if own:
        return own if accumulated else f"{own} {kept}"
    where = {"lightning": "Trainer(accumulate_grad_batches", "accelerate": "Accelerator(gradient_accumulation_steps"}
    if accumulated and seen.framework in where:
        kept = f"and {where[seen.framework]}={accumulation}), so the effective batch stays the same"
    return f"DataLoader(..., batch_size={rows}) {kept}"


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
        lightning="Trainer(accumulate_grad_batches=N), which reduces gradients once a step",
        accelerate="Accelerator(gradient_accumulation_steps=N) and with accelerator.accumulate(model): per micro-batch",
    )


def attention(seen: Observed) -> str:
    if seen.model.get("attention") == "eager":
        return 'from_pretrained(..., attn_implementation="sdpa")'
    return (
        "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) instead of the explicit softmax; "
        "attn_mask=... instead of is_causal for any other mask"
    )


def compiled(seen: Observed) -> str:
    return by_framework(
        seen,
        torch='model = torch.compile(model), or mode="reduce-overhead" for CUDA graphs',
        arguments=("torch_compile=True",),
        lightning="trainer.fit(torch.compile(module), ...)",
    )


def fewer_shapes(seen: Observed) -> str:
    if seen.framework in _TRAINERS:
        return "pad_to_multiple_of=64 in the data collator, so that shapes repeat"
    return "torch.compile(model, dynamic=True), or pad inputs to a few fixed lengths so that shapes repeat"


def anomaly(seen: Observed) -> str:
    return by_framework(
        seen,
        torch="remove torch.autograd.set_detect_anomaly(True) / detect_anomaly(); enable it only to find a NaN",
        lightning="Trainer(detect_anomaly=False)",
    )
