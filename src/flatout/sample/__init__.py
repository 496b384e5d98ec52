"""Generation and likelihoods: one `Sampler` protocol, a cached sampler on our decoder, and the plain reference."""

from flatout.sample.generate import Generator
from flatout.sample.plain import Plain, logits_of
from flatout.sample.request import Completion, Sampler, Sampling
from flatout.sample.text import complete, pieces, plain_prompt, prompt_ids, stop_texts, text_of

__all__ = [
    "Completion",
    "Generator",
    "Plain",
    "Sampler",
    "Sampling",
    "complete",
    "logits_of",
    "pieces",
    "plain_prompt",
    "prompt_ids",
    "stop_texts",
    "text_of",
]
