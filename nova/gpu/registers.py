"""Writes per-thread code (level 5): a thread's registers as one vector, addresses, accesses, shuffles.

A tile is `vector<K x T>`, its K registers in the order of the layout; a scalar is the same in all threads of the block
unless it comes from `tid`, `lane`, `warp` or `digit`. What depends only on the thread is computed once, in the
function's entry, wherever it is asked for.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from nova.gpu import asm
from nova.tile.layout import WARP, NestedLayout
from nova.tile.text import BITS, FLOATS, Emitter, Operand, Value, number_text

SHARED = "!llvm.ptr<3>"
_SPACES = {"!llvm.ptr<1>": "global", SHARED: "shared"}


def memory_element(element: str) -> str:
    """The type of an element in memory: booleans are bytes."""
    return "i8" if element == "i1" else element


def element_bytes(element: str) -> int:
    return BITS[memory_element(element)] // 8


def bits_of(element: str, literal: str) -> int:
    """The bits of a literal as `number_text` spells it."""
    if literal.startswith("0x"):
        return int(literal, 16)
    if element == "f64":
        return int(np.float64(literal).view(np.uint64))
    return int(literal) & ((1 << BITS[element]) - 1)


class ThreadCode(Emitter):
    """The body of one kernel. `threads`: in a block."""

    def __init__(self, threads: int, grid: Sequence[int] = (1, 1, 1)) -> None:
        super().__init__()
        self.threads, self.grid = threads, tuple(grid)
        self.entry: list[str] = []
        self.per_thread: dict[Any, Value] = {}
        self.literals: dict[str, str] = {}
        self.broadcasts: ChainMap[tuple[str, int], Value] = ChainMap()

    def body(self) -> str:
        return "\n".join([*self.head, *self.entry, *self.lines])

    # --- once a thread ---

    def once(self, key: Any, make: Callable[[], Value]) -> Value:
        """What `make` emits, in the function's entry, the first time `key` is asked for."""
        found = self.per_thread.get(key)
        if found is None:
            saved = self.lines, self.depth
            self.lines, self.depth = self.entry, 1
            found = self.per_thread[key] = make()
            self.lines, self.depth = saved
        return found

    def special(self, name: str, limit: int) -> Value:
        """A special register such as tid.x, known to be below `limit`."""
        return self.once(name, lambda: self.result(f"nvvm.read.ptx.sreg.{name} range <i32, 0, {limit}> : i32", "i32"))

    def tid(self) -> Value:
        return self.special("tid.x", self.threads)

    def lane(self) -> Value:
        return self.once("lane", lambda: self.int_op("remui", self.tid(), WARP))

    def warp(self) -> Value:
        return self.once("warp", lambda: self.int_op("divui", self.tid(), WARP))

    def digit(self, of: str, stride: int, count: int) -> Operand:
        """of // stride % count, `of` being "lane" or "warp": i32."""
        limit = WARP if of == "lane" else -(-self.threads // WARP)
        if count == 1:
            return 0

        def make() -> Value:
            number: Operand = self.div(self.lane() if of == "lane" else self.warp(), stride)
            number = number if stride * count >= limit else self.rem(number, count)
            assert isinstance(number, Value)
            return number

        return self.once((of, stride, count), make)

    def thread_sum(self, terms: Sequence[tuple[str, int, int, int]], element: str = "i32") -> Operand:
        """Sum of digit * step over (of, stride, count, step), computed once a thread."""
        terms = tuple(term for term in terms if term[2] > 1 and term[3])
        if not terms:
            return 0

        def make() -> Value:
            total: Operand = 0
            for of, stride, count, step in terms:
                digit = self.cast_unsigned(self.digit(of, stride, count), element)
                product = digit if step == 1 else self.nsw("muli", digit, step)
                total = product if total == 0 else self.nsw("addi", total, product)
            assert isinstance(total, Value)
            return total

        return self.once((terms, element), make)

    def linear_sum(self, terms: Sequence[tuple[int, int]]) -> Operand:
        """XOR of (tid & mask) << shift over (mask, shift), shifting right where it is negative; once a thread."""
        if not terms:
            return 0

        def make() -> Value:
            total: Operand = 0
            for mask, shift in terms:
                part = self.int_op("andi", self.tid(), mask)
                if shift:
                    part = self.int_op("shli" if shift > 0 else "shrui", part, abs(shift))
                total = part if isinstance(total, int) else self.int_op("xori", total, part)
            assert isinstance(total, Value)
            return total

        return self.once(("linear", tuple(terms)), make)

    def coordinate(self, layout: NestedLayout, dim: int) -> Operand:
        """The index along `dim` of the thread's register 0."""
        return self.thread_sum(layout.thread_part(dim))

    def first_copy(self, layout: NestedLayout, of_lanes: bool = False) -> Value | None:
        """Whether the thread is the first of those that hold the same elements; None if no two do.

        `of_lanes`: the first of those in its warp.
        """
        parts = [part for dim in range(layout.rank) for part in layout.thread_part(dim)]
        conditions = []
        limits = {"lane": min(WARP, self.threads), "warp": 1 if of_lanes else -(-self.threads // WARP)}
        for of, limit in limits.items():
            used = [(stride, count) for o, stride, count, _ in parts if o == of]
            if limit > math.prod(count for _, count in used):
                conditions.append((of, tuple(used)))
        if not conditions:
            return None

        def make() -> Value:
            tests = [self._no_rest(of, used) for of, used in conditions]
            return (
                tests[0] if len(tests) == 1 else self.result(f"arith.andi {tests[0].name}, {tests[1].name} : i1", "i1")
            )

        return self.once(("first", *conditions), make)

    def _no_rest(self, of: str, used: tuple[tuple[int, int], ...]) -> Value:
        """Whether what the digits of `of` leave over is zero."""
        number = self.lane() if of == "lane" else self.warp()
        rest: Operand = number
        for stride, count in used:
            rest = self.sub(rest, self.mul(self.digit(of, stride, count), stride))
        return self.compare("eq", rest, 0)

    # --- text ---

    def result(self, text: str, element: str, count: int | None = None, layout: Any = None) -> Value:
        """A line that defines one value: a scalar, or a vector of `count`."""
        value = Value(self.fresh(), element, None if count is None else (count,), layout)
        self.line(f"{value.name} = {text}")
        return value

    def nsw(self, name: str, a: Operand, b: Operand) -> Value:
        """Integer arithmetic that does not overflow."""
        x, y, element = self._ints(a, b)
        return self.result(f"arith.{name} {x.name}, {y.name} overflow<nsw> : {element}", element)

    def cast_unsigned(self, value: Operand, element: str) -> Operand:
        if not isinstance(value, Value) or value.element == element:
            return value
        return self.result(f"arith.extui {value.name} : {value.element} to {element}", element)

    def constant_text(self, text: str, element: str) -> Value:
        """A scalar constant from its literal."""
        found = self.constants.get((text, element))
        if found is None:
            found = self.constants[text, element] = Value(f"%c{len(self.constants)}", element)
            self.literals[found.name] = text
            self.head.append(f"  {found.name} = arith.constant {text}{'' if element == 'i1' else f' : {element}'}")
        return found

    def constant(self, number: float | int | bool, element: str) -> Value:
        return self.constant_text(number_text(number, element), element)

    def folded(self, value: Value) -> Operand:
        """The Python number of an integer constant, else the value."""
        text = self.literals.get(value.name)
        if text is None or value.element in FLOATS or value.element == "i1":
            return value
        return int(text)

    def table(self, numbers: Sequence[int], element: str) -> Value:
        """A constant vector, one number a register."""
        text = f"dense<[{', '.join(map(str, numbers))}]> : vector<{len(numbers)}x{element}>"
        found = self.constants.get((text, ""))
        if found is None:
            found = self.constants[text, ""] = Value(f"%c{len(self.constants)}", element, (len(numbers),))
            self.head.append(f"  {found.name} = arith.constant {text}")
        return found

    @contextmanager
    def region(self) -> Iterator[None]:
        """Lines of a nested region; what is remembered inside is forgotten after it."""
        self.broadcasts = self.broadcasts.new_child()
        self.depth += 1
        yield
        self.depth -= 1
        self.broadcasts = self.broadcasts.parents

    # --- registers ---

    def broadcast(self, scalar: Value, count: int, layout: Any = None) -> Value:
        """Every register the same."""
        literal = self.literals.get(scalar.name)
        if literal is not None:
            text = f"dense<{literal}> : vector<{count}x{scalar.element}>"
            found = self.constants.get((text, ""))
            if found is None:
                found = self.constants[text, ""] = Value(f"%c{len(self.constants)}", scalar.element, (count,))
                self.head.append(f"  {found.name} = arith.constant {text}")
        else:
            found = self.broadcasts.get((scalar.name, count))
            if found is None:
                text = f"vector.broadcast {scalar.name} : {scalar.element} to vector<{count}x{scalar.element}>"
                found = self.broadcasts[scalar.name, count] = self.result(text, scalar.element, count)
        return Value(found.name, scalar.element, (count,), layout)

    def poison(self, count: int, element: str) -> Value:
        found = self.constants.get(("poison", f"{count}x{element}"))
        if found is None:
            found = self.constants["poison", f"{count}x{element}"] = Value(
                f"%c{len(self.constants)}", element, (count,)
            )
            self.head.append(f"  {found.name} = ub.poison : {found.type}")
        return found

    def extract(self, vector: Value, register: int) -> Value:
        return self.result(
            f"vector.extract {vector.name}[{register}] : {vector.element} from {vector.type}", vector.element
        )

    def elements(self, vector: Value) -> list[Value]:
        """All registers as scalars."""
        return [self.extract(vector, r) for r in range(count_of(vector))]

    def from_elements(self, scalars: Sequence[Value], layout: Any = None) -> Value:
        kind = f"vector<{len(scalars)}x{scalars[0].element}>"
        names = ", ".join(s.name for s in scalars)
        return self.result(f"vector.from_elements {names} : {kind}", scalars[0].element, len(scalars), layout)

    def take(self, vector: Value, registers: Iterable[int], layout: Any = None) -> Value:
        """The registers named, in that order; they may repeat."""
        registers = [int(r) for r in registers]
        count = count_of(vector)
        if registers == list(range(count)):
            return Value(vector.name, vector.element, vector.shape, layout)
        first, n = registers[0], len(registers)
        kind = f"vector<{n}x{vector.element}>"
        if n < count and registers == list(range(first, first + n)):
            text = (
                f"vector.extract_strided_slice {vector.name} {{offsets = [{first}], sizes = [{n}], strides = [1]}} : "
                f"{vector.type} to {kind}"
            )
        else:
            listed = ", ".join(map(str, registers))
            text = f"vector.shuffle {vector.name}, {vector.name} [{listed}] : {vector.type}, {vector.type}"
        return self.result(text, vector.element, n, layout)

    def concat(self, pieces: Sequence[Value], layout: Any = None) -> Value:
        """Vectors one after the other."""
        if len(pieces) == 1:
            return Value(pieces[0].name, pieces[0].element, pieces[0].shape, layout)
        total = sum(count_of(p) for p in pieces)
        made, at = self.poison(total, pieces[0].element), 0
        for piece in pieces:
            text = (
                f"vector.insert_strided_slice {piece.name}, {made.name} {{offsets = [{at}], strides = [1]}} : "
                f"{piece.type} into {made.type}"
            )
            made, at = self.result(text, made.element, total, layout), at + count_of(piece)
        return made

    def convert(self, name: str, value: Value, element: str) -> Value:
        """A conversion such as arith.extf, of a scalar or a vector."""
        kind = Value("", element, value.shape).type
        count = None if value.shape is None else count_of(value)
        return self.result(f"{name} {value.name} : {value.type} to {kind}", element, count, value.layout)

    def as_boolean(self, bytes_: Value) -> Value:
        """Booleans from the bytes that hold them."""
        count = count_of(bytes_)
        zero = self.broadcast(self.constant(0, bytes_.element), count)
        text = f"arith.cmpi ne, {bytes_.name}, {zero.name} : {bytes_.type}"
        return self.result(text, "i1", count, bytes_.layout)

    def bitcast(self, vector: Value, element: str) -> Value:
        """The same bits of a vector as other elements, maybe of another width."""
        if vector.element == element:
            return vector
        count = count_of(vector) * BITS[vector.element] // BITS[element]
        kind = f"vector<{count}x{element}>"
        return self.result(f"vector.bitcast {vector.name} : {vector.type} to {kind}", element, count)

    def opaque(self, words: Value) -> Value:
        """A vector of i32, one by one out of LLVM's sight."""
        text = f'llvm.inline_asm asm_dialect = att "{asm.WORD}", "=r,r"'
        kept = [self.result(f"{text} {word.name} : (i32) -> i32", "i32") for word in self.elements(words)]
        return self.from_elements(kept)

    def binary(self, name: str, a: Value, b: Value, layout: Any = None) -> Value:
        """An op of two operands of one type, e.g. "arith.addf"."""
        count = None if a.shape is None else count_of(a)
        return self.result(f"{name} {a.name}, {b.name} : {a.type}", a.element, count, layout)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """a where a scalar i1 holds, else b: scalars or registers of one type."""
        count = None if a.shape is None else count_of(a)
        return self.result(f"arith.select {condition.name}, {a.name}, {b.name} : {a.type}", a.element, count)

    # --- addresses and accesses ---

    def offset(self, pointer: Value, by: Operand, element: str = "i8") -> Value:
        """`pointer` moved by so many elements."""
        unit, kind = memory_element(element), pointer.element
        if isinstance(by, int) and by == 0:
            return pointer
        if isinstance(by, int) and abs(by) < 1 << 30:  # what the op's 32-bit constants hold
            return self.result(f"llvm.getelementptr {pointer.name}[{by}] : ({kind}) -> {kind}, {unit}", kind)
        step = self.scalar(by, "i64")
        text = f"llvm.getelementptr {pointer.name}[{step.name}] : ({kind}, {step.element}) -> {kind}, {unit}"
        return self.result(text, kind)

    def load(self, pointer: Value, element: str, count: int | None = None) -> Value:
        """A scalar, or a vector in one access; aligned to its size. Memory elements: i8, not i1."""
        kind = element if count is None else f"vector<{count}x{element}>"
        bytes_ = element_bytes(element) * (count or 1)
        return self.result(
            f"llvm.load {pointer.name} {{alignment = {bytes_} : i64}} : {pointer.element} -> {kind}", element, count
        )

    def store(self, value: Value, pointer: Value) -> None:
        """A scalar or a vector in one access; aligned to its size."""
        bytes_ = element_bytes(value.element) * (1 if value.shape is None else count_of(value))
        self.line(
            f"llvm.store {value.name}, {pointer.name} {{alignment = {bytes_} : i64}} : {value.type}, {pointer.element}"
        )

    def load_where(
        self, predicate: Value, pointer: Value, constant: int, element: str, count: int, otherwise: int
    ) -> list[Value]:
        """The words of `count` elements at `pointer` + constant bytes, made of the bits `otherwise` elsewhere."""
        size = element_bytes(element)
        access = asm.access("ld", _SPACES[pointer.element], size, count)
        word_bits = max(BITS[access.operand], 8 * size)
        fill = sum(otherwise << shift for shift in range(0, word_bits if access.word != "u8" else 8, 8 * size))
        value = self.constant(_signed(fill, BITS[access.operand]), access.operand)
        operands = [pointer, predicate, self.immediate(constant), *[value] * access.count]
        names, types = (", ".join(getattr(v, f) for v in operands) for f in ("name", "element"))
        one = access.operand
        kind = one if access.count == 1 else f"!llvm.struct<({', '.join([one] * access.count)})>"
        made = self.result(
            f'llvm.inline_asm has_side_effects asm_dialect = att "{access.text}", "{access.constraints}" {names} : '
            f"({types}) -> {kind}", one,
        )  # fmt: skip
        if access.count == 1:
            return [made]
        return [self.result(f"llvm.extractvalue {made.name}[{i}] : {kind}", one) for i in range(access.count)]

    def store_where(
        self, predicate: Value, words: Sequence[Value], pointer: Value, constant: int, element: str, count: int
    ) -> None:
        """Stores the words of `count` elements at `pointer` + constant bytes if the predicate holds."""
        access = asm.access("st", _SPACES[pointer.element], element_bytes(element), count)
        operands = [pointer, predicate, self.immediate(constant), *words]
        names, types = (", ".join(getattr(v, f) for v in operands) for f in ("name", "element"))
        self.line(
            f'llvm.inline_asm has_side_effects asm_dialect = att "{access.text}", "{access.constraints}" {names} : '
            f"({types}) -> ()"
        )

    def words(self, vector: Value, width: int) -> list[list[Value]]:
        """The registers as the words that `store_where` takes, a list for each run of `width` elements."""
        size = element_bytes(vector.element)
        access = asm.access("st", "global", size, width)
        if access.word == "u8":
            vector = self.convert("arith.extui", vector, "i16")
        scalars = self.elements(self.bitcast(vector, access.operand))
        return [scalars[i : i + access.count] for i in range(0, len(scalars), access.count)]

    def from_words(self, words: Sequence[Value], element: str, width: int) -> Value:
        """The elements in words as `load_where` returns them."""
        vector = self.from_elements(words)
        if asm.access("ld", "global", element_bytes(element), width).word == "u8":
            return self.convert("arith.trunci", vector, "i8")
        return self.bitcast(vector, element)

    def immediate(self, number: int) -> Value:
        """A constant that inline PTX prints as a number."""
        key = (f"#{number}", "i32")
        found = self.constants.get(key)
        if found is None:
            found = self.constants[key] = Value(f"%c{len(self.constants)}", "i32")
            self.head.append(f"  {found.name} = llvm.mlir.constant({number} : i32) : i32")
        return found

    # --- between threads ---

    def barrier_line(self, by_warp: bool = False, warps: int = 0) -> None:
        """`warps`: groups of so many have a barrier each; number 0 is that of all threads (PTX ISA 9.7.13.1). Of n
        groups these are n to 2n-1: groups of another size, which may wait at the same time, have others."""
        if by_warp:
            self.line(f"nvvm.bar.warp.sync {self.constant(-1, 'i32').name} : i32")
        elif warps:
            groups = self.threads // (warps * WARP)
            number = self.once(
                ("barrier", warps), lambda: self.int_op("addi", self.int_op("divui", self.warp(), warps), groups)
            )
            threads = self.constant(warps * WARP, "i32")
            self.line(f"nvvm.barrier id = {number.name} number_of_threads = {threads.name}")
        else:
            self.line("nvvm.barrier")

    def shuffle_xor(self, value: Value, mask: int) -> Value:
        """A vector's registers as the lane whose number differs in `mask` has them."""
        element, bits = value.element, BITS[value.element]
        if bits > 32:
            halves = self.elements(self.bitcast(value, "i32"))
            return self.bitcast(self.from_elements([self._shuffle(h, mask) for h in halves]), element)
        if bits == 32:
            return self.from_elements([self._shuffle(e, mask) for e in self.elements(value)])
        integers = self.bitcast(value, f"i{bits}") if bits > 1 else value
        wide = self.elements(self.convert("arith.extui", integers, "i32"))
        moved = self.from_elements([self._shuffle(e, mask) for e in wide])
        narrow = self.convert("arith.trunci", moved, f"i{bits}")
        return self.bitcast(narrow, element)

    def _shuffle(self, scalar: Value, mask: int) -> Value:
        everyone, by, clamp = self.constant(-1, "i32"), self.constant(mask, "i32"), self.constant(WARP - 1, "i32")
        names = f"{everyone.name}, {scalar.name}, {by.name}, {clamp.name}"
        return self.result(f"nvvm.shfl.sync bfly {names} : {scalar.element} -> {scalar.element}", scalar.element)


def count_of(vector: Value) -> int:
    """Registers of a vector."""
    assert vector.shape is not None, f"{vector!r} is not a vector"
    return vector.shape[0]


def _signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> (bits - 1) & 1 else number
