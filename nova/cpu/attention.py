"""Attention kernels: `nova.online_attention` and its gradients to tile loops over vectors.

    %o, %l = nova.online_attention(%qkv, %out, %lse) {...}

    for each (batch, head, group of query panels) in parallel          forward: attention_forward.py
      for key block                                                    (only up to the diagonal if causal)
        pack K, V
        for panel: scores; mask; online softmax; weighted sum
      write out, lse

The tile maths is in attention_tiles.py (contractions), attention_softmax.py (elementwise) and attention_pack.py
(layouts); this file reads the op, asks nova/schedule for the tiles, and assembles the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nova.cpu import parallel
from nova.cpu.attention_mask import Dropout, Mask
from nova.cpu.attention_pack import Matrix
from nova.cpu.attention_tiles import Geometry, Kit, Scope
from nova.fusion import attention_form
from nova.lowering import lanes as ln
from nova.lowering.lanes import Type, Value
from nova.mlir import ir
from nova.schedule.attention import AttentionSchedule, register_rows, schedule_attention
from nova.schedule.target import CpuTarget


class Access(attention_form.Access):
    """Where a logical tensor lies, and how CPU code walks it."""

    def start(self, s: Scope, *indices: Value | int) -> Value:
        """Offset of the element at `indices` (leading dims; the rest are 0)."""
        offset: Value | int = self.offset
        for index, stride in zip(indices, self.strides, strict=False):
            offset = s.add(offset, s.mul(index, stride))
        return s.i64(offset)

    def matrix(self, columns: int) -> Matrix:
        """The last two dims."""
        return Matrix(self.element, self.strides[-2], self.strides[-1], columns)

    def column(self) -> Matrix:
        """The last dim as a matrix of one column."""
        return Matrix(self.element, self.strides[-1], 0, 1)


class Attention(attention_form.Attention):
    """One attention op, with what its CPU code applies to scores."""

    @property
    def compute(self) -> Type:
        """f64 for f64 operands, else f32."""
        return ln.f64() if self["q"].element == ln.f64() else ln.f32()

    @property
    def mask(self) -> Mask | None:
        if not self.has("mask"):
            return None
        access = self["mask"]
        return Mask(access.element, access.strides[2], access.strides[3])

    @property
    def has_floor(self) -> bool:
        """Whether a row's statistic may be in the split form that float masks need."""
        return self.mask is not None and not self.mask.is_bool

    @property
    def dropout(self) -> Dropout | None:
        return Dropout(self.dropout_p, self.stream, self.keys) if self.dropout_p > 0 else None


def read_op(op: ir.Operation) -> Attention:
    """The data of an attention op whose operands are arguments of its function."""
    form = vars(attention_form.read_op(op))
    accesses = {name: Access(**vars(access)) for name, access in form["accesses"].items()}
    return Attention(**form | {"accesses": accesses})


@dataclass
class Work:
    """What emitting one attention op needs: the op, its tiles, helpers and workspace."""

    op: Attention
    schedule: AttentionSchedule
    geometry: Geometry
    kit: Kit
    workspace: parallel.Workspace

    def scratch(self, elements: int) -> parallel.Slot:
        """A buffer of the compute type, one a thread."""
        return self.workspace.per_thread([max(elements, 1)], self.geometry.element, self.schedule.threads)

    def panels(self, queries: int | None = None) -> int:
        return -(-(self.op.queries if queries is None else queries) // self.geometry.queries)


class Body:
    """A phase's function while it is emitted: its scope, argument pointers and scratch pointers."""

    def __init__(self, work: Work, region: parallel.Region):
        self.work, self.region = work, region
        block = ir.InsertionPoint.current.block
        self.scope = Scope(work.geometry, block)

    def pointer(self, access: Access) -> Value:
        return self.region.pointers[access.argument]

    def scratch(self, slot: parallel.Slot) -> Value:
        offset: Value | int = slot.offset
        if slot.stride:
            thread = ln.create("arith.index_cast", ln.int_type(64), [self.region.thread])
            offset = self.scope.add(self.scope.mul(thread, slot.stride), slot.offset)
        return self.scope.at(self.region.workspace, offset, ln.int_type(8))

    def unflatten(self, task: Value, sizes: Sequence[int]) -> list[Value | int]:
        """The indices of a task number in row-major order."""
        s, indices, rest = self.scope, [], ln.create("arith.index_cast", ln.int_type(64), [task])
        for size in reversed(sizes[1:]):
            indices.append(0 if size == 1 else ln.remui(rest, s.i(size)))
            rest = rest if size == 1 else ln.divui(rest, s.i(size))
        return [rest, *reversed(indices)]


def geometry_of(element: Type, target: CpuTarget) -> Geometry:
    """16 registers hold 6 rows x 2 vectors of accumulators, 32 hold 12 x 2."""
    return Geometry(element, target.vector_bits // 8 // ln.bytes_of(element), register_rows(target))


def lower(kernel: ir.OpView, target: CpuTarget) -> tuple[ir.Module, int]:
    """The module and workspace of a kernel function that holds attention ops."""
    from nova.cpu import attention_backward, attention_forward

    block = kernel.body.blocks[0]
    name = ir.StringAttr(kernel.attributes["sym_name"]).value
    workspace = parallel.Workspace()
    phases, kits = [], []
    for number, op in enumerate(attention_form.attention_ops(kernel)):
        attention = read_op(op)
        schedule = schedule_attention(attention.problem(), target)
        geometry = geometry_of(attention.compute, target)
        kit = Kit(geometry, f"{name}_h{number}")
        # phases run one after the other, so their scratch may overlap
        own = parallel.Workspace()
        work = Work(attention, schedule, geometry, kit, own)
        emitter = attention_forward if attention.name == "online_attention" else attention_backward
        phases.append(emitter.phase(work))
        workspace.bytes = max(workspace.bytes, own.bytes)
        kits.append(kit)
    module = parallel.emit_kernel(name, [argument.type for argument in block.arguments], phases)
    with ir.Location.unknown():
        for kit in kits:
            kit.finish(module)
    return module, workspace.bytes
