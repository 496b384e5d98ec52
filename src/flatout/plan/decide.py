"""Every decision with its reason, one pass over them: later ones stand on earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from flatout.cost import GIB, Flops, Rates
from flatout.errors import UsageError
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    job: Job
    decisions: Decisions
    reasons: Mapping[str, str]
    predicted: Prediction
    rows: int | None = None  # completions written at once, where the recipe samples; its reason is among the others

    def but(self, **changes: Any) -> Plan:
        """The same job with some decisions pinned to other values, everything else decided anew."""
        return decide(replace(self.job, pins=replace(self.job.pins, **changes)))

    @property
    def flops(self) -> Flops:
        return self.job.flops(self.decisions.recompute)

    @property
    def rates(self) -> Rates:
        return rates_of(self.job, decided(self.job, self.decisions))

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
                "sequence_length": self.job.sequence_length,
                "batch_tokens": self.job.batch_tokens,
                "num_ranks": self.job.num_ranks,
                "steps": self.job.steps,
                "packing": self.job.packing,
                "hardware": self.job.hardware.name,
                "preset": self.job.pins.preset,
                "adapters": None if self.job.adapters is None else asdict(self.job.adapters),
                "base": self.job.base,
            },
            "rows": self.rows,
            "rates": self.rates.to_json(),
        }


def decide(job: Job) -> Plan:
    """The plan of a job; a pinned value is taken as it is."""
    _refuse_for_foreign(job)
    choices = Choices(pins=job.pins)
    _decide_passes(job, choices)
    _decide_host(job, choices)
    decisions, reasons = choices.decisions(), choices.reasons
    predicted = predict(job, decisions)
    if job.pins.micro_batch is None:
        reasons["micro_batch"] = f"{_room(job, decisions, predicted)}; {reasons['micro_batch']}"
    rows = None
    if job.generator is not None:
        rows, reasons["rows"] = batch.rows_at_once(job, job.generator, precision=decisions.precision)
    return Plan(job=job, decisions=decisions, reasons=reasons, predicted=predicted, rows=rows)


def _refuse_for_foreign(job: Job) -> None:
    """What was asked for and is not there for a model that transformers runs; all of it at once."""
    pins = job.pins
    asked = {
        "data.packing documents": job.packing == "documents",
        "plan.fused_qkv": bool(pins.fused_qkv),
        "plan.fused_mlp": bool(pins.fused_mlp),
        "plan.fp8": bool(pins.fp8),
        f"plan.compile {pins.compile}": pins.compile not in (None, "none"),
        "plan.recompute selective": pins.recompute == "selective",
    }
    if job.shape.foreign and (found := [name for name, present in asked.items() if present]):
        raise UsageError(
            f"this model does not run with {', '.join(found)}: {job.shape.foreign}, so transformers runs it; "
            "leave out what is named, or choose a model of the llama, mistral, qwen2 or qwen3 family"
        )


def _decide_passes(job: Job, choices: Choices) -> None:
    """How the device computes."""
    precision = choices.settle("precision", *kernels.precision(job))
    found = kernels.segments(job, precision=precision)
    parts = {name: choices.settle(name, on, reason) for name, on, reason in found}
    fused = parts["fused_qkv"] and parts["fused_mlp"] and parts["fused_loss"]
    compile = choices.settle("compile", *kernels.compiler(job, precision=precision, fused=fused))
    path = path_of(fused=fused, fp8=parts["fp8"], compiled=compile != "none")
    fit, why = batch.fit(job, precision=precision, path=path)
    choices.values |= asdict(fit)
    choices.reasons |= why
    recompute, micro_tokens = fit.recompute, fit.micro_batch * job.sequence_length
    attention = choices.settle(
        "attention", *kernels.attention(job, precision=precision, compile=compile, recompute=recompute)
    )
    choices.settle("loss_chunk", *_loss_chunk(job, micro_tokens))
    passes = Passes(
        micro_tokens=micro_tokens,
        accumulation=fit.accumulation,
        precision=precision,
        path=path,
        recompute=recompute,
        tf32=choices.settle("tf32", *kernels.tf32(job)),
        documents=documents_of(job, attention),
    )
    choices.settle("graphs", *kernels.graphs(job, passes, compile=compile))
    choices.settle("fused_optimizer", True, "one pass over weights, gradients and moments instead of many")


def _loss_chunk(job: Job, micro_tokens: int) -> tuple[int, str]:
    rows, chunks = loss_chunk(job, micro_tokens), math.ceil(micro_tokens / LOSS_ROWS[job.device])
    saved = (micro_tokens - rows) * job.shape.vocab * 2 / GIB
    return rows, f"{chunks} chunks a micro-batch; holds {saved:.1f} GiB fewer logits than all at once"


def _room(job: Job, decisions: Decisions, predicted: Prediction) -> str:
    total_gib = job.usable_gib
    peak = "memory unknown" if total_gib is None else f"predicted peak {predicted.peak_gib:.1f} of {total_gib:.1f} GiB"
    return f"{decisions.micro_batch * job.sequence_length} tokens a pass; {peak}"


# -- the host's part ----------------------------------------------------------------------------------------


def _decide_host(job: Job, choices: Choices) -> None:
    """How data comes, and what the allocator and the interpreter may do."""
    on_gpu = job.device == "gpu"
    choices.settle("workers", *_workers(job))
    ahead = 4 if job.pins.preset == "max" else 2
    choices.settle("prefetch", ahead, f"{ahead} steps of data stand ready while the device works")
    pinning = "page-locked memory copies while kernels run" if on_gpu else "no device to copy to"
    choices.settle("pin_memory", on_gpu, pinning)
    segments = "freed blocks of any size can be used again, against fragmentation"
    choices.settle("expandable_segments", on_gpu, segments if on_gpu else "an allocator setting for GPUs")
    choices.settle("memory_fraction", *_fraction(job))
    choices.settle("manual_gc", True, "a collection in the middle of a step would stall every rank")
    choices.settle("threads", *_threads(job))


def _workers(job: Job) -> tuple[int, str]:
    cores = job.hardware.num_cpus
    if cores is None:
        return 2, "the number of CPU cores is not known; more are added if the device waits for data"
    count = max(1, min(4, cores // job.num_ranks - 1))
    return count, f"{cores} cores for {job.num_ranks} rank(s); more are added if the device waits for data"


def _fraction(job: Job) -> tuple[float, str]:
    share = {"safe": 0.90, "balanced": 0.95, "max": 0.98}[job.pins.preset]
    if job.device == "cpu":
        return share, "an allocator setting for GPUs"
    return share, "the rest is left to the driver and the libraries' own buffers"


def _threads(job: Job) -> tuple[int, str]:
    cores = job.hardware.num_cpus
    if cores is None:
        return 4, "the number of CPU cores is not known"
    share = max(1, cores // job.num_ranks)
    if job.device == "cpu":
        return share, f"all of this rank's share of {cores} cores"
    return min(8, share), "the GPU does the arithmetic; a few threads serve the host's part"
