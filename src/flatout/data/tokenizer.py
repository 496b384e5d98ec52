"""Text to token ids and back: raw bytes, a BPE trained on the data, or any `tokenizer.json`.

Every tokenizer is stored as a `tokenizer.json`, so that shards can name the one that made them by its
fingerprint and an exported model includes it. Text is always data: a document that spells out
`<|endoftext|>` gets the ids of those characters, never the control token.
Used by `flatout data prepare`, `train`, `chat` and `export`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flatout import hub
from flatout.config.rules import size_problem
from flatout.data import chat
from flatout.data.forms import FORMS, Form, form_in
from flatout.data.writing import make_folder, write
from flatout.errors import EnvironmentLacks, UsageError, first_line
from flatout.files import BadFile, parse_json, read_text

EOS = "<|endoftext|>"
WELL_KNOWN_EOS = (EOS, "</s>", "<|im_end|>")
TRAINING_CHARACTERS = 64_000_000
TRAINING_CHARACTERS_PER_DOCUMENT = 100_000
KEPT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
FILES = (*KEPT_FILES, "config.json")  # the model's own, read for its end-of-text id only


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """sha256 over everything that determines the ids of a text."""
        ...

    @property
    def files_fingerprint(self) -> str:
        """sha256 over all of its files: those that determine ids, and those that render conversations."""
        ...

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """The ids (such as BOS) that go before a text's own ids, if the model was trained with them."""
        ...

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        ...

    @property
    def form(self) -> Form | None:
        """The plain-text form that its chat template writes, if it is one of ours."""
        ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """A conversation as text by the chat template, optionally up to the start of the assistant's answer."""
        ...

    def render_ids(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        """The same as ids: the template's marks are control tokens, the messages are plain text."""
        ...

    def render_ids_batch(self, several: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        """The ids of several conversations up to the start of the assistant's answer."""
        ...

    def save(self, folder: Path) -> None:
        """Writes a folder that `load_tokenizer` and Hugging Face's AutoTokenizer can load."""
        ...


def load_tokenizer(spec: str, *, documents: Callable[[], Iterable[str]] | None, cache: Path) -> Tokenizer:
    """The tokenizer a configuration names; `bpe:SIZE` is trained on `documents` once and kept in `cache`."""
    if spec == "byte":
        return ByteTokenizer()
    if spec.startswith("bpe:"):
        return _trained(spec, documents=documents, cache=cache)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _from_files(_read_folder(path), name=spec)
    if path.exists():
        return _from_files({**_read_folder(path.parent), "tokenizer.json": _read_text(path)}, name=spec)
    if _is_path(spec):
        raise UsageError(f"data.tokenizer: {spec} does not exist; give a folder with tokenizer.json, or such a file")
    return _from_files(_download(spec), name=spec)


def kept_tokenizer(folder: Path, *, name: str) -> Tokenizer:
    """Loads the tokenizer saved in one of our folders; links out of the folder are refused."""
    return _from_files(_read_folder(folder, root=folder.parent), name=name)


def with_form(tokenizer: Tokenizer, name: str | None) -> Tokenizer:
    """The tokenizer with a form as its chat template, unless it has a template."""
    if name is None or tokenizer.has_template or not isinstance(tokenizer, ByteTokenizer | JsonTokenizer):
        return tokenizer
    template = FORMS[name].template(begin=tokenizer.decode(tokenizer.begin_ids))
    return _from_files({**tokenizer.files, "chat_template.jinja": template}, name=tokenizer.name)


def encode_arrays(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray[Any, Any]]:
    """`encode_batch` as arrays, for bytes without a conversion to Python integers."""
    if isinstance(tokenizer, ByteTokenizer):
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]
    return [np.array(ids, np.uint32) for ids in tokenizer.encode_batch(texts)]


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a text."""

    name = "byte"
    vocab_size = 257
    eos_id = 256
    begin_ids = ()
    has_template = False
    form = None

    @property
    def fingerprint(self) -> str:
        return _fingerprint(_byte_json(), self.eos_id)

    @property
    def files_fingerprint(self) -> str:
        return self.fingerprint

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        # A model's vocabulary is rounded up, so an untrained one may emit ids that have no text.
        pieces = (bytes([i]) if i < 256 else EOS.encode() if i == self.eos_id else b"" for i in ids)
        return b"".join(pieces).decode(errors="replace")

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        raise _no_template(self.name)

    def render_ids(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        raise _no_template(self.name)

    def render_ids_batch(self, several: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        raise _no_template(self.name)

    def save(self, folder: Path) -> None:
        _write_files(folder, self.files)

    @property
    def files(self) -> Mapping[str, str]:
        return {"tokenizer.json": _byte_json(), "tokenizer_config.json": _config_json(EOS)}


@dataclass(frozen=True, kw_only=True)
class JsonTokenizer:
    """A `tokenizer.json` run by the `tokenizers` package. Its original files are kept unchanged."""

    name: str
    vocab_size: int
    eos_id: int
    files: Mapping[str, str]
    backend: Any  # tokenizers.Tokenizer

    @property
    def fingerprint(self) -> str:
        return _fingerprint(self.files["tokenizer.json"], self.eos_id)

    @property
    def files_fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    @cached_property
    def begin_ids(self) -> tuple[int, ...]:
        ids: list[int] = self._controlled.encode("").ids
        return tuple(i for i in ids if i != self.eos_id)

    # Read from the files once: the prompts of every phase of rollouts need them.

    @cached_property
    def _template(self) -> str | None:
        return chat.template_of(self.files)

    @cached_property
    def _words(self) -> dict[str, str]:
        return chat.words_of(self.files)

    @cached_property
    def _control(self) -> list[str]:
        return [token.content for token in self._controlled.get_added_tokens_decoder().values()]

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def form(self) -> Form | None:
        return form_in(self._template)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        return self._rendered([messages], add_generation_prompt=add_generation_prompt)[0]

    def _rendered(self, several: Sequence[chat.Messages], *, add_generation_prompt: bool) -> list[str]:
        if self._template is None:
            raise _no_template(self.name)
        words, prompt = self._words, add_generation_prompt
        return chat.rendered(self._template, several, words=words, add_generation_prompt=prompt, name=self.name)

    def render_ids(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        return chat.encoded(
            lambda said: self.render(said, add_generation_prompt=add_generation_prompt),
            messages,
            control=self._control,
            encode=lambda text: list(self._controlled.encode(text, add_special_tokens=False).ids),
            encode_text=lambda text: self.encode_batch([text])[0],
        )

    def render_ids_batch(self, several: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        """All at once, on several cores, except those that spell control tokens out."""
        plain = [not any(token and token in chat.text_in(said) for token in self._control) for said in several]
        texts = self._rendered(
            [said for said, one in zip(several, plain, strict=True) if one], add_generation_prompt=True
        )
        found = iter(self._controlled.encode_batch_fast(texts, add_special_tokens=False))
        return [
            list(next(found).ids) if one else self.render_ids(said, add_generation_prompt=True)
            for said, one in zip(several, plain, strict=True)
        ]

    @cached_property
    def _controlled(self) -> Any:
        """A second backend that recognises control tokens in text, for the output of a template."""
        backend = type(self.backend).from_str(self.files["tokenizer.json"])
        backend.no_truncation()
        backend.no_padding()
        return backend

    def save(self, folder: Path) -> None:
        _write_files(folder, self.files)


def _no_template(name: str) -> UsageError:
    return UsageError(f"the tokenizer {name} has no chat template, which conversations need: {template_advice(name)}")


def template_advice(name: str) -> str:
    """How to get a chat template."""
    if name == "byte":
        return "name a folder with its tokenizer.json and a chat_template.jinja, as `flatout data prepare` writes one"
    return "use the tokenizer of a chat model, or put a chat_template.jinja next to its tokenizer.json"


def _trained(spec: str, *, documents: Callable[[], Iterable[str]] | None, cache: Path) -> Tokenizer:
    if problem := size_problem(spec):
        raise UsageError(f"data.tokenizer: {problem}")
    if (cache / "tokenizer.json").exists():
        return kept_tokenizer(cache, name=spec)
    if documents is None:
        raise UsageError(f"data.tokenizer: {spec} needs text to train on, which is missing; name a trained tokenizer")
    tokenizers = _tokenizers()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=int(spec.removeprefix("bpe:")),
        special_tokens=[EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_training_sample(documents()), trainer=trainer)
    files = {"tokenizer.json": backend.to_str(pretty=True), "tokenizer_config.json": _config_json(EOS)}
    _write_files(cache, files)
    return _from_files(files, name=spec)


def _training_sample(documents: Iterable[str]) -> Iterator[str]:
    """The beginnings of the first documents, of limited size and the same every time."""
    left = TRAINING_CHARACTERS
    for text in documents:
        yield text[: min(left, TRAINING_CHARACTERS_PER_DOCUMENT)]
        left -= min(len(text), TRAINING_CHARACTERS_PER_DOCUMENT)
        if left <= 0:
            return


def _from_files(files: Mapping[str, str], *, name: str) -> Tokenizer:
    if "tokenizer.json" not in files:
        raise UsageError(f"data.tokenizer: {name} has no tokenizer.json; save the tokenizer in that format first")
    text = files["tokenizer.json"]
    if text == _byte_json() and chat.template_of(files) is None:
        return ByteTokenizer()
    try:
        backend = _tokenizers().Tokenizer.from_str(text)
    except BaseException as error:  # the package raises bare Exception, and panics of Rust below that
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UsageError(f"data.tokenizer: the tokenizer.json of {name} cannot be read: {first_line(error)}") from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # text is data, see the module's first lines
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    for side in FILES:
        if side.endswith(".json") and side != "tokenizer.json":
            _json_object(files, side, name=name)
    eos = _eos(files, vocabulary=vocabulary, name=name)
    config = {**_json_object(files, "tokenizer_config.json", name=name), "eos_token": eos}
    kept = {side: files[side] for side in KEPT_FILES if side in files}
    kept["tokenizer_config.json"] = json.dumps(config, indent=1)
    # Ids may have gaps, so the size is computed from the largest one.
    size = max(vocabulary.values()) + 1
    return JsonTokenizer(name=name, vocab_size=size, eos_id=vocabulary[eos], files=kept, backend=backend)


def _eos(files: Mapping[str, str], *, vocabulary: Mapping[str, int], name: str) -> str:
    for side in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json_object(files, side, name=name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            if token not in vocabulary:
                raise UsageError(f"data.tokenizer: {side} of {name} names {token!r} as eos_token, which has no id")
            return token
    wanted = _json_object(files, "config.json", name=name).get("eos_token_id")
    wanted = wanted[0] if isinstance(wanted, list) and wanted else wanted
    for token, token_id in vocabulary.items():
        if token_id == wanted:
            return token
    for token in WELL_KNOWN_EOS:
        if token in vocabulary:
            return token
    raise UsageError(
        f"data.tokenizer: {name} does not name its EOS token, and has no {', '.join(WELL_KNOWN_EOS)}; "
        'put a tokenizer_config.json with "eos_token" next to its tokenizer.json'
    )


def _read_folder(folder: Path, *, root: Path | None = None) -> dict[str, str]:
    found = {}
    for name in FILES:
        with suppress(FileNotFoundError):
            found[name] = _read_text(folder / name, root=root)
    return found


def _is_path(spec: str) -> bool:
    """Whether it must be a file or folder: a name on the hub is OWNER/NAME, and may end like `Qwen2.5-0.5B`."""
    ending = Path(spec).suffix.removeprefix(".")
    return spec.startswith((".", "/", "~")) or spec.count("/") > 1 or (ending.isalpha() and ending.islower())


def _download(name: str) -> dict[str, str]:
    if "/" not in name:
        raise UsageError(
            f"data.tokenizer: {name!r} is not byte, bpe:SIZE, an existing path, or a Hugging Face name (OWNER/NAME)"
        )
    try:
        folder = hub.folder(name, weights=False)
    except UsageError as error:
        raise UsageError(f"data.tokenizer: {error}; check the name, or log in with `hf auth login`") from error
    except EnvironmentLacks as error:
        raise EnvironmentLacks(f"data.tokenizer: {error}") from error
    return _read_folder(folder)


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise EnvironmentLacks(
            "the `tokenizers` package is not installed: pip install 'flatout[train]', or use data.tokenizer: byte"
        ) from error
    return tokenizers


def _read_text(path: Path, *, root: Path | None = None) -> str:
    try:
        return read_text(path, root=root or hub.root_of(path))
    except BadFile as error:
        raise UsageError(f"data.tokenizer: {error}") from None


def _json_object(files: Mapping[str, str], file: str, *, name: str) -> dict[str, Any]:
    return parse_json(files.get(file, "{}"), source=f"data.tokenizer: {file} of {name}")


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    make_folder(folder)
    # tokenizer.json last: its presence means that the folder is complete.
    for name in sorted(files, key=lambda name: name == "tokenizer.json"):
        write(folder / name, files[name].encode())


def _fingerprint(tokenizer_json: str, eos_id: int) -> str:
    return hashlib.sha256(f"{eos_id}\n{tokenizer_json}".encode()).hexdigest()


def _config_json(eos: str) -> str:
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}, indent=1)


def _byte_json() -> str:
    """The byte tokenizer in Hugging Face's format: byte-level BPE without a single merge.

    That format writes bytes as printable characters: printable bytes represent themselves, the others follow in
    order from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocabulary = {chr(b if b in printable else next(others)): b for b in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 256, "content": EOS, **flags}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        },
        indent=1,
    )
