"""Ops that only exist between level 1 and level 2, where fusion decides what gets a buffer of its own."""

from __future__ import annotations

from nova.dialect.base import Instance, check, check_like, op
from nova.dialect.types import Described


@op("copy", "x")
def _copy(it: Instance) -> None:
    """x, in a row-major buffer of its own: what a view becomes where no kernel can read through it."""
    check_like(it.outs[0], it.ins[0], "result", "operand")


def _tiles(classes: int, tile: int) -> int:
    return -(-classes // tile)


@op("sce_partials", "logits *target", "maxima sums *picked", "tile:int")
def _sce_partials(it: Instance) -> None:
    """Per row of logits [N,C] and tile of `tile` columns (the last may be short): the maximum m of the tile and
    the sum of
    e**(x - m), where a tile of nothing but -inf sums to 0; with target [N] also the sum of x over the columns
    that are the
    row's target. Results [N, ceil(C/tile)], f32 (f64 for f64)."""
    logits = it.ins[0]
    check(len(logits.shape) == 2, "logits {} must be [N,C]", logits)
    check(it["tile"] > 0, "tile {} is not positive", it["tile"])
    wide = "f64" if logits.dtype == "f64" else "f32"
    expected = Described((logits.shape[0], _tiles(logits.shape[1], it["tile"])), wide)
    check(len(it.outs) == 2 + len(it.optional()), "{} results with {} targets", len(it.outs), len(it.optional()))
    for out in it.outs:
        check_like(out, expected, "result", "expected")


@op(
    "sce_merge",
    "maxima sums picked target *weight",
    "loss lse",
    "has_weight:bool ignore_index:int reduction:int classes:int",
)
def _sce_merge(it: Instance) -> None:
    """nova.sce without label smoothing from the partials of its logits: M = max of maxima, S = sum of sums *
    e**(maxima - M),
    lse = M + log(S), and the target's logit from picked: the logits [N,classes] themselves, or the partial sums."""
    maxima, sums, picked, target = it.ins[:4]
    check_like(sums, maxima, "sums", "maxima")
    check(len(picked.shape) == 2 and picked.shape[0] == maxima.shape[0], "picked {} does not fit {}", picked, maxima)
    check(target == Described(maxima.shape[:1], "i64"), "target {} must be i64[{}]", target, maxima.shape[0])
    check_like(it.outs[1], Described(maxima.shape[:1], maxima.dtype), "lse", "expected")
