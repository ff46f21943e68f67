"""Guards in native code: one call compares every watched dictionary, list, object and tensor with what it was.

A GPT-2 step depends on some 2,000 dictionaries (module attributes, hooks, parameter tables, optimizer state)
and 600 tensors. Reading them one by one from Python costs 0.3 ms; native code needs a few nanoseconds each:

    dictionary   its version tag (CPython 3.11 and 3.12 count every change of a dictionary in its header)
    list         its items, by identity
    object       its class
    tensor       class, dtype, sizes, strides, requires_grad, whether `.grad` is None, data pointer

Nothing about memory layout is assumed. `runtime.tensor_layout` finds where PyTorch keeps a tensor's geometry, and the
rest is found here by looking for known values and then checked. Where that fails, `PythonWatch` does the same
comparisons in Python.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import torch

from nova.capture.views import is_leaf
from nova.runtime import orc, tensor_layout

_TYPE = 8  # PyObject.ob_type
_TAG = 24  # PyDictObject.ma_version_tag: after the object header and ma_used
_WORD = 8
_INLINE_DIMS = 5
_META_WORDS = (18, 20)  # an AutogradMeta ends in flags after some pointers, whose number depends on the version
GRAD_NONE, GRAD_SET, GRAD_ANY = 0, 1, 2
COMPUTED = 2  # `requires_grad` of a tensor that has a history
_POINTER = 5  # the word of a record that holds the data pointer

# what `nova_watch` found, in the low bits of its result; the index is in the bits above (MOVED: some tensors did,
# and nothing else changed)
UNCHANGED, DICT, LIST, TENSOR, MOVED, CLASS = 0, 1, 2, 3, 4, 5


@dataclass(frozen=True)
class AutogradLayout:
    """Byte offsets in the TensorImpl and in its AutogradMeta, and the address that stands for "no gradient"."""

    meta: int  # in the TensorImpl: AutogradMeta*, null where autograd never looked at the tensor
    requires_grad: int  # in the AutogradMeta: one byte
    grad: int  # in the AutogradMeta: TensorImpl* of `.grad`; the word after it is null, or what computed the tensor
    none: int  # the TensorImpl that stands for an undefined tensor


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _bytes(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


@cache
def autograd_layout() -> AutogradLayout | None:
    """Where PyTorch keeps requires_grad and `.grad`; None where that could not be established."""
    # Whatever the user's default device and grad mode are, and without touching the random generator.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.inference_mode(False):
        return _find_autograd_layout()


def _find_autograd_layout() -> AutogradLayout | None:
    plain, leaf = torch.zeros(3), torch.zeros(3, requires_grad=True)
    size = 16
    metas = [
        i for i, (a, b) in enumerate(zip(_words(plain._cdata, size), _words(leaf._cdata, size), strict=True))
        if a == 0 and b > 1 << 16 and b % 8 == 0
    ]  # fmt: skip
    for i, length in itertools.product(metas, _META_WORDS):
        meta = _words(leaf._cdata, size)[i]
        before = _words(meta, length)
        grad = torch.ones(3)
        leaf.grad = grad
        during = _words(meta, length)
        leaf.grad = None
        found = [j for j in range(length) if during[j] == grad._cdata and before[j] not in (0, grad._cdata)]
        if len(found) != 1 or _words(meta, length) != before:
            continue
        on = _bytes(meta, length * _WORD)
        leaf.requires_grad_(False)
        off = _bytes(meta, length * _WORD)
        leaf.requires_grad_(True)
        flags = [j for j in range(length * _WORD) if on[j] == 1 and off[j] == 0]
        if len(flags) != 1 or _bytes(meta, length * _WORD) != on:
            continue
        layout = AutogradLayout(i * _WORD, flags[0], found[0] * _WORD, before[found[0]])
        if _autograd_agrees(layout):
            return layout
    return None


def _read_autograd(layout: AutogradLayout, tensor: torch.Tensor) -> tuple[int, bool]:
    meta = _words(tensor._cdata + layout.meta, 1)[0]
    if meta == 0:
        return 0, True
    grad, computed = _words(meta + layout.grad, 2)
    return _bytes(meta + layout.requires_grad, 1)[0] | (COMPUTED if computed else 0), grad == layout.none


def _autograd_agrees(layout: AutogradLayout) -> bool:
    trained = torch.nn.Linear(3, 2)
    trained(torch.ones(1, 3)).sum().backward()
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    thawed = torch.nn.Parameter(torch.zeros(2), requires_grad=False).requires_grad_(True)
    samples = [trained.weight, trained.bias, frozen, thawed, torch.zeros(3), torch.zeros(2, 2, requires_grad=True)]
    cleared = torch.nn.Parameter(torch.zeros(2))
    cleared.grad = torch.ones(2)
    cleared.grad = None
    samples.append(cleared)
    changed, base = torch.zeros(2), torch.zeros(2, 2)
    row = base[0]
    changed.mul_(trained.bias)
    base.mul_(trained.bias)
    computed = [trained.weight * 2, trained.weight[0], trained.weight.t(), changed, base, row[:1]]
    return all(_read_autograd(layout, t) == (int(t.requires_grad), t.grad is None) for t in samples) and all(
        _read_autograd(layout, t) == (COMPUTED, True) for t in computed
    )


def _requires(tensor: torch.Tensor) -> int:
    """Whether a tensor requires grad: 0, 1 for a leaf, COMPUTED."""
    return int(tensor.requires_grad) if is_leaf(tensor) else COMPUTED


@cache
def dict_tags() -> bool:
    """Whether this Python counts the changes of a dictionary in its header."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12) or sys.implementation.name != "cpython":
        return False

    class Probe:
        pass

    probe = Probe()
    probe.a = 1  # type: ignore[attr-defined]
    for table in ({"a": 1, "b": 2}, probe.__dict__):
        tag = _words(id(table) + _TAG, 1)[0]
        _ = table["a"], list(table), table.get("c")
        if _words(id(table) + _TAG, 1)[0] != tag:
            return False
        for change in (lambda t: t.update(a=5), lambda t: t.update(c=3), lambda t: t.pop("a"), lambda t: t.clear()):
            change(table)
            now = _words(id(table) + _TAG, 1)[0]
            if now == tag:
                return False
            tag = now
    return True


def _same_words(name: str, before: str, after: str, offset: int, code: int) -> str:
    """A loop between two blocks over %{name}_objects, %{name}_count of them: the word at `offset` in each must be that
    of %{name}_words; where one is not, the function returns its number with `code`."""
    return f"""{name}_loop:
  %{name}_i = phi i64 [0, %{before}], [%{name}_i_next, %{name}_next]
  %{name}_more = icmp ult i64 %{name}_i, %{name}_count
  br i1 %{name}_more, label %{name}, label %{after}
{name}:
  %{name}_object_p = getelementptr ptr, ptr %{name}_objects, i64 %{name}_i
  %{name}_object = load ptr, ptr %{name}_object_p
  %{name}_now_p = getelementptr i8, ptr %{name}_object, i64 {offset}
  %{name}_now = load i64, ptr %{name}_now_p
  %{name}_want_p = getelementptr i64, ptr %{name}_words, i64 %{name}_i
  %{name}_want = load i64, ptr %{name}_want_p
  %{name}_same = icmp eq i64 %{name}_now, %{name}_want
  br i1 %{name}_same, label %{name}_next, label %{name}_differs
{name}_next:
  %{name}_i_next = add i64 %{name}_i, 1
  br label %{name}_loop
{name}_differs:
  %{name}_shifted = shl i64 %{name}_i, 3
  %{name}_coded = or i64 %{name}_shifted, {code}
  ret i64 %{name}_coded
"""


def _text(tensor: tensor_layout.TensorLayout, autograd: AutogradLayout) -> str:
    """LLVM IR of `nova_watch(state)` and `nova_live(list, state)`."""
    return f"""
; record: class, dtype, dim, requires_grad, grad, pointer (-1 = any), element size, sizes..., strides...
define internal i64 @check(ptr %object, ptr %record) alwaysinline {{
entry:
  %class_p = getelementptr i8, ptr %object, i64 8
  %class = load i64, ptr %class_p
  %want_class = load i64, ptr %record
  %same_class = icmp eq i64 %class, %want_class
  br i1 %same_class, label %head, label %differs

head:
  %impl_p = getelementptr i8, ptr %object, i64 {tensor.impl}
  %impl = load ptr, ptr %impl_p
  %dtype_p = getelementptr i8, ptr %impl, i64 {tensor.dtype}
  %dtype16 = load i16, ptr %dtype_p
  %dtype = zext i16 %dtype16 to i64
  %dim_p = getelementptr i8, ptr %impl, i64 {tensor.dim}
  %dim = load i64, ptr %dim_p
  %r1 = getelementptr i64, ptr %record, i64 1
  %want_dtype = load i64, ptr %r1
  %r2 = getelementptr i64, ptr %record, i64 2
  %want_dim = load i64, ptr %r2
  %same_dtype = icmp eq i64 %dtype, %want_dtype
  %same_dim = icmp eq i64 %dim, %want_dim
  %same_head = and i1 %same_dtype, %same_dim
  br i1 %same_head, label %autograd, label %differs

autograd:
  %meta_p = getelementptr i8, ptr %impl, i64 {autograd.meta}
  %meta = load ptr, ptr %meta_p
  %r3 = getelementptr i64, ptr %record, i64 3
  %want_requires = load i64, ptr %r3
  %r4 = getelementptr i64, ptr %record, i64 4
  %want_grad = load i64, ptr %r4
  %no_meta = icmp eq ptr %meta, null
  br i1 %no_meta, label %flags, label %has_meta

has_meta:
  %requires_p = getelementptr i8, ptr %meta, i64 {autograd.requires_grad}
  %requires8 = load i8, ptr %requires_p
  %flag64 = zext i8 %requires8 to i64
  %grad_p = getelementptr i8, ptr %meta, i64 {autograd.grad}
  %computed_p = getelementptr i8, ptr %grad_p, i64 {_WORD}
  %computed_word = load ptr, ptr %computed_p
  %is_leaf = icmp eq ptr %computed_word, null
  %computed = select i1 %is_leaf, i64 0, i64 {COMPUTED}
  %requires64 = or i64 %flag64, %computed
  %grad_word = load i64, ptr %grad_p
  %grad_is_set = icmp ne i64 %grad_word, {autograd.none}
  %grad_set64 = zext i1 %grad_is_set to i64
  br label %flags

flags:
  %requires = phi i64 [0, %autograd], [%requires64, %has_meta]
  %grad = phi i64 [0, %autograd], [%grad_set64, %has_meta]
  %same_requires = icmp eq i64 %requires, %want_requires
  %same_grad1 = icmp eq i64 %grad, %want_grad
  %any_grad = icmp eq i64 %want_grad, {GRAD_ANY}
  %same_grad = or i1 %same_grad1, %any_grad
  %same_flags = and i1 %same_requires, %same_grad
  br i1 %same_flags, label %place, label %differs

place:
  %inline = getelementptr i8, ptr %dim_p, i64 {_WORD}
  %is_inline = icmp ule i64 %dim, {_INLINE_DIMS}
  br i1 %is_inline, label %compare, label %outside

outside:
  %heap = load ptr, ptr %inline
  br label %compare

compare:
  %sizes = phi ptr [%inline, %place], [%heap, %outside]
  %stride_at = phi i64 [{_INLINE_DIMS}, %place], [%dim, %outside]
  %strides = getelementptr i64, ptr %sizes, i64 %stride_at
  %want_sizes = getelementptr i64, ptr %record, i64 7
  %want_strides = getelementptr i64, ptr %want_sizes, i64 %dim
  %scalar = icmp eq i64 %dim, 0
  br i1 %scalar, label %pointer, label %axis

axis:
  %d = phi i64 [0, %compare], [%d_next, %axis_next]
  %size_p = getelementptr i64, ptr %sizes, i64 %d
  %size = load i64, ptr %size_p
  %want_size_p = getelementptr i64, ptr %want_sizes, i64 %d
  %want_size = load i64, ptr %want_size_p
  %stride_p = getelementptr i64, ptr %strides, i64 %d
  %stride = load i64, ptr %stride_p
  %want_stride_p = getelementptr i64, ptr %want_strides, i64 %d
  %want_stride = load i64, ptr %want_stride_p
  %same_size = icmp eq i64 %size, %want_size
  %same_stride = icmp eq i64 %stride, %want_stride
  %same_axis = and i1 %same_size, %same_stride
  br i1 %same_axis, label %axis_next, label %differs

axis_next:
  %d_next = add i64 %d, 1
  %more_axes = icmp ult i64 %d_next, %dim
  br i1 %more_axes, label %axis, label %pointer

pointer:
  %r5 = getelementptr i64, ptr %record, i64 5
  %want_pointer = load i64, ptr %r5
  %any_pointer = icmp eq i64 %want_pointer, -1
  br i1 %any_pointer, label %same, label %data

data:
  %r6 = getelementptr i64, ptr %record, i64 6
  %itemsize = load i64, ptr %r6
  %storage_p = getelementptr i8, ptr %impl, i64 {tensor.storage}
  %storage = load ptr, ptr %storage_p
  %data_p = getelementptr i8, ptr %storage, i64 {tensor.data}
  %data_word = load i64, ptr %data_p
  %offset_p = getelementptr i8, ptr %impl, i64 {tensor.offset}
  %offset = load i64, ptr %offset_p
  %bytes = mul i64 %offset, %itemsize
  %now = add i64 %data_word, %bytes
  %unmoved = icmp eq i64 %now, %want_pointer
  br i1 %unmoved, label %same, label %moved

same:
  ret i64 {UNCHANGED}
moved:
  ret i64 {MOVED}
differs:
  ret i64 {TENSOR}
}}

; state: dicts, dict count, tags, lists, list count, list items, list starts, tensors, tensor count, records, starts,
; objects, object count, classes
define i64 @nova_watch(ptr %state) {{
entry:
  %dict_objects = load ptr, ptr %state
  %s1 = getelementptr i64, ptr %state, i64 1
  %dict_count = load i64, ptr %s1
  %s2 = getelementptr i64, ptr %state, i64 2
  %dict_words = load ptr, ptr %s2
  %s3 = getelementptr i64, ptr %state, i64 3
  %lists = load ptr, ptr %s3
  %s4 = getelementptr i64, ptr %state, i64 4
  %list_count = load i64, ptr %s4
  %s5 = getelementptr i64, ptr %state, i64 5
  %items = load ptr, ptr %s5
  %s6 = getelementptr i64, ptr %state, i64 6
  %list_starts = load ptr, ptr %s6
  %s7 = getelementptr i64, ptr %state, i64 7
  %tensors = load ptr, ptr %s7
  %s8 = getelementptr i64, ptr %state, i64 8
  %tensor_count = load i64, ptr %s8
  %s9 = getelementptr i64, ptr %state, i64 9
  %records = load ptr, ptr %s9
  %s10 = getelementptr i64, ptr %state, i64 10
  %starts = load ptr, ptr %s10
  %s11 = getelementptr i64, ptr %state, i64 11
  %class_objects = load ptr, ptr %s11
  %s12 = getelementptr i64, ptr %state, i64 12
  %class_count = load i64, ptr %s12
  %s13 = getelementptr i64, ptr %state, i64 13
  %class_words = load ptr, ptr %s13
  br label %dict_loop

{_same_words("dict", "entry", "list_loop", _TAG, DICT)}
list_loop:
  %l = phi i64 [0, %dict_loop], [%l_next, %list_next]
  %more_lists = icmp ult i64 %l, %list_count
  br i1 %more_lists, label %list, label %class_loop
list:
  %list_p = getelementptr ptr, ptr %lists, i64 %l
  %list_object = load ptr, ptr %list_p
  %low_p = getelementptr i64, ptr %list_starts, i64 %l
  %low = load i64, ptr %low_p
  %high_p = getelementptr i64, ptr %low_p, i64 1
  %high = load i64, ptr %high_p
  %want_length = sub i64 %high, %low
  %length_p = getelementptr i8, ptr %list_object, i64 16
  %length = load i64, ptr %length_p
  %same_length = icmp eq i64 %length, %want_length
  br i1 %same_length, label %list_items, label %list_differs
list_items:
  %item_pp = getelementptr i8, ptr %list_object, i64 24
  %item_p = load ptr, ptr %item_pp
  %want_p = getelementptr i64, ptr %items, i64 %low
  br label %item_loop
item_loop:
  %k = phi i64 [0, %list_items], [%k_next, %item_next]
  %more_items = icmp ult i64 %k, %length
  br i1 %more_items, label %item, label %list_next
item:
  %a_p = getelementptr i64, ptr %item_p, i64 %k
  %a = load i64, ptr %a_p
  %b_p = getelementptr i64, ptr %want_p, i64 %k
  %b = load i64, ptr %b_p
  %same_item = icmp eq i64 %a, %b
  br i1 %same_item, label %item_next, label %list_differs
item_next:
  %k_next = add i64 %k, 1
  br label %item_loop
list_next:
  %l_next = add i64 %l, 1
  br label %list_loop
list_differs:
  %li = shl i64 %l, 3
  %lr = or i64 %li, {LIST}
  ret i64 %lr

{_same_words("class", "list_loop", "tensor_loop", _TYPE, CLASS)}
tensor_loop:
  %t = phi i64 [0, %class_loop], [%t_next, %tensor_next]
  %any_moved = phi i64 [{UNCHANGED}, %class_loop], [%any_moved_next, %tensor_next]
  %more_tensors = icmp ult i64 %t, %tensor_count
  br i1 %more_tensors, label %tensor, label %done
tensor:
  %object_p = getelementptr ptr, ptr %tensors, i64 %t
  %object = load ptr, ptr %object_p
  %start_p = getelementptr i64, ptr %starts, i64 %t
  %start = load i64, ptr %start_p
  %record = getelementptr i64, ptr %records, i64 %start
  %found = call i64 @check(ptr %object, ptr %record)
  %differs = icmp eq i64 %found, {TENSOR}
  br i1 %differs, label %tensor_differs, label %tensor_next
tensor_next:
  %any_moved_next = or i64 %any_moved, %found
  %t_next = add i64 %t, 1
  br label %tensor_loop
tensor_differs:
  %ti = shl i64 %t, 3
  %tr = or i64 %ti, %found
  ret i64 %tr

done:
  ret i64 %any_moved
}}

; the items of a list against records; the list has at least `count` items, all of them tensors or not
define i64 @nova_live(ptr %list, i64 %count, ptr %records, ptr %starts) {{
entry:
  %item_pp = getelementptr i8, ptr %list, i64 24
  %item_p = load ptr, ptr %item_pp
  br label %loop
loop:
  %t = phi i64 [0, %entry], [%t_next, %next]
  %more = icmp ult i64 %t, %count
  br i1 %more, label %tensor, label %done
tensor:
  %object_p = getelementptr ptr, ptr %item_p, i64 %t
  %object = load ptr, ptr %object_p
  %start_p = getelementptr i64, ptr %starts, i64 %t
  %start = load i64, ptr %start_p
  %record = getelementptr i64, ptr %records, i64 %start
  %found = call i64 @check(ptr %object, ptr %record)
  %fine = icmp eq i64 %found, {UNCHANGED}
  br i1 %fine, label %next, label %differs
next:
  %t_next = add i64 %t, 1
  br label %loop
differs:
  %ti = shl i64 %t, 3
  %tr = or i64 %ti, %found
  ret i64 %tr
done:
  ret i64 {UNCHANGED}
}}
"""


@cache
def _functions() -> tuple[Any, Any, Any] | None:
    """(`nova_watch`, `nova_live`, the library that holds them), or None where a layout is unknown."""
    tensor, autograd = tensor_layout.tensor_layout(), autograd_layout()
    if tensor is None or autograd is None or not _list_layout():
        return None
    library = orc.load(orc.compile_ir(_text(tensor, autograd)), ["nova_watch", "nova_live"])
    # PYFUNCTYPE: called with the GIL held, since the code reads Python objects.
    word = ctypes.c_int64
    watch = ctypes.PYFUNCTYPE(word, ctypes.c_void_p)(library["nova_watch"])
    live = ctypes.PYFUNCTYPE(word, ctypes.py_object, word, ctypes.c_void_p, ctypes.c_void_p)(library["nova_live"])
    return watch, live, library


@cache
def _list_layout() -> bool:
    probe = [object(), "x", 5]
    length, items = _words(id(probe) + 16, 2)
    return length == 3 and _words(items, 3) == [id(item) for item in probe]


def record(tensor: torch.Tensor, grad: int = GRAD_ANY, pointer: bool = True) -> list[int]:
    """What a tensor is compared with."""
    layout, autograd = tensor_layout.tensor_layout(), autograd_layout()
    assert layout is not None and autograd is not None
    dtype = ctypes.c_uint16.from_address(tensor._cdata + layout.dtype).value
    return [
        id(type(tensor)), dtype, tensor.dim(), _read_autograd(autograd, tensor)[0], grad,
        _address(tensor) if pointer else -1, tensor.itemsize,
        *tensor.shape, *tensor.stride(),
    ]  # fmt: skip


def _address(tensor: torch.Tensor) -> int:
    """What the native code computes: an empty tensor reports 0 whatever its offset, so it is not compared."""
    return tensor.data_ptr() or (0 if tensor.storage_offset() == 0 else -1)


def _array(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


class Tables:
    """Dictionaries compared in Python, all entries in one pass; only where their version tags cannot be read."""

    def __init__(self, dicts: list[dict[Any, Any]]):
        self.dicts = dicts
        self._keys = [list(table) for table in dicts]
        self._values = [list(table.values()) for table in dicts]
        self._flatten()

    def _flatten(self) -> None:
        self._lengths = [len(values) for values in self._values]
        self._flat_keys = list(chain.from_iterable(self._keys))
        self._flat = list(chain.from_iterable(self._values))

    def changed(self) -> int | None:
        """The first dictionary that is not as it was."""
        dicts = self.dicts
        try:
            if (
                list(map(len, dicts)) == self._lengths
                and all(map(is_, chain.from_iterable(map(dict.values, dicts)), self._flat))
                and all(map(is_, chain.from_iterable(dicts), self._flat_keys))
            ):
                return None
        except RuntimeError:  # changed by another thread meanwhile
            pass
        for index, table in enumerate(dicts):
            values, keys = self._values[index], self._keys[index]
            if len(table) != len(values) or not all(map(is_, table.values(), values)):
                return index
            if not all(map(_same_key, table, keys)):
                return index
        return None

    def accept(self, index: int) -> None:
        self._keys[index], self._values[index] = list(self.dicts[index]), list(self.dicts[index].values())
        self._flatten()


def _same_key(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (str, int)) and a == b)


class NativeWatch:
    """Dictionaries, lists, objects and tensors, and what they were. Holds references to all of them."""

    def __init__(
        self,
        dicts: list[dict[Any, Any]],
        lists: list[list[Any]],
        tensors: list[torch.Tensor],
        grads: list[int],
        objects: Sequence[Any] = (),
    ):
        functions = _functions()
        assert functions is not None
        self.native = functions[0]
        self.tables = None if dict_tags() else Tables(dicts)
        self.dicts, self.lists, self.tensors, self.grads = dicts, lists, tensors, grads
        self.items = [list(found) for found in lists]
        self._dicts = _array([id(table) for table in dicts])
        self._tags = _array([0] * len(dicts))
        self._lists = _array([id(found) for found in lists])
        self._tensors = _array([0] * len(tensors))
        self.objects, self._kinds = objects, [*map(type, objects)]
        self._objects, self._classes_of = _array([*map(id, objects)]), _array([*map(id, self._kinds)])
        self._state = (ctypes.c_int64 * 14)()
        if self.tables is None:
            for index in range(len(dicts)):
                self.accept_dict(index)
        self._pack_lists()
        self._pack_tensors()
        self.address = ctypes.addressof(self._state)

    def _pack_lists(self) -> None:
        starts, flat = [0], []
        for items in self.items:
            flat += [id(item) for item in items]
            starts.append(len(flat))
        self._list_items, self._list_starts = _array(flat), _array(starts)
        self._fill()

    def _pack_tensors(self) -> None:
        starts: list[int] = []
        flat: list[int] = []
        self._classes = {type(tensor) for tensor in self.tensors}
        for index, (tensor, grad) in enumerate(zip(self.tensors, self.grads, strict=True)):
            self._tensors[index] = id(tensor)
            starts.append(len(flat))
            flat += record(tensor, grad)
        self._records, self._starts = _array(flat), _array(starts)
        self._fill()

    def _fill(self) -> None:
        if not hasattr(self, "_records") and not hasattr(self, "_list_items"):
            return
        address = ctypes.addressof
        pairs = [
            (0, address(self._dicts)), (1, len(self.dicts) if self.tables is None else 0), (2, address(self._tags)),
            (3, address(self._lists)), (4, len(self.lists)),
            (5, address(self._list_items)), (6, address(self._list_starts)),
            (11, address(self._objects)), (12, len(self.objects)), (13, address(self._classes_of)),
        ]  # fmt: skip
        if hasattr(self, "_records"):
            pairs += [
                (7, address(self._tensors)), (8, len(self.tensors)),
                (9, address(self._records)), (10, address(self._starts)),
            ]  # fmt: skip
        for slot, value in pairs:
            self._state[slot] = value

    def check(self) -> int:
        """0, or (index << 3) | kind of the first thing that changed."""
        if self.tables is not None and (index := self.tables.changed()) is not None:
            return index << 3 | DICT
        return self.native(self.address)

    def accept_dict(self, index: int) -> None:
        """Takes the dictionary as it is now for unchanged."""
        if self.tables is not None:
            return self.tables.accept(index)
        self._tags[index] = _words(id(self.dicts[index]) + _TAG, 1)[0]

    def accept_list(self, index: int) -> None:
        self.items[index] = list(self.lists[index])
        self._pack_lists()

    def accept_tensor(self, index: int) -> None:
        """Takes a tensor as it is now for unchanged; its number of dimensions is the same."""
        tensor = self.tensors[index]
        self._classes.add(type(tensor))
        self._tensors[index] = id(tensor)
        words = record(tensor, self.grads[index])
        self._records[self._starts[index] : self._starts[index] + len(words)] = words

    def accept_pointers(self) -> None:
        """Takes all data pointers as they are now; everything else about the tensors is unchanged."""
        for start, tensor in zip(self._starts, self.tensors, strict=True):
            at = start + _POINTER
            if self._records[at] != -1:
                self._records[at] = _address(tensor)


class PythonWatch:
    """The same comparisons in Python, where the native ones are not to be had."""

    def __init__(
        self,
        dicts: list[dict[Any, Any]],
        lists: list[list[Any]],
        tensors: list[torch.Tensor],
        grads: list[int],
        objects: Sequence[Any] = (),
    ):
        self.dicts, self.lists, self.tensors, self.grads = dicts, lists, tensors, grads
        self.objects, self._kinds = objects, [*map(type, objects)]
        self.tables = Tables(dicts)
        self.items = [list(found) for found in lists]
        self.accept_pointers()

    def check(self) -> int:
        if (index := self.tables.changed()) is not None:
            return index << 3 | DICT
        for index, found in enumerate(self.lists):
            items = self.items[index]
            if len(found) != len(items) or not all(map(is_, found, items)):
                return index << 3 | LIST
        if not all(map(is_, map(type, self.objects), self._kinds)):
            return CLASS
        moved = UNCHANGED
        for index, (tensor, want) in enumerate(zip(self.tensors, self._records, strict=True)):
            code = check_in_python(tensor, want)
            if code == TENSOR:
                return index << 3 | TENSOR
            moved |= code
        return moved

    def accept_dict(self, index: int) -> None:
        self.tables.accept(index)

    def accept_list(self, index: int) -> None:
        self.items[index] = list(self.lists[index])

    def accept_tensor(self, index: int) -> None:
        self._records[index] = python_record(self.tensors[index], self.grads[index])

    def accept_pointers(self) -> None:
        pairs = zip(self.tensors, self.grads, strict=True)
        self._records = [python_record(tensor, grad) for tensor, grad in pairs]


def python_record(tensor: torch.Tensor, grad: int = GRAD_ANY, pointer: bool = True) -> tuple[Any, ...]:
    address = tensor.data_ptr() if pointer else -1
    return type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), _requires(tensor), grad, address


def check_in_python(tensor: Any, want: tuple[Any, ...]) -> int:
    if type(tensor) is not want[0]:
        return TENSOR
    if (tensor.dtype, tensor.shape, tensor.stride(), _requires(tensor)) != want[1:5]:
        return TENSOR
    if want[5] != GRAD_ANY and (not is_leaf(tensor) or tensor.grad is None) != (want[5] == GRAD_NONE):
        return TENSOR
    return MOVED if want[6] != -1 and tensor.data_ptr() != want[6] else UNCHANGED


class LiveCheck:
    """Metadata of tensors that are looked up anew on every call: `check(list)` is 0 or (index << 3) | TENSOR."""

    def __init__(self, tensors: Sequence[torch.Tensor], grads: Sequence[int], native: bool = True):
        functions = _functions() if native else None
        self._classes = {type(tensor) for tensor in tensors}
        if functions is None:
            self._python = [python_record(t, grad, pointer=False) for t, grad in zip(tensors, grads, strict=True)]
            self.check = self._check_python
            return
        starts: list[int] = []
        flat: list[int] = []
        for tensor, grad in zip(tensors, grads, strict=True):
            starts.append(len(flat))
            flat += record(tensor, grad, pointer=False)
        self._records, self._starts = _array(flat), _array(starts)
        self._native = functions[1]
        self._where = len(tensors), ctypes.addressof(self._records), ctypes.addressof(self._starts)
        self.check = self._check_native

    def _check_native(self, found: list[Any]) -> int:
        return self._native(found, *self._where)

    def _check_python(self, found: list[Any]) -> int:
        for index, (tensor, want) in enumerate(zip(found, self._python, strict=True)):
            if check_in_python(tensor, want):
                return index << 3 | TENSOR
        return UNCHANGED


def make_watch(
    dicts: list[dict[Any, Any]],
    lists: list[list[Any]],
    tensors: list[torch.Tensor],
    grads: list[int],
    objects: Sequence[Any] = (),
    native: bool = True,
) -> NativeWatch | PythonWatch:
    """Watches everything given; natively where this Python and this PyTorch allow it."""
    kind = NativeWatch if native and _functions() is not None else PythonWatch
    return kind(dicts, lists, tensors, grads, objects)
