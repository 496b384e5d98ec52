"""The theoretical limit: how many tokens per second this model can reach on this device, and impossible claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flatout.cost import Flops, ModelShape, Rates, flops_per_token
from flatout.errors import UsageError
from flatout.hardware import Hardware
from flatout.hardware.table import by_nvml_name
from flatout.insight.diagnose.observed import Observed

# Below this share of the limit, a job without a known cause is not called healthy.
FAR_BELOW = 0.1
# Findings that do not explain a low speed.
NOT_OF_SPEED = ("unstable-loss", "slow-convergence", "oom-risk")


def limit_of(seen: Observed) -> dict[str, Any]:
    """Measured tokens per second, the ceiling, and their ratio; None for values that are unknown."""
    peak, source = _peak(seen)
    flops, how = _flops(seen)
    measured = seen.tokens_per_s
    ceiling = None if peak is None or flops is None else peak * seen.world / flops.done
    if ceiling is not None and measured is not None and measured > ceiling:
        # Not every weight multiplies every token (experts, shared weights), so the FLOPs cannot be counted.
        ceiling, flops, how = None, None, "not every weight multiplies every token, so the FLOPs per token are unknown"
    return {
        "tokens_per_s": measured,
        "ceiling_tokens_per_s": ceiling,
        "share": None if ceiling is None or measured is None else measured / ceiling,
        "peak_flops": peak,
        "flops_per_token": None if flops is None else flops.done,
        "source": source,
        "model": how,
    }


def rates_of(seen: Observed) -> Rates | None:
    flops, _ = _flops(seen)
    peak, _ = _peak(seen)
    return None if flops is None else Rates(flops=flops, peak_flops=peak, num_devices=seen.world)


def _peak(seen: Observed) -> tuple[float | None, str]:
    gpu = seen.facts.get("gpu")
    if seen.on_gpu and gpu:
        card = by_nvml_name(gpu["name"])
        if card is None:
            return None, f"{gpu['name']} is not in the table of datasheets"
        dtype = "bf16" if "bf16" in card.peak_flops else "fp16"
        return card.peak_flops.get(dtype), f"{dtype} peak of the {card.source}"
    measured = (seen.facts.get("replays") or {}).get("matmul_flops")
    if measured:
        return float(measured), f"a 1024 x 1024 float32 matmul measured here, {seen.facts['threads']} threads"
    return None, f"there is no datasheet for this CPU, and its speed was not measured: {seen.no_replays}"


def _flops(seen: Observed) -> tuple[Flops | None, str]:
    """FLOPs per token, from the model's configuration if it is a known decoder, else from its weights."""
    model, length = seen.model, seen.length
    weights = model.get("matmul_weights")
    if not weights or length is None:
        return None, "no token ids or no linear layers were observed, so the FLOPs per token are unknown"
    frozen = model["trainable"] < 0.5 * model["parameters"]
    try:
        shape = ModelShape.from_hf(model.get("config") or {})
    except UsageError:
        per_weight = 4 if frozen else 6
        flops = Flops(forward=2 * weights, backward=(per_weight - 2) * weights, recomputed=0.0, common=6.0 * weights)
        return flops, f"{weights:,} matmul weights, without attention: the ceiling is slightly too high"
    flops = flops_per_token(shape, sequence_length=round(length))
    if frozen:
        flops = replace(flops, backward=flops.backward - 2 * shape.matmul_weights)
    return flops, "its config.json, with causal attention"


def too_good(claimed_tokens_per_s: float, *, parameters: float, hardware: Hardware) -> str | None:
    """The error message for a claim that this hardware cannot reach; None if it is possible or unknown."""
    peak = hardware.peak_flops.get("bf16") or hardware.peak_flops.get("fp16")
    if peak is None:
        return None
    share = 6 * parameters * claimed_tokens_per_s / (peak * max(1, hardware.num_gpus))
    if share <= 1:
        return None
    return (
        f"{claimed_tokens_per_s:,.0f} tokens/s with a model of {parameters:,.0f} weights would be {share:.0%} of the "
        f"peak of {max(1, hardware.num_gpus)} x {hardware.name}: that number is wrong"
    )


def as_json(rates: Rates | None) -> Mapping[str, Any] | None:
    return None if rates is None else rates.to_json()
