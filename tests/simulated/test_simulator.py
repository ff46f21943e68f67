"""The warp simulator: what it computes, what it refuses, and what it counts."""

from __future__ import annotations

import re

import numpy as np
import pytest

from nova.gpu import simulate_values as sv
from nova.gpu.simulate import SimulationError, run

SHARED = "llvm.mlir.global external @nova_smem() {addr_space = 3 : i32, alignment = 1024 : i64} : !llvm.array<0 x i8>"


def kernel(body: str, arguments: int = 2, threads: int = 32, shared: int = 0, extra: str = "") -> str:
    """A module of one kernel. %tid, %lane, %c0, %c1, %sm (shared memory) and pointers %a0, %a1, .. are there."""
    names = ", ".join(f"%a{k}: !llvm.ptr<1>" for k in range(arguments)) + extra
    return f"""
module {{
  {SHARED}
  llvm.func @k({names}) attributes {{gpu.kernel, nvvm.kernel, nvvm.reqntid = array<i32: {threads}>,
                                     nova_gpu.shared = {shared} : i64}} {{
    %tid = nvvm.read.ptx.sreg.tid.x : i32
    %lane = nvvm.read.ptx.sreg.laneid : i32
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %all = arith.constant -1 : i32
    %sm = llvm.mlir.addressof @nova_smem : !llvm.ptr<3>
{body}
    llvm.return
  }}
}}"""


def gep(name: str, base: str, index: str, element: str = "f32", space: int = 1) -> str:
    return (
        f"%{name} = llvm.getelementptr {base}[{index}] : (!llvm.ptr<{space}>, i32) -> !llvm.ptr<{space}>, {element}\n"
    )


def load(name: str, base: str, index: str = "%tid", element: str = "f32", space: int = 1, type_: str = "") -> str:
    return gep(f"{name}_p", base, index, element, space) + (
        f"%{name} = llvm.load %{name}_p : !llvm.ptr<{space}> -> {type_ or element}\n"
    )


def store(value: str, base: str, index: str = "%tid", element: str = "f32", space: int = 1, type_: str = "") -> str:
    name = f"{value.strip('%')}_{base.strip('%')}_q"
    return gep(name, base, index, element, space) + (
        f"llvm.store {value}, %{name} : {type_ or element}, !llvm.ptr<{space}>\n"
    )


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- control flow ----------------------------------------------------------------------------------------------------


def test_loops_run_as_often_as_each_thread_says():
    body = """
    %r = scf.for %i = %c0 to %tid step %c1 iter_args(%s = %c0) -> (i32) : i32 {
      %t = arith.addi %s, %i : i32
      scf.yield %t : i32
    }
""" + store("%r", "%a0", element="i32")  # fmt: skip
    out = np.zeros(32, np.int32)
    run(kernel(body, 1), [out])
    np.testing.assert_array_equal(out, [n * (n - 1) // 2 for n in range(32)])


def test_branches_and_while_loops_differ_by_thread():
    body = """
    %two = arith.constant 2 : i32
    %three = arith.constant 3 : i32
    %r:2 = scf.while (%x = %tid, %n = %c0) : (i32, i32) -> (i32, i32) {
      %more = arith.cmpi sgt, %x, %c1 : i32
      scf.condition(%more) %x, %n : i32, i32
    } do {
    ^bb0(%x: i32, %n: i32):
      %bit = arith.andi %x, %c1 : i32
      %odd = arith.cmpi ne, %bit, %c0 : i32
      %next = scf.if %odd -> (i32) {
        %y = arith.muli %x, %three : i32
        %z = arith.addi %y, %c1 : i32
        scf.yield %z : i32
      } else {
        %y = arith.divui %x, %two : i32
        scf.yield %y : i32
      }
      %m = arith.addi %n, %c1 : i32
      scf.yield %next, %m : i32, i32
    }
""" + store("%r#1", "%a0", element="i32").replace("%r#1_a0_q", "%q").replace("r#1_a0_q", "q")  # fmt: skip

    def steps(x: int) -> int:
        n = 0
        while x > 1:
            x, n = (3 * x + 1 if x % 2 else x // 2), n + 1
        return n

    out = np.zeros(32, np.int32)
    run(kernel(body, 1), [out])
    np.testing.assert_array_equal(out, [steps(x) for x in range(32)])


def test_accesses_of_threads_that_do_not_branch_are_not_made():
    body = "%in = arith.constant 20 : i32\n%c = arith.cmpi slt, %tid, %in : i32\nscf.if %c {\n"
    body += load("x", "%a0") + store("%x", "%a1") + "}\n"
    x, out = floats(20), np.zeros(20, np.float32)
    report = run(kernel(body), [x, out])
    np.testing.assert_array_equal(out, x)
    assert report["k"].global_load.bytes == 80


# --- memory: what it refuses -----------------------------------------------------------------------------------------


def test_an_access_out_of_bounds_names_thread_and_offset():
    with pytest.raises(SimulationError, match=r"k: .*llvm\.load(.|\n)*thread 20, .*4 bytes at offset 80 of argument 0"):
        run(kernel(load("x", "%a0") + store("%x", "%a1")), [floats(20), floats(32)])
    with pytest.raises(SimulationError, match="offset -4 of argument 0"):
        run(kernel("%m = arith.subi %tid, %c1 : i32\n" + load("x", "%a0", "%m")), [floats(32), None])


def test_null_and_misaligned_pointers():
    with pytest.raises(SimulationError, match="null pointer"):
        run(kernel(load("x", "%a0")), [None, None])
    body = load("x", "%a0", element="f32", type_="vector<4xf32>")
    with pytest.raises(SimulationError, match="aligned to 16 bytes, got offset 4"):
        run(kernel(body), [floats(64), None])


def test_shared_memory_has_its_size():
    with pytest.raises(SimulationError, match="4 bytes at offset 64 of 64 bytes of shared memory"):
        run(kernel(load("x", "%a0") + store("%x", "%sm", space=3), shared=64), [floats(32), None])


NEIGHBOUR = "%n0 = arith.addi %tid, %c1 : i32\n%w = arith.constant 31 : i32\n%n = arith.andi %n0, %w : i32\n"
EXCHANGE = load("x", "%a0") + NEIGHBOUR + store("%x", "%sm", space=3)
FETCH = load("y", "%sm", "%n", space=3) + store("%y", "%a1")


def test_a_barrier_orders_threads_and_its_absence_is_a_race():
    x, out = floats(32), np.zeros(32, np.float32)
    run(kernel(EXCHANGE + "nvvm.barrier\n" + FETCH, shared=128), [x, out])
    np.testing.assert_array_equal(out, np.roll(x, -1))
    with pytest.raises(SimulationError, match=r"thread 0, .*reads what thread 1 has written since the last barrier"):
        run(kernel(EXCHANGE + FETCH, shared=128), [x, out])


def by_groups(neighbour: str, warps: int = 2) -> str:
    """128 threads: each writes, the warps of a group synchronise, each reads its `neighbour` (of %tid)."""
    barrier = (
        "%c5 = arith.constant 5 : i32\n%warp = arith.shrui %tid, %c5 : i32\n"
        f"%ws = arith.constant {warps} : i32\n%g = arith.divui %warp, %ws : i32\n%id = arith.addi %g, %c1 : i32\n"
        f"%count = llvm.mlir.constant({warps * 32} : i32) : i32\nnvvm.barrier id = %id number_of_threads = %count\n"
    )
    other = f"%by = arith.constant {neighbour} : i32\n%n = arith.xori %tid, %by : i32\n"
    return load("x", "%a0") + store("%x", "%sm", space=3) + barrier + other + FETCH


def test_a_barrier_of_two_warps_orders_these():
    x, out = floats(128), np.zeros(128, np.float32)
    report = run(kernel(by_groups("32"), shared=512, threads=128), [x, out])
    np.testing.assert_array_equal(out, x[np.arange(128) ^ 32])
    assert report["k"].counters["group barriers"] == 1


def test_groups_of_two_sizes_at_one_barrier_are_found():
    """The first two warps may still be on their way to it as a pair when others wait there for all four."""
    again = "%four = llvm.mlir.constant(128 : i32) : i32\n%first = llvm.mlir.constant(1 : i32) : i32\n"
    again += "nvvm.barrier id = %first number_of_threads = %four\n"
    buffers = [floats(128), np.zeros(128, np.float32)]
    with pytest.raises(SimulationError, match="groups of other than 128 threads may be at this barrier"):
        run(kernel(by_groups("32") + again, shared=512, threads=128), buffers)
    run(kernel(by_groups("32") + "nvvm.barrier\n" + again, shared=512, threads=128), buffers)


def test_and_not_the_others():
    with pytest.raises(SimulationError, match=r"reads what one of warps 2 to 3 has written since the last barrier"):
        run(kernel(by_groups("64"), shared=512, threads=128), [floats(128), floats(128)])


def test_writing_again_needs_the_barrier_of_those_who_read():
    again = "%z = arith.addf %y, %y : f32\n" + store("%z", "%sm", space=3)
    barrier = "nvvm.barrier id = %id number_of_threads = %count\n"
    buffers = [floats(128), floats(128)]
    with pytest.raises(SimulationError, match="writes what thread 32 has read"):
        run(kernel(by_groups("32") + again, shared=512, threads=128), buffers)
    run(kernel(by_groups("32") + barrier + again, shared=512, threads=128), buffers)


def test_groups_have_barriers_of_their_own():
    body = by_groups("32").replace("%id = arith.addi %g, %c1", "%id = arith.addi %c1, %c0")
    with pytest.raises(SimulationError, match="expected a number of 1 to 15 for each 64 neighbours"):
        run(kernel(body, shared=512, threads=128), [floats(128), floats(128)])


def test_writing_what_others_read_is_a_race():
    again = "%z = arith.addf %y, %y : f32\n" + store("%z", "%sm", space=3)
    with pytest.raises(SimulationError, match="writes what thread 31 has read"):
        run(kernel(EXCHANGE + "nvvm.barrier\n" + FETCH + again, shared=128), [floats(32), floats(32)])


def test_two_threads_writing_one_place_is_a_race():
    with pytest.raises(SimulationError, match="in the same instruction"):
        run(kernel(load("x", "%a0") + store("%x", "%sm", "%c0", space=3), shared=128), [floats(32), None])


def test_reading_what_nothing_wrote():
    with pytest.raises(SimulationError, match="uninitialised"):
        run(kernel(load("y", "%sm", space=3), shared=128), [None, None])


def test_a_barrier_that_some_threads_do_not_reach():
    body = "%in = arith.constant 20 : i32\n%c = arith.cmpi slt, %tid, %in : i32\nscf.if %c {\nnvvm.barrier\n}\n"
    with pytest.raises(SimulationError, match="thread 20, .*does not reach"):
        run(kernel(body), [None, None])


def test_blocks_of_a_launch_are_not_ordered():
    """One block reads what another writes, or both write one place; in two launches the same is fine."""
    block = "%b = nvvm.read.ptx.sreg.ctaid.x : i32\n%size = arith.constant 32 : i32\n%at = arith.muli %b, %size : i32\n"
    own, first = "%i = arith.addi %at, %tid : i32\n", "%i = arith.addi %c0, %tid : i32\n"
    write = "%x = arith.constant 1.0 : f32\n" + store("%x", "%a0", "%i")
    buffers = [floats(64), np.zeros(64, np.float32)]
    run(kernel(block + own + write), buffers, grid=(2, 1, 1))
    with pytest.raises(SimulationError, match="writes what another block has written in the same launch"):
        run(kernel(block + first + write), buffers, grid=(2, 1, 1))
    run(kernel(block + first + write), buffers, grid=(2, 1, 1), ordered=False)
    ahead = "%j = arith.addi %size, %tid : i32\n" + load("y", "%a0", "%j")
    with pytest.raises(SimulationError, match="writes what another block has read in the same launch"):
        run(kernel(block + own + ahead + write), buffers, grid=(2, 1, 1))
    behind = "%o = arith.subi %at, %at : i32\n%j = arith.addi %o, %tid : i32\n" + load("y", "%a0", "%j")
    with pytest.raises(SimulationError, match="reads what another block has written in the same launch"):
        run(kernel(block + own + write + behind), buffers, grid=(2, 1, 1))


def test_threads_meet_in_global_memory_only_at_barriers():
    write = "%x = arith.constant 1.0 : f32\n" + store("%x", "%a0")
    fetch = NEIGHBOUR + load("y", "%a0", "%n") + store("%y", "%a1")
    buffers = [floats(32), np.zeros(32, np.float32)]
    run(kernel(write + "nvvm.barrier\n" + fetch), buffers)
    with pytest.raises(SimulationError, match="reads what thread 1 has written since the last barrier"):
        run(kernel(write + fetch), buffers)
    with pytest.raises(SimulationError, match="in global memory"):
        run(kernel("%x = arith.constant 1.0 : f32\n" + store("%x", "%a0", "%c0")), buffers)


# --- asynchronous copies ---------------------------------------------------------------------------------------------

COPY = (
    gep("from", "%a0", "%tid", "vector<4xf32>") + gep("to", "%sm", "%tid", "vector<4xf32>", 3)
    + "nvvm.cp.async.shared.global %to, %from, 16, cache = cg : !llvm.ptr<3>, !llvm.ptr<1>\n"
    + "nvvm.cp.async.commit.group\n"
)  # fmt: skip
READ_NEXT = NEIGHBOUR + load("y", "%sm", "%n", "vector<4xf32>", 3) + store("%y", "%a1", element="vector<4xf32>")


def test_asynchronous_copies_are_waited_for():
    x, out = floats(32, 4), np.zeros((32, 4), np.float32)
    body = COPY + "nvvm.cp.async.wait.group 0\nnvvm.barrier\n" + READ_NEXT
    report = run(kernel(body, shared=512), [x, out])
    np.testing.assert_array_equal(out, np.roll(x, -1, axis=0))
    assert report["k"].global_load.bytes == 512 and report["k"].shared_store.wavefronts == 4
    with pytest.raises(SimulationError, match="asynchronous copy still fills"):
        run(kernel(COPY + "nvvm.barrier\n" + READ_NEXT, shared=512), [x, out])
    with pytest.raises(SimulationError, match="asynchronous copy still fills"):
        run(kernel(COPY + "nvvm.cp.async.wait.group 1\nnvvm.barrier\n" + READ_NEXT, shared=512), [x, out])
    with pytest.raises(SimulationError, match="reads what thread 1 has written since the last barrier"):
        run(kernel(COPY + "nvvm.cp.async.wait.group 0\n" + READ_NEXT, shared=512), [x, out])


def test_a_copy_reads_only_its_source_size_and_fills_with_zeros():
    size = "%four = arith.constant 4 : i32\n%few = arith.constant 30 : i32\n%c = arith.cmpi slt, %tid, %few : i32\n"
    size += "%sixteen = arith.constant 16 : i32\n%size = arith.select %c, %sixteen, %c0 : i32\n"
    copy = COPY.replace(
        "cache = cg : !llvm.ptr<3>, !llvm.ptr<1>", "cache = cg, %size : !llvm.ptr<3>, !llvm.ptr<1>, i32"
    )
    x, out = floats(30, 4), np.ones((32, 4), np.float32)
    run(kernel(size + copy + "nvvm.cp.async.wait.group 0\nnvvm.barrier\n" + READ_NEXT, shared=512), [x, out])
    np.testing.assert_array_equal(out, np.roll(np.concatenate([x, np.zeros((2, 4), np.float32)]), -1, axis=0))


# --- warps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "clamp", "source"),
    [
        ("bfly", 31, lambda i: i ^ 5),
        ("down", 31, lambda i: i + 5 if i + 5 < 32 else i),
        ("up", 0, lambda i: i - 5 if i >= 5 else i),
        ("idx", 31, lambda i: 5),
        ("down", 31 | 24 << 8, lambda i: i + 5 if (i + 5) // 8 == i // 8 else i),
    ],
)
def test_shuffles(mode, clamp, source):
    body = f"%o = arith.constant 5 : i32\n%cl = arith.constant {clamp} : i32\n" + load("x", "%a0")
    body += f"%y = nvvm.shfl.sync {mode} %all, %x, %o, %cl : f32 -> f32\n" + store("%y", "%a1")
    x, out = floats(64), np.zeros(64, np.float32)
    run(kernel(body, threads=64), [x, out])
    np.testing.assert_array_equal(out, [x[32 * (i // 32) + source(i % 32)] for i in range(64)])


def test_a_shuffle_waits_for_the_threads_of_its_mask():
    body = "%in = arith.constant 16 : i32\n%c = arith.cmpi slt, %tid, %in : i32\n%cl = arith.constant 31 : i32\n"
    body += "scf.if %c {\n%y = nvvm.shfl.sync bfly %all, %tid, %c1, %cl : i32 -> i32\n}\n"
    with pytest.raises(SimulationError, match="waits for threads that do not get here"):
        run(kernel(body), [None, None])


def test_a_block_of_less_than_a_warp_shuffles_among_itself():
    body = "%cl = arith.constant 31 : i32\n%y = nvvm.shfl.sync bfly %all, %tid, %c1, %cl : i32 -> i32\n"
    out = np.zeros(8, np.int32)
    run(kernel(body + store("%y", "%a0", element="i32"), 1, threads=8), [out])
    np.testing.assert_array_equal(out, np.arange(8) ^ 1)
    with pytest.raises(SimulationError, match="thread 6 shuffles from thread 7, which does not take part"):
        run(kernel(body + store("%y", "%a0", element="i32"), 1, threads=7), [out])


MATRIX = (
    "#nvvm.mma_layout<{}>, shape = #nvvm.ld_st_matrix_shape<m = 8, n = 8>, eltType = #nvvm.ld_st_matrix_elt_type<b16>"
)


def _fill_shared(count: int) -> str:
    """Copies `count` f32 words a thread from %a0 to shared memory."""
    type_ = f"vector<{count}xf32>"
    return load("w", "%a0", element=type_) + store("%w", "%sm", element=type_, space=3) + "nvvm.barrier\n"


@pytest.mark.parametrize("layout", ["row", "col"])
def test_ldmatrix_and_stmatrix(layout):
    """Thread t names row t of 32 rows of 16 bytes; register m of lane l is a pair of matrix m."""
    body = _fill_shared(4) + gep("row", "%sm", "%tid", "vector<4xf32>", 3)
    fields = "!llvm.struct<(i32, i32, i32, i32)>"
    body += (
        f"%r = nvvm.ldmatrix %row {{num = 4 : i32, layout = {MATRIX.format(layout)}}} : (!llvm.ptr<3>) -> {fields}\n"
    )
    body += "".join(f"%r{m} = llvm.extractvalue %r[{m}] : {fields}\n" for m in range(4))
    body += "%v = vector.from_elements %r0, %r1, %r2, %r3 : vector<4xi32>\n" + store(
        "%v", "%a1", element="vector<4xi32>"
    )
    body += "nvvm.barrier\n"
    attributes = MATRIX.format(layout)
    body += f"nvvm.stmatrix %row, %r0, %r1, %r2, %r3 {{layout = {attributes}}} : !llvm.ptr<3>, i32, i32, i32, i32\n"
    body += "nvvm.barrier\n" + load("back", "%sm", element="vector<4xf32>", space=3)
    body += store("%back", "%a2", element="vector<4xf32>")
    words = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)  # matrix, row, column
    out, back = np.zeros((32, 4, 2), np.uint16), np.zeros((4, 8, 8), np.uint16)
    run(kernel(body, 3, shared=512), [words.view(np.float32), out, back.view(np.float32)])
    for lane in range(32):
        for m in range(4):
            matrix = words[m].T if layout == "col" else words[m]
            np.testing.assert_array_equal(out[lane, m], matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2])
    np.testing.assert_array_equal(back, words)


FRAGMENTS = {
    "bf16": ((16, 8, 16), 4, 2, "i32", 2), "f16": ((16, 8, 16), 4, 2, "vector<2xf16>", 2),
    "tf32": ((16, 8, 8), 4, 2, "i32", 1), "f64": ((8, 8, 4), 1, 1, "f64", 1),
}  # fmt: skip


def _mma(element: str) -> str:
    """One tensor-core product of fragments, whose registers thread by thread are the three operands."""
    (m, n, k), a, b, register, _ = FRAGMENTS[element]
    c, out = (2, "f64") if element == "f64" else (4, "f32")

    def registers(name: str, count: int, base: str, type_: str) -> str:
        size = {"i32": 4, "f32": 4, "f64": 8}.get(type_, 4)
        array = f"!llvm.array<{count} x {type_}>"
        text = ""
        for j in range(count):
            text += (
                f"%{name}{j}_p = llvm.getelementptr {base}[%tid, {j}] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {array}\n"
            )
            text += f"%{name}{j} = llvm.load %{name}{j}_p {{alignment = {size} : i64}} : !llvm.ptr<1> -> {type_}\n"
        return text

    body = registers("fa", a, "%a0", register) + registers("fb", b, "%a1", register) + registers("fc", c, "%a2", out)
    lists = [", ".join(f"%{x}{j}" for j in range(count)) for x, count in (("fa", a), ("fb", b), ("fc", c))]
    struct = f"!llvm.struct<({', '.join([out] * c)})>"
    kinds = "" if element in ("f16", "f64") else (
        f"multiplicandAPtxType = #nvvm.mma_type<{element}>, multiplicandBPtxType = #nvvm.mma_type<{element}>, "
    )  # fmt: skip
    body += f"""
    %d = nvvm.mma.sync A[{lists[0]}] B[{lists[1]}] C[{lists[2]}] {{layoutA = #nvvm.mma_layout<row>,
         layoutB = #nvvm.mma_layout<col>, {kinds}shape = #nvvm.shape<m = {m}, n = {n}, k = {k}>}}
         : ({register}, {register}, {out}) -> {struct}
"""
    body += "".join(f"%d{j} = llvm.extractvalue %d[{j}] : {struct}\n" for j in range(c))
    body += f"%v = vector.from_elements {', '.join(f'%d{j}' for j in range(c))} : vector<{c}x{out}>\n"
    return body + store("%v", "%a3", element=f"vector<{c}x{out}>")


def _encode(values: np.ndarray, element: str) -> np.ndarray:
    if element == "bf16":
        return sv.f32_to_bf16(values)
    return values.astype({"f16": np.float16, "tf32": np.float32, "f64": np.float64}[element])


def _fragment(matrix: np.ndarray, rows, columns) -> np.ndarray:
    return np.stack([matrix[r, c] for r, c in zip(rows, columns, strict=True)], axis=-1)


@pytest.mark.parametrize("element", FRAGMENTS)
def test_tensor_cores_multiply_fragments_as_the_ptx_manual_lays_them_out(element):
    (m, n, k), _, _, _, packed = FRAGMENTS[element]
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, shape).astype(np.float64) for shape in ((m, k), (k, n)))
    c = rng.integers(-8, 8, (m, n)).astype(np.float64)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    halves = range(m // 8)
    steps = range(k // (4 * packed))
    a_places = [(g + 8 * h, packed * t + e + 4 * packed * s) for s in steps for h in halves for e in range(packed)]
    b_places = [(packed * t + e + 4 * packed * s, g) for s in steps for e in range(packed)]
    c_places = [(g + 8 * h, 2 * t + e) for h in halves for e in range(2)]
    wide = np.float64 if element == "f64" else np.float32
    operands = [_encode(_fragment(x, *zip(*places)), element) for x, places in ((a, a_places), (b, b_places))]
    start, out = _fragment(c, *zip(*c_places)).astype(wide), np.zeros((32, len(c_places)), wide)
    report = run(kernel(_mma(element), 4), [*operands, start, out])
    np.testing.assert_array_equal(out, _fragment(a @ b + c, *zip(*c_places)))
    assert sum(count for name, count in report["k"].counters.items() if name.startswith("mma.")) == 1


def test_tf32_operands_are_truncated():
    one = np.float32(1) + np.float32(2.0**-11)
    assert sv.truncate_tf32(np.array([one]))[0] == 1
    assert sv.round_tf32(np.array([one]))[0] == np.float32(1) + np.float32(2.0**-10)
    body = load("x", "%a0") + '%y = "nvvm.convert.float.to.tf32"(%x) {rnd = #nvvm.fp_rnd_mode<rna>} : (f32) -> i32\n'
    out = np.zeros(32, np.float32)
    run(kernel(body + store("%y", "%a1", element="i32")), [np.full(32, one), out])
    assert (out == np.float32(1) + np.float32(2.0**-10)).all()


def test_tensor_cores_want_whole_warps():
    body = (
        "%in = arith.constant 16 : i32\n%half = arith.cmpi slt, %tid, %in : i32\nscf.if %half {\n"
        + _mma("tf32")
        + "}\n"
    )
    with pytest.raises(SimulationError, match="only some of its threads get here"):
        run(kernel(body, 4), [floats(32, 4), floats(32, 2), floats(32, 4), floats(32, 4)])


# --- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "sectors", "passes"), [(1, 4, 1), (2, 8, 2), (8, 32, 8), (32, 32, 32), (33, 32, 1)])
def test_sectors_and_bank_conflicts(stride, sectors, passes):
    body = f"%s = arith.constant {stride} : i32\n%i = arith.muli %tid, %s : i32\n"
    body += load("x", "%a0", "%i") + store("%x", "%sm", "%i", space=3)
    report = run(kernel(body, shared=32 * 33 * 4), [floats(32 * 33), None])["k"]
    assert (report.global_load.requests, report.global_load.bytes, report.global_load.sectors) == (1, 128, sectors)
    assert report.shared_store.wavefronts == passes and report.bank_conflicts == passes - 1


def test_wide_shared_accesses_go_by_quarter_warps():
    body = load("x", "%a0", element="vector<4xf32>") + store("%x", "%sm", element="vector<4xf32>", space=3)
    report = run(kernel(body, shared=512), [floats(128), None])["k"]
    assert report.shared_store.wavefronts == report.shared_store.ideal == 4


def test_blocks_and_instructions():
    body = "%b = nvvm.read.ptx.sreg.ctaid.y : i32\n%first = arith.cmpi eq, %tid, %c0 : i32\nscf.if %first {\n"
    body += store("%b", "%a0", "%b", "i32") + "}\n"
    out = np.full(3, -1, np.int32)
    report = run(kernel(body, 1, threads=64), [out], grid=(1, 3, 1))["k"]
    np.testing.assert_array_equal(out, [0, 1, 2])
    assert report.blocks == 3 and report.instructions["llvm.store"] == 3


# --- arguments -------------------------------------------------------------------------------------------------------


def test_arrays_given_twice_are_one_memory_and_scalars_are_values():
    body = load("x", "%a0") + "%y = arith.addf %x, %f : f32\n" + store("%y", "%a1")
    x = floats(32)
    want = x + np.float32(2)
    run(kernel(body, extra=", %f: f32"), [x, x, 2.0])
    np.testing.assert_array_equal(x, want)


def test_addresses_in_tables():
    body = "%e = llvm.load %a0 : !llvm.ptr<1> -> i64\n%t = llvm.inttoptr %e : i64 to !llvm.ptr<1>\n"
    body += load("x", "%t") + store("%x", "%a1")
    x, out = floats(32), np.zeros(32, np.float32)
    run(kernel(body), [np.array([x.ctypes.data]), out], memory=[x])
    np.testing.assert_array_equal(out, x)
    with pytest.raises(SimulationError, match="is in no buffer"):
        run(kernel(body), [np.array([16]), out], memory=[x])


def test_an_operation_it_does_not_know_is_named():
    body = "%x = nvvm.read.ptx.sreg.clock : i32\n"
    with pytest.raises(NotImplementedError, match=re.escape("nvvm.read.ptx.sreg.clock")):
        run(kernel(body), [None, None])


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_bf16_rounds_to_nearest_even():
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    want = torch.from_numpy(values).to(torch.bfloat16)
    got = sv.bf16_to_f32(sv.f32_to_bf16(values))
    np.testing.assert_array_equal(got, want.float().numpy())


def test_conversions_saturate_like_the_hardware():
    to_int = sv.convert("fptosi", sv.Kind("f32"), sv.Kind("i32"))
    got = to_int(np.array([1.9, -1.9, 3e9, -3e9, np.nan, np.inf], np.float32))
    np.testing.assert_array_equal(got, [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1])
