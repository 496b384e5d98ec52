"""What a run looks like in a terminal: tables at the start, one live line, a summary with the verdict at the end.

A sink like any other: it is told what is recorded and knows nothing else, so it can neither slow nor break a run.
Where the output is no terminal, the same facts come as plain lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flatout.cost import Rates
from flatout.hardware import Hardware, Measured
from flatout.plan import Decisions
from flatout.record import Event, StepRecord

# Steps the shown speed is averaged over.
WINDOW = 20


def number(value: float | None, *, unit: str = "", digits: int = 3) -> str:
    """A figure for people; unknown is said, never shown as zero."""
    if value is None:
        return "n/a"
    if abs(value) >= 1000:
        return f"{value:,.0f}{unit}"
    return f"{value:.{digits}g}{unit}"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "n/a"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, header_style="dim", overflow="fold")
    return made


def plan_tables(plan: Mapping[str, Any]) -> list[Table]:
    """A plan as JSON, drawn: decisions with reasons, then predictions."""
    decisions = table("Plan", "decision", "value", "reason")
    for field in fields(Decisions):
        value = plan["decisions"][field.name]
        shown = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        decisions.add_row(field.name, f"[bold]{escape(shown)}[/]", escape(plan["reasons"][field.name]))
    if plan.get("rows") is not None:
        decisions.add_row("rows", f"[bold]{plan['rows']}[/]", f"completions at once: {escape(plan['reasons']['rows'])}")
    predicted = plan["predicted"]
    forecast = table("Predicted", "what", "value", "how")
    parts = ", ".join(
        f"{name.replace('_', ' ')} {size:.2f}" for name, size in predicted["memory_gib"].items() if size > 0.005
    )
    if predicted.get("left_out"):
        parts += f"; without {predicted['left_out']}"
    unknown, rates = predicted.get("unknown"), Rates.from_json(plan["rates"])
    forecast.add_row("peak memory", number(predicted["peak_gib"], unit=" GiB"), parts)
    how = f"estimated from shape and {rates.peak_words}"
    forecast.add_row("tokens/s", number(predicted["tokens_per_s"]), escape(unknown or how))
    shares = f"as done; {percent(predicted['mfu_common'])} by 6N + 12LHT; of {rates.peak_words}"
    forecast.add_row("MFU", percent(predicted["mfu"]), escape(unknown or shares))
    if predicted["hours"] is not None:
        forecast.add_row("time", duration(predicted["hours"] * 3600), f"{plan['job']['steps']} steps")
    forecast.add_row("checkpoint", number(predicted["checkpoint_gib"], unit=" GiB"), "each, on disk")
    return [decisions, forecast]


def hardware_table(hardware: Hardware) -> Table:
    rows = table("Hardware", "what", "value")
    if hardware.gpu is None and hardware.sm is None:
        rows.add_row("GPU", "none: everything runs on the CPU")
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
    rows = table("Self-test", "path", "against", "usable", "difference", "times as fast", "why not")
    for check in checks:
        usable = "[green]yes[/]" if check["usable"] else "[red]no[/]"
        difference = "n/a" if check["difference"] is None else f"{check['difference']:.1e}"
        speedup = number(check["speedup"])
        rows.add_row(check["path"], check["against"], usable, difference, speedup, escape(check["reason"]))
    return rows


class View:
    """Draws one run. `every` is the distance of plain lines where there is no terminal."""

    def __init__(self, console: Console, *, every: int = 10) -> None:
        self.console, self.every = console, every
        self.total = 0
        self.rates: Rates | None = None
        self.recent: deque[StepRecord] = deque(maxlen=WINDOW)
        self.val_loss: float | None = None
        self.live: Live | None = None

    def step(self, record: StepRecord) -> None:
        self.recent.append(record)
        if self.live is not None:
            self.live.update(self._line(record))
        elif not self.console.is_terminal and (record.step + 1) % self.every == 0:
            self.console.print(self._text(record), highlight=False, soft_wrap=True)

    def event(self, event: Event) -> None:
        data = event.data
        match event.kind:
            case "hardware":
                self.console.print(hardware_table(Hardware.from_json(data)), "")
            case "data":
                self.console.print(
                    f"[bold]Data[/]  {escape(str(data['source']))}: {data['train_tokens']:,} tokens to train on, "
                    f"{data['valid_tokens']:,} held out, tokenizer {escape(str(data['tokenizer']))} "
                    f"({data['vocab']:,} ids)\n",
                    highlight=False,
                )
            case "plan":
                self.rates = Rates.from_json(data["rates"])
                for drawn in plan_tables(data):
                    self.console.print(drawn, "")
            case "active":
                rows = table("Active paths", "path", "as found on this device")
                for name, fact in data.items():
                    rows.add_row(name, escape(str(fact)))
                self.console.print(rows, "")
            case "start":
                self.total = data["total_steps"]
                self._say(f"Run folder {data['folder']}, {self.total} steps")
                if self.console.is_terminal:
                    self.live = Live(console=self.console, refresh_per_second=4, transient=True)
                    self.live.start()
            case "eval":
                before, self.val_loss = self.val_loss, data["val_loss"]
                change = "" if before is None else f" (was {before:.4f})"
                self._say(f"step {event.step}: validation loss {self.val_loss:.4f}{change}")
            case "tasks":
                self._say(f"step {event.step}: {task_words(data)}")
            case "sampling":
                self._sampling(sampling_line(data))
            case "sample" | "dataset" | "score" | "stage":
                self._stop()
                self._say(notice(event) or "")
            case "rft":
                self._stop()
                self.console.print("", rft_table(data))
                self._say(notice(event) or "", style="bold")
            case "save":
                self._say(f"step {event.step}: saved {data['checkpoint']}")
            case "target":
                self._say(
                    f"target reached: validation loss {data['val_loss']:.4f} after {duration(data['seconds'])}, "
                    f"{data['tokens']:,} tokens, {data['gpu_hours']:.3f} device-hours"
                )
            case "end":
                self._stop()
                self._summary(data)
            case "save-failed":
                self._say(f"step {event.step}: NOT saved, training goes on: {data['error']}", style="red")
            case _ if sentence := notice(event):
                self._say(sentence, style="yellow")

    def close(self) -> None:
        self._stop()

    def _say(self, text: str, *, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

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
        seconds = sum(r.seconds for r in self.recent)
        tokens = sum(r.tokens for r in self.recent)
        mfu = self.rates.shares(tokens=tokens, seconds=seconds).mfu if self.rates else None
        left = (self.total - record.step - 1) * seconds / len(self.recent)
        used, total = record.memory.get("allocated_gib"), record.memory.get("total_gib")
        peak = record.memory.get("peak_gib")
        share = f" ({percent(peak / total)})" if peak is not None and total else ""
        busy = record.utilisation
        parts = [
            f"step {record.step + 1}/{self.total}",
            f"loss {'n/a' if record.loss is None else format(record.loss, '.4f')}",
            f"lr {'n/a' if (lr := record.extra.get('lr')) is None else format(lr, '.2e')}",
            f"{tokens / seconds:,.0f} tok/s",
            f"{len(self.recent) / seconds:.2f} it/s",
            f"MFU {percent(mfu)}",
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

    def _summary(self, data: Mapping[str, Any]) -> None:
        outcome = data["outcome"]
        speed = outcome["speed"]
        rows = table("Result", "what", "value")
        rows.add_row(
            "steps", f"{outcome['steps']:,}, {outcome['tokens']:,} tokens, {duration(outcome['hours'] * 3600)}"
        )
        rows.add_row("speed", f"{number(speed['tokens_per_s'])} tokens/s, {number(speed['step_s'], unit=' s')} a step")
        hfu = f", HFU {percent(speed['hfu'])}" if speed["hfu"] != speed["mfu"] else ""
        rows.add_row("MFU", f"{percent(speed['mfu'])} as done{hfu}; {percent(speed['mfu_common'])} by 6N + 12LHT")
        rows.add_row("waiting for data", percent(speed["data_share"]))
        rows.add_row("unattributed", percent(speed["unattributed_share"]))
        rows.add_row("peak memory", f"{number(outcome['peak_gib'], unit=' GiB')} ({percent(outcome['memory_share'])})")
        losses = [number(outcome["loss_first_tenth"], digits=4), number(outcome["loss_last_tenth"], digits=4)]
        rows.add_row("training loss", f"{losses[0]} in the first tenth, {losses[1]} in the last")
        if outcome["val_losses"]:
            rows.add_row("validation loss", " -> ".join(f"{v:.4f}" for v in _ends(outcome["val_losses"])))
        if scores := outcome.get("task_scores"):
            rows.add_row("task score", " -> ".join(percent(v) for v in _ends(scores, best=max)))
        rows.add_row("ended by", str(outcome["stopped_by"]))
        self.console.print("", rows)
        if data["verdicts"]:
            judged = table("Criteria", "criterion", "wanted", "got", "verdict")
            for verdict in data["verdicts"]:
                word = {True: "[green]met[/]", False: "[red]not met[/]", None: "[yellow]not measured[/]"}[
                    verdict["met"]
                ]
                judged.add_row(verdict["criterion"], verdict["wanted"], verdict["got"], word)
            self.console.print("", judged)


def task_words(data: Mapping[str, Any]) -> str:
    """The scores of a `tasks` event in one line."""
    return "; ".join(
        f"{task['task']} {task['metric']} {score_text(task['metric'], task['value'])}"
        f"{interval_text(task['metric'], task['low'], task['high'], brackets=True)}, n {task['n']:,}"
        for task in data["tasks"]
    )


def score_text(metric: str, value: float | None) -> str:
    return number(value, digits=4) if metric == "perplexity" else percent(value)


def interval_text(metric: str, low: float | None, high: float | None, *, brackets: bool = False) -> str:
    if low is None or high is None:
        return "" if brackets else "n/a"
    span = f"{score_text(metric, low)} to {score_text(metric, high)}"
    return f" ({span})" if brackets else span


def sampling_line(data: Mapping[str, Any]) -> str:
    """How far sampling has come."""
    memory = data["memory"]
    used, total = memory.get("peak_gib", memory.get("allocated_gib")), memory.get("total_gib")
    parts = [
        f"questions {data['questions']:,}/{data['of']:,}",
        f"samples {data['samples']:,}",
        f"kept {data['kept']:,}",
        f"success {percent(data['success_rate'])}",
        f"{number(data['tokens_per_s'])} tok/s",
        f"{data['rows']} rows",
        f"mem {number(used)}/{number(total)} GiB" + (f" ({percent(used / total)})" if used and total else ""),
        f"ETA {duration(data['left_s'])}",
    ]
    return "  ".join(parts)


def rft_table(data: Mapping[str, Any]) -> Table:
    """The student on the same held-out questions, before and after each round."""
    rows = table(f"On {data['n']:,} held-out questions of {data['task']}", "", "accuracy", "95 % interval", "answered")
    for at, (accuracy, (low, high), answered) in enumerate(
        zip(data["accuracy"], data["intervals"], data["answered"], strict=True)
    ):
        when = "before" if at == 0 else "after" if len(data["accuracy"]) == 2 else f"after round {at}"
        within = "n/a" if low is None else f"{percent(low)} to {percent(high)}"
        rows.add_row(when, f"[bold]{percent(accuracy)}[/]", within, percent(answered))
    return rows


def notice(event: Event) -> str | None:
    """An event in one sentence; None for those that need none."""
    data = event.data
    match event.kind:
        case "skipped":
            return f"step {event.step}: update skipped, loss {data['loss']}, gradient norm {data['grad_norm']}"
        case "patience":
            return f"step {event.step}: no improvement in {data['patience']} evaluations (best {data['best']:.4f})"
        case "resume":
            return f"resumed at step {event.step} from {data['checkpoint']}"
        case "profile":
            return f"step {event.step}: trace and kernel table in {data['folder']}"
        case "compile":
            paid = f"paid back at step {data['break_even']} (estimated)" if data["break_even"] else "gain not known"
            return f"step {event.step}: compiling took {data['seconds']:.1f} s, {paid}"
        case "micro_batch":
            speeds = ((t["micro_batch"], t["tokens_per_s"]) for t in data["trials"])
            tried = ", ".join(
                f"{size} {f'{speed:,.0f} tokens/s' if speed else 'did not fit'}" for size, speed in speeds
            )
            compiling = f", {data['compile_seconds']:.1f} of them first passes" if data["compile_seconds"] else ""
            return f"micro-batches tried in {data['seconds']:.1f} s{compiling}: {tried}"
        case "oom":
            return (
                f"step {event.step}: out of memory with micro-batch {data['micro_batch']}; the same step is taken "
                f"again, and all after it, with {data['now']} and more accumulation"
            )
        case "stage":
            ended = f"loss {number(data['loss'])}, validation loss {number(data['val_loss'])}"
            return f"{data['folder']}: {data['steps']} steps in {duration(data['seconds'])}, {ended}"
        case "sample":
            how = "at most" if data["adaptive"] else "always"
            return (
                f"round {data['round']}: {data['questions']:,} questions of {data['task']}, {how} {data['oversample']} "
                f"samples each at temperature {data['temperature']:g}, by {data['model']} ({data['on']})"
            )
        case "dataset":
            return dataset_sentence(data)
        case "score":
            when = f"after round {data['round']}" if data["round"] else "before"
            answered = percent(data["details"]["answered"])
            return f"{when}: {percent(data['value'])} of {data['n']:,} questions right, {answered} answered"
        case "rows":
            return f"out of memory with {data['rows']} completions at once; the same are drawn again with {data['now']}"
        case "rft":
            return gain_sentence(data)
        case "workers":
            return f"step {event.step}: {percent(data['data_share'])} waiting for data, now {data['workers']} workers"
        case "sink_failed":
            return f"{data['sink']} failed and is off: {data['error']}"
        case "notice" | "bad-checkpoint":
            return str(data["text"])
        case _:
            return None


def dataset_sentence(data: Mapping[str, Any]) -> str:
    said = [
        f"round {data['round']}: {data['solved']:,} of {data['questions']:,} questions solved "
        f"({percent(data['success_rate'])}), {data['kept']:,} rows kept of {data['correct']:,} correct among "
        f"{data['samples']:,} samples ({percent(data['correct_share'])}; {percent(data['answered_share'])} answered), "
        f"{data['tokens']:,} tokens in {duration(data['seconds'])}, {number(data['tokens_per_s'])} tokens/s",
    ]
    left_out = {
        "duplicates": "said before",
        "unfinished": "correct but cut off",
        "cut_short": "cut short",
        "too_long": "longer than the window",
        "killed": "graders killed",
    }
    said += [f"{data[name]:,} {words}" for name, words in left_out.items() if data[name]]
    return f"{', '.join(said)}; {data['path']}"


def gain_sentence(data: Mapping[str, Any]) -> str:
    found, took = data["difference"], duration(data["seconds"])
    if found is None:
        return f"too few questions to say whether accuracy changed; {took} in all"
    words = "rose" if found["low"] > 0 else "fell" if found["high"] < 0 else "did not change for certain"
    return (
        f"accuracy {words}: {100 * found['value']:+.1f} points (95 % interval {100 * found['low']:+.1f} to "
        f"{100 * found['high']:+.1f}, McNemar p {number(found['p'], digits=2)}), {took} in all"
    )


def _ends(values: list[float], *, best: Callable[[list[float]], float] = min) -> list[float]:
    """First, best and last; the best only where it is not one of the others."""
    first, found, last = values[0], best(values), values[-1]
    return [first] if len(values) == 1 else [first, last] if found in (first, last) else [first, found, last]
