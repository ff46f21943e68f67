"""What tile programs need of a kernel whose body is one nova op (kinds scatter, scan)."""

from __future__ import annotations

from collections.abc import Sequence

from nova.lowering.whole_op import WholeOp
from nova.mlir import ir
from nova.tile.builder import Program
from nova.tile.expressions import memory_element
from nova.tile.text import BITS, FLOATS, Operand, Value


class Op:
    """The op, and the launches made for it so far."""

    def __init__(self, func_op: ir.OpView):
        self.whole = WholeOp.read(func_op)
        self.name = self.whole.name.removeprefix("nova.")
        self.function = self.whole.function
        self.launches: list[Program] = []
        self.bytes = 0

    def shape(self, operand: int) -> list[int]:
        return self.whole.shape(operand)

    def result_shape(self) -> list[int]:
        return self.whole.result_shape()

    def element(self, operand: int) -> str:
        """The type of an operand's elements in registers."""
        type_ = self.whole.types[self.whole.operands[operand]]
        return memory_element(str(ir.RankedTensorType(type_).element_type))

    def launch(self, name: str, blocks: int, threads: int, min_blocks: int = 0) -> Program:
        """One more launch. A grid of no blocks is not launched."""
        program = Program(
            f"{self.function}_{len(self.launches)}_{name}",
            len(self.whole.types) + 2,
            (blocks, 1, 1),
            threads,
            min_blocks,
        )
        self.launches.append(program)
        return program

    def operand(self, program: Program, number: int) -> Value:
        return program.args[self.whole.operands[number]]

    def result(self, program: Program) -> Value:
        return program.args[self.whole.results[0]]

    def record(self, program: Program) -> Value:
        return program.args[-1]

    def reserve(self, count: int, element_bytes: int = 4) -> int:
        """The offset of an array in the workspace."""
        offset = self.bytes
        self.bytes += -(-max(count, 1) * element_bytes // 256) * 256
        return offset

    def scratch(self, program: Program, offset: int) -> Value:
        workspace = program.args[-2]
        return program.advance(workspace, offset, "i8") if offset else workspace


def running_type(element: str) -> str:
    """The type in which long sums are kept: as PyTorch, f32 for 16-bit floats and f64 for f32."""
    return {"bf16": "f32", "f16": "f32", "f32": "f64"}.get(element, element)


def power_of_two(n: int) -> int:
    """The smallest that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()


def vector_of(element: str, *counts: int) -> int:
    """Elements of a 16-byte access, or fewer, so that it divides all `counts`."""
    vector = 128 // max(BITS[element], 8)
    while vector > 1 and any(count % vector for count in counts):
        vector //= 2
    return vector


def combination(name: str, element: str) -> str:
    """The arith op of a scatter's or scan's way to combine ("add", "mul", "amax", "amin")."""
    if element in FLOATS:
        return {"add": "arith.addf", "mul": "arith.mulf", "amax": "arith.maximumf", "amin": "arith.minimumf"}[name]
    if element == "i1":
        return {"add": "arith.ori", "mul": "arith.andi", "amax": "arith.ori", "amin": "arith.andi"}[name]
    return {"add": "arith.addi", "mul": "arith.muli", "amax": "arith.maxsi", "amin": "arith.minsi"}[name]


def decode(p: Program, flat: Operand | Value, extents: Sequence[int]) -> list[Operand]:
    """Coordinates of a flat row-major position; a tile or a uniform scalar."""
    coordinates: list[Operand] = []
    for extent in reversed(extents[1:]):
        if extent == 1:
            coordinates.append(0)
        elif isinstance(flat, Value) and flat.is_tile:
            coordinates.append(p.binary("arith.remui", flat, extent))
            flat = p.binary("arith.divui", flat, extent)
        else:
            coordinates.append(p.rem(flat, extent))
            flat = p.div(flat, extent)
    return [flat, *reversed(coordinates)] if extents else []


def dot(p: Program, coordinates: Sequence[Operand], strides: Sequence[int], start: Operand = 0) -> Operand:
    """start + the sum of coordinate * stride, of tiles and scalars."""
    total = start
    for coordinate, stride in zip(coordinates, strides, strict=True):
        if stride == 0 or (isinstance(coordinate, int) and coordinate == 0):
            continue
        scaled = coordinate if stride == 1 else tile_op(p, "muli", coordinate, stride)
        total = tile_op(p, "addi", total, scaled)
    return total


def tile_op(p: Program, name: str, a: Operand, b: Operand) -> Operand:
    """arith.<name> of integers, tiles or uniform scalars; Python ints fold."""
    if isinstance(a, int) and a == 0 and name == "addi":
        return b
    if isinstance(b, int) and b == 0 and name == "addi":
        return a
    if any(isinstance(x, Value) and x.is_tile for x in (a, b)):
        return p.binary(f"arith.{name}", a, b)
    return {"addi": p.add, "muli": p.mul}[name](a, b)
