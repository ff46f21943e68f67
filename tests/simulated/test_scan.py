"""Scans as tile programs: the CPU's cases, then shapes that take every path."""

from __future__ import annotations

import pytest
import torch

from nova.tile.builder import Program
from nova.tile.layout import NestedLayout
from tests.numerics import test_scatter_scan as cases
from tests.numerics.test_scatter_scan import close, test_scan, test_scan_dtypes  # noqa: F401  (run here once more)
from tests.simulated.whole_op import runner
from tests.tile_programs import compare, numbers


@pytest.fixture(params=[4, 5], ids=["tiles", "threads"], autouse=True)
def _run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(cases, "run", runner(request.param))


def wanted(item: pytest.Function) -> bool:
    return item.originalname != "test_layouts" or item.callspec.params["_run"] == 5


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


LAYOUTS = [
    # shape, layout by (subgroup, batch, outer, thread, element, subgroup strides, thread strides), dim
    ((2, 64), ((1, 2), (1, 2), (2, 1), (1, 8), (1, 2), (0, 1), (0, 1)), 1),  # copies in other lanes
    ((64, 8), ((2, 1), (2, 1), (2, 1), (8, 4), (1, 2), (1, 0), (4, 1)), 0),
    ((16, 24), ((1, 2), (2, 3), (1, 1), (8, 4), (1, 1), (0, 1), (1, 8)), 1),
    ((32, 6), ((4, 1), (1, 3), (2, 1), (2, 2), (2, 1), (1, 0), (16, 1)), 0),
    ((1, 40), ((1, 1), (1, 5), (1, 2), (1, 1), (1, 4), (0, 0), (0, 0)), 1),  # in registers only
]


@pytest.mark.parametrize("element,kind", [("i64", "addi"), ("f32", "addf"), ("bf16", "maximumf"), ("i32", "muli")])
@pytest.mark.parametrize("shape,fields,dim", LAYOUTS)
def test_layouts(shape, fields, dim: int, element: str, kind: str) -> None:
    """Threads against what their tiles mean."""
    layout = NestedLayout(*fields)
    assert layout.shape == shape
    program = Program("scan", 2, (1, 1, 1), 128)
    window = {"strides": [shape[1], 1]}
    tile = program.load(program.args[0], 0, [0, 0], element, layout, **window)
    program.store(program.scan(tile, dim, kind), program.args[1], 0, [0, 0], **window)
    count = shape[0] * shape[1]
    compare(program, [numbers(element, count), numbers(element, count, 1)])
