"""`flatout chat`: reads questions and streams the answers as they are generated.

It works in a terminal and in a pipe: one question per line, `/reset` starts again, `/quit` or the end of the input ends
it. Control characters that could affect the terminal are removed from the answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from flatout import limits
from flatout.cli.shared import (
    Adapter,
    BackendName,
    Dtype,
    MaxTokens,
    ModelName,
    Seed,
    TopP,
    Trust,
    err,
    out,
    print_plain,
    require_torch,
    warn,
)
from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.data.tokenizer import Tokenizer
    from flatout.engine.opening import Opened
    from flatout.sample import Sampler, Sampling
    from flatout.tasks import Message

HELP = "/reset starts over, /quit exits; Ctrl-C stops an answer, Ctrl-D exits"


def chat(
    model: ModelName,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token")] = 0.7,
    top_p: TopP = 0.95,
    max_tokens: MaxTokens = 512,
    seed: Seed = 0,
    dtype: Dtype = None,
    backend: BackendName = "auto",
    adapter: Adapter = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="serve the OpenAI API on 127.0.0.1, for tools that use it")
    ] = False,
    port: Annotated[int, typer.Option(help="port of --serve (default: any free one)", min=0, max=limits.PORT)] = 0,
    trust: Trust = None,
) -> None:
    """Chat with a model in the terminal, read one question per line from a pipe, or serve it to other programs."""
    require_torch()
    from flatout.engine.opening import open_model
    from flatout.sample import Sampling, backend_of, sampler_of, vocabulary_check

    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, logprobs=False)
    chosen = backend_of(backend, sampling=sampling)
    opened = open_model(
        model, dtype=dtype, backend=chosen, trust=trust, adapter=adapter, check=vocabulary_check(chosen)
    )
    warn(opened.notices)
    if serve:
        if system is not None:
            raise UsageError("--system is for the terminal: programs send their own system message to --serve")
        _serve(opened, sampler_of(opened, backend=chosen, rows=1), sampling, port=port)
        return
    conversation = Conversation(
        sampler_of(opened, backend=chosen, rows=1),
        opened.tokenizer,
        sampling=replace(sampling, stop_ids=opened.stop_ids),
        system=system,
    )
    run(conversation, Lines.standard())


def _serve(opened: Opened, sampler: Sampler, sampling: Sampling, *, port: int) -> None:
    from flatout.sample.serve import Served, Server

    stopping = replace(sampling, stop_ids=opened.stop_ids)
    server = Server(Served(opened.name, sampler, opened.tokenizer, stopping), port=port)
    print_plain(f"base URL  {server.url}\nAPI key   {server.token}")
    print_plain("Only programs on this machine that send this key are answered. Ctrl-C stops the server.")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


class Conversation:
    """A conversation with a model. Without a chat template, each line is continued as plain text."""

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer, *, sampling: Sampling, system: str | None) -> None:
        self.sampler, self.tokenizer, self.sampling, self.system = sampler, tokenizer, sampling, system
        self.messages: list[Message] = []
        self.forgotten = 0  # turns dropped because the context window was full
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.forgotten = 0

    def ask(self, question: str) -> Iterator[str]:
        """Yields the answer piece by piece. An answer that is stopped halfway stays in the conversation."""
        from flatout.sample import answer_pieces

        prompt = self._prompt(question)
        said: list[str] = []
        try:
            for piece in answer_pieces(self.tokenizer, self._tokens(prompt)):
                said.append(piece)
                yield piece
        finally:
            if self.tokenizer.has_template:
                self.messages.append({"role": "assistant", "content": "".join(said)})
            # A repeated question gets another sample, and the same seed gives the same conversation.
            self.sampling = replace(self.sampling, seed=self.sampling.seed + 1)

    @property
    def answered_by(self) -> str | None:
        """The adapter that the router chose for the last question, and how sure it was; None without a router."""
        chosen = getattr(self.sampler, "chosen", None)
        if not chosen:
            return None
        which, sure = chosen[0]
        return f"{self.sampler.names[which]} answered, confidence {100 * sure:.0f} %"  # type: ignore[attr-defined]

    def _tokens(self, prompt: list[int]) -> Iterator[int]:
        for token in self.sampler.stream(prompt, sampling=self.sampling):
            if token not in self.sampling.stop_ids:
                yield token

    def _prompt(self, question: str) -> list[int]:
        from flatout.sample import prompt_ids

        if not self.tokenizer.has_template:
            ids = [*self.tokenizer.begin_ids, *self.tokenizer.encode_batch([question])[0]]
            return ids[: self._longest_prompt()]
        self.messages.append({"role": "user", "content": question})
        while True:
            ids = prompt_ids(self.tokenizer, self.messages)
            first = 1 if self.system else 0
            if len(ids) <= self._longest_prompt():
                return ids
            if len(self.messages) - first < 3:
                self.messages.pop()
                raise TooLong(f"{len(ids)} tokens do not fit the window of {self.sampler.window}: shorten the question")
            del self.messages[first : first + 2]
            self.forgotten += 1

    def _longest_prompt(self) -> int:
        """The longest prompt that leaves space for at least a short answer."""
        return self.sampler.window - min(self.sampling.max_tokens, self.sampler.window // 2)


class TooLong(Exception):
    """The question does not fit the context window; the conversation continues."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Input and output of a conversation: a terminal, a pipe or a test."""

    ask: Callable[[], str]  # raises EOFError at the end
    say: Callable[[str], None]
    note: Callable[[str], None]

    @classmethod
    def standard(cls) -> Lines:
        terminal = sys.stdin.isatty()

        def ask() -> str:
            if terminal:
                try:
                    return input("> ")
                except EOFError:
                    note("")  # so that the shell's prompt starts on a new line
                    raise
            if line := sys.stdin.readline():
                return line.rstrip("\n")
            raise EOFError

        def say(text: str) -> None:
            out.write(text)

        def note(text: str) -> None:
            err.write(text + "\n")

        return cls(ask=ask, say=say, note=note)


def run(conversation: Conversation, lines: Lines) -> None:
    if not conversation.tokenizer.has_template:
        without = " --system is ignored." if conversation.system else ""
        lines.note(
            "This tokenizer has no chat template: each line is continued as plain text, so type a whole prompt, in the "
            f"form of the texts that the model was trained on.{without}"
        )
    lines.note(HELP)
    while True:
        try:
            question = lines.ask()
        except EOFError:
            return
        except KeyboardInterrupt:
            lines.note("")
            continue
        match question.strip():
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                conversation.reset()
                lines.note("started again")
            case _:
                _answer(conversation, question, lines)


def _answer(conversation: Conversation, question: str, lines: Lines) -> None:
    forgotten = conversation.forgotten
    answer = conversation.ask(question)
    try:
        for piece in answer:
            lines.say(piece)
        lines.say("\n")
        if conversation.answered_by is not None:
            lines.note(f"({conversation.answered_by})")
    except KeyboardInterrupt:
        lines.say("\n")
        lines.note("stopped")
    except TooLong as error:
        lines.note(str(error))
    finally:
        answer.close()  # type: ignore[attr-defined]
    if conversation.forgotten > forgotten:
        lines.note(f"the context window is full: the first {conversation.forgotten} turns were dropped")
