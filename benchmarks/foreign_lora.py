"""LoRA on a Gemma 3 that transformers runs, by the usual command, against Hugging Face's Trainer with PEFT.

    python -m benchmarks.foreign_lora --repeats 2
    python -m benchmarks.foreign_lora --shape tiny --steps 4 --batch 4 --precision fp32    # on a CPU

A model of the given shape with random weights and a byte-level tokenizer is written once; both sides open that folder
and train rank 16 on all projections, on the same rows of 48 to 128 tokens, with the same number of rows a step. Ours is
`flatout train` as a user runs it, read from its run folder; the peer pads each batch to its longest row. Repeats are
interleaved. Speed counts real tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lora import LONGEST, SHORTEST, ours, write_rows
from benchmarks.results import FOLDER, measuring

UNITS = {"tokens_per_s": "real tokens/s", "peak_gib": "GiB"}
RANK = 16
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 320, "sliding_window": 64,
    },
}  # fmt: skip


def write_model(folder: Path, shape: str) -> None:
    """A Gemma 3 with random weights in bf16, and a tokenizer in which a letter is a token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"<pad>": 0, "<eos>": 1, "<bos>": 2}
    backend = Tokenizer(models.BPE(vocab=special | {c: i for i, c in enumerate(alphabet, len(special))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(folder)
    config = Gemma3TextConfig(**SHAPES[shape], pad_token_id=0, eos_token_id=1, bos_token_id=2, dtype=torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Gemma3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def peer(folder: Path, rows: Path, options: argparse.Namespace) -> dict[str, float] | None:
    """The figures of PEFT in a process of its own; None, with its last output printed, if it failed."""
    script = Path(__file__).with_name("router_peft.py")
    given = (folder, rows, RANK, options.steps, options.batch, options.precision, LONGEST)
    done = subprocess.run([sys.executable, script, *map(str, given)], capture_output=True, text=True, cwd=rows.parent)
    if done.returncode:
        print(f"peft: {done.stderr[-600:]}", flush=True)
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    return {"tokens_per_s": found["tokens_s"], "peak_gib": found["peak_gib"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128, help="rows a step")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, help="default: foreign-lora.jsonl among the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_rows(rows := scratch / "rows.jsonl", count=options.batch * (options.steps + 10))
        write_model(model := scratch / "model", options.shape)
        tokens = -(-options.batch * (SHORTEST + LONGEST) // 2 // LONGEST) * LONGEST  # whole sequences
        (file := scratch / "job.yaml").write_text(
            f"recipe: sft\nmodel: {model}\n"
            f"data: {{source: jsonl, path: {rows}, sequence_length: {LONGEST}, cache: {scratch}/cache}}\n"
            f"train: {{batch_tokens: {tokens}, steps: {options.steps}, lr: 5.0e-4, weight_decay: 0.0}}\n"
            f"lora: {{rank: {RANK}, alpha: {2 * RANK}}}\neval: {{tokens: 4096}}\nsave: {{weights_only: true}}\n"
            f"plan: {{precision: {options.precision}}}\n"
        )
        to = options.to or FOLDER / "foreign-lora.jsonl"
        with measuring(f"foreign-lora-{options.shape}", commit=options.commit, units=UNITS, to=to) as measured:
            for repeat in range(options.repeats):
                done = ours(file, [], folder=scratch / f"run-{repeat}")
                if done.refused:
                    print("flatout", done.refused, flush=True)
                else:
                    measured["flatout"].append({name: done.figures[name] for name in UNITS})
                if (found := peer(model, rows, options)) is not None:
                    measured["peft"].append(found)
                print(repeat, {name: figures[-1] for name, figures in measured.items()}, flush=True)


if __name__ == "__main__":
    main()
