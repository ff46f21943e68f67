"""Epilogues with reductions over N tiles: the loss head's row maximum and sum of exponentials, a tile at a time.

    %mx = linalg.generic (m, n) -> (m, n floordiv 512)  maximum(acc)            partial row maxima
    %sm = linalg.generic (m, n) -> (m, n floordiv 512)  sum(exp(acc - mx))      partial sums, each with its own maximum

The nest leaves the sums of one N tile of a few rows in scratch that fits L2. Then each row goes through stages: a stage
walks the tile's columns once, carries its reductions in vectors, and stores what can be stored; reductions that need
another's result come a stage later. Lanes are combined in a fixed order at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nova.cpu import body, build, ints
from nova.cpu.contraction_epilogue import Anchor, Frame, Segment
from nova.cpu.ints import Int
from nova.errors import CompileError
from nova.fusion.access import Access
from nova.fusion.contraction_form import Contraction, Generic
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir

COMBINERS: dict[str, Callable[[Value, Value], Value]] = {
    "arith.addf": ln.addf,
    "arith.mulf": ln.mulf,
    "arith.maximumf": ln.maximum,
    "arith.minimumf": ln.minimum,
    "arith.maxnumf": ln.maximum_number,
    "arith.minnumf": ln.minimum_number,
}


@dataclass(frozen=True)
class Stage:
    """One walk over a tile's columns."""

    reductions: list[Generic]
    stores: list[tuple[Value, Access]]


def stages(c: Contraction) -> list[Stage]:
    """What each walk does: a value belongs to the stage after the last tile reduction it depends on."""
    generics = list({id(g): g for g, _ in c.generics.values()}.values())
    levels: dict[int, int] = {}

    def level(generic: Generic) -> int:
        """Walks that must be over before this one is computed (a tile reduction: finished)."""
        if id(generic) not in levels:
            producers = [c.generics[v][0] for v in generic.operands if v in c.generics]
            levels[id(generic)] = max((level(p) for p in producers), default=0) + (1 if generic.tile else 0)
        return levels[id(generic)]

    last = max(level(g) for g in generics)
    found = []
    for number in range(last + 1):
        reductions = [g for g in generics if g.tile and level(g) == number + 1]
        stores = [o for o in c.outputs if not c.generics[o[0]][0].tile and level(c.generics[o[0]][0]) == number]
        if reductions or stores:
            found.append(Stage(reductions, stores))
    return found


def emit_row(frame: Frame, m: Int, n: Int, count: Int, load: Callable[[Int, int], Value], lanes: int) -> None:
    """All stages of row m on the tile's columns [n, n + count); `load(j, lanes)` gives their accumulators."""
    known: dict[int, list[Value]] = {}
    for stage in stages(frame.c):
        _emit_stage(stage, frame, m, n, count, load, lanes, known)
        for generic in stage.reductions:
            for number, value in enumerate(known[id(generic)]):
                for output, access in frame.c.outputs:
                    if frame.c.generics[output] == (generic, number):
                        Segment(Anchor(frame, m, n), 0, 0, 0).store(access, value)


def _emit_stage(
    stage: Stage,
    frame: Frame,
    m: Int,
    n: Int,
    count: Int,
    load: Callable[[Int, int], Value],
    lanes: int,
    known: dict[int, list[Value]],
) -> None:
    """One walk: whole vectors, then the columns left over, then the lanes of each reduction combined."""
    results = [(g, i) for g in stage.reductions for i in range(len(g.op.results))]

    def step(j: Int, carried: list[Value], width: int) -> list[Value]:
        segment = Segment(Anchor(frame, m, ints.add(n, j)), 0, 0, width, load(j, width))
        segment.computed.update(known)
        for value, access in stage.stores:
            segment.store(access, segment.value(value))
        carried = list(carried)
        after: list[Value] = []
        for generic in stage.reductions:
            arity = len(generic.op.results)
            after += [ln.splat(v, width) for v in segment.reduce(generic, carried[:arity])]
            carried = carried[arity:]
        return after

    def identity(generic: Generic, number: int, width: int) -> Value:
        start = body.Hooks().outer(_fill(frame.c, generic, number))
        return ln.splat(start, width)

    whole = ints.mul(ints.div(count, lanes), lanes)
    sums = _walk(0, whole, lanes, [identity(g, i, lanes) for g, i in results], lambda j, v: step(j, v, lanes))
    totals = [_across(value, _combiner(g, i), lanes) for value, (g, i) in zip(sums, results, strict=True)]
    if not (isinstance(count, int) and count == whole):
        # Single columns go on from the total of the vectors.
        totals = _walk(whole, count, 1, totals, lambda j, v: step(j, v, 0))
    for (generic, _), total in zip(results, totals, strict=True):
        known.setdefault(id(generic), []).append(total)


def _walk(
    begin: Int, end: Int, stride: int, carried: list[Value], step: Callable[[Value, list[Value]], list[Value]]
) -> list[Value]:
    return build.loop_carrying(ints.value(begin), ints.value(end), ints.value(stride), carried, step)


def _fill(c: Contraction, generic: Generic, number: int) -> Value:
    """The constant that a reduction starts from."""
    owner = generic.operands[generic.inputs + number].owner
    if isinstance(owner, ir.Block) or owner.name != "linalg.fill":
        raise CompileError(f"kernel @{c.name}: a reduction over tiles starts from a linalg.fill: {generic.op}")
    return owner.operands[0]


def _combiner(generic: Generic, number: int) -> Callable[[Value, Value], Value]:
    """How two partial results combine: the operation that takes the running value."""
    argument = generic.block.arguments[generic.inputs + number]
    users = [use.owner for use in argument.uses]
    name = users[0].operation.name if len(users) == 1 else ""
    if name not in COMBINERS:
        raise CompileError(f"a reduction over tiles combines by one of {', '.join(COMBINERS)}: {generic.op}")
    return COMBINERS[name]


def _across(value: Value, combine: Callable[[Value, Value], Value], lanes: int) -> Value:
    """Combines the lanes: halves of the vector, then quarters, ..."""
    width = lanes
    while width > 1:
        width //= 2
        low, high = (ln.shuffle(value, value, range(start, start + width)) for start in (0, width))
        value = combine(low, high)
    return ln.lane(value, 0)
