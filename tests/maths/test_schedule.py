"""What every schedule must satisfy, whatever the shape: the ledgers, the cover of the problem, and a sane prediction."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nova.errors import NovaError
from nova.mlir import context, ir
from nova.schedule import config
from nova.schedule import target as targets
from nova.schedule.bandwidth import LoopProblem, schedule_loops
from nova.schedule.contraction import ContractionProblem, ContractionSchedule, row_major, schedule_contraction
from nova.schedule.contraction_gpu import Candidate, _registers

extent = st.integers(1, 5000) | st.sampled_from([1, 2, 7, 64, 768, 4096, 50304])
CPUS = [*targets.CPU_PRESETS.values(), targets.cpu("sse", cores=1, ghz=2.0, vector_bits=128, fma_units=1)]


@st.composite
def problems(draw: st.DrawFn) -> ContractionProblem:
    dtype = draw(st.sampled_from(["f32", "bf16", "f64"]))
    layout = draw(st.sampled_from(["nn", "nt", "tn", "tt"]))
    sizes = [draw(extent) for _ in range(3)]
    accumulate = "f64" if dtype == "f64" else "f32"
    return row_major(*sizes, dtype=dtype, layout=layout, batch=draw(st.integers(1, 40)), accumulate=accumulate)


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from(CPUS))
def test_cpu_contractions_fit(p: ContractionProblem, target: targets.CpuTarget) -> None:
    s = schedule_contraction(p, target)
    assert math.isfinite(s.seconds) and s.seconds > 0 and s.reasons
    assert 1 <= s.threads <= target.cores
    if s.kind == "dot":
        assert p.m <= 8 and s.subgroup[0] == p.m
        return
    lanes = target.lanes(p.accumulate)
    rows, columns = s.subgroup
    vectors = columns // lanes
    assert columns % lanes == 0 and rows * vectors + vectors + 1 < target.registers
    assert s.workgroup[0] % rows == 0 and s.workgroup[1] % columns == 0
    size = 8 if p.accumulate == "f64" else 4
    if s.promoted[1]:
        assert s.reduction * columns * size <= target.l2 // 2  # held in L1, or streamed
    if s.promoted[0] and p.m > rows:
        assert s.workgroup[0] * s.reduction * size <= target.l2
    assert s.unit % (rows if s.split == "m" else columns) == 0
    assert s.k_chunks == 1 or p.k // s.k_chunks >= 512
    assert s.chain <= 512 and s.chain % s.unroll == 0


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(sorted(targets.PRESETS)))
def test_gpu_contractions_fit(p: ContractionProblem, board: str) -> None:
    target = targets.PRESETS[board]
    s = schedule_contraction(p, target)
    assert math.isfinite(s.seconds) and s.seconds >= target.launch_seconds
    assert s.smem_bytes <= target.smem_block and s.stages >= 2
    assert s.subgroup[0] * s.warps[0] == s.workgroup[0] and s.subgroup[1] * s.warps[1] == s.workgroup[1]
    assert s.threads <= 1024
    candidate = Candidate(s.kind, *s.workgroup, s.reduction, s.warps, s.stages)
    assert _registers(candidate, p.dtype) <= target.registers_thread
    assert s.kind != "wgmma" or target.has_wgmma


@settings(max_examples=60, deadline=None)
@given(extent, extent, extent, st.sampled_from(["zen3", "h200", "rtx3060"]))
def test_more_work_is_never_predicted_much_faster(m: int, n: int, k: int, name: str) -> None:
    target = targets.by_name(name)
    once = schedule_contraction(row_major(m, n, k), target).seconds
    twice = schedule_contraction(row_major(m, n, 2 * k), target).seconds
    assert twice >= 0.8 * once


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**5), st.sampled_from(["f32", "bf16", "i64"]), st.integers(0, 3))
def test_loops_fit(rows: int, columns: int, dtype: str, reductions: int) -> None:
    size = rows * columns * 4
    p = LoopProblem(max(rows, 1), max(columns, 1), size, size, 3.0 * rows * columns, dtype, reductions)
    for target in (targets.CPU_PRESETS["zen3"], targets.by_name("h200")):
        s = schedule_loops(p, target)
        assert s.vector >= 1 and s.rows_per_block >= 1 and math.isfinite(s.seconds)
        if isinstance(target, targets.GpuTarget):
            assert s.vector == 1 or columns % s.vector == 0
            assert s.threads <= 1024


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(["zen3", "a100"]))
def test_lowering_config_gives_the_schedule_back(p: ContractionProblem, name: str) -> None:
    schedule = schedule_contraction(p, targets.by_name(name))
    with context(), ir.Location.unknown():
        op = ir.Module.create().operation
        config.write(op, schedule)
        assert config.read(op, ContractionSchedule) == schedule
        assert config.plain(op)["predicted_seconds"] == schedule.seconds


def test_another_records_config_is_not_taken() -> None:
    with context(), ir.Location.unknown():
        op = ir.Module.create().operation
        config.write(op, schedule_loops(LoopProblem(1, 1, 4, 4, 1.0), targets.CPU_PRESETS["zen3"]))
        assert config.read(op, ContractionSchedule) is None


def test_host_is_a_plausible_machine() -> None:
    host = targets.host()
    assert host.cores >= 1 and host.vector_bits in (128, 256, 512)
    assert 8 << 10 <= host.l1 <= host.l2 <= host.l3 <= 1 << 30
    assert 1e9 < host.core_peak("f32") < 1e12
    assert host.lanes("f64") * 2 == host.lanes("f32")


def test_an_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(NovaError, match="h200"):
        targets.by_name("h2000")


def test_targets_from_pass_options() -> None:
    from nova.schedule.annotate import target_of

    assert target_of("h200") is targets.PRESETS["h200"]
    assert target_of(SimpleNamespace(target="a100")) is targets.PRESETS["a100"]
    assert target_of(targets.PRESETS["h100"]) is targets.PRESETS["h100"]
    assert target_of(None) is targets.host()
