"""Writes tile programs: one method an op, arithmetic on tiles, loops.

    program = Program("softmax_0", arguments=2, grid=(4096, 1, 1), threads=128)
    row = program.program_id(0)
    x = program.load(program.args[0], program.mul(row, 768), [0], "f32", layout, strides=[1], extents=[768], vector=4)
    top = program.reduce(x, [0], "maximumf")                      # a scalar: every dimension is reduced
    e = program.unary("math.exp", program.binary("arith.subf", x, top))
    program.store(e, program.args[1], ...)
    text = module_text([program])

Operands of elementwise ops may be tiles and scalars; scalars are splat. Layouts of tiles must agree: `to_layout` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nova.errors import CompileError
from nova.tile.layout import NestedLayout
from nova.tile.text import BITS, FLOATS, Emitter, Operand, Value, number_text

POINTER = "!llvm.ptr<1>"
MOST_BLOCKS = (1 << 31) - 1
_CONVERT = {"arith.extf", "arith.truncf", "arith.sitofp", "arith.uitofp", "arith.fptosi", "arith.fptoui", "arith.extsi",
            "arith.extui", "arith.trunci", "arith.bitcast", "arith.index_cast"}  # fmt: skip


def _ints(values: Sequence[int]) -> str:
    return f"array<i64{': ' if values else ''}{', '.join(map(str, values))}>"


class Program(Emitter):
    """One launch: a function of the kernel's pointers, run by a grid of blocks of `threads` threads."""

    def __init__(
        self, name: str, arguments: int, grid: tuple[int, int, int], threads: int, min_blocks: int = 0
    ) -> None:
        super().__init__()
        if grid[0] > MOST_BLOCKS:
            raise CompileError(f"{name}: {grid[0]:,} blocks are more than a launch may have")
        self.name, self.grid, self.threads, self.min_blocks = name, grid, threads, min_blocks
        self.args = [Value(f"%arg{i}", POINTER) for i in range(arguments)]

    # --- elementwise ---

    def binary(self, name: str, a: Operand, b: Operand, attrs: str = "") -> Value:
        """arith or math op of two operands of one type, e.g. "arith.addf"; Python numbers and scalars are splat."""
        element = a.element if isinstance(a, Value) else b.element if isinstance(b, Value) else ""
        x, y = self._alike([self.scalar(a, element), self.scalar(b, element)])
        return self._result(name, [x, y], element, attrs)

    def unary(self, name: str, a: Value, element: str | None = None, attrs: str = "") -> Value:
        """Also conversions: `element` is the result's."""
        return self._result(name, [a], element or a.element, attrs)

    def convert(self, a: Value, element: str, signed: bool = True) -> Value:
        """Between number types as `arith` spells it; the value itself if nothing changes."""
        if a.element == element:
            return a
        up = BITS[element] > BITS[a.element]
        if a.element in FLOATS and element in FLOATS:
            if BITS[element] == BITS[a.element]:  # bf16 and f16 meet in f32
                return self.convert(self.convert(a, "f32"), element)
            return self.unary("arith.extf" if up else "arith.truncf", a, element)
        if a.element in FLOATS:
            return self.unary("arith.fptosi" if signed else "arith.fptoui", a, element)
        if element in FLOATS:
            return self.unary("arith.uitofp" if a.element == "i1" or not signed else "arith.sitofp", a, element)
        extend = "arith.extui" if a.element == "i1" or not signed else "arith.extsi"
        return self.unary(extend if up else "arith.trunci", a, element)

    def cmp(self, predicate: str, a: Operand, b: Operand) -> Value:
        """arith.cmpf or cmpi by type; the predicate as in MLIR ("olt", "slt", ..)."""
        element = a.element if isinstance(a, Value) else b.element if isinstance(b, Value) else "i32"
        x, y = self._alike([self.scalar(a, element), self.scalar(b, element)])
        result = Value(self.fresh(), "i1", x.shape, x.layout or y.layout)
        name = "arith.cmpf" if element in FLOATS else "arith.cmpi"
        self.line(f"{result.name} = {name} {predicate}, {x.name}, {y.name} : {x.type}")
        return result

    def select(self, condition: Value, a: Operand, b: Operand) -> Value:
        element = a.element if isinstance(a, Value) else b.element if isinstance(b, Value) else "f32"
        x, y = self.scalar(a, element), self.scalar(b, element)
        if condition.is_tile or x.is_tile or y.is_tile:
            c, x, y = self._alike([condition, x, y])
        else:
            c = condition
        return self._result("arith.select", [c, x, y], element, "")

    def fma(self, a: Operand, b: Operand, c: Operand) -> Value:
        element = next(v.element for v in (a, b, c) if isinstance(v, Value))
        values = self._alike([self.scalar(v, element) for v in (a, b, c)])
        return self._result("math.fma", values, element, "")

    def splat(self, value: Operand, shape: tuple[int, ...], element: str = "f32", layout: Any = None) -> Value:
        """A tile whose elements are all `value`. With a layout it may be carried by a loop."""
        scalar = self.scalar(value, element)
        if layout is not None:
            return self.op("nova_tile.splat", [scalar], scalar.element, shape, f"layout = {layout.text()}", layout)
        result = Value(self.fresh(), scalar.element, shape)
        self.line(f"{result.name} = vector.broadcast {scalar.name} : {scalar.element} to {result.type}")
        return result

    def _alike(self, values: list[Value]) -> list[Value]:
        tiles = [v for v in values if v.is_tile]
        if not tiles:
            return values
        layouts = {v.layout for v in tiles if v.layout is not None}
        if len(layouts) > 1 or len({v.shape for v in tiles}) > 1:
            raise ValueError(f"tiles of different shapes or layouts meet: {', '.join(map(repr, tiles))} with {layouts}")
        shape = tiles[0].shape
        assert shape is not None
        return [v if v.is_tile else self.splat(v, shape, v.element) for v in values]

    def _result(self, name: str, operands: list[Value], element: str, attrs: str) -> Value:
        shape = next((v.shape for v in operands if v.is_tile), None)
        layout = next((v.layout for v in operands if v.layout is not None), None)
        return self.op(name, operands, element, shape, attrs, layout)

    # --- memory ---

    def program_id(self, axis: int = 0) -> Value:
        return self.op("nova_tile.program_id", [], "i32", attrs=f"axis = {axis} : i64")

    def load(
        self, pointer: Value, base: Operand, offsets: Sequence[Operand], element: str, layout: NestedLayout, *,
        strides: Sequence[int], extents: Sequence[int] | None = None, vector: int = 1, fill: float | int = 0,
        wide: bool = False,
    ) -> Value:  # fmt: skip
        """See the dialect's `load`; the tile's shape is the layout's. `base`: uniform i32 or i64, in elements."""
        attrs = self._window(strides, extents, vector, wide) + f", fill = {number_text(fill, element)}"
        attrs += "" if element == "i1" else f" : {element}"
        attrs += f", layout = {layout.text()}"
        operands = [pointer, self.scalar(base, "i64"), *self._offsets(offsets)]
        return self.op("nova_tile.load", operands, element, layout.shape, attrs, layout)

    def store(
        self, tile: Value, pointer: Value, base: Operand, offsets: Sequence[Operand], *, strides: Sequence[int],
        extents: Sequence[int] | None = None, vector: int = 1, wide: bool = False, layout: NestedLayout | None = None,
    ) -> None:  # fmt: skip
        """`layout` is only needed for a splat tile."""
        layout = self._layout_of(tile, layout)
        attrs = self._window(strides, extents, vector, wide) + f", layout = {layout.text()}"
        operands = [tile, pointer, self.scalar(base, "i64"), *self._offsets(offsets)]
        self.effect("nova_tile.store", operands, attrs)

    def gather(
        self, pointer: Value, index: Value, element: str, mask: Value | None = None, *, vector: int = 1,
        fill: float | int = 0, layout: NestedLayout | None = None,
    ) -> Value:  # fmt: skip
        layout = self._layout_of(index, layout)
        attrs = f"vector = {vector} : i64, fill = {number_text(fill, element)}"
        attrs += ("" if element == "i1" else f" : {element}") + f", layout = {layout.text()}"
        operands = [pointer, index, *([mask] if mask is not None else [])]
        return self.op("nova_tile.gather", operands, element, layout.shape, attrs, layout)

    def scatter(
        self, tile: Value, pointer: Value, index: Value, mask: Value | None = None, *, vector: int = 1,
        layout: NestedLayout | None = None,
    ) -> None:  # fmt: skip
        layout = self._layout_of(index if tile.layout is None else tile, layout)
        operands = [tile, pointer, index, *([mask] if mask is not None else [])]
        self.effect("nova_tile.scatter", operands, f"vector = {vector} : i64, layout = {layout.text()}")

    # --- scalars in memory, pointers ---

    def load_scalar(self, pointer: Value, index: Operand, element: str) -> Value:
        """pointer[index], the same in all threads."""
        return self.op("nova_tile.load_scalar", [pointer, self.scalar(index, "i64")], element)

    def store_scalar(self, value: Value, pointer: Value, index: Operand) -> None:
        """pointer[index] = value, by one thread."""
        self.effect("nova_tile.store_scalar", [value, pointer, self.scalar(index, "i64")])

    def load_pointer(self, table: Value, index: Operand) -> Value:
        """The pointer in word `index` of a table."""
        return self.op("nova_tile.load_pointer", [table, self.scalar(index, "i64")], POINTER)

    def advance(self, pointer: Value, offset: Operand, element: str) -> Value:
        """The pointer `offset` elements further."""
        attrs = f"bytes = {max(BITS[element], 8) // 8} : i64"
        return self.op("nova_tile.advance", [pointer, self.scalar(offset, "i64")], POINTER, attrs=attrs)

    def address(self, pointer: Value) -> Value:
        """The pointer as i64."""
        return self.op("nova_tile.address", [pointer], "i64")

    def _offsets(self, offsets: Sequence[Operand]) -> list[Value]:
        """All of one type: i64 if one of them is."""
        wide = any(isinstance(o, Value) and o.element == "i64" for o in offsets)
        return [self.scalar(self.cast(o, "i64") if wide else o, "i64" if wide else "i32") for o in offsets]

    @staticmethod
    def _window(strides: Sequence[int], extents: Sequence[int] | None, vector: int, wide: bool) -> str:
        extents = [-1] * len(strides) if extents is None else extents
        return (
            f"strides = {_ints(strides)}, extents = {_ints(extents)}, vector = {vector} : i64, "
            f"wide = {'true' if wide else 'false'}"
        )

    @staticmethod
    def _layout_of(tile: Value, layout: NestedLayout | None) -> NestedLayout:
        found = tile.layout if tile.layout is not None else layout
        if found is None:
            raise ValueError(f"{tile!r} has no layout of its own: say which")
        return found

    # --- tiles ---

    def iota(self, dim: int, layout: NestedLayout) -> Value:
        attrs = f"dim = {dim} : i64, layout = {layout.text()}"
        return self.op("nova_tile.iota", [], "i32", layout.shape, attrs, layout)

    def reduce(self, tile: Value, dims: Sequence[int], kind: str, layout: NestedLayout | None = None) -> Value:
        """kind: the suffix of an arith op ("addf", "maximumf", ..). A scalar if all dims are reduced."""
        layout = self._layout_of(tile, layout)
        left = layout.project(dims)
        attrs = f'dims = {_ints(dims)}, kind = "{kind}", layout = {layout.text()}'
        shape, of = (left.shape, left) if left.rank else (None, None)
        return self.op("nova_tile.reduce", [tile], tile.element, shape, attrs, of)

    def reduce_scatter(self, tile: Value, dims: Sequence[int], kind: str, layout: NestedLayout) -> Value:
        """The same, held in `layout` afterwards; at least one dimension is left."""
        source = self._layout_of(tile, None)
        attrs = f'dims = {_ints(dims)}, kind = "{kind}", source = {source.text()}, layout = {layout.text()}'
        return self.op("nova_tile.reduce_scatter", [tile], tile.element, layout.shape, attrs, layout)

    def expand(self, tile: Value, dims: Sequence[int], layout: NestedLayout) -> Value:
        """Repeats along new dimensions; `layout` is the result's and must agree with the tile's on the others."""
        if tile.layout is not None and layout.project(dims) != tile.layout:
            raise ValueError(f"expand to {layout.text()} of a tile held as {tile.layout.text()}")
        attrs = f"dims = {_ints(dims)}, layout = {layout.text()}"
        return self.op("nova_tile.expand", [tile], tile.element, layout.shape, attrs, layout)

    def to_layout(self, tile: Value, layout: NestedLayout) -> Value:
        if tile.layout in (None, layout):
            return Value(tile.name, tile.element, tile.shape, layout)
        attrs = f"source = {tile.layout.text()}, layout = {layout.text()}"
        return self.op("nova_tile.to_layout", [tile], tile.element, layout.shape, attrs, layout)

    def transpose(self, tile: Value, permutation: Sequence[int]) -> Value:
        layout = self._layout_of(tile, None).permute(permutation)
        attrs = f"permutation = {_ints(permutation)}"
        return self.op("nova_tile.transpose", [tile], tile.element, layout.shape, attrs, layout)

    def scan(self, tile: Value, dim: int, kind: str) -> Value:
        layout = self._layout_of(tile, None)
        attrs = f'dim = {dim} : i64, kind = "{kind}", layout = {layout.text()}'
        return self.op("nova_tile.scan", [tile], tile.element, tile.shape, attrs, layout)

    def check(self, bad: Value, value: Value, record: Value) -> None:
        """Flags an error in `record` (the kernel's last argument) where `bad`; `value` is i64, shaped like `bad`."""
        self.effect("nova_tile.check", [bad, value, record])

    def guard(self, record: Value) -> None:
        """From here on nothing is done if the step has flagged an error; `record` is the step's (its slot 0)."""
        self.effect("nova_tile.guard", [record])

    def guard_first(self) -> None:
        """Puts a guard before everything that the program does; its record is the last argument."""
        self.lines.insert(0, f"  {self.generic('nova_tile.guard', [self.args[-1]], '')} -> ()")

    # --- shared memory and tensor cores ---

    def alloc_shared(self, stages: int, rows: int, columns: int, element: str, swizzle: str = "xor") -> Value:
        result = Value(self.fresh("s"), f"memref<{stages}x{rows}x{columns}x{element}, 3>")
        self.line(f'{result.name} = "nova_tile.alloc_shared"() {{swizzle = "{swizzle}"}} : () -> {result.type}')
        return result

    def async_copy(
        self, pointer: Value, shared: Value, stage: Operand, base: Operand, offsets: Sequence[Operand], *,
        strides: Sequence[int], extents: Sequence[int] | None = None, vector: int = 1, wide: bool = False,
    ) -> None:  # fmt: skip
        operands = [pointer, shared, self.scalar(stage), self.scalar(base, "i64"), *self._offsets(offsets)]
        self.effect("nova_tile.async_copy", operands, self._window(strides, extents, vector, wide))

    def async_commit(self) -> None:
        self.effect("nova_tile.async_commit", [])

    def async_wait(self, pending: int) -> None:
        self.effect("nova_tile.async_wait", [], f"pending = {pending} : i64")

    def barrier(self) -> None:
        self.effect("nova_tile.barrier", [])

    def load_shared(
        self, shared: Value, stage: Operand, offsets: Sequence[Operand], element: str, layout: NestedLayout,
        transposed: bool = False,
    ) -> Value:  # fmt: skip
        attrs = f"transposed = {'true' if transposed else 'false'}, layout = {layout.text()}"
        operands = [shared, self.scalar(stage), *(self.scalar(o) for o in offsets)]
        return self.op("nova_tile.load_shared", operands, element, layout.shape, attrs, layout)

    def store_shared(
        self, tile: Value, shared: Value, stage: Operand, offsets: Sequence[Operand], transposed: bool = False,
        layout: NestedLayout | None = None,
    ) -> None:  # fmt: skip
        layout = self._layout_of(tile, layout)
        attrs = f"transposed = {'true' if transposed else 'false'}, layout = {layout.text()}"
        operands = [tile, shared, self.scalar(stage), *(self.scalar(o) for o in offsets)]
        self.effect("nova_tile.store_shared", operands, attrs)

    def mma(self, a: Value, b: Value, c: Value, intrinsic: str) -> Value:
        """c + a b; the layouts come from nova.tile.layout's mma_* constructors."""
        names = (("lhs", a), ("rhs", b), ("layout", c))
        layouts = ", ".join(f"{name} = {self._layout_of(value, None).text()}" for name, value in names)
        attrs = f'intrinsic = "{intrinsic}", {layouts}'
        return self.op("nova_tile.mma", [a, b, c], c.element, c.shape, attrs, c.layout)

    def round_tf32(self, tile: Value) -> Value:
        return self.op("nova_tile.round_tf32", [tile], tile.element, tile.shape, "", tile.layout)

    def text(self) -> str:
        arguments = ", ".join(f"{a.name}: {a.type}" for a in self.args)
        attrs = f"nova_tile.grid = {_ints(self.grid)}, nova_tile.threads = {self.threads} : i64"
        attrs += f", nova_tile.min_blocks = {self.min_blocks} : i64"
        return f"func.func @{self.name}({arguments}) attributes {{{attrs}}} {{\n{self.body()}\n  return\n}}"


def module_text(programs: Sequence[Program], workspace: int = 0) -> str:
    """The module of a kernel: its launches in order. `workspace`: bytes of scratch memory that they share."""
    functions = "\n".join(program.text() for program in programs)
    return f"module attributes {{nova_tile.workspace = {workspace} : i64}} {{\n{functions}\n}}\n"
