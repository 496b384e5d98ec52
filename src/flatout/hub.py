"""Finds a model's files: a local folder as it is, any other name on the Hugging Face hub.

Only JSON, text and safetensors are fetched; nothing pickled ever, and nothing executable unless the user trusts the
code of one commit. Paths in a model's files never lead out of their folder.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout import files
from flatout.errors import EnvironmentLacks, UsageError, first_line

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
# Size limit of config.json, adapter_config.json or an index of weights; the largest published one has about 10 MB.
JSON_BYTES = 32 << 20
# The Python files of one model, all together.
CODE_BYTES, CODE_FILES = 16 << 20, 256
TRUSTING = "--trust-remote-code"
_COMMIT, _SHARED = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


def push(name: str, folder: Path, *, public: bool = False, message: str) -> str:
    """Uploads a folder to the model `name`, USER/NAME, on the hub, which is made if it is not there; returns its URL.

    The user's own login is used: `hf auth login`, or HF_TOKEN.
    """
    check_name(name)
    if "/" not in name:
        raise UsageError(f"--push {name!r:.100} must be USER/NAME")
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    except ImportError:
        raise EnvironmentLacks("--push needs huggingface_hub: pip install 'flatout[train]'") from None
    api = HfApi()
    try:
        api.create_repo(name, repo_type="model", private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), repo_type="model", commit_message=message)
    except HFValidationError as error:
        raise UsageError(f"--push {name!r:.100}: {first_line(error)[:300]}") from None
    except HfHubHTTPError as error:
        words = first_line(error)[:300]
        raise EnvironmentLacks(f"the hub refused {name!r:.100}: {words}. Log in with `hf auth login`") from None
    except (OSError, OfflineModeIsEnabled) as error:
        raise EnvironmentLacks(f"the hub cannot be reached: {first_line(error)[:300]}") from None
    return f"https://huggingface.co/{name}"


def folder(name: str, *, weights: bool, revision: str | None = None, trust: str | None = None) -> Path:
    """The folder of `name`, fetched from the hub at `revision` if it is not a local folder.

    `trust` is the user's pin: for a hub name, its Python files are then fetched too, at that commit.
    """
    if is_here(name):
        if revision is not None:
            raise UsageError(
                f"model.revision {revision!r} works only with hub models, and {name} is a folder: remove it"
            )
        return Path(os.path.expanduser(name))
    check_name(name)
    revision = pinned(name, revision=revision, trust=trust)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise EnvironmentLacks(
            f"model {name!r} is not a local folder, and fetching it needs huggingface_hub: pip install 'flatout[train]'"
        ) from None
    wanted = [*SMALL_FILES, *(["model*.safetensors"] if weights else []), *(["*.py"] if trust else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except LocalEntryNotFoundError:
        raise EnvironmentLacks(
            f"model {name!r:.200} is not a local folder, not in the local cache, and the hub cannot be reached: "
            "connect once, or give a folder"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        where = f"{name!r:.200}" + (f" at {revision!r:.100}" if revision else "")
        raise UsageError(f"the hub refused {where}: {first_line(error)[:300]}") from None


def is_here(name: str) -> bool:
    """Whether a model's name is a folder on this machine."""
    return bool(name) and os.path.isdir(os.path.expanduser(name))


def check_name(name: str) -> None:
    """Refuses a model name that is neither a local folder nor a possible hub name."""
    if is_here(name):
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        found = "is not a folder" if os.path.exists(os.path.expanduser(name)) else "does not exist"
        raise UsageError(f"model: the folder {name!r:.200} {found}; give a folder, or a name on the hub, OWNER/NAME")


def name_in_cache(folder: Path) -> str | None:
    """The hub name of a folder that is a snapshot in the hub's cache, `models--OWNER--NAME/snapshots/COMMIT`."""
    kind, *parts = folder.parent.parent.name.split("--")
    return "/".join(parts) if folder.parent.name == "snapshots" and kind == "models" and parts else None


def root_of(path: Path) -> Path:
    """The folder that a link to a model's file may not leave: the model's folder, or the blobs of the hub's cache.

    There `snapshots/COMMIT/FILE` links to `blobs/HASH`, which may link to `blobs/XX/HASH` of all models.
    """
    if path.parent.parent.name == "snapshots":
        real, repository = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent.parent.parent))
        if real.parent == repository / "blobs":
            return real.parent
        if real.parent.parent == repository.parent / "blobs" and _SHARED.fullmatch(real.name):
            return real.parent
    return path.parent


# -- code that comes with a model ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Code:
    """The Python files of a model, and the pin that identifies exactly these files."""

    files: Mapping[str, bytes]
    pin: str


def pinned(name: str, *, revision: str | None, trust: str | None) -> str | None:
    """The revision to fetch; for a hub name, the pin is the commit."""
    if trust is None or is_here(name):
        return revision
    if not _COMMIT.fullmatch(trust):
        raise UsageError(
            f"{TRUSTING} {trust!r} cannot pin {name!r}, a name on the hub: give the commit whose code you have read, "
            "all 40 hexadecimal digits of it"
        )
    if revision not in (None, trust):
        raise UsageError(f"{TRUSTING} {trust} and model.revision {revision!r} are different commits: give the same one")
    return trust


def code_of(name: str, found: Path) -> Code:
    """The code in the folder `found` of the model `name`, pinned by its commit, or by its hash in a local folder.

    Only files in the same folder as config.json: transformers imports no others.
    """
    names = sorted(entry.name for entry in os.scandir(found) if entry.name.endswith(".py"))
    if len(names) > CODE_FILES:
        raise UsageError(
            f"{found} has {len(names)} Python files next to its config.json; at most {CODE_FILES} are read"
        )
    read: dict[str, bytes] = {}
    for file in names:
        left = CODE_BYTES - sum(map(len, read.values()))
        read[file] = files.read_bytes(found / file, root=root_of(found / file), limit=left)
    if not is_here(name):
        return Code(files=read, pin=found.name)
    digest = hashlib.sha256()
    for file, content in read.items():
        # With their lengths, so that no two sets of files give the same text.
        digest.update(f"{len(file.encode())} {len(content)} ".encode() + file.encode() + content)
    return Code(files=read, pin=digest.hexdigest())


# -- config.json --------------------------------------------------------------------------------------------

# config.json of a few well-known models, as published: a plan for them needs no network.
_LLAMA = {"model_type": "llama", "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
_QWEN = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 1e6}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
PUBLISHED: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _LLAMA
    | dict(zip(_SIZES, (576, 1536, 30, 9, 3), strict=True))
    | {"vocab_size": 49152, "rope_theta": 1e5},
    "HuggingFaceTB/SmolLM2-360M-Instruct": _LLAMA
    | dict(zip(_SIZES, (960, 2560, 32, 15, 5), strict=True))
    | {"vocab_size": 49152, "rope_theta": 1e5},
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _LLAMA
    | dict(zip(_SIZES, (2048, 8192, 24, 32, 32), strict=True))
    | {"vocab_size": 49152, "rope_theta": 1.3e5},
    "Qwen/Qwen2.5-3B-Instruct": _QWEN
    | dict(zip(_SIZES, (2048, 11008, 36, 16, 2), strict=True))
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-7B-Instruct": _QWEN
    | dict(zip(_SIZES, (3584, 18944, 28, 28, 4), strict=True))
    | {"vocab_size": 152064, "tie_word_embeddings": False},
}


def config_of(name: str, *, revision: str | None = None, trust: str | None = None) -> dict[str, Any]:
    """A model's config.json; for a few well-known models it is built in, unless a folder has that name."""
    if name in PUBLISHED and revision is None and not is_here(name):
        return dict(PUBLISHED[name])
    return read_json(folder(name, weights=False, revision=revision, trust=trust) / "config.json")


def read_json(path: Path, *, limit: int = JSON_BYTES) -> dict[str, Any]:
    """A JSON object from an untrusted file."""
    try:
        return files.read_json(path, root=root_of(path), limit=limit)
    except FileNotFoundError:
        raise UsageError(f"{path} is missing: a model folder needs it") from None
