"""Attention by the threads of a simulated GPU, against float64.

The simulator stops at races, at copies that nobody waited for, at shared memory that nobody wrote and at accesses out
of bounds; so these runs also say that the pipeline's waits and barriers are enough.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from nova.gpu import simulate
from nova.schedule import target as targets
from tests.attention_cases import Case, check, inputs, run_forward
from tests.attention_programs import TileKernel, level3, maker, simulated, tile_text
from tests.numerics.test_attention import CASES

TF32 = 2.0**-10
ONE = Case(batch=1, heads=1, kv_heads=1, queries=80, keys=80, dim=32, value_dim=32, causal=True)


@pytest.mark.parametrize("board", ["a100", "rtx4090", "h200"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "tf32", "f32", "f64"])
def test_precisions_and_boards(dtype: str, board: str) -> None:
    """Causal, over more than one block of keys, by each board's own tiles."""
    case = dataclasses.replace(ONE, dtype="f32" if dtype == "tf32" else dtype)
    make = maker(targets.PRESETS[board], dtype == "tf32", simulated)
    check(case, make=make, roundoff=TF32 if dtype == "tf32" else 0.0)


@pytest.mark.parametrize(
    "name", ["one_key", "head_7_3", "packed_64", "grouped", "bool_shared", "float_row", "dropout_ragged", "no_keys"]
)
def test_shapes_and_masks(name: str) -> None:
    case = CASES[name]
    make = maker(targets.PRESETS["h200"], run=simulated)
    check(case, mask_grad=case.mask.startswith("float"), make=make)


def test_values_of_another_width_than_keys() -> None:
    """Both padded: rows and columns of a copy are cut, each at places of its own."""
    case = Case(queries=33, keys=65, dim=40, value_dim=24, scale=0.3)
    check(case, make=maker(targets.PRESETS["h200"], run=simulated))


@pytest.mark.parametrize("dims", ["bhts", "11t1", "b111"])
def test_the_gradient_of_a_mask(dims: str) -> None:
    case = Case(mask=f"float:{dims}", heads=1, kv_heads=1, queries=20, keys=70, dim=8, value_dim=8)
    check(case, mask_grad=True, make=maker(targets.PRESETS["h200"], run=simulated))


def measured(case: Case, backward: bool, tf32: bool = False) -> list[simulate.Report]:
    """What the launches of a kernel moved."""
    reports: list[simulate.Report] = []
    target = targets.PRESETS["h200"]
    text = tile_text(level3(case, backward, False, target, tf32), target)
    kernel = TileKernel(text, lambda text, buffers: reports.append(simulated(text, buffers)))
    tensors = inputs(case)
    shape = case.shapes["q"]
    flat = [shape[0], shape[2], shape[1] * shape[3]]
    packed = torch.cat([tensors[n].transpose(1, 2).reshape(flat) for n in "qkv"], 2)
    out, lse = torch.zeros(flat, dtype=packed.dtype), torch.zeros(case.shapes["lse"])
    if backward:
        kernel.call([torch.zeros_like(out), packed, out, lse], [torch.zeros_like(packed)])
    else:
        kernel.call([packed], [out, lse])
    return reports


@pytest.mark.parametrize(("dtype", "tf32"), [("bf16", False), ("f32", True)])
@pytest.mark.parametrize("backward", [False, True])
def test_no_two_lanes_meet_in_a_bank(dtype: str, tf32: bool, backward: bool) -> None:
    """Rows of 64: ldmatrix, its transposed form, and the single loads of TF32's values all pass in one go."""
    case = dataclasses.replace(ONE, dtype=dtype, layout="packed", queries=128, keys=128, dim=64, value_dim=64)
    (report,) = measured(case, backward, tf32)
    assert report.bank_conflicts == 0


def test_operands_are_read_once_a_block() -> None:
    """Forward reads Q once, and K and V once a block of queries, 16 bytes an access."""
    case = dataclasses.replace(ONE, dtype="bf16", layout="packed", queries=64, keys=64, dim=64, value_dim=64)
    (report,) = measured(case, backward=False)
    kernel = report["attention_0"]
    assert kernel.global_load.bytes == 3 * 64 * 64 * 2
    assert kernel.global_load.requests == 3 * 64 * 64 * 2 // (32 * 16)


def test_same_bits_every_time() -> None:
    case = dataclasses.replace(ONE, dtype="bf16")
    make, tensors = maker(targets.PRESETS["h200"], run=simulated), inputs(ONE)
    tensors = {name: value.to(torch.bfloat16) for name, value in tensors.items()}
    first, second = (run_forward(case, tensors, make(case, False, False)) for _ in range(2))
    assert all(np.array_equal(first[n].float().numpy(), second[n].float().numpy()) for n in first)
