"""What the launches of a multi-tensor kernel share: the table of words, and the scalars of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from nova.errors import CompileError
from nova.fusion.kernel import Index, Out, Tensor
from nova.tile.builder import Program
from nova.tile.expressions import Domain, Evaluator, Part, Sources, memory_element
from nova.tile.layout import NestedLayout
from nova.tile.multi_tensor_plan import Plan, Slot
from nova.tile.text import Operand, Value


class Launch:
    """A program with the table's fixed words read."""

    def __init__(self, plan: Plan, name: str, grid: int, threads: int, min_blocks: int = 0):
        self.plan = plan
        self.program = p = Program(f"{plan.kernel.name}_{name}", 1, (grid, 1, 1), threads, min_blocks)
        self.table = p.args[0]
        self.n = p.load_scalar(self.table, 0, "i64")
        self.count = p.cast(self.n, "i32")
        if "nova.guarded" in plan.kernel.attrs:
            p.guard(p.load_pointer(self.table, p.add(self.word(plan.end), 1)))
        self.workspace = p.load_pointer(self.table, self.word(plan.end))
        self.firsts = self.slot(plan.firsts)
        self.shared: dict[Tensor, Value] = {}

    def word(self, place: tuple[int, int], tensor: Operand | None = None) -> Operand:
        """The number of a word: fixed + lists * n + tensor."""
        fixed, lists = place
        p = self.program
        found = p.add(p.mul(self.n, lists), fixed)
        return found if tensor is None else p.add(p.cast(tensor, "i64"), found)

    def slot(self, slot: Slot) -> Value:
        return self.program.advance(self.workspace, slot.offset, "i8") if slot.offset else self.workspace

    def pointer(self, tensor: Tensor, number: Operand) -> Value:
        """Of a list's entry, or of what all tensors share."""
        place = self.plan.words[tensor]
        return self.program.load_pointer(self.table, self.word(place, number if tensor.list_ == "nova.list" else None))

    def first(self, tensor: Operand) -> Value:
        """The number of the tensor's first unit."""
        return self.program.load_scalar(self.firsts, self.program.cast(tensor, "i64"), "i32")


class Scalars(Sources):
    """Scalars of tensor `number`."""

    def __init__(self, launch: Launch, number: Operand):
        self.launch, self.number = launch, number
        self.known: dict[Tensor, Part] = {}

    def load(self, tensor: Tensor, index: Index) -> Part:
        if tensor not in self.known:
            self.known[tensor] = self.read(tensor)
        return self.known[tensor]

    def read(self, tensor: Tensor) -> Part:
        launch, p = self.launch, self.launch.program
        element = memory_element(tensor.dtype)
        if tensor in launch.plan.slots and tensor.kind == "saved":
            slot = launch.slot(launch.plan.slots[tensor])
            return Part(p.load_scalar(slot, p.cast(self.number, "i64"), element), (), element)
        if tensor.kind == "local":
            raise CompileError(f"kernel @{launch.plan.kernel.name}: {tensor} is read before it is written")
        return Part(p.load_scalar(launch.pointer(tensor, self.number), 0, element), (), element)


_NOTHING = NestedLayout((), (), (), (), (), (), ())


def store_scalars(launch: Launch, scalars: Scalars, outs: Sequence[Out]) -> None:
    """Computes all, then stores: what is updated in place is read before."""
    domain = Domain(launch.program, _NOTHING)
    evaluator = Evaluator(domain, scalars)
    values = []
    for out in outs:
        (part,) = evaluator.emit([out.value])
        if out.tensor not in scalars.known:
            scalars.known[out.tensor] = part
        values.append(domain.scalar(part))
    p = launch.program
    for out, value in zip(outs, values, strict=True):
        if out.tensor.kind == "saved":
            p.store_scalar(value, launch.slot(launch.plan.slots[out.tensor]), p.cast(scalars.number, "i64"))
        elif out.tensor.kind == "out":
            at = p.cast(scalars.number, "i64") if out.tensor.list_ == "nova.element" else 0
            p.store_scalar(value, launch.pointer(out.tensor, scalars.number), at)
