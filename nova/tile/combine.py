"""Combinations that reductions, scans and scatters use: their neutral elements."""

from __future__ import annotations

from nova.tile.text import BITS, FLOATS


def identity(kind: str, element: str) -> float | int:
    """The value that changes nothing: `kind` is an arith op, with or without its prefix."""
    name = kind.removeprefix("arith.")
    if element in FLOATS:
        limit = float("inf")
        return {
            "addf": -0.0, "mulf": 1.0, "maximumf": -limit, "maxnumf": -limit, "minimumf": limit, "minnumf": limit,
        }[name]  # fmt: skip
    if element == "i1":
        return {"addi": 0, "ori": 0, "xori": 0, "maxui": 0, "andi": 1, "muli": 1, "minui": 1}[name]
    bits = BITS[element]
    return {
        "addi": 0, "muli": 1, "ori": 0, "xori": 0, "andi": -1, "maxsi": -(1 << bits - 1), "minsi": (1 << bits - 1) - 1,
        "maxui": 0, "minui": -1,
    }[name]  # fmt: skip
