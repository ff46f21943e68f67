"""What a replayed step does on the host, around the compiled program: effects, and the user's output tree.

    scheduler.step()          {"kind": "call", "target": <scheduler>, "method": "step", "args": [], "kwargs": {}}
    group["lr"] *= 2          {"kind": "assign", "target": <number>, "value": {"float": 5}, "type": "float"}
    p.grad = None             {"kind": "grad_none", "param": <p>}
    loss.backward()           {"kind": "grad", "param": <p>, "output": 3}
    p.grad = flat[:4]         {"kind": "grad_view", "param": <p>, "input": 2, "size": [4], "stride": [1], ...}
    p.grad = q                {"kind": "grad_source", "param": <p>, "value": <q>}
    model.eval()              {"kind": "set", "target": <module>, "name": "training", "value": false}
    p.requires_grad_(False)   {"kind": "requires_grad", "target": <p>, "value": false}

The output tree is `outputs.py`'s; here it becomes one Python expression. What it names by source is looked up before
the step runs: a returned learning rate is the one before `scheduler.step()`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nova.capture.outputs import window
from nova.capture.signature import Signature, Source
from nova.capture.versions import bumper

Tree = Any


def class_path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def find_class(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


class Builder:
    """Compiles trees to functions of (fresh outputs, tensor inputs, numbers, roots)."""

    def __init__(self, signature: Signature, classes: Mapping[str, Any] | None = None):
        self.classes = dict(classes or {})
        self.sources: list[Source] = []  # what is looked up before the step runs
        self.fresh: dict[int, int] = {}
        self.state_of: dict[int, int] = {}
        for index, output in enumerate(signature.outputs):
            if output.kind == "state":
                assert output.input is not None
                self.state_of[index] = output.input
            else:
                self.fresh[index] = len(self.fresh)
        self.tensor_at: dict[int, int] = {}
        self.number_at: dict[int, int] = {}
        for index, spec in enumerate(signature.inputs):
            if spec.role == "scalar":
                self.number_at[index] = len(self.number_at)
            elif spec.role != "seed":
                self.tensor_at[index] = len(self.tensor_at)
        self._space: dict[str, Any] = {"OrderedDict": OrderedDict, "defaultdict": defaultdict, "window": window}
        self._windows: dict[int, str] = {}  # variables of the function that is being made

    def _constant(self, value: Any) -> str:
        name = f"K{len(self._space)}"
        self._space[name] = value
        return name

    def expression(self, tree: Tree) -> str:
        """Python source that builds the tree."""
        ((kind, value),) = tree.items()
        match kind:
            case "output":
                return self.output(value)
            case "float":
                return f"float({self.output(value)})"
            case "const":
                return self._constant(value)
            case "source":
                self.sources.append(value)
                return f"known[{len(self.sources) - 1}]"
            case "window":
                return self._window(value)
            case "tuple":
                return f"({''.join(self.expression(item) + ', ' for item in value)})"
            case "list":
                return f"[{', '.join(map(self.expression, value))}]"
            case "dict":
                return self._dict(value)
            case "mapping":
                cls = self._class(value)
                made = self._dict(value[2])
                return f"{self._constant(cls)}({'**' if dataclasses.is_dataclass(cls) else ''}{made})"
            case "namedtuple":
                return f"{self._constant(self._class(value))}({', '.join(map(self.expression, value[2]))})"
            case "sequence":
                return f"{self._constant(self._class(value))}([{', '.join(map(self.expression, value[2]))}])"
            case "dataclass":
                fields = ", ".join(f"{name}={self.expression(item)}" for name, item in value[2])
                return f"{self._constant(self._class(value))}({fields})"
        raise ValueError(f"unknown node in an output tree: {tree!r}")

    def _window(self, view: Mapping[str, Any]) -> str:
        """One object, however often it is returned."""
        name = self._windows.get(view["number"])
        if name is None:
            name = self._windows[view["number"]] = f"w{view['number']}"
            base = self.output(view["output"]) if "output" in view else f"inputs[{self.tensor_at[view['input']]}]"
            return f"({name} := window({base}, {self._constant(view)}))"
        return name

    def output(self, index: int) -> str:
        """signature.outputs[index]: a fresh tensor, or the updated input where it is a state output."""
        if index in self.state_of:
            return f"inputs[{self.tensor_at[self.state_of[index]]}]"
        return f"fresh[{self.fresh[index]}]"

    def _class(self, path: Sequence[Any]) -> Any:
        found = self.classes.get(f"{path[0]}:{path[1]}")
        return found if found is not None else find_class(f"{path[0]}:{path[1]}")

    def _dict(self, items: Sequence[Any]) -> str:
        return f"{{{', '.join(f'{self._constant(key)}: {self.expression(item)}' for key, item in items)}}}"

    def function(self, tree: Tree) -> Callable[[list[Any], list[Any], list[Any]], Any]:
        """A function of (fresh outputs, tensor inputs, what `sources` named before the step)."""
        self._windows.clear()
        text = f"def build(fresh, inputs, known):\n    return {self.expression(tree)}\n"
        exec(compile(text, "<nova outputs>", "exec"), self._space)
        return self._space["build"]


def tree_classes(value: Any, found: dict[str, Any]) -> None:
    """Collects the classes in a returned value: they may live where import cannot find them again."""
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (tuple, list)):
        items = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return
    found.setdefault(class_path(type(value)), type(value))
    for item in items:
        tree_classes(item, found)


# ---- effects

Run = Callable[[list[Any], list[Any], list[Any], Callable[[Source], Any]], None]  # fresh, inputs, known, find


class Effects:
    """The host effects of a step, in order, for one binding: `locate(source)` is the place of an object in `objs`."""

    def __init__(
        self, signature: Signature, classes: Mapping[str, Any], objs: list[Any],
        locate: Callable[[Source], int | None], use_native: bool = True,
    ):  # fmt: skip
        self.builder = Builder(signature, classes)
        self.objs, self.locate = objs, locate
        self.output = self.builder.function(signature.out_spec)
        written = [o.input for o in signature.outputs if o.counted and o.input is not None]
        self.count_writes = bumper([self.builder.tensor_at[k] for k in written], use_native)
        # Effects up to the last phase in which a number is read run before the program, the others after it.
        self.early = max((spec.phase for spec in signature.inputs if spec.role == "scalar"), default=0)
        self.before = [self._compile(effect) for effect in signature.effects[: self.early]]
        # Flags come first: a scheduler looks at whether its optimizer has stepped.
        self.flags = [self._compile(effect) for effect in signature.effects if effect["kind"] == "set"]
        self._clear: list[int] = []
        self._assign: list[tuple[int, int]] = []
        self._run: list[Run] = []
        for effect in signature.effects[self.early :]:
            if effect["kind"] == "set":
                continue
            place = locate(effect["param"]) if effect["kind"] in ("grad", "grad_none") else None
            if place is None:
                self._run.append(self._compile(effect))
            elif effect["kind"] == "grad_none":
                self._clear.append(place)
            elif effect["output"] in self.builder.fresh:
                self._assign.append((place, self.builder.fresh[effect["output"]]))
            else:
                self._run.append(self._compile(effect))

    @property
    def sources(self) -> list[Source]:
        return self.builder.sources

    def _compile(self, effect: dict[str, Any]) -> Run:
        source: Source = effect["target"] if "target" in effect else effect["param"]
        place, objs = self.locate(source), self.objs

        def target(find: Callable[[Source], Any]) -> Any:
            return find(source) if place is None else objs[place]

        match effect["kind"]:
            case "call":
                method, args, kwargs = effect["method"], effect["args"], effect["kwargs"]
                return lambda fresh, inputs, known, find: getattr(target(find), method)(*args, **kwargs)
            case "assign":
                return self._assignment(source, self.builder.function(effect["value"]), effect["type"])
            case "set":
                name, value = effect["name"], effect["value"]

                def set_(fresh: Any, inputs: Any, known: Any, find: Any) -> None:
                    table = target(find).__dict__
                    if table.get(name, set_) is not value:
                        table[name] = value

                return set_
            case "requires_grad":
                value = effect["value"]
                return lambda fresh, inputs, known, find: target(find).requires_grad_(value)
            case "grad_none":
                return lambda fresh, inputs, known, find: setattr(target(find), "grad", None)
            case "grad":
                to = self.builder.function({"output": effect["output"]})
                return lambda fresh, inputs, known, find: setattr(target(find), "grad", to(fresh, inputs, known))
            case "grad_source":
                value = effect["value"]
                return lambda fresh, inputs, known, find: setattr(target(find), "grad", find(value))
            case "grad_view":
                return self._grad_view(effect, target)
        raise ValueError(f"unknown effect {effect['kind']!r}")

    def _grad_view(self, effect: dict[str, Any], target: Callable[[Any], Any]) -> Run:
        position = self.builder.tensor_at[effect["input"]]

        def view(fresh: Any, inputs: Any, known: Any, find: Any) -> None:
            target(find).grad = window(inputs[position], effect)

        return view

    def _assignment(self, source: Source, value: Callable[..., Any], kind: str) -> Run:
        """A number of a parameter group that the step itself sets; one in a tuple replaces the tuple."""
        cast = {"int": int, "float": float}[kind]
        owner = Source(source.root, source.key, source.path[:-1])
        key: Any = source.path[-1][1]

        def assign(fresh: Any, inputs: Any, known: Any, find: Any) -> None:
            table, number = find(owner), cast(value(fresh, inputs, known))
            if isinstance(table, tuple):
                items = list(table)
                items[key] = number
                find(Source(owner.root, owner.key, owner.path[:-1]))[owner.path[-1][1]] = tuple(items)
            else:
                table[key] = number

        return assign

    def after(self, fresh: list[Any], inputs: list[Any], known: list[Any], find: Callable[[Source], Any]) -> None:
        """Runs the effects that come after the compiled program."""
        objs = self.objs
        for place in self._clear:
            objs[place].grad = None
        for place, output in self._assign:
            objs[place].grad = fresh[output]
        for run in self._run:
            run(fresh, inputs, known, find)


def fresh_copies(value: Any) -> Any:
    """The tensors of an output without their autograd history, as a replay gives them."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.grad_fn is not None else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(fresh_copies, value))
    if type(value) in (tuple, list):
        return type(value)(map(fresh_copies, value))
    if type(value) is dict:
        return {key: fresh_copies(item) for key, item in value.items()}
    return value
