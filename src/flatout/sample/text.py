"""Converts conversations to prompts, and generated tokens to text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flatout.data.forms import QUESTION, Form
from flatout.data.tokenizer import Tokenizer
from flatout.errors import UsageError
from flatout.model import Decoder
from flatout.sample.generate import Generator
from flatout.sample.request import Sampling

# A character may take several tokens; more undecodable ones than this are garbage, and shown as such.
LONGEST_CHARACTER = 4


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids by the chat template; without one, as questions and answers to be continued."""
    if tokenizer.has_template:
        return _some(tokenizer.render_ids(messages, add_generation_prompt=True), tokenizer)
    return [*tokenizer.begin_ids, *tokenizer.encode_batch([plain_prompt(messages)])[0]]


def prompt_ids_batch(tokenizer: Tokenizer, several: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int]]:
    """The same for several prompts, faster."""
    if tokenizer.has_template:
        return [_some(ids, tokenizer) for ids in tokenizer.render_ids_batch(several)]
    encoded = tokenizer.encode_batch([plain_prompt(messages) for messages in several])
    return [[*tokenizer.begin_ids, *ids] for ids in encoded]


def _some(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt, which a template of others may have left empty."""
    if not ids:
        raise UsageError(f"the chat template of {tokenizer.name} makes an empty prompt of a conversation: correct it")
    return ids


def plain_prompt(messages: Sequence[Mapping[str, str]]) -> str:
    names = {"user": QUESTION.ask, "assistant": f"{QUESTION.answer.strip()} "}
    turns = [names.get(message["role"], "") + message["content"] for message in messages]
    return "\n\n".join(turns) + QUESTION.answer


def stop_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Where a model that was not trained to end would continue with another question."""
    form = _plain_form(tokenizer)
    return () if form is None else form.stops


def answer_space(tokenizer: Tokenizer) -> str:
    """What an answer begins with: after `Answer:` a space, after a template's mark nothing."""
    form = _plain_form(tokenizer)
    return "" if form is None else form.space


def _plain_form(tokenizer: Tokenizer) -> Form | None:
    """The form of its prompts, if they are plain text."""
    return tokenizer.form if tokenizer.has_template else QUESTION


def answer_pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The pieces of an answer, without the space that its form begins with."""
    begun = tokenizer.form is None
    for piece in pieces(tokenizer, ids):
        text = piece if begun or tokenizer.form is None else piece.removeprefix(tokenizer.form.space)
        begun = True
        if text:
            yield text


def text_of(tokenizer: Tokenizer, ids: Sequence[int], sampling: Sampling) -> str:
    """The text of a completion, without what stopped it."""
    text = tokenizer.decode([i for i in ids if i not in sampling.stop_ids])
    ends = [at for stop in sampling.stop_texts if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text as its tokens arrive, never half a character."""
    seen: list[int] = []
    start = read = 0  # seen[start:read] was shown last: later tokens are decoded with it, as spaces depend on it
    for i in ids:
        seen.append(i)
        before, now = tokenizer.decode(seen[start:read]), tokenizer.decode(seen[start:])
        unfinished = now.endswith("\ufffd") and len(seen) - read < LONGEST_CHARACTER
        if len(now) > len(before) and not unfinished:
            yield now[len(before) :]
            start, read = read, len(seen)
    if rest := tokenizer.decode(seen[start:])[len(tokenizer.decode(seen[start:read])) :]:
        yield rest


def complete(
    model: Decoder, tokenizer: Tokenizer, prompt: str, *, max_new_tokens: int, temperature: float, seed: int
) -> str:
    """The prompt and the model's continuation, up to the end of the document."""
    ids = [*tokenizer.begin_ids, *tokenizer.encode_batch([prompt])[0]]
    stop_ids = frozenset({tokenizer.eos_id})
    sampling = Sampling(max_tokens=max_new_tokens, temperature=temperature, stop_ids=stop_ids, seed=seed)
    [completion] = Generator(model, tokenizer).generate([ids], sampling=sampling)
    return prompt + text_of(tokenizer, completion.ids, sampling)
