"""Does generation sample from the model's own distribution?

    python -m benchmarks.unbiased FOLDER --questions 1000 --samples 16

The negative log-probability of every generated token is compared with its expectation under the model's distribution
at the sampling temperature, by a plain forward pass over the same tokens. The ratio of the means should be 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.results import FOLDER, Call, git_commit, table, write
from flatout.engine.opening import open_model
from flatout.model import Decoder
from flatout.model.attention import over_sequences
from flatout.recipes.questions import questions_of
from flatout.sample import Completion, Sampling, prompt_ids
from flatout.sample.cache import logits
from flatout.sample.generate import Generator

TEMPERATURE, MAX_TOKENS = 0.7, 32
BATCH, CHUNK = 128, 4096


@torch.no_grad()
def expected(model: Decoder, prompts: Sequence[Sequence[int]], done: Sequence[Completion], *, device: str) -> Tensor:
    """The expected negative log-probability of each generated token, given those before it."""
    found: list[Tensor] = []
    for first in range(0, len(done), BATCH):
        part = [[*prompts[one.prompt], *one.ids] for one in done[first : first + BATCH]]
        starts = [len(prompts[one.prompt]) for one in done[first : first + BATCH]]
        length = max(map(len, part))
        padded = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in part], device=device)
        before = [i * length + at for i, ids in enumerate(part) for at in range(starts[i] - 1, len(ids) - 1)]

        def head(hidden_NC: Tensor, weight_VC: Tensor, where: Sequence[int] = before) -> list[Tensor]:
            chosen = hidden_NC[torch.tensor(where, device=hidden_NC.device)]
            logs = (logits(chunk, weight_VC).log_softmax(-1) for chunk in chosen.split(CHUNK))
            return [-((log / TEMPERATURE).softmax(-1) * log).sum(-1).double() for log in logs]

        positions = torch.arange(length, device=device).repeat(len(part))
        found += model(padded.flatten(), positions, over_sequences(model.shape, batch=len(part)), head)
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--to", type=Path, default=FOLDER / "unbiased.jsonl")
    options = parser.parse_args()
    call = Call(benchmark="unbiased", commit=options.commit or git_commit())
    device, task = "cuda" if torch.cuda.is_available() else "cpu", questions_of("units:train")
    rows = []
    for dtype in ("bf16", "fp32") if device == "cuda" else ("fp32",):
        opened = open_model(options.model, dtype=dtype, device=device)
        model, tokenizer = opened.model, opened.tokenizer
        assert isinstance(model, Decoder), "our own decoder, not transformers' behind an adapter"
        prompts = [prompt_ids(tokenizer, task.prompt(i)) for i in range(options.questions)]
        asked = Sampling(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=7, stop_ids=opened.stop_ids)
        done = list(Generator(model, tokenizer).generate(prompts, sampling=asked, samples=options.samples))
        seen = -torch.tensor([x for one in done for x in one.logprobs], dtype=torch.float64)
        wanted = expected(model, prompts, done, device=device).cpu()
        differences = seen - wanted
        mean, centre = wanted.mean().item(), differences.mean().item()
        error = 1.96 * differences.std().item() / len(differences) ** 0.5
        row = call.result(variant=dtype, metric="ratio", unit="ratio", values=[1 + centre / mean])
        rows.append(replace(row, low=1 + (centre - error) / mean, high=1 + (centre + error) / mean))
        rows.append(call.result(variant=dtype, metric="tokens", unit="", values=[len(differences)]))
    write(rows, options.to)
    print(table(rows))


if __name__ == "__main__":
    main()
