"""Attention's tile programs against float64, by their meaning at level 4: no distribution, no hardware.

The same problems as the CPU's kernels, on boards with much and with little shared memory. Outputs, workspace and shared
memory start poisoned; an access outside of a buffer is an error.
"""

import math
import re

import pytest
import torch

from nova.schedule import target as targets
from tests.attention_cases import Case, check, inputs, run_backward, run_forward
from tests.attention_programs import level3, maker, tile_text
from tests.numerics.test_attention import CASES, empty_rows

H200, SMALL = targets.PRESETS["h200"], targets.PRESETS["rtx3060"]
TF32 = 2.0**-10


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case: Case) -> None:
    """float32 operands are split: errors are those of float32."""
    check(case, mask_grad=case.mask.startswith("float"), make=maker(H200))


@pytest.mark.parametrize("name", ["head_7_3", "head_72_80", "packed_64", "grouped", "float_bias", "dropout", "bf16"])
def test_on_a_small_board(name: str) -> None:
    check(CASES[name], mask_grad=CASES[name].mask.startswith("float"), make=maker(SMALL))


@pytest.mark.parametrize("name", ["head_72_80", "packed", "grouped", "bool_shared", "float_full", "dropout_ragged"])
def test_tf32(name: str) -> None:
    """Operands that may be rounded to TF32 are, and to nearest: an error of the order of half a unit."""
    check(CASES[name], mask_grad=CASES[name].mask.startswith("float"), make=maker(H200, tf32=True), roundoff=TF32)


@pytest.mark.parametrize("dims", ["bhts", "1hts", "11ts", "b11s", "11t1", "1h1s", "b111"])
def test_mask_gradient_sums_over_broadcast_dims(dims: str) -> None:
    case = Case(mask=f"float:{dims}", batch=2, heads=2, kv_heads=1, queries=70, keys=130, dim=8, value_dim=8)
    check(case, mask_grad=True, make=maker(H200))


@pytest.mark.parametrize(("kind", "value"), [("bool", False), ("float", -math.inf), ("float", -1e9)])
def test_rows_that_see_no_key(kind: str, value: float | bool) -> None:
    """Output 0 and gradients 0, or those of a uniform row where the mask is finite: as on the CPU."""
    case = Case(mask=f"{kind}:bhts")
    tensors = empty_rows(case, value)
    found = []
    for make in (maker(H200), None):
        out = run_forward(case, tensors, make and make(case, False, False))
        saved = tensors | {"out": out["out"].contiguous(), "lse": out["lse"]}
        found.append(out | run_backward(case, saved, False, make and make(case, True, False)))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=2e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_results_repeat() -> None:
    case = Case(dtype="bf16", causal=True, heads=4, kv_heads=2, queries=100, keys=100)
    tensors = inputs(case)
    first, second = (run_forward(case, tensors, maker(H200)(case, False, False))["out"] for _ in range(2))
    assert torch.equal(first, second)


def test_packed_operands_are_read_where_they_lie() -> None:
    """One packed buffer in, one packed gradient out: two launches and no repacking."""
    case = Case(dtype="bf16", causal=True, layout="packed", queries=128, keys=128, dim=64, value_dim=64)
    text = tile_text(level3(case, True, False, H200), H200)
    assert len(re.findall("func.func", text)) == 2
    assert "nova_tile.gather" not in text and "vector = 8" in text
