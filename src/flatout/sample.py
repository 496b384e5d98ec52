"""Continues a text with a decoder: plain and cache-free, the reference that faster samplers are held to."""

from __future__ import annotations

import torch

from flatout.data.tokenizer import Tokenizer
from flatout.model import Model, Rectangular


@torch.no_grad()
def complete(
    model: Model, tokenizer: Tokenizer, prompt: str, *, max_new_tokens: int, temperature: float, seed: int
) -> str:
    """The prompt and what the model makes of it, up to the end of the document."""
    device = model.head_weight.device
    # On the CPU, so that a seed gives the same draws everywhere.
    generator = torch.Generator().manual_seed(seed)
    ids = list(tokenizer.encode_batch([prompt])[0])
    limit = min(model.shape.positions, len(ids) + max_new_tokens)
    while len(ids) < limit:
        tokens = torch.tensor(ids, device=device)
        hidden = model.hidden(tokens, torch.arange(len(ids), device=device), Rectangular(batch=1))
        logits = (hidden[-1] @ model.head_weight.to(hidden.dtype).t()).float().cpu()[: tokenizer.vocab_size]
        if temperature > 0:
            chosen = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        if chosen == tokenizer.eos_id:
            break
        ids.append(chosen)
    return tokenizer.decode(ids)
