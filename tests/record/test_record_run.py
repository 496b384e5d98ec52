"""The run folder under kills, torn lines, full disks, foreign folders and several processes."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.waiting import HANG_S, wait_until

from flatout.errors import EnvironmentLacks, UsageError
from flatout.record import Diagnosis, Event, Finding, Run, Span, StepExtra, StepRecord

PARTS = {"config": {}, "plan": {}, "hardware": {}, "environment": {}}


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    return output


# ---- making and opening


def test_a_created_run_reads_back(run: Run):
    opened = Run.open(run.path)
    assert opened.config_text == "recipe: pretrain\n"
    assert opened.config == {"recipe": "pretrain"}
    assert opened.plan == {"micro_batch": 4}
    assert opened.hardware == {"gpu": None}
    assert opened.environment == {"run_id": run.id, "python": "3.11"}
    assert list(opened.steps()) == []
    assert opened.rollups() == []
    assert not list(run.path.glob(".*.tmp"))


def test_an_existing_run_is_refused_with_both_ways_out(run: Run):
    with pytest.raises(UsageError, match=r"already holds a run.*--resume.*--run FOLDER"):
        Run.create(run.path, config_text="other", **PARTS)
    assert run.config_text == "recipe: pretrain\n"


def test_a_users_own_file_is_not_overwritten(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("mine")
    with pytest.raises(UsageError, match=r"config\.yaml.*--run"):
        Run.create(tmp_path, config_text="theirs", **PARTS)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "mine"


@pytest.mark.parametrize("parent", ["a file", "/proc"])
def test_an_unwritable_place_says_so(tmp_path: Path, parent: str):
    if parent == "a file":
        parent = str(tmp_path / "file")
        Path(parent).write_text("")
    with pytest.raises(EnvironmentLacks, match=r"cannot write the run folder .*--run FOLDER"):
        Run.create(Path(parent) / "run", config_text="", **PARTS)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"lacks config\.yaml"):
        Run.open(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        Run.open(tmp_path / "nowhere")


def test_secrets_do_not_reach_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLUSTER_TOKEN", "sentinel-env-1")
    run = Run.create(
        tmp_path / "run",
        config_text="wandb_key: sentinel-yaml-2\ndata:\n  path: https://me:sentinel-url-3@host/data\n",
        config={"data": {"path": "https://me:sentinel-url-3@host/data"}},
        plan={},
        hardware={},
        environment={"NCCL_X": "sentinel-env-1"},
    )
    with run.recorder() as recorder:
        recorder.event("failed", error="401 for key sentinel-env-1 at s3://id:sentinel-url-4@bucket")
    text = b"".join(path.read_bytes() for path in run.path.iterdir())
    assert b"sentinel" not in text
    assert run.config["data"]["path"] == "https://***@host/data"


# ---- writing and reading


def test_a_step_comes_back_as_it_was(run: Run, make_step):
    written = make_step(1)
    with run.recorder() as recorder:
        recorder.step(written)
        recorder.event("eval", step=1, val_loss=1.5)
        recorder.sample({"time": 1.0, "cpu": 0.5})
    assert list(run.steps()) == [written]
    started, evaluated = run.events()
    assert (started.kind, started.attempt, started.data["pid"]) == ("attempt", 1, os.getpid())
    assert (evaluated.kind, evaluated.step, evaluated.data) == ("eval", 1, {"val_loss": 1.5})
    assert list(run.samples()) == [{"attempt": 1, "time": 1.0, "cpu": 0.5}]


def test_non_finite_numbers_are_strict_json_and_come_back(run: Run, make_step):
    with run.recorder() as recorder:
        recorder.step(make_step(1, loss=math.nan, extra=StepExtra(grad_norm=math.inf, stage="NaN seen")))
        recorder.event("non_finite", raw=[-math.inf])

    def refuse(spelling: str) -> None:
        raise AssertionError(f"{spelling} is not JSON")

    for path in run.path.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)
    (step,) = run.steps()
    assert step.loss is not None
    assert math.isnan(step.loss)
    assert step.extra == StepExtra(grad_norm=math.inf, stage="NaN seen")
    assert list(run.events())[-1].data == {"raw": [-math.inf]}


def test_each_rank_has_its_own_lines_under_one_attempt(run: Run, make_step):
    with run.recorder() as first, run.recorder(rank=1, attempt=first.attempt) as second:
        first.step(make_step(1, loss=1.0))
        second.step(make_step(1, loss=9.0))
    assert run.ranks() == [0, 1]
    assert [step.loss for step in run.steps(rank=1)] == [9.0]
    assert (run.path / "steps-rank00001.jsonl").exists()
    with pytest.raises(ValueError, match="attempt of rank 0"):
        run.recorder(rank=1)


def test_what_is_not_a_step_is_named(run: Run, make_step):
    with run.recorder() as recorder:
        recorder.step(make_step(1))
    with (run.path / "steps.jsonl").open("a") as file:
        file.write("garbage\n")
    with pytest.raises(UsageError, match=r"steps\.jsonl, the line at byte \d+"):
        list(run.steps())


# ---- attempts


def test_repeats_after_a_resume_count_once(run: Run, make_step):
    for attempt, numbers in ((1, range(1, 11)), (2, range(6, 9)), (3, range(8, 13))):
        with run.recorder() as recorder:
            assert recorder.attempt == attempt
            for number in numbers:
                recorder.step(make_step(number, attempt=attempt))
    assert len(list(run.steps())) == 18
    latest = [(step.step, step.attempt) for step in run.latest_steps()]
    assert latest == [(n, 1) for n in range(1, 6)] + [(n, 2) for n in (6, 7)] + [(n, 3) for n in range(8, 13)]


def test_steps_beyond_a_rollback_are_gone_at_once(run: Run, make_step):
    with run.recorder() as recorder:
        for number in (1, 2, 3, 4, 2):  # within one attempt: step 4 diverged, back to 2
            recorder.step(make_step(number))
        assert [step.step for step in run.latest_steps()] == [1, 2]


KEEP_WRITING = """
    import sys, time
    from flatout.record import Run, StepExtra, StepRecord
    run = Run.open(sys.argv[1])
    with run.lock():
        recorder = run.recorder()
        first = sum(1 for _ in run.latest_steps())
        print("up", flush=True)
        for step in range(first, 10**9):
            recorder.step(StepRecord(attempt=recorder.attempt, step=step, time=time.time(), seconds=0.1, tokens=1,
                                     padded_tokens=1, loss=0.5, extra=StepExtra(stage="x" * 2000)))
"""


def wait_until_grown(path: Path, num_bytes: int, process: subprocess.Popen[str]) -> None:
    before = path.stat().st_size
    wait_until(lambda: path.stat().st_size >= before + num_bytes, process=process)


def test_a_writer_killed_at_any_moment_leaves_a_readable_run(run: Run):
    for attempt in range(1, 5):
        process = start(KEEP_WRITING, str(run.path))
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        wait_until_grown(run.file("steps", 0), attempt * 10_000, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        steps = [step.step for step in run.latest_steps()]
        assert steps == list(range(len(steps)))
        assert list(run.steps())[-1].attempt == attempt
        assert sum(part.num_steps for part in run.rollups()) == len(list(run.steps()))


def test_a_torn_end_is_skipped_and_then_cut(run: Run, make_step):
    with run.recorder() as recorder:
        recorder.step(make_step(1))
    for name in ("steps.jsonl", "events.jsonl", "steps.rollup.jsonl"):
        with (run.path / name).open("ab") as file:
            file.write(b'{"attempt": 1, "st')
    assert [step.step for step in run.steps()] == [1]
    with run.recorder() as recorder:
        assert recorder.attempt == 2
        recorder.step(make_step(2, attempt=2))
    assert [step.step for step in run.steps()] == [1, 2]
    assert [event.attempt for event in run.events()] == [1, 2]
    assert [(part.first_step, part.attempt) for part in run.rollups()] == [(1, 1), (2, 2)]


# ---- the lock


HOLD_LOCK = """
    import os, sys, time
    from flatout.record import Run
    with Run.open(sys.argv[1]).lock():
        if sys.argv[2] == "fork" and os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(600)
        elif sys.argv[2] == "alone":
            print(os.getpid(), flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_the_lock_names_its_holder_and_dies_with_it(run: Run, how: str):
    process = start(HOLD_LOCK, str(run.path), how)
    assert process.stdout is not None
    speaker = int(process.stdout.readline())
    try:
        with pytest.raises(UsageError, match=rf"in use by pid {process.pid} on \S+"), run.lock():
            pass
        process.kill()
        process.wait()
        with run.lock():  # also while a forked worker of the dead holder lives on
            pass
    finally:
        process.kill()
        if how == "fork":
            os.kill(speaker, signal.SIGKILL)
        process.stdout.close()


def test_the_lock_is_free_again_after_use(run: Run):
    with run.lock(), pytest.raises(UsageError, match="already in use"), run.lock():
        pass
    with run.lock():
        pass


# ---- a full disk


FILL_UP = """
    import resource, sys, time
    from flatout.record import Run, StepExtra, StepRecord
    run = Run.open(sys.argv[1])
    with run.recorder() as recorder:
        def step(number):
            recorder.step(StepRecord(attempt=1, step=number, time=0.0, seconds=0.1, tokens=1, padded_tokens=1,
                                     loss=0.5, extra=StepExtra(stage="x" * 300)))
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))   # writes are cut short, then refused
        for number in range(10):
            step(number)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        step(10)
        print(recorder.num_dropped)
"""


def test_a_full_disk_drops_lines_and_says_so(run: Run):
    num_dropped = int(finish(start(FILL_UP, str(run.path))))
    steps = [step.step for step in run.steps()]
    assert 0 < num_dropped < 10
    assert steps == [*range(10 - num_dropped), 10]
    told = [event.data["num_lines"] for event in run.events() if event.kind == "lines_dropped"]
    assert told == [1, num_dropped]  # once when it began, once with the total


# ---- sinks


class Told:
    def __init__(self, *, fail_on: str | None = None) -> None:
        self.heard: list[str] = []
        self.fail_on = fail_on

    def step(self, record: StepRecord) -> None:
        self._hear(f"step {record.step}")

    def event(self, event: Event) -> None:
        self._hear(event.kind)

    def close(self) -> None:
        self._hear("close")

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        if what == self.fail_on:
            raise RuntimeError("tracker is down")


def test_a_failing_sink_is_switched_off_and_the_run_goes_on(run: Run, make_step):
    good, bad = Told(), Told(fail_on="step 1")
    with run.recorder(sinks=[bad, good]) as recorder:
        recorder.step(make_step(1))
        recorder.step(make_step(2))
    assert bad.heard == ["attempt", "step 1"]
    assert good.heard == ["attempt", "sink_failed", "step 1", "step 2", "close"]
    (failure,) = [event for event in run.events() if event.kind == "sink_failed"]
    assert failure.data == {"sink": "Told", "error": "RuntimeError: tracker is down"}
    assert len(list(run.steps())) == 2


def test_record_needs_only_the_standard_library():
    script = """
        import sys, flatout.record
        print(sorted({"torch", "numpy", "psutil", "pydantic"} & set(sys.modules)))
    """
    assert finish(start(script)).strip() == "[]"


def test_a_diagnosis_comes_back_as_it_was_written(run: Run) -> None:
    assert run.diagnosis is None
    finding = Finding(
        cause="host-sync",
        sentence="The host waits for the device in every step.",
        share=0.2,
        gain=0.15,
        status="estimated",
        evidence=("train.py:12 .item() took 20 ms of 100", "api_key=sk-abcdefghijklmnopqrstuvwxyz123456"),
        fix="log every 10 steps",
    )
    run.write_diagnosis(Diagnosis(verdict="slow", limit={"share": 0.4}, findings=(finding,)))
    found = run.diagnosis
    assert found is not None
    assert found.findings[0].evidence[0] == finding.evidence[0]
    assert "abcdefghijklmnop" not in (run.path / "findings.json").read_text()
    assert found.limit == {"share": 0.4}


def test_samples_can_be_read_evenly_spread_however_many_there_are(run: Run):
    with run.recorder() as recorder:
        for second in range(1000):
            recorder.sample({"time": float(second), "note": "x" * (second % 7)})
    assert [sample["time"] for sample in run.samples()] == list(range(1000))
    spread = [sample["time"] for sample in run.samples(at_most=10)]
    assert len(spread) == 10
    assert spread[0] == 0
    assert all(80 <= later - earlier <= 120 for earlier, later in itertools.pairwise(spread))
    assert run.last_sample()["time"] == 999


def test_fewer_samples_than_asked_for_come_all(run: Run):
    assert run.last_sample() is None
    assert list(run.samples(at_most=5)) == []
    with run.recorder() as recorder:
        for second in range(3):
            recorder.sample({"time": float(second)})
    with (run.path / "monitor.jsonl").open("ab") as file:
        file.write(b'{"time": 3')  # still being written
    assert [sample["time"] for sample in run.samples(at_most=5)] == [0, 1, 2]


def test_recent_steps_are_the_end_of_the_latest_ones(run: Run, make_step):
    for attempt, numbers in ((1, range(600)), (2, range(500, 530))):
        with run.recorder() as recorder:
            for number in numbers:
                recorder.step(make_step(number, attempt=attempt))
    recent = run.recent_steps(40)
    assert recent == list(run.latest_steps())[-40:]
    assert [step.attempt for step in recent] == [1] * 10 + [2] * 30
    assert len(run.recent_steps(10_000)) == 530


def test_training_time_is_what_evaluating_and_saving_leave(make_step):
    spans = (Span(phase="eval", seconds=0.2), Span(phase="forward", seconds=0.2), Span(phase="save", seconds=0.05))
    assert make_step(0, spans=spans).training_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    "text", ["{}", '{"verdict": "v", "limit": {}, "findings": [{"cause": "x", "colour": "blue"}]}']
)
def test_findings_of_another_version_are_named(run: Run, text: str):
    (run.path / "findings.json").write_text(text)
    with pytest.raises(UsageError, match=r"findings\.json is not what flatout writes there: .*Run the doctor again"):
        _ = run.diagnosis
