"""The small cost model of fusion: what an elementwise op costs an element, and when computing it twice pays.

Units: one unit is one vector add. A byte moved to or from memory costs BYTE units (a core adds about 8 floats a
cycle from registers, and streams about 3 bytes a cycle), so recomputing a float32 pays up to about 10 units.
"""

from __future__ import annotations

from nova.fusion.records import Op, Value

BYTE = 1.25  # units a byte moved
DEFAULT = 1.0
UNITS = {
    "div": 4.0, "sqrt": 4.0, "rsqrt": 5.0, "reciprocal": 4.0, "floordiv": 6.0, "truncdiv": 5.0, "rem": 8.0, "fmod": 8.0,
    "exp": 12.0, "exp2": 11.0, "expm1": 14.0, "log": 14.0, "log2": 14.0, "log10": 15.0, "log1p": 16.0, "sin": 18.0,
    "cos": 18.0, "tan": 24.0, "asin": 20.0, "acos": 20.0, "atan": 20.0, "sinh": 24.0, "cosh": 24.0, "tanh": 12.0,
    "asinh": 24.0, "acosh": 24.0, "atanh": 24.0, "sigmoid": 16.0, "log_sigmoid": 24.0, "erf": 14.0, "erfc": 20.0,
    "silu": 18.0, "gelu": 18.0, "softplus": 28.0, "elu": 14.0, "pow": 30.0, "atan2": 24.0, "hypot": 8.0,
    "gelu_backward": 30.0, "silu_backward": 22.0, "softplus_backward": 16.0, "log_sigmoid_backward": 16.0,
    "elu_backward": 14.0, "uniform": 12.0, "normal": 40.0, "randint": 16.0, "gather": 6.0, "take": 2.0, "index": 6.0,
}  # fmt: skip


def units(op: Op) -> float:
    """Cost of one element of the op's result."""
    return UNITS.get(op.name, DEFAULT)


def recompute_pays(value: Value, chain: list[Op], extra_bytes: int) -> tuple[bool, str]:
    """Whether computing `value` again by `chain`, reading `extra_bytes` more, beats writing it and reading it back."""
    elements = max(1, _elements(value))
    work = sum(units(op) * max((_elements(result) for result in op.results), default=0) for op in chain) / elements
    again = work + BYTE * extra_bytes / elements
    stored = BYTE * 2 * value.bytes / elements
    text = f"recomputing costs {again:.1f} units an element, a round trip {stored:.1f}"
    return again <= stored, text


def _elements(value: Value) -> int:
    count = 1
    for size in value.shape:
        count *= size
    return count
