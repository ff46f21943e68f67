"""Chooses how a contraction is tiled, from its shape and the target's limits alone: no search on hardware, no timing."""

from __future__ import annotations

from dataclasses import dataclass, field

from nova.schedule.target import ELEMENT_BYTES, CpuTarget, Target


@dataclass(frozen=True)
class Operand:
    """One operand as the nest walks it. A stride is None where the dimension is made of several."""

    dtype: str
    across_stride: int | None  # elements between neighbours along m (lhs) or n (rhs)
    k_stride: int | None
    elements: int = 0


@dataclass(frozen=True)
class ContractionProblem:
    m: int
    n: int
    k: int
    batch: int
    lhs: Operand
    rhs: Operand
    accumulate: str = "f32"
    output_bytes: int = 4  # bytes stored for each (m, n)
    epilogue_operations: int = 0
    keeps_partials: bool = True  # an f32 result can hold sums between k blocks

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


@dataclass(frozen=True)
class CpuContractionSchedule:
    kind: str  # "tiled" | "rows" | "split_k"
    rows: int
    vectors: int
    lanes: int
    unroll: int
    mc: int
    nc: int
    kc: int
    pack_lhs: bool
    pack_rhs: bool
    split: str  # dimension dealt to threads: "m" | "n"
    unit: int
    groups: int
    threads: int
    k_chunks: int = 1
    seconds: float = 0.0
    reasons: tuple[str, ...] = field(default=())


def schedule_contraction(problem: ContractionProblem, target: Target) -> CpuContractionSchedule:
    assert isinstance(target, CpuTarget)
    lanes = target.lanes(problem.accumulate)
    rows, vectors = 6, 2
    nr = vectors * lanes
    size = ELEMENT_BYTES[problem.accumulate]
    kc_max = target.l1 // 2 // (nr * size)
    blocks = max(1, -(-problem.k // (kc_max + kc_max // 2)))
    kc = max(1, -(-problem.k // blocks))
    kc = min(-(-kc // 4) * 4, max(problem.k, 1))
    mc = max(rows, target.l2 // 5 * 2 // (kc * size) // rows * rows)
    nc = max(nr, target.l3 // (2 * target.cores) // (kc * size) // nr * nr)
    return CpuContractionSchedule(
        "tiled", rows, vectors, lanes, 4, mc, nc, kc, True, True, "m", rows * 4, 1, target.cores,
    )
