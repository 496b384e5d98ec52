"""Finds a model's files: a local folder as it is, any other name on the Hugging Face hub.

Only JSON, text and safetensors are fetched; nothing pickled ever, and nothing executable unless the user trusts the
code of one commit.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from flatout.errors import EnvironmentLacks, UsageError

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


def folder(name: str, *, weights: bool, revision: str | None = None, code: bool = False) -> Path:
    """The folder that holds `name`, fetched from the hub at `revision` if it is no folder here.

    `code` fetches Python files too, and asks for a commit: a branch or tag can be moved to other code.
    """
    local = Path(name).expanduser()
    if name and local.is_dir():
        if revision is not None:
            raise UsageError(f"model.revision {revision!r} beside the folder {name}, which has none: leave it out")
        return local
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        raise UsageError(f"model {name!r} is no folder here, and a name on the hub looks like OWNER/NAME")
    if code and not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise UsageError(
            f"model.trust_remote_code would run the code of {name!r} at {revision or 'its newest revision'}, which can "
            "change: pin model.revision to a commit of 40 hexadecimal digits, or give a folder"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise EnvironmentLacks(
            f"model {name!r} is not a local folder, and fetching it needs huggingface_hub: pip install 'flatout[train]'"
        ) from None
    wanted = [*SMALL_FILES, *(["model*.safetensors"] if weights else []), *(["*.py"] if code else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except LocalEntryNotFoundError:
        raise EnvironmentLacks(
            f"model {name!r} is not a local folder, not in the local cache, and the hub cannot be reached: "
            "go online once, or give a folder"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        where = repr(name) + (f" at {revision!r}" if revision else "")
        raise UsageError(f"the hub refused {where}: {str(error).splitlines()[0]}") from None


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


def config_of(name: str, *, revision: str | None = None, code: bool = False) -> dict[str, Any]:
    """A model's config.json; for a few well-known ones without asking anybody, unless a folder is called so."""
    if name in PUBLISHED and revision is None and not Path(name).is_dir():
        return dict(PUBLISHED[name])
    return read_json(folder(name, weights=False, revision=revision, code=code) / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of somebody else's."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} is missing: a model folder needs it") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}, not an object")
    return value
