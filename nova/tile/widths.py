"""How many bits positions in tensors and numbers along dimensions take: 32 as long as they hold them.

position    an element's offset in a tensor                   64 bits from WIDE elements on
number      of a row, column, step: counts whole tiles,       64 bits where the last tile may end beyond 32
            also the part of the last one that hangs over
"""

from __future__ import annotations

from nova.errors import CompileError

WIDE = 1 << 31
OVERHANG = 1 << 20  # more than a tile hangs over the end of what it covers


def is_wide(elements: int) -> bool:
    """Whether positions among so many elements need 64 bits."""
    return elements >= WIDE


def position_type(elements: int) -> str:
    return "i64" if is_wide(elements) else "i32"


def number_type(*extents: int) -> str:
    """The type of numbers along dimensions of these sizes."""
    return "i64" if max(extents) > WIDE - OVERHANG else "i32"


def check_numbers(what: str, *extents: int) -> None:
    """Refuses sizes that code with 32-bit numbers only would get wrong without saying so."""
    if number_type(*extents) != "i32":
        raise CompileError(f"{what}: {max(extents):,} along one dimension; at most {WIDE - OVERHANG:,} have GPU code")
