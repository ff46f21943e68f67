"""Emits nests whose tiles hold whole rows, or whose columns need nothing of each other: one pass over memory.

block -> (repetition, rows, columns)       elementwise, row reductions: one tile a block
block -> (columns, part)                   totals over the rows: a loop over the tiles of the part, sums in registers;
                                           each part writes its share, and a later nest adds them up in order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from nova.fusion.kernel import Index, Kernel, Linear, Structured, Tensor
from nova.schedule.bandwidth import TileShape
from nova.tile.expressions import Part, memory_element
from nova.tile.layout import NestedLayout, scattered
from nova.tile.loops_ahead import Queue, Tiles
from nova.tile.loops_body import Body, combined, computed, constant_tile, finished, reduced, scattered_sum, start_of
from nova.tile.loops_plan import Nest, Total, rounds
from nova.tile.loops_space import GROUP, ROW, Frame, Memory, decode
from nova.tile.text import Operand, Value

WARP = 32


@dataclass(eq=False)
class Work:
    """A nest with its tile: what the emitters of all kinds of nests take."""

    kernel: Kernel
    nest: Nest
    frame: Frame
    shape: TileShape
    fixed: tuple[int, ...]  # loops that are one index in a block
    stored: frozenset[Tensor]
    barrier: bool = False  # between the loads and the stores of a row's value: they share a buffer
    finishes: list[Nest] = field(default_factory=list)  # merging nests that need no launch: there is one part

    @property
    def repetitions(self) -> int:
        count = 1
        for loop in self.fixed:
            count *= self.kernel.loops[loop]
        return count

    @property
    def row_tiles(self) -> int:
        return max(1, -(-self.frame.row_count // self.shape.rows))

    @property
    def column_tiles(self) -> int:
        return max(1, -(-self.frame.group_count // self.shape.groups))

    @property
    def flat_total(self) -> bool:
        """Whether totals are over columns, because there are no rows."""
        return bool(self.nest.totals) and not self.nest.rows

    @property
    def blocks(self) -> int:
        if self.shape.long or self.flat_total:
            across = 1
        else:
            across = self.column_tiles
        if self.nest.totals:
            return self.repetitions * across * self.shape.parts
        if self.nest.merges:
            return across
        return self.repetitions * across * self.row_tiles

    def layout(self, unroll: int, groups: int) -> NestedLayout:
        """Of tiles with `groups` vectors side by side in each thread's batch and `unroll` one after the other."""
        shape, vector = self.shape, self.frame.vector
        lanes_c = min(WARP, shape.column_threads)
        lanes_r = max(1, min(WARP // lanes_c, shape.row_threads))
        warps_c, warps_r = shape.column_threads // lanes_c, shape.row_threads // lanes_r
        run = shape.row_run
        return NestedLayout(
            (warps_r, 1, warps_c, 1), (shape.row_batch // run, unroll, groups, 1), (1, 1, 1, 1),
            (lanes_r, 1, lanes_c, 1), (run, 1, 1, vector), (warps_c, 0, 1, 0), (lanes_c, 0, 1, 0),
        )  # fmt: skip

    @property
    def row_warps(self) -> int:
        """Warps that hold different rows of the same columns."""
        return self.shape.threads // max(self.shape.column_threads, WARP)

    def scattered(self) -> NestedLayout:
        """Of what there is one of a column: the threads of all rows have a share."""
        whole = self.layout(1, self.shape.column_batch)
        one = NestedLayout(
            (1, *whole.subgroup[1:]), (1, *whole.batch[1:]), whole.outer, (1, *whole.thread[1:]),
            (1, *whole.element[1:]), whole.subgroup_strides, whole.thread_strides,
        )  # fmt: skip
        return scattered(one, GROUP, self.shape.row_threads)


def emit(work: Work, memory: Memory, block: Operand) -> None:
    """The code of one block of a nest that is not long."""
    program = memory.program
    layout = work.layout(1, work.shape.column_batch)
    if work.nest.totals or work.nest.merges:
        _Totals(work, memory, layout).emit(block)
        return
    across, down = work.column_tiles, work.row_tiles
    column = program.rem(block, across)
    rest = program.div(block, across)
    row = program.rem(rest, down)
    fixed = decode(program, program.div(rest, down), work.fixed, work.kernel.loops) if work.fixed else {}
    once = program.compare("eq", column, 0) if across > 1 and work.nest.small else None
    if across == 1:
        column = 0
    body = make_body(work, memory, layout, fixed, row if down > 1 else 0, column, once)
    run_whole(work, body)


def make_body(
    work: Work, memory: Memory, layout: NestedLayout, fixed: dict[int, Operand], row_tile: Operand,
    column_tile: Operand, once: Value | None = None, group0: Operand | None = None, ragged: bool | None = None,
) -> Body:  # fmt: skip
    """A tile by its numbers along rows and columns."""
    program, shape, frame = memory.program, work.shape, work.frame
    row0 = program.mul(program.cast(row_tile, frame.row_number), shape.rows)
    groups = layout.shape[2]
    start = program.mul(program.cast(column_tile, frame.group_number), groups) if group0 is None else group0
    ragged_groups = bool(frame.group_count % groups) if ragged is None else ragged
    body = Body(
        frame, memory, layout, fixed, row0, start, bool(frame.row_count % shape.rows), ragged_groups
    )  # fmt: skip
    body.setup(work.nest, work.stored, once)
    return body


def compute(work: Work, body: Body) -> set[Structured]:
    """All ops of the nest on a tile, but for those of its totals, which are returned."""
    body.prefetch()
    for elementwise, reductions in rounds(work.nest):
        for op in elementwise:
            body.elementwise(op)
        body.reduce(reductions)
    return {total.op for total in work.nest.totals}


def run_whole(work: Work, body: Body) -> None:
    """The ops of a nest whose tile is complete."""
    compute(work, body)
    if work.barrier:
        body.program.barrier()
    body.flush()


class Accumulators:
    """Totals while tiles go by: values that a loop carries."""

    def __init__(self, work: Work, totals: Sequence[Total], probe: Body):
        self.totals = list(totals)
        self.dims = [probe.total_dims(total) for total in totals]
        self.elements = [computed(memory_element(total.out.value.type)) for total in totals]
        self.start = [
            constant_tile(
                probe.program, probe.domain, start_of(str(total.out.combine), memory_element(total.out.value.type)),
                element, dims,
            )
            for total, dims, element in zip(totals, self.dims, self.elements, strict=True)
        ]  # fmt: skip

    def add(self, body: Body, carried: Sequence[Value]) -> list[Value]:
        """The carried values with this tile's."""
        following = []
        for total, dims, value, element in zip(self.totals, self.dims, carried, self.elements, strict=True):
            have = Part(value, dims, element)
            following.append(
                body.domain.whole(combined(body.domain, str(total.out.combine), have, body.share(total)), dims)
            )
        return following

    def finish(self, body: Body, carried: Sequence[Value], keep: bool = True, last: Body | None = None) -> list[Part]:
        """Combined over what the total does not keep, in the type of the reduction, and laid out as for `last`."""
        parts = []
        for total, dims, value, element in zip(self.totals, self.dims, carried, self.elements, strict=True):
            part, combine = Part(value, dims, element), str(total.out.combine)
            gone = tuple(d for d in dims if d == ROW or not (total.keeps and keep))
            if last is not None and gone == (ROW,) and len(dims) > 1:
                parts.append(scattered_sum(body.domain, part, combine, last.domain))
            else:
                parts.append(reduced(body.domain, part, gone, combine))
        return parts


class _Totals:
    """A nest that sums over its rows (or over everything), or that adds up such shares."""

    def __init__(self, work: Work, memory: Memory, layout: NestedLayout):
        self.work, self.memory, self.layout, self.program = work, memory, layout, memory.program
        self.once: Value | None = None  # holds in the first of the blocks that share rows

    def emit(self, block: Operand) -> None:
        work, program = self.work, self.program
        parts = work.shape.parts if work.nest.totals else 1
        part = program.rem(block, parts) if parts > 1 else 0
        column: Operand = 0
        if not work.flat_total and not work.shape.long and work.column_tiles > 1:
            column = program.div(block, parts)
            self.once = program.compare("eq", column, 0)
        tiles = work.column_tiles if work.flat_total else work.row_tiles
        totals = work.nest.totals or work.nest.merges
        probe = self.body(0, column, parts)
        accumulators = Accumulators(work, totals, probe)
        if tiles == 1:
            body = self.body(part, column, parts)
            values = self.tile(body, accumulators, accumulators.start)
        else:
            values = self.walk(accumulators, part, tiles, column, parts)
        if work.flat_total or work.row_warps <= 1:
            last = self.body(0, column, parts)
            store_totals(work, last, accumulators.finish(last, values), part)
            return
        last = make_body(work, self.memory, work.scattered(), {}, 0, column, self.once)
        store_totals(work, last, accumulators.finish(probe, values, last=last), part)

    def walk(self, accumulators: Accumulators, part: Operand, tiles: int, column: Operand, parts: int) -> list[Value]:
        """All tiles of a part. While one is computed the loads of the next ones are under way (`loops_ahead`)."""
        program, count, depth = self.program, len(accumulators.start), self.work.shape.ahead
        first = self.body(part, column, parts)
        queue = Queue(self, first, depth, Tiles(tiles, column, parts))
        columns = first.prefetch_columns() if depth and not self.work.flat_total else []
        start = [*accumulators.start, *queue.start(part)]

        def turn(index: Operand, carried: Sequence[Value], taken: int) -> list[Value]:
            sums, queue.carried = list(carried[:count]), list(carried[count:])
            for number in range(taken):
                tile = program.add(index, number * parts) if number else index
                body = self.body(tile, column, parts)
                body.values.update((key, first.values[key]) for key in columns)
                queue.step(body, tile)
                sums = self.tile(body, accumulators, sums)
            return [*sums, *queue.carried]

        taken, middle = queue.turn, part
        if taken > 1:
            turns = program.div(program.sub(tiles + parts - 1, part), parts * taken)
            middle = program.add(part, program.mul(turns, parts * taken))
            with program.for_(part, middle, parts * taken, start) as loop:
                loop.yield_(turn(loop.index, loop.carried, taken))
            start = loop.results
        if taken == 1 or tiles % parts or tiles // parts % taken:
            with program.for_(middle, tiles, parts, start) as loop:
                loop.yield_(turn(loop.index, loop.carried, 1))
            start = loop.results
        return start[:count]

    def body(self, tile: Operand, column: Operand, parts: int) -> Body:
        work = self.work
        if work.flat_total:
            return make_body(work, self.memory, self.layout, {}, 0, tile)
        return make_body(work, self.memory, self.layout, {}, tile, column, self.once)

    def tile(self, body: Body, accumulators: Accumulators, carried: Sequence[Value]) -> list[Value]:
        if self.work.nest.merges:
            return accumulators_of_shares(body, accumulators, carried)
        totals = compute(self.work, body)
        following = accumulators.add(body, carried)
        for op in totals:
            body.checks(op)
        if self.work.barrier:
            self.program.barrier()
        body.flush()
        return following


def share_of(total: Total) -> tuple[Tensor, Index]:
    """The partial sums of a total, by part and column."""
    assert total.partial is not None
    first = Linear.of({total.loop: 1})
    return total.partial, (first, *(Linear.of({loop: 1}) for loop in total.columns))


def accumulators_of_shares(body: Body, accumulators: Accumulators, carried: Sequence[Value]) -> list[Value]:
    """The carried values with a tile of shares."""
    following = []
    shares = [body.load(*share_of(total)) for total in accumulators.totals]
    for total, dims, value, element, part in zip(
        accumulators.totals, accumulators.dims, carried, accumulators.elements, shares, strict=True
    ):
        combine = str(total.out.combine)
        share = body.masked(part, combine, tuple(d for d in dims if d == ROW))
        have = Part(value, dims, element)
        following.append(body.domain.whole(combined(body.domain, combine, have, share), dims))
    return following


def store_totals(work: Work, body: Body, parts: Sequence[Part], part: Operand) -> None:
    """Writes a part's shares; or, where the sums are complete, runs what needs them."""
    totals = work.nest.totals or work.nest.merges
    if work.nest.totals and not work.finishes:
        for total, value in zip(totals, parts, strict=True):
            tensor, index = share_of(total)
            body.fixed[total.loop] = part
            if total.keeps or body.once is None:
                body.write(tensor, index, value)
                continue
            with body.program.if_(body.once):
                body.write(tensor, index, value)
        return
    body.once = None  # each block has columns of its own
    for total, value in zip(totals, parts, strict=True):
        out = total.out
        element = memory_element(out.tensor.dtype)
        body.values[out.tensor, out.index] = finished(body.domain, value, str(out.combine), out.init, element)
        if out.tensor.kind != "local" or out.tensor in work.stored:
            done = body.values[out.tensor, out.index]
            body.waiting.append((partial(body.write, out.tensor, out.index, done), False))
    for nest in work.finishes or [work.nest]:
        for op in nest.ops:
            body.elementwise(op)
    body.flush()
