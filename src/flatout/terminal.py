"""Shows a run in a terminal: tables at the start, one live line, and a summary with the verdict at the end.

It is an ordinary sink: it gets only what is recorded, so it can neither slow nor break a run.
If the output is not a terminal, the same facts are printed as plain lines.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flatout.cost import Rates
from flatout.hardware import Hardware, Measured, amd_here
from flatout.hardware.table import NO_AMD
from flatout.plan import Decisions
from flatout.plan.decisions import PINNED
from flatout.record import WARM_STEPS, Event, Speed, StepRecord, events
from flatout.record.routed import AdapterScore, PhaseScored
from flatout.verdict import Part, peak_words, rl_parts, speed_of_steps
from flatout.words import duration, loss_text, number, percent

# Steps the shown speed is averaged over.
WINDOW = 20


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, header_style="dim", overflow="fold")
    return made


# Predictions that differ by less are the same.
SAME_SPEED = 0.005
# Decisions that are shown only if the configuration pins them, or with --verbose; the second ones on a CPU.
IN_THE_BACKGROUND = (
    "loss_chunk", "fused_optimizer", "prefetch", "pin_memory", "expandable_segments", "memory_fraction", "manual_gc",
)  # fmt: skip
FOR_GPUS = ("fused_qkv", "fused_mlp", "fused_loss", "fp8", "tf32", "graphs")


def plan_tables(plan: Mapping[str, Any], *, verbose: bool = False) -> list[Table]:
    """The tables of a plan in JSON form: the decisions that matter, or all of them, with reasons; then predictions."""
    quiet = (*IN_THE_BACKGROUND, *(FOR_GPUS if plan["job"].get("device") == "cpu" else ()))
    names = [field.name for field in fields(Decisions)]
    shown_names = [name for name in names if verbose or name not in quiet or plan["reasons"][name] == PINNED]
    hidden = len(names) - len(shown_names)
    decisions = table(f"Plan ({hidden} more with --verbose)" if hidden else "Plan", "decision", "value", "reason")
    for name in shown_names:
        value = plan["decisions"][name]
        shown = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        decisions.add_row(name, f"[bold]{escape(shown)}[/]", escape(plan["reasons"][name]))
    if plan.get("rows") is not None:
        decisions.add_row(
            "rows", f"[bold]{plan['rows']}[/]", f"concurrent sequences: {escape(plan['reasons']['rows'])}"
        )
    predicted = plan["predicted"]
    forecast = table("Predicted", "what", "value", "how")
    parts = ", ".join(
        f"{name.replace('_', ' ')} {size:.2f}" for name, size in predicted["memory_gib"].items() if size > 0.005
    )
    if predicted.get("left_out"):
        parts += f"; without {predicted['left_out']}"
    unknown, rates = predicted.get("unknown"), Rates.from_json(plan["rates"])
    if (other := plan.get("balanced")) is not None:
        forecast.add_row("preset", escape(str(plan["job"].get("preset"))), escape(_against_balanced(plan, other)))
    if (total := plan["job"].get("parameters")) is not None:
        trained = plan["job"]["trained_parameters"]
        share = (
            "all of them trained" if trained == total else f"{trained:,} trained, {percent(trained / total)} of them"
        )
        forecast.add_row("parameters", number(total), share)
    forecast.add_row("peak memory", number(predicted["peak_gib"], unit=" GiB"), parts)
    how = f"estimated from shape and {rates.peak_words}"
    how += "; completions of sample.max_tokens, without grading" if predicted.get("parts_s") else ""
    forecast.add_row("tokens/s", number(predicted["tokens_per_s"]), escape(unknown or how))
    shares = f"as done; {percent(predicted['mfu_common'])} by 6N + 12LHT; of {rates.peak_words}"
    forecast.add_row("MFU", percent(predicted["mfu"]), escape(unknown or shares))
    if predicted["hours"] is not None:
        forecast.add_row("time", duration(predicted["hours"] * 3600), f"{plan['job']['steps']} steps")
    forecast.add_row("checkpoint", number(predicted["checkpoint_gib"], unit=" GiB"), "each, on disk")
    if not predicted.get("parts_s"):
        return [decisions, forecast]
    return [decisions, forecast, _predicted_parts(predicted)]


def _predicted_parts(predicted: Mapping[str, Any]) -> Table:
    """The parts of a step of reinforcement learning, and why some are unknown."""
    rows, whole = table("Predicted parts of a step", "part", "s a step", "how"), predicted["step_s"]
    for name, seconds in predicted["parts_s"].items():
        share = "" if seconds is None or not whole else f"{percent(seconds / whole)} of the step without grading"
        mfu = predicted.get(f"{name.removesuffix(' update')}_mfu") if name.endswith(" update") else None
        share += "" if mfu is None else f", MFU {percent(mfu)}"
        rows.add_row(name, number(seconds), escape(predicted["parts_unknown"].get(name, share)))
    return rows


def _against_balanced(plan: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What the preset changes, against the default one."""
    if other["problem"]:
        return "balanced does not fit"
    if not other["changes"]:
        return "changes nothing here: balanced makes the same decisions"
    shown = ", ".join(
        f"{name} {plan['decisions'][name]} (balanced: {value})" for name, value in other["changes"].items()
    )
    ours, theirs = plan["predicted"]["tokens_per_s"], other["tokens_per_s"]
    if ours is None or theirs is None:
        return f"changes {shown}"
    same = abs(ours / theirs - 1) < SAME_SPEED
    speed = "as fast as balanced" if same else f"{ours / theirs:.2f} times as fast as balanced, {theirs:,.0f} tokens/s"
    return f"predicted {speed}; changes {shown}"


def hardware_table(hardware: Hardware) -> Table:
    rows = table("Hardware", "what", "value")
    if hardware.gpu is None and hardware.sm is None:
        rows.add_row("GPU", f"AMD: {NO_AMD}" if amd_here() else "none: everything runs on the CPU")
    else:
        known = hardware.gpu or hardware.name or "unknown"
        rows.add_row("GPU", f"{hardware.num_gpus} x {escape(known)}")
        rows.add_row("SM", "n/a" if hardware.sm is None else f"{hardware.sm[0]}.{hardware.sm[1]}")
        rows.add_row("memory", number(hardware.memory_gib, unit=" GiB", digits=4))
        peaks = ", ".join(f"{name} {flops / 1e12:.0f}" for name, flops in hardware.peak_flops.items())
        rows.add_row("peak TFLOP/s", peaks or "n/a: not in the table of known GPUs")
        bandwidth = None if hardware.bandwidth is None else hardware.bandwidth / 1e12
        rows.add_row("bandwidth", number(bandwidth, unit=" TB/s"))
        rows.add_row("link", hardware.link or "n/a")
        rows.add_row("driver", hardware.driver or "n/a")
        if hardware.source:
            rows.add_row("source", escape(hardware.source))
    rows.add_row("CPU", f"{escape(hardware.cpu or 'unknown')}, {hardware.num_cpus or 'n/a'} cores")
    rows.add_row("RAM", number(hardware.ram_gib, unit=" GiB"))
    return rows


def measured_table(hardware: Hardware, measured: Measured) -> Table:
    rows = table("Measured", "what", "datasheet", "measured", "share")
    figures = [(dtype, hardware.peak_flops.get(dtype), flops) for dtype, flops in measured.flops.items()]
    for name, sheet, found in figures:
        rows.add_row(name, _tera(sheet, "FLOP/s"), _tera(found, "FLOP/s"), percent(found / sheet if sheet else None))
    if measured.bandwidth:
        sheet, found = hardware.bandwidth, measured.bandwidth
        rows.add_row("copy", _tera(sheet, "B/s"), _tera(found, "B/s"), percent(found / sheet if sheet else None))
    return rows


def _tera(value: float | None, unit: str) -> str:
    return number(None if value is None else value / 1e12, unit=f" T{unit}")


def selftest_table(checks: list[dict[str, Any]]) -> Table:
    rows = table("Self-test", "path", "reference", "usable", "difference", "times as fast", "why not")
    for check in checks:
        usable = "[green]yes[/]" if check["usable"] else "[red]no[/]"
        difference = "n/a" if check["difference"] is None else f"{check['difference']:.1e}"
        speedup = number(check["speedup"]) + (", noise" if check.get("noise") else "")
        rows.add_row(check["path"], check["against"], usable, difference, speedup, escape(check["reason"]))
    return rows


def tokens_words(speed: Speed, *, unit: str = "tok/s") -> str:
    """Tokens a second of all devices together, and of each where there are several."""
    total, each = speed.tokens_per_s, speed.tokens_per_s_per_device
    told = f"{number(total)} {unit}"
    return told if each in (None, total) else f"{told} in total, {number(each)} per device"


def _is_padded(speed: Speed) -> bool:
    return (
        None not in (speed.padded_tokens_per_s, speed.tokens_per_s) and speed.padded_tokens_per_s != speed.tokens_per_s
    )


class View:
    """Shows one run. `every` is the number of steps between plain lines if there is no terminal."""

    def __init__(self, console: Console, *, every: int = 10, verbose: bool = False) -> None:
        self.console, self.every, self.verbose = console, every, verbose
        self.total = 0
        self.rates: Rates | None = None
        self.hardware: Mapping[str, Any] = {}
        self.peak: str | None = None  # what MFU is a share of
        self.recent: deque[StepRecord] = deque(maxlen=WINDOW)
        self.seen = 0  # steps of this attempt
        self.val_loss: float | None = None
        self.live: Live | None = None

    def step(self, record: StepRecord) -> None:
        self.seen += 1
        if self.seen == WARM_STEPS + 1:  # the shown speed is that of the verdict, which leaves the warm-up out
            self.recent.clear()
        self.recent.append(record)
        if self.live is not None:
            self.live.update(self._line(record))
        elif not self.console.is_terminal and (record.step + 1) % self.every == 0:
            self.console.print(self._text(record), highlight=False, soft_wrap=True)

    def event(self, event: Event) -> None:
        sentence = event.sentence()
        match event:
            case events.AttemptBegan():
                pass
            case events.HardwareFound():
                self.hardware = event.facts
                self.console.print(hardware_table(Hardware.from_json(event.facts)), "")
            case events.DataOpened():
                self.console.print(f"[bold]Data[/]  {escape(sentence or '')}\n", highlight=False)
            case events.Planned():
                self.rates = Rates.from_json(event.facts["rates"])
                self.peak = peak_words(self.rates, self.hardware)
                for drawn in plan_tables(event.facts, verbose=self.verbose):
                    self.console.print(drawn, "")
            case events.PathsActive():
                rows = table("Active paths", "path", "on this device")
                for name, fact in event.facts.items():
                    rows.add_row(name, escape(str(fact)))
                self.console.print(rows, "")
            case events.PathsRan():
                rows = table("What ran", "decision", "planned", "ran", "seen")
                for name, path in event.facts.items():
                    same = path["planned"] == path["ran"]
                    ran = escape(path["ran"]) if same else f"[yellow]{escape(path['ran'])}[/]"
                    rows.add_row(name, escape(path["planned"]), ran, escape(path["seen"]))
                self._stop()
                self.console.print(rows, "")
                self._start()
            case events.Started():
                self.total = event.total_steps or 0
                self._say(sentence or "")
                self._start()
            case events.Evaluated():
                change = "" if self.val_loss is None else f" (was {loss_text(self.val_loss)})"
                self.val_loss = event.val_loss
                self._say(f"{_at(event)}{sentence}{change}")
            case events.SamplingProgress():
                self._sampling(event.line())
            case events.StudentJudged():
                self._stop()
                self.console.print("", judged_table(event))
                self._say(sentence or "", style="bold")
            case PhaseScored():
                self._stop()
                self.console.print("", *phase_tables(event))
                self._say(sentence or "", style="bold")
            case events.Ended():
                self._stop()
                self._summary(event)
            case events.SamplingBegan() | events.DatasetMade() | events.StudentScored() | events.StageTrained():
                self._stop()
                self._say(sentence or "")
            case _ if sentence:
                plain = isinstance(event, events.TasksScored | events.Saved | events.BestKept | events.TargetReached)
                style = "" if plain else "red" if isinstance(event, events.SaveFailed) else "yellow"
                self._say(f"{_at(event)}{sentence}", style=style)

    def close(self) -> None:
        self._stop()

    def _say(self, text: str, *, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

    def _start(self) -> None:
        if self.console.is_terminal:
            self.live = Live(console=self.console, refresh_per_second=4, transient=True)
            self.live.start()

    def _stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _sampling(self, line: str) -> None:
        if not self.console.is_terminal:
            self._say(line)
            return
        if self.live is None:
            self.live = Live(console=self.console, refresh_per_second=4, transient=True)
            self.live.start()
        self.live.update(Text(line, overflow="fold"))

    def _text(self, record: StepRecord) -> str:
        speed = speed_of_steps(self.recent, rates=self.rates)
        # The remaining time includes evaluations and saves.
        left = (self.total - record.step - 1) * sum(r.seconds for r in self.recent) / len(self.recent)
        used, total = record.memory.get("allocated_gib"), record.memory.get("total_gib")
        peak = record.memory.get("peak_gib")
        share = f" ({percent(peak / total)})" if peak is not None and total else ""
        busy = record.utilisation
        parts = [
            f"step {record.step + 1}/{self.total}",
            f"loss {'n/a' if record.loss is None else format(record.loss, '.4f')}",
            f"lr {'n/a' if (lr := record.extra.lr) is None else format(lr, '.2e')}",
            tokens_words(speed),
            f"{1 / (speed.step_s or math.inf):.2f} it/s",
            f"MFU {percent(speed.mfu)}",
            f"mem {number(peak if peak is not None else used)}/{number(total)} GiB{share}",
            *([f"GPU {percent(busy['gpu'])}"] if "gpu" in busy else []),
            f"CPU {percent(busy.get('cpu'))}",
            f"RAM {percent(busy.get('ram'))}",
            f"ETA {duration(left)}",
        ]
        return "  ".join(parts)

    def _line(self, record: StepRecord) -> Table:
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, self.total), completed=record.step + 1, width=20)
        grid.add_row(bar, Text(self._text(record), overflow="fold"))
        return grid

    def _summary(self, event: events.Ended) -> None:
        outcome = event.outcome
        speed = outcome.speed
        rows = table("Result", "what", "value")
        rows.add_row("steps", f"{outcome.steps:,}, {outcome.tokens:,} tokens, {duration(outcome.hours * 3600)}")
        padded = f"; {number(speed.padded_tokens_per_s)} tokens/s with padding" if _is_padded(speed) else ""
        told = tokens_words(speed, unit="tokens/s")
        rows.add_row("speed", f"{told}, {number(speed.step_s, unit=' s')} a step{padded}")
        hfu = f", HFU {percent(speed.hfu)}" if speed.hfu != speed.mfu else ""
        of = f" of {self.peak}" if self.peak else ""
        rows.add_row("MFU", f"{percent(speed.mfu)}{of} as done{hfu}; {percent(speed.mfu_common)} by 6N + 12LHT")
        rows.add_row("waiting for data", percent(speed.data_share))
        rows.add_row("unattributed", percent(speed.unattributed_share))
        rows.add_row("peak memory", f"{number(outcome.peak_gib, unit=' GiB')} ({percent(outcome.memory_share)})")
        if outcome.reward_last_tenth is not None:
            rewards = [number(outcome.reward_first_tenth, digits=3), number(outcome.reward_last_tenth, digits=3)]
            rows.add_row("reward", f"{rewards[0]} in the first tenth, {rewards[1]} in the last")
            rows.add_row("actor MFU", f"{percent(speed.actor_mfu)} in the time of its update, by 6N + 12LHT")
            if speed.critic_mfu is not None:
                rows.add_row("critic MFU", f"{percent(speed.critic_mfu)} in the time of its update")
        losses = [number(outcome.loss_first_tenth, digits=4), number(outcome.loss_last_tenth, digits=4)]
        rows.add_row("training loss", f"{losses[0]} in the first tenth, {losses[1]} in the last")
        if outcome.val_losses:
            rows.add_row("validation loss", " -> ".join(map(loss_text, _ends(outcome.val_losses))))
        if outcome.task_scores:
            rows.add_row("task score", " -> ".join(map(percent, _ends(outcome.task_scores, best=max))))
        rows.add_row("ended by", "the last step" if outcome.stopped_by == "end" else outcome.stopped_by)
        self.console.print("", rows)
        if parts := rl_parts(speed):
            self.console.print("", parts_table(parts, speed))
        if event.verdicts:
            judged = table("Criteria", "criterion", "wanted", "got", "verdict")
            words = {True: "[green]met[/]", False: "[red]not met[/]", None: "[yellow]not measured[/]"}
            for verdict in event.verdicts:
                judged.add_row(verdict.criterion, verdict.wanted, verdict.got, words[verdict.met])
            self.console.print("", judged)


def parts_table(parts: Sequence[Part], speed: Speed) -> Table:
    """The parts of a step of reinforcement learning, and their sum against the step."""
    step = table("Parts of a step", "part", "s a step", "share")
    for part in parts:
        step.add_row(part.name, number(part.seconds), percent(part.share))
    total = sum(part.seconds for part in parts)
    step.add_row("sum", number(total), f"{percent(sum(part.share for part in parts))} of {number(speed.step_s)} s")
    return step


def judged_table(event: events.StudentJudged) -> Table:
    """The student on the same held-out questions, before and after each round."""
    rows = table(f"On {event.n:,} held-out questions of {event.task}", "", "accuracy", "95 % interval", "answered")
    for at, (accuracy, (low, high), answered) in enumerate(
        zip(event.accuracy, event.intervals, event.answered, strict=True)
    ):
        when = "before" if at == 0 else "after" if len(event.accuracy) == 2 else f"after round {at}"
        within = "n/a" if low is None else f"{percent(low)} to {percent(high)}"
        rows.add_row(when, f"[bold]{percent(accuracy)}[/]", within, percent(answered))
    return rows


def phase_tables(event: PhaseScored) -> list[Table]:
    """The scores of each task after a phase, and where the router sent their prompts."""
    hows = list(dict.fromkeys(score.how for score in event.scores))
    rows = table(f"After phase {event.phase}, on held-out questions", "task", "metric", *hows)
    for name in event.names:
        mine = {score.how: score for score in event.scores if score.task == name}
        cells = [f"{mine[how].value:.3f} ± {_reach(mine[how]):.3f}" if how in mine else "n/a" for how in hows]
        rows.add_row(escape(name), next(iter(mine.values())).metric if mine else "n/a", *cells)
    if event.confusion is None:
        return [rows]
    routed = table("Prompts by task and adapter", "prompts of", *(f"to {escape(name)}" for name in event.names))
    for name, counts in zip(event.names, event.confusion, strict=True):
        routed.add_row(escape(name), *map(str, counts))
    return [rows, routed]


def _reach(score: AdapterScore) -> float:
    """Half the width of its interval."""
    return 0.0 if score.low is None or score.high is None else (score.high - score.low) / 2


def _at(event: Event) -> str:
    return "" if event.step is None else f"step {event.step}: "


def _ends(values: Sequence[float], *, best: Callable[[Sequence[float]], float] = min) -> list[float]:
    """First, best and last; the best only if it is not one of the others."""
    first, found, last = values[0], best(values), values[-1]
    return [first] if len(values) == 1 else [first, last] if found in (first, last) else [first, found, last]
