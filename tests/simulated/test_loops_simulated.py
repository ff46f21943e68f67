"""Kernels of kind "loops" on the GPU's levels, without a GPU: every case of the CPU's tests as a tile program.

Each runs twice: as level 4 means it, and as the threads of the warp simulator, which finds races and accesses out of
bounds. Outputs and workspace start out poisoned.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from nova import mlir
from nova.gpu import simulate
from nova.gpu.distribute import distribute
from nova.mlir import ir
from nova.schedule import target as targets
from nova.tile import generate, interpret, widths
from tests.numerics import test_loops as cases

LEFT_OUT = {
    "test_streaming_stores_need_no_alignment",  # addresses of the CPU's stores
    "test_column_sum_accumulates_onto_a_tensor",  # and three more forms that no pass of this level makes
    "test_argmax_takes_the_first_of_equals",
    "test_concat_and_pad",
    "test_strided_slices_in_and_out",
    "test_gather_rows_and_report_bad_indices",  # below, with a record of its own
}
for _name in dir(cases):
    if _name.startswith("test_") and _name not in LEFT_OUT:
        globals()[_name] = getattr(cases, _name)


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own bytes as the simulators want them: bfloat16 as uint16, booleans as bytes."""
    flat = tensor.reshape(-1)
    if tensor.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.view(torch.uint8).numpy().view(np.bool_) if tensor.dtype == torch.bool else flat.numpy()


class Loaded:
    """A kernel as `tests.kernels.Loaded`, but simulated."""

    def __init__(self, text: str, how: str):
        if "nova.inplace" not in text:
            text = text.replace('nova.kernel = "loops",', 'nova.kernel = "loops", nova.inplace = [],')
        module = mlir.parse(text)
        with mlir.context(), ir.Location.unknown():
            self.program = str(generate.run(module, targets.by_name("h200")))
            self.threads = distribute(mlir.parse(self.program)) if how == "threads" else ""
        size = int(self.program.split("nova_tile.workspace = ")[1].split(" ")[0])
        self.workspace = torch.full((size + 64,), 0xFF, dtype=torch.uint8)
        self.record = np.zeros(4, np.int64)

    def call(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        buffers = [memory_of(t) for t in (*inputs, *outputs)]
        buffers += [self.workspace.numpy(), self.record]
        if self.threads:
            simulate.run(self.threads, buffers)
        else:
            interpret.run(self.program, buffers)


@pytest.fixture(autouse=True, params=["tiles", "threads"])
def _simulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cases, "load", lambda text: Loaded(text, request.param))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # runs are the same anyway
    torch.manual_seed(0)
    return


@pytest.mark.parametrize(
    "case", [lambda: cases.test_elementwise_one_dim(1003), lambda: cases.test_transposes_and_zero_sizes([7, 13, 5]),
             cases.test_index_values, lambda: cases.test_softmax(37, 33), lambda: cases.test_whole_sum([1003, 3]),
             lambda: cases.test_column_reduction("sum", [1003, 3])],
    ids=["elementwise", "transpose", "indices", "softmax", "total", "columns"],
)  # fmt: skip
def test_numbers_of_rows_and_vectors_in_64_bits(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tensors beyond 2^31 elements need, with the border moved down to 256."""
    monkeypatch.setattr(widths, "WIDE", 256)
    monkeypatch.setattr(widths, "OVERHANG", 128)
    case()


def test_what_another_nest_reads_is_not_overwritten_beside_it() -> None:
    """A sum that one block completes is used at that block's end, but not over an operand that other blocks read."""
    rows, columns, others = 8, 1024, 5
    k = cases.Kernel([rows, columns, others], [0], "nova.inplace = [array<i64: 1, 0>]")
    x, c, z = k.arg([rows, columns]), k.arg([columns]), k.arg([others, columns])
    new, y = k.out([columns]), k.out([others, columns])
    product = "%p = arith.mulf %i0, %i1 : f32"
    (scaled,) = k.generic([2, 1], [], [(z, "d0, d1"), (c, "d1")], [(y, "d0, d1")], product, "%p")
    start = k.fill(k.empty([columns]), "0.0")
    add = "%p = arith.addf %x0, %i0 : f32"
    (total,) = k.generic([0, 1], [0], [(x, "d0, d1")], [(start, "d1")], add, "%p")
    (moved,) = k.generic([1], [], [(c, "d0"), (total, "d0")], [(new, "d0")], "%p = arith.addf %i0, %i1 : f32", "%p")
    a, state, b = torch.randn(rows, columns), torch.randn(columns), torch.randn(others, columns)
    before, found = state.clone(), torch.empty(others, columns)
    cases.load(k.text(moved, scaled)).call([a, state, b], [state, found])
    torch.testing.assert_close(found, b * before)
    torch.testing.assert_close(state, before + a.sum(0))
