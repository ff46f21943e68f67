"""The cost model's common part: what an operation costs in vector clocks, and time from bytes and operations."""

from __future__ import annotations

from nova.schedule.target import CpuTarget

# Vector operations that one operation of a region becomes; anything not listed is one.
OPERATION_COST = {
    "arith.divf": 5.0, "arith.remf": 20.0, "arith.divsi": 20.0, "arith.remsi": 20.0, "arith.divui": 20.0,
    "math.sqrt": 5.0, "math.rsqrt": 10.0, "math.exp": 12.0, "math.exp2": 10.0, "math.expm1": 20.0, "math.log": 14.0,
    "math.log1p": 20.0, "math.log2": 14.0, "math.erf": 16.0, "math.erfc": 30.0, "math.tanh": 16.0, "math.sin": 18.0,
    "math.cos": 18.0, "math.tan": 30.0, "math.atan": 20.0, "math.atan2": 30.0, "math.asin": 25.0, "math.acos": 25.0,
    "math.sinh": 20.0, "math.cosh": 20.0, "math.powf": 40.0, "math.roundeven": 2.0, "nova.philox": 45.0,
    "arith.constant": 0.0, "linalg.index": 0.5, "linalg.yield": 0.0, "tensor.extract": 4.0,
}  # fmt: skip
OPERATIONS_CLOCK = 1.5  # vector operations a core sustains in a clock
CACHE_FACTOR = 3.0  # last-cache bandwidth over main memory's


def cpu_seconds(target: CpuTarget, bytes_moved: float, vector_operations: float, threads: int) -> float:
    """Arithmetic and memory overlap. What fits the last cache is taken to be in it: another kernel just made it."""
    arithmetic = vector_operations / (OPERATIONS_CLOCK * target.clock * threads)
    bandwidth = min(target.core_bandwidth * threads, target.bandwidth)
    if bytes_moved <= target.l3 / 2:
        bandwidth = target.core_bandwidth * threads * CACHE_FACTOR
    return max(arithmetic, bytes_moved / bandwidth) + (target.fork_seconds if threads > 1 else 0.0)
