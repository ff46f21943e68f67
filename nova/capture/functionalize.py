"""Tensors that share memory, as values: which graph node is the present content of a tensor.

PyTorch tensors are windows on storages and change in place; graph nodes never change. This table knows, for
every storage met while a step is recorded, the node of its whole content (`base`), and every window through
which it was seen with the view operation that makes it. A write through one window makes new nodes for it
and, by the inverse view operations, for the base; other windows are read again from the base when needed.

    storage of x   base (0, (4, 6), ...) = %x          version 0
                   view (6, (6,), ...)   = select(base, 0, 1)
    x[1].add_(1)   base = select_scatter(%x, add(select(%x, 0, 1), 1), 0, 1), version 1

A storage that no recorded operation made is an input of the step: it is lifted to a placeholder. One that is
seen through overlapping or strided tensors becomes one flat placeholder that covers them all. Two storages over the
same memory (`torch.from_numpy(n)` twice) are one here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from nova.capture.signature import TensorType
from nova.capture.views import (
    DTYPE_NAMES,
    Geometry,
    ViewOp,
    aten,
    canonical_steps,
    geometry,
    is_contiguous,
    memory_order,
    span,
    write_back,
)
from nova.errors import UnsupportedError

Place = tuple[int, int, torch.device, bool]  # of memory: address, bytes, device; whether it is the user's


@functools.cache
def _device_name(device: torch.device) -> str:
    return str(device)


class View:
    """One window on a storage. `parent` is None for the base."""

    __slots__ = ("node", "op", "parent", "type", "version")

    def __init__(
        self, type_: TensorType, parent: Geometry | None, op: ViewOp | None, node: fx.Node | None, version: int
    ):
        self.type, self.parent, self.op, self.node, self.version = type_, parent, op, node, version


class Storage:
    """One piece of memory. The weak reference keeps its address from being used again."""

    __slots__ = ("backup", "base", "input", "version", "views", "weak", "written")

    def __init__(self, weak: StorageWeakRef, base: Geometry, view: View, input_: Lifted | None):
        self.weak, self.base, self.input = weak, base, input_
        self.views: dict[Geometry, View] = {base: view}
        self.version = 0
        self.written = False
        self.backup: Any = None


class Lifted:
    """A placeholder and the tensors of the user's program that it stands for."""

    __slots__ = ("flat", "members", "node", "span_offset", "tensor", "type")

    def __init__(self, tensor: Tensor, node: fx.Node, type_: TensorType, flat: bool):
        self.tensor, self.node, self.type, self.flat = tensor, node, type_, flat
        self.span_offset = 0  # of the span's start from the tensor's first element
        self.members: list[Tensor] = [tensor]

    def touch(self, t: Tensor) -> None:
        """`t` is a window on this input too: that it shares memory with the others is a fact to guard."""
        if all(member is not t for member in self.members):
            self.members.append(t)


class Values:
    """The table of storages. `emit(target, args, type)` appends a node; `lift(type)` makes a placeholder."""

    def __init__(
        self, emit: Callable[..., fx.Node], placeholder: Callable[[TensorType], fx.Node],
        on_lift: Callable[[Lifted], None], at_start: Callable[..., fx.Node],
    ):  # fmt: skip
        self.emit, self.placeholder, self.on_lift, self.at_start = emit, placeholder, on_lift, at_start
        self.storages: dict[int, Storage] = {}
        self._by_memory: dict[Place, Storage] = {}  # inputs
        self._same: list[StorageWeakRef] = []  # other storages over the memory of an input
        self.widened = 0  # how often a placeholder was replaced by a wider one
        self.opaque: dict[int, tuple[Tensor, fx.Node]] = {}  # tensors without a storage of their own (sparse)
        self.first_write: Callable[[Storage, Tensor], None] = lambda storage, t: None
        self.canonical: Callable[[Tensor], Tensor] = lambda t: t  # which tensor to lift for a storage
        self.external: Callable[[Tensor], bool] = lambda t: False  # whether a tensor is the user's
        self.ambiguous: Callable[[str], None] = lambda why: None  # this run must not be replayed

    # ---- types ----

    def type_of(self, t: Tensor) -> TensorType:
        try:
            return TensorType(tuple(t.shape), DTYPE_NAMES[t.dtype], _device_name(t.device))
        except KeyError:
            raise UnsupportedError(f"tensors of type {t.dtype} are not supported") from None

    def _view_type(self, g: Geometry, device: str) -> TensorType:
        return TensorType(g[1], DTYPE_NAMES[g[3]], device)

    # ---- reading ----

    def get(self, t: Tensor) -> Storage | None:
        return self.storages.get(t.untyped_storage()._cdata)

    def known(self, t: Tensor) -> bool:
        """Whether the step has already met this tensor's memory."""
        return id(t) in self.opaque if t.layout is not torch.strided else self.get(t) is not None

    def storage(self, t: Tensor) -> Storage:
        """The storage of a tensor, lifted when it is new."""
        found = self.storages.get(t.untyped_storage()._cdata)
        return self._lift(t) if found is None else self._touched(found, t)

    def _touched(self, storage: Storage, t: Tensor) -> Storage:
        """Notes another of the user's tensors on an input, also where its window is known (`p` and `p.data`)."""
        if storage.input is not None and t is not storage.input.tensor and self.external(t):
            storage.input.touch(t)
        return storage

    def node(self, t: Tensor) -> fx.Node:
        """The node of a tensor's present content."""
        if t.layout is not torch.strided:
            return self._opaque_node(t)
        storage, g = self.storage(t), geometry(t)
        view = storage.views.get(g) or self._alias(storage, t, g)
        if view.version == storage.version and view.node is not None:
            return view.node
        return self._read(storage, view)

    def _read(self, storage: Storage, view: View) -> fx.Node:
        """Reads a window again from its parents."""
        if view.version == storage.version and view.node is not None:
            return view.node
        assert view.parent is not None and view.op is not None
        parent = self._read(storage, storage.views[view.parent])
        view.node = self.emit(view.op.target, (parent, *view.op.args), view.type)
        view.version = storage.version
        return view.node

    def _opaque_node(self, t: Tensor) -> fx.Node:
        found = self.opaque.get(id(t))
        if found is None or found[0] is not t:
            raise UnsupportedError(
                f"a {str(t.layout).removeprefix('torch.')} tensor cannot be an input of the step; make it inside"
            )
        return found[1]

    # ---- defining ----

    def define(self, t: Tensor, node: fx.Node) -> None:
        """A tensor that an operation returned now has the value `node`."""
        if t.layout is not torch.strided:
            node.meta["dynamic"] = node.meta["sparse"] = True  # no memory of a size known before it runs
            self.opaque[id(t)] = (t, node)
            return
        storage = self.get(t)
        g = geometry(t)
        if storage is None:
            self.storages[t.untyped_storage()._cdata] = Storage(
                StorageWeakRef(t.untyped_storage()), g, View(self.type_of(t), None, None, node, 0), None
            )
            return
        view = storage.views.get(g) or self._alias(storage, t, g)
        if view.version != storage.version or view.node is not node:
            self.write(t, node)

    def redefine(self, t: Tensor, node: fx.Node) -> None:
        """Like `write`, for a tensor whose storage may have been resized by the operation (`out=`)."""
        storage = self.get(t)
        if storage is None or geometry(t) in storage.views or storage.input is not None:
            self.write(t, node)
            return
        g = geometry(t)
        storage.views = {g: View(self.type_of(t), None, None, node, storage.version + 1)}
        storage.base, storage.version = g, storage.version + 1

    def alias(self, out: Tensor, x: Tensor, op: ViewOp | None) -> None:
        """`out` is a view of `x` by `op` (None: only the geometry is known)."""
        storage, g = self.storage(x), geometry(out)
        parent = geometry(x)
        if g in storage.views:
            if self.varies(storage) and self._steps(storage, parent, op) != self._steps(storage, g):
                self.ambiguous("windows on a result whose size depends on the data coincided in this run")
            return
        if parent not in storage.views:
            self._alias(storage, x, parent)
            if g in storage.views:  # placing the parent went through this very window
                return
        if op is None or op.target is aten.as_strided.default:
            self._alias(storage, out, g)
            return
        storage.views[g] = View(self.type_of(out), parent, op, None, -1)

    def read_base(self, storage: Storage) -> fx.Node:
        """What a storage holds now, all of it."""
        return self._read(storage, storage.views[storage.base])

    def varies(self, storage: Storage) -> bool:
        """Whether another run may find another size in this storage."""
        node = storage.views[storage.base].node
        return node is not None and bool(node.meta.get("dynamic"))

    def _steps(self, storage: Storage, g: Geometry, last: ViewOp | None = None) -> list[tuple[Any, ...]] | None:
        """How a window is made from its storage's base, in a form that is equal only for windows always equal."""
        ops = [] if last is None else [(g[1], last)]
        while g in storage.views and storage.views[g].parent is not None:
            view = storage.views[g]
            assert view.parent is not None and view.op is not None
            ops.append((view.parent[1], view.op))
            g = view.parent
        return canonical_steps(ops[::-1]) if g == storage.base else None

    def present(self, t: Tensor) -> fx.Node | None:
        """The node that `t` has already, without reading it from anywhere."""
        storage = self.storage(t)
        view = storage.views[geometry(t)]
        return view.node if view.version == storage.version else None

    def replace(self, t: Tensor, node: fx.Node) -> None:
        """Reads `t` from another node that has the same value."""
        storage = self.storage(t)
        view = storage.views[geometry(t)]
        view.node, view.version = node, storage.version

    # ---- writing ----

    def before_write(self, t: Tensor) -> None:
        """Called before a real operation changes `t` in place."""
        if t.layout is torch.strided:
            storage = self.storage(t)
            self.first_write(storage, t)
            storage.written = True

    def write(self, t: Tensor, node: fx.Node) -> None:
        """The content of `t` is now `node`; everything else on its storage changes with it."""
        if t.layout is not torch.strided:
            self.define(t, node)
            return
        storage, g = self.storage(t), geometry(t)
        if g not in storage.views:
            self._alias(storage, t, g)
        chain: list[tuple[View, fx.Node | None]] = []  # each window up to the base, with its parent's value before
        view = storage.views[g]
        while view.parent is not None:
            assert view.op is not None
            parent = storage.views[view.parent]
            partial = view.op.target in _PARTIAL
            chain.append((view, self._read(storage, parent) if partial else parent.node))
            view = parent
        storage.version += 1
        storage.written = True
        for view, before in chain:
            view.node, view.version = node, storage.version
            assert view.parent is not None and view.op is not None
            parent = storage.views[view.parent]
            node = write_back(self.emit, before, parent.type, node, view.op)  # type: ignore[arg-type]
        base = storage.views[storage.base]
        base.node, base.version = node, storage.version

    # ---- inputs ----

    def _lift(self, t: Tensor) -> Storage:
        """A storage met for the first time: an input of the step."""
        seen, t = t, self.canonical(t)
        memory = t.untyped_storage()
        place = (memory.data_ptr(), memory.nbytes(), t.device, self.external(t))
        if place in self._by_memory and place[1]:
            self._same.append(StorageWeakRef(memory))
            self.storages[memory._cdata] = self._by_memory[place]
            self._touched(self._by_memory[place], t)
            return self._touched(self._by_memory[place], seen)
        g = geometry(t)
        device = str(t.device)
        self.type_of(t)  # refuses unsupported element types
        contiguous = is_contiguous(g[1], g[2]) and g[4] == 0
        type_ = self.type_of(t) if contiguous else TensorType((span(g[1], g[2]),), DTYPE_NAMES[g[3]], device)
        base = g if contiguous else (g[0], type_.shape, (1,), g[3], 0)
        node = self.placeholder(type_)
        lifted = Lifted(t, node, type_, not contiguous)
        storage = Storage(StorageWeakRef(memory), base, View(type_, None, None, node, 0), lifted)
        self.storages[memory._cdata] = self._by_memory[place] = storage
        if not contiguous:
            self._alias(storage, t, g)
        self.on_lift(lifted)
        if geometry(seen) not in storage.views:
            self._alias(storage, seen, geometry(seen))
        return storage

    def _alias(self, storage: Storage, t: Tensor, g: Geometry) -> View:
        """A window that no recorded view operation made: found again by its place in the storage."""
        offset, sizes, strides, dtype, bits = g
        if self.varies(storage):
            self.ambiguous("a window on a result whose size depends on the data is known by its place only")
        if storage.input is not None:
            self._widen(storage, g)
            storage.input.touch(t)
        base = storage.views[storage.base]
        if dtype != storage.base[3]:
            if dtype.itemsize != storage.base[3].itemsize:
                raise UnsupportedError(f"one storage seen as {storage.base[3]} and as {dtype} in the same step")
            plain = (*storage.base[:3], dtype, 0)
            if plain not in storage.views:
                type_ = self._view_type(plain, base.type.device)
                storage.views[plain] = View(type_, storage.base, ViewOp(aten.view.dtype, (dtype,)), None, -1)
            parent = plain
        else:
            parent = storage.base
        if not is_contiguous(parent[1], parent[2]):
            order = memory_order(parent[1], parent[2])
            if order is None:
                raise UnsupportedError("a view of a tensor whose memory has holes")
            dense = (parent[0], tuple(parent[1][d] for d in order), tuple(parent[2][d] for d in order), dtype, 0)
            if dense not in storage.views:
                storage.views[dense] = View(
                    self._view_type(dense, base.type.device), parent, ViewOp(aten.permute.default, (order,)), None, -1
                )
            parent = dense
        view = storage.views.get((offset, sizes, strides, dtype, 0)) or self._place(
            storage, (offset, sizes, strides, dtype, 0), parent
        )
        for bit, target in ((1, aten.conj_physical.default), (2, aten.neg.default)):
            if bits & bit:
                view = View(view.type, (offset, sizes, strides, dtype, 0), ViewOp(target, ()), None, -1)
                storage.views[g] = view
        return view

    def _place(self, storage: Storage, g: Geometry, parent: Geometry) -> View:
        """A plain window at an offset of a contiguous parent: slice and view where it is contiguous itself."""
        offset, sizes, strides, dtype, _ = g
        device = storage.views[parent].type.device
        relative, count = offset - parent[0], span(sizes, strides)
        if not is_contiguous(sizes, strides) or len(parent[1]) != 1 or count == 0:
            op = ViewOp(aten.as_strided.default, (list(sizes), list(strides), relative))
        else:
            flat = (offset, (count,), (1,), dtype, 0)
            if flat not in storage.views:
                op = ViewOp(aten.slice.Tensor, (0, relative, relative + count, 1))
                storage.views[flat] = View(self._view_type(flat, device), parent, op, None, -1)
            if g == flat:
                return storage.views[flat]
            parent, op = flat, ViewOp(aten.view.default, (list(sizes),))
        storage.views[g] = View(self._view_type(g, device), parent, op, None, -1)
        return storage.views[g]

    def _widen(self, storage: Storage, g: Geometry) -> None:
        """Makes the placeholder cover a window that reaches outside it (or beside a strided one)."""
        old = storage.base
        low = min(old[0], g[0])
        high = max(old[0] + span(old[1], old[2]), g[0] + span(g[1], g[2]))
        if (low, high) == (old[0], old[0] + span(old[1], old[2])):
            return
        lifted, before = storage.input, storage.views[old]
        assert lifted is not None
        self.widened += 1
        base = (low, (high - low,), (1,), old[3], 0)
        type_ = self._view_type(base, before.type.device)
        node = self.placeholder(type_)
        first = self.at_start(aten.slice.Tensor, (node, 0, old[0] - low, old[0] - low + span(old[1], old[2]), 1),
                              TensorType((span(old[1], old[2]),), type_.dtype, type_.device))  # fmt: skip
        if len(old[1]) != 1:
            first = self.at_start(aten.view.default, (first, list(old[1])), before.type)
        placeholder = lifted.node
        placeholder.replace_all_uses_with(first)
        changed = before.node is not placeholder
        for view in storage.views.values():
            if view.node is placeholder:
                view.node = first
        lifted.node, lifted.type, lifted.flat = node, type_, True
        lifted.span_offset = low - int(lifted.tensor.storage_offset())
        placeholder.graph.erase_node(placeholder)
        storage.base = base
        storage.views[base] = View(type_, None, None, node, storage.version)
        # the old base becomes a window of the new one
        flat = (old[0], (span(old[1], old[2]),), (1,), old[3], 0)
        if flat == old:
            before.parent, before.op = base, ViewOp(aten.slice.Tensor, (0, old[0] - low, old[0] - low + flat[1][0], 1))
        else:
            op = ViewOp(aten.slice.Tensor, (0, old[0] - low, old[0] - low + flat[1][0], 1))
            storage.views[flat] = View(self._view_type(flat, type_.device), base, op, None, -1)
            before.parent, before.op = flat, ViewOp(aten.view.default, (list(old[1]),))
        if changed:
            content: Any = before.node
            for g_view in (before, storage.views[flat]):
                if g_view.parent is not None and g_view.op is not None:
                    content = write_back(self.emit, node, storage.views[g_view.parent].type, content, g_view.op)
                if g_view.parent == base:
                    break
            storage.views[base].node = content


_PARTIAL = {aten.slice.Tensor, aten.select.int, aten.diagonal.default, aten.as_strided.default}
