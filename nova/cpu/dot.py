"""Few rows against B with contiguous k (a linear layer on one to eight rows): dot products, nothing packed.

    for n, 4 columns:   acc[r][j] += A[r, k:k+8] * B[n+j, k:k+8]     vectors along k; B streams past once
                        sums of 4 vectors -> 4 lanes of one vector   (a tree of shuffles and adds)
    per strip of 64 columns: the epilogue, row by row

Sums run along k in `lanes` interleaved chains and are added in a fixed order, whatever the number of threads.
"""

from __future__ import annotations

from nova.cpu import build, ints, parallel
from nova.cpu import contraction_epilogue as ep
from nova.cpu.contraction_epilogue import Frame
from nova.cpu.ints import Int
from nova.cpu.microkernel import to_accumulator
from nova.fusion import access as ac
from nova.fusion.contraction_form import Contraction
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.schedule.contraction import ContractionSchedule
from nova.schedule.target import CpuTarget


class DotNest:
    """The loop nest of a kernel with few rows."""

    def __init__(self, c: Contraction, s: ContractionSchedule, target: CpuTarget):
        self.c, self.s = c, s
        self.lanes = target.lanes(str(c.accumulator))
        self.columns = s.subgroup[1]
        self.strip = s.workgroup[1]
        self.workspace = parallel.Workspace()
        self.slot = self.workspace.per_thread([c.m * self.strip], c.accumulator, max(s.threads, 1))

    @property
    def units(self) -> int:
        return -(-self.c.n // self.s.unit)

    def phases(self) -> list[parallel.Phase]:
        return [parallel.Phase(self.c.batch * self.units, self.s.threads, ints.pooled(self._emit))]

    def _emit(self, region: parallel.Region) -> None:
        c = self.c
        share = ints.mul(ints.from_index(region.thread), self.slot.stride) if self.slot.stride else 0
        buffer = ints.offset_pointer(region.workspace, ints.add(share, self.slot.offset), ln.int_type(8))
        with region.tasks() as index:
            task = ints.from_index(index)
            frame = Frame(c, region.pointers, ints.div(task, self.units)).prepare()
            start = ints.mul(ints.rem(task, self.units), self.s.unit)
            end = ints.minimum(ints.add(start, self.s.unit), c.n)
            with ints.loop(start, end, self.strip) as n:
                count = ints.minimum(self.strip, ints.sub(end, n))
                with build.loop(ints.value(0), ints.value(count), ints.value(self.columns)) as j:
                    self._group(frame, ints.add(n, j), j, buffer)
                for row in range(c.m):
                    self._outputs(frame, row, n, count, buffer)

    def _outputs(self, frame: Frame, row: int, n: Int, count: Int, buffer: Value) -> None:
        element = self.c.accumulator

        def load(j: Int, lanes: int) -> Value:
            return ln.load(ints.offset_pointer(buffer, ints.add(j, row * self.strip), element), element, lanes)

        ep.emit_row(frame, row, n, count, load, self.lanes)

    def _group(self, frame: Frame, n: Int, j: Int, buffer: Value) -> None:
        """Dot products of all rows with `columns` columns from n on; columns past the end repeat the last one."""
        c, lanes, element = self.c, self.lanes, self.c.accumulator
        rows = [self._pointer(frame, c.lhs, c.dims.m, r) for r in range(c.m)]
        places = [ints.minimum(ints.add(n, i), c.n - 1) if i else n for i in range(self.columns)]
        columns = [self._pointer(frame, c.rhs, c.dims.n, place) for place in places]

        def step(k: Int, sums: list[Value], width: int) -> list[Value]:
            right = [self._load(p, c.rhs, k, width) for p in columns]
            out = []
            for r, pointer in enumerate(rows):
                left = self._load(pointer, c.lhs, k, width)
                for i, b in enumerate(right):
                    out.append(ln.fma(left, b, sums[r * self.columns + i]))
            return out

        zeros = [ln.constant(ln.vector_type(element, lanes), 0.0)] * (c.m * self.columns)
        main = c.k // lanes * lanes
        sums = build.loop_carrying(
            ints.value(0), ints.value(main), ints.value(lanes), zeros, lambda k, carried: step(k, carried, lanes)
        )
        totals = [_sum_each(sums[r * self.columns : (r + 1) * self.columns], lanes) for r in range(c.m)]
        if c.k != main:
            scalars = [ln.lane(t, i) if ln.lanes_of(t.type) else t for t in totals for i in range(self.columns)]
            scalars = build.loop_carrying(
                ints.value(main), ints.value(c.k), ints.value(1), scalars, lambda k, carried: step(k, carried, 0)
            )
            groups = [scalars[r * self.columns : (r + 1) * self.columns] for r in range(c.m)]
            totals = [ln.from_lanes(group) if len(group) > 1 else group[0] for group in groups]
        for r, total in enumerate(totals):
            ln.store(total, ints.offset_pointer(buffer, ints.add(j, r * self.strip), element))

    def _pointer(self, frame: Frame, access: ac.Access, dims: tuple[int, ...], place: Int) -> Value:
        offset = ints.offset_along(access, dims, self.c.dims.sizes, place)
        return ints.offset_pointer(frame.base(access), offset, access.element)

    def _load(self, pointer: Value, access: ac.Access, k: Int, width: int) -> Value:
        value = ln.load(ints.offset_pointer(pointer, k, access.element), access.element, width)
        return to_accumulator(value, self.c.accumulator)


def _sum_each(vectors: list[Value], lanes: int) -> Value:
    """A vector whose i-th lane is the sum of the i-th vector's lanes (a scalar if there is one vector)."""
    count, span = len(vectors), 1
    while len(vectors) > 1:
        vectors = [_fold(a, b, span, lanes) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        span *= 2
    total = vectors[0]
    width = lanes
    while width > max(count, 1):  # what is left are partial sums in blocks of `count` lanes
        width //= 2
        low, high = (ln.shuffle(total, total, range(s, s + width)) for s in (0, width))
        total = ln.addf(low, high)
    return total if count > 1 else ln.lane(total, 0)


def _fold(a: Value, b: Value, span: int, lanes: int) -> Value:
    """Adds neighbouring blocks of `span` lanes; blocks of a and b alternate in the result."""
    low: list[int] = []
    high: list[int] = []
    for base in range(0, lanes, 2 * span):
        for source in (0, lanes):
            low += range(source + base, source + base + span)
            high += range(source + base + span, source + base + 2 * span)
    return ln.addf(ln.shuffle(a, b, low), ln.shuffle(a, b, high))
