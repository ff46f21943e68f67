"""Tile programs of contraction kernels: a block multiplies two panels through a ring of shared-memory stages.

    copy tiles 0 .. stages-2                                     each a group of asynchronous copies
    for each k tile:
      fragments of step 1;  copies of tile + stages-1;  product of step 0      fragments are loaded one step ahead
      fragments of step 2;                              product of step 1
      ...   wait for the next tile, barrier;
      its fragments of step 0;                          product of the last step
    epilogue, slice by slice through shared memory

One barrier a k tile: it says both that the next tile has arrived and that everybody is done with the one before, whose
stage the next copies overwrite. K is summed in order, so results are reproducible; a K dealt to several blocks leaves
partial sums in the workspace, which a second launch adds in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from nova.errors import CompileError
from nova.fusion import contraction_form, readback
from nova.fusion.contraction_tiles import tiled_problem, tiling_of
from nova.mlir import ir
from nova.schedule import config
from nova.schedule.contraction import ContractionSchedule, schedule_contraction
from nova.schedule.target import GpuTarget
from nova.tile.builder import Program
from nova.tile.contraction_epilogue import Epilogue, Place
from nova.tile.contraction_frame import Frame, Plan, split
from nova.tile.contraction_operand import Ring, sides
from nova.tile.contraction_unit import Unit, unit_of
from nova.tile.expressions import Domain
from nova.tile.layout import WARP, NestedLayout, blocked
from nova.tile.text import BITS, Operand, Value
from nova.tile.widths import check_numbers, is_wide

REDUCING_LANES = 8  # along a row that is reduced: 128 bytes of it at once are enough for memory
SLICE = 32  # results of a thread that go through the epilogue together
MERGE_THREADS = 256


def generate(kernel: ir.OpView, target: GpuTarget) -> tuple[list[Program], int]:
    """The launches of a contraction kernel, and its bytes of workspace."""
    form = contraction_form.read(kernel)
    schedule = config.read(kernel.operation, ContractionSchedule)
    if schedule is None:
        schedule = schedule_contraction(tiled_problem(form), target)
    if schedule.kind not in ("mma_sync", "simt"):
        raise CompileError(f"kernel @{form.name}: no code for a schedule of kind {schedule.kind!r}")
    plan = Plan(form, readback.read(kernel), tiling_of(form))
    generator = _Generator(plan, schedule, target)
    programs = [generator.main()]
    if generator.chunks > 1:
        programs.append(generator.merge())
    return programs, generator.workspace


class _Generator:
    """The programs of one kernel."""

    def __init__(self, plan: Plan, schedule: ContractionSchedule, target: GpuTarget):
        self.plan, self.schedule, self.target = plan, schedule, target
        self.tiling, self.epilogue = plan.tiling, Epilogue(plan)
        self.block = schedule.workgroup
        self.sides = sides(self.tiling, plan.form.lhs, plan.form.rhs)
        self.element = str(plan.form.accumulator)
        self.unit: Unit = unit_of(schedule, *self.sides, self.element)
        tiling = self.tiling
        check_numbers(f"kernel @{plan.form.name}", tiling.m.extent, tiling.n.extent, tiling.k.extent)
        self.blocks_m, self.blocks_n = (
            -(-role.extent // b) for role, b in zip((tiling.m, tiling.n), self.block, strict=True)
        )
        per_run = -(-tiling.k.extent // schedule.reduction)
        tiles = per_run * tiling.k.outer_extent
        self.chunks = max(1, min(schedule.k_chunks, tiles)) if not tiling.k.outer and tiles else 1
        self.tiles = -(-tiles // self.chunks)  # k tiles of a block
        self.check_k = tiling.k.extent % schedule.reduction != 0 or self.tiles * self.chunks != tiles
        if plan.form.tile and plan.form.tile != self.block[1]:
            raise CompileError(
                f"kernel @{plan.form.name} reduces over tiles of {plan.form.tile} columns, and its blocks have "
                f"{self.block[1]}"
            )

    @property
    def plane(self) -> int:
        """Elements of one chunk's partial sums."""
        return self.tiling.outer_extent * self.tiling.m.extent * self.tiling.n.extent

    @property
    def run(self) -> int:
        """Columns of a thread beside one another: as many as accesses may move at once where N is no multiple of 4."""
        return power_within(self.tiling.n.extent, 4)

    @property
    def workspace(self) -> int:
        return self.chunks * self.plane * BITS[self.element] // 8 if self.chunks > 1 else 0

    # --- the main launch ---

    def main(self) -> Program:
        """Products, and the epilogue unless K is dealt out."""
        schedule = self.schedule
        grid = self.blocks_m * self.blocks_n * self.tiling.outer_extent * self.chunks
        threads = schedule.warps[0] * schedule.warps[1] * WARP
        program = Program(f"{self.plan.form.name}_main", self.plan.arguments, (grid, 1, 1), threads)
        frame, chunk, outer = self._place(program)
        sums = self._products(program, frame, chunk)
        if self.chunks > 1:
            self._store_partial(frame, chunk, outer, sums)
        else:
            self._finish(program, frame, sums)
        return program

    def _place(self, program: Program) -> tuple[Frame, Operand, Operand]:
        """The block's coordinates. Groups of block rows share their columns' panel in the L2 cache."""
        rows, columns = self.blocks_m, self.blocks_n
        number: Operand = program.program_id(0)
        outer, number = program.div(number, rows * columns), program.rem(number, rows * columns)
        if self.tiling.outer_extent * self.chunks == 1:
            outer, number = 0, program.program_id(0)
        group = max(1, min(self.schedule.groups, rows))
        which, inside = program.div(number, group * columns), program.rem(number, group * columns)
        if group >= rows:
            which, inside = 0, number
        first = program.mul(which, group)
        height = program.min(program.sub(rows, first), group) if rows % group else group
        row, column = program.add(first, program.rem(inside, height)), program.div(inside, height)
        chunk, outer = (
            (program.rem(outer, self.chunks), program.div(outer, self.chunks)) if self.chunks > 1 else (0, outer)
        )
        dims = self.tiling.outer
        places = dict(zip(dims, split(program, outer, [self.tiling.sizes[d] for d in dims]), strict=True))
        bm, bn = self.block
        return (
            Frame(program, self.plan, self.block, places, program.mul(row, bm), program.mul(column, bn)),
            chunk,
            outer,
        )

    def _products(self, program: Program, frame: Frame, chunk: Operand) -> Value:
        """The block's accumulators."""
        schedule, stages = self.schedule, self.schedule.stages
        unit = self.unit
        sums = program.splat(0.0, self.block, self.element, unit.accumulator)
        if not self.tiles:
            return sums
        starts = (frame.row, frame.column)
        rings = [
            Ring(side, frame, start, block, schedule.reduction, stages, self.check_k)
            for side, start, block in zip(self.sides, starts, self.block, strict=True)
        ]
        for ring in rings:
            ring.allocate()
        return _Pipeline(program, unit, rings, program.mul(chunk, self.tiles), self.tiles).run(sums)

    # --- what happens to the sums ---

    def _finish(self, program: Program, frame: Frame, sums: Value) -> None:
        """The epilogue: in slices of rows through shared memory, or as the accumulators lie if that is too small."""
        bm, bn = self.block
        size = BITS[self.element] // 8
        if bm * bn * size + 1024 > self.target.smem_block:
            place = Place(self.epilogue, frame, Domain(program, self.unit.accumulator), lambda: sums)
            place.prefetch()
            place.finish()
            return
        across = REDUCING_LANES if self.plan.form.tile else WARP
        layout = slice_layout(bm, bn, program.threads, self.run, across)
        height = layout.shape[0]
        domain = Domain(program, layout)
        shared: list[Value] = []

        def part(row: int) -> Place:
            def read() -> Value:
                return program.load_shared(shared[0], 0, (row, 0), self.element, layout)

            return Place(self.epilogue, frame.below(row) if row else frame, domain, read)

        places = [part(row) for row in range(0, bm, height)]
        places[0].prefetch()
        shared.append(program.alloc_shared(1, bm, bn, self.element))
        program.store_shared(sums, shared[0], 0, (0, 0))
        program.barrier()
        for number, place in enumerate(places):
            if number + 1 < len(places):
                places[number + 1].prefetch()
            place.finish()

    def _store_partial(self, frame: Frame, chunk: Operand, outer: Operand, sums: Value) -> None:
        """The chunk's sums into its plane of the workspace."""
        program, (m, n) = frame.program, (self.tiling.m, self.tiling.n)
        base = program.add(
            program.mul(program.cast(chunk, "i64"), self.plane),
            program.mul(program.cast(outer, "i64"), m.extent * n.extent),
        )
        extents = [m.extent if m.extent % self.block[0] else -1, n.extent if n.extent % self.block[1] else -1]
        run = self.unit.accumulator.element[1]
        program.store(
            sums, program.args[self.plan.workspace], base, [frame.row, frame.column], strides=[n.extent, 1],
            extents=extents, vector=run if n.extent % run == 0 else 1, wide=is_wide(m.extent * n.extent),
        )  # fmt: skip

    def merge(self) -> Program:
        """Adds the chunks in order and finishes."""
        (m, n), outer_extent = (self.tiling.m, self.tiling.n), self.tiling.outer_extent
        bn = self.block[1] if self.block[1] <= 128 else 64
        layout = merge_layout(bn, MERGE_THREADS, self.run)
        bm = layout.shape[0]
        rows, columns = -(-m.extent // bm), -(-n.extent // bn)
        name = f"{self.plan.form.name}_merge"
        program = Program(name, self.plan.arguments, (rows * columns * outer_extent, 1, 1), MERGE_THREADS)
        outer, row, column = split(program, program.program_id(0), [outer_extent, rows, columns])
        dims = self.tiling.outer
        places = dict(zip(dims, split(program, outer, [self.tiling.sizes[d] for d in dims]), strict=True))
        frame = Frame(program, self.plan, (bm, bn), places, program.mul(row, bm), program.mul(column, bn))
        extents = [m.extent if m.extent % bm else -1, n.extent if n.extent % bn else -1]
        vector = self.run

        def chunk(number: int) -> Value:
            base = program.add(program.mul(program.cast(outer, "i64"), m.extent * n.extent), number * self.plane)
            return program.load(
                program.args[self.plan.workspace], base, [frame.row, frame.column], self.element, layout,
                strides=[n.extent, 1], extents=extents, vector=vector, wide=is_wide(m.extent * n.extent),
            )  # fmt: skip

        def sums() -> Value:
            parts = [chunk(number) for number in range(self.chunks)]
            total = parts[0]
            for part in parts[1:]:
                total = program.binary("arith.addf", total, part)
            return total

        place = Place(self.epilogue, frame, Domain(program, layout), sums)
        place.prefetch()
        place.finish()
        return program


def slice_layout(bm: int, bn: int, threads: int, run: int = 4, across: int = WARP) -> NestedLayout:
    """Rows of a block, as many as make SLICE results a thread, held in runs of columns by the lanes of a warp.

    `across`: lanes along a row at most. Few of them leave more of a reduction along the row within a thread.
    """
    warps = threads // WARP
    lanes_n = power_within(bn // run, across)
    lanes_m = WARP // lanes_n
    height = warps * lanes_m
    while height * 2 <= bm and height * 2 * bn <= SLICE * threads:
        height *= 2
    if height > bm or bm % height:
        return _few_rows(bm, bn, warps, run)
    return blocked((height, bn), (warps, 1), (lanes_m, lanes_n), run)


def power_within(number: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides `number`."""
    return min(number & -number or limit, limit)


def _few_rows(bm: int, bn: int, warps: int, run: int) -> NestedLayout:
    """Fewer rows than warps x lanes: further warps take columns, and what is left over holds copies."""
    lanes_m = power_within(bm, WARP)
    lanes_n = power_within(bn // run, WARP // lanes_m)
    warps_m = power_within(bm // lanes_m, warps)
    warps_n = power_within(bn // run // lanes_n, warps // warps_m)
    return blocked((bm, bn), (warps_m, warps_n), (lanes_m, lanes_n), run)


def merge_layout(bn: int, threads: int, run: int = 4) -> NestedLayout:
    """Two rows a thread, in runs of columns."""
    lanes_n = power_within(bn // run, WARP)
    lanes_m = WARP // lanes_n
    warps = threads // WARP
    return blocked((warps * lanes_m * 2, bn), (warps, 1), (lanes_m, lanes_n), run)


class _Pipeline:
    """The loop over k tiles, `first` + 0 .. count-1 of them."""

    def __init__(self, program: Program, unit: Unit, rings: Sequence[Ring], first: Operand, count: int):
        self.program, self.unit, self.rings, self.first, self.count = program, unit, list(rings), first, count
        self.stages, depth = rings[0].stages, rings[0].depth
        if depth % unit.step:
            raise CompileError(f"k tiles of {depth} are not cut into steps of {unit.step}")
        self.steps = depth // unit.step
        self.ahead = self.stages - 1  # tiles under way beside the one that is multiplied

    def run(self, sums: Value) -> Value:
        program = self.program
        for number in range(self.ahead):
            if number < self.count:
                self._copy(number, number)
            program.async_commit()
        self._wait()
        state = [sums, *(self.unit.operand(program, f) for f in self._fragments(0, 0))]
        copying = max(0, self.count - self.ahead)
        stage: Operand = 0
        if copying:
            stage, state = self._loop(0, copying, stage, state, copy=True)
        if self.count - 1 > copying:
            stage, state = self._loop(copying, self.count - 1, stage, state, copy=False)
        if copying < self.count:
            state = self._tile(None, stage, state, copy=False, last=True)
        program.async_wait(0)
        return state[0]

    def _loop(
        self, begin: int, end: int, stage: Operand, state: list[Value], copy: bool
    ) -> tuple[Operand, list[Value]]:
        """k tiles begin .. end-1, of which none is the kernel's last unless all of them copy."""
        program = self.program
        with program.for_(begin, end, 1, [program.scalar(stage), *state]) as loop:
            here, *inside = loop.carried
            after = self._tile(loop.index, here, inside, copy)
            loop.yield_([program.scalar(self._next(here)), *after])
        here, *results = loop.results
        return here, results

    def _next(self, stage: Operand) -> Operand:
        """The stage that follows in the ring."""
        program = self.program
        if isinstance(stage, int):
            return (stage + 1) % self.stages
        if self.stages & (self.stages - 1) == 0:
            return program.int_op("andi", program.add(stage, 1), self.stages - 1)
        wraps = program.compare("eq", stage, self.stages - 1)
        return program.select(wraps, program.scalar(0), program.scalar(program.add(stage, 1)))

    def _before(self, stage: Operand) -> Operand:
        """The stage that comes before in the ring: where tile + stages-1 goes."""
        program = self.program
        if isinstance(stage, int):
            return (stage - 1) % self.stages
        if self.stages & (self.stages - 1) == 0:
            return program.int_op("andi", program.add(stage, self.stages - 1), self.stages - 1)
        wraps = program.compare("eq", stage, 0)
        return program.select(wraps, program.scalar(self.stages - 1), program.scalar(program.sub(stage, 1)))

    def _tile(
        self, number: Operand | None, stage: Operand, state: list[Value], copy: bool, last: bool = False
    ) -> list[Value]:
        """Multiplies one k tile; what it returns are the sums and the fragments of the next tile's first step."""
        program, unit = self.program, self.unit
        total, a, b = state
        sums = program.splat(0.0, total.shape or (), unit.element, unit.accumulator) if unit.restarts else total
        for step in range(self.steps):
            ends = step == self.steps - 1
            following: list[Value] = []
            if not ends:
                following = self._fragments(stage, (step + 1) * unit.step)
            if step == 0 and not last:
                if copy:
                    assert number is not None
                    self._copy(program.add(number, self.ahead), self._before(stage))
                program.async_commit()
            if ends and not last:
                self._wait()
                following = self._fragments(self._next(stage), 0)
            sums = unit.product(program, a, b, sums)
            if following:  # rounded only now: at the head of the loop, the first product must not wait for that
                a, b = (unit.operand(program, fragment) for fragment in following)
        return [program.binary("arith.addf", total, sums) if unit.restarts else sums, a, b]

    def _copy(self, number: Operand, stage: Operand) -> None:
        for ring in self.rings:
            ring.copy(self.program.add(self.first, number), stage)

    def _wait(self) -> None:
        """Until the next tile is there, for all threads."""
        self.program.async_wait(self.stages - 2)
        self.program.barrier()

    def _fragments(self, stage: Operand, k: int) -> list[Value]:
        lhs, rhs = self.rings
        return [lhs.fragment(stage, k, self.unit.lhs, True), rhs.fragment(stage, k, self.unit.rhs, False)]
