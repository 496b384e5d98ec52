"""Logs of other tools: what is read off them, and what is said to be missing."""

import json
from pathlib import Path

import pytest

from flatout.errors import UsageError
from flatout.insight import logs

NANOGPT = """
tokens per iteration will be: 491,520
number of parameters: 123.59M
step 0: train loss 10.9884, val loss 10.9870
iter 0: loss 10.9886, time 32456.10ms, mfu -100.00%
iter 10: loss 9.5123, time 982.00ms, mfu 42.10%
iter 20: loss 8.9001, time 983.04ms, mfu 42.05%
iter 30: loss 8.2001, time 983.04ms, mfu 42.06%
iter 40: loss 7.9001, time 983.04ms, mfu 42.06%
"""
NANOCHAT = "\n".join(
    f"step {i:05d}/21400 (0.0{i}%) | loss: {9 - i / 10:.6f} | lrm: 1.00 | dt: 700.40ms | tok/sec: 748,{i:03d} "
    f"| bf16_mfu: 46.{i:02d} | epoch: 1 | total time: 0.10m"
    for i in range(10)
)
TITAN = "\n".join(
    f"[rank0]:[titan] 2025-06-11 10:00:0{i} - root - INFO - \x1b[31mstep: {10 * i:2}  \x1b[32mloss: {8 - i / 9:7.4f}  "
    f"\x1b[33mgrad_norm:  2.1000  \x1b[34mmemory: 38.12GiB(40.10%)  \x1b[36mtps: 7,1{i}0  \x1b[35mtflops: 415.20  "
    f"mfu: 41.98%\x1b[39m"
    for i in range(8)
)
VERL = "\n".join(
    f"\x1b[36m(TaskRunner pid=71)\x1b[0m step:{i} - actor/pg_loss:0.0{i + 1} - actor/grad_norm:np.float64(0.2{i}) "
    f"- perf/mfu/actor:0.31 - timing_s/gen:60.0 - timing_s/reward:2.0 - timing_s/testing:1.0 - timing_s/step:80.0 "
    f"- perf/total_num_tokens:640000 - perf/time_per_step:80.0 - perf/throughput:1000.0"
    for i in range(1, 8)
)
TRAINER = "\n".join(
    f"{{'loss': '{5 - i / 10:.4g}', 'grad_norm': '0.9', 'learning_rate': '3.7e-05', 'epoch': '0.{i}', "
    f"'num_input_tokens_seen': {1024 * i}, 'train_runtime': '{i / 10}', 'train_tokens_per_second': '1.024e+04'}}"
    for i in range(1, 9)
)
JSONL = "\n".join(json.dumps({"step": i, "data": {"loss": 4 - i / 9, "tokens_per_second": 5000 + i}}) for i in range(9))
CSV = "step,loss,tokens,dt,note\n" + "\n".join(f"{i},{4 - i / 9:.3f},8192,0.5,ok" for i in range(9))
PAIRS = "\n".join(f"12:00:0{i} INFO step={i} loss={3 - i / 9:.3f} lr=1e-4 dt=250ms tokens=16384" for i in range(9))
COLONS = "\n".join(f"Step: {i} | Loss: {3 - i / 9:.3f} | Tokens/s: 21,50{i}" for i in range(9))
STATE = json.dumps(
    {
        "global_step": 8,
        "log_history": [
            {"step": i, "loss": 5 - i / 9, "num_input_tokens_seen": 4096 * i, "train_runtime": i * 2.0}
            for i in range(1, 9)
        ],
    }
)


@pytest.mark.parametrize(
    ("text", "kind", "tokens_per_s", "mfu"),
    [
        (NANOGPT, "nanoGPT", 500_000, 0.4206),
        (NANOCHAT, "nanochat", 748_005.5, 0.46055),
        (TITAN, "torchtitan", 7_145, 0.4198),
        (VERL, "verl", 1000, 0.31),
        (TRAINER, "Hugging Face Trainer", 10_240, None),
        (STATE, "Hugging Face Trainer state", 2048, None),
        (JSONL, "JSON lines", 5005, None),
        (CSV, "CSV", 16_384, None),
        (PAIRS, "key=value", 65_536, None),
        (COLONS, "key=value", 21_505, None),
    ],
)
def test_speed_and_mfu_are_read_off_the_log(
    tmp_path: Path, text: str, kind: str, tokens_per_s: float, mfu: float | None
) -> None:
    path = tmp_path / "train.log"
    path.write_text(text)
    found = logs.diagnose(path)
    assert found.limit["kind"] == kind
    assert found.limit["tokens_per_s"] == pytest.approx(tokens_per_s, rel=1e-3)
    assert found.limit["mfu"] == (None if mfu is None else pytest.approx(mfu, rel=1e-3))
    if mfu is None:
        assert any("--on" in lack for lack in found.limit["missing"])


def test_mfu_is_computed_where_machine_and_model_are_told(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(CSV)
    found = logs.diagnose(path, on="A100-80GB", params="124M")
    assert found.limit["mfu"] == pytest.approx(6 * 124e6 * 16_384 / 312e12)
    assert found.limit["ceiling_tokens_per_s"] == pytest.approx(312e12 / (6 * 124e6))


def test_a_claim_above_the_speed_of_light_is_called_out(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("\n".join(f"step={i} loss=3.0 tok/s=5,000,000" for i in range(9)))
    found = logs.diagnose(path, on="H100", params="124M")
    assert "that number is wrong" in found.verdict
    path.write_text("\n".join(f"step={i} loss=3.0 tok/s=500,000" for i in range(9)))
    assert "wrong;" not in logs.diagnose(path, on="H100", params="124M").verdict


def test_a_log_shows_a_loss_that_ends_in_nan_and_what_takes_the_time(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("\n".join(f"step={i} loss={'nan' if i > 5 else 2.0}" for i in range(12)))
    found = logs.diagnose(path)
    assert found.findings[0].cause == "unstable-loss"
    assert found.findings[0].share == pytest.approx(0.5)
    path.write_text(VERL)
    assert [finding.cause for finding in logs.diagnose(path).findings] == ["generation-batch"]
    path.write_text(TITAN)
    assert [finding.cause for finding in logs.diagnose(path).findings] == ["small-batch"]


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("hello\nworld\n")
    with pytest.raises(UsageError, match="is not a known training log"):
        logs.diagnose(path)
    with pytest.raises(UsageError, match="cannot be read"):
        logs.diagnose(tmp_path / "missing.log")
