"""Where a block of a contraction stands, and addresses of everything that belongs to a place of the result.

A kernel's loops are, for a block: one coordinate each (batch and outer dimensions), or digits of the flat row or column
of a tile. An address is then base + row part + column part: a strided window of memory if both parts are arithmetic
progressions, else elements at computed places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from nova.fusion.access import Access
from nova.fusion.contraction_form import Contraction
from nova.fusion.contraction_tiles import Role, Tiling
from nova.fusion.kernel import Kernel, Linear
from nova.tile.builder import Program
from nova.tile.expressions import Domain, Part
from nova.tile.text import Operand


@dataclass(frozen=True)
class Plan:
    """What all programs of the kernel share."""

    form: Contraction
    kernel: Kernel
    tiling: Tiling

    @property
    def workspace(self) -> int:
        """The argument that scratch memory comes in; the error record follows."""
        return len(self.form.buffers)

    @property
    def arguments(self) -> int:
        return len(self.form.buffers) + 2


@dataclass
class Frame:
    """A block's coordinates: its outer dimensions, and the flat row and column that the tile begins at."""

    program: Program
    plan: Plan
    block: tuple[int, int]  # rows and columns of a whole block
    places: dict[int, Operand]  # outer dimension -> coordinate
    row: Operand
    column: Operand
    at_column: dict[object, Part] = field(default_factory=dict)  # parts that only depend on the column, by key

    def below(self, rows: int) -> Frame:
        """The same block, `rows` further down."""
        row = self.program.add(self.row, rows)
        return Frame(self.program, self.plan, self.block, self.places, row, self.column, self.at_column)

    @property
    def tile_number(self) -> Operand:
        """Which tile of N, for kernels that reduce over tiles."""
        return self.program.div(self.column, self.plan.form.tile)


def split(program: Program, flat: Operand, sizes: Sequence[int]) -> list[Operand]:
    """Digits of a uniform number, the first the most significant."""
    digits: list[Operand] = []
    for size in reversed(sizes[1:]):
        digits.append(program.rem(flat, size))
        flat = program.div(flat, size)
    return [flat, *reversed(digits)] if sizes else []


def base_of(frame: Frame, item: Linear) -> Operand:
    """The constant of an address and the contribution of the block's coordinates, in elements: i64."""
    program, form = frame.program, frame.plan.form
    total: Operand = item.const
    for loop, coefficient in item.terms:
        place = frame.tile_number if loop == form.tile_dim else frame.places.get(loop, 0)
        total = program.add(program.mul(program.cast(place, "i64"), coefficient), total)
    return total


def step_along(tiling: Tiling, role: Role, item: Linear) -> int | None:
    """Elements between neighbours along the role's flat index; None if it is no arithmetic progression."""
    coefficients = dict(item.terms)
    if not role.tile:
        return 0
    step = coefficients.get(role.tile[-1], 0)
    length = 1
    for dim in reversed(role.tile):
        if coefficients.get(dim, 0) != step * length:
            return None
        length *= tiling.sizes[dim]
    return step


def digits_of(domain: Domain, flat: Part, role: Role, sizes: Sequence[int]) -> dict[int, Part]:
    """The coordinate along each of the role's dimensions from its flat index."""
    program, found = domain.program, {}
    for place, dim in enumerate(reversed(role.tile)):
        last = place == len(role.tile) - 1
        size = sizes[dim]
        if isinstance(flat.value, int):
            found[dim] = Part(flat.value if last else flat.value % size, (), "i32")
            flat = Part(flat.value // size, (), "i32")
            continue
        found[dim] = flat if last else domain.apply(lambda x, n=size: program.binary("arith.remui", x, n), (flat,))
        if not last:
            flat = domain.apply(lambda x, n=size: program.binary("arith.divui", x, n), (flat,))
    return found


def vector_along(size: int, step: int, others: Sequence[int], limit: int) -> int:
    """Elements that one access may move along a run of `size` in steps of `step`; `others` move its start."""
    if step != 1:
        return 1
    width = limit
    while width > 1 and any(number % width for number in (size, *others)):
        width //= 2
    return width


def alignment(numbers: Sequence[int]) -> int:
    """The largest power of two that divides all of them (a large one if there are none)."""
    divisor = math.gcd(*numbers) if numbers else 0
    return divisor & -divisor if divisor else 1 << 20


def linear_of(access: Access) -> Linear:
    """An access of the form as a linear expression of loops."""
    return Linear.of(dict(enumerate(access.coefficients)), access.offset)


def uniform(value: Operand, element: str = "i32") -> Part:
    return Part(value, (), element)
