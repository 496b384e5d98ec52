"""The documents say what the code says."""

from pathlib import Path

import pytest

from flatout.config import from_mapping, keys

ROOT = Path(__file__).parents[1]


def test_every_setting_is_documented_with_its_own_words() -> None:
    from flatout.config import load, show

    text = (ROOT / "docs" / "config.md").read_text()
    loaded = load(ROOT / "examples" / "pretrain-demo.yaml")
    for row in show(loaded):
        assert f"| `{row.key}` |" in text, f"docs/config.md lacks {row.key}"
        help_text = row.help.replace("<|", "<\\|").replace("|>", "\\|>")
        assert help_text in text, f"docs/config.md says something else of {row.key}"
    assert sum(line.startswith("| `") for line in text.splitlines()) == len(keys())


def test_every_cause_of_the_doctor_has_its_section() -> None:
    import re

    from flatout.insight.diagnose import CAUSES

    text = (ROOT / "docs" / "causes.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert sections.keys() == set(CAUSES)
    for cause, section in sections.items():
        assert "**Looks like:**" in section, cause
        assert "flatout:**" in section or "**All frameworks:**" in section, cause


def test_the_settings_of_flatout_in_the_causes_are_settings() -> None:
    import re

    text = (ROOT / "docs" / "causes.md").read_text()
    named = set(re.findall(r"`((?:plan|data|train|eval|save|profile)\.[a-z_]+)(?==|`)", text))
    assert len(named) > 10
    assert named <= set(keys()) | {"profile.steps"}


def test_the_readme_table_is_what_was_measured() -> None:
    pytest.importorskip("torch")
    from benchmarks.results import read

    results = read(ROOT / "benchmarks" / "results" / "pretrain-124m.jsonl")
    newest = [r for r in results if r.call == results[-1].call]
    readme = (ROOT / "README.md").read_text()
    for result in newest:
        if result.metric == "tokens_per_s":
            assert f"{result.value:,.0f}" in readme, f"{result.variant} is not in README.md as measured"


def test_the_example_in_the_readme_is_valid() -> None:
    import yaml

    block = (ROOT / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    settings = from_mapping(yaml.safe_load(block))
    assert settings.train.steps == 1000


def test_the_readme_is_at_most_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
