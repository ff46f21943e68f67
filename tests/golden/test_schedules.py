"""The schedules of a GPT-2 124M step (8 x 1024 tokens), pinned: a change of the model shows here as a diff to judge.

Pure functions of shape and target, so no GPU is needed. Each line is (kind, block, K step, warps, stages, K chunks).
"""

from __future__ import annotations

import pytest

from nova.schedule import target as targets
from nova.schedule.attention import AttentionProblem, schedule_attention
from nova.schedule.bandwidth import LoopProblem, schedule_loops
from nova.schedule.contraction import row_major, schedule_contraction

GPT2 = {
    "qkv": (8192, 2304, 768, "nt"),
    "proj": (8192, 768, 768, "nt"),
    "fc1": (8192, 3072, 768, "nt"),
    "fc2": (8192, 768, 3072, "nt"),
    "head": (8192, 50304, 768, "nt"),
    "dX(fc1)": (8192, 768, 3072, "nn"),
    "dW(proj)": (768, 768, 8192, "tn"),
    "dW(fc1)": (3072, 768, 8192, "tn"),
    "square": (4096, 4096, 4096, "nn"),  # on the Ada board in TF32: the paper's 256 x 128 by 4 x 2 warps of 64 x 64
}
OTHERS = {
    "512": (512, 512, 512, "nn"),
    "2048": (2048, 2048, 2048, "nn"),
    "mlp": (32, 64, 64, "nt"),
    "mlp dX": (32, 64, 64, "nn"),
    "mlp dW": (64, 64, 32, "tn"),
    "one row": (1, 768, 768, "nt"),
    "long k": (16, 16, 100000, "tn"),
}

GPU = {
    ("rtx3060", "tf32", "qkv"): ("mma_sync", (256, 128), 16, (4, 2), 4, 1),
    ("rtx3060", "tf32", "proj"): ("mma_sync", (256, 128), 16, (4, 2), 4, 1),
    ("rtx3060", "tf32", "fc1"): ("mma_sync", (256, 128), 16, (4, 2), 4, 1),
    ("rtx3060", "tf32", "fc2"): ("mma_sync", (256, 128), 16, (4, 2), 4, 1),
    ("rtx3060", "tf32", "head"): ("mma_sync", (256, 128), 16, (4, 2), 4, 1),
    ("rtx3060", "tf32", "dX(fc1)"): ("mma_sync", (256, 128), 16, (4, 2), 4, 1),
    ("rtx3060", "tf32", "dW(proj)"): ("mma_sync", (256, 128), 16, (4, 2), 4, 3),
    ("rtx3060", "tf32", "dW(fc1)"): ("mma_sync", (128, 96), 32, (4, 2), 3, 1),
    ("rtx3060", "tf32", "square"): ("mma_sync", (256, 128), 32, (4, 2), 2, 1),
    ("rtx3060", "bf16", "qkv"): ("mma_sync", (256, 128), 64, (4, 2), 2, 1),
    ("rtx3060", "bf16", "proj"): ("mma_sync", (256, 128), 64, (4, 2), 2, 1),
    ("rtx3060", "bf16", "fc1"): ("mma_sync", (256, 128), 64, (4, 2), 2, 1),
    ("rtx3060", "bf16", "fc2"): ("mma_sync", (256, 128), 64, (4, 2), 2, 1),
    ("rtx3060", "bf16", "head"): ("mma_sync", (256, 128), 64, (4, 2), 2, 1),
    ("rtx3060", "bf16", "dX(fc1)"): ("mma_sync", (256, 128), 64, (4, 2), 2, 1),
    ("rtx3060", "bf16", "dW(proj)"): ("mma_sync", (256, 128), 32, (4, 2), 4, 3),
    ("rtx3060", "bf16", "dW(fc1)"): ("mma_sync", (128, 96), 64, (4, 2), 3, 1),
    ("rtx3060", "bf16", "square"): ("mma_sync", (256, 128), 64, (4, 2), 2, 1),
    ("rtx6000ada", "tf32", "qkv"): ("mma_sync", (128, 96), 32, (4, 2), 3, 1),
    ("rtx6000ada", "tf32", "proj"): ("mma_sync", (128, 192), 32, (2, 4), 2, 1),
    ("rtx6000ada", "tf32", "fc1"): ("mma_sync", (128, 128), 32, (4, 2), 3, 1),
    ("rtx6000ada", "tf32", "fc2"): ("mma_sync", (128, 192), 32, (2, 4), 2, 1),
    ("rtx6000ada", "tf32", "head"): ("mma_sync", (256, 128), 32, (4, 2), 2, 1),
    ("rtx6000ada", "tf32", "dX(fc1)"): ("mma_sync", (128, 192), 32, (2, 4), 2, 1),
    ("rtx6000ada", "tf32", "dW(proj)"): ("mma_sync", (256, 128), 32, (4, 2), 2, 7),
    ("rtx6000ada", "tf32", "dW(fc1)"): ("mma_sync", (64, 96), 32, (2, 4), 4, 1),
    ("rtx6000ada", "tf32", "square"): ("mma_sync", (256, 128), 32, (4, 2), 2, 1),
    ("rtx6000ada", "bf16", "qkv"): ("mma_sync", (128, 192), 64, (2, 4), 2, 1),
    ("rtx6000ada", "bf16", "proj"): ("mma_sync", (128, 192), 32, (2, 4), 4, 1),
    ("rtx6000ada", "bf16", "fc1"): ("mma_sync", (128, 128), 64, (4, 2), 3, 1),
    ("rtx6000ada", "bf16", "fc2"): ("mma_sync", (128, 192), 64, (2, 4), 2, 1),
    ("rtx6000ada", "bf16", "head"): ("mma_sync", (256, 128), 64, (4, 2), 2, 1),
    ("rtx6000ada", "bf16", "dX(fc1)"): ("mma_sync", (128, 192), 64, (2, 4), 2, 1),
    ("rtx6000ada", "bf16", "dW(proj)"): ("mma_sync", (64, 96), 64, (2, 4), 4, 1),
    ("rtx6000ada", "bf16", "dW(fc1)"): ("mma_sync", (64, 96), 64, (2, 4), 4, 1),
    ("rtx6000ada", "bf16", "square"): ("mma_sync", (256, 128), 64, (4, 2), 2, 1),
    ("h100", "tf32", "qkv"): ("mma_sync", (128, 192), 32, (2, 4), 4, 1),
    ("h100", "tf32", "proj"): ("mma_sync", (128, 192), 32, (2, 4), 4, 1),
    ("h100", "tf32", "fc1"): ("mma_sync", (256, 128), 32, (4, 2), 4, 1),
    ("h100", "tf32", "fc2"): ("mma_sync", (128, 192), 32, (2, 4), 4, 1),
    ("h100", "tf32", "head"): ("mma_sync", (256, 128), 32, (4, 2), 4, 1),
    ("h100", "tf32", "dX(fc1)"): ("mma_sync", (128, 192), 32, (2, 4), 4, 1),
    ("h100", "tf32", "dW(proj)"): ("mma_sync", (256, 128), 32, (4, 2), 4, 7),
    ("h100", "tf32", "dW(fc1)"): ("mma_sync", (128, 192), 32, (2, 4), 4, 4),
    ("h100", "tf32", "square"): ("mma_sync", (256, 128), 32, (4, 2), 4, 1),
    ("h100", "bf16", "qkv"): ("mma_sync", (128, 192), 64, (2, 4), 4, 1),
    ("h100", "bf16", "proj"): ("mma_sync", (128, 192), 64, (2, 4), 4, 1),
    ("h100", "bf16", "fc1"): ("mma_sync", (256, 128), 64, (4, 2), 4, 1),
    ("h100", "bf16", "fc2"): ("mma_sync", (128, 192), 64, (2, 4), 4, 1),
    ("h100", "bf16", "head"): ("mma_sync", (256, 128), 64, (4, 2), 4, 1),
    ("h100", "bf16", "dX(fc1)"): ("mma_sync", (128, 192), 64, (2, 4), 4, 1),
    ("h100", "bf16", "dW(proj)"): ("mma_sync", (256, 128), 64, (4, 2), 4, 7),
    ("h100", "bf16", "dW(fc1)"): ("mma_sync", (128, 192), 64, (2, 4), 4, 4),
    ("h100", "bf16", "square"): ("mma_sync", (256, 128), 64, (4, 2), 4, 1),
    ("h200", "tf32", "qkv"): ("mma_sync", (128, 192), 32, (2, 4), 4, 1),
    ("h200", "tf32", "proj"): ("mma_sync", (128, 192), 32, (2, 4), 4, 1),
    ("h200", "tf32", "fc1"): ("mma_sync", (256, 128), 32, (4, 2), 4, 1),
    ("h200", "tf32", "fc2"): ("mma_sync", (128, 192), 32, (2, 4), 4, 1),
    ("h200", "tf32", "head"): ("mma_sync", (256, 128), 32, (4, 2), 4, 1),
    ("h200", "tf32", "dX(fc1)"): ("mma_sync", (128, 192), 32, (2, 4), 4, 1),
    ("h200", "tf32", "dW(proj)"): ("mma_sync", (256, 128), 32, (4, 2), 4, 7),
    ("h200", "tf32", "dW(fc1)"): ("mma_sync", (128, 192), 32, (2, 4), 4, 4),
    ("h200", "tf32", "square"): ("mma_sync", (256, 128), 32, (4, 2), 4, 1),
    ("h200", "bf16", "qkv"): ("mma_sync", (128, 192), 64, (2, 4), 4, 1),
    ("h200", "bf16", "proj"): ("mma_sync", (128, 192), 64, (2, 4), 4, 1),
    ("h200", "bf16", "fc1"): ("mma_sync", (256, 128), 64, (4, 2), 4, 1),
    ("h200", "bf16", "fc2"): ("mma_sync", (128, 192), 64, (2, 4), 4, 1),
    ("h200", "bf16", "head"): ("mma_sync", (256, 128), 64, (4, 2), 4, 1),
    ("h200", "bf16", "dX(fc1)"): ("mma_sync", (128, 192), 64, (2, 4), 4, 1),
    ("h200", "bf16", "dW(proj)"): ("mma_sync", (256, 128), 64, (4, 2), 4, 7),
    ("h200", "bf16", "dW(fc1)"): ("mma_sync", (128, 192), 64, (2, 4), 4, 4),
    ("h200", "bf16", "square"): ("mma_sync", (256, 128), 64, (4, 2), 4, 1),
}

# (kind, register tile, cache block, K step, packed operands, split dimension, threads, K chunks) on two cores: Zen 3
# multiplies two 256-bit vectors a clock, Zen 4 one of 512 bits; "avx512", with sixteen cores, two of them
CPU = {
    ("zen3", "512"): ("tiled", (6, 16), (96, 512), 256, (True, False), "m", 2, 1),
    ("zen3", "2048"): ("tiled", (6, 16), (96, 2048), 344, (True, True), "m", 2, 1),
    ("zen3", "fc1"): ("tiled", (6, 16), (96, 2720), 384, (True, True), "m", 2, 1),
    ("zen3", "fc2"): ("tiled", (6, 16), (96, 768), 384, (True, True), "m", 2, 1),
    ("zen3", "head"): ("tiled", (6, 16), (96, 2720), 384, (True, True), "n", 2, 1),
    ("zen3", "dW(fc1)"): ("tiled", (6, 16), (96, 768), 376, (True, False), "m", 2, 1),
    ("zen3", "mlp"): ("tiled", (4, 16), (32, 16), 64, (False, True), "m", 1, 1),
    ("zen3", "mlp dX"): ("tiled", (4, 16), (32, 64), 64, (False, False), "m", 1, 1),
    ("zen3", "mlp dW"): ("tiled", (6, 16), (66, 64), 32, (False, False), "m", 1, 1),
    ("zen3", "one row"): ("dot", (1, 8), (1, 64), 768, (False, False), "n", 2, 1),
    ("zen3", "long k"): ("tiled", (6, 16), (18, 16), 25000, (False, False), "m", 2, 4),
    ("zen4", "512"): ("tiled", (16, 16), (96, 512), 512, (True, False), "m", 2, 1),
    ("zen4", "2048"): ("tiled", (16, 16), (96, 1024), 1024, (True, True), "m", 2, 1),
    ("zen4", "fc1"): ("tiled", (16, 16), (96, 1360), 768, (True, True), "m", 2, 1),
    ("zen4", "fc2"): ("tiled", (16, 16), (96, 768), 1024, (True, True), "m", 2, 1),
    ("zen4", "head"): ("tiled", (16, 16), (96, 1360), 768, (True, True), "n", 2, 1),
    ("zen4", "dW(fc1)"): ("tiled", (16, 16), (96, 768), 1024, (True, False), "m", 2, 1),
    ("zen4", "mlp"): ("tiled", (16, 16), (32, 16), 64, (False, True), "m", 1, 1),
    ("zen4", "mlp dX"): ("tiled", (16, 16), (32, 64), 64, (False, False), "m", 1, 1),
    ("zen4", "mlp dW"): ("tiled", (16, 16), (64, 64), 32, (False, False), "m", 1, 1),
    ("zen4", "one row"): ("dot", (1, 8), (1, 64), 768, (False, False), "n", 2, 1),
    ("zen4", "long k"): ("tiled", (16, 16), (16, 16), 25000, (False, False), "m", 2, 4),
    ("avx512", "512"): ("tiled", (12, 32), (96, 512), 256, (True, False), "m", 16, 1),
    ("avx512", "2048"): ("tiled", (12, 32), (96, 1920), 256, (True, True), "m", 16, 1),
    ("avx512", "fc1"): ("tiled", (12, 32), (96, 1920), 256, (True, True), "m", 16, 1),
    ("avx512", "dX(fc1)"): ("tiled", (12, 32), (96, 768), 280, (True, False), "m", 16, 1),
    ("avx512", "mlp"): ("tiled", (8, 32), (32, 32), 64, (False, True), "m", 1, 1),
}


@pytest.mark.parametrize("key", GPU, ids="-".join)
def test_gpu_contractions(key: tuple[str, str, str]) -> None:
    board, dtype, name = key
    m, n, k, layout = GPT2[name]
    operand, compute = ("f32", "tf32") if dtype == "tf32" else (dtype, "")
    problem = row_major(m, n, k, dtype=operand, layout=layout, compute=compute)
    s = schedule_contraction(problem, targets.by_name(board))
    assert (s.kind, s.workgroup, s.reduction, s.warps, s.stages, s.k_chunks) == GPU[key], s.reasons


@pytest.mark.parametrize("key", CPU, ids="-".join)
def test_cpu_contractions(key: tuple[str, str]) -> None:
    target, name = key
    m, n, k, layout = (GPT2 | OTHERS)[name]
    s = schedule_contraction(row_major(m, n, k, layout=layout), targets.CPU_PRESETS[target])
    found = (s.kind, s.subgroup, s.workgroup, s.reduction, s.promoted, s.split, s.threads, s.k_chunks)
    assert found == CPU[key], s.reasons


def test_the_papers_listing() -> None:
    s = schedule_contraction(row_major(4096, 4096, 4096, compute="tf32"), targets.by_name("rtx6000ada"))
    assert (s.workgroup, s.subgroup, s.warps) == ((256, 128), (64, 64), (4, 2))
    assert s.intrinsic == "MMA_SYNC_TF32_16x8x8"
    assert any("above the balance point" in reason for reason in s.reasons)


def test_below_the_balance_point_the_tile_is_spread_not_shrunk() -> None:
    """A contraction that main memory bounds keeps its tile and takes more warps."""
    s = schedule_contraction(row_major(4096, 4096, 64, dtype="bf16"), targets.by_name("rtx6000ada"))
    assert any("below the balance point" in reason for reason in s.reasons), s.reasons
    assert s.warps[0] * s.warps[1] == 8


def test_layer_norm_streams_its_output_past_the_cache() -> None:
    size = 8192 * 768 * 4
    problem = LoopProblem(8192, 768, size, size, 8192 * 768 * 10.0, row_reductions=2)
    zen = schedule_loops(problem, targets.CPU_PRESETS["zen3"])
    large_cache = schedule_loops(problem, targets.cpu("large", cores=2, ghz=2.5, l3=96 << 20))
    assert zen.nontemporal and zen.prefetch and not large_cache.nontemporal
    reduced = LoopProblem(8192, 768, 4 * size, 8192 * 4, 8192 * 768.0, row_reductions=1)
    assert not schedule_loops(reduced, targets.CPU_PRESETS["zen3"]).nontemporal
    h200 = schedule_loops(problem, targets.by_name("h200"))
    assert (h200.vector, h200.rows_per_block) == (4, 4)
    assert h200.seconds == pytest.approx(2 * size / 4.8e12, rel=0.5)


# rows, columns, threads, stages, and whether the rows' operands stay in registers: forward, query half, key half
ATTENTION = {
    ("h200", "bf16", 64): ((64, 64, 64, 2, False), (64, 32, 128, 2, True), (64, 64, 128, 2, True)),
    ("h200", "bf16", 128): ((128, 32, 128, 2, False), (64, 32, 128, 2, True), (64, 16, 128, 2, False)),
    ("h200", "tf32", 64): ((128, 16, 128, 2, True), (64, 64, 128, 2, True), (32, 32, 64, 2, True)),
    ("rtx6000ada", "bf16", 64): ((64, 64, 64, 1, False), (64, 64, 128, 2, True), (64, 32, 128, 2, True)),
    ("rtx3060", "bf16", 64): ((64, 64, 64, 1, False), (32, 32, 64, 1, True), (32, 32, 64, 1, True)),
}  # fmt: skip


@pytest.mark.parametrize("key", ATTENTION, ids=lambda key: "-".join(map(str, key)))
def test_gpu_attention(key: tuple[str, str, int]) -> None:
    """GPT-2's heads, causal: 8 x 12 x 1024."""
    board, precision, dim = key
    dtype, tf32 = ("f32", True) if precision == "tf32" else (precision, False)
    forward, backward = (
        schedule_attention(
            AttentionProblem(8, 12, 12, 1024, 1024, dim, dim, dtype, True, direction, tf32), targets.by_name(board)
        )
        for direction in ("forward", "backward")
    )
    found = [(s.block_queries, s.block_keys, s.threads, s.stages, s.hold) for s in (forward, backward)]
    rows, columns, threads, stages, hold, _ = backward.key_half
    assert (*found, (rows, columns, threads, stages, bool(hold))) == ATTENTION[key], forward.reasons + backward.reasons


def test_attention_fits_every_board() -> None:
    for board in targets.PRESETS:
        for dim in (32, 64, 128, 256):
            problem = AttentionProblem(8, 12, 12, 1024, 1024, dim, dim, "bf16", causal=True)
            assert schedule_attention(problem, targets.by_name(board)).shared_bytes <= targets.PRESETS[board].smem_block
