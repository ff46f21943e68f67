"""`nova.jit`: the decorator, and what happens on a call.

    call -> a binding whose guards hold? -> numbers, tensors -> executable -> effects -> outputs     (steady state)
         -> a capture whose guards hold for these objects?   -> bind it, then as above               (rebinding)
         -> neither: record the step for real, compile it, and return the recording run's results   (capture)

A `Variant` is one capture with its executable; a `Binding` ties it to live objects (fastpath.py). Going back to a
state that was captured before (train/eval, an earlier batch size) costs nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import platform
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from nova.config import Options, knobs
from nova.errors import DeviceError, NovaError, UnsupportedError

if TYPE_CHECKING:
    from nova.capture.sources import ObjectMap

F = TypeVar("F", bound=Callable[..., Any])
BINDINGS_PER_VARIANT = 8  # e.g. instances of a class whose method is a step; the oldest goes
VARIANTS = 128  # captures a step; the least recently used goes

_disabled = 0
recording: set[int] = set()  # threads that are recording a step
one_recording = threading.RLock()  # held while a step is recorded, and looked for where no binding holds
PATIENCE = 10.0  # seconds after which it is said that a call waits for another thread's recording


@contextlib.contextmanager
def _turn(name: str) -> Iterator[None]:
    """This thread's turn to record. Where another's recording waits for this call it never comes: so it is said."""
    if not one_recording.acquire(timeout=PATIENCE):
        print(
            f"nova: {name} waits while another thread records a step (which must not itself wait for this call)",
            file=sys.stderr,
        )
        one_recording.acquire()
    try:
        yield
    finally:
        one_recording.release()


class disable:
    """Turns Nova off: `nova.disable()` from now on, `with nova.disable():` for a while, `nova.disable(f)` inside f."""

    def __new__(cls, function: Callable[..., Any] | None = None) -> Any:
        if function is None:
            return super().__new__(cls)

        @functools.wraps(function)
        def eagerly(*args: Any, **kwargs: Any) -> Any:
            with cls():
                return function(*args, **kwargs)

        return eagerly

    def __init__(self) -> None:
        global _disabled
        _disabled += 1
        self._on = True

    def __enter__(self) -> disable:
        return self

    def __exit__(self, *error: object) -> None:
        self.enable()

    def enable(self) -> None:
        """Undoes this `disable`."""
        global _disabled
        if self._on:
            self._on = False
            _disabled -= 1


def synchronize() -> None:
    """Waits for every compiled step and raises what one of them found. On a CPU a step is finished when it returns."""
    found = sys.modules.get("nova.runtime.device_executable")
    if found is not None:
        found.synchronize()


@overload
def jit(function: F) -> F: ...
@overload
def jit(**options: Any) -> Callable[[F], F]: ...
def jit(function: Any = None, **options: Any) -> Any:
    """Compiles a training step: forward, backward and optimizer become one executable.

    Use it bare (`@nova.jit`) or with options (`@nova.jit(precision="bf16")`), on functions, methods and callable
    objects. Options: see `nova.Options`.
    """
    chosen = Options.of(**options)
    if function is None:
        return lambda f: jit(f, **options)
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(jit(function.__func__, **options))
    if isinstance(function, type):
        raise TypeError(f"nova.jit compiles a step, not a class: decorate the step method of {function.__qualname__}")
    if isinstance(function, Step):
        return Step(function.function, chosen)
    if not callable(function):
        raise TypeError(f"nova.jit needs a function or another callable, not {function!r}")
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise UnsupportedError(f"Nova runs on Linux x86-64; this is {sys.platform} {platform.machine()}")
    return Step(function, chosen)


def _restore(function: Any, options: Options) -> Step:
    return Step(function, options)


class Variant:
    """One capture and its executable, with the bindings to live objects that were made so far."""

    def __init__(self, capture: Any, executable: Any, compilation: Any = None):
        self.capture, self.executable, self.compilation = capture, executable, compilation
        self.bindings: list[Any] = []
        self.seeded = capture.signature.uses_rng

    def bind(self, roots: Any) -> Any:
        """A binding to the objects of this call, or the Mismatch that rules it out."""
        from nova.capture.warm import check_with_state

        return self.bind_to(check_with_state(self.capture.guards, roots))

    def bind_to(self, objs: Any) -> Any:
        """A binding to the objects that a check of the guards found; a Mismatch is returned as it is."""
        from nova.capture.fastpath import Binding
        from nova.capture.replay import Effects

        if not isinstance(objs, list):
            return objs
        capture = self.capture
        binding = Binding(capture.guards, objs, capture.signature, capture.consts, knobs.native)
        binding.effects = Effects(capture.signature, capture.classes, binding.objs, binding.place, knobs.native)
        binding.seal()
        binding.on_death = functools.partial(_forget, self.bindings, weakref.ref(binding))
        self.bindings.insert(0, binding)
        del self.bindings[BINDINGS_PER_VARIANT:]
        return binding


class Step:
    """A compiled step. Calls like the function it was made from."""

    _nova_state = ("function",)  # what a step that reaches this one may depend on (nova/capture/sources.py)

    def __init__(self, function: Callable[..., Any], options: Options):
        self.function, self.options = function, options
        self._lock = threading.RLock()
        self._variants: list[Variant] = []  # most recently used first
        self._history: dict[Any, list[Any]] = {}  # what changed before -> the values seen
        self._noted: set[str] = set()
        self._known: set[str] = set()  # stored captures that were loaded
        self.captures = 0  # how often the step was recorded
        self.compilations = 0
        self.loads = 0  # captures found on disk instead
        self.capture_seconds = 0.0  # of the last recording
        self._enabled = knobs.enabled
        self.name = getattr(function, "__name__", type(function).__name__)
        functools.update_wrapper(self, function, updated=())

    # -- standing in for a function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<nova.jit of {self.function!r}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return Step(copy.deepcopy(self.function, memo), self.options)

    def __copy__(self) -> Step:
        return Step(self.function, self.options)

    def __reduce__(self) -> Any:
        return _restore, (self.function, self.options)

    # -- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _disabled or not self._enabled or (recording and threading.get_ident() in recording):
            return self.function(*args, **kwargs)  # also where another step that calls this one is being recorded
        with self._lock:
            entered = self._bound(args, kwargs)
            if entered is not None:
                return _run(self.function, *entered, args, kwargs)
            with _turn(self.name):  # if another thread is recording, the guards look at what it patches
                entered = self._bound(args, kwargs) if self._variants else None
                if entered is None:
                    return self._other(args, kwargs)
            return _run(self.function, *entered, args, kwargs)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, Any, Any] | None:
        """The variant and the binding whose guards hold, and what the binding found."""
        variants = self._variants
        for position, variant in enumerate(variants):
            for binding in tuple(variant.bindings):
                try:
                    found = binding.enter(args, kwargs)
                except Exception:  # its model was collected meanwhile, and what it looks at with it: no call of its
                    if not binding.gone:
                        raise
                    found = None
                if found is not None:
                    if position:
                        variants.insert(0, variants.pop(position))
                    return variant, binding, found
        return None

    def _other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """No binding holds: bind a capture that does, or make one."""
        from nova.capture import warm
        from nova.capture.environment import watching
        from nova.capture.sources import ObjectMap, Roots

        if what := watching():
            self._once(f"runs eagerly inside {what}, which a replay would leave out")
            return self.function(*args, **kwargs)
        mismatch = None
        for position, variant in enumerate(self._variants):
            bound = variant.bind(Roots(self.function, args, kwargs, variant.capture.consts))
            if not hasattr(bound, "enter"):
                mismatch = mismatch or bound
                continue
            return self._enter(self._variants.pop(position), bound, args, kwargs)
        objects = ObjectMap(self.function, args, kwargs)
        key = warm.key_of(objects, self.options) if warm.usable(self.options) else None
        if key is not None:
            for variant, bound in self._stored(key, objects.roots):
                return self._enter(variant, bound, args, kwargs)
        return self._capture(args, kwargs, objects, key, mismatch)

    def _enter(self, variant: Variant, bound: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a variant that was bound just now, which becomes the most recently used."""
        found = bound.enter(args, kwargs)
        if found is None:
            raise NovaError(f"a guard of {self.name} holds when it is checked slowly and not when it is checked fast")
        self._variants.insert(0, variant)
        del self._variants[VARIANTS:]
        return _run(self.function, variant, bound, found, args, kwargs)

    def _stored(self, key: str, roots: Any) -> Iterator[tuple[Variant, Any]]:
        """The capture that another process stored and whose guards hold, bound."""
        from nova.capture import warm
        from nova.capture.session import Capture
        from nova.runtime import executable

        for digest, decode in warm.stored(key):
            if digest in self._known:
                continue
            try:
                step, guards, optimizers = decode()
                objs = warm.check_with_state(guards, roots)
                loaded = executable.load(digest) if isinstance(objs, list) else None
            except (DeviceError, UnsupportedError):
                raise  # of the machine, not of what was stored
            except Exception as error:
                warm.damaged(digest, error)
                continue
            if loaded is None:
                continue
            self._known.add(digest)
            self.loads += 1
            variant = Variant(Capture(self.name, step, guards, optimizers=optimizers), loaded)
            yield variant, variant.bind_to(objs)

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], objects: ObjectMap, key: str | None, mismatch: Any
    ) -> Any:
        from nova.capture import session, warm
        from nova.capture.replay import fresh_copies
        from nova.capture.sources import Roots
        from nova.progress import Progress

        if mismatch is not None:
            self._announce(mismatch)
        if self.options.backend == "compile":
            from nova.runtime import pool

            pool.start()  # the workers import the compiler while the step is recorded
        with Progress(self.name) as progress:
            progress("capture")
            capture = session.capture(self.function, args, kwargs, self.name, objects)
            self.captures += 1
            self.capture_seconds = progress.elapsed
            if capture.truncated:
                self._once("the step reaches more than 100,000 Python objects: changes beyond them are not seen")
            if capture.unseen:
                self._once(f"the step reaches large arrays: what changes in {capture.unseen[0]} is not seen")
            try:
                variant = None if capture.once else self._compile(capture, progress)
            except BaseException:
                capture.rollback()
                raise
        capture.rollback = _nothing
        objects.release()
        result, capture.result, capture.inputs = fresh_copies(capture.result), None, []
        if any(spec.type.device != "cpu" for spec in capture.signature.inputs):
            gc.collect()  # what the recorded run left in cycles holds memory of the device until a collection
        if variant is None:
            progress.summary(f"recorded in {progress.elapsed:.2f} s, not compiled yet: {capture.once[0]}")
            return result
        self._variants.insert(0, variant)
        del self._variants[VARIANTS:]
        if key is not None:
            warm.save(key, capture.signature, capture.guards, self.name, capture.optimizers, variant.executable)
        with contextlib.suppress(Exception):  # the next call binds again, and reports what is wrong
            variant.bind(Roots(self.function, args, kwargs, capture.consts))
        kernels = f", {progress.counts['kernels']} kernels" if "kernels" in progress.counts else ""
        seconds = progress.seconds.get("capture", 0.0)
        progress.summary(f"captured and compiled in {progress.elapsed:.2f} s (capture {seconds:.2f} s{kernels})")
        return result

    def _compile(self, capture: Any, progress: Any) -> Variant:
        if self.options.backend == "interpret":
            from nova.capture.interpret import Interpreted

            return Variant(capture, Interpreted(capture.step))
        from nova import pipeline
        from nova.dump import StepDump
        from nova.runtime import placement
        from nova.schedule import target

        device = placement.device_of(capture.step)
        chosen = target.by_name(device)
        self.compilations += 1
        dump = StepDump.of(self.name)
        compilation = pipeline.compile_step(capture.step, chosen, self.options, progress, dump, device)
        if knobs.debug >= 2:
            from nova import inspect

            inspect.print_kernels(compilation.kernels, chosen)
        return Variant(capture, compilation.executable, compilation)

    # -- notices

    def _announce(self, mismatch: Any) -> None:
        """Says why there is another capture, and what to do when it keeps happening."""
        from nova.progress import notice

        text = f"{self.name}: another capture, because {mismatch}"
        what = mismatch.what.split(" was ")[0] if mismatch.value is None else ""
        seen = self._history.setdefault((mismatch.source, mismatch.step, what), [])
        value = mismatch.what if mismatch.value is None else mismatch.value
        if not isinstance(value, (int, float, str)):
            value = mismatch.what
        if value not in seen:
            seen.append(value)
        if what.startswith("dimension"):
            advice = ""
            if len(seen) >= 2:
                advice = (
                    f". That {what} has had {len(seen) + 1} sizes: each is a capture. Pad it to one size or a few "
                    "(torch.nn.functional.pad, or a batch sampler that drops the last batch)"
                )
            notice(text + advice)
        elif len(seen) >= 2 and isinstance(value, (int, float)) and not isinstance(value, bool):
            notice(
                f"{text}. It has had {len(seen) + 1} values: each is a capture. Pass it as a tensor or a float argument"
            )
        elif knobs.debug >= 1:
            notice(text)

    def _once(self, text: str) -> None:
        from nova.progress import notice

        if text not in self._noted:
            self._noted.add(text)
            notice(f"{self.name}: {text}")


def _forget(bindings: list[Any], reference: Any) -> None:
    """Drops a binding whose model or optimizer has gone. Replaces no list: a call may be iterating over it."""
    binding = reference()
    if binding in bindings:
        bindings.remove(binding)


def target_of(step: Any) -> tuple[Callable[..., Any], Options]:
    """The plain callable behind a step (a method of one stays bound), and the options it is compiled with."""
    if isinstance(step, Step):
        return step.function, step.options
    if isinstance(step, types.MethodType) and isinstance(step.__func__, Step):
        return types.MethodType(step.__func__.function, step.__self__), step.__func__.options
    return step, Options()


def _nothing() -> None:
    return None


def _run(
    function: Any,
    variant: Variant,
    binding: Any,
    found: tuple[list[Any], list[float]],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """The steady state: everything is bound, the guards hold."""
    inputs, numbers = found
    effects = binding.effects
    find = functools.partial(_find, function, variant, args, kwargs)
    try:
        variant.executable.reserve()
        known = [find(source) for source in effects.sources]
        for effect in effects.flags:
            effect([], inputs, known, find)
        if effects.early:
            for phase, effect in enumerate(effects.before, 1):
                effect([], inputs, known, find)
                for position, when, source in binding.late:
                    if when == phase:
                        numbers[position] = find(source)
        effects.count_writes(inputs)  # a step that stops halfway has written, too
        fresh = variant.executable(inputs, numbers, _seed() if variant.seeded else 0)
        effects.after(fresh, inputs, known, find)
        return effects.output(fresh, inputs, known)
    finally:
        binding.release()


def _find(function: Any, variant: Variant, args: Sequence[Any], kwargs: dict[str, Any], source: Any) -> Any:
    from nova.capture.sources import Roots

    return Roots(function, args, kwargs, variant.capture.consts).resolve(source)


def _seed() -> int:
    from nova.capture.rng import draw_seed

    return draw_seed()
