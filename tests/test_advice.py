"""Settings that a message tells people to write are settings: the loader takes every one of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.command import Command
from tests.command import flatout as command  # noqa: F401 a fixture

import flatout
from flatout.config import load
from flatout.config.load import keys
from flatout.errors import UsageError

SECTIONS = {key.partition(".")[0] for key in keys() if "." in key}
# A value ends with the word; a list runs to its bracket. What is filled in at run time stands as HOLE.
HOLE = "\N{WHITE SQUARE}"
ADVICE = re.compile(rf"(?<![\w./-])((?:{'|'.join(sorted(SECTIONS))})\.[a-z_0-9]+)(?:=|: )(\[[^\]]*\]|[^\s,;)`'\"|]+)")
# What some settings need beside them, and what their place in a sentence stands for.
NEEDS = {
    "rl": ["recipe=rl", "rl.tasks=[math]"],
    "lora": ["recipe=sft", "data.source=jsonl", "data.path=rows.jsonl", "lora.rank=8"],
    "rft": ["recipe=rft", "rft.task=units:train", "rft.teach=units:train"],
    "save": ["eval.every=5"],
    "dpo": ["recipe=dpo", "data.path=rows.jsonl"],
    "data.as_chat": ["recipe=sft", "data.path=rows.jsonl"],
}
LIKE = {"DIR": "folder", "FILE": "file", "N": "2"}
# Keys in front of a message about their value, which is no advice to write that word.
PROSE = re.compile(
    r"(the|a|an|not|no|it|its|is|this|with|of|for|at|as|in|one|needs|only|must|leave|item|there|adapter)\b"
)


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a module, parts that are written one after the other as one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def advice() -> dict[str, str]:
    """`key=value` to the file that says it."""
    found: dict[str, str] = {}
    root = Path(flatout.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for text in texts(ast.parse(path.read_text())):
            for key, value in ADVICE.findall(text):
                value = LIKE.get(value, value.rstrip(".:"))
                if HOLE not in value and value and not PROSE.match(value):
                    found[f"{key}={value}"] = str(path.relative_to(root))
    return found


FOUND = advice()


def test_there_is_advice_to_check() -> None:
    assert {"plan.compile=none", "plan.recompute=full", "plan.preset=safe", "data.packing=concat"} <= FOUND.keys()


@pytest.mark.parametrize("setting", FOUND)
def test_the_loader_takes_what_a_message_advises(setting: str) -> None:
    base = ["model.layers=1", "model.hidden=64", "model.heads=1", "train.steps=100"]
    section, key = setting.partition(".")[0], setting.partition("=")[0]
    load(None, overrides=[*base, *NEEDS.get(key, NEEDS.get(section, ())), setting], environ={})


# -- refusals ------------------------------------------------------------------------------------------------

SFT = ("recipe=sft", "data.source=jsonl", "data.path=rows.jsonl")
DPO = ("recipe=dpo", "data.path=rows.jsonl")
RFT = ("recipe=rft", "rft.task=units:train", "rft.teach=units:train")
RL = ("recipe=rl", "rl.tasks=[units]")
ROUTER = ("recipe=router", "lora.rank=2", "router.teach_steps=2", "data.sources=[{task: qa}, {task: code}]")


@dataclass(frozen=True)
class Refusal:
    """Settings that are refused, a part of what is said, and each way out that it names (`-key`: leave it out)."""

    given: tuple[str, ...]
    says: str
    ways: tuple[tuple[str, ...], ...]


def refusal(*given: str, says: str, ways: Iterable[str | tuple[str, ...]]) -> Refusal:
    return Refusal(given, says, tuple((way,) if isinstance(way, str) else way for way in ways))


REFUSALS = [
    refusal("train.objective=loss", says="is not MODULE:FUNCTION", ways=["train.objective=rewards:short"]),
    refusal(
        *DPO,
        "train.objective=a:b",
        says="works only with recipe pretrain or sft",
        ways=["recipe=pretrain", ("recipe=sft", "data.source=jsonl"), "-train.objective"],
    ),
    refusal(
        "-train.steps",
        says="has no length; set one of train.steps, train.epochs or train.tokens",
        ways=["train.steps=2", "train.epochs=2", "train.tokens=100"],
    ),
    refusal(
        "train.epochs=2",
        says="has 2 lengths (train.steps, train.epochs); keep one",
        ways=["-train.steps", "-train.epochs"],
    ),
    refusal(
        "train.warmup_steps=200",
        says="must be less than train.steps (100)",
        ways=["train.warmup_steps=99", "train.steps=201"],
    ),
    refusal(
        "-model.heads",
        says="missing; set model.name, or all of model.layers",
        ways=["model.heads=1", ("model.name=a/b", "-model.layers", "-model.hidden")],
    ),
    refusal(
        "model.revision=main",
        says="works only with model.name; set model.name",
        ways=[("model.name=a/b", "-model.layers", "-model.hidden", "-model.heads"), "-model.revision"],
    ),
    refusal(
        "model.name=a/b",
        "-model.hidden",
        "-model.heads",
        says="conflicts with model.name",
        ways=["-model.layers", ("-model.name", "model.hidden=64", "model.heads=1")],
    ),
    refusal(
        "model.heads=3",
        says="is not a multiple of model.heads (3); use 63 or 66, or set model.head_dim",
        ways=["model.hidden=66", "model.hidden=63", "model.head_dim=16"],
    ),
    refusal("model.head_dim=3", says="rotary embeddings need an even width", ways=["model.head_dim=4"]),
    refusal("model.heads=4", "model.kv_heads=3", says="must divide model.heads (4)", ways=["model.kv_heads=2"]),
    refusal("model.vocab=256", says="set at least 257, or remove it", ways=["model.vocab=257", "-model.vocab"]),
    refusal("data.tokenizer=bpe:1", says="SIZE must be a number from 257", ways=["data.tokenizer=bpe:257"]),
    refusal("data.source=text", says="data.source text needs a file, folder or glob", ways=["data.path=a.txt"]),
    refusal("data.source=hf", says="data.source hf needs the dataset's name", ways=["data.name=a/b"]),
    refusal(
        *SFT,
        "data.sources=[{path: a}]",
        says="conflicts with data.sources, whose items name their own; remove one",
        ways=[("-data.path", "-data.source"), "-data.sources"],
    ),
    refusal(
        "recipe=sft",
        "data.sources=[{path: a, weight: 1}, {path: b}]",
        says="give every item one, or none",
        ways=["data.sources=[{path: a, weight: 1}, {path: b, weight: 1}]", "data.sources=[{path: a}, {path: b}]"],
    ),
    refusal(
        "recipe=sft",
        "data.sources=[{split: train}]",
        says="has neither path nor name; set one of them",
        ways=["data.sources=[{path: a}]", "data.sources=[{name: a/b}]"],
    ),
    refusal(
        "recipe=sft",
        "data.sources=[{path: a, subset: b}]",
        says="and a path; remove one",
        ways=["data.sources=[{path: a}]", "data.sources=[{name: a/b, subset: b}]"],
    ),
    refusal(
        "recipe=sft",
        "data.sources=[{path: a, split: 'x y'}]",
        says="is not a split; write train, train[:8000]",
        ways=["data.sources=[{path: a, split: 'train[:8000]'}]"],
    ),
    refusal(
        "data.sequence_length=64",
        "model.positions=32",
        says="must be at most model.positions (32)",
        ways=["data.sequence_length=32", "model.positions=64"],
    ),
    refusal(
        "train.batch_tokens=1500",
        says="is not a multiple of data.sequence_length (1024); use 1024 or 2048",
        ways=["train.batch_tokens=1024", "train.batch_tokens=2048"],
    ),
    refusal(
        "plan.micro_batch=3",
        "plan.accumulation=1",
        says="must divide the 64 sequences of a step",
        ways=["plan.micro_batch=4"],
    ),
    refusal("eval.patience=2", says="needs evaluations during the run; set eval.every", ways=["eval.every=5"]),
    refusal("save.best=true", says="needs evaluations during the run; set eval.every", ways=["eval.every=5"]),
    refusal("target.val_loss=2", says="needs evaluations during the run; set eval.every", ways=["eval.every=5"]),
    refusal(
        "profile.steps=[5, 2]", says="must be the first and the last step, in this order", ways=["profile.steps=[2, 5]"]
    ),
    refusal(
        "profile.steps=[5, 200]",
        says="must end before train.steps (100)",
        ways=["profile.steps=[5, 99]", "train.steps=201"],
    ),
    refusal("eval.tasks=unit", says="did you mean units?", ways=["eval.tasks=units"]),
    refusal(
        "eval.task_limit=5", says="works only with eval.tasks; set it, such as [units]", ways=["eval.tasks=[units]"]
    ),
    refusal(
        "eval.tasks=[perplexity:a]",
        "eval.criterion=tasks",
        says="add one, or use eval.criterion: loss",
        ways=["eval.tasks=[units]", "eval.criterion=loss"],
    ),
    refusal("rl.samples=4", says="works only with recipe rl", ways=["-rl.samples", ("recipe=rl", "rl.tasks=[units]")]),
    refusal(
        *SFT,
        "lora.alpha=4",
        says="works only with adapters; set lora.rank, such as 16",
        ways=["lora.rank=16", "-lora.alpha"],
    ),
    refusal(*SFT, "data.split='x y'", says="is not a split", ways=["data.split=train", "data.split=test[10%:20%]"]),
    refusal(
        *SFT, "data.split='test[120%:]'", says="has a share outside -100% to 100%", ways=["data.split='test[20%:]'"]
    ),
    refusal(
        *SFT,
        "data.split='test[5:2]'",
        says="is empty; its first row must be before its last",
        ways=["data.split='test[2:5]'"],
    ),
    refusal(
        *SFT,
        "data.source=text",
        says="has no rows; recipe sft takes jsonl, parquet or hf",
        ways=["data.source=jsonl", "data.source=parquet", ("data.source=hf", "data.name=a/b", "-data.path")],
    ),
    refusal(
        "recipe=sft",
        says="recipe sft reads rows: set data.path, data.name or data.sources",
        ways=["data.path=a.jsonl", "data.name=a/b", "data.sources=[{path: a}]"],
    ),
    refusal(
        *SFT,
        "data.valid_path=a",
        "data.valid_name=b/c",
        says="conflicts with data.valid_name (b/c); remove one",
        ways=["-data.valid_path", "-data.valid_name"],
    ),
    refusal(
        "recipe=sft",
        "data.sources=[{path: a}, {path: b}]",
        "data.valid_split=test",
        says="of which source? Set data.valid_path or data.valid_name too",
        ways=["data.valid_path=a", "data.valid_name=a/b"],
    ),
    refusal(
        *DPO,
        "data.template=x",
        says="works only with recipe sft",
        ways=["-data.template", ("recipe=sft", "data.source=jsonl")],
    ),
    refusal(*DPO, "dpo.margin=1", says="works only with dpo.loss: simpo", ways=["dpo.loss=simpo"]),
    refusal(
        *SFT,
        "data.template=x",
        "data.format=text",
        says="conflicts with data.template",
        ways=["-data.format", "-data.template"],
    ),
    refusal("data.system=x", says="works only with recipe sft or dpo", ways=["-data.system", SFT]),
    refusal(
        "data.sources=[{path: a}]",
        says="1 items work only with recipe sft or dpo",
        ways=["-data.sources", "recipe=sft"],
    ),
    refusal(
        "data.source=hf",
        "data.name=a/b",
        "data.split=train[:5]",
        says="slices of rows work only with recipe sft or dpo",
        ways=["data.split=train", "recipe=sft"],
    ),
    refusal(
        "recipe=rft",
        "rft.teach=units:train",
        says="missing; name a task, such as units:train",
        ways=["rft.task=units:train"],
    ),
    refusal(
        "recipe=rft",
        "rft.task=jsonl:a",
        "rft.teach=units:train",
        says="set rft.valid to the task to score",
        ways=["rft.valid=jsonl:b", "rft.task=units:train", "rft.task=math:train"],
    ),
    refusal(*RFT, "data.path=a", says="works only with other recipes", ways=["-data.path", SFT[:2]]),
    refusal(
        *RFT[:2],
        "model.name=a/b",
        "-model.layers",
        "-model.hidden",
        "-model.heads",
        "data.tokenizer=bpe:300",
        says="conflicts with model.name, which has its own tokenizer; remove one",
        ways=["-data.tokenizer"],
    ),
    refusal(
        *RFT[:2],
        says="set model.name, or rft.teach to fine-tune them first",
        ways=["rft.teach=units:train", ("model.name=a/b", "-model.layers", "-model.hidden", "-model.heads")],
    ),
    refusal(
        *RFT,
        "sample.min_tokens=200",
        says="must be at most sample.max_tokens (120)",
        ways=["sample.min_tokens=120", "sample.max_tokens=200"],
    ),
    refusal(*RFT, "rft.keep=40", says="must be at most rft.oversample (30)", ways=["rft.keep=30", "rft.oversample=40"]),
    refusal(
        *RFT,
        "sample.temperature=0",
        says="raise it, or set rft.oversample: 1",
        ways=["sample.temperature=1", "rft.oversample=1"],
    ),
    refusal("recipe=rl", says="missing; name tasks, such as [math, logic]", ways=["rl.tasks=[math, logic]"]),
    refusal(*RL, "rl.prompts=3", "rl.updates=2", says="use 2 or 4", ways=["rl.prompts=2", "rl.prompts=4"]),
    refusal(
        "recipe=rl",
        "rl.tasks=[units, units]",
        says="to see a task more often, raise rl.prompts",
        ways=["rl.tasks=[units]"],
    ),
    refusal(*RL, "mtl.method=pcgrad", says="needs at least two tasks", ways=["rl.tasks=[units, math]", "-mtl.method"]),
    refusal(*RL, "rl.samples=1", says="needs at least 2; ppo takes 1", ways=["rl.samples=2", "rl.algorithm=ppo"]),
    refusal(
        *RL,
        "sample.temperature=0",
        says="completions of a prompt are identical; raise it",
        ways=["sample.temperature=1"],
    ),
    refusal(
        *RL,
        "rl.old_logprobs=sampler",
        "sample.top_k=5",
        says="use trainer",
        ways=["rl.old_logprobs=trainer", "-sample.top_k"],
    ),
    refusal(
        *RL,
        "rl.ahead=1",
        "rl.dynamic_sampling=1",
        says="set one of the two to 0",
        ways=["rl.ahead=0", "rl.dynamic_sampling=0"],
    ),
    refusal(
        *RL,
        "rl.ahead=1",
        "rl.correction=null",
        says="set rl.correction, and sample with temperature 1",
        ways=[("rl.correction=2", "sample.temperature=1", "sample.top_p=1", "sample.top_k=0"), "rl.ahead=0"],
    ),
    refusal(
        *RL,
        "rl.overlong_buffer=500",
        says="must be at most sample.max_tokens (120)",
        ways=["rl.overlong_buffer=120", "sample.max_tokens=500"],
    ),
    refusal(
        *RL,
        "sample.max_tokens=2000",
        says="leaves no room for a prompt in data.sequence_length (1024)",
        ways=["sample.max_tokens=500", ("data.sequence_length=4096",)],
    ),
    refusal(*RL, "rl.teach_lr=1", says="set rl.teach, or leave rl.teach_lr out", ways=["rl.teach=2", "-rl.teach_lr"]),
    refusal(
        *RL,
        "-train.steps",
        says="missing; give the number of steps, or train.epochs over the questions of the tasks",
        ways=["train.steps=2", "train.epochs=1"],
    ),
    refusal(
        *RL,
        "rl.updates=3",
        "rl.prompts=3",
        says="must be a multiple of the 3 steps of a phase",
        ways=["train.steps=99", ("rl.updates=2", "rl.prompts=4")],
    ),
    refusal(
        *ROUTER,
        "data.sources=[{task: qa}]",
        says="a router needs at least two",
        ways=["data.sources=[{task: qa}, {task: code}]"],
    ),
    refusal(
        *ROUTER,
        "data.sources=[{name: a}, {task: code}]",
        says="has no task; name one, such as sentiment, qa",
        ways=["data.sources=[{name: a, task: sentiment}, {task: code}]"],
    ),
    refusal(
        *ROUTER,
        "data.sources=[{task: 'qa:train'}, {task: code}]",
        says="give the file as path, and leave the split out",
        ways=["data.sources=[{task: qa}, {task: code}]"],
    ),
    refusal(
        *ROUTER,
        "data.sources=[{task: qa, name: 'a b'}, {task: code}]",
        says="set another name",
        ways=["data.sources=[{task: qa, name: ab}, {task: code}]"],
    ),
    refusal(
        *ROUTER,
        "data.sources=[{task: qa}, {task: qa}]",
        says="give each its own name",
        ways=["data.sources=[{task: qa}, {task: qa, name: b}]"],
    ),
    refusal(
        *ROUTER,
        "data.sources=[{task: qa, subset: a}, {task: code}]",
        says="sets subset, which recipe router does not use; remove it",
        ways=["data.sources=[{task: qa}, {task: code}]"],
    ),
    refusal(
        *ROUTER,
        "data.sources=[{task: qa, split: test}, {task: code}]",
        says="holds questions out by itself, so remove it",
        ways=["data.sources=[{task: qa}, {task: code}]"],
    ),
    refusal(
        *ROUTER,
        "data.sources=[{task: qa, weight: 1}, {task: code}]",
        says="give all of them one",
        ways=["data.sources=[{task: qa, weight: 1}, {task: code, weight: 1}]"],
    ),
    refusal(*ROUTER, "-lora.rank", "lora.rank=null", says="a router needs adapters, such as 16", ways=["lora.rank=16"]),
    refusal(
        *ROUTER,
        "lora.adapter=a",
        says="use router.start, with one for each source",
        ways=[("-lora.adapter", "router.start=a", "router.phase=2", "-router.teach_steps")],
    ),
    refusal(
        *ROUTER,
        "router.phase=2",
        "-router.teach_steps",
        says="set its folder, or phase: all",
        ways=["router.start=a", ("router.phase=all", "router.teach_steps=2")],
    ),
    refusal(
        *ROUTER,
        "router.start=a",
        says="remove it, or set router.phase",
        ways=["-router.start", ("router.phase=2", "-router.teach_steps")],
    ),
    refusal(
        *ROUTER,
        "router.start=a",
        "router.phase=2",
        says="works only before phase 1; remove it",
        ways=["-router.teach_steps"],
    ),
    refusal(
        *ROUTER,
        "-router.teach_steps",
        "router.teach_lr=1",
        says="has no effect without router.teach_steps",
        ways=["router.teach_steps=2", "-router.teach_lr"],
    ),
    refusal(
        *ROUTER,
        "-router.teach_steps",
        says="set model.name, or router.teach_steps",
        ways=["router.teach_steps=2", ("model.name=a/b", "-model.layers", "-model.hidden", "-model.heads")],
    ),
    refusal(
        *ROUTER,
        "router.temperature_end=2",
        says="must be at most router.temperature (1.0)",
        ways=["router.temperature_end=1", "router.temperature=2"],
    ),
    refusal(*ROUTER, "data.train_on=all", says="recipe router needs completion", ways=["data.train_on=completion"]),
    refusal(
        *ROUTER,
        "eval.tasks=[units]",
        says="scores the task of each source after every phase; remove it",
        ways=["-eval.tasks"],
    ),
    refusal(*ROUTER, "data.path=a", says="recipe router reads data.sources; remove it", ways=["-data.path"]),
]
ADDITION = ("model.layers=1", "model.hidden=64", "model.heads=1", "train.steps=100")


def settled(given: Iterable[str]) -> list[str]:
    """Overrides of which the last one of each key stands; `-key` takes it away."""
    found: dict[str, str] = {}
    for one in given:
        key = one.partition("=")[0]
        found.pop(key.removeprefix("-"), None)
        if not key.startswith("-"):
            found[key] = one
    return list(found.values())


def mistakes(given: Iterable[str]) -> list[str]:
    """What the loader says to these settings."""
    try:
        load(None, overrides=settled([*ADDITION, *given]), environ={})
    except UsageError as error:
        return str(error).splitlines()[1:]
    return []


@pytest.mark.parametrize("one", REFUSALS, ids=lambda one: one.says)
def test_following_a_refusal_never_leads_to_the_same_one(one: Refusal) -> None:
    said = [line for line in mistakes(one.given) if one.says in line]
    assert said, mistakes(one.given)
    for way in one.ways:
        after = mistakes([*one.given, *way])
        assert not any(one.says in line for line in after), (way, after)


def test_every_rule_has_its_refusal_here() -> None:
    """Every sentence of the rules is said by one of them."""
    source = Path(flatout.__file__).parent / "config" / "rules.py"
    tree = ast.parse(source.read_text())
    plain = {
        node.body[0].value for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    inside = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    sentences = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                re.escape(str(part.value)) if isinstance(part, ast.Constant) else "(?s:.*)" for part in node.values
            ]
            sentences.append("".join(parts))
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in plain and node not in inside
        ):
            sentences.append(re.escape(node.value))
    said = "\n".join(line for one in REFUSALS for line in mistakes(one.given))
    long = [one for one in sentences if " " in one and len(re.sub(r"\(\?s:\.\*\)|\\", "", one)) > 25]
    assert len(long) > 60
    assert [one for one in long if not re.search(one.replace("(?s:.*)", ".*"), said)] == []


# -- refusals of the plan ------------------------------------------------------------------------------------

LARGE = ("model.layers=32", "model.hidden=4096", "model.heads=32", "train.steps=10", "model.vocab=32000")
PLANS = {
    "memory": (*LARGE, "data.sequence_length=4096", "train.batch_tokens=131072", "--on", "A100-80GB"),
    "memory, pinned": (*LARGE, "plan.micro_batch=8", "plan.recompute=none", "--on", "H200"),
    "memory, graphs": (*LARGE[:4], "model.vocab=32000", "plan.graphs=true", "plan.micro_batch=1", "--on", "A100-40GB"),
    "memory, preset": (*LARGE, "plan.preset=safe", "data.sequence_length=8192", "--on", "RTX 4090"),
    "adapters": (*LARGE, *SFT, "lora.rank=16", "--on", "T4"),
    "several tasks": (*LARGE, "recipe=rl", "rl.tasks=[math, logic]", "mtl.method=pcgrad", "--on", "A100-80GB"),
    "micro-batch": (*ADDITION, "plan.micro_batch=3"),
    "micro-batch, ranks": (*ADDITION, "plan.micro_batch=32", "plan.accumulation=2", "--on", "H100x2"),
    "batch, ranks": (*ADDITION, "train.batch_tokens=65536", "--on", "H100x3"),
    "sharding": (*ADDITION, "plan.sharding=full", "--on", "H100"),
    "sharding, fp8": (*ADDITION, "plan.sharding=full", "plan.fp8=true", "--on", "H100x2"),
    "positions": (*LARGE, "lora.rank=16", *SFT, "lora.targets=x", "--on", "H100"),
}


@pytest.mark.parametrize("name", PLANS)
def test_following_the_plan_never_leads_to_the_same_refusal(
    command: Command,  # noqa: F811
    tmp_path: Path,
    name: str,
) -> None:
    """Step by step, always the first thing that is advised, until there is a plan or nothing to set."""
    (tmp_path / "c.yaml").write_text("seed: 0\n")
    given, said = list(PLANS[name]), list[str]()
    while (done := command("plan", "c.yaml", *given)).code:
        assert done.err not in said, f"the same again, after {given}"
        said.append(done.err)
        ways = [
            (key, value)
            for key, value in ADVICE.findall(done.err)
            if value not in ("full", "none") or "fit" in done.err
        ]
        if choice := re.search(r"plan\.(\w+) \d+ does not divide .* choose one of ([\d, ]+)", done.err):
            ways = [(f"plan.{choice[1]}", choice[2].split(", ")[0])]
        elif choice := re.search(r"cannot share evenly: use (\d+)", done.err):
            ways = [("train.batch_tokens", choice[1])]
        elif choice := re.search(r"does not work with (.*): remove one of them", done.err):
            ways = [("plan.sharding", "none")]
        elif choice := re.search(r"lora.targets.*: give (all-linear)", done.err):
            ways = [("lora.targets", choice[1])]
        if not ways:
            assert re.search("smaller model|sharded over|would fit|leave one of them out", done.err), done.err
            break
        for key, value in ways[: 2 if " and " in done.err else 1]:
            given = [one for one in given if one.partition("=")[0] != key]
            given.insert(0, f"{key}={value.rstrip('.')}")
