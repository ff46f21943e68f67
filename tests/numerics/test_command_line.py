"""`python -m nova`: every command runs and says what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nova import pipeline
from nova.__main__ import app
from nova.config import TABLE
from nova.runtime.cache import Cache, shared

MODULE = """
func.func @f(%x: tensor<3xf32>) -> tensor<3xf32> {
  %0 = "nova.exp"(%x) : (tensor<3xf32>) -> tensor<3xf32>
  %1 = "nova.sqrt"(%x) : (tensor<3xf32>) -> tensor<3xf32>
  return %0 : tensor<3xf32>
}
"""


def run(*arguments: str, input: str | None = None, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), input=input, env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_passes():
    text = run("passes")
    assert all(stage.name in text for stage in pipeline.STAGES)


def test_ops():
    assert "## nova.matmul" in run("ops")


def test_doctor():
    text = run("doctor")
    assert "torch" in text and all(name in text for name, _, _ in TABLE)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("1024", "1024", "1024"), "register tile"),
        (("8192", "8192", "8192", "--dtype", "bf16", "--target", "h200"), "mma_sync"),
    ],
)
def test_schedule(arguments, expected):
    assert expected in run("schedule", *arguments)


@pytest.mark.parametrize("wrong", [("--target", "abacus"), ("--dtype", "f7")])
def test_schedule_says_what_is_known(wrong):
    assert "Invalid value" in run("schedule", "8", "8", "8", *wrong, code=2)


@pytest.mark.parametrize("standard_input", [False, True])
def test_opt(tmp_path: Path, standard_input):
    file = tmp_path / "step.mlir"
    file.write_text(MODULE)
    text = run("opt", "simplify", "-", input=MODULE) if standard_input else run("opt", "simplify", str(file))
    assert "nova.exp" in text and "nova.sqrt" not in text


@pytest.mark.parametrize("wrong", [("polish", "-"), ("simplify", "nowhere.mlir")])
def test_opt_says_what_is_wrong(wrong):
    assert wrong[0 if wrong[1] == "-" else 1] in run("opt", *wrong, input=MODULE, code=2)


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NOVA_CACHE", str(tmp_path))
    other = tmp_path / "notes" / "ab" / "abacus"  # not an entry: stays
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    assert "empty" in run("cache")
    Cache(tmp_path).put("kernel", "abcd", {"a": 1}, {"code": b"x" * 10})
    assert "kernel: 1 entries" in run("cache")
    assert shared().get("kernel", "abcd") is not None
    assert "empty" in run("cache", "--clear")
    assert shared().get("kernel", "abcd") is None and other.read_text() == "mine"
    monkeypatch.setenv("NOVA_CACHE", "0")
    assert "no cache on disk" in run("cache")
