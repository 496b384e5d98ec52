"""flatout against Hugging Face's Trainer on a CPU: the same model, data, batch and threads, in one run.

    python -m benchmarks.trainer_cpu --steps 20 --repeats 3

On a CPU only the ratio is meaningful; it is printed, not recorded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flatout.config import from_mapping
from flatout.data.corpus import open_corpus
from flatout.recipes import pretrain

LENGTH, BATCH = 256, 8
CONFIG: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 256, "heads": 4, "vocab": 4096},
    "data": {"source": "embedded", "embedded_mb": 2, "tokenizer": "bpe:4096", "sequence_length": LENGTH},
    "plan": {"precision": "fp32"},
}


def ours(steps: int, folder: Path) -> float:
    train = {"batch_tokens": LENGTH * BATCH, "steps": steps, "lr": 1e-3, "warmup_steps": 1}
    settings = from_mapping(CONFIG | {"train": train, "save": {"weights_only": True}})
    outcome = pretrain.run(settings, folder=folder)
    assert outcome.speed.tokens_per_s is not None
    return outcome.speed.tokens_per_s


def theirs(steps: int, folder: Path) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    settings = from_mapping(CONFIG | {"train": {"steps": 1, "batch_tokens": LENGTH}})
    with open_corpus(settings.data, seed=0) as corpus:
        windows = (corpus.train.num_tokens - 1) // LENGTH
        rows = [torch.from_numpy(corpus.train.window(i * LENGTH, LENGTH).astype("int64")) for i in range(windows)]
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            times.append(time.perf_counter())

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=4096,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        report_to=[],
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-3,
        optim="adamw_torch_fused",
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    return BATCH * LENGTH * (len(times) - 4) / (times[-1] - times[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(options.repeats):
            one = ours(options.steps, Path(scratch) / f"ours-{repeat}")
            other = theirs(options.steps, Path(scratch) / f"theirs-{repeat}")
            ratios.append(one / other)
            print(
                f"repeat {repeat}: flatout {one:,.0f}, Trainer {other:,.0f} tokens/s, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
