"""One adapter on one task with PEFT and Hugging Face's Trainer, as the peer of benchmarks/router.py and the like.

    python benchmarks/router_peft.py MODEL ROWS RANK STEPS BATCH PRECISION LENGTH

Rows are padded to the longest of their batch, and only answers are trained on. The first steps warm up and are not
measured. Prints one JSON line: the real tokens and the seconds of the measured steps, and
the peak of the device's memory.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

WARM_STEPS = 5


def main() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

    folder, rows, rank, steps, batch, precision, length = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    examples = [_encoded(tokenizer, json.loads(line), int(length)) for line in Path(rows).read_text().splitlines()]
    examples = [one for one in examples if one is not None]
    examples *= -(-(int(steps) + WARM_STEPS) * int(batch) // len(examples))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float32, "fp32": torch.float32}[precision]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    model = get_peft_model(
        model, LoraConfig(r=int(rank), lora_alpha=2 * int(rank), target_modules=targets, task_type="CAUSAL_LM")
    )
    seen = {"tokens": 0, "began": 0.0, "seconds": 0.0, "steps": 0}

    def collate(several: list[Any]) -> dict[str, Any]:
        longest = max(len(ids) for ids, _ in several)
        if seen["steps"] >= WARM_STEPS:
            seen["tokens"] += sum(len(ids) for ids, _ in several)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return {
            "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in several]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in several]),
            "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in several]),
        }

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if seen["steps"] == WARM_STEPS:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                seen["began"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen["steps"] += 1

    arguments = TrainingArguments(
        output_dir="peft-out", per_device_train_batch_size=int(batch), max_steps=int(steps) + WARM_STEPS,
        learning_rate=5e-4, bf16=precision == "bf16", fp16=precision == "fp16", report_to=[], save_strategy="no",
        logging_strategy="no", remove_unused_columns=False, dataloader_num_workers=0,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=examples, data_collator=collate, callbacks=[Timed()]).train()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - seen["began"]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    figures = {"tokens": seen["tokens"], "seconds": seconds, "tokens_s": seen["tokens"] / seconds, "peak_gib": peak}
    print(json.dumps(figures))


def _encoded(tokenizer: Any, row: dict[str, Any], length: int) -> tuple[list[int], list[int]] | None:
    if isinstance(row["prompt"], str):
        before = tokenizer(row["prompt"])["input_ids"]
        ids = before + tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    else:
        before = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=False)
    if len(ids) > length:
        return None
    return ids, [-100] * len(before) + ids[len(before) :]


if __name__ == "__main__":
    main()
