"""The arena of shared memory: live areas never overlap, and what may still be read is not written without a barrier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nova.gpu.shared_arena import PLENTY, SMALL, Area, Arena, Cut, State


@given(st.lists(st.tuples(st.integers(1, 20000), st.integers(0, 3)), max_size=40))
def test_areas(steps: list[tuple[int, int]]) -> None:
    """Any order of taking, releasing and synchronising."""
    arena, reading = Arena(), []
    for size, what in steps:
        if what < 2:
            area, wait = arena.take(size)
            assert area.end - area.start >= size and area.start % 128 == 0 and area.end <= arena.total
            assert not any(area.meets(other) for other in arena.live if other is not area)
            assert wait or not any(area.meets(other) for other in reading)
            if wait:
                arena.synchronised()
                reading.clear()
        elif arena.live and what == 2:
            area = arena.live[size % len(arena.live)]
            arena.release(area)
            reading.append(area)
        else:
            arena.synchronised()
            reading.clear()


def test_small_scratch_spreads_out_instead_of_waiting() -> None:
    arena, waits = Arena(), []
    for _ in range(SMALL // 1024 + 1):
        area, wait = arena.take(1024)
        waits.append(wait)
        if wait:
            arena.synchronised()
        arena.release(area)
    assert waits == [False] * (SMALL // 1024) + [True]


def test_a_loop_waits_at_its_top_and_may_not_run() -> None:
    arena = Arena()
    first, _ = arena.take(256)
    arena.release(first)
    with arena.repeated():
        area, wait = arena.take(256)
        assert wait
        arena.synchronised()
        arena.release(area)
    assert set(arena.busy) == {first, area} and not arena.everything_busy


@pytest.mark.parametrize(("size", "wait"), [(PLENTY // 2, False), (PLENTY, True)])
def test_scratch_spreads_beside_a_buffer_as_long_as_it_is_small(size: int, wait: bool) -> None:
    arena = Arena()
    arena.take(size)
    first, _ = arena.take(256)
    arena.release(first)
    assert arena.take(256)[1] == wait


def test_a_loop_waits_for_what_its_end_reads() -> None:
    """Two areas in turn: the second's barrier stands between the first's reading and its next writing."""
    arena = Arena()
    second = Area(128, 256)
    with arena.repeated(State((second,))):
        area, wait = arena.take(128)
        assert (area, wait) == (Area(0, 128), False)
        arena.synchronised()
        arena.release(area)
        assert arena.take(128) == (second, False)
        arena.synchronised()
        arena.release(second)
    assert arena.busy == [second] and not arena.blind


def test_a_copy_goes_on_by_itself() -> None:
    arena = Arena()
    area, _ = arena.take(128)
    other = arena.copy()
    other.release(area)
    other.take(4096)
    assert (arena.live, arena.busy, arena.total) == ([area], [], 128)


def test_a_loop_without_scratch_changes_nothing() -> None:
    arena = Arena()
    with arena.repeated():
        pass
    assert arena.take(64) == (Area(0, 128), False)


def test_branches_join() -> None:
    arena = Arena()
    before = arena.state()
    area, _ = arena.take(512)
    arena.release(area)
    arena.restore(arena.state(), before)
    assert arena.busy == [area]


def test_groups_write_their_own_pieces_again_after_their_own_barrier() -> None:
    """Two areas in turn, as in a loop over tiles; in the third step the first area is free without waiting for all."""
    arena, cut, taken = Arena(), Cut(2, 128), []
    for _ in range(4):
        area, wait = arena.take(128, cut=cut)
        assert not wait
        arena.synchronised(cut.warps)
        arena.release(area)
        taken.append((area.start, area.end))
    assert taken == [(0, 128), (128, 256), (0, 128), (128, 256)]


@pytest.mark.parametrize("cut", [None, Cut(4, 128), Cut(2, 64)])
def test_who_cuts_an_area_otherwise_waits_for_all(cut: Cut | None) -> None:
    arena = Arena()
    first, _ = arena.take(PLENTY, cut=Cut(2, 128))
    arena.synchronised(2)
    arena.release(first)
    arena.synchronised(2)
    assert arena.state().settled == (first,) and not arena.busy
    assert arena.take(PLENTY, cut=cut)[1]


def test_a_barrier_of_other_groups_settles_nothing() -> None:
    arena = Arena()
    area, _ = arena.take(128, cut=Cut(2, 128))
    arena.release(area)
    arena.synchronised(4)
    assert arena.busy == [area] and not arena.settled


def test_settled_on_one_path_and_busy_on_another_is_busy() -> None:
    arena = Arena()
    area, _ = arena.take(128, cut=Cut(2, 128))
    arena.release(area)
    busy = arena.state()
    arena.synchronised(2)
    arena.restore(arena.state(), busy)
    assert arena.busy == [area] and not arena.settled
