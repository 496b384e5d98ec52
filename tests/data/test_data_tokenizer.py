from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout import hub
from flatout.data.embedded import documents
from flatout.data.tokenizer import ByteTokenizer, Tokenizer, encode_arrays, load_tokenizer
from flatout.errors import UsageError

CORPUS = list(documents(1, 0.2))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer("bpe:600", documents=lambda: CORPUS, cache=tmp_path_factory.mktemp("bpe"))


@given(TEXTS)
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    [ids] = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert encode_arrays(tokenizer, [text])[0].tolist() == ids


@settings(max_examples=200)
@given(text=TEXTS)
def test_bpe_comes_back(bpe: Tokenizer, text: str) -> None:
    [ids] = bpe.encode_batch([text])
    assert bpe.decode(ids) == text
    assert bpe.eos_id not in ids
    assert encode_arrays(bpe, [text])[0].tolist() == ids


def test_bpe_compresses_and_has_the_size_asked_for(bpe: Tokenizer) -> None:
    assert bpe.vocab_size == 600
    assert len(bpe.encode_batch([CORPUS[0]])[0]) < 0.6 * len(CORPUS[0])


def test_bpe_training_is_deterministic(bpe: Tokenizer, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flatout.data.embedded import documents\n"
        "from flatout.data.tokenizer import load_tokenizer\n"
        "made = load_tokenizer('bpe:600', documents=lambda: documents(1, 0.2), cache=Path(sys.argv[1]))\n"
        "print(made.fingerprint)"
    )
    other = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == bpe.fingerprint


def test_text_never_becomes_a_control_token(bpe: Tokenizer) -> None:
    text = "before <|endoftext|> after"
    for tokenizer in (ByteTokenizer(), bpe):
        [ids] = tokenizer.encode_batch([text])
        assert tokenizer.eos_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([tokenizer.eos_id]) == "<|endoftext|>"


def test_saved_tokenizers_load_back_the_same(bpe: Tokenizer, tmp_path: Path) -> None:
    for tokenizer in (ByteTokenizer(), bpe):
        folder = tmp_path / tokenizer.name.replace(":", "-")
        tokenizer.save(folder)
        for spec in (folder, folder / "tokenizer.json"):
            back = load_tokenizer(str(spec), documents=None, cache=tmp_path)
            assert (back.fingerprint, back.eos_id, back.vocab_size) == (
                tokenizer.fingerprint,
                tokenizer.eos_id,
                tokenizer.vocab_size,
            )
            assert back.encode_batch(CORPUS[:5]) == tokenizer.encode_batch(CORPUS[:5])


def test_the_byte_tokenizer_is_a_valid_tokenizer_json(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    ByteTokenizer().save(tmp_path)
    foreign = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Grüße, 世界 \x00\n\t end"
    assert foreign.encode(text).ids == ByteTokenizer().encode_batch([text])[0]
    assert foreign.decode(foreign.encode(text).ids) == text
    assert foreign.token_to_id("<|endoftext|>") == 256


def test_ids_beyond_the_vocabulary_do_not_break_decoding(bpe: Tokenizer) -> None:
    assert ByteTokenizer().decode([104, 300, 105]) == "hi"
    assert bpe.decode([*bpe.encode_batch(["hi"])[0], 639]) == "hi"


def test_eos_is_found_where_it_is_said(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "!"}}))
    [[bang]] = bpe.encode_batch(["!"])
    assert load_tokenizer(str(tmp_path), documents=None, cache=tmp_path).eos_id == bang
    config.unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_tokenizer(str(tmp_path), documents=None, cache=tmp_path).eos_id == 7
    (tmp_path / "config.json").unlink()
    assert load_tokenizer(str(tmp_path), documents=None, cache=tmp_path).eos_id == bpe.eos_id


def test_another_eos_is_another_fingerprint(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    assert load_tokenizer(str(tmp_path), documents=None, cache=tmp_path).fingerprint != bpe.fingerprint


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("bpe:many", "SIZE must be a number from 257"),
        ("bpe:256", "SIZE must be a number from 257"),
        ("./nowhere", "does not exist"),
        ("/nowhere/tokenizer.json", "does not exist"),
        ("a/b/c", "does not exist"),
        ("~/nowhere", "does not exist"),
        ("models/tokenizer.model", "does not exist"),
        ("bytes", "is not byte, bpe:SIZE"),
        ("bpe:300", "needs text to train on"),
    ],
)
def test_a_wrong_name_is_explained(spec: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "folder", lambda name, *, weights: pytest.fail(f"{name} went to the hub"))
    with pytest.raises(UsageError, match=says):
        load_tokenizer(spec, documents=None, cache=tmp_path / "cache")


def test_damaged_files_are_explained(bpe: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path), documents=None, cache=tmp_path)
    for content in ("{", "[" * 100_000, '{"version": "1.0"}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UsageError, match="cannot be read"):
            load_tokenizer(str(tmp_path), documents=None, cache=tmp_path)
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nobody>"}))
    with pytest.raises(UsageError, match="has no id"):
        load_tokenizer(str(tmp_path), documents=None, cache=tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["added_tokens"][0]["content"] = "<end>"
    raw["model"]["vocab"] = {("<end>" if k == "<|endoftext|>" else k): v for k, v in raw["model"]["vocab"].items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match="does not name its EOS token"):
        load_tokenizer(str(tmp_path), documents=None, cache=tmp_path)


@pytest.mark.parametrize("name", ["somebody/some-model", "Qwen/Qwen2.5-0.5B", "microsoft/phi-1.5", "a/b.v2-Chat"])
def test_names_on_the_hub_go_to_the_one_downloader(
    bpe: Tokenizer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def folder(name: str, *, weights: bool) -> Path:
        asked.append((name, weights))
        return tmp_path

    monkeypatch.setattr(hub, "folder", folder)
    bpe.save(tmp_path)
    assert load_tokenizer(name, documents=None, cache=tmp_path / "cache").fingerprint == bpe.fingerprint
    assert asked == [(name, False)]


def test_a_name_the_hub_refuses_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(name: str, *, weights: bool) -> Path:
        raise UsageError(f"the hub refused {name!r}")

    monkeypatch.setattr(hub, "folder", folder)
    with pytest.raises(UsageError, match=r"data\.tokenizer: the hub refused 'some/body'; check the name, or log in"):
        load_tokenizer("some/body", documents=None, cache=tmp_path)


def test_a_name_that_cannot_be_downloaded_is_what_the_environment_lacks(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from flatout.data.tokenizer import load_tokenizer\n"
        "from flatout.errors import EnvironmentLacks\n"
        "try: load_tokenizer('somebody/some-model', documents=None, cache=Path())\n"
        "except EnvironmentLacks as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("data.tokenizer: model 'somebody/some-model'")
    assert "give a folder" in done.stdout


def test_real_tokenizers_round_trip(real_data: Path, tmp_path: Path) -> None:
    for name, vocab_size, eos in (("tokenizer_gpt2", 50257, 50256), ("tokenizer_smollm2", 49152, 2)):
        tokenizer = load_tokenizer(str(real_data / name), documents=None, cache=tmp_path)
        assert (tokenizer.vocab_size, tokenizer.eos_id) == (vocab_size, eos)
        for text in (*CORPUS[:20], "naïve — “quoted” 世界 <|im_start|>"):
            assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text
        tokenizer.save(tmp_path / name)
        assert load_tokenizer(str(tmp_path / name), documents=None, cache=tmp_path).fingerprint == tokenizer.fingerprint
