"""What is drawn of a run: the facts told to the view, and nothing that was not told."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from rich.console import Console

from flatout.config.settings import CriteriaSettings
from flatout.cost import ModelShape
from flatout.hardware import Hardware, named
from flatout.plan import Job, Plan, decide
from flatout.record import Event, Outcome, Speed, StepExtra, StepRecord, event_from_json
from flatout.terminal import View, hardware_table, plan_tables
from flatout.verdict import judge
from flatout.words import duration, number, percent

MARKUP = "[red]x[/]"
SHAPE = ModelShape(
    layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, intermediate=2048, vocab=50304, positions=1024
)


def plan_on(machine: str) -> Plan:
    return decide(
        Job(
            shape=SHAPE,
            hardware=named(machine),
            sequence_length=1024,
            batch_tokens=524288,
            num_ranks=1,
            steps=1000,
        )
    )


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def drawn(*things: Any) -> str:
    paper = console()
    for thing in things:
        paper.print(thing)
    return text(paper)


def event(kind: str, *, step: int | None = None, **data: Any) -> Event:
    # Through JSON, as a reader of the run folder would get it.
    line = {"attempt": 0, "time": 0.0, "kind": kind, "step": step, "data": json.loads(json.dumps(data))}
    return event_from_json(line, source="here")


def record(step: int, **known: Any) -> StepRecord:
    values: dict[str, Any] = {"seconds": 0.5, "tokens": 1000, "padded_tokens": 1000, "loss": 2.5}
    return StepRecord(attempt=0, step=step, time=0.0, **values | known)


def row(page: str, start: str) -> str:
    """The one line that starts so, with runs of blanks made one."""
    (found,) = [line for line in (" ".join(line.split()) for line in page.splitlines()) if line.startswith(start)]
    return found


# Figures


def test_unknown_figures_are_said_and_never_zero() -> None:
    assert (number(None, unit=" GiB"), percent(None), duration(None)) == ("n/a", "n/a", "n/a")
    assert (number(0.0), percent(0.0), duration(0.0)) == ("0", "0.0 %", "0m00s")


def test_figures_for_people() -> None:
    assert number(1234567.8) == "1,234,568"
    assert number(12.345, unit=" GiB") == "12.3 GiB"
    assert number(12.345, digits=4) == "12.35"  # three digits are the default
    assert percent(0.4567) == "45.7 %"
    assert [duration(s) for s in (59.6, 61, 3600, 90061)] == ["1m00s", "1m01s", "1h00m", "25h01m"]


# Tables


def test_the_plan_shows_every_decision_with_its_reason() -> None:
    plan = plan_on("H200")
    page = drawn(*plan_tables(plan.to_json(), verbose=True))
    for name, value, reason in plan.explain():
        shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        assert row(page, f"{name} ") == f"{name} {shown} {reason}"
    assert row(page, "peak memory").startswith(f"peak memory {plan.predicted.peak_gib:.3g} GiB weights 0.60,")
    assert row(page, "tokens/s").startswith(f"tokens/s {plan.predicted.tokens_per_s:,.0f} estimated")
    assert row(page, "MFU").endswith("by 6N + 12LHT; of 989 TFLOPS bf16 (datasheet)")
    assert row(page, "time").endswith(" 1000 steps")
    assert row(page, "checkpoint") == "checkpoint 1.81 GiB each, on disk"


def test_without_verbose_the_plan_shows_what_matters() -> None:
    plan = plan_on("CPU")
    page = drawn(*plan_tables(plan.to_json()))
    names = [name for name, _, _ in plan.explain() if f"\n{name} " in page]
    assert {"precision", "micro_batch", "threads"} <= set(names)
    assert not {"fp8", "graphs", "fused_qkv", "pin_memory", "manual_gc"} & set(names)
    assert f"Plan ({len(plan.explain()) - len(names)} more with --verbose)" in page
    pinned = plan.with_pins(fp8=False)
    assert "\nfp8 " in drawn(*plan_tables(pinned.to_json())), "what the user pinned is shown"
    on_gpu = drawn(*plan_tables(plan_on("H200").to_json()))
    assert "\nfp8 " in on_gpu
    assert "\nmanual_gc " not in on_gpu


def test_a_plan_that_predicts_no_speed_says_so() -> None:
    plan = plan_on("CPU")
    page = drawn(*plan_tables(plan.to_json()))
    assert row(page, "tokens/s") == f"tokens/s n/a {plan.predicted.unknown}"
    assert row(page, "MFU") == f"MFU n/a {plan.predicted.unknown}"
    assert row(page, "peak memory").endswith("; without the process itself, interpreter and libraries")
    assert "\ntime" not in page


def test_the_hardware_table() -> None:
    page = drawn(hardware_table(named("A100-80GB", num_gpus=8)))
    assert row(page, "GPU") == "GPU 8 x NVIDIA A100-SXM4-80GB"
    assert row(page, "SM") == "SM 8.0"
    assert row(page, "memory") == "memory 79.2 GiB"
    assert row(page, "peak TFLOP/s") == "peak TFLOP/s fp32 20, tf32 156, fp16 312, bf16 312"
    assert row(page, "bandwidth") == "bandwidth 2.04 TB/s"
    assert row(page, "RAM") == "RAM n/a"

    assert "none: everything runs on the CPU" in drawn(hardware_table(named("CPU")))
    stranger = Hardware(name=None, gpu=MARKUP, num_gpus=1, cpu=MARKUP)
    page = drawn(hardware_table(stranger))
    assert row(page, "GPU") == f"GPU 1 x {MARKUP}"
    assert row(page, "CPU") == f"CPU {MARKUP}, n/a cores"
    assert row(page, "peak TFLOP/s").startswith("peak TFLOP/s n/a")


# A run


def start(view: View, *, machine: str = "H200", total_steps: int = 100) -> None:
    view.event(event("plan", **plan_on(machine).to_json()))
    view.event(event("start", folder="runs/a", total_steps=total_steps))


def test_a_run_is_introduced() -> None:
    paper = console()
    view = View(paper)
    view.event(event("hardware", **named("H200").to_json()))
    view.event(
        event("data", source="corpus.jsonl", train_tokens=1234567, valid_tokens=89, tokenizer="bpe:1024", vocab=1024)
    )
    start(view)
    view.event(event("active", attention="cudnn", compile=MARKUP))
    page = text(paper)
    assert row(page, "GPU") == "GPU 1 x NVIDIA H200"
    assert row(page, "Data") == (
        "Data corpus.jsonl: 1,234,567 tokens to train on, 89 held out, tokenizer bpe:1024 (1,024 ids)"
    )
    assert row(page, "precision") == "precision bf16 SM 9.0 has bf16 tensor cores; no loss scaling needed"
    assert row(page, "compile [") == f"compile {MARKUP}"
    assert row(page, "Run folder") == "Run folder runs/a, 100 steps"


def test_plain_lines_come_every_so_many_steps() -> None:
    paper = console()
    view = View(paper, every=3)
    start(view)
    before = len(text(paper))
    for step in range(7):
        view.step(record(step))
    lines = text(paper)[before:].splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/100", "step 6/100"]


def test_a_plain_line_holds_what_is_known() -> None:
    paper = console()
    view = View(paper, every=1)
    start(view)
    view.step(
        record(
            1,
            tokens=250_000,
            loss=3.14159,
            memory={"allocated_gib": 10.0, "peak_gib": 25.0, "total_gib": 100.0},
            utilisation={"gpu": 0.99, "cpu": 0.5, "ram": 0.25},
            extra=StepExtra(lr=6e-4),
        )
    )
    mfu = plan_on("H200").rates.shares(tokens=250_000, seconds=0.5).mfu
    assert text(paper).splitlines()[-1].split("  ") == [
        "step 2/100",
        "loss 3.1416",
        "lr 6.00e-04",
        "500,000 tok/s",
        "2.00 it/s",
        f"MFU {percent(mfu)}",
        "mem 25/100 GiB (25.0 %)",
        "GPU 99.0 %",
        "CPU 50.0 %",
        "RAM 25.0 %",
        "ETA 0m49s",
    ]


def test_a_plain_line_says_what_is_not_known() -> None:
    paper = console()
    view = View(paper, every=1)
    start(view, machine="CPU")
    view.step(record(0, loss=None))
    parts = text(paper).splitlines()[-1].split("  ")
    assert {"loss n/a", "lr n/a", "MFU n/a", "mem n/a/n/a GiB", "CPU n/a", "RAM n/a"} <= set(parts)
    assert not any(part.startswith("GPU") for part in parts)


def test_the_shown_speed_is_that_of_the_last_steps() -> None:
    paper = console()
    view = View(paper, every=1)
    start(view, total_steps=1000)
    view.step(record(0, seconds=1000.0))
    for step in range(1, 21):
        view.step(record(step, seconds=0.5))
    assert "2,000 tok/s  2.00 it/s" in text(paper).splitlines()[-1]


def test_events_become_sentences() -> None:
    paper = console()
    view = View(paper)
    start(view)
    view.event(event("eval", step=10, val_loss=3.0))
    view.event(event("eval", step=20, val_loss=2.5))
    view.event(event("save", step=20, checkpoint="step-20"))
    view.event(event("target", step=20, val_loss=2.5, seconds=90.0, tokens=20480, gpu_hours=0.025))
    view.event(event("save-failed", step=30, error="no space left"))
    view.event(event("skipped", step=31, loss=float("inf"), grad_norm=float("nan")))
    view.event(event("something-new", step=32, anything=1))
    assert text(paper).splitlines()[-6:] == [
        "step 10: validation loss 3.0000",
        "step 20: validation loss 2.5000 (was 3.0000)",
        "step 20: saved step-20",
        "step 20: target reached: validation loss 2.5000 after 1m30s, 20,480 tokens, 0.025 device-hours",
        "step 30: NOT saved, training continues: no space left",
        "step 31: update skipped: loss inf, gradient norm nan",
    ]


@pytest.mark.parametrize(
    ("kind", "data", "says"),
    [
        ("patience", {"patience": 3, "best": 2.0}, "no improvement in 3 evaluations (best 2.0000)"),
        ("resume", {"checkpoint": "step-7"}, "resumed from step-7"),
        ("best", {"val_loss": 2.5}, "kept as the best checkpoint so far: validation loss 2.5000"),
        ("best", {"task_score": 0.5}, "kept as the best checkpoint so far: task score 50.0 %"),
        ("profile", {"folder": "runs/a/profile"}, "trace and kernel table in runs/a/profile"),
        (
            "workers",
            {"data_share": 0.125, "workers": 3},
            "12.5 % of the time was spent waiting for data; now 3 workers",
        ),
        ("sink_failed", {"sink": "wandb", "error": "offline"}, "wandb failed and is switched off: offline"),
        ("bad-checkpoint", {"text": "step-5 is torn"}, "step-5 is torn"),
        ("notice", {"text": "one of 8 GPUs"}, "one of 8 GPUs"),
        ("end", {"outcome": {"stopped_by": "SIGTERM"}, "verdicts": []}, "ended by SIGTERM"),
        ("hardware", {}, None),
        ("a-kind-of-tomorrow", {"anything": 1}, None),
    ],
)
def test_an_event_is_one_sentence_everywhere(kind: str, data: dict[str, Any], says: str | None) -> None:
    told = event(kind, step=7, **data)
    assert (told.kind, told.sentence()) == (kind, says)
    if kind not in ("end", "hardware"):
        paper = console()
        View(paper).event(told)
        assert text(paper).strip() == ("" if says is None else f"step 7: {says}")


# The end

OUTCOME = Outcome(
    stopped_by="end",
    steps=100,
    tokens=102400,
    hours=0.5,
    speed=Speed(
        steps=97,
        tokens_per_s=51234.0,
        step_s=0.02,
        mfu=0.4,
        hfu=0.4,
        mfu_common=0.45,
        data_share=0.01,
        unattributed_share=0.02,
    ),
    loss_first_tenth=5.0,
    loss_last_tenth=3.25,
    val_losses=(5.1, 3.0, 3.5, 3.2),
    peak_gib=25.0,
    memory_share=0.18,
    saves=2,
)


def ended(outcome: Outcome, criteria: CriteriaSettings | None = None) -> str:
    paper = console()
    verdicts = [asdict(verdict) for verdict in judge(criteria or CriteriaSettings(), outcome)]
    View(paper).event(event("end", step=outcome.steps, outcome=outcome.to_json(), verdicts=verdicts))
    return text(paper)


def test_the_summary() -> None:
    page = ended(OUTCOME)
    assert row(page, "steps") == "steps 100, 102,400 tokens, 30m00s"
    assert row(page, "speed") == "speed 51,234 tokens/s, 0.02 s a step"
    assert row(page, "MFU") == "MFU 40.0 % as done; 45.0 % by 6N + 12LHT"
    assert row(page, "waiting for data") == "waiting for data 1.0 %"
    assert row(page, "peak memory") == "peak memory 25 GiB (18.0 %)"
    assert row(page, "training loss") == "training loss 5 in the first tenth, 3.25 in the last"
    # The first, the best and the last.
    assert row(page, "validation loss") == "validation loss 5.1000 -> 3.0000 -> 3.2000"
    assert row(page, "ended by") == "ended by the last step"
    assert "Criteria" not in page

    recomputed = replace(OUTCOME, speed=replace(OUTCOME.speed, hfu=0.5))
    assert row(ended(recomputed), "MFU") == "MFU 40.0 % as done, HFU 50.0 %; 45.0 % by 6N + 12LHT"


def test_the_summary_of_a_run_too_short_to_measure() -> None:
    page = ended(Outcome(stopped_by="end", steps=1, tokens=1024, hours=0.0, speed=Speed(steps=0)))
    assert row(page, "speed") == "speed n/a tokens/s, n/a a step"
    assert row(page, "MFU") == "MFU n/a as done; n/a by 6N + 12LHT"
    assert row(page, "peak memory") == "peak memory n/a (n/a)"
    assert row(page, "training loss") == "training loss n/a in the first tenth, n/a in the last"
    assert "validation loss" not in page


def test_the_verdict_on_each_criterion() -> None:
    page = ended(OUTCOME, CriteriaSettings(tokens_per_s=50000, mfu=0.5, utilisation=0.9, loss_falling=True))
    assert row(page, "tokens_per_s") == "tokens_per_s at least 50,000 in total 51,234 met"
    assert row(page, "mfu") == "mfu at least 0.5 0.45 not met"
    assert row(page, "utilisation") == "utilisation at least 0.9 not measured not measured"
    assert row(page, "loss_falling") == "loss_falling true 5.0000 to 3.2500 met"


# Text that is not ours


def test_markup_in_data_is_shown_as_it_is() -> None:
    paper = console()
    view = View(paper)
    plan = plan_on("H200").to_json()
    plan["reasons"]["precision"] = MARKUP
    view.event(event("plan", **plan))
    view.event(event("data", source=MARKUP, train_tokens=1, valid_tokens=1, tokenizer=MARKUP, vocab=1))
    view.event(event("start", folder=f"runs/{MARKUP}", total_steps=1))
    view.event(event("save", step=1, checkpoint=MARKUP))
    view.event(event("save-failed", step=1, error=MARKUP))
    view.event(event("notice", text=f"{MARKUP} [/] [bold"))
    page = text(paper)
    assert row(page, "precision") == f"precision bf16 {MARKUP}"
    assert f"{MARKUP}: 1 tokens to train on, 1 held out, tokenizer {MARKUP} (1 ids)" in page
    assert page.splitlines()[-4:] == [
        f"Run folder runs/{MARKUP}, 1 steps",
        f"step 1: saved {MARKUP}",
        f"step 1: NOT saved, training continues: {MARKUP}",
        f"{MARKUP} [/] [bold",
    ]


def test_long_lines_stay_whole_where_there_is_no_terminal() -> None:
    paper = Console(file=io.StringIO(), force_terminal=False, width=40)
    view = View(paper, every=1)
    view.event(event("start", folder="runs/" + "long" * 30, total_steps=1))
    view.step(record(0))
    first, second = text(paper).splitlines()
    assert first.endswith("long, 1 steps")
    assert second.endswith("ETA 0m00s")


# A terminal


def test_a_terminal_gets_one_live_line_which_the_end_takes_away() -> None:
    paper = console(terminal=True)
    view = View(paper)
    start(view)
    live = view.live
    assert live is not None
    assert live.is_started
    for step in range(30):
        view.step(record(step))
    live.refresh()
    view.event(event("eval", step=30, val_loss=3.0))
    view.event(event("end", step=30, outcome=OUTCOME.to_json(), verdicts=[]))
    assert not live.is_started
    assert "step 30/100" in text(paper)
    assert "validation loss 3.0000" in text(paper)
    assert "ended by" in text(paper)
    view.close()


def test_a_run_that_breaks_off_leaves_the_terminal_clean() -> None:
    paper = console(terminal=True)
    view = View(paper)
    start(view)
    live = view.live
    assert live is not None
    view.step(record(0))
    view.close()
    assert not live.is_started
    # The cursor that the live line hid is shown again.
    assert text(paper).rindex("\x1b[?25h") > text(paper).rindex("\x1b[?25l")
