"""Attention's plain-data parts: its schedule's ledgers, and the algebra of the views it absorbs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nova.cpu.attention_tiles import column_tiles, padded_rows, row_tiles
from nova.errors import CompileError
from nova.fusion.attention import dense_strides, reshaped_strides
from nova.schedule import target as targets
from nova.schedule.attention import AttentionProblem, prefers_halves, schedule_attention

extent = st.integers(1, 3000)
CPUS = [*targets.CPU_PRESETS.values(), targets.cpu("sse", cores=1, ghz=2.0, vector_bits=128, fma_units=1)]


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(["f32", "bf16", "f64"]))
    sizes = (draw(extent), draw(extent), draw(st.integers(1, 128)), draw(st.integers(1, 128)))
    direction = draw(st.sampled_from(["forward", "backward"]))
    return AttentionProblem(
        draw(st.integers(1, 16)), kv_heads * group, kv_heads, *sizes, dtype, draw(st.booleans()), direction
    )


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from(CPUS))
def test_cpu_tiles_fit(p: AttentionProblem, target: targets.CpuTarget) -> None:
    s = schedule_attention(p, target)
    lanes = target.lanes("f64" if p.dtype == "f64" else "f32")
    rows = 12 if target.registers >= 32 else 6
    assert s.panel == 2 * lanes and s.block_queries % s.panel == 0
    assert s.block_keys % (2 * rows) == 0 and s.block_keys % 4 == 0  # register tiles, depth unroll, Philox blocks
    assert s.block_keys < p.keys + 2 * rows and s.block_queries < p.queries + s.panel
    assert 1 <= s.threads <= target.cores and math.isfinite(s.seconds) and s.seconds > 0 and s.reasons
    if p.dim + p.value_dim <= 128 and target.l1 >= 32 << 10:
        assert s.shared_bytes <= target.l1
    assert s.halves == (p.direction == "backward" and prefers_halves(p, target))


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(sorted(targets.PRESETS)))
def test_gpu_ledger_holds(p: AttentionProblem, name: str) -> None:
    target = targets.PRESETS[name]
    s = schedule_attention(p, target)
    assert s.registers <= target.registers_thread and s.shared_bytes <= target.smem_block
    assert s.threads % 32 == 0 and s.threads <= 256 and s.seconds > target.launch_seconds
    assert s.halves == (p.direction == "backward")


def test_a_head_that_fits_no_board_says_so() -> None:
    p = AttentionProblem(1, 1, 1, 64, 64, 8192, 8192)
    with pytest.raises(CompileError, match="8192.*does not fit rtx3060: it needs .* B .* there are 101,376 B"):
        schedule_attention(p, targets.PRESETS["rtx3060"])


def test_halves_only_where_cores_would_idle() -> None:
    many = targets.cpu("many", cores=8, ghz=2.5)
    one_head = AttentionProblem(1, 1, 1, 1024, 1024, 64, 64, direction="backward")
    assert prefers_halves(one_head, many)
    assert not prefers_halves(AttentionProblem(8, 1, 1, 1024, 1024, 64, 64, direction="backward"), many)
    assert not prefers_halves(one_head, targets.cpu("one", cores=1, ghz=2.5))
    assert not prefers_halves(AttentionProblem(1, 1, 1, 16, 16, 8, 8, direction="backward"), many)  # over before a fork


def test_causal_pairs_are_counted() -> None:
    for queries, keys in ((5, 5), (3, 7), (7, 3)):
        p = AttentionProblem(2, 3, 3, queries, keys, 8, 8, causal=True)
        assert p.pairs == 6 * torch.ones(queries, keys).tril().sum().item()


@given(st.integers(1, 300), st.sampled_from([6, 12]))
def test_row_tiles_cover(total: int, most: int) -> None:
    tiles = row_tiles(total, most)
    at = 0
    for begin, end, rows in tiles:
        assert begin == at and (end - begin) % rows == 0 and 1 <= rows <= most
        at = end
    assert total <= at == padded_rows(total, most) <= total + total // 20


@given(st.integers(1, 40))
def test_column_tiles_cover(vectors: int) -> None:
    at = 0
    for first, width, tiles in column_tiles(vectors):
        assert first == at and 1 <= width <= 3 and (width != 1 or vectors == 1)
        at += width * tiles
    assert at == vectors


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(shapes, st.permutations(range(4)), st.data())
def test_reshaped_strides_are_pytorchs(shape: list[int], order: list[int], data: st.DataObject) -> None:
    """Whatever torch can view, we can, with strides that reach the same elements; and nothing else."""
    order = [axis for axis in order if axis < len(shape)]
    x = torch.arange(math.prod(shape)).view(shape).permute(order)
    new = data.draw(st.permutations([*shape, 1])) if data.draw(st.booleans()) else [x.numel()]
    if data.draw(st.booleans()) and len(shape) > 1:
        new = [shape[0] * shape[1], *shape[2:]]
    strides = reshaped_strides(tuple(x.shape), x.stride(), tuple(new))
    try:
        expected = x.view(new)
    except RuntimeError:
        assert strides is None
        return
    assert strides is not None
    assert torch.equal(torch.as_strided(x, new, strides), expected)
    assert dense_strides(tuple(shape)) == torch.empty(shape).stride()
