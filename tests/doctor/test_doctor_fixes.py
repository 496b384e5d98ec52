"""Every fix that is code is put into a small script of its framework, and the script still trains.

The code is taken from the doctor's own text. Most scripts run only with `make test-doctor`, because they take seconds
each.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import warm
from tests.insight.test_insight_diagnose import seen
from tests.waiting import HANG_S

from flatout.insight.diagnose import fixes
from flatout.insight.diagnose.observed import Observed

COMMON = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        y = ATTENTION
        return x + self.out(y)
def build():
    return torch.nn.Sequential(torch.nn.Embedding(32, 16), Block(), torch.nn.Linear(16, 32))
def loss_of(model, ids):
    logits = model(ids[:, :-1]).flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
rows = [torch.arange(9) + i % 20 for i in range(64)]
"""
PLAIN = (
    COMMON
    + """
SETUP
model = build().to("DEVICE")
WRAP
parameters = model.parameters()
optimizer = OPTIMIZER
loader = LOADER
for step, ids in enumerate(loader):
    with CONTEXT:
        loss = loss_of(model, ids.to("DEVICE"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        break
assert loss.isfinite() and step >= 1, loss
print("trained")
"""
)
LIGHTNING = (
    COMMON
    + """
import logging
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SETUP
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = build()
    def training_step(self, batch, index):
        return loss_of(self.model, batch)
    def validation_step(self, batch, index):
        self.log("val_loss", loss_of(self.model, batch))
    def configure_optimizers(self):
        return OPTIMIZER
known = dict(max_steps=4, accelerator="DEVICE", logger=False, enable_progress_bar=False, enable_model_summary=False,
             default_root_dir=sys.argv[1], num_sanity_val_steps=0)
known.update(dict(ARGUMENTS))
trainer = L.Trainer(**known)
module = Module()
trainer.fit(MODULE, LOADER, DataLoader(rows, batch_size=32))
assert trainer.global_step == 4
print("trained")
"""
)
ACCELERATE = (
    COMMON
    + """
from accelerate import Accelerator
known = dict(cpu=ON_CPU)
known.update(dict(ARGUMENTS))
accelerator = Accelerator(**known)
model = build()
parameters = model.parameters()
optimizer = OPTIMIZER
model, optimizer, loader = accelerator.prepare(model, optimizer, LOADER)
for step, ids in enumerate(loader):
    with accelerator.accumulate(model):
        loss = loss_of(model, ids)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if step == 3:
        break
assert loss.isfinite() and step >= 1, loss
print("trained")
"""
)
TRAINER = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding,
    LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast, Trainer, TrainingArguments)
words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, 64)}}, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
rows = [{"input_ids": list(range(3, 3 + length)), "attention_mask": [1] * length, LABELS} for length in (8, 24, 9) * 8]
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                     pad_token_id=0, num_labels=2)
model = MODEL
known = dict(max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=ON_CPU, save_strategy="no",
             disable_tqdm=True, logging_steps=1)
known.update(dict(ARGUMENTS))
trainer = Trainer(model, TrainingArguments(sys.argv[1] + "/out", **known), train_dataset=rows, eval_dataset=rows,
                  data_collator=COLLATOR)
assert trainer.train().training_loss > 0
print("trained")
"""
DEFAULTS = {
    "SETUP": "",
    "WRAP": "",
    "ATTENTION": "(q @ k.transpose(-1, -2)).softmax(-1) @ v",
    "CONTEXT": "torch.enable_grad()",
    "MODULE": "module",
    "ARGUMENTS": "",
    "LABELS": "",
    "LOADER": "DataLoader(rows, batch_size=4)",
    "MODEL": "LlamaForCausalLM(config)",
    "COLLATOR": "DataCollatorForLanguageModeling(tokenizer, mlm=False)",
}
SCRIPTS = {"torch": PLAIN, "lightning": LIGHTNING, "accelerate": ACCELERATE, "trainer": TRAINER}
NEEDS = {"torch": (), "lightning": ("lightning",), "accelerate": ("accelerate",), "trainer": ("transformers",)}
LLAMA = {"model": {"class": "LlamaForCausalLM"}}


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A text of the doctor, and where its code goes."""

    name: str
    framework: str
    text: Callable[[Observed], str]
    into: dict[str, str]  # the slot of the script, and the pattern of the code in the text
    also: dict[str, str] | None = None  # other slots of the script
    facts: dict[str, object] | None = None
    always: bool = False  # also in `make test`
    needs_gpu: bool = False


CALL = {name: rf"{name}\((.*?)\)(?=$|[;, ])" for name in ("TrainingArguments", "Trainer", "Accelerator")}
LOADER, OPTIMIZER = r"DataLoader\(.*?\)", r"torch\.optim\.\w+\(.*?fused=True\)"


def everywhere(name: str, text: Callable[[Observed], str], into: dict[str, str], frameworks: str) -> list[Fix]:
    return [Fix(name=name, framework=framework, text=text, into=into) for framework in frameworks.split()]


def larger(watched: Observed) -> str:
    return fixes.larger_batch(watched, rows=8, accumulation=2)


FOUR_MICRO = {"micro": [{"rows": 4, "length": 8, "tokens": 32, "real": 32.0}] * 4}
FIXES = [
    Fix(
        name="bf16",
        framework="torch",
        text=fixes.bf16,
        into={"CONTEXT": r"with (torch\.autocast\(.*?\)):"},
    ),
    Fix(name="bf16", framework="lightning", text=fixes.bf16, into={"ARGUMENTS": CALL["Trainer"]}),
    Fix(name="bf16", framework="accelerate", text=fixes.bf16, into={"ARGUMENTS": CALL["Accelerator"]}),
    Fix(name="bf16", framework="trainer", text=fixes.bf16, into={"ARGUMENTS": CALL["TrainingArguments"]}),
    Fix(
        name="fp16",
        framework="torch",
        text=fixes.fp16,
        into={"CONTEXT": r"with (torch\.autocast\(.*?\)):"},
        needs_gpu=True,
    ),
    Fix(name="fp16", framework="lightning", text=fixes.fp16, into={"ARGUMENTS": CALL["Trainer"]}, needs_gpu=True),
    Fix(name="fp16", framework="accelerate", text=fixes.fp16, into={"ARGUMENTS": CALL["Accelerator"]}, needs_gpu=True),
    Fix(
        name="fp16", framework="trainer", text=fixes.fp16, into={"ARGUMENTS": CALL["TrainingArguments"]}, needs_gpu=True
    ),
    *everywhere("tf32", fixes.tf32, {"SETUP": r"torch\.set_float32_matmul_precision\(.*?\)"}, "torch lightning"),
    Fix(
        name="tf32", framework="trainer", text=fixes.tf32, into={"ARGUMENTS": CALL["TrainingArguments"]}, needs_gpu=True
    ),
    *everywhere(
        "loader",
        lambda watched: fixes.loader(watched, workers=2),
        {"LOADER": LOADER},
        "torch lightning accelerate",
    ),
    Fix(
        name="loader",
        framework="trainer",
        text=lambda watched: fixes.loader(watched, workers=2),
        into={"ARGUMENTS": CALL["TrainingArguments"]},
    ),
    *everywhere("fused", fixes.fused_optimizer, {"OPTIMIZER": OPTIMIZER}, "torch lightning accelerate"),
    Fix(name="fused", framework="trainer", text=fixes.fused_optimizer, into={"ARGUMENTS": CALL["TrainingArguments"]}),
    *(
        Fix(
            name=what,
            framework=framework,
            text=lambda watched, what=what: fixes.rarer(watched, what),  # type: ignore[misc]
            into={"ARGUMENTS": CALL[call]},
        )
        for what in ("evaluation", "checkpointing", "logging")
        for framework, call in (("lightning", "Trainer"), ("trainer", "TrainingArguments"))
    ),
    Fix(
        name="padding, rows without labels",
        framework="trainer",
        text=fixes.padding,
        into={"ARGUMENTS": CALL["TrainingArguments"], "COLLATOR": r"DataCollatorForLanguageModeling\(.*?\)"},
        facts=LLAMA,
        always=True,
    ),
    Fix(
        name="padding, rows with labels",
        framework="trainer",
        text=fixes.padding,
        into={"ARGUMENTS": CALL["TrainingArguments"], "COLLATOR": r"DataCollatorForSeq2Seq\(.*?\)"},
        also={"LABELS": '"labels": list(range(3, 3 + length))'},
        facts=LLAMA,
    ),
    Fix(
        name="padding, a classifier",
        framework="trainer",
        text=fixes.padding,
        into={"ARGUMENTS": CALL["TrainingArguments"], "COLLATOR": r"DataCollatorWithPadding\(.*?\)"},
        also={"LABELS": '"labels": length % 2', "MODEL": "LlamaForSequenceClassification(config)"},
        facts={"model": {"class": "LlamaForSequenceClassification"}},
    ),
    Fix(name="larger batch", framework="torch", text=larger, into={"LOADER": LOADER}),
    Fix(
        name="larger batch",
        framework="lightning",
        text=larger,
        into={"LOADER": LOADER, "ARGUMENTS": CALL["Trainer"]},
    ),
    Fix(
        name="larger batch",
        framework="accelerate",
        text=larger,
        into={"LOADER": LOADER, "ARGUMENTS": CALL["Accelerator"]},
        always=True,
    ),
    Fix(name="larger batch", framework="trainer", text=larger, into={"ARGUMENTS": CALL["TrainingArguments"]}),
    Fix(
        name="no recomputation",
        framework="trainer",
        text=fixes.no_recompute,
        into={"ARGUMENTS": CALL["TrainingArguments"]},
    ),
    Fix(
        name="no sync",
        framework="torch",
        text=fixes.no_sync,
        into={"CONTEXT": r"with (model\.no_sync\(\)):"},
        also={
            "SETUP": "import torch.distributed as dist\n"
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
            "WRAP": "model = torch.nn.parallel.DistributedDataParallel(model)",
        },
    ),
    Fix(name="no sync", framework="lightning", text=fixes.no_sync, into={"ARGUMENTS": CALL["Trainer"]}),
    Fix(name="no sync", framework="accelerate", text=fixes.no_sync, into={"ARGUMENTS": CALL["Accelerator"]}),
    Fix(
        name="attention",
        framework="torch",
        text=fixes.attention,
        into={"ATTENTION": r"torch\.nn\.functional\.scaled_dot_product_attention\(.*?\)"},
        always=True,
    ),
    Fix(
        name="attention",
        framework="trainer",
        text=fixes.attention,
        into={"MODEL": r"from_pretrained\(.*?\)"},
        facts={"model": {"attention": "eager"}},
    ),
    Fix(name="anomaly", framework="lightning", text=fixes.anomaly, into={"ARGUMENTS": CALL["Trainer"]}),
    Fix(name="compile", framework="torch", text=fixes.compiled, into={"WRAP": r"model = torch\.compile\(model\)"}),
    Fix(name="compile", framework="lightning", text=fixes.compiled, into={"MODULE": r"torch\.compile\(module\)"}),
    Fix(name="compile", framework="trainer", text=fixes.compiled, into={"ARGUMENTS": CALL["TrainingArguments"]}),
    Fix(
        name="shapes",
        framework="torch",
        text=fixes.fewer_shapes,
        into={"WRAP": r"torch\.compile\(model, dynamic=True\)"},
    ),
    Fix(name="shapes", framework="trainer", text=fixes.fewer_shapes, into={"COLLATOR": r"pad_to_multiple_of=\d+"}),
]


def applied(fix: Fix, folder: Path) -> str:
    """The script with the code of the text in it."""
    from_facts = {"framework": fix.framework, "device": "cpu", "trainer_arguments": None, **(fix.facts or {})}
    step = {
        "device": None,
        "host": {"forward": 0.05, "backward": 0.05},
        **(FOUR_MICRO if fix.name == "larger batch" else {}),
    }
    text = fix.text(seen(step=step, **from_facts))
    parameters = "self.parameters()" if fix.framework == "lightning" else "parameters"
    where = {"DEVICE": "cuda" if fix.needs_gpu else "cpu", "ON_CPU": str(not fix.needs_gpu)}
    slots = {**DEFAULTS, **where, "OPTIMIZER": f"torch.optim.AdamW({parameters})", **(fix.also or {})}
    for slot, pattern in fix.into.items():
        found = re.search(pattern, text)
        assert found is not None, f"no code for {slot} in: {text}"
        code = found[1] if found.re.groups else found[0]
        code = re.sub(r"=N\b", "=2", code)
        code = code if fix.needs_gpu else code.replace('"cuda"', '"cpu"')
        if "..." in code:
            code = code.replace("...", {"LOADER": "rows, batch_size=4", "OPTIMIZER": "lr=1e-3"}.get(slot, "folder"))
            code = re.sub(r"batch_size=4(.*batch_size=)", r"shuffle=False\1", code)
        slots[slot] = code
    if slots["WRAP"].startswith("torch.compile"):
        slots["WRAP"] = f"model = {slots['WRAP']}"
    if slots["COLLATOR"].startswith("pad_to"):
        slots["COLLATOR"] = f"DataCollatorForLanguageModeling(tokenizer, mlm=False, {slots['COLLATOR']})"
    if slots["MODEL"].startswith("from_pretrained"):
        saved = f"LlamaForCausalLM(config).save_pretrained({str(folder)!r})\nmodel = LlamaForCausalLM."
        slots["MODEL"] = saved + slots["MODEL"].replace("folder", repr(str(folder)))
    script = SCRIPTS[fix.framework]
    for slot, code in slots.items():
        script = re.sub(rf"\b{slot}\b", lambda _, code=code: code, script)  # type: ignore[misc]
    return script


def marks_of(fix: Fix) -> list[pytest.MarkDecorator]:
    if fix.needs_gpu:  # on a CPU the framework refuses it
        return [pytest.mark.gpu]
    return [] if fix.always else [pytest.mark.live]


MARKED = [pytest.param(fix, id=f"{fix.framework}-{fix.name}", marks=marks_of(fix)) for fix in FIXES]


@pytest.mark.parametrize("fix", MARKED)
def test_a_script_with_the_fix_still_trains(fix: Fix, tmp_path: Path) -> None:
    for package in NEEDS[fix.framework]:
        pytest.importorskip(package)
    script = applied(fix, tmp_path / "model")
    if fix.name == "loader":  # its workers are forked, as in a script; a process of `warm` would start them otherwise
        (tmp_path / "script.py").write_text(script)
        command = [sys.executable, "script.py", str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        started = warm.Started(tmp_path, cwd=tmp_path, script=script)
        (out, err), code = started.communicate(), started.wait()
    assert code == 0, err[-2000:]
    assert out.strip().endswith("trained")


def test_every_fix_by_framework_is_in_the_list() -> None:
    import inspect

    own = {name for name, made in inspect.getmembers(fixes, inspect.isfunction) if made.__module__ == fixes.__name__}
    helpers = {"trainer", "by_framework", "_collator"}
    named = {"larger_batch" if fix.text is larger else fix.text.__name__ for fix in FIXES} - {"<lambda>"}
    assert own - helpers == named | {"loader", "rarer"}


def test_an_optimizer_without_a_fused_version_is_kept() -> None:
    other = {"1": {"class": "Adafactor", "module": "x", "fused": None, "foreach": None, "tensors": 9}}
    text = fixes.fused_optimizer(seen(framework="trainer", optimizers=other))
    assert "AdamW" not in text
    assert "adamw" not in text
