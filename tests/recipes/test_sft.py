"""Fine-tuning end to end: adapters learn, resume bit for bit after a kill, and open in PEFT and transformers."""

import contextlib
import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recipes_processes import events, held_at, trajectory, wait_for_step, weights_hash
from tests.data.talks import question, tokenizer_folder
from tests.warm import Started

from flatout import cli
from flatout.record import Run

Call = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., Started]


def test_adapters_learn_and_open_in_peft_and_merged_in_transformers(
    flatout: Call, sft: Path, base: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = flatout("train", sft, "train.steps=null", "train.epochs=4", "save.best=true", "--run", run)
    assert done.returncode == 0, done.stderr
    losses = [float(str(e["val_loss"])) for e in events(run, "eval")]
    assert losses[-1] < losses[0] - 1.0
    (data,) = events(run, "data")
    assert (data["train_examples"], data["valid_examples"]) == (180, 20)
    first = next(Run.open(run).steps())
    assert first.tokens < first.padded_tokens == 512
    assert first.extra.targets < first.tokens / 2, "only the answers are learnt"

    # Only adapters are saved, and the best stays however many come after it.
    newest = max((run / "checkpoints").glob("step-*"))
    assert sum(f.stat().st_size for f in newest.glob("*.safetensors")) < 400_000
    best = min(events(run, "best"), key=lambda e: float(str(e["val_loss"])))
    assert (run / "checkpoints" / "best").read_text().strip() == f"step-{best['step']:08}"

    for arguments in (["--to", tmp_path / "adapter"], ["--to", tmp_path / "merged", "--merge", "--dtype", "fp32"]):
        exported = flatout("export", run, *arguments)
        assert exported.returncode == 0, exported.stderr
    refused = flatout("export", run, "--to", tmp_path / "adapter")
    assert refused.returncode == 2
    assert "--force overwrites the export in it" in refused.stderr
    assert flatout("export", run, "--to", tmp_path / "adapter", "--force").returncode == 0
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain = AutoModelForCausalLM.from_pretrained(base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    talk = [{"role": "user", "content": question(3)[0]}, {"role": "assistant", "content": question(3)[1]}]
    ids = torch.tensor([tokenizer.apply_chat_template(talk, tokenize=True)["input_ids"]])
    with torch.no_grad():
        untouched = plain(ids).logits
        adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter")
        assert (adapted(ids).logits - merged(ids).logits).abs().max() < 1e-3
        assert (untouched - merged(ids).logits).abs().max() > 0.5

    # And back: a run that starts from the exported adapter starts where this one ended.
    again = flatout("train", sft, f"lora.adapter={tmp_path / 'adapter'}", "train.steps=1", "train.warmup_steps=0",
                    "--run", tmp_path / "again")  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert float(str(events(tmp_path / "again", "eval")[0]["val_loss"])) == pytest.approx(losses[-1], abs=1e-4)


@pytest.mark.parametrize(
    "extra",
    [[], pytest.param(["lora.dropout=0.1", "plan.workers=2", "plan.micro_batch=1"], marks=pytest.mark.long)],
)
def test_resume_after_kill_is_bit_exact(
    flatout: Call, start: Start, sft: Path, tmp_path: Path, extra: list[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert flatout("train", sft, *extra, "save.every=4", "--run", whole).returncode == 0
    process = start("train", sft, *extra, "save.every=4", "--run", broken, script=held_at(15))
    wait_for_step(broken, 6, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = flatout("train", sft, *extra, "save.every=4", "--run", broken, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert trajectory(broken) == trajectory(whole)
    assert weights_hash(broken) == weights_hash(whole)
    assert len(trajectory(whole)) == 16


def test_a_checkpoint_at_the_end_of_every_epoch(flatout: Call, sft: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    length = ["train.steps=null", "train.epochs=2.5", "eval.every=null", "save.keep=9"]
    done = flatout("train", sft, *length, "save.every=epoch", "train.batch_tokens=1536", "--run", run)
    assert done.returncode == 0, done.stderr
    (data,) = events(run, "data")
    sequences, each = int(str(data["sequences"])), 1536 // 128
    assert sequences % each, "an epoch ends within a step"
    ends = [math.ceil(number * sequences / each) for number in (1, 2, 2.5)]
    saved = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert saved == ends


def test_full_fine_tuning_is_the_same_recipe(flatout: Call, sft: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = flatout("train", sft, "lora.rank=null", "lora.alpha=null", "train.lr=3e-3", "--run", run)
    assert done.returncode == 0, done.stderr
    losses = [float(str(e["val_loss"])) for e in events(run, "eval")]
    assert losses[-1] < losses[0] - 1.0
    merged = flatout("export", run, "--to", tmp_path / "x", "--merge")
    assert merged.returncode == 2
    assert "nothing to merge" in merged.stderr


def test_a_model_trained_on_plain_questions_is_asked_in_their_form(
    flatout: Call,
    sft: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows, run, out = tmp_path / "plain.jsonl", tmp_path / "run", tmp_path / "out"
    rows.write_text((json.dumps({"question": "Two and two?", "answer": "four"}) + "\n") * 40)
    bare = tokenizer_folder(tmp_path / "bare")
    config = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    plain = ("lora.rank=null", "lora.alpha=null", "train.lr=1e-2", f"data.tokenizer={bare}", f"data.path={rows}")
    done = flatout("train", sft, *plain, "--run", run)
    assert done.returncode == 0, done.stderr
    assert flatout("export", run, "--to", out).returncode == 0
    assert "Answer:" in (out / "chat_template.jinja").read_text()
    for model in (run, out):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Two and two?\n"))
        monkeypatch.setattr(sys, "argv", ["flatout", "chat", str(model), "--temperature", "0", "--max-tokens", "20"])
        with contextlib.suppress(SystemExit):
            cli.main()
        printed = capsys.readouterr()
        assert printed.out == "four\n"
        assert "no chat template" not in printed.err


def test_adapters_on_four_bits_learn(flatout: Call, sft: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = flatout("train", sft, "lora.base=4-bit", "--run", run)
    assert done.returncode == 0, done.stderr
    assert "frozen weights in 4 bits" in done.stdout
    losses = [float(str(e["val_loss"])) for e in events(run, "eval")]
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.targets=w_out", "lora.targets: 'w_out' matches no projection"),
        ("lora.adapter=nowhere", "lora.adapter: there is no folder nowhere"),
        ("data.source=text", "recipe sft takes jsonl, parquet or hf"),
        ("data.tokenizer=byte2", "data.tokenizer"),
        ("model=/nowhere", "error: model: the folder '/nowhere' does not exist"),
        ("recipe=pretrain", "works only with recipe sft"),
    ],
)
def test_bad_input_is_told_with_exit_code_2(
    flatout: Call, sft: Path, tmp_path: Path, override: str, message: str
) -> None:
    done = flatout("train", sft, override, "--run", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_corrupt_base_is_named(flatout: Call, sft: Path, base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in base.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-1000])
    done = flatout("train", sft, f"model={copy}", "--run", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert "model.safetensors is not a readable safetensors file" in " ".join(done.stderr.split())


def test_a_checkpoint_goes_on_with_its_own_base_only(flatout: Call, sft: Path, base: Path, tmp_path: Path) -> None:
    copy, run = tmp_path / "copy", tmp_path / "run"
    copy.mkdir()
    for file in base.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert flatout("train", sft, f"model={copy}", "train.steps=4", "--run", run).returncode == 0
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-4:] = b"\x00\x00\x00\x40"
    (copy / "model.safetensors").write_bytes(bytes(content))
    resumed = flatout("train", sft, f"model={copy}", "train.steps=8", "--run", run, "--resume")
    assert resumed.returncode == 4
    assert "belongs to another run" in " ".join(resumed.stderr.split())
    exported = flatout("export", run, "--to", tmp_path / "out")
    assert exported.returncode == 2
    assert "does not have the weights" in " ".join(exported.stderr.split())


def test_the_plan_knows_about_adapters(flatout: Call, sft: Path) -> None:
    plans = {}
    for name, overrides in {
        "full": ["lora.rank=null", "lora.alpha=null"],
        "lora": [],
        "4": ["lora.base=4-bit"],
    }.items():
        made = flatout("plan", sft, *overrides, "plan.precision=null", "--on", "T4", "--json")
        assert made.returncode == 0, made.stderr
        plans[name] = json.loads(made.stdout)["predicted"]
    assert plans["4"]["memory_gib"]["weights"] < plans["lora"]["memory_gib"]["weights"]
    assert plans["lora"]["memory_gib"]["optimizer"] < plans["full"]["memory_gib"]["optimizer"] / 3
    assert plans["lora"]["checkpoint_gib"] < plans["full"]["checkpoint_gib"] / 3
