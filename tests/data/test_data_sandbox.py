"""Chat templates that loop, grow or fail: refused by name, in a process that the kernel ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.data.talks import CHATML, tokenizer_folder, write_rows

from flatout.config.settings import DataSettings
from flatout.data import chat
from flatout.data.examples import open_conversations
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import UsageError

MESSAGES = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
DOUBLED = "{% set n = namespace(x=['xx']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
# By what they would do if they were let.
ENDLESS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a list of iterators": "{% for i in range(99999) %}{{ range(99999)|map(attribute='x')|list|length }}{% endfor %}",
    "a power": "{{ 10 ** 1000000000 }}",
    "tags to strip": "{{ ('<>' * 500000)|striptags }}",
    "addresses to mark": "{{ ('www.a.bc ' * 300000)|urlize }}",
    "words to wrap": "{{ ('x ' * 3000000)|wordwrap(1) }}",
}
GIGANTIC = {
    "a product": "{{ 'x' * 10**10 }}",
    "a list": "{{ [1] * 10**9 }}",
    "texts doubled": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a padded text": "{{ 'x'|center(10000000000) }}",
    "a format method": "{{ '{0:{1}}'.format('x', 10000000000) }}",
    "a replacement": "{{ ('x' * 99999)|replace('x', 'y' * 99999) }}",
    "an indent": "{{ messages|tojson(indent=1000000000) }}",
    "JSON doubled": DOUBLED + "{{ n.x|tojson }}",
}
LONG = {"an output": "{% for i in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", "a text": "{{ 'x' * 10000000 }}"}
FAILING = {
    "{{ 1 / 0 }}": "division by zero",
    "{{ 1 + 'x' }}": "unsupported operand",
    "{{ 1.5 ** 100000 }}": "Numerical result",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}": "recursion",
    "{% block a %}{{ self.a() }}{% endblock %}": "recursion",
    "{% include 'x' %}": "no loader",
    "{{ messages[0].content.encode('nonsense') }}": "nonsense",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{{ namespace(__class__=1) }}": "a namespace cannot have",
    "{{ messages.append(1) }}": "access to attribute 'append'",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


def with_template(folder: Path, to: Path, template: str) -> Path:
    to.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (to / name).write_text((folder / name).read_text())
    (to / "chat_template.jinja").write_text(template)
    return to


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "PROCESSOR_S", 0.3)


def rendered(template: str, messages: Sequence[Mapping[str, Any]] = MESSAGES) -> str:
    [text] = chat.rendered(template, [messages], words={}, add_generation_prompt=False, name="theirs")
    return text


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("what", ENDLESS)
def test_endless_templates_are_ended(what: str) -> None:
    with pytest.raises(
        UsageError, match=r"chat template of theirs is not usable: it takes more than 0\.3 s|needs more"
    ):
        rendered(ENDLESS[what])


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("what", GIGANTIC)
def test_gigantic_templates_are_ended(what: str) -> None:
    with pytest.raises(UsageError, match=r"template of theirs is not usable: it (needs more than 1024 MiB|takes)"):
        rendered(GIGANTIC[what])


@pytest.mark.parametrize("what", LONG)
def test_a_text_that_is_far_longer_than_its_messages_is_refused(what: str) -> None:
    with pytest.raises(UsageError, match=r"it makes a text of [0-9,]+ characters; at most 1,0[0-9,]+ are allowed"):
        rendered(LONG[what])


def test_the_next_template_is_rendered_after_one_that_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "PROCESSOR_S", 0.1)
    with pytest.raises(UsageError, match="takes more than"):
        rendered("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    monkeypatch.undo()
    assert rendered("{{ messages|length }}") == "2"


def test_a_killed_process_is_replaced_and_no_answer_is_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        rendered("{{ messages[0].content }}", [{"role": "user", "content": "\ud800 and\nso on"}]) == "\ud800 and\nso on"
    )
    for child in renderers():
        os.kill(child, signal.SIGKILL)
    assert rendered("{{ messages|length }}") == "2"

    write = os.write

    def interrupted(descriptor: int, data: Any) -> int:
        write(descriptor, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rendered("{{ messages[0].content }}")
    monkeypatch.undo()
    assert rendered("{{ messages[1].content }}") == "Four."


def test_threads_and_forked_processes_each_get_their_own_answers() -> None:
    def lengths(count: int) -> list[str]:
        return [rendered("{{ messages|length }}", MESSAGES * count) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lengths, range(4))) == [[str(2 * count)] * 20 for count in range(4)]
    before = renderers()
    forked = os.fork()
    if not forked:
        with contextlib.suppress(BaseException):
            os._exit(0 if rendered("{{ messages|length }}") == "2" and not before & renderers() else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert rendered("{{ messages|length }}") == "2"
    assert renderers() == before


def renderers() -> set[int]:
    """The processes that this one renders in."""
    children = psutil.Process().children()
    return {child.pid for child in children if any("sandbox" in word for word in child.cmdline())}


@pytest.mark.parametrize(("template", "says"), FAILING.items())
def test_a_template_that_fails_in_any_way_makes_a_bad_row(
    folder: Path, tmp_path: Path, template: str, says: str
) -> None:
    tokenizer = with_template(folder, tmp_path / "tokenizer", template)
    rows = write_rows(tmp_path / "rows.jsonl", count=20)
    data = DataSettings(source="jsonl", path=str(rows), sequence_length=64, cache=str(tmp_path / "cache"))
    with (
        pytest.raises(UsageError, match=f"20 of 20 rows cannot be used.*the chat template refuses it: .*{says}"),
        open_conversations(data, seed=0, tokenizer=str(tokenizer)),
    ):
        pass


def test_a_template_that_takes_too_much_stops_at_the_first_row(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path / "tokenizer", "{{ 'x' * 10000000 }}")
    rows = write_rows(tmp_path / "rows.jsonl", count=20)
    data = DataSettings(source="jsonl", path=str(rows), sequence_length=64, cache=str(tmp_path / "cache"))
    with (
        pytest.raises(
            UsageError, match=r"the chat template of .*tokenizer is not usable: it makes a text of 10,000,000"
        ),
        open_conversations(data, seed=0, tokenizer=str(tokenizer)),
    ):
        pass


@pytest.mark.parametrize(
    "template", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 500, "x" * (2 << 20)]
)
def test_a_template_that_cannot_be_compiled_is_refused(folder: Path, tmp_path: Path, template: str) -> None:
    made = with_template(folder, tmp_path / "tokenizer", template)
    tokenizer = load_tokenizer(str(made), documents=None, cache=tmp_path)
    with pytest.raises(UsageError, match=r"the chat template of .* (is not valid Jinja|has 2,097,152 characters)"):
        tokenizer.render(MESSAGES, add_generation_prompt=False)


def test_long_conversations_are_rendered_as_before(folder: Path, tmp_path: Path) -> None:
    """What is allowed grows with the messages, and none of the bounds changes a text."""
    made = with_template(
        folder,
        tmp_path / "tokenizer",
        CHATML + "{{ messages[1:]|map(attribute='role')|join(', ') }}{{ (messages|last)['content'].upper()[:3] ~ 1 }}"
        "{% for i in range(3) %}{{ loop.index if not loop.last else '%03d' % loop.length }}{% endfor %}",
    )
    tokenizer = load_tokenizer(str(made), documents=None, cache=tmp_path)
    long = [*MESSAGES * 500, {"role": "user", "content": "{%1000000000d}" * 50_000}]
    text = tokenizer.render(long, add_generation_prompt=False)
    begin = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in long)
    assert text == begin + ", ".join(m["role"] for m in long[1:]) + "{%11" + "12003"


def test_a_damaged_side_file_of_a_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    made = with_template(folder, tmp_path / "tokenizer", CHATML)
    (made / "special_tokens_map.json").write_text("[1]")
    with pytest.raises(UsageError, match=r"special_tokens_map\.json of .* holds a list where a JSON object"):
        load_tokenizer(str(made), documents=None, cache=tmp_path).render(MESSAGES, add_generation_prompt=False)
