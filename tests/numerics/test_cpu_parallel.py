"""The shape of a CPU kernel: tasks dealt to threads, phases, scratch, and the way from text to object code."""

from __future__ import annotations

import pytest
import torch

from nova import mlir
from nova.cpu import build, compile, parallel, to_llvm
from nova.errors import CompileError
from nova.lowering import lanes as ln
from nova.mlir import ir
from nova.schedule import target as targets
from tests.contraction_text import Case
from tests.kernels import Loaded, load_module, poisoned

ROWS, COLUMNS = 37, 24


def kernel(phases, buffers: int = 2, workspace: parallel.Workspace | None = None) -> Loaded:
    """A kernel over `buffers` tensors of ROWS x COLUMNS floats."""
    with mlir.context(), ir.Location.unknown():
        type_ = ir.RankedTensorType.get([ROWS, COLUMNS], ln.f32())
        module = parallel.emit_kernel("k", [type_] * buffers, phases)
    return load_module(module, "k", workspace.bytes if workspace else 0)


def scaled_copy(source: int, to: int, factor: float):
    """A phase body: row `task` of buffer `to` is `factor` times that of `source`."""

    def emit(region: parallel.Region) -> None:
        with region.tasks() as row, build.loop(0, COLUMNS, 8) as column:
            place = ln.addi(ln.muli(row, ln.index(COLUMNS)), column)
            offset = ln.cast("index_cast", place, ln.int_type(64))
            value = ln.load(ln.address(region.pointers[source], offset, ln.f32()), ln.f32(), 8)
            scaled = ln.mulf(value, ln.constant(value.type, factor))
            ln.store(scaled, ln.address(region.pointers[to], offset, ln.f32()))

    return emit


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cyclic", [False, True])
@pytest.mark.parametrize("most", [1, 2, 16])
def test_every_task_runs_once(threads: int, cyclic: bool, most: int) -> None:
    loaded = kernel([parallel.Phase(ROWS, most, scaled_copy(0, 1, 2.0), cyclic)])
    x, y = torch.randn(ROWS, COLUMNS), poisoned([ROWS, COLUMNS], torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        loaded.call([x], [y])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y, 2 * x)


def test_phases_see_all_of_the_one_before() -> None:
    """Phase 2 reads rows that another thread wrote in phase 1."""

    def mirrored(region: parallel.Region) -> None:
        with region.tasks() as row, build.loop(0, COLUMNS, 8) as column:
            other = ln.subi(ln.index(ROWS - 1), row)
            read, write = (
                ln.cast("index_cast", ln.addi(ln.muli(r, ln.index(COLUMNS)), column), ln.int_type(64))
                for r in (other, row)
            )
            value = ln.load(ln.address(region.pointers[1], read, ln.f32()), ln.f32(), 8)
            ln.store(value, ln.address(region.pointers[2], write, ln.f32()))

    loaded = kernel([parallel.Phase(ROWS, 2, scaled_copy(0, 1, 3.0)), parallel.Phase(ROWS, 2, mirrored)], buffers=3)
    x = torch.randn(ROWS, COLUMNS)
    for _ in range(50):
        y, z = (poisoned([ROWS, COLUMNS], torch.float32) for _ in range(2))
        loaded.call([x], [y, z])
        assert torch.equal(z, (3 * x).flip(0))


def test_no_tasks_do_nothing() -> None:
    loaded = kernel([parallel.Phase(0, 2, scaled_copy(0, 1, 2.0))])
    y = torch.full([ROWS, COLUMNS], 7.0)
    loaded.call([torch.randn(ROWS, COLUMNS)], [y])
    assert (y == 7).all()


def test_each_thread_has_its_own_scratch() -> None:
    """A row goes through scratch that all threads use at the same time."""
    workspace = parallel.Workspace()
    with mlir.context(), ir.Location.unknown():
        shared, own = workspace.shared([3], ln.f32()), workspace.per_thread([COLUMNS], ln.f32(), 2)
    assert (shared.offset, own.offset, own.stride) == (0, 64, 128) and workspace.bytes == 64 + 2 * 128

    def emit(region: parallel.Region) -> None:
        scratch = region.scratch(own)
        with region.tasks() as row:
            with build.loop(0, COLUMNS) as column:
                value = mlir.memref.LoadOp(region.buffers[0], [row, column]).result
                mlir.memref.StoreOp(value, scratch, [column])
            with build.loop(0, COLUMNS) as column:
                value = mlir.memref.LoadOp(scratch, [column]).result
                mlir.memref.StoreOp(value, region.buffers[1], [row, column])

    loaded = kernel([parallel.Phase(ROWS, 2, emit)], workspace=workspace)
    x = torch.randn(ROWS, COLUMNS)
    for _ in range(50):
        y = poisoned([ROWS, COLUMNS], torch.float32)
        loaded.call([x], [y])
        assert torch.equal(x, y)


def test_a_count_of_tasks_known_only_at_run_time() -> None:
    """As in multi-tensor kernels: the first pointer holds the number of tasks."""

    def count(args: ir.Value) -> ir.Value:
        n = ln.load(parallel.load_argument(args, 0), ln.int_type(64))
        return ln.cast("index_cast", n, ln.index_type())

    loaded = kernel([parallel.Phase(count, 2, scaled_copy(1, 2, 5.0))], buffers=3)
    for rows in (0, 1, 20, ROWS):
        x, y = torch.randn(ROWS, COLUMNS), torch.full([ROWS, COLUMNS], 7.0)
        loaded.call([torch.tensor([rows]), x], [y])
        assert torch.equal(y[:rows], 5 * x[:rows]) and (y[rows:] == 7).all()


def test_compiling_the_same_text_gives_the_same_code() -> None:
    text = Case("mk,nk->mn", {"m": 20, "n": 40, "k": 30}, epilogue="gelu").text()
    first, second = (compile.compile_kernel(text, targets.host()) for _ in range(2))
    assert first == second and first.entry == "k" and first.object_code[:4] == b"\x7fELF"


def test_a_kernel_may_lie_in_a_nested_module() -> None:
    text = Case("mk,kn->mn", {"m": 4, "n": 8, "k": 4}).text("inner")
    declaration = 'func.func private @inner() attributes {nova.kernel = "contraction"}'
    nested = f"module {{ {declaration}\n module @kernels {text.removeprefix('module')} }}"
    assert compile.compile_kernel(nested, targets.host()).name == "inner"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module {}", "expected one function with nova.kernel, got 0"),
        ('module { func.func @k() attributes {nova.kernel = "magic"} { return } }', "unknown kind 'magic'"),
    ],
)
def test_what_is_not_a_kernel_is_refused(text: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        compile.compile_kernel(text, targets.host())


def test_llvm_errors_are_nova_errors() -> None:
    with pytest.raises(CompileError, match="LLVM refused"):
        to_llvm.compile_object("define void @f( {", targets.host())


def test_invalid_ir_of_an_emitter_is_a_nova_error() -> None:
    """A shuffle of lanes that are not there: translation to LLVM would abort the process."""

    def emit(region: parallel.Region) -> None:
        value = ln.constant(ln.vector_type(ln.f32(), 4), 1.0)
        ln.store(ln.shuffle(value, value, range(4, 12)), region.pointers[1])

    with pytest.raises(CompileError, match="does not verify"):
        kernel([parallel.Phase(1, 1, emit)])
