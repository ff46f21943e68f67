"""Kernels whose one op stays a `nova` op down to the code generator: scatters and scans.

@k(%base, %index, %src) { %0 = nova.scatter(..); return %0 }
  ->  @k(%base, %index, %src, %out {nova.out}) { %0 = nova.scatter(..); return %0 } attributes {nova.dims = [], ..}
"""

from __future__ import annotations

import re

from nova.fusion import records
from nova.fusion.records import Function, Value

KINDS = frozenset({"scatter", "scan"})


def inplace_pairs(function: Function) -> list[tuple[int, int]]:
    """The in-place pairs that the function carries."""
    text = function.attrs.get("nova.inplace", "[]")
    return [(int(a), int(b)) for a, b in re.findall(r"array<i64: (\d+), (\d+)>", text)]


def lower(function: Function, kind: str) -> str:
    """Adds the destinations; the op itself stays."""
    names: dict[Value, str] = {}
    for value in function.args:
        names[value] = f"%{len(names)}"
    lines = [records.op_text(op, names) for op in function.ops]
    returned = list(function.outputs)
    destinations = [Value(value.shape, value.dtype) for value in returned]
    for number, value in enumerate(destinations):
        names[value] = f"%out{number}"
    function.arg_attrs = [*(function.arg_attrs or ["{}"] * len(function.args)), *(["{nova.out}"] * len(destinations))]
    function.args = [*function.args, *destinations]
    return records.function_text(function, lines, names)
