"""load_shared and store_shared: by ldmatrix where the layout is its matrices', else word by word (paper Table 1).

ldmatrix reads matrices of 8 rows of 16 bytes, and gives lane t the words of row t / 4, word t % 4. So it serves

  * 16-bit tiles whose lanes hold pairs along the buffer's rows (K-major operands), and, with .trans, along its columns
    (M- and N-major operands);
  * 32-bit tiles along the rows. There is no .trans for them: it would tear the words apart, so those are single loads.

Four matrices move at once: lane l brings the address of row l % 8 of matrix l / 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nova.gpu.distribute import Buffer, Distributor, Op, lowers
from nova.gpu.registers import element_bytes
from nova.gpu.shared_access import SharedWindow, Terms
from nova.tile.layout import NestedLayout
from nova.tile.text import BITS, Value

ROWS = 8  # of a matrix


@dataclass(frozen=True)
class Group:
    """One ldmatrix: its matrices by number, where the first begins, and the steps that lane bits 3 and 4 add."""

    matrices: tuple[int, ...]
    row: int
    column: int
    row_steps: tuple[int, ...]
    column_steps: tuple[int, ...]

    @property
    def rows(self) -> Terms:
        return (("lane", 1, ROWS, 1), *(("lane", ROWS << i, 2, step) for i, step in enumerate(self.row_steps)))

    @property
    def columns(self) -> Terms:
        return tuple(("lane", ROWS << i, 2, step) for i, step in enumerate(self.column_steps))


@dataclass(frozen=True)
class Matrices:
    """A tile as matrices of ldmatrix: what is loaded, and how."""

    transposed: bool  # .trans
    groups: tuple[Group, ...]
    words: int  # registers of a matrix that a lane gets at once


def matrices_of(layout: NestedLayout, element: str, transposed: bool) -> Matrices | None:
    """How ldmatrix loads a tile, or None if it cannot. `transposed`: dimension 0 runs along the buffer's columns."""
    bits = BITS[element]
    if layout.rank != 2 or bits not in (16, 32):
        return None
    row_dim, column_dim = (1, 0) if transposed else (0, 1)
    pair = 32 // bits
    quad = [d for d in (0, 1) if (layout.thread[d], layout.thread_strides[d]) == (4, 1) and layout.element[d] == pair]
    eight = [d for d in (0, 1) if (layout.thread[d], layout.thread_strides[d]) == (8, 4) and layout.element[d] == 1]
    if len(quad) != 1 or len(eight) != 1 or quad == eight:
        return None
    across = quad[0] == row_dim  # the pairs run along the buffer's columns: the matrix must be turned
    if across and bits != 16:
        return None
    rows = layout.register_part(row_dim)[::pair]
    columns = layout.register_part(column_dim)[::pair]
    return Matrices(across, tuple(_groups(rows, columns, _order(layout))), pair)


def _order(layout: NestedLayout) -> np.ndarray:
    """Matrices in the order in which the registers should come: mma.sync wants A's by halves of k, then of rows.

    A quad of registers that comes in another order than it is used costs moves in the main loop.
    """
    numbers = np.arange(math.prod(layout.batch) * math.prod(layout.outer)).reshape(*layout.batch, *layout.outer)
    return (numbers.swapaxes(2, 3) if layout.outer == (2, 2) else numbers).reshape(-1)


def _groups(rows: np.ndarray, columns: np.ndarray, order: np.ndarray) -> list[Group]:
    """Matrices by fours where their places are regular, else by twos or singly."""
    groups, at = [], 0
    rows, columns = rows[order], columns[order]
    while at < len(rows):
        size = next(n for n in (4, 2, 1) if at % n == 0 and at + n <= len(rows) and _regular(rows, columns, at, n))
        steps = [1, 2][: size.bit_length() - 1]
        groups.append(
            Group(
                tuple(int(n) for n in order[at : at + size]), int(rows[at]), int(columns[at]),
                tuple(int(rows[at + s] - rows[at]) for s in steps),
                tuple(int(columns[at + s] - columns[at]) for s in steps),
            )
        )  # fmt: skip
        at += size
    return groups


def _regular(rows: np.ndarray, columns: np.ndarray, at: int, size: int) -> bool:
    return size < 4 or all(x[at + 3] - x[at + 2] == x[at + 1] - x[at] for x in (rows, columns))


def _warp_terms(layout: NestedLayout, dim: int) -> Terms:
    return tuple(part for part in layout.thread_part(dim) if part[0] == "warp")


@lowers("nova_tile.load_shared")
def load_shared(it: Distributor, op: Op) -> None:
    buffer, layout, transposed = it.buffer_of(op.operands[0]), op["layout"], op["transposed"]
    element = str(op.results[0].type.element_type)
    matrices = matrices_of(layout, element, transposed)
    load = _load_matrices if matrices is not None and buffer.columns * element_bytes(element) % 16 == 0 else None
    if load is not None and _aligned(it, op, element):
        assert matrices is not None
        it.set(op.results[0], load(it, op, buffer, layout, matrices))
    else:
        it.set(op.results[0], _load_words(it, op, buffer, layout))


def _aligned(it: Distributor, op: Op, element: str) -> bool:
    """Whether the tile's columns begin at 16 bytes. Run-time offsets are multiples of a tile, so they do."""
    column = it.number_of(op.operands[3])
    return not isinstance(column, int) or column * element_bytes(element) % 16 == 0


def _load_matrices(it: Distributor, op: Op, buffer: Buffer, layout: NestedLayout, matrices: Matrices) -> Value:
    stage, *offsets = (it.number_of(v) for v in op.operands[1:])
    row_dim, column_dim = (1, 0) if op["transposed"] else (0, 1)
    words: dict[int, Value] = {}
    windows: dict[tuple[Terms, Terms], SharedWindow] = {}
    for group in matrices.groups:
        terms = (*_warp_terms(layout, row_dim), *group.rows), (*_warp_terms(layout, column_dim), *group.columns)
        if terms not in windows:
            windows[terms] = SharedWindow(it, buffer, stage, (offsets[0], offsets[1]), *terms)
        pointer, constant = windows[terms].at(group.row, group.column)
        got = _ldmatrix(it, it.offset(pointer, constant), len(group.matrices), matrices.transposed)
        words.update(zip(group.matrices, got, strict=True))
    vector = it.bitcast(it.from_elements([words[number] for number in range(len(words))]), buffer.element)
    return Value(vector.name, vector.element, vector.shape, layout)


def _ldmatrix(it: Distributor, pointer: Value, count: int, transposed: bool) -> list[Value]:
    """The words of `count` matrices that the lane gets."""
    kind = "i32" if count == 1 else f"!llvm.struct<({', '.join(['i32'] * count)})>"
    layout = "col" if transposed else "row"
    attrs = (
        f"num = {count} : i32, layout = #nvvm.mma_layout<{layout}>, shape = #nvvm.ld_st_matrix_shape<m = 8, n = 8>, "
        "eltType = #nvvm.ld_st_matrix_elt_type<b16>"
    )
    made = it.result(f"nvvm.ldmatrix {pointer.name} {{{attrs}}} : ({pointer.element}) -> {kind}", "i32")
    if count == 1:
        return [made]
    return [it.result(f"llvm.extractvalue {made.name}[{i}] : {kind}", "i32") for i in range(count)]


# --- word by word ----------------------------------------------------------------------------------------------------


def _runs(layout: NestedLayout, dim: int, element: str) -> np.ndarray:
    """int[accesses, width]: registers that are neighbours along `dim`, at most 16 bytes of them."""
    width = layout.element[dim]
    while width * element_bytes(element) > 16 or layout.element[dim] % width:
        width -= 1
    registers = np.arange(layout.registers).reshape(layout.register_shape)
    return np.moveaxis(registers, 2 * layout.rank + dim, -1).reshape(-1, width)


def _word_window(it: Distributor, op: Op, buffer: Buffer, layout: NestedLayout, first: int) -> SharedWindow:
    stage, row, column = (it.number_of(v) for v in op.operands[first : first + 3])
    row_dim, column_dim = (1, 0) if op["transposed"] else (0, 1)
    return SharedWindow(
        it, buffer, stage, (row, column), layout.thread_part(row_dim), layout.thread_part(column_dim)
    )  # fmt: skip


def _places(layout: NestedLayout, op: Op, buffer: Buffer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(registers of each access, its row, its column), counted from the thread's first element."""
    row_dim, column_dim = (1, 0) if op["transposed"] else (0, 1)
    registers = _runs(layout, column_dim, buffer.element)
    first = registers[:, 0]
    return registers, layout.register_part(row_dim)[first], layout.register_part(column_dim)[first]


def _load_words(it: Distributor, op: Op, buffer: Buffer, layout: NestedLayout) -> Value:
    window = _word_window(it, op, buffer, layout, 1)
    registers, rows, columns = _places(layout, op, buffer)
    width = registers.shape[1]
    pieces = []
    for row, column in zip(rows, columns, strict=True):
        pointer, constant = window.at(int(row), int(column))
        pieces.append(it.load(it.offset(pointer, constant), buffer.element, width if width > 1 else None))
    loaded = it.concat(pieces) if width > 1 else it.from_elements(pieces)
    return it.take(loaded, np.argsort(registers.reshape(-1)), layout)


@lowers("nova_tile.store_shared")
def store_shared(it: Distributor, op: Op) -> None:
    """Copies of an element are stored by each of their holders: they are equal."""
    buffer, layout = it.buffer_of(op.operands[1]), op["layout"]
    tile = it.tile(op.operands[0], layout)
    window = _word_window(it, op, buffer, layout, 2)
    registers, rows, columns = _places(layout, op, buffer)
    width = registers.shape[1]
    for run, row, column in zip(registers, rows, columns, strict=True):
        pointer, constant = window.at(int(row), int(column))
        piece = it.take(tile, run)
        it.store(piece if width > 1 else it.extract(piece, 0), it.offset(pointer, constant))
