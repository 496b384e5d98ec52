from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout import gallery
from flatout.config import dump, keys, load, show
from flatout.record import redact, redact_command, redacted

SECRET = "sentinel"


@pytest.mark.parametrize(
    "text",
    [
        f"wandb_key: {SECRET}",
        f"  api-key: {SECRET} with, spaces {SECRET}",
        f"password = '{SECRET} {SECRET}'",
        f'{{"token": "{SECRET}\\"{SECRET}", "a": 1}}',
        f"{{'AWS_SECRET_ACCESS_KEY': '{SECRET}'}}",
        f"HF_TOKEN={SECRET} python train.py",
        f"train.py --hub-token {SECRET} --steps 3",
        f"--api_key={SECRET}",
        f"https://{SECRET}:{SECRET}@host/path",
        f"git clone https://{SECRET}@host/x.git",
        f"postgresql+psycopg://u:{SECRET}@@{SECRET}@db/x",
        f"GET /x?user=1&access_token={SECRET}&b=2",
        f"Authorization: Bearer {SECRET}{SECRET}",
        f"hf_{SECRET}{SECRET}{SECRET}",
        f"key is sk-proj-{SECRET}{SECRET}.",
        f"ghp_{SECRET}{SECRET}0123",
        f"eyJhbGciOiJI.{SECRET}.{SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_secrets_are_masked(text: str):
    masked = redact(text)
    assert SECRET not in masked
    assert "***" in masked
    assert redact(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "tokenizer: bpe:4096\nbatch_tokens: 65536\ntokens: 1e9",
        "pad_token: <pad>\neos_token: '<|endoftext|>'\nflops_per_token: 6",
        "commit: 0123456789abcdef0123456789abcdef01234567",
        "path: https://host/data@v1/file.jsonl",
        "mail me@host, see s3://bucket/key",
        "wandb_key: null",
        "keys: [a, b]",
    ],
)
def test_the_rest_stays(text: str):
    assert redact(text) == text


def test_what_follows_a_secret_stays():
    assert redact("a?token=abcdefgh&b=2") == "a?token=***&b=2"
    assert redact("api_key: abc\nsteps: 3\n") == "api_key: ***\nsteps: 3\n"
    assert redact('{"api_key": "abc", "steps": 3}') == '{"api_key": ***, "steps": 3}'


def test_data_is_masked_by_name_and_by_content():
    data = {
        "api_key": SECRET,
        "list": [{"url": f"http://u:{SECRET}@h"}],
        "eos_token": "<s>",
        "tokens": 5,
        "token": None,
    }
    assert redacted(data) == {
        "api_key": "***",
        "list": [{"url": "http://***@h"}],
        "eos_token": "<s>",
        "tokens": 5,
        "token": None,
    }


def test_values_of_secret_variables_are_masked_anywhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", f"{SECRET}-in-env")
    monkeypatch.setenv("SHORT_TOKEN", "the")
    assert redact(f"failed with {SECRET}-in-env, the end") == "failed with ***, the end"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--auth", SECRET],
        ["--hf-auth", SECRET],
        ["--key", SECRET],
        ["--key", f"-{SECRET}"],
        ["--pass", SECRET],
        ["--db-pass", SECRET],
        ["--pwd", SECRET],
        ["--api-key", f"{SECRET} with spaces {SECRET}"],
        ["--pass", f'it\'s "{SECRET}" in quotes'],
        [f"--apikey={SECRET}"],
        [f"--auth={SECRET}"],
        [f"+login.auth={SECRET}"],
        ["-token", SECRET],
        ["-p", SECRET],
        ["-H", f"Authorization: {SECRET}"],
        ["-H", f"Authorization: Bearer {SECRET}{SECRET}"],
        ["-H", f"Authorization: Token {SECRET} {SECRET}"],
        ["-H", f"X-Api-Key: {SECRET}"],
        [f"--header=Authorization: Basic {SECRET}"],
        ["--header", f"Cookie: session={SECRET}; other={SECRET}"],
        [f"https://host/x?a=1&token={SECRET}"],
        [f"https://host/x?api_key={SECRET}&b=2"],
        [f"https://host/x?sv=1&sig={SECRET}#top"],
        [f"https://host/x?X-Amz-Signature={SECRET}&key={SECRET}"],
    ],
)
@pytest.mark.parametrize("program", [["python", "train.py"], ["torchrun", "-m", "pkg.train"], ["./train"]])
def test_secrets_in_a_command_line_are_masked(program: list[str], arguments: list[str]):
    shown = redact_command([*program, *arguments, "--lr", "3e-4"])
    assert not [argument for argument in shown if SECRET in argument], shown
    assert shown[: len(program)] == program
    assert shown[-2:] == ["--lr", "3e-4"]


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --pad_token <pad> --pad-token <pad> --eos_token=</s> --max_tokens 5 --tokenizer gpt2",
        "python train.py --flops_per_token 6 --batch-tokens 65536 --text-key text --num-key-value-heads 8 --passes 3",
        "python train.py --token --verbose --use-auth --lr 3e-4 model.path=/data/key",
        "srun -p gpu python -u train.py --precision bf16",
        "python -p train.py",
        "flatout eval runs/one --tasks jsonl:q.jsonl?question=problem&answer=solution&grader=math",
    ],
)
def test_the_vocabulary_of_the_trade_stays_in_a_command_line(command: str):
    assert redact_command(command.split()) == command.split()


def test_a_secret_of_a_command_line_is_masked_wherever_it_comes_up_again():
    redact_command(["train.py", "--auth", f"{SECRET}-once-more"])
    assert redact(f"KeyError: {SECRET}-once-more") == "KeyError: ***"


@given(
    st.sampled_from(keys()),
    st.one_of(st.integers(), st.floats(allow_nan=False), st.sampled_from(["bf16", "a/b.jsonl"])),
)
def test_no_setting_of_ours_is_taken_for_a_secret(key: str, value: object):
    text = f"{key}: {value}\n--{key} {value}\n{key}={value}\n"
    assert redact(text) == text
    assert redacted({key: str(value)}) == {key: str(value)}


@pytest.mark.parametrize("example", [example.name for example in gallery.examples()])
def test_every_value_of_an_example_is_shown(example: str, tmp_path: Path):
    path = tmp_path / "example.yaml"
    path.write_text(gallery.find(example).text)
    loaded = load(path, environ={})
    assert redact(dump(loaded.settings)) == dump(loaded.settings)
    assert redact(path.read_text()) == path.read_text()
    values = {row.key: row.value for row in show(loaded)}
    assert redacted(values) == values
