"""Shows runs and the machine live in a terminal: `flatout watch [RUN...]`. It only reads and never disturbs a run.

In a pipe it prints one plain line per update. It ends when every run is over, or with Ctrl-C at any time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flatout.errors import UsageError
from flatout.insight import numbers
from flatout.insight.diagnose.runs import findings_of
from flatout.insight.machine import LOOK_S, Machine, MachineSampler, sampling_machine
from flatout.insight.report.plain import to_json
from flatout.insight.story import Story, TaskScore, tell
from flatout.record import Run
from flatout.terminal import table, tokens_words
from flatout.words import duration, interval_text, number, percent, score_text

BLOCKS = "▁▂▃▄▅▆▇█"
# The report shows more parts of a run; an update needs fewer.
NUM_PARTS = 48
_STYLES = {"running": "green", "finished": "green", "stopped": "yellow", "lost": "red", "silent": "yellow"}
_LEFT_OUT = ("history", "config", "environment", "hardware")


class Reader:
    """Reads a run folder again only if it has changed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: tuple[int, ...] = ()
        self._story: Story | None = None

    def read(self) -> Story:
        files = [self._run.file(what, 0) for what in ("steps", "events")]
        seen = tuple(file.stat().st_size if file.exists() else 0 for file in files)
        # A run may also die or stall, which changes no file.
        if self._story is None or seen != self._seen or not self._story.state.over:
            try:
                self._seen, self._story = seen, tell(self._run, num_parts=NUM_PARTS)
            except FileNotFoundError as error:
                raise UsageError(f"{self._run.path} is no longer a run folder: {error.filename} was removed") from error
        return self._story


def watch(runs: Sequence[Run], *, console: Console, once: bool = False, interval_s: float = 2.0) -> None:
    """Shows the runs, and this machine, until all runs are over; without runs, the machine until Ctrl-C."""
    readers = [Reader(run) for run in runs]
    disk = runs[0].path if runs else Path()
    with sampling_machine(disk=disk, interval_s=LOOK_S if once else max(LOOK_S, interval_s / 2)) as sampler:
        if once:
            console.print(view([reader.read() for reader in readers], sampler.second(), console=console))
            return
        try:
            if console.is_terminal:
                with Live(console=console, auto_refresh=False) as live:
                    _repeat(readers, sampler, interval_s, lambda *seen: _redraw(live, *seen))
            else:
                _repeat(readers, sampler, interval_s, lambda *seen: _say(console, *seen))
        except KeyboardInterrupt:
            return


def snapshot(runs: Sequence[Run]) -> dict[str, Any]:
    """One update as plain data, for programs."""
    with sampling_machine(disk=runs[0].path if runs else Path(), interval_s=LOOK_S) as sampler:
        told = [to_json(tell(run, num_parts=NUM_PARTS)) for run in runs]
        for run in told:
            for key in _LEFT_OUT:
                del run[key]
        return {"machine": sampler.second().to_json(), "runs": told}


def _repeat(
    readers: Sequence[Reader],
    sampler: MachineSampler,
    interval_s: float,
    show: Callable[[Sequence[Story], Machine], None],
) -> None:
    sampler.second()
    while True:
        stories = [reader.read() for reader in readers]
        show(stories, sampler.latest())
        if stories and all(story.state.over for story in stories):
            return
        time.sleep(interval_s)


def _redraw(live: Live, stories: Sequence[Story], machine: Machine) -> None:
    live.update(view(stories, machine, console=live.console), refresh=True)


def _say(console: Console, stories: Sequence[Story], machine: Machine) -> None:
    lines = [line(story) for story in stories] or [machine_line(machine)]
    for said in lines:
        console.print(Text(said), soft_wrap=True)


def view(stories: Sequence[Story], machine: Machine, *, console: Console) -> RenderableType:
    """The whole view, for any width from 80 columns."""
    parts: list[RenderableType] = []
    for story in stories:
        parts += [run_view(story, unicode=console.encoding.startswith("utf")), Text("")]
    return Group(*parts, machine_view(machine))


def run_view(story: Story, *, unicode: bool = True) -> RenderableType:
    head = Text.assemble((story.name, "bold"), "  ", (_state(story), _STYLES.get(story.state.kind, "")))
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    if story.total_steps and not story.state.over:
        rows.add_row("", ProgressBar(total=story.total_steps, completed=story.num_steps, width=60))
    for name, said in _rows(story, unicode=unicode).items():
        rows.add_row(name, Text(said))
    parts: list[RenderableType] = [head, rows]
    for finding in findings_of(story)[:4]:
        gain = "" if finding.gain is None else f" (gain {percent(finding.gain)}, {finding.status})"
        parts.append(Text(f"! {finding.sentence}{gain} -> {finding.fix}", style="yellow"))
    if story.last_sample and story.state.kind == "running" and story.host != socket.gethostname():
        parts.append(machine_view(Machine(sample=story.last_sample), title=story.host or "unknown host"))
    return Group(*parts)


def _state(story: Story) -> str:
    total = "" if story.total_steps is None else f"/{story.total_steps:,}"
    left = "" if story.state.over else f", ETA {duration(story.left_s)}"
    return f"{story.state.sentence}, step {story.num_steps:,}{total}{left}"


def _rows(story: Story, *, unicode: bool) -> dict[str, str]:
    val = story.evaluations[-1].val_loss if story.evaluations else None
    drawn = f"  {spark([part.loss for part in story.parts])}" if unicode and story.parts else ""
    phases = sorted(story.phases, key=lambda phase: -phase.share)[:6]
    return {
        "loss": f"{_loss(story)}, validation {number(val, digits=4)}, lr {_lr(story)}{drawn}",
        **({"tasks": _tasks(story)} if story.tasks else {}),
        "speed": _speed(story),
        "MFU": f"{numbers.figure(story, 'mfu').text} as done, {percent(story.speed.mfu_common)} by 6N + 12LHT",
        "memory": numbers.figure(story, "peak_gib").text + " at the peak",
        "phases": "  ".join(f"{phase.name} {100 * phase.share:.1f}%" for phase in phases) or "n/a",
        "criteria": story.judged,
        **({"doctor": story.verdict} if story.verdict else {}),
    }


def line(story: Story) -> str:
    """A run in one line, for pipes."""
    parts = [
        f"{story.name}: {_state(story)}",
        f"loss {_loss(story)}",
        f"lr {_lr(story)}",
        _speed(story),
        f"MFU {numbers.figure(story, 'mfu').text}",
        f"mem {numbers.figure(story, 'peak_gib').text}",
        *(f"! {finding.sentence}" for finding in findings_of(story)[:1]),
    ]
    return "  ".join(parts)


def machine_line(machine: Machine) -> str:
    parts = [f"{name} {said}" for name, said in machine.host().items()]
    for gpu in machine.gpus:
        parts.append(f"GPU {gpu['index']} {machine.memory_of(gpu)} busy {percent(gpu.get('busy'))}")
    return "  ".join(parts)


def machine_view(machine: Machine, *, title: str = "this machine") -> RenderableType:
    said = "  ".join(f"{name} {value}" for name, value in machine.host().items())
    host = Text.assemble((title, "bold"), "  ", said)
    if not machine.gpus:
        return Group(host, Text("no GPU is visible to NVML here", style="dim"))
    # Short headings: the table must fit in 80 columns. `busy`: some kernel was running.
    rows = table("", "GPU", "memory GiB", "busy", "SM", "tensor", "DRAM", "W", "temp", "MHz", "throttled")
    for gpu in machine.gpus:
        rows.add_row(*_gpu_cells(gpu))
    return Group(host, rows)


def _gpu_cells(gpu: Mapping[str, Any]) -> list[str]:
    def whole(key: str) -> str:
        return f"{gpu[key]:.0f}" if key in gpu else "n/a"

    def share(key: str) -> str:
        return f"{100 * gpu[key]:.0f}%" if key in gpu else "n/a"

    used, total = gpu.get("memory_gib"), gpu.get("memory_total_gib")
    memory = "n/a" if used is None or not total else f"{used:.0f}/{total:.0f} {100 * used / total:.0f}%"
    held = ",".join(gpu["throttle"]).replace("_", " ") or "no" if "throttle" in gpu else "n/a"
    shares = [share(key) for key in ("busy", "sm_active", "tensor_active", "dram_active")]
    return [str(gpu["index"]), memory, *shares, *map(whole, ("power_w", "temperature_c", "sm_clock_mhz")), held]


def spark(values: Sequence[float | None]) -> str:
    """A curve in one line of text; values that are unknown or not finite are gaps."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known) or 1.0
    scaled = [None if value is None else int((value - low) / span * (len(BLOCKS) - 1)) for value in values]
    return "".join(" " if value is None else BLOCKS[value] for value in scaled)


def _loss(story: Story) -> str:
    return "n/a" if story.last is None or story.last.loss is None else f"{story.last.loss:.4f}"


def _tasks(story: Story) -> str:
    """Of each task the first score and the newest, which is what training made of it."""
    ends: dict[str, list[TaskScore]] = {}
    for score in story.tasks:
        ends.setdefault(score.task, []).append(score)
    said = []
    for task, scores in ends.items():
        first, last = scores[0], scores[-1]
        began = f"{score_text(first.metric, first.value)} -> " if first is not last else ""
        span = interval_text(last.metric, last.low, last.high, brackets=True)
        value = f"{began}{score_text(last.metric, last.value)}{span}{last.ungraded}"
        said.append(f"{task} {last.metric} {value} at step {last.step:,}")
    return "  ".join(said)


def _lr(story: Story) -> str:
    lr = story.last.extra.lr if story.last else None
    return "n/a" if lr is None else f"{lr:.2e}"


def _speed(story: Story) -> str:
    """Of the whole run; while it is running, also of its last steps."""
    speed, recent = story.speed, story.recent
    now = "" if story.state.over else f" (last {recent.steps} steps: {number(recent.tokens_per_s)} tok/s)"
    a_second = None if not speed.step_s else 1 / speed.step_s
    whole = f"{tokens_words(speed)}, {number(a_second)} it/s, {number(speed.step_s, unit=' s')} a step"
    return f"{whole}{now}"
