"""Interleaved timing, an honest refusal when the machine is loaded, and results as JSON with their provenance.

Contestants run in turn inside one process: round 1 of every contestant, round 2 of every contestant, ... Medians and
ratios are reported; the spread of the reference contestant (interquartile range over median) decides whether the
machine was quiet enough to report at all. Where it wasn't, all contestants are timed again, a few times at most, and
only the reference's spread says which attempt counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nova.bench import timing
from nova.bench.timing import Timing

MAX_SPREAD = 0.10
ATTEMPTS = 5  # at a quiet measurement


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


def save(name: str, results: object, folder: Path = Path(__file__).parent / "results") -> Path:
    """Writes results with their provenance to benchmarks/results/<name>.json."""
    path = folder / f"{name}.json"
    timing.save(path, results, device="cpu")
    return path
