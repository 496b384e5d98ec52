"""Every number has a smallest and a largest value: in a configuration and on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from tests.command import Command, flatout  # noqa: F401 a fixture

from flatout import cli

DOCS = Path(__file__).parents[2] / "docs" / "config.md"
HUGE = ("1000000000000000000", "9223372036854775807", "9" * 30, "1e400", "1e31")


def numbers(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every place of a schema where a number goes."""
    if isinstance(node, dict):
        if node.get("type") in ("integer", "number"):
            yield path, node
        for key, value in node.items():
            yield from numbers(value, f"{path}/{key}")
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from numbers(value, f"{path}/{number}")


def test_the_schema_bounds_every_number(flatout: Command) -> None:  # noqa: F811
    document = json.loads(flatout("config", "schema").out)
    found = dict(numbers(document))
    assert len(found) > 100
    for path, node in found.items():
        assert {"minimum", "exclusiveMinimum"} & node.keys(), path
        assert {"maximum", "exclusiveMaximum"} & node.keys(), path
        most = node.get("maximum", node.get("exclusiveMaximum"))
        assert most <= (10**15 if node["type"] == "integer" else 1e30), path


def of_settings(flatout: Command) -> Iterator[tuple[str, dict[str, Any]]]:  # noqa: F811
    """Every setting that is a number, and its part of the schema."""
    document = json.loads(flatout("config", "schema").out)
    for section, entry in document["properties"].items():
        reference = next((one["$ref"] for one in [entry, *entry.get("anyOf", [])] if "$ref" in one), None)
        leaves = {"": entry} if reference is None else document["$defs"][reference.rpartition("/")[2]]["properties"]
        for name, leaf in leaves.items():
            for node in [leaf, *leaf.get("anyOf", [])]:
                if node.get("type") in ("integer", "number"):
                    yield f"{section}.{name}".rstrip("."), node


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("model: {layers: 1, hidden: 64, heads: 1}\ntrain: {steps: 1}\n")
    return str(path)


def test_no_setting_takes_a_number_beyond_use(flatout: Command, config: str) -> None:  # noqa: F811
    counts = {key: node["type"] for key, node in of_settings(flatout)}
    assert {"plan.workers", "train.steps", "seed", "rl.samples", "save.keep", "plan.threads"} <= counts.keys()
    for value in HUGE:
        asked = [key for key, kind in counts.items() if kind == "integer" or value in ("1e400", "1e31")]
        for some in (asked[i : i + 20] for i in range(0, len(asked), 20)):  # as many as a message names
            done = flatout("config", "validate", config, *(f"{key}={value}" for key in some))
            assert done.code == 2
            for key in some:
                assert f"{key}: {value} must be" in done.err or f"{key}: {value} is too large" in done.err, done.err


@pytest.mark.parametrize("value", ["256", "0"])
def test_a_plan_takes_the_largest_number_of_workers_and_reads_it_again(
    flatout: Command,  # noqa: F811
    config: str,
    value: str,
) -> None:
    assert flatout("plan", config, f"plan.workers={value}", "--json").code == 0
    assert flatout("plan", config, "plan.workers=257").err.endswith("must be at most 256 (data loader workers)\n")


def test_the_limits_are_in_the_documentation(flatout: Command) -> None:  # noqa: F811
    """The page names each limit as the schema has it."""
    text = DOCS.read_text()
    for key, node in of_settings(flatout):
        (row,) = re.findall(rf"^\| `{re.escape(key)}` \|.*$", text, re.MULTILINE)
        if node["type"] == "integer" and "maximum" in node:
            assert f"at most {node['maximum']:,}" in row, key


def options() -> Iterator[tuple[str, str]]:
    """Every number that a command takes as an option: the command and the option."""
    apps = {"": cli.app, "data ": cli.data.app, "config ": cli.config.app}
    for group, app in apps.items():
        for command in app.registered_commands:
            assert command.callback is not None
            name = group + (command.name or command.callback.__name__)
            for parameter, hint in get_type_hints(command.callback, include_extras=True).items():
                if get_origin(hint) is Annotated and {int, float} & {get_args(hint)[0], *get_args(get_args(hint)[0])}:
                    flags = [flag for flag in get_args(hint)[1].param_decls if flag.startswith("--")]
                    yield name, flags[0] if flags else f"--{parameter.replace('_', '-')}"


def test_no_option_takes_a_number_beyond_use(flatout: Command, config: str) -> None:  # noqa: F811
    found = list(options())
    assert len(found) > 30
    for name, flag in found:
        for value in (HUGE[1], "nan", "-inf"):
            more = {"eval": ["--tasks", "units"], "data prepare": ["--to", "out"]}.get(name, [])
            done = flatout(*name.split(), config, *more, f"{flag}={value}")
            assert done.code == 2, (name, flag, value, done.err)
            assert "Traceback" not in done.err, (name, flag, value)
