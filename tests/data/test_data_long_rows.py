"""Conversations of thousands of messages: the same examples as short ones, by work that grows with their length."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data.talks import CHATML, tokenizer_folder

from flatout.config.settings import DataSettings
from flatout.data import chat, sandbox
from flatout.data.examples import Encoder, Examples
from flatout.data.tokenizer import load_tokenizer

Message = dict[str, Any]
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m['role'] }}>{{ m['content'] | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM_FIRST = (
    "{% if messages[0]['role'] == 'system' %}{% set said = messages[1:] %}{{ messages[0]['content'] }}\n"
    "{% else %}{% set said = messages %}Be kind.\n{% endif %}"
    "{% for m in said %}[{{ m['role'] }}]{{ m['content'] }}{{ '' if loop.last else ' ' }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS_TOGETHER = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<user>{% endif %}({{ m.content }})"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}</user>{% endif %}"
    "{% else %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUMBERED = "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}\n{% endfor %}"
REWRITING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content[:3] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def talk(turns: int, *, system: bool = False, tools: int = 0) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": "Be brief."}] if system else []
    for i in range(turns):
        asked = [{"role": "tool", "content": f"{i} {k}"} for k in range(tools)] if i and tools else []
        asked = asked or [{"role": "user", "content": f"Question {i}?"}]
        messages += [*asked, {"role": "assistant", "content": f"Answer {i}."}]
    return messages


def located(template: str, messages: list[Message]) -> tuple[str, list[tuple[int, int]], int]:
    """The text, the answers' places, and how many messages were rendered for them."""
    program, _ = sandbox.compiled(template, dated=False)
    work = 0

    def render(part: list[Message], *, tools: Any = None, prompt: bool = False) -> str:
        nonlocal work
        work += len(part)
        return str(program.render(messages=part, add_generation_prompt=prompt, bos_token="<s>"))

    text = render(messages)
    wanted = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return text, sandbox.spans(render, messages, tools=None, wanted=wanted, text=text), work


TALKS: dict[str, tuple[str, Callable[[int], list[Message]]]] = {
    "ChatML": (CHATML, talk),
    "ChatML with a system message": (CHATML, lambda turns: talk(turns, system=True)),
    "roles that must alternate": (GEMMA, talk),
    "a system message of its own": (SYSTEM_FIRST.replace("{{ '' if loop.last else ' ' }}", ""), talk),
    "tools": (TOOLS_TOGETHER, lambda turns: talk(turns, tools=3)),
}


@pytest.mark.parametrize("name", TALKS)
def test_long_conversations_have_the_spans_of_short_ones_and_cost_by_their_length(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, talked = TALKS[name]
    _, few, few_work = located(template, talked(500))
    text, many, many_work = located(template, talked(1000))
    assert many[:500] == few
    assert many_work < 2.2 * few_work
    assert all(text[low:high].strip("\n").startswith("Answer") for low, high in many)
    monkeypatch.setattr(sandbox, "CHEAP", 10**12)  # every conversation is rendered up to each answer
    _, exact, _ = located(template, talked(100))
    assert few[:100] == exact


@pytest.mark.parametrize("template", [NUMBERED, SYSTEM_FIRST, REWRITING])
def test_a_template_that_looks_at_the_whole_conversation_is_rendered_up_to_each_answer(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome() -> object:
        try:
            return located(template, talk(100))[1]
        except sandbox.BadConversation as error:
            return str(error)

    found = outcome()
    monkeypatch.setattr(sandbox, "CHEAP", 10**12)
    assert found == outcome()
    if template == NUMBERED:
        monkeypatch.undo()
        with pytest.raises(sandbox.BadConversation, match="4,000 messages are too many for this chat template"):
            located(template, talk(2000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


def read(folder: Path, path: Path, rows: list[Any]) -> tuple[Examples, dict[str, int]]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(source="jsonl", path=str(path), sequence_length=1 << 24, max_bad_share=1.0)
    encoder = Encoder(data, load_tokenizer(str(folder), documents=None, cache=folder))
    return encoder.read("train")[0], dict(encoder.tally.reasons)


def test_every_answer_of_a_row_of_thousands_of_messages_is_learnt(folder: Path, tmp_path: Path) -> None:
    found, reasons = read(folder, tmp_path / "rows.jsonl", [{"messages": talk(2000)}, {"messages": talk(1)}])
    assert not reasons
    tokenizer = load_tokenizer(str(folder), documents=None, cache=folder)
    learnt = tokenizer.decode(found.tokens[: found.ends[0]][found.trained[: found.ends[0]]].tolist())
    assert learnt == "".join(f"Answer {i}.<|im_end|>\n" for i in range(2000))


def test_what_is_too_long_for_a_template_is_a_bad_row(folder: Path, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * (2 << 20)}, {"role": "assistant", "content": "y"}]
    rows = [{"messages": long}, {"messages": talk(10_000)}, {"messages": talk(1)}]
    found, reasons = read(folder, tmp_path / "rows.jsonl", rows)
    assert len(found) == 1
    assert reasons == {
        "longer than 2 MiB, the most that a template is given": 1,
        "more than 16,384 messages": 1,
    }


def test_long_rows_are_tokenized_one_by_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[int] = []
    encode = Encoder.encode

    def counted(self: Encoder, drafts: Any) -> Any:
        together.append(sum(len(draft.text) for draft in drafts))
        return encode(self, drafts)

    monkeypatch.setattr(Encoder, "encode", counted)
    monkeypatch.setattr("flatout.data.examples.ENCODED_CHARACTERS", 5000)
    rows = [{"messages": [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "y"}]}] * 9
    found, _ = read(folder, tmp_path / "rows.jsonl", rows)
    assert len(found) == 9
    assert len(together) == 5
    assert max(together) < 5000


def test_many_segments_are_joined_in_order(folder: Path, tmp_path: Path) -> None:
    row = {"segments": [{"text": f"{i} ", "label": i % 2 == 1} for i in range(5000)]}
    found, _ = read(folder, tmp_path / "rows.jsonl", [row])
    tokenizer = load_tokenizer(str(folder), documents=None, cache=folder)
    assert tokenizer.decode(found.tokens.tolist()) == "".join(f"{i} " for i in range(5000))
    assert tokenizer.decode(found.tokens[found.trained].tolist()) == "".join(f"{i} " for i in range(1, 5000, 2))


def test_published_templates_give_what_transformers_gives(real_data: Path) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    words = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    answered = [{"role": "user", "content": "Two & <two>?"}, {"role": "assistant", "content": " Four. "}]
    talks = [answered, [{"role": "system", "content": "Be brief."}, *answered], answered * 3]
    rendered = 0
    for path in sorted((real_data / "chat_templates").glob("*.jinja")):
        program = chat.compiled(path.read_text())
        for prompt in (True, False):
            found = program.rendered([chat.Talk(messages=messages) for messages in talks], words=words, prompt=prompt)
            for messages, ours in zip(talks, found, strict=True):
                try:
                    [[theirs], _] = utils.render_jinja_template(
                        [messages], chat_template=path.read_text(), add_generation_prompt=prompt, **words
                    )
                except Exception:
                    continue
                assert isinstance(ours, chat.Rendered), (path.name, ours)
                assert ours.text == theirs, path.name
                rendered += 1
    assert rendered > 200


def test_published_templates_have_the_same_spans_in_parts(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    for path in sorted((real_data / "chat_templates").glob("*.jinja")):
        found = []
        for cheap in (0, 10**12):
            monkeypatch.setattr(sandbox, "CHEAP", cheap)
            try:
                found.append(located(path.read_text(), talk(30))[1])
            except Exception as error:  # of the template
                found.append(str(error))
        assert found[0] == found[1], path.name
        compared += isinstance(found[0], list)
    assert compared > 20
