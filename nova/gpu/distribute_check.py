"""Checks: a bad value goes to the kernel's error record, int64[4] of (flag, value, address of the step's flag, 0).

    check    a thread with a bad element stores the value and the flag, and sets the step's flag
    guard    load the step's flag;  scf.if %is_clear { ...all that follows... }          one uniform branch a block

So kernels that write lifted state do nothing once a kernel before them has found an error.
"""

from __future__ import annotations

from nova.errors import CompileError
from nova.gpu.distribute import Distributor, Op, is_tile, lowers
from nova.gpu.registers import count_of
from nova.tile.text import Value


@lowers("nova_tile.check")
def check(it: Distributor, op: Op) -> None:
    """One predicated pair of stores a thread: its last bad element. Which thread's value remains does not matter."""
    bad, value = it.of(op.operands[0]), it.of(op.operands[1])
    record = it.scalar_of(op.operands[2])
    if is_tile(op.operands[0]):
        layout = bad.layout or value.layout
        if layout is not None:
            bad, value = (it.tile(v, layout) for v in op.operands[:2])
    if bad.shape is None:
        _write(it, bad, value, record)
        return
    flags, values = it.elements(bad), it.elements(value)
    any_bad, found = flags[0], values[0]
    for flag, number in zip(flags[1:], values[1:], strict=True):
        any_bad = it.result(f"arith.ori {any_bad.name}, {flag.name} : i1", "i1")
        found = it.select(flag, number, found)
    assert len(flags) == count_of(bad)
    _write(it, any_bad, found, record)


def _write(it: Distributor, bad: Value, value: Value, record: Value) -> None:
    """The value, then the flags."""
    one = it.constant(1, "i64")
    for number, place in ((value, 8), (one, 0)):
        _store_where(it, bad, number, record, place)
    (address,) = it.load_where(bad, record, 16, "i64", 1, 0)  # null where nothing is bad, or no step is behind it
    known = it.compare("ne", address, 0)
    pointer = it.result(f"llvm.inttoptr {address.name} : i64 to {record.element}", record.element)
    _store_where(it, known, one, pointer, 0)


def _store_where(it: Distributor, where: Value, number: Value, pointer: Value, place: int) -> None:
    (words,) = it.words(it.from_elements([number]), 1)
    it.store_where(where, words, pointer, place, "i64", 1)


@lowers("nova_tile.guard")
def guard(it: Distributor, op: Op) -> None:
    """Opens a region that `func.return` closes."""
    if it.guarded:
        raise CompileError(f"distribute: {it.name} has two guards")
    flag = it.load(it.scalar_of(op.operands[0]), "i64")
    is_clear = it.compare("eq", flag, 0)
    it.line(f"scf.if {is_clear.name} {{")
    it.guarded = True
    it.depth += 1
