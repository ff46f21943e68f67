"""The plan of a step as plain data: what to call, on which bytes. JSON-able, so a warm process needs no MLIR.

    StepGraph (read from the outlined @step)  --plan_step-->  StepPlan  --step_program-->  object code

Every operand is a `Ref`: a base (an input tensor, a fresh output, the arena, ...) and a byte offset. Bases are
numbered: tensor inputs, then fresh outputs, then ARENA, CONSTANTS, SCALARS, ERRORS as the last four.

On a GPU all bases are device memory. What the step finds on the CPU (an optimizer's step counts) or leaves there is
marked `host`: single numbers travel in the block of scalars, in cells; larger tensors are copied before and after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from nova.runtime import memory
from nova.runtime.dtypes import contiguous_strides, itemsize, numel
from nova.runtime.packing import align

VERSION = 3
LARGEST = 5  # buffers that an error names
GUARDED_COPY = "guarded_copy"  # the kernel that `plan_step` adds to the plan's where it needs one
ERROR_BYTES = 32  # int64[4] a call site: flag, bad value; on a GPU: the address of slot 0's flag, 0


# ---- level 2 without MLIR: what `read_step` finds in @step


@dataclass
class GraphValue:
    """An SSA value of @step. `shape` None: a live tensor that only PyTorch calls touch, of a size that may vary."""

    shape: tuple[int, ...] | None
    dtype: str
    kind: Literal["tensor", "scalar", "seed", "constant", "temp"] = "temp"
    name: str = ""
    view_of: int | None = None
    data: bytes = b""  # constants only
    host: bool = False  # an input that lies in the CPU's memory while the step runs on a GPU

    @property
    def nbytes(self) -> int:
        return 0 if self.shape is None else numel(self.shape) * itemsize(self.dtype)


@dataclass
class GraphCall:
    """A kernel call ("kernel"), an operation left to PyTorch ("aten") or a bucket marker ("bucket")."""

    kind: Literal["kernel", "aten", "bucket"]
    target: str  # kernel symbol, ATen overload, or bucket number
    operands: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    inplace: list[tuple[int, int]] = field(default_factory=list)
    count: int | None = None  # multi_tensor kernels: number of tensors
    raises: str = ""  # "IndexError: message with {value}"; "" = the kernel never flags an error
    repeats: bool = False  # what it may flag, an earlier call has flagged
    guarded: bool = False  # on a GPU: does nothing once the step's flag is set
    template: Any = None  # aten: arguments
    source: str = ""  # the user's line, where it is wanted with every call
    where: Callable[[], str] | None = None  # finds it: reading a location takes time


@dataclass
class GraphOutput:
    value: int
    state_of: int | None = None  # value id of the input that it replaces
    strides: tuple[int, ...] | None = None
    host: bool = False  # a fresh output that eager leaves in the CPU's memory
    counts: bool = False  # the new value of a host input is the old one plus one


@dataclass
class StepGraph:
    """@step after outlining: values in definition order (arguments first), calls in program order."""

    values: list[GraphValue] = field(default_factory=list)
    calls: list[GraphCall] = field(default_factory=list)
    outputs: list[GraphOutput] = field(default_factory=list)
    name: str = "step"
    device: str = "cpu"


# ---- the plan


@dataclass(frozen=True)
class Ref:
    base: int
    offset: int = 0


@dataclass(frozen=True)
class TensorRef:
    """Bytes seen as a dense tensor, or the live tensor number `live`."""

    shape: tuple[int, ...]
    dtype: str
    ref: Ref | None = None
    live: int | None = None


@dataclass(frozen=True)
class KernelCall:
    """`kernels[kernel](slots)`: an int slot is a literal, a Ref is an address."""

    kernel: int
    symbol: str
    slots: tuple[int | Ref, ...]
    raises: str = ""
    source: str = ""
    table: bool = False  # on a GPU: slots[0] is where slots[1:] are copied to before the launch, its only parameter


@dataclass(frozen=True)
class AtenCall:
    target: str
    template: Any
    operands: tuple[TensorRef, ...]
    results: tuple[TensorRef, ...]
    source: str = ""
    release: tuple[int, ...] = ()  # live tensors that nothing reads after this call


@dataclass(frozen=True)
class BucketReady:
    bucket: int


@dataclass(frozen=True)
class CopyBytes:
    target: Ref
    source: Ref
    nbytes: int


Item = KernelCall | AtenCall | BucketReady | CopyBytes


@dataclass(frozen=True)
class TensorInput:
    name: str
    shape: tuple[int, ...]
    dtype: str
    host: bool = False  # in the CPU's memory
    written: bool = False  # the step gives it new contents


@dataclass(frozen=True)
class HostCell:
    """A single number in the CPU's memory, input `input`, and its place in the block of scalars.

    `update`: "" it is read only; "count" the host adds one; "fetch" the step waits for the new value.
    """

    input: int
    offset: int
    dtype: str
    update: Literal["", "count", "fetch"] = ""


@dataclass(frozen=True)
class FreshOutput:
    """A fresh tensor. `dense`: the step leaves dense bytes there, and they are copied out to `strides`;
    `live`: it is that live tensor itself."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    dense: Ref | None = None
    live: int | None = None
    host: bool = False  # moved to the CPU's memory after the step


@dataclass
class StepPlan:
    name: str
    inputs: list[TensorInput] = field(default_factory=list)
    scalars: int = 0
    seeded: bool = False
    outputs: list[FreshOutput] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)  # one name a distinct kernel object, for reading only
    items: list[Item] = field(default_factory=list)
    arena_bytes: int = 0
    constant_bytes: int = 0
    error_slots: int = 1  # slot 0 is shared by kernels that never flag; on a GPU its flag is the whole step's
    report: dict[str, Any] = field(default_factory=dict)  # memory plan figures, for `explain`
    device: str = "cpu"
    cells: list[HostCell] = field(default_factory=list)
    staged_bytes: int = 0  # the part of the block of scalars that the host fills: numbers, seed, cells
    block_bytes: int = 0  # with the tables of kernels over lists of tensors

    # base numbers
    @property
    def arena(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def constants(self) -> int:
        return self.arena + 1

    @property
    def scalar_block(self) -> int:
        return self.arena + 2

    @property
    def errors(self) -> int:
        return self.arena + 3

    @property
    def bases(self) -> int:
        return self.arena + 4

    @property
    def aten_calls(self) -> list[AtenCall]:
        return [item for item in self.items if isinstance(item, AtenCall)]

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **_encode(self)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> StepPlan:
        if data.get("version") != VERSION:
            raise ValueError(f"step plan of version {data.get('version')}, expected {VERSION}")
        return StepPlan(
            name=data["name"],
            inputs=[
                TensorInput(i["name"], tuple(i["shape"]), i["dtype"], i["host"], i["written"]) for i in data["inputs"]
            ],
            scalars=data["scalars"],
            seeded=data["seeded"],
            outputs=[
                FreshOutput(tuple(o["shape"]), o["dtype"], tuple(o["strides"]), _ref(o["dense"]), o["live"], o["host"])
                for o in data["outputs"]
            ],
            kernels=list(data["kernels"]),
            items=[_item(item) for item in data["items"]],
            arena_bytes=data["arena_bytes"],
            constant_bytes=data["constant_bytes"],
            error_slots=data["error_slots"],
            report=data["report"],
            device=data["device"],
            cells=[HostCell(c["input"], c["offset"], c["dtype"], c["update"]) for c in data["cells"]],
            staged_bytes=data["staged_bytes"],
            block_bytes=data["block_bytes"],
        )


def _encode(value: Any) -> Any:
    """Dataclasses to JSON: a Ref is [base, offset], an item carries its class name."""
    if isinstance(value, Ref):
        return [value.base, value.offset]
    if dataclasses.is_dataclass(value):
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"item": type(value).__name__, **fields} if isinstance(value, Item) else fields
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    return value


def _ref(data: list[int] | None) -> Ref | None:
    return None if data is None else Ref(*data)


def _tensor_ref(data: dict[str, Any]) -> TensorRef:
    return TensorRef(tuple(data["shape"]), data["dtype"], _ref(data["ref"]), data["live"])


def _item(data: dict[str, Any]) -> Item:
    match data["item"]:
        case "KernelCall":
            slots = tuple(Ref(*s) if isinstance(s, list) else s for s in data["slots"])
            return KernelCall(data["kernel"], data["symbol"], slots, data["raises"], data["source"], data["table"])
        case "AtenCall":
            operands, results = (tuple(map(_tensor_ref, data[k])) for k in ("operands", "results"))
            return AtenCall(data["target"], data["template"], operands, results, data["source"], tuple(data["release"]))
        case "BucketReady":
            return BucketReady(data["bucket"])
        case "CopyBytes":
            return CopyBytes(Ref(*data["target"]), Ref(*data["source"]), data["nbytes"])
    raise ValueError(f"unknown item {data['item']!r} in a step plan")


# ---- planning


def plan_step(
    graph: StepGraph, kernels: dict[str, tuple[int, int]], names: list[str], reorder: bool = False
) -> tuple[StepPlan, bytes, memory.MemoryPlan]:
    """Plans memory and resolves every operand to a Ref.

    `kernels`: callee symbol -> (kernel number, workspace bytes); `names`: one name a kernel number. `reorder`: call
    in an order with a lower peak, where one is found. Returns the plan, the bytes of the constants block, and the
    memory plan (for printing).
    """
    planner = _StepPlanner(graph, kernels, names)
    # Buckets are ready in program order; who reads live tensors is invisible to the memory planner.
    fixed = any(
        call.kind == "bucket" or any(graph.values[v].shape is None for v in call.operands) for call in graph.calls
    )
    if reorder and not fixed:
        planner = _StepPlanner(planner.reordered(), kernels, names)
    return planner.run()


class _StepPlanner:
    def __init__(self, graph: StepGraph, kernels: dict[str, tuple[int, int]], names: list[str]):
        self.graph, self.kernels = graph, kernels
        self.plan = StepPlan(graph.name, kernels=list(names), device=graph.device)
        self.constants = bytearray()
        finding = [t for t, call in enumerate(graph.calls) if call.raises and not call.repeats]
        self.guarded = graph.device != "cpu" and bool(finding)  # state is written only where no error was found
        self.checked = max(finding, default=0)  # the last call that may find one
        self.live: dict[int, int] = {}  # value -> live tensor number
        self.bound: dict[int, Ref] = {}  # values outside the planner's arena: inputs, scalars, constants
        self.error_slot = 1

    def run(self) -> tuple[StepPlan, bytes, memory.MemoryPlan]:
        graph, plan = self.graph, self.plan
        written = {output.state_of for output in graph.outputs}
        for index, value in enumerate(graph.values):
            if value.shape is None:
                self.live[index] = len(self.live)
            elif value.kind == "tensor":
                self.bound[index] = Ref(len(plan.inputs))
                plan.inputs.append(TensorInput(value.name, value.shape, value.dtype, value.host, index in written))
        fresh = [output for output in graph.outputs if output.state_of is None]
        for output in fresh:
            value = graph.values[output.value]
            shape = value.shape or ()
            strides = output.strides or contiguous_strides(shape)
            live = self.live.get(output.value)
            plan.outputs.append(FreshOutput(shape, value.dtype, tuple(strides), live=live, host=output.host))
        self._scalars()
        self._cells()
        self._place_constants()
        laid_out = self._memory(fresh)
        self._items(laid_out)
        plan.constant_bytes = len(self.constants)
        plan.error_slots = self.error_slot
        plan.arena_bytes = laid_out.arena_bytes
        plan.report = {
            "arena_bytes": laid_out.arena_bytes,
            "lower_bound": laid_out.lower_bound,
            "naive_bytes": laid_out.naive_bytes,
            "state_bytes": sum(numel(i.shape) * itemsize(i.dtype) for i in plan.inputs),
            "in_place": len(laid_out.shared),
            "donated": len(laid_out.donated),
            "copies": [f"{copy.reason} ({copy.nbytes:,} B)" for copy in laid_out.copies_before + laid_out.copies_after],
            "slots": [list(slot) for slot in laid_out.slots],
            "largest": [self._described(slot) for slot in sorted(laid_out.slots, key=lambda slot: -slot[4])[:LARGEST]],
        }
        return plan, bytes(self.constants), laid_out

    def _described(self, slot: tuple[str, int, int, int, int]) -> str:
        """A buffer of the arena for a reader: "1,204,224 B  f32[8, 1024, 147] of matmul_0 (train.py, line 7: ...)"."""
        name, start, _, _, nbytes = slot
        if not 0 <= start < len(self.graph.calls):
            return f"{nbytes:,} B  {name}"
        call = self.graph.calls[start]
        values = [v for r in call.results if (v := self.graph.values[r]).shape is not None and v.nbytes == nbytes]
        what = f"{values[0].dtype}{list(values[0].shape or ())} of {name}" if values else name
        source = call.source or (call.where() if call.where is not None else "")
        return f"{nbytes:,} B  {what}" + (f" ({source})" if source else "")

    def _scalars(self) -> None:
        """Traced numbers share one block: scalars in order, then the seed."""
        for index, value in enumerate(self.graph.values):
            if value.kind == "scalar":
                self.bound[index] = Ref(self.plan.scalar_block, 8 * self.plan.scalars)
                self.plan.scalars += 1
        for index, value in enumerate(self.graph.values):
            if value.kind == "seed":
                self.bound[index] = Ref(self.plan.scalar_block, 8 * self.plan.scalars)
                self.plan.seeded = True

    def _cells(self) -> None:
        """Places for single numbers in the CPU's memory, after the scalars and the seed."""
        plan = self.plan
        offset = 8 * (plan.scalars + plan.seeded)
        updates = {o.state_of: "count" if o.counts else "fetch" for o in self.graph.outputs if o.state_of is not None}
        for index, value in enumerate(self.graph.values):
            if value.kind == "tensor" and value.host and _is_cell(value):
                update: Any = updates.get(index, "")
                plan.cells.append(HostCell(self.bound[index].base, offset, value.dtype, update))
                self.bound[index] = Ref(plan.scalar_block, offset)
                offset += 8
        plan.staged_bytes = plan.block_bytes = offset

    def _constant(self, data: bytes) -> Ref:
        self.constants += b"\0" * (align(len(self.constants)) - len(self.constants))
        offset = len(self.constants)
        self.constants += data
        return Ref(self.plan.constants, offset)

    def _place_constants(self) -> None:
        for index, value in enumerate(self.graph.values):
            if value.kind == "constant" and value.view_of is None:
                if len(value.data) != value.nbytes:
                    raise ValueError(f"constant {index} has {len(value.data)} bytes of data, not {value.nbytes}")
                self.bound[index] = self._constant(value.data)

    def reordered(self) -> StepGraph:
        graph = self.graph
        outputs = [memory.Output(output.value, output.state_of) for output in graph.outputs]
        order = memory.reorder(self._values(), self._calls(), outputs)
        calls = [dataclasses.replace(graph.calls[time], repeats=False) for time in order]  # the first may come last now
        return dataclasses.replace(graph, calls=calls)

    def _values(self) -> list[memory.Value]:
        """For the pure planner. Live values take no part: to it they are empty constants."""
        values = []
        for index, value in enumerate(self.graph.values):
            if index in self.live:
                values.append(memory.Value(0, "constant"))
            elif value.kind == "temp":
                values.append(memory.Value(value.nbytes, "temp", value.view_of, value.name))
            else:
                kind: Literal["input", "constant"] = "input" if value.kind == "tensor" else "constant"
                values.append(memory.Value(value.nbytes, kind, value.view_of, value.name))
        return values

    def _calls(self) -> list[memory.Call]:
        calls = []
        for time, call in enumerate(self.graph.calls):
            operands = tuple(v for v in call.operands if v not in self.live)
            results = tuple(v for v in call.results if v not in self.live)
            workspace = self.kernels[call.target][1] if call.kind == "kernel" else 0
            made = memory.Call(
                operands, results, tuple(call.inplace), workspace, call.target, self._writes_state(time, call)
            )
            calls.append(made)
        return calls

    def _writes_state(self, time: int, call: GraphCall) -> bool:
        """Whether a call may write lifted state in place: if it does nothing once the step has found an error, and
        comes after everything that may find one."""
        return not self.guarded or (call.guarded and time > self.checked)

    def _memory(self, fresh: list[GraphOutput]) -> memory.MemoryPlan:
        state = [output for output in self.graph.outputs if output.state_of is not None]
        outputs = []
        for spec, output in zip(self.plan.outputs, fresh, strict=True):
            gathered = spec.live is not None or spec.strides != contiguous_strides(spec.shape)
            outputs.append(memory.Output(output.value, None, gathered))
        outputs += [memory.Output(output.value, output.state_of) for output in state]
        return memory.plan(self._values(), self._calls(), outputs)

    def _resolve(self, place: memory.Place) -> Ref:
        if place.segment == "arena":
            return Ref(self.plan.arena, place.offset)
        if place.segment == "output":
            return Ref(len(self.plan.inputs) + place.index)
        return self.bound[place.index]

    def _items(self, laid_out: memory.MemoryPlan) -> None:
        items, plan = self.plan.items, self.plan
        refs = [self._resolve(place) if i not in self.live else None for i, place in enumerate(laid_out.places)]
        last_read = {v: t for t, call in enumerate(self.graph.calls) for v in (*call.results, *call.operands)}
        kept = {output.value for output in self.graph.outputs}

        def copies(pending: list[memory.Copy]) -> None:
            guarded = [copy for copy in pending if self.guarded and copy.target.segment == "input"]
            for copy in pending:
                if copy not in guarded:
                    items.append(CopyBytes(self._resolve(copy.target), self._resolve(copy.source), copy.nbytes))
            if guarded:
                items.append(self._guarded_copies(guarded))

        def tensor(index: int) -> TensorRef:
            value = self.graph.values[index]
            return TensorRef(value.shape or (), value.dtype, refs[index], self.live.get(index))

        copies(laid_out.copies_before)
        for time, call in enumerate(self.graph.calls):
            if call.kind == "kernel":
                items.append(self._kernel(call, refs, laid_out.workspaces[time]))
            elif call.kind == "bucket":
                items.append(BucketReady(int(call.target)))
            else:
                dead = [v for v in {*call.operands, *call.results} if v in self.live and last_read[v] == time]
                operands, results = tuple(map(tensor, call.operands)), tuple(map(tensor, call.results))
                release = tuple(sorted(self.live[v] for v in dead if v not in kept))
                items.append(AtenCall(call.target, call.template, operands, results, call.source, release))
        copies(laid_out.copies_after)
        for position, place in laid_out.strided.items():
            if plan.outputs[position].live is None:
                plan.outputs[position] = dataclasses.replace(plan.outputs[position], dense=self._resolve(place))

    def _kernel(self, call: GraphCall, refs: list[Ref | None], workspace: memory.Place | None) -> KernelCall:
        slots: list[int | Ref] = []
        if call.count is not None:
            counts = [numel(self.graph.values[v].shape or ()) for v in call.operands[: call.count]]
            table = self._constant(b"".join(n.to_bytes(8, "little") for n in counts))
            slots += [call.count, table]
        for value in (*call.operands, *call.results):
            ref = refs[value]
            if ref is None:
                raise ValueError(f"kernel {call.target} uses value {value}, whose size depends on data")
            slots.append(ref)
        slots.append(self._resolve(workspace) if workspace is not None else 0)
        slot, raises = 0, call.raises
        if call.repeats and self.guarded:
            raises = ""  # the earlier call says it; this one may be guarded, by the step's flag in slot 0
        if raises:
            slot, self.error_slot = self.error_slot, self.error_slot + 1
        slots.append(Ref(self.plan.errors, slot * ERROR_BYTES))
        by_table = call.count is not None and self.plan.device != "cpu"
        if by_table:
            self._as_table(slots)
        return KernelCall(self.kernels[call.target][0], call.target, tuple(slots), raises, call.source, by_table)

    def _as_table(self, slots: list[int | Ref]) -> None:
        """The words of a table go to the block of scalars, and its place comes before them."""
        start = align(self.plan.block_bytes)
        self.plan.block_bytes = start + 8 * len(slots)
        slots.insert(0, Ref(self.plan.scalar_block, start))

    def _guarded_copies(self, copies: list[memory.Copy]) -> KernelCall:
        """New state into its place by one launch (nova/tile/guarded_copy.py), whose kernel comes after all others."""
        slots: list[int | Ref] = [len(copies), Ref(self.plan.errors)]
        for copy in copies:
            slots += [self._resolve(copy.target), self._resolve(copy.source), copy.nbytes]
        self._as_table(slots)
        self.plan.kernels.append(GUARDED_COPY)
        return KernelCall(len(self.plan.kernels) - 1, GUARDED_COPY, tuple(slots), table=True)


def _is_cell(value: GraphValue) -> bool:
    return value.shape is not None and numel(value.shape) == 1 and value.nbytes <= 8
