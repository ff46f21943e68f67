"""Device times of contestants in turn, and results as JSON with their provenance.

A contestant is `run(i)`: one call on input set i. A round puts a spinning kernel on the stream, records an event,
enqueues one call a set while the device spins, and records another event: so the time between the events is the
device's alone, whatever the calls cost the host. The sets together are larger than the L2 cache. Contestants take
turns, round by round.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

Run = Callable[[int], Any]
COLD_BYTES = 400e6  # footprint of all input sets together: several times any L2 cache
SPIN_CYCLES = 2_000_000  # about a millisecond; doubled until the host keeps ahead


@dataclass
class Timing:
    """Seconds a call, one entry a round."""

    name: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        s = sorted(self.seconds)
        return (s[(3 * len(s)) // 4] - s[len(s) // 4]) / self.median


def sets_for(nbytes: float, least: int = 2, most: int = 32) -> int:
    """Input sets of `nbytes` each that are not in a cache when they come round again."""
    return int(max(least, min(most, -(-COLD_BYTES // max(nbytes, 1)))))


def interleave(contestants: Mapping[str, Run], sets: int, rounds: int = 9, warmup: int = 2) -> dict[str, Timing]:
    """Times every contestant `rounds` times, in turn. The first calls compile, so they are not timed."""
    timings = {name: Timing(name) for name in contestants}
    spin = {}
    for name, run in contestants.items():
        for _ in range(warmup):
            for i in range(sets):
                run(i)
        torch.cuda.synchronize()
        spin[name] = _spin_for(run, sets)
    for _ in range(rounds):
        for name, run in contestants.items():
            timings[name].seconds.append(_round(run, sets, spin[name]))
    return timings


def _spin_for(run: Run, sets: int) -> int:
    """Cycles that keep the device busy until the host has enqueued a round."""
    start = time.perf_counter()
    for i in range(sets):
        run(i)
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return int(max(SPIN_CYCLES, 2.0 * host * 2.0e9))


def _round(run: Run, sets: int, cycles: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    start.record()
    for i in range(sets):
        run(i)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / sets


def copy_bandwidth(nbytes: float) -> float:
    """Bytes a second, read and written together, of an elementwise copy that moves `nbytes` in all."""
    elements = max(int(nbytes // 8), 1024)
    sets = sets_for(nbytes)
    pairs = [(torch.randn(elements, device="cuda"), torch.empty(elements, device="cuda")) for _ in range(sets)]
    timing = interleave({"copy": lambda i: torch.neg(pairs[i][0], out=pairs[i][1])}, sets)["copy"]
    return 8 * elements / timing.median


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """|found - exact| / |exact| by the Euclidean norm; nan never passes a comparison."""
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def provenance(device: str = "cuda") -> dict[str, Any]:
    """Commit, versions and the machine of a measurement on the GPU ("cuda") or the processor ("cpu")."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
        return done.stdout.strip()

    changes = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "commit": git("rev-parse", "HEAD") + changes, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(), "torch": torch.__version__,
    } | (_about_gpu() if device == "cuda" else _about_cpu())  # fmt: skip


def _about_gpu() -> dict[str, Any]:
    import nova

    properties = torch.cuda.get_device_properties(0)
    return {
        "nova": nova.__version__, "triton": _version("triton"), "liger": _version("liger-kernel"),
        "device": properties.name, "sms": properties.multi_processor_count, "data": "N(0, 1)",
    }  # fmt: skip


def _about_cpu() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return {"llvmlite": _version("llvmlite"), "cpu": cpu, "threads": torch.get_num_threads()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def save(path: Path, results: Any, device: str = "cuda") -> None:
    """Writes results with their provenance; dataclasses become dictionaries, what JSON does not know its text."""

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)

    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"provenance": provenance(device), "results": results}, indent=1, default=plain)
    path.write_text(text + "\n")


def liger() -> Any:
    """The liger_kernel package, or None where it is not installed."""
    try:
        from liger_kernel import ops
    except ImportError:
        return None
    return ops
