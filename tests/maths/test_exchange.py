"""Layout changes through shared memory: every element has a place of its own, and standard moves meet no bank twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nova.gpu import exchange
from nova.gpu.exchange import Swizzle
from nova.tile.layout import NestedLayout, blocked, mma_accumulator, mma_lhs


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, int]) -> NestedLayout:
    """Layouts of a tile of powers of two over 4 warps: bits of each dimension dealt out to the five levels."""
    lanes, warps, picked = 5, 2, []
    for size in shape:
        bits = size.bit_length() - 1
        element = draw(st.integers(0, min(bits, 3)))
        thread = draw(st.integers(0, min(bits - element, lanes)))
        subgroup = draw(st.integers(0, min(bits - element - thread, warps)))
        outer = draw(st.integers(0, bits - element - thread - subgroup))
        lanes, warps = lanes - thread, warps - subgroup
        batch = bits - element - thread - subgroup - outer
        picked.append((1 << subgroup, 1 << batch, 1 << outer, 1 << thread, 1 << element))
    subgroups, batches, outers, threads, elements = zip(*picked, strict=True)
    return NestedLayout(
        subgroups, batches, outers, threads, elements, (1, subgroups[0]), (threads[1], 1)
    )  # fmt: skip


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_element_has_its_own_place(data: st.DataObject) -> None:
    shape = (16, 64)
    source, target = data.draw(layouts(shape)), data.draw(layouts(shape))
    size = data.draw(st.sampled_from([1, 2, 4, 8]))
    plan = exchange.plan(source, target, size, 128)
    places = {}
    for layout, width in ((source, plan.written), (target, plan.read)):
        addresses, elements = plan.addresses(layout, 128), layout.indices(128)
        assert addresses.min() >= 0 and addresses.max() < plan.size
        for address, element in zip(addresses.reshape(-1), elements.reshape(-1, 2).tolist(), strict=True):
            assert places.setdefault(int(address), element) == element
        assert width * size <= exchange.ACCESS_BYTES
    assert len(places) == 16 * 64


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_swizzled_addresses_are_linear(data: st.DataObject) -> None:
    layout = data.draw(layouts((32, 32)))
    plan = exchange.Exchange((32, 1), 1024, Swizzle(5, 2, data.draw(st.integers(0, 3))), 1, 1, False)
    table = plan.addresses(layout, 128)
    found = exchange.linear(table)
    assert found is not None
    own = np.zeros(128, np.int64)
    for mask, shift in found.terms:
        bits = np.arange(128) & mask
        own ^= bits << shift if shift >= 0 else bits >> -shift
    np.testing.assert_array_equal(own[:, None] ^ np.array(found.registers)[None, :], table)
    assert not (own & ~found.thread_bits).any()


def test_what_is_not_linear_is_found_out() -> None:
    assert exchange.linear(np.arange(12)[:, None] * 3) is None


@pytest.mark.parametrize(
    "source, target, size",
    [
        (mma_accumulator(64, 128, (2, 2)), blocked((64, 128), (4, 1), (1, 32), 4), 4),
        (mma_accumulator(128, 64, (4, 1)), blocked((128, 64), (4, 1), (4, 8), 8), 2),
        (blocked((64, 64), (4, 1), (4, 8), 8), mma_lhs(64, 64, (4, 1), 16), 2),
    ],
)
def test_tensor_core_tiles_meet_no_bank_twice(source: NestedLayout, target: NestedLayout, size: int) -> None:
    plan = exchange.plan(source, target, size, 128)
    for layout, width in ((source, plan.written), (target, plan.read)):
        passes = exchange.bank_passes(plan.addresses(layout, 128)[:, 0], width, size)
        assert passes == max(1, width * size // 4)


def test_warps_that_keep_their_rows_need_no_other_warp() -> None:
    rows = blocked((64, 32), (4, 1), (4, 8), 4)
    assert exchange.stays_in_warp(rows, blocked((64, 32), (4, 1), (16, 2), 4), 128)
    assert not exchange.stays_in_warp(rows, blocked((64, 32), (1, 4), (4, 8), 1), 128)


def test_a_warp_that_holds_a_copy_reads_what_the_first_wrote() -> None:
    whole = blocked((32,), (1,), (32,), 1)
    turned = NestedLayout((1,), (1,), (1,), (16,), (2,), (0,), (1,))
    assert exchange.stays_in_warp(whole, turned, 32)
    assert not exchange.stays_in_warp(whole, turned, 64)
