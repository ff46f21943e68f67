"""Contractions of a GPT-2 step: tensor-core instructions by shape, operands by ldmatrix as far as Table 1 allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from census.machine_code import TARGETS, Count, Kernel
from contraction_programs import level4
from contraction_programs import level5 as threads_of
from contraction_text import Case, loss_head_text


def case(spec: str, sizes: tuple[int, int, int], precision: str, epilogue: str = "", **more) -> str:
    dtype = "f32" if precision == "tf32" else precision
    out = dtype if dtype != "f32" else ""
    return Case(
        spec, dict(zip("mnk", sizes, strict=True)), dtype=dtype, out_dtype=out, epilogue=epilogue, **more
    ).text()


def contraction(
    name: str, text: str, precision: str, counts: Mapping[str, Count],
    by_arch: Mapping[str, Mapping[str, Count]] | None = None, archs: tuple[str, ...] = tuple(TARGETS), **changes,
) -> Kernel:  # fmt: skip
    """Level 2 text by the configurator's schedule, or with changes to it."""

    def make(arch: str) -> str:
        return threads_of(level4(text, TARGETS[arch], precision == "tf32", **changes)[0])

    made: Callable[[str], str] = make
    return Kernel(f"contraction-{name}", made, counts, archs, by_arch=by_arch or {})


SOME = (1, 4000)
BF16 = {"HMMA.16816.F32.BF16": SOME, "LDGSTS.E.BYPASS": SOME}
TF32 = {"HMMA.1688.F32.TF32": SOME, "LDGSTS.E.BYPASS": SOME}
TILE = {"workgroup": (128, 128), "warps": (2, 2), "threads": 128, "stages": 3, "k_chunks": 1}
LARGE = {"workgroup": (256, 128), "warps": (4, 2), "threads": 256, "stages": 4, "k_chunks": 1}
FC1, FC2, DW = (8192, 3072, 768), (8192, 768, 3072), (768, 768, 8192)

KERNELS = [
    # the main loop of 64 x 64 a warp and 64 of k is 128 products and 32 ldmatrix; it is there three or four times
    contraction("bf16-nt", case("mk,nk->mn", FC1, "bf16"), "bf16",
                {"HMMA.16816.F32.BF16": (384, 512), "LDSM.16.M88.4": (96, 128), "LDSM.16.MT88": 0}, archs=("sm_90a",),
                reduction=64, **LARGE),
    contraction("bf16-nn", case("mk,kn->mn", FC1, "bf16"), "bf16", {**BF16, "LDSM.16.M88": SOME, "LDSM.16.MT88": SOME}),
    contraction("bf16-tn", case("km,kn->mn", DW, "bf16"), "bf16", {**BF16, "LDSM.16.M88": 0, "LDSM.16.MT88": SOME}),
    contraction("tf32-nt", case("mk,nk->mn", FC1, "tf32"), "tf32", {**TF32, "LDSM.16.M88": SOME, "LDSM.16.MT88": 0}),
    contraction("tf32-nn", case("mk,kn->mn", FC1, "tf32"), "tf32",
                {**TF32, "LDSM.16.M88": SOME, "LDSM.16.MT88": 0, "LDS": SOME}),
    contraction("tf32-tn", case("km,kn->mn", DW, "tf32"), "tf32", {**TF32, "LDSM": 0, "LDS": SOME}),
    contraction("tf32-tn-large", case("km,kn->mn", DW, "tf32"), "tf32", TF32, archs=("sm_90a",), reduction=32, **LARGE),
    contraction("f16-tt", case("km,nk->mn", FC1, "f16"), "f16",
                {"HMMA.16816.F32": SOME, "LDSM.16.MT88": SOME, "LDSM.16.M88": SOME}),
    contraction("f32-nn", case("mk,kn->mn", FC1, "f32"), "f32", {"HMMA": 0, "FFMA": (512, 9000), "LDS.128": SOME}),
    # epilogues: 16-byte stores of float32, 8-byte stores of bf16, side operands read as wide
    contraction("gelu", case("mk,nk->mn", FC1, "bf16", "gelu"), "bf16", {**BF16, "STG.E.64": SOME}, **TILE, reduction=32),
    contraction("gelu-backward", case("mk,kn->mn", FC1, "bf16", "gelu_backward"), "bf16", {**BF16, "LDG.E.128": SOME},
                **TILE, reduction=32),
    contraction("residual", case("mk,nk->mn", FC2, "tf32", "relu_residual"), "tf32",
                {**TF32, "LDG.E.128": SOME, "STG.E.128": SOME}, **TILE, reduction=16),
    contraction("split-k", case("km,kn->mn", DW, "bf16", beta=True), "bf16", BF16, **{**TILE, "k_chunks": 8}, reduction=32),
    contraction("loss-head", loss_head_text(8192, 50304, 768, 128, True), "tf32", {**TF32, "SHFL.BFLY": SOME}, **TILE,
                reduction=16),
]  # fmt: skip
