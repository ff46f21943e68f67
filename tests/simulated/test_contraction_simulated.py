"""Contractions by the threads of a simulated GPU, against float64: layouts, types, ragged shapes, epilogues, split K.

The simulator stops at races, at copies that nobody waited for and at accesses out of bounds, so these runs also say
that the pipeline's waits and barriers are enough.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contraction_programs import flat, level4, level5, relative, simulated, tensor_of
from contraction_text import Case, loss_head_text

from nova.gpu import simulate

LAYOUTS = ["mk,kn->mn", "mk,nk->mn", "km,kn->mn", "km,nk->mn"]
BOUNDS = {"f64": 1e-14, "f32": 2e-6, "tf32": 1e-3, "bf16": 4e-3, "f16": 5e-4}
TYPES = ["bf16", "f16", "tf32", "f32", "f64"]


def check(case: Case, precision: str = "", target: str = "h200", **changes):
    """Runs a case; its error must fit the precision of the result. Returns the simulator's report."""
    precision = precision or case.dtype
    text, schedule = level4(case.text(), target, precision == "tf32", **changes)
    inputs = case.inputs()
    expected = case.reference(inputs)
    found, report = simulated(text, inputs, expected, case.out_dtype)
    for have, want in zip(found, expected, strict=True):
        assert torch.isfinite(have).all()
        assert relative(have, want) < BOUNDS[precision]
    return schedule, report


def of_type(spec: str, sizes: dict[str, int], precision: str, **more) -> Case:
    dtype = "f32" if precision == "tf32" else precision
    return Case(spec, sizes, dtype=dtype, out_dtype=dtype, **more)


@pytest.mark.parametrize("spec", LAYOUTS)
@pytest.mark.parametrize("precision", TYPES)
def test_ragged(spec: str, precision: str) -> None:
    """Nothing divides anything: single elements are copied, and tiles hang over on every side."""
    check(of_type(spec, {"m": 37, "n": 45, "k": 51}, precision), precision)


@pytest.mark.parametrize("spec", LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "tf32", "f32"])
def test_vectors_and_several_blocks(spec: str, precision: str) -> None:
    schedule, report = check(of_type(spec, {"m": 72, "n": 88, "k": 72}, precision), precision)
    assert schedule.kind == ("simt" if precision == "f32" else "mma_sync")
    assert report.kernels[0].shared_load.conflicts == 0 or schedule.kind == "simt"


@pytest.mark.parametrize("target", ["a100", "rtx6000ada", "h100"])
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_boards(target: str, precision: str) -> None:
    check(of_type("mk,kn->mn", {"m": 50, "n": 72, "k": 40}, precision), precision, target)


BIG = {
    "bf16": {"workgroup": (128, 256), "warps": (2, 4), "reduction": 64},
    "tf32": {"workgroup": (256, 128), "warps": (4, 2), "reduction": 32},
    "f32": {"workgroup": (128, 128), "warps": (2, 2), "reduction": 16},
}


@pytest.mark.parametrize("precision", list(BIG))
@pytest.mark.parametrize("stages", [2, 3])
def test_the_large_tiles_of_real_shapes(precision: str, stages: int) -> None:
    """More k tiles than stages, in one block; the epilogue in slices."""
    tile = BIG[precision]
    sizes = {"m": tile["workgroup"][0], "n": tile["workgroup"][1] - 8, "k": 3 * tile["reduction"] + 8}
    threads = 32 * tile["warps"][0] * tile["warps"][1]
    check(of_type("mk,nk->mn", sizes, precision), precision, stages=stages, threads=threads, **tile)


@pytest.mark.parametrize(("spec", "columns"), [("mk,nk->mn", 192), ("km,kn->mn", 96)])
def test_tiles_of_three_times_a_power_of_two(spec: str, columns: int) -> None:
    """192 divides the widths of many models; rows of 192 columns are swizzled too."""
    case = Case(spec, {"m": 64, "n": 200, "k": 72}, dtype="bf16", out_dtype="bf16", epilogue="relu_residual")
    _, report = check(case, workgroup=(64, columns), warps=(1, 4), reduction=32, stages=3, threads=128)
    assert report.bank_conflicts == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_every_number_of_k_tiles(count: int) -> None:
    check(Case("mk,nk->mn", {"m": 16, "n": 16, "k": 32 * count}, dtype="bf16"), reduction=32, stages=4)


@pytest.mark.parametrize("epilogue", ["bias", "row_bias", "scale", "relu_residual", "gelu", "gelu_backward", "mask"])
@pytest.mark.parametrize("sizes", [(37, 45, 21), (48, 64, 40)], ids=str)
def test_epilogues(epilogue: str, sizes: tuple[int, int, int]) -> None:
    case = of_type("mk,nk->mn", dict(zip("mnk", sizes, strict=True)), "bf16", epilogue=epilogue)
    check(case)


def test_epilogue_on_accumulators_where_shared_memory_is_short() -> None:
    """256 x 128 sums do not fit 99 KiB: they are stored as the tensor cores leave them."""
    case = Case("mk,nk->mn", {"m": 200, "n": 128, "k": 40}, dtype="bf16", epilogue="bias")
    check(case, target="rtx6000ada", workgroup=(256, 128), warps=(4, 2), reduction=32, stages=2, threads=256)


@pytest.mark.parametrize(
    "spec",
    [
        "bmk,bkn->bmn", "mbk,nbk->bmn", "bmk,bnk->mbn", "bmk,bnk->bnm", "bmk,nk->bmn", "bmk,hnk->bhmn", "bhmk,hnk->bmn",
        "bmk,bmn->kn", "bhmk,bhnk->bmhn",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "sizes", [{"b": 3, "h": 2, "m": 13, "n": 20, "k": 24}, {"b": 2, "h": 3, "m": 16, "n": 24, "k": 9}]
)
def test_batches_and_split_dimensions(spec: str, sizes: dict[str, int]) -> None:
    check(of_type(spec, {c: v for c, v in sizes.items() if c in set(spec)}, "bf16"))


@pytest.mark.parametrize("spec", ["bc(2p+q)(2r+t),mcqt->bmpr", "bc(p+q)(r+t),bmpr->mcqt"])
def test_convolution_windows(spec: str) -> None:
    sizes = {"b": 2, "c": 3, "p": 5, "q": 3, "r": 16, "t": 3, "m": 8}
    check(of_type(spec, sizes, "tf32"), "tf32")


@pytest.mark.parametrize("precision", ["bf16", "f32", "f64"])
def test_k_dealt_to_several_blocks(precision: str) -> None:
    """Partial sums in the workspace, added in order by a second launch that also does the epilogue."""
    dtype = precision
    case = Case(
        "km,kn->mn", {"m": 35, "n": 40, "k": 300}, dtype=dtype, beta=True, epilogue="bias" if dtype == "f32" else ""
    )
    _, report = check(case, k_chunks=3)
    assert [kernel.name for kernel in report.kernels] == ["k_main", "k_merge"]


@pytest.mark.parametrize("chunks", [1, 2])
def test_accumulates_in_place(chunks: int) -> None:
    """One buffer is the start and the result."""
    case = Case("km,kn->mn", {"m": 35, "n": 40, "k": 140}, beta=True, inplace=True)
    text, _ = level4(case.text().replace("[[2, 0]]", "[array<i64: 2, 0>]"), "h200", k_chunks=chunks)
    inputs = case.inputs()
    a, b, start = (flat(x) for x in inputs)
    workspace = np.full(chunks * start.size, np.nan, np.float32)
    simulate.run(level5(text), [a, b, start, start, workspace, np.zeros(2, np.int64)])
    (expected,) = case.reference(inputs)
    assert relative(tensor_of(start, expected), expected) < BOUNDS["f32"]


@pytest.mark.parametrize(
    "case",
    [
        Case("nk,k->n", {"n": 50, "k": 65}), Case("k,k->", {"k": 65}), Case("m,n->mn", {"m": 9, "n": 21}),
        Case("mk,nk->mn", {"m": 5, "n": 4, "k": 0}, epilogue="bias"), Case("mk,nk->mn", {"m": 1, "n": 1, "k": 1}),
    ],
    ids=lambda case: case.spec,
)  # fmt: skip
def test_small_and_degenerate(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize(("tile", "precision"), [(64, "tf32"), (128, "f32"), (16, "tf32")])
def test_loss_head_partials(tile: int, precision: str, logits: bool) -> None:
    rows, columns, depth = 40, 150, 24
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(s, generator=generator) for s in ((rows, depth), (columns, depth), (columns,)))
    labels = torch.randint(0, columns, (rows,), generator=generator)
    z = x.double() @ w.double().T + bias.double()
    tiles = -(-columns // tile)
    padded = torch.full((rows, tiles * tile), float("-inf"), dtype=torch.float64)
    padded[:, :columns] = z
    padded = padded.view(rows, tiles, tile)
    maxima = padded.amax(2)
    picked = torch.zeros(rows, tiles, dtype=torch.float64)
    picked[torch.arange(rows), labels // tile] = z[torch.arange(rows), labels]
    sums = torch.exp(padded - maxima[..., None]).sum(2)
    expected = ([z] if logits else []) + [maxima, sums] + ([] if logits else [picked])
    text, schedule = level4(loss_head_text(rows, columns, depth, tile, logits), "h200", precision == "tf32")
    assert schedule.workgroup[1] == tile
    found, _ = simulated(text, [x, w, bias, labels], expected, "f32")
    for have, want in zip(found, expected, strict=True):
        assert relative(have, want) < 3 * BOUNDS[precision]


def test_the_same_bits_every_time() -> None:
    case = Case("km,kn->mn", {"m": 20, "n": 30, "k": 200}, dtype="bf16")
    text, _ = level4(case.text(), "h200", k_chunks=2)
    inputs = case.inputs()
    expected = case.reference(inputs)
    (one,), (two,) = (simulated(text, inputs, expected, "f32")[0] for _ in range(2))
    assert torch.equal(one, two)


def test_float32_sums_are_short_chains() -> None:
    """As exact as a library's: a k tile has sums of its own."""
    case = Case("mk,nk->mn", {"m": 32, "n": 32, "k": 1000})
    inputs = case.inputs()
    expected = case.reference(inputs)
    found, _ = simulated(level4(case.text(), "h200")[0], inputs, expected, "f32")
    assert relative(found[0], expected[0]) < 2e-7
