"""Overlap of address ranges: the sweep and the lookup against comparing every pair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nova.capture.memory import ApartFrom, overlap

span = st.tuples(st.integers(0, 40), st.integers(0, 8), st.booleans()).map(lambda s: (s[0], s[0] + s[1], s[2]))


def meet(a, b) -> bool:
    """Whether two spans share an address and one of them changes."""
    return max(a[0], b[0]) < min(a[1], b[1]) and (a[2] or b[2])


@given(st.lists(span, max_size=8))
def test_the_sweep_finds_a_pair_if_there_is_one(spans):
    pairs = [(a, b) for i, a in enumerate(spans) for b in spans[:i] if meet(a, b)]
    found = overlap(spans)
    assert (found is not None) == bool(pairs)
    if found is not None:
        assert found[0] != found[1] and meet(spans[found[0]], spans[found[1]])


@given(st.lists(span, max_size=8), span)
def test_the_lookup_says_whether_one_more_is_apart(spans, one):
    assert ApartFrom(spans).holds(*one) == (not any(meet(one, other) for other in spans))
