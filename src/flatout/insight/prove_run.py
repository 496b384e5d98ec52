"""Measures the fixes of a run of flatout (`flatout doctor RUN --prove`): short runs of its configuration with each one.

The rounds are those of a script's proof: unchanged, each fix alone, all of them, unchanged once more. Each is a trial,
as in `flatout ablate`, in a process of its own. The configuration is named by the user and never taken from the run
folder, because a configuration may name code to run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from flatout.config import load, to_mapping
from flatout.errors import UsageError
from flatout.insight.compare import differences
from flatout.insight.prove import ALL_TOGETHER, Proof, announced, hopeless, of_some_steps, proof_of
from flatout.insight.trials import Measured, Trial, Trials
from flatout.record import Diagnosis, Run

# Causes whose fix is a decision of the plan. What rarer evaluations or saves bring follows from their share.
TRIED = ("data-starvation", "needless-recompute", "small-batch", "recompiles")
_SETTING = re.compile(r"\b(plan\.\w+)=(\w+)")


def changes(diagnosis: Diagnosis) -> dict[str, Mapping[str, str]]:
    """The settings that fix each cause, where short runs can show their effect."""
    found = {f.cause: dict(_SETTING.findall(f.fix)) for f in diagnosis.findings if f.cause in TRIED}
    return {cause: settings for cause, settings in found.items() if settings}


def prove_run(
    run: Run,
    diagnosis: Diagnosis,
    *,
    config: Path,
    folder: Path,
    repeats: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[Proof]:
    """Measures every fix that is a decision of the plan, and all of them together."""
    if different := differences([run.config, to_mapping(load(config).settings)]):
        names = ", ".join(key for key, _ in different[:5])
        raise UsageError(
            f"--config {config} differs from what {run.path} was trained with ({names}): give the configuration of "
            f"that run; {run.path}/config.yaml is a copy, if you trust that folder"
        )
    fixes = changes(diagnosis)
    if not fixes:
        return []
    if len(fixes) > 1:
        fixes[ALL_TOGETHER] = {key: value for settings in fixes.values() for key, value in settings.items()}
    rounds: list[tuple[list[Measured], dict[str, Measured]]] = []
    expected = {finding.cause: finding.gain for finding in diagnosis.findings}
    going, stopped = list(fixes), dict[str, str]()
    say(announced(num_runs=repeats * (len(fixes) + 2), repeats=repeats, run_s=None))
    with closing(Trials(config, [], folder=folder, say=say)) as trials:
        for repeat in itertools.count():
            if len(rounds) == repeats or going in ([], [ALL_TOGETHER]):
                break
            # A trial is known by its settings and seed, so the second unchanged one has a seed of its own.
            seed, second = 2 * repeat, 2 * repeat + 1
            plain = [trials.run(Trial(settings={}, seed=seed), name="unchanged")]
            order = going if repeat % 2 == 0 else list(reversed(going))
            changed = {cause: trials.run(Trial(settings=fixes[cause], seed=seed), name=cause) for cause in order}
            plain.append(trials.run(Trial(settings={}, seed=second), name="unchanged again"))
            if len({one.call for one in (*plain, *changed.values())}) == 1:  # else an earlier call was interrupted
                rounds.append((plain, changed))
            if rounds and len(rounds) < repeats:
                given_up = hopeless([_proof(cause, rounds) for cause in going], expected=expected, rounds=len(rounds))
                for cause, why in given_up.items():
                    say(f"{cause} is not measured any longer: {why}")
                stopped |= given_up
                going = [cause for cause in going if cause not in stopped]
    return [replace(_proof(cause, rounds), stopped=stopped.get(cause)) for cause in fixes]


def _proof(cause: str, every: list[tuple[list[Measured], dict[str, Measured]]]) -> Proof:
    rounds = [(plain, changed[cause]) for plain, changed in every if cause in changed]

    def log(one: Measured) -> float | None:
        return one.log_total if of_some_steps(cause) else one.log_time

    pairs = [([time for one in plain if (time := log(one)) is not None], log(changed)) for plain, changed in rounds]
    losses = [
        abs(changed.loss - plain[0].loss)
        for plain, changed in rounds
        if changed.loss is not None and plain[0].loss is not None
    ]
    tried = [one for plain, changed in rounds for one in (*plain, changed)]
    return proof_of(cause, pairs, differences=losses, problem=next((one.problem for one in tried if one.problem), None))
