"""`flatout.accelerate`: the same numbers as plain transformers, in one instance only, and everything back by undo."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout.engine import accelerate as module
from flatout.errors import UsageError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "initializer_range": 0.2,  # wide enough that attention matters
}  # fmt: skip
FAMILIES = {"Llama": {}, "Mistral": {"sliding_window": 5}, "Qwen2": {}, "Qwen3": {"head_dim": 16}}


def made(family: str, **more: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family] | more))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():  # norms and biases that are not 1 and 0
        if parameter.dim() == 1:
            parameter.data = torch.randn(parameter.shape) * 0.1 + float("norm" in name)
    return model


def tokens(*, batch: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(0, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["plain", "kernels"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both paths on a CPU: the plain one, as users have it, and the kernels by Triton's interpreter."""
    if request.param == "plain":
        monkeypatch.setattr(module, "no_triton", lambda _device: "the kernels need a GPU")
    elif torch.cuda.is_available():
        pytest.skip("on a GPU the kernels run natively: tests/kernels")
    return str(request.param)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "no_triton", lambda _device: "the kernels need a GPU")


def gradients(model: Any, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_transformers(family: str, path: str) -> None:
    model = made(family)
    other = copy.deepcopy(model)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padded on the left
    labels = torch.where(mask == 1, ids, -100)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    before = model.eval()(**given)
    expected_loss, expected = gradients(model.train(), **given)
    keys, names = model.state_dict().keys(), [name for name, _ in model.named_parameters()]

    found = flatout.accelerate(model)
    assert found.why_not == {}
    assert len(found.changed) == 4
    assert all(("(kernels)" if path == "kernels" else "(plain: ") in line for line in found.changed)
    after = model.eval()(**given)
    real = mask.bool()
    assert (after.logits - before.logits)[real].abs().max() < 1e-4
    loss, grads = gradients(model.train(), **given)
    assert abs(loss - expected_loss) < 1e-5
    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (grads[name] - gradient).abs().max() <= 1e-4 * max(1.0, float(gradient.abs().max())), name
    assert model(**given).logits is None, "no logits while it trains with labels"
    assert (model.state_dict().keys(), [name for name, _ in model.named_parameters()]) == (keys, names)
    assert type(other.model.layers[0]).__mro__[1].__name__ == "GradientCheckpointingLayer", (
        "another instance is as it was"
    )

    found.undo()
    again = model.eval()(**given)
    assert torch.equal(again.logits, before.logits)
    assert type(model) is type(other)
    assert not any(hasattr(part, "_flatout") for part in model.modules())
    pointers = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(pointers)) == len(pointers), "every weight has its own storage again"
    found.undo()  # does nothing


def trained(model: Any, folder: Path, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    rows = [{"input_ids": tokens(batch=1, seed=i)[0], "labels": tokens(batch=1, seed=i)[0]} for i in range(80)]
    chosen = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=20, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=3e-3, logging_steps=1, report_to=[], save_strategy="no", seed=0, use_cpu=True, disable_tqdm=True,
        **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=chosen, train_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize(
    ("family", "options"), [("Llama", {}), ("Qwen3", {"gradient_checkpointing": True}), ("Qwen2", {"bf16": True})]
)
def test_twenty_steps_of_the_trainer_are_equal(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = made(family)
    plain_losses, plain = trained(copy.deepcopy(model), tmp_path / "plain", **options)
    flatout.accelerate(model)
    losses, found = trained(model, tmp_path / "fused", **options)
    limit = 5e-2 if options.get("bf16") else 1e-4
    assert len(losses) == 20
    assert max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True)) < limit
    assert max(float((found[name] - plain[name]).abs().max()) for name in plain) < limit
    assert losses[-1] != losses[0]


def test_a_few_steps_with_the_kernels_under_autocast(tmp_path: Path) -> None:
    """The residual stream is fp32 there and the matmuls are 16 bits wide."""
    model = made("Qwen3")
    ids = tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected_loss, expected = gradients(model.train(), input_ids=ids, labels=ids)
        flatout.accelerate(model)
        loss, found = gradients(model, input_ids=ids, labels=ids)
    assert abs(loss - expected_loss) < 2e-2
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        assert float((found[name] - gradient).norm() / gradient.norm()) < 6e-2, name


@pytest.mark.usefixtures("plainly")
def test_it_saves_generates_copies_and_shows_attention_as_before(tmp_path: Path) -> None:
    model = made("Llama", attn_implementation="eager").eval()
    ids = tokens(batch=1)
    generated = model.generate(ids, max_new_tokens=6, do_sample=False)
    shown = model(ids, output_attentions=True, output_hidden_states=True)
    flatout.accelerate(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), generated)
    seen = model(ids, output_attentions=True, output_hidden_states=True)
    for name in ("attentions", "hidden_states"):
        assert len(seen[name]) == len(shown[name]) > 0
        assert all((a - b).abs().max() < 1e-4 for a, b in zip(seen[name], shown[name], strict=True))
    model.save_pretrained(tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(back) is transformers.LlamaForCausalLM
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), model.state_dict().values(), strict=True))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.q_proj.weight.mul_(2)
    assert (twin(ids).logits - seen.logits).abs().max() > 1e-3, "a copy computes with its own weights"
    assert torch.equal(model(ids).logits, seen.logits)


@pytest.mark.usefixtures("plainly")
def test_the_loss_follows_the_arguments_of_transformers() -> None:
    model = made("Llama").train()
    ids = tokens()
    half = torch.where(torch.arange(9) % 2 == 0, ids, -100)
    cases: list[dict[str, Any]] = [
        {"labels": half, "num_items_in_batch": torch.tensor(17)},
        {"labels": ids, "shift_labels": half},
        {"labels": ids, "logits_to_keep": 9},
        {"labels": ids, "return_dict": False},
        {"labels": ids, "ignore_index": int(ids[0, 3])},
    ]
    expected = [model(ids, **case)[0].item() for case in cases]
    flatout.accelerate(model)
    assert [model(ids, **case)[0].item() for case in cases] == pytest.approx(expected, abs=1e-5)
    assert model(ids, logits_to_keep=9, labels=ids).logits is not None


@pytest.mark.usefixtures("plainly")
def test_what_is_left_alone_is_told() -> None:
    peft = pytest.importorskip("peft")
    model = made("Llama")
    ids = tokens()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, config)
    expected, grads = gradients(tuned.train(), input_ids=ids, labels=ids)
    found = flatout.accelerate(tuned)
    assert "peft.tuners.lora.layer.Linear" in found.why_not["norm, qkv and rotary embeddings"]
    assert "norm, gate, up, SwiGLU and down: one function in 2 of 2 layers" in str(found)
    loss, after = gradients(tuned, input_ids=ids, labels=ids)
    assert abs(loss - expected) < 1e-5
    assert all((after[name] - grads[name]).abs().max() < 1e-4 for name in grads)

    hooked = made("Llama")
    hooked.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert "has hooks" in flatout.accelerate(hooked).why_not["norm and MLP"]
    odd = made("Llama", hidden_act="gelu")
    assert "gelu" in flatout.accelerate(odd).why_not["norm and MLP"]
    own = made("Qwen2")
    own.loss_function = lambda **_: torch.zeros(())
    assert "not that of causal models" in flatout.accelerate(own).why_not["loss"]


@pytest.mark.usefixtures("plainly")
def test_what_cannot_be_accelerated_is_refused() -> None:
    with pytest.raises(UsageError, match=r"knows LlamaForCausalLM, .* but not torch\.nn\.modules\.linear\.Linear"):
        flatout.accelerate(nn.Linear(2, 2))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32))
    with pytest.raises(UsageError, match="GPT2LMHeadModel"):
        flatout.accelerate(gpt2)
    model = made("Llama")
    with pytest.raises(UsageError, match="nothing in this LlamaForCausalLM"):
        flatout.accelerate(model, segments=False, loss=False)
    done = flatout.accelerate(model)
    with pytest.raises(UsageError, match="accelerated already"):
        flatout.accelerate(model)
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(UsageError, match=r"after flatout\.accelerate"):
        tuned(tokens())
    tuned.unload()
    done.undo()
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(UsageError, match="has no values here"):
        flatout.accelerate(empty)


def test_another_function_in_the_same_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Llama")
    monkeypatch.setattr(module, "no_triton", lambda _device: "the kernels need a GPU")
    monkeypatch.setattr(module, "rotate", lambda x, *_: x)
    with pytest.raises(UsageError, match="differs from the plain one by"):
        flatout.accelerate(model)
    assert not any(hasattr(part, "_flatout") for part in model.modules()), "nothing is left changed"


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_the_kernels_on_a_gpu(family: str, autocast: bool) -> None:
    model = made(family).cuda().train()
    model = model if autocast else model.to(torch.bfloat16)
    ids = tokens(batch=4, length=48).cuda()
    exact_loss, exact = gradients(copy.deepcopy(model).float(), input_ids=ids, labels=ids)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        _, plain = gradients(model, input_ids=ids, labels=ids)
        found = flatout.accelerate(model)
        loss, fused = gradients(model, input_ids=ids, labels=ids)
    assert found.why_not == {}
    assert all("(kernels)" in line for line in found.changed), found.changed
    assert abs(loss - exact_loss) < 5e-2
    for name, gradient in exact.items():
        allowed = 2 * float((plain[name].float() - gradient).norm()) + 2e-2 * float(gradient.norm())
        assert float((fused[name].float() - gradient).norm()) <= allowed, name
