"""What the launches of a multi-tensor kernel compute, and where: see nova/tile/multi_tensor.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from nova.errors import CompileError
from nova.fusion.kernel import Expr, Kernel, Out, Structured, Tensor, expr, load, walk
from nova.schedule.target import GpuTarget
from nova.tile.expressions import memory_element
from nova.tile.layout import NestedLayout, blocked
from nova.tile.text import BITS

TENSORS = 1 << 15  # at most, in one call
THREADS = 256
BLOCKS_PER_SM = 64  # of the elements' launch: many, so that the last ones end together
HEAD = 2  # words before the pointers: n, numel
IN_FLIGHT = 128  # bytes a thread loads before it uses any


@dataclass
class Slot:
    """An array in the workspace."""

    offset: int
    element: str


@dataclass
class Plan:
    """What each launch computes. Tensors of the "saved" kind are scalars that `prepare` leaves for the others."""

    kernel: Kernel
    target: GpuTarget
    words: dict[Tensor, tuple[int, int]] = field(default_factory=dict)  # (fixed part, lists before it)
    end: tuple[int, int] = (0, 0)  # the workspace's word
    early: list[Out] = field(default_factory=list)
    elements: list[Structured] = field(default_factory=list)
    late: list[Out] = field(default_factory=list)
    slots: dict[Tensor, Slot] = field(default_factory=dict)  # saved scalars and partials
    partials: dict[Tensor, Out] = field(default_factory=dict)
    definitions: dict[Tensor, Expr] = field(default_factory=dict)  # of locals and saved scalars
    workspace: int = 0

    def __post_init__(self) -> None:
        self._place_words()
        self.firsts = self._reserve(TENSORS + 1, "i32")
        late = self._late_tensors()
        for op in self.kernel.ops:
            if op.checks:
                raise CompileError(f"kernel @{self.kernel.name}: a check in an update of many tensors")
            if op.loops:
                self._element_op(op, late)
            else:
                self._scalar_op(op, late)

    @property
    def grid(self) -> int:
        return self.target.sms * BLOCKS_PER_SM

    def _place_words(self) -> None:
        fixed, lists = HEAD, 0
        for group in (self.kernel.args, self.kernel.outs):
            for tensor in group:
                if tensor.list_ == "nova.list":
                    self.words[tensor] = (fixed, lists)
                    lists += 1
            for tensor in group:
                if tensor.list_ != "nova.list":
                    self.words[tensor] = (fixed, lists)
                    fixed += 1
        self.end = (fixed, lists)

    def _reserve(self, count: int, element: str) -> Slot:
        slot = Slot(self.workspace, element)
        self.workspace += -(-count * max(BITS[element], 8) // 8 // 256) * 256
        return slot

    def _late_tensors(self) -> set[Tensor]:
        """Scalars that depend on a reduction over their tensor."""
        found: set[Tensor] = set()
        for op in self.kernel.ops:
            for out in op.outs:
                if out.combine is not None or (
                    not op.loops and any(n.op == "load" and n.attr[0] in found for n in walk([out.value]))
                ):
                    found.add(out.tensor)
        return found

    def _element_op(self, op: Structured, late: set[Tensor]) -> None:
        outs = [Out(o.tensor, o.index, self._saving(o.value, late), o.combine, o.init) for o in op.outs]
        self.elements.append(Structured(op.loops, op.reduced, outs))
        for out in outs:
            if _reads(out.value, late):
                raise CompileError(f"kernel @{self.kernel.name}: an update uses a reduction of its own tensor")
            if out.combine is None:
                continue
            self.partials[out.tensor] = out
            self.slots[out.tensor] = self._reserve(TENSORS + self.grid, memory_element(out.tensor.dtype))
            if out.tensor.kind == "out":
                self.late.append(Out(out.tensor, (), load(out.tensor, ())))

    def _scalar_op(self, op: Structured, late: set[Tensor]) -> None:
        for out in op.outs:
            if out.tensor not in late:
                self.early.append(out)
                self.definitions[out.tensor] = out.value
                continue
            value = self._saving(out.value, late)
            self.definitions[out.tensor] = value
            if out.tensor.kind == "out":
                self.late.append(Out(out.tensor, out.index, value))

    def _saving(self, root: Expr, late: set[Tensor]) -> Expr:
        """The expression with all that is known before the elements replaced by loads of saved scalars."""
        known: dict[Expr, bool] = {}
        for node in walk([root]):
            own = node.op not in ("linear", "acc", "nova.philox")
            if node.op == "load":
                own = not node.attr[0].shape and node.attr[0] not in late and not self._is_element(node.attr[0])
            known[node] = own and all(known[arg] for arg in node.args)
        memo: dict[Expr, Expr] = {}

        def replaced(node: Expr) -> Expr:
            if node.op == "const" or not known[node]:
                return memo[node]
            return self._saved(node)

        for node in walk([root]):
            if known[node]:
                memo[node] = node
                continue
            memo[node] = expr(node.op, [replaced(arg) for arg in node.args], node.type, node.attr)
        return replaced(root)

    def _is_element(self, tensor: Tensor) -> bool:
        """A local that another op over the elements computes."""
        return any(out.tensor is tensor for op in self.elements for out in op.outs)

    def _saved(self, value: Expr) -> Expr:
        for tensor, definition in self.definitions.items():
            if tensor.kind == "saved" and definition is value:
                return load(tensor, ())
        tensor = Tensor("saved", (), value.type)
        self.definitions[tensor] = value
        self.slots[tensor] = self._reserve(TENSORS, memory_element(value.type))
        self.early.append(Out(tensor, (), value))
        return load(tensor, ())


def _reads(root: Expr, tensors: set[Tensor]) -> bool:
    return any(node.op == "load" and node.attr[0] in tensors for node in walk([root]))


def streams(plan: Plan) -> list[Tensor]:
    """Tensors of the elements: those read, then those written."""
    read = {t: None for op in plan.elements for t, _ in op.loads() if t.shape and t.kind != "local"}
    written = {o.tensor: None for op in plan.elements for o in op.outs if o.tensor.kind == "out" and o.combine is None}
    return [*read, *written]


def unit_of(plan: Plan) -> tuple[int, NestedLayout]:
    """(elements a block moves at once, how its threads hold them)."""
    reads = {t for op in plan.elements for t, _ in op.loads() if t.shape and t.kind != "local"}
    sizes = [BITS[memory_element(t.dtype)] // 8 for t in streams(plan)] or [4]
    run = min(8, 16 // min(sizes))
    bytes_ = run * sum(BITS[memory_element(t.dtype)] // 8 for t in reads)
    batch = max(1, IN_FLIGHT // max(bytes_, 16))
    unit = THREADS * run * batch
    return unit, blocked([unit], [THREADS // 32], [32], run)


def blocks_per_sm(plan: Plan) -> int:
    """So many that ptxas keeps the registers for them: three blocks where few pointers and no doubles are live."""
    moved = streams(plan)
    small = all(BITS[memory_element(t.dtype)] <= 32 for t in moved)
    return 3 if small and len(moved) <= 7 else 2
