"""Sizes beyond 32 bits: numbers of 64 bits where there is code for them, an error where there is none."""

from __future__ import annotations

import re

import pytest
import torch

from nova import mlir
from nova.errors import CompileError
from nova.schedule import target
from nova.tile import generate, widths
from nova.tile.builder import MOST_BLOCKS, Program
from tests.contraction_programs import level4
from tests.contraction_text import Case
from tests.numerics.test_loops import Kernel
from tests.simulated.whole_op import runner, text_of, tile_program

BOARD = target.by_name("h200")
BORDER = {"WIDE": 256, "OVERHANG": 128}


def lower_border(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BORDER.items():
        monkeypatch.setattr(widths, name, value)


@pytest.mark.parametrize(
    ("shape", "dim"), [((300, 3), 0), ((2, 300), 1), ((3, 5, 200), 1), ((200, 2), 1), ((5000,), 0)]
)
@pytest.mark.parametrize("level", [4, 5])
def test_running_sums(shape: tuple[int, ...], dim: int, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_border(monkeypatch)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y, _ = runner(level)("cumsum", f"dim = {dim} : i64", [x], shape, x.dtype, "scan")
    torch.testing.assert_close(y, x.cumsum(dim))


@pytest.mark.parametrize(
    ("shape", "dim"), [((3 << 30,), 0), ((1 << 16, 1 << 16), 1), ((2, 3 << 30), 0), ((3 << 30, 2), 1)]
)
def test_running_sums_of_billions_number_them_in_64_bits(shape: tuple[int, ...], dim: int) -> None:
    text = text_of(
        "cumsum", f"dim = {dim} : i64", [torch.empty(shape, device="meta")], shape, torch.float32, "scan", False
    )
    narrow = max(shape) <= widths.WIDE - widths.OVERHANG
    offsets = [
        line.split(" : ")[-1]
        for line in tile_program(text).splitlines()
        if '"nova_tile.load"' in line and line.endswith("xf32>")
    ]
    assert offsets and all(("i64, i32, i32)" in o) is narrow and ("i64, i64, i64)" in o) is not narrow for o in offsets)


def test_an_element_is_numbered_in_64_bits_where_its_vector_needs_32() -> None:
    count, vector = 3 << 30, 2
    k = Kernel([count], [0])
    out = k.out([count], "i64")
    body = "%i = linalg.index 0 : index\n %p = arith.index_cast %i : index to i64"
    (result,) = k.generic([0], [], [], [(out, "d0")], body, "%p")
    module = mlir.parse(k.text(result).replace('nova.kernel = "loops",', 'nova.kernel = "loops", nova.inplace = [],'))
    with mlir.context(), mlir.ir.Location.unknown():
        program = str(generate.run(module, BOARD))
    assert re.search(rf"arith.muli %\w+, %c{vector}_i64", program)
    assert not re.search(rf"arith.muli %\w+, %c{vector}_i32", program)


def test_more_updates_than_32_bits_number_are_refused() -> None:
    count = (1 << 31) + 5
    values, index = torch.empty((count, 4), device="meta"), torch.empty(count, dtype=torch.int64, device="meta")
    attributes = "rows = 10 : i64, padding_idx = -1 : i64"
    text = text_of("take_backward", attributes, [values, index], (10, 4), torch.float32, "scatter", False)
    with pytest.raises(CompileError, match="updates: 2,147,483,653 along one dimension"):
        tile_program(text)


def test_blocks_beyond_a_grid_are_refused() -> None:
    Program("most", 1, (MOST_BLOCKS, 1, 1), 32)
    with pytest.raises(CompileError, match="2,147,483,648 blocks are more than a launch may have"):
        Program("more", 1, (MOST_BLOCKS + 1, 1, 1), 32)


def test_a_contraction_of_billions_of_rows_is_refused() -> None:
    case = Case("mk,kn->mn", {"m": 1 << 31, "n": 8, "k": 8}, dtype="bf16", out_dtype="bf16")
    with pytest.raises(CompileError, match="2,147,483,648 along one dimension"):
        level4(case.text(), "h200", False)
