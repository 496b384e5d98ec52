from __future__ import annotations

import json

import pytest

from flatout.errors import UsageError
from flatout.hardware import Hardware, named, names, parse
from flatout.hardware.table import by_nvml_name


@pytest.mark.parametrize(
    ("nvml_name", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe-16GB"),
        ("Tesla V100S-PCIE-32GB", "V100S-32GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_a_card_is_found_by_the_name_the_driver_gives(nvml_name: str, name: str) -> None:
    row = by_nvml_name(nvml_name)
    assert row is not None
    assert row.name == name


@pytest.mark.parametrize(
    "nvml_name",
    [
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA L40",
        "NVIDIA B300",
        "",
    ],
)
def test_a_sibling_of_a_known_card_is_unknown(nvml_name: str) -> None:
    assert by_nvml_name(nvml_name) is None


def test_peaks_are_dense_and_only_of_units_that_exist() -> None:
    assert {name: named(name).peak_flops["bf16"] for name in ("A100-40GB", "H100-SXM", "H100-PCIe", "H200")} == {
        "A100-40GB": 312e12,
        "H100-SXM": 989e12,
        "H100-PCIe": 756e12,
        "H200": 989e12,
    }
    assert named("V100-32GB").peak_flops["fp16"] == 125e12
    assert named("T4").peak_flops["fp16"] == 65e12
    for name in names():
        card = named(name)
        if card.sm is None:
            continue
        assert ("bf16" in card.peak_flops) == ("tf32" in card.peak_flops) == (card.sm >= (8, 0)), name
        assert ("fp8" in card.peak_flops) == (card.sm >= (8, 9)), name
        if "bf16" in card.peak_flops:
            # A sparse figure that slipped in would break these ratios of the tensor cores.
            assert card.peak_flops["fp16"] == card.peak_flops["bf16"]
            assert card.peak_flops["bf16"] / card.peak_flops["tf32"] == pytest.approx(2, rel=0.03), name
        if "fp8" in card.peak_flops:
            assert card.peak_flops["fp8"] / card.peak_flops["bf16"] == pytest.approx(2, rel=0.03), name


def test_every_row_is_complete_and_in_units() -> None:
    assert len(set(names())) == len(names())
    for name in names():
        card = named(name)
        if name == "CPU":
            assert (card.gpu, card.num_gpus, card.peak_flops, card.memory_gib) == (None, 0, {}, None)
            continue
        assert card.source, name
        assert card.memory_gib is not None
        assert card.bandwidth is not None
        assert card.link_bandwidth is not None
        assert 14 < card.memory_gib < 190, name
        assert 300e9 <= card.bandwidth <= 8e12, name
        assert (card.link == "NVLink") == (card.link_bandwidth >= 300e9), name
        if name.endswith("GB"):
            stated_gib = float(name.split("-")[-1].removesuffix("GB"))
            assert stated_gib - 1 < card.memory_gib < stated_gib, name
        assert card.gpu is not None
        assert by_nvml_name(card.gpu) == card


@pytest.mark.parametrize(
    ("text", "name", "num_gpus"),
    [
        ("A100-80GBx8", "A100-80GB", 8),
        ("a100-80gb x8", "A100-80GB", 8),
        ("A100 80GB X 8", "A100-80GB", 8),
        ("H200", "H200", 1),
        ("T4x1", "T4", 1),
        ("h100", "H100-SXM", 1),
        ("H100x16", "H100-SXM", 16),
        ("4090", "RTX-4090", 1),
        ("5090", "RTX-5090", 1),
        ("A6000x4", "RTX-A6000", 4),
        ("B200x8", "B200", 8),
        ("3090x2", "RTX-3090", 2),
        ("RTX3090", "RTX-3090", 1),
        ("rtx 3090", "RTX-3090", 1),
        ("RTX3090x4", "RTX-3090", 4),
        ("CPU", "CPU", 0),
        ("cpu", "CPU", 0),
    ],
)
def test_parse(text: str, name: str, num_gpus: int) -> None:
    hardware = parse(text)
    assert (hardware.name, hardware.num_gpus) == (name, num_gpus)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("A100", "A100-40GB, A100-80GB"),
        ("V100x8", "V100-16GB, V100-32GB"),
        ("H20", "did you mean H200"),
        ("A100-80Gx8", "did you mean A100-80GB"),
        ("RTX 5080", "'RTX 5080' is not in the table"),
        ("RTX5080x2", "'RTX5080' is not in the table"),
        ("H200x0", "at least one GPU"),
        ("CPUx2", "write CPU"),
        ("", "'' is not in the table"),
        ("x8", "It has T4,"),
    ],
)
def test_parse_says_the_way_out(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert says in str(refused.value)


@pytest.mark.parametrize("hardware", [named("A100-80GB", num_gpus=8), named("T4"), named("CPU")])
def test_json_round_trip(hardware: Hardware) -> None:
    data = json.loads(json.dumps(hardware.to_json()))
    assert data == hardware.to_json()
    assert Hardware.from_json(data) == hardware
    assert Hardware.from_json(data | {"from_a_newer_version": 1}) == hardware


@pytest.mark.parametrize("name", ["MI300X", "MI250x8", "AMD Instinct", "Radeon VII", "RX-7900"])
def test_an_amd_card_is_told_about(name: str) -> None:
    with pytest.raises(UsageError, match=r"for NVIDIA GPUs; on AMD it trains on the CPU only\. It has"):
        parse(name)
