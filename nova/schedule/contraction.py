"""Chooses how a contraction is tiled, from its shape and the target's limits alone: no search on hardware, no timing.

`schedule_contraction(problem, target)` is pure and memoised; CPUs and GPUs answer with the same record, of which each
uses its part. A schedule explains itself: `reasons` says what bound each choice, `seconds` is the model's prediction.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from nova.schedule.target import ELEMENT_BYTES, CpuTarget, GpuTarget, Target


@dataclass(frozen=True)
class Operand:
    """One operand as the nest walks it: a stride is None where the dimension is made of several."""

    dtype: str
    across_stride: int | None  # elements between neighbours along m (lhs) or n (rhs)
    k_stride: int | None

    @property
    def bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class ContractionProblem:
    """C[batch, m, n] = sum over k of A[batch, m, k] * B[batch, k, n], and an epilogue."""

    m: int
    n: int
    k: int
    batch: int
    lhs: Operand
    rhs: Operand
    accumulate: str = "f32"
    compute: str = ""  # the operands' type in the arithmetic units: "tf32" where the user's settings allow it
    output_bytes: int = 4  # stored for each (m, n)
    epilogue_bytes: int = 0  # loaded for each (m, n)
    epilogue_operations: int = 0
    k_run: int = 0  # K comes in runs of so many, and no step of a block crosses two (0: it is one run)
    n_tile_limit: int = 0  # the kernel reduces over tiles of n of this size: blocks may not cross them (0: no tiles)

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch

    @property
    def bytes(self) -> float:
        """Least main-memory traffic: each operand once."""
        operands = self.m * self.k * self.lhs.bytes + self.k * self.n * self.rhs.bytes
        return float(self.batch * (operands + self.m * self.n * (self.output_bytes + self.epilogue_bytes)))

    @property
    def dtype(self) -> str:
        """Key of the target's rate table."""
        return self.compute or self.lhs.dtype

    def intensity(self) -> float:
        """FLOPs per element moved, as the paper counts it."""
        return 2 * self.m * self.n * self.k / max(self.m * self.k + self.k * self.n + self.m * self.n, 1)


def row_major(
    m: int, n: int, k: int, *, dtype: str = "f32", layout: str = "nn", batch: int = 1, **more: object
) -> ContractionProblem:
    """A plain matrix product; layout as BLAS writes it: "nt" is A[m, k] @ B[n, k]^T."""
    lhs = Operand(dtype, k, 1) if layout[0] == "n" else Operand(dtype, 1, m)
    rhs = Operand(dtype, 1, n) if layout[1] == "n" else Operand(dtype, k, 1)
    return ContractionProblem(m, n, k, batch, lhs, rhs, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ContractionSchedule:
    """One contraction's plan. `workgroup`, `reduction`, `subgroup` are the paper's names for the nested tiles."""

    kind: str  # CPU: "tiled", "dot"; GPU: "mma_sync", "wgmma", "simt"
    workgroup: tuple[int, int]  # M x N block: a cache block on a CPU, a thread block on a GPU
    reduction: int  # K step of a block
    subgroup: tuple[int, int]  # M x N of the innermost unit: the register tile, or a warp's tile
    threads: int  # threads of the pool worth using, or threads of a block
    promoted: tuple[bool, bool] = (True, True)  # copy lhs / rhs into packed panels or shared memory
    unroll: int = 2  # k steps in one trip of the innermost loop
    chain: int = 256  # CPU: k steps summed in one go; such sums are added up, which rounds less
    split: str = "m"  # CPU: dimension dealt to threads
    unit: int = 1  # CPU: rows (columns) of that dimension in one task
    groups: int = 1  # CPU: ranges of the other dimension; GPU: blocks that share an L2 panel (rasterisation width)
    prefetch: int = 0  # CPU: k steps by which the tile asks for B in place
    ahead: bool = False  # CPU: the k loop asks for what comes next, which may lie beyond L2
    lhs_ahead: bool = False  # CPU: and for A's next block: L2 has room for two, and two panels of B
    k_chunks: int = 1  # independent pieces of K, added in order afterwards
    warps: tuple[int, int] = (1, 1)  # GPU: warp grid of a block
    stages: int = 1  # GPU: buffers of the software pipeline
    cluster: tuple[int, int] = (1, 1)
    intrinsic: str = ""
    smem_bytes: int = 0
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()


@functools.lru_cache(maxsize=4096)
def _schedule(problem: ContractionProblem, target_name: str, key: int) -> ContractionSchedule:
    target = _TARGETS[key]
    if isinstance(target, CpuTarget):
        from nova.schedule import contraction_cpu

        return contraction_cpu.schedule(problem, target)
    from nova.schedule import contraction_gpu

    assert isinstance(target, GpuTarget)
    return contraction_gpu.schedule(problem, target)


_TARGETS: dict[int, Target] = {}  # targets hold a dict of rates, so they are kept by identity for the memo


def schedule_contraction(problem: ContractionProblem, target: Target) -> ContractionSchedule:
    """The plan for one contraction on one target."""
    _TARGETS[id(target)] = target
    return _schedule(problem, target.name, id(target))
