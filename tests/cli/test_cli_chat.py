"""A conversation: remembered, started again, stopped halfway, longer than the window; never a control character."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from flatout.cli import chat
from flatout.data.tokenizer import ByteTokenizer
from flatout.errors import UsageError
from flatout.sample import Completion, Sampling


class Chatty(ByteTokenizer):
    has_template = True  # type: ignore[assignment]

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]" * add_generation_prompt

    def render_ids(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        return list(self.render(messages, add_generation_prompt=add_generation_prompt).encode())


class Echo:
    """Answers with what it was given, in brackets, and ends with the stop token."""

    def __init__(self, *, window: int = 1000, interrupt_after: int | None = None) -> None:
        self.window, self.interrupt_after = window, interrupt_after
        self.prompts: list[str] = []
        self.seeds: list[int] = []

    def stream(self, prompt: Sequence[int], *, sampling: Sampling) -> Iterator[int]:
        text = ByteTokenizer().decode(prompt)
        self.prompts.append(text)
        self.seeds.append(sampling.seed)
        for at, byte in enumerate(f"<{text[-12:]}>".encode()):
            if at == self.interrupt_after:
                self.interrupt_after = None
                raise KeyboardInterrupt
            yield byte
        yield 256

    def generate(self, *_: Any, **__: Any) -> Iterator[Completion]:
        raise NotImplementedError

    def likelihoods(self, *_: Any) -> list[list[float]]:
        raise NotImplementedError

    def surprisals(self, *_: Any) -> Iterator[list[float]]:
        raise NotImplementedError


def talk(
    *lines: str | type[BaseException],
    echo: Echo | None = None,
    tokenizer: ByteTokenizer | None = None,
    system: str | None = None,
) -> tuple[str, list[str], Echo]:
    """What was said, what was noted, and the sampler with what it was asked."""
    given, said, noted, echo = iter(lines), [], [], echo or Echo()

    def ask() -> str:
        line = next(given, EOFError)
        if isinstance(line, type):
            raise line
        return line

    sampling = Sampling(max_tokens=50, stop_ids=frozenset({256}), seed=7)
    made = chat.Conversation(echo, tokenizer or Chatty(), sampling=sampling, system=system)
    chat.run(made, chat.Lines(ask=ask, say=said.append, note=noted.append))
    return "".join(said), noted, echo


def test_a_conversation_is_remembered() -> None:
    said, _, echo = talk("one", "two")
    assert said == "<e[assistant]>\n<o[assistant]>\n"
    assert echo.prompts[1] == "[user]one[assistant]<e[assistant]>[user]two[assistant]"
    assert echo.seeds == [7, 8]


def test_the_system_message_stays_through_a_reset() -> None:
    _, noted, echo = talk("one", "/reset", "two", system="Be kind.")
    assert "started again" in noted
    assert echo.prompts == ["[system]Be kind.[user]one[assistant]", "[system]Be kind.[user]two[assistant]"]


def test_quit_ends_and_empty_lines_ask_nothing() -> None:
    _, _, echo = talk("", "  ", "/quit", "never asked")
    assert not echo.prompts


def test_an_interrupt_stops_an_answer_and_not_the_program() -> None:
    said, noted, echo = talk("one", "two", echo=Echo(interrupt_after=3))
    assert said.startswith("<e[\n")
    assert "stopped" in noted
    assert echo.prompts[1].startswith("[user]one[assistant]<e[[user]two")


def test_an_interrupt_at_the_prompt_only_makes_a_new_one() -> None:
    said, _, _ = talk(KeyboardInterrupt, "one")
    assert said.endswith("\n")
    assert said != ""


def test_what_no_longer_fits_is_forgotten_and_said() -> None:
    _, noted, echo = talk("a" * 40, "b" * 40, "c" * 40, echo=Echo(window=170), system="S")
    assert any("turns were dropped" in note for note in noted)
    assert echo.prompts[-1].startswith("[system]S[user]")
    assert "a" * 40 not in echo.prompts[-1]
    assert "c" * 40 in echo.prompts[-1]


def test_a_question_that_never_fits_is_refused_and_forgotten() -> None:
    said, noted, echo = talk("a" * 500, "short", echo=Echo(window=200))
    assert any("shorten the question" in note for note in noted)
    assert echo.prompts == ["[user]short[assistant]"]
    assert said.count("\n") == 1


def test_without_a_template_text_is_continued_and_that_is_said() -> None:
    said, noted, echo = talk("Once", "Twice", tokenizer=ByteTokenizer(), system="ignored")
    assert echo.prompts == ["Once", "Twice"]
    assert "no chat template" in noted[0]
    assert "--system" in noted[0]
    assert said == "<Once>\n<Twice>\n"


@pytest.mark.parametrize("hostile", ["\x1b[2J\x1b]0;owned\x07", "\x9b31m", "\u202e", "\r\x08"])
def test_no_control_character_reaches_the_terminal(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer, _, _ = talk(hostile, tokenizer=ByteTokenizer())
    chat.Lines.standard().say(answer)
    said = capsys.readouterr().out
    assert said.strip("<>\n")
    assert said.isprintable() or set(said) - {"\n", "\ufffd"} <= set(map(chr, range(32, 127)))
    assert hostile not in said


def test_a_template_that_leaves_nothing_of_a_question_is_refused() -> None:
    class Silent(Chatty):
        def render_ids(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[int]:
            return []

    with pytest.raises(UsageError, match="makes an empty prompt of a conversation"):
        talk("hello", tokenizer=Silent())
