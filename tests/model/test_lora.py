"""Adapters: equal to the plain formula on every path, merged without loss, and at home in PEFT's files."""

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flatout.config import from_mapping
from flatout.cost import TARGETS, Adapters, ModelShape, projections
from flatout.errors import UsageError
from flatout.model import Decoder, Rectangular, load_adapted, lora, peft, weights
from flatout.model.nf4 import Nf4
from flatout.plan import adapters_of

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=96, positions=64)
CPU = torch.device("cpu")
LORA = Adapters(rank=4, alpha=8.0)


def adapted(spec: Adapters = LORA, *, shape: ModelShape = SHAPE, moved: bool = True) -> Decoder:
    """A frozen model with adapters; `moved` gives B values too, as training does."""
    model = Decoder(shape)
    model.initialise(3)
    lora.freeze(model, device=CPU, base_bits=spec.base_bits, seed=0)
    lora.attach(model, spec, seed=1)
    if moved:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for _, b in lora.adapters(model).values():
                b.normal_(0.0, 0.1, generator=generator)
    return model


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(tokens, torch.arange(len(tokens)), Rectangular(batch=1), lambda h, w: h @ w.t())
    return out


def tokens() -> torch.Tensor:
    return torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(0))


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    logits(model, tokens()).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


SOME_TARGETS = (TARGETS, ("q", "v"), ("k",), ("o", "down"), ("up",))


@pytest.mark.parametrize("targets", SOME_TARGETS)
def test_only_groups_with_a_target_have_an_adapter(targets: tuple[str, ...]) -> None:
    model = adapted(Adapters(rank=4, alpha=12.0, targets=targets))
    expected = {group for group, parts in lora.GROUPS.items() if set(parts) & set(targets)}
    assert all(set(block.adapters) == expected for block in model.blocks)


@pytest.mark.parametrize(
    ("group", "targets"),
    [(group, targets) for targets in SOME_TARGETS for group, parts in lora.GROUPS.items() if set(parts) & set(targets)],
)
def test_an_adapter_is_the_plain_formula(group: str, targets: tuple[str, ...]) -> None:
    spec = Adapters(rank=4, alpha=12.0, targets=targets)
    block = adapted(spec).blocks[0]
    adapter, weight = block.adapters[group], getattr(block, group)
    x = torch.randn(9, weight.shape[1], requires_grad=True)
    found = adapter(x, weight, None)

    expected = F.linear(x, weight)
    begin = 0
    for name in lora.GROUPS[group]:
        rows = projections(SHAPE)[name][1]
        if name in targets:
            a, b = adapter.pairs()[name]
            addition = spec.scale * (x @ a.t()) @ b.t()
            expected = expected + F.pad(addition, (begin, weight.shape[0] - begin - rows))
        begin += rows
    assert torch.allclose(found, expected, atol=1e-5)
    dy = torch.randn_like(found)
    wanted = [x, adapter.a, adapter.b]
    ours = torch.autograd.grad(found, wanted, dy, retain_graph=True)
    plain = torch.autograd.grad(expected, wanted, dy)
    for one, other in zip(ours, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_a_fresh_adapter_changes_nothing_and_only_it_learns() -> None:
    plain = Decoder(SHAPE)
    plain.initialise(3)
    model = adapted(moved=False)
    assert torch.equal(logits(model, tokens()), logits(plain, tokens()))
    assert set(gradients(model)) == {n for n, p in model.named_parameters() if ".adapters." in n}
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == LORA.num_parameters(SHAPE)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_gives_the_same_gradients(recompute: str) -> None:
    plain, other = adapted(), adapted()
    for block in other.blocks:
        block.recompute = recompute  # type: ignore[assignment]
    expected, found = gradients(plain), gradients(other)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-7), name


def test_dropout_only_while_training_and_the_same_when_recomputed() -> None:
    spec = replace(LORA, dropout=0.5)
    model = adapted(spec)
    with torch.no_grad():
        assert torch.allclose(logits(model, tokens()), logits(adapted(), tokens()), atol=1e-5)
    results = []
    for recompute in ("none", "full"):
        other = adapted(spec)
        for block in other.blocks:
            block.recompute = recompute  # type: ignore[assignment]
        torch.manual_seed(7)
        results.append(gradients(other))
    assert not torch.allclose(results[0]["blocks.0.adapters.qkv.a"], gradients(adapted())["blocks.0.adapters.qkv.a"])
    for name, gradient in results[0].items():
        assert torch.allclose(results[1][name], gradient, atol=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(LORA, id="16"),
        pytest.param(Adapters(rank=4, alpha=8.0, targets=("q",), base_bits=4), id="4", marks=pytest.mark.long),
    ],
)
def test_compiled_blocks_give_the_same_gradients(spec: Adapters) -> None:
    expected, model = gradients(adapted(spec)), adapted(spec)
    torch.compiler.reset()  # graphs of one class's blocks are counted together, whichever test made them
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    found = gradients(model)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-6), name


def test_rslora_scales_by_the_root() -> None:
    assert replace(LORA, rslora=True).scale == 8.0 / 2.0
    assert LORA.scale == 2.0


def test_merging_gives_the_same_model_without_adapters() -> None:
    model = adapted()
    before = logits(model, tokens())
    lora.merge(model)
    assert not lora.adapters(model)
    assert torch.allclose(logits(model, tokens()), before, atol=1e-4)


@pytest.mark.parametrize("targets", ["qq", "q,w_proj", "lm_head", ",", "all-linear,q"])
def test_a_target_that_matches_nothing_is_refused_with_the_known_ones(targets: str) -> None:
    with pytest.raises(UsageError, match=r"matches no projection.*q, k, v, o, gate, up, down"):
        adapters_of(settings(targets=targets).lora)


def settings(**values: object):  # type: ignore[no-untyped-def]
    return from_mapping(
        {
            "recipe": "sft",
            "model": {"layers": 2, "hidden": 64, "heads": 4},
            "data": {"source": "jsonl", "path": "x.jsonl"},
            "train": {"steps": 1},
            "lora": {"rank": 4, **values},
        }
    )


def test_targets_by_our_names_and_by_theirs() -> None:
    assert adapters_of(settings().lora).targets == TARGETS  # type: ignore[union-attr]
    assert adapters_of(settings(targets="v_proj, q").lora).targets == ("q", "v")  # type: ignore[union-attr]


# -- 4 bits ------------------------------------------------------------------------------------------------


def test_four_bits_come_back_as_the_nearest_code() -> None:
    weight = torch.randn(32, 64)
    codes = Nf4.of(weight)
    assert codes.codes.numel() == weight.numel() // 2
    error = (codes.dense(torch.float32) - weight).abs()
    # Half of the widest gap between two codes, times the block's largest weight.
    assert (error <= 0.16 * weight.abs().amax(dim=1, keepdim=True)).all()
    assert error.mean() < 0.1
    again = Nf4.of(codes.dense(torch.float32))
    assert torch.equal(again.codes, codes.codes)


def test_adapters_on_four_bits_equal_adapters_on_the_weights_those_stand_for() -> None:
    model, dense = adapted(replace(LORA, base_bits=4)), adapted(replace(LORA, base_bits=4))
    for block in dense.blocks:
        for group in lora.GROUPS:
            weight = getattr(block, group).dense(torch.float32)
            delattr(block, group)
            setattr(block, group, torch.nn.Parameter(weight, requires_grad=False))
    expected, found = gradients(dense), gradients(model)
    assert set(expected) == set(found)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-6), name


def test_four_bits_without_an_adapter_pass_the_gradient_through() -> None:
    model = adapted(replace(LORA, base_bits=4, targets=("q",)))
    assert all(gradient.abs().sum() > 0 for gradient in gradients(model).values())


# -- PEFT's files ------------------------------------------------------------------------------------------

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    return folder


def ours_on(base: Path, spec: Adapters) -> Decoder:
    model = weights.load(base)
    lora.freeze(model, device=CPU, base_bits=16, seed=0)
    lora.attach(model, spec, seed=1)
    return model


@pytest.mark.parametrize(
    "spec", [LORA, Adapters(rank=3, alpha=5.0, targets=("q", "v", "down"), rslora=True)], ids=["all", "some"]
)
def test_peft_opens_our_adapter_with_equal_logits(base: Path, tmp_path: Path, spec: Adapters) -> None:
    from peft import PeftModel

    model = ours_on(base, spec)
    with torch.no_grad():
        for _, b in lora.adapters(model).values():
            b.normal_(0.0, 0.1)
    peft.save(model, tmp_path, spec, base=str(base), fingerprint=peft.fingerprint(base))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    with torch.no_grad():
        expected, found = theirs(tokens()[None]).logits[0], logits(model, tokens())
        plain = AutoModelForCausalLM.from_pretrained(base)(tokens()[None]).logits[0]
    assert (found - expected).abs().max() < 1e-3
    assert (plain - expected).abs().max() > 0.1, "the adapter does something"
    assert peft.read(tmp_path) == spec


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]])
def test_we_open_pefts_adapter_with_equal_logits(base: Path, tmp_path: Path, targets: object) -> None:
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM"),  # type: ignore[arg-type]
    )
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.1)
    theirs.save_pretrained(tmp_path)
    spec = peft.read(tmp_path)
    model = ours_on(base, spec)
    peft.load(model, tmp_path, spec, base=peft.fingerprint(base))
    with torch.no_grad():
        assert (logits(model, tokens()) - theirs(tokens()[None]).logits[0]).abs().max() < 1e-3


def saved(base: Path, folder: Path) -> Decoder:
    model = ours_on(base, LORA)
    peft.save(model, folder, LORA, base=str(base), fingerprint=peft.fingerprint(base))
    return model


def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    model = saved(base, tmp_path)
    with pytest.raises(UsageError, match="another base: its weights are not"):
        peft.load(model, tmp_path, LORA, base="0" * 64)
    wider = adapted(shape=replace(SHAPE, intermediate=192))
    with pytest.raises(
        UsageError, match=r"another base: .*gate_proj.*this model needs|another base: .*this model needs"
    ):
        peft.load(wider, tmp_path, LORA, base=None)
    deeper = adapted(shape=replace(SHAPE, layers=3))
    with pytest.raises(UsageError, match="it has 2 layers, the model has 3"):
        peft.load(deeper, tmp_path, LORA, base=None)


def test_what_our_adapters_cannot_do_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    model = saved(base, tmp_path)
    with pytest.raises(UsageError, match=r"rank 4, but this run has 8: set lora\.rank"):
        peft.load(model, tmp_path, replace(LORA, rank=8), base=None)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True, "bias": "all"}))
    with pytest.raises(UsageError, match="sets use_dora, bias"):
        peft.load(model, tmp_path, LORA, base=None)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file(
        tensors | {"base_model.model.lm_head.lora_A.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(UsageError, match="matches no target of this decoder"):
        peft.load(model, tmp_path, LORA, base=None)


@pytest.mark.parametrize("damage", ["truncated", "missing", "nonsense"])
def test_a_damaged_adapter_is_named(base: Path, tmp_path: Path, damage: str) -> None:
    model = saved(base, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[:-100] if damage == "truncated" else b"x" * 64)
    with pytest.raises(UsageError, match=r"adapter_model\.safetensors"):
        peft.load(model, tmp_path, LORA, base=None)


@pytest.mark.parametrize("base_bits", [16, 4])
def test_a_frozen_base_is_never_wider_than_it_is_kept(
    base: Path, base_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From fp32 files: no fp32 matrix becomes a parameter, and of the files one tensor at a time is on the host."""
    made: list[tuple[str, torch.nn.Parameter]] = []
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = weights.TensorFiles.read

    def watched(files: weights.TensorFiles, name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(files, name)
        assert tensor.dtype == torch.float32
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(weights.TensorFiles, "read", watched)
    hook = torch.nn.modules.module.register_module_parameter_registration_hook(
        lambda module, name, parameter: made.append((f"{type(module).__name__}.{name}", parameter))
    )
    try:
        spec = replace(LORA, base_bits=base_bits)
        model = load_adapted(base, spec, shape=SHAPE, device=CPU, compute_dtype=torch.bfloat16)
    finally:
        hook.remove()
    real = [(name, p) for name, p in made if p is not None and not p.is_meta and not name.startswith("Adapter.")]
    assert [name for name, p in real if p.ndim > 1 and p.dtype != torch.bfloat16] == []
    assert len(alive) == 2 + 9 * SHAPE.layers + 1, "every tensor was read once"
    assert most == 1
    whole = weights.load(base)
    assert torch.equal(model.embedding, whole.embedding.bfloat16())
    assert isinstance(model.blocks[1].qkv, Nf4) == (base_bits == 4)
    assert {b.dtype for _, b in lora.adapters(model).values()} == {torch.float32}


@pytest.mark.gpu
def test_a_frozen_base_goes_straight_to_the_gpu(base: Path) -> None:
    cuda = torch.device("cuda")
    torch.zeros(1, device=cuda)  # whatever the first use of a device takes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_adapted(base, LORA, shape=SHAPE, device=cuda, compute_dtype=torch.bfloat16)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert held >= sum(p.nbytes for p in model.parameters())
    assert peak <= held + 2 * model.embedding.nbytes, "no more than a tensor or two beside the result"


def test_an_exported_adapter_that_was_damaged_is_named(tmp_path: Path) -> None:
    model = adapted()
    peft.save(model, tmp_path / "adapter", LORA, base="base", fingerprint=None)
    peft.load(model, tmp_path / "adapter", LORA, base=None)
    path = tmp_path / "adapter" / peft.TENSORS
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # one bit of the last number
    path.write_bytes(content)
    with pytest.raises(UsageError, match="was changed after it was exported"):
        peft.load(model, tmp_path / "adapter", LORA, base=None)
