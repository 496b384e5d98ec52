"""Causes that follow from how busy the GPU and the CPU are, and from settings that the log shows."""

from __future__ import annotations

from collections.abc import Iterator

from flatout.hardware import Hardware
from flatout.insight.diagnose.host import finding_of
from flatout.insight.logs.formats import Log
from flatout.record import Finding

# Shares of time: a GPU that is busy for less waits; a CPU that is busy for more has no time left.
BUSY_GPU, BUSY_CPU = 0.6, 0.85
# Fewer tokens than this in a forward pass leave a GPU waiting for kernel launches.
_FEW_TOKENS = 2048
# Below this share of the GPU's memory, a larger micro-batch is worth a try.
LITTLE_MEMORY = 0.5
# Below this share of the time, emptying the cache is not worth a change.
_CACHE_SHARE = 0.02
_MUCH_GENERATION = 0.3


def findings(log: Log, *, slow: bool, machine: Hardware | None) -> Iterator[Finding]:
    """`slow`: the log shows an MFU that is far too low."""
    util = log.steady("gpu_util")
    idle = util is not None and util < BUSY_GPU
    for found in (
        _host_bound(log, util) if idle else None,
        _little_memory(log, machine) or (_few_tokens(log) if slow or idle else None),
        _generation(log, idle=idle),
        _float32(log, machine),
        _recompute(log, machine),
        _empty_cache(log),
    ):
        if found is not None:
            yield found


def idle_gpu(log: Log) -> Finding | None:
    """A GPU that waits, where nothing else in the log says for what."""
    util = log.steady("gpu_util")
    if util is None or util >= BUSY_GPU:
        return None
    return finding_of(
        "low-mfu",
        f"The GPU is busy only {util:.0%} of the time; the log does not show why.",
        None,
        None,
        ["GPU utilisation as logged", "how busy the CPU is would tell whether the GPU waits for it"],
        "measure one step: `flatout doctor -- COMMAND` gives its phases and what the GPU waits for",
    )


def suspicions(log: Log, *, machine: Hardware | None) -> Iterator[str]:
    """What a setting in the log hints at, and the number that would settle it."""
    if log.settings.get("workers") == 0 and log.steady("gpu_util") is None and not log.values("data_s"):
        yield (
            "whether training waits for data, as the loader has no workers: GPU utilisation (nvidia-smi), or the time "
            "a step waits (`flatout doctor -- COMMAND`)"
        )
    if log.settings.get("checkpointing") == 1 and memory_share(log, machine) is None:
        yield "whether gradient checkpointing, which is on, is needed: the GPU's memory, used and in total (nvidia-smi)"
    if (log.steady("gpu_util") or 1.0) < BUSY_GPU and log.steady("cpu_util") is None:
        yield "how busy the CPU is, to tell what the GPU waits for: top, or a monitor that logs both"
    if log.values("empty_cache_s") and _seconds_of_all(log) is None:
        yield "how long everything took, to say what share of it emptying the cache is"


def memory_share(log: Log, machine: Hardware | None) -> float | None:
    share = log.steady("memory_share")
    if share is None and machine is not None and machine.memory_gib and (gib := log.steady("memory_gib")):
        return gib / machine.memory_gib
    return share


def _host_bound(log: Log, util: float | None) -> Finding | None:
    cpu, workers = log.steady("cpu_util"), log.settings.get("workers")
    evidence = [f"GPU utilisation {util:.0%} as logged: for the rest of the time the GPU has nothing to do"]
    if cpu is not None and cpu >= BUSY_CPU:
        sentence = f"The GPU is busy {util:.0%} of the time and the CPU {cpu:.0%}: the GPU waits for work on the CPU."
        evidence.append(f"CPU utilisation {cpu:.0%} as logged: more loader workers need free cores")
        fix = (
            "take work off the CPU: tokenize, decode and augment once, before training; compute rewards in fewer, "
            "parallel calls; `flatout doctor -- COMMAND` names the lines that take the time"
        )
    elif workers == 0:
        sentence = (
            f"The GPU is busy {util:.0%} of the time, and the loader has no workers: every step waits for a batch."
        )
        evidence.append("num_workers=0, or not set, as the log says")
        fix = "DataLoader(num_workers=4, persistent_workers=True, pin_memory=True), if so many cores are free"
    else:
        return None
    return finding_of("data-starvation", sentence, None if util is None else 1 - util, None, evidence, fix)


def _little_memory(log: Log, machine: Hardware | None) -> Finding | None:
    used, how = log.steady("memory_share"), "memory share as logged"
    if used is None and machine is not None and (used := memory_share(log, machine)) is not None:
        gib = log.steady("memory_gib")
        how = f"{gib:.3g} GiB as logged, {machine.memory_gib:.3g} GiB of a {machine.name}"
    if used is None or used >= LITTLE_MEMORY:
        return None
    return finding_of(
        "small-batch",
        f"Only {used:.0%} of the GPU's memory is used: a larger micro-batch would fit.",
        None,
        None,
        [f"{how}; a log does not show how much time it saves"],
        "double the micro-batch and halve accumulation until memory is about 80 % used; compare tokens/s",
    )


def _few_tokens(log: Log) -> Finding | None:
    rows = log.settings.get("micro_batch") or log.settings.get("batch_rows")
    parts = log.settings.get("prompt_length", 0.0) + log.settings.get("response_length", 0.0)
    length = parts or log.settings.get("length") or log.once.get("sequence_length")
    if not rows or (length is None and rows > 1) or (length is not None and rows * length >= _FEW_TOKENS):
        return None
    what = "one row" if length is None else f"at most {rows * length:,.0f} tokens ({rows:,.0f} x {length:,.0f})"
    return finding_of(
        "small-batch",
        f"A forward pass has {what}: too little work for a GPU.",
        None,
        None,
        ["batch and lengths as the log says; a log does not show how much time it saves"],
        "a larger micro-batch, up to about 80 % of the memory; short rows cost little if a pass has many of them",
    )


def _generation(log: Log, *, idle: bool) -> Finding | None:
    generating, training = log.steady("generation_s"), log.steady("training_s")
    if not generating or not training or (share := generating / (generating + training)) < _MUCH_GENERATION:
        return None
    evidence = [f"{generating / 60:,.3g} min of generation beside {training / 60:,.3g} min of training"]
    if not idle:
        fix = "generate with an inference engine (vLLM), all prompts in one call, with the key/value cache on"
        return finding_of("generation-bound", f"Generation takes {share:.0%} of the time.", share, None, evidence, fix)
    util = log.steady("gpu_util")
    if rows := log.settings.get("micro_batch"):
        evidence.append(f"at most {rows:,.0f} sequences at a time")
    return finding_of(
        "generation-batch",
        f"Generation takes {share:.0%} of the time, and the GPU is busy {util:.0%} of it: its batches are too small.",
        share,
        None,
        evidence,
        "complete more prompts in one call, and all samples of a prompt together, until memory is about 80 % used",
    )


def _float32(log: Log, machine: Hardware | None) -> Finding | None:
    bits, mixed = log.settings.get("bits"), log.settings.get("mixed")
    off = mixed == 0 and bits != 16
    if not (off or (bits == 32 and mixed != 1)) or (machine is not None and machine.gpu is None):
        return None
    return finding_of(
        "fp32-matmul",
        "Mixed precision is off: unless the weights are in 16 bits, training computes in float32.",
        None,
        None,
        ["the precision as the log says; on a GPU with tensor cores 16 bits are several times as fast"],
        "bf16=True in TrainingArguments, or torch.autocast with bfloat16; on a T4 or V100, float16 with a GradScaler",
    )


def _recompute(log: Log, machine: Hardware | None) -> Finding | None:
    used = memory_share(log, machine)
    if log.settings.get("checkpointing") != 1 or used is None or used >= LITTLE_MEMORY:
        return None
    return finding_of(
        "needless-recompute",
        f"Gradient checkpointing is on, and only {used:.0%} of the GPU's memory is used.",
        None,
        None,
        ["a forward pass is computed twice to save memory that is free"],
        "gradient_checkpointing=False, and a smaller micro-batch if memory runs out",
    )


def _empty_cache(log: Log) -> Finding | None:
    seconds, total = log.steady("empty_cache_s"), _seconds_of_all(log)
    if not seconds or not total or (share := seconds / total) < _CACHE_SHARE:
        return None
    return finding_of(
        "empty-cache",
        f"Emptying the cache takes {seconds:,.3g} s of {total:,.3g} s.",
        share,
        share,
        ["calls and their duration as the log says"],
        "remove torch.cuda.empty_cache() from the loop; once after an evaluation is enough",
    )


def _seconds_of_all(log: Log) -> float | None:
    return log.steady("generation_s") or log.steady("wall_s") or log.steady("epoch_s")
