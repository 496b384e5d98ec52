"""Roll-ups agree with the steps, and a long run opens by reading its end only."""

import json
import math
import os
from pathlib import Path

import pytest

from flatout.record import Run, StepExtra
from flatout.record.records import step_to_json

ROLLUPS = "steps.rollup.jsonl"


def bytes_read() -> int:
    """What this process has asked the system to read so far, cached or not."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_sums_means_and_peaks(run: Run, make_step):
    with run.recorder() as recorder:
        for step in range(300):
            loss = math.nan if step == 7 else float(step)
            extra = StepExtra(lr=0.1 if step % 2 else 0.3, stage="text")
            recorder.step(make_step(step, loss=loss, memory={"peak_gib": float(step)}, extra=extra))
    first, rest = run.rollups()
    assert (first.first_step, first.last_step, first.num_steps) == (0, 255, 256)
    assert (rest.first_step, rest.last_step, rest.num_steps) == (256, 299, 44)
    assert first.seconds == pytest.approx(128.0)
    assert (first.tokens, first.padded_tokens) == (25600, 32768)
    assert first.loss == pytest.approx((sum(range(256)) - 7) / 255)
    assert first.num_non_finite == 1
    assert (first.loss_low, first.loss_high) == (0.0, 255.0)
    assert (first.fastest_s, first.slowest_s) == (0.5, 0.5)
    assert first.spans == pytest.approx({"forward": 51.2, "critic/forward": 25.6})
    assert first.memory == {"peak_gib": 255.0}
    assert first.extra == pytest.approx({"lr": 0.2})
    assert (first.first_time, first.last_time) == (1000.0, 1255.0)
    assert rest.end_byte == (run.path / "steps.jsonl").stat().st_size


def test_the_recorder_writes_what_a_rebuild_finds(run: Run, make_step):
    for attempt, numbers in ((1, range(600)), (2, range(500, 800))):
        with run.recorder() as recorder:
            for number in numbers:
                recorder.step(make_step(number, attempt=attempt))
    kept = run.rollups()
    assert [(part.attempt, part.num_steps) for part in kept] == [(1, 256), (1, 256), (1, 88), (2, 256), (2, 44)]
    (run.path / ROLLUPS).unlink()
    assert run.rollups() == kept
    assert (run.path / ROLLUPS).exists()


def test_overtaken_steps_are_left_out(run: Run, make_step):
    for attempt, numbers in ((1, range(600)), (2, range(300, 400))):
        with run.recorder() as recorder:
            for number in numbers:
                recorder.step(make_step(number, attempt=attempt))
    parts = [(part.attempt, part.first_step, part.last_step) for part in run.latest_rollups()]
    assert parts == [(1, 0, 255), (1, 256, 299), (2, 300, 399)]
    assert sum(part.tokens for part in run.latest_rollups()) == 400 * 100


@pytest.mark.parametrize("damage", ["shorter steps", "garbage", "other version", "gap"])
def test_roll_ups_that_disagree_are_rebuilt(run: Run, make_step, damage: str):
    with run.recorder() as recorder:
        for number in range(800):
            recorder.step(make_step(number))
    steps_path, rollups_path = run.path / "steps.jsonl", run.path / ROLLUPS
    lines = rollups_path.read_text().splitlines(keepends=True)
    expected = run.rollups()
    match damage:
        case "shorter steps":
            text = steps_path.read_bytes().splitlines(keepends=True)
            steps_path.write_bytes(b"".join(text[100:]))
        case "garbage":
            rollups_path.write_bytes(b"\0" * 100 + b"\n")
        case "other version":
            rollups_path.write_text(json.dumps({"colour": "blue"}) + "\n")
        case "gap":
            rollups_path.write_text(lines[0] + lines[2])
    rebuilt = run.rollups()
    if damage == "shorter steps":
        assert [(part.first_step, part.num_steps) for part in rebuilt] == [(100, 256), (356, 256), (612, 188)]
    else:
        assert rebuilt == expected
    assert len(rollups_path.read_text().splitlines()) == len(rebuilt) - 1


def test_a_live_run_is_not_written_to(run: Run, make_step):
    with run.lock(), run.recorder() as recorder:
        for number in range(300):
            recorder.step(make_step(number))
        (run.path / ROLLUPS).unlink()
        assert [part.num_steps for part in run.rollups()] == [256, 44]
        assert not (run.path / ROLLUPS).exists()


@pytest.mark.long
def test_a_long_run_opens_by_its_end(run: Run, make_step):
    num_steps = 50_000
    before, after = json.dumps(step_to_json(make_step(123456))).split("123456")
    with (run.path / "steps.jsonl").open("w") as file:
        file.writelines(f"{before}{number}{after}\n" for number in range(num_steps))
    built = run.rollups()
    assert sum(part.num_steps for part in built) == num_steps
    rollups_bytes = (run.path / ROLLUPS).stat().st_size
    steps_bytes = (run.path / "steps.jsonl").stat().st_size
    line_bytes = steps_bytes // num_steps

    start = bytes_read()
    again = Run.open(run.path).rollups()
    used = bytes_read() - start

    assert again == built
    # The roll-ups, the last one's own lines to check it, and the tail after it; reads are buffered.
    assert used < rollups_bytes + 3 * 256 * line_bytes + 4 * os.sysconf("SC_PAGESIZE")
    assert used < steps_bytes / 50

    start = bytes_read()
    assert next(run.latest_steps()).step == 0
    assert bytes_read() - start < steps_bytes / 50


def test_a_history_keeps_sums_and_extremes_in_few_parts(run: Run, make_step):
    with run.recorder() as recorder:
        for number in range(5000):
            loss = 90.0 if number == 3333 else math.nan if number == 4444 else 2.0
            recorder.step(make_step(number, loss=loss, seconds=4.0 if number == 2222 else 0.5))
    parts = run.history(at_most=10)
    assert len(parts) == 10
    assert [part.first_step for part in parts][:2] == [0, 512]
    assert parts[-1].last_step == 4999
    assert sum(part.num_steps for part in parts) == 5000
    assert sum(part.seconds for part in parts) == pytest.approx(5000 * 0.5 + 3.5)
    assert sum(part.num_non_finite for part in parts) == 1
    assert max(part.loss_high for part in parts) == 90.0
    assert max(part.slowest_s for part in parts) == 4.0
    assert sum(part.loss * (part.num_steps - part.num_non_finite) for part in parts) == pytest.approx(4998 * 2 + 90)
    assert parts[0].extra == pytest.approx({"lr": 1e-3, "kl": 0.5})


def test_a_short_history_is_every_step(run: Run, make_step):
    with run.recorder() as recorder:
        for number in range(300):
            recorder.step(make_step(number, loss=float(number)))
    parts = run.history(at_most=1000)
    assert [part.loss for part in parts] == list(range(300))
    assert [step.step for step in run.steps_in(run.latest_rollups()[1])] == list(range(256, 300))


def test_merging_only_non_finite_losses_says_none(run: Run, make_step):
    with run.recorder() as recorder:
        for number in range(4):
            recorder.step(make_step(number, loss=math.nan))
    (part,) = run.history(at_most=1)
    assert (part.loss, part.loss_low, part.loss_high, part.num_non_finite) == (None, None, None, 4)
