"""`flatout tune`: finds a faster plan by measuring, and writes it into the configuration."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatout import limits
from flatout.cli.ablate import Budget, Limit, SearchFolder, say, searching, seconds_of
from flatout.cli.shared import (
    AsJson,
    Config,
    LossMargin,
    Overrides,
    escaped,
    new_folder,
    out,
    print_json,
    print_plain,
    require_torch,
)
from flatout.errors import RunFailed, UsageError
from flatout.words import duration, loss_text, number, percent

if TYPE_CHECKING:
    from flatout.insight.lr import Rates
    from flatout.insight.trials import Measured
    from flatout.insight.tune import Tuned


def tune(
    config: Config,
    overrides: Overrides = None,
    search: Annotated[
        Literal["plan", "lr"],
        typer.Option(help="plan: decisions that change the speed; lr: the learning rate and its warm-up"),
    ] = "plan",
    trials: Annotated[
        int | None,
        typer.Option(
            help="trials of the search, at most (default: 20, or what the budget allows)", min=2, max=limits.REPEATS
        ),
    ] = None,
    budget: Budget = None,
    apply: Annotated[bool, typer.Option("--apply", help="write the result into CONFIG; comments are kept")] = False,
    revert: Annotated[bool, typer.Option("--revert", help="undo the last --apply, byte for byte")] = False,
    limit: Limit = 600.0,
    loss_margin: LossMargin = 0.005,
    run: SearchFolder = None,
    as_json: AsJson = False,
) -> None:
    """Find a faster plan by measuring short runs, and show what each change contributed.

    The effective batch and the lengths stay the same. A second call with the same --run continues.
    """
    from flatout.config import edit

    if revert:
        print_plain(f"restored {edit.revert(config)}")
        return
    if apply and overrides:
        raise UsageError("--apply writes what was measured, and overrides are not in the file: put them there first")
    if search == "lr" and (budget is not None or trials is not None):
        raise UsageError(
            "--budget and --trials are for --search plan: --search lr tries a fixed grid of learning rates"
        )
    require_torch()
    from flatout.config import load
    from flatout.files import cache_folder, write_atomic
    from flatout.hardware import detect, with_cpu_facts
    from flatout.insight import lr
    from flatout.insight import tune as verb
    from flatout.insight.trials import STEPS, Trials
    from flatout.plan import job_of

    settings = load(config, overrides=overrides or []).settings
    folder = run or new_folder(f"{config.stem}-tune")
    steps = lr.STEPS if search == "lr" else STEPS
    made = Trials(
        config, overrides or [], folder=folder, steps=steps, limit_s=limit, reach_peak=search == "lr", say=say
    )
    if search == "lr":
        with searching(made):
            rates = lr.search(made)
        values, found, unconfirmed = rates.values, rates.to_json(), rates.unconfirmed
    else:
        seconds = None if budget is None else seconds_of(budget)
        machine = with_cpu_facts(detect(), cache=cache_folder())
        job = job_of(settings, hardware=machine, num_ranks=1)
        with searching(made):
            tuned = verb.tune(made, job, most=trials, budget_s=seconds, loss_margin=loss_margin)
        values, found, unconfirmed = tuned.values, tuned.to_json(), tuned.unconfirmed
    write_atomic(folder / "tuned.json", json.dumps(found, indent=1).encode())
    if as_json:
        print_json(found)
    elif search == "lr":
        _print_rates(rates)
    else:
        _print_tuned(tuned)
        if seconds is not None:
            print_plain(_spent(tuned, seconds=made.spent_s, budget_s=seconds))
    if not values:
        if not as_json:
            print_plain("The configuration is as good as the best trial, so there is nothing to change.")
        return
    if apply and unconfirmed is not None:
        raise RunFailed(f"nothing was written: {unconfirmed}")
    try:
        before = config.read_bytes().decode()
        after = edit.edited(before, values)
    except UsageError as error:
        if apply:
            raise
        say(str(error))
        return
    if not as_json:
        for line in difflib.unified_diff(before.splitlines(), after.splitlines(), str(config), "tuned", lineterm=""):
            print_plain(line)
        if unconfirmed is not None:
            print_plain(f"Not confirmed: {unconfirmed}.")
    if apply:
        kept = edit.apply(config, values, note={"trials": str(folder)})
        if not as_json:
            print_plain(f"written to {config}; the earlier file is {kept}; undo: flatout tune {config} --revert")


def _print_tuned(tuned: Tuned) -> None:
    from flatout.terminal import table

    made = table("Trials", "", "tokens/s", "MFU", "memory", "start-up", "loss")
    ordered = sorted(tuned.trials, key=lambda one: (one.log_time is None, one.log_time or 0.0))
    for one in ordered:
        name = "your file" if one is tuned.start else _short(one, tuned.start)
        cells = [number(one.tokens_per_s), percent(one.mfu), number(one.peak_gib, unit=" GiB")]
        cells += [number(one.start_s, unit=" s"), one.problem or loss_text(one.loss)]
        made.add_row(escaped(name), *map(escaped, cells))
    out.print(made, highlight=False)
    if tuned.left:
        print_plain(f"The search ended: {tuned.left}.")
    if tuned.unpaid:
        print_plain(f"The trial with the fastest steps is not the best plan: {tuned.unpaid}.")
    changed = table("Changes", "setting", "before", "now")
    for key, (before, after) in tuned.changes.items():
        changed.add_row(key, str(before), str(after))
    if tuned.changes:
        out.print(changed, highlight=False)
    gain = tuned.gain
    if gain is not None and gain.low > 0:
        words = f"{1 / gain.ratio:.2f} times as fast (95 % interval {1 / gain.high:.2f} to {1 / gain.low:.2f})"
        loss = "" if tuned.loss_verdict is None else f"; loss: {tuned.loss_verdict}"
        print_plain(f"Measured again in {gain.pairs} pairs: {gain.verdict}, {words}{loss}.")
    for name, ratio in tuned.without.items():
        told = "fails" if ratio is None else f"takes {ratio:.2f} times as long"
        print_plain(f"With {name} as before, the best plan {told} (one trial).")
    for name, ratio in tuned.dropped.items():
        print_plain(f"Not changed: {name}. As before, it took {ratio:.2f} times as long (one trial).")


def _spent(tuned: Tuned, *, seconds: float, budget_s: float) -> str:
    told = f"The trials took {duration(seconds)} of the budget of {duration(budget_s)}"
    if tuned.gain is not None and tuned.gain.needed_more:
        return f"{told}; it does not last for the {tuned.gain.needed_more} pairs until the next verdict."
    enough = seconds < 0.9 * budget_s and tuned.left != "the budget was spent"
    return f"{told}; the rest was not needed." if enough else f"{told}."


def _short(one: Measured, start: Measured) -> str:
    """The decisions that differ from those of the user's file, without those that follow from others."""
    from flatout.insight.switches import FOLLOW

    own = {key.removeprefix("plan."): value for key, value in one.settings.items()} | one.decisions
    found = {key: value for key, value in own.items() if value is not None and start.decisions.get(key) != value}
    return ", ".join(f"{key} {value}" for key, value in found.items() if f"plan.{key}" not in FOLLOW) or "the same plan"


def _print_rates(rates: Rates) -> None:
    from flatout.terminal import table

    made = table(f"Loss after {rates.steps} steps", "learning rate", "loss")
    for lr, loss in rates.losses.items():
        made.add_row(f"{lr:.3g}", loss_text(loss))
    out.print(made, highlight=False)
    made = table(f"Loss after {rates.steps} steps, learning rate {rates.best:.3g}", "warm-up steps", "loss")
    for warmup, loss in rates.warmup_losses.items():
        made.add_row(str(warmup), loss_text(loss))
    if rates.warmup_losses:
        out.print(made, highlight=False)
    else:
        print_plain(f"Your warm-up of {rates.warmup:,} steps is too long for these trials, so it stays.")
    found = rates.difference
    if rates.best in (min(rates.losses), max(rates.losses)):
        which = "highest" if rates.best == max(rates.losses) else "lowest"
        beyond = f"a better one may lie beyond: set train.lr: {rates.best:.3g} and search again"
        print_plain(f"{rates.best:.3g} is the {which} rate that was tried, and {beyond}.")
    if found is not None and found.low > 0:
        change = f"{found.ratio - 1:+.2%} (95 % interval {found.low - 1:+.2%} to {found.high - 1:+.2%})"
        both = (rates.best, rates.best_warmup), (rates.lr, rates.warmup)
        names = [f"learning rate {a:.3g} and {b} warm-up steps" for a, b in both]
        print_plain(f"Loss of {names[0]} against {names[1]}: {change}, {found.pairs} seeds.")
