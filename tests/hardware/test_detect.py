from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

from flatout.errors import EnvironmentLacks
from flatout.hardware import detect, unsupported_build
from flatout.hardware.detect import Gpu, cpu_name, cpu_quotas, memory_limits, visible

GIB = 2**30


def gpu(number: int, name: str = "NVIDIA A100-SXM4-80GB", **changes: Any) -> Gpu:
    plain = Gpu(name=name, uuid=f"GPU-{number}aaa-bbbb", sm=(8, 0), memory_gib=79.25)
    return replace(plain, **changes)


def mig(number: int) -> Gpu:
    return gpu(number, "NVIDIA A100-SXM4-80GB MIG 1g.10gb", uuid=f"MIG-{number}ccc", memory_gib=9.5)


FOUR = [gpu(number) for number in range(4)]


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("0,7,1", [0]),
        ("1,-1,2", [1]),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,1", []),
        ("GPU-2aaa-bbbb,GPU-0", [2, 0]),
        ("GPU-", []),
        ("0,GPU-0aaa", []),
        ("0,", [0]),
    ],
)
def test_visible_gpus_are_those_cuda_would_show(wanted: str | None, indices: list[int]) -> None:
    assert visible(FOUR, wanted=wanted) == [FOUR[index] for index in indices]


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [(None, [mig(0)]), ("0", [mig(0)]), ("MIG-1ccc", [mig(1)]), ("MIG-1ccc,MIG-0ccc", [mig(1)]), ("1", [])],
)
def test_a_divided_card_shows_one_instance(wanted: str | None, seen: list[Gpu]) -> None:
    cards = [gpu(0, divided=True, instances=(mig(0), mig(1))), gpu(1, divided=True)]
    assert visible(cards, wanted=wanted) == seen


class Driver(ModuleType):
    """The part of `pynvml` that detection calls, over cards written down here; a handle is the card itself."""

    def __init__(self, cards: Sequence[Gpu], *, nvlink: bool = True, broken: Exception | None = None) -> None:
        super().__init__("pynvml")
        self.cards, self.nvlink, self.broken = cards, nvlink, broken
        self.sessions = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)  # the constants and the errors are the real ones

    def nvmlInit(self) -> None:
        if self.broken is not None:
            raise self.broken
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        return next(part for card in self.cards for part in (card, *card.instances) if part.uuid == uuid)

    def nvmlDeviceGetName(self, handle: Gpu) -> str:
        return handle.name

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        return handle.uuid

    def nvmlDeviceGetCudaComputeCapability(self, handle: Gpu) -> Any:
        return _or_unsupported(handle.sm)

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu, version: int) -> SimpleNamespace:
        assert version == pynvml.nvmlMemory_v2
        reserved = GIB // 2
        return SimpleNamespace(total=_or_unsupported(handle.memory_gib) * GIB + reserved, reserved=reserved)

    def nvmlDeviceGetMigMode(self, handle: Gpu) -> list[int]:
        if handle.sm == (7, 5):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(handle.divided), int(handle.divided)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Gpu, slot: int) -> Gpu:
        if slot % 2 or slot // 2 >= len(handle.instances):  # instances sit in every other slot
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle.instances[slot // 2]

    def nvmlDeviceGetP2PStatus(self, one: Gpu, other: Gpu, over: int) -> int:
        assert one.uuid != other.uuid
        assert over == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        return int(pynvml.NVML_P2P_STATUS_OK if self.nvlink else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)


def _or_unsupported(value: Any) -> Any:
    if value is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], Driver]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(driver: Driver) -> Driver:
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        return driver

    return install


Install = Callable[[Driver], Driver]


def test_a_known_machine(install: Install) -> None:
    driver = install(Driver(FOUR))
    hardware = detect()
    assert (hardware.name, hardware.gpu, hardware.num_gpus) == ("A100-80GB", "NVIDIA A100-SXM4-80GB", 4)
    assert hardware.memory_gib == 79.25  # without what the driver reserves
    assert hardware.peak_flops["bf16"] == 312e12
    assert (hardware.link, hardware.link_bandwidth) == ("NVLink", 600e9)
    assert hardware.driver == "580.1"
    assert driver.sessions == 0


def test_visible_devices_are_respected(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Driver(FOUR))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3,0")
    assert detect().num_gpus == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert (detect().name, detect().num_gpus, detect().driver) == ("CPU", 0, "580.1")


def test_cards_that_only_share_a_bus_do_not_get_nvlink(install: Install) -> None:
    install(Driver(FOUR, nvlink=False))
    assert (detect().link, detect().link_bandwidth) == ("PCIe", None)
    install(Driver(FOUR[:1], nvlink=False))
    assert detect().link == "NVLink"  # one card: what its datasheet offers


def test_an_unknown_card_keeps_what_the_driver_says_and_has_no_peaks(install: Install) -> None:
    install(Driver([gpu(0, "NVIDIA H200 NVL", sm=(9, 0), memory_gib=140.0)]))
    hardware = detect()
    assert (hardware.name, hardware.gpu, hardware.sm) == (None, "NVIDIA H200 NVL", (9, 0))
    assert hardware.memory_gib == 140.0
    assert (hardware.peak_flops, hardware.bandwidth, hardware.source) == ({}, None, None)
    assert (hardware.link, hardware.link_bandwidth) == (None, None)


def test_an_instance_of_a_card_is_not_the_card(install: Install) -> None:
    install(Driver([gpu(0, divided=True, instances=(mig(0), mig(1)))]))
    hardware = detect()
    assert (hardware.name, hardware.num_gpus, hardware.memory_gib) == (None, 1, 9.5)
    assert hardware.peak_flops == {}
    assert hardware.sm == (8, 0)


def test_mixed_cards_count_as_the_least_and_have_no_peaks(install: Install) -> None:
    install(Driver([gpu(0), gpu(1, "Tesla T4", sm=(7, 5), memory_gib=14.5)], nvlink=False))
    hardware = detect()
    assert (hardware.name, hardware.gpu, hardware.num_gpus) == (None, "NVIDIA A100-SXM4-80GB + Tesla T4", 2)
    assert (hardware.sm, hardware.memory_gib, hardware.peak_flops) == ((7, 5), 14.5, {})


def test_what_the_driver_does_not_answer_is_unknown(install: Install) -> None:
    install(Driver([gpu(0, sm=None, memory_gib=None)]))
    assert (detect().sm, detect().memory_gib) == (None, None)


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver_means_a_cpu_machine(install: Install, error: int) -> None:
    install(Driver([], broken=pynvml.NVMLError(error)))
    assert (detect().name, detect().num_gpus, detect().driver) == ("CPU", 0, None)


def test_a_broken_driver_is_not_mistaken_for_no_gpu(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Driver([], broken=pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)))
    with pytest.raises(EnvironmentLacks, match="CUDA_VISIBLE_DEVICES="):
        detect()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect().name == "CPU"


def test_this_machine_without_its_gpus_in_a_process_of_its_own() -> None:
    program = (
        "import sys, json; from flatout.hardware import detect; found = detect().to_json();"
        "assert 'torch' not in sys.modules; print(found['name'], found['num_gpus'], found['num_cpus'])"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    cpus = sorted(os.sched_getaffinity(0))[:1]
    done = subprocess.run(
        ["taskset", "-c", str(cpus[0]), sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["CPU", "0", "1"]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_cgroup_v2_limits_of_the_group_and_its_ancestors(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/job/step/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/job/memory.max": "max\n",
        },
    )
    assert list(cpu_quotas(root)) == [3.5]
    assert list(memory_limits(root)) == [8 * GIB]


def test_cgroup_v1_limits_inside_a_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        },
    )
    assert list(cpu_quotas(root)) == [2.0]
    assert list(memory_limits(root)) == [4 * GIB]


def test_cgroup_v1_without_limit_and_no_cgroups_at_all(tmp_path: Path) -> None:
    assert list(cpu_quotas(tmp_path)) == []
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "2:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert list(cpu_quotas(root)) == []


def test_cpu_name(tmp_path: Path) -> None:
    root = write(tmp_path, {"x86": "processor : 0\nmodel name\t: AMD EPYC 9654\n", "arm": "CPU part\t: 0xd0c\n"})
    assert cpu_name(root / "x86") == "AMD EPYC 9654"
    assert cpu_name(root / "arm") is None
    assert cpu_name(root / "absent") is None


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("sm", "arch_list"),
    [
        (None, CUDA_13),
        ((7, 5), CUDA_13),
        ((8, 9), CUDA_13),  # machine code of 8.6
        ((9, 0), ["sm_90a"]),
        ((10, 3), CUDA_13),
        ((10, 3), ["sm_100f"]),
        ((12, 1), ["sm_120"]),
        ((13, 0), CUDA_13),  # PTX of 12.0
        ((8, 0), ["sm_75", "compute_75"]),
    ],
)
def test_builds_that_run(sm: tuple[int, int] | None, arch_list: list[str]) -> None:
    assert unsupported_build(sm=sm, arch_list=arch_list, torch_version="2.13.0") is None


@pytest.mark.parametrize(
    ("sm", "arch_list", "says"),
    [
        ((7, 0), CUDA_13, ["sm_70", "sm_75, sm_80", "2.13.0", "CUDA 12.6"]),
        ((6, 1), CUDA_13, ["sm_61", "CUDA 12.6"]),
        ((3, 7), CUDA_13, ["sm_37", "sm_50 or later"]),
        ((8, 0), ["sm_86"], ["sm_80", "CUDA 13"]),
        ((9, 0), ["sm_80", "sm_86"], ["sm_90", "CUDA 13"]),
        ((10, 0), ["sm_90a", "compute_90a"], ["sm_100", "CUDA 13"]),
        ((11, 0), ["sm_100", "compute_100f"], ["sm_110", "CUDA 13"]),
        ((9, 0), [], ["sm_90", "CPU-only build", "driver"]),
        ((9, 0), ["gfx942"], ["sm_90"]),
    ],
)
def test_builds_that_do_not_run_say_which_does(sm: tuple[int, int], arch_list: list[str], says: list[str]) -> None:
    sentence = unsupported_build(sm=sm, arch_list=arch_list, torch_version="2.13.0")
    assert sentence is not None
    for part in says:
        assert part in sentence
