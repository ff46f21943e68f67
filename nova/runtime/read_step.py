"""Reads the outlined level-2 @step into a `StepGraph`: the last time that the step is MLIR.

func.func private @layer_norm_0(tensor<..>, ..) -> tensor<..> attributes {nova.inplace = [[0, 0]], ..}
func.func @step(%w: tensor<..> {nova.role = "param", nova.donates = 0}, ..) -> (tensor<..>, ..) {
  %0 = func.call @layer_norm_0(%x, %w) ..      kernel call
  %1 = nova.reshape %0                          the same bytes
  %2 = nova.aten_call %1 {op, args}             through PyTorch
  return %3, %4
}
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nova.errors import CompileError, SourceLine
from nova.mlir import ir
from nova.runtime.dtypes import FROM_MLIR, contiguous_strides
from nova.runtime.step_plan import GraphCall, GraphOutput, GraphValue, StepGraph

_FILE = re.compile(r'"([^"]+)":(\d+):\d+')
_MODULE = re.compile(r'loc\("([^"]*)"\(')


def source_of(location: Any) -> str:
    """The user's line of an MLIR location, "" if it has none."""
    text = str(location)
    found = _FILE.search(text)
    if found is None:
        return ""
    module = _MODULE.match(text)
    return str(SourceLine(found[1], int(found[2]), module=module[1] if module else ""))


class _Types:
    """MLIR tensor type -> (shape or None where a size depends on data, short dtype); each type is read once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[tuple[int, ...] | None, str]] = {}

    def __getitem__(self, type_: Any) -> tuple[tuple[int, ...] | None, str]:
        if type_ not in self._known:
            if not isinstance(type_, ir.RankedTensorType):
                raise CompileError(f"a value of @step has type {type_}, not a ranked tensor")
            shape = tuple(type_.shape) if type_.has_static_shape else None
            self._known[type_] = (shape, FROM_MLIR[str(type_.element_type)])
        return self._known[type_]


def dense_bytes(attribute: Any, dtype: str, count: int) -> bytes:
    """The elements of a dense attribute as they lie in memory."""
    if count == 0:
        return b""
    if dtype == "bf16":  # the bindings cannot read bf16 arrays; constants of the step are splats
        if not attribute.is_splat:
            raise CompileError("a constant of @step is a bf16 tensor of different values")
        bits = np.float32(attribute.get_splat_value().value).view(np.uint32)
        rounded = (int(bits) + 0x7FFF + ((int(bits) >> 16) & 1)) >> 16  # to nearest even; bf16 values are exact
        return rounded.to_bytes(2, "little") * count
    return np.ascontiguousarray(np.array(attribute)).tobytes()


def _find_step(module: Any) -> tuple[Any, dict[str, Any]]:
    """@step (the public function with a body) and the declarations of its kernels by symbol.

    Kernel bodies lie in a nested module of their own and are not looked at.
    """
    functions: dict[str, Any] = {}
    steps = []
    for op in module.body:
        if op.operation.name != "func.func":
            continue
        functions[ir.StringAttr(op.attributes["sym_name"]).value] = op
        private = _text(op.attributes, "sym_visibility") == "private"
        if not private and len(op.regions[0].blocks) > 0 and "nova.kernel" not in op.attributes:
            steps.append(op)
    if len(steps) != 1:
        raise CompileError(f"expected one step function, found {len(steps)}")
    return steps[0], functions


def _dictionaries(function: Any, name: str, count: int) -> list[Any]:
    if name not in function.attributes:
        return [{}] * count
    return list(function.attributes[name])


def _text(attributes: Any, name: str) -> str:
    return ir.StringAttr(attributes[name]).value if name in attributes else ""


def _kernel_fields(function: Any) -> dict[str, Any]:
    """What the declaration of a kernel says: in-place pairs, tensor count, error message."""
    attributes = function.attributes
    fields: dict[str, Any] = {
        "inplace": [], "raises": _text(attributes, "nova.raises"), "guarded": "nova.guarded" in attributes
    }  # fmt: skip
    if "nova.inplace" in attributes:
        fields["inplace"] = [tuple(int(getattr(i, "value", i)) for i in pair) for pair in attributes["nova.inplace"]]
    if "nova.count" in attributes:
        fields["count"] = int(ir.IntegerAttr(attributes["nova.count"]).value)
    return fields


class _Reader:
    def __init__(self, module: Any):
        self.step, self.functions = _find_step(module)
        self.graph = StepGraph(name=ir.StringAttr(self.step.attributes["sym_name"]).value)
        self.types = _Types()
        self.ids: dict[Any, int] = {}
        self.kernel_fields: dict[str, dict[str, Any]] = {}

    def define(self, value: Any, **fields: Any) -> int:
        shape, dtype = self.types[value.type]
        self.graph.values.append(GraphValue(shape, dtype, **fields))
        self.ids[value] = len(self.graph.values) - 1
        return self.ids[value]

    def run(self, signature: Any) -> StepGraph:
        block = self.step.regions[0].blocks[0]
        donates = self._arguments(block)
        returned: list[Any] = []
        for op in block:
            operation = op.operation
            if operation.name == "func.return":
                returned = list(operation.operands)
                break
            self._operation(operation)
        self._outputs(returned, donates, signature)
        _set_auxiliary_apart(self.graph)
        return self.graph

    def _arguments(self, block: Any) -> dict[int, int]:
        """Defines the arguments; returns result position -> value of the input that it replaces."""
        donates: dict[int, int] = {}
        attributes = _dictionaries(self.step, "arg_attrs", len(block.arguments))
        for argument, extra in zip(block.arguments, attributes, strict=True):
            role = _text(extra, "nova.role")
            kind = role if role in ("scalar", "seed") else "tensor"
            index = self.define(argument, kind=kind, name=_text(extra, "nova.name"))
            if "nova.donates" in extra:
                donates[int(ir.IntegerAttr(extra["nova.donates"]).value)] = index
        return donates

    def _operation(self, operation: Any) -> None:
        operands = [self.ids[value] for value in operation.operands]
        match operation.name:
            case "func.call":
                self._kernel_call(operation, operands)
            case "nova.reshape":
                self.define(operation.results[0], view_of=operands[0])
            case "nova.constant":
                value = operation.results[0]
                shape, dtype = self.types[value.type]
                count = int(np.prod(shape or (), dtype=np.int64))
                data = dense_bytes(operation.attributes["value"], dtype, count)
                self.define(value, kind="constant", data=data)
            case "nova.aten_call":
                self._aten_call(operation, operands)
            case "nova.bucket_ready":
                bucket = str(ir.IntegerAttr(operation.attributes["bucket"]).value)
                self.graph.calls.append(GraphCall("bucket", bucket, operands))
            case name:
                raise CompileError(f"@step holds {name}, which is not a kernel call (is outlining done?)")

    def _kernel_call(self, operation: Any, operands: list[int]) -> None:
        symbol = operation.attributes["callee"].value
        if symbol not in self.kernel_fields:
            if symbol not in self.functions:
                raise CompileError(f"@step calls @{symbol}, which is not declared")
            self.kernel_fields[symbol] = _kernel_fields(self.functions[symbol])
        fields = self.kernel_fields[symbol]
        results = [self.define(result, name=symbol) for result in operation.results]
        source = source_of(operation.location) if fields["raises"] else ""
        call = GraphCall("kernel", symbol, operands, results, source=source, **fields)
        call.repeats = "nova.repeats" in operation.attributes
        call.where = functools.partial(source_of, operation.location)
        self.graph.calls.append(call)

    def _aten_call(self, operation: Any, operands: list[int]) -> None:
        attributes = operation.attributes
        target = _text(attributes, "op").replace("::", ".")
        results = [self.define(result, name=target) for result in operation.results]
        if "nova.dynamic" in attributes:
            for index in results:
                self.graph.values[index].shape = None
        call = GraphCall("aten", target, operands, results, template=_text(attributes, "args"))
        call.source = source_of(operation.location)
        self.graph.calls.append(call)

    def _outputs(self, returned: list[Any], donates: Mapping[int, int], signature: Any) -> None:
        attributes = _dictionaries(self.step, "res_attrs", len(returned))
        for position, (value, extra) in enumerate(zip(returned, attributes, strict=True)):
            output = GraphOutput(self.ids[value], donates.get(position))
            if output.state_of is None:
                strides = tuple(extra["nova.strides"]) if "nova.strides" in extra else None
                if signature is not None:
                    strides = signature.outputs[position].strides
                shape = self.graph.values[output.value].shape
                if strides is not None and shape is not None and tuple(strides) != contiguous_strides(shape):
                    output.strides = tuple(strides)
            self.graph.outputs.append(output)


def _set_auxiliary_apart(graph: StepGraph) -> None:
    """Auxiliary results of PyTorch's operations that no kernel reads become live tensors, whatever their shape is.

    `_embedding_bag` gives an empty `offset2bag` or a full one, depending on the strides of the weight; what `_ctc_loss`
    keeps for its derivative is as long as the longest target. What nobody reads is let go after the call.
    """
    kernels = {v for call in graph.calls if call.kind == "kernel" for v in call.operands}
    read = kernels | {output.value for output in graph.outputs} | {value.view_of for value in graph.values}
    for call in graph.calls:
        for index in call.results[1:] if call.kind == "aten" else ():
            if index not in read:
                graph.values[index].shape = None


def read_step(module: Any, signature: Any = None) -> StepGraph:
    """The step of an outlined module. `signature` (level 0) adds the strides eager gives fresh outputs."""
    return _Reader(module).run(signature)
