"""Per-thread code does what the tile program says: every family of ops, over element types and layouts."""

import re

import numpy as np
import pytest
from tile_programs import MEMORY, compare, level5, numbers

from nova.gpu import exchange
from nova.gpu.to_ptx import to_ptx
from nova.tile.builder import Program
from nova.tile.layout import NestedLayout, blocked, mma_accumulator, mma_lhs
from nova.tile.text import Value

ELEMENTS = sorted(MEMORY)
RAGGED = blocked((4, 64), (2, 2), (2, 16), 2)


def copy_program(element: str, vector: int, extents: list[int] | None, layout: NestedLayout) -> Program:
    """Blocks of rows [4, 64] of a [rows, 80] array."""
    program = Program("copy", 2, (2, 2, 1), 128)
    row, column = program.mul(program.program_id(1), 4), program.mul(program.program_id(0), 64)
    window = {"strides": [80, 1], "extents": extents, "vector": vector}
    tile = program.load(program.args[0], 80, [row, column], element, layout, fill=1, **window)
    program.store(tile, program.args[1], 0, [row, column], **window)
    return program


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("vector", [1, 2])
def test_copy_with_ragged_edges(element: str, vector: int) -> None:
    buffers = [numbers(element, 80 * 8), np.zeros(80 * 8, MEMORY[element])]
    compare(copy_program(element, vector, [7, 70], RAGGED), buffers)


@pytest.mark.parametrize("element", ELEMENTS)
def test_copy_of_whole_tiles(element: str) -> None:
    width = min(16 // np.dtype(MEMORY[element]).itemsize, 8)
    layout = blocked((4, 64), (4, 1), (1, min(32, 64 // width)), width)
    program = Program("copy", 2, (2, 1, 1), 128)
    row = program.mul(program.program_id(0), 4)
    tile = program.load(program.args[0], 0, [row, 0], element, layout, strides=[64, 1], vector=width)
    program.store(tile, program.args[1], 0, [row, 0], strides=[64, 1], vector=width)
    report = compare(program, [numbers(element, 512), np.zeros(512, MEMORY[element])])
    assert report[0].global_store.bytes == 512 * np.dtype(MEMORY[element]).itemsize  # no copy stores twice


def test_fill_is_seen() -> None:
    layout = blocked((64,), (1,), (32,), 2)
    program = Program("fill", 2, (1, 1, 1), 32)
    tile = program.load(program.args[0], 0, [0], "f32", layout, strides=[1], extents=[50], vector=2, fill=float("-inf"))
    program.store(tile, program.args[1], 0, [0], strides=[1], vector=2)
    found = [numbers("f32", 50), np.zeros(64, np.float32)]
    compare(program, found)


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("dims", [[0], [1], [0, 1]])
@pytest.mark.parametrize("kind", ["addf", "maximumf"])
def test_reduce(warps: int, dims: list[int], kind: str) -> None:
    """Over registers, lanes and warps, with copies of a tile in warps that no dimension tells apart."""
    layout = NestedLayout((1, warps), (2, 1), (1, 2), (8, 4), (1, 2), (0, 1), (4, 1))
    program = Program("reduce", 2, (1, 1, 1), 32 * max(warps, 2))
    rows, columns = layout.shape
    tile = program.load(program.args[0], 0, [0, 0], "f32", layout, strides=[columns, 1], vector=2)
    total = program.reduce(tile, dims, kind)
    if total.is_tile:
        program.store(total, program.args[1], 0, [0], strides=[1])
    else:
        program.store_scalar(total, program.args[1], 0)
    compare(program, [numbers("f32", rows * columns), np.zeros(rows + columns, np.float32)])


@pytest.mark.parametrize("element", ["bf16", "f16", "f64", "i8", "i32", "i64", "i1"])
def test_reduce_of_other_types(element: str) -> None:
    kind = {"i": "addi", "f": "addf", "b": "maximumf"}[element[0]] if element != "i1" else "ori"
    layout = blocked((4, 256), (1, 4), (2, 16), 4)
    program = Program("reduce", 2, (1, 1, 1), 128)
    tile = program.load(program.args[0], 0, [0, 0], element, layout, strides=[256, 1], vector=4)
    program.store(program.reduce(tile, [1], kind), program.args[1], 0, [0], strides=[1])
    compare(program, [numbers(element, 1024), np.zeros(4, MEMORY[element])])


def test_softmax_of_rows() -> None:
    layout = blocked((2, 512), (1, 4), (1, 32), 4)
    program = Program("softmax", 2, (3, 1, 1), 128)
    row = program.mul(program.program_id(0), 2)
    window = {"strides": [400, 1], "extents": [5, 400], "vector": 4}
    x = program.load(program.args[0], 0, [row, 0], "f32", layout, fill=float("-inf"), **window)
    x = program.binary("arith.subf", x, program.expand(program.reduce(x, [1], "maximumf"), [1], layout))
    e = program.unary("math.exp", x)
    total = program.expand(program.reduce(e, [1], "addf"), [1], layout)
    program.store(program.binary("arith.divf", e, total), program.args[1], 0, [row, 0], **window)
    compare(program, [numbers("f32", 2000), np.zeros(2000, np.float32)], 1e-6)


def test_a_loop_carries_a_tile_and_its_scratch_waits() -> None:
    """Each iteration reduces across warps: the simulator would find the race of an early write."""
    layout = blocked((8, 128), (4, 1), (1, 32), 4)
    program = Program("sums", 2, (1, 1, 1), 128)
    start = program.splat(0.0, (128,), "f32", layout.project([0]))
    with program.for_(0, 24, 8, [start]) as loop:
        x = program.load(program.args[0], 0, [loop.index, 0], "f32", layout, strides=[128, 1], vector=4)
        x = program.binary("arith.mulf", x, x)
        loop.yield_([program.binary("arith.addf", loop.carried[0], program.reduce(x, [0], "addf"))])
    program.store(loop.results[0], program.args[1], 0, [0], strides=[1], vector=4)
    compare(program, [numbers("f32", 24 * 128), np.zeros(128, np.float32)])


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_reductions_in_turn_wait_for_each_other(rounds: int) -> None:
    """With several an iteration none but its own barrier is left: the simulator would find a race between iterations."""
    layout = blocked((8, 128), (4, 1), (1, 32), 4)
    program = Program("sums", 2, (1, 1, 1), 128)
    start = program.splat(0.0, (128,), "f32", layout.project([0]))
    with program.for_(0, 40, 8, [start]) as loop:
        x = program.load(program.args[0], 0, [loop.index, 0], "f32", layout, strides=[128, 1], vector=4)
        for _ in range(rounds):
            total = program.reduce(x, [0], "addf")
            x = program.binary("arith.subf", x, program.expand(total, [0], layout))
        loop.yield_([program.binary("arith.addf", loop.carried[0], total)])
    program.store(loop.results[0], program.args[1], 0, [0], strides=[1], vector=4)
    compare(program, [numbers("f32", 40 * 128), np.zeros(128, np.float32)], 1e-5)


def test_condition_of_a_block() -> None:
    layout = blocked((64,), (2,), (32,), 1)
    program = Program("odd", 2, (4, 1, 1), 64)
    block = program.program_id(0)
    x = program.load(program.args[0], 0, [program.mul(block, 64)], "i32", layout, strides=[1])
    with program.if_(program.compare("eq", program.rem(block, 2), 1)):
        program.store_scalar(program.reduce(x, [0], "addi"), program.args[1], block)
    compare(program, [numbers("i32", 256), np.zeros(4, np.int32)])


def test_gather_and_scatter_with_masks() -> None:
    layout = blocked((32,), (1,), (8,), 4)
    program = Program("move", 3, (1, 1, 1), 64)
    at = program.load(program.args[2], 0, [0], "i64", layout, strides=[1], vector=2)
    inside = program.cmp("sge", at, 8)
    x = program.gather(program.args[0], at, "bf16", inside, fill=3)
    program.scatter(x, program.args[1], program.convert(at, "i32"), program.cmp("slt", at, 60))
    index = np.random.default_rng(1).permutation(64)[:32].astype(np.int64)
    compare(program, [numbers("bf16", 64), np.zeros(64, np.uint16), index])


def test_gather_of_runs() -> None:
    layout = blocked((8, 16), (1, 1), (8, 2), 8)
    program = Program("rows", 3, (1, 1, 1), 32)
    rows = program.load(program.args[2], 0, [0], "i64", layout.project([1]), strides=[1])
    start = program.expand(program.binary("arith.muli", rows, 16), [1], layout)
    column = program.convert(program.iota(1, layout), "i64")
    x = program.gather(program.args[0], program.binary("arith.addi", start, column), "f32", vector=4)
    program.store(x, program.args[1], 0, [0, 0], strides=[16, 1], vector=4)
    report = compare(program, [numbers("f32", 512), np.zeros(128, np.float32), numbers("i64", 8) % 32])
    assert report[0].global_load.requests == 3  # the indices, and two accesses of a lane


@pytest.mark.parametrize("element", ["f32", "bf16", "i8", "f64", "i1"])
@pytest.mark.parametrize(
    "source, target",
    [
        (blocked((64, 32), (4, 1), (4, 8), 4), blocked((64, 32), (4, 1), (16, 2), 4)),
        (mma_accumulator(64, 32, (2, 2)), blocked((64, 32), (4, 1), (4, 8), 4)),
        (blocked((64, 32), (4, 1), (8, 4), 8), mma_lhs(64, 32, (4, 1), 16)),
        (blocked((48, 24), (4, 1), (4, 8), 1), blocked((48, 24), (2, 1), (8, 4), 2)),
    ],
)
def test_change_of_layout(element: str, source: NestedLayout, target: NestedLayout) -> None:
    program = Program("move", 2, (1, 1, 1), 128)
    rows, columns = source.shape
    tile = program.load(program.args[0], 0, [0, 0], element, source, strides=[columns, 1])
    program.store(program.to_layout(tile, target), program.args[1], 0, [0, 0], strides=[columns, 1])
    compare(program, [numbers(element, rows * columns), np.zeros(rows * columns, MEMORY[element])])


def test_a_transposition_meets_no_bank_twice() -> None:
    """Blocks of 4 x 4 a thread: wide accesses on both sides, and every pass over the banks is full."""
    layout = NestedLayout((4, 1), (2, 1), (1, 1), (2, 16), (4, 4), (1, 0), (16, 1))
    program = Program("transpose", 2, (2, 2, 1), 128)
    i, j = program.mul(program.program_id(0), 64), program.mul(program.program_id(1), 64)
    x = program.load(program.args[0], 0, [i, j], "f32", layout, strides=[128, 1], vector=4)
    y = program.to_layout(program.transpose(x, [1, 0]), layout)
    program.store(y, program.args[1], 0, [j, i], strides=[128, 1], vector=4)
    report = compare(program, [numbers("f32", 128 * 128), np.zeros(128 * 128, np.float32)])
    assert report.bank_conflicts == 0


def test_a_permutation_of_registers_moves_nothing() -> None:
    layout = NestedLayout((1,), (4,), (1,), (32,), (2,), (0,), (1,))
    other = NestedLayout((1,), (2,), (2,), (32,), (2,), (0,), (1,))
    program = Program("same", 2, (1, 1, 1), 32)
    x = program.load(program.args[0], 0, [0], "f32", layout, strides=[1], vector=2)
    program.store(program.to_layout(x, other), program.args[1], 0, [0], strides=[1], vector=2)
    compare(program, [numbers("f32", 256), np.zeros(256, np.float32)])
    assert "nova_smem" not in level5(program)


def test_an_accumulator_becomes_an_operand_without_moving() -> None:
    source, target = mma_accumulator(32, 32, (2, 1)), mma_lhs(32, 32, (2, 1), 16)
    assert exchange.stays_in_warp(source, target, 64)
    program = Program("operand", 2, (1, 1, 1), 64)
    x = program.load(program.args[0], 0, [0, 0], "f32", source, strides=[32, 1], vector=2)
    program.store(program.to_layout(x, target), program.args[1], 0, [0, 0], strides=[32, 1], vector=2)
    compare(program, [numbers("f32", 1024), np.zeros(1024, np.float32)])
    assert "nova_smem" not in level5(program)


def test_arithmetic_of_halves_rounds_after_every_op() -> None:
    layout = blocked((256,), (1,), (32,), 8)
    program = Program("halves", 2, (1, 1, 1), 32)
    x = program.load(program.args[0], 0, [0], "bf16", layout, strides=[1], vector=8)
    y = program.binary("arith.mulf", program.binary("arith.addf", x, 1.0 / 3), x)
    program.store(program.select(program.cmp("olt", x, 0.0), x, y), program.args[1], 0, [0], strides=[1], vector=8)
    compare(program, [numbers("bf16", 256), np.zeros(256, np.uint16)])


def test_scalars_in_memory() -> None:
    program = Program("scalars", 2, (3, 1, 1), 64)
    block = program.program_id(0)
    for element, at in (("f32", 0), ("bf16", 40), ("i1", 100), ("i64", 20)):
        here = program.add(program.mul(block, 2), at)
        value = program.load_scalar(program.args[0], here, element)
        program.store_scalar(value, program.args[1], here)
    source = numbers("i8", 256).view(np.uint8)
    source[100:110] %= 2
    compare(program, [source, np.zeros(256, np.uint8)])


def test_an_op_of_two_results() -> None:
    layout = blocked((64,), (2,), (32,), 1)
    program = Program("product", 2, (1, 1, 1), 64)
    x = program.load(program.args[0], 0, [0], "i32", layout, strides=[1])
    low, high = program.fresh(), program.fresh()
    program.line(
        f'{low}, {high} = "arith.mului_extended"({x.name}, {x.name}) : ({x.type}, {x.type}) -> ({x.type}, {x.type})'
    )
    program.store(Value(high, "i32", x.shape, layout), program.args[1], 0, [0], strides=[1])
    compare(program, [numbers("i32", 64), np.zeros(64, np.int32)])


def test_offsets_of_64_bits() -> None:
    layout = blocked((4, 64), (2, 2), (2, 16), 2)
    program = Program("wide", 2, (2, 1, 1), 128)
    row = program.mul(program.program_id(0), 4)
    x = program.load(program.args[0], 64, [row, 0], "i16", layout, strides=[64, 1], vector=2, wide=True)
    program.store(x, program.args[1], program.mul(row, 64), [0, 0], strides=[64, 1], vector=2, wide=True)
    compare(program, [numbers("i16", 9 * 64), np.zeros(512, np.int16)])


@pytest.mark.parametrize("element, value", [("f32", -0.5), ("i1", True), ("i64", -3), ("bf16", 2.0), ("f64", 0.1)])
def test_a_tile_of_equal_elements_is_stored(element: str, value: float) -> None:
    layout = blocked((100,), (1,), (25,), 2)
    program = Program("fill", 1, (2, 1, 1), 64)
    at = program.mul(program.program_id(0), 100)
    tile = program.splat(value, (100,), element)
    program.store(tile, program.args[0], 0, [at], strides=[1], extents=[150], vector=2, layout=layout)
    compare(program, [np.zeros(150, MEMORY[element])])


@pytest.mark.parametrize("dims", [[0], [1], [0, 1]])
def test_reduce_over_warps_that_are_no_power_of_two(dims: list[int]) -> None:
    layout = NestedLayout((3, 2), (1, 2), (1, 1), (4, 8), (2, 1), (1, 3), (8, 1))
    rows, columns = layout.shape
    program = Program("reduce", 2, (1, 1, 1), 192)
    x = program.load(program.args[0], 0, [0, 0], "f32", layout, strides=[columns, 1])
    total = program.reduce(x, dims, "addf")
    if total.is_tile:
        program.store(total, program.args[1], 0, [0], strides=[1])
    else:
        program.store_scalar(total, program.args[1], 0)
    compare(program, [numbers("f32", rows * columns), np.zeros(rows + columns, np.float32)])


def test_many_changes_of_layout_in_a_loop_share_memory() -> None:
    """Scratch is used again: the simulator would find what is overwritten too early."""
    source, target = blocked((64, 64), (4, 1), (4, 8), 4), blocked((64, 64), (1, 4), (32, 1), 4)
    program = Program("swap", 2, (1, 1, 1), 128)
    x = program.load(program.args[0], 0, [0, 0], "f32", source, strides=[64, 1], vector=4)
    with program.for_(0, 3, 1, [x]) as loop:
        y = program.to_layout(program.binary("arith.addf", loop.carried[0], 1.0), target)
        y = program.binary("arith.mulf", y, program.expand(program.reduce(y, [1], "maximumf"), [1], target))
        loop.yield_([program.to_layout(y, source)])
    program.store(program.to_layout(loop.results[0], target), program.args[1], 0, [0, 0], strides=[64, 1], vector=4)
    compare(program, [numbers("f32", 4096), np.zeros(4096, np.float32)])
    assert int(re.search(r"nova_gpu.shared = (\d+)", level5(program))[1]) <= 64 * 64 * 4 + 1024


@pytest.mark.parametrize("lanes", [4, 32])
def test_lanes_exchange_rounded_products(lanes: int) -> None:
    """A sum of products that are a lane's own may be a multiply-add. A lane that adds another's product to its own
    rounds both, or the two would have different sums; the simulator, which never fuses, cannot tell."""
    layout = blocked((2 * lanes,), (1,), (lanes,), 2)
    contract = "fastmath = #arith.fastmath<contract>"
    for vector, fused in ((1, False), (2, True)):
        program = Program("dot", 2, (1, 1, 1), 32)
        layout = blocked((vector * lanes,), (1,), (lanes,), vector)
        x, y = (program.load(program.args[0], base, [0], "f32", layout, strides=[1]) for base in (0, 64))
        program.store_scalar(
            program.reduce(program.binary("arith.mulf", x, y, contract), [0], "addf"), program.args[1], 0
        )
        ptx = to_ptx(level5(program), "sm_80")
        assert ("fma.rn.f32" in ptx) is fused
        shuffles = ptx[ptx.index("shfl") :]
        assert shuffles.count("add.rn.f32") == lanes.bit_length() - 1 and "fma" not in shuffles


@pytest.mark.parametrize("warps", [8, 16])
def test_groups_of_several_sizes_do_not_meet(warps):
    """Maxima over two, four and eight of the block's warps, one right after the other."""
    bits = warps.bit_length() - 1
    shape = (2,) * bits + (32,)
    strides = tuple(1 << bits - 1 - d for d in range(bits))
    ones, none = (1,) * (bits + 1), (0,) * bits
    layout = NestedLayout((*(2,) * bits, 1), ones, ones, (*(1,) * bits, 32), ones, (*strides, 0), (*none, 1))
    program = Program("sizes", 2, (1, 1, 1), 32 * warps)
    at, steps = [0] * (bits + 1), [int(np.prod(shape[d + 1 :])) for d in range(bits + 1)]
    x = program.load(program.args[0], 0, at, "f32", layout, strides=steps)
    for first in range(bits - 1, 0, -1):
        dims = list(range(first, bits))
        x = program.binary("arith.subf", x, program.expand(program.reduce(x, dims, "maximumf"), dims, layout))
    program.store(x, program.args[1], 0, at, strides=steps)
    size = int(np.prod(shape))
    report = compare(program, [numbers("f32", size), np.zeros(size, np.float32)])
    assert report["sizes"].counters["group barriers"] == bits - 1
