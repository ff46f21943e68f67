"""The inline PTX of level 5: one table, which the simulator reads as well.

    @$5 ld.global.v4.b32 {$0, $1, $2, $3}, [$4+$6];     four words, if the predicate holds; else the tied inputs
    mov.b32 $0, $1;                                     the same word

The predicated accesses are here because LLVM has none: it would branch around each. The constant of the address is an
operand of its own, so that it lands in the instruction. An access counts as a side effect on memory: LLVM keeps them in
order, and ptxas, which knows what they are, reorders them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

CONSTRAINTS = {"u8": "h", "b16": "h", "b32": "r", "b64": "l"}
OPERAND_TYPES = {"u8": "i16", "b16": "i16", "b32": "i32", "b64": "i64"}
WORD_BYTES = {"u8": 1, "b16": 2, "b32": 4, "b64": 8}


WORD = "mov.b32 $0, $1;"
"""A word as it is. LLVM does not look into it, so two bfloat16 that a loop carries stay in one register."""


@dataclass(frozen=True)
class Access:
    """One predicated access of `count` words.

    ld: operands (address, predicate, constant, count values for where it fails), results the words.
    st: operands (address, predicate, constant, count words), no result.
    """

    kind: str  # "ld" or "st"
    space: str  # "global" or "shared"
    word: str  # PTX type of a word: a key of WORD_BYTES
    count: int

    @property
    def operand(self) -> str:
        """The MLIR type of a word; a byte travels in the low half of 16 bits."""
        return OPERAND_TYPES[self.word]

    @property
    def bytes(self) -> int:
        return WORD_BYTES[self.word] * self.count

    @property
    def text(self) -> str:
        vector = f".v{self.count}" if self.count > 1 else ""
        first = 0 if self.kind == "ld" else 3
        names = ", ".join(f"${first + i}" for i in range(self.count))
        words = f"{{{names}}}" if self.count > 1 else names
        name = f"{self.kind}.{self.space}{vector}.{self.word}"
        if self.kind == "ld":
            n = self.count
            return f"@${n + 1} {name} {words}, [${n}+${n + 2}];"
        return f"@$1 {name} [$0+$2], {words};"

    @property
    def constraints(self) -> str:
        letter = CONSTRAINTS[self.word]
        if self.kind == "ld":
            parts = [f"={letter}"] * self.count + ["l", "b", "n"] + [str(i) for i in range(self.count)]
        else:
            parts = ["l", "b", "n"] + [letter] * self.count
        return ",".join([*parts, "~{memory}"])


_SHAPES = (("u8", 1), ("b16", 1), ("b32", 1), ("b32", 2), ("b32", 4), ("b64", 1), ("b64", 2))
TABLE: dict[str, Access] = {
    access.text: access
    for access in (Access(k, s, w, n) for k, s, (w, n) in product(("ld", "st"), ("global", "shared"), _SHAPES))
}
"""Every template of level 5 by its text."""


def access(kind: str, space: str, element_bytes: int, count: int) -> Access:
    """The access that moves `count` elements of 1, 2, 4 or 8 bytes at once, at most 16 bytes together."""
    total = element_bytes * count
    if total > 16 or total & (total - 1):
        raise ValueError(f"no access moves {count} elements of {element_bytes} bytes")
    if element_bytes == 8:
        return Access(kind, space, "b64", count)
    word = {1: "u8", 2: "b16"}.get(total, "b32")
    return Access(kind, space, word, max(1, total // 4))
