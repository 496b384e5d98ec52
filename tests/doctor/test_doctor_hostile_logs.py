"""`doctor --log FILE` on anything: a diagnosis or one sentence, in bounded time, and never a traceback."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import warm

from flatout.errors import UsageError
from flatout.insight import logs
from flatout.insight.logs import formats, lines, names

DIGITS = "9" * 5000
GOOD = "".join(f"step={step} loss=2.{9 - step} tok/s=100\n" for step in range(9))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "missing"])
def test_what_is_no_file_is_told_at_once(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = {"device": Path("/dev/zero"), "folder": tmp_path}.get(kind, tmp_path / kind)
    done = warm.flatout("doctor", "--log", path, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error:")
    assert "Traceback" not in done.stderr


def test_a_file_of_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.log"
    with path.open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(UsageError, match=r"3,221,225,472 bytes"):
        logs.diagnose(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"loss":' * 100_000,
        '{"a":' * 900 + "1" + "}" * 900,
        f'{{"step": {DIGITS}, "loss": 1}}',
        '{"log_history": ' + "[" * 100_000,
        "{'loss': " + "[" * 5000 + "}",
        f"{{'loss': {DIGITS}}}",
        "{'loss', 'step'}",
        "iter 1: loss 1,000, time 1,5ms, mfu 1,000%",
        f"iter {DIGITS}: loss {DIGITS}, time {DIGITS}ms",
        "step 1: train loss 1,2, val loss 1,2",
        "step 1 | loss: 1,5 | dt: 1,2ms | tok/sec: 1 | mfu: 1,1",
        "step: 1  tps: 1  mfu: 1,1%  memory: 1GiB(1,1%)",
        "step " * 3000 + "| loss: 1 " * 300,
        "step=1 loss=" + "1" * 16_000 + "x",
        "a" * 16_000,
        "9" * 16_000,
        "1/1 " * 4000,
        "number of parameters: 1.2.3M",
        "step=1 loss=1e999 tok/s=1e308",
        "x" * 5_000_000,
        "\x00\x1b[" + "0;" * 5000,
    ],
)
def test_a_hostile_line_costs_little_and_hides_no_other(tmp_path: Path, line: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(f"{GOOD}{line}\n")
    assert logs.diagnose(path, on="H100", params="124M").limit["tokens_per_s"] == 100


def test_a_table_with_an_endless_cell_is_told(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text(f"step,loss\n1,{'9' * 200_000}\n")
    with pytest.raises(UsageError, match="is not a known training log"):
        logs.diagnose(path)


@pytest.mark.parametrize("size", ["1.2.3B", "0", DIGITS, "-7B", "nan", ""])
def test_a_size_that_is_none_is_told(tmp_path: Path, size: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(GOOD)
    with pytest.raises(UsageError, match="is not a size") as raised:
        logs.diagnose(path, params=size) if size else formats.size(size)
    assert len(str(raised.value)) < 200


NUMBERS = st.one_of(st.floats(), st.integers(), st.sampled_from(["nan", "inf", "-inf", "1,000", "1e308", "0"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(sorted(names.CANON)), NUMBERS, min_size=1), min_size=1, max_size=5))
def test_any_numbers_are_diagnosed(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]) -> None:
    path = tmp_path_factory.mktemp("log") / "train.log"
    path.write_text(
        "".join(f"step={i} " + " ".join(f"{k}={v}" for k, v in row.items()) + "\n" for i, row in enumerate(rows))
    )
    with suppress(UsageError):  # no line that is known
        logs.diagnose(path, on="H100x8", params="7B")


LINES = [
    "step {0} | loss: {1}.{2} | lr: 3e-0{3} | tok/s: {4},{5} | MFU: {6}% | mem: {7}.{8}GB/80GB | bf16_mfu: {9}",
    "iter {0}: loss {1}.{2}, time {3}.{4}ms, mfu {5}.{6}%",
    "{{'loss': {0}.{1}, 'rewards/v{2}': {3}, 'epoch': 0.{4}, 'learning_rate': {5}e-0{6}}}",
    "{0}%|##  | {1}/{2} [{3}:{4}<{5}:{6},  {7}.{8}it/s, loss={9}]",
    "[{0}/{1}] rank{2} loss={3}.{4} {5},{6} tok/s {7}.{8}s/it bf{9}_mfu: 3{0}.1",
    "|  {0}MiB / {1}MiB |   {2}%  Default | GPU{3}: {4}.{5}/{6}GB ({7}%) | Util: {8}% | CPU: {9}%",
]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(LINES), st.lists(st.integers(0, 1200), min_size=10, max_size=10)), max_size=30)
)
def test_lines_of_a_known_shape_give_the_same_numbers(found: list[tuple[str, list[int]]]) -> None:
    shapes = lines.Shapes()
    for template, numbers in found:
        line = template.format(*numbers)
        assert shapes.of(line).row_of(line) == lines.row_of(line)


def test_a_million_lines_of_one_shape_are_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    shape_of = lines._shape_of
    monkeypatch.setattr(lines, "_shape_of", lambda line: searched.append(line) or shape_of(line))
    path = tmp_path / "train.log"
    path.write_text(
        "".join(f"step {i:06d} | loss: {2 + i % 7 / 10:.4f} | tok/s: 65,{i % 1000:03d}\n" for i in range(5000))
    )
    assert len(logs.read(path).rows) == 5000
    assert len(searched) < 10


@pytest.mark.parametrize("machine", ["H100x99999999999", f"H100x{DIGITS}", "H100x1000001"])
def test_more_gpus_than_there_are_is_told(machine: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(GOOD)
    done = warm.flatout("doctor", "--log", "train.log", "--on", machine, cwd=tmp_path)
    assert done.returncode == 2
    assert "at most 1,000,000 GPUs" in done.stderr
    assert len(done.stderr) < 300


@pytest.mark.parametrize("loss", ["-1", "0", "nan", "inf"])
def test_a_target_that_no_loss_reaches_is_told(loss: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(GOOD)
    done = warm.flatout("doctor", "--log", "train.log", "--target-loss", loss, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a loss: it must be above 0" in done.stderr


@pytest.mark.parametrize(
    "text", ["| a | b |\n" * 100_000, "Before:\n" * 100_000, "x: 1-" + "9" * 300, "(30% utilization) " * 20]
)
def test_hostile_summaries_cost_little(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(f"{GOOD}{text}\n")
    assert logs.diagnose(path, on="H100", params="124M").limit["tokens_per_s"] == 100
