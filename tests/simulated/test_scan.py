"""Scans as tile programs: the CPU's cases, then shapes that take every path."""

from __future__ import annotations

import pytest
import torch

from tests.numerics import test_scatter_scan as cases
from tests.numerics.test_scatter_scan import close, test_scan, test_scan_dtypes  # noqa: F401  (run here once more)
from tests.simulated.whole_op import runner


@pytest.fixture(params=[4, 5], ids=["tiles", "threads"], autouse=True)
def _run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(cases, "run", runner(request.param))


@pytest.mark.parametrize("shape,dim", [
    ([300, 8], 1), ([2, 8192], 1), ([3, 5000], 1), ([40, 260], 0), ([2, 70, 6], 1), ([9, 1, 130], 1), ([600, 2], 0),
    ([1, 60000], 1), ([20000, 3], 0), ([3, 9000, 3], 1),
])  # fmt: skip
def test_paths(shape: list[int], dim: int) -> None:
    x = torch.randn(shape)
    got, _ = cases.run("cumsum", f"dim = {dim} : i64", [x], shape, x.dtype, "scan")
    close(got, torch.cumsum(x.double(), dim), 2e-7)


def test_a_half_of_a_long_row() -> None:
    x = torch.ones(1, 4100, dtype=torch.float16)
    got, _ = cases.run("cumsum", "dim = 1 : i64", [x], x.shape, x.dtype, "scan")
    assert got[0, 2047] == 2048
    assert got[0, 4099] == 4100
