"""Where an element lies in a shared-memory buffer: rows of 16-byte chunks, permuted so that nothing meets in a bank.

    row 0:  0 1 2 3 4 5 6 7        chunk c of row r lies at place c ^ key(r); 128-byte rows shown. Eight rows of one
    row 1:  4 5 6 7 0 1 2 3        column of chunks (ldmatrix), and eight neighbouring chunks of a row (copies), are in
    row 2:  2 3 0 1 6 7 4 5        eight different places: no bank twice. The key's upper bits also differ among rows
    ...                            0..3, and among 0, 2, 4, 6: where lanes read words at [row t, 8 columns] (TF32).

The permutation stays within `group` chunks, the largest power of two up to 8 that divides the row; shorter rows share
128 bytes, and rows of the same line the key. Pure maths: generated code and tests use the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CHUNK = 16  # bytes that move together
LINE = 128  # bytes of all 32 banks
PERIOD = 8  # rows after which keys repeat


def group_of(row_bytes: int) -> int:
    """Chunks that a row's permutation stays within."""
    chunks = row_bytes // CHUNK
    return next(size for size in (8, 4, 2, 1) if chunks % size == 0)


def key_bits(group: int) -> tuple[tuple[int, ...], ...]:
    """For each bit of the key, lowest first, the bits of the row whose parity it is."""
    return {8: ((2,), (1,), (0, 2)), 4: ((2,), (1,)), 2: ((2,),), 1: ()}[group]


def key(row: np.ndarray, row_bytes: int) -> np.ndarray:
    """What a row's chunk numbers are XORed with."""
    total = np.zeros_like(row)
    for place, bits in enumerate(key_bits(group_of(row_bytes))):
        total |= sum((row >> bit) for bit in bits) % 2 << place
    return total


@dataclass(frozen=True)
class Placement:
    """One stage of a buffer, rows x columns."""

    rows: int
    columns: int
    element_bytes: int
    swizzle: str = "xor"

    @property
    def row_bytes(self) -> int:
        return self.columns * self.element_bytes

    @property
    def stage_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def swizzled(self) -> bool:
        return self.swizzle == "xor" and self.row_bytes % CHUNK == 0 and group_of(self.row_bytes) > 1

    @property
    def group_bytes(self) -> int:
        """Columns of so many bytes are permuted as a whole by what is added to the column in multiples of it."""
        return group_of(self.row_bytes) * CHUNK if self.swizzled else 1

    def offset(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Bytes from the start of the stage."""
        row, column = np.broadcast_arrays(np.asarray(row, np.int64), np.asarray(column, np.int64))
        within = column * self.element_bytes
        if self.swizzled:
            within = within ^ (key(row, self.row_bytes) * CHUNK)
        return row * self.row_bytes + within


def wavefronts(offsets: np.ndarray, width: int) -> int:
    """Shared-memory cycles of one access of `width` bytes by each lane, over the fewest that its bytes need: 1 is free.

    A warp's access is served 128 bytes at a time: 32 lanes of 4 bytes, 16 of 8 or 8 of 16. Lanes that read the same
    word share it.
    """
    lanes = max(LINE // width, 1)
    worst = 0.0
    for start in range(0, len(offsets), lanes):
        part = np.unique(np.asarray(offsets[start : start + lanes])[:, None] // 4 + np.arange(max(width // 4, 1)))
        banks = np.bincount(part % 32, minlength=32)
        worst = max(worst, float(banks.max()))
    return int(worst)
