"""What the threads of a warp do together in the simulator: shuffles, votes, and the tensor cores' mma.sync.

The fragments are PTX's: with g = lane / 4 and t = lane % 4, a lane holds rows g and g + 8 of A and C, column g of B.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nova.gpu import simulate_values as sv
from nova.gpu.simulate_memory import WARP, SimulationError, Where
from nova.gpu.simulate_values import Array, Builder
from nova.mlir import ir

if TYPE_CHECKING:
    from nova.gpu.simulate import Block, Compiler, Step

TABLE: dict[str, Builder] = {}
_LANE = np.arange(WARP)
_G, _T = _LANE // 4, _LANE % 4

# --- special registers -----------------------------------------------------------------------------------------------


def _register(read: Callable[[Block], Array]) -> Builder:
    def build(c: Compiler, op: ir.Operation) -> Step:
        (result,) = c.slots(op.results)

        def step(s: Block) -> None:
            s.values[result] = read(s)

        return step

    return build


def _one(number: int) -> Array:
    return np.array([number], np.int32)


_REGISTERS: dict[str, Callable[[Block], Array]] = {
    "tid.x": lambda s: s.thread.astype(np.int32),
    "tid.y": lambda s: _one(0), "tid.z": lambda s: _one(0),
    "ntid.x": lambda s: _one(s.threads), "ntid.y": lambda s: _one(1), "ntid.z": lambda s: _one(1),
    "ctaid.x": lambda s: _one(s.block[0]), "ctaid.y": lambda s: _one(s.block[1]), "ctaid.z": lambda s: _one(s.block[2]),
    "nctaid.x": lambda s: _one(s.grid[0]), "nctaid.y": lambda s: _one(s.grid[1]), "nctaid.z": lambda s: _one(s.grid[2]),
    "laneid": lambda s: (s.thread % WARP).astype(np.int32), "warpid": lambda s: (s.thread // WARP).astype(np.int32),
    "warpsize": lambda s: _one(WARP), "nwarpid": lambda s: _one(s.warps),
}  # fmt: skip
TABLE |= {f"nvvm.read.ptx.sreg.{name}": _register(read) for name, read in _REGISTERS.items()}

# --- shuffles and votes ----------------------------------------------------------------------------------------------


def shuffle_source(mode: str, lane: Array, offset: Array, control: Array) -> tuple[Array, Array]:
    """(source lane, whether it is inside) by PTX's rules; `control` holds the clamp and the segment mask."""
    clamp, segment = control & 31, (control >> 8) & 31
    low, high = lane & segment, (lane & segment) | (clamp & ~segment)
    offset = offset & 31
    source = {
        "up": lane - offset, "down": lane + offset, "bfly": lane ^ offset, "idx": low | (offset & ~segment),
    }[mode]  # fmt: skip
    inside = source >= high if mode == "up" else source <= high
    return np.where(inside, source, lane), inside


def shuffle_step(
    s: Block, where: Where, mode: str, value: Array, offset: Array, control: Array, members: Array
) -> tuple[Array, Array]:
    """(value of the source lane, whether there was one) in all threads."""
    lane = s.thread % WARP
    s.require_members(where, members)
    source, inside = shuffle_source(mode, lane, s.everywhere(offset), s.everywhere(control))
    from_thread = s.thread - lane + source
    here = np.ones(s.threads, np.bool_) if s.active is None else s.active
    inside_block = np.minimum(from_thread, s.threads - 1)
    if (dead := here & ((from_thread > inside_block) | ~here[inside_block])).any():
        thread = int(np.argmax(dead))
        text = f"thread {thread} shuffles from thread {int(from_thread[thread])}, which does not take part"
        raise SimulationError(f"{where}\n  {text}")
    return s.everywhere(value)[from_thread], inside


def _shfl(c: Compiler, op: ir.Operation) -> Step:
    members, value, offset, control = c.slots(op.operands)
    (result,) = c.slots(op.results)
    mode, where = _enum(op, "kind"), c.where(op)
    with_flag = c.kind(op.results[0]).element == "struct"

    def step(s: Block) -> None:
        v = s.values
        s.counters["shuffles"] += s.active_warps()
        got, inside = shuffle_step(s, where, mode, v[value], v[offset], v[control], v[members])
        v[result] = (got, inside) if with_flag else got

    return step


def _enum(op: ir.Operation, name: str) -> str:
    """The word inside an attribute such as #nvvm<shfl_kind bfly> or #nvvm.shfl_kind<bfly>."""
    match = re.search(r"(\w+)>$", str(op.attributes[name]))
    if match is None:
        raise NotImplementedError(f"{op.name}: {op.attributes[name]}")
    return match[1]


def _vote(c: Compiler, op: ir.Operation) -> Step:
    members, predicate = c.slots(op.operands)
    (result,) = c.slots(op.results)
    mode, where = _enum(op, "kind"), c.where(op)

    def step(s: Block) -> None:
        s.require_members(where, s.values[members])
        voted = s.everywhere(s.values[predicate]).copy()
        if s.active is not None:
            voted &= s.active
        rows = voted.reshape(-1, WARP)
        alive = np.ones_like(rows) if s.active is None else s.active.reshape(-1, WARP)
        if mode == "ballot":
            bits = (rows.astype(np.uint64) << _LANE.astype(np.uint64)).sum(axis=1).astype(np.uint32).view(np.int32)
            s.values[result] = np.repeat(bits, WARP)
            return
        whole = {"any": rows.any(axis=1), "all": (rows | ~alive).all(axis=1)}
        whole["uni"] = whole["all"] | ~whole["any"]
        s.values[result] = np.repeat(whole[mode], WARP)

    return step


_REDUX: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


def _redux(c: Compiler, op: ir.Operation) -> Step:
    value, members = c.slots(op.operands)[:2]
    (result,) = c.slots(op.results)
    mode, where = _enum(op, "kind"), c.where(op)
    is_unsigned = mode in ("umin", "umax")
    combine = _REDUX[mode.removeprefix("u").removeprefix("f") if mode not in ("add",) else mode]

    def step(s: Block) -> None:
        s.require_warps(where)
        s.require_members(where, s.values[members])
        rows = s.everywhere(s.values[value]).reshape(-1, WARP)
        got = combine.reduce(sv.unsigned(rows) if is_unsigned else rows, axis=1)
        s.values[result] = np.repeat(got.astype(rows.dtype), WARP)

    return step


def _elect(c: Compiler, op: ir.Operation) -> Step:
    (result,) = c.slots(op.results)

    def step(s: Block) -> None:
        s.values[result] = s.thread % WARP == 0

    return step


# --- mma.sync --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fragments:
    """Where the elements of one operand's registers lie: rows and columns, [32 lanes, elements of a lane]."""

    rows: Array
    columns: Array
    shape: tuple[int, int]

    def matrix(self, values: Array) -> Array:
        """[warps, 32, elements] to [warps, rows, columns]."""
        result = np.zeros((len(values), *self.shape), values.dtype)
        result[:, self.rows, self.columns] = values
        return result

    def spread(self, matrix: Array) -> Array:
        """[warps, rows, columns] to [warps, 32, elements]."""
        return matrix[:, self.rows, self.columns]


def _fragments(shape: tuple[int, int], places: list[tuple[Array, Array]]) -> Fragments:
    rows, columns = (np.stack([place[i] for place in places], axis=1) for i in (0, 1))
    return Fragments(rows, columns, shape)


def accumulator(m: int, n: int) -> Fragments:
    """C and D: two neighbouring columns of row g, then of row g + 8."""
    return _fragments((m, n), [(_G + 8 * i, 2 * _T + e) for i in range(m // 8) for e in range(2)])


def left_operand(m: int, k: int, packed: int) -> Fragments:
    """A, `packed` elements a register: rows g and g + 8, then the next columns."""
    step = 4 * packed
    places = [
        (_G + 8 * i, packed * _T + e + step * j) for j in range(k // step) for i in range(m // 8) for e in range(packed)
    ]
    return _fragments((m, k), places)


def right_operand(k: int, n: int, packed: int) -> Fragments:
    """B, `packed` elements a register: column g."""
    step = 4 * packed
    return _fragments((k, n), [(packed * _T + e + step * j, _G) for j in range(k // step) for e in range(packed)])


def unpack(registers: list[Array], element: str) -> Array:
    """[threads, elements] as f32 or f64: what the tensor cores read of registers."""
    if element == "f64":
        return np.stack(sv.join_rows(*registers), axis=1)
    raw = [np.ascontiguousarray(r).reshape(len(r), -1).view(np.uint32)[:, 0] for r in registers]
    words = np.ascontiguousarray(np.stack(sv.join_rows(*raw), axis=1))
    if element == "tf32":
        return sv.truncate_tf32(words.view(np.float32))
    halves = words.view(np.uint16)
    return sv.bf16_to_f32(halves) if element == "bf16" else halves.view(np.float16).astype(np.float32)


def multiply(a: Array, b: Array, c: Array) -> Array:
    """a @ b + c of every warp: exact products, summed in f64, rounded once to c's type."""
    return (np.matmul(a.astype(np.float64), b.astype(np.float64)) + c).astype(c.dtype)


def _mma(c: Compiler, op: ir.Operation) -> Step:
    shape = [int(x) for x in re.findall(r"= (\d+)", str(op.attributes["shape"]))]
    m, n, k = shape
    sizes = [int(x) for x in op.attributes["operandSegmentSizes"]]
    slots = c.slots(op.operands)
    a_slots, b_slots, c_slots = slots[: sizes[0]], slots[sizes[0] : sizes[0] + sizes[1]], slots[sizes[0] + sizes[1] :]
    (result,) = c.slots(op.results)
    element, where = _mma_element(c, op), c.where(op)
    packed = 2 if element in ("bf16", "f16") else 1
    left, right, out = left_operand(m, k, packed), right_operand(k, n, packed), accumulator(m, n)
    narrow = c.kind(op.operands[sizes[0] + sizes[1]]).element == "f16"

    def rows(s: Block, x: Array) -> Array:
        return s.everywhere(x).reshape(-1, WARP, x.shape[1])

    def step(s: Block) -> None:
        s.require_warps(where)
        s.counters[f"mma.{element}.m{m}n{n}k{k}"] += s.active_warps()
        v = s.values
        a, b = (unpack([v[x] for x in group], element) for group in (a_slots, b_slots))
        if narrow:
            start = unpack([v[x] for x in c_slots], "f16")
        else:
            start = np.stack(sv.join_rows(*(v[x] for x in c_slots)), axis=1)
        product = multiply(left.matrix(rows(s, a)), right.matrix(rows(s, b)), out.matrix(rows(s, start)))
        lanes = out.spread(product).reshape(s.threads, -1)
        if narrow:
            halves = lanes.astype(np.float16)
            v[result] = tuple(halves[:, i : i + 2] for i in range(0, halves.shape[1], 2))
        else:
            v[result] = tuple(lanes[:, i] for i in range(lanes.shape[1]))

    return step


def _mma_element(c: Compiler, op: ir.Operation) -> str:
    if "multiplicandAPtxType" in op.attributes:
        element = _enum(op, "multiplicandAPtxType")
    else:
        element = c.kind(op.operands[0]).element
    if element not in ("bf16", "f16", "tf32", "f64"):
        raise NotImplementedError(f"the simulator has no mma.sync of {element}")
    return element


# --- conversions of their own ----------------------------------------------------------------------------------------


def _to_tf32(c: Compiler, op: ir.Operation) -> Step:
    mode = _enum(op, "rnd") if "rnd" in op.attributes else "rna"
    target = c.kind(op.results[0])
    return c.pure(op, lambda x: sv.bitcast(sv.round_tf32(x, mode), target))


def _pack_bf16(c: Compiler, op: ir.Operation) -> Step:
    """cvt.rn.bf16x2.f32: the first operand goes to the upper half."""
    target = c.kind(op.results[0])

    def pack(high: Array, low: Array) -> Array:
        return sv.bitcast(np.stack(sv.join_rows(sv.f32_to_bf16(low), sv.f32_to_bf16(high)), axis=1), target)

    return c.pure(op, pack)


# --- the special-function unit ---------------------------------------------------------------------------------------


def _approximate(function: sv.Function, flushes: bool = False) -> Builder:
    """An f32 function of the special-function unit, here exact; denormals are flushed if the operation says so."""

    def build(c: Compiler, op: ir.Operation) -> Step:
        flush = flushes or ("ftz" in op.attributes and bool(op.attributes["ftz"].value))
        return c.pure(op, lambda x: special_function(function, x, flush))

    return build


def special_function(function: sv.Function, x: Array, flush: bool) -> Array:
    x = _flushed(x) if flush else x
    result = function(x.astype(np.float64)).astype(np.float32)
    return _flushed(result) if flush else result


def _flushed(x: Array) -> Array:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


_INTRINSICS: dict[str, tuple[sv.Function, bool]] = {
    "llvm.nvvm.rsqrt.approx.f": (lambda x: 1.0 / np.sqrt(x), False),
    "llvm.nvvm.rsqrt.approx.ftz.f": (lambda x: 1.0 / np.sqrt(x), True),
    "llvm.nvvm.rcp.approx.ftz.f": (lambda x: 1.0 / x, True),
    "llvm.nvvm.ex2.approx.f": (np.exp2, False), "llvm.nvvm.ex2.approx.ftz.f": (np.exp2, True),
    "llvm.nvvm.lg2.approx.ftz.f": (np.log2, True),
}  # fmt: skip


def _intrinsic(c: Compiler, op: ir.Operation) -> Step:
    name = str(op.attributes["intrin"].value)
    if name not in _INTRINSICS:
        raise NotImplementedError(f"the simulator has no intrinsic {name}")
    function, flush = _INTRINSICS[name]
    return c.pure(op, lambda x: special_function(function, x, flush))


TABLE |= {
    "nvvm.shfl.sync": _shfl, "nvvm.vote.sync": _vote, "nvvm.redux.sync": _redux, "nvvm.elect.sync": _elect,
    "nvvm.mma.sync": _mma, "nvvm.convert.float.to.tf32": _to_tf32, "nvvm.convert.f32x2.to.bf16x2": _pack_bf16,
    "nvvm.ex2": _approximate(np.exp2), "nvvm.rcp.approx.ftz.f": _approximate(lambda x: 1.0 / x, flushes=True),
    "nvvm.log2": _approximate(np.log2), "llvm.call_intrinsic": _intrinsic,
}  # fmt: skip
