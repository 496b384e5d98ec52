"""Logs as five guides on slow training show them: each is read, and what its numbers support is found.

Rows of the same format and with the same numbers; causes that the numbers do not support must not be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.command import Command, flatout

from flatout.insight import logs

__all__ = ["flatout"]


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    text: str
    found: Sequence[str]  # the causes, in the doctor's order
    said: str = ""  # part of the verdict
    missing: str = ""  # part of what is said to be missing
    on: str | None = None
    params: str | None = None
    target_loss: float | None = None


JUDGED_BEFORE = "from before and after a change (judged: before)"
NOT_JUDGED = "its speed cannot be judged"

# A PPO run on eight GPUs: 128 + 128 tokens, four rows, 67 to 83 tokens/s, an MFU of 1.7 to 4.3 %, 72 of 94 GB.
PPO_SETTINGS = (
    "data.train_batch_size=4\ndata.max_prompt_length=128\ndata.max_response_length=128\n"
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1\nactor_rollout_ref.rollout.n=1\n"
)
PPO_LINES = "\n".join(
    f"(TaskRunner pid=4711) step:{i} - training/global_step:{i} - perf/mfu/actor:{0.017 + 0.0026 * (i % 11):.4f} - "
    f"perf/throughput:{67 + 2 * (i % 9)} - perf/max_memory_reserved_gb:72.0"
    for i in range(1, 23)
)
PPO_FIGURES = (
    "model flops utilization (MFU): 1.7-4.3%\nthroughput: 67-83 tokens/second (target 2000)\n"
    "memory utilization: 72GB/94GB\n"
)
PPO_TABLE = """
| figure             | original  | optimized  | gain |
|--------------------|-----------|------------|------|
| **Batch size**     | 4         | 128        | 32x  |
| Sequence length    | 256       | 768        | 3x   |
| GPU utilization    | 1.7%      | 40-60%     | 30x  |
| Throughput         | 83 tok/s  | 2000+ tok/s | 24x |
| Training time      | 4.5 days  | 4-6 hours  | 20x  |
"""


def smi(used: int, total: int, busy: int, *, gpus: int = 8) -> str:
    rule = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+"
    lines = [rule, "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |"]
    for gpu in range(gpus):
        lines += [
            f"|   {gpu}  NVIDIA A100-SXM4-80GB          On  |   00000000:0{gpu}:00.0 Off |                    0 |",
            f"| N/A   45C    P0             310W / 400W |  {used:>6}MiB / {total:>6}MiB |    {busy:>3}%      Default |",
            rule,
        ]
    return "\n".join(lines)


def clock(seconds: int) -> str:
    return f"{seconds // 60:02d}:{seconds % 60:02d}"


# Answers are sampled for 45 to 60 minutes, then a model is tuned for 10 to 12; the GPU is busy 30 to 40 %.
RFT_BLOCKS = """
### Data generation
- **Before**: 45-60 minutes (one question at a time)
- **After**: 5-10 minutes

### Training
- **Before**: 10-12 minutes
- **After**: 5-8 minutes

### GPU utilization
- **Before**: 30-40%
- **After**: 90-95%
"""
RFT_ARROWS = "GPU utilization: 30% → 95%\ngeneration time: 45min -> 7min\ntraining time: 12min → 6min\n"
RFT_SEQUENCE = "one by one:\nA → GPU → B → GPU (30% utilization)\nin parallel:\nA,B,C,D → GPU (95% utilization)\n"
RFT_CACHE = "ask, generate, clear the cache (repeated 900x)\noverhead: 900 x 50ms = 45s\n"
RFT_PROGRESS = "".join(
    f"\rgenerating:  {i}%|#   | {9 * i}/900 [{clock(27 * i)}<{clock(2700 - 27 * i)}, 3.00s/it]" for i in range(1, 90)
)

# 124M weights on an H100: 60 to 70 thousand tokens/s, an MFU of 29 to 32 %, 9.5 of 80 GB, loss 4.98 at step 1,000.
H100_LINES = "\n".join(
    f"step {50 * i} | train loss {10.9 - 0.27 * i:.4f} | {60 + i // 2}.{i % 10}K tok/s | MFU {29 + i % 4}.0% | "
    "memory: 9.5GB/80GB (11%)"
    for i in range(1, 21)
)
H100_SUMMARY = (
    "MFU: 29-32%\ntokens/sec: ~60-70K\nmemory usage: only 11% of 80GB (9.5GB)\n"
    "val loss 4.9777 at step 1000, target 3.0781\n"
)
H100_TABLE = """
| Metric          | Before      | After          | Improvement |
|-----------------|-------------|----------------|-------------|
| Batch size      | 8           | 32-64          | 4-8x        |
| Memory usage    | 11% (9.5GB) | 60-70% (50GB)  | 6x          |
| Tokens/sec      | 60-70K      | 500K+          | 7x          |
| MFU             | 29-32%      | 70-80%         | 2.5x        |
| Val loss (1000 steps) | 4.98  | ~3.5           |             |
"""
H100_BATCH = "batch_size=8\ngradient_accumulation_steps=16\ntokens per step: 131,072\n"

# A LoRA run of a model with 360M weights, in float32, with gradient checkpointing, and without loader workers.
LORA_SETTINGS = """
- **Batch size**: 32
- **Epochs**: 3
- **Gradient checkpointing**: Enabled (20-30% slower)
- **Mixed precision**: Not enabled
- **DataLoader workers**: Not configured
- **Gradient accumulation**: Not used
- **Model compilation**: Not enabled
"""
LORA_EPOCHS = "current training time: ~10-15 minutes per epoch\nexpected training time: ~3-5 minutes per epoch\n"
LORA_TIME = "\nreal\t37m30.412s\nuser\t36m58.008s\nsys\t0m41.330s\n"
LORA_TRAINER = "\n".join(
    f"{{'loss': {2.4 - i / 50:.4f}, 'grad_norm': 0.8, 'learning_rate': 2e-04, 'epoch': {i / 10:.1f}}}"
    for i in range(1, 30)
)

# A T4 with 16 GB: after mixed precision and loader workers, and before.
T4_MONITOR = (
    "⚡ GPU: 8.2/16.0GB (51%) | Util: 85% | CPU: 45.3% | RAM: 67.2%\n"
    "Training sentiment: 100%|████████| 250/250 [02:15<00:00, 1.85it/s]\nloss: 0.3245, lr: 5.23e-05, mem: 8.2GB\n"
)
T4_STARVED = "".join(f"⚡ GPU: 13.0/16.0GB (81%) | Util: {20 + i}% | CPU: 98.{i}% | RAM: 67.2%\n" for i in range(10))
T4_BEFORE = """
Before optimization:
- training speed: ~0.5-1.0 it/s
- GPU utilization: ~20-30%
- memory usage: ~12-14GB
- time per epoch: 45-60 minutes
"""
T4_AFTER = T4_BEFORE.replace("Before", "After").replace("0.5-1.0", "3-6").replace("20-30", "80-95")
T4_AFTER = T4_AFTER.replace("12-14GB", "6-10GB").replace("45-60", "8-15")
T4_SETTINGS = "precision: fp32\nnum_workers=0\npin_memory=False\ncudnn.benchmark=False\n"
T4_CONFIG = """
training:
  batch_size: 32
  gradient_accumulation_steps: 2
  use_mixed_precision: true
  dataloader_num_workers: 8
"""

EXCERPTS = {
    "000 metrics and settings": Excerpt(text=PPO_SETTINGS + PPO_LINES, found=["small-batch"], said="3.1% of the limit"),
    "000 metrics": Excerpt(text=PPO_LINES, found=["low-mfu"], said="no cause found, but only 3.1%"),
    "000 settings": Excerpt(text=PPO_SETTINGS, found=[], said=NOT_JUDGED, missing="tokens/s"),
    "000 figures": Excerpt(text=PPO_FIGURES, found=["low-mfu"], said="no cause found, but only 3.0%"),
    "000 figures and settings": Excerpt(text=PPO_SETTINGS + PPO_FIGURES, found=["small-batch"]),
    "000 table": Excerpt(text=PPO_TABLE, found=["small-batch"], said=JUDGED_BEFORE, missing="how busy the CPU is"),
    "000 nvidia-smi": Excerpt(text=smi(61440, 96256, 80), found=[], said="GPU busy 80% of the time"),
    "001 before and after": Excerpt(text=RFT_BLOCKS, found=["generation-batch"], said=JUDGED_BEFORE),
    "001 arrows": Excerpt(text=RFT_ARROWS, found=["generation-batch"], said=JUDGED_BEFORE),
    "001 sequence": Excerpt(text=RFT_SEQUENCE, found=["low-mfu"], said=JUDGED_BEFORE, missing="how busy the CPU is"),
    "001 cache": Excerpt(text=RFT_CACHE, found=[], said=NOT_JUDGED, missing="how long everything took"),
    "001 cache of 45 minutes": Excerpt(text=RFT_CACHE + RFT_ARROWS, found=["generation-batch"]),
    "001 nvidia-smi": Excerpt(text=smi(35840, 40960, 95, gpus=1), found=[], said=NOT_JUDGED),
    "001 progress": Excerpt(text=RFT_PROGRESS, found=[], said=f"{NOT_JUDGED}; 45m00s in all", missing="tokens/s"),
    "001 settings": Excerpt(text="MICRO_BATCH_SIZE=256\nCHUNK_SIZE=10\n", found=[], said=NOT_JUDGED),
    "002 lines": Excerpt(text=H100_LINES, found=["small-batch"], said="30.5% of the limit"),
    "002 summary": Excerpt(text=H100_SUMMARY, found=["small-batch"], target_loss=3.0781),
    "002 table": Excerpt(text=H100_TABLE, found=["small-batch"], said="500,000 tokens/s, as expected after the change"),
    "002 batch": Excerpt(text=H100_BATCH, found=[], said=NOT_JUDGED),
    "003 settings": Excerpt(text=LORA_SETTINGS, found=["fp32-matmul"], missing="whether gradient checkpointing"),
    "003 settings on a CPU": Excerpt(text=LORA_SETTINGS, found=[], on="CPU", said=NOT_JUDGED, missing="loader has no"),
    "003 settings and memory": Excerpt(
        text=LORA_SETTINGS + smi(9011, 81920, 40, gpus=1),
        found=["data-starvation", "small-batch", "fp32-matmul", "needless-recompute"],
    ),
    "003 epochs": Excerpt(text=LORA_EPOCHS, found=[], said=f"{NOT_JUDGED}; 12m30s in all"),
    "003 time": Excerpt(text=LORA_TIME, found=[], said=f"{NOT_JUDGED}; 37m30s in all"),
    "003 trainer": Excerpt(text=LORA_TRAINER, found=[], said=NOT_JUDGED, missing="include_num_input_tokens_seen"),
    "004 monitor": Excerpt(text=T4_MONITOR, found=[], said="GPU busy 85% of the time", missing="tokens per step"),
    "004 monitor, CPU at 98 %": Excerpt(text=T4_STARVED, found=["data-starvation"]),
    "004 before": Excerpt(text=T4_BEFORE, found=["low-mfu"], on="T4", missing="how busy the CPU is"),
    "004 before, with settings": Excerpt(
        text=T4_BEFORE + T4_SETTINGS, found=["data-starvation", "fp32-matmul"], on="T4"
    ),
    "004 after": Excerpt(text=T4_AFTER, found=[], on="T4", said=NOT_JUDGED),
    "004 configuration": Excerpt(text=T4_CONFIG, found=[], said=NOT_JUDGED),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCERPTS)
def test_each_excerpt_is_read_and_its_causes_are_found(name: str, tmp_path: Path) -> None:
    excerpt = EXCERPTS[name]
    path = tmp_path / "train.log"
    path.write_text(excerpt.text)
    found = logs.diagnose(path, on=excerpt.on, params=excerpt.params, target_loss=excerpt.target_loss)
    assert sorted(finding.cause for finding in found.findings) == sorted(excerpt.found), found.verdict
    assert excerpt.said in found.verdict
    assert any(excerpt.missing in lack for lack in found.limit["missing"])


@pytest.mark.parametrize("name", EXCERPTS)
def test_a_speed_that_cannot_be_judged_is_never_called_healthy(name: str, flatout: Command, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(EXCERPTS[name].text)
    done = flatout("doctor", "--log", "train.log", *(["--on", on] if (on := EXCERPTS[name].on) else []))
    assert done.code == 0, done.err
    assert "no problem" not in done.out
    assert "Not in the log" in done.out


@pytest.mark.parametrize(
    ("mfu", "said"),
    [
        ("45%", "shows no problem"),
        ("20%", "a dense model on one GPU usually reaches 30 % to 60 %"),
        ("5%", "but only 5"),
    ],
)
def test_only_a_usual_mfu_is_called_healthy(tmp_path: Path, mfu: str, said: str) -> None:
    path = tmp_path / "train.log"
    path.write_text("\n".join(f"step {i} | loss: {3 - i / 9:.3f} | MFU: {mfu}" for i in range(9)))
    assert said in logs.diagnose(path).verdict


def test_a_gpu_that_waits_for_a_busy_cpu_is_a_finding_with_both_numbers(flatout: Command, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("GPU: 13.0/16.0GB (81%) | Util: 25% | CPU: 98.0% | RAM: 67.2%\n")
    done = flatout("doctor", "--log", "train.log")
    assert "1. data-starvation  costs 75.0 %" in done.out
    assert "The GPU is busy 25% of the time and the CPU 98%" in done.out


def test_emptying_the_cache_is_a_finding_where_it_takes_a_larger_share(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(RFT_CACHE + "real\t5m00.0s\n")
    (finding,) = logs.diagnose(path).findings
    assert finding.cause == "empty-cache"
    assert finding.share == pytest.approx(0.15)


def test_a_table_of_nvidia_smi_and_its_csv_give_the_same_shares(tmp_path: Path) -> None:
    table, rows = tmp_path / "smi.txt", tmp_path / "smi.csv"
    table.write_text(smi(20480, 81920, 30))
    rows.write_text("utilization.gpu [%], memory.used [MiB], memory.total [MiB]\n" + "30 %, 20480 MiB, 81920 MiB\n" * 8)
    for path in (table, rows):
        log = logs.read(path)
        assert (log.steady("gpu_util"), log.steady("memory_share")) == (pytest.approx(0.3), pytest.approx(0.25))


@pytest.mark.parametrize(
    "setting", ["bf16=True\nfp16=False", "fp16: false\nbf16: true", "dtype=bfloat16\nuse_amp=False"]
)
def test_sixteen_bits_under_another_name_are_no_finding(tmp_path: Path, setting: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(setting)
    assert not logs.diagnose(path).findings


def test_a_target_loss_is_estimated_from_lines_but_not_from_one_value(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(H100_LINES)
    assert "3.0781 needs about" in logs.diagnose(path, target_loss=3.0781).limit["target"]
    path.write_text(H100_SUMMARY)
    assert "cannot be told: the log has " in logs.diagnose(path, target_loss=3.0781).limit["target"]


def test_a_log_that_lacks_nothing_but_a_speed_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("step 1 | loss: 2 | tok/s: 0 | data_time: 0.1 | grad_norm: 1 | memory: 60GB/80GB\n")
    verdict = logs.diagnose(path, on="H100", params="7B").verdict
    assert verdict.endswith("Missing: a speed above 0")
