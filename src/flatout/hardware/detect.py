"""Detects the hardware of this machine: the GPUs with NVML, the host with /proc and cgroups.

`flatout hardware` prints the result, and every plan without `--on` uses it. It needs no torch and no CUDA context,
so it is quick and takes no GPU memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from flatout.errors import EnvironmentLacks
from flatout.hardware.table import Hardware, by_nvml_name, named

_GIB = 2**30
_T = TypeVar("_T")


def detect() -> Hardware:
    """This machine as a CUDA process started here would see it; a CPU machine if it would see no GPU."""
    return _with_host(_detect_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))


def host() -> Hardware:
    """This machine without its GPUs."""
    return _with_host(named("CPU"))


def _with_host(gpus: Hardware) -> Hardware:
    import psutil

    ram_bytes = min([psutil.virtual_memory().total, *memory_limits()])
    return replace(
        gpus,
        cpu=cpu_name(),
        num_cpus=max(1, int(min([len(os.sched_getaffinity(0)), *cpu_quotas()]))),
        ram_gib=ram_bytes / _GIB,
    )


# GPUs


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card as NVML describes it. A card divided by MIG has instances and cannot be used as a whole."""

    name: str
    uuid: str
    sm: tuple[int, int] | None
    memory_gib: float | None
    divided: bool = False
    instances: tuple[Gpu, ...] = ()


def visible(gpus: Sequence[Gpu], *, wanted: str | None) -> list[Gpu]:
    """The GPUs that CUDA shows to a process whose CUDA_VISIBLE_DEVICES is `wanted`.

    Indices are taken in the order of the PCI bus, which is CUDA's own order as long as the cards are alike.
    """
    usable = list(_usable(gpus, wanted=wanted).values())
    # CUDA gives a process one MIG instance, and nothing beside it.
    return usable[:1] if any(part.uuid.startswith("MIG-") for part in usable) else usable


def _usable(gpus: Sequence[Gpu], *, wanted: str | None) -> dict[str, Gpu]:
    """The GPUs, and the instances of divided ones, by the entry of CUDA_VISIBLE_DEVICES that selects each alone."""
    chosen: dict[str, Gpu] = {}
    for entry in map(str, range(len(gpus))) if wanted is None else wanted.split(","):
        found = _find(entry.strip(), gpus)
        if found is None:
            break  # as CUDA does: what follows an entry it cannot resolve is hidden
        if found in chosen.values():
            return {}  # as CUDA does: naming a device twice hides all of them
        chosen[entry.strip()] = found
    return {
        (name if part is gpu else part.uuid): part
        for name, gpu in chosen.items()
        for part in (gpu.instances if gpu.divided else [gpu])
    }


def devices() -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES that this process can hand out: one for each GPU or MIG instance."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted == "":
        return []
    with _driver() as present:
        return list(_usable(_read_gpus(), wanted=wanted)) if present else []


def _find(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    everything = [*gpus, *(instance for gpu in gpus for instance in gpu.instances)]
    matches = [gpu for gpu in everything if gpu.uuid.startswith(entry)] if entry else []
    return matches[0] if len(matches) == 1 else None


def _detect_gpus(wanted: str | None) -> Hardware:
    if wanted == "":
        return named("CPU")
    import pynvml

    with _driver() as present:
        if not present:
            return named("CPU")
        driver = _ask(pynvml.nvmlSystemGetDriverVersion)
        gpus = visible(_read_gpus(), wanted=wanted)
        if not gpus:
            return replace(named("CPU"), driver=driver)
        return replace(_describe(gpus, nvlink=_all_on_nvlink(gpus)), driver=driver)


@contextmanager
def _driver() -> Iterator[bool]:
    """Whether there is an NVIDIA driver, which can be asked within the block."""
    import pynvml

    try:
        try:
            pynvml.nvmlInit()
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
            yield False
            return
        try:
            yield True
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise EnvironmentLacks(
            f"the NVIDIA driver is installed but does not respond ({error}): repair it (a reboot helps after a "
            "driver update), or set CUDA_VISIBLE_DEVICES= to use this machine without its GPUs"
        ) from error


def _describe(gpus: Sequence[Gpu], *, nvlink: bool | None) -> Hardware:
    kinds = list(dict.fromkeys(gpu.name for gpu in gpus))
    row = by_nvml_name(kinds[0]) if len(kinds) == 1 else None
    base = row if row is not None else Hardware(name=None, gpu=None, num_gpus=0)
    # A single card keeps the link of its datasheet; between several cards, NVML decides.
    link = base.link if nvlink is None else ("NVLink" if nvlink else "PCIe")
    return replace(
        base,
        gpu=" + ".join(kinds),
        num_gpus=len(gpus),
        # Every rank must run the same program in the same memory, so cards of several kinds count as the least.
        sm=_least(gpu.sm for gpu in gpus),
        memory_gib=_least(gpu.memory_gib for gpu in gpus),
        link=link,
        link_bandwidth=base.link_bandwidth if link == base.link else None,
    )


def _least(values: Iterable[Any]) -> Any:
    known = list(values)
    return None if None in known else min(known)


def _read_gpus() -> list[Gpu]:
    import pynvml

    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        sm = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        mig_mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
        divided = mig_mode is not None and mig_mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        instances = []
        for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if divided else 0):
            instance = _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)  # None: an empty slot
            if instance is not None:
                instances.append(_read_gpu(instance, sm=sm))
        gpus.append(replace(_read_gpu(handle, sm=sm), divided=divided, instances=tuple(instances)))
    return gpus


def _read_gpu(handle: Any, *, sm: tuple[int, int] | None) -> Gpu:
    import pynvml

    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        sm=None if sm is None else (sm[0], sm[1]),
        # The driver keeps `reserved` for itself; the rest is what CUDA calls the total.
        memory_gib=None if memory is None else (memory.total - memory.reserved) / _GIB,
    )


def _all_on_nvlink(gpus: Sequence[Gpu]) -> bool | None:
    """Whether the first GPU reaches every other over NVLink; None when there is no other."""
    import pynvml

    first, *others = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
    if not others:
        return None
    over_nvlink = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    status = [_ask(pynvml.nvmlDeviceGetP2PStatus, first, other, over_nvlink) for other in others]
    return all(each == pynvml.NVML_P2P_STATUS_OK for each in status)


def _ask(question: Callable[..., _T], *about: Any) -> _T | None:
    """The answer, or None where this card or driver does not know the question."""
    import pynvml

    try:
        return question(*about)
    except pynvml.NVMLError:
        return None


# Which torch runs here


def amd_here() -> bool:
    """Whether this machine has an AMD GPU with its driver, which NVML does not show."""
    return Path("/dev/kfd").exists()


def unsupported_build(*, sm: tuple[int, int] | None, arch_list: list[str], torch_version: str) -> str | None:
    """None if a torch built for `arch_list` has kernels for this GPU, else the error message.

    torch itself only warns, and fails at the first kernel with "no kernel image is available".
    """
    if sm is None or any(_runs_on(sm, arch) for arch in arch_list):
        return None
    gpu = f"sm_{sm[0]}{sm[1]}"
    if not arch_list:
        return (
            f"torch {torch_version} has no kernels for any GPU, and this one is {gpu}: it is a CPU-only build, or it "
            "needs a newer driver. Install a CUDA build of torch that matches the driver"
        )
    if sm >= (7, 5):
        remedy = "the official CUDA 13 builds of torch have it"
    elif sm >= (5, 0):
        remedy = "the builds for CUDA 12.8 and later dropped it; the CUDA 12.6 builds of the same torch have it"
    else:
        remedy = "no build of a torch this recent has it; use a GPU of sm_50 or later"
    return f"torch {torch_version} is built for {', '.join(arch_list)} and cannot run on this GPU, {gpu}: {remedy}"


def _runs_on(sm: tuple[int, int], arch: str) -> bool:
    parsed = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if parsed is None:
        return False
    built_for = (int(parsed[2]), int(parsed[3]))
    if parsed[4] == "a":  # instructions of one chip alone
        return built_for == sm
    # Machine code, and the code of a family (f), serves later chips of its generation; PTX serves all later chips.
    of_one_generation = parsed[1] == "sm" or parsed[4] == "f"
    return built_for <= sm and (built_for[0] == sm[0] or not of_one_generation)


# The host


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The model as the kernel prints it; None on ARM, where it does not."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1].strip() if found else None


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """The CPU quota, in CPUs, of each cgroup that this process is in: a container's share of the machine."""
    for group in _cgroups("cpu", root=root):
        if (limit := _words(group / "cpu.max")) and limit[0] != "max":
            yield int(limit[0]) / int(limit[1])
        quota_us, period_us = _words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us")
        if quota_us and period_us and int(quota_us[0]) > 0:
            yield int(quota_us[0]) / int(period_us[0])


def memory_limits(root: Path = Path("/")) -> Iterator[int]:
    """Bytes allowed by each cgroup this process is in."""
    for group in _cgroups("memory", root=root):
        for limit in (_words(group / "memory.max"), _words(group / "memory.limit_in_bytes")):
            if limit and limit[0] != "max":
                yield int(limit[0])


def _cgroups(controller: str, *, root: Path) -> Iterator[Path]:
    """Folders of the groups that bind this process for one controller, its own first, in cgroup v2 and v1.

    Every ancestor binds too. Inside a container the path may be the host's and not exist: the walk up ends at
    the mount, which there is the container's own group.
    """
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = PurePosixPath(path)
        for each in (group, *group.parents):
            yield mount / each.relative_to("/")


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []
