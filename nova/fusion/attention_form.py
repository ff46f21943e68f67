"""An attention op as plain data: what schedules and code generators of every target read of it.

%o, %l = nova.online_attention(%qkv, %qkv, %qkv, .., %into_o, %into_l) {q_access = [0, T*3C, D, 3C, 1], ..}
  ->
Attention(batch=8, heads=12, .., accesses={"q": Access(argument=0, offset=0, strides=(T*3C, D, 3C, 1)), ..})
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nova.dialect.attention import TENSORS
from nova.dialect.base import attribute_value
from nova.errors import CompileError
from nova.lowering.constants import LOG2_E
from nova.mlir import ir
from nova.schedule.attention import AttentionProblem, Direction


@dataclass(frozen=True)
class Access:
    """Where a logical tensor lies: kernel argument, element offset, element strides."""

    argument: int
    element: ir.Type
    offset: int
    strides: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return str(self.element)


@dataclass(frozen=True)
class Attention:
    """One attention op, as plain data."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    causal: bool
    scale: float
    dropout_p: float
    stream: int
    accesses: dict[str, Any]
    tf32: bool = False

    def __getitem__(self, tensor: str) -> Any:
        return self.accesses[tensor]

    def has(self, tensor: str) -> bool:
        return tensor in self.accesses

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.heads // self.kv_heads

    @property
    def factor(self) -> float:
        """What a dot product is multiplied by to be a base-2 score."""
        return self.scale * LOG2_E

    @property
    def sums(self) -> str:
        """The type of scores, statistics and accumulators."""
        return "f64" if self["q"].dtype == "f64" else "f32"

    def problem(self) -> AttentionProblem:
        direction: Direction = "forward" if self.name == "online_attention" else "backward"
        return AttentionProblem(
            self.batch, self.heads, self.kv_heads, self.queries, self.keys, self.dim, self.value_dim, self["q"].dtype,
            self.causal, direction, self.tf32,
        )  # fmt: skip


def is_attention(op: ir.Operation) -> bool:
    return op.name.removeprefix("nova.") in TENSORS


def attention_ops(kernel: ir.OpView) -> list[ir.Operation]:
    """The attention ops of a kernel function, in order."""
    name = ir.StringAttr(kernel.operation.attributes["sym_name"]).value
    block = kernel.operation.regions[0].blocks[0]
    ops = [op.operation for op in block.operations if is_attention(op.operation)]
    if not ops:
        raise CompileError(f"kernel @{name} has no attention op")
    return ops


def read_op(op: ir.Operation) -> Attention:
    """The data of an attention op whose operands are arguments of its function."""
    name = op.name.removeprefix("nova.")
    reads, writes = TENSORS[name]
    accesses = {}
    for tensor, operand in zip((*reads, *writes), op.operands, strict=True):
        access = attribute_value(op.attributes[f"{tensor}_access"])
        if access:
            operand = _destination(operand)
            element = ir.RankedTensorType(operand.type).element_type
            accesses[tensor] = Access(operand.arg_number, element, access[0], tuple(access[1:]))
    sizes = attribute_value(op.attributes["sizes"])
    batch, heads, kv_heads, queries, keys, dim, value_dim = sizes
    return Attention(
        name, batch, heads, kv_heads, queries, keys, dim, value_dim,
        causal=attribute_value(op.attributes["causal"]),
        scale=attribute_value(op.attributes["scale"]),
        dropout_p=attribute_value(op.attributes["dropout_p"]),
        stream=attribute_value(op.attributes["stream"]),
        accesses=accesses,
        tf32="nova.tf32" in op.attributes or _of_kernel(op, "nova.tf32"),
    )  # fmt: skip


def _of_kernel(op: ir.Operation, name: str) -> bool:
    """Whether the function around an op carries a unit attribute."""
    parent = op.parent
    return parent is not None and name in parent.operation.attributes


def _destination(value: ir.Value) -> ir.BlockArgument:
    """The kernel argument behind a value: itself, or what the attention op before wrote into it."""
    while not isinstance(value.owner, ir.Block):
        op = value.owner
        tensors = TENSORS.get(op.name.removeprefix("nova."))
        if tensors is None:
            raise CompileError(f"an operand of attention is computed in the kernel by {op.name}")
        value = op.operands[len(tensors[0]) + ir.OpResult(value).result_number]
    return ir.BlockArgument(value)
