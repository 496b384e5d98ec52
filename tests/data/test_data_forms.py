"""Models without a chat template keep the plain-text form that they were trained on, as a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.data.talks import tokenizer_folder

from flatout.config.settings import DataSettings
from flatout.data.examples import Encoder, open_conversations
from flatout.data.tokenizer import Tokenizer, load_tokenizer
from flatout.errors import UsageError
from flatout.sample import answer_space, prompt_ids, stop_texts

QUESTION = {"question": "Two & <two>?", "answer": "4"}
INSTRUCTION = {"instruction": "Add two and two.", "output": "4"}
PAIR = {"prompt": "Context.\n\nQuestion: Two & <two>?\nAnswer:", "completion": " 4"}
ASKED = {"role": "user", "content": "Two & <two>?"}
OTHER = {"prompt": "Two and two make", "completion": " 4"}


def bare_folder(folder: Path, *, begin: bool = False) -> Path:
    """A tokenizer without a template, and perhaps one that begins every text with a token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    tokenizer_folder(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    if begin:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        first = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
        backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[first])
        backend.save(str(folder / "tokenizer.json"))
    return folder


def trained(tmp_path: Path, tokenizer: str, rows: list[Any]) -> Tokenizer:
    """The tokenizer that is saved with a model that was trained on the rows."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(path=str(tmp_path / "rows.jsonl"), source="jsonl", cache=str(tmp_path / "cache"))
    with open_conversations(data, seed=0, tokenizer=tokenizer) as found:
        found.tokenizer.save(tmp_path / "saved")
    return load_tokenizer(str(tmp_path / "saved"), documents=None, cache=tmp_path)


@pytest.mark.parametrize("kind", ["byte", "bpe", "bpe with a first token"])
@pytest.mark.parametrize(
    ("row", "asked"),
    [
        (QUESTION, [ASKED]),
        (QUESTION | {"system": "Be right."}, [{"role": "system", "content": "Be right."}, ASKED]),
        (INSTRUCTION, [{"role": "user", "content": "Add two and two."}]),
        (PAIR, [{"role": "system", "content": "Context."}, ASKED]),
    ],
)
def test_the_template_asks_as_the_rows_did(tmp_path: Path, kind: str, row: Any, asked: list[Any]) -> None:
    spec = kind if kind == "byte" else str(bare_folder(tmp_path / "bare", begin="first" in kind))
    plain = load_tokenizer(spec, documents=None, cache=tmp_path)
    encoder = Encoder(DataSettings(source="jsonl", path="x"), plain)
    [(ids, learnt)] = encoder.encode([encoder.draft(row)])
    kept = trained(tmp_path, spec, [row] * 4)
    prompt = prompt_ids(kept, asked)
    assert prompt == [i for i, trained in zip(ids.tolist(), learnt, strict=True) if not trained]
    # A conversation is trained on as the row was, and the answer begins as it did.
    chat = Encoder(DataSettings(source="jsonl", path="x"), kept)
    [(again, learnt_again)] = chat.encode([chat.draft({"messages": [*asked, {"role": "assistant", "content": "4"}]})])
    assert (again.tolist(), learnt_again.tolist()) == (ids.tolist(), learnt.tolist())
    assert kept.decode(ids[learnt].tolist()).startswith(f"{answer_space(kept)}4")
    assert stop_texts(kept)


def test_transformers_reads_the_saved_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kept = trained(tmp_path, str(bare_folder(tmp_path / "bare")), [QUESTION] * 4)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == kept.render(messages, add_generation_prompt=True)
    assert text == "Question: One?\nAnswer: 1<|im_end|>\n\nQuestion: Two?\nAnswer:"


@pytest.mark.parametrize(
    "rows", [[OTHER] * 4, [OTHER, OTHER, QUESTION, INSTRUCTION], [{"text": "Question: one\nAnswer:"}] * 4]
)
def test_rows_of_no_form_leave_the_tokenizer_as_it_is(tmp_path: Path, rows: list[Any]) -> None:
    assert not trained(tmp_path, "byte", rows).has_template


def test_a_template_of_its_own_stays(tmp_path: Path) -> None:
    spec = str(tokenizer_folder(tmp_path / "own"))
    before = load_tokenizer(spec, documents=None, cache=tmp_path)
    assert trained(tmp_path, spec, [PAIR] * 4).files_fingerprint == before.files_fingerprint


def test_the_byte_tokenizer_reads_the_template_beside_it(tmp_path: Path) -> None:
    byte = load_tokenizer("byte", documents=None, cache=tmp_path)
    with pytest.raises(UsageError, match=r"byte has no chat template.*name a folder with its tokenizer.json and a"):
        byte.render([], add_generation_prompt=False)
    byte.save(tmp_path / "byte")
    (tmp_path / "byte" / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    kept = load_tokenizer(str(tmp_path / "byte"), documents=None, cache=tmp_path)
    assert (kept.fingerprint, kept.vocab_size, kept.eos_id) == (byte.fingerprint, byte.vocab_size, byte.eos_id)
    messages = [{"role": "user", "content": "Zoë"}, {"role": "assistant", "content": "“3”"}]
    assert kept.render_ids(messages, add_generation_prompt=False) == list("[Zoë][“3”]".encode())
    encoder = Encoder(DataSettings(source="jsonl", path="x"), kept)
    [(ids, learnt)] = encoder.encode([encoder.draft({"messages": messages})])
    assert ids.tolist() == list("[Zoë][“3”]".encode())
    assert bytes(ids[learnt].tolist()).decode() == "[“3”]"
