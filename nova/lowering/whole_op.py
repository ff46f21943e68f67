"""A kernel function whose body is one nova op on the function's own arguments, as plain data (kinds scatter, scan)."""

from __future__ import annotations

from dataclasses import dataclass

from nova.errors import CompileError
from nova.lowering import lanes as ln
from nova.mlir import int_array, ir


@dataclass
class WholeOp:
    function: str
    name: str
    types: list[ir.Type]  # of the function's arguments
    operands: list[int]  # argument positions
    results: list[int]
    attributes: ir.OpAttributeMap
    aliased: list[int]
    raises: bool

    @staticmethod
    def read(func_op: ir.OpView) -> WholeOp:
        """Reads `%r = nova.op(%args) ...; return %r`."""
        operation = func_op.operation
        block = operation.regions[0].blocks[0]
        body = [view.operation for view in block.operations]
        name = ir.StringAttr(operation.attributes["sym_name"]).value
        if len(body) != 2 or not body[0].name.startswith("nova.") or list(body[1].operands) != list(body[0].results):
            raise CompileError(f"kernel @{name}: expected one nova op and its return, got {[op.name for op in body]}")
        op = body[0]
        arguments = list(block.arguments)
        first_output = len(arguments) - len(op.results)
        pairs = ir.ArrayAttr(operation.attributes["nova.inplace"]) if "nova.inplace" in operation.attributes else ()
        aliased = sorted({p for pair in map(int_array, pairs) for p in (pair[0], first_output + pair[1])})
        return WholeOp(
            name, op.name, [a.type for a in arguments], [arguments.index(v) for v in op.operands],
            list(range(first_output, len(arguments))), op.attributes, aliased, "nova.raises" in operation.attributes,
        )  # fmt: skip

    def shape(self, operand: int) -> list[int]:
        return list(ir.RankedTensorType(self.types[self.operands[operand]]).shape)

    def element(self, operand: int) -> ir.Type:
        return ln.register_type(ir.RankedTensorType(self.types[self.operands[operand]]).element_type)

    def result_shape(self, result: int = 0) -> list[int]:
        return list(ir.RankedTensorType(self.types[self.results[result]]).shape)

    def integer(self, name: str) -> int:
        return ir.IntegerAttr(self.attributes[name]).value

    def integers(self, name: str) -> list[int]:
        return int_array(self.attributes[name])

    def text(self, name: str) -> str:
        return ir.StringAttr(self.attributes[name]).value

    def flag(self, name: str) -> bool:
        return ir.BoolAttr(self.attributes[name]).value
