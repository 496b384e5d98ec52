"""Every format and every kind of file, right and broken; slices, mixtures, and `flatout data show`."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests.command import Command
from tests.data.talks import CHATML, tokenizer_folder, write_rows

from flatout.config import slices
from flatout.config.settings import DataSettings, SourceSettings
from flatout.data.examples import Conversations, Encoder, Examples, open_conversations
from flatout.data.mixture import Mixed, shares
from flatout.data.rows import files_of, read_rows
from flatout.data.sources import Tally
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import UsageError

TOOLED = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
assert TOOLED != CHATML


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))
    (found / "chat_template.jinja").write_text(TOOLED)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer without a chat template."""
    found = tokenizer_folder(tmp_path_factory.mktemp("plain"))
    config = json.loads((found / "tokenizer_config.json").read_text())
    (found / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    return found


def marked(row: Any, tokenizer: Path, **data: Any) -> str:
    """The text of a row, with what is learnt in brackets."""
    codec = load_tokenizer(str(tokenizer), documents=None, cache=Path())
    encoder = Encoder(DataSettings(path="x", **data), codec)
    ((ids, trained),) = encoder.encode([encoder.draft(row)])
    text, inside = "", False
    for token, learnt in zip(ids.tolist(), trained.tolist(), strict=True):
        text += "[" if learnt and not inside else "]" if inside and not learnt else ""
        text, inside = text + codec.decode([token]), learnt
    return text + ("]" if inside else "")


def user(text: str, answer: str, *, system: str = "") -> str:
    before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{before}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n[{answer}<|im_end|>\n]"


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
ROWS: list[tuple[str, dict[str, Any], str]] = [
    (
        "messages",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "name": None}]},
        user("Hi", "Yes"),
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "Yes"},
            ]
        },
        user("a b", "Yes"),
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}], "system": "Be."},
        user("Hi", "Yes", system="Be."),
    ),
    ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3"}, user("Add.\n\n1 2", "3")),
    ("alpaca", {"instruction": "Add.", "input": "", "output": "3", "system": "S"}, user("Add.", "3", system="S")),
    ("prompt-completion", {"prompt": "1 + 1 =", "completion": " 2"}, "1 + 1 =[ 2<|im_end|>]"),
    ("question-answer", {"question": "Who?", "answer": "Me"}, user("Who?", "Me")),
    ("instruction-response", {"instruction": "Go", "response": "Ok", "context": "now"}, user("Go\n\nnow", "Ok")),
    ("segments", {"segments": [{"text": "in ", "label": False}, {"text": "out", "label": True}]}, "in [out]"),
    ("text", {"text": "all of it"}, "[all of it<|im_end|>]"),
]


@pytest.mark.parametrize(("name", "row", "text"), ROWS)
def test_a_format_is_recognised_by_its_keys(folder: Path, name: str, row: dict[str, Any], text: str) -> None:
    assert marked(row, folder) == text
    assert marked(row, folder, format=name) == text  # and by its name
    codec = load_tokenizer(str(folder), documents=None, cache=Path())
    assert Encoder(DataSettings(path="x"), codec).meaning(row).format == name


def test_earlier_turns_of_alpaca_rows(folder: Path, plain: Path) -> None:
    row = {"instruction": "And 2?", "output": "4", "history": [["1?", "2"]]}
    assert marked(row, folder) == user("1?", "2") + user("And 2?", "4")
    wanted = "### Instruction:\n1?\n\n### Response:\n2\n\n### Instruction:\nAnd 2?\n\n### Response:\n[4<|im_end|>]"
    assert marked(row, plain) == wanted


def test_without_a_chat_template_questions_are_written_out(plain: Path, folder: Path) -> None:
    alpaca = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert marked(alpaca, plain) == "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n[3<|im_end|>]"
    assert marked(alpaca, folder, as_chat=False) == marked(alpaca, plain)
    assert marked({"question": "Who?", "answer": "Me"}, plain) == "Question: Who?\nAnswer:[ Me<|im_end|>]"


def test_tools_and_tool_calls_go_through_the_template(folder: Path) -> None:
    messages = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
    ]
    text = marked({"messages": messages, "tools": [WEATHER]}, folder)
    assert '[{"type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}<|im_end|>\n]' in text
    assert text.startswith('<|im_start|>system\n[{"type": "function"')  # the brackets of JSON, not of learning
    assert text == marked({"messages": messages, "tools": json.dumps([WEATHER])}, folder)
    turns = [
        {"from": "human", "value": "Rome?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"place": "Rome"}}'},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "Sunny."},
    ]
    assert text == marked({"conversations": turns, "tools": [WEATHER]}, folder)


def test_tokens_are_taken_as_they_are(folder: Path) -> None:
    codec = load_tokenizer(str(folder), documents=None, cache=Path())
    encoder = Encoder(DataSettings(path="x"), codec)
    row = {"input_ids": [5, 6, 7, 8, 0], "labels": [-100, -100, 7, 8, -100], "attention_mask": [1, 1, 1, 1, 0]}
    ((ids, trained),) = encoder.encode([encoder.draft(row)])
    assert (ids.tolist(), trained.tolist()) == ([5, 6, 7, 8], [False, False, True, True])


def test_a_template_of_the_configuration_reads_any_row(folder: Path) -> None:
    template = "{{ passage }}\nQ: {{ ask }}\nA:"
    row = {"passage": "P", "ask": "Q1", "reply": " R", "id": 3}
    options = {"template": template, "completion_field": "reply"}
    assert marked(row, folder, **options) == "P\nQ: Q1\nA:[ R<|im_end|>]"
    with pytest.raises(ValueError, match=r"no field 'ask' \(keys: passage, reply\)"):
        marked({"passage": "P", "reply": "R"}, folder, **options)
    with pytest.raises(UsageError, match="names no field"):
        marked(row, folder, template="x", completion_field="reply")
    with pytest.raises(UsageError, match=r"data\.template is not valid Jinja"):
        marked(row, folder, template="{% for %}", completion_field="reply")
    with pytest.raises(ValueError, match=r"data\.template fails on it"):
        marked(row, folder, template="{{ ask.__class__.__mro__ }}", completion_field="reply")


BROKEN: list[tuple[Any, str]] = [
    (
        {"id": 1, "body": "x"},
        r"no known format \(keys: body, id\); set data.prompt_field and data.completion_field, or",
    ),
    (
        {"question": "x"},
        r"no 'answer' beside 'question' \(keys: question\); name the answer with data.completion_field",
    ),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "from 'alien' is not one of human"),
    ({"conversations": "x"}, "'conversations' is not a list of objects"),
    ({"instruction": "x", "output": " "}, "an empty answer"),
    ({"instruction": "x", "output": 3}, "'output' is not a text"),
    ({"instruction": "x", "output": "y", "history": ["z"]}, "'history' is not a list of pairs"),
    ({"segments": [{"text": "x", "label": "yes"}]}, "a segment has no 'text' and true or false as 'label'"),
    ({"input_ids": [1, 2], "labels": [1]}, "different lengths"),
    ({"input_ids": [1, 2], "labels": [2, 2]}, "neither -100 nor that of the token"),
    ({"input_ids": [1, -2]}, "not a token"),
    ({"input_ids": "1 2"}, "not lists of whole numbers"),
    ({"text": ""}, "an empty text"),
    ({"prompt": 1, "completion": "x"}, "neither two texts nor two lists"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a content part of type 'image_url'"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"x": 1}]}]}, "no function with a name"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": "{"}, "'tools' is not JSON"),
    ({"prompt": "x", "chosen": "y", "rejected": "z"}, "train on them with recipe: dpo"),
]


@pytest.mark.parametrize(("row", "words"), BROKEN)
def test_a_broken_row_is_told_with_its_keys_and_the_way_out(folder: Path, row: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        marked(row, folder)


def test_a_format_that_is_named_needs_its_keys(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no 'instruction' and no 'output' for data.format alpaca \(keys: text\)"):
        marked({"text": "x"}, folder, format="alpaca")


def test_a_template_that_leaves_tool_calls_out_is_noticed(tmp_path: Path) -> None:
    plain = tokenizer_folder(tmp_path)
    row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}]}
    with pytest.raises(ValueError, match="leaves tool calls out"):
        marked(row, plain)
    row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "tools": [WEATHER]}
    with pytest.raises(ValueError, match="leaves tools out"):
        marked(row, plain)


# -- files ---------------------------------------------------------------------------------------------------

QA = [{"question": f"What is {i}?", "answer": f"number {i}"} for i in range(40)]


def written(tmp_path: Path, kind: str) -> Path:
    import pyarrow as pa
    import pyarrow.parquet

    path = tmp_path / f"rows.{kind}"
    lines = "\n".join(json.dumps(row) for row in QA)
    match kind:
        case "jsonl" | "ndjson":
            path.write_text(lines)
        case "json":
            path.write_text(json.dumps(QA, indent=1))
        case "json.gz":
            path.write_bytes(gzip.compress(json.dumps(QA).encode()))
        case "csv" | "tsv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["question", "answer"], delimiter="," if kind == "csv" else "\t")
                writer.writeheader()
                writer.writerows(QA)
        case "parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist(QA), path)
        case "arrow":
            table = pa.Table.from_pylist(QA)
            with pa.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "json.gz", "csv", "tsv", "parquet", "arrow"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    tally = Tally(on_bad_row="stop", max_bad_share=0)
    assert [row for _, row in read_rows(SourceSettings(path=str(path)), tally=tally)] == QA


def test_an_arrow_file_and_a_saved_dataset(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa

    table = pa.Table.from_pylist(QA)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    tally = Tally(on_bad_row="stop", max_bad_share=0)
    assert [row for _, row in read_rows(SourceSettings(path=str(tmp_path / "a.arrow")), tally=tally)] == QA
    datasets.Dataset.from_list(QA).save_to_disk(str(tmp_path / "saved"))
    assert [row for _, row in read_rows(SourceSettings(path=str(tmp_path / "saved")), tally=tally)] == QA


def rows_of(text: str | bytes, path: Path) -> tuple[list[Any], Tally]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    tally = Tally(on_bad_row="skip", max_bad_share=1)
    return [row for _, row in read_rows(SourceSettings(path=str(path)), tally=tally)], tally


def test_broken_tables_are_told_with_their_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.json:2: invalid JSON"):
        rows_of('[{"a": 1}, {"a": oops}]', tmp_path / "a.json")
    with pytest.raises(UsageError, match="the array has no end"):
        rows_of('[{"a": 1}', tmp_path / "a.json")
    with pytest.raises(UsageError, match="one object with the lists data; write its rows as a JSON array"):
        rows_of('{\n "data": [1, 2]\n}', tmp_path / "a.json")
    assert rows_of('{"a": 1}\n{"a": 2}\n', tmp_path / "a.json")[0] == [{"a": 1}, {"a": 2}]
    assert rows_of("[]", tmp_path / "a.json")[0] == []
    assert rows_of("[1, 23]", tmp_path / "a.json")[0] == [1, 23]
    found, tally = rows_of('a,b\n1,2\n3\n"x\ny",5\n', tmp_path / "a.csv")
    assert found == [{"a": "1", "b": "2"}, {"a": "x\ny", "b": "5"}]
    assert tally.examples == {"columns that do not match the first line": [f"{tmp_path}/a.csv:3"]}
    with pytest.raises(UsageError, match="two columns called 'a'"):
        rows_of("a,a\n1,2\n", tmp_path / "a.csv")
    with pytest.raises(UsageError, match="not valid CSV"):
        rows_of('a,b\n"1,2\n', tmp_path / "a.csv")
    with pytest.raises(UsageError, match="is damaged"):
        rows_of(b"nonsense", tmp_path / "a.arrow")
    with pytest.raises(UsageError, match="none of the suffixes"):
        rows_of("x", tmp_path / "a.doc")


def test_a_large_array_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    rows = [{"text": "é" * (3 << 20)}, *({"text": str(i), "n": i} for i in range(5_000))]
    assert rows_of(json.dumps(rows, ensure_ascii=False), tmp_path / "a.json")[0] == rows


def test_a_folder_with_files_for_its_splits(tmp_path: Path) -> None:
    for name in ("train-00.jsonl", "train-01.jsonl", "test.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    names = {split: [f.name for f in files_of(SourceSettings(path=str(tmp_path), split=split))]
             for split in ("train", "test", "dev")}  # fmt: skip
    assert names == {
        "train": ["train-00.jsonl", "train-01.jsonl"], "test": ["test.jsonl"], "dev": ["validation.jsonl"]
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"no file of split 'odd', only test\.jsonl"):
        files_of(SourceSettings(path=str(tmp_path), split="odd"))
    (tmp_path / "other").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "other" / name).write_text("{}\n")
    assert len(files_of(SourceSettings(path=str(tmp_path / "other")))) == 2


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ("train", range(40)), ("train[:5]", range(5)), ("train[10:12]", range(10, 12)), ("train[-3:]", range(37, 40)),
        ("train[:10%]", range(4)), ("train[90%:]", range(36, 40)), ("train[25%:50%]", range(10, 20)),
        ("train[:-38]", range(2)),
    ],
)  # fmt: skip
def test_slices_of_rows_and_per_cent(tmp_path: Path, split: str, wanted: range) -> None:
    assert slices.problem(split) is None
    source = SourceSettings(path=str(written(tmp_path, "jsonl")), split=split)
    tally = Tally(on_bad_row="stop", max_bad_share=0)
    assert [row for _, row in read_rows(source, tally=tally)] == [QA[i] for i in wanted]
    capped = [row for _, row in read_rows(replace(source, size=2), tally=tally)]
    assert capped == [QA[i] for i in wanted][:2]


# -- mixtures ------------------------------------------------------------------------------------------------


def opened(tmp_path: Path, folder: Path, **data: Any) -> Conversations:
    settings = DataSettings(sequence_length=64, cache=str(tmp_path / "cache"), **data)
    with open_conversations(settings, seed=0, tokenizer=str(folder)) as found:
        return found


def test_fields_that_are_not_used_are_told(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"instruction": f"Do {i}", "input": "this" if i % 2 else "", "output": "ok", "id": i} for i in range(20)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    talks = opened(tmp_path, folder, path=str(path))
    assert talks.facts.formats == ({"alpaca": 20},)
    assert talks.summary() == f"fields of {path} that are not used: 'id' in 20 rows"
    # The mapping names two of the three: the third is not lost in silence.
    mapped = opened(tmp_path, folder, path=str(path), prompt_field="instruction", completion_field="output")
    assert "'input' in 10 rows" in mapped.summary()
    assert mapped.describe()["left_out"] == mapped.summary()


def test_several_sources_and_a_validation_set_by_path_split_or_share(tmp_path: Path, folder: Path) -> None:
    first, second = written(tmp_path, "jsonl"), written(tmp_path, "csv")
    third = write_rows(tmp_path / "talks.jsonl", count=30)
    sources = (
        SourceSettings(path=str(first), split="train[:50%]", task="qa"),
        SourceSettings(path=str(second), size=7),
        SourceSettings(path=str(third)),
    )
    talks = opened(tmp_path, folder, sources=sources)
    assert talks.facts.formats == ({"question-answer": 20}, {"question-answer": 7}, {"messages": 30})
    assert talks.facts.counts == {"train": (19, 6, 29), "valid": (1, 1, 1)}
    assert talks.source.startswith("qa (question-answer), ")
    by_path = opened(tmp_path, folder, sources=sources, valid_path=str(third), valid_split="train[:5]")
    assert (len(by_path.train), len(by_path.valid)) == (57, 5)
    by_split = opened(tmp_path, folder, path=str(first), split="train[:80%]", valid_split="train[80%:]")
    assert (len(by_split.train), len(by_split.valid)) == (32, 8)
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set" / "train.jsonl", count=12)
    by_name = opened(tmp_path, folder, path=str(first), valid_name=str(tmp_path / "set"))
    assert (len(by_name.train), len(by_name.valid)) == (40, 12)
    of_hub = opened(tmp_path, folder, name=str(tmp_path / "set"), split="train[2:6]")
    assert len(of_hub.train) + len(of_hub.valid) == 4


def examples_of(counts: tuple[int, ...]) -> Examples:
    """Examples whose first token is the number of their source."""
    generator = np.random.default_rng(0)
    rows = []
    for source, count in enumerate(counts):
        for number in range(count):
            ids = np.concatenate([[source, number], generator.integers(10, 60, int(generator.integers(4, 20)))])
            rows.append((ids, np.arange(len(ids)) > 1))
    return Examples.of(rows)


@pytest.mark.parametrize("weights", [(1, 1, 1), (0.7, 0.2, 0.1), (1, 3, 6)])
def test_a_mixture_has_the_shares_asked_for(weights: tuple[float, ...]) -> None:
    counts = (3000, 200, 800)
    examples = examples_of(counts)
    mixed = Mixed(
        examples, counts=counts, weights=weights, sequence_length=256, batch_sequences=8, seed=1, shuffle=True
    )
    sources = np.repeat(np.arange(3), counts)
    for epoch in range(3):
        found = np.bincount(sources[mixed.chosen(epoch)], minlength=3) / len(mixed.chosen(epoch))
        assert np.abs(found - np.array(weights) / sum(weights)).max() < 0.01
    # A source that gives only a part of itself gives another part in the next epoch.
    seen = [set(mixed.chosen(epoch)[sources[mixed.chosen(epoch)] == 0].tolist()) for epoch in range(3)]
    if len(seen[0]) < 1500:
        assert seen[0].isdisjoint(seen[1])
    # A source that is repeated is repeated evenly.
    times = np.bincount(mixed.chosen(0), minlength=4000)[3000:3200]
    assert times.max() - times.min() <= 1
    # And the batches of the steps hold what was chosen.
    starts = [
        int(batch.tokens[at])
        for step in range(20)
        for batch in mixed.micro_batches(step, micro_batch=4)
        for at in batch.cu_seqlens.tolist()[:-1]  # type: ignore[union-attr]
        if at < len(batch.tokens) and int(batch.targets[at : at + 8].max()) >= 0
    ]
    found = np.bincount(starts, minlength=3)[:3] / len(starts)
    assert np.abs(found - np.array(weights) / sum(weights)).max() < 0.05  # a few steps only


def test_a_mixture_is_the_same_from_any_step_on_and_over_the_end_of_an_epoch() -> None:
    counts = (60, 10)
    examples = examples_of(counts)

    def made() -> Mixed:
        return Mixed(
            examples, counts=counts, weights=(1, 1), sequence_length=64, batch_sequences=4, seed=3, shuffle=True
        )

    one = made()
    last = int(3 * one.steps_per_epoch) + 2
    whole = [one.micro_batches(step, micro_batch=4)[0] for step in range(last)]
    for step in reversed(range(last)):  # as a run that begins there
        halves = [b for rank in (0, 1) for b in made().micro_batches(step, rank=rank, world=2, micro_batch=2)]
        for name in ("tokens", "targets", "positions"):
            joined = np.concatenate([getattr(b, name).numpy() for b in halves])
            assert (joined == getattr(whole[step], name).numpy()).all()
    first = one.first.num_sequences
    seen = sorted(e for i in range(first) for e in one.members(i))
    assert seen == sorted(one.chosen(0).tolist())


def test_shares_add_up() -> None:
    assert shares([1, 1, 1], total=100) == (34, 33, 33)
    assert shares([1000, 1], total=10) == (10, 1)  # never none


# -- the command ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "row", "text"), ROWS)
def test_data_show_on_every_format(
    folder: Path, tmp_path: Path, flatout: Command, name: str, row: dict[str, Any], text: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    config = {
        "recipe": "sft",
        "model": {"layers": 1, "hidden": 32, "heads": 2},
        "data": {"path": "rows.jsonl", "tokenizer": str(folder), "sequence_length": 128, "cache": "cache"},
        "train": {"steps": 1, "batch_tokens": 128},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    found = json.loads(flatout("data", "show", "c.yaml", "-n", "1", "--json").out)
    (source,), (example,) = found["sources"], found["examples"]
    assert source["formats"] == {name: 4}
    assert "".join(f"[{said}]" if learnt else said for said, learnt in example["pieces"]) == text
    assert found["left_out"] == ""


def test_data_show_prints_examples_lengths_fill_and_what_was_dropped(
    folder: Path, tmp_path: Path, flatout: Command
) -> None:
    write_rows(tmp_path / "a.jsonl", count=120)
    (tmp_path / "b.csv").write_text("question,answer,id\nWho?,Me,1\nWhere?,Here,2\nWhy?,,3\n")
    config = {
        "recipe": "sft",
        "model": {"layers": 1, "hidden": 32, "heads": 2},
        "data": {
            "sources": [{"path": "a.jsonl", "weight": 3, "task": "units"}, {"path": "b.csv", "weight": 1}],
            "tokenizer": str(folder), "sequence_length": 64, "cache": "cache",
        },
        "train": {"steps": 1, "batch_tokens": 128},
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    done = flatout("data", "show", "c.yaml", "-n", "1")
    assert done.code == 0, done.err
    assert "units, example 1: " in done.out
    assert "  > " in done.out
    assert "  | <|im_start|>user" in done.out
    assert "units: 120 messages; 119 to train on (75.0% of an epoch), 1 held out" in done.out
    assert "packed into " in done.out
    assert "left out: 1 row: an empty answer (first: b.csv:4)" in done.out
    assert "fields of b.csv that are not used: 'id' in 2 rows" in done.out
    config["recipe"] = "pretrain"
    config["data"] = {"sequence_length": 64}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(config))
    refused = flatout("data", "show", "p.yaml")
    assert refused.code == 2
    assert "recipe pretrain learns from running text" in refused.err
