"""Contraction kernels against float64: shapes, layouts, epilogues, dtypes, with poisoned outputs and workspace."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import torch

from nova import mlir
from nova.cpu import contraction, to_llvm
from nova.cpu.compile import compile_kernel, find_kernel
from nova.fusion import contraction_form
from nova.schedule import target as targets
from nova.schedule.contraction import schedule_contraction
from tests.contraction_text import Case, loss_head_text
from tests.kernels import load_kernel, poisoned, run_kernel

EPSILON = {"f32": 2.0**-24, "f64": 2.0**-53, "bf16": 2.0**-9, "f16": 2.0**-11}


def check(case: Case, threads: int = 2, target: targets.CpuTarget | None = None) -> list[torch.Tensor]:
    inputs = case.inputs()
    results = run_kernel(case.text(), inputs, target, threads)
    depth = max(case.sizes.get("k", 1) * case.sizes.get("q", 1), 1)
    for result, expected in zip(results, case.reference(inputs), strict=True):
        scale = max(expected.abs().max().item(), depth**0.5) if expected.numel() else 1.0
        bound = (EPSILON[case.accumulate] * (8 + 4 * depth**0.5) + 2 * EPSILON[case.out_dtype]) * scale
        assert torch.isfinite(result).all()
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=bound)
    return results


LAYOUTS = ["mk,kn->mn", "mk,nk->mn", "km,kn->mn", "km,nk->mn"]
SHAPES = [
    (1, 1, 1), (6, 16, 4), (7, 17, 5), (12, 32, 64), (37, 45, 51), (5, 130, 33), (97, 15, 129), (64, 64, 32),
    (3, 257, 17),
]  # fmt: skip


@pytest.mark.parametrize("spec", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged(spec: str, shape: tuple[int, int, int]) -> None:
    check(Case(spec, dict(zip("mnk", shape, strict=True))))


@pytest.mark.parametrize("spec", LAYOUTS)
def test_several_blocks_of_every_dimension(spec: str) -> None:
    caches = {"l1": 4 << 10, "l2": 16 << 10, "l3": 64 << 10}
    host = targets.host()
    fast = targets.cpu("fast", cores=2, ghz=2.5, vector_bits=host.vector_bits, fma_units=2)
    slow = targets.cpu("slow", cores=2, ghz=2.5, vector_bits=host.vector_bits, fma_units=1)
    for like, k in ((fast, 211), (fast, 256), (slow, 1031), (slow, 2048)):
        own = {"llvm_cpu": host.llvm_cpu, "llvm_features": host.llvm_features}
        target = dataclasses.replace(like, **caches, **own)
        for m, n in ((101, 149), (96, 160)):
            case = Case(spec, {"m": m, "n": n, "k": k})
            assert reduction(case, target) < k
            check(case, target=target)


def reduction(case: Case, target: targets.CpuTarget) -> int:
    """k steps of a block."""
    module = mlir.parse(case.text())  # lives as long as what was read from it
    with mlir.context():
        problem = contraction_form.problem_of(contraction_form.read(find_kernel(module)))
    return schedule_contraction(problem, target).reduction


@pytest.mark.parametrize("k", [255, 257, 511, 770, 1024, 3001])
@pytest.mark.parametrize("spec", ["mk,kn->mn", "km,nk->mn"])
def test_long_sums_round_like_short_ones(spec: str, k: int) -> None:
    """Positive numbers, whose sum grows steadily: one chain of `k` additions would lose a few more bits."""
    case = Case(spec, {"m": 40, "n": 70, "k": k})
    inputs = [x.abs() for x in case.inputs()]
    expected = case.reference(inputs)[0]
    (result,) = run_kernel(case.text(), inputs)
    assert ((result.double() - expected) / expected).pow(2).mean().sqrt() < 2.5e-7


REGISTER_FILES = [
    targets.CPU_PRESETS["zen3"], targets.CPU_PRESETS["zen4"], targets.CPU_PRESETS["avx512"],
    targets.cpu("zen1", cores=2, ghz=3.0, fma_units=1, llvm_cpu="znver1"),
]  # fmt: skip


@pytest.mark.parametrize("target", REGISTER_FILES, ids=lambda target: target.name)
@pytest.mark.parametrize(("spec", "m"), [(spec, m) for spec in LAYOUTS for m in (64, 250, 1024)])
def test_the_k_loop_spills_no_vector(spec: str, m: int, target: targets.CpuTarget) -> None:
    """What is compiled for any CPU can be read on every other: the loop of multiply-adds leaves the stack alone."""
    for n, k in ((257, 300), (256, 256), (768, 1024)):
        kernel = compile_kernel(Case(spec, {"m": m, "n": n, "k": k}).text(), target)
        machine = to_llvm.target_machine(target.llvm_cpu, target.llvm_features)
        module = llvm.parse_assembly(kernel.llvm_ir)
        module.triple, module.data_layout = machine.triple, str(machine.target_data)
        blocks = re.split(r"^[.\w]+:|^\s+j\w+\s.*$", machine.emit_assembly(module), flags=re.MULTILINE)
        loops = [block for block in blocks if block.count("vfm") >= 8]
        assert loops
        assert not [
            line for block in loops for line in block.splitlines() if re.search(r"\(%rsp\).*[xyz]mm|mm.*\(%rsp", line)
        ]


@pytest.mark.parametrize("shape", [(0, 5, 4), (5, 0, 4), (5, 4, 0), (0, 0, 0)], ids=str)
def test_empty(shape: tuple[int, int, int]) -> None:
    """No rows or columns: nothing happens. No k: the sum is its start."""
    check(Case("mk,nk->mn", dict(zip("mnk", shape, strict=True)), epilogue="bias"))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
@pytest.mark.parametrize("spec", LAYOUTS)
def test_dtypes(spec: str, dtype: str) -> None:
    check(Case(spec, {"m": 37, "n": 45, "k": 70}, dtype=dtype))
    check(Case(spec, {"m": 48, "n": 64, "k": 64}, dtype=dtype, out_dtype=dtype))


@pytest.mark.parametrize("epilogue", ["bias", "row_bias", "scale", "relu_residual", "gelu", "gelu_backward", "mask"])
@pytest.mark.parametrize("shape", [(48, 64, 40), (37, 45, 21), (3, 70, 64), (29, 37, 700)], ids=str)
def test_epilogues(epilogue: str, shape: tuple[int, int, int]) -> None:
    check(Case("mk,nk->mn", dict(zip("mnk", shape, strict=True)), epilogue=epilogue))


def test_epilogue_rounds_to_bf16() -> None:
    check(Case("mk,nk->mn", {"m": 33, "n": 50, "k": 40}, dtype="bf16", out_dtype="bf16", epilogue="gelu"))


@pytest.mark.parametrize("k", [24, 900])
def test_accumulates_into_an_input(k: int) -> None:
    check(Case("km,kn->mn", {"m": 35, "n": 40, "k": k}, beta=True))
    check(Case("km,kn->mn", {"m": 35, "n": 40, "k": k}, beta=True, epilogue="gelu"))


@pytest.mark.parametrize("k", [24, 900])
def test_result_in_place_of_the_start(k: int) -> None:
    """`grad += X^T dY` with one buffer: sums of k blocks may not be kept where the start still lies."""
    case = Case("km,kn->mn", {"m": 35, "n": 40, "k": k}, beta=True, inplace=True)
    a, b, start = case.inputs()
    expected = case.reference([a, b, start])[0]
    kernel = load_kernel(case.text())
    kernel.call([a, b, start], [start])
    torch.testing.assert_close(start.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "spec",
    [
        "bmk,bkn->bmn",
        "bmk,bnk->bmn",
        "bkm,bkn->bmn",
        "mbk,nbk->bmn",  # heads between rows: attention's scores from [T, H, D]
        "bmk,bnk->mbn",  # and its output back to [T, H, D]
        "bmk,bnk->bnm",  # the result transposed: operands change sides
        "bmk,nk->bmn",  # rows of a batch times one matrix: batch and m are one dimension
        "bmk,hnk->bhmn",  # head split on the way out: n = (h, n), m = (b, m)
        "bhmk,hnk->bmn",  # head merge: k = (h, k)
        "bmk,bmn->kn",  # weight gradient over (b, m)
        "bhmk,bhnk->bmhn",
    ],
)
@pytest.mark.parametrize(
    "sizes", [{"b": 3, "h": 2, "m": 13, "n": 20, "k": 24}, {"b": 2, "h": 3, "m": 16, "n": 24, "k": 9}]
)
def test_batches_and_head_splits(spec: str, sizes: dict[str, int]) -> None:
    letters = set(spec) - set(",->")
    check(Case(spec, {c: v for c, v in sizes.items() if c in letters}))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("width", [7, 16])
def test_convolution_windows(stride: int, width: int) -> None:
    """x[b, c, (s*p + q), (s*r + t)] * w[m, c, q, t] -> y[b, m, p, r], and the gradient of w."""
    x = f"bk({stride}p+q)({stride}r+t)"
    sizes = {"b": 2, "k": 3, "p": 5, "q": 3, "r": width, "t": 3, "m": 10}
    check(Case(f"{x},mkqt->bmpr", sizes))
    check(Case(f"{x},bmpr->mkqt", sizes))


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize("spec", ["mk,nk->mn", "mk,kn->mn"])
def test_few_rows(spec: str, m: int) -> None:
    check(Case(spec, {"m": m, "n": 70, "k": 99}, epilogue="gelu"))
    check(Case(spec, {"m": m, "n": 33, "k": 64}, dtype="bf16"))
    check(Case(spec, {"m": m, "n": 64, "k": 64}, dtype="bf16"))


def test_few_rows_in_double_precision() -> None:
    """Four lanes a vector: fewer dot products side by side than in single precision."""
    check(Case("mk,nk->mn", {"m": 1, "n": 33, "k": 65}, dtype="f64"))
    check(Case("mk,nk->mn", {"m": 2, "n": 33, "k": 65}, dtype="f64"))


def test_matrix_times_vector() -> None:
    check(Case("nk,k->n", {"n": 50, "k": 65}))
    check(Case("kn,k->n", {"n": 50, "k": 65}))
    check(Case("k,k->", {"k": 65}))
    check(Case("m,n->mn", {"m": 9, "n": 21}))


def test_long_k_in_chunks() -> None:
    many = dataclasses.replace(targets.host(), cores=2)
    case = Case("km,kn->mn", {"m": 6, "n": 16, "k": 20000}, epilogue="gelu")
    schedule = _schedule(case, many)
    assert schedule.k_chunks > 1
    check(case, target=many)


def _schedule(case: Case, target: targets.CpuTarget):
    from nova import mlir
    from nova.cpu.compile import find_kernel

    module = mlir.parse(case.text())
    with mlir.context():
        return schedule_contraction(contraction_form.problem_of(contraction_form.read(find_kernel(module))), target)


@pytest.mark.parametrize(
    "case",
    [
        Case("mk,kn->mn", {"m": 300, "n": 301, "k": 302}),
        Case("mk,nk->mn", {"m": 60, "n": 1000, "k": 300}, epilogue="gelu"),
        Case("bmk,bnk->bmn", {"b": 7, "m": 64, "n": 64, "k": 64}),
        Case("mk,nk->mn", {"m": 4, "n": 2000, "k": 300}),
        Case("km,kn->mn", {"m": 6, "n": 16, "k": 50000}),
    ],
    ids=lambda case: case.spec,
)
def test_bits_do_not_depend_on_the_number_of_threads(case: Case) -> None:
    inputs = case.inputs()
    one, two = (run_kernel(case.text(), inputs, threads=n) for n in (1, 2))
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def test_more_cores_than_the_machine_has() -> None:
    """A schedule for many cores runs on fewer threads: groups of N, chunks of K, small units."""
    wide = dataclasses.replace(targets.host(), cores=16, fork_seconds=0.0)
    check(Case("mk,nk->mn", {"m": 200, "n": 500, "k": 300}, epilogue="relu_residual"), target=wide)
    check(Case("km,kn->mn", {"m": 20, "n": 30, "k": 9000}), target=wide)


def test_not_a_number_and_infinity_propagate() -> None:
    case = Case("mk,nk->mn", {"m": 20, "n": 40, "k": 30}, epilogue="relu_residual")
    inputs = case.inputs()
    inputs[0][3, 7], inputs[0][5, 2] = float("nan"), float("inf")
    (result,) = run_kernel(case.text(), inputs)
    (expected,) = case.reference(inputs)
    assert result[3].isnan().all()
    assert torch.equal(torch.isfinite(result), torch.isfinite(expected))
    rows = [r for r in range(20) if r not in (3, 5)]
    torch.testing.assert_close(result[rows].double(), expected[rows], rtol=0, atol=1e-4)


def test_nothing_outside_the_result_is_written_or_read() -> None:
    """The operands end at the edge of their allocation, the result has guard values on both sides."""
    case = Case("mk,kn->mn", {"m": 13, "n": 29, "k": 31})
    a, b = case.inputs()
    guarded = poisoned([64 + 13 * 29 + 64], torch.float32)
    guarded.fill_(7.0)
    out = guarded[64 : 64 + 13 * 29].view(13, 29)
    load_kernel(case.text()).call([a, b], [out])
    torch.testing.assert_close(out.double(), case.reference([a, b])[0], rtol=0, atol=1e-4)
    assert (guarded[:64] == 7).all() and (guarded[-64:] == 7).all()


def test_a_body_that_is_not_a_product_is_refused() -> None:
    from nova import mlir
    from nova.cpu.compile import find_kernel
    from nova.errors import CompileError

    text = Case("mk,kn->mn", {"m": 4, "n": 4, "k": 4}).text().replace("arith.mulf", "arith.subf")
    module = mlir.parse(text)
    with mlir.context(), pytest.raises(CompileError, match="mulf and addf"):
        contraction.lower(find_kernel(module), targets.host())


@pytest.mark.parametrize("logits", [True, False], ids=["stored", "not stored"])
@pytest.mark.parametrize(
    "shape",
    [(13, 100, 20, 32), (64, 512, 64, 128), (7, 257, 33, 64), (150, 1000, 70, 512), (3, 4000, 50, 512)],
    ids=str,
)
def test_partial_reductions_over_tiles(shape: tuple[int, int, int, int], logits: bool) -> None:
    """The loss head: row maxima and sums of exponentials of each N tile, the last one short."""
    rows, columns, depth, tile = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, depth, generator=generator) / depth**0.5
    w, bias = torch.randn(columns, depth, generator=generator), torch.randn(columns, generator=generator)
    text = loss_head_text(rows, columns, depth, tile, logits)
    labels = torch.randint(columns, (rows,), generator=generator)
    results = run_kernel(text, [x, w, bias, labels], threads=2)
    full = x.double() @ w.double().T + bias
    padded = torch.full((rows, -(-columns // tile) * tile), -torch.inf, dtype=torch.float64)
    padded[:, :columns] = full
    tiles = padded.view(rows, -1, tile)
    maxima = tiles.amax(-1)
    expected = [full] * logits + [maxima, (tiles - maxima[..., None]).exp().sum(-1)]
    if not logits:
        picked = torch.zeros_like(maxima)
        picked[torch.arange(rows), labels // tile] = full[torch.arange(rows), labels]
        expected.append(picked)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), reference, rtol=2e-5, atol=2e-5)
    assert all(
        torch.equal(x, y) for x, y in zip(results, run_kernel(text, [x, w, bias, labels], threads=1), strict=True)
    )


def test_operands_and_results_are_slices() -> None:
    """A = x[:, 1, 2:], B = every second row of w, and the result fills columns 3 .. 3 + n of a wider tensor."""
    m, n, k = 10, 21, 12
    text = f"""
#a = affine_map<(d0, d1, d2) -> (d0, d2)>
#b = affine_map<(d0, d1, d2) -> (d1, d2)>
#c = affine_map<(d0, d1, d2) -> (d0, d1)>
func.func private @k(%x: tensor<{m}x3x{k + 2}xf32>, %w: tensor<{2 * n}x{k}xf32>,
                     %o: tensor<{m}x{n + 5}xf32> {{nova.out}}) -> tensor<{m}x{n + 5}xf32>
    attributes {{nova.kernel = "contraction", nova.inplace = [], nova.dims = array<i64: {m}, {n}, {k}>}} {{
  %zero = arith.constant 0.0 : f32
  %a = tensor.extract_slice %x[0, 1, 2] [{m}, 1, {k}] [1, 1, 1]
      : tensor<{m}x3x{k + 2}xf32> to tensor<{m}x{k}xf32>
  %b = tensor.extract_slice %w[0, 0] [{n}, {k}] [2, 1] : tensor<{2 * n}x{k}xf32> to tensor<{n}x{k}xf32>
  %e = tensor.empty() : tensor<{m}x{n}xf32>
  %init = linalg.fill ins(%zero : f32) outs(%e : tensor<{m}x{n}xf32>) -> tensor<{m}x{n}xf32>
  %acc = linalg.generic {{indexing_maps = [#a, #b, #c], iterator_types = ["parallel", "parallel", "reduction"]}}
      ins(%a, %b : tensor<{m}x{k}xf32>, tensor<{n}x{k}xf32>) outs(%init : tensor<{m}x{n}xf32>)
      attrs = {{dims = array<i64: 0, 1, 2>, nova.contraction}} {{
  ^bb0(%l: f32, %r: f32, %s: f32):
    %p = arith.mulf %l, %r : f32
    %t = arith.addf %s, %p : f32
    linalg.yield %t : f32
  }} -> tensor<{m}x{n}xf32>
  %r = tensor.insert_slice %acc into %o[0, 3] [{m}, {n}] [1, 1] : tensor<{m}x{n}xf32> into tensor<{m}x{n + 5}xf32>
  return %r : tensor<{m}x{n + 5}xf32>
}}"""
    x, w = torch.randn(m, 3, k + 2), torch.randn(2 * n, k)
    out = torch.full((m, n + 5), 7.0)
    load_kernel(text).call([x, w], [out])
    torch.testing.assert_close(out[:, 3 : 3 + n], x[:, 1, 2:] @ w[::2].T, rtol=1e-5, atol=1e-5)
    assert (out[:, :3] == 7).all() and (out[:, 3 + n :] == 7).all()


def test_heads_of_one_packed_buffer() -> None:
    """tests/ir/fusion/examples: q @ k^T from a [B, T, 3, H, D] buffer in bf16, slices and head split in the access."""
    text = (Path(__file__).parents[1] / "ir/fusion/examples/matmul_transposed.mlir").read_text()
    qkv = torch.randn(4, 256, 3, 12, 64).bfloat16()
    (result,) = run_kernel(text, [qkv])
    q, k = (qkv[:, :, i].float().transpose(1, 2) for i in (0, 1))
    torch.testing.assert_close(result, (q @ k.transpose(-1, -2)).bfloat16(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("bits", [128, 512])
@pytest.mark.parametrize("spec", LAYOUTS)
def test_other_vector_widths(spec: str, bits: int) -> None:
    """LLVM splits or joins vectors that this machine lacks, so the code for other CPUs runs here too."""
    target = dataclasses.replace(targets.host(), vector_bits=bits, registers=32 if bits == 512 else 16)
    check(Case(spec, {"m": 37, "n": 70, "k": 45}), target=target)
    check(Case(spec, {"m": 30, "n": 64, "k": 48}, dtype="bf16", epilogue="bias"), target=target)
    check(Case(spec, {"m": 2, "n": 70, "k": 65}, dtype="f64"), target=target)
