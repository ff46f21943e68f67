"""What a schedule may know about the machine: one frozen record per device, CPU or GPU.

The configurator is a pure function of (problem, Target), so any machine can schedule for any other: GPU boards come
from the presets of their public limits, the host CPU is read from sysfs, `/proc/cpuinfo` and LLVM. Nothing is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nova.errors import NovaError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

ELEMENT_BYTES = {
    "f64": 8, "f32": 4, "tf32": 4, "bf16": 2, "f16": 2, "f8E4M3FN": 1, "f8E5M2": 1,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "i1": 1, "complex<f32>": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Common part: a name, the peak rates, and the bandwidth of main memory."""

    name: str
    bandwidth: float  # bytes/s of main memory that a copy reaches
    peak: Mapping[str, float]  # FLOP/s of the whole device, by operand dtype ("tf32" is its own key)

    @property
    def is_gpu(self) -> bool:
        return isinstance(self, GpuTarget)

    def balance(self, dtype: str) -> float:
        """FLOPs a byte of main-memory traffic must feed for the arithmetic units to stay busy."""
        return self.peak[dtype] / self.bandwidth


@dataclass(frozen=True)
class CpuTarget(Target):
    """A CPU: caches a core sees, its vector registers, and how LLVM names it."""

    cores: int = 1
    vector_bits: int = 256
    registers: int = 16  # architectural vector registers
    l1: int = 32 << 10
    l2: int = 512 << 10
    l3: int = 8 << 20  # shared
    clock: float = 2.5e9
    llvm_cpu: str = "x86-64-v3"
    llvm_features: str = ""
    fork_seconds: float = 2e-6  # fork-join of a warm thread pool
    core_bandwidth: float = 10e9  # bytes/s one core can move to and from main memory

    def lanes(self, dtype: str = "f32") -> int:
        """Elements of `dtype` in one vector register."""
        return self.vector_bits // 8 // ELEMENT_BYTES[dtype]

    def core_peak(self, dtype: str = "f32") -> float:
        return self.peak[dtype] / self.cores


@dataclass(frozen=True)
class GpuTarget(Target):
    """An NVIDIA GPU: the limits that the driver reports and the vendor publishes."""

    capability: tuple[int, int] = (8, 0)
    sms: int = 1
    smem_block: int = 99 << 10  # shared memory one block may have (opt-in maximum)
    smem_sm: int = 100 << 10
    smem_reserve: int = 1 << 10  # what the driver takes of each block's share
    registers_sm: int = 65536
    registers_thread: int = 255
    threads_sm: int = 1536
    blocks_sm: int = 16
    l2: int = 4 << 20
    l2_bandwidth: float = 0.0  # bytes/s, whole chip
    smem_bytes_clock: int = 128  # shared-memory bytes a clock, one SM
    clock: float = 1.5e9
    launch_seconds: float = 3e-6
    supports: frozenset[str] = frozenset()  # kinds of contraction that there is code for besides mma_sync and simt

    @property
    def arch(self) -> str:
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def dependent_launch(self) -> bool:
        """Whether a launch may begin before the one ahead of it has ended, and wait for it itself."""
        return self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        return self.capability[0] == 9


def _gpu(name: str, **fields: object) -> GpuTarget:
    return GpuTarget(name=name, **fields)  # type: ignore[arg-type]


# Public limits: vendor data sheets and the CUDA programming guide's table of compute capabilities. Dense rates,
# float32 accumulation (the GeForce boards run it at half rate for 16-bit operands).
PRESETS: dict[str, GpuTarget] = {
    "rtx3060": _gpu(
        "rtx3060", bandwidth=360e9, capability=(8, 6), sms=28, l2=3 << 20, l2_bandwidth=1.2e12, clock=1.777e9,
        peak={"f64": 0.199e12, "f32": 12.7e12, "tf32": 12.7e12, "bf16": 25.5e12, "f16": 25.5e12},
    ),
    "rtx6000ada": _gpu(
        "rtx6000ada", bandwidth=960e9, capability=(8, 9), sms=142, l2=96 << 20, l2_bandwidth=5.0e12, clock=2.505e9,
        blocks_sm=24, peak={"f64": 1.4e12, "f32": 91.1e12, "tf32": 182.1e12, "bf16": 364.2e12, "f16": 364.2e12},
    ),
    "rtx4090": _gpu(
        "rtx4090", bandwidth=1008e9, capability=(8, 9), sms=128, l2=72 << 20, l2_bandwidth=5.0e12, clock=2.52e9,
        blocks_sm=24, peak={"f64": 1.3e12, "f32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12, "f16": 165.2e12},
    ),
    "a100": _gpu(
        "a100", bandwidth=1555e9, capability=(8, 0), sms=108, smem_block=163 << 10, smem_sm=164 << 10, threads_sm=2048,
        blocks_sm=32, l2=40 << 20, l2_bandwidth=4.8e12, clock=1.41e9,
        peak={"f64": 9.7e12, "f32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "f16": 312e12},
    ),
    "h100": _gpu(
        "h100", bandwidth=3350e9, capability=(9, 0), sms=132, smem_block=227 << 10, smem_sm=228 << 10, threads_sm=2048,
        blocks_sm=32, l2=50 << 20, l2_bandwidth=5.5e12, clock=1.83e9,
        peak={"f64": 34e12, "f32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "f16": 989.4e12},
    ),
    "h200": _gpu(
        "h200", bandwidth=4800e9, capability=(9, 0), sms=132, smem_block=227 << 10, smem_sm=228 << 10, threads_sm=2048,
        blocks_sm=32, l2=50 << 20, l2_bandwidth=5.5e12, clock=1.83e9,
        peak={"f64": 34e12, "f32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "f16": 989.4e12},
    ),
}  # fmt: skip


def cpu(
    name: str,
    *,
    cores: int,
    ghz: float,
    vector_bits: int = 256,
    fma_units: float = 2,
    bandwidth: float = 20e9,
    **fields: object,
) -> CpuTarget:
    """A CPU record whose peaks are derived: cores x clock x FMA units x lanes x 2."""
    flops32 = cores * ghz * 1e9 * fma_units * (vector_bits // 32) * 2
    peak = {"f64": flops32 / 2, "f32": flops32, "tf32": flops32, "bf16": flops32, "f16": flops32}
    registers = 32 if vector_bits == 512 else 16
    return CpuTarget(
        name=name, bandwidth=bandwidth, peak=peak, cores=cores, vector_bits=vector_bits, registers=registers,
        core_bandwidth=min(bandwidth, 10e9), clock=ghz * 1e9, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


CPU_PRESETS: dict[str, CpuTarget] = {
    "zen3": cpu("zen3", cores=2, ghz=2.8, l1=32 << 10, l2=512 << 10, l3=32 << 20, llvm_cpu="znver3"),
    "zen4": cpu("zen4", cores=2, ghz=3.7, vector_bits=512, fma_units=1, l1=32 << 10, l2=1 << 20, l3=32 << 20,
                llvm_cpu="znver4"),
    "avx512": cpu("avx512", cores=16, ghz=2.5, vector_bits=512, bandwidth=150e9, l1=48 << 10, l2=2 << 20, l3=60 << 20,
                  llvm_cpu="sapphirerapids"),
}  # fmt: skip


@functools.cache
def host() -> CpuTarget:
    """The CPU this process runs on."""
    import llvmlite.binding as llvm

    features = dict(llvm.get_host_cpu_features())
    vector_bits = 512 if features.get("avx512f") else 256 if features.get("avx2") else 128
    cache = _host_caches()
    text = _read("/proc/cpuinfo")
    ghz = _clock(text)
    cores = len(os.sched_getaffinity(0))
    enabled = ",".join(("+" if on else "-") + feature for feature, on in sorted(features.items()))
    return cpu(
        "cpu", cores=cores, ghz=ghz, vector_bits=vector_bits,
        fma_units=_fma_units(llvm.get_host_cpu_name(), vector_bits),
        bandwidth=10e9 * min(cores, 8), l1=cache.get(1, 32 << 10), l2=cache.get(2, 512 << 10),
        l3=cache.get(3, cache.get(2, 512 << 10)), llvm_cpu=llvm.get_host_cpu_name(), llvm_features=enabled,
    )  # fmt: skip


def by_name(name: str) -> Target:
    """ "cpu", "cuda:0", "h200", ...: the host, a GPU of this machine, or a preset."""
    if name == "cpu":
        return host()
    if name.startswith("cuda"):
        return device(int(name.partition(":")[2] or 0))
    found = PRESETS.get(name) or CPU_PRESETS.get(name)
    if found is None:
        known = ", ".join(["cpu", "cuda", *PRESETS, *CPU_PRESETS])
        raise NovaError(f"unknown target {name!r}; known targets: {known}")
    return found


# Multiply-adds a clock of one multiprocessor, dense, by compute capability: f32, tf32, 16-bit.
_RATES = {(8, 0): (64, 512, 1024), (8, 6): (128, 128, 256), (8, 9): (128, 256, 512), (9, 0): (128, 1024, 2048)}


@functools.cache
def device(index: int = 0) -> GpuTarget:
    """A GPU of this machine: what the driver reports, on top of the preset of a board of that name."""
    from nova.runtime import cuda

    return describe(cuda.device(index))


def describe(found: Any) -> GpuTarget:
    """The target of a device (`nova.runtime.cuda.Device`, or something that answers like one)."""
    capability = found.capability
    if capability < (8, 0):
        raise UnsupportedError(
            f"{found.name} has compute capability {capability[0]}.{capability[1]}; Nova compiles for 8.0 (Ampere) on"
        )
    reported = {
        name: found.attribute(name)
        for name in ("sms", "smem_block", "smem_sm", "smem_reserve", "registers_sm", "threads_sm", "blocks_sm", "l2")
    }
    preset = preset_of(found.name)
    if preset is not None and preset.capability == capability:
        part = reported["sms"] / preset.sms  # less than one in a slice of a board
        peak = {dtype: rate * part for dtype, rate in preset.peak.items()}
        return dataclasses.replace(preset, **reported, peak=peak, bandwidth=preset.bandwidth * min(part, 1.0))
    known = [c for c in _RATES if c <= capability]
    f32, tf32, low = _RATES[max(known)]
    clock = found.attribute("clock") * 1e3 or 1.5e9
    scale = 2 * clock * reported["sms"]
    peak = {"f64": f32 * scale / 2, "f32": f32 * scale, "tf32": tf32 * scale, "bf16": low * scale, "f16": low * scale}
    bandwidth = 2e3 * found.attribute("memory_clock") * found.attribute("memory_bus") / 8 or 1e12
    return GpuTarget(
        name=_short(found.name), bandwidth=bandwidth, peak=peak, capability=capability, clock=clock,
        l2_bandwidth=4 * bandwidth, **reported,
    )  # fmt: skip


def preset_of(board: str) -> GpuTarget | None:
    """The preset of a board by the driver's name for it, such as "NVIDIA H100 80GB HBM3"."""
    words = "".join(c for c in board.lower() if c.isalnum())
    names = [name for name in PRESETS if name in words]
    return PRESETS[max(names, key=len)] if names else None


def _short(board: str) -> str:
    return "".join(c for c in board.lower().removeprefix("nvidia") if c.isalnum())


def _fma_units(cpu_name: str, vector_bits: int) -> float:
    """Whole-vector multiply-adds a clock: two, except where the units are half as wide as the registers."""
    halved = {"znver1": 256, "znver4": 512}.get(cpu_name, 128)
    return 1.0 if vector_bits <= 128 or vector_bits == halved else 2.0


def _host_caches() -> dict[int, int]:
    """Bytes of the first core's data cache at each level, from sysfs (absent in some containers)."""
    sizes: dict[int, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = (_read(index / leaf).strip() for leaf in ("type", "level", "size"))
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if kind in ("Data", "Unified") and level.isdigit() and match:
            sizes[int(level)] = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
    return sizes


def _clock(cpuinfo: str) -> float:
    """GHz: the highest that the kernel knows, else the model name's, else the reading now, else a modest guess.

    Schedules must not change from run to run, so the reading, which moves on machines that scale, comes late.
    """
    highest = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if highest.isdigit():
        return int(highest) / 1e6
    match = re.search(r"model name.*@\s*([\d.]+)\s*GHz", cpuinfo)
    if match:
        return float(match[1])
    match = re.search(r"cpu MHz\s*:\s*([\d.]+)", cpuinfo)
    return max(round(float(match[1]) / 1e3, 1), 1.0) if match else 2.5


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
