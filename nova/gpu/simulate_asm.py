"""Inline PTX in the simulator: the templates of nova/gpu/asm.py, by their text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nova.gpu import asm
from nova.gpu import simulate_values as sv
from nova.gpu.simulate_access import SHARED, read, write
from nova.gpu.simulate_values import Builder
from nova.mlir import ir

if TYPE_CHECKING:
    from nova.gpu.simulate import Block, Compiler, Step

_SPACES = {"global": 1, "shared": SHARED}


def _inline_asm(c: Compiler, op: ir.Operation) -> Step:
    text = str(op.attributes["asm_string"].value)
    if text == asm.WORD:
        return c.pure(op, lambda x: x)
    template = asm.TABLE.get(text)
    if template is None:
        raise NotImplementedError(f"the simulator has no inline PTX {text!r}: it is not in nova/gpu/asm.py")
    space = _SPACES[template.space]
    c.touches(space, template.bytes, template.bytes)
    return (_load if template.kind == "ld" else _store)(c, op, template, space)


def _load(c: Compiler, op: ir.Operation, template: asm.Access, space: int) -> Step:
    address, predicate, constant, *otherwise = c.slots(op.operands)
    (result,) = c.slots(op.results)
    where, dtype = c.where(op), np.dtype(f"u{asm.WORD_BYTES[template.word]}")
    register = c.kind(op.operands[3]).dtype

    def step(s: Block) -> None:
        v = s.values
        mask = s.everywhere(v[predicate])
        access = s.access(where, v[address] + v[constant], template.bytes, template.bytes, mask)
        words = s.spread(read(s, access, space, dtype, template.count), mask)
        words = words.astype(register) if words.dtype.itemsize < register().itemsize else words.view(register)
        got = [np.where(mask, words[:, i], v[slot]) for i, slot in enumerate(otherwise)]
        v[result] = got[0] if template.count == 1 else tuple(got)

    return step


def _store(c: Compiler, op: ir.Operation, template: asm.Access, space: int) -> Step:
    address, predicate, constant, *sources = c.slots(op.operands)
    where, width = c.where(op), asm.WORD_BYTES[template.word]

    def step(s: Block) -> None:
        v = s.values
        mask = s.everywhere(v[predicate])
        access = s.access(where, v[address] + v[constant], template.bytes, template.bytes, mask)
        words = np.stack(sv.join_rows(*(s.gathered(v[x], mask) for x in sources)), axis=1)
        signed = np.dtype(f"i{width}")
        write(s, access, space, words.astype(signed).view(f"u{width}"))

    return step


TABLE: dict[str, Builder] = {"llvm.inline_asm": _inline_asm}
