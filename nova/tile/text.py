"""Writes IR as text: names, constants, uniform arithmetic with folding, nested loops.

Building an operation through the bindings costs 24 us; printing it from here and parsing the text costs a third. Both
the tile programs (level 4) and the per-thread code (level 5) are written this way.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

FLOATS = frozenset({"f64", "f32", "bf16", "f16"})
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}


class Value:
    """An SSA value: a scalar (`shape` is None), or a vector of `shape`. `layout` is set on tiles that carry one."""

    __slots__ = ("element", "layout", "name", "shape")

    def __init__(self, name: str, element: str, shape: tuple[int, ...] | None = None, layout: Any = None):
        self.name, self.element, self.shape, self.layout = name, element, shape, layout

    @property
    def type(self) -> str:
        if self.shape is None:
            return self.element
        return f"vector<{'x'.join(map(str, self.shape))}x{self.element}>"

    @property
    def is_tile(self) -> bool:
        return self.shape is not None

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


Operand = Value | int | float


def number_text(number: float | int | bool, element: str) -> str:
    """The literal of a scalar type, without the type."""
    if element not in FLOATS:
        return ("true" if number else "false") if element == "i1" else str(int(number))
    value = float(number)
    if element == "f64":
        return f"{value:.17e}" if math.isfinite(value) else f"0x{struct.unpack('>Q', struct.pack('>d', value))[0]:016X}"
    if element == "f16":
        return f"0x{struct.unpack('>H', struct.pack('>e', value))[0]:04X}"
    try:
        bits = struct.unpack(">I", struct.pack(">f", value))[0]
    except OverflowError:
        bits = 0x7F800000 if value > 0 else 0xFF800000
    if element == "bf16":
        if math.isnan(value):
            return "0x7FC0"
        return f"0x{(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 & 0xFFFF:04X}"
    return f"0x{bits:08X}"


class Emitter:
    """One function's body. Constants go to its head, so that they dominate every use."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.head: list[str] = []
        self.constants: dict[tuple[str, str], Value] = {}
        self.count = 0
        self.depth = 1

    def fresh(self, hint: str = "") -> str:
        self.count += 1
        return f"%{hint or 'v'}{self.count}"

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def constant(self, number: float | int | bool, element: str) -> Value:
        """A scalar constant."""
        text = number_text(number, element)
        found = self.constants.get((text, element))
        if found is None:
            found = self.constants[text, element] = Value(f"%c{len(self.constants)}", element)
            suffix = "" if element == "i1" else f" : {element}"
            self.head.append(f"  {found.name} = arith.constant {text}{suffix}")
        return found

    def scalar(self, value: Operand, element: str = "i32") -> Value:
        return value if isinstance(value, Value) else self.constant(value, element)

    def op(
        self, name: str, operands: Sequence[Value], element: str, shape: tuple[int, ...] | None = None,
        attrs: str = "", layout: Any = None,
    ) -> Value:  # fmt: skip
        """An op with one result, in generic form."""
        result = Value(self.fresh(), element, shape, layout)
        self.line(f"{result.name} = {self.generic(name, operands, attrs)} -> {result.type}")
        return result

    def effect(self, name: str, operands: Sequence[Value], attrs: str = "") -> None:
        """An op without results, in generic form."""
        self.line(f"{self.generic(name, operands, attrs)} -> ()")

    @staticmethod
    def generic(name: str, operands: Sequence[Value], attrs: str) -> str:
        names, types = (", ".join(getattr(v, field) for v in operands) for field in ("name", "type"))
        return f'"{name}"({names}) {{{attrs}}} : ({types})'

    # --- uniform integer arithmetic: Python ints fold ---

    def _ints(self, a: Operand, b: Operand) -> tuple[Value, Value, str]:
        element = a.element if isinstance(a, Value) else b.element if isinstance(b, Value) else "i32"
        return self.scalar(a, element), self.scalar(b, element), element

    def int_op(self, name: str, a: Operand, b: Operand) -> Value:
        x, y, element = self._ints(a, b)
        result = Value(self.fresh(), element)
        self.line(f"{result.name} = arith.{name} {x.name}, {y.name} : {element}")
        return result

    def add(self, a: Operand, b: Operand) -> Operand:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0 and isinstance(a, int):
            return b
        return a if isinstance(b, int) and b == 0 else self.int_op("addi", a, b)

    def sub(self, a: Operand, b: Operand) -> Operand:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if isinstance(b, int) and b == 0 else self.int_op("subi", a, b)

    def mul(self, a: Operand, b: Operand) -> Operand:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        for x, y in ((a, b), (b, a)):
            if isinstance(x, int) and x in (0, 1):
                return y if x else 0
        return self.int_op("muli", a, b)

    def div(self, a: Operand, b: Operand) -> Operand:
        """Of non-negative integers."""
        if isinstance(a, int) and isinstance(b, int):
            return a // b
        return a if isinstance(b, int) and b == 1 else self.int_op("divui", a, b)

    def rem(self, a: Operand, b: Operand) -> Operand:
        if isinstance(a, int) and isinstance(b, int):
            return a % b
        return 0 if isinstance(b, int) and b == 1 else self.int_op("remui", a, b)

    def min(self, a: Operand, b: Operand) -> Operand:
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else self.int_op("minsi", a, b)

    def max(self, a: Operand, b: Operand) -> Operand:
        return max(a, b) if isinstance(a, int) and isinstance(b, int) else self.int_op("maxsi", a, b)

    def cdiv(self, a: Operand, b: int) -> Operand:
        return self.div(self.add(a, b - 1), b)

    def cast(self, value: Operand, element: str) -> Operand:
        """Of a uniform integer, sign-extending."""
        if not isinstance(value, Value) or value.element == element:
            return value
        name = "extsi" if BITS[element] > BITS[value.element] else "trunci"
        result = Value(self.fresh(), element)
        self.line(f"{result.name} = arith.{name} {value.name} : {value.element} to {element}")
        return result

    def compare(self, predicate: str, a: Operand, b: Operand) -> Value:
        """arith.cmpi of uniform integers; predicate as in MLIR: eq, slt, ..."""
        x, y, element = self._ints(a, b)
        result = Value(self.fresh(), "i1")
        self.line(f"{result.name} = arith.cmpi {predicate}, {x.name}, {y.name} : {element}")
        return result

    # --- control flow ---

    def for_(self, begin: Operand, end: Operand, step: Operand, inits: Sequence[Value] = ()) -> Loop:
        """`with e.for_(0, n, 1, [x]) as loop:` - i32 bounds, the same for all threads."""
        return Loop(self, begin, end, step, inits)

    @contextmanager
    def if_(self, condition: Value) -> Iterator[None]:
        """An scf.if without results."""
        self.line(f"scf.if {condition.name} {{")
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    def body(self) -> str:
        return "\n".join([*self.head, *self.lines])


class Loop:
    """An scf.for being written: `index`, `carried` inside; `yield_(values)` at its end; `results` afterwards."""

    def __init__(self, emitter: Emitter, begin: Operand, end: Operand, step: Operand, inits: Sequence[Value]):
        self.emitter, self.inits = emitter, list(inits)
        self.bounds = [emitter.scalar(bound) for bound in (begin, end, step)]
        self.index = Value(emitter.fresh("i"), "i32")
        self.carried = [Value(emitter.fresh(), v.element, v.shape, v.layout) for v in inits]
        self.results = [Value(emitter.fresh(), v.element, v.shape, v.layout) for v in inits]
        self.yielded: list[Value] = []

    def __enter__(self) -> Loop:
        e = self.emitter
        low, high, step = (bound.name for bound in self.bounds)
        # one op may define many values, but the group syntax %x:n would rename them; so each gets its own name
        left = f"{', '.join(r.name for r in self.results)} = " if self.results else ""
        pairs = ", ".join(f"{c.name} = {i.name}" for c, i in zip(self.carried, self.inits, strict=True))
        types = ", ".join(v.type for v in self.inits)
        carried = f" iter_args({pairs}) -> ({types})" if pairs else ""
        e.line(f"{left}scf.for {self.index.name} = {low} to {high} step {step}{carried} : i32 {{")
        e.depth += 1
        return self

    def yield_(self, values: Sequence[Value]) -> None:
        """The next iteration's carried values; a tile's layout must stay what it was."""
        for have, want in zip(values, self.inits, strict=True):
            if (have.type, have.layout) != (want.type, want.layout):
                raise ValueError(f"a loop carries {want.type} {want.layout}, but {have.type} {have.layout} is yielded")
        self.yielded = list(values)

    def __exit__(self, *error: object) -> None:
        e = self.emitter
        if error[0] is None:
            if len(self.yielded) != len(self.inits):
                raise ValueError(f"a loop carries {len(self.inits)} values, but {len(self.yielded)} are yielded")
            if self.yielded:
                names, types = (", ".join(getattr(v, f) for v in self.yielded) for f in ("name", "type"))
                e.line(f"scf.yield {names} : {types}")
        e.depth -= 1
        e.line("}")
