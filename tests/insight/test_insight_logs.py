"""Logs of other tools: what is read off them, and what is said to be missing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.insight.conftest import Flatout

from flatout.errors import UsageError
from flatout.insight import doctor, logs
from flatout.insight.logs.lines import row_of
from flatout.record import Span, StepRecord
from flatout.record.records import step_to_json

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
    assert found.findings[0].share is None  # a failure has no cost in step time
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


# -- what each tool prints, to its own format string


def lines(template: Callable[[int], str], count: int = 12) -> str:
    return "\n".join(template(i) for i in range(count))


LLM_C = lines(
    lambda i: (
        f"step {i + 1:4d}/19560 | loss {11 - i / 10:7.6f} (+nanz)| norm 1.2345 (+nanz)| lr 2.00e-06 | 1640.12 ms | "
        "42.1% bf16 MFU | 319655 tok/s"
    )
)
MEGATRON = "  seq_length ...................................... 4096\n" + lines(
    lambda i: (
        f" [2025-08-01 07:19:{i:02d}] iteration {i + 1:8d}/    5000 | consumed samples: {128 * (i + 1):12d} | elapsed "
        f"time per iteration (ms): 12936.1 | throughput per GPU (TFLOP/s/GPU): 118.7 | learning rate: 6.9E-08 | global "
        f"batch size:   128 | lm loss: {10.4 - i / 9:.6E} | loss scale: 1.0 | grad norm: 26.203 | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |"
    )
)
DEEPSPEED = "sequence length: 512\n" + lines(
    lambda i: (
        f"[2022-08-29 06:58:56,121] [INFO] [logging.py:68:log_dist] [Rank 0] step={10 * i}, skipped=2, lr=[5e-05], "
        "mom=[(0.9, 0.999)]\n"
        f"[2022-08-29 06:58:56,176] [INFO] [timer.py:198:stop] epoch=0/micro_step={10 * i}/global_step={10 * i}, "
        "RunningAvgSamplesPerSec=232.7, CurrSamplesPerSec=227.5, MemAllocated=0.36GB, MaxMemAllocated=15.06GB"
    )
)
LITGPT = "block_size: 2048\n" + lines(
    lambda i: (
        f"Epoch 1 | iter {i + 1} step {i + 1} | loss train: {10 - i / 9:.3f}, val: n/a | iter time: 250.00 ms (step) "
        "remaining time: 1:02:03"
    )
)
TORCHTUNE = lines(lambda i: f"Step {i + 1} | loss:{2 - i / 99:.4f} lr:2e-05 tokens_per_second_per_gpu:1234.5 ")
BAR = "".join(
    f"\rEpoch 0:  {i}%|█▏        | {i}/100 [00:{i:02d}<01:30,  4.00it/s, v_num=0, train_loss={3 - i / 99:.3f}]"
    for i in range(1, 13)
)
SLOW_BAR = "\rMap: 100%|██████████| 900/900 [00:01<00:00, 700.00it/s]\n" + "".join(
    f"\r {i}%|▏  | {i}/405 [01:31<2:33:18, 22.00s/it]\n{{'loss': {9 - i / 9:.4f}, 'grad_norm': 1.5, "
    f"'learning_rate': 1e-06, 'epoch': 0.0{i}}}\n"
    for i in range(1, 10)
)
UNSLOTH = (
    "==((====))==  Unsloth - 2x faster free finetuning | Num GPUs used = 1\n"
    "   \\\\   /|    Num examples = 1,000 | Num Epochs = 1 | Total steps = 60\n"
    "O^O/ \\_/ \\    Batch size per device = 2 | Gradient accumulation steps = 4\n"
    "\\        /    Data Parallel GPUs = 1 | Total batch size (2 x 4 x 1) = 8\n"
    ' "-____-"     Trainable parameters = 24,313,856 of 3,237,063,680 (0.75% trained)\n'
) + SLOW_BAR
AXOLOTL = lines(
    lambda i: (
        f"{{'loss': {1.5 - i / 99:.4f}, 'grad_norm': 0.7, 'learning_rate': 2e-05, 'memory/max_active (GiB)': 20.5, "
        "'memory/max_allocated (GiB)': 20.5, 'memory/device_reserved (GiB)': 22.1, "
        f"'tokens/train_per_sec_per_gpu': 3456.7, 'epoch': 0.{i:02d}}}"
    )
)
TRL = lines(
    lambda i: (
        f"{{'loss': 0.0, 'grad_norm': 9.187, 'learning_rate': 4.1e-06, 'num_tokens': {1000 * (i + 1)}.0, "
        "'completions/mean_length': 719.1, 'completions/clipped_ratio': 0.1, 'rewards/answer/mean': 0.2, "
        f"'reward': 0.2, 'reward_std': 0.5, 'kl': 0.001, 'step_time': 11.45, 'epoch': 0.0{i}}}"
    )
)
LIGHTNING_CSV = "epoch,lr-AdamW,step,train_loss,val_loss\n" + lines(
    lambda i: f"0,0.001,{10 * i},{3 - i / 20:.4f}," if i % 4 else f"0,,{10 * i},,{3.1 - i / 20:.4f}"
)
FLATOUT = lines(
    lambda i: (
        f"step {10 * (i + 1)}/200  loss {5 - i / 10:.4f}  lr 3.00e-04  65,000 tok/s  2.10 it/s  MFU 1.3 %  "
        "mem 9.5/80 GiB (11.9 %)  CPU 40.0 %  RAM 10.0 %  ETA 1m02s"
    )
)
OWN = lines(
    lambda i: json.dumps(
        step_to_json(
            StepRecord(
                attempt=1,
                step=i,
                time=1.79e9 + i,
                seconds=0.75 if i % 5 == 4 else 0.5,
                tokens=4096,
                padded_tokens=4096,
                loss=3 - i / 99,
                spans=(Span(phase="data", seconds=0.2), *((Span(phase="eval", seconds=0.25),) if i % 5 == 4 else ())),
            )
        )
    ),
    20,
)
GENERIC = lines(
    lambda i: f"step {100 * i} | loss: {6.2 - i / 10:.2f} | tokens/sec: 65000 | MFU: 30.1% | memory: 9.5GB/80GB"
)
BRACKETS = lines(lambda i: f"[{i + 1}/100] loss={2.3 - i / 99:.3f} tok/s=1.2k")


@pytest.mark.parametrize(
    ("text", "kind", "tokens_per_s", "mfu", "step_s"),
    [
        (LLM_C, "llm.c", 319_655, 0.421, 1.64012),
        (MEGATRON, "Megatron", 128 * 4096 / 12.9361, 118.7 / 989, 12.9361),
        (DEEPSPEED, "DeepSpeed", 227.5 * 512, None, None),
        (LITGPT, "LitGPT", None, None, 0.25),
        (TORCHTUNE, "torchtune", 1234.5, None, None),
        (BAR, "progress bar", None, None, 0.25),
        (SLOW_BAR, "Hugging Face Trainer", None, None, 22.0),
        (UNSLOTH, "Hugging Face Trainer", None, None, 22.0),
        (AXOLOTL, "Hugging Face Trainer", 3456.7, None, None),
        (TRL, "TRL", None, None, 11.45),
        (LIGHTNING_CSV, "CSV", None, None, None),
        (FLATOUT, "flatout", 65_000, 0.013, 1 / 2.1),
        (OWN, "flatout steps.jsonl", 8192, None, 0.5),
        (GENERIC, "key=value", 65_000, 0.301, None),
        (BRACKETS, "key=value", 1200, None, None),
    ],
)
def test_what_tools_print_is_read_with_the_right_numbers(
    tmp_path: Path, text: str, kind: str, tokens_per_s: float | None, mfu: float | None, step_s: float | None
) -> None:
    path = tmp_path / "train.log"
    path.write_text(text)
    log, found = logs.read(path), logs.diagnose(path, on="H100" if kind == "Megatron" else None)
    assert log.kind == kind
    for name, wanted in (("tokens_per_s", tokens_per_s), ("mfu", mfu), ("step_s", step_s)):
        assert found.limit[name] == (None if wanted is None else pytest.approx(wanted, rel=1e-3)), name
    losses = log.values("policy_loss" if kind == "TRL" else "loss")
    assert kind == "DeepSpeed" or len(losses) >= 9
    steps = log.values("step")
    assert not steps or (steps == sorted(steps) and steps[-1] >= 9)


def test_what_was_printed_once_is_not_taken_for_something_else(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(UNSLOTH)
    assert logs.read(path).once == {"parameters": 3_237_063_680}


@pytest.mark.parametrize("printed", ["MFU: 1.3%", "mfu=1.3", "MFU 1.3 %", "mfu(%): 1.3"])
def test_an_mfu_in_percent_is_not_a_share(tmp_path: Path, printed: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(lines(lambda i: f"step {i} | loss: {3 - i / 9:.2f} | {printed}"))
    assert logs.diagnose(path).limit["mfu"] == pytest.approx(0.013)


def test_an_mfu_below_one_is_percent_where_another_line_is_above_one(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(lines(lambda i: f"step {i} | loss: {3 - i / 9:.2f} | mfu: {0.4 if i else 1.2}"))
    assert logs.diagnose(path).limit["mfu"] == pytest.approx(0.004)


@pytest.mark.parametrize(
    "line",
    [
        "{{'loss': {loss}, 'grad_norm': {loss}, 'learning_rate': 1e-05, 'epoch': 0.1}}",
        "step {step} | loss: {loss} | tok/s: 5000",
        "iter {step}: loss {loss}, time 120.20ms, mfu 31.00%",
        '{{"step": {step}, "loss": {loss}, "tokens_per_s": 5000}}',
    ],
)
@pytest.mark.parametrize("bad", ["nan", "NaN", "inf", "-inf"])
def test_a_loss_that_is_no_number_is_a_failure_without_a_cost(tmp_path: Path, line: str, bad: str) -> None:
    if line.startswith('{{"'):
        bad = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(bad, bad)
    path = tmp_path / "train.log"
    path.write_text(lines(lambda i: line.format(step=i, loss=bad if i > 7 else 2.0 - i / 9)))
    found = logs.diagnose(path)
    assert len(logs.read(path).rows) == 12
    first = found.findings[0]
    assert (first.cause, first.share, first.gain) == ("unstable-loss", None, None)
    assert "1 cause found: unstable-loss" in found.verdict
    assert "no longer learns" in first.sentence


def test_a_single_loss_that_is_no_number_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(lines(lambda i: f"step {10 * i} loss {'nan' if i == 4 else 3 - i / 9} lr 1e-4"))
    (finding,) = logs.diagnose(path).findings
    assert finding.sentence == "1 of 12 losses are not finite, the first at step 40."


def test_names_and_units_are_told_apart(tmp_path: Path) -> None:
    assert row_of("step 10 loss 3.1 tok/s 5000") == {"step": 10, "loss": 3.1, "tokens_per_s": 5000}
    assert row_of("step: 10 loss: 3.1 tok/s: 5k") == {"step": 10, "loss": 3.1, "tokens_per_s": 5000}
    assert row_of("step 10 loss 3.1 speed 5,000 tok/s") == {"step": 10, "loss": 3.1, "tokens_per_s": 5000}
    assert row_of("Epoch [1/10], Step [100/600], Loss: 2.3") == {
        "epoch": 1,
        "step": 100,
        "total": 600,
        "loss": 2.3,
    }
    assert row_of("step 3 | step_time: 1.5s | mem: 75% | val: 0.8 | memory: 31") == {
        "step": 3,
        "seconds": 1.5,
        "memory_share": 0.75,
    }
    assert row_of("step 3 aux loss: 0.01 total time: 4.0m") == {"step": 3}


def test_skipped_updates_are_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(lines(lambda i: f"[Rank 0] step={10 * i}, skipped={7 * i}, lr=[5e-05], mom=[(0.9, 0.999)]"))
    (finding,) = logs.diagnose(path).findings
    assert finding.sentence.startswith("77 of 110 updates were skipped")


def causes(path: Path, text: str, **more: Any) -> list[str]:
    path.write_text(text)
    return [finding.cause for finding in logs.diagnose(path, **more).findings]


def test_a_loss_that_stays_at_a_uniform_guess_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    noise = (0.004, -0.003, 0.001, -0.002)
    flat = lines(lambda i: f"step {i} | loss: {10.82 + noise[i % 4]:.4f} | lr: 3e-4", 60)
    assert causes(path, flat) == ["slow-convergence"]
    assert "uniform guess over about 50," in logs.diagnose(path).findings[0].sentence
    assert causes(path, flat.replace("step ", "step 9")) == []  # a later part of a run
    assert causes(path, lines(lambda i: f"step {i} | loss: {10.82 - i / 100:.4f} | lr: 3e-4", 60)) == []
    assert (
        causes(path, lines(lambda i: f"step {i} | loss: {(2.0, 3.0, 1.5, 3.4)[i % 4]} | lr: 3e-4", 60)) == []
    )  # noisy
    assert causes(path, lines(lambda i: f"step {i} | loss: 10.82 | lr: {i}e-6", 60)) == []  # the warm-up


def test_low_mfu_and_unused_memory_are_findings(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    verl = VERL.replace("perf/mfu/actor:0.31", "perf/mfu/actor:0.02").replace("timing_s/gen:60.0", "timing_s/gen:20.0")
    assert causes(path, verl) == ["low-mfu"]
    finding = logs.diagnose(path).findings[0]
    assert "2.0%" in finding.sentence
    assert "flatout doctor -- COMMAND" in finding.fix
    assert causes(path, GENERIC) == ["small-batch"]
    assert "12%" in logs.diagnose(path).findings[0].sentence
    assert causes(path, DEEPSPEED, on="H100") == ["small-batch"]
    assert causes(path, GENERIC.replace("9.5GB", "70GB")) == []


@pytest.mark.parametrize("speed", ["tok/s: {fast}", "{fast} tok/s", "dt: {slow}ms"])
def test_a_speed_that_falls_to_a_fifth_is_a_finding(tmp_path: Path, speed: str) -> None:
    path = tmp_path / "train.log"

    def line(i: int) -> str:
        late = i >= 20
        said = speed.format(fast="1,000" if late else "5,000", slow=500.0 if late else 100.0)
        return f"step {i} | loss: {3 - i / 99:.3f} | {said}"

    assert causes(path, lines(line, 40)) == ["speed-drop"]
    finding = logs.diagnose(path).findings[0]
    assert finding.sentence.startswith("The speed falls to 20% during the run, around step ")
    assert finding.share == pytest.approx(0.8)
    assert finding.gain is None


def test_the_way_to_a_target_loss(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(lines(lambda i: f"step {10 * i}/1000 | loss: {5 - i / 10:.3f} | dt: 500.0ms", 21))

    def told(wanted: float) -> str:
        return str(logs.diagnose(path, target_loss=wanted).limit["target"])

    assert told(4.0) == "the loss reached 4 at step 100"
    assert told(5.0) == "the loss reached 5 at step 0"
    assert "2 needs about 100 more steps, 0m50s" in told(2.0)
    assert "the run ends at step 1,000, before that" in told(-8.0)
    path.write_text(lines(lambda i: f"step {i} | loss: 5.0", 21))
    assert "cannot be told: the loss does not fall clearly" in told(2.0)
    path.write_text(lines(lambda i: f"step {i} | loss: 5.0", 3))
    assert "cannot be told: the log has 3 lines" in told(2.0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["--log", "train.log", "--target-loss", "nan"], "is not a loss"), (["--target-loss", "3"], "needs --log FILE")],
)
def test_a_target_that_means_nothing_is_refused(
    flatout: Flatout, tmp_path: Path, arguments: list[str], why: str
) -> None:
    (tmp_path / "train.log").write_text(GENERIC)
    code, _, err = flatout("doctor", *arguments)
    assert code == 2
    assert why in " ".join(err.split())


def test_what_a_log_lacks_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    path.write_text(BRACKETS)
    doctor.say(logs.diagnose(path), console=Console(width=200))
    said = capsys.readouterr().out
    assert "Not in the log" in said
    assert "- the machine, for MFU: --on NAME" in said
    assert "- gradient norms, to judge stability" in said


def test_a_finding_names_its_section_in_the_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    path.write_text(GENERIC)
    doctor.say(logs.diagnose(path), console=Console(width=200))
    assert "more: docs/causes.md#small-batch" in capsys.readouterr().out
