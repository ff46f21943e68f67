"""Pass `lower-attention`: attention kernels get their layouts absorbed and become online (one-pass) attention.

A kernel function reaches this pass as the graph had it: views that cut heads out of a packed buffer, attention, views
that put the heads back. The views are composed into one affine access per operand, and disappear:

    %q = nova.slice %qkv, %q4 = nova.reshape %q, %qt = nova.transpose %q4     (B,T,3C) -> (B,H,T,D), three times
    %o, %l = nova.attention(%qt, %kt, %vt)
    %ot = nova.transpose %o, %y = nova.reshape %ot                            (B,H,T,D) -> (B,T,C)
    return %y, %l
  ->
    %y, %l = nova.online_attention(%qkv, %qkv, %qkv, .., %into_y, %into_l)
        {q_access = [0, T*3C, D, 3C, 1], .., out_access = [0, T*C, D, C, 1], ..}

This must run before nova-to-linalg, which has no pattern for attention: the softmax between two contractions is more
than elementwise fusion may cross. Backward becomes one op, or a query half and a key half where a whole head per task
would leave cores idle (GPUs: always), and one more op for the gradient of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nova.dialect.attention import TENSORS
from nova.dialect.base import attribute_value
from nova.dialect.types import Shape, describe
from nova.errors import CompileError
from nova.mlir import context, func, ir
from nova.schedule import target as targets
from nova.schedule.attention import AttentionProblem, prefers_halves

VIEWS = frozenset(f"nova.{name}" for name in ("reshape", "transpose", "slice", "broadcast", "as_strided"))


@dataclass(frozen=True)
class View:
    """A strided view of a whole row-major buffer; `root` identifies the buffer."""

    root: Any
    shape: Shape
    offset: int
    strides: tuple[int, ...]

    def access(self) -> list[int]:
        return [self.offset, *self.strides]


def dense_strides(shape: Shape) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def reshaped_strides(shape: Shape, strides: Sequence[int], new_shape: Shape) -> tuple[int, ...] | None:
    """Strides that make `new_shape` a view of (shape, strides), or None where elements would have to move."""
    if 0 in shape or 0 in new_shape:
        return dense_strides(new_shape)
    # runs of dims that are contiguous among themselves, innermost first: [elements, innermost stride]
    runs: list[list[int]] = []
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1][0] *= size
        else:
            runs.append([size, stride])
    result, run, used = [], 0, 1
    for size in reversed(new_shape):
        if size == 1:
            result.append(0)
            continue
        if run < len(runs) and used == runs[run][0]:
            run, used = run + 1, 1
        if run == len(runs) or runs[run][0] % (used * size):
            return None
        result.append(runs[run][1] * used)
        used *= size
    return tuple(reversed(result))


def read_view(value: ir.Value) -> View:
    """How `value` is read from the function argument it is a view of."""
    shape = describe(value.type).shape
    owner = value.owner
    if isinstance(owner, ir.Block):
        return View(value, shape, 0, dense_strides(shape))
    attributes = {key: attribute_value(owner.attributes[key]) for key in owner.attributes}
    if owner.name not in VIEWS:
        raise CompileError(f"lower-attention: an operand of attention is computed in the kernel by {owner.name}")
    base = read_view(owner.operands[0])
    if owner.name == "nova.transpose":
        strides = tuple(base.strides[axis] for axis in attributes["permutation"])
        return View(base.root, shape, base.offset, strides)
    if owner.name == "nova.slice":
        starts, steps = attributes["starts"], attributes["strides"]
        offset = base.offset + sum(start * s for start, s in zip(starts, base.strides, strict=True))
        return View(base.root, shape, offset, tuple(s * n for s, n in zip(base.strides, steps, strict=True)))
    if owner.name == "nova.broadcast":
        repeated = [0] * len(shape)
        for axis, dim in enumerate(attributes["dims"]):
            repeated[dim] = base.strides[axis] if base.shape[axis] == shape[dim] else 0
        return View(base.root, shape, base.offset, tuple(repeated))
    if owner.name == "nova.as_strided":
        if (base.offset, base.strides) != (0, dense_strides(base.shape)):
            raise CompileError("lower-attention: as_strided of a view")
        return View(base.root, shape, attributes["offset"], tuple(attributes["stride"]))
    split = reshaped_strides(base.shape, base.strides, shape)
    if split is None:
        raise CompileError(f"lower-attention: reshape of {list(base.shape)} to {list(shape)} is no view")
    return View(base.root, shape, base.offset, split)


def written_views(returned: ir.Value, result: int) -> Iterator[tuple[ir.Value, View]]:
    """The values that the returned tensor number `result` is assembled from, each with its place in that tensor."""
    shape = describe(returned.type).shape
    pending = [(returned, View(result, shape, 0, dense_strides(shape)))]
    while pending:
        value, view = pending.pop()
        owner = value.owner
        name = "" if isinstance(owner, ir.Block) else owner.name
        if name == "nova.transpose":
            strides = [0] * len(view.shape)
            for axis, source in enumerate(attribute_value(owner.attributes["permutation"])):
                strides[source] = view.strides[axis]
            source_shape = describe(owner.operands[0].type).shape
            pending.append((owner.operands[0], View(result, source_shape, view.offset, tuple(strides))))
        elif name == "nova.reshape":
            source_shape = describe(owner.operands[0].type).shape
            split = reshaped_strides(view.shape, view.strides, source_shape)
            if split is None:
                raise CompileError(f"lower-attention: result reshape {owner} is no view")
            pending.append((owner.operands[0], View(result, source_shape, view.offset, split)))
        elif name == "nova.concat":
            dim, position = attribute_value(owner.attributes["dim"]), 0
            for part in owner.operands:
                part_shape = describe(part.type).shape
                offset = view.offset + position * view.strides[dim]
                pending.append((part, View(result, part_shape, offset, view.strides)))
                position += part_shape[dim]
        else:
            yield value, view


def run(module: ir.Module, options: Any = None) -> ir.Module:
    """Rewrites every function that holds an attention op, in place."""
    target = options if isinstance(options, targets.Target) else getattr(options, "target", None)
    target = target or targets.by_name("zen3")
    with context(), ir.Location.unknown():
        for function in list(_functions(module.operation)):
            blocks = function.regions[0].blocks
            ops = [op.operation for op in blocks[0].operations] if len(blocks) else []
            attention = [op for op in ops if op.name in ("nova.attention", "nova.attention_backward")]
            if len(attention) > 1:
                raise CompileError(f"lower-attention: {len(attention)} attention ops in one kernel")
            if attention and not _is_step(function):
                _lower(function, attention[0], ops[-1], target)
    return module


def _functions(parent: ir.Operation) -> Iterator[ir.Operation]:
    for region in parent.regions:
        for block in region.blocks:
            for op in block.operations:
                if op.operation.name == "func.func":
                    yield op.operation
                elif op.operation.name == "builtin.module":
                    yield from _functions(op.operation)


def _is_step(function: ir.Operation) -> bool:
    return "sym_visibility" not in function.attributes


def _lower(function: ir.Operation, op: ir.Operation, terminator: ir.Operation, target: targets.Target) -> None:
    """Builds the destination-passing kernel in front of `function` and erases it."""
    block = function.regions[0].blocks[0]
    flags = {key: attribute_value(op.attributes[key]) for key in ("causal", "scale", "dropout_p", "stream")}
    flags["tf32"] = "nova.tf32" in op.attributes
    backward = op.name == "nova.attention_backward"
    names = ("dout", "q", "k", "v", "out", "lse") if backward else ("q", "k", "v")
    reads = dict(zip(names, (read_view(v) for v in list(op.operands)[: len(names)]), strict=True))
    shapes = [reads[name].shape for name in ("q", "k", "v")]
    (batch, heads, rows, dim), (_, kv_heads, keys, _), value_dim = shapes[0], shapes[1], shapes[2][3]
    extra = list(op.operands)[len(names) :]
    if attribute_value(op.attributes["has_mask"]):
        reads["mask"] = _broadcast(read_view(extra.pop(0)), (batch, heads, rows, keys))
    if attribute_value(op.attributes["has_seed"]):
        reads["seed"] = read_view(extra.pop(0))
    produced = ("dq", "dk", "dv", "dmask") if backward else ("out", "lse")
    writes = _writes(op, terminator, produced)
    if "dmask" in writes:
        writes["dmask"] = _broadcast(writes["dmask"], (batch, heads, rows, keys))

    problem = AttentionProblem(
        batch, heads, kv_heads, rows, keys, dim, value_dim, describe(op.operands[1].type).dtype, flags["causal"],
        "backward" if backward else "forward",
    )  # fmt: skip
    kind = "attention_backward" if backward else "attention_forward"
    sizes = [batch, heads, kv_heads, rows, keys, dim, value_dim]
    with ir.InsertionPoint(function):
        new, inputs, outputs = _signature(function, block, terminator, kind)
    with ir.InsertionPoint(new.regions[0].blocks[0]):
        for name in _ops(writes, backward, prefers_halves(problem, target)):
            _emit(name, reads, writes, dict(zip(block.arguments, inputs, strict=False)), outputs, sizes, flags)
        func.ReturnOp(outputs)
    function.erase()


def _writes(op: ir.Operation, terminator: ir.Operation, produced: Sequence[str]) -> dict[str, View]:
    """Where each result of the op goes; results nobody returns are absent."""
    writes: dict[str, View] = {}
    results = dict(zip(op.results, produced, strict=False))
    for number, returned in enumerate(terminator.operands):
        for value, view in written_views(returned, number):
            name = results.get(value)
            if name is None:
                raise CompileError(f"lower-attention: a returned value is not a view of attention's results: {value}")
            if name in writes:
                raise CompileError(f"lower-attention: {name} is returned twice")
            writes[name] = view
    return writes


def _broadcast(view: View, full: Shape) -> View:
    """The view with the missing and one-sized dims of `full` repeated by stride 0."""
    lead = len(full) - len(view.shape)
    strides = [0] * lead + [s if n > 1 else 0 for n, s in zip(view.shape, view.strides, strict=True)]
    return View(view.root, full, view.offset, tuple(strides))


def _ops(writes: dict[str, View], backward: bool, halves: bool) -> list[str]:
    """The online ops that produce `writes`."""
    if not backward:
        return ["online_attention"]
    query, key = "dq" in writes, "dk" in writes or "dv" in writes
    names = []
    if query and key and not halves:
        names.append("online_attention_backward")
    else:
        names += ["online_attention_backward_query"] * query + ["online_attention_backward_key"] * key
    return names + ["online_attention_backward_mask"] * ("dmask" in writes)


def _signature(
    function: ir.Operation, block: ir.Block, terminator: ir.Operation, kind: str
) -> tuple[ir.Operation, list[ir.Value], list[ir.Value]]:
    """The new function: the old arguments, then a destination for each result."""
    attributes = {key: function.attributes[key] for key in function.attributes}
    results = [value.type for value in terminator.operands]
    inputs = [argument.type for argument in block.arguments]
    old_attributes = list(attributes.pop("arg_attrs", [ir.DictAttr.get({})] * len(inputs)))
    destination = ir.DictAttr.get({"nova.out": ir.UnitAttr.get()})
    attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get([*inputs, *results], results))
    attributes["arg_attrs"] = ir.ArrayAttr.get([*old_attributes, *([destination] * len(results))])
    attributes["nova.kernel"] = ir.StringAttr.get(kind)
    new = ir.Operation.create("func.func", attributes=attributes, regions=1, loc=function.location)
    arguments = new.regions[0].blocks.append(*inputs, *results).arguments
    return new, list(arguments)[: len(inputs)], list(arguments)[len(inputs) :]


def _emit(
    name: str,
    reads: dict[str, View],
    writes: dict[str, View],
    arguments: dict[ir.Value, ir.Value],
    outputs: list[ir.Value],
    sizes: list[int],
    flags: dict[str, Any],
) -> None:
    """One online op; `outputs` is updated to the destinations' new contents."""
    read_names, write_names = TENSORS[name]
    operands, attributes = [], {}
    filler = next(iter(arguments.values()))  # what stands for an absent tensor
    for tensor in (*read_names, *write_names):
        view = (writes if tensor in write_names else reads).get(tensor)
        attributes[f"{tensor}_access"] = ir.DenseI64ArrayAttr.get(view.access() if view else [])
        if view is None:
            operands.append(filler)
        else:
            operands.append(outputs[view.root] if tensor in write_names else arguments[view.root])
    attributes["sizes"] = ir.DenseI64ArrayAttr.get(sizes)
    attributes["causal"] = ir.BoolAttr.get(flags["causal"])
    for key in ("scale", "dropout_p"):
        attributes[key] = ir.FloatAttr.get(ir.F64Type.get(), flags[key])
    attributes["stream"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), flags["stream"])
    if flags["tf32"]:
        attributes["nova.tf32"] = ir.UnitAttr.get()
    types = [operand.type for operand in operands[len(read_names) :]]
    op = ir.Operation.create(f"nova.{name}", results=types, operands=operands, attributes=attributes)
    for tensor, result in zip(write_names, op.results, strict=True):
        if tensor in writes:
            outputs[writes[tensor].root] = result
