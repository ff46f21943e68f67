"""What ptxas makes of per-thread code: wide accesses, constants folded into them, no spills, no branches in a tile."""

import pytest
from tile_programs import level5

from nova.gpu import ptxas
from nova.gpu.to_ptx import to_ptx
from nova.tile.builder import Program
from nova.tile.layout import NestedLayout, blocked

pytestmark = pytest.mark.skipif(
    ptxas.find_ptxas() is None or ptxas.find_nvdisasm() is None, reason="ptxas and nvdisasm are needed"
)
WIDTHS = {"f32": 4, "f64": 2, "bf16": 8, "f16": 8, "i1": 16, "i8": 16, "i16": 8, "i32": 4, "i64": 2}


def machine_code(program: Program, arch: str) -> list[ptxas.Instruction]:
    """The instructions of the program's kernel, which must not spill."""
    assembled = ptxas.assemble(to_ptx(level5(program), arch), arch)
    assert assembled.kernels[program.name].clean and not assembled.warnings
    return ptxas.disassemble(assembled.cubin)[program.name]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("element", sorted(WIDTHS))
def test_tiles_move_16_bytes_at_a_time(element: str, checked: bool, arch: str) -> None:
    """Whether or not the bounds are checked: four accesses, one address, and no branch around any of them."""
    width = WIDTHS[element]
    layout = blocked((4 * 128 * width,), (4,), (32,), width)
    program = Program("copy", 2, (9, 1, 1), 128)
    at = program.mul(program.program_id(0), layout.shape[0])
    window = {"strides": [1], "vector": width, "extents": [9 * layout.shape[0] - width] if checked else None}
    tile = program.load(program.args[0], 0, [at], element, layout, **window)
    program.store(tile, program.args[1], 0, [at], **window)
    code = machine_code(program, arch)
    for name in ("LDG", "STG"):
        assert ptxas.count(code, f"{name}.E.128") == ptxas.count(code, name) == 4
    first = next(i for i, one in enumerate(code) if one.opcode.startswith("LDG"))
    last = max(i for i, one in enumerate(code) if one.opcode.startswith("STG"))
    assert not any(one.opcode.startswith("BRA") for one in code[first:last])
    assert sum(one.opcode.startswith("IMAD.WIDE") for one in code) <= 4


def test_a_transposition_has_wide_accesses_on_both_sides() -> None:
    layout = NestedLayout((4, 1), (2, 1), (1, 1), (2, 16), (4, 4), (1, 0), (16, 1))
    program = Program("transpose", 2, (2, 2, 1), 128)
    i, j = program.mul(program.program_id(0), 64), program.mul(program.program_id(1), 64)
    x = program.load(program.args[0], 0, [i, j], "f32", layout, strides=[128, 1], vector=4)
    y = program.to_layout(program.transpose(x, [1, 0]), layout)
    program.store(y, program.args[1], 0, [j, i], strides=[128, 1], vector=4)
    code = machine_code(program, "sm_80")
    for name in ("LDG.E.128", "STS.128", "LDS.128", "STG.E.128"):
        assert ptxas.count(code, name) == 8


def test_a_reduction_is_shuffles_and_one_round_through_shared_memory() -> None:
    layout = blocked((1, 1024), (1, 8), (1, 32), 4)
    program = Program("sum", 2, (16, 1, 1), 256)
    x = program.load(program.args[0], 0, [program.program_id(0), 0], "f32", layout, strides=[1024, 1], vector=4)
    program.store(program.reduce(x, [1], "addf"), program.args[1], 0, [program.program_id(0)], strides=[1])
    code = machine_code(program, "sm_90a")
    counts = {name: ptxas.count(code, name) for name in ("SHFL", "STS", "LDS.128", "BAR")}
    assert counts == {"SHFL": 5, "STS": 1, "LDS.128": 2, "BAR": 1}
