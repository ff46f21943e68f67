"""Code for kernels of kind "contraction": packed panels, a register tile, and the epilogue on what it leaves.

    for jc, NC:  for pc, KC:  pack rhs [KC x NC]
      for ic, MC:             pack lhs [MC x KC]
        for jr, NR:  for ir, MR:   12 accumulators  ->  epilogue  ->  outputs

Threads share the M (or N) dimension in units of whole tiles; each merges its units into one range and runs the nest
above on it, so one thread packs nothing twice. A tile's sums don't depend on which range it fell in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nova.cpu import access as ac
from nova.cpu import contraction_epilogue as ep
from nova.cpu import contraction_form as cf
from nova.cpu import build, ints, pack, parallel
from nova.cpu import lanes as ln
from nova.cpu.contraction_epilogue import Frame, Segment
from nova.cpu.contraction_form import Contraction
from nova.cpu.ints import Int
from nova.cpu.lanes import Value
from nova.cpu.microkernel import Panel, Tile, multiply
from nova.mlir import ir, scf
from nova.schedule.contraction import ContractionProblem, CpuContractionSchedule, Operand, schedule_contraction
from nova.schedule.target import CpuTarget


def problem_of(c: Contraction) -> ContractionProblem:
    """What the configurator needs to know of a kernel."""

    def operand(access: ac.Access, dims: tuple[int, ...]) -> Operand:
        across, length = ac.contiguous_run(access, dims, c.dims.sizes)
        k_stride, k_length = ac.contiguous_run(access, c.dims.k, c.dims.sizes)
        return Operand(
            str(access.element),
            across if length == c.dims.extent(dims) else None,
            k_stride if k_length == c.k else None,
        )

    return ContractionProblem(
        c.m, c.n, c.k, c.batch, operand(c.lhs, c.dims.m), operand(c.rhs, c.dims.n), str(c.accumulator),
        output_bytes=sum(ln.bytes_of(access.element) for _, access in c.outputs),
        epilogue_operations=ep.operation_count(c),
        keeps_partials=_partial_output(c) is not None,
    )  # fmt: skip


def _partial_output(c: Contraction) -> ac.Access | None:
    """An output that can hold partial sums: of the accumulator's type, vector-friendly, sharing memory with nothing."""
    for _, access in c.outputs:
        dims = [d for d in (*c.dims.m, *c.dims.n, *c.dims.batch)]
        complete = all(access.coefficients[d] for d in dims)
        if access.element == c.accumulator and access.buffer not in c.aliased and complete:
            return access
    return None


def lower(kernel: ir.OpView, target: CpuTarget) -> tuple[ir.Module, int]:
    c = cf.read(kernel)
    schedule = schedule_contraction(problem_of(c), target)
    nest = Nest(c, schedule)
    return parallel.emit_kernel(c.name, c.buffers, nest.phases(), c.aliased), nest.workspace.bytes


@dataclass(frozen=True)
class Range:
    """A rectangle of the output plane."""

    m0: Int
    m1: Int
    n0: Int
    n1: Int


class Nest:
    """The loop nest of one kernel."""

    def __init__(self, c: Contraction, s: CpuContractionSchedule):
        self.c, self.s = c, s
        self.tile = Tile(s.rows, s.vectors, s.lanes, c.accumulator, s.unroll)
        self.workspace = parallel.Workspace()
        mc, nc = min(s.mc, _up(c.m, s.rows)), min(s.nc, _up(c.n, self.tile.columns))
        element, threads = c.accumulator, max(s.threads, 1)
        self.lhs_slot = self.workspace.per_thread([mc * s.kc], element, threads) if s.pack_lhs else None
        self.rhs_slot = self.workspace.per_thread([nc * s.kc], element, threads) if s.pack_rhs else None
        self.tile_slot = self.workspace.per_thread([s.rows * self.tile.columns], element, threads)
        self.blocks = max(1, -(-c.k // s.kc))
        self.partial = _partial_output(c) if self.blocks > 1 else None
        self.partial_slot = None
        if self.blocks > 1 and self.partial is None:
            self.partial_slot = self.workspace.shared([c.batch * c.m * c.n], element)
        self.light = ep.operation_count(c) <= ep.LIGHT_OPERATIONS and all(
            ep.lane_stride(c, access, s.lanes) in (0, 1) for access in self._plane_accesses()
        )

    def _plane_accesses(self) -> list[ac.Access]:
        core = [(self.c.core.op, 0), (self.c.core.op, 1)]
        read = [access for key, access in self.c.accesses.items() if key not in core]
        return [*read, *(access for _, access in self.c.outputs)]

    # --- tasks ---------------------------------------------------------------------------------------------------

    def phases(self) -> list[parallel.Phase]:
        return [parallel.Phase(self.c.batch * self.s.groups * self.units, self.s.threads, self.emit)]

    @property
    def units(self) -> int:
        extent = self.c.m if self.s.split == "m" else self.c.n
        return -(-extent // self.s.unit)

    def emit(self, region: parallel.Region) -> None:
        """One thread's share: units [begin, end) of (batch, group, unit), merged into a range per batch and group."""
        self.region = region
        self.lhs_buffer = self._buffer(self.lhs_slot)
        self.rhs_buffer = self._buffer(self.rhs_slot)
        self.tile_buffer = self._buffer(self.tile_slot)
        self.partial_buffer = self._buffer(self.partial_slot)
        begin, end = ints.from_index(region.begin), ints.from_index(region.end)
        planes = self.c.batch * self.s.groups
        if self.s.threads <= 1:
            begin, end = 0, planes * self.units
        if planes == 1:
            self._plane(0, begin, end)
            return
        with ints.loop(ints.div(begin, self.units), ints.ceil_div(end, self.units)) as plane:
            first = ints.mul(plane, self.units)
            low = ints.sub(ints.maximum(begin, first), first) if self.s.threads > 1 and self.units > 1 else 0
            high = ints.sub(ints.minimum(end, ints.add(first, self.units)), first) if low != 0 else self.units
            self._plane(plane, low, high)

    def _buffer(self, slot: parallel.Slot | None) -> Value | None:
        if slot is None:
            return None
        offset = ints.add(ints.mul(ints.from_index(self.region.thread), slot.stride) if slot.stride else 0, slot.offset)
        return ints.offset_pointer(self.region.workspace, offset, ln.int_type(8))

    def _plane(self, plane: Int, low: Int, high: Int) -> None:
        batch, group = ints.div(plane, self.s.groups), ints.rem(plane, self.s.groups)
        self.frame = Frame(self.c, self.region.pointers, batch).prepare()
        extents = {"m": self.c.m, "n": self.c.n}
        split, other = self.s.split, "n" if self.s.split == "m" else "m"
        shared = ints.mul(low, self.s.unit), ints.minimum(ints.mul(high, self.s.unit), extents[split])
        span = _up(-(-extents[other] // self.s.groups), self.tile.columns if other == "n" else self.s.rows)
        start = ints.mul(group, span)
        own = (start, ints.minimum(ints.add(start, span), extents[other])) if self.s.groups > 1 else (0, extents[other])
        self._blocks(Range(*shared, *own) if split == "m" else Range(*own, *shared))

    # --- the nest ------------------------------------------------------------------------------------------------

    def _source(self, access: ac.Access, across: tuple[int, ...]) -> pack.Source:
        return pack.Source(access, self.frame.base(access), across, self.c.dims.k, self.c.dims.sizes)

    def _blocks(self, r: Range) -> None:
        c, s = self.c, self.s
        lhs, rhs = self._source(c.lhs, c.dims.m), self._source(c.rhs, c.dims.n)
        with ints.loop(r.n0, r.n1, s.nc) as jc:
            n_end = ints.minimum(ints.add(jc, s.nc), r.n1)
            with ints.loop(0, max(c.k, 1), s.kc) as pc:
                depth = ints.minimum(s.kc, ints.sub(c.k, pc)) if c.k % s.kc else (s.kc if c.k else 0)
                if s.pack_rhs:
                    self._pack(rhs, jc, n_end, c.n, pc, depth, self.tile.columns, self.rhs_buffer)
                with ints.loop(r.m0, r.m1, s.mc) as ic:
                    m_end = ints.minimum(ints.add(ic, s.mc), r.m1)
                    if s.pack_lhs:
                        self._pack(lhs, ic, m_end, c.m, pc, depth, s.rows, self.lhs_buffer)
                    with ints.loop(jc, n_end, self.tile.columns) as jr:
                        right = self._rhs_panel(rhs, jr, jc, pc)
                        with ints.loop(ic, m_end, s.rows) as ir_:
                            left = self._lhs_panel(lhs, ir_, ic, pc)
                            self._prefetch(ir_, jr)
                            self._finish(multiply(self.tile, left, right, depth), ir_, jr, pc)

    def _pack(
        self, source: pack.Source, start: Int, end: Int, limit: int, pc: Int, depth: Int, width: int, to: Value | None
    ) -> None:
        assert to is not None
        pack.panels(
            source, start, end, limit, pc, depth, width, to, self.s.kc * width, self.c.accumulator, self.s.lanes
        )

    def _lhs_panel(self, source: pack.Source, m: Int, block: Int, pc: Int) -> Panel:
        rows, element = self.s.rows, self.c.accumulator
        if self.lhs_buffer is not None:
            offset = ints.mul(ints.sub(m, block), self.s.kc)
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
        if self.rhs_buffer is not None:
            offset = ints.mul(ints.sub(n, block), self.s.kc)
            return Panel(ints.offset_pointer(self.rhs_buffer, offset, element), element, self.tile.columns)
        start = ints.add(source.across_offset(n), source.depth_offset(pc))
        pointer = ints.offset_pointer(source.pointer, start, source.access.element)
        return Panel(pointer, source.access.element, source.depth_stride() or 0)

    def _prefetch(self, m: Int, n: Int) -> None:
        """Asks for the tile's lines of the first output before the k loop hides their latency."""
        access = self.c.outputs[0][1]
        if ep.lane_stride(self.c, access, self.s.lanes) != 1:
            return
        i32 = ln.int_type(32)
        hints = {name: ir.IntegerAttr.get(i32, number) for name, number in (("rw", 1), ("hint", 3), ("cache", 1))}
        for row in range(self.s.rows):
            segment = Segment(self.frame, ints.add(m, row), n, self.s.lanes)
            ln.create_void("llvm.intr.prefetch", [segment.address(access)], hints)

    # --- what becomes of a tile ----------------------------------------------------------------------------------

    def _finish(self, tile: list[Value], m: Int, n: Int, pc: Int) -> None:
        """Adds the sums of earlier k blocks; then the epilogue after the last block, else keeps the sums."""
        if self.light:
            _branch(self._full(m, n), lambda: self._in_registers(tile, m, n, pc), lambda: self._by_rows(tile, m, n, pc))
        else:
            self._by_rows(tile, m, n, pc)

    def _is_last(self, pc: Int) -> bool | Value:
        return ints.equal(pc, (self.blocks - 1) * self.s.kc)

    def _full(self, m: Int, n: Int) -> bool | Value:
        """Whether the tile lies wholly inside the output."""
        return ints.both(
            ints.at_most(ints.add(m, self.s.rows), self.c.m, self.c.m % self.s.rows == 0),
            ints.at_most(ints.add(n, self.tile.columns), self.c.n, self.c.n % self.tile.columns == 0),
        )

    def _in_registers(self, tile: list[Value], m: Int, n: Int, pc: Int) -> None:
        s = self.s
        places = [(ints.add(m, i // s.vectors), ints.add(n, i % s.vectors * s.lanes)) for i in range(len(tile))]

        def outputs(values: list[Value]) -> None:
            for value, (row, column) in zip(values, places, strict=True):
                Segment(self.frame, row, column, s.lanes, value).store_outputs()

        if self.blocks == 1:
            outputs(tile)
            return
        pointers = [self._partial_pointer(*place) for place in places]
        branch = scf.IfOp(ints.equal(pc, 0), [self.tile.vector] * len(tile), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.YieldOp(tile)
        with ir.InsertionPoint(branch.else_block):
            before = [ln.load(pointer, self.c.accumulator, s.lanes) for pointer in pointers]
            scf.YieldOp([ln.addf(x, y) for x, y in zip(before, tile, strict=True)])
        sums = list(branch.results)

        def keep() -> None:
            for value, pointer in zip(sums, pointers, strict=True):
                ln.store(value, pointer)

        _branch(self._is_last(pc), lambda: outputs(sums), keep)

    def _by_rows(self, tile: list[Value], m: Int, n: Int, pc: Int) -> None:
        """Spills the tile to L1 and goes on row by row: at edges, and for long epilogues."""
        rows, columns, s = self.s.rows, self.tile.columns, self.s
        for i, value in enumerate(tile):
            ln.store(value, ints.offset_pointer(self.tile_buffer, i * s.lanes, self.c.accumulator))
        valid_rows = ints.minimum(rows, ints.sub(self.c.m, m)) if self.c.m % rows else rows
        valid = ints.minimum(columns, ints.sub(self.c.n, n)) if self.c.n % columns else columns
        with build.loop(ln.i64(0), ints.value(valid_rows), ln.i64(1)) as row:
            place = ints.offset_pointer(self.tile_buffer, ints.mul(row, columns), self.c.accumulator)
            at = ints.add(m, row)

            def outputs() -> None:
                ep.emit_row(self.frame, at, n, valid, columns, place, s.lanes)

            if self.blocks == 1:
                outputs()
            else:
                partial = self._partial_pointer(at, n)
                with build.if_then(ln.cmpi("ne", ints.value(pc), ln.i64(0))):
                    self._columns(valid, ln.addf, (partial, place), place)
                _branch(self._is_last(pc), outputs, lambda: self._columns(valid, lambda x: x, (place,), partial))

    def _columns(self, count: Int, function: Callable[..., Value], sources: tuple[Value, ...], to: Value) -> None:
        """`to[j] = function(sources[j]...)` for j < count."""
        element, lanes = self.c.accumulator, self.s.lanes
        whole = ints.mul(ints.div(count, lanes), lanes)
        for begin, end, width in ((0, whole, lanes), (whole, count, 0)):
            if isinstance(count, int) and not width:
                continue
            with ints.loop(begin, end, max(width, 1)) as j:
                values = [ln.load(ints.offset_pointer(p, j, element), element, width) for p in sources]
                ln.store(function(*values), ints.offset_pointer(to, j, element))

    def _partial_pointer(self, m: Int, n: Int) -> Value:
        """Where the sums of earlier k blocks of (m, n) are: in an output, or in the workspace."""
        if self.partial is not None:
            return Segment(self.frame, m, n, self.s.lanes).address(self.partial)
        plane = ints.mul(self.frame.batch, self.c.m * self.c.n)
        offset = ints.add(plane, ints.mul(m, self.c.n), n)
        return ints.offset_pointer(self.partial_buffer, offset, self.c.accumulator)


def _branch(condition: bool | Value, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """if/else; a condition known now emits one side only."""
    if isinstance(condition, bool):
        (then if condition else otherwise)()
        return
    branch = scf.IfOp(condition, has_else=True)
    for block, emit in ((branch.then_block, then), (branch.else_block, otherwise)):
        with ir.InsertionPoint(block):
            emit()
            scf.YieldOp([])


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
