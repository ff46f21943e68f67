"""Addresses in swizzled shared memory: once a thread, then constants.

    byte (row, column) of a stage = row * row_bytes + (column ^ key(row) * 16)

A thread's rows and columns are sums of digits of its lane and warp, a constant that belongs to the register, and maybe
a run-time offset. The key has a period of 8 rows, and the permutation stays within `group_bytes`: what is a multiple of
those is added afterwards, as the constant of the instruction, and only the remainders take part in the XOR.
Registers with the same remainders share an address, made in the function's entry where nothing depends on a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nova.gpu.distribute import Buffer, Distributor
from nova.gpu.registers import element_bytes
from nova.tile import shared
from nova.tile.shared import Placement
from nova.tile.text import Operand, Value

Terms = tuple[tuple[str, int, int, int], ...]  # (of "lane" or "warp", stride, count, step), as thread_sum takes them


def placement_of(buffer: Buffer) -> Placement:
    return Placement(buffer.rows, buffer.columns, element_bytes(buffer.element), buffer.swizzle)


@dataclass
class SharedWindow:
    """A thread's places in one stage of a buffer, from run-time or constant `offsets` (row, column) on."""

    it: Distributor
    buffer: Buffer
    stage: Operand
    offsets: tuple[Operand, Operand]
    rows: Terms
    columns: Terms
    made: dict[tuple[int, int], Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = placement_of(self.buffer)

    def at(self, row: int, column: int) -> tuple[Value, int]:
        """(pointer, constant bytes after it) of this row and column, counted from the thread's first element."""
        place, size = self.place, self.place.element_bytes
        row_offset, column_offset = self.offsets
        row += row_offset if isinstance(row_offset, int) else 0
        column = (column + (column_offset if isinstance(column_offset, int) else 0)) * size
        near_row = row % shared.PERIOD if place.swizzled else 0
        near_column = column % place.group_bytes
        found = self.made.get((near_row, near_column))
        if found is None:
            found = self.made[near_row, near_column] = self._pointer(near_row, near_column)
        return found, (row - near_row) * place.row_bytes + column - near_column

    def _pointer(self, row: int, column: int) -> Value:
        """The address of the thread's element this far away, in the stage."""
        it, place = self.it, self.place
        stage = it.mul(self.stage, place.stage_bytes)
        flip = self._flip(row, column)
        if flip is None:
            return it.offset(self.buffer.pointer, it.add(self._fixed(row, column), stage))
        inside = it.add(self._fixed(0, 0), stage)
        if flip:
            inside = inside ^ flip if isinstance(inside, int) else it.int_op("xori", inside, flip)
        return it.offset(self.buffer.pointer, it.add(inside, row * place.row_bytes))

    def _flip(self, row: int, column: int) -> int | None:
        """The bits in which the place differs from that of the thread's first element, if they are always the same.

        They are where the row and the column share no bits with the thread's part: then the key is an XOR of both keys.
        One address and an XOR of a constant take fewer registers in a loop than an address for each.
        """
        place, size = self.place, self.place.element_bytes
        if any(not isinstance(offset, int) for offset in self.offsets) or not place.swizzled:
            return None
        columns = tuple((of, stride, count, step * size) for of, stride, count, step in self.columns)
        masks = _bits_of(self.rows), _bits_of(columns)
        if None in masks or row & (masks[0] or 0) or column & (masks[1] or 0):
            return None
        return column ^ int(shared.key(np.array(row), place.row_bytes)) * shared.CHUNK

    def _fixed(self, row: int, column: int) -> Operand:
        """Bytes from the start of stage 0; in the function's entry if nothing moves."""
        it = self.it
        moves = any(not isinstance(offset, int) for offset in self.offsets)
        if moves or not (self.rows or self.columns):
            return self._place(row, column)
        key = ("place in shared memory", self.place, self.rows, self.columns, row, column)
        return it.once(key, lambda: it.scalar(self._place(row, column)))

    def _place(self, row: int, column: int) -> Operand:
        """Bytes from the start of stage 0."""
        it, place = self.it, self.place
        own_row = it.thread_sum(self.rows)
        own_column = it.thread_sum(tuple((of, s, n, step * place.element_bytes) for of, s, n, step in self.columns))
        own_row, own_column = it.add(own_row, row), it.add(own_column, column)
        row_offset, column_offset = self.offsets
        if not isinstance(row_offset, int):
            own_row = it.add(own_row, row_offset)
        if not isinstance(column_offset, int):
            own_column = it.add(own_column, it.mul(column_offset, place.element_bytes))
        if place.swizzled:
            own_column = self._permuted(own_row, own_column)
        return it.add(it.mul(own_row, place.row_bytes), own_column)

    def _permuted(self, row: Operand, column: Operand) -> Operand:
        """column ^ key(row) * 16"""
        it = self.it
        chunk = shared.CHUNK.bit_length() - 1
        for number, bits in enumerate(shared.key_bits(shared.group_of(self.place.row_bytes))):
            parity = self._parity(row, bits)
            if isinstance(parity, int):
                column = column ^ parity << chunk + number if isinstance(column, int) else it.int_op(
                    "xori", column, parity << chunk + number
                )  # fmt: skip
            else:
                column = it.int_op("xori", it.int_op("shli", parity, chunk + number), column)
        return column

    def _parity(self, row: Operand, bits: Sequence[int]) -> Operand:
        if isinstance(row, int):
            return sum(row >> bit for bit in bits) % 2
        total: Operand = 0
        for bit in bits:
            shifted = row if bit == 0 else self.it.int_op("shrui", row, bit)
            total = shifted if total == 0 else self.it.int_op("xori", total, shifted)
        return self.it.int_op("andi", total, 1)


def _bits_of(terms: Terms) -> int | None:
    """The bits that a sum of digits may set; None if its terms share bits or are no powers of two."""
    mask = 0
    for _, _, count, step in terms:
        if count == 1 or step == 0:
            continue
        bits = (count - 1) * step
        if count & (count - 1) or step & (step - 1) or mask & bits:
            return None
        mask |= bits
    return mask
