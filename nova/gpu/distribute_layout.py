"""Ops that only rename registers, or move a tile to another layout.

What a register holds is a table [threads, registers] of element numbers, so each of these is the question which
register of the source holds the same element: `np.take` in the compiler, one `vector.shuffle` in the code. Where
another thread has it, the tile goes through shared memory, in the order that `nova.gpu.exchange` plans.
"""

from __future__ import annotations

import numpy as np

from nova.gpu import exchange
from nova.gpu.distribute import Distributor, Op, lowers
from nova.gpu.distribute_memory import Place, Window, load_places, run_dim, runs, store_places, window_places
from nova.gpu.exchange import Exchange
from nova.gpu.registers import element_bytes
from nova.tile.layout import NestedLayout, register_permutation
from nova.tile.text import Value


@lowers("nova_tile.iota")
def iota(it: Distributor, op: Op) -> None:
    layout, dim = op["layout"], op["dim"]
    steps = layout.register_part(dim)
    own = it.coordinate(layout, dim)
    numbers = it.table([int(s) for s in steps], "i32")
    if isinstance(own, int):
        it.set(op.results[0], Value(numbers.name, "i32", numbers.shape, layout))
        return
    start = it.broadcast(it.scalar(own), layout.registers)
    it.set(op.results[0], it.binary("arith.addi", start, numbers, layout))


@lowers("nova_tile.expand")
def expand(it: Distributor, op: Op) -> None:
    """Register r of the result is the one of the source with the same coordinates along the dims that were there."""
    layout, dims = op["layout"], op["dims"]
    if it.of(op.operands[0]).shape is None:
        it.set(op.results[0], it.of(op.operands[0]))
        return
    source = layout.project(dims)
    tile = it.tile(op.operands[0], source)
    sizes = list(layout.register_shape)
    kept = [d if axis % layout.rank not in dims else 1 for axis, d in enumerate(sizes)]
    registers = np.broadcast_to(np.arange(source.registers).reshape(kept), sizes).reshape(-1)
    if source.registers == 1 and layout.registers > 1:
        it.set(op.results[0], it.broadcast(it.extract(tile, 0), layout.registers, layout))
    else:
        it.set(op.results[0], it.take(tile, registers, layout))


@lowers("nova_tile.transpose")
def transpose(it: Distributor, op: Op) -> None:
    tile = it.of(op.operands[0])
    if tile.shape is None:
        it.set(op.results[0], tile)
        return
    source, permutation = tile.layout, op["permutation"]
    axes = [level * source.rank + p for level in range(3) for p in permutation]
    registers = np.arange(source.registers).reshape(source.register_shape).transpose(axes).reshape(-1)
    it.set(op.results[0], it.take(tile, registers, source.permute(permutation)))


@lowers("nova_tile.to_layout")
def to_layout(it: Distributor, op: Op) -> None:
    tile = it.of(op.operands[0])
    if tile.shape is None:
        it.set(op.results[0], tile)
        return
    source, target = op["source"], op["layout"]
    tile = it.tile(op.operands[0], source)
    registers = register_permutation(source, target, it.threads)
    if registers is not None:
        it.set(op.results[0], it.take(tile, registers, target))
    else:
        it.set(op.results[0], through_shared(it, tile, source, target))


def through_shared(it: Distributor, tile: Value, source: NestedLayout, target: NestedLayout) -> Value:
    """Every thread writes what it has and reads what it needs."""
    element, size = tile.element, element_bytes(tile.element)
    plan = exchange.plan(source, target, size, it.threads)
    with it.scratch(plan.size * size) as scratch:
        places, registers = exchange_places(it, plan, scratch, source, plan.written, element, it.first_copy(source))
        store_places(it, places, registers, tile)
        it.barrier(by_warp=plan.by_warp)
        places, registers = exchange_places(it, plan, scratch, target, plan.read, element, None)
        return load_places(it, places, registers, element, 0, target)


def exchange_places(
    it: Distributor, plan: Exchange, scratch: Value, layout: NestedLayout, width: int, element: str, own: Value | None
) -> tuple[list[Place], np.ndarray]:
    """The accesses of one side of an exchange; `own`: a condition."""
    zeros = (0,) * layout.rank
    if not plan.swizzle.bits:
        window = Window(scratch, 0, zeros, plan.strides, (-1,) * layout.rank, width, False)
        return window_places(it, window, layout, element, own)
    table = exchange.linear(plan.addresses(layout, it.threads) * element_bytes(element))
    assert table is not None, f"a swizzled exchange of {layout.text()} is not linear"
    registers = runs(layout, run_dim(layout, plan.strides, width), width)
    start = it.linear_sum(table.terms)
    pointers: dict[int, Value] = {}
    places = []
    for register in registers[:, 0]:
        constant = table.registers[register]
        mixed = constant & table.thread_bits  # bits that the thread's part may have as well
        if mixed not in pointers:
            own_bits = start if mixed == 0 else it.int_op("xori", start, mixed)
            pointers[mixed] = it.offset(scratch, own_bits)
        places.append(Place(pointers[mixed], constant ^ mixed, own))
    return places, registers
