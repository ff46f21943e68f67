"""Updates of many tensors, scatters and scans."""

from __future__ import annotations

from census.machine_code import Kernel, level5

from nova import mlir
from nova.dialect.base import segment_texts
from nova.tile import guarded_copy

LISTS = "%p: tensor<2x{0}> {{nova.list}}, %g: tensor<2x{0}> {{nova.list}}, %m: tensor<2x{0}> {{nova.list}}, "
RESULTS = (
    "(tensor<2x{0}> {{nova.list}}, tensor<2x{0}> {{nova.list}}, tensor<2x{0}> {{nova.list}}, tensor<f32> {{nova.list}})"
)
ADAM = (
    "module {{\nfunc.func private @adam(" + LISTS + "%v: tensor<2x{0}> {{nova.list}}, %s: tensor<f32> {{nova.list}}, "
    "%lr: tensor<f64>, %b1: tensor<f64>, %b2: tensor<f64>, %eps: tensor<f64>, %wd: tensor<f64>) -> " + RESULTS + """
    attributes {{nova.inplace = [array<i64: 0, 0>, array<i64: 2, 1>, array<i64: 3, 2>, array<i64: 4, 3>],
    nova.kernel = "multi_tensor"}} {{
  %r:4 = "nova.adam"(%p, %g, %m, %v, %s, %lr, %b1, %b2, %eps, %wd) {{amsgrad = false, decoupled = true,
    has_found_inf = false, maximize = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0>}} :
    (tensor<2x{0}>, tensor<2x{0}>, tensor<2x{0}>, tensor<2x{0}>, tensor<f32>, tensor<f64>, tensor<f64>, tensor<f64>,
    tensor<f64>, tensor<f64>) -> (tensor<2x{0}>, tensor<2x{0}>, tensor<2x{0}>, tensor<f32>)
  return %r#0, %r#1, %r#2, %r#3 : tensor<2x{0}>, tensor<2x{0}>, tensor<2x{0}>, tensor<f32>
}}
}}"""
)  # fmt: skip

GUARDED = ADAM.replace("attributes {{", "attributes {{nova.guarded, ")


def norm(arch: str) -> str:
    with mlir.context():
        sizes = segment_texts("foreach_norm", [mlir.ir.Type.parse("tensor<2xf32>")], [], {})
    text = f"""module {{
      func.func private @norm(%g: tensor<2xf32> {{nova.list}}) -> (tensor<1xf32> {{nova.element}})
          attributes {{nova.inplace = [], nova.kernel = "multi_tensor"}} {{
        %r = "nova.foreach_norm"(%g) {{{", ".join(["ord = 2.0 : f64", *sizes])}}} : (tensor<2xf32>) -> tensor<1xf32>
        return %r : tensor<1xf32>
      }}
    }}"""
    return level5(text, arch)


def whole(op: str, attrs: str, operands: list[str], result: str, kind: str, arch: str) -> str:
    args = ", ".join(f"%a{i}: {t}" for i, t in enumerate(operands))
    names = ", ".join(f"%a{i}" for i in range(len(operands)))
    text = f"""module {{
      func.func private @k({args}) -> {result} attributes {{nova.inplace = [], nova.kernel = "{kind}"}} {{
        %r = "nova.{op}"({names}) {{{attrs}}} : ({", ".join(operands)}) -> {result}
        return %r : {result}
      }}
    }}"""
    return level5(text, arch)


def embedding(element: str, arch: str) -> str:
    types = [f"tensor<8192x768x{element}>", "tensor<8192xi64>"]
    attrs = "rows = 50304 : i64, padding_idx = -1 : i64"
    return whole("take_backward", attrs, types, f"tensor<50304x768x{element}>", "scatter", arch)


def scan(shape: str, dim: int, arch: str) -> str:
    return whole("cumsum", f"dim = {dim} : i64", [f"tensor<{shape}>"], f"tensor<{shape}>", "scan", arch)


def scatter_add(arch: str) -> str:
    types = ["tensor<1000xf32>", "tensor<100000xi64>", "tensor<100000xf32>"]
    return whole("scatter", 'dim = 0 : i64, reduce = "add"', types, types[0], "scatter", arch)


# 16-byte accesses, all launches together: adam's 4 loads and 3 stores of two vectors; of the embedding's gradient the
# zeros (4 stores), rows of 768 by warps (6 vectors of f32, 3 of bf16), the long runs (8 loads, 1 store) and the sort
KERNELS = [
    Kernel("adam", lambda arch: level5(ADAM.format("f32"), arch), {"LDG.E.128": 8, "STG.E.128": 6}, registers=80),
    Kernel("adam_f64", lambda arch: level5(ADAM.format("f64"), arch), {"LDG.E.128": 8, "STG.E.128": 6}, registers=128),
    # in steps that check labels: a look at the step's flag, and no register more
    Kernel("adam_guarded", lambda arch: level5(GUARDED.format("f32"), arch), {"LDG.E.128": 8, "STG.E.128": 6}, registers=80),
    Kernel("guarded_copy", lambda arch: level5(guarded_copy.TEXT, arch), {"LDG.E.128": (1, 8), "STG.E.128": (1, 8)}, registers=40),
    Kernel("norm", norm, {"LDG.E.128": 8, "SHFL": (10, 40)}, registers=80),
    Kernel("embedding_backward", lambda arch: embedding("f32", arch), {"LDG.E.128": (30, 80), "STG.E.128": 11, "RED": 0}),
    Kernel("embedding_backward_bf16", lambda arch: embedding("bf16", arch), {"LDG.E.128": (30, 80), "STG.E.128": 8, "RED": 0}),
    Kernel("scatter_add", scatter_add, {"ATOM": 0, "RED": 0}, registers=64),
    Kernel("cumsum_rows", lambda arch: scan("4096x4096xf32", 1, arch), {"LDG.E.128": 2, "STG.E.128": 2, "SHFL": (20, 80)}),
    Kernel("cumsum_columns", lambda arch: scan("4096x4096xf32", 0, arch), {"LDG.E.128": (4, 40), "STG.E.128": 2}),
]  # fmt: skip
