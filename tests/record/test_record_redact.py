import pytest

from flatout.record import redact, redacted

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
