"""`nova.verify`: the compiled step against eager PyTorch and float64, from the same state.

The captured graph is evaluated node by node in PyTorch, once in its own precision (what eager computes) and once in
float64. A compiled result is right if its distance from float64 is no more than a few times eager's own. If an output
is not, the step is compiled again with its intermediate values as outputs, and the first wrong one is named by the
user's module and line. State is left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from nova.capture.signature import CapturedStep, OutputSpec, Signature, TensorType
from nova.config import Options
from nova.errors import NovaError
from nova.runtime import placement

FACTOR = 3.0  # how much farther from float64 than eager a result may be
FLOOR = {"f32": 4e-6, "f64": 1e-14, "bf16": 2e-2, "f16": 3e-3}  # relative; for results that eager gets exact
CHUNK = 64  # intermediate values exported at a time while looking for the first wrong one


@dataclass(frozen=True)
class Check:
    """One compared tensor: relative distances from the float64 result."""

    name: str
    where: str
    nova: float
    eager: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.nova <= self.limit

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "WRONG"
        place = f"  at {self.where}" if self.where else ""
        return f"{verdict}: {self.name}: error {self.nova:.1e}, eager's {self.eager:.1e}, limit {self.limit:.1e}{place}"


@dataclass
class Verification:
    """The verdict. `first_wrong` is the earliest value beyond rounding, or None."""

    checks: list[Check] = field(default_factory=list)
    first_wrong: Check | None = None

    @property
    def ok(self) -> bool:
        return self.first_wrong is None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            worst = max((c.nova for c in self.checks), default=0.0)
            return f"verified: {len(self.checks)} tensors agree with eager within rounding (largest error {worst:.1e})"
        bad = [c for c in self.checks if not c.ok]
        return "\n".join([f"first wrong value: {self.first_wrong}", *map(str, bad)])


def verify(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Verification:
    """Compiles `step` for these arguments and compares it with eager and float64; changes no state."""
    from nova.inspect import capture

    captured = capture(step, *args, **kwargs)
    generator = torch.get_rng_state()
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.set_rng_state(generator)
    return verify_captured(captured.step, captured.inputs, seed, captured.options)


def verify_captured(captured: CapturedStep, inputs: Sequence[Any], seed: int, options: Options) -> Verification:
    """`inputs` follow the signature: tensors, numbers, None for the seed."""
    device = placement.device_of(captured)
    values = [_value(spec, given, seed, device) for spec, given in zip(captured.signature.inputs, inputs, strict=True)]
    eager, exact = evaluate(captured.graph, values, False), evaluate(captured.graph, values, True)
    results = list(next(n for n in captured.graph.nodes if n.op == "output").args[0])
    result = Verification(_compare(captured, results, values, seed, options, eager, exact))
    if all(c.ok for c in result.checks):
        return result
    candidates = [n for n in captured.graph.nodes if n.op == "call_function" and _exportable(n)]
    for start in range(0, len(candidates), CHUNK):
        chunk = candidates[start : start + CHUNK]
        for check in _compare(_probe(captured, chunk), chunk, values, seed, options, eager, exact):
            if not check.ok:
                result.first_wrong = check
                return result
    result.first_wrong = next(c for c in result.checks if not c.ok)
    return result


def _value(spec: Any, given: Any, seed: int, device: str) -> Tensor:
    if spec.role == "seed":
        return torch.tensor(seed, dtype=torch.int64, device=device)
    if spec.role == "scalar":
        return torch.tensor(float(given), dtype=torch.float64)
    return given.detach().clone()


def evaluate(graph: fx.Graph, values: Sequence[Tensor], float64: bool) -> dict[fx.Node, Any]:
    """Every node's value in PyTorch. With `float64`, float32 and float64 arithmetic both run in float64."""
    found: dict[fx.Node, Any] = {}
    inputs = iter(values)

    def widen(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype == torch.float32:
            return x.double()
        return torch.float64 if x is torch.float32 else x

    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                found[node] = next(inputs)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = _call(node.target, args, kwargs, widen if float64 else None)
    return found


def _call(target: Any, args: Any, kwargs: Any, widen: Callable[[Any], Any] | None) -> Any:
    if widen is not None:
        try:
            return target(*tree_map(widen, args), **tree_map(widen, kwargs))
        except (RuntimeError, NotImplementedError):  # an operation without float64: its own precision has to do
            args, kwargs = tree_map(_narrow, (args, kwargs))
    return target(*args, **kwargs)


def _narrow(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype == torch.float64 and x.dim() else x


def _exportable(node: fx.Node) -> bool:
    kind = node.meta.get("type")
    return isinstance(kind, TensorType) and kind.dtype in FLOOR and not node.meta.get("dynamic")


def _probe(captured: CapturedStep, nodes: list[fx.Node]) -> CapturedStep:
    """The same step with `nodes` as its only outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    wanted, needed = set(nodes), set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    for node in captured.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = node.meta
    assert wanted <= copies.keys()
    graph.output(tuple(copies[n] for n in nodes))
    outputs = [OutputSpec("user", n.meta["type"]) for n in nodes]
    signature = Signature(captured.signature.inputs, outputs, None, [], captured.signature.uses_rng)
    return CapturedStep(graph, signature, None, f"{captured.name}_probe")


def _compare(
    captured: CapturedStep, nodes: Sequence[fx.Node], values: Sequence[Tensor], seed: int, options: Options,
    eager: dict[fx.Node, Any], exact: dict[fx.Node, Any],
) -> list[Check]:  # fmt: skip
    """Compiles and runs a step, and compares each output with the node of the original graph that it stands for."""
    from nova import pipeline
    from nova.schedule import target

    device = placement.device_of(captured)
    executable: Any = pipeline.compile_step(captured, target.by_name(device), options, device=device).executable
    specs = captured.signature.inputs
    mine = [v.clone() for v in values]
    tensors = [v for v, s in zip(mine, specs, strict=True) if s.role not in ("scalar", "seed")]
    scalars = [v.item() for v, s in zip(values, specs, strict=True) if s.role == "scalar"]
    fresh = iter(executable(tensors, scalars, seed))
    checks = []
    for spec, node in zip(captured.signature.outputs, nodes, strict=True):
        got = mine[spec.input] if spec.kind == "state" and spec.input is not None else next(fresh)
        name = specs[spec.input].name if spec.input is not None else node.name
        checks.append(_check(name, node, got, eager[node], exact[node], spec.type.dtype))
    return checks


def _check(name: str, node: fx.Node, got: Tensor, eager: Tensor, exact: Tensor, dtype: str) -> Check:
    source = node.meta.get("src")
    where = (f"{source.module}: " if source and source.module else "") + (str(source) if source else "")
    if dtype not in FLOOR:
        same = 0.0 if torch.equal(got.reshape(-1), eager.reshape(-1)) else math.inf
        return Check(name, where, same, 0.0, 0.0)
    mine, theirs = distance(got, exact), distance(eager, exact)
    return Check(name, where, mine, theirs, FACTOR * theirs + FLOOR[dtype])


def distance(a: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact value; infinite where non-finite values don't match."""
    a, b = a.double().reshape(-1), exact.double().reshape(-1)
    if a.shape != b.shape:
        raise NovaError(f"a compiled output has {a.numel()} elements, expected {b.numel()}")
    finite = torch.isfinite(b)
    if not torch.equal(finite, torch.isfinite(a)) or not torch.equal(torch.isnan(a), torch.isnan(b)):
        return math.inf
    a, b = a[finite], b[finite]
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item() if a.numel() else 0.0
