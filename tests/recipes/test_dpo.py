"""Preference optimisation: TRL's loss and gradients, packing that changes nothing, and runs from end to end."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from recipes_processes import events, held_at, trajectory, wait_for_step
from tests.data.talks import question
from tests.engine.test_step import ACTIVE
from tests.warm import Started

from flatout.config.settings import DataSettings, DpoSettings
from flatout.data.examples import Encoder, Examples
from flatout.data.packed import Packed
from flatout.data.stream import NOT_TRAINED, Batch
from flatout.data.tokenizer import load_tokenizer
from flatout.engine.objective import LOSS, Head
from flatout.engine.prepare import attend_for
from flatout.losses import linear_cross_entropy
from flatout.model import Decoder, weights
from flatout.plan.job import named_shape
from flatout.recipes.preference import REFERENCE, Pairs, Preference, with_columns

Call = Callable[..., subprocess.CompletedProcess[str]]
LOSSES = ["sigmoid", "ipo"]


def decoder_of(folder: Path) -> Decoder:
    from flatout.config.settings import ModelSettings

    return weights.load(folder, shape=named_shape(ModelSettings(name=str(folder))))


def summed(model: Decoder, batch: Batch, objective: Preference) -> dict[str, torch.Tensor]:
    def head(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        return objective(batch, Head(hidden_NC=hidden, weight_VC=weight, loss=linear_cross_entropy))

    return dict(model(batch.tokens, batch.positions, attend_for(batch, active=ACTIVE), head))


def batches_of(examples: Examples, *, length: int = 128, size: int = 1) -> list[Batch]:
    packed = Packed(examples, sequence_length=length, batch_sequences=size, seed=0, shuffle=False, unit=2)
    steps = -(-packed.num_sequences // size)
    return [batch for step in range(steps) for batch in Pairs(packed).micro_batches(step, micro_batch=size)]


def log_probs(model: Decoder, examples: Examples) -> Examples:
    """The examples with the log-probabilities of a model, one example at a time."""
    values = np.zeros(len(examples.tokens), np.float32)
    for begin, end in zip(examples.ends - examples.lengths, examples.ends, strict=True):
        one = Examples(
            tokens=examples.tokens[begin:end], trained=examples.trained[begin:end], ends=np.array([end - begin])
        )
        batch = Packed(one, sequence_length=128, batch_sequences=1, seed=0, shuffle=False).batch([0])
        with torch.no_grad():
            logp = model(
                batch.tokens, batch.positions, attend_for(batch, active=ACTIVE),
                lambda hidden, weight, batch=batch: Head(
                    hidden_NC=hidden, weight_VC=weight, loss=linear_cross_entropy
                ).log_probs(batch.targets)[0],
            )  # fmt: skip
        values[begin + 1 : end] = np.where(one.trained[1:], logp[: end - begin - 1].numpy(), 0)
    from dataclasses import replace

    return replace(examples, columns={**examples.columns, REFERENCE: values})


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_trl(base: Path, tmp_path: Path, loss: str) -> None:
    """Within 1e-5 in fp32, on the same tokens, packed here and padded there."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = []
    for i in range(6):
        asked, answer = question(i)
        rows.append(
            {"prompt": asked, "chosen": f" {answer}", "rejected": " I do not know that one, sorry" * (1 + i % 2)}
        )
    model, reference = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path / "moved")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), beta=0.3, loss_type=[loss], use_cpu=True, bf16=False, report_to=[],
        per_device_train_batch_size=6, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model=model, ref_model=reference, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
    theirs = trainer.compute_loss(trainer.model, inputs)
    theirs.backward()

    found = []
    for ids, mask, learnt in zip(inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"], strict=True):
        kept = mask.bool().numpy()
        found.append((ids.numpy()[kept], learnt.bool().numpy()[kept]))
    order = [i for pair in range(6) for i in (pair, pair + 6)]
    examples = with_columns(Examples.of([found[i] for i in order]))
    examples = log_probs(decoder_of(base), examples)
    ours = decoder_of(tmp_path / "moved")
    batches = batches_of(examples)
    assert 1 < len(batches) < 6, "packed, and not all in one sequence"
    assert sum(batch.num_target_tokens for batch in batches) == 6
    total = sum((summed(ours, batch, Preference(DpoSettings(loss=loss, beta=0.3)))[LOSS] for batch in batches), 0) / 6
    total.backward()
    assert abs(float(total) - float(theirs)) < 1e-5
    their_layers = trainer.model.model.layers
    for block, layer in zip(ours.blocks, their_layers, strict=True):
        qkv = torch.cat([getattr(layer.self_attn, f"{name}_proj").weight.grad for name in "qkv"])
        up = torch.cat([layer.mlp.gate_proj.weight.grad, layer.mlp.up_proj.weight.grad])
        pairs = [(block.qkv, qkv), (block.gate_up, up), (block.out, layer.self_attn.o_proj.weight.grad)]
        pairs += [(block.down, layer.mlp.down_proj.weight.grad)]
        for mine, wanted in pairs:
            assert mine.grad is not None
            assert (mine.grad - wanted).abs().max() < 1e-5
    assert (ours.embedding.grad - trainer.model.model.embed_tokens.weight.grad).abs().max() < 1e-5  # type: ignore[operator]


def some_pairs(count: int) -> Examples:
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        prompt = generator.integers(3, 300, 5)
        for _ in range(2):
            answer = generator.integers(3, 300, int(generator.integers(2, 12)))
            rows.append((np.concatenate([prompt, answer]), np.arange(5 + len(answer)) >= 5))
    return with_columns(Examples.of(rows))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo"])
def test_packed_equals_the_formula_on_one_answer_at_a_time(base: Path, loss: str) -> None:
    model, settings = decoder_of(base), DpoSettings(loss=loss, beta=0.5, margin=0.2 if loss == "simpo" else 0.0)
    examples = log_probs(model, some_pairs(9))  # the model's own: the policy at the start
    said, count = examples.columns[REFERENCE], examples.trained_counts
    begins = examples.ends - examples.lengths
    sums = np.array([said[b:e].sum() for b, e in zip(begins, examples.ends, strict=True)])
    shifted = examples.columns[REFERENCE] * 0.7
    from dataclasses import replace

    away = np.array([(said - shifted)[b:e].sum() for b, e in zip(begins, examples.ends, strict=True)])
    wanted = 0.0
    for chosen, rejected in zip(range(0, 18, 2), range(1, 18, 2), strict=True):
        if loss == "sigmoid":
            wanted += np.log1p(np.exp(-0.5 * (away[chosen] - away[rejected])))
        elif loss == "ipo":
            wanted += (away[chosen] / count[chosen] - away[rejected] / count[rejected] - 1) ** 2
        else:
            ahead = sums[chosen] / count[chosen] - sums[rejected] / count[rejected]
            wanted += np.log1p(np.exp(-(0.5 * ahead - 0.2)))
    columns = {**examples.columns, REFERENCE: shifted}
    found = [summed(model, batch, Preference(settings)) for batch in batches_of(replace(examples, columns=columns))]
    assert float(sum(one[LOSS] for one in found)) == pytest.approx(float(wanted), rel=1e-4)
    in_two = batches_of(replace(examples, columns=columns), length=64, size=2)
    again = sum(float(summed(model, batch, Preference(settings))[LOSS].detach()) for batch in in_two)
    assert again == pytest.approx(float(wanted), rel=1e-4)
    assert 0 <= float(sum(one["accuracy"] for one in found)) <= 9


# -- rows ----------------------------------------------------------------------------------------------------


def test_preference_rows_in_every_form(base: Path) -> None:
    encoder = Encoder(DataSettings(path="x"), load_tokenizer(str(base), documents=None, cache=Path()), pairs=True)
    user, good, bad = ({"role": r, "content": c} for r, c in (("user", "Q"), ("assistant", "A"), ("assistant", "B")))
    with_prompt = encoder.meaning({"prompt": [user], "chosen": [good], "rejected": [bad]}).meaning
    without = encoder.meaning({"chosen": [user, good], "rejected": [user, bad]}).meaning
    beside = encoder.meaning({"prompt": "Q", "chosen": [user, good], "rejected": [user, bad]}).meaning
    assert with_prompt == without == beside
    for row, words in (
        ({"chosen": [user, good], "rejected": [user, good]}, "the same conversation"),
        ({"prompt": "Q", "chosen": "A", "rejected": " "}, "an empty answer"),
        ({"prompt": "Q", "chosen": 1, "rejected": "B"}, "neither texts nor lists of messages"),
        ({"prompt": "Q", "completion": "A"}, "no 'chosen' and 'rejected', which recipe dpo compares"),
    ):
        with pytest.raises(ValueError, match=words):
            encoder.meaning(row)


# -- runs ----------------------------------------------------------------------------------------------------


def config_of(base: Path, tmp_path: Path, *, count: int = 60, **sections: Any) -> Path:
    rows = []
    for i in range(count):
        asked, answer = question(i)
        rows.append({"prompt": asked, "chosen": f" {answer}", "rejected": f" {question(i + 1)[1][::-1]}"})
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    settings: dict[str, Any] = {
        "recipe": "dpo",
        "model": str(base),
        "data": {"path": str(tmp_path / "pairs.jsonl"), "sequence_length": 128, "valid_share": 0.2, "cache": "cache"},
        "train": {"batch_tokens": 512, "steps": 12, "lr": 5e-3},
        "eval": {"every": 6},
        "plan": {"precision": "fp32", "threads": 1},
    }
    path = tmp_path / "dpo.yaml"
    path.write_text(yaml.safe_dump(settings | sections))
    return path


@pytest.mark.parametrize(("loss", "extra"), [("sigmoid", ["lora.rank=4"]), ("ipo", []), ("simpo", ["lora.rank=4"])])
def test_a_run_learns_to_prefer(flatout: Call, base: Path, tmp_path: Path, loss: str, extra: list[str]) -> None:
    from flatout.record import Run

    path = config_of(base, tmp_path)
    done = flatout("train", path, f"dpo.loss={loss}", *extra, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    steps = list(Run.open(tmp_path / "run").steps())
    if loss == "sigmoid":  # at the start the policy is the reference
        assert steps[0].loss == pytest.approx(np.log(2), abs=1e-4)
    assert steps[-1].loss < steps[0].loss
    assert float(steps[-1].extra.metrics["accuracy"]) > 0.9
    losses = [float(str(e["val_loss"])) for e in events(tmp_path / "run", "eval")]
    assert losses[-1] < losses[0]


def test_resume_after_kill_is_bit_exact(
    flatout: Call, start: Callable[..., Started], base: Path, tmp_path: Path
) -> None:
    path, whole, broken = config_of(base, tmp_path), tmp_path / "whole", tmp_path / "broken"
    assert flatout("train", path, "lora.rank=4", "save.every=4", "--run", whole).returncode == 0
    process = start("train", path, "lora.rank=4", "save.every=4", "--run", broken, script=held_at(9))
    wait_for_step(broken, 6, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = flatout("train", path, "lora.rank=4", "save.every=4", "--run", broken, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert trajectory(broken) == trajectory(whole)


def test_a_batch_counts_its_pairs() -> None:
    batch = batches_of(some_pairs(2))[0]
    assert int((batch.targets != NOT_TRAINED).sum()) > batch.num_target_tokens == 2


def test_a_model_that_transformers_runs_learns_to_prefer(flatout: Call, tmp_path: Path) -> None:
    from tests.data.talks import tokenizer_folder
    from transformers import GPT2Config, GPT2LMHeadModel

    from flatout.record import Run

    folder = tokenizer_folder(tmp_path / "gpt2")
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=320, n_positions=128)).save_pretrained(folder)
    done = flatout(
        "train",
        config_of(folder, tmp_path),
        "lora.rank=4",
        "train.steps=4",
        "eval.every=null",
        "--run",
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stderr
    steps = list(Run.open(tmp_path / "run").steps())
    assert steps[0].loss == pytest.approx(np.log(2), abs=1e-4)
    assert steps[-1].loss < steps[0].loss
