"""Attention of a GPT-2 step by every board's own tiles: products on tensor cores, exponentials of one instruction each.

bf16 reads keys and values by ldmatrix, plain and transposed; TF32 cannot transpose by it and reads values word by word.
"""

from __future__ import annotations

from census.machine_code import Count, Kernel, level5, target

from tests.attention_cases import Case
from tests.attention_programs import level3

SOME = (1, 4000)
PRODUCTS = {"bf16": "HMMA.16816.F32.BF16", "f16": "HMMA.16816.F32", "tf32": "HMMA.1688.F32.TF32"}


def attention(precision: str, backward: bool, counts: dict[str, Count], dim: int = 64, **more) -> Kernel:
    """Causal, packed, 8 x 12 heads x 1024."""
    dtype = "f32" if precision == "tf32" else precision
    case = Case(8, 12, 12, 1024, 1024, dim, dim, dtype=dtype, causal=True, layout="packed")

    def make(arch: str) -> str:
        return level5(level3(case, backward, False, target(arch), precision == "tf32"), arch, first=3)

    name = f"attention-{'backward' if backward else 'forward'}-{precision}-{dim}"
    wanted = {PRODUCTS[precision]: SOME, "LDSM.16.M88": SOME, "LDGSTS.E.BYPASS.128": SOME, "MUFU.EX2": SOME, **counts}
    return Kernel(name, make, wanted, **more)


HALF = {"LDSM.16.MT88": SOME}
WORDS = {"LDSM.16.MT88": 0, "LDS": SOME}
NO_BRANCHES_IN_ROWS = {"SHFL": (4, 32)}  # two steps for the maxima of a quad's rows a loop, and the final sums

KERNELS = [
    attention("bf16", False, {**HALF, **NO_BRANCHES_IN_ROWS}),
    attention("bf16", True, HALF),
    attention("bf16", False, HALF, dim=128),
    attention("bf16", True, HALF, dim=128),
    attention("f16", False, HALF, archs=("sm_80", "sm_90a")),
    attention("tf32", False, {**WORDS, **NO_BRANCHES_IN_ROWS}),
    attention("tf32", True, WORDS),
]
