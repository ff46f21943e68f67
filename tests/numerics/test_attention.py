"""Attention kernels against float64, over ragged sizes, masks, layouts, dtypes, grouped heads and dropout.

Outputs and workspace start poisoned, so an unwritten or unread-before-written element shows as NaN.
"""

import dataclasses
import math

import pytest
import torch

from nova.schedule import target as targets
from tests.attention_cases import (
    TORCH,
    Case,
    check,
    inputs,
    keep_mask,
    kernel,
    lowered,
    nova_text,
    reference,
    run_backward,
    run_forward,
)

CASES = {
    # lengths and head dims off every tile boundary
    "one_query": Case(queries=1, keys=37),
    "one_key": Case(queries=17, keys=1, causal=True),
    "scalar_head": Case(dim=1, value_dim=1, queries=17, keys=17),
    "head_7_3": Case(dim=7, value_dim=3, queries=33, keys=65, causal=True),
    "head_16": Case(dim=16, value_dim=16, queries=64, keys=64, causal=True),
    "head_72_80": Case(batch=1, dim=72, value_dim=80, queries=65, keys=65, causal=True),
    "head_256": Case(batch=1, heads=1, kv_heads=1, dim=256, value_dim=264, queries=37, keys=49),
    "long": Case(batch=1, heads=1, kv_heads=1, dim=32, value_dim=32, queries=700, keys=530, causal=True),
    "long_keys": Case(batch=1, heads=1, kv_heads=1, dim=8, value_dim=8, queries=5, keys=1500),
    "few_keys_causal": Case(queries=70, keys=20, causal=True),
    "extra_keys_causal": Case(queries=20, keys=70, causal=True),
    "large_scores": Case(scale=40.0),
    "negative_scale": Case(scale=-0.7, causal=True),
    # layouts: no repacking, one packed gradient
    "packed": Case(layout="packed", queries=50, keys=50, dim=24, causal=True),
    "packed_64": Case(layout="packed", queries=65, keys=65, dim=64, value_dim=64),
    "heads_last": Case(layout="heads_last", heads=4, kv_heads=2, queries=50, keys=37),
    # grouped heads
    "grouped": Case(batch=1, heads=6, kv_heads=2, queries=40, keys=55, causal=True),
    "multi_query": Case(heads=3, kv_heads=1, queries=17, keys=17),
    # masks
    "bool_padding": Case(mask="bool:b11s"),
    "bool_full": Case(mask="bool:bhts", keys=65),
    "bool_shared": Case(mask="bool:11ts", causal=True, queries=65, keys=65),
    "bool_query": Case(mask="bool:1ht1"),
    "float_full": Case(mask="float:bhts"),
    "float_bias": Case(mask="float:1hts", queries=65, keys=50),
    "float_row": Case(mask="float:b11s", causal=True),
    # dropout: keys per row a multiple of four or not (Philox blocks straddle rows)
    "dropout": Case(dropout=0.3, keys=40, causal=True),
    "dropout_ragged": Case(dropout=0.1, queries=35, keys=37),
    "dropout_all": Case(dropout=1.0, queries=17, keys=17),
    "dropout_mask": Case(dropout=0.5, mask="bool:b11s", heads=4, kv_heads=2),
    # dtypes
    "f64": Case(dtype="f64", dim=7, value_dim=5, queries=33, keys=41, causal=True),
    "f64_dropout_mask": Case(dtype="f64", dropout=0.25, mask="float:1hts"),
    "bf16": Case(dtype="bf16", causal=True, layout="packed"),
    "bf16_mask": Case(dtype="bf16", mask="float:b11s"),
    "f16": Case(dtype="f16", dim=72, value_dim=72, queries=50, keys=65),
    # nothing to do
    "no_batch": Case(batch=0),
    "no_keys": Case(keys=0),
    "no_queries": Case(queries=0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case: Case) -> None:
    check(case, mask_grad=case.mask.startswith("float"))


@pytest.mark.parametrize("dims", ["bhts", "1hts", "11ts", "b11s", "11t1", "1h1s"])
def test_mask_gradient_sums_over_broadcast_dims(dims: str) -> None:
    case = Case(mask=f"float:{dims}", batch=3, heads=4, kv_heads=2, queries=70, keys=130, dim=8, value_dim=8)
    check(case, mask_grad=True)


@pytest.mark.parametrize("causal", [False, True])
def test_halves_agree_with_one_pass(causal: bool) -> None:
    """Many cores and one head: the pass makes two halves. Both are right."""
    many = dataclasses.replace(targets.host(), cores=8)
    case = Case(batch=1, heads=2, kv_heads=1, queries=150, keys=200, causal=causal)
    text = lowered(nova_text(case, True), many)
    assert "online_attention_backward_query" in text and "online_attention_backward_key" in text
    check(case, target=many)


@pytest.mark.parametrize("bits", [128, 512])
def test_other_vector_widths(bits: int) -> None:
    """Tiles for 128-bit vectors, and for 512-bit ones with 32 registers (which LLVM splits where the CPU has none)."""
    registers = 32 if bits == 512 else 16
    narrow = dataclasses.replace(targets.host(), vector_bits=bits, registers=registers)
    check(Case(queries=70, keys=90, causal=True, mask="float:1hts"), mask_grad=True, target=narrow)
    check(Case(queries=40, keys=50, dtype="f64", dropout=0.2), target=narrow)


def empty_rows(case: Case, value: float | bool) -> dict[str, torch.Tensor]:
    """Inputs whose mask hides every key from rows 0 and 20, and two keys from all."""
    tensors = inputs(case)
    mask = torch.full(case.mask_shape, case.mask.startswith("bool"))
    mask = mask if case.mask.startswith("bool") else mask.float()
    for row in (0, 20):
        mask[..., row, :] = value
    mask[..., :, 3:5] = value
    return tensors | {"mask": mask}


@pytest.mark.parametrize(("kind", "value"), [("bool", False), ("float", -math.inf)])
def test_rows_that_see_no_key(kind: str, value: float | bool) -> None:
    """Output 0, log-sum-exp -inf, gradients 0: what PyTorch's scaled_dot_product_attention does."""
    case = Case(mask=f"{kind}:bhts")
    tensors = empty_rows(case, value)
    outputs = run_forward(case, tensors)
    gradients = run_backward(case, tensors | outputs)
    q, k, v = (tensors[n].clone().requires_grad_() for n in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=tensors["mask"], scale=case.factor)
    expected.backward(tensors["dout"])
    assert (outputs["out"][:, :, [0, 20]] == 0).all() and (outputs["lse"][:, :, [0, 20]] == -math.inf).all()
    assert (gradients["dq"][:, :, [0, 20]] == 0).all()
    torch.testing.assert_close(outputs["out"], expected.detach(), atol=2e-6, rtol=1e-5)
    for name, leaf in zip("qkv", (q, k, v), strict=True):
        torch.testing.assert_close(gradients[f"d{name}"], leaf.grad, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e9])
def test_rows_of_huge_negative_numbers_are_uniform(value: float) -> None:
    """A finite mask on every key is no mask at all: uniform weights, and the gradients of uniform weights."""
    case = Case(mask="float:bhts", keys=37)
    tensors = empty_rows(case, value)
    outputs = run_forward(case, tensors)
    assert torch.isfinite(outputs["lse"]).all()
    gradients = run_backward(case, tensors | outputs)
    # the softmax of these rows does not see the scores at all in float32: take the uniform rows as the definition
    uniform = tensors | {"mask": torch.where(tensors["mask"] != 0, -math.inf, 0.0)}
    uniform["q"] = tensors["q"].clone()
    uniform["q"][:, :, [0, 20]] = 0
    uniform["mask"][..., [0, 20], :] = 0
    exact = reference(case, uniform)
    torch.testing.assert_close(outputs["out"].double(), exact["out"], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(gradients["dv"].double(), exact["dv"], atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(gradients["dq"].double(), exact["dq"], atol=5e-6, rtol=1e-5)


def test_nan_reaches_the_rows_that_see_them() -> None:
    """A NaN key poisons every row that sees it and no other; so does a NaN query its own row."""
    case = Case(batch=1, heads=1, kv_heads=1, causal=True)
    tensors = inputs(case)
    tensors["k"][0, 0, 30, 0] = math.nan
    tensors["q"][0, 0, 3, 1] = math.nan
    nan = run_forward(case, tensors)["out"][0, 0].isnan().all(-1)
    assert nan[30:].all() and nan[3] and nan.sum() == len(nan[30:]) + 1


@pytest.mark.parametrize("case", [CASES["packed"], CASES["grouped"], CASES["dropout"], CASES["float_bias"]])
def test_thread_count_changes_no_bit(case: Case) -> None:
    before = torch.get_num_threads()
    tensors, results = inputs(case), []
    mask_grad = case.mask.startswith("float")
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            outputs = run_forward(case, tensors)
            results.append(outputs | run_backward(case, tensors | outputs, mask_grad))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_dropout_mask_is_the_reference_philox() -> None:
    """Identity keys expose the probabilities: dropped exactly where the reference drops."""
    case = Case(batch=2, heads=3, kv_heads=3, queries=21, keys=29, value_dim=29, dropout=0.4)
    tensors = inputs(case)
    tensors["v"] = torch.eye(29).expand(2, 3, 29, 29).contiguous()
    dropped = run_forward(case, tensors)["out"] == 0
    assert torch.equal(dropped, keep_mask(case, tensors) == 0)
    assert 0.3 < dropped.float().mean() < 0.5


def test_workspace_does_not_grow_with_the_square_of_the_length() -> None:
    """No T x T matrix anywhere: doubling the length must not even double the forward's scratch."""
    small, large = (kernel(Case(batch=1, heads=1, kv_heads=1, queries=n, keys=n), False) for n in (1024, 2048))
    assert large.kernel.workspace <= 2 * small.kernel.workspace
    text = lowered(nova_text(Case(queries=1000, keys=1001), False))
    assert "1000x1001" not in text


def test_dtype_names_cover_torch() -> None:
    assert set(TORCH) == {"f32", "f64", "bf16", "f16"}


def test_halves_write_into_one_packed_gradient() -> None:
    many = dataclasses.replace(targets.host(), cores=8)
    case = Case(batch=1, heads=1, kv_heads=1, queries=200, keys=200, layout="packed")
    text = lowered(nova_text(case, True), many)
    assert "online_attention_backward_key" in text
    check(case, target=many)
