"""An operand of a contraction on its way: global memory, a shared-memory ring, fragments in registers.

The ring keeps the operand as memory has it, so that copies are whole vectors: [rows, k] if k is contiguous there
(K-major), [k, rows] if the other dimension is (M- or N-major). Which instruction reads the fragments follows from that
and from the element (paper Table 1); here it is only a matter of `transposed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from nova.fusion.access import Access
from nova.fusion.contraction_tiles import Role, Tiling
from nova.fusion.kernel import Linear
from nova.tile.contraction_frame import Frame, alignment, base_of, linear_of, split
from nova.tile.expressions import memory_element
from nova.tile.layout import NestedLayout
from nova.tile.text import BITS, Operand, Value
from nova.tile.widths import is_wide

COPY_BYTES = 16  # of the widest asynchronous copy


@dataclass(frozen=True)
class Side:
    """lhs or rhs: what it reads, along which roles, and how its tile lies in shared memory."""

    access: Access
    across: Role  # m or n
    k: Role
    across_stride: int
    k_stride: int
    sizes: tuple[int, ...]

    @property
    def element(self) -> str:
        return memory_element(str(self.access.element))

    @property
    def k_major(self) -> bool:
        """Whether k is the contiguous dimension; if none is, as if it were."""
        return self.k_stride == 1 or self.across_stride != 1

    @property
    def contiguous(self) -> bool:
        return 1 in (self.k_stride, self.across_stride)

    @property
    def vector(self) -> int:
        """Elements that a copy may move at once: its start, every step and the extent are multiples of it."""
        if not self.contiguous:
            return 1
        inner, outer_stride = (self.k, self.across_stride) if self.k_major else (self.across, self.k_stride)
        own = {*self.across.tile, *self.k.tile}
        item = linear_of(self.access)
        numbers = [item.const, outer_stride, inner.extent]
        numbers += [c for loop, c in item.terms if loop not in own and self.sizes[loop] != 1]
        return min(alignment([n for n in numbers if n]), COPY_BYTES * 8 // max(BITS[self.element], 8))

    def shape(self, across: int, k: int) -> tuple[int, int]:
        """Rows and columns of a stage."""
        return (across, k) if self.k_major else (k, across)


def sides(tiling: Tiling, lhs: Access, rhs: Access) -> tuple[Side, Side]:
    (lhs_m, lhs_k), (rhs_k, rhs_n) = tiling.lhs_strides, tiling.rhs_strides
    return (
        Side(lhs, tiling.m, tiling.k, lhs_m, lhs_k, tiling.sizes),
        Side(rhs, tiling.n, tiling.k, rhs_n, rhs_k, tiling.sizes),
    )


@dataclass
class Ring:
    """A side's buffers of a block, `stages` of them."""

    side: Side
    frame: Frame
    start: Operand  # the block's first row or column
    block: int
    depth: int  # k of a stage
    stages: int
    check_k: bool  # a stage may reach over the end of k
    shared: Value | None = None

    def allocate(self) -> None:
        rows, columns = self.side.shape(self.block, self.depth)
        self.shared = self.frame.program.alloc_shared(self.stages, rows, columns, self.side.element)

    def copy(self, number: Operand, stage: Operand) -> None:
        """Starts copying the k tile of this number into a stage; zeros where there is nothing."""
        program, side = self.frame.program, self.side
        assert self.shared is not None
        per_run = max(1, -(-side.k.extent // self.depth))
        run, within = (program.div(number, per_run), program.rem(number, per_run)) if side.k.outer else (0, number)
        base = base_of(self.frame, self._outside())
        for loop, place in zip(side.k.outer, split(program, run, [side.sizes[d] for d in side.k.outer]), strict=True):
            step = side.access.coefficients[loop]
            base = program.add(base, program.mul(program.cast(place, "i64"), step))
        offsets, strides = [self.start, program.mul(within, self.depth)], [side.across_stride, side.k_stride]
        extents = [
            side.across.extent if side.across.extent % self.block else -1, side.k.extent if self.check_k else -1,
        ]  # fmt: skip
        if not side.k_major:
            offsets, strides, extents = offsets[::-1], strides[::-1], extents[::-1]
        numel = side.across.extent * abs(side.across_stride) + side.k.extent * abs(side.k_stride)
        program.async_copy(
            program.args[side.access.buffer], self.shared, stage, base, offsets, strides=strides, extents=extents,
            vector=side.vector, wide=is_wide(numel),
        )  # fmt: skip

    def _outside(self) -> Linear:
        """The access without its tile dimensions and outer k: what a block adds once."""
        item = linear_of(self.side.access)
        own = {*self.side.across.tile, *self.side.k.tile, *self.side.k.outer}
        return Linear(item.const, tuple((loop, c) for loop, c in item.terms if loop not in own))

    def fragment(self, stage: Operand, k: int, layout: NestedLayout, is_lhs: bool) -> Value:
        """Columns k.. of a stage as [block, k] (lhs) or [k, block] (rhs)."""
        assert self.shared is not None
        offsets = (0, k) if self.side.k_major else (k, 0)
        transposed = self.side.k_major != is_lhs
        return self.frame.program.load_shared(self.shared, stage, offsets, self.side.element, layout, transposed)
