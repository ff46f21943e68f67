"""Attention kernels on an NVIDIA GPU beside PyTorch's: `python benchmarks/attention_gpu.py`.

Kernels are compiled by Nova's own path and launched through the driver, so a figure is device time of the launches and
nothing else. With `--build FOLDER` they are only compiled (no GPU is needed), with `--kernels FOLDER` only run. Results
are compared with float64 before anything is timed; contestants take turns, and medians are reported.

`--tiles` adds other schedules of the same kernels: rows,columns,threads,stages,hold,resident for the query side (and,
after a colon, for the key half).
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpu_kernels
import torch
import torch.nn.functional as F
import typer
from gpu_kernels import Kernel, timing

SHAPES = ((8, 12, 1024, 64), (8, 12, 2048, 64), (8, 16, 1024, 128))  # batch, heads, length, head dim
PRECISIONS = ("bf16", "tf32")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "f32": torch.float32}
WARM_CALLS = 20
COLD_BYTES = 256 << 20  # written between repetitions, so that no operand is in the second-level cache


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel to compile: what it computes, and by which tiles ("" = the schedule's own choice)."""

    shape: tuple[int, int, int, int]
    precision: str
    backward: bool
    tiles: str = ""
    causal: bool = True

    @property
    def name(self) -> str:
        direction = "backward" if self.backward else "forward"
        tiles = f" [{self.tiles}]" if self.tiles else ""
        return f"{'x'.join(map(str, self.shape))} {self.precision} {direction}{tiles}"


@dataclasses.dataclass(frozen=True)
class Built:
    """Its code, as plain data."""

    ptx: str
    cubin: bytes
    workspace: int
    launches: tuple[tuple[str, tuple[int, int, int], int, int], ...]  # symbol, grid, threads, shared bytes
    notes: str


def build(variant: Variant, board: str) -> Built:
    """Compiles a variant. Needs no GPU."""
    from nova import mlir
    from nova.gpu.compile import compile_kernel
    from nova.mlir import ir
    from nova.schedule import annotate, config, target
    from nova.schedule.attention import AttentionSchedule
    from tests.attention_cases import Case
    from tests.attention_programs import level3

    batch, heads, length, dim = variant.shape
    dtype = "f32" if variant.precision == "tf32" else variant.precision
    case = Case(batch, heads, heads, length, length, dim, dim, dtype=dtype, causal=variant.causal, layout="packed")
    board_target = target.PRESETS[board]
    text = level3(case, variant.backward, False, board_target, tf32=variant.precision == "tf32")
    module = annotate.run(mlir.parse(text), board_target)
    with mlir.context(), ir.Location.unknown():
        kernel = next(iter(annotate.kernels(module.operation)))
        schedule = config.read(kernel.operation, AttentionSchedule)
        assert schedule is not None
        if variant.tiles:
            schedule = with_tiles(schedule, variant.tiles)
            config.write(kernel.operation, schedule)
        text = str(module)
    made = compile_kernel(text, board_target)
    launches = tuple((launch.symbol, launch.grid, launch.threads, launch.shared) for launch in made.launches)
    used = "; ".join(f"{r['registers']} registers, {r['spill_stores']} spilled" for r in made.resources)
    query = (schedule.block_queries, schedule.block_keys, schedule.threads, schedule.stages, int(schedule.hold))
    notes = f"{query} {schedule.key_half or ''} {used}"
    return Built(made.ptx, made.cubin, made.workspace, launches, notes)


def with_tiles(schedule: Any, tiles: str) -> Any:
    """The schedule with other tiles."""
    parts = [[int(n) for n in part.split(",")] for part in tiles.split(":")]
    rows, columns, threads, stages, hold, resident = parts[0]
    changed = dataclasses.replace(
        schedule, block_queries=rows, block_keys=columns, panel=32 * rows // threads, threads=threads, stages=stages,
        hold=bool(hold), resident=resident,
    )  # fmt: skip
    return dataclasses.replace(changed, key_half=tuple(parts[1])) if len(parts) > 1 else changed


# --- running ---------------------------------------------------------------------------------------------------------


def cold_time(run: Callable[[], object], count: int = 10) -> float:
    """Seconds of one call, cold caches: events around each of `count` calls."""
    flush = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(count):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def warm_times(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of one call, of WARM_CALLS in a row, contestants in turn."""
    calls = {name: lambda _, run=run: run() for name, run in contestants.items()}
    return gpu_kernels.medians(calls, WARM_CALLS, rounds)


def cold_times(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of one call with cold caches, contestants in turn."""
    found = [{name: cold_time(run) for name, run in contestants.items()} for _ in range(rounds)]
    return {name: statistics.median(times[name] for times in found) for name in contestants}


class Problem:
    """Operands, and what PyTorch makes of them."""

    def __init__(self, shape: tuple[int, int, int, int], precision: str, causal: bool):
        self.shape, self.precision, self.causal = shape, precision, causal
        batch, heads, length, dim = shape
        generator = torch.Generator("cuda").manual_seed(0)
        make = lambda *size: torch.randn(*size, device="cuda", generator=generator).to(DTYPES[precision])
        self.qkv, self.dout = make(batch, length, 3 * heads * dim), make(batch, length, heads * dim)
        self.heads = [self._heads(part) for part in self.qkv.chunk(3, 2)]
        self.out = torch.empty_like(self.dout)
        self.lse = torch.empty(batch, heads, length, device="cuda")
        self.dqkv = torch.empty_like(self.qkv)
        self.first = slice(0, 1)
        self.exact = self._reference()

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (self.shape[1], -1)).transpose(1, 2)

    def _reference(self) -> dict[str, torch.Tensor]:
        """The first batch entry in float64."""
        leaves = [x[self.first].double().detach().requires_grad_() for x in self.heads]
        q, k, v = leaves
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.shape[3])
        if self.causal:
            scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), -math.inf)
        out = scores.softmax(-1) @ v
        out.backward(self._heads(self.dout)[self.first].double())
        return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}

    def arguments(self, backward: bool) -> list[torch.Tensor]:
        return [self.dout, self.qkv, self.out, self.lse, self.dqkv] if backward else [self.qkv, self.out, self.lse]

    def errors(self, backward: bool) -> float:
        """Of Nova's results in this problem's buffers: the largest relative error of a tensor."""
        found = {"out": self.out} if not backward else dict(zip(("dq", "dk", "dv"), self.dqkv.chunk(3, 2), strict=True))
        return max(self._error(self._heads(x)[self.first], name) for name, x in found.items())

    def _error(self, found: torch.Tensor, name: str) -> float:
        return timing.relative_error(found, self.exact[name])

    def theirs(self) -> dict[str, Callable[[], Any]]:
        """PyTorch's backends: "forward name" and "backward name" -> a call."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        wanted = {"efficient": SDPBackend.EFFICIENT_ATTENTION}
        if self.precision in ("bf16", "f16"):
            wanted = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION} | wanted
        calls: dict[str, Callable[[], Any]] = {}
        leaves = [x.detach().requires_grad_() for x in self.heads]
        dout = self._heads(self.dout)
        for name, backend in wanted.items():

            def forward(backend=backend):
                with sdpa_kernel(backend), torch.no_grad():
                    return F.scaled_dot_product_attention(*self.heads, is_causal=self.causal)

            try:
                forward()
                with sdpa_kernel(backend):
                    out = F.scaled_dot_product_attention(*leaves, is_causal=self.causal)
                torch.autograd.grad(out, leaves, dout, retain_graph=True)
            except RuntimeError as error:
                print(f"{name} does not run {self.shape} {self.precision}: {error}", file=sys.stderr)
                continue
            calls[f"forward {name}"] = forward
            calls[f"backward {name}"] = lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return calls


def run_problem(variants: dict[Variant, Built], rounds: int) -> list[dict[str, Any]]:
    """All variants of one problem: correctness, then times in turn with PyTorch's."""
    some = next(iter(variants))
    problem = Problem(some.shape, some.precision, some.causal)
    rows, calls = [], {}
    for variant, built in variants.items():
        row: dict[str, Any] = {"name": variant.name, "notes": built.notes}
        rows.append(row)
        try:
            kernel = Kernel(built.cubin or built.ptx.encode(), built.launches, built.workspace)
            arguments = problem.arguments(variant.backward)
            (problem.dqkv if variant.backward else problem.out).fill_(math.nan)
            kernel(*arguments)
            torch.cuda.synchronize()
            row["error"] = problem.errors(variant.backward)
        except RuntimeError as error:
            row["failed"] = str(error)
            continue
        calls[variant.name] = partial(kernel, *arguments)
        phases = {str(i): partial(kernel, *arguments, only=i) for i in range(len(built.launches))}
        row["phases_us"] = [round(1e6 * seconds, 1) for seconds in warm_times(phases, 3).values()]
    theirs = problem.theirs()
    contestants = calls | theirs
    warm = warm_times(contestants, rounds)
    cold = cold_times(contestants, rounds)
    for row in rows:
        if row["name"] in calls:
            row["cold_ms"], row["ms"] = (1e3 * times[row["name"]] for times in (cold, warm))
    for name in theirs:
        rows.append({
            "name": f"{'x'.join(map(str, some.shape))} {some.precision} {name}", "notes": "PyTorch",
            "cold_ms": 1e3 * cold[name], "ms": 1e3 * warm[name],
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'kernel':58} {'ms':>8} {'cold ms':>8} {'TFLOP/s':>8} {'error':>9}  tiles, registers"]
    for row in sorted(rows, key=lambda row: (" ".join(row["name"].split(" ")[:3]), row.get("ms", math.inf))):
        if "ms" not in row:
            lines.append(f"{row['name']:58} failed: {row.get('failed')}  {row['notes']}")
            continue
        batch, heads, length, dim = map(int, row["name"].split(" ")[0].split("x"))
        flops = 2.0 * batch * heads * length * length * dim * (2.5 if "backward" in row["name"] else 1.0)
        rate = flops / row["ms"] / 1e9
        lines.append(
            f"{row['name']:58} {row['ms']:8.4f} {row['cold_ms']:8.4f} {rate:8.0f} {row.get('error', math.nan):9.1e}  "
            f"{row.get('phases_us', '')} {row['notes']}"
        )
    return "\n".join(lines)


def variants_of(shapes: list[str], precisions: list[str], tiles: list[str]) -> list[Variant]:
    found = []
    for shape in [tuple(map(int, text.split(","))) for text in shapes] or SHAPES:
        for precision in precisions:
            for backward in (False, True):
                wanted = [""] + [t for t in tiles if (":" in t) == backward]
                found += [Variant(shape, precision, backward, t) for t in wanted]
    return found


def main(
    build_into: Path = typer.Option(None, "--build", help="only compile, into this folder"),
    kernels: list[Path] = typer.Option([], help="run what was compiled into these folders"),
    shape: list[str] = typer.Option([], help="batch,heads,length,dim; may be given several times"),
    precision: list[str] = typer.Option(list(PRECISIONS)),
    tiles: list[str] = typer.Option([], help="other schedules, see above"),
    board: str = typer.Option("h200"),
    rounds: int = typer.Option(5),
    out: Path = typer.Option(Path("benchmarks/results/attention_gpu.json")),
) -> None:
    """Compiles, checks, times and prints."""
    built: dict[Variant, Built] = {}
    for folder in kernels:
        built |= pickle.loads((folder / "attention.pickle").read_bytes())
    if not kernels:
        for variant in variants_of(shape, precision, tiles):
            try:
                built[variant] = build(variant, board)
            except Exception as error:
                print(f"{variant.name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                continue
            print(f"built {variant.name}: {built[variant].notes}", file=sys.stderr)
    if build_into is not None:
        build_into.mkdir(parents=True, exist_ok=True)
        (build_into / "attention.pickle").write_bytes(pickle.dumps(built))
        return
    groups: dict[tuple, dict[Variant, Built]] = {}
    for variant, code in built.items():
        groups.setdefault((variant.shape, variant.precision), {})[variant] = code
    rows = []
    for group in groups.values():
        rows += run_problem(group, rounds)
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    out.write_text(json.dumps(about | {"rows": rows}, indent=1))
    print(table(rows))


if __name__ == "__main__":
    typer.run(main)
