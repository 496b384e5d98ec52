"""A tokenizer with a chat template, and rows for it."""

import json
import random
from pathlib import Path

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNITS = [("kilograms", "grams", 1000), ("meters", "centimeters", 100), ("hours", "minutes", 60)]


def question(i: int) -> tuple[str, str]:
    generator = random.Random(i)
    big, small, factor = generator.choice(UNITS)
    number = generator.randint(1, 9)
    return f"How many {small} are there in {number} {big}?", f"{number * factor} {small}"


def tokenizer_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(question(i)) for i in range(50)], trainer=trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_rows(path: Path, *, count: int) -> Path:
    """Questions and answers as messages."""
    with path.open("w") as file:
        for i in range(count):
            asked, answer = question(i)
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path
