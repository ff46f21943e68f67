"""The copies of new state at the end of a step on a GPU, all in one launch that does nothing once an error was found.

A memory copy of the driver cannot be predicated. The launch has one argument, a table of 64-bit words:

    n, error record of the step, n times (target, source, bytes)

Places are aligned to 16 bytes where there are as many: whole vectors first, then the bytes that are left.
"""

from __future__ import annotations

from nova.mlir import ir
from nova.schedule.target import GpuTarget
from nova.tile.builder import Program
from nova.tile.layout import blocked
from nova.tile.text import Operand, Value

NAME = "guarded_copy"
TEXT = f"""
func.func private @{NAME}(%table: tensor<1xi64>) attributes {{nova.kernel = "{NAME}", nova.inplace = []}} {{
  return
}}
"""
"""The kernel as the pipeline takes it, level 1: it has no operations that any stage would lower."""

THREADS = 256
BLOCKS_PER_SM = 4
VECTOR, WORD = 16, "i32"  # bytes that a thread moves at once, and of which type
HEAD, EACH = 2, 3  # words


def generate(kernel: ir.OpView, target: GpuTarget) -> tuple[list[Program], int]:
    """The launch."""
    blocks = BLOCKS_PER_SM * target.sms
    p = Program(f"{NAME}_0", 1, (blocks, 1, 1), THREADS)
    table = p.args[0]
    p.guard(p.load_pointer(table, 1))
    count = p.cast(p.load_scalar(table, 0, "i64"), "i32")
    with p.for_(0, count, 1) as loop:
        word = p.add(p.mul(p.cast(loop.index, "i64"), EACH), HEAD)
        target_, source = p.load_pointer(table, word), p.load_pointer(table, p.add(word, 1))
        size = p.load_scalar(table, p.add(word, 2), "i64")
        own = p.rem(p.add(p.program_id(0), loop.index), blocks)  # small tensors are dealt out over the blocks
        _vectors(p, target_, source, p.div(size, VECTOR), own, blocks)
        _tail(p, target_, source, size, own)
    return [p], 0


def _vectors(p: Program, target: Value, source: Value, vectors: Operand, own: Operand, blocks: int) -> None:
    """Vectors own * THREADS + thread, then those `blocks` blocks further, and so on."""
    layout = blocked([THREADS, VECTOR // 4], [THREADS // 32, 1], [32, 1], VECTOR // 4)
    vector, word = (p.convert(p.iota(dim, layout), "i64") for dim in (0, 1))
    with p.for_(own, p.cast(p.cdiv(vectors, THREADS), "i32"), blocks) as loop:
        number = p.binary("arith.addi", vector, p.mul(p.cast(loop.index, "i64"), THREADS))
        at = p.binary("arith.addi", p.binary("arith.muli", number, VECTOR // 4), word)
        inside = p.cmp("slt", number, vectors)
        p.scatter(p.gather(source, at, WORD, inside, vector=VECTOR // 4), target, at, inside, vector=VECTOR // 4)


def _tail(p: Program, target: Value, source: Value, size: Operand, own: Operand) -> None:
    """What is left after whole vectors, by the first block."""
    layout = blocked([32], [1], [32])
    with p.if_(p.compare("eq", own, 0)):
        left = p.cast(p.rem(size, VECTOR), "i32")
        whole = p.sub(size, p.cast(left, "i64"))
        index = p.iota(0, layout)
        inside = p.cmp("slt", index, left)
        tile = p.gather(p.advance(source, whole, "i8"), index, "i8", inside)
        p.scatter(tile, p.advance(target, whole, "i8"), index, inside)
