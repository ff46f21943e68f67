"""Philox4x32-10 on tiles, the same bits as on the CPU: word element % 4 of the block with counter element // 4.

Runs of four elements along the vector dimension share a block, which is computed once, without that dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nova.tile.expressions import Domain, Part

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
Keys = list[tuple["Part", "Part"]]


def _signed(word: int) -> int:
    """The i32 literal with the bits of a 32-bit word."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _op(domain: Domain, name: str, a: Part, b: Part | int) -> Part:
    if isinstance(b, int):
        return domain.apply(lambda x: domain.program.binary(name, x, b), (a,))
    return domain.apply(lambda x, y: domain.program.binary(name, x, y), (a, b))


def round_keys(domain: Domain, seed: Part) -> Keys:
    """The two key words of every round, i32."""
    low = domain.convert(seed, "i32")
    high = domain.convert(_op(domain, "arith.shrui", seed, 32), "i32")
    keys = []
    for number in range(ROUNDS):
        keys.append((low, high))
        if number + 1 < ROUNDS:
            low = _op(domain, "arith.addi", low, _signed(WEYL[0]))
            high = _op(domain, "arith.addi", high, _signed(WEYL[1]))
    return keys


def block(domain: Domain, keys: Keys, counter: Part, stream: int) -> list[Part]:
    """The four words (i32) of the blocks with these counters (i64)."""
    from nova.tile.expressions import Part

    words = [
        domain.convert(counter, "i32"),
        domain.convert(_op(domain, "arith.shrui", counter, 32), "i32"),
        Part(_signed(stream), (), "i32"),
        Part(0, (), "i32"),
    ]
    for key0, key1 in keys:
        high0, low0 = _multiply(domain, words[0], MULTIPLIERS[0])
        high1, low1 = _multiply(domain, words[2], MULTIPLIERS[1])
        words = [_mix(domain, high1, words[1], key0), low1, _mix(domain, high0, words[3], key1), low0]
    return words


def _mix(domain: Domain, a: Part, b: Part, c: Part) -> Part:
    return _op(domain, "arith.xori", _op(domain, "arith.xori", a, b), c)


def _multiply(domain: Domain, a: Part, factor: int) -> tuple[Part, Part]:
    """High and low words of an unsigned product."""
    from nova.tile.expressions import Part

    if isinstance(a.value, int):
        product = (a.value & 0xFFFFFFFF) * factor
        return Part(_signed(product >> 32), (), "i32"), Part(_signed(product), (), "i32")
    wide = _op(domain, "arith.muli", domain.convert(a, "i64", signed=False), factor)
    high = domain.convert(_op(domain, "arith.shrui", wide, 32), "i32")
    return high, domain.convert(wide, "i32")


def run(domain: Domain, keys: Keys, first: Part, count: int, stream: int) -> Part:
    """Words of elements first .. first + count - 1 along the vector dimension; `first` (i64) is a multiple of 4."""
    words: list[Part] = []
    counter = _op(domain, "arith.shrui", first, 2)
    for number in range(count // 4):
        words += block(domain, keys, counter if number == 0 else _op(domain, "arith.addi", counter, number), stream)
    return _pick(domain, words, domain.iota(domain.layout.rank - 1))


def any_elements(domain: Domain, keys: Keys, element: Part, stream: int) -> Part:
    """The word of each element (i64), a block each."""
    words = block(domain, keys, _op(domain, "arith.shrui", element, 2), stream)
    return _pick(domain, words, domain.convert(_op(domain, "arith.andi", element, 3), "i32"))


def _pick(domain: Domain, words: list[Part], which: Part) -> Part:
    """words[which]: a balanced choice, by the bits of `which`."""
    bit = 0
    while len(words) > 1:
        mask = _op(domain, "arith.andi", which, 1 << bit)
        odd = domain.apply(lambda x: domain.program.cmp("ne", x, 0), (mask,))
        words = [domain.apply(domain.program.select, (odd, b, a)) for a, b in zip(words[::2], words[1::2], strict=True)]
        bit += 1
    return words[0]
