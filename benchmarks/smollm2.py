"""Makes a Hugging Face folder of a real Llama from a GGUF file: `python benchmarks/smollm2.py FILE.gguf TOKENIZER TO`.

transformers cannot save a model that it read from GGUF, so the weights are copied into a new one. The tokenizer is
taken from a folder, because the one in the GGUF file lacks its end-of-text token. Needs the package `gguf`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def convert(file: Path, tokenizer: Path, to: Path, *, dtype: torch.dtype) -> None:
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the file, which is not what is written
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
    fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(read.state_dict())
    fresh.tie_weights()
    fresh.to(dtype).save_pretrained(to)
    for path in (p for p in tokenizer.iterdir() if p.suffix in (".json", ".jinja") or p.name == "merges.txt"):
        shutil.copy(path, to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    arguments = parser.parse_args()
    convert(arguments.file, arguments.tokenizer, arguments.to, dtype=DTYPES[arguments.dtype])


if __name__ == "__main__":
    main()
