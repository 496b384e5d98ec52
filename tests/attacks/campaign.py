"""Many trials, some of them at the same time, and what they found."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.attacks import Result, attempt, serving
from tests.attacks.ground import build
from tests.attacks.kinds import KINDS, Kind


def names(trials: int, kinds: Sequence[str] | None) -> list[str]:
    """The trials of a campaign: every kind in turn, in its share."""
    shares = {kind: one.share for kind, one in KINDS.items() if kinds is None or kind in kinds}
    total, made = sum(shares.values()), Counter[str]()

    def drawn() -> Iterator[str]:
        for number in range(1, trials + 1):
            kind = max(shares, key=lambda one: shares[one] * number / total - made[one])
            made[kind] += 1
            yield f"{kind}/{made[kind]}"

    return list(drawn())


def _kind(name: str) -> Kind:
    return KINDS[name.partition("/")[0]]


def campaign(
    *,
    folder: Path,
    trials: int,
    seed: int,
    jobs: int = 2,
    kinds: Sequence[str] | None = None,
    one: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    chosen = [one] if one else names(trials, kinds)
    ground = build(folder / "ground", runs=any(_kind(name).runs for name in chosen))
    results: list[Result] = []
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(jobs) as pool:
            started = [
                pool.submit(
                    attempt,
                    name,
                    _kind(name).attack,
                    seed=seed,
                    ground=ground,
                    folder=folder / f"seed-{seed}",
                    keep=one is not None,
                )
                for name in chosen
            ]
            for done in as_completed(started):
                results.append(done.result())
                if results[-1].faults:
                    progress(f"{results[-1].name}: {'; '.join(results[-1].faults)}")
                if len(results) % 100 == 0:
                    progress(f"{len(results)} of {len(chosen)} trials after {time.monotonic() - began:.0f} s")
    finally:
        serving.stop()
    return sorted(results, key=lambda result: chosen.index(result.name))


def report(results: Sequence[Result], *, seed: int) -> str:
    """What was found, with what repeats it."""
    bad = [result for result in results if result.faults]
    lines = []
    for result in bad:
        lines += [f"\n{result.name} (python -m tests.attack --seed {seed} --one {result.name})"]
        lines += [f"  fault: {fault}" for fault in result.faults]
        lines += [f"  {command[:1000]}" for command in result.commands]
    kinds = Counter(result.name.partition("/")[0] for result in results)
    failed = Counter(result.name.partition("/")[0] for result in bad)
    slowest = sorted(results, key=lambda result: -result.seconds)[:5]
    lines += ["", f"{len(results)} trials, {len(bad)} with a fault"]
    for kind, count in kinds.items():
        seconds = sum(result.seconds for result in results if result.name.startswith(f"{kind}/"))
        lines += [f"  {kind}: {failed[kind]} of {count}, {seconds / count:.1f} s each"]
    lines += [f"  slowest: {', '.join(f'{result.name} {result.seconds:.0f} s' for result in slowest)}"]
    return "\n".join(lines)
