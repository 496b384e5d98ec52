"""Adapters on real weights, on one GPU: held-out loss and accuracy before and after, with their intervals.

    python -m benchmarks.sft FOLDER                          # unit conversion, with its worked solutions
    python -m benchmarks.sft FOLDER --gsm8k DATA/gsm8k       # also word problems: its train.jsonl and test.jsonl

It runs the commands themselves, `flatout train` with `recipe: sft`, `flatout eval MODEL --against RUN`, `export` and
`chat`. Accuracies and their difference, paired by question, have their 95 % interval as low and high. The
result is also opened in fp32 as an adapter by PEFT and merged by transformers, and their logits are compared with ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.logits import our_logits
from benchmarks.results import FOLDER, Call, Result, git_commit, table, write
from benchmarks.rft import asked_both, trained
from flatout.engine.opening import open_model
from flatout.record import Run
from flatout.sample import prompt_ids
from flatout.tasks import Message, Worked, open_task

QUESTIONS, TALKED = 20, 10
DIFFERENCE = "largest difference of logits from ours"
UNITS = {
    "whole_s": "s",
    "loss_before": "nats a token",
    "loss_after": "nats a token",
    "in_peft": DIFFERENCE,
    "merged": DIFFERENCE,
    "untrained": DIFFERENCE,
    "right_in_chat": f"answers of {TALKED}",
}


def write_rows(path: Path, task: str, *, limit: int | None) -> Path:
    """Writes a task's questions with worked solutions: with the task's prompt, and every other one as in a chat."""
    asked: Any = open_task(task)
    assert isinstance(asked, Worked)
    with path.open("w") as file:
        for i in range(min(asked.size, limit or asked.size)):
            prompt = without_examples(asked.prompt(i)) if i % 2 else list(asked.prompt(i))
            said = {"role": "assistant", "content": asked.solution(i)}
            file.write(json.dumps({"prompt": prompt, "completion": [said]}) + "\n")
    return path


def without_examples(prompt: Sequence[Message]) -> list[Message]:
    """The instructions and the question, without the examples."""
    return [message for message in prompt if message["role"] == "system"] + [prompt[-1]]


def config(path: Path, *, model: str, rows: Path, epochs: int) -> Path:
    path.write_text(
        f"recipe: sft\nmodel: {model}\n"
        f"data: {{source: jsonl, path: {rows}, sequence_length: 2048, valid_share: 0.05, cache: {path.parent}/cache}}\n"
        f"train: {{batch_tokens: 8192, epochs: {epochs}, lr: 1.0e-3, warmup_steps: 10, weight_decay: 0.0, "
        "beta2: 0.99}\n"
        "lora: {rank: 16, alpha: 64}\neval: {every: 100000, tokens: 32768}\nsave: {weights_only: true}\n"
    )
    return path


def ours(file: Path, overrides: list[str], *, folder: Path) -> dict[str, Any]:
    whole_s = trained(file, overrides, folder=folder)
    losses = [event.data["val_loss"] for event in Run.open(folder).events() if event.kind == "eval"]
    return {"whole_s": whole_s, "loss_before": losses[0], "loss_after": losses[-1]}


def elsewhere(model: str, run: Path, task: str, *, scratch: Path) -> dict[str, float]:
    """How far the logits of 20 questions are from ours: of the adapter in PEFT, merged, and of the base model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    flatout("export", run, "--to", scratch / "adapter")
    flatout("export", run, "--to", scratch / "merged", "--merge", "--dtype", "fp32")
    ours = open_model(str(run), dtype="fp32")
    device = next(ours.model.parameters()).device
    asked: Any = open_task(task)
    texts = [torch.tensor(prompt_ids(ours.tokenizer, asked.prompt(i)), device=device) for i in range(QUESTIONS)]
    expected = [our_logits(ours.model, text) for text in texts]

    @torch.no_grad()
    def apart(other: Any) -> float:
        found: list[Tensor] = [other(text[None]).logits[0] for text in texts]
        return max(float((one - two).abs().max()) for one, two in zip(found, expected, strict=True))

    def opened(folder: Path | str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)

    plain = opened(model)
    found = {"untrained": apart(plain), "merged": apart(opened(scratch / "merged"))}
    found["in_peft"] = apart(PeftModel.from_pretrained(plain, scratch / "adapter").eval())
    return found


def talked(run: Path, task: str) -> tuple[int, list[str]]:
    """How many of ten questions in one conversation `flatout chat` answers rightly, and its lines.

    Answers have one line each, as in training; an answer of several lines shifts the others, which then count as wrong.
    """
    asked: Any = open_task(task)
    prompts = [without_examples(asked.prompt(i)) for i in range(TALKED)]
    told = prompts[0][:-1]
    system = ["--system", told[0]["content"]] if told else []
    lines = "".join(f"{' '.join(prompt[-1]['content'].split())}\n" for prompt in prompts)
    said = flatout("chat", run, *system, "--temperature", "0", "--max-tokens", "64", stdin=lines).splitlines()
    return sum(asked.reward(i, answer) == 1 for i, answer in enumerate(said[:TALKED])), said


def flatout(*arguments: object, stdin: str | None = None) -> str:
    command = [sys.executable, "-m", "flatout", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, input=stdin)
    if done.returncode:
        sys.exit(f"flatout {arguments[0]}: exit {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout


def results(call: Call, variant: str, found: dict[str, Any]) -> list[Result]:
    rows = [call.result(variant=variant, metric=m, unit=u, values=[found[m]]) for m, u in UNITS.items() if m in found]
    for name in ("before", "after", "gain"):
        value, low, high = found[name]
        rows.append(call.share(variant=variant, metric=name, value=value, low=low, high=high))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("--gsm8k", type=Path, default=None, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--rows", type=int, default=None, help="fewer, to try the script on a CPU")
    parser.add_argument("--limit", type=int, default=1000, help="questions that are measured")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides for every run")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "sft.jsonl")
    options = parser.parse_args()

    jobs = {"units": ("units:train", "units", 8)}
    if options.gsm8k is not None:
        train, test = (f"gsm8k:{options.gsm8k}/{name}.jsonl" for name in ("train", "test"))
        jobs["gsm8k"] = (train, test, 2)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for variant, (learnt, measured, epochs) in jobs.items():
            rows = write_rows(scratch / f"{variant}.jsonl", learnt, limit=options.rows)
            file = config(scratch / f"{variant}.yaml", model=options.model, rows=rows, epochs=epochs)
            told = ours(file, options.set, folder=scratch / variant)
            told |= asked_both(options.model, scratch / variant, measured, limit=options.limit, name="")
            told |= elsewhere(options.model, scratch / variant, measured, scratch=scratch / f"{variant}-opened")
            if variant == "units":  # word problems are solved over several lines
                told["right_in_chat"], said = talked(scratch / variant, measured)
                print("chat:", *said, sep="\n  ", flush=True)
            call = Call(benchmark="sft", commit=options.commit or git_commit())
            found = results(call, variant, told)
            write(found, options.to)
            print(table(found), flush=True)


if __name__ == "__main__":
    main()
