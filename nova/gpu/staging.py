"""stage and staged: a tile through shared memory by cp.async, each thread's values in places of its own.

    stage    cp.async [slot + tid * 8 + 0], [x], 8; cp.async [slot + tid * 8 + row], [x + 256], 8; ..   an access a row
    staged   ld.shared.v2.b32 [slot + tid * 8 + 0]; ..                             after cp.async.wait_group: no barrier

What is on its way takes no registers, so loads can run several tiles ahead of their use. Neighbouring threads have
neighbouring places, so nothing meets in a bank.
"""

from __future__ import annotations

from nova.gpu.async_copy import copy_vector, move_vector
from nova.gpu.distribute import Buffer, Distributor, Op, lowers
from nova.gpu.distribute_memory import Place, Window, load_places, run_dim, runs, window_places
from nova.gpu.exchange import ACCESS_BYTES
from nova.gpu.registers import element_bytes
from nova.tile.text import Operand, Value


def _own(it: Distributor, buffer: Buffer, stage: Operand, width: int) -> Value:
    """The thread's first place in a stage."""
    size = element_bytes(buffer.element)
    first = it.offset(buffer.pointer, it.mul(it.tid(), width * size))
    return it.offset(first, it.mul(stage, buffer.rows * buffer.columns * size))


@lowers("nova_tile.stage")
def stage(it: Distributor, op: Op) -> None:
    buffer = it.buffer_of(op.operands[1])
    pointer, _, slot, base, *offsets = op.operands
    window = Window(
        it.scalar_of(pointer), it.number_of(base), tuple(it.number_of(o) for o in offsets), op["strides"],
        op["extents"], op["vector"], op["wide"],
    )  # fmt: skip
    places, registers = window_places(it, window, op["layout"], buffer.element, None)
    width, size = registers.shape[1], element_bytes(buffer.element)
    own = _own(it, buffer, it.number_of(slot), width)
    copy = copy_vector if width * size >= 4 else move_vector
    for row, place in enumerate(places):
        source, target = it.offset(place.pointer, place.constant), it.offset(own, row * buffer.columns * size)
        copy(it, source, target, buffer, width, place.predicate)


@lowers("nova_tile.staged")
def staged(it: Distributor, op: Op) -> None:
    buffer, layout = it.buffer_of(op.operands[0]), op["layout"]
    size = element_bytes(buffer.element)
    width = min(op["vector"], ACCESS_BYTES // size)
    registers = runs(layout, run_dim(layout, op["strides"], width), width)
    own = _own(it, buffer, it.number_of(op.operands[1]), width)
    places = [Place(own, row * buffer.columns * size, None) for row in range(len(registers))]
    element = str(op.results[0].type.element_type)
    it.set(op.results[0], load_places(it, places, registers, element, None, layout))
