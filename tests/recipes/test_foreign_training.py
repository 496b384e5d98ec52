"""Models that transformers runs, behind the same commands: losses of a plain loop with PEFT, and exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.talks import tokenizer_folder, write_rows

from flatout import recipes
from flatout.config import from_mapping
from flatout.data.stream import NOT_TRAINED
from flatout.losses import capped, linear_cross_entropy, row_loss
from flatout.optim import schedule
from flatout.recipes.sft import conversations
from flatout.record import Run

STEPS = 10
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip


def config_of(kind: str) -> Any:
    import transformers as t

    match kind:
        case "gpt2":
            return t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=320, n_positions=128, initializer_range=0.1)
        case "gemma2":
            return t.Gemma2Config(
                **SMALL, head_dim=8, sliding_window=16, query_pre_attn_scalar=8, final_logit_softcapping=5.0
            )
        case "gemma3":
            return t.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=16, query_pre_attn_scalar=8)
        case "phi3":
            return t.Phi3Config(**SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        case _:
            return t.Qwen3MoeConfig(
                **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                decoder_sparse_step=1, mlp_only_layers=[],
            )  # fmt: skip


KINDS = ["gpt2", "gemma2", "gemma3", "phi3", "qwen3_moe"]


@pytest.fixture(scope="module", params=KINDS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tokenizer_folder(tmp_path_factory.mktemp("foreign") / request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(request.param)).save_pretrained(folder)
    return folder


def settings_of(base: Path, tmp_path: Path, *, rank: int | None) -> Any:
    rows = write_rows(tmp_path / "rows.jsonl", count=40)
    return from_mapping(
        {
            "recipe": "sft",
            "model": str(base),
            "data": {"path": str(rows), "sequence_length": 128, "valid_share": 0.1, "cache": str(tmp_path / "cache")},
            "train": {"batch_tokens": 512, "steps": STEPS, "lr": 1e-3, "warmup_steps": 2},
            "plan": {"precision": "fp32", "threads": 1},
            "lora": {"rank": rank},
        }
    )


def plain_loop(settings: Any, base: Path) -> tuple[list[float], Any]:
    """Examples padded to the right, masked, one optimizer step for each step of the run."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if settings.lora.rank is not None:
        import peft

        transposed = model.config.model_type == "gpt2"
        asked = peft.LoraConfig(
            r=settings.lora.rank, lora_alpha=2 * settings.lora.rank, target_modules="all-linear",
            task_type="CAUSAL_LM", fan_in_fan_out=transposed,
        )  # fmt: skip
        torch.manual_seed(0)
        model = peft.get_peft_model(model, asked)
    model.train()
    train = settings.train
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps)
    rate, losses = schedule(train, total_steps=STEPS), []
    with conversations(settings) as material:
        stream: Any = material.source.stream  # type: ignore[attr-defined]
        for step in range(STEPS):
            numbers = [
                member
                for index in range(step * stream.batch_sequences, (step + 1) * stream.batch_sequences)
                for member in stream.members(int(stream.sequences(torch.tensor([index]).numpy())[0]))
            ]
            rows = []
            for number in numbers:
                begin = int(stream.examples.ends[number] - stream.examples.lengths[number])
                part = slice(begin, int(stream.examples.ends[number]))
                rows.append((torch.from_numpy(stream.examples.tokens[part]).long(), stream.examples.trained[part]))
            longest = max(len(ids) for ids, _ in rows)
            ids, labels, mask = (torch.full((len(rows), longest), fill) for fill in (0, NOT_TRAINED, 0))
            for i, (tokens, learnt) in enumerate(rows):
                ids[i, : len(tokens)], mask[i, : len(tokens)] = tokens, 1
                labels[i, : len(tokens)] = torch.where(torch.from_numpy(learnt), tokens, NOT_TRAINED)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, train.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses, model.eval()


@pytest.mark.parametrize("rank", [None, 4])
def test_losses_are_those_of_a_plain_loop_and_the_export_opens(
    base: Path, tmp_path: Path, flatout: Callable[..., Any], rank: int | None
) -> None:
    from transformers import AutoModelForCausalLM

    settings = settings_of(base, tmp_path, rank=rank)
    recipes.run(settings, folder=tmp_path / "run")
    ours = [step.loss for step in Run.open(tmp_path / "run").steps()]
    theirs, model = plain_loop(settings, base)
    assert len(ours) == STEPS
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert ours[-1] < ours[0] - 0.05
    done = flatout("export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    if rank is None:
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    else:
        from peft import PeftModel

        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        exported = PeftModel.from_pretrained(plain, tmp_path / "out")
        merged = flatout("export", str(tmp_path / "run"), "--to", str(tmp_path / "m"), "--dtype", "fp32", "--merge")
        experts = base.name == "qwen3_moe"
        assert merged.returncode == (2 if experts else 0), merged.stderr
        assert not experts or "export without --merge" in merged.stderr
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        assert (exported.eval()(ids).logits - wanted).abs().max() < 2e-3
        if rank is not None and not experts:
            whole = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
            assert (exported(ids).logits - whole(ids).logits).abs().max() < 1e-4


def test_capped_logits_have_the_loss_and_gradient_of_autograd() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 8).requires_grad_(), torch.randn(20, 8).requires_grad_()
    targets = torch.randint(0, 20, (12,))
    targets[3] = NOT_TRAINED
    ours = linear_cross_entropy(hidden, weight, targets, chunk=5, rows=capped(row_loss, 2.0))
    found = torch.autograd.grad(ours, (hidden, weight))
    logits = 2.0 * torch.tanh(hidden @ weight.t() / 2.0)
    theirs = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    wanted = torch.autograd.grad(theirs, (hidden, weight))
    assert abs(float(ours) - float(theirs)) < 1e-4
    for mine, other in zip(found, wanted, strict=True):
        assert (mine - other).abs().max() < 1e-5
