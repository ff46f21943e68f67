"""Swizzled shared memory: nothing is lost, and every access of a contraction's main loop is free of bank conflicts."""

from __future__ import annotations

import numpy as np
import pytest

from nova.gpu.async_copy import passes_of
from nova.gpu.fragments import matrices_of
from nova.tile import shared
from nova.tile.layout import WARP, NestedLayout, mma_accumulator, mma_lhs, mma_rhs
from nova.tile.shared import Placement, wavefronts

ELEMENT = {16: "bf16", 32: "f32"}


def amount(terms, thread: np.ndarray) -> np.ndarray:
    """Sum of digits of the lane and warp, as generated code computes it."""
    ids = {"lane": thread % WARP, "warp": thread // WARP}
    return sum((ids[of] // stride % count * step for of, stride, count, step in terms), np.zeros_like(thread))


@pytest.mark.parametrize("columns", [8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_element_has_a_place_of_its_own(columns: int, size: int) -> None:
    place = Placement(32, columns, size)
    row, column = np.indices((32, columns))
    found = place.offset(row, column)
    assert sorted(found.reshape(-1)) == list(range(0, place.stage_bytes, size))


@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
def test_what_is_a_multiple_of_group_and_period_may_be_added_later(columns: int) -> None:
    place = Placement(64, columns, 4)
    row, column = np.indices((8, max(place.group_bytes // 4, 1)))
    moved = place.offset(row + 16, column + place.group_bytes // 4 * (columns * 4 // place.group_bytes - 1))
    step = 16 * place.row_bytes + place.group_bytes * (columns * 4 // place.group_bytes - 1)
    assert (moved == place.offset(row, column) + step).all()


def loads(layout: NestedLayout, bits: int, columns: int, rows: int, transposed: bool):
    """(offsets of a warp's lanes, bytes) of every access that loads a tile."""
    place = Placement(rows, columns, bits // 8)
    row_dim, column_dim = (1, 0) if transposed else (0, 1)
    matrices = matrices_of(layout, ELEMENT[bits], transposed)
    lanes = np.arange(WARP)
    if matrices is not None:
        for group in matrices.groups:
            row, column = amount(group.rows, lanes) + group.row, amount(group.columns, lanes) + group.column
            yield place.offset(row, column)[: 8 * len(group.matrices)], 16
        return
    for register in range(layout.registers):
        index = layout.indices(WARP)[:, register]
        yield place.offset(index[:, row_dim], index[:, column_dim]), bits // 8


@pytest.mark.parametrize("k_major", [True, False], ids=["k-major", "other"])
@pytest.mark.parametrize("depth", [32, 64, 128], ids="k of {} bytes".format)
@pytest.mark.parametrize("bits", [16, 32])
def test_fragments_are_loaded_without_conflicts(bits: int, depth: int, k_major: bool) -> None:
    """Both operands of mma.sync, as the buffer holds them K-major or not; 16 x 16 tiles of 32-bit words included."""
    k, step = depth * 8 // bits, 256 // bits
    for across in (32, 64, 128):
        rows, columns = (across, k) if k_major else (k, across)
        for layout, is_lhs in (
            (mma_lhs(across, step, (1, 1), bits), True),
            (mma_rhs(step, across, (1, 1), bits), False),
        ):
            if step > k:
                continue
            transposed = k_major != is_lhs
            for offsets, width in loads(layout, bits, columns, rows, transposed):
                assert wavefronts(offsets, width) == 1


def test_routing_follows_the_papers_table() -> None:
    """ldmatrix for what is K-major, ldmatrix.trans for other 16-bit operands, single loads for other TF32 operands."""
    for bits in (16, 32):
        step = 256 // bits
        a, b = mma_lhs(64, step, (2, 2), bits), mma_rhs(step, 64, (2, 2), bits)
        element = ELEMENT[bits]
        for layout, k_major_is_transposed in ((a, False), (b, True)):
            direct = matrices_of(layout, element, k_major_is_transposed)
            assert direct is not None
            assert not direct.transposed
            turned = matrices_of(layout, element, not k_major_is_transposed)
            assert (turned is not None and turned.transposed) if bits == 16 else turned is None


def test_paired_tf32_operands_are_loaded_word_by_word_without_conflicts() -> None:
    layout = mma_rhs(8, 64, (1, 1), 32, paired_k=True)
    assert matrices_of(layout, "f32", False) is None
    for offsets, width in loads(layout, 32, 64, 8, False):
        assert wavefronts(offsets, width) == 1


def test_neighbouring_rows_are_loaded_and_stored_without_conflicts() -> None:
    """TF32 operands whose rows are contiguous: two rows a lane, eight bytes."""
    place = Placement(8, 64, 4)
    lanes = np.arange(WARP)
    for column in range(0, 64, 16):
        assert wavefronts(place.offset(lanes % 4, column + 2 * (lanes // 4)), 8) == 1
    place = Placement(64, 128, 4)
    for half in (0, 1):
        assert wavefronts(place.offset(2 * (lanes // 4) + half, 2 * (lanes % 4)), 8) == 1


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_accumulators_are_stored_without_conflicts(columns: int) -> None:
    """Two columns a lane, eight bytes: the way into the epilogue."""
    layout = mma_accumulator(64, columns, (1, 1))
    place = Placement(64, columns, 4)
    for register in range(0, layout.registers, 2):
        index = layout.indices(WARP)[:, register]
        assert wavefronts(place.offset(index[:, 0], index[:, 1]), 8) == 1


@pytest.mark.parametrize("threads", [64, 128, 256])
@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("size", [2, 4])
def test_copies_cover_the_tile_once_without_conflicts(size: int, columns: int, threads: int) -> None:
    rows, width = 64, 16 // size
    passes = passes_of(rows, columns, width, threads)
    place = Placement(rows, columns, size)
    thread = np.arange(passes.active)
    seen = np.zeros((rows, columns), int)
    for row, column in passes.steps:
        r, c = amount(passes.rows, thread) + row, amount(passes.columns, thread) + column
        for i in range(width):
            np.add.at(seen, (r, c + i), 1)
        for warp in range(0, passes.active, WARP):
            offsets = place.offset(r, c)[warp : warp + WARP]
            assert wavefronts(offsets, 16) == 1
    assert (seen == 1).all()


def test_wavefronts_counts_conflicts() -> None:
    lanes = np.arange(WARP)
    assert wavefronts(lanes * 4, 4) == 1
    assert wavefronts(lanes * 128, 4) == WARP
    assert wavefronts(lanes * 0, 4) == 1  # one word for all
    assert wavefronts(lanes * 32, 16) == 2
    assert shared.key(np.arange(8), 64).tolist() == [0, 0, 2, 2, 1, 1, 3, 3]
