"""Scatters as tile programs: the CPU's cases, then long runs, many updates, and every path of the choice."""

from __future__ import annotations

import pytest
import torch

from nova.tile import sort
from tests.numerics import test_scatter_scan as cases
from tests.numerics.test_scatter_scan import (  # noqa: F401  (run here once more)
    close,
    test_as_strided_scatter,
    test_index_put_accumulates,
    test_index_put_overwrites_and_reports,
    test_max_pool2d_backward,
    test_scatter,
    test_scatter_last_duplicate_wins_and_bad_index_is_skipped,
    test_take_backward,
    test_take_backward_dtypes_and_int32_ids,
    test_take_backward_reports_and_skips_bad_ids,
)
from tests.simulated.whole_op import runner

THREADS = (  # also as per-thread code; the others would take minutes
    "test_take_backward[-1-ids_shape1-columns1-11]", "test_take_backward[2-ids_shape3-columns3-4]",
    "test_take_backward_dtypes_and_int32_ids[dtype1]", "test_take_backward_reports_and_skips_bad_ids[7]",
    "test_scatter[add-shape2-index_shape2-0]", "test_scatter[amax-shape4-index_shape4-2]", "test_scatter[none-shape0-index_shape0-0]",
    "test_index_put_accumulates[shape2", "test_index_put_accumulates[shape4", "test_index_put_overwrites_and_reports",
    "test_as_strided_scatter", "test_long_runs", "test_many_keys_and_many_updates[add-2]",
    "test_pooling", "test_max_pool2d_backward",
)  # fmt: skip


@pytest.fixture(params=[4, 5], ids=["tiles", "threads"], autouse=True)
def _run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(cases, "run", runner(request.param))


def wanted(item: pytest.Function) -> bool:
    """As tiles everything, as threads what THREADS lists."""
    name = item.name.replace("threads-", "").replace("[threads]", "")
    return item.callspec.params["_run"] == 4 or name.startswith(THREADS)


def test_long_runs() -> None:
    """Some places have hundreds of updates, so that blocks combine them."""
    ids = torch.where(torch.rand(700) < 0.5, 3, torch.randint(0, 40, [700]))
    dy = torch.randn(700, 36)
    attrs = "rows = 40 : i64, padding_idx = -1 : i64"
    got, _ = cases.run("take_backward", attrs, [dy, ids], [40, 36], dy.dtype)
    close(got, torch.zeros(40, 36, dtype=torch.float64).index_add_(0, ids, dy.double()))


@pytest.mark.parametrize("folded", [sort.FOLDED, 2])
@pytest.mark.parametrize("reduce", ["add", "none"])
def test_many_keys_and_many_updates(reduce: str, folded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one pass of the sort, more than one block of it, with and without a launch that adds up histograms."""
    monkeypatch.setattr(sort, "FOLDED", folded)
    base, index, src = torch.randn(70000), torch.randint(0, 70000, [1500]), torch.randn(1500)
    if reduce == "none":
        index = torch.randperm(70000)[:1500]
    got, _ = cases.run("scatter", f'dim = 0 : i64, reduce = "{reduce}"', [base, index, src], [70000], base.dtype)
    want = base.double()
    close(got, want.scatter_add(0, index, src.double()) if reduce == "add" else want.scatter(0, index, src.double()))


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "shape"), [
    ((2, 2), (2, 2), (0, 0), (1, 1), (2, 2, 8, 12)), ((3, 2), (1, 2), (1, 0), (1, 2), (1, 3, 7, 9)),
    ((5, 5), (3, 2), (2, 1), (1, 1), (2, 1, 11, 10)), ((6, 6), (4, 4), (2, 2), (1, 1), (1, 2, 13, 13)),
])  # fmt: skip
def test_pooling(kernel, stride, padding, dilation, shape) -> None:
    """Windows that overlap, do not, leave gaps; more taps than elements look at one by one."""
    x = torch.randn(shape)
    y, indices = torch.nn.functional.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)
    dy = torch.randn(y.shape)
    numbers = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    attrs = ", ".join(f"{name} = array<i64: {a}, {b}>" for name, (a, b) in numbers.items())
    got, _ = cases.run("max_pool2d_backward", attrs, [dy, indices], x.shape, x.dtype)
    planes = shape[0] * shape[1]
    want = torch.zeros(planes, shape[2] * shape[3], dtype=torch.float64)
    close(got, want.scatter_add(1, indices.view(planes, -1), dy.double().view(planes, -1)).view(shape))
