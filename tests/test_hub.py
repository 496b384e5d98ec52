"""Model files: local folders as they are, and a hub that is really served, though by a small server of our own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from flatout import hub
from flatout.errors import EnvironmentLacks, UsageError

COMMIT = "0" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"print('code')",
    "training_args.pt": b"a pickle",
}


def _etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as one public repository, `owner/model`, needs."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0].replace("/bare/", "/owner/model/").replace("/models/bare", "/models/owner/model")
        name = path.removeprefix(f"/owner/model/resolve/{COMMIT}/")
        if path.startswith("/api/models/owner/model/tree/"):
            entries = [{"type": "file", "path": n, "size": len(b), "oid": _etag(b)} for n, b in FILES.items()]
            self.reply(json.dumps(entries).encode())
        elif path.startswith("/api/models/owner/model/revision/no-such-branch"):
            self.refuse("RevisionNotFound")
        elif path.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": name} for name in FILES]
            self.reply(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode())
        elif name in FILES:
            self.reply(FILES[name])
        else:
            self.refuse("RepoNotFound")

    do_HEAD = do_GET

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", _etag(body))
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, why: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", why)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(name: str, *, endpoint: str, home: Path, weights: bool = True, offline: bool = False, **more: object) -> str:
    """What `hub.folder` answers in a process that knows only this hub: a path, or the error's kind and message."""
    program = f"""
from flatout import hub
from flatout.errors import FlatoutError
try:
    print(hub.folder({name!r}, weights={weights}, **{more}))
except FlatoutError as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Folders here


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert hub.folder(str(tmp_path), weights=True) == tmp_path
    monkeypatch.chdir(tmp_path)
    # A folder here goes before a name on the hub.
    assert hub.folder("owner/model", weights=False) == Path("owner/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.folder("~/owner", weights=False) == tmp_path / "owner"


@pytest.mark.parametrize("name", ["./model", "/no/such/model", "~/model", "", "a/b/c"])
def test_what_is_neither_a_folder_nor_a_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="OWNER/NAME"):
        hub.folder(name, weights=False)


def test_a_name_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EnvironmentLacks, match=r"pip install 'flatout\[train\]'"):
        hub.folder("owner/model", weights=False)


# The hub


def test_nothing_that_could_run_is_fetched(tmp_path: Path, endpoint: str) -> None:
    small = Path(ask("owner/model", endpoint=endpoint, home=tmp_path, weights=False))
    assert {file.name for file in small.iterdir()} == {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert hub.read_json(small / "config.json") == {"model_type": "llama"}

    whole = Path(ask("owner/model", endpoint=endpoint, home=tmp_path))
    assert {file.name for file in whole.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    # What was fetched once is there without the hub.
    assert Path(ask("owner/model", endpoint="http://127.0.0.1:9", home=tmp_path, offline=True)) == whole


def test_a_revision_is_the_one_that_is_fetched(tmp_path: Path, endpoint: str) -> None:
    found = Path(ask("owner/model", endpoint=endpoint, home=tmp_path, revision=COMMIT))
    assert found.name == COMMIT
    answer = ask("owner/model", endpoint=endpoint, home=tmp_path, revision="no-such-branch")
    assert answer.startswith("UsageError: the hub refused 'owner/model' at 'no-such-branch': ")


def test_a_bare_name_is_one_of_the_hub(tmp_path: Path, endpoint: str) -> None:
    found = Path(ask("bare", endpoint=endpoint, home=tmp_path))
    assert hub.read_json(found / "config.json") == {"model_type": "llama"}


def test_code_is_fetched_only_of_a_pinned_commit(tmp_path: Path, endpoint: str) -> None:
    for pin in ("main", "true", COMMIT[:12], "f" * 64):
        answer = ask("owner/model", endpoint=endpoint, home=tmp_path, trust=pin)
        assert answer.startswith(f"UsageError: --trust-remote-code {pin!r} cannot pin 'owner/model'")
        assert "40 hexadecimal digits" in answer
    answer = ask("owner/model", endpoint=endpoint, home=tmp_path, trust=COMMIT, revision="main")
    assert "and model.revision 'main' are different commits" in answer
    found = Path(ask("owner/model", endpoint=endpoint, home=tmp_path, trust=COMMIT))
    assert found.name == COMMIT
    assert (found / "modeling.py").is_file()
    assert not (found / "pytorch_model.bin").exists()


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.revision 'main' works only with hub models"):
        hub.folder(str(tmp_path), weights=True, revision="main")
    assert hub.folder(str(tmp_path), weights=True, trust="0" * 64) == tmp_path


def test_a_name_the_hub_does_not_know_is_a_mistake(tmp_path: Path, endpoint: str) -> None:
    answer = ask("owner/nothing", endpoint=endpoint, home=tmp_path)
    assert answer.startswith("UsageError: the hub refused 'owner/nothing': ")
    assert "\n" not in answer
    assert ask("own er/model", endpoint=endpoint, home=tmp_path).startswith(
        "UsageError: the hub refused 'own er/model'"
    )


def test_an_unreachable_hub_is_not_the_users_mistake(tmp_path: Path) -> None:
    answer = ask("owner/model", endpoint="http://127.0.0.1:9", home=tmp_path)
    assert answer.startswith("EnvironmentLacks: model 'owner/model' is not a local folder, not in the local cache")
    assert "connect once, or give a folder" in answer


# JSON of somebody else's


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is missing"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[1, 2]", "holds a list where a JSON object is expected"),
        (b"null", "holds null where a JSON object is expected"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"layers": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        hub.read_json(file)
    assert str(file) in str(refused.value)
    assert says in str(refused.value)


def test_a_json_object_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"name": "Übung", "layers": 2}', encoding="utf-8")
    assert hub.read_json(file) == {"name": "Übung", "layers": 2}


def test_links_are_followed_only_within_a_folder_or_the_cache_of_the_hub(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"key": "canary"}')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").symlink_to(secret)
    with pytest.raises(UsageError, match="symbolic link that leaves"):
        hub.read_json(model / "config.json")

    cache = tmp_path / "hub"
    snapshot = cache / "models--owner--model" / "snapshots" / COMMIT
    for folder in (snapshot, snapshot.parents[1] / "blobs", cache / "blobs" / "ab"):
        folder.mkdir(parents=True)
    own, shared = snapshot.parents[1] / "blobs" / "0123", cache / "blobs" / "ab" / ("ab" * 32)
    own.write_text('{"where": "own"}')
    shared.write_text('{"where": "shared"}')
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    assert hub.read_json(snapshot / "config.json") == {"where": "own"}
    own.unlink()
    own.symlink_to(f"../../blobs/ab/{shared.name}")
    assert hub.read_json(snapshot / "config.json") == {"where": "shared"}
    own.unlink()
    own.symlink_to(secret)
    with pytest.raises(UsageError, match="symbolic link that leaves"):
        hub.read_json(snapshot / "config.json")
    # Blobs that are a link themselves are no cache of the hub.
    own.unlink()
    own.parent.rmdir()
    own.parent.symlink_to(tmp_path)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/secret.json")
    with pytest.raises(UsageError, match="symbolic link that leaves"):
        hub.read_json(snapshot / "tokenizer.json")


def test_code_is_pinned_by_its_own_hash_and_links_are_no_part_of_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "a.py").write_text("x = 1")
    (model / "sub" / "b.py").write_text("y = 1")
    first = hub.code_of(str(model), model)
    assert [*first.files] == ["a.py"]
    (model / "a.py").write_text("x = 2")
    changed = hub.code_of(str(model), model)
    (model / "a.py").rename(model / "c.py")
    renamed = hub.code_of(str(model), model)
    assert len({first.pin, changed.pin, renamed.pin}) == 3
    (tmp_path / "outside.py").write_text("z = 1")
    (model / "d.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(UsageError, match="symbolic link that leaves"):
        hub.code_of(str(model), model)


def test_published_shapes_have_their_published_sizes() -> None:
    from flatout.cost import ModelShape

    sizes = {name.split("/")[1]: ModelShape.from_hf(hub.config_of(name)).num_parameters for name in hub.PUBLISHED}
    assert {name: round(count / 1e6) for name, count in sizes.items()} == {
        "SmolLM2-135M-Instruct": 135,
        "SmolLM2-360M-Instruct": 362,
        "SmolLM2-1.7B-Instruct": 1711,
        "Qwen2.5-3B-Instruct": 3086,
        "Qwen2.5-7B-Instruct": 7616,
    }


def test_a_folder_is_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_package = pytest.importorskip("huggingface_hub")
    calls: list[tuple[str, dict[str, object]]] = []

    class Api:
        def create_repo(self, name: str, **options: object) -> None:
            calls.append((name, options))

        def upload_folder(self, **options: object) -> None:
            calls.append(("upload", options))

    monkeypatch.setattr(hub_package, "HfApi", Api)
    assert hub.push("me/mine", tmp_path, message="Step 8") == "https://huggingface.co/me/mine"
    assert calls[0] == ("me/mine", {"repo_type": "model", "private": True, "exist_ok": True})
    assert calls[1][1]["folder_path"] == str(tmp_path)
    hub.push("me/mine", tmp_path, public=True, message="Step 8")
    assert calls[2][1]["private"] is False
    with pytest.raises(UsageError, match="must be USER/NAME"):
        hub.push("mine", tmp_path, message="x")

    def down(self: object, name: str, **_: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(Api, "create_repo", down)
    with pytest.raises(EnvironmentLacks, match="cannot be reached: no route"):
        hub.push("me/mine", tmp_path, message="x")
