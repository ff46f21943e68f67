"""`python -m nova`: look at the compiler without a training run, and without a GPU.

python -m nova opt PASS... FILE.mlir       run passes on IR, print the result
python -m nova passes                      the pipeline, stage by stage
python -m nova schedule M N K              the schedule of a contraction on a target, and why
python -m nova ops                         the manual of the nova dialect
python -m nova bench ...             kernels and steps beside PyTorch, on a GPU
python -m nova cache [--clear]             what the artifact cache holds
python -m nova doctor                      versions, target and settings
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from nova.bench.cli import app as bench

HELP = "Look at the compiler without a training run, and without a GPU."
app = typer.Typer(add_completion=False, no_args_is_help=True, help=HELP, rich_markup_mode=None)
app.add_typer(bench, name="bench")
console = Console(markup=False)  # brackets in what is printed are its own


@app.command()
def opt(passes: list[str] = typer.Argument(help="pass names, then a file (or - for standard input)")) -> None:
    """Runs passes on a file of IR, in the order given, and prints what comes out."""
    from nova import pipeline
    from nova.mlir import context, parse

    *names, file = passes
    for name in names:
        if name not in pipeline.BY_NAME:
            raise typer.BadParameter(f"no pass named {name!r}; passes: {', '.join(pipeline.BY_NAME)}")
    if file != "-" and not Path(file).is_file():
        raise typer.BadParameter(f"no file {file!r}")
    module = parse(sys.stdin.read() if file == "-" else Path(file).read_text())
    with context():
        for name in names:
            module = pipeline.run_pass(name, module)
        print(module)


@app.command()
def passes() -> None:
    """The stages of the compiler in order."""
    import importlib

    from nova.pipeline import STAGES

    table = Table("level", "pass", "sees", "what it does")
    for stage in STAGES:
        doc = (importlib.import_module(stage.module).__doc__ or "").strip().split("\n\n")[0]
        table.add_row(str(stage.level), stage.name, stage.scope, " ".join(doc.split()))
    console.print(table)


@app.command()
def ops() -> None:
    """Every operation of the nova dialect: operands, attributes, meaning."""
    from nova.dialect.ops import markdown
    from nova.mlir import context

    context()
    print(markdown())


@app.command()
def schedule(m: int, n: int, k: int, dtype: str = "f32", target: str = "cpu") -> None:
    """The Analytic Configurator's choice for an M x N x K contraction, with its reasons."""
    from nova.errors import NovaError
    from nova.schedule.contraction import row_major, schedule_contraction
    from nova.schedule.target import ELEMENT_BYTES, by_name

    try:
        chosen = by_name(target)
    except NovaError as error:
        raise typer.BadParameter(str(error), param_hint="--target") from None
    if dtype not in chosen.peak or dtype not in ELEMENT_BYTES:
        raise typer.BadParameter(f"{target} has rates for {', '.join(chosen.peak)}", param_hint="--dtype")
    result = schedule_contraction(row_major(m, n, k, dtype=dtype, output_bytes=ELEMENT_BYTES[dtype]), chosen)
    table = Table("field", "value", title=f"{m} x {n} x {k}, {dtype}, {target}")
    for field in dataclasses.fields(result):
        if field.name != "reasons":
            table.add_row(field.name, str(getattr(result, field.name)))
    console.print(table)
    for reason in result.reasons:
        console.print(reason)


@app.command()
def cache(clear: bool = typer.Option(False, help="delete every entry")) -> None:
    """Where the artifact cache is and what it holds."""
    from nova.runtime.cache import shared

    store = shared()
    if clear:
        store.clear()
    console.print(store.describe())


@app.command()
def doctor() -> None:
    """Versions, the target Nova compiles for, and every setting."""
    import llvmlite
    import torch

    from nova import __version__
    from nova.config import TABLE
    from nova.schedule.target import host

    versions = {"nova": __version__, "torch": torch.__version__, "llvmlite": llvmlite.__version__}
    versions["python"] = sys.version.split()[0]
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    console.print(host())
    for index in range(torch.cuda.device_count()):
        _describe_gpu(index)
    table = Table("setting", "default", "meaning")
    for name, default, meaning in TABLE:
        table.add_row(name, default or "-", meaning)
    console.print(table)


def _describe_gpu(index: int) -> None:
    from nova.errors import NovaError
    from nova.gpu import ptxas
    from nova.runtime import cuda
    from nova.schedule.target import device

    try:
        console.print(device(index))
        found = cuda.driver()
    except NovaError as error:
        console.print(str(error))
        return
    cuda_version, ptx = (".".join(map(str, v)) for v in (found.version, found.ptx_version))
    console.print(
        f"{cuda.device(index).name}: driver of CUDA {cuda_version}, reads PTX up to {ptx}; "
        f"ptxas: {ptxas.version() or 'none, the driver assembles kernels'}"
    )


if __name__ == "__main__":
    app()
