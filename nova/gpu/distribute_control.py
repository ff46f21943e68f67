"""Structure of a tile program: program ids, loops, conditions, barriers, buffers."""

from __future__ import annotations

from typing import Any

from nova.errors import CompileError
from nova.gpu.distribute import Distributor, Op, lowers
from nova.gpu.shared_arena import State
from nova.tile.text import Value


@lowers("nova_tile.program_id")
def program_id(it: Distributor, op: Op) -> None:
    axis = op["axis"]
    it.set(op.results[0], it.special(f"ctaid.{'xyz'[axis]}", it.grid[axis]))


@lowers("func.return")
def return_(it: Distributor, op: Op) -> None:
    if it.guarded:
        it.depth -= 1
        it.line("}")
    it.line("llvm.return")


@lowers("nova_tile.barrier")
def barrier(it: Distributor, op: Op) -> None:
    it.barrier()


@lowers("nova_tile.alloc_shared")
def alloc_shared(it: Distributor, op: Op) -> None:
    it.set(op.results[0], it.buffer(op))


def _yielded(it: Distributor, block: Any) -> list[Value]:
    """Lowers the body of a region; what its terminator yields."""
    *body, terminator = block.operations
    for _, op in it.in_order(body):
        it.lower(op)
    return [it.of(v) for v in terminator.operation.operands]


def _emit_yield(it: Distributor, values: list[Value], wanted: list[Value]) -> None:
    for have, want in zip(values, wanted, strict=True):
        if (have.type, have.layout) != (want.type, want.layout):
            raise CompileError(f"distribute: a region of {it.name} yields {have!r} where {want.type} is carried")
    if values:
        it.line(f"scf.yield {', '.join(v.name for v in values)} : {', '.join(v.type for v in values)}")


def _fresh_like(it: Distributor, values: list[Value]) -> list[Value]:
    return [Value(it.fresh(), v.element, v.shape, v.layout) for v in values]


def _words(it: Distributor, value: Value) -> Value:
    """A vector as a loop carries it: 16-bit elements in pairs, or each would take a register of its own."""
    if value.shape is None or value.element not in ("bf16", "f16") or value.shape[0] % 2:
        return value
    return it.bitcast(value, "i32")


def _tile(it: Distributor, carried: Value, tile: Value) -> Value:
    """What was carried, in the type and layout of `tile`."""
    if carried.element == tile.element:
        return carried
    found = it.bitcast(it.opaque(carried), tile.element)
    return Value(found.name, found.element, found.shape, tile.layout)


@lowers("scf.for")
def for_(it: Distributor, op: Op) -> None:
    """A loop that carries registers.

    Its first scratch waits for what threads may still read of the last iteration. What that is shows at the body's end,
    so an outermost loop where it mattered is written again, and kept if it then ends as was supposed.
    """
    if it.loops:
        _loop(it, op, None)
        return
    before = it.checkpoint()
    reading = _loop(it, op, None)
    if reading is None:
        return
    it.roll_back(before)
    again = _loop(it, op, reading)
    if again is None or not again.within(reading):
        it.roll_back(before)
        _loop(it, op, None)


def _loop(it: Distributor, op: Op, reading: State | None) -> State | None:
    """Writes the loop. Returns what threads may be reading at the end of its body, if they waited at its top."""
    low, high, step, *tiles = [it.of(v) for v in op.operands]
    inits = [_words(it, v) for v in tiles]
    block = op.operation.regions[0].blocks[0]
    results, carried = _fresh_like(it, inits), _fresh_like(it, inits)
    counter = Value(it.fresh("i"), low.element)

    left = f"{', '.join(r.name for r in results)} = " if results else ""
    pairs = ", ".join(f"{c.name} = {i.name}" for c, i in zip(carried, inits, strict=True))
    passed = f" iter_args({pairs}) -> ({', '.join(v.type for v in inits)})" if pairs else ""
    it.line(f"{left}scf.for {counter.name} = {low.name} to {high.name} step {step.name}{passed} : {low.element} {{")
    it.loops += 1
    blind = it.arena.blind
    with it.arena.repeated(reading), it.region():
        inside = [_tile(it, v, tile) for v, tile in zip(carried, tiles, strict=True)]
        it.known.update(zip(block.arguments, [counter, *inside], strict=True))
        _emit_yield(it, [_words(it, v) for v in _yielded(it, block)], inits)
        ends = it.arena.state()
    it.loops -= 1
    it.line("}")
    after = [_tile(it, v, tile) for v, tile in zip(results, tiles, strict=True)]
    it.known.update(zip(op.results, after, strict=True))
    waited = it.arena.blind > blind or reading is not None
    return ends if waited and not ends.everything else None


@lowers("scf.if")
def if_(it: Distributor, op: Op) -> None:
    """A condition that is the same for all threads of the block, so that barriers may stand inside."""
    regions = [region for region in op.operation.regions if len(region.blocks)]
    condition = it.scalar_of(op.operands[0])
    header = len(it.lines)  # the types follow from what the first region yields
    it.line("")
    results: list[Value] = []
    before, after = it.arena.state(), []
    for number, region in enumerate(regions):
        if number:
            it.line("} else {")
        it.arena.restore(before)
        with it.region():
            values = _yielded(it, region.blocks[0])
            results = _fresh_like(it, values) if number == 0 else results
            _emit_yield(it, values, results)
        after.append(it.arena.state())
    it.line("}")
    it.arena.restore(*after, *([] if len(regions) == 2 else [before]))
    left = f"{', '.join(r.name for r in results)} = " if results else ""
    types = f" -> ({', '.join(r.type for r in results)})" if results else ""
    it.lines[header] = "  " * it.depth + f"{left}scf.if {condition.name}{types} {{"
    it.known.update(zip(op.results, results, strict=True))
