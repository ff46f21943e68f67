"""Random programs over random layouts: threads do what the tile program means."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tile_programs import MEMORY, compare, numbers

from nova.tile.builder import Program
from nova.tile.layout import NestedLayout
from nova.tile.text import Value

WARPS = 4
ELEMENTS = ["f32", "bf16", "i32", "f64", "i8", "i64"]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> NestedLayout:
    """Bits of each dimension dealt out to the five levels; what is left of lanes and warps holds copies."""
    lanes, warps, picked, lane_strides, warp_strides = 5, 2, [], [0] * len(shape), [0] * len(shape)
    for dim in draw(st.permutations(range(len(shape)))):
        bits = shape[dim].bit_length() - 1
        element = draw(st.integers(0, min(bits, 3)))
        thread = draw(st.integers(0, min(bits - element, lanes)))
        subgroup = draw(st.integers(0, min(bits - element - thread, warps)))
        outer = draw(st.integers(0, bits - element - thread - subgroup))
        lane_strides[dim], warp_strides[dim] = 1 << (5 - lanes), 1 << (2 - warps)
        lanes, warps = lanes - thread, warps - subgroup
        batch = bits - element - thread - subgroup - outer
        picked.append((dim, (1 << subgroup, 1 << batch, 1 << outer, 1 << thread, 1 << element)))
    levels = zip(*(sizes for _, sizes in sorted(picked)), strict=True)
    return NestedLayout(*levels, tuple(warp_strides), tuple(lane_strides))


def widest(draw: st.DrawFn, layout: NestedLayout, extent: int) -> int:
    """A width that the last dimension allows."""
    choices = [w for w in (1, 2, 4, 8) if layout.element[-1] % w == 0 and extent % w == 0]
    return draw(st.sampled_from(choices))


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, list[np.ndarray]]:
    """Loads a window of a matrix, sends it through random ops, and stores it."""
    element = draw(st.sampled_from(ELEMENTS))
    shape = draw(st.sampled_from([(8, 32), (16, 16), (4, 64), (1, 128), (32, 8)]))
    layout = draw(layouts(shape))
    program = Program("random", 2, (2, 2, 1), 32 * WARPS)
    rows, columns = 2 * shape[0], 2 * shape[1]
    checked = draw(st.booleans())
    extents = [rows - draw(st.integers(0, 3)), columns - 8 * draw(st.integers(0, 1))] if checked else None
    at = [program.mul(program.program_id(1), shape[0]), program.mul(program.program_id(0), shape[1])]
    width = widest(draw, layout, columns)
    x = program.load(
        program.args[0], 0, at, element, layout, strides=[columns, 1], extents=extents, vector=width, fill=2,
        wide=draw(st.booleans()),
    )  # fmt: skip
    floats = element in ("f32", "bf16", "f64")
    kinds = ["maximumf", "minimumf"] if floats else ["maxsi", "minsi", "xori", "addi"]
    steps = ["add", "reduce", "scatter", "total", "move", "iota", "transpose"]
    for step in draw(st.lists(st.sampled_from(steps), max_size=5)):
        if step == "add":
            x = program.binary("arith.addf" if floats else "arith.addi", x, 1)
        elif step == "reduce":
            dim, kind = draw(st.integers(0, 1)), draw(st.sampled_from(kinds))
            top = program.expand(program.reduce(x, [dim], kind), [dim], x.layout)
            x = program.binary("arith.subf" if floats else "arith.subi", top, x)
        elif step == "scatter":
            dim, kind = draw(st.integers(0, 1)), draw(st.sampled_from(kinds))
            left = x.layout.project([dim])
            shares = program.reduce_scatter(x, [dim], kind, draw(layouts(left.shape)))
            top = program.expand(program.to_layout(shares, left), [dim], x.layout)
            x = program.binary("arith.subf" if floats else "arith.subi", top, x)
        elif step == "total":
            x = program.binary(f"arith.{kinds[1]}", x, program.reduce(x, [0, 1], kinds[0]))
        elif step == "move":
            x = program.to_layout(x, draw(layouts(x.shape)))
        elif step == "iota":
            here = program.iota(draw(st.integers(0, 1)), x.layout)
            x = program.select(
                program.cmp("slt", here, draw(st.integers(0, 40))), x, program.splat(3, x.shape, element)
            )
        else:
            x = program.transpose(x, [1, 0])
    return program, finish(draw, program, x, shape, extents, element)


def finish(
    draw: st.DrawFn, program: Program, x: Value, shape: tuple[int, int], extents: list[int] | None, element: str
) -> list[np.ndarray]:
    """Stores the tile where it came from, turned if it was; the buffers."""
    if x.shape != shape:
        x = program.transpose(x, [1, 0])
    rows, columns = 2 * shape[0], 2 * shape[1]
    at = [program.mul(program.program_id(1), shape[0]), program.mul(program.program_id(0), shape[1])]
    width = widest(draw, x.layout, columns)
    program.store(x, program.args[1], 0, at, strides=[columns, 1], extents=extents, vector=width)
    return [numbers(element, rows * columns), np.zeros(rows * columns, MEMORY[element])]


@given(programs())
@settings(max_examples=30, deadline=None)
def test_random_programs(made: tuple[Program, list[np.ndarray]]) -> None:
    compare(*made)
