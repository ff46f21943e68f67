"""Launches that may begin while the one before them ends: what a thread does first, and how the host asks for it."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest

from nova import mlir
from nova.gpu import launcher
from nova.gpu.compile import launches_of
from nova.gpu.distribute import distribute
from nova.gpu.launcher import Launch
from nova.gpu.to_ptx import to_ptx
from nova.runtime import orc
from nova.schedule import target
from nova.tile.builder import Program, module_text
from nova.tile.layout import blocked

LAYOUT = blocked((64,), (2,), (32,), 1)


def program(loop: bool, guard: bool) -> Program:
    p = Program("k", 4, (3, 1, 1), 64)
    start = p.splat(0.0, (64,), "f32", LAYOUT)
    if loop:
        with p.for_(0, p.add(p.program_id(0), 40), 1, [start]) as body:
            x = p.load(p.args[0], 0, [body.index], "f32", LAYOUT, strides=[1])
            body.yield_([p.binary("arith.addf", body.carried[0], x)])
        x = body.results[0]
    else:
        x = p.load(p.args[0], 0, [0], "f32", LAYOUT, strides=[1])
    p.store(x, p.args[1], 0, [0], strides=[1])
    if guard:
        p.guard_first()
    return p


def code(text: str, dependent: bool) -> str:
    with mlir.context():
        return distribute(mlir.parse(text), dependent)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("guard", [False, True])
def test_every_thread_waits_before_it_touches_memory(loop: bool, guard: bool) -> None:
    """Also before it looks at the step's flag; and lets the next launch begin only after that."""
    ptx = to_ptx(code(module_text([program(loop, guard)]), True), "sm_90a")
    lines = [line.strip() for line in ptx.splitlines()]
    wait = next(i for i, line in enumerate(lines) if line.startswith("griddepcontrol.wait"))
    allow = [i for i, line in enumerate(lines) if line.startswith("griddepcontrol.launch_dependents")]
    before = [
        x for x in lines[:wait] if "ld.global" in x or "st.global" in x or x.startswith(("@", "bra", "ret", "bar"))
    ]
    assert not before and allow and min(allow) > wait
    assert any("ld.global" in line for line in lines[wait:])
    if loop:
        back = [i for i, line in enumerate(lines) if line.startswith("@") and "bra" in line]
        assert min(allow) > (back[1] if guard else back[0])  # the guard's own comes first


@pytest.mark.parametrize(
    ("board", "dependent"), [("a100", False), ("rtx3060", False), ("rtx6000ada", False), ("h200", True)]
)
def test_boards_without_dependent_launches_have_none(board: str, dependent: bool) -> None:
    found = target.by_name(board)
    assert found.dependent_launch is dependent
    text = code(module_text([program(True, True)]), found.dependent_launch)
    assert ("griddepcontrol" in text) is dependent
    with mlir.context():
        (launch,), _ = launches_of(mlir.parse(text))
    assert launch.dependent is dependent
    assert ("call i32 %launch_ex" in launcher.host_ir("k", [launch])) is dependent


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Value(ctypes.Union):
    """CUlaunchAttributeValue: some of its members, and the padding that gives its size."""

    _fields_ = [("pad", ctypes.c_char * 64), ("allowed", ctypes.c_int), ("pointer", ctypes.c_void_p)]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: the value lies 8 bytes after the id."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", Value)]


def test_the_launcher_speaks_the_drivers_structures() -> None:
    """One dependent launch among others: grid, block, memory, stream, attribute and parameters are where cuda.h has them."""
    plain = Launch("a", (7, 2, 3), 96, 1024, 3)
    launches = [plain, dataclasses.replace(plain, symbol="b", grid=(70000, 5, 6), shared=232448, dependent=True), plain]
    seen = []

    def launch(function, *numbers):
        seen.append((function, numbers[:7], numbers[7], None))
        return 0

    def launch_ex(config, function, params, extra):
        c = Config.from_address(config)
        a = Attribute.from_address(c.attributes)
        words = (ctypes.c_void_p * 5).from_address(extra)
        size = ctypes.c_size_t.from_address(words[3]).value
        assert not params and (words[0], words[2], words[4], size) == (1, 2, None, 24)
        numbers = (c.gx, c.gy, c.gz, c.bx, c.by, c.bz, c.shared)
        seen.append((function, numbers, c.stream, (c.count, a.id, a.value.allowed, words[1])))
        return 0

    pointer = ctypes.c_void_p
    kinds = (
        ctypes.CFUNCTYPE(ctypes.c_int, pointer, *[ctypes.c_uint] * 7, pointer, pointer, pointer),
        ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer),
    )
    functions = kinds[0](launch), kinds[1](launch_ex)
    library = orc.load(orc.compile_ir(launcher.host_ir("entry", launches), 0), ["entry", launcher.CONTEXT])
    stream, status = ctypes.c_uint64(55), ctypes.c_uint64(0)
    words = [ctypes.cast(f, pointer).value for f in functions]
    words += [ctypes.addressof(stream), ctypes.addressof(status), 101, 102, 103]
    (ctypes.c_uint64 * len(words)).from_address(library[launcher.CONTEXT])[:] = words
    table = (ctypes.c_uint64 * 3)()
    ctypes.CFUNCTYPE(None, pointer)(library["entry"])(ctypes.addressof(table))
    assert [f for f, *_ in seen] == [101, 102, 103] and status.value == 0
    assert seen[1][1:] == ((70000, 5, 6, 96, 1, 1, 232448), 55, (1, 6, 1, ctypes.addressof(table)))
    assert seen[0][1:3] == seen[2][1:3] == ((7, 2, 3, 96, 1, 1, 1024), 55)
