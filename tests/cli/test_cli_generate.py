"""`flatout generate` as a shell meets it: plain text for one prompt, JSON lines for several, errors before a model is
loaded."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.command import Command
from tests.data.talks import tokenizer_folder

from flatout.cost import ModelShape
from flatout.data.tokenizer import ByteTokenizer
from flatout.engine.opening import open_model
from flatout.model import Decoder, weights
from flatout.sample import Sampling, sampler_of, text_of


def write_weights(folder: Path, *, vocab: int, eos: int) -> None:
    torch.manual_seed(0)
    shape = ModelShape(
        layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=64, vocab=vocab, positions=256
    )
    model = Decoder(shape)
    model.initialise(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # answers that depend on the question
    weights.export(model, folder, dtype=torch.float32, eos_token_id=eos)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    ByteTokenizer().save(path)
    write_weights(path, vocab=257, eos=256)
    return path


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a chat template."""
    path = tokenizer_folder(tmp_path_factory.mktemp("chatty"))
    write_weights(path, vocab=320, eos=2)
    return path


def rows(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def continuation(folder: Path, text: str = "", *messages: tuple[str, str], max_tokens: int) -> str:
    """The likeliest continuation of a text or of messages, by the sampler itself."""
    opened = open_model(str(folder))
    sampling = Sampling(max_tokens=max_tokens, stop_ids=opened.stop_ids)
    ids = [*opened.tokenizer.begin_ids, *opened.tokenizer.encode_batch([text])[0]]
    if messages:
        rows = [{"role": role, "content": content} for role, content in messages]
        ids = opened.tokenizer.render_ids(rows, add_generation_prompt=True)
    [done] = sampler_of(opened).generate([ids], sampling=sampling)
    return text_of(opened.tokenizer, done.ids, sampling)


def test_one_prompt_is_continued_as_plain_text(folder: Path, flatout: Command) -> None:
    from flatout.output import clean

    done = flatout("generate", str(folder), "Hello", "--temperature", "0", "--max-tokens", "12")
    assert done.code == 0, done.err
    assert done.out == clean(continuation(folder, "Hello", max_tokens=12)) + "\n"
    assert done.err == ""


def test_several_prompts_and_samples_are_json_lines_in_their_order(folder: Path, flatout: Command) -> None:
    asked = ["generate", str(folder), "Hello", "there", "-n", "3", "--temperature", "1", "--max-tokens", "5"]
    done = flatout(*asked)
    assert done.code == 0, done.err
    found = rows(done.out)
    assert [row["prompt"] for row in found] == ["Hello", "there"]
    assert [len(row["completions"]) for row in found] == [3, 3]
    assert all(0 < one["tokens"] <= 5 for row in found for one in row["completions"])
    assert {one["finish"] for row in found for one in row["completions"]} <= {"stopped", "length"}
    assert len({one["text"] for one in found[0]["completions"]}) == 3
    assert flatout(*asked, "--seed", "1").out != done.out
    assert flatout(*asked, "--rows", "1").out == done.out, "draws do not depend on the batch"


def test_json_for_a_single_answer(folder: Path, flatout: Command) -> None:
    plain = continuation(folder, "Hello", max_tokens=4)
    [row] = rows(flatout("generate", str(folder), "Hello", "--temperature", "0", "--max-tokens", "4", "--json").out)
    assert row == {"prompt": "Hello", "completions": [{"text": plain, "tokens": 4, "finish": "length"}]}


def test_rows_of_a_file_keep_their_fields(folder: Path, tmp_path: Path, flatout: Command) -> None:
    lines = [{"prompt": "one", "id": 7}, "two", {"messages": [{"role": "user", "content": "three"}], "id": "x"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    done = flatout("generate", str(folder), "--input", str(tmp_path / "in.jsonl"), "--max-tokens", "3")
    assert done.code == 0, done.err
    found = rows(done.out)
    assert [row.get("id") for row in found] == [7, None, "x"]
    assert [row.get("prompt") for row in found] == ["one", "two", None]
    assert found[2]["messages"] == lines[2]["messages"]  # type: ignore[index]


def test_many_rows_are_complete_and_in_order(
    folder: Path, tmp_path: Path, flatout: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flatout.cli import generate

    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"{i}", "id": i}) + "\n" for i in range(20)))
    asked = ["generate", str(folder), "--input", str(tmp_path / "in.jsonl"), "--temperature", "1", "--max-tokens", "4"]
    whole = flatout(*asked)
    assert [row["id"] for row in rows(whole.out)] == [*range(20)]
    monkeypatch.setattr(generate, "MAX_TOGETHER", 6)
    assert flatout(*asked).out == whole.out, "the parts of a long file are sampled as the whole"


def test_stdin(folder: Path, flatout: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert flatout("generate", str(folder), "-", "--temperature", "0", "--max-tokens", "4", "--json").out == (
        flatout("generate", str(folder), "Hello", "--temperature", "0", "--max-tokens", "4", "--json").out
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "a"}\n{"prompt": "b"}\n'))
    done = flatout("generate", str(folder), "--input", "-", "--max-tokens", "2")
    assert [row["prompt"] for row in rows(done.out)] == ["a", "b"]


def test_a_stop_text_ends_an_answer_and_is_left_out(folder: Path, flatout: Command) -> None:
    options = ["--temperature", "0", "--max-tokens", "40", "--json"]
    [whole] = rows(flatout("generate", str(folder), "Hello", *options).out)
    text = whole["completions"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    [cut] = rows(flatout("generate", str(folder), "Hello", *options, "--stop", "never there", "--stop", stop).out)
    [answer] = cut["completions"]
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish"] == "stopped"


def test_a_chat_model_is_asked_by_its_template(chatty: Path, flatout: Command) -> None:
    def text(*options: str) -> str:
        done = flatout("generate", str(chatty), "Hi", "--temperature", "0", "--max-tokens", "6", "--json", *options)
        assert done.code == 0, done.err
        answer: str = rows(done.out)[0]["completions"][0]["text"]
        return answer

    asked, brief = ("user", "Hi"), ("system", "Be brief")
    assert text() == continuation(chatty, "", asked, max_tokens=6)
    assert text("--system", "Be brief") == continuation(chatty, "", brief, asked, max_tokens=6)
    assert text("--raw") == continuation(chatty, "Hi", max_tokens=6)
    assert len({text(), text("--system", "Be brief"), text("--raw")}) == 3


def test_an_answer_in_the_form_of_the_training_rows_begins_without_its_space(chatty: Path, flatout: Command) -> None:
    """The form is the model's chat template; where the likeliest answer has another beginning, nothing is cut."""
    from flatout.data.forms import QUESTION

    config = chatty / "tokenizer_config.json"
    before = config.read_text()
    asked = ["--temperature", "1", "--max-tokens", "3", "-n", "200"]
    try:
        config.write_text(json.dumps(json.loads(before) | {"chat_template": QUESTION.template(begin="")}))
        [formed] = rows(flatout("generate", str(chatty), "Hi", *asked).out)
        [plain] = rows(flatout("generate", str(chatty), QUESTION.written("Hi"), "--raw", *asked).out)
    finally:
        config.write_text(before)
    texts = [one["text"] for one in plain["completions"]]
    assert any(text.startswith(" ") for text in texts)
    assert [one["text"] for one in formed["completions"]] == [text.removeprefix(" ") for text in texts]


def test_prompts_that_do_not_fit(folder: Path, flatout: Command) -> None:
    long = "x" * 300
    one = flatout("generate", str(folder), long)
    assert (one.code, "a prompt of 300 tokens does not fit the model's window: shorten it" in one.err) == (2, True)
    several = flatout("generate", str(folder), "a", long, "--max-tokens", "2")
    assert several.code == 0
    assert [row["completions"][0]["finish"] == "too_long" for row in rows(several.out)] == [False, True]
    assert "1 of 2 prompts do not fit the model's window" in several.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to continue: give a prompt"),
        (["a", "--temperature", "0", "-n", "2"], "-n above 1 at temperature 0"),
        (["a", "--temperature", "-1"], "temperature -1 must be 0"),
        (["a", "--stop", ""], "--stop is empty"),
        (["a", "--input", "b.jsonl"], "exclude each other"),
        (["--input", "missing.jsonl"], "missing.jsonl"),
        (["--input", "nul\0byte"], "embedded null"),
        (["--input", "."], "--input .: "),
        (["--input", "empty.jsonl"], "empty.jsonl has no prompts"),
        (["--input", "bad.jsonl"], "bad.jsonl, line 2 is not JSON"),
        (["--input", "number.jsonl"], "number.jsonl, line 1: needs either a text in prompt, or messages"),
        (["--input", "role.jsonl"], "role.jsonl, line 1: needs either"),
        (["--input", "half.jsonl"], "half.jsonl, line 1: character 2 is half of a pair"),
        (["-", "-"], "- reads all of stdin"),
        ([""], "a prompt is empty"),
        (["a", "--system", "b", "--raw"], "--system needs a chat template"),
        (["a", "--backend", "tgi"], "must be one of auto, flatout, hf, vllm"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_mistakes_are_told_before_a_model_is_loaded(
    options: list[str], message: str, tmp_path: Path, folder: Path, flatout: Command
) -> None:
    files = {
        "empty": "\n", "bad": '"a"\n{', "number": "3\n", "half": '"a\\ud800"\n',
        "role": '{"messages": [{"role": "wizard", "content": "a"}]}\n',
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    # Only the template is a matter of the model.
    done = flatout("generate", str(folder) if "--raw" in options else "no-such-model", *options)
    assert done.code == 2, done.err
    assert message in done.err
    assert done.out == ""
