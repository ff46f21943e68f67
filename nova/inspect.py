"""Looking at what the compiler did: the stages as objects, and one report.

captured = nova.capture(step, x, y)          level 0, state unchanged
lowered = captured.lower("cpu")              levels 1 to 3, for any target
compiled = lowered.compile()                 kernels, memory plan, step program
print(nova.explain(step, x, y))              all of it as one report
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nova.capture.signature import CapturedStep
from nova.config import Options
from nova.errors import NovaError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nova.fusion.outline import KernelText
    from nova.pipeline import Compilation, Kernel
    from nova.runtime.profile import KernelTime


def capture(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    """Records one run of `step` and puts all state back: tensors, Python objects, the generator."""
    import torch

    from nova.capture import session
    from nova.jit import target_of

    function, options = target_of(step)
    name = getattr(step, "__name__", type(step).__name__)
    generator = torch.get_rng_state()
    start = time.perf_counter()
    recorded = session.capture(function, args, kwargs, name)
    seconds = time.perf_counter() - start
    recorded.rollback()
    torch.set_rng_state(generator)
    return Captured(recorded.step, options, seconds, recorded.inputs)


@dataclass(repr=False)
class Captured:
    """Level 0: the step as one functional graph."""

    step: CapturedStep
    options: Options
    seconds: float
    inputs: list[Any]  # what each input of the signature stood for: tensors, numbers, None for the seed

    def __repr__(self) -> str:
        operations = sum(node.op == "call_function" for node in self.step.graph.nodes)
        return f"<Captured: {operations} operations, {len(self.inputs)} inputs; see as_text()>"

    def as_text(self) -> str:
        """The graph, one operation a line."""
        return str(self.step.graph)

    def lower(self, target: str = "cpu") -> Lowered:
        """Levels 1 to 3 for a target that need not be in this machine."""
        from nova import pipeline
        from nova.runtime import placement
        from nova.schedule import target as targets

        clock = pipeline.Clock(None)
        snapshots: dict[str, str] = {}
        chosen = targets.by_name(target)
        device = placement.device_of(self.step)
        runs = device.startswith("cuda") and targets.by_name(device) == chosen
        module, decisions = pipeline.lower_step(self.step, chosen, self.options, clock, snapshots)
        return Lowered(self, chosen, module, decisions.decisions(), snapshots, device if runs else None)


ORDER = ("kind", "intrinsic", "workgroup", "reduction", "subgroup", "block_queries", "block_keys", "vector", "threads")


def _choice(name: str, value: Any) -> str:
    """One field of a schedule as "workgroup 51x192"; "" if it chooses nothing."""
    if name == "promoted":
        sides = [side for side, on in zip(("lhs", "rhs"), value, strict=True) if on]
        return f"promoted {'+'.join(sides)}" if sides else ""
    if isinstance(value, bool):
        return name if value else ""
    if value in (0, 1, "", (1, 1)) and name != "threads":
        return ""
    if name == "kind":
        return str(value)
    return f"{name} {'x'.join(map(str, value)) if isinstance(value, tuple) else value}"


@dataclass
class ScheduledKernel:
    """One distinct kernel with its schedule."""

    name: str
    kind: str
    calls: int
    schedule: dict[str, Any]  # lowering_config as plain values
    predicted_seconds: float | None  # of one call
    levels: dict[str, str]  # stage name -> text

    measured_seconds: float | None = None  # of one call
    launches: tuple[Any, ...] = ()  # on a GPU: nova.gpu.launcher.Launch
    smaller: str = ""  # why the schedule is not the one that was chosen first (nova/gpu/fit.py)

    @property
    def schedule_text(self) -> str:
        """What was chosen, in the order of the nested tiles; choices that are "none" are left out."""
        names = [name for name in ORDER if name in self.schedule]
        names += [name for name in self.schedule if name not in (*ORDER, "reasons", "predicted_seconds")]
        return ", ".join(text for name in names if (text := _choice(name, self.schedule[name])))

    @property
    def launch_text(self) -> str:
        """Blocks x threads of each launch, and its dynamic shared memory."""
        shapes = []
        for launch in self.launches:
            blocks = "x".join(map(str, launch.grid[: max(i + 1 for i in range(3) if i == 0 or launch.grid[i] > 1)]))
            shared = f" {launch.shared >> 10}K" if launch.shared else ""
            shapes.append(f"({blocks}) x {launch.threads}{shared}")
        return ", ".join(shapes)


@dataclass(repr=False)
class Lowered:
    """Levels 1 to 3: the outlined step and its scheduled kernels."""

    captured: Captured
    target: Any
    module: Any
    decisions: list[Any]
    snapshots: dict[str, str]
    device: str | None = None  # where it can run here; None: code for another machine

    def __repr__(self) -> str:
        return f"<Lowered for {self.target.name}: {len(self.kernels)} kernels; see as_text()>"

    def as_text(self, level: str = "outline-kernels") -> str:
        """The step after a stage ("nova", "simplify", "form-dispatches", ...), or a kernel's level "kernel:stage"."""
        from nova import pipeline

        if level in self.snapshots:
            return self.snapshots[level]
        name, _, stage = level.partition(":")
        for kernel in self.kernels:
            if kernel.name == name and stage in kernel.levels:
                return kernel.levels[stage]
            if kernel.name == name and stage in [s.name for s in pipeline.kernel_stages(self.target)]:
                text = kernel.levels["outline-kernels"]
                return [str(m) for found, m in pipeline.lower_kernel(text, self.target) if found == stage][-1]
        raise NovaError(f"no level {level!r}; the step has {', '.join(self.snapshots)}; a kernel's are 'name:stage'")

    @cached_property
    def kernels(self) -> list[ScheduledKernel]:
        """Every distinct kernel, lowered to level 3."""
        from nova.fusion import outline

        return [scheduled(kernel, self.target) for kernel in outline.kernels(self.module)]

    def cost_analysis(self) -> dict[str, float]:
        """Predicted seconds of a step by kernel, summed over its calls."""
        return {k.name: k.predicted_seconds * k.calls for k in self.kernels if k.predicted_seconds is not None}

    def compile(self) -> Compiled:
        """Machine code and the memory plan."""
        from nova import pipeline

        step = self.captured
        device = "cpu" if not self.target.is_gpu else self.device
        return Compiled(self, pipeline.compile_step(step.step, self.target, step.options, device=device))


@dataclass(repr=False)
class Compiled:
    """Levels 4 to 6 and the step program."""

    lowered: Lowered
    compilation: Compilation

    def __repr__(self) -> str:
        return f"<Compiled for {self.lowered.target.name}: kernels {', '.join(self.kernels)}; see as_text(kernel)>"

    def as_text(self, kernel: str) -> str:
        """Code of a kernel: PTX for a GPU, else LLVM IR."""
        found = self._kernel(kernel)
        return found.code.ptx or found.llvm_ir

    def ptx(self, kernel: str) -> str:
        """Assembly text of a kernel for a GPU."""
        return self._kernel(kernel).code.ptx

    def cubin(self, kernel: str) -> bytes:
        """Machine code of a kernel for a GPU; empty where there is no ptxas."""
        return self._kernel(kernel).code.cubin

    def launches(self, kernel: str) -> list[dict[str, Any]]:
        """Every launch of a kernel on a GPU: symbol, grid, threads, shared bytes, and what ptxas says of it."""
        code = self._kernel(kernel).code
        resources = code.resources or [{}] * len(code.launches)
        return [{**asdict(launch), **used} for launch, used in zip(code.launches, resources, strict=True)]

    @property
    def kernels(self) -> list[str]:
        return [k.name for k in self.compilation.kernels]

    def _kernel(self, name: str) -> Kernel:
        for k in self.compilation.kernels:
            if k.name == name:
                return k
        raise NovaError(f"no kernel {name!r}; kernels: {', '.join(self.kernels)}")

    def memory_analysis(self) -> Memory:
        """What the step needs beside its state, and where the arena's bytes are."""
        return Memory.of(self.compilation.executable, self.lowered.captured.step)


def scheduled(kernel: KernelText | Kernel, target: Any, code: Any = None) -> ScheduledKernel:
    """Lowers one kernel to level 3 here, keeping the text after every stage. `code`: what it was compiled to, if that
    is known: it knows whether a block may have less shared memory than the target has."""
    from nova import pipeline
    from nova.fusion import outline
    from nova.gpu import fit
    from nova.mlir import context
    from nova.schedule import config

    levels = {"outline-kernels": kernel.text}
    schedule: dict[str, Any] = {}
    reason = getattr(code, "smem_reason", "")
    options = fit.allowance(target, code.smem_limit, reason) if reason else target
    for stage, module in pipeline.lower_kernel(kernel.text, options, last=3):
        levels[stage] = str(module)
        with context():
            for function in outline.kernel_functions(module):
                schedule = config.plain(function.operation) or schedule
    predicted = schedule.get("predicted_seconds") or None  # a kernel over a list of tensors predicts nothing
    return ScheduledKernel(kernel.name, kernel.kind, kernel.calls, schedule, predicted, levels, smaller=reason)


def print_kernels(kernels: Sequence[Kernel], target: Any) -> None:
    """NOVA_DEBUG=2: one line a kernel."""
    for k in (scheduled(kernel, target, kernel.code) for kernel in kernels):
        predicted = f", predicted {k.predicted_seconds * 1e6:.1f} us" if k.predicted_seconds else ""
        smaller = f"; {k.smaller}" if k.smaller else ""
        print(f"nova:   {k.name} ({k.kind}) x{k.calls}: {k.schedule_text}{predicted}{smaller}", file=sys.stderr)


@dataclass(frozen=True)
class Memory:
    """Bytes of a step. `step_bytes` is what it needs beside the state that lives between steps."""

    arena: int
    outputs: int  # fresh outputs: the loss, gradients that are kept
    state: int  # parameters, buffers, optimizer state, kept gradients
    lower_bound: int  # no arena can be smaller with this order of kernels
    without_reuse: int
    table: str

    @property
    def step_bytes(self) -> int:
        return self.arena + self.outputs

    @property
    def peak(self) -> int:
        """Arena, outputs and live state."""
        return self.step_bytes + self.state

    @classmethod
    def of(cls, executable: Any, step: CapturedStep) -> Memory:
        from nova.runtime.dtypes import itemsize, numel

        plan, laid_out = executable.plan, executable.memory_plan
        kept = ("param", "buffer", "opt_state", "grad")
        state = sum(numel(i.type.shape) * itemsize(i.type.dtype) for i in step.signature.inputs if i.role in kept)
        fresh = sum(numel(o.shape) * itemsize(o.dtype) for o in plan.outputs)
        return cls(
            plan.arena_bytes, fresh, state, laid_out.lower_bound if laid_out else 0,
            laid_out.naive_bytes if laid_out else 0, laid_out.table() if laid_out else "",
        )  # fmt: skip


@dataclass
class Report:
    """What `nova.explain` found. Print it, or read its fields."""

    name: str
    nodes: int  # operations captured
    kernels: list[ScheduledKernel]
    decisions: list[Any]
    fallbacks: list[str]  # "aten.topk.default x2  (file, line 7)": what runs through PyTorch
    memory: Memory
    seconds: dict[str, float]  # of each stage; "capture" first
    launches: int
    inputs: Counter = field(default_factory=Counter)  # lifted inputs by role

    def __rich_console__(self, console: Any, options: Any) -> Iterator[RenderableType]:
        from rich.table import Table

        inputs = ", ".join(f"{n} {role}" for role, n in self.inputs.items())
        yield f"[bold]{self.name}[/]: {self.nodes} operations captured; inputs: {inputs}"
        yield f"{len(self.kernels)} distinct kernels, {self.launches} launches a step; stages: " + ", ".join(
            f"{stage} {s:.2f} s" for stage, s in self.seconds.items()
        )
        measured = any(k.measured_seconds is not None for k in self.kernels)
        gpu = any(k.launches for k in self.kernels)
        columns = ["kernel", "kind", "calls", "schedule", *(["launches"] if gpu else []), "predicted us"]
        columns += ["measured us"] if measured else []
        table = Table(*columns, title="Kernels; times are of one call")
        for k in sorted(self.kernels, key=lambda k: -(k.measured_seconds or k.predicted_seconds or 0) * k.calls):
            row = [k.name, k.kind, str(k.calls), k.schedule_text, *([k.launch_text] if gpu else [])]
            row.append(_microseconds(k.predicted_seconds))
            table.add_row(*row, *([_microseconds(k.measured_seconds)] if measured else []))
        yield table
        yield from (f"  {k.name}: {k.smaller}" for k in self.kernels if k.smaller)
        refused = Counter(
            f"{d.kind}: {d.op}{' with ' + d.with_op if d.with_op else ''}: {d.reason}" for d in self.decisions
        )
        yield f"\n[bold]Fusion[/]: {len(self.decisions)} decisions"
        for text, count in refused.most_common():
            yield f"  {text}" + (f"  (x{count})" if count > 1 else "")
        step, state = self.memory.step_bytes / 1e6, self.memory.state / 1e6
        yield f"\n[bold]Memory[/]: {step:.1f} MB beside {state:.1f} MB of state"
        yield self.memory.table
        yield "\n[bold]Through PyTorch[/]: " + ("nothing" if not self.fallbacks else "")
        yield from (f"  {line}" for line in self.fallbacks)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=140, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def explain(step: Callable[..., Any], *args: Any, measure: bool = False, **kwargs: Any) -> Report:
    """Captures and compiles `step` for these arguments, leaves all state as it was, and reports every stage.

    With `measure`, each kernel is also timed where it runs, on copies of the inputs.
    """
    from nova.runtime import placement

    captured = capture(step, *args, **kwargs)
    lowered = captured.lower(placement.device_of(captured.step))
    compiled = lowered.compile()
    lowered.kernels = [scheduled(k, lowered.target, k.code) for k in compiled.compilation.kernels]
    for kernel, made in zip(lowered.kernels, compiled.compilation.kernels, strict=True):
        kernel.launches = made.code.launches
    if measure:
        _measure(lowered, compiled.compilation.executable)
    plan = compiled.compilation.executable.plan
    counts = Counter((call.target, call.source) for call in plan.aten_calls)
    fallbacks = [f"{target} x{n}" + (f"  ({source})" if source else "") for (target, source), n in counts.items()]
    graph = captured.step.graph
    return Report(
        captured.step.name,
        sum(node.op == "call_function" for node in graph.nodes),
        lowered.kernels,
        lowered.decisions,
        fallbacks,
        compiled.memory_analysis(),
        {"capture": captured.seconds, **compiled.compilation.seconds},
        sum(k.calls * max(len(k.launches), 1) for k in lowered.kernels),
        Counter(i.role for i in captured.step.signature.inputs),
    )


def _measure(lowered: Lowered, executable: Any) -> None:
    """Sets the measured time of every kernel."""
    from nova.runtime.profile import profile

    captured = lowered.captured
    specs = captured.step.signature.inputs
    given = list(zip(specs, captured.inputs, strict=True))
    tensors = [value for spec, value in given if spec.role not in ("scalar", "seed")]
    scalars = [float(value) for spec, value in given if spec.role == "scalar"]
    seconds, calls = _by_kernel(lowered.module, profile(executable, tensors, scalars))
    for kernel in lowered.kernels:
        if calls[kernel.name]:
            kernel.measured_seconds = seconds[kernel.name] / calls[kernel.name]


def _by_kernel(module: Any, times: Sequence[KernelTime]) -> tuple[dict[str, float], Counter[str]]:
    """Seconds and calls of each distinct kernel of an outlined step."""
    from nova.fusion import outline

    bodies = outline.bodies_of(module)
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for timed in times:
        name = bodies.get(timed.name, timed.name)  # the copies of new state have no body of the step's
        seconds[name] += timed.median
        calls[name] += timed.calls
    return seconds, calls


def breakdown(step: Any, *args: Any) -> list[dict[str, Any]]:
    """Each kernel of a jitted step that was called last with arguments like these, largest first: calls, seconds on
    copies of its inputs, share of all kernels' time, and the seconds that its schedule predicts. Empty for a step that
    another process compiled: what the artifact cache keeps of a step knows no schedules."""
    from nova import mlir
    from nova.runtime.profile import profile
    from nova.schedule import target

    variant = step._variants[0]
    if variant.compilation is None:
        return []
    inputs, scalars = variant.bindings[0].enter(args, {})
    compilation = variant.compilation
    seconds, calls = _by_kernel(mlir.parse(compilation.module_text()), profile(variant.executable, inputs, scalars))
    whole = sum(seconds.values())
    chosen = target.by_name(variant.executable.plan.device)
    known = {k.name: scheduled(k, chosen, k.code) for k in compilation.kernels}
    rows = []
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        predicted = known[name].predicted_seconds if name in known else None
        rows.append({
            "kernel": name, "kind": known[name].kind if name in known else "copy", "calls": calls[name],
            "seconds": spent, "share": spent / whole,
            "predicted_seconds": None if predicted is None else predicted * calls[name],
        })  # fmt: skip
    return rows
