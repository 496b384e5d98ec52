"""The arithmetic held against hand-computed figures, a live model, and peaks measured on an H200."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from flatout.cost import (
    GIB,
    Adapters,
    BlockPath,
    Flops,
    ModelShape,
    Rates,
    Shares,
    activation_bytes,
    checkpoint_bytes,
    decode_s,
    flops_per_token,
    kv_cache_bytes_per_token,
    step_time,
    training_memory,
    weight_bytes,
)
from flatout.cost.roofline import phase_work
from flatout.errors import UsageError

SMALL = ModelShape(
    layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, intermediate=2048, vocab=50304, positions=1024
)
MIDDLE = ModelShape(
    layers=32,
    hidden=960,
    heads=15,
    kv_heads=5,
    head_dim=64,
    intermediate=2560,
    vocab=49152,
    positions=1024,
    tied=True,
)
LARGE = ModelShape(
    layers=16,
    hidden=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    intermediate=8192,
    vocab=128256,
    positions=4096,
    tied=True,
)
TINY = ModelShape(layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, intermediate=96, vocab=100, positions=64)


def memory(shape: ModelShape, *, micro_tokens: int, **changes: Any) -> Any:
    values: dict[str, Any] = {"precision": "bf16", "recompute": "none", "path": "compiled", "loss_chunk": 8192}
    return training_memory(shape, micro_tokens=micro_tokens, **values | changes)


# Parameters


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True},
        {"qk_norm": True},
        {"qkv_bias": True},
        {"kv_heads": 2},
        {"kv_heads": 1, "head_dim": 16},
        {"tied": True, "qk_norm": True, "qkv_bias": True, "kv_heads": 2, "layers": 3},
    ],
    ids=str,
)
def test_parameters_are_those_of_a_live_decoder(changes: dict[str, Any]) -> None:
    from flatout.model import Decoder

    shape = replace(TINY, **changes)
    model = Decoder(shape)
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())

    multiplied = [
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and (shape.tied or name != "embedding")
    ]
    assert shape.matmul_weights == sum(multiplied)


def test_the_small_shape_is_counted_by_hand() -> None:
    block = 768 * 3 * 768 + 768 * 768 + 3 * 768 * 2048
    assert SMALL.block_matmul_weights == block == 7_077_888
    assert SMALL.matmul_weights == 12 * block + 50304 * 768 == 123_568_128
    assert SMALL.num_parameters == 12 * (block + 2 * 768) + 2 * 50304 * 768 + 768 == 162_220_800


# FLOPs


def test_the_common_figure_is_6n_plus_12lht() -> None:
    flops = flops_per_token(SMALL, sequence_length=1024)
    assert flops.common == 6 * 123_568_128 + 12 * 12 * 768 * 1024 == 854_654_976


def test_attention_is_counted_as_causal() -> None:
    flops = flops_per_token(SMALL, sequence_length=1024)
    # Scores and mix are two matmuls of 2 x width x context; a token sees (T + 1) / 2 positions on average.
    attention = 2 * 2 * 12 * 768 * 1025 / 2
    assert flops.forward == 2 * 123_568_128 + attention
    assert flops.backward == 2 * flops.forward
    assert flops.done == 6 * 123_568_128 + 3 * attention == 798_087_168

    common_attention = flops.common - 6 * SMALL.matmul_weights
    assert 3 * attention / common_attention == pytest.approx(0.5, rel=2 / 1024)


def test_attention_is_as_wide_as_the_heads_not_as_the_residual() -> None:
    narrow, wide = (replace(LARGE, head_dim=width) for width in (64, 128))
    extra = {
        shape.head_dim: flops_per_token(shape, sequence_length=4096).common - 6 * shape.matmul_weights
        for shape in (narrow, wide)
    }
    assert extra == {64: 12 * 16 * 2048 * 4096, 128: 12 * 16 * 4096 * 4096}


def test_packed_documents_attend_less() -> None:
    whole = flops_per_token(SMALL, sequence_length=1024)
    packed = flops_per_token(SMALL, sequence_length=1024, mean_context=100.0)
    assert whole.forward - packed.forward == 4 * 12 * 768 * (512.5 - 100.0)
    assert packed.common == whole.common


def test_frozen_weights_get_no_gradient_of_their_own() -> None:
    trained = flops_per_token(SMALL, sequence_length=1024)
    adapters = Adapters(rank=16, alpha=32.0)
    frozen = flops_per_token(SMALL, sequence_length=1024, adapters=adapters)
    low_rank = 2 * adapters.num_parameters(SMALL)
    assert frozen.forward == trained.forward + low_rank
    assert trained.backward - frozen.backward == 2 * SMALL.matmul_weights - 2 * low_rank
    assert frozen.common == trained.common


def test_adapters_are_counted_by_target() -> None:
    assert Adapters(rank=4, alpha=8.0, targets=("q",)).num_parameters(SMALL) == 12 * 4 * (768 + 768)
    whole = Adapters(rank=4, alpha=8.0).num_parameters(SMALL)
    assert whole == 12 * 4 * (4 * (768 + 768) + 3 * (768 + SMALL.intermediate))


def test_frozen_weights_take_two_bytes_or_half_of_one_and_no_optimizer() -> None:
    how = {"micro_tokens": 1024, "precision": "bf16", "recompute": "none", "path": "compiled", "loss_chunk": 1024}
    full = training_memory(SMALL, **how)  # type: ignore[arg-type]
    adapters = Adapters(rank=16, alpha=32.0)
    lora = training_memory(SMALL, **how, adapters=adapters)  # type: ignore[arg-type]
    qlora = training_memory(SMALL, **how, adapters=replace(adapters, base_bits=4))  # type: ignore[arg-type]
    trained = adapters.num_parameters(SMALL)
    assert lora.weights == 2 * SMALL.num_parameters + 4 * trained
    assert lora.optimizer == 8 * trained
    assert lora.weights - qlora.weights == (2 - 0.5625) * SMALL.layers * SMALL.block_matmul_weights
    assert qlora.total < lora.total < full.total
    assert checkpoint_bytes(SMALL, weights_only=False, adapters=adapters) == 12 * trained


def test_recomputation_adds_a_forward_of_the_blocks_to_hfu_only() -> None:
    plain = flops_per_token(SMALL, sequence_length=1024)
    full = flops_per_token(SMALL, sequence_length=1024, recompute="full")
    assert full.done == plain.done == plain.executed
    assert full.common == plain.common
    assert full.executed - full.done == plain.forward - 2 * 50304 * 768
    # Selective recomputation repeats only what is no matmul.
    assert flops_per_token(SMALL, sequence_length=1024, recompute="selective") == plain


def test_rates_are_shares_of_all_devices_peaks() -> None:
    flops = Flops(forward=100.0, backward=200.0, recomputed=60.0, common=330.0)
    shares = Rates(flops=flops, peak_flops=1000.0, num_devices=2).shares(tokens=20, seconds=10.0)
    assert asdict(shares) == pytest.approx({"mfu": 0.3, "hfu": 0.36, "mfu_common": 0.33, "critic": None})


@pytest.mark.parametrize(("peak", "seconds"), [(None, 1.0), (0.0, 1.0), (1e12, 0.0)])
def test_an_unknown_peak_gives_no_share(peak: float | None, seconds: float) -> None:
    flops = flops_per_token(SMALL, sequence_length=1024)
    assert Rates(flops=flops, peak_flops=peak).shares(tokens=1024, seconds=seconds) == Shares()
    assert Shares() == Shares(mfu=None, hfu=None, mfu_common=None)


def test_rates_survive_json() -> None:
    rates = Rates(flops=flops_per_token(SMALL, sequence_length=1024), peak_flops=989e12, num_devices=8)
    assert Rates.from_json(rates.to_json()) == rates


# Memory


@pytest.mark.parametrize(
    ("shape", "length", "micro_batch", "accumulation", "measured_gib"),
    [
        (SMALL, 1024, 8, 1, 6.36),
        (SMALL, 1024, 32, 1, 14.85),
        (SMALL, 1024, 64, 1, 25.14),
        (SMALL, 1024, 128, 1, 45.73),
        (MIDDLE, 1024, 16, 1, 22.33),
        (MIDDLE, 1024, 32, 2, 38.81),
        (LARGE, 4096, 2, 1, 31.06),
        (LARGE, 4096, 4, 2, 47.60),
    ],
)
def test_the_predicted_peak_is_what_an_h200_allocated(
    shape: ModelShape, length: int, micro_batch: int, accumulation: int, measured_gib: float
) -> None:
    predicted = memory(shape, micro_tokens=micro_batch * length, accumulation=accumulation)
    assert predicted.gib == pytest.approx(measured_gib, rel=0.10)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("path", ["eager", "compiled", "fused"])
@pytest.mark.parametrize("shape", [SMALL, MIDDLE, LARGE], ids=["124M", "360M", "1B"])
def test_memory_grows_with_the_micro_batch_and_shrinks_with_recomputation(
    shape: ModelShape, precision: str, path: BlockPath
) -> None:
    peaks = {
        mode: [
            memory(shape, micro_tokens=n * 1024, precision=precision, recompute=mode, path=path).total
            for n in (1, 2, 8, 16, 64)
        ]
        for mode in ("none", "selective", "full")
    }
    for sizes in peaks.values():
        assert sizes == sorted(set(sizes))
    for none, selective, full in zip(*peaks.values(), strict=True):
        assert none > selective > full


def test_every_part_of_the_memory_has_its_own_cause() -> None:
    plain = memory(SMALL, micro_tokens=8192)
    assert (plain.weights, plain.optimizer) == (4 * SMALL.num_parameters, 8 * SMALL.num_parameters)
    assert plain.total == sum(asdict(plain).values())
    assert plain.gib == plain.total / GIB

    def changed(**changes: Any) -> set[str]:
        other = asdict(memory(SMALL, **{"micro_tokens": 8192} | changes))
        return {name for name, size in asdict(plain).items() if other[name] != size}

    assert changed(accumulation=4) == {"gradients"}
    assert changed(loss_chunk=1024) == {"temporary"}
    assert changed(micro_tokens=4096) == {"activations", "temporary"}
    assert memory(SMALL, micro_tokens=8192, precision="fp32").weight_copies == 0


def test_the_largest_part_is_named_with_its_size() -> None:
    assert memory(LARGE, micro_tokens=1024).largest() == f"optimizer {8 * LARGE.num_parameters / GIB:.2f} GiB"
    assert memory(SMALL, micro_tokens=131072).largest().startswith("activations ")


def test_checkpoints_and_caches_by_hand() -> None:
    assert checkpoint_bytes(SMALL, weights_only=True) == 4 * 162_220_800
    assert checkpoint_bytes(SMALL, weights_only=False) == 12 * 162_220_800
    assert kv_cache_bytes_per_token(MIDDLE, precision="bf16") == 2 * 32 * 5 * 64 * 2


# Time


def seconds(**changes: Any) -> float:
    values: dict[str, Any] = {
        "micro_tokens": 65536,
        "accumulation": 1,
        "flops": flops_per_token(SMALL, sequence_length=1024),
        "precision": "bf16",
        "peak_flops": 989e12,
        "bandwidth": 4.8e12,
        "path": "compiled",
        "sequence_length": 1024,
    }
    return step_time(SMALL, **values | changes).seconds


def test_time_follows_what_it_is_made_of() -> None:
    plain = seconds()
    assert seconds(peak_flops=400e12) > plain
    assert seconds(bandwidth=1e12) > plain
    assert seconds(path="eager") > plain > seconds(path="fused") > seconds(path="fp8", fp8_flops=1979e12)
    assert seconds(sequence_length=4096) < plain, "longer sequences fill the attention's kernels better"
    assert seconds(flops=flops_per_token(SMALL, sequence_length=1024, recompute="full")) > plain
    # Never faster than the matmuls alone at the full peak.
    assert plain > 65536 * flops_per_token(SMALL, sequence_length=1024).done / 989e12
    # Accumulated micro-batches share one update of the weights.
    assert 3.9 * plain < seconds(accumulation=4) < 4 * plain


def test_few_tokens_take_the_time_of_the_host() -> None:
    assert seconds(micro_tokens=64) == seconds(micro_tokens=128)
    assert seconds(micro_tokens=64, path="fp8") > seconds(micro_tokens=64, path="fused")
    again = flops_per_token(SMALL, sequence_length=1024, recompute="full")
    assert seconds(micro_tokens=64, flops=again) > 1.5 * seconds(micro_tokens=64), "blocks are launched once more"
    # Recorded, a pass takes as long as what is in it; with many tokens it does so anyway, and gradients are added up.
    assert seconds(micro_tokens=64, path="fused", graphs=True) < seconds(micro_tokens=128, path="fused", graphs=True)
    assert seconds(micro_tokens=64, path="fused", graphs=True) < 0.5 * seconds(micro_tokens=64, path="fused")
    assert seconds(path="fused") < seconds(path="fused", graphs=True) < 1.1 * seconds(path="fused")


def test_every_micro_batch_casts_the_weights_and_adds_to_their_gradients() -> None:
    assert seconds(micro_tokens=32768, accumulation=2) > seconds()
    assert weight_bytes(SMALL, width=2, path="fused", again=False) == 10 * SMALL.matmul_weights
    blocks = SMALL.layers * SMALL.block_matmul_weights
    assert weight_bytes(SMALL, width=2, path="fused", again=True) == 10 * SMALL.matmul_weights + 6 * blocks
    assert weight_bytes(SMALL, width=2, path="fp8", again=False) == 4 * SMALL.matmul_weights
    assert weight_bytes(SMALL, width=4, path="eager", again=False) == 4 * SMALL.matmul_weights


def test_short_documents_do_not_make_the_libraries_attention_free() -> None:
    short = flops_per_token(SMALL, sequence_length=1024, mean_context=40)
    assert seconds(flops=short, documents="varlen") > 1.1 * seconds(flops=short)
    long = flops_per_token(SMALL, sequence_length=8192)
    assert seconds(flops=long, documents="varlen") == seconds(flops=long)
    assert seconds(flops=short) < seconds(flops=short, documents="short") < seconds(flops=short, documents="varlen")


def test_adapters_take_launches_unless_their_passes_are_recorded() -> None:
    adapted = {"adapters": Adapters(rank=16, alpha=32.0, targets=("q", "v")), "path": "fused"}
    assert seconds(micro_tokens=64, **adapted) == seconds(micro_tokens=128, **adapted)
    assert seconds(micro_tokens=64, graphs=True, **adapted) < seconds(micro_tokens=128, graphs=True, **adapted)
    assert seconds(**adapted) > seconds(path="fused")
    assert seconds(**adapted) == pytest.approx(seconds(graphs=True, **adapted), rel=0.1), "many tokens hide launches"


# Hugging Face configurations

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 960,
    "intermediate_size": 2560,
    "max_position_embeddings": 8192,
    "num_attention_heads": 15,
    "num_hidden_layers": 32,
    "num_key_value_heads": 5,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 100000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}},
        {"rope_theta": 100000, "rope_scaling": {"type": "default"}},
    ],
    ids=["old", "new", "old with a plain scaling"],
)
def test_old_and_new_ways_to_write_the_rotary_base(rope: dict[str, Any]) -> None:
    expected = replace(MIDDLE, positions=8192, rope_theta=100000.0)
    assert ModelShape.from_hf(LLAMA | rope) == expected


def test_what_a_config_may_leave_out() -> None:
    bare = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
    shape = ModelShape.from_hf(bare)
    assert (shape.kv_heads, shape.tied, shape.head_dim, shape.rope_theta) == (15, False, 64, 10000.0)
    assert ModelShape.from_hf(LLAMA | {"head_dim": 128}).q_width == 15 * 128


def test_each_family_brings_its_own_details() -> None:
    qwen2 = ModelShape.from_hf(LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False})
    qwen3 = ModelShape.from_hf(LLAMA | {"model_type": "qwen3", "attention_bias": False})
    llama = ModelShape.from_hf(LLAMA | {"sliding_window": 4096, "use_sliding_window": True})
    assert llama.window is None, "llama has no windows, whatever its config.json says"
    assert (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic rope scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn rope scaling but lacks factor"),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4096,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 16,
            },
            "layers with a sliding window before others without one",
        ),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None, "vocab_size": None}, "lacks hidden_size, vocab_size"),
    ],
)
def test_what_the_decoder_cannot_run_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        ModelShape.from_hf(LLAMA | changes)
    assert says in str(refused.value)


def test_several_refusals_come_together() -> None:
    with pytest.raises(UsageError, match=r"mlp_bias, hidden_act 'relu'"):
        ModelShape.from_hf(LLAMA | {"mlp_bias": True, "hidden_act": "relu"})


# The roofline


def work(shape: ModelShape, *, recompute: str = "none", adapters: Adapters | None = None, **changes: Any) -> Any:
    flops = flops_per_token(shape, sequence_length=1024, adapters=adapters, recompute=recompute)
    values: dict[str, Any] = {"tokens": 8192, "targets": 8192, "micro_batches": 1, "precision": "bf16", "path": "fused"}
    return flops, phase_work(shape, flops=flops, recompute=recompute, adapters=adapters, **values | changes)


@pytest.mark.parametrize("adapters", [None, Adapters(rank=16, alpha=32.0)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_work_of_the_phases_is_all_of_it(recompute: str, adapters: Adapters | None) -> None:
    flops, phases = work(SMALL, recompute=recompute, adapters=adapters)
    assert phases["forward"].flops + phases["backward"].flops == pytest.approx(8192 * flops.executed)


def test_the_head_works_in_the_forward_pass_and_on_targets_only() -> None:
    _, every = work(SMALL)
    _, half = work(SMALL, targets=4096)
    head = 2 * SMALL.vocab * SMALL.hidden
    assert every["forward"].flops - half["forward"].flops == 4096 * 3 * head
    assert every["forward"].bytes > half["forward"].bytes
    assert every["backward"] == half["backward"]


def test_the_bytes_of_weights_and_gradients_by_hand() -> None:
    head, rest = TINY.vocab * TINY.hidden, TINY.num_parameters - TINY.vocab * TINY.hidden
    blocks = TINY.layers * TINY.block_matmul_weights
    _, phases = work(TINY, tokens=0, targets=0)
    # Weights are read in bf16, gradients written in fp32; those of the head in the forward pass.
    assert phases["forward"].bytes == 2 * (blocks + head) + 4 * head
    assert phases["backward"].bytes == 2 * blocks + 4 * rest
    assert phases["optimize"].bytes == 32 * TINY.num_parameters
    _, phases = work(TINY, tokens=0, targets=0, micro_batches=3)
    assert phases["forward"].bytes == 3 * 2 * (blocks + head) + (4 + 8 + 8) * head
    assert phases["backward"].bytes == 3 * 2 * blocks + (4 + 8 + 8) * rest


def test_the_bytes_of_activations_and_logits_by_hand() -> None:
    _, none = work(TINY, tokens=0, targets=0)
    _, some = work(TINY, tokens=10, targets=5)
    kept = 10 * TINY.layers * activation_bytes(TINY, precision="bf16", recompute="none", path="fused")
    assert some["forward"].bytes - none["forward"].bytes == kept + 5 * 4 * 2 * TINY.vocab
    assert some["backward"].bytes - none["backward"].bytes == kept


def test_eight_bits_halve_the_weights_but_for_one_projection() -> None:
    _, sixteen = work(TINY, tokens=0, targets=0)
    _, eight = work(TINY, tokens=0, targets=0, path="fp8")
    head, wide = TINY.vocab * TINY.hidden, TINY.layers * TINY.hidden * TINY.q_width
    blocks = TINY.layers * TINY.block_matmul_weights
    assert sixteen["backward"].bytes - eight["backward"].bytes == blocks - wide
    assert sixteen["forward"].bytes - eight["forward"].bytes == blocks - wide + head
    assert eight["optimize"].bytes > sixteen["optimize"].bytes, "it makes the 8-bit copies"


@pytest.mark.parametrize(("bits", "each"), [(16, 2), (4, 0.5625)])
def test_a_frozen_base_is_read_and_has_no_gradients(bits: int, each: float) -> None:
    adapters = Adapters(rank=4, alpha=8.0, base_bits=bits)
    _, phases = work(TINY, tokens=0, targets=0, adapters=adapters)
    trained, head = adapters.num_parameters(TINY), TINY.vocab * TINY.hidden
    blocks = each * TINY.layers * TINY.block_matmul_weights + 2 * trained
    assert phases["forward"].bytes == blocks + 2 * head
    assert phases["backward"].bytes == blocks + 4 * trained
    assert phases["optimize"].bytes == 32 * trained


def test_ranks_that_share_the_update_do_a_part_of_it_each() -> None:
    _, one = work(SMALL)
    _, eight = work(SMALL, update_ranks=8)
    assert eight["optimize"].bytes == one["optimize"].bytes / 8
    assert eight["optimize"].intensity == one["optimize"].intensity
    assert eight["backward"] == one["backward"]


def test_recomputation_keeps_less_and_reads_more() -> None:
    _, kept = work(SMALL)
    _, again = work(SMALL, recompute="full")
    assert again["forward"].bytes < kept["forward"].bytes
    assert again["backward"].bytes > kept["backward"].bytes


# Decode steps of the sampler, in ms, by rows and tokens of context; each row also has 64 of its own (docs/sampling.md)


@pytest.mark.parametrize(
    ("rows", "context", "measured_ms"),
    [
        *((64, 120, 1.48), (256, 120, 2.18), (1024, 120, 5.11), (2048, 120, 9.69), (4096, 120, 15.57)),
        *((64, 500, 1.87), (256, 500, 3.41), (1024, 500, 9.48), (2048, 500, 18.58)),
        *((256, 1500, 5.47), (1024, 1500, 20.70)),
    ],
)
def test_decode_steps_take_what_was_measured_on_an_h200(rows: int, context: int, measured_ms: float) -> None:
    found = decode_s(
        MIDDLE,
        rows=rows,
        prompts=rows,
        prompt_tokens=context,
        own_tokens=64,
        precision="bf16",
        peak_flops=989e12,
        bandwidth=4.8e12,
    )
    assert found * 1000 == pytest.approx(measured_ms, rel=0.25)
