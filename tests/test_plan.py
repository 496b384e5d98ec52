"""Plans: for every machine of the table, exact in the batch, honest about memory, with a reason for everything."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout import gallery
from flatout.config import from_mapping, load
from flatout.config.settings import DataSettings, ModelSettings, PlanSettings, Settings, TrainSettings, settable
from flatout.cost import BUCKET_BYTES, Adapters, ModelShape, cpu_share, flops_per_token
from flatout.errors import UsageError
from flatout.hardware import Hardware, named, names
from flatout.plan import Decisions, Job, Plan, compile_break_even, decide, job_of, shape_of, tokenizer_size
from flatout.plan.batch import MEMORY_BUDGET
from flatout.plan.kernels import FOREIGN
from flatout.plan.predict import COMPILE_S, FULL_TOKENS

EXAMPLE = gallery.find("pretrain-124m")
SMALL = ModelShape(
    layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, intermediate=2048, vocab=50304, positions=1024
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
HUGE = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, positions=8192
)


def job(
    *,
    shape: ModelShape = SMALL,
    hardware: Hardware | str = "H200",
    sequences: int = 512,
    num_ranks: int = 1,
    length: int | None = None,
    pins: dict[str, Any] | None = None,
    **others: Any,
) -> Job:
    length = length or shape.positions
    return Job(
        shape=shape,
        hardware=machine(hardware, num_ranks) if isinstance(hardware, str) else hardware,
        sequence_length=length,
        batch_tokens=sequences * length,
        num_ranks=num_ranks,
        pins=PlanSettings(**pins or {}),
        **others,
    )


def machine(name: str, num_ranks: int) -> Hardware:
    return named(name, num_gpus=1 if name == "CPU" else num_ranks)


def differences(before: Plan, after: Plan) -> set[str]:
    values = asdict(after.decisions)
    return {name for name, value in asdict(before.decisions).items() if values[name] != value}


def refusal(of: Job) -> str:
    with pytest.raises(UsageError) as refused:
        decide(of)
    return str(refused.value)


# What is refused


def test_what_does_not_fit_is_told_with_what_would() -> None:
    adapters = Adapters(rank=16, alpha=32.0, targets=("q", "v"))
    large = {"shape": HUGE, "hardware": "T4", "adapters": adapters, "length": 1024, "sequences": 16}
    told = refusal(job(**large))
    assert "weights" in told
    assert "lora.base: 4-bit would fit (" in told
    decide(job(**large | {"adapters": replace(adapters, base_bits=4)}))
    tight = {**large, "hardware": "A10", "pins": {"recompute": "none"}}
    assert "plan.micro_batch: 1 and plan.recompute: full would fit (" in refusal(job(**tight))
    decide(job(**tight | {"pins": {"recompute": "full", "micro_batch": 1}}))
    long = {**large, "hardware": "V100-16GB", "length": 16384, "sequences": 1, "shape": replace(HUGE, positions=16384)}
    assert "lora.base: 4-bit and data.sequence_length: 4096 would fit (" in refusal(job(**long))
    decide(job(**long | {"length": 4096, "sequences": 4, "adapters": replace(adapters, base_bits=4)}))
    assert "a smaller model, shorter sequences or a larger device would fit" in refusal(
        job(**large | {"adapters": None})
    )


# Every machine


@pytest.mark.parametrize("name", names())
def test_every_machine_gets_a_plan_for_the_example(name: str) -> None:
    machine = named(name)
    plan = decide(job_of(load(EXAMPLE.path, environ={}).settings, hardware=machine, num_ranks=1))
    decisions, predicted = plan.decisions, plan.predicted
    assert plan.job.shape == SMALL
    assert decisions.micro_batch * decisions.accumulation * 1024 == 524288

    if machine.sm is None:
        assert (decisions.precision, decisions.compile, decisions.tf32) == ("fp32", "none", False)
        assert (decisions.pin_memory, decisions.expandable_segments) == (False, False)
        # Nothing is promised for a processor whose peak nobody knows.
        assert (predicted.tokens_per_s, predicted.step_s, predicted.mfu, predicted.hours) == (None,) * 4
        return
    assert machine.memory_gib is not None
    older = name.startswith(("T4", "V100"))
    assert decisions.precision == ("fp16" if older else "bf16")
    assert decisions.attention == ("efficient" if older else "cudnn" if machine.sm >= (9, 0) else "flash")
    assert decisions.tf32 is not older
    assert predicted.peak_gib <= MEMORY_BUDGET["balanced"] * machine.memory_gib
    assert predicted.tokens_per_s is not None
    assert predicted.mfu is not None
    assert 0.05 < predicted.mfu < 0.7
    assert predicted.hours == pytest.approx(1000 * 524288 / predicted.tokens_per_s / 3600)


def test_reinforcement_learning_counts_what_it_holds_beside_the_policy() -> None:
    def parts(**others: Any) -> dict[str, float]:
        return decide(job(sequences=16, packing="documents", **others)).predicted.memory_gib

    weights = SMALL.num_parameters / 2**30
    assert parts()["task_gradients"] == parts()["critic"] == parts()["reference"] == 0
    assert parts(gradient_tasks=6)["task_gradients"] == pytest.approx(24 * weights)
    adapters = Adapters(rank=16, alpha=32.0)
    assert parts(gradient_tasks=6, adapters=adapters)["task_gradients"] < weights
    assert parts(reference=True)["reference"] == pytest.approx(2 * weights)
    assert parts(own_critic=True)["critic"] > 12 * weights, "fp32 weights and two moments, at least"
    # Six gradients of all weights do not fit, those of adapters do.
    tight = {"shape": HUGE, "base": "a model", "length": 1024, "sequences": 16}
    assert "task gradients" in refusal(job(**tight, gradient_tasks=6))
    assert "lora.rank: 16 would fit (" in refusal(job(**tight, gradient_tasks=6))
    decide(job(**tight, gradient_tasks=6, adapters=adapters))


def test_what_a_configuration_of_reinforcement_learning_holds() -> None:
    def asked(**changes: Any) -> tuple[int, bool, bool]:
        values: dict[str, Any] = {
            "recipe": "rl",
            "model": {"layers": 1, "hidden": 32, "heads": 2},
            "rl": {"tasks": ["math:train", "stem:train"]},
            "train": {"steps": 2},
        }
        for key, value in changes.items():
            values[key] = {**values.get(key, {}), **value}
        made = job_of(from_mapping(values), hardware=named("H200"), num_ranks=1)
        return made.gradient_tasks, made.own_critic, made.reference

    assert asked() == (0, False, False)
    assert asked(mtl={"method": "pcgrad"}) == (2, False, False)
    assert asked(rl={"algorithm": "ppo"}) == (0, False, False)
    assert asked(rl={"algorithm": "ppo", "critic": "own", "kl": 0.1}) == (0, True, True)
    assert asked(rl={"kl": 0.1}, lora={"rank": 4}) == (0, False, False)


@pytest.mark.parametrize("name", ["H200", "T4", "CPU"])
def test_a_plan_needs_no_torch(name: str) -> None:
    heavy = ["torch", "numpy", "transformers", "datasets", "safetensors", "tokenizers"]
    program = f"""
import sys
blocked = {heavy if name == "H200" else []}
for module in blocked:
    sys.modules[module] = None  # importing it now fails
from flatout.cli import main
sys.argv = ["flatout", "plan", {str(EXAMPLE.path)!r}, "--on", {name!r}, "--json"]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
loaded = [module for module in {heavy} if sys.modules.get(module) is not None]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["job"]["hardware"] == name


def test_an_unknown_gpu_is_planned_for_by_what_is_known_of_it() -> None:
    card = Hardware(name=None, gpu="NVIDIA Newer", num_gpus=1, sm=(12, 0), memory_gib=31.0)
    plan = decide(job(hardware=card))
    assert plan.decisions.precision == "bf16"
    assert plan.predicted.peak_gib <= 0.85 * 31.0
    assert (plan.predicted.tokens_per_s, plan.predicted.mfu, plan.rates.peak_flops) == (None, None, None)

    nameless = decide(job(hardware=replace(card, sm=None, memory_gib=None)))
    assert nameless.decisions.precision == "fp32"
    assert "memory unknown" in nameless.reasons["micro_batch"]


@pytest.mark.parametrize(("ratio", "precision"), [(None, "fp32"), (0.4, "fp32"), (1.5, "bf16"), (6.0, "bf16")])
def test_a_cpu_gets_bf16_only_where_it_was_measured_faster(ratio: float | None, precision: str) -> None:
    peaks = {} if ratio is None else {"fp32": 1e11, "bf16": ratio * 1e11}
    assert decide(job(hardware=replace(named("CPU"), peak_flops=peaks))).decisions.precision == precision


@pytest.mark.parametrize(
    ("hardware", "others", "expected"),
    [
        ("H200", {"packing": "documents"}, "flash"),
        ("H200", {"pins": {"precision": "fp32"}}, "efficient"),
        ("H200", {"shape": replace(SMALL, head_dim=256)}, "flash"),
        ("CPU", {}, "flash"),
    ],
)
def test_attention_is_the_fastest_that_can_do_it(hardware: str, others: dict[str, Any], expected: str) -> None:
    assert decide(job(hardware=hardware, **others)).decisions.attention == expected


@pytest.mark.parametrize(("hidden", "precision"), [(128, "fp32"), (256, "bf16"), (768, "bf16")])
def test_narrow_layers_stay_in_fp32_on_a_cpu(hidden: int, precision: str) -> None:
    """Their time is not spent in matmuls, and casts cost more than faster matmuls save."""
    fast = replace(named("CPU"), peak_flops={"fp32": 2e11, "bf16": 1e12}, peak_source="measured")
    shape = replace(SMALL, hidden=hidden, heads=4, kv_heads=4, head_dim=hidden // 4, intermediate=3 * hidden)
    assert decide(job(hardware=fast, shape=shape)).decisions.precision == precision
    steps = {
        name: decide(job(hardware=fast, shape=shape, pins={"precision": name})).predicted.step_s
        for name in ("fp32", "bf16")
    }
    assert min(steps, key=lambda name: steps[name]) == precision, "the prediction agrees"


def test_a_measured_cpu_has_figures_and_an_unmeasured_one_says_why_not() -> None:
    measured = replace(named("CPU"), peak_flops={"fp32": 1e11, "bf16": 5e10}, peak_source="measured", process_gib=0.3)
    plan = decide(job(hardware=measured, steps=10))
    rates = plan.to_json()["rates"]
    assert (rates["peak_flops"], rates["precision"], rates["peak_source"]) == (1e11, "fp32", "measured")
    assert plan.rates.peak_words == "0.1 TFLOPS fp32 (measured)"
    assert plan.predicted.mfu == pytest.approx(cpu_share(SMALL.hidden))
    assert plan.predicted.step_s == pytest.approx(plan.flops.done * plan.job.batch_tokens / cpu_share(768) / 1e11)
    assert plan.predicted.memory_gib["process"] == pytest.approx(0.3)
    assert (plan.predicted.unknown, plan.predicted.left_out) == (None, None)

    bare = decide(job(hardware="CPU")).predicted
    assert bare.unknown is not None
    assert "not measured" in bare.unknown
    assert "the process itself" in (bare.left_out or "")
    assert bare.peak_gib == pytest.approx(plan.predicted.peak_gib - 0.3)

    sheet = decide(job())
    assert sheet.rates.peak_words == "989 TFLOPS bf16 (datasheet)"
    assert (sheet.predicted.unknown, sheet.predicted.left_out) == (None, None)


def test_the_peak_is_of_the_arithmetic_really_used() -> None:
    pinned = {"precision": "fp32"}
    assert decide(job(pins=pinned)).rates.peak_flops == named("H200").peak_flops["tf32"]
    assert decide(job(pins=pinned | {"tf32": False})).rates.peak_flops == named("H200").peak_flops["fp32"]


# The batch


@settings(max_examples=150, deadline=None)
@given(
    share=st.integers(1, 600),
    num_ranks=st.integers(1, 16),
    length=st.sampled_from([2, 128, 1000, 1024]),
    name=st.sampled_from(names()),
    preset=st.sampled_from(["safe", "balanced", "max"]),
)
def test_the_effective_batch_is_exact(share: int, num_ranks: int, length: int, name: str, preset: str) -> None:
    asked = job(hardware=name, sequences=share * num_ranks, num_ranks=num_ranks, length=length, pins={"preset": preset})
    plan = decide(asked)
    micro_batch, accumulation = plan.decisions.micro_batch, plan.decisions.accumulation
    assert micro_batch * accumulation * num_ranks * length == asked.batch_tokens
    assert micro_batch * length <= FULL_TOKENS[asked.device]
    chunks = -(-micro_batch * length // plan.decisions.loss_chunk)
    assert plan.decisions.loss_chunk * (chunks - 1) >= micro_batch * length * (chunks - 1) // chunks, "evenly cut"


def test_a_batch_the_ranks_cannot_share_is_refused_with_one_they_can() -> None:
    message = refusal(job(sequences=100, num_ranks=8))
    assert message == (
        "train.batch_tokens 102400 is 100 sequences of 1024, which 8 ranks cannot share evenly: use 98304"
    )
    assert decide(replace(job(num_ranks=8), batch_tokens=98304)).job.rank_sequences == 12
    assert "use 8192" in refusal(job(sequences=3, num_ranks=8))


def test_a_batch_of_broken_sequences_is_refused() -> None:
    message = refusal(replace(job(), batch_tokens=1000))
    assert message == "train.batch_tokens 1000 is not a multiple of data.sequence_length 1024"


# Pins


@pytest.mark.parametrize(
    "pins",
    [
        {"micro_batch": 8},
        {"accumulation": 128},
        {"micro_batch": 16, "accumulation": 32},
        {"recompute": "full"},
        {"precision": "fp32", "attention": "math", "compile": "none"},
        {"loss_chunk": 512, "workers": 0, "memory_fraction": 0.5, "tf32": False},
    ],
    ids=str,
)
def test_a_pin_is_taken_as_it_is(pins: dict[str, Any]) -> None:
    plan = decide(job(pins=pins))
    for name, value in pins.items():
        assert getattr(plan.decisions, name) == value
    assert {name for name, reason in plan.reasons.items() if reason.startswith("pinned")} == set(pins)
    assert plan.decisions.micro_batch * plan.decisions.accumulation == 512


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"micro_batch": 5}, "plan.micro_batch 5 does not divide the 12 sequences"),
        ({"accumulation": 5}, "plan.accumulation 5 does not divide the 12 sequences"),
        ({"micro_batch": 24}, "choose one of 1, 2, 3, 4, 6, 12"),
        ({"accumulation": 1000}, "choose one of 1, 2, 3, 4, 6, 12"),
        (
            {"micro_batch": 4, "accumulation": 4},
            "plan.micro_batch 4 x plan.accumulation 4 is not the 12 sequences of a step on one rank",
        ),
    ],
)
def test_a_pin_that_breaks_the_batch_is_refused_with_the_choices(pins: dict[str, Any], says: str) -> None:
    assert says in refusal(job(sequences=12, pins=pins))


def test_a_pinned_micro_batch_is_no_excuse_for_running_out_of_memory() -> None:
    message = refusal(job(hardware="T4", pins={"micro_batch": 512, "recompute": "none"}))
    assert "micro-batch 512 and recomputation none" in message


# Memory


def test_a_model_that_cannot_fit_is_refused_with_sizes() -> None:
    message = refusal(job(shape=HUGE, hardware="T4", sequences=16))
    assert "recomputation full" in message
    assert "12.4 of 14.6 GiB" in message
    needed_gib = float(message.split(" GiB", 1)[0].rsplit(" ", 1)[1])
    assert needed_gib > 12 * HUGE.num_parameters / 2**30
    assert "largest part: optimizer" in message


@pytest.mark.parametrize("fused", [True, False])
def test_recomputation_is_tried_before_refusing(fused: bool) -> None:
    kernels = {} if fused else {"fused_qkv": False, "fused_mlp": False, "fused_loss": False}
    modes = ["none", "full"] if fused else ["none", "selective", "full"]
    taken = []
    for memory_gib in range(40, 16, -1):
        card = replace(named("A100-40GB"), memory_gib=float(memory_gib))
        try:
            plan = decide(job(shape=LARGE, hardware=card, sequences=8, pins={"micro_batch": 1, **kernels}))
        except UsageError:
            taken.append("refused")
            continue
        assert plan.predicted.peak_gib <= 0.85 * memory_gib
        taken.append(str(plan.decisions.recompute))
    assert taken == sorted(taken, key=[*modes, "refused"].index)
    assert set(taken) == {*modes, "refused"}


def test_a_thin_micro_batch_is_widened_by_recomputation() -> None:
    asked = job(shape=replace(LARGE, positions=256), hardware="A100-80GB")
    # Just too little memory for 2048 tokens, which fill a device, with every activation kept.
    peak_gib = decide(asked).with_pins(micro_batch=8, recompute="none").predicted.peak_gib
    card = replace(asked.hardware, memory_gib=0.99 * peak_gib / MEMORY_BUDGET["balanced"])
    plan = decide(replace(asked, hardware=card))
    assert plan.with_pins(recompute="none").decisions.micro_batch == 4
    assert plan.decisions.recompute == "full", "fused kernels overwrite what selective recomputation would keep"
    assert plan.decisions.micro_batch >= 8


def test_where_every_micro_batch_is_thin_the_widest_is_taken() -> None:
    asked = job(shape=replace(LARGE, positions=256), hardware="A100-80GB")
    # Just too little memory for 2048 tokens even where only the blocks' inputs are kept.
    peak_gib = decide(asked).with_pins(micro_batch=8, recompute="full").predicted.peak_gib
    card = replace(asked.hardware, memory_gib=0.99 * peak_gib / MEMORY_BUDGET["balanced"])
    plan = decide(replace(asked, hardware=card))
    assert (plan.decisions.micro_batch, plan.decisions.recompute) == (4, "full")


def test_presets_differ_in_what_they_risk() -> None:
    # 2520 has many divisors, so the micro-batch can follow the memory closely.
    plain = {"fused_qkv": False, "fused_mlp": False, "fused_loss": False}
    asked = job(hardware="A10", sequences=2520, pins={"recompute": "none", **plain})
    plans = {preset: decide(asked).with_pins(preset=preset) for preset in ("safe", "balanced", "max")}
    compiled = [plan.with_pins(compile="default") for plan in plans.values()]
    sizes = [plan.decisions.micro_batch for plan in compiled]
    assert sizes == sorted(set(sizes))
    for plan, share in zip(compiled, (0.75, 0.85, 0.92), strict=True):
        assert 0.9 * share < plan.predicted.peak_gib / 22.1 <= share
    assert [plan.decisions.compile for plan in plans.values()] == ["none", "default", "default"]
    assert [plan.decisions.tf32 for plan in plans.values()] == [False, True, True]
    assert [plan.decisions.prefetch for plan in plans.values()] == [2, 2, 4]
    fractions = [plan.decisions.memory_fraction for plan in plans.values()]
    assert fractions == sorted(set(fractions))


# What a plan says and does


@pytest.mark.parametrize(
    "change",
    [
        {"attention": "flash"},
        {"prefetch": 7},
        {"workers": 0},
        {"compile": "max-autotune"},
        {"fused_optimizer": False},
    ],
    ids=str,
)
def test_but_changes_what_was_asked_and_nothing_else(change: dict[str, Any]) -> None:
    plan = decide(job(pins={"micro_batch": 64}))
    other = plan.with_pins(**change)
    assert differences(plan, other) == set(change)
    (name,) = change
    assert other.reasons[name] == "pinned in the configuration"
    assert {key: why for key, why in other.reasons.items() if key != name} == {
        key: why for key, why in plan.reasons.items() if key != name
    }
    assert plan == decide(job(pins={"micro_batch": 64}))


def test_but_decides_anew_what_hangs_on_the_change() -> None:
    plan = decide(job())
    halved = plan.with_pins(micro_batch=32)
    assert differences(plan, halved) == {"micro_batch", "accumulation", "graphs"}
    assert halved.predicted.peak_gib < plan.predicted.peak_gib
    assert halved.with_pins(micro_batch=None) == plan


def test_recomputing_costs_hfu_and_time_not_mfu_flops() -> None:
    plan = decide(job())
    full = plan.with_pins(recompute="full")
    assert full.flops.done == plan.flops.done
    assert full.flops.executed > plan.flops.executed
    assert full.predicted.step_s is not None
    assert plan.predicted.step_s is not None
    assert full.predicted.step_s > plan.predicted.step_s


@pytest.mark.parametrize("machine", ["H200", "T4", "CPU"])
def test_every_decision_is_made_and_has_a_reason(machine: str) -> None:
    plan = decide(job(hardware=machine))
    declared = [f.name for f in fields(Decisions)]
    assert declared == [f.name for f in settable(PlanSettings) if f.name != "preset"]
    for name in declared:
        assert getattr(plan.decisions, name) is not None, name
        assert len(plan.reasons[name]) > 10, name
    assert set(plan.reasons) == set(declared)


def test_the_json_of_a_plan() -> None:
    plan = decide(job(num_ranks=8, steps=100))
    values = json.loads(json.dumps(plan.to_json()))
    assert list(values) == ["decisions", "reasons", "predicted", "job", "balanced", "rows", "rates"]
    assert values["decisions"] == asdict(plan.decisions)
    assert set(values["reasons"]) == set(values["decisions"])
    assert sum(values["predicted"]["memory_gib"].values()) == pytest.approx(values["predicted"]["peak_gib"])
    assert values["job"]["num_ranks"] == values["rates"]["num_devices"] == 8
    assert ModelShape(**values["job"]["shape"]) == SMALL


def test_more_ranks_share_the_work() -> None:
    one, eight = decide(job()), decide(job(num_ranks=8))
    assert one.predicted.step_s is not None
    assert eight.predicted.step_s is not None
    assert one.predicted.step_s / 8.5 < eight.predicted.step_s < one.predicted.step_s / 7
    assert eight.predicted.mfu == pytest.approx(one.predicted.mfu, rel=0.1)


def test_more_ranks_take_one_bucket_of_memory_and_the_time_of_their_link() -> None:
    def of(num_ranks: int, name: str = "A100-80GB", **changes: Any) -> Plan:
        return decide(job(hardware=replace(machine(name, num_ranks), **changes), sequences=64, num_ranks=num_ranks))

    def alone(plan: Plan) -> Plan:
        """The same share of the batch without the others."""
        job = replace(plan.job, batch_tokens=plan.job.batch_tokens // plan.job.num_ranks, num_ranks=1)
        return decide(replace(job, hardware=replace(job.hardware, num_gpus=1)))

    eight = of(8)
    assert eight.predicted.peak_gib - alone(eight).predicted.peak_gib == pytest.approx(BUCKET_BYTES / 2**30)
    ring_s = 2 * 7 / 8 * 4 * SMALL.num_parameters / 300e9  # 600 GB/s, both directions summed
    assert eight.predicted.step_s - alone(eight).predicted.step_s == pytest.approx(ring_s)
    assert of(8, "A100-PCIe-80GB").predicted.step_s > eight.predicted.step_s
    unknown = of(8, link_bandwidth=None).predicted
    assert (unknown.step_s, unknown.tokens_per_s, unknown.mfu) == (None, None, None)
    assert of(8, num_gpus=4).predicted.step_s is None, "nobody knows the link between two machines"


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        (TrainSettings(steps=7), 7),
        (TrainSettings(tokens=1e6, batch_tokens=65536), 16),
        (TrainSettings(epochs=1.0), None),
    ],
)
def test_the_length_of_a_job(train: TrainSettings, steps: int | None) -> None:
    asked = Settings(model=ModelSettings(layers=2, hidden=64, heads=2), train=train)
    made = job_of(asked, hardware=named("H200"), num_ranks=1)
    assert made.steps == steps
    assert (decide(made).predicted.hours is None) == (steps is None)
    assert job_of(asked, hardware=named("H200"), num_ranks=1, total_steps=3).steps == 3


# Shapes


def shape(*, model: dict[str, Any], **data: Any) -> ModelShape:
    return shape_of(Settings(model=ModelSettings(**model), data=DataSettings(**data)))


def test_what_a_configuration_leaves_out_of_the_shape() -> None:
    made = shape(model={"layers": 2, "hidden": 100, "heads": 5}, sequence_length=512)
    assert made == ModelShape(
        layers=2, hidden=100, heads=5, kv_heads=5, head_dim=20, intermediate=384, vocab=320, positions=512
    )
    assert shape(model={"layers": 2, "hidden": 64, "heads": 2}, tokenizer="bpe:1000").vocab == 1024
    with pytest.raises(UsageError, match="model needs `name`"):
        shape(model={"layers": 2, "hidden": 64})


def test_sequences_longer_than_the_positions_are_refused() -> None:
    with pytest.raises(UsageError, match="sequence_length 2048 is longer than the model's 1024 positions"):
        shape(model={"layers": 2, "hidden": 64, "heads": 2, "positions": 1024}, sequence_length=2048)


@pytest.mark.parametrize("size", [{"heads": 0}, {"layers": -3}, {"hidden": 0}, {"rope_theta": float("nan")}], ids=str)
def test_sizes_that_no_model_has_are_refused_whoever_wrote_them(size: dict[str, Any]) -> None:
    (name,) = size
    with pytest.raises(UsageError, match=f"the model's {name} is .* must be"):
        shape(model={"layers": 2, "hidden": 64, "heads": 2} | size)


def model_folder(path: Path, **changes: Any) -> Path:
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def test_the_shape_of_a_folder_of_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    assert shape(model={"name": str(folder)}, sequence_length=512) == ModelShape(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate=192,
        vocab=300,
        positions=512,
        tied=True,
        qk_norm=True,
        rope_theta=1e6,
        norm_eps=1e-6,
    )
    with pytest.raises(UsageError, match="longer than the model's 512 positions"):
        shape(model={"name": str(folder)}, sequence_length=1024)


def test_a_folder_that_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        shape(model={"name": str(tmp_path)})
    with pytest.raises(UsageError, match="lacks vocab_size"):
        shape(model={"name": str(model_folder(tmp_path / "half", vocab_size=None))})


# Tokenizers


def test_sizes_that_need_no_file() -> None:
    assert tokenizer_size("byte") == 257
    assert tokenizer_size("bpe:4096") == 4096


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordLevel"])
def test_the_size_of_a_tokenizer_file(tmp_path: Path, kind: str) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(getattr(models, kind)())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = tokenizer.model.get_trainer()
    trainer.vocab_size, trainer.show_progress = 60, False
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    assert tokenizer_size(str(file)) == tokenizer_size(str(tmp_path)) == tokenizer.get_vocab_size()

    tokenizer.add_special_tokens(["<|endoftext|>", "<|pad|>"])
    tokenizer.save(str(file))
    assert tokenizer_size(str(file)) == tokenizer.get_vocab_size() == max(tokenizer.get_vocab().values()) + 1


@pytest.mark.parametrize("content", ['{"model": {}}', '{"model": {"vocab": {}}}', '{"model": "x"}', "[1]", "{"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        tokenizer_size(str(file))


def test_what_does_not_exist_is_named_by_its_own_key() -> None:
    with pytest.raises(UsageError, match=r"^data\.tokenizer: /nowhere does not exist"):
        tokenizer_size("/nowhere")
    with pytest.raises(UsageError, match="model: the folder '/nowhere' does not exist"):
        shape(model={"name": "/nowhere"})


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.json is missing"):
        tokenizer_size(str(tmp_path))


def test_compiling_is_left_out_of_runs_too_short_to_pay() -> None:
    plain = {"fused_qkv": False, "fused_mlp": False, "fused_loss": False}
    even = compile_break_even(job(), precision="bf16")
    assert even is not None
    assert decide(job(steps=even - 1, pins=plain)).decisions.compile == "none"
    assert f"at step {even}" in decide(job(steps=even - 1, pins=plain)).reasons["compile"]
    assert decide(job(steps=even, pins=plain)).decisions.compile == "default"
    assert decide(job(steps=None, pins=plain)).decisions.compile == "default"
    assert decide(job(steps=1, pins={"compile": "default"})).decisions.compile == "default"
    twice = compile_break_even(job(), precision="bf16", compile_s=2 * COMPILE_S)
    assert twice == pytest.approx(2 * even, abs=1)


# Kernels and 8 bits


def test_kernels_and_8_bits_where_they_gain() -> None:
    hopper = decide(job(sequences=64)).decisions
    assert (hopper.fused_qkv, hopper.fused_mlp, hopper.fused_loss, hopper.fp8, hopper.compile) == (
        True,
        True,
        True,
        True,
        "none",
    )
    ampere = decide(job(hardware="A100-80GB", sequences=64))
    assert ampere.decisions.fused_mlp
    assert not ampere.decisions.fp8
    assert "SM 8.9" in ampere.reasons["fp8"]
    ada = decide(job(hardware="RTX 4090", sequences=64))
    assert not ada.decisions.fp8
    assert "plan.fp8: true" in ada.reasons["fp8"]
    assert not decide(job(hardware="T4")).decisions.fused_mlp
    assert not decide(job(hardware="CPU")).decisions.fused_mlp
    assert not decide(job(sequences=64, pins={"preset": "safe"})).decisions.fp8


def test_8_bits_need_tokens_enough_and_widths_of_16() -> None:
    few = decide(job(sequences=1))
    assert not few.decisions.fp8
    assert "too few tokens" in few.reasons["fp8"]
    # Where passes cannot be recorded, 8 bits have more launches to wait for.
    assert decide(job(sequences=8)).decisions.fp8
    assert not decide(job(sequences=8, pins={"graphs": False})).decisions.fp8
    assert not decide(job(sequences=8, pins={"compile": "default"})).decisions.fp8
    deep = decide(job(shape=replace(LARGE, layers=36), hardware="H100-SXM", length=2048, sequences=1))
    assert "under 50% of memory" in deep.reasons["graphs"]
    assert not deep.decisions.fp8
    odd = decide(job(shape=replace(SMALL, vocab=50257), sequences=64))
    assert not odd.decisions.fp8
    assert "model.vocab is 50257" in odd.reasons["fp8"]
    assert not decide(job(shape=replace(SMALL, hidden=384, heads=6, kv_heads=6), sequences=64)).decisions.fp8


def test_query_and_key_norms_are_fused_where_heads_are_a_power_of_two() -> None:
    plan = decide(job(shape=replace(SMALL, qk_norm=True), sequences=64, steps=None))
    assert plan.decisions.fused_qkv
    assert plan.decisions.fp8
    odd = decide(job(shape=replace(SMALL, qk_norm=True, head_dim=96), sequences=64, steps=None))
    assert not odd.decisions.fused_qkv
    assert "not 96" in odd.reasons["fused_qkv"]
    assert odd.decisions.fused_mlp
    assert odd.decisions.compile == "default"


def test_selective_recomputation_is_for_the_plain_path() -> None:
    plan = decide(job(sequences=64, pins={"recompute": "selective"}))
    assert not plan.decisions.fused_mlp
    assert not plan.decisions.fp8


def test_a_foreign_model_has_no_fast_paths_and_no_figures_nobody_counted() -> None:
    plan = decide(job(shape=replace(SMALL, foreign="model_type 'gpt2' is not ours"), pins={"preset": "max"}))
    chosen = plan.decisions
    assert (chosen.fused_qkv, chosen.fused_mlp, chosen.fp8, chosen.compile) == (False, False, False, "none")
    assert chosen.fused_loss, "the loss is ours whatever the model is"
    assert plan.reasons["fused_mlp"] == "transformers runs this model"
    assert (plan.predicted.mfu, plan.predicted.tokens_per_s, plan.rates.peak_flops) == (None, None, None)
    assert plan.predicted.peak_gib > 0


def test_what_a_foreign_model_cannot_have_is_refused_all_at_once() -> None:
    shape = replace(SMALL, foreign="model_type 'gpt2' is not ours")
    text = refusal(job(shape=shape, packing="documents", pins={"fp8": True, "fused_mlp": True, "compile": "default"}))
    assert text.startswith("this model does not support plan.fused_mlp, plan.fp8, plan.compile default: ")
    assert "model_type 'gpt2' is not ours" in text


def test_why_a_model_is_foreign_is_recorded_under_its_first_name() -> None:
    """Checkpoints of older versions are identified by this JSON."""
    foreign = replace(SMALL, foreign="model_type 'gpt2' is not ours")
    recorded = json.loads(json.dumps(foreign.to_json()))
    assert recorded["adapter"] == foreign.foreign
    assert "foreign" not in recorded
    assert ModelShape.from_json(recorded, source="plan.json") == foreign
    assert "adapter" not in SMALL.to_json()
    with pytest.raises(UsageError, match=r"^plan\.json is not what flatout writes there"):
        ModelShape.from_json(recorded | {"adapter": 1}, source="plan.json")


def test_a_window_shortens_attention(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", model_type="mistral", sliding_window=256, max_position_embeddings=1024)
    model = {"name": str(folder)}
    found = shape(model=model, sequence_length=512)
    assert (found.foreign, found.positions, found.window) == ("", 1024, 256)
    seen = [min(at + 1, 256) for at in range(512)]
    assert found.context(512) == pytest.approx(sum(seen) / 512)
    assert found.context(256) == 257 / 2
    half = replace(found, full_layers=found.layers // 2)
    assert half.context(512) == pytest.approx((sum(seen) / 512 + 513 / 2) / 2)
    whole, slides = (flops_per_token(one, sequence_length=512) for one in (replace(found, window=None), found))
    assert slides.attention / whole.attention == pytest.approx(sum(seen) / 512 / (513 / 2))


@pytest.mark.parametrize(
    ("name", "machine"),
    [("t4", "T4"), ("v100", "V100-32GB"), ("a100-40gb", "A100-40GB"), ("a100-80gb", "A100-80GB"), ("h100", "H100")],
)
def test_the_fine_tuning_examples_fit_their_machines(name: str, machine: str) -> None:
    hardware = named(machine)
    loaded = load(gallery.find(f"sft-{name}").path, environ={})
    plan = decide(job_of(loaded.settings, hardware=hardware, num_ranks=1))
    assert hardware.memory_gib is not None
    assert plan.predicted.peak_gib < 0.93 * hardware.memory_gib
    assert plan.decisions.precision == ("fp16" if name in ("t4", "v100") else "bf16")
    assert plan.to_json()["job"]["base"] == loaded.settings.model.name


def test_a_smaller_share_of_the_memory_is_a_smaller_device() -> None:
    loaded = load(gallery.find("sft-a100-80gb").path, environ={})
    whole = decide(job_of(loaded.settings, hardware=named("A100-80GB"), num_ranks=1))
    half = whole.with_pins(memory_fraction=0.5)
    assert half.predicted.peak_gib < 0.5 * 79
    with pytest.raises(UsageError, match=r"the model needs .* of 7\.\d GiB .*largest part: weights"):
        whole.with_pins(memory_fraction=0.1)
    four = decide(replace(whole.job, adapters=replace(whole.job.adapters, base_bits=4)))  # type: ignore[type-var]
    assert four.decisions.fused_qkv is False
    assert "4-bit" in four.reasons["fused_qkv"]
    assert "16-bit matmuls" in whole.reasons["fp8"] or "SM 8.9" in whole.reasons["fp8"]


# Sampling


@pytest.mark.parametrize(("machine", "rows"), [("A100-80GB", 512), ("A100-40GB", 256), ("V100-32GB", 128), ("CPU", 32)])
def test_completions_at_once_are_those_of_the_guides_matrix(machine: str, rows: int) -> None:
    """For its generator, SmolLM2-1.7B, with sequences of 512; the guide found its figures by hand."""
    generator = ModelShape(
        layers=24,
        hidden=2048,
        heads=32,
        kv_heads=32,
        head_dim=64,
        intermediate=8192,
        vocab=49152,
        positions=512,
        tied=True,
    )
    hardware = named(machine) if machine != "CPU" else replace(named(machine), ram_gib=64.0)
    plan = decide(job(hardware=hardware, length=512, generator=generator))
    assert plan.rows == plan.to_json()["rows"] == rows
    assert plan.with_pins(precision="fp32").rows == (rows // 2 if machine != "CPU" else 32)
    assert decide(job(hardware=hardware, length=512, generator=generator, rows=7)).rows == 7
    assert decide(job(hardware=hardware, length=512)).rows is None
    assert ("slow generation" in plan.reasons["rows"]) == (machine == "V100-32GB")


def test_a_generator_that_does_not_fit_is_refused_with_the_figures() -> None:
    huge = ModelShape(
        layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28672, vocab=128256, positions=4096
    )
    assert "sampling needs 131." in refusal(job(hardware="A100-40GB", length=512, generator=huge))


def test_short_documents_have_a_kernel_of_their_own() -> None:
    def of(**changes: Any) -> Plan:
        return decide(job(**{"packing": "documents", "longest": 128, "sequences": 8} | changes))

    assert of().decisions.attention == "short"
    assert "128 tokens" in of().reasons["attention"]
    wide = replace(SMALL, heads=8, kv_heads=8, head_dim=96)
    for changes in (
        {"longest": 129},
        {"longest": None},
        {"packing": "concat"},
        {"hardware": "T4"},
        {"shape": wide},
        {"pins": {"fused_mlp": False, "compile": "default"}},
        {"pins": {"attention": "flash"}},
    ):
        assert of(**changes).decisions.attention != "short", changes


def test_passes_are_recorded_where_the_device_might_wait_and_memory_is_left() -> None:
    adapters = Adapters(rank=16, alpha=32.0, targets=("q", "v"))

    def of(**changes: Any) -> Plan:
        return decide(job(**{"hardware": "H200", "length": 1024, "sequences": 8} | changes))

    for changes in (
        {"adapters": adapters},
        {"adapters": adapters, "pins": {"recompute": "full"}},
        {"adapters": adapters, "sequences": 32},
        {},
        {"pins": {"recompute": "full"}},
        {"pins": {"fp8": True}},
    ):
        assert of(**changes).decisions.graphs is True, changes
        assert "host" in of(**changes).reasons["graphs"]
    few, whole = of(), of(pins={"graphs": False})
    assert few.predicted.tokens_per_s > whole.predicted.tokens_per_s
    assert few.predicted.peak_gib > whole.predicted.peak_gib, "gradients stay beside new ones"
    for changes, word in (
        ({"sequences": 64}, "enough tokens"),
        ({"hardware": "CPU"}, "CUDA graphs need a GPU"),
        ({"pins": {"fused_mlp": False}}, "kernel"),
        ({"pins": {"recompute": "selective"}}, "kernel"),
        ({"adapters": adapters, "sequences": 64, "pins": {"memory_fraction": 0.2, "micro_batch": 64}}, "peak"),
    ):
        plan = of(**changes)
        assert plan.decisions.graphs is False, changes
        assert word in plan.reasons["graphs"], changes
    assert of(adapters=adapters, pins={"graphs": False}).decisions.graphs is False
    assert of(shape=replace(SMALL, foreign="a model of another kind")).reasons["graphs"] == FOREIGN
    unknown = replace(named("H200"), peak_flops={})
    assert "is unknown" in of(hardware=unknown).reasons["graphs"]
    # One peak in all that is said of a plan, gradients that stay included; and it fits.
    assert f"predicted peak {few.predicted.peak_gib:.1f} of" in few.reasons["micro_batch"]
    pinned = {"shape": replace(LARGE, layers=56), "hardware": "A100-80GB", "sequences": 1}
    assert decide(job(**pinned)).decisions.graphs is False
    assert decide(job(**pinned)).decisions.recompute == "none"
    assert decide(job(**pinned, pins={"graphs": True})).decisions.recompute == "full"


# Copies or shards

SEVEN = ModelShape(
    layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064, positions=2048
)
SEVENTY = ModelShape(
    layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28672, vocab=128256, positions=2048
)


def test_weights_are_sharded_where_a_copy_does_not_fit() -> None:
    """Full fine-tuning of 7B on eight A100s; all that the ranks hold together is one model and its optimizer."""
    plan = decide(job(shape=SEVEN, hardware="A100-80GB", num_ranks=8, sequences=64))
    assert plan.decisions.sharding == "full"
    assert "a copy on each rank needs 121" in plan.reasons["sharding"]
    memory, whole = plan.predicted.memory_gib, SEVEN.num_parameters / 2**30
    assert memory["weights"] + memory["optimizer"] == pytest.approx(12 * whole / 8)
    assert not plan.decisions.fp8
    assert not plan.decisions.graphs
    small = decide(job(num_ranks=8))
    assert small.decisions.sharding == "none"
    assert "a copy on each rank fits" in small.reasons["sharding"]
    assert decide(job()).reasons["sharding"] == "one rank holds everything"


def test_seventy_billion_weights_are_refused_with_what_would_fit() -> None:
    told = refusal(job(shape=SEVENTY, hardware="A100-80GB", num_ranks=8, sequences=64))
    assert "sharded over 64 such devices it would fit" in told
    adapters = Adapters(rank=16, alpha=32)
    plan = decide(job(shape=SEVENTY, hardware="A100-80GB", num_ranks=8, sequences=64, adapters=adapters))
    assert plan.decisions.sharding == "full", "frozen weights are sharded too"
    assert not plan.decisions.fused_qkv


def test_what_sharding_cannot_do_is_refused_all_at_once() -> None:
    pins = {"sharding": "full", "fp8": True, "graphs": True}
    assert "does not work with plan.fp8, plan.graphs" in refusal(job(num_ranks=8, pins=pins))
    assert "does not work with one rank" in refusal(job(pins={"sharding": "full"}))


def test_threads_leave_out_cores_that_other_processes_use() -> None:
    hardware = replace(named("CPU"), num_cpus=4)
    settings = from_mapping({"model": {"layers": 2, "hidden": 64, "heads": 2}, "train": {"steps": 1}})
    for free, expected in ((None, 4), (4, 4), (1, 1)):
        plan = decide(job_of(settings, hardware=replace(hardware, free_cpus=free), num_ranks=1))
        assert plan.decisions.threads == expected
    assert plan.reasons["threads"].startswith("other processes use 3 of 4 cores")
