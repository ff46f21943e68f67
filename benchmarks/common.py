"""Interleaved timing, an honest refusal when the machine is loaded, and results as JSON with their provenance.

Contestants run in turn inside one process: round 1 of every contestant, round 2 of every contestant, ... Medians and
ratios are reported; the spread of the reference contestant (interquartile range over median) decides whether the
machine was quiet enough to report at all. Where it wasn't, all contestants are timed again, a few times at most, and
only the reference's spread says which attempt counts.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

MAX_SPREAD = 0.10
ATTEMPTS = 5  # at a quiet measurement


@dataclass
class Timing:
    """Seconds of each round of one contestant."""

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


def interleave(contestants: dict[str, Callable[[], object]], rounds: int = 15, inner: int = 1, warmup: int = 2):
    """Times every contestant `rounds` times, in turn; a round is `inner` calls. Returns {name: Timing}."""
    timings = {name: Timing(name) for name in contestants}
    for run in contestants.values():
        for _ in range(warmup):
            run()
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            for _ in range(inner):
                run()
            timings[name].seconds.append((time.perf_counter() - start) / inner)
    return timings


def quiet(reference: Timing, limit: float = MAX_SPREAD) -> bool:
    """True if the reference was steady; otherwise says on standard error that nothing can be reported."""
    if reference.spread <= limit:
        return True
    print(f"the machine is loaded: {reference.name} itself spreads {reference.spread:.0%} (limit {limit:.0%}); "
          "no figure is reported", file=sys.stderr)  # fmt: skip
    return False


def interleave_quietly(
    contestants: dict[str, Callable[[], object]],
    reference: Callable[[dict[str, Timing]], Timing],
    rounds: int = 15,
    inner: int = 1,
    warmup: int = 2,
) -> dict[str, Timing] | None:
    """The timings of the first attempt in which the reference was steady, or None and a word on standard error."""
    for attempt in range(1, ATTEMPTS + 1):
        timings = interleave(contestants, rounds, inner, warmup)
        steady = reference(timings)
        if steady.spread <= MAX_SPREAD:
            return timings
        if attempt < ATTEMPTS:
            print(f"attempt {attempt} of {ATTEMPTS}: {steady.name} spreads {steady.spread:.0%}", file=sys.stderr)
    quiet(steady)
    return None


def provenance() -> dict:
    """Commit, versions and processor of a measurement."""
    import llvmlite
    import torch

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        return done.stdout.strip()

    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    changes = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "commit": git("rev-parse", "HEAD") + changes,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "python": platform.python_version(), "torch": torch.__version__,
        "llvmlite": llvmlite.__version__, "cpu": cpu, "threads": torch.get_num_threads(),
    }  # fmt: skip


def save(name: str, results: object, folder: Path = Path(__file__).parent / "results") -> Path:
    """Writes results with their provenance to benchmarks/results/<name>.json."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    plain = json.loads(
        json.dumps(results, default=lambda o: asdict(o) if hasattr(o, "__dataclass_fields__") else str(o))
    )
    path.write_text(json.dumps({"provenance": provenance(), "results": plain}, indent=1) + "\n")
    return path
