"""`flatout generate`: continues prompts or answers messages, one or many at a time.

One answer to one prompt is printed as plain text. Several prompts or samples are printed as JSON lines, in the order of
the prompts, each as soon as its samples are complete.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.cli.shared import (
    Adapter,
    BackendName,
    Dtype,
    MaxTokens,
    ModelName,
    Rows,
    Seed,
    TopP,
    Trust,
    out,
    require_torch,
    warn,
)
from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.data.tokenizer import Tokenizer
    from flatout.sample import Sampler, Sampling

# Prompts in one call of the sampler, which holds all of them in memory.
MAX_TOGETHER = 1024
ROLES = ("system", "user", "assistant")


def generate(
    model: ModelName,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="prompts; - reads one from stdin", metavar="PROMPT")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help='JSON lines of prompts ("text", {"prompt": …} or {"messages": […]}); - reads stdin',
        ),
    ] = None,
    samples: Annotated[int, typer.Option("-n", "--samples", help="answers to each prompt", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token")] = 0.7,
    top_p: TopP = 0.95,
    max_tokens: MaxTokens = 512,
    stop: Annotated[
        list[str] | None, typer.Option(help="text that ends an answer and is left out; may be given several times")
    ] = None,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="system message, for models with a chat template")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text as it is, without the chat template")] = False,
    dtype: Dtype = None,
    rows: Rows = None,
    backend: BackendName = "auto",
    adapter: Adapter = None,
    trust: Trust = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines also for a single answer")] = False,
) -> None:
    """Generate text: plain for one prompt, JSON lines for several prompts or samples."""
    require_torch()
    from flatout.engine.opening import open_model
    from flatout.sample import Sampling, backend_of, sampler_of, vocabulary_check

    requests = _requests(prompts or [], source)
    if samples > 1 and temperature == 0:
        raise UsageError("-n above 1 at temperature 0 would repeat one answer: give a --temperature above 0")
    if not all(stop or []):
        raise UsageError("--stop is empty: give the text that ends an answer")
    for option, text in [("--system", system or ""), *(("--stop", text) for text in stop or [])]:
        _check_text(text, place=option)
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        stop_texts=tuple(stop or ()),
        seed=seed,
        logprobs=False,
    )
    chosen = backend_of(backend, sampling=sampling)
    opened = open_model(
        model, dtype=dtype, backend=chosen, trust=trust, adapter=adapter, check=vocabulary_check(chosen)
    )
    warn(opened.notices)
    encoded = _encoded(requests, opened.tokenizer, system=system, raw=raw)
    answers = _answers(
        sampler_of(opened, backend=chosen, rows=rows),
        opened.tokenizer,
        encoded,
        sampling=replace(sampling, stop_ids=opened.stop_ids),
        samples=samples,
    )
    if as_json or source is not None or len(requests) * samples > 1:
        _print_lines(requests, answers)
    else:
        _print_text(next(answers)[0], tokens=len(encoded[0].ids))


@dataclass(frozen=True, kw_only=True)
class Request:
    """A text or a conversation to be continued, and the fields of its line, which go into the output."""

    text: str | None
    messages: Sequence[Mapping[str, str]] = ()
    fields: Mapping[str, Any]


def _requests(prompts: Sequence[str], source: str | None) -> list[Request]:
    if source is not None:
        if prompts:
            raise UsageError("prompts on the command line and --input exclude each other: put them all into the file")
        return _read(source)
    if not prompts:
        raise UsageError('nothing to continue: give a prompt ("Once upon a time"), - for stdin, or --input FILE')
    if prompts.count("-") > 1:
        raise UsageError("- reads all of stdin and can be given once")
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    if not all(texts):
        raise UsageError("a prompt is empty: give at least one character")
    for text in texts:
        _check_text(text, place="a prompt")
    return [Request(text=text, fields={"prompt": text}) for text in texts]


def _read(source: str) -> list[Request]:
    """The prompts of a file, all checked before a model is loaded."""
    name = "stdin" if source == "-" else source
    try:
        content = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--input {source}: {error}") from None
    requests = [
        _request(line, place=f"{name}, line {number}")
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    ]
    if not requests:
        raise UsageError(f'{name} has no prompts: one JSON line each, such as {{"prompt": "Once upon a time"}}')
    return requests


def _request(line: str, *, place: str) -> Request:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f'{place} is not JSON ({error}): write "text", {{"prompt": …}} or {{"messages": […]}}'
        ) from None
    row = {"prompt": row} if isinstance(row, str) else row
    text, messages = (row.get("prompt"), row.get("messages")) if isinstance(row, dict) else (None, None)
    if isinstance(text, str) and text and messages is None:
        _check_text(text, place=place)
        return Request(text=text, fields=row)
    if text is None and isinstance(messages, list) and messages and all(map(_is_message, messages)):
        _check_text("".join(message["content"] for message in messages), place=place)
        return Request(text=None, messages=messages, fields=row)
    raise UsageError(
        f"{place}: needs either a text in prompt, or messages, a list of "
        f'{{"role": "{"|".join(ROLES)}", "content": "text"}}'
    )


def _check_text(text: str, *, place: str) -> None:
    """Bytes of a command line and escapes in JSON may make half characters, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place}: character {error.start + 1} is half of a pair: give text in UTF-8") from None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in ROLES and isinstance(value.get("content"), str)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    ids: Sequence[int]
    space: str = ""  # what an answer in the model's form begins with


def _encoded(requests: Sequence[Request], tokenizer: Tokenizer, *, system: str | None, raw: bool) -> list[Prompt]:
    """Texts by the chat template as in `flatout chat`, or as they are; messages as in `flatout chat --serve`."""
    from flatout.sample import answer_space, prompt_ids_batch

    templated = tokenizer.has_template and not raw
    if system is not None and not templated:
        why = "--raw" if raw else "this tokenizer has no chat template"
        raise UsageError(f"--system needs a chat template ({why}): put the instruction into the prompt")
    if raw and any(request.text is None for request in requests):
        raise UsageError("--raw continues texts, not messages: use prompt instead of messages, or leave out --raw")
    texts = [request.text for request in requests if request.text is not None and not templated]
    whole = iter([Prompt(ids=[*tokenizer.begin_ids, *ids]) for ids in tokenizer.encode_batch(texts)])
    conversations = [_messages(request, system) for request in requests if templated or request.text is None]
    space = answer_space(tokenizer)
    chats = (Prompt(ids=ids, space=space) for ids in prompt_ids_batch(tokenizer, conversations))
    return [next(chats if templated or request.text is None else whole) for request in requests]


def _messages(request: Request, system: str | None) -> list[Mapping[str, str]]:
    messages = list(request.messages) or [{"role": "user", "content": request.text or ""}]
    first = [{"role": "system", "content": system}] if system is not None and messages[0]["role"] != "system" else []
    return [*first, *messages]


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    tokens: int
    finish: str  # stopped, length or too_long


def _answers(
    sampler: Sampler, tokenizer: Tokenizer, prompts: Sequence[Prompt], *, sampling: Sampling, samples: int
) -> Iterator[list[Answer]]:
    """The samples of each prompt, in the order of the prompts. Draws depend on a prompt's place among all of them."""
    from flatout.sample import text_of

    for start in range(0, len(prompts), MAX_TOGETHER):
        part = list(islice(prompts, start, start + MAX_TOGETHER))
        complete: list[dict[int, Answer]] = [{} for _ in part]
        printed = 0
        keys = range(start, start + len(part))
        ids = [prompt.ids for prompt in part]
        for done in sampler.generate(ids, sampling=sampling, samples=samples, keys=keys):
            text = text_of(tokenizer, done.ids, sampling).removeprefix(part[done.prompt].space)
            complete[done.prompt][done.sample] = Answer(text=text, tokens=len(done.ids), finish=done.status)
            while printed < len(part) and len(complete[printed]) == samples:
                yield [complete[printed][sample] for sample in range(samples)]
                printed += 1


def _print_lines(requests: Sequence[Request], answers: Iterator[list[Answer]]) -> None:
    too_long = 0
    for request, several in zip(requests, answers, strict=True):
        row = [{"text": one.text, "tokens": one.tokens, "finish": one.finish} for one in several]
        out.write(json.dumps({**request.fields, "completions": row}) + "\n")
        too_long += several[0].finish == "too_long"
    if too_long:
        warn([f"{too_long} of {len(requests)} prompts do not fit the model's window: their finish is too_long"])


def _print_text(answer: Answer, *, tokens: int) -> None:
    if answer.finish == "too_long":
        raise UsageError(f"a prompt of {tokens} tokens does not fit the model's window: shorten it")
    out.write(answer.text + "\n")
