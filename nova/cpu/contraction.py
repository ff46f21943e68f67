"""Code for kernels of kind "contraction": packed panels, a register tile, and the epilogue on what it leaves.

    for jc, NC:  for pc, KC:
      for ic, MC:             pack lhs [MC x KC]
        for jr, NR:           pack rhs [KC x NR] for the first ic
          for ir, MR:         12 accumulators  ->  epilogue  ->  outputs

Threads share the M (or N) dimension in units of whole tiles; each merges its units into one range and runs the nest
above on it, so one thread packs nothing twice. A tile's sums don't depend on which range it fell in. Where tiles are
too few, K is cut into chunks that leave their sums in the workspace, and a second phase adds them in order.
"""

from __future__ import annotations

from functools import partial

from nova.cpu import build, contraction_rows, ints, pack, parallel
from nova.cpu import contraction_ahead as ahead
from nova.cpu import contraction_epilogue as ep
from nova.cpu.contraction_ahead import Place
from nova.cpu.contraction_epilogue import Frame
from nova.cpu.contraction_tile import Partials, TileSink, branch
from nova.cpu.ints import Int
from nova.cpu.microkernel import Panel, Tile, multiply
from nova.fusion import access as ac
from nova.fusion import contraction_form as cf
from nova.fusion.contraction_form import Contraction
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir
from nova.schedule import config
from nova.schedule.contraction import ContractionSchedule, schedule_contraction
from nova.schedule.target import CpuTarget


def lower(kernel: ir.OpView, target: CpuTarget) -> tuple[ir.Module, int]:
    """The kernel as a module of loops, and its workspace in bytes."""
    c = cf.read(kernel)
    schedule = config.read(kernel.operation, ContractionSchedule)
    if schedule is None or (c.tile and schedule.workgroup[1] != c.tile):
        schedule = schedule_contraction(cf.problem_of(c), target)
    if schedule.kind == "dot":
        from nova.cpu.dot import DotNest

        nest: Nest | DotNest = DotNest(c, schedule, target)
    else:
        nest = Nest(c, schedule, target)
    return parallel.emit_kernel(c.name, c.buffers, nest.phases(), c.aliased), nest.workspace.bytes


def partial_output(c: Contraction) -> ac.Access | None:
    """An output that can hold partial sums: of the accumulator's type, contiguous along n, sharing no memory."""
    dims = (*c.dims.m, *c.dims.n, *c.dims.batch)
    for _, access in c.outputs:
        stride, run = ac.contiguous_run(access, c.dims.n, c.dims.sizes)
        dense = run == c.n and stride in (0, 1) and all(access.coefficients[d] for d in dims)
        if access.element == c.accumulator and access.buffer not in c.aliased and dense:
            return access
    return None


class Nest:
    """The loop nest of one kernel."""

    def __init__(self, c: Contraction, s: ContractionSchedule, target: CpuTarget):
        self.c, self.s = c, s
        self.rows, self.columns = s.subgroup
        self.lanes = target.lanes(str(c.accumulator))
        self.tile = Tile(self.rows, self.columns // self.lanes, self.lanes, c.accumulator, s.unroll)
        self.kc = s.reduction
        self.mc, self.nc = s.workgroup
        self.pack_lhs, self.pack_rhs = s.promoted
        # B read in place still needs its last, partial panel packed: reading past the row could leave the buffer.
        self.rhs_edge = not self.pack_rhs and c.n % self.columns != 0
        self.chunk = -(-c.k // s.k_chunks)
        self.blocks = max(1, -(-self.chunk // self.kc))
        self.partial_output = partial_output(c) if self.blocks > 1 and s.k_chunks == 1 else None
        self.pitch = _up(self.nc, self.columns)  # of the scratch that holds a tile of rows, where tiles are reduced
        self.light = cf.operation_count(c) <= ep.LIGHT_OPERATIONS and ep.all_vector_friendly(c, self.lanes)
        self._lay_out_workspace()

    def _lay_out_workspace(self) -> None:
        c, s, element, threads = self.c, self.s, self.c.accumulator, max(self.s.threads, 1)
        self.workspace = parallel.Workspace()

        def slot(elements: int) -> parallel.Slot | None:
            return self.workspace.per_thread([elements], element, threads) if elements else None

        self.lhs_slot = slot(self.mc * self.kc if self.pack_lhs else 0)
        self.rhs_slot = slot(self.kc * (self.nc if self.pack_rhs else self.columns if self.rhs_edge else 0))
        self.tile_slot = slot(self.mc * self.pitch if c.tile else self.rows * self.columns)
        kept = s.k_chunks > 1 or (self.blocks > 1 and self.partial_output is None)
        self.partial_slot = self.workspace.shared([s.k_chunks * c.batch * c.m * c.n], element) if kept else None

    # --- tasks ---------------------------------------------------------------------------------------------------

    @property
    def units(self) -> int:
        """Tasks of one plane: one batch element, k chunk and group."""
        return -(-(self.c.m if self.s.split == "m" else self.c.n) // self.s.unit)

    @property
    def planes(self) -> int:
        return self.s.k_chunks * self.c.batch * self.s.groups

    def phases(self) -> list[parallel.Phase]:
        phases = [parallel.Phase(self.planes * self.units, self.s.threads, ints.pooled(self._emit))]
        if self.s.k_chunks > 1:
            phases.append(parallel.Phase(self.c.batch * self.c.m, self.s.threads, ints.pooled(self._emit_sum)))
        return phases

    def _emit(self, region: parallel.Region) -> None:
        """One thread's share: units [begin, end) of all planes, merged into one range a plane."""
        self._enter(region)
        begin, end = ints.from_index(region.begin), ints.from_index(region.end)
        if self.s.threads <= 1:
            begin, end = 0, self.planes * self.units
        if self.planes == 1:
            self._plane(0, begin, end)
            return
        whole = self.s.threads <= 1 or self.units == 1
        with ints.loop(ints.div(begin, self.units), ints.ceil_div(end, self.units)) as plane:
            first = ints.mul(plane, self.units)
            low = 0 if whole else ints.sub(ints.maximum(begin, first), first)
            high = self.units if whole else ints.sub(ints.minimum(end, ints.add(first, self.units)), first)
            self._plane(plane, low, high)

    def _enter(self, region: parallel.Region) -> None:
        self.region = region

        def buffer(slot: parallel.Slot | None) -> Value | None:
            if slot is None:
                return None
            share = ints.mul(ints.from_index(region.thread), slot.stride) if slot.stride else 0
            return ints.offset_pointer(region.workspace, ints.add(share, slot.offset), ln.int_type(8))

        self.lhs_buffer, self.rhs_buffer = buffer(self.lhs_slot), buffer(self.rhs_slot)
        self.tile_buffer, self.partial_buffer = buffer(self.tile_slot), buffer(self.partial_slot)

    def _plane(self, plane: Int, low: Int, high: Int) -> None:
        """Units [low, high) of one plane, as a rectangle of the output."""
        s, extents = self.s, {"m": self.c.m, "n": self.c.n}
        group, rest = ints.rem(plane, s.groups), ints.div(plane, s.groups)
        batch, chunk = ints.rem(rest, self.c.batch), ints.div(rest, self.c.batch)
        frame = Frame(self.c, self.region.pointers, batch).prepare()
        other = "n" if s.split == "m" else "m"
        span = _up(-(-extents[other] // s.groups), self.columns if other == "n" else self.rows)
        start = ints.mul(group, span)
        own = (start, ints.minimum(ints.add(start, span), extents[other])) if s.groups > 1 else (0, extents[other])
        shared = (ints.mul(low, s.unit), ints.minimum(ints.mul(high, s.unit), extents[s.split]))
        ranges = {s.split: shared, other: own}
        partials = None
        if self.partial_output is not None or self.partial_buffer is not None:
            at = ints.mul(ints.add(ints.mul(chunk, self.c.batch), batch), self.c.m * self.c.n)
            kept = self.partial_buffer and ints.offset_pointer(self.partial_buffer, at, self.c.accumulator)
            partials = Partials(self.partial_output, kept)
        sink = TileSink(frame, self.tile, self.tile_buffer, self.light, partials, outputs_follow=s.k_chunks == 1)
        if s.k_chunks == 1:
            depths = (0, self.c.k)
        else:
            k_begin = ints.mul(chunk, self.chunk)
            depths = (k_begin, ints.minimum(ints.add(k_begin, self.chunk), self.c.k))
        self._blocks(sink, ranges["m"], ranges["n"], depths)

    # --- the nest ------------------------------------------------------------------------------------------------

    def _blocks(self, sink: TileSink, m: tuple[Int, Int], n: tuple[Int, Int], k: tuple[Int, Int]) -> None:
        c, rows, columns = self.c, self.rows, self.columns
        lhs, rhs = (
            pack.Source(access, sink.frame.base(access), across, c.dims.k, c.dims.sizes)
            for access, across in ((c.lhs, c.dims.m), (c.rhs, c.dims.n))
        )
        even = all(x % self.s.unroll == 0 for x in (c.k, self.chunk, self.kc))
        with ints.loop(n[0], n[1], self.nc) as jc:
            n_end = ints.minimum(ints.add(jc, self.nc), n[1])
            with ints.loop(k[0], k[1] if c.k else 1, self.kc) as pc:
                depth = self._depth(k, pc)
                first, last = ints.equal(pc, k[0]), self._is_last(k, pc)
                if self.rhs_edge:
                    edge = c.n // columns * columns
                    self._pack(rhs, (edge, c.n, c.n), pc, depth, columns, self.rhs_buffer)
                with ints.loop(m[0], m[1], self.mc) as ic:
                    m_end, first_rows = ints.minimum(ints.add(ic, self.mc), m[1]), ints.equal(ic, m[0])
                    if self.pack_lhs:
                        self._pack(lhs, (ic, m_end, c.m), pc, depth, rows, self.lhs_buffer)
                    with ints.loop(jc, n_end, columns) as jr:
                        right = self._rhs_panel(rhs, jr, jc, pc)
                        if self.pack_rhs:  # just before its first use, while it is near
                            span = (jr, ints.minimum(ints.add(jr, columns), n_end), c.n)
                            fill = partial(self._pack, rhs, span, pc, depth, columns, right.pointer)
                            branch(first_rows, fill, lambda: None)
                        with ints.loop(ic, m_end, rows) as ir_:
                            left = self._lhs_panel(lhs, ir_, ic, pc)
                            asking = ahead.interlude(self, sink.frame, lhs, rhs, Place(m, (ic, jc, pc), ir_, jr, right))
                            values = multiply(self.tile, left, right, depth, self.s.chain, even, asking)
                            if c.tile:
                                self._hold(values, ints.sub(ir_, ic), ints.sub(jr, jc))
                            else:
                                sink.finish(values, ir_, jr, first, last)
                    if c.tile:
                        self._rows_of_tile(sink.frame, (ic, m_end), jc, n_end)

    # --- reductions over N tiles ---------------------------------------------------------------------------------

    def _hold(self, values: list[Value], row: Int, column: Int) -> None:
        """Puts a register tile where the rest of its N tile is."""
        for i, value in enumerate(values):
            place = ints.add(ints.mul(ints.add(row, i // self.tile.vectors), self.pitch), column)
            place = ints.add(place, i % self.tile.vectors * self.lanes)
            ln.store(value, ints.offset_pointer(self.tile_buffer, place, self.c.accumulator))

    def _rows_of_tile(self, frame: Frame, m: tuple[Int, Int], n: Int, n_end: Int) -> None:
        element = self.c.accumulator
        count = ints.sub(n_end, n) if self.c.n % self.nc else self.nc
        with build.loop(ints.value(m[0]), ints.value(m[1]), ints.value(1)) as row:
            start = ints.offset_pointer(self.tile_buffer, ints.mul(ints.sub(row, m[0]), self.pitch), element)

            def load(j: Int, lanes: int) -> Value:
                return ln.load(ints.offset_pointer(start, j, element), element, lanes)

            wide = self.c.n % self.columns == 0 and ep.all_vector_friendly(self.c, self.columns)
            contraction_rows.emit_row(frame, row, n, count, load, self.columns if wide else self.lanes)

    def _depth(self, k: tuple[Int, Int], pc: Int) -> Int:
        if self.c.k == 0:
            return 0
        if self.s.k_chunks == 1 and self.c.k % self.kc == 0:
            return self.kc
        return ints.minimum(self.kc, ints.sub(k[1], pc))

    def _is_last(self, k: tuple[Int, Int], pc: Int) -> bool | Value:
        if self.blocks == 1:
            return True
        return ints.at_least(ints.add(pc, self.kc), k[1])

    def _pack(
        self, source: pack.Source, span: tuple[Int, Int, int], pc: Int, depth: Int, width: int, to: Value | None
    ) -> None:
        """Packs rows or columns of span (start, end, limit). Panels read in place keep their element type."""
        assert to is not None
        start, end, limit = span
        in_place = source.access is self.c.rhs and not self.pack_rhs
        element = source.access.element if in_place else self.c.accumulator
        pack.panels(source, pack.Block(start, end, limit, pc, depth, width, to, self.kc * width, element, self.lanes))

    def _lhs_panel(self, source: pack.Source, m: Int, block: Int, pc: Int) -> Panel:
        rows, element = self.rows, self.c.accumulator
        if self.pack_lhs:
            offset = ints.mul(ints.sub(m, block), self.kc)
            return Panel(ints.offset_pointer(self.lhs_buffer, offset, element), element, rows, tuple(range(rows)))
        stride, k_stride = source.across_run()[0], source.depth_stride()
        start = ints.add(source.across_offset(m), source.depth_offset(pc))
        pointer = ints.offset_pointer(source.pointer, start, source.access.element)
        places: tuple[Int, ...] = tuple(r * stride for r in range(rows))
        if self.c.m % rows:  # rows past the end read the last one instead
            last = ints.sub(self.c.m - 1, m)
            places = tuple(ints.mul(ints.minimum(last, r), stride) if r else 0 for r in range(rows))
        return Panel(pointer, source.access.element, k_stride or 0, places)

    def _rhs_panel(self, source: pack.Source, n: Int, block: Int, pc: Int) -> Panel:
        element = self.c.accumulator
        if self.pack_rhs:
            offset = ints.mul(ints.sub(n, block), self.kc)
            return Panel(ints.offset_pointer(self.rhs_buffer, offset, element), element, self.columns)
        start = ints.add(source.across_offset(n), source.depth_offset(pc))
        pointer = ints.offset_pointer(source.pointer, start, source.access.element)
        k_stride: Int = source.depth_stride() or 0
        if self.rhs_edge:
            whole = ln.cmpi("sle", ints.value(ints.add(n, self.columns)), ints.value(self.c.n))
            pointer = ln.select(whole, pointer, self.rhs_buffer)
            k_stride = ln.select(whole, ints.value(k_stride), ints.value(self.columns))
        return Panel(pointer, source.access.element, k_stride, ahead=self.s.prefetch)

    # --- the second phase of chunks of K -------------------------------------------------------------------------

    def _emit_sum(self, region: parallel.Region) -> None:
        """Rows of all batch elements: the chunks' sums added in order, then the epilogue."""
        self._enter(region)
        c, element = self.c, self.c.accumulator
        with region.tasks() as task:
            row = ints.from_index(task)
            frame = Frame(c, region.pointers, ints.div(row, c.m)).prepare()
            start = ints.offset_pointer(self.partial_buffer, ints.mul(row, c.n), element)

            def load(j: Int, lanes: int) -> Value:
                planes = [ints.add(chunk * c.batch * c.m * c.n, j) for chunk in range(self.s.k_chunks)]
                first, *others = (ln.load(ints.offset_pointer(start, p, element), element, lanes) for p in planes)
                for other in others:
                    first = ln.addf(first, other)
                return first

            ep.emit_row(frame, ints.rem(row, c.m), 0, c.n, load, self.lanes)


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
