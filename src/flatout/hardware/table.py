"""`Hardware`, the properties of a machine, and the table of cards with their datasheet peaks.

`flatout plan --on A100-80GBx8` reads the table for a machine that is not here; `flatout hardware` looks up the
card it detected. A card is matched by its exact name: a sibling with other clocks or fewer cores is unknown, and
an unknown card has no peaks rather than those of another card.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from flatout.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine with GPUs of one kind, or none. Unknown is `None`, or an absent peak."""

    name: str | None  # key in the table; None when the GPU is not in it
    gpu: str | None  # as NVML names it; None on a CPU machine
    num_gpus: int
    sm: tuple[int, int] | None = None
    memory_gib: float | None = None  # of one GPU, without what the driver keeps for itself
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # of one GPU, dense; absent: no such unit
    bandwidth: float | None = None  # of one GPU's memory, bytes/s
    link: str | None = None  # between GPUs: "NVLink" or "PCIe"
    link_bandwidth: float | None = None  # of one GPU, bytes/s, both directions summed
    driver: str | None = None
    cpu: str | None = None
    num_cpus: int | None = None  # this process may use
    ram_gib: float | None = None  # this process may use
    source: str | None = None  # of the peaks
    peak_source: Literal["datasheet", "measured"] | None = None
    free_cpus: int | None = None  # CPU only: cores that no other process used when the run was planned; measured
    process_gib: float | None = None  # CPU only: what a process with torch takes before it has a model; measured

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"sm": None if self.sm is None else list(self.sm)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Hardware:
        """Read back `to_json`. Keys of a newer version are ignored: old readers still open new run folders."""
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        major_minor = known.get("sm")
        return cls(**known | {"sm": None if major_minor is None else (major_minor[0], major_minor[1])})


def _card(
    name: str,
    gpu: str,
    sm: tuple[int, int],
    memory_gib: float,
    gb_per_s: float,
    link: str,
    link_gb_per_s: float,
    peaks: tuple[str, Mapping[str, float]],
) -> Hardware:
    source, tflops = peaks
    return Hardware(
        name=name,
        gpu=gpu,
        num_gpus=1,
        sm=sm,
        memory_gib=memory_gib,
        peak_flops={dtype: value * 1e12 for dtype, value in tflops.items()},
        bandwidth=gb_per_s * 1e9,
        link=link,
        link_bandwidth=link_gb_per_s * 1e9,
        source=source,
        peak_source="datasheet",
    )


# fmt: off
# Teraflop/s, dense: datasheets from Ampere on print most figures with 2:4 sparsity, which doubles them. GeForce
# cards run fp16 twice as fast with an fp16 accumulator; training accumulates in fp32, so that is the figure here.
_T4        = "NVIDIA T4 datasheet", {"fp32": 8.1, "fp16": 65}
_V100_SXM  = "NVIDIA V100 datasheet, SXM2", {"fp32": 15.7, "fp16": 125}
_V100_PCIE = "NVIDIA V100 datasheet, PCIe", {"fp32": 14, "fp16": 112}
_V100S     = "NVIDIA V100 datasheet, V100S", {"fp32": 16.4, "fp16": 130}
_A10       = "NVIDIA A10 datasheet, dense", {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125}
_A10G      = "NVIDIA A10G datasheet, dense", {"fp32": 35, "tf32": 35, "fp16": 70, "bf16": 70}
_L4        = "NVIDIA L4 datasheet, dense", {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242.5}
_A100      = "NVIDIA A100 datasheet, dense", {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}
_RTX_3090  = "NVIDIA GA102 whitepaper, dense", {"fp32": 35.6, "tf32": 35.6, "fp16": 71, "bf16": 71}
_RTX_4090  = ("NVIDIA Ada whitepaper, dense",
              {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3})
_H100_PCIE = ("NVIDIA H100 datasheet, PCIe, dense",
              {"fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513})
_HOPPER    = {"fp32": 67, "tf32": 494.5, "fp16": 989, "bf16": 989, "fp8": 1979}
_H100_SXM  = "NVIDIA H100 datasheet, SXM, dense", _HOPPER
_H200      = "NVIDIA H200 datasheet, SXM, dense", _HOPPER
_A6000     = "NVIDIA RTX A6000 datasheet, dense", {"fp32": 38.7, "tf32": 77.4, "fp16": 154.8, "bf16": 154.8}
_L40S      = ("NVIDIA L40S datasheet, dense",
              {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362, "fp8": 733})
_RTX_5090  = ("NVIDIA RTX Blackwell whitepaper, dense",
              {"fp32": 104.8, "tf32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp8": 419})
_B200      = ("NVIDIA HGX B200 datasheet, dense",
              {"fp32": 75, "tf32": 1100, "fp16": 2250, "bf16": 2250, "fp8": 4500})
_GB200     = ("NVIDIA GB200 NVL72 datasheet, one GPU, dense",
              {"fp32": 80, "tf32": 1250, "fp16": 2500, "bf16": 2500, "fp8": 5000})

# Memory is what CUDA offers a program, which is less than what is soldered on.
_TABLE = [
    #     name              as NVML names it           sm      GiB    GB/s  link      GB/s
    _card("T4",             "Tesla T4",                (7, 5), 14.6,  320,  "PCIe",   32,  _T4),
    _card("V100-16GB",      "Tesla V100-SXM2-16GB",    (7, 0), 15.8,  900,  "NVLink", 300, _V100_SXM),
    _card("V100-32GB",      "Tesla V100-SXM2-32GB",    (7, 0), 31.7,  900,  "NVLink", 300, _V100_SXM),
    _card("V100-PCIe-16GB", "Tesla V100-PCIE-16GB",    (7, 0), 15.8,  900,  "PCIe",   32,  _V100_PCIE),
    _card("V100-PCIe-32GB", "Tesla V100-PCIE-32GB",    (7, 0), 31.7,  900,  "PCIe",   32,  _V100_PCIE),
    _card("V100S-32GB",     "Tesla V100S-PCIE-32GB",   (7, 0), 31.7,  1134, "PCIe",   32,  _V100S),
    _card("A10",            "NVIDIA A10",              (8, 6), 22.1,  600,  "PCIe",   64,  _A10),
    _card("A10G",           "NVIDIA A10G",             (8, 6), 22.1,  600,  "PCIe",   64,  _A10G),
    _card("L4",             "NVIDIA L4",               (8, 9), 22.0,  300,  "PCIe",   64,  _L4),
    _card("A100-40GB",      "NVIDIA A100-SXM4-40GB",   (8, 0), 39.4,  1555, "NVLink", 600, _A100),
    _card("A100-80GB",      "NVIDIA A100-SXM4-80GB",   (8, 0), 79.2,  2039, "NVLink", 600, _A100),
    _card("A100-PCIe-40GB", "NVIDIA A100-PCIE-40GB",   (8, 0), 39.4,  1555, "PCIe",   64,  _A100),
    _card("A100-PCIe-80GB", "NVIDIA A100 80GB PCIe",   (8, 0), 79.2,  1935, "PCIe",   64,  _A100),
    _card("RTX-3090",       "NVIDIA GeForce RTX 3090", (8, 6), 23.7,  936,  "PCIe",   64,  _RTX_3090),
    _card("RTX-4090",       "NVIDIA GeForce RTX 4090", (8, 9), 23.6,  1008, "PCIe",   64,  _RTX_4090),
    _card("H100-SXM",       "NVIDIA H100 80GB HBM3",   (9, 0), 79.2,  3350, "NVLink", 900, _H100_SXM),
    _card("H100-PCIe",      "NVIDIA H100 PCIe",        (9, 0), 79.2,  2000, "PCIe",   128, _H100_PCIE),
    _card("H200",           "NVIDIA H200",             (9, 0), 139.8, 4800, "NVLink", 900, _H200),
    _card("RTX-A6000",      "NVIDIA RTX A6000",        (8, 6), 47.5,  768,  "PCIe",   64,  _A6000),
    _card("L40S",           "NVIDIA L40S",             (8, 9), 44.4,  864,  "PCIe",   64,  _L40S),
    _card("RTX-5090",       "NVIDIA GeForce RTX 5090", (12, 0), 31.3, 1792, "PCIe",   128, _RTX_5090),
    _card("B200",           "NVIDIA B200",             (10, 0), 178.3, 7700, "NVLink", 1800, _B200),
    _card("GB200",          "NVIDIA GB200",            (10, 0), 184.0, 8000, "NVLink", 1800, _GB200),
    Hardware(name="CPU", gpu=None, num_gpus=0),
]
# fmt: on

# Common short names with one meaning. "A100" and "V100" have several and are refused with the choices.
_ALIASES = {"h100": "H100-SXM", "3090": "RTX-3090", "4090": "RTX-4090", "5090": "RTX-5090", "a6000": "RTX-A6000"}


# More than any cluster has.
MOST_GPUS = 1_000_000


def names() -> list[str]:
    return [row.name for row in _TABLE if row.name is not None]


def named(name: str, *, num_gpus: int = 1) -> Hardware:
    """The machine with `num_gpus` cards of that name; `CPU` has none."""
    rows = {_squash(known): row for known, row in zip(names(), _TABLE, strict=True)}
    asked = _squash(name)
    row = rows.get(_squash(_ALIASES.get(asked, asked)))
    if row is None:
        raise UsageError(_unknown(name))
    if num_gpus < 1:
        raise UsageError(f"{name} x {num_gpus}: a machine has at least one GPU; write {row.name}, or CPU for none")
    if row.gpu is None:
        if num_gpus > 1:
            raise UsageError(f"{name} x {num_gpus}: CPU is one machine without a GPU; write CPU")
        return row
    return replace(row, num_gpus=num_gpus)


def parse(text: str) -> Hardware:
    """`A100-80GBx8`, `H200`, `CPU`: a name of the table and, after an x, how many."""
    counted = re.fullmatch(r"(.+?)\s*(?<!rt)x\s*(\d+)", text.strip(), re.IGNORECASE)  # the x of RTX counts nothing
    if counted is None:
        return named(text.strip())
    if len(counted[2]) > len(str(MOST_GPUS)) or int(counted[2]) > MOST_GPUS:
        shown = text.strip() if len(text) < 60 else f"{text.strip()[:60]}..."
        raise UsageError(f"{shown}: at most {MOST_GPUS:,} GPUs; write how many the job has, such as H100x8")
    return named(counted[1], num_gpus=int(counted[2]))


def by_nvml_name(gpu: str) -> Hardware | None:
    """The row of exactly this card, or None. Old drivers leave out the brand, so it does not count."""
    return next((row for row in _TABLE if row.gpu is not None and _unbranded(row.gpu) == _unbranded(gpu)), None)


def _unbranded(gpu: str) -> str:
    return re.sub(r"^(NVIDIA|Tesla)\s+", "", gpu).casefold()


def _squash(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


# Cards of other makers, by the beginning of their names.
_OTHERS = {"amd": "AMD", "mi1": "AMD", "mi2": "AMD", "mi3": "AMD", "radeon": "AMD", "rx": "AMD", "gaudi": "Intel"}
NO_AMD = "flatout's kernels, its monitor and its table of peaks are for NVIDIA GPUs; on AMD it trains on the CPU only"


def _unknown(name: str) -> str:
    known = names()
    asked = _squash(name)
    for begin, maker in _OTHERS.items():
        if asked.startswith(begin):
            why = NO_AMD if maker == "AMD" else f"GPUs of {maker} are not supported"
            return f"{name!r} is not in the table of machines: {why}. It has {', '.join(known)}"
    several = [row for row in known if asked and _squash(row).startswith(asked)]
    if len(several) > 1:
        return f"{name!r} matches several cards: choose one of {', '.join(several)}"
    near = difflib.get_close_matches(asked, map(_squash, known), n=3, cutoff=0.5)
    likely = [row for close in near for row in known if _squash(row) == close]
    hint = f"did you mean {' or '.join(likely)}? " if likely else ""
    return f"{name!r} is not in the table of machines: {hint}It has {', '.join(known)}"
