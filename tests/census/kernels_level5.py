"""Level-5 text by hand: the forms that generated code is made of, and the instructions they become."""

from __future__ import annotations

from census.machine_code import Kernel

SHARED = "llvm.mlir.global external @nova_smem() {addr_space = 3 : i32, alignment = 1024 : i64} : !llvm.array<0 x i8>"
LDMATRIX = (
    "layout = #nvvm.mma_layout<row>, shape = #nvvm.ld_st_matrix_shape<m = 8, n = 8>, "
    "eltType = #nvvm.ld_st_matrix_elt_type<b16>"
)
FLOATS = "!llvm.struct<(f32, f32, f32, f32)>"
WORDS = "!llvm.struct<(i32, i32, i32, i32)>"


def module(body: str, threads: int = 256) -> str:
    return f"""
module {{
  {SHARED}
  llvm.func @k(%a: !llvm.ptr<1>, %b: !llvm.ptr<1>, %n: i32) attributes {{gpu.kernel, nvvm.kernel,
      nvvm.reqntid = array<i32: {threads}>}} {{
    %tid = nvvm.read.ptx.sreg.tid.x : i32
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %sm = llvm.mlir.addressof @nova_smem : !llvm.ptr<3>
{body}
    llvm.return
  }}
}}"""


def elementwise(element: str, lanes: int, body: str) -> str:
    """Loads %x of `lanes` elements with one address a thread, stores %y."""
    type_ = f"vector<{lanes}x{element}>"
    return module(f"""
    %p = llvm.getelementptr %a[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<{lanes} x {element}>
    %x = llvm.load %p {{alignment = 16 : i64}} : !llvm.ptr<1> -> {type_}
{body}
    %q = llvm.getelementptr %b[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<{lanes} x {element}>
    llvm.store %y, %q {{alignment = 16 : i64}} : {type_}, !llvm.ptr<1>
""")


def narrow(body: str) -> str:
    """Eight bf16 computed in f32: %u to %v."""
    return elementwise("bf16", 8, f"""
    %u = arith.extf %x : vector<8xbf16> to vector<8xf32>
{body}
    %y = arith.truncf %v : vector<8xf32> to vector<8xbf16>
""")  # fmt: skip


def warp_sum() -> str:
    body = "%w = arith.constant 31 : i32\n%all = arith.constant -1 : i32\n%s0 = vector.extract %x[0] : f32 from vector<4xf32>\n"
    for k, distance in enumerate((16, 8, 4, 2, 1)):
        body += f"""
    %d{k} = arith.constant {distance} : i32
    %o{k} = nvvm.shfl.sync bfly %all, %s{k}, %d{k}, %w : f32 -> f32
    %s{k + 1} = arith.addf %s{k}, %o{k} : f32"""
    return elementwise("f32", 4, body + "\n    %y = vector.broadcast %s5 : f32 to vector<4xf32>")


def product_loop(tiles: int, element: str) -> str:
    """A loop of cp.async, ldmatrix and mma.sync that carries 4 `tiles` accumulators in one vector."""
    lanes, k = 4 * tiles, 16 if element == "bf16" else 8
    kinds = f"multiplicandAPtxType = #nvvm.mma_type<{element}>, multiplicandBPtxType = #nvvm.mma_type<{element}>"
    body = f"""
    %zero = arith.constant dense<0.0> : vector<{lanes}xf32>
    %from = llvm.getelementptr %a[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<16 x i8>
    %to = llvm.getelementptr %sm[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, !llvm.array<16 x i8>
    %sum = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero) -> (vector<{lanes}xf32>) : i32 {{
      %next = llvm.getelementptr %from[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<4096 x i8>
      nvvm.cp.async.shared.global %to, %next, 16, cache = cg : !llvm.ptr<3>, !llvm.ptr<1>
      nvvm.cp.async.commit.group
      nvvm.cp.async.wait.group 0
      nvvm.barrier
      %fa = nvvm.ldmatrix %to {{num = 4 : i32, {LDMATRIX}}} : (!llvm.ptr<3>) -> {WORDS}
"""
    body += "".join(f"%a{j} = llvm.extractvalue %fa[{j}] : {WORDS}\n" for j in range(4))
    for t in range(tiles):
        if t % 2 == 0:
            body += f"""
      %p{t} = llvm.getelementptr %to[{4096 + 512 * t}] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8
      %fb{t} = nvvm.ldmatrix %p{t} {{num = 4 : i32, {LDMATRIX}}} : (!llvm.ptr<3>) -> {WORDS}
"""
        pair = f"%fb{t - t % 2}"
        body += "".join(f"%b{t}_{j} = llvm.extractvalue {pair}[{2 * (t % 2) + j}] : {WORDS}\n" for j in range(2))
        body += "".join(
            f"%c{t}_{j} = vector.extract %acc[{4 * t + j}] : f32 from vector<{lanes}xf32>\n" for j in range(4)
        )
        body += f"""
      %d{t} = nvvm.mma.sync A[%a0, %a1, %a2, %a3] B[%b{t}_0, %b{t}_1] C[%c{t}_0, %c{t}_1, %c{t}_2, %c{t}_3]
        {{layoutA = #nvvm.mma_layout<row>, layoutB = #nvvm.mma_layout<col>, {kinds},
          shape = #nvvm.shape<m = 16, n = 8, k = {k}>}} : (i32, i32, f32) -> {FLOATS}
"""
        body += "".join(f"%e{t}_{j} = llvm.extractvalue %d{t}[{j}] : {FLOATS}\n" for j in range(4))
    names = ", ".join(f"%e{t}_{j}" for t in range(tiles) for j in range(4))
    body += f"""
      %made = vector.from_elements {names} : vector<{lanes}xf32>
      nvvm.barrier
      scf.yield %made : vector<{lanes}xf32>
    }}
"""
    for t in range(tiles):
        body += f"""
    %v{t} = vector.extract_strided_slice %sum {{offsets = [{4 * t}], sizes = [4], strides = [1]}}
      : vector<{lanes}xf32> to vector<4xf32>
    %q{t} = llvm.getelementptr %b[%tid, {t}] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<{tiles} x vector<4xf32>>
    llvm.store %v{t}, %q{t} {{alignment = 16 : i64}} : vector<4xf32>, !llvm.ptr<1>
"""
    return module(body)


ONE_ACCESS = {"LDG.E.128": 1, "STG.E.128": 1, "LDG": 1, "STG": 1}

KERNELS = [
    Kernel("copy", lambda arch: elementwise("f32", 4, "%y = arith.negf %x : vector<4xf32>"), ONE_ACCESS, registers=32),
    Kernel(
        "bf16_exp", lambda arch: narrow("%v = math.exp %u : vector<8xf32>"), {**ONE_ACCESS, "MUFU.EX2": 8, "BRA": 1}
    ),
    Kernel(
        "bf16_tanh",
        lambda arch: narrow("%v = math.tanh %u : vector<8xf32>"),
        {**ONE_ACCESS, "MUFU.EX2": 8, "MUFU.RCP": 8, "BRA": 1},
    ),
    Kernel(
        "approximate_exp2",
        lambda arch: elementwise("f32", 4, "%y = math.exp2 %x fastmath<afn> : vector<4xf32>"),
        {**ONE_ACCESS, "MUFU.EX2": 4, "FMUL": 0, "FSETP": 0},
    ),
    Kernel(
        "maximum",
        lambda arch: narrow(
            "%z = arith.constant dense<0.0> : vector<8xf32>\n%v = arith.maximumf %u, %z : vector<8xf32>"
        ),
        {**ONE_ACCESS, "HMNMX2.BF16_V2.NAN": 4},  # LLVM sees that nothing is lost in bf16 itself
    ),
    Kernel("warp_sum", lambda arch: warp_sum(), {"LDG": 1, "STG.E.128": 1, "SHFL.BFLY": 5, "FADD": 5}, registers=32),
    Kernel(
        "reciprocal",
        lambda arch: elementwise("f32", 4, "%y = arith.divf %x, %x fastmath<arcp> : vector<4xf32>"),
        {**ONE_ACCESS, "MUFU.RCP": 4, "CALL": 0, "BRA": 1},
    ),
    Kernel(
        "bf16_product",
        lambda arch: product_loop(16, "bf16"),
        {"LDGSTS.E.BYPASS.128": (1, 8), "LDSM.16.M88.4": (9, 72), "HMMA.16816.F32.BF16": (16, 128), "STG.E.128": 16},
    ),
    Kernel(
        "tf32_product",
        lambda arch: product_loop(16, "tf32"),
        {"LDGSTS.E.BYPASS.128": (1, 8), "LDSM.16.M88.4": (9, 72), "HMMA.1688.F32.TF32": (16, 128), "STG.E.128": 16},
    ),
    Kernel(
        "large_accumulators",  # 192 registers carried as one vector
        lambda arch: product_loop(48, "bf16"),
        {"HMMA.16816.F32.BF16": (48, 384), "STG.E.128": 48},
    ),
]
