"""Artefacts made by somebody who wishes us ill, given to the real command: nothing of theirs runs, nothing outside them
is read or written, and what is wrong with them is one sentence.

One process that has imported everything forks a child for each case, with an end to its time and its memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tests import warm
from tests.data.talks import tokenizer_folder

from flatout.cost import Adapters, ModelShape
from flatout.model import Decoder, lora, peft, weights

CANARY = "canary-7c1f2e: nobody may read or change this"
REFUSED = frozenset({2, 3, 4})
ASKED = ("--tasks", "sums", "--limit", "1", "--max-tokens", "2")
SHAPE = ModelShape(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=64, vocab=320, positions=512, norm_eps=1e-5
)
LORA = Adapters(rank=2, alpha=4.0)

RUNNER = """
import gc, json, os, resource, runpy, signal, sys
import transformers.models.gpt2.modeling_gpt2, transformers.generation.utils
import flatout.cli, flatout.engine.opening, flatout.evaluate, flatout.recipes.pretrain, flatout.recipes.sft
import flatout.config, flatout.output, typer.main
typer.main.get_command(flatout.cli.app)
flatout.config.schema()
gc.freeze()  # the children then copy less of this memory
results = {}
for name, case in json.load(open(sys.argv[1])).items():
    out, err = case["root"] + "/.out", case["root"] + "/.err"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(120)
            resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.chdir(case["root"])
            sys.argv = ["flatout", *case["argv"]]
            try:
                runpy.run_module("flatout", run_name="__main__", alter_sys=True)
                code = 0
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
            except BaseException:
                import traceback
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    results[name] = [os.waitstatus_to_exitcode(status), *(open(path, errors="replace").read() for path in (out, err))]
json.dump(results, open(sys.argv[2], "w"))
"""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Sound artefacts to spoil copies of, and the folder of one case."""

    sound: Path
    root: Path
    canary: Path

    @property
    def sentinel(self) -> Path:
        return self.root / "EXECUTED"

    @property
    def code(self) -> str:
        """A model's code as it comes with some; running it leaves the sentinel."""
        return (
            f"import pathlib\npathlib.Path({str(self.sentinel)!r}).write_text('ran')\n"
            "from transformers import GPT2Config, GPT2LMHeadModel\n"
            "class OwnConfig(GPT2Config):\n    model_type = 'own'\n"
            "class OwnModel(GPT2LMHeadModel):\n    config_class = OwnConfig\n"
        )

    @property
    def pickle(self) -> bytes:
        """Unpickling it leaves the sentinel; numpy's and torch's older files are no more than this."""
        return f"cposix\nsystem\n(S'touch {self.sentinel}'\ntR.".encode()

    def copy(self, kind: str, to: str | None = None) -> Path:
        return Path(shutil.copytree(self.sound / kind, self.root / (to or kind), symlinks=True))

    def with_code(self, to: str = "own", **changes: Any) -> Path:
        """A model that needs its own code."""
        folder = self.copy("gpt2", to)
        (folder / "own.py").write_text(self.code)
        named = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        rewrite(folder / "config.json", **{"model_type": "own", "auto_map": named, **changes})
        return folder

    def configuration(self, name: str, text: str | bytes) -> Path:
        path = self.root / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_by_link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def replace_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def pin_of(folder: Path) -> str:
    """As the refusal prints it."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        name, content = path.name.encode(), path.read_bytes()
        digest.update(f"{len(name)} {len(content)} ".encode() + name + content)
    return digest.hexdigest()


Build = Callable[[Ground], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    build: Build
    codes: frozenset[int] = REFUSED
    says: str = ""


CASES: list[Case] = []


def case(name: str, *, ignored: bool = False, says: str = "") -> Callable[[Build], Build]:
    """`ignored`: the hostile part has no effect, and the command succeeds."""

    def add(build: Build) -> Build:
        CASES.append(Case(name=name, build=build, codes=frozenset({0}) if ignored else REFUSED, says=says))
        return build

    return add


# -- code wherever a configuration may stand ----------------------------------------------------------------


@case("code of a model folder, eval", says="--trust-remote-code")
def _(ground: Ground) -> list[Any]:
    return ["eval", ground.with_code(), *ASKED]


@case("code of a model folder, chat", says="--trust-remote-code")
def _(ground: Ground) -> list[Any]:
    return ["chat", ground.with_code()]


@case("code of a model folder, train", says="--trust-remote-code")
def _(ground: Ground) -> list[Any]:
    return ["train", ground.sound / "foreign.yaml", f"model.name={ground.with_code()}", "--run", ground.root / "run"]


@case("code of a model folder, the pin of another", says="does not stand for")
def _(ground: Ground) -> list[Any]:
    return ["chat", ground.with_code(), "--trust-remote-code", "0" * 64]


@case("code of a model folder, a commit as pin", says="does not stand for")
def _(ground: Ground) -> list[Any]:
    return ["chat", ground.with_code(), "--trust-remote-code", "0" * 40]


@case("code that another repository holds", says="another repository")
def _(ground: Ground) -> list[Any]:
    folder = ground.with_code(auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "x/y--own.OwnModel"})
    return ["chat", folder, "--trust-remote-code", pin_of(folder)]


@case("code in another folder", says="next to its config.json")
def _(ground: Ground) -> list[Any]:
    folder = ground.with_code(auto_map={"AutoModelForCausalLM": "../own.OwnModel"})
    return ["chat", folder, "--trust-remote-code", pin_of(folder)]


@case("a list where code is named")
def _(ground: Ground) -> list[Any]:
    folder = ground.with_code(auto_map=["own.OwnModel"])
    return ["chat", folder, "--trust-remote-code", pin_of(folder)]


@case("code that is a link to a file elsewhere", says="symbolic link")
def _(ground: Ground) -> list[Any]:
    folder = ground.with_code()
    elsewhere = ground.configuration("elsewhere.py", ground.code)
    replace_by_link(folder / "own.py", elsewhere)
    return ["chat", folder, "--trust-remote-code", pin_of(folder)]


@case("code beside a model that transformers has", ignored=True)
def _(ground: Ground) -> list[Any]:
    return ["chat", ground.with_code(model_type="gpt2")]


@case("code beside a model of our decoder", ignored=True)
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("llama")
    (folder / "own.py").write_text(ground.code)
    rewrite(folder / "config.json", auto_map={"AutoModelForCausalLM": "own.OwnModel"})
    return ["chat", folder]


@case("code of a tokenizer", ignored=True)
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("gpt2")
    (folder / "own.py").write_text(ground.code)
    rewrite(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]},
    )
    return ["chat", folder]


@case("code that generates", ignored=True)
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("gpt2")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(ground.code + "def generate(*a, **k): pass\n")
    return ["eval", folder, *ASKED]


@case("kernels that a configuration names", ignored=True)
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("gpt2")
    rewrite(folder / "config.json", attn_implementation="x/kernel", _attn_implementation="x/kernel")
    return ["chat", folder]


@case("an adapter on a base with code", says="adapters need flatout's own decoder")
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("adapter")
    rewrite(folder / "adapter_config.json", base_model_name_or_path=str(ground.with_code()))
    return ["chat", folder]


@case("code in an adapter's folder", ignored=True)
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("adapter")
    (folder / "own.py").write_text(ground.code)
    rewrite(folder / "adapter_config.json", auto_map={"base_model_class": "own.OwnModel", "parent_library": "own"})
    return ["chat", folder]


@case("an adapter's configuration beside a whole model", ignored=True)
def _(ground: Ground) -> list[Any]:
    folder, elsewhere = ground.copy("gpt2"), ground.with_code()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(elsewhere)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return ["chat", folder]


def spoilt_run(ground: Ground, **recorded: Any) -> Path:
    """A run of a foreign model that names code inside its own folder."""
    run = ground.copy("foreign-run", "run")
    ground.with_code("run/own")
    config = json.loads((run / "config.json").read_text())
    config["model"] |= {"name": str(run / "own"), **recorded}
    (run / "config.json").write_text(json.dumps(config))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


@case("a run that trusts its own code, export", says="--trust-remote-code")
def _(ground: Ground) -> list[Any]:
    return ["export", spoilt_run(ground, trust_remote_code=True), "--to", ground.root / "out"]


@case("a run that trusts its own code, eval", says="--trust-remote-code")
def _(ground: Ground) -> list[Any]:
    return ["eval", spoilt_run(ground, trust_remote_code=True), *ASKED]


@case("a run that trusts its own code, chat", says="--trust-remote-code")
def _(ground: Ground) -> list[Any]:
    return ["chat", spoilt_run(ground, trust_remote_code=True)]


@case("a run that trusts its own code, resumed", says="on the command line only")
def _(ground: Ground) -> list[Any]:
    run = spoilt_run(ground, trust_remote_code=True)
    return ["train", run / "config.yaml", "--run", run, "--resume"]


@case("a run that brings the pin of its own code", says="--trust-remote-code")
def _(ground: Ground) -> list[Any]:
    run = spoilt_run(ground)
    return ["export", spoilt_run_again(run, trust=pin_of(run / "own")), "--to", ground.root / "out"]


def spoilt_run_again(run: Path, **recorded: Any) -> Path:
    config = json.loads((run / "config.json").read_text())
    config["model"] |= recorded
    (run / "config.json").write_text(json.dumps(config))
    return run


@case("a run whose model is a number")
def _(ground: Ground) -> list[Any]:
    return ["export", spoilt_run(ground, name=7), "--to", ground.root / "out"]


@case("a configuration that trusts", says="on the command line only")
def _(ground: Ground) -> list[Any]:
    text = yaml.safe_dump(
        {"model": {"name": str(ground.with_code()), "trust_remote_code": True}, "train": {"steps": 1}}
    )
    return ["train", ground.configuration("c.yaml", text)]


@case("an override that trusts", says="on the command line only")
def _(ground: Ground) -> list[Any]:
    return ["train", ground.sound / "foreign.yaml", f"model.name={ground.with_code()}", "model.trust_remote_code=true"]


# -- pickles -------------------------------------------------------------------------------------------------

PICKLES = [
    "pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth",
    "model.pkl", "weights.npy",
]  # fmt: skip


def _with_pickles(ground: Ground, kind: str) -> list[Any]:
    folder = ground.copy(kind)
    for name in PICKLES:
        header = (
            b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
        )
        (folder / name).write_bytes((header if name.endswith(".npy") else b"") + ground.pickle)
    return ["chat", folder]


for _kind in ("llama", "gpt2", "adapter"):
    case(f"pickles of every usual name beside the weights of {_kind}", ignored=True)(
        lambda ground, kind=_kind: _with_pickles(ground, kind)
    )


@case("pickled weights only", says="pickled weights are not read")
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("llama")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(ground.pickle)
    return ["chat", folder]


@case("pickled weights only, of a foreign model", says="pickled weights are not read")
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("gpt2")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(ground.pickle)
    return ["chat", folder]


@case("a pickled adapter only", says="pickled adapters are not read")
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("adapter")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    (folder / "adapter_model.bin").write_bytes(ground.pickle)
    return ["chat", folder]


for _kind, _file in (
    ("llama", "model.safetensors"),
    ("gpt2", "model.safetensors"),
    ("adapter", "adapter_model.safetensors"),
    ("llama", "tokenizer.json"),
    ("llama", "config.json"),
):

    def _pickled(ground: Ground, kind: str = _kind, file: str = _file) -> list[Any]:
        folder = ground.copy(kind)
        (folder / file).write_bytes(ground.pickle)
        return ["chat", folder]

    case(f"a pickle called {_file} in {_kind}")(_pickled)


@case("an index that names a pickle", says="not a safetensors file next to it")
def _(ground: Ground) -> list[Any]:
    return _indexed(ground, "pytorch_model.bin")


@case("pickled tokens to train on")
def _(ground: Ground) -> list[Any]:
    ground.configuration("tokens.npy", ground.pickle)
    data = ["data.source=tokens", "data.path=tokens.npy", "data.tokenizer=byte"]
    return ["train", ground.sound / "own.yaml", *data, "--run", ground.root / "run"]


# -- links, pipes, devices, folders --------------------------------------------------------------------------


def _linked(ground: Ground, kind: str, file: str, outside: str) -> list[Any]:
    folder = ground.copy(kind)
    target = ground.canary if outside == "canary" else ground.sound / kind / file
    replace_by_link(folder / file, target)
    return ["chat", folder]


for _kind, _file, _outside in (
    ("llama", "config.json", "canary"),
    ("llama", "config.json", "sound"),
    ("llama", "model.safetensors", "canary"),
    ("llama", "model.safetensors", "sound"),
    ("llama", "tokenizer.json", "sound"),
    ("llama", "tokenizer_config.json", "sound"),
    ("llama", "chat_template.jinja", "canary"),
    ("gpt2", "config.json", "sound"),
    ("gpt2", "model.safetensors", "sound"),
    ("gpt2", "generation_config.json", "canary"),
    ("adapter", "adapter_config.json", "sound"),
    ("adapter", "adapter_model.safetensors", "sound"),
):
    case(f"{_file} of {_kind}, a link to {_outside} elsewhere", says="symbolic link that leaves")(
        lambda ground, kind=_kind, file=_file, outside=_outside: _linked(ground, kind, file, outside)
    )


@case("the links of the hub's cache", ignored=True)
def _(ground: Ground) -> list[Any]:
    made = ground.copy("llama", "blobs-of")
    snapshot = ground.root / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = snapshot.parents[1] / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(made.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return ["chat", snapshot]


def _indexed(ground: Ground, file: Any) -> list[Any]:
    folder = ground.copy("llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(ground.root / "outside.safetensors")
    (folder / "pytorch_model.bin").write_bytes(ground.pickle)
    index = {"weight_map": dict.fromkeys(tensors, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["chat", folder]


for _place in (
    "../outside.safetensors",
    "/etc/passwd",
    "missing.safetensors",
    "..",
    "",
    7,
    None,
    ["model.safetensors"],
):
    case(f"an index that names {_place!r}")(lambda ground, place=_place: _indexed(ground, place))


@case("an index of a foreign model that names files elsewhere", says="not a safetensors file next to it")
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("gpt2")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(ground.root / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["chat", folder]


for _content in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "7", "[" * 5000):

    def _bare_index(ground: Ground, content: str = _content) -> list[Any]:
        folder = ground.copy("llama")
        (folder / "model.safetensors.index.json").write_text(content)
        return ["chat", folder]

    case(f"an index of {_content[:20]}")(_bare_index)

for _kind, _file in (
    ("llama", "config.json"),
    ("llama", "model.safetensors"),
    ("llama", "tokenizer.json"),
    ("gpt2", "model.safetensors"),
    ("adapter", "adapter_config.json"),
    ("adapter", "adapter_model.safetensors"),
):

    def _piped(ground: Ground, kind: str = _kind, file: str = _file) -> list[Any]:
        folder = ground.copy(kind)
        replace_by_pipe(folder / file)
        return ["chat", folder]

    def _zeros(ground: Ground, kind: str = _kind, file: str = _file) -> list[Any]:
        folder = ground.copy(kind)
        replace_by_link(folder / file, Path("/dev/zero"))
        return ["chat", folder]

    def _folder(ground: Ground, kind: str = _kind, file: str = _file) -> list[Any]:
        folder = ground.copy(kind)
        (folder / file).unlink()
        (folder / file).mkdir()
        return ["chat", folder]

    case(f"a pipe called {_file} in {_kind}")(_piped)
    case(f"a device called {_file} in {_kind}")(_zeros)
    case(f"a folder called {_file} in {_kind}")(_folder)


# -- absurd numbers ------------------------------------------------------------------------------------------

ABSURD: list[dict[str, Any]] = [
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 10**4000},
    {"num_hidden_layers": None},
    {"num_hidden_layers": True},
    {"hidden_size": -1},
    {"hidden_size": "32"},
    {"hidden_size": 32.5},
    {"hidden_size": [32]},
    {"num_attention_heads": 0},
    {"num_key_value_heads": 3},
    {"head_dim": 0},
    {"head_dim": 7},
    {"vocab_size": 10**12},
    {"vocab_size": 10**7},
    {"intermediate_size": 2**62},
    {"max_position_embeddings": 10**30},
    {"rope_parameters": {"rope_theta": 0}},
    {"rope_parameters": {"rope_theta": float("nan")}},
    {"rope_parameters": {"rope_theta": "10000"}},
    {"rms_norm_eps": None},
    {"rms_norm_eps": float("inf")},
    {"tie_word_embeddings": "yes"},
    {"rope_parameters": "x"},
    {"rope_scaling": [1]},
    {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
    {"rope_parameters": {"rope_type": "linear", "factor": 0}},
    {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": -1}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}},
    {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
    {"rope_parameters": {"rope_type": ["yarn"]}},
    {"model_type": ["llama"]},
    {"model_type": "mistral", "sliding_window": -1},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": "x"},
    {"quantization_config": ["x"]},
]
for _changes in ABSURD:

    def _numbered(ground: Ground, changes: dict[str, Any] = _changes) -> list[Any]:
        folder = ground.copy("llama")
        rewrite(folder / "config.json", **changes)
        return ["chat", folder]

    case(f"config.json with {str(_changes)[:90]}")(_numbered)

for _content in ("[" * 100_000, '{"a": ' * 50_000, '{"vocab_size": ' + "9" * 10_000 + "}", "\x00", "{}", "null", ""):

    def _other_json(ground: Ground, content: str = _content) -> list[Any]:
        folder = ground.copy("llama")
        (folder / "config.json").write_text(content)
        return ["chat", folder]

    case(f"config.json of {len(_content)} characters beginning {_content[:10]!r}")(_other_json)

ABSURD_ADAPTERS: list[dict[str, Any]] = [
    {"r": 0},
    {"r": -1},
    {"r": 10**9},
    {"r": 10**4000},
    {"r": "8"},
    {"r": None},
    {"r": [2]},
    {"r": 4},
    {"lora_alpha": None},
    {"lora_alpha": "4"},
    {"lora_alpha": float("nan")},
    {"lora_alpha": 10**400},
    {"lora_alpha": {}},
    {"lora_dropout": 7},
    {"lora_dropout": "x"},
    {"use_rslora": "yes"},
    {"peft_type": ["LORA"]},
    {"base_model_name_or_path": 7},
    {"base_model_name_or_path": "x" * 5000},
    {"base_model_name_or_path": "~nobody-of-this-name/x"},
]
for _changes in ABSURD_ADAPTERS:

    def _adapted(ground: Ground, changes: dict[str, Any] = _changes) -> list[Any]:
        folder = ground.copy("adapter")
        rewrite(folder / "adapter_config.json", **changes)
        return ["chat", folder]

    case(f"adapter_config.json with {str(_changes)[:60]}")(_adapted)


@case("adapter_config.json without r", says="does not set r")
def _(ground: Ground) -> list[Any]:
    folder = ground.copy("adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    del config["r"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return ["chat", folder]


Tensors = dict[str, torch.Tensor]
SPOILT: dict[str, Callable[[str, torch.Tensor], Tensors]] = {
    "of another shape": lambda name, tensor: {name: torch.ones(7, 7)},
    "without dimensions": lambda name, tensor: {name: torch.ones(())},
    "of whole numbers": lambda name, tensor: {name: tensor.to(torch.int32)},
    "of missing numbers": lambda name, tensor: {name: torch.full_like(tensor, float("nan"))},
    "left out": lambda name, tensor: {},
    "of a layer far away": lambda name, tensor: {
        name: tensor,
        name.replace("layers.0", "layers." + "9" * 5000): tensor.clone(),
    },
}
for _what, _spoil in SPOILT.items():

    def _spoilt(ground: Ground, spoil: Callable[[str, torch.Tensor], Tensors] = _spoil) -> list[Any]:
        folder = ground.copy("adapter")
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        name = next(name for name in tensors if "layers.0" in name and "lora_B" in name)
        save_file(tensors | spoil(name, tensors.pop(name)), path, metadata={"format": "pt"})
        return ["chat", folder]

    case(f"a matrix of an adapter {_what}")(_spoilt)


def _header(text: bytes, *, length: int | None = None, body: bytes = b"\0" * 64) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + body


HEADERS = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "a header without end": _header(b"{", length=2**63),
    "a header longer than the file": _header(b"{}", length=10**6),
    "no JSON": _header(b"x" * 20),
    "a list": _header(b"[]"),
    "tensors over each other": _header(
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}'
    ),
    "a tensor beyond the file": _header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,99999]}}'),
    "a shape that is no size": _header(b'{"a":{"dtype":"F32","shape":[4611686018427387904,8],"data_offsets":[0,64]}}'),
    "an unknown type": _header(b'{"a":{"dtype":"X9","shape":[16],"data_offsets":[0,64]}}'),
}
for _what, _bytes in HEADERS.items():
    for _kind, _file in (("llama", "model.safetensors"), ("adapter", "adapter_model.safetensors")):

        def _headed(ground: Ground, kind: str = _kind, file: str = _file, content: bytes = _bytes) -> list[Any]:
            folder = ground.copy(kind)
            (folder / file).write_bytes(content)
            return ["chat", folder]

        case(f"{_file} with {_what}")(_headed)


# -- configurations ------------------------------------------------------------------------------------------

LAUGHS = "a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 30)
)
YAMLS: dict[str, tuple[str | bytes, str]] = {
    "an object to be built": (
        "train: !!python/object/apply:os.system ['touch EXECUTED']\n",
        "given for a whole section",
    ),
    "an object for a section": ("train: !!python/object:os.system {steps: 1}\n", "is not allowed"),
    "an object for a value": ("train: {steps: !!python/object/apply:os.system ['touch EXECUTED']}\n", "is not allowed"),
    "an object for the file": ("!!python/object/apply:os.system {a: 1}\n", "is not allowed"),
    "aliases that grow": (LAUGHS + "train: *a29\n", "mistakes"),
    "an alias of itself": ("train: &a {lr: *a}\n", "train.lr"),
    "deep nesting": ("[" * 500_000, "nested too deeply"),
    "many keys": ("".join(f"key{i}: 1\n" for i in range(200_000)), "at most 1,048,576"),
    "some thousand keys": ("".join(f"k{i}: 1\n" for i in range(20_000)), "more than 4,000"),
    "many mistakes": ("".join(f"k{i}: 1\n" for i in range(1000)), "more"),
    "a long key": ("? " + "k" * 900_000 + "\n: 1\n", "unknown key"),
    "a long number": ("train: {steps: " + "9" * 4000 + "}\n", "too large"),
    "a longer number": ("train: {steps: " + "9" * 900_000 + "}\n", "whole number"),
    "a list": ("- a\n- b\n", "key: value"),
    "a key twice": ("train: {steps: 1, steps: 2}\n", "given twice"),
    "tabs": ("train:\n\tsteps: 1\n", "tabs"),
    "a zero byte": (b"train: \x00", "not a YAML text file"),
    "Latin letters": (b"run: \xfc\n", "UTF-8"),
    "control characters": ('"\\e]0;title\\a": 1\n', "unknown key"),
}
for _what, (_text, _says) in YAMLS.items():
    case(f"a configuration with {_what}", says=_says)(
        lambda ground, text=_text: ["config", "validate", ground.configuration("c.yaml", text)]
    )


@case("a pipe as configuration", says="named pipe")
def _(ground: Ground) -> list[Any]:
    replace_by_pipe(ground.root / "c.yaml")
    return ["train", ground.root / "c.yaml"]


@case("a device as configuration", says="device")
def _(ground: Ground) -> list[Any]:
    return ["plan", "/dev/zero"]


for _override in (
    "train.steps=" + "9" * 5000,
    "train.lr=" + "[" * 20_000,
    "train.lr='",
    "train.lr=!!python/object/apply:os.system ['touch EXECUTED']",
    "eval.tasks=[!!python/object/apply:os.system ['touch EXECUTED']]",
    "k" * 100_000 + "=1",
    "model.name=" + "x" * 5000,
    "model.name=~nobody-of-this-name/model",
    "data.tokenizer=bpe:" + "9" * 5000,
    "model.layers=" + "9" * 18,
    "=",
    "\x1b]0;title\x07=1",
):
    case(f"the override {_override[:40]!r}")(
        lambda ground, override=_override: ["plan", ground.sound / "own.yaml", "model.hidden=64", override]
    )


# -- chat templates ------------------------------------------------------------------------------------------

TEMPLATES = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('touch EXECUTED').read() }}",
    "a format string": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "an import": "{% import 'os' as os %}{{ os.system('touch EXECUTED') }}",
    "an include": "{% include '/etc/passwd' %}",
    "a long loop": "{% for i in range(10**12) %}x{% endfor %}",
    "no end": "{% for",
}
for _what, _template in TEMPLATES.items():

    def _templated(ground: Ground, template: str = _template) -> list[Any]:
        folder = ground.copy("llama")
        (folder / "chat_template.jinja").write_text(template)
        return ["eval", folder, *ASKED]

    case(f"a chat template with {_what}", says="chat template")(_templated)


# -- run folders ---------------------------------------------------------------------------------------------


def _run_file_linked(ground: Ground, file: str) -> list[Any]:
    run = ground.copy("own-run", "run")
    path = run / file
    if path.is_dir():
        shutil.rmtree(path)
        path.symlink_to(ground.sound / "own-run" / file)
    else:
        replace_by_link(path, ground.canary)
    return ["eval", run, *ASKED]


for _file in ("config.json", "plan.json", "events.jsonl", "steps.jsonl", ".lock", "checkpoints", "tokenizer"):
    # The score is told all the same where only its record would go through the link.
    case(f"{_file} of a run, a link elsewhere", ignored=_file.endswith((".jsonl", ".lock")))(
        lambda ground, file=_file: _run_file_linked(ground, file)
    )

for _section, _value in (
    ("shape", {"layers": 10**9}),
    ("shape", {"no_such_size": 1}),
    ("shape", {"hidden": "32"}),
    ("adapters", {"rank": 10**9}),
    ("adapters", 7),
):

    def _planned(ground: Ground, section: str = _section, value: Any = _value) -> list[Any]:
        run = ground.copy("own-run", "run")
        plan = json.loads((run / "plan.json").read_text())
        before = plan["job"][section]
        plan["job"][section] = before | value if isinstance(before, dict) and isinstance(value, dict) else value
        (run / "plan.json").write_text(json.dumps(plan))
        return ["export", run, "--to", ground.root / "out"]

    case(f"plan.json of a run with {_section} {_value}")(_planned)


def _in_checkpoint(ground: Ground, spoil: Callable[[Path], None]) -> list[Any]:
    run = ground.copy("own-run", "run")
    [checkpoint] = [path for path in (run / "checkpoints").iterdir() if path.is_dir()][:1]
    for path in [path for path in checkpoint.iterdir() if path.is_file()]:
        spoil(path)
    return ["export", run, "--to", ground.root / "out"]


for _what in ("pickle", "link", "pipe"):

    def _checkpointed(ground: Ground, what: str = _what) -> list[Any]:
        spoil = {
            "pickle": lambda path: path.write_bytes(ground.pickle),
            "link": lambda path: replace_by_link(path, ground.canary),
            "pipe": replace_by_pipe,
        }[what]
        return _in_checkpoint(ground, spoil)

    case(f"a checkpoint whose files are each a {_what}")(_checkpointed)


# -- the tests -----------------------------------------------------------------------------------------------


def make_sound(folder: Path) -> None:
    """A model of our decoder, one of transformers, an adapter, and a run of either kind of model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = Decoder(SHAPE)
    model.initialise(0)
    weights.export(model, tokenizer_folder(folder / "llama"), dtype=torch.float32)
    lora.freeze(model, device=torch.device("cpu"), base_bits=16, seed=0)
    lora.attach(model, LORA, seed=0)
    fingerprint = peft.fingerprint(folder / "llama")
    peft.save(model, folder / "adapter", LORA, base=str(folder / "llama"), fingerprint=fingerprint)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=320, n_positions=512))
    gpt2.save_pretrained(tokenizer_folder(folder / "gpt2"))
    common = {
        "data": {"source": "embedded", "embedded_mb": 0.1, "sequence_length": 64, "valid_share": 0.05},
        "train": {"batch_tokens": 128, "steps": 1},
        "eval": {"tokens": 64},
        "plan": {"precision": "fp32", "threads": 1},
    }
    named = {"own": {"layers": 2, "hidden": 32, "heads": 2}, "foreign": {"name": str(folder / "gpt2")}}
    for name, chosen in named.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"model": chosen, **common}))
        done = warm.flatout("train", f"{name}.yaml", "--run", f"{name}-run", cwd=folder)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Ground, tuple[int, str, str]]]:
    """What became of each case, and where."""
    base = tmp_path_factory.mktemp("hostile")
    sound = base / "sound"
    sound.mkdir()
    make_sound(sound)
    grounds, work = {}, {}
    given = [item.callspec.params.get("one") for item in request.session.items if hasattr(item, "callspec")]
    chosen = {one.name for one in given if isinstance(one, Case)}
    for number, one in enumerate(one for one in CASES if one.name in chosen):
        root, canary = base / f"case-{number}", base / f"canary-{number}.json"
        root.mkdir()
        canary.write_text(json.dumps({"secret": CANARY}))
        grounds[one.name] = Ground(sound=sound, root=root, canary=canary)
        argv = [str(word) for word in one.build(grounds[one.name])]
        work[one.name] = {"argv": argv, "root": str(root)}
    (base / "work.json").write_text(json.dumps(work))
    os.environ["HF_HOME"], before = str(base / "hf"), os.environ.get("HF_HOME")
    started = warm.Started(base / "work.json", base / "results.json", cwd=base, script=RUNNER)
    out, err = started.communicate(timeout=1500)
    if before is None:
        del os.environ["HF_HOME"]
    else:
        os.environ["HF_HOME"] = before
    assert started.returncode == 0, f"{out}{err}"
    results = json.loads((base / "results.json").read_text())
    return {name: (ground, results[name]) for name, ground in grounds.items()}


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_nothing_runs_nothing_leaks_and_it_is_said(
    one: Case, ends: dict[str, tuple[Ground, tuple[int, str, str]]]
) -> None:
    ground, (code, out, err) = ends[one.name]
    assert not ground.sentinel.exists(), "its code was executed"
    assert ground.canary.read_text() == json.dumps({"secret": CANARY}), "a file outside was changed"
    written = [path for path in ground.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not any(CANARY.encode() in path.read_bytes() for path in written), "a file outside was read"
    assert "Traceback" not in out + err, err[-3000:]
    assert code in one.codes, f"exit {code}: {err[-3000:]}"
    if one.codes == REFUSED:
        assert one.says in " ".join(err.split()), err
        assert 20 < len(err) < 6000, err
        assert not any(ord(sign) < 32 and sign != "\n" for sign in err), repr(err)


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({one.name for one in CASES}) == len(CASES) >= 40


def test_pinned_code_runs(tmp_path: Path, ends: dict[str, tuple[Ground, tuple[int, str, str]]]) -> None:
    """The sentinel is one that code leaves when it does run: no test above passes for want of working code."""
    ground = Ground(sound=next(iter(ends.values()))[0].sound, root=tmp_path, canary=tmp_path / "none")
    folder = ground.with_code()
    before = warm.flatout("chat", folder, cwd=tmp_path)
    assert before.returncode == 2, before.stderr
    pin = before.stderr.split()[-1]
    assert pin == pin_of(folder)
    assert not ground.sentinel.exists()
    done: subprocess.CompletedProcess[str] = warm.flatout(
        "eval", folder, *ASKED, "--trust-remote-code", pin, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert ground.sentinel.exists()
