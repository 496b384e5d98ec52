"""What ran is told from the names of operators and kernels, and a decision that did not come true is told apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flatout.config.settings import PlanSettings
from flatout.cost import ModelShape
from flatout.engine.ran import Calls, paths
from flatout.hardware import parse
from flatout.plan import Job, decide

SHAPE = ModelShape(
    layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, intermediate=3072, vocab=50304, positions=1024
)
DECISIONS = decide(
    Job(
        shape=SHAPE,
        hardware=parse("H200"),
        sequence_length=1024,
        batch_tokens=1024 * 64,
        num_ranks=1,
        pins=PlanSettings(attention="cudnn", fp8=True, fused_qkv=True, fused_mlp=True, fused_loss=True),
    )
).decisions


@dataclass(frozen=True)
class Event:
    called: str
    types: tuple[str, ...] = ()

    def name(self) -> str:
        return self.called

    def dtypes(self) -> list[str]:
        return list(self.types)


BF16 = ("c10::BFloat16", "c10::BFloat16")
AS_PLANNED = [
    *[Event("_NormQkvRope"), Event("_NormMlp"), Event("aten::_scaled_dot_product_cudnn_attention")] * 12,
    *[Event("aten::_scaled_mm", ("c10::Float8_e4m3fn", "c10::Float8_e4m3fn"))] * 96,
    *[Event("aten::mm", BF16)] * 3,
    Event("aten::_scaled_dot_product_cudnn_attention_backward", BF16),
    Event("aten::_fused_adamw_"),
    Event("cudaGraphLaunch"),
]


def test_a_plan_that_came_true() -> None:
    found = paths(Calls.of(AS_PLANNED), replace(DECISIONS, graphs=True), on_gpu=True)
    names = {"precision", "attention", "compile", "fused_optimizer", "fused_qkv", "fused_mlp", "fp8", "graphs"}
    assert found.keys() == names
    assert {name for name, path in found.items() if path.planned != path.ran} == set()
    assert found["precision"].seen == "8-bit in 96, bf16 in 3 of 99 matrix products"
    assert found["attention"].seen == "aten::_scaled_dot_product_cudnn_attention called 12 times"


def test_a_plan_that_did_not() -> None:
    ran = [
        *[Event("aten::addmm", ("float", "float", "float"))] * 4,
        *[Event("aten::_scaled_dot_product_attention_math"), Event("Torch-Compiled Region: 0/0")] * 12,
        *[Event("aten::addcdiv_")] * 40,
    ]
    found = paths(Calls.of(ran), DECISIONS, on_gpu=True)
    told = {name: (path.planned, path.ran) for name, path in found.items()}
    assert told == {
        "precision": ("bf16", "fp32"),
        "attention": ("cudnn", "math"),
        "compile": ("none", "default"),
        "fused_optimizer": ("yes", "no"),
        "fused_qkv": ("yes", "no"),
        "fused_mlp": ("yes", "no"),
        "fp8": ("yes", "no"),
    }


def test_a_replayed_graph_is_known_by_its_kernels() -> None:
    replayed = [Event("cudaGraphLaunch"), Event("aten::_fused_adamw_"), Event("_rotate"), Event("_swiglu_forward")]
    found = paths(
        Calls.of([*replayed, Event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop")]), DECISIONS, on_gpu=True
    )
    told = {name: path.ran for name, path in found.items()}
    assert told.items() >= {"attention": "cudnn", "fused_qkv": "yes", "fused_mlp": "yes", "graphs": "yes"}.items()
    assert not {"precision", "fp8"} & told.keys(), "their names do not tell"


def test_nothing_is_said_of_what_names_do_not_tell() -> None:
    assert paths(Calls.of([Event("aten::add")]), DECISIONS, on_gpu=False).keys() == {"compile"}
