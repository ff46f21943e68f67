"""Codes of who touched shared memory: joined, and forgiven by the barriers of their groups."""

import numpy as np
import pytest

from nova.gpu.simulate_threads import MANY, join, ordered, synchronised, text


def codes(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_group_grows_to_hold_both() -> None:
    warp = join(codes(0), codes(31))[0]
    pair = join(codes(warp), codes(32))[0]
    block = join(codes(pair), codes(1023))[0]
    assert text(warp) == "warp 0" and text(pair) == "one of warps 0 to 1" and text(block) == "one of warps 0 to 31"
    assert join(codes(7), codes(7))[0] == 7 and join(codes(pair), codes(MANY))[0] == MANY


@pytest.mark.parametrize(
    ("thread", "level", "inside", "outside"), [(40, 0, 63, 64), (40, 1, 0, 64), (200, 2, 255, 127)]
)
def test_a_barrier_orders_its_group(thread: int, level: int, inside: int, outside: int) -> None:
    done = synchronised(codes(thread), level)
    assert ordered(done, codes(inside))[0] and not ordered(done, codes(outside))[0]
    assert not ordered(codes(thread), codes(inside))[0]


def test_a_barrier_of_less_than_those_who_touched_orders_nothing() -> None:
    pair = join(codes(0), codes(32))
    assert synchronised(pair, 0)[0] == pair[0]
    assert not ordered(synchronised(codes(MANY), 4), codes(0))[0]


def test_touching_again_afterwards_needs_another_barrier() -> None:
    done = synchronised(join(codes(0), codes(32)), 1)
    again = join(done, codes(33))
    assert not ordered(again, codes(0))[0] and ordered(synchronised(again, 1), codes(0))[0]
