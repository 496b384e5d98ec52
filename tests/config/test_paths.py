"""A path that no file can have is refused with a sentence, wherever it is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.command import Command, flatout  # noqa: F401 a fixture

LONG_NAME = "n" * 300
LONG_PATH = "/".join(["folder"] * 700)
ZERO = '"a\\0b"'  # quotes of YAML, because a command line cannot hold a zero byte
SETTINGS = (
    *("run", "model.name", "data.path", "data.name", "data.tokenizer", "data.valid_path", "data.valid_name"),
    *("data.cache", "lora.adapter", "router.start", "rft.prompt", "rft.student_prompt", "rft.generator"),
)
TASKS = ("eval.tasks", "rl.tasks", "rft.task", "rft.valid", "rft.teach")
PATHS = {
    LONG_NAME: "has a name of 300 bytes",
    "\N{SNOWMAN}" * 90: "has a name of 270 bytes",
    LONG_PATH: "has 4,899 bytes",
    ZERO: "holds a zero byte",
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("model: {layers: 1, hidden: 64, heads: 1}\ntrain: {steps: 1}\n")
    return str(path)


@pytest.mark.parametrize("path", PATHS)
def test_no_setting_takes_an_impossible_path(flatout: Command, config: str, path: str) -> None:  # noqa: F811
    for key in SETTINGS:
        done = flatout("config", "validate", config, f"{key}={path}")
        assert done.code == 2
        assert f"{key}: " in done.err
        assert PATHS[path] in done.err, done.err
    for key in TASKS:
        spec = f'"jsonl:{path[1:]}' if path == ZERO else f"jsonl:{path}"
        done = flatout("config", "validate", config, f"{key}={spec}")
        assert (done.code, "Traceback" in done.err) == (2, False)
        assert "bytes" in done.err or "zero byte" in done.err


def test_an_impossible_path_in_a_list_of_sources_names_its_key(flatout: Command, config: str) -> None:  # noqa: F811
    done = flatout("config", "validate", config, "recipe=sft", f"data.sources=[{{path: {LONG_NAME}}}]")
    assert done.code == 2
    assert "has a name of 300 bytes" in done.err


# Every argument and option that names a file or a folder.
COMMANDS = (
    ["plan", "PATH"],
    ["train", "PATH"],
    ["train", "CONFIG", "--run", "PATH"],
    ["train", "CONFIG", "--run", "PATH", "--dry-run"],
    ["launch", "PATH"],
    ["launch", "CONFIG", "--run", "PATH", "--dry-run"],
    ["sample", "PATH"],
    ["export", "PATH", "--to", "out"],
    ["export", "run", "--to", "PATH"],
    ["doctor", "PATH"],
    ["doctor", "--", "PATH"],
    ["doctor", "--log", "PATH"],
    ["doctor", "run", "--json", "PATH"],
    ["doctor", "run", "--run", "PATH"],
    ["doctor", "run", "--prove", "--config", "PATH"],
    ["eval", "PATH", "--tasks", "units"],
    ["eval", "run", "--tasks", "jsonl:PATH"],
    ["eval", "run", "--tasks", "units", "--against", "PATH"],
    ["chat", "PATH"],
    ["ablate", "PATH"],
    ["ablate", "CONFIG", "--run", "PATH"],
    ["ablate", "CONFIG", "--baseline", "PATH"],
    ["tune", "PATH"],
    ["tune", "CONFIG", "--run", "PATH"],
    ["compare", "PATH", "PATH"],
    ["report", "PATH"],
    ["report", "run", "-o", "PATH"],
    ["watch", "PATH", "--once"],
    ["runs", "PATH"],
    ["examples", "pretrain-demo", "--to", "PATH"],
    ["data", "prepare", "PATH", "--to", "out"],
    ["data", "prepare", "embedded", "--to", "PATH"],
    ["data", "prepare", "embedded", "--to", "out", "--tokenizer", "PATH"],
    ["data", "prepare", "CONFIG", "--to", "out", "--valid-path", "PATH"],
    ["data", "show", "PATH"],
    ["config", "validate", "PATH"],
    ["config", "show", "PATH"],
)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_command_takes_an_impossible_path(flatout: Command, config: str, arguments: list[str]) -> None:  # noqa: F811
    for path in (LONG_NAME, LONG_PATH):
        done = flatout(*(one.replace("PATH", path).replace("CONFIG", config) for one in arguments))
        assert done.code in (2, 127), done.err  # 127: a script that does not exist
        assert "Traceback" not in done.err
        assert done.err.startswith("error: ")
        assert len(done.err) < 1000


def test_a_path_that_only_becomes_too_long_is_no_crash(flatout: Command, config: str) -> None:  # noqa: F811
    name = "n" * 250  # what is written beside it has a longer name
    for arguments in (["examples", "pretrain-demo", "--to", name], ["train", config, "--dry-run", "--run", name]):
        done = flatout(*arguments)
        assert "Traceback" not in done.err
        assert done.code in (0, 2, 3)


def test_a_link_to_itself_is_no_crash(flatout: Command, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "loop").symlink_to("loop")
    for arguments in (["runs", "loop"], ["report", "loop"], ["doctor", "loop"], ["doctor", "--log", "loop"]):
        done = flatout(*arguments)
        assert done.code in (2, 127)
        assert "Traceback" not in done.err
