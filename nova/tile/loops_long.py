"""Rows too long for registers: each pass over a row is a loop over pieces of its columns.

    softmax     pass 0     max and sum of exp(x - max) together     reads the row
                pass 1     y = exp(x - max) / sum                   reads it again, from the L2 cache if it is there

A value of a column is made again in each pass that needs it; what was stored is read back by the thread that stored it.

Sums of exp(x - m), where m is the maximum of the same x, need no pass of their own (`Online`): each thread keeps the
maximum so far and a sum relative to it, rescaled when the maximum grows; at the end the threads' sums are brought to
the row's maximum. The rule needs a maximum over X and a sum over W * exp(X - m) in which W does not depend on m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from nova.fusion.kernel import Expr, Index, Out, Structured, Tensor, rewrite, walk
from nova.lowering.constants import LOG2_E
from nova.tile.expressions import Domain, Part, memory_element
from nova.tile.loops_body import Body, combined, computed, constant_tile, finished, reduced, start_of
from nova.tile.loops_emit import Accumulators, Work, make_body, store_totals
from nova.tile.loops_plan import Key, Nest
from nova.tile.loops_space import ROW, UNROLL, VECTOR, Memory, decode
from nova.tile.text import Operand, Value
from nova.tile.widths import check_numbers


@dataclass
class Pass:
    """What one walk over the columns does; `rows` are the row-wise ops in front of it."""

    rows: list[Structured] = field(default_factory=list)
    reductions: list[Structured] = field(default_factory=list)
    stores: list[Structured] = field(default_factory=list)


@dataclass(frozen=True)
class Online:
    """sum of weight * exp(value - top) in the pass that finds `top`, the maximum of `value`."""

    out: Out
    top: Out
    weight: Expr | None


def emit(work: Work, memory: Memory, block: Operand) -> None:
    """The code of one block: one tile of rows, or the part of them whose totals it makes."""
    program = memory.program
    row = _LongRow(work, memory)
    down = work.row_tiles
    if not work.nest.totals:
        fixed = decode(program, program.div(block, down), work.fixed, work.kernel.loops) if work.fixed else {}
        row.emit(program.rem(block, down) if down > 1 else 0, fixed)
        return
    parts = work.shape.parts
    probe = row.whole(0, {})
    accumulators = Accumulators(work, work.nest.totals, probe)
    with program.for_(block, down, parts, accumulators.start) as loop:
        body = row.emit(loop.index, {})
        loop.yield_(accumulators.add(body, loop.carried))
    last = row.whole(0, {})
    store_totals(work, last, accumulators.finish(last, loop.results), block)


class _LongRow:
    """One tile of rows."""

    def __init__(self, work: Work, memory: Memory):
        self.work, self.memory, self.program = work, memory, memory.program
        self.nest = work.nest
        self.passes, self.tail_rows = plan_passes(self.nest, find_online(self.nest))
        self.online = {id(online.out): online for online in find_online(self.nest)}

    def whole(self, row: Operand, fixed: dict[int, Operand]) -> Body:
        """A tile for what there is one of a row."""
        return make_body(self.work, self.memory, self.work.layout(1, 1), fixed, row, 0)

    def emit(self, row: Operand, fixed: dict[int, Operand]) -> Body:
        known: dict[Key, Part] = {}
        body = self.whole(row, fixed)
        body.values = known
        for step in self.passes:
            for op in step.rows:
                body.elementwise(op)
            self.walk(step, row, fixed, known)
            for op in step.reductions:
                for out in op.outs:
                    body.keep(op, out.tensor, out.index)
                body.checks(op)
        for op in self.tail_rows:
            body.elementwise(op)
        if self.work.barrier:
            self.program.barrier()
        body.flush()
        return body

    # --- one pass ---

    def walk(self, step: Pass, row: Operand, fixed: dict[int, Operand], known: dict[Key, Part]) -> None:
        """All columns once: pieces of many vectors a thread in a loop, what is left of them, and a ragged last one.

        All leave the same state with each thread, so that the threads come together once.
        """
        groups, across, unroll = (
            self.work.frame.group_count,
            self.work.shape.column_threads,
            self.work.shape.column_batch,
        )
        size = across * unroll
        whole = groups // size * size
        left = (groups - whole) // across
        program, states = self.program, _States(step, self.online)
        check_numbers("vectors of a row", groups)

        def body(start: Operand, unrolled: int, ragged: bool) -> Body:
            layout = self.work.layout(unrolled, 1)
            made = make_body(self.work, self.memory, layout, fixed, row, 0, group0=start, ragged=ragged)
            made.values = dict(known)
            made.later = self.remade(step)
            return made

        def run(piece: Body, carried: Sequence[Value]) -> list[Value]:
            following = states.add(piece, carried)
            self.stores(piece, step)
            return following

        first = body(0, 1, False)
        carried = states.start(first)
        if whole == size:
            carried = run(body(0, unroll, False), carried)
        elif whole:
            with program.for_(0, whole, size, carried) as loop:
                loop.yield_(run(body(loop.index, unroll, False), loop.carried))
            carried = loop.results
        if left:
            carried = run(body(whole, left, False), carried)
        if groups % across:
            carried = run(body(whole + left * across, 1, True), carried)
        known.update(states.values(first, states.finish(first, carried)))

    def remade(self, step: Pass) -> dict[Key, Structured]:
        """Column values that a pass makes for itself: locals, and what it stores."""
        found = {}
        for op in self.nest.ops:
            if op.reduced or self.nest.is_row(op):
                continue
            for out in op.outs:
                if out.tensor.kind == "local" or op in step.stores:
                    found[out.tensor, out.index] = op
        return found

    def stores(self, body: Body, step: Pass) -> None:
        for op in step.stores:
            body.elementwise(op)
        body.flush()


# --- passes -----------------------------------------------------------------------------------------------------------


def passes(nest: Nest) -> int:
    """Walks over a row."""
    return len(plan_passes(nest, find_online(nest))[0])


def plan_passes(nest: Nest, online: Sequence[Online]) -> tuple[list[Pass], list[Structured]]:
    """The passes, and the row-wise ops after the last one."""
    made = nest.keys()
    totals = {total.op for total in nest.totals}
    joined = {id(o.out): o for o in online}
    position: dict[Structured, int] = {}
    for op in nest.ops:
        sources = [made[key] for key in op.loads() if key in made and made[key] is not op]
        tops = [joined[id(out)].top for out in op.outs if id(out) in joined]
        if tops:  # with its maximum
            position[op] = max(position[made[top.tensor, top.index]] for top in tops)
        else:
            position[op] = max((position[source] + bool(source.reduced) for source in sources), default=0)
    _keep_readers_first(nest, position, {op for op in nest.ops if any(id(out) in joined for out in op.outs)})
    count = max((p + 1 for op, p in position.items() if op not in totals and not nest.is_row(op)), default=0)
    passes = [Pass() for _ in range(count)]
    tail: list[Structured] = []
    for op in nest.ops:
        place = position[op]
        if op in totals:
            continue
        if nest.is_row(op):
            (passes[place].rows if place < count else tail).append(op)
        elif op.reduced:
            passes[place].reductions.append(op)
        elif any(out.tensor.kind != "local" for out in op.outs) or op.checks:
            passes[place].stores.append(op)
    return [p for p in passes if p.rows or p.reductions or p.stores], tail


def _keep_readers_first(nest: Nest, position: dict[Structured, int], online: set[Structured]) -> None:
    """An op that stores comes no earlier than ops in front of it that read arguments: they may share a buffer."""
    seen = 0
    for op in nest.ops:
        if any(out.tensor.kind == "out" for out in op.outs) and not op.reduced and not nest.is_row(op):
            position[op] = max(position[op], seen)
        if not nest.is_row(op) and any(tensor.kind == "arg" for tensor, _ in op.loads()):
            seen = max(seen, position[op])
    for op in nest.ops:  # users of a store that moved
        for key in op.loads():
            source = nest.keys().get(key)
            if source is not None and source is not op and not source.reduced and op not in online:
                position[op] = max(position[op], position[source])


def inlined(nest: Nest, root: Expr) -> Expr:
    """An expression with the column values it loads written out."""
    made = {key: op for key, op in nest.keys().items() if not op.reduced and not nest.is_row(op)}

    def change(node: Expr) -> Expr | None:
        if node.op != "load" or node.attr not in made:
            return None
        out = next(o for o in made[node.attr].outs if (o.tensor, o.index) == node.attr)
        return inlined(nest, out.value)

    return rewrite(root, change)


def find_online(nest: Nest) -> list[Online]:
    """Sums that the pass of their maximum may take along."""
    totals = {total.op for total in nest.totals}
    tops = {
        (out.tensor, out.index): out for op in nest.ops if op.reduced and op not in totals
        for out in op.outs if out.combine == "arith.maximumf" and out.tensor.dtype in ("f32", "f64")
    }  # fmt: skip
    found = []
    for op in nest.ops:
        if not op.reduced or op in totals:
            continue
        parts = [part for out in op.outs if (part := _online(nest, out, tops)) is not None]
        if len(parts) == len(op.outs) and len({id(part.top) for part in parts}) == 1:
            found += parts
    return found


def _online(nest: Nest, out: Out, tops: dict[Key, Out]) -> Online | None:
    if out.combine != "arith.addf":
        return None
    value = inlined(nest, out.value)
    reduced_keys = {key for key, op in nest.keys().items() if op.reduced or nest.is_row(op)}
    factors = list(value.args) if value.op == "arith.mulf" else [value]
    for place, factor in enumerate(factors):
        if factor.op != "math.exp" or factor.args[0].op != "arith.subf":
            continue
        x, m = factor.args[0].args
        if m.op != "load" or m.attr not in tops or inlined(nest, tops[m.attr].value) is not x:
            continue
        rest = factors[1 - place] if len(factors) == 2 else None
        if rest is not None and any(n.op == "load" and n.attr in reduced_keys for n in walk([rest])):
            continue
        return Online(out, tops[m.attr], rest)
    return None


# --- accumulators of a pass -------------------------------------------------------------------------------------------


class _States:
    """What a pass's reductions carry: a value a thread and row, or a sum relative to a maximum that moves."""

    def __init__(self, step: Pass, online: dict[int, Online]):
        self.outs = [out for op in step.reductions for out in op.outs]
        self.online = online
        self.slots = {id(out): number for number, out in enumerate(self.outs)}

    @staticmethod
    def dims(domain: Domain) -> tuple[int, ...]:
        return tuple(d for d in domain.every if d not in (UNROLL, VECTOR))

    @staticmethod
    def element(out: Out) -> str:
        return computed(memory_element(out.value.type))

    def start(self, body: Body) -> list[Value]:
        return [
            constant_tile(
                body.program, body.domain, start_of(str(out.combine), memory_element(out.value.type)),
                self.element(out), self.dims(body.domain),
            )
            for out in self.outs
        ]  # fmt: skip

    def add(self, body: Body, carried: Sequence[Value]) -> list[Value]:
        """The states after a piece."""
        domain, dims = body.domain, self.dims(body.domain)
        old = [Part(v, dims, self.element(out)) for v, out in zip(carried, self.outs, strict=True)]
        new: dict[int, Part] = {}
        for number, out in enumerate(self.outs):
            if id(out) not in self.online:
                (part,) = body.evaluator.emit([out.value])
                new[number] = combined(domain, str(out.combine), old[number], self.within(body, part, str(out.combine)))
        for number, out in enumerate(self.outs):
            if id(out) in self.online:
                new[number] = self.relative(body, self.online[id(out)], old, new, number)
        return [domain.whole(new[number], dims) for number in range(len(self.outs))]

    def within(self, body: Body, part: Part, combine: str) -> Part:
        """A thread's own values combined."""
        masked = body.masked(part, combine, body.column_dims())
        own = tuple(d for d in (UNROLL, VECTOR) if d in body.domain.every)
        if self.dims(body.domain) != tuple(d for d in masked.dims if d not in own):
            masked = Part(body.domain.whole(masked), body.domain.every, masked.element)
        return reduced(body.domain, masked, own, combine)

    def relative(self, body: Body, online: Online, old: list[Part], new: dict[int, Part], number: int) -> Part:
        domain, program = body.domain, body.program
        top = self.slots[id(online.top)]
        safe = _finite(domain, new[top])
        (x,) = body.evaluator.emit([online.top.value])
        value = _exp_of_difference(domain, domain.convert(x, safe.element), safe)
        if online.weight is not None:
            (weight,) = body.evaluator.emit([online.weight])
            value = domain.apply(lambda a, b: program.binary("arith.mulf", a, b), (value, weight))
        scale = _exp_of_difference(domain, old[top], safe)
        kept = domain.apply(lambda a, b: program.binary("arith.mulf", a, b), (old[number], scale))
        return combined(domain, "arith.addf", kept, self.within(body, value, "arith.addf"))

    def finish(self, body: Body, carried: Sequence[Value]) -> list[Part]:
        """Combined over the threads of a row."""
        domain, dims = body.domain, self.dims(body.domain)
        gone = tuple(d for d in dims if d != ROW)
        parts = [Part(v, dims, self.element(out)) for v, out in zip(carried, self.outs, strict=True)]
        done: dict[int, Part] = {}
        for number, out in enumerate(self.outs):
            if id(out) not in self.online:
                done[number] = reduced(domain, parts[number], gone, str(out.combine))
        for number, out in enumerate(self.outs):
            if id(out) in self.online:
                top = self.slots[id(self.online[id(out)].top)]
                moved = self.moved(domain, parts[number], parts[top], done[top])
                done[number] = reduced(domain, moved, gone, "arith.addf")
        return [done[number] for number in range(len(self.outs))]

    @staticmethod
    def moved(domain: Domain, total: Part, own: Part, top: Part) -> Part:
        """A sum relative to `own`, relative to `top`: sums of threads that saw nothing are zero."""
        scale = _exp_of_difference(domain, own, top)
        return domain.apply(lambda a, b: domain.program.binary("arith.mulf", a, b), (total, scale))

    def values(self, body: Body, results: Sequence[Part]) -> dict[tuple[Tensor, Index], Part]:
        found = {}
        for out, part in zip(self.outs, results, strict=True):
            element = memory_element(out.tensor.dtype)
            found[out.tensor, out.index] = finished(body.domain, part, str(out.combine), out.init, element)
        return found


def _finite(domain: Domain, top: Part) -> Part:
    """A maximum to subtract: 0 in place of minus infinity, so that exp(-inf - top) is 0 and not NaN."""

    def make(x: Value) -> Value:
        program = domain.program
        return program.select(program.cmp("oeq", x, -math.inf), program.constant(0.0, x.element), x)

    return domain.apply(make, (top,))


def _exp_of_difference(domain: Domain, a: Part, b: Part) -> Part:
    """exp(a - b) for a <= b, as a part of a sum in which the largest is 1.

    In float32 by one exp2: its relative error is about |b - a| 2^-24, and its weight in the sum falls faster.
    """
    program = domain.program
    difference = domain.apply(lambda x, y: program.binary("arith.subf", x, y), (a, b))
    if difference.element != "f32":
        return domain.apply(lambda x: program.unary("math.exp", x), (difference,))

    def make(x: Value) -> Value:
        scaled = program.binary("arith.mulf", x, LOG2_E)
        return program.unary("math.exp2", scaled, attrs="fastmath = #arith.fastmath<afn>")

    return domain.apply(make, (difference,))
