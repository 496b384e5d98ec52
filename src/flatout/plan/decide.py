"""Makes every decision with its reason, in one pass; later decisions depend on earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from flatout.cost import GIB, Flops, Rates
from flatout.errors import FlatoutError, UsageError
from flatout.plan import batch, kernels
from flatout.plan.decisions import Choices, Decisions
from flatout.plan.job import Job
from flatout.plan.predict import (
    LOSS_ROWS,
    Passes,
    Prediction,
    decided,
    documents_of,
    loss_chunk,
    path_of,
    predict,
    rates_of,
)
from flatout.plan.rollouts import predict_rl


@dataclass(frozen=True, kw_only=True)
class Plan:
    job: Job
    decisions: Decisions
    reasons: Mapping[str, str]
    predicted: Prediction
    rows: int | None = None  # concurrent sequences, if the recipe samples; its reason is among the others

    def with_pins(self, **changes: Any) -> Plan:
        """The plan of the same job with some decisions pinned to other values and everything else decided again."""
        return decide(replace(self.job, pins=replace(self.job.pins, **changes)))

    @property
    def flops(self) -> Flops:
        return self.job.flops(self.decisions.recompute)

    @property
    def rates(self) -> Rates:
        return rates_of(self.job, decided(self.job, self.decisions))

    def against_balanced(self) -> dict[str, Any] | None:
        """What another preset than balanced changes: decisions by name, and the speed with that preset."""
        pins = self.job.pins
        if pins.preset == "balanced":
            return None
        free = dict.fromkeys(pins.implied)
        try:
            plain = decide(replace(self.job, pins=replace(pins, preset="balanced", implied=(), **free)))
        except FlatoutError as error:
            return {"problem": str(error), "changes": {}, "tokens_per_s": None}
        ours, theirs = asdict(self.decisions), asdict(plain.decisions)
        return {
            "problem": None,
            "changes": {name: theirs[name] for name in ours if ours[name] != theirs[name]},
            "tokens_per_s": plain.predicted.tokens_per_s,
        }

    def explain(self) -> list[tuple[str, Any, str]]:
        """Rows of (decision, value, reason) in the order they are declared."""
        return [(f.name, getattr(self.decisions, f.name), self.reasons[f.name]) for f in fields(Decisions)]

    def to_json(self) -> dict[str, Any]:
        return {
            "decisions": asdict(self.decisions),
            "reasons": dict(self.reasons),
            "predicted": asdict(self.predicted),
            "job": {
                "shape": self.job.shape.to_json(),
                "parameters": self.job.num_parameters,
                "trained_parameters": self.job.num_trained,
                "sequence_length": self.job.sequence_length,
                "batch_tokens": self.job.batch_tokens,
                "num_ranks": self.job.num_ranks,
                "steps": self.job.steps,
                "packing": self.job.packing,
                "hardware": self.job.hardware.name,
                "device": self.job.device,
                "preset": self.job.pins.preset,
                "adapters": None if self.job.adapters is None else asdict(self.job.adapters),
                "base": self.job.base,
            },
            "balanced": self.against_balanced(),
            "rows": self.rows,
            "rates": self.rates.to_json(),
        }


def decide(job: Job) -> Plan:
    """Returns the plan of a job; pinned values are kept."""
    _refuse_for_foreign(job)
    choices = Choices(pins=job.pins)
    # Decided first: what fits, and which kernels run, follows from it.
    sharding = choices.choose("sharding", *batch.sharding(job))
    asked, job = job, replace(job, pins=replace(job.pins, sharding=sharding))
    _decide_passes(job, choices)
    _decide_host(job, choices)
    decisions, reasons = choices.decisions(), choices.reasons
    predicted = predict(job, decisions)
    if job.rollout is not None:
        predicted = predict_rl(job, decisions, predicted)
    if job.pins.micro_batch is None:
        reasons["micro_batch"] = f"{_peak_text(job, decisions, predicted)}; {reasons['micro_batch']}"
    rows = None
    if job.generator is not None:
        rows, reasons["rows"] = batch.rows_at_once(job, job.generator, precision=decisions.precision)
    return Plan(job=asked, decisions=decisions, reasons=reasons, predicted=predicted, rows=rows)


def _refuse_for_foreign(job: Job) -> None:
    """Refuses, in one message, all requested features that a model run by transformers does not support."""
    pins = job.pins
    asked = {
        "plan.fused_qkv": bool(pins.fused_qkv),
        "plan.fused_mlp": bool(pins.fused_mlp),
        "plan.fp8": bool(pins.fp8),
        f"plan.compile {pins.compile}": pins.compile not in (None, "none"),
        "plan.recompute selective": pins.recompute == "selective",
        "plan.sharding full": pins.sharding == "full",
    }
    if job.shape.foreign and (found := [name for name, present in asked.items() if present]):
        raise UsageError(
            f"this model does not support {', '.join(found)}: {job.shape.foreign}, so transformers runs it; "
            "remove these settings, or choose a model of the llama, mistral, qwen2 or qwen3 family"
        )


def _decide_passes(job: Job, choices: Choices) -> None:
    """Decides precision, kernels, batch and the optimizer."""
    precision = choices.choose("precision", *kernels.precision(job))
    found = kernels.segments(job, precision=precision)
    parts = {name: choices.choose(name, on, reason) for name, on, reason in found}
    fused = parts["fused_qkv"] and parts["fused_mlp"] and parts["fused_loss"]
    compile = choices.choose("compile", *kernels.compiler(job, precision=precision, fused=fused))
    path = path_of(fused=fused, fp8=parts["fp8"], compiled=compile != "none")
    fit, why = batch.fit(job, precision=precision, path=path)
    choices.values |= asdict(fit)
    choices.reasons |= why
    recompute, micro_tokens = fit.recompute, fit.micro_batch * job.sequence_length
    attention = choices.choose(
        "attention", *kernels.attention(job, precision=precision, compile=compile, recompute=recompute)
    )
    choices.choose("loss_chunk", *_loss_chunk(job, micro_tokens))
    passes = Passes(
        micro_tokens=micro_tokens,
        accumulation=fit.accumulation,
        precision=precision,
        path=path,
        recompute=recompute,
        tf32=choices.choose("tf32", *kernels.tf32(job)),
        documents=documents_of(job, attention),
    )
    choices.choose("graphs", *kernels.graphs(job, passes, compile=compile))
    choices.choose("fused_optimizer", True, "one pass over weights, gradients and moments instead of many")


def _loss_chunk(job: Job, micro_tokens: int) -> tuple[int, str]:
    rows, chunks = loss_chunk(job, micro_tokens), math.ceil(micro_tokens / LOSS_ROWS[job.device])
    saved = (micro_tokens - rows) * job.shape.vocab * 2 / GIB
    return rows, f"{chunks} chunks per micro-batch; saves {saved:.1f} GiB of logits"


def _peak_text(job: Job, decisions: Decisions, predicted: Prediction) -> str:
    total_gib = job.usable_gib
    peak = "memory unknown" if total_gib is None else f"predicted peak {predicted.peak_gib:.1f} of {total_gib:.1f} GiB"
    return f"{decisions.micro_batch * job.sequence_length} tokens per pass; {peak}"


# -- the host -----------------------------------------------------------------------------------------------


def _decide_host(job: Job, choices: Choices) -> None:
    """Decides data loading, the allocator's settings, garbage collection and threads."""
    on_gpu = job.device == "gpu"
    choices.choose("workers", *_workers(job))
    ahead = 4 if job.pins.preset == "max" else 2
    choices.choose("prefetch", ahead, f"{ahead} steps of data are ready while the device computes")
    pinning = "copies from page-locked memory overlap with kernels" if on_gpu else "no device to copy to"
    choices.choose("pin_memory", on_gpu, pinning)
    segments = "reduces fragmentation: freed blocks of any size can be reused"
    choices.choose("expandable_segments", on_gpu, segments if on_gpu else "an allocator setting for GPUs")
    choices.choose("memory_fraction", *_fraction(job))
    choices.choose("manual_gc", True, "a garbage collection in the middle of a step would stall every rank")
    choices.choose("threads", *_threads(job))


def _workers(job: Job) -> tuple[int, str]:
    cores = job.hardware.num_cpus
    if cores is None:
        return 2, "the number of CPU cores is unknown; workers are added if the device waits for data"
    count = max(1, min(4, cores // job.num_ranks - 1))
    return count, f"{cores} cores for {job.num_ranks} rank(s); workers are added if the device waits for data"


def _fraction(job: Job) -> tuple[float, str]:
    share = {"safe": 0.90, "balanced": 0.95, "max": 0.98}[job.pins.preset]
    if job.device == "cpu":
        return share, "an allocator setting for GPUs"
    return share, "the rest is left for the driver and library buffers"


def _threads(job: Job) -> tuple[int, str]:
    cores = job.hardware.num_cpus
    if cores is None:
        return 4, "the number of CPU cores is unknown"
    share = max(1, cores // job.num_ranks)
    free = job.hardware.free_cpus
    if job.device == "cpu" and free is not None and free < share:
        return free, f"other processes use {share - free} of {cores} cores, and a thread that waits for one stops all"
    if job.device == "cpu":
        return share, f"all of this rank's share of {cores} cores"
    return min(8, share), "the GPU computes; the host needs only a few threads"
