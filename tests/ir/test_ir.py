"""Runs every `.mlir` file under this folder through the passes its RUN line names, and checks the output.

A file starts with `// RUN: nova-opt <pass> [<pass> ...]` and holds FileCheck lines (`// CHECK: ...`). `// TARGET: h200`
names the device to compile for; without it, that is this machine.
"""

import re
from pathlib import Path

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import DumpInputKind, Options
from filecheck.parser import Parser

from nova import pipeline
from nova.cpu import compile
from nova.mlir import context, ir, parse
from nova.schedule import target as targets

ROOT = Path(__file__).parent
RUN = re.compile(r"^// RUN: nova-opt (.+)$", re.MULTILINE)
TARGET = re.compile(r"^// TARGET: (\w+)$", re.MULTILINE)
FILES = [p for p in sorted(ROOT.rglob("*.mlir")) if RUN.search(p.read_text())]

EXAMPLES = sorted((ROOT / "fusion" / "examples").glob("*.mlir"))


def filecheck(output: str, check_file: Path) -> None:
    """Fails unless `output` satisfies the CHECK lines of the file."""
    assert "// CHECK" in check_file.read_text(), f"{check_file} has no CHECK line"
    options = Options(match_filename=str(check_file), dump_input=DumpInputKind.NEVER)
    matcher = Matcher(options, FInput("<output>", output), Parser.from_opts(options))
    assert matcher.run() == 0, f"FileCheck failed for {check_file}; the output was:\n{output}"


def test_every_pass_has_a_test() -> None:
    tested = {name for path in FILES for name in RUN.search(path.read_text())[1].split()}
    assert tested >= {stage.name for stage in pipeline.STAGES if stage.device == "any"}
    assert tested <= set(pipeline.BY_NAME)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_the_form_of_level_2(path: Path) -> None:
    """The examples that describe kernels at level 2 are what the stages after it read."""
    module = parse(path.read_text())
    target = targets.by_name("zen3")
    with context(), ir.Location.unknown():
        pipeline.check_level(pipeline.BY_NAME["nova-to-linalg"], module)
        module = pipeline.run_pass("configure", module, target)
        assert "predicted_seconds" in str(module)
        loops, _ = compile.lower_kernel(module, target)
        assert loops.operation.verify() and "linalg." not in str(loops)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_ir(path: Path) -> None:
    text = path.read_text()
    module, named = parse(text), TARGET.search(text)
    target = targets.by_name(named[1]) if named else None
    with context(), ir.Location.unknown():
        for name in RUN.search(text)[1].split():
            module = pipeline.run_pass(name, module, target)
        assert module.operation.verify()
        filecheck(str(module), path)
