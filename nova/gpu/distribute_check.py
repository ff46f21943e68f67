"""Checks: the first bad value found goes to the kernel's error record, int64[2] of (flag, value)."""

from __future__ import annotations

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
        found = it.result(f"arith.select {flag.name}, {number.name}, {found.name} : i64", "i64")
    assert len(flags) == count_of(bad)
    _write(it, any_bad, found, record)


def _write(it: Distributor, bad: Value, value: Value, record: Value) -> None:
    """The value, then the flag."""
    for number, place in ((value, 8), (it.constant(1, "i64"), 0)):
        (words,) = it.words(it.from_elements([number]), 1)
        it.store_where(bad, words, record, place, "i64", 1)
