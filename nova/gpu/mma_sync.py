"""Products of tiles: mma.sync on tensor cores, fused multiply-adds elsewhere.

    %d = "nova_tile.mma"(%a, %b, %c) {intrinsic = "MMA_SYNC_BF16_16x8x16"}       c + a b, a block's tiles
      -> nvvm.mma.sync A[4 words], B[2 words], C[4 floats]                       for each fragment of a warp

The registers of the layouts mma_lhs, mma_rhs and mma_accumulator are the instruction's operands in order, except that
A's words come as (rows 0-7, rows 8-15) x (k low, k high) and the layout counts k first. The order of k is that of the
registers, so results do not depend on the schedule of the hardware.
"""

from __future__ import annotations

import re

import numpy as np

from nova.errors import CompileError
from nova.gpu.distribute import Distributor, Op, lowers
from nova.tile.layout import NestedLayout
from nova.tile.text import Value

_TYPES = {"BF16": "bf16", "F16": "f16", "TF32": "tf32"}
_WORDS_OF_A = ((0, 0), (1, 0), (0, 1), (1, 1))  # (half of the rows, half of k) of the instruction's operands


@lowers("nova_tile.mma")
def mma(it: Distributor, op: Op) -> None:
    lhs, rhs, layout, intrinsic = op["lhs"], op["rhs"], op["layout"], op["intrinsic"]
    a, b, c = (it.tile(v, of) for v, of in zip(op.operands, (lhs, rhs, layout), strict=True))
    product = _fma if intrinsic.startswith("FMA_") else _mma_sync
    it.set(op.results[0], product(it, a, b, c, intrinsic))


def _mma_sync(it: Distributor, a: Value, b: Value, c: Value, intrinsic: str) -> Value:
    match = re.fullmatch(r"MMA_SYNC_(BF16|F16|TF32)_(16)x(8)x(8|16)", intrinsic)
    if match is None:
        raise CompileError(f"mma: no instruction for the intrinsic {intrinsic}")
    lhs, rhs, layout = a.layout, b.layout, c.layout
    _check(lhs, rhs, layout)
    (mb, nb), kb = layout.batch, lhs.batch[1]
    words_a = _grid(it, a, (mb, kb, 2, 2))
    words_a = words_a.swapaxes(2, 3) if lhs.element[0] == 2 else words_a  # to (half of the rows, half of k)
    words_b = _grid(it, b, (kb, nb, 2))
    sums = np.array(it.elements(c), dtype=object).reshape(mb, nb, 4)
    shape = ", ".join(f"{name} = {size}" for name, size in zip("mnk", match.groups()[1:], strict=True))
    kind = _TYPES[match[1]]
    attrs = (
        "layoutA = #nvvm.mma_layout<row>, layoutB = #nvvm.mma_layout<col>, "
        f"multiplicandAPtxType = #nvvm.mma_type<{kind}>, multiplicandBPtxType = #nvvm.mma_type<{kind}>, "
        f"shape = #nvvm.shape<{shape}>"
    )
    for k in range(kb):
        for i in range(mb):
            for j in range(nb) if i % 2 == 0 else reversed(range(nb)):  # back and forth: neighbours share B
                sums[i, j] = _instruction(it, words_a[i, k], words_b[k, j], sums[i, j], attrs)
    made = it.from_elements(list(sums.reshape(-1)))
    return Value(made.name, made.element, made.shape, layout)


def _instruction(it: Distributor, a: np.ndarray, b: np.ndarray, c: np.ndarray, attrs: str) -> list[Value]:
    names_a = ", ".join(a[place].name for place in _WORDS_OF_A)
    names_b, names_c = (", ".join(v.name for v in words) for words in (b, c))
    kind = "!llvm.struct<(f32, f32, f32, f32)>"
    word = b[0].type
    made = it.result(
        f"nvvm.mma.sync A[{names_a}] B[{names_b}] C[{names_c}] {{{attrs}}} : ({word}, {word}, f32) -> {kind}", "f32"
    )
    return [it.result(f"llvm.extractvalue {made.name}[{i}] : {kind}", "f32") for i in range(4)]


def _check(lhs: NestedLayout, rhs: NestedLayout, layout: NestedLayout) -> None:
    """Outer, thread and element parts are the instruction's; warps hold what their part of the result needs.

    A lane's two rows of an instruction are r and r + 8 (outer 2), or neighbours (element 2): the contraction does not
    care which rows are called so, as long as the left operand and the sums agree.
    """
    rows = (lhs.outer[0], lhs.element[0])
    if rows not in ((2, 1), (1, 2)) or (layout.outer, layout.element) != ((rows[0], 1), (rows[1], 2)):
        raise CompileError(f"mma: layouts are not those of mma.sync: {lhs.text()} into {layout.text()}")
    if (lhs.thread, rhs.thread, layout.thread) != ((8, 4), (4, 8), (8, 4)):
        raise CompileError(f"mma: lanes are not those of mma.sync: {lhs.text()} x {rhs.text()} into {layout.text()}")
    if lhs.batch[0] != layout.batch[0] or rhs.batch[1] != layout.batch[1] or lhs.batch[1] != rhs.batch[0]:
        raise CompileError(f"mma: fragments of {lhs.batch} x {rhs.batch} into {layout.batch}")


def _grid(it: Distributor, tile: Value, shape: tuple[int, ...]) -> np.ndarray:
    """The tile's registers as 32-bit words, the instruction's operands: integers, or pairs of f16."""
    if tile.element == "f16":
        words = [it.take(tile, (r, r + 1)) for r in range(0, tile.layout.registers, 2)]
    else:
        words = it.elements(it.bitcast(tile, "i32"))
    grid = np.empty(len(words), dtype=object)
    grid[:] = words
    return grid.reshape(shape)


def _fma(it: Distributor, a: Value, b: Value, c: Value, intrinsic: str) -> Value:
    """Thread by thread: its part of a column of a times its part of a row of b, for each k."""
    lhs, rhs, layout = a.layout, b.layout, c.layout
    rows, columns = layout.register_part(0), layout.register_part(1)
    row_of, column_of = lhs.register_part(0), rhs.register_part(1)
    k_of_a, k_of_b = lhs.register_part(1), rhs.register_part(0)
    total = c
    for k in range(lhs.shape[1]):
        left = [int(np.flatnonzero((row_of == row) & (k_of_a == k))[0]) for row in rows]
        right = [int(np.flatnonzero((column_of == column) & (k_of_b == k))[0]) for column in columns]
        x, y = it.take(a, left), it.take(b, right)
        text = f"math.fma {x.name}, {y.name}, {total.name} : {c.type}"
        total = it.result(text, c.element, layout.registers, layout)
    return total


@lowers("nova_tile.round_tf32")
def round_tf32(it: Distributor, op: Op) -> None:
    tile = it.of(op.operands[0])
    if tile.shape is None:
        it.set(op.results[0], _rounded(it, tile))
        return
    words = [_rounded(it, e) for e in it.elements(tile)]
    made = it.from_elements(words)
    it.set(op.results[0], Value(made.name, made.element, made.shape, tile.layout))


def _rounded(it: Distributor, scalar: Value) -> Value:
    attrs = "rnd = #nvvm.fp_rnd_mode<rna>"
    bits = it.result(f'"nvvm.convert.float.to.tf32"({scalar.name}) {{{attrs}}} : (f32) -> i32', "i32")
    return it.result(f"arith.bitcast {bits.name} : i32 to f32", "f32")
