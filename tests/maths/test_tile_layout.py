"""Layouts: every element is somewhere, what is copied is known, and the tensor cores' fragments are as the PTX ISA says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nova.tile import layout as lay

SMALL = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> lay.NestedLayout:
    """Layouts of rank 1 to 3 over at most four warps."""
    rank = draw(st.integers(1, 3))
    lanes, warps = [1] * rank, [1] * rank
    for counts, budget in ((lanes, 32), (warps, 4)):
        for d in draw(st.permutations(range(rank))):
            counts[d] = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16, 32) if n <= budget]))
            budget //= counts[d]
    batch, outer, element = (tuple(draw(SMALL) for _ in range(rank)) for _ in range(3))
    return lay.NestedLayout(
        tuple(warps), batch, outer, tuple(lanes), element, lay.row_major(warps), lay.row_major(lanes)
    )  # fmt: skip


@settings(deadline=None)
@given(layouts())
def test_every_element_is_held_and_each_first_copy_once(layout: lay.NestedLayout) -> None:
    threads = 4 * 32
    flat = np.ravel_multi_index(np.moveaxis(layout.indices(threads), -1, 0), layout.shape)
    first = np.array([layout.is_first_copy(t // 32, t % 32) for t in range(threads)])
    assert sorted(flat[first].reshape(-1)) == list(range(int(np.prod(layout.shape))))
    assert layout.registers * first.sum() == np.prod(layout.shape)


@settings(deadline=None)
@given(layouts())
def test_the_text_is_the_layout(layout: lay.NestedLayout) -> None:
    assert lay.NestedLayout.parse(layout.text()) == layout


@settings(deadline=None)
@given(layouts(), st.data())
def test_projection_drops_coordinates(layout: lay.NestedLayout, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, layout.rank - 1))
    kept = [d for d in range(layout.rank) if d != dim]
    left = layout.project([dim]).indices(128)
    whole = layout.indices(128)[..., kept]
    for thread in range(0, 128, 37):
        assert {tuple(row) for row in left[thread]} == {tuple(row) for row in whole[thread]}


def test_accumulators_of_m16n8() -> None:
    layout = lay.mma_accumulator(16, 8, (1, 1))
    for lane in range(32):
        group, quad = lane // 4, lane % 4
        expected = [(group, 2 * quad), (group, 2 * quad + 1), (group + 8, 2 * quad), (group + 8, 2 * quad + 1)]
        assert [layout.index(0, lane, r) for r in range(4)] == expected


@pytest.mark.parametrize(("bits", "step"), [(16, 2), (32, 1)])
def test_operands_of_mma(bits: int, step: int) -> None:
    """PTX ISA: A holds rows group and group + 8, B column group; k is quad * step and that plus half the instruction."""
    k = 256 // bits
    a, b = lay.mma_lhs(16, k, (1, 1), bits), lay.mma_rhs(k, 8, (1, 1), bits)
    for lane in range(32):
        group, quad = lane // 4, lane % 4
        ks = {h * k // 2 + quad * step + e for h in range(2) for e in range(step)}
        assert {a.index(0, lane, r) for r in range(a.registers)} == {(row, j) for row in (group, group + 8) for j in ks}
        assert {b.index(0, lane, r) for r in range(b.registers)} == {(j, group) for j in ks}


def test_what_needs_no_shared_memory() -> None:
    """Probabilities become the next contraction's operand where they are: 16-bit as it is, TF32 with paired k."""
    scores = lay.mma_accumulator(64, 64, (4, 1))
    assert lay.register_permutation(scores, lay.mma_lhs(64, 64, (4, 1), 16), 128) is not None
    assert lay.register_permutation(scores, lay.mma_lhs(64, 64, (4, 1), 32, paired_k=True), 128) is not None
    assert lay.register_permutation(scores, lay.mma_lhs(64, 64, (4, 1), 32), 128) is None


def test_a_tile_that_is_not_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="not cut by"):
        lay.blocked((8, 100), (1, 1), (1, 32), 4)


@given(
    st.sampled_from([1, 2, 8, 32]), st.sampled_from([1, 2, 4]), st.integers(1, 6), st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 5),
)  # fmt: skip
def test_scattered_threads_hold_every_element_and_less_each(
    lanes: int, warps: int, batch: int, run: int, doublings: int
) -> None:
    copies = 1 << doublings
    whole = lay.NestedLayout((warps, 1), (batch, 1), (1, 1), (lanes, 1), (1, run), (1, 0), (1, 0))
    shared = lay.scattered(whole, 0, copies)
    flat = np.ravel_multi_index(np.moveaxis(shared.indices(max(32, lanes * warps * copies)), -1, 0), shared.shape)
    assert shared.shape == whole.shape and set(flat.reshape(-1)) == set(range(int(np.prod(whole.shape))))
    of_batch = np.gcd(batch, copies)
    assert whole.registers // shared.registers == of_batch * np.gcd(run, copies // of_batch)
    distinct = min(32, shared.thread[0] * shared.thread[1])
    assert (np.diff(flat[:distinct, 0]) > 0).all()  # lanes that are neighbours hold neighbours in memory
