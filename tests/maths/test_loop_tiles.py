"""The tiles of memory-bound kernels on GPUs: within the hardware's limits, and covering what they must."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nova.schedule import target as targets
from nova.schedule.bandwidth import REGISTERS, TileProblem, schedule_tile

BOARDS = sorted(targets.PRESETS)


@st.composite
def problems(draw) -> TileProblem:
    vector = draw(st.sampled_from([1, 2, 4, 8]))
    columns = vector * draw(st.integers(1, 40000))
    rows = draw(st.integers(1, 100000))
    total = draw(st.sampled_from(["", "rows", "all"]))
    return TileProblem(
        1 if total == "all" else rows, columns, vector, draw(st.sampled_from([1.0, 2.0, 4.0, 8.0, 24.0])),
        draw(st.integers(1, 6)), draw(st.booleans()) and total != "all", total, row_lanes=draw(st.booleans()),
        fixed=draw(st.sampled_from([1, 7, 64])),
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from(BOARDS))
def test_tiles_fit(p: TileProblem, board: str) -> None:
    s = schedule_tile(p, targets.PRESETS[board])
    assert 32 <= s.threads <= 1024 and s.threads & (s.threads - 1) == 0
    assert s.row_threads & (s.row_threads - 1) == 0 and s.row_batch >= 1 and s.column_batch >= 1
    assert s.parts >= 1 and (p.total or s.parts == 1)
    assert s.row_batch * s.column_batch * p.vector <= max(REGISTERS, 8 * p.vector)
    if p.reduces and not s.long:
        assert s.groups * p.vector >= p.columns, "a tile holds whole rows"
    assert s.reasons


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from(BOARDS))
def test_the_same_problem_has_the_same_tile(p: TileProblem, board: str) -> None:
    """How sums are cut depends on nothing else, so results do not change from run to run."""
    assert schedule_tile(p, targets.PRESETS[board]) == schedule_tile(p, targets.PRESETS[board])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 2, 4, 8]), st.sampled_from(BOARDS))
def test_turned_tiles_hold_square_blocks(rows: int, groups: int, vector: int, board: str) -> None:
    p = TileProblem(rows, groups * vector, vector, turned=True)
    s = schedule_tile(p, targets.PRESETS[board])
    assert s.threads % 32 == 0 and s.rows == s.groups * vector in (32, 64)
    assert s.row_run in (vector, 4), "blocks that exchange without bank conflicts"
