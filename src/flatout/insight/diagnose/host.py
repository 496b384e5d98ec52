"""Causes on the host's side: data, logging, evaluation, saving, the allocator, generation and rewards."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from flatout.insight.diagnose import fixes
from flatout.insight.diagnose.observed import Observed, short
from flatout.insight.diagnose.ranks import uneven
from flatout.record import Finding

# Below these shares of step time a cause is not reported.
WORTH = 0.05
# By which factor something that is done too often should be done less often.
RARER = 5
# More workers than these are never advised.
MOST_WORKERS = 8


def data_starvation(seen: Observed) -> Finding | None:
    """Training waits for its next batch, or for the rank with the larger batch."""
    # On a GPU, apparent work between the steps may be the wait for a value that the host reads.
    between = max(0.0, seen.activities.get("", 0.0) - (waits(seen, "sync") if seen.on_gpu else 0.0))
    if not seen.micro or seen.is_in_most_steps("new-model") or seen.is_in_most_steps("new-optimizer"):
        between = 0.0  # without a module the computation itself happens there; what is made anew has a cause of its own
    share = -seen.loader_start_share + seen.activities.get("data", 0.0) + between
    if seen.idle_share is not None:  # a loss computed outside the model is also work between the steps
        share = min(share, seen.idle_share)
    if share < 0.08:
        return _uneven_data(seen)
    loader = seen.loader
    workers = suited_workers(seen, share=share)
    gain = _gain_of_workers(seen, share=share, workers=workers)
    where = seen.sites("data", "data", most=1) or seen.sites("", most=1)
    at = f" at {where[0]}" if where else ""
    evidence = [f"{share:.0%} of step time waiting for data (phases of {len(seen.steps)} steps, stack samples{at})"]
    if loader is None:
        sentence = f"The script builds its batches between two steps{at}, and the model waits."
        fix = "move that code into a Dataset and read it with " + fixes.loader(seen, workers=workers)
        evidence.append("no DataLoader was used for training")
    elif not loader["num_workers"]:
        sentence = f"Batches are built in the training process{at}: there are no loader workers, so every step waits."
        fix = fixes.loader(seen, workers=workers)
        evidence.append(f"DataLoader(num_workers=0, batch_size={loader['batch_size']}) over {loader['dataset']}")
        if workers == 1 and cores_of(seen) < 2:
            fix += "; with one core, do the slow part once, before training"
    elif workers < loader["num_workers"]:
        sentence = f"{loader['num_workers']} loader workers cost more than they help{at}: {_few_cores(seen)}."
        fix = f"{fixes.loader(seen, workers=workers)}, or do the slow part once, before training"
        evidence.append(f"DataLoader(num_workers={loader['num_workers']}) over {loader['dataset']}")
    else:
        sentence = f"{loader['num_workers']} loader workers are slower than training{at}."
        fix = "do the slow part once, before training"
        if workers > loader["num_workers"]:
            fix = f"{fixes.loader(seen, workers=workers)}, or {fix}"
        evidence.append(f"DataLoader(num_workers={loader['num_workers']}) over {loader['dataset']}")
    evidence += _replayed_batches(seen)
    if seen.on_gpu and loader is not None and not loader["pin_memory"]:
        pageable = float(seen.profile.get("copies_pageable_s") or 0.0) / seen.step_s
        evidence.append(f"memory is not pinned: {pageable:.1%} of step time in copies from pageable memory (profiler)")
    return finding_of("data-starvation", sentence, share, gain, evidence, fix)


def cores_of(seen: Observed) -> int:
    """The cores of one rank."""
    return max(1, seen.cores // max(1, seen.world))


def suited_workers(seen: Observed, *, share: float) -> int:
    """How many loader workers fit the machine and the batches.

    None where handing a batch over takes longer than making it.

    On a CPU training computes on the same cores, so no more workers than cores help.
    """
    now = (seen.loader or {}).get("num_workers") or 0
    most = min(MOST_WORKERS, cores_of(seen))
    batch = seen.replay("batch-alone")
    if now and batch is not None:  # waited for by training, and made in the training process
        rest_s = seen.step_s * (1 - share) / seen.accumulation
        if batch[1] < batch[0]:
            return 0
        return min(most, max(1, math.ceil(batch[1] / max(rest_s, 1e-9))))
    return min(most, 2 * now if now else max(2, most) if most > 1 else 1)


def _gain_of_workers(seen: Observed, *, share: float, workers: int) -> float | None:
    """With workers the batch is made while the step runs, so only the longer of the two times counts.

    The CPU time of the job remains, and no number of workers spreads it over more cores than there are.
    """
    batch = seen.replay("batch-alone")
    if not workers and batch is not None:
        return share * max(0.0, 1 - batch[1] / batch[0])
    now = (seen.loader or {}).get("num_workers") or 0
    if now > workers:
        return None
    if now == workers:  # the slow part done once, before training
        return share
    gain = 1 - max(1 - share, share * max(1, now) / workers)
    used = sum(step.get("cpu_s") or 0.0 for step in seen.steps) / seen.seconds
    return max(0.0, min(gain, 1 - min(1.0, used / cores_of(seen))))


def _few_cores(seen: Observed) -> str:
    cores = cores_of(seen)
    if (batch := seen.replay("batch-alone")) is not None and batch[1] < batch[0]:
        return "a batch is made faster in the training process itself"
    return f"there {'is 1 core' if cores == 1 else f'are {cores} cores'}"


def _replayed_batches(seen: Observed) -> list[str]:
    batch = seen.replay("batch-alone")
    if batch is None:
        return []
    return [
        f"a batch: {batch[0] * 1e3:.2f} ms of waiting, {batch[1] * 1e3:.2f} ms to make it without workers (replayed)"
    ]


def _uneven_data(seen: Observed) -> Finding | None:
    found = uneven(seen.ranks)
    gain = 0.0 if found is None else found.wasted * seen.compute_share
    if found is None or gain < WORTH:
        return None
    return finding_of(
        "data-starvation",
        "A step's tokens are distributed unevenly, and every rank waits for the one with the most.",
        gain,
        gain,
        [found.sentence, f"forward and backward are {seen.compute_share:.0%} of step time"],
        "give every rank the same number of tokens per step: pack rows, or batch rows of similar length across ranks",
    )


def logging(seen: Observed) -> Finding | None:
    share = seen.activities.get("log", 0.0)
    if share < WORTH:
        return None
    sites = seen.sites("log")
    return finding_of(
        "logging",
        f"Logging slows down every step{_at(sites)}.",
        share,
        share * 0.9,
        [f"{share:.0%} of step time in logging code (stack samples)", *sites],
        fixes.rarer(seen, "logging"),
    )


def busy_thread(seen: Observed) -> Finding | None:
    """Another thread of the script runs Python all the time, and the training thread waits for the GIL."""
    found = max(seen.facts.get("other_threads") or (), key=lambda thread: float(thread["share"]), default=None)
    share = 0.0 if found is None else min(1.0, float(found["share"]))
    if found is None or share < 0.15:
        return None
    who, where = f"Thread {found['name']!r}", f"while the model trains, at {short(found['site'])}: the two take turns."
    evidence = [f"the thread used the CPU for {share:.0%} of the time; Python runs one thread at a time"]
    fix = "do that work in a process of its own (multiprocessing.Process), or less often"
    if found["kind"] == "log":
        return finding_of("logging", f"{who} logs {where}", share, share * 0.8, evidence, fix)
    return finding_of("busy-thread", f"{who} runs Python {where}", share, share * 0.8, evidence, fix)


def evaluation(seen: Observed) -> Finding | None:
    share, times = seen.activities.get("eval", 0.0), seen.steps_with("eval")
    if share < 0.1 or times < 2 or _grows(seen):
        return None
    return finding_of(
        "evaluation",
        f"Evaluation runs {times} times in {len(seen.steps)} steps and takes a large share of the time.",
        share,
        share * (1 - 1 / RARER),
        [
            f"{share:.0%} of step time in forward passes without gradients and the code around them",
            *seen.sites("eval", "eval"),
        ],
        fixes.rarer(seen, "evaluation", times=RARER),
    )


def checkpointing(seen: Observed) -> Finding | None:
    share, times = seen.activities.get("save", 0.0), sum(step["counts"].get("save", 0) > 0 for step in seen.steps)
    if share < WORTH or times < 2:
        return None
    return finding_of(
        "checkpointing",
        f"The model is saved in {times} of {len(seen.steps)} steps, and training stops each time.",
        share,
        share * (1 - 1 / RARER),
        [f"{share:.0%} of step time in saving (torch.save, safetensors)", *seen.sites("save", "save")],
        fixes.rarer(seen, "checkpointing", times=RARER),
    )


def empty_cache(seen: Observed) -> Finding | None:
    calls = sum(step["counts"].get("empty-cache", 0) for step in seen.steps)
    share = seen.share("empty-cache")
    if seen.on_gpu and calls:  # the released memory is allocated again in the middle of the step
        share += waits(seen, "malloc")
    if not calls or share < 0.02:
        return None
    return finding_of(
        "empty-cache",
        "torch.cuda.empty_cache() or gc.collect() in the loop frees memory that the next step allocates again.",
        share,
        share,
        [f"{calls / len(seen.steps):.1f} calls a step, {share:.0%} of step time", *seen.sites("", "empty-cache")],
        "remove the call from the loop; once after an evaluation is enough",
    )


def reward_bound(seen: Observed) -> Finding | None:
    share = seen.activities.get("reward", 0.0)
    if share < 0.1:
        return None
    sites = seen.sites("reward")
    return finding_of(
        "reward-bound",
        f"Rewards are computed one after another while the model waits{_at(sites)}.",
        share,
        share * 0.8,
        [f"{share:.0%} of step time in reward code (stack samples)", *sites],
        "score completions in a concurrent.futures.ProcessPoolExecutor while the next ones are generated",
    )


def no_kv_cache(seen: Observed) -> Finding | None:
    """Generation that processes the whole text again for every token."""
    share = seen.activities.get("generate", 0.0)
    uncached = [g for g in seen.facts["generations"] if g["cache"] is False]
    if uncached:
        prompt, new = _mean(uncached, "prompt"), _mean(uncached, "new")
        evidence = f"generate(use_cache=False) at {short(uncached[0]['site'])}: {new:.0f} tokens after {prompt:.0f}"
    elif grown := _grows(seen):
        prompt, new, passes = grown
        share += passes
        evidence = f"forward passes without gradients whose length grows by one, {new:.0f} times from {prompt:.0f}"
    else:
        return None
    if share < WORTH or new < 4:
        return None
    read_again = new * (prompt + new / 2)
    left = max(0.3, (prompt + new) / read_again)  # one token at a time is limited by kernel launches, not by FLOPs
    return finding_of(
        "no-kv-cache",
        "Generation runs without a key/value cache: every new token processes the whole text again.",
        share,
        share * (1 - left),
        [f"{share:.0%} of step time in generation", evidence],
        "model.generate(..., use_cache=True); in your own loop, pass past_key_values",
    )


def generation_batch(seen: Observed) -> Finding | None:
    share = seen.activities.get("generate", 0.0)
    calls = seen.facts["generations"]
    per_step = Counter(g["step"] for g in calls)
    if not per_step or share < WORTH:
        return None
    each, rows = sum(per_step.values()) / len(per_step), _mean(calls, "rows")
    if each < 2 or rows > 8:
        return None
    return finding_of(
        "generation-batch",
        f"Prompts are completed in {each:.0f} calls per step of {rows:.0f} rows each; one call would be enough.",
        share,
        share * (1 - 1 / each) * 0.9,
        [f"{share:.0%} of step time in generate(), called {each:.1f} times a step at {short(calls[0]['site'])}"],
        "pad the prompts on the left (tokenizer.padding_side='left') and pass them to one generate() call",
    )


def generation_bound(seen: Observed) -> Finding | None:
    """Most of a step is spent generating text, as in reinforcement learning."""
    share = seen.activities.get("generate", 0.0)
    if share < 0.3:
        return None
    reward, passive = seen.activities.get("reward", 0.0), seen.activities.get("reference", 0.0)
    evidence = [
        f"{share:.0%} of step time in generation, {reward:.0%} in rewards, {passive:.0%} in log-probabilities without "
        f"gradients, {seen.share('forward', 'loss', 'backward', 'optimizer'):.0%} in the update"
    ]
    if calls := seen.facts["generations"]:
        evidence.append(
            f"{_mean(calls, 'rows'):.0f} rows, {_mean(calls, 'new'):.0f} new tokens after {_mean(calls, 'prompt'):.0f}"
        )
    advice = {
        "trl": "GRPOConfig(use_vllm=True), a smaller max_completion_length, more completions per call "
        "(num_generations, generation_batch_size), and use_cache=True"
    }.get(
        seen.framework,
        "generate with an inference engine (vLLM: use_vllm=True in TRL, actor_rollout_ref.rollout.name=vllm in verl, "
        "--vllm_num_engines in OpenRLHF), all prompts in one call, with the key/value cache on",
    )
    return finding_of(
        "generation-bound",
        f"Generation takes {share:.0%} of the step; the update waits for it.",
        share,
        None,
        evidence,
        advice,
    )


def _grows(seen: Observed) -> tuple[float, float, float] | None:
    """A generation loop: forward passes without gradients that grow by one token.

    Returns the first length, the number of lengths, and the share of step time of these passes. In train mode they are
    counted with those of a reference model, which are told apart by their tokens.
    """
    for phase in ("eval", "reference"):
        passes = [(rows, length, count) for of, rows, length, count in seen.facts["forwards"] if of == phase and length]
        tokens = sum(rows * length * count for rows, length, count in passes)
        for rows in {rows for rows, _, _ in passes}:
            lengths = {length for of, length, _ in passes if of == rows}
            if len(lengths) >= 8 and max(lengths) - min(lengths) == len(lengths) - 1:
                own = sum(rows * length * count for of, length, count in passes if of == rows)
                return min(lengths), len(lengths), seen.activities.get(phase, 0.0) * own / tokens
    return None


def waits(seen: Observed, kind: str) -> float:
    """Share of step time in which the GPU was idle for this reason, by the profiler."""
    found = seen.profile.get("waits") or {}
    return float(found.get(kind, 0.0)) / seen.step_s


def _mean(rows: Any, key: str) -> float:
    return float(sum(row[key] for row in rows) / len(rows))


def _at(sites: list[str]) -> str:
    return f" at {sites[0]}" if sites else ""


def finding_of(
    cause: str,
    sentence: str,
    share: float | None,
    gain: float | None,
    evidence: list[str],
    fix: str,
    *,
    refuted: bool = False,
) -> Finding:
    """A finding; `refuted` where its own replay shows that the fix costs time."""
    bounded = 0.0 if refuted else None if gain is None else max(0.0, min(gain, 1.0))
    return Finding(
        cause=cause,
        sentence=sentence,
        share=share if share is not None and share > 0 else None,
        gain=bounded,
        status="refuted" if refuted else "estimated",
        evidence=tuple(evidence),
        fix=fix,
    )


ALL = (
    data_starvation,
    logging,
    busy_thread,
    evaluation,
    checkpointing,
    empty_cache,
    reward_bound,
    no_kv_cache,
    generation_batch,
    generation_bound,
)
