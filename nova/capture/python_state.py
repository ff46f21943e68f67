"""Python state that a step writes or reads behind the compiler's back: found, put back, refused.

A captured step is replayed without its Python, so Python that matters must not happen inside it. Before a step is
recorded, every mutable object it can reach is copied shallowly; afterwards the difference is what the step wrote.

    def step(x):                      refused:  list 'history' was changed: its length was 3, is now 4
        history.append(...)                     move it out of the step
        seed = random.random()        refused:  the step reads random.random()
        model.train()                 allowed:  replayed after each call

While it runs, a profile hook notes the user functions that run (their bytecode says what must be guarded), the
modules that are called, and stops reads of clocks, random numbers, the environment and files, with their line.
"""

from __future__ import annotations

import builtins
import contextvars
import datetime
import gc
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nova.capture import bytecode
from nova.capture.contents import MEMORY_LIMIT, Memory, Range, elements
from nova.capture.guards import _MISSING as MISSING
from nova.capture.guards import _short, same_literal
from nova.capture.interrupts import Interrupts
from nova.capture.library_calls import is_library_code
from nova.capture.signature import Source
from nova.capture.sources import (
    MODULE_TABLES,
    ObjectMap,
    Reached,
    Step,
    extend,
    follow,
    is_user_class,
    is_user_code,
    is_user_file,
    own_dict,
    slot_names,
)
from nova.capture.views import is_leaf
from nova.capture.wrappers import inside
from nova.errors import CaptureError, SourceLine

ADVICE = "A captured step is replayed without running its Python; move this out of the step"


# ---- what the step wrote


@dataclass
class Change:
    """One entry of one object that the step changed."""

    holder: Reached
    step: Step
    before: Any
    after: Any

    @property
    def source(self) -> Source:
        return extend(self.holder.source, self.step)

    def __str__(self) -> str:
        kind, _ = self.step
        if self.before is MISSING:
            return f"{self.source} was created: {_short(self.after)}"
        if self.after is MISSING:
            return f"{self.source} was removed"
        if kind == "length":
            return f"{self.holder.source} was changed: it had {self.before} items, now {self.after}"
        return f"{self.source} was changed: it was {_short(self.before)}, is now {_short(self.after)}"


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return isinstance(a, (int, float, str, bytes, complex)) and same_literal(a, b)


def _table_changes(
    holder: Reached, before: dict[Any, Any], after: Any, step: Callable[[Any], Step]
) -> Iterator[Change]:
    for key, was in before.items():
        now = after.get(key, MISSING)
        if not _same(was, now):
            yield Change(holder, step(key), was, now)
    if len(after) != len(before) or any(key not in before for key in after):
        for key in list(after):
            if key not in before:
                yield Change(holder, step(key), MISSING, after[key])


class Snapshot:
    """Shallow copies of the mutable objects of an `ObjectMap`."""

    def __init__(self, objects: ObjectMap):
        self.objects = objects
        self._tables: list[tuple[Reached, Any, dict[Any, Any], Callable[[Any], Step]]] = []
        self._lists: list[tuple[Reached, Any, list[Any]]] = []
        self._sets: list[tuple[Reached, Any, Any]] = []
        self._cells: list[tuple[Reached, str, types.CellType, Any]] = []
        self._classes: list[tuple[Reached, type, dict[str, Any]]] = []
        self._tensors: list[tuple[Reached, torch.Tensor, Any, bool]] = []
        self._slots: list[tuple[Reached, Any, dict[str, Any]]] = []
        self._iterators: list[tuple[Reached, Any, Any]] = []
        self._memory: list[tuple[Reached, Memory]] = []
        self._copied = 0  # bytes
        self.unseen: list[Reached] = []  # arrays that are too large to copy: writes to them are not seen
        self._variables: list[tuple[Reached, contextvars.ContextVar[Any], Any]] = []
        self._random = _random_states()
        self._generators = [(r, r.obj) for r in objects.reached.values() if _is_numpy_generator(r.obj)]
        self._generator_states = [repr(g.bit_generator.state) for _, g in self._generators]
        for reached in objects.reached.values():
            take = getattr(self, f"_take_{reached.kind}", None)
            if take is not None:
                take(reached, reached.obj)

    def _table(self, reached: Reached, table: Any, step: Callable[[Any], Step]) -> None:
        self._tables.append((reached, table, dict(table), step))

    def _take_dict(self, reached: Reached, obj: dict[Any, Any]) -> None:
        self._table(reached, obj, lambda key: ("item", key))

    def _take_list(self, reached: Reached, obj: Any) -> None:
        self._lists.append((reached, obj, list(obj)))

    def _take_set(self, reached: Reached, obj: Any) -> None:
        if not isinstance(obj, frozenset):
            self._sets.append((reached, obj, set(obj)))

    def _take_module(self, reached: Reached, obj: torch.nn.Module) -> None:
        self._table(reached, obj.__dict__, lambda name: ("attr", name))
        for table, kind in MODULE_TABLES.items():
            self._table(reached, getattr(obj, table), partial(_step, kind))

    def _take_object(self, reached: Reached, obj: Any) -> None:
        if (table := own_dict(obj)) is not None:
            self._table(reached, table, lambda name: ("attr", name))
        if slot_names(type(obj)):
            self._slots.append((reached, obj, _slot_values(obj)))
        if hasattr(type(obj), "__next__"):
            self._take_opaque(reached, obj)

    _take_optimizer = _take_object

    def _take_opaque(self, reached: Reached, obj: Any) -> None:
        if hasattr(type(obj), "__next__"):
            self._iterators.append((reached, obj, _iterator_position(obj)))

    def _take_function(self, reached: Reached, obj: types.FunctionType) -> None:
        if not is_user_code(obj.__code__, obj.__globals__):
            return
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            self._cells.append((reached, name, cell, _cell_value(cell)))
        names = bytecode.names(obj.__code__)
        globals_ = {name: obj.__globals__.get(name, MISSING) for name in names.written}
        if globals_:
            self._slots.append((reached, obj, globals_))
        if obj.__dict__:
            self._table(reached, obj.__dict__, lambda name: ("attr", name))

    def _take_wrapper(self, reached: Reached, obj: Any) -> None:
        if isinstance(obj, contextvars.ContextVar):
            self._variables.append((reached, obj, inside(obj)[0]))
        elif isinstance(obj, types.CellType):
            self._cells.append((reached, "", obj, _cell_value(obj)))
        else:
            self._take_content(reached, obj)

    def _take_class(self, reached: Reached, cls: type) -> None:
        if is_user_class(cls):
            self._classes.append((reached, cls, dict(vars(cls))))

    def _take_tensor(self, reached: Reached, tensor: torch.Tensor) -> None:
        grad = tensor.grad if is_leaf(tensor) else None
        self._tensors.append((reached, tensor, grad, tensor.requires_grad))

    def _take_content(self, reached: Reached, obj: Any) -> None:
        found = elements(obj)
        if found is None:
            return
        if self._copied + found.nbytes > MEMORY_LIMIT:
            self.unseen.append(reached)
            return
        self._copied += found.nbytes
        self._memory.append((reached, Memory(obj, found)))

    def overlapping(self, written: Sequence[Range]) -> set[int]:
        """The identities of arrays that lie, in part, in memory that tensors of the step wrote."""
        return {id(memory.obj) for _, memory in self._memory if memory.overlaps(written)} if written else set()

    def changes(self, written: Sequence[Range] = ()) -> Iterator[Change]:
        """Everything that is not as it was, in no order that matters. What tensors wrote to memory is not Python's."""
        for reached, memory in self._memory:
            if (different := memory.difference(written)) is not None:
                yield Change(reached, memory.step(different.at), different.before, different.after)
        for reached, table, before, step in self._tables:
            yield from _table_changes(reached, before, table, step)
        for reached, items, was in self._lists:
            if len(items) != len(was):
                yield Change(reached, ("length", ""), len(was), len(items))
            else:
                for position, (a, b) in enumerate(zip(was, items, strict=True)):
                    if not _same(a, b):
                        yield Change(reached, ("item", position), a, b)
        for reached, found, was in self._sets:
            if found != was:
                yield Change(reached, ("length", ""), len(was), len(found))
        for reached, name, cell, was in self._cells:
            if not _same(was, now := _cell_value(cell)):
                yield Change(reached, ("closure", name) if name else ("inside", 0), was, now)
        for reached, variable, was in self._variables:
            if not _same(was, now := inside(variable)[0]):
                yield Change(reached, ("inside", 0), was, now)
        for reached, cls, before in self._classes:
            yield from _table_changes(reached, before, vars(cls), lambda name: ("static", name))
        for reached, obj, before in self._slots:
            if isinstance(obj, types.FunctionType):
                now = {name: obj.__globals__.get(name, MISSING) for name in before}
                yield from _table_changes(reached, before, now, lambda name: ("global", name))
            else:
                yield from _table_changes(reached, before, _slot_values(obj), lambda name: ("attr", name))
        for reached, tensor, grad, requires_grad in self._tensors:
            if is_leaf(tensor) and tensor.grad is not grad:
                yield Change(reached, ("attr", "grad"), grad, tensor.grad)
            if tensor.requires_grad != requires_grad:
                yield Change(reached, ("attr", "requires_grad"), requires_grad, tensor.requires_grad)
        for reached, iterator, was in self._iterators:
            if _iterator_position(iterator) != was:
                yield Change(reached, ("iterator", ""), was, MISSING)

    def random_changes(self) -> list[str]:
        """Generators outside PyTorch that were drawn from."""
        found = [name for name, state in _random_states().items() if state != self._random.get(name, state)]
        for (reached, generator), was in zip(self._generators, self._generator_states, strict=True):
            if repr(generator.bit_generator.state) != was:
                found.append(str(reached.source))
        return found

    def restore(self) -> None:
        """Puts every object back. Tensor contents are the recorder's business."""
        for _, table, before, _ in self._tables:
            if any(table.get(key, MISSING) is not value for key, value in before.items()) or len(table) != len(before):
                _restore_table(table, before)
        for _, items, was in self._lists:
            if len(items) != len(was) or any(a is not b for a, b in zip(items, was, strict=True)):
                items.clear()
                items.extend(was)
        for _, found, was in self._sets:
            if found != was:
                found.clear()
                found.update(was)
        for _, _, cell, was in self._cells:
            if _cell_value(cell) is not was and was is not MISSING:
                cell.cell_contents = was
        for _, memory in self._memory:
            memory.restore()
        for _, variable, was in self._variables:
            if was is not MISSING and inside(variable)[0] is not was:
                variable.set(was)
        for _, cls, before in self._classes:
            for change in list(_table_changes(_, before, vars(cls), partial(_step, "static"))):
                if change.before is MISSING:
                    delattr(cls, change.step[1])
                else:
                    setattr(cls, change.step[1], change.before)
        for _, obj, before in self._slots:
            if isinstance(obj, types.FunctionType):
                _restore_entries(obj.__globals__, before)
            else:
                for name, value in before.items():
                    if value is not MISSING and getattr(obj, name, MISSING) is not value:
                        setattr(obj, name, value)
        with torch.no_grad():
            for _, tensor, grad, requires_grad in self._tensors:
                if is_leaf(tensor) and tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                if is_leaf(tensor) and tensor.grad is not grad:
                    tensor.grad = grad
        _restore_random(self._random)


def _slot_values(obj: Any) -> dict[str, Any]:
    return {name: getattr(obj, name, MISSING) for name in slot_names(type(obj))}


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _restore_table(table: Any, before: dict[Any, Any]) -> None:
    """A dictionary as it was, its order included."""
    table.clear()
    table.update(before)


def _restore_entries(table: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is MISSING:
            table.pop(name, None)
        else:
            table[name] = value


def _step(kind: str, name: Any) -> Step:
    return kind, name


def _iterator_position(iterator: Any) -> Any:
    """Something that changes when an iterator moves on."""
    if hasattr(iterator, "gi_frame"):
        return None if iterator.gi_frame is None else iterator.gi_frame.f_lasti
    try:
        return iterator.tell() if hasattr(iterator, "tell") else iterator.__length_hint__()
    except Exception:
        pass
    try:
        return repr(iterator.__reduce__()[2:]) if hasattr(iterator, "__reduce__") else None
    except Exception:  # not every iterator can be described; attributes of Python classes are compared anyway
        return None


def _is_numpy_generator(obj: Any) -> bool:
    return type(obj).__module__.startswith("numpy.random") and hasattr(obj, "bit_generator")


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states


def _restore_random(states: dict[str, Any]) -> None:
    random.setstate(states["random"])
    if "numpy.random" in states:
        numpy = sys.modules["numpy"]
        name, keys, *rest = states["numpy.random"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


# ---- what the step does while it runs

_TIME = {
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
    "process_time_ns", "thread_time", "localtime", "gmtime", "ctime", "strftime",
}  # fmt: skip
_DATE = {"now", "today", "utcnow"}
_C_NAMES = _TIME | _DATE | {"copy_context", "open", "input", "urandom", "getrandbits", "random", "getenv"}
_ENVIRON_CODES = {
    os._Environ.__getitem__.__code__: "os.environ",
    os._Environ.__iter__.__code__: "os.environ",
    os.getenv.__code__: "os.getenv()",
}
_RANDOM_FILE = random.__file__
_QUIET = ("linecache", "tokenize", "importlib", "inspect", "warnings", "traceback", "logging", "zipimport")
_MODULE_CODES = {
    torch.nn.Module._call_impl.__code__,
    torch.nn.Module._wrapped_call_impl.__code__,
    torch.nn.Module._slow_forward.__code__ if hasattr(torch.nn.Module, "_slow_forward") else None,
}


class Watch:
    """Watches a step run: user code, modules, schedulers and `train()` calls, and forbidden reads."""

    def __init__(self, objects: ObjectMap):
        self.objects = objects
        self.codes: dict[types.CodeType, dict[str, Any]] = {}  # user code that ran, with its globals
        self.library: dict[types.CodeType, dict[str, Any]] = {}  # PyTorch's
        self.modules: dict[int, torch.nn.Module] = {}
        self.training_set: dict[int, torch.nn.Module] = {}  # `training` set by train()/eval() before it was read
        self.refused: CaptureError | None = None
        self.optimizers: dict[int, torch.optim.Optimizer] = {}  # those whose step() ran
        self.asked: set[tuple[type, str]] = set()  # type of an object, and an attribute that was asked for
        self.listed: set[int] = set()  # ids of the Python modules that `vars` was called on
        self.rates_read: list[tuple[Any, int, SourceLine]] = []  # get_last_lr(): scheduler, its epoch, line
        # 0 ignore, 1 module, 2 environment, 3 module random, 4 optimizer, 5 get_last_lr, 6 __getattr__
        self._known: dict[types.CodeType, int] = {}
        self._thread = threading.get_ident()

    def watched(self, function: Callable[..., Any], interrupts: Interrupts) -> Callable[..., Any]:
        """`function`, watched while it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(self._patched())
                before = sys.getprofile()
                sys.setprofile(self._profile)
                # A profiler written in C (cProfile) is reported as itself, and only it can switch itself on again.
                restore = getattr(before, "enable", None)
                stack.callback(*((restore,) if restore is not None else (sys.setprofile, before)))
                with interrupts.allowed():
                    return function(*args, **kwargs)

        return run

    def unwatched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, which is Nova's own and not watched: most of what runs while a step is recorded."""
        hook, set_hook, thread = self._profile, sys.setprofile, self._thread

        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            set_hook(None)
            try:
                return original(*args, **kwargs)
            finally:
                set_hook(hook)

        return run

    def _profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            kind = self._known.get(frame.f_code)
            if kind is None:
                kind = self._classify(frame.f_code, frame)
            if kind:
                self._on_call(frame, kind)
        elif event == "c_call" and argument.__name__ in _C_NAMES:
            self._on_c_call(frame, argument)

    def _classify(self, code: types.CodeType, frame: types.FrameType) -> int:
        kind = 0
        if is_library_code(code):
            self.library[code] = frame.f_globals
        if code in _MODULE_CODES:
            kind = 1
        elif code.co_qualname == "Optimizer.profile_hook_step.<locals>.wrapper":
            kind = 4
        elif code is torch.optim.lr_scheduler.LRScheduler.get_last_lr.__code__:
            kind = 5
        elif code in _ENVIRON_CODES:
            kind = 2
        elif code.co_filename == _RANDOM_FILE:
            kind = 3
        elif is_user_code(code, frame.f_globals):
            if _collecting(frame):
                return 0  # not remembered: the step may call it too
            self.codes[code] = frame.f_globals
            kind = 6 if code.co_name in ("__getattr__", "__getattribute__") else 0
        self._known[code] = kind
        return kind

    def _on_call(self, frame: types.FrameType, kind: int) -> None:
        if kind == 1:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                self.modules.setdefault(id(module), module)
            return
        if kind == 4:
            optimizer = frame.f_locals["args"][0]
            self.optimizers.setdefault(id(optimizer), optimizer)
            return
        if kind == 6:
            self._on_getattr(frame)
            return
        caller = frame.f_back
        if kind == 5:
            if caller is not None and is_user_file(caller.f_code.co_filename):
                scheduler, code = frame.f_locals["self"], caller.f_code
                line = SourceLine(code.co_filename, caller.f_lineno, code.co_name)
                self.rates_read.append((scheduler, scheduler.last_epoch, line))
            return
        if kind == 2:
            user = _user_frame(caller, ("os.py", "_collections_abc.py", "<frozen os>", "<frozen _collections_abc>"))
            if user is not None:
                self._refuse(_ENVIRON_CODES[frame.f_code], user)
        elif caller is not None and is_user_file(caller.f_code.co_filename):
            self._refuse(f"random.{frame.f_code.co_name}()", caller)

    def _on_getattr(self, frame: types.FrameType) -> None:
        """A name that was not found, and that the user's `__getattr__` answers for: it may come to be found."""
        code = frame.f_code
        values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        obj, name = values[0] if len(values) > 1 else types, values[-1] if values else None
        if isinstance(name, str):
            self.asked.add((type(obj), name))

    def _on_c_call(self, frame: types.FrameType, function: Any) -> None:
        name = function.__name__
        module, owner = getattr(function, "__module__", None), getattr(function, "__self__", None)
        if isinstance(owner, random.Random) or name == "urandom":
            what = f"random.{name}()" if name != "urandom" else "os.urandom()"
        elif module == "time" and name in _TIME:
            what = f"time.{name}()"
        elif name in _DATE and isinstance(owner, type) and issubclass(owner, datetime.date):
            what = f"datetime.{owner.__name__}.{name}()"
        elif function is contextvars.copy_context:
            what = "contextvars.copy_context()"
        elif name == "input" or function is open:
            user = _user_frame(frame, None)
            if user is not None and not _importing(user):
                self._refuse(f"{name}()", user)
            return
        else:
            return
        if is_user_file(frame.f_code.co_filename) and not _collecting(frame):
            self._refuse(what, frame)

    def _refuse(self, what: str, frame: types.FrameType) -> None:
        code = frame.f_code
        line = SourceLine(code.co_filename, frame.f_lineno, code.co_name)
        error = CaptureError(f"the step reads {what}. {ADVICE}, and pass what it gives as an argument.", line)
        if self.refused is None:
            self.refused = error
        raise error

    # -- calls that are seen by patching, because the profile hook does not see them

    @contextmanager
    def _patched(self) -> Iterator[None]:
        with ExitStack() as stack:
            from nova.capture.record import Recorder

            stack.enter_context(_replaced(Recorder, "__torch_dispatch__", self.unwatched))
            stack.enter_context(_replaced(torch.nn.Module, "train", self._train))
            stack.enter_context(_replaced_item(vars(builtins), "next", self._next))
            for name in ("getattr", "hasattr"):
                stack.enter_context(_replaced_item(vars(builtins), name, self._asking))
            stack.enter_context(_replaced_item(vars(builtins), "vars", self._listing))
            numpy = sys.modules.get("numpy")
            if numpy is not None:
                for name, value in list(vars(numpy.random).items()):
                    if (
                        callable(value)
                        and not name.startswith("_")
                        and not isinstance(value, type)
                        and name != "get_state"
                    ):
                        stack.enter_context(_replaced_item(vars(numpy.random), name, self._numpy(name)))
            yield

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
            if threading.get_ident() == self._thread and id(module) not in self.modules:
                self.training_set.setdefault(id(module), module)
            return original(module, mode)

        return train

    def _asking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`getattr` or `hasattr` that notes which names the user's code asks for."""
        this, known = threading.get_ident(), self.codes

        def ask(obj: Any, name: str, *default: Any) -> Any:
            if sys._getframe(1).f_code in known and threading.get_ident() == this:
                self.asked.add((type(obj), name))
            return original(obj, name, *default)

        return ask

    def _listing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`vars` that notes the modules it is called on."""

        def vars(*objects: Any) -> Any:
            if not objects:
                return sys._getframe(1).f_locals
            if isinstance(objects[0], types.ModuleType) and threading.get_ident() == self._thread:
                self.listed.add(id(objects[0]))
            return original(*objects)

        return vars

    def _next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next(iterator: Any, *default: Any) -> Any:
            if threading.get_ident() == self._thread and (found := self.objects.get(iterator)) is not None:
                frame = sys._getframe(1)
                if is_user_file(frame.f_code.co_filename):
                    self._refuse(f"the iterator {found.source}", frame)
            return original(iterator, *default)

        return next

    def _numpy(self, name: str) -> Callable[..., Any]:
        def replace(original: Callable[..., Any]) -> Callable[..., Any]:
            def function(*args: Any, **kwargs: Any) -> Any:
                frame = sys._getframe(1)
                if threading.get_ident() == self._thread and is_user_file(frame.f_code.co_filename):
                    self._refuse(f"numpy.random.{name}()", frame)
                return original(*args, **kwargs)

            return function

        return replace


def _importing(frame: types.FrameType) -> bool:
    """Whether a frame is the loader of a module: someone's import hook, called by Python's import system."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename == frame.f_code.co_filename:
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename.startswith("<frozen importlib")


def _collecting(frame: types.FrameType | None) -> bool:
    """Whether the frame belongs to a callback of the garbage collector, which runs anywhere and is not the step's."""
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _user_frame(frame: types.FrameType | None, through: tuple[str, ...] | None) -> types.FrameType | None:
    """The user's frame that asked, through library frames: only those named, or any that does not read files itself."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_user_file(filename):
            return frame
        if through is not None:
            if not filename.endswith(through):
                return None
        elif any(quiet in filename for quiet in _QUIET) or "/torch/" in filename or "/nova/" in filename:
            return None
        frame = frame.f_back
    return None


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    replacement = wrap(original)
    replacement._nova_original = original
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _replaced_item(table: dict[str, Any], name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = table[name]
    table[name] = wrap(original)
    try:
        yield
    finally:
        table[name] = original


# ---- the verdict


def settle(
    snapshot: Snapshot, allowed: Callable[[Change], bool], line: SourceLine | None, written: Sequence[Range] = ()
) -> None:
    """Refuses what the step changed, unless it is allowed. The caller restores the snapshot when this raises."""
    drawn = snapshot.random_changes()
    if drawn:
        raise CaptureError(f"the step draws random numbers from {', '.join(drawn)}. {ADVICE}, or use PyTorch's.", line)
    for change in snapshot.changes(written):
        if change.step[0] == "iterator":
            raise CaptureError(
                f"the step advances the iterator {change.holder.source}. {ADVICE}, and pass what it gives.", line
            )
        if not allowed(change):
            raise CaptureError(f"the step changes Python state: {change}. {ADVICE}.", line)


def current(change: Change) -> Any:
    """The value of a changed entry now."""
    return follow(change.holder.obj, change.step)
