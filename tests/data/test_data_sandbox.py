"""Chat templates that loop, grow or fail: refused by name, after the same number of steps on every machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.talks import CHATML, tokenizer_folder, write_rows

from flatout.config.settings import DataSettings
from flatout.data.examples import open_conversations
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import UsageError

MESSAGES = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
DOUBLED = "{% set n = namespace(x=['xx']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
# By what they would do if they were let.
ENDLESS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" * 2,
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a loop that calls itself": "{% for x in range(9) recursive %}{% if loop.depth < 40 %}{{ loop(range(9)) }}"
    "{% endif %}{% endfor %}",
    "a list of iterators": "{% for i in range(99999) %}{{ range(99999)|map(attribute='x')|list|length }}{% endfor %}",
    "a copy in a loop": "{% set l = range(9000)|list %}{% for i in range(99999) %}{% set x = l[:] %}{% endfor %}",
}
GIGANTIC = {
    "a product": "{{ 'x' * 10**10 }}",
    "a list": "{{ [1] * 10**9 }}",
    "a power": "{{ 10 ** 1000000000 }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "texts doubled": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "sums doubled": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "lists doubled": DOUBLED + "{{ n.x }}",
    "JSON doubled": DOUBLED + "{{ n.x|tojson }}",
    "a padded text": "{{ 'x'|center(10000000000) }}",
    "a padding method": "{{ 'x'.ljust(10000000000) }}",
    "a format": "{{ '%1000000000d' % 1 }}",
    "a format method": "{{ '{0:{1}}'.format('x', 1000000000) }}",
    "a replacement": "{{ ('x' * 99999)|replace('x', 'y' * 99999) }}",
    "a join": "{{ ('y' * 99999).join('x' * 99999) }}",
    "a join of few": "{{ ('y' * 99999).join(['x'] * 1000) }}",
    "a join by a filter": "{{ (['x'] * 1000)|join('y' * 99999) }}",
    "a format of bytes": "{{ '%1000000000d'.encode() % 1 }}",
    "an indent": "{{ messages|tojson(indent=1000000000) }}",
    "a block": "{% set s = 'x' * 9999 %}{% set t %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endset %}",
    "an output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
}
FAILING = {
    "{{ 1 / 0 }}": "division by zero",
    "{{ 1 + 'x' }}": "unsupported operand",
    "{{ 1.5 ** 100000 }}": "Numerical result",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}": "recursion",
    "{% block a %}{{ self.a() }}{% endblock %}": "recursion",
    "{% include 'x' %}": "no loader",
    "{{ messages[0].content.encode('nonsense') }}": "nonsense",
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


RENDER = """
import json, resource, sys
from flatout.data import chat
from flatout.errors import UsageError
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
for template in json.load(sys.stdin):
    try:
        chat.rendered(template, json.loads(sys.argv[1]), words={}, add_generation_prompt=False)
        print("rendered", flush=True)
    except UsageError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("templates", "says"),
    [(ENDLESS, "takes more than"), (GIGANTIC, "makes a text or list of|computes a number|takes more")],
)
def test_endless_and_gigantic_templates_are_refused(templates: dict[str, str], says: str) -> None:
    """In a process of its own, with a bound on its memory and a guard against hanging."""
    command = [sys.executable, "-c", RENDER, json.dumps(MESSAGES)]
    given = json.dumps(list(templates.values()))
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    answers = dict(zip(templates, done.stdout.splitlines(), strict=True))
    for what, answer in answers.items():
        assert "chat template is not usable" in answer, (what, answer)
        assert any(word in answer for word in says.split("|")), (what, answer)


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
            UsageError, match="the tokenizer's chat template is not usable: it makes a text or list of 10,000,000"
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
    with pytest.raises(UsageError, match=r"the chat template (is not valid Jinja|has 2,097,152 characters)"):
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
    long = [*MESSAGES * 500, {"role": "user", "content": "{%1000000000d}" * 100_000}]
    text = tokenizer.render(long, add_generation_prompt=False)
    begin = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in long)
    assert text == begin + ", ".join(m["role"] for m in long[1:]) + "{%11" + "12003"


def test_a_damaged_side_file_of_a_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    made = with_template(folder, tmp_path / "tokenizer", CHATML)
    (made / "special_tokens_map.json").write_text("[1]")
    with pytest.raises(UsageError, match=r"special_tokens_map\.json of .* holds a list where a JSON object"):
        load_tokenizer(str(made), documents=None, cache=tmp_path).render(MESSAGES, add_generation_prompt=False)
