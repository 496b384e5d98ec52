"""Generation and likelihoods behind one `Sampler` protocol: a cached sampler on our decoder, transformers, vLLM, and
the plain reference."""

from flatout.sample.backends import BACKENDS, Backend, backend_of, sampler_of, vocabulary_check
from flatout.sample.generate import Generator
from flatout.sample.hf import HuggingFace
from flatout.sample.plain import Plain, logits_of
from flatout.sample.request import Completion, Sampler, Sampling
from flatout.sample.routed import RoutedSampler
from flatout.sample.text import (
    answer_pieces,
    answer_space,
    complete,
    pieces,
    plain_prompt,
    prompt_ids,
    prompt_ids_batch,
    stop_texts,
    text_of,
)

__all__ = [
    "BACKENDS",
    "Backend",
    "Completion",
    "Generator",
    "HuggingFace",
    "Plain",
    "RoutedSampler",
    "Sampler",
    "Sampling",
    "answer_pieces",
    "answer_space",
    "backend_of",
    "complete",
    "logits_of",
    "pieces",
    "plain_prompt",
    "prompt_ids",
    "prompt_ids_batch",
    "sampler_of",
    "stop_texts",
    "text_of",
    "vocabulary_check",
]
