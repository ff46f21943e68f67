"""Philox4x32-10 words inside generated loops: counter-based, so any element can be drawn by any thread in any order.

    word = "nova.philox"(%seed, %element) {stream = 3}      word element % 4 of the block with counter element // 4

A vector whose elements count up from a multiple of 4 needs one block for four lanes (checked at run time, one compare
and one branch); any other vector computes a block a lane. State words live in 64-bit lanes with the upper half zero,
so that a round is two `vpmuludq` and no shuffles.
"""

from __future__ import annotations

from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir, scf

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

Keys = list[tuple[Value, Value]]


def round_keys(seed: Value) -> Keys:
    """The two key words of every round, as scalar i64: computed once, in front of the loops."""
    mask = ln.i64(MASK)
    low, high = ln.andi(seed, mask), ln.shrui(seed, ln.i64(32))
    keys = []
    for number in range(ROUNDS):
        keys.append((low, high))
        if number + 1 < ROUNDS:
            low = ln.andi(ln.addi(low, ln.i64(WEYL[0])), mask)
            high = ln.andi(ln.addi(high, ln.i64(WEYL[1])), mask)
    return keys


def _block(counter: Value, stream: int, keys: Keys) -> list[Value]:
    """The four words of the blocks with these counters, in i64 lanes."""

    def c(number: int) -> Value:
        return ln.constant(counter.type, number)

    lanes = ln.lanes_of(counter.type)
    words = [ln.andi(counter, c(MASK)), ln.shrui(counter, c(32)), c(stream & MASK), c(0)]
    for key0, key1 in keys:
        product0, product1 = ln.muli(words[0], c(MULTIPLIERS[0])), ln.muli(words[2], c(MULTIPLIERS[1]))
        words = [
            ln.xori(ln.xori(ln.shrui(product1, c(32)), words[1]), ln.splat(key0, lanes)),
            ln.andi(product1, c(MASK)),
            ln.xori(ln.xori(ln.shrui(product0, c(32)), words[3]), ln.splat(key1, lanes)),
            ln.andi(product0, c(MASK)),
        ]
    return words


def words(keys: Keys, element: Value, stream: int) -> Value:
    """The i32 word of each element (i64, scalar or vector)."""
    lanes = ln.lanes_of(element.type)
    if lanes < 8 or lanes % 4:
        return _any_elements(keys, element, stream)
    first = ln.lane(element, 0)
    counting = ln.addi(ln.splat(first, lanes), ln.iota(ln.int_type(64), lanes))
    differs = ln.xori(element, counting)
    differs = ln.create("vector.reduction", ln.int_type(64), [differs], {"kind": _or_kind()})
    odd = ln.ori(differs, ln.andi(first, ln.i64(3)))
    branch = scf.IfOp(ln.cmpi("eq", odd, ln.i64(0)), [ln.like(element, ln.int_type(32))], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.YieldOp([_consecutive(keys, first, lanes, stream)])
    with ir.InsertionPoint(branch.else_block):
        scf.YieldOp([_any_elements(keys, element, stream)])
    return branch.results[0]


def _or_kind() -> ir.Attribute:
    return ir.Attribute.parse("#vector.kind<or>")


def _consecutive(keys: Keys, first: Value, lanes: int, stream: int) -> Value:
    """Elements first, first + 1, ...: a block for each four, and a 4 x n transpose of its words."""
    blocks = lanes // 4
    counter = ln.splat(ln.shrui(first, ln.i64(2)), blocks)
    counter = ln.addi(counter, ln.iota(ln.int_type(64), blocks))
    narrow = [ln.cast("trunci", word, ln.int_type(32)) for word in _block(counter, stream, keys)]
    pairs = [ln.shuffle(narrow[k], narrow[k + 1], range(2 * blocks)) for k in (0, 2)]
    order = [(k % 4 % 2) * blocks + k // 4 + (k % 4 // 2) * 2 * blocks for k in range(lanes)]
    return ln.shuffle(pairs[0], pairs[1], order)


def _any_elements(keys: Keys, element: Value, stream: int) -> Value:
    words = _block(ln.shrui(element, ln.constant(element.type, 2)), stream, keys)
    low = _bit(element, 1)
    high = _bit(element, 2)
    word = ln.select(high, ln.select(low, words[3], words[2]), ln.select(low, words[1], words[0]))
    return ln.cast("trunci", word, ln.int_type(32))


def _bit(element: Value, mask: int) -> Value:
    masked = ln.andi(element, ln.constant(element.type, mask))
    return ln.cmpi("ne", masked, ln.constant(element.type, 0))
