"""Kernels of kind "loops" as tile programs: elementwise chains, reductions, copies, gathers, and mixes of them.

    kernel -> nests (loops_plan) -> a tile for each (schedule.bandwidth) -> launches

Nests of one launch don't wait for each other and divide its blocks: block numbers below the first's count are its, and
so on. Sums over rows write one share a block to the workspace, and a merging nest of a later launch adds them up; how
many there are depends on shapes and target only, so results are the same from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nova.fusion.kernel import WIDTHS, Kernel, Structured, Tensor
from nova.fusion.readback import read
from nova.mlir import ir
from nova.schedule.bandwidth import WASTE, TileProblem, TileShape, schedule_tile
from nova.schedule.target import GpuTarget
from nova.tile import loops_emit, loops_long
from nova.tile.builder import Program
from nova.tile.expressions import memory_element
from nova.tile.layout import NestedLayout
from nova.tile.loops_body import computed
from nova.tile.loops_emit import Work
from nova.tile.loops_plan import Nest, Planner, accesses, numel, order_loops, reads_of, simplify
from nova.tile.loops_space import Frame, Memory
from nova.tile.text import BITS
from nova.tile.widths import is_wide

ALIGNMENT = 256  # of slots in the workspace


def generate(func_op: ir.OpView, target: GpuTarget) -> tuple[list[Program], int]:
    """The kernel's launches and its workspace in bytes."""
    return Loops(read(func_op), target).run()


class Loops:
    """One kernel on its way to tile programs."""

    def __init__(self, kernel: Kernel, target: GpuTarget):
        self.kernel, self.target = kernel, target
        simplify(kernel)
        self.loops = len(kernel.loops)
        self.arguments = [*kernel.args, *kernel.outs]
        self.alone: set[Structured] = set()
        self.slots: dict[Tensor, int] = {}
        self.bytes = 0

    def run(self) -> tuple[list[Program], int]:
        works = self.plan(apart=False)
        if any(w.shape.long and any(t.keeps or (t.op.loops != w.frame.rows and not w.nest.is_row(t.op))
                                    for t in w.nest.totals) for w in works):  # fmt: skip
            works = self.plan(apart=True)
        works = self.absorb(works)
        self.store(works)
        programs = []
        for number, level in enumerate(sorted({w.nest.level for w in works})):
            programs.append(self.launch(number, [w for w in works if w.nest.level == level]))
        return programs, self.bytes

    # --- plans ---

    def plan(self, apart: bool) -> list[Work]:
        """Nests and their tiles. A row's value that several blocks need is not written over what they make it from:
        its op gets a nest of its own, and the others wait for that or come before it."""
        while True:
            del self.kernel.loops[self.loops :]
            nests = Planner(self.kernel, apart, self.alone).run()
            works: list[Work] = []
            for nest in sorted(nests, key=lambda n: n.level):
                for total in nest.merges:
                    nest.column_order = total.columns
                works.append(self.work(nest))
            crossing = {op for work in works for op in self.crossing(work)}
            if not crossing:
                return works
            self.alone |= crossing

    def work(self, nest: Nest) -> Work:
        """The tile of a nest; its totals get their partial sums."""
        kernel = self.kernel
        order = nest.column_order
        order_loops(kernel, nest)
        if nest.merges:
            nest.column_order, nest.row_order = order, (nest.merges[0].loop,)
        rows, columns = nest.row_order, nest.column_order
        fixed: tuple[int, ...] = ()
        vector = self.vector(nest, columns)
        turned = self.is_turned(nest)
        if turned:
            fixed, rows = rows[:-1], rows[-1:]
        frame = Frame(kernel, rows, columns, vector)
        shape = schedule_tile(self.problem(nest, frame, fixed, turned), self.target)
        if idle(shape, frame) > WASTE and vector > 2:  # shorter vectors may fit the row better
            shorter = Frame(kernel, rows, columns, vector // 2)
            other = schedule_tile(self.problem(nest, shorter, fixed, turned), self.target)
            if idle(other, shorter) < idle(shape, frame):
                frame, shape = shorter, other
        work = Work(kernel, nest, frame, shape, fixed, frozenset())
        if turned:
            work.frame = replace(frame, turned=turned_layout(work))
        if nest.totals:
            kernel.loops.append(shape.parts)
        for number, total in enumerate(nest.totals):
            total.columns = columns if total.keeps else ()
            total.loop = len(kernel.loops) - 1
            element = computed(memory_element(total.out.value.type))
            extents = tuple(kernel.loops[loop] for loop in total.columns)
            total.partial = Tensor("local", (shape.parts, *extents), element, f"share{number}")
        work.barrier = bool(self.shared_rows(nest))
        return work

    def problem(self, nest: Nest, frame: Frame, fixed: tuple[int, ...], turned: bool) -> TileProblem:
        kernel = self.kernel
        loads = [(t, {loop for loop, _ in linear.terms}) for t, linear, written in accesses(nest) if not written]
        full = [t for t, loops in loads if loops >= nest.full] or [
            t for t, loops in loads if loops >= set(frame.columns)
        ]
        read_bytes = sum(max(WIDTHS.get(t.dtype.removeprefix("u"), 32), 8) / 8 for t in full)
        along = [op for op in nest.ops if nest.reduces(op)]
        totals = nest.totals or nest.merges
        kept = sum(total.keeps for total in totals)
        total = ""
        if totals:
            total = "rows" if nest.rows or nest.merges else "all"
        whole = any(not t.keeps and not nest.is_row(t.op) for t in nest.totals) and bool(nest.rows)
        reduces = bool(along) or whole or (bool(nest.totals) and not kept and bool(nest.rows))
        return TileProblem(
            frame.row_count, numel(kernel, frame.columns), frame.vector, max(read_bytes, 1.0),
            max(1, len(full) + kept) if reduces else max(1, len(full)), reduces, total,
            self.row_lanes(nest, frame) and not turned, turned, numel(kernel, fixed), bool(nest.merges),
            reduces and loops_long.passes(nest) > 1,
        )  # fmt: skip

    def vector(self, nest: Nest, columns: tuple[int, ...]) -> int:
        """Elements of 16 bytes of the widest type that is moved in runs."""
        if not columns:
            return 1
        lane, widest = columns[-1], 0
        for tensor, linear, _ in accesses(nest):
            if dict(linear.terms).get(lane) == 1 and len({loop for loop, _ in linear.terms}) >= min(2, len(nest.full)):
                widest = max(widest, BITS[memory_element(tensor.dtype)])
        for total in nest.merges:
            widest = max(widest, BITS[computed(memory_element(total.out.value.type))])
        if not widest and any(node.op == "tensor.extract" for op in nest.ops for node in op.nodes()):
            widest = max((BITS[memory_element(out.tensor.dtype)] for op in nest.ops for out in op.outs), default=0)
            widest = widest if self.unit_extract(nest, lane) else 0
        if not widest:
            return 1
        vector = min(8, 128 // max(widest, 8))
        if any(node.op == "nova.philox" for op in nest.ops for node in op.nodes()):
            vector = max(vector, 4)
        while vector > 1 and self.kernel.loops[lane] % vector:
            vector //= 2
        return vector

    @staticmethod
    def unit_extract(nest: Nest, lane: int) -> bool:
        """Whether the column loop is the last index of an element that a body picks."""
        nodes = [node for op in nest.ops for node in op.nodes() if node.op == "tensor.extract" and node.args]
        return any(n.args[-1].op == "linear" and dict(n.args[-1].attr.terms).get(lane) == 1 for n in nodes)

    def is_turned(self, nest: Nest) -> bool:
        """Whether an elementwise nest reads or writes across its rows: through tiles that are turned over."""
        if nest.rows is not None or nest.merges or not nest.row_order or len(nest.column_order) != 1:
            return False
        sizes, lane = self.kernel.loops, nest.column_order[0]
        across = None
        for tensor, linear, _ in accesses(nest):
            terms = dict(linear.terms)
            if terms.get(lane, 0) in (0, 1) or is_wide(tensor.numel):
                continue
            row = next((d for d in nest.row_order if terms.get(d) == 1 and sizes[d] >= 8), None)
            if row is not None and sizes[lane] >= 8:
                across = row
        if across is None or any(across in small for small in nest.small):
            return False
        nest.row_order = (*(d for d in nest.row_order if d != across), across)
        return numel(self.kernel, (*nest.row_order, lane)) >= 1024

    def row_lanes(self, nest: Nest, frame: Frame) -> bool:
        """Whether neighbours in memory lie along the rows only."""
        if not frame.rows or frame.row_count < 8:
            return False
        columns = rows = 0
        for tensor, linear, _ in accesses(nest):
            terms = dict(linear.terms)
            if frame.columns and terms.get(frame.columns[-1]) == 1 and self.kernel.loops[frame.columns[-1]] > 1:
                columns += tensor.numel
            elif terms.get(frame.rows[-1]) == 1:
                rows += tensor.numel
        if not frame.columns:
            return True
        if columns or (self.unit_extract(nest, frame.columns[-1]) and numel(self.kernel, frame.columns) > 16):
            return False
        return rows > 0

    def shared_rows(self, nest: Nest) -> list[Structured]:
        """Ops that write a row's value over an operand that all threads of the row read."""
        reads = {tensor for op in nest.ops for tensor, _ in reads_of(op)}
        over = {self.kernel.outs[r] for a, r in self.kernel.inplace if self.arguments[a] in reads}
        return [op for op in nest.ops if nest.is_row(op) and any(out.tensor in over for out in op.outs)]

    def crossing(self, work: Work) -> list[Structured]:
        """Those of them whose rows are dealt out over several blocks."""
        rows = frozenset(work.nest.row_order)
        one_block = work.shape.long or work.flat_total or work.column_tiles == 1
        return [op for op in self.shared_rows(work.nest) if not one_block or frozenset(op.loops) != rows]

    # --- launches ---

    def absorb(self, works: list[Work]) -> list[Work]:
        """Merging nests of sums that one block completes run at that block's end."""
        gone: set[int] = set()
        for work in works:
            nest = work.nest
            if not nest.totals or work.shape.parts > 1:
                continue
            merging = [w for w in works if set(w.nest.merges) & set(nest.totals)]
            apart = any(set(w.nest.merges) - set(nest.totals) for w in merging)
            scalars = any(not w.nest.column_order for w in merging) and not work.flat_total and work.column_tiles > 1
            others = {o for w in merging for o in self.before(works, w) if o is not work}
            if apart or scalars or others or (work.shape.long and any(t.keeps for t in nest.totals)):
                continue
            work.finishes = [w.nest for w in merging]
            gone |= {id(w) for w in merging}
        return [work for work in works if id(work) not in gone]

    def before(self, works: Sequence[Work], work: Work) -> list[Work]:
        """Nests that make something which a nest reads, or that read what it writes over."""
        read = {tensor for op in work.nest.ops for tensor, _ in reads_of(op)}
        made = {out.tensor for op in work.nest.ops for out in op.outs} | {t.out.tensor for t in work.nest.merges}
        over = {self.arguments[a] for a, r in self.kernel.inplace if self.kernel.outs[r] in made}

        def first(nest: Nest) -> bool:
            totals = {id(total.out) for total in nest.totals}
            outs = [out for op in nest.ops for out in op.outs if id(out) not in totals]
            outs += [total.out for total in nest.merges]
            return any(out.tensor in read for out in outs) or any(t in over for op in nest.ops for t, _ in reads_of(op))

        return [w for w in works if w is not work and first(w.nest)]

    def store(self, works: list[Work]) -> None:
        """Workspace for locals that another nest reads, and for shares."""
        places = {tensor: number for number, tensor in enumerate(self.arguments)}
        home = {}
        for work in works:
            for nest in (work.nest, *work.finishes):
                for op in nest.ops:
                    for out in op.outs:
                        home[out.tensor] = work
        for work in works:
            for nest in (work.nest, *work.finishes):
                for total in nest.merges:
                    home[total.out.tensor] = work
        stored = set()
        for work in works:
            for nest in (work.nest, *work.finishes):
                stored |= {t for op in nest.ops for t, _ in reads_of(op) if t not in places and home[t] is not work}
            if not work.finishes:
                for total in work.nest.totals:
                    assert total.partial is not None
                    self.slot(total.partial)
        for tensor in stored:
            self.slot(tensor)
        for work in works:
            work.stored = frozenset(stored)

    def slot(self, tensor: Tensor) -> None:
        if tensor not in self.slots:
            self.slots[tensor] = self.bytes
            size = tensor.numel * max(BITS[memory_element(tensor.dtype)], 8) // 8
            self.bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def launch(self, number: int, works: list[Work]) -> Program:
        threads = max(work.shape.threads for work in works)
        blocks = sum(work.blocks for work in works)
        name = self.kernel.name
        shape = works[0].shape
        resident = 0  # blocks that an SM must hold at once; those that share sums are as many as all SMs together hold
        if len(works) == 1 and shape.ahead:
            resident = -(-shape.parts // self.target.sms)
        elif blocks <= self.target.sms:
            resident = 1  # there is never a second one: registers for all loads at once, rather than room beside it
        program = Program(f"{name}_{number}", len(self.arguments) + 2, (max(blocks, 1), 1, 1), threads, resident)
        places = {tensor: place for place, tensor in enumerate(self.arguments)}
        memory = Memory(program, places, self.slots, len(self.arguments))
        block = program.program_id(0)
        first = 0
        for work in works:
            emit = loops_long.emit if work.shape.long else loops_emit.emit
            if len(works) == 1:
                emit(work, memory, block if blocks > 1 else 0)
                break
            inside = program.compare("slt", block, first + work.blocks)
            if first:
                inside = program.binary("arith.andi", inside, program.compare("sge", block, first))
            with program.if_(inside):
                emit(work, memory, program.sub(block, first) if work.blocks > 1 else 0)
            first += work.blocks
        return program


def idle(shape: TileShape, frame: Frame) -> float:
    """Lanes of a tile that holds whole rows, over elements of a row; 1 where tiles are not that wide."""
    whole = shape.groups >= frame.group_count > 32 and not shape.long
    return shape.groups / frame.group_count if whole else 1.0


def turned_layout(work: Work) -> NestedLayout:
    """For the operands of a turned nest: neighbours along the rows."""
    shape, vector = work.shape, work.frame.vector
    side, groups, threads = shape.rows, shape.groups, shape.threads
    run = shape.row_run if shape.row_run > 1 else min(4, vector)
    lanes = min(32, side // run)
    rest = 32 // lanes  # lanes along the columns
    warps = threads // 32
    if rest * warps <= groups:
        return NestedLayout(
            (1, 1, warps, 1), (side // (run * lanes), 1, groups // (rest * warps), 1), (1, 1, 1, 1),
            (lanes, 1, rest, 1), (run, 1, 1, vector), (0, 0, 1, 0), (1, 0, lanes, 0),
        )  # fmt: skip
    over = rest * warps // groups  # of the vector dimension
    over = min(over, vector)
    across = groups // rest if groups >= rest else 1
    return NestedLayout(
        (1, 1, across, over), (side // (run * lanes), 1, groups // (rest * across) if groups >= rest else 1, 1),
        (1, 1, 1, 1), (lanes, 1, min(rest, groups), 1), (run, 1, 1, vector // over), (0, 0, over, 1), (1, 0, lanes, 0),
    )  # fmt: skip
