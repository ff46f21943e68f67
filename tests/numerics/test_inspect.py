"""What a user sees of a compilation: `explain`, the stages as objects, dumps, settings. State is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nova
from nova import inspect, pipeline
from nova.gpu import ptxas
from nova.schedule import target


class Trainer:
    """A step that is a method, with dropout, a layer norm, momentum, and one operation left to PyTorch."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.batch = torch.randn(8, 6), torch.randint(4, (8,))

    def step(self, x, target):
        self.optimizer.zero_grad()
        logits = self.model(x)
        loss = nn.functional.cross_entropy(logits, target)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), torch.linalg.cond(logits.detach()[:4])

    compiled = nova.jit(step)

    def state(self):
        parameters = [p.detach().clone() for p in self.model.parameters()]
        grads = [p.grad is None for p in self.model.parameters()]
        return parameters, grads, len(self.optimizer.state), torch.get_rng_state(), self.model.training


@pytest.fixture(scope="module")
def trainer():
    return Trainer()


@pytest.fixture
def unchanged(trainer):
    before = trainer.state()
    yield trainer
    after = trainer.state()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert torch.equal(before[3], after[3]) and before[1:3] + before[4:] == after[1:3] + after[4:]


@pytest.fixture(scope="module")
def lowered(trainer):
    return nova.capture(trainer.step, *trainer.batch).lower("cpu")


def test_explain_shows_every_part(unchanged):
    report = nova.explain(unchanged.compiled, *unchanged.batch, measure=True)
    text = str(report)
    assert "inputs: 6 param, 2 arg, 1 seed, 4 scalar, 6 opt_state" in text
    assert "fused: gelu with" in text  # what was fused
    refused = [d for d in report.decisions if d.kind == "refused"]
    assert refused and all(d.reason for d in report.decisions)
    assert "lower bound" in text and report.memory.step_bytes > 0
    assert len(report.fallbacks) == 1 and "linalg" in report.fallbacks[0]
    assert "test_inspect.py, line" in report.fallbacks[0] and "torch.linalg.cond" in report.fallbacks[0]
    contraction = next(k for k in report.kernels if k.kind == "contraction")
    assert "workgroup" in contraction.schedule_text and contraction.predicted_seconds > 0
    assert all(0 < k.measured_seconds < 1 for k in report.kernels)
    assert "predicted us" in text and "measured us" in text
    assert all(len(line) <= 140 for line in text.splitlines())


def test_every_level_of_the_step_and_of_a_kernel_prints(lowered):
    step_stages = [stage.name for stage in pipeline.STAGES if stage.scope == "step"]
    assert list(lowered.snapshots) == ["nova", *step_stages]
    assert "nova.linear" in lowered.as_text("nova") and "@step" in lowered.as_text()
    assert repr(lowered).startswith("<Lowered for ") and "\n" not in repr(lowered)
    kernel = next(k for k in lowered.kernels if k.kind == "contraction")
    assert "linalg.generic" in lowered.as_text(f"{kernel.name}:nova-to-linalg")
    assert "lowering_config" in lowered.as_text(f"{kernel.name}:configure")
    with pytest.raises(nova.NovaError, match="no level 'polish'"):
        lowered.as_text("polish")


def test_costs_and_memory_of_a_compiled_step(lowered):
    compiled = lowered.compile()
    costs = lowered.cost_analysis()
    assert costs and all(0 < seconds < 1 for seconds in costs.values())
    kernel = next(iter(costs))
    assert "define" in compiled.as_text(kernel) and kernel in compiled.as_text(kernel)
    memory = compiled.memory_analysis()
    assert memory.lower_bound <= memory.arena <= memory.without_reuse
    parameters = 4 * (6 * 16 + 16 + 2 * 16 + 16 * 4 + 4)
    assert memory.state == 2 * parameters  # and their momentum
    with pytest.raises(nova.NovaError, match="no kernel 'polish'"):
        compiled.as_text("polish")


@pytest.mark.parametrize("precision, target, kind", [("float32", "rtx3060", "simt"), ("bf16", "rtx3060", "mma_sync")])
def test_schedules_for_a_gpu_that_is_not_here(unchanged, precision, target, kind):
    step = nova.jit(precision=precision)(unchanged.step)
    lowered = nova.capture(step, *unchanged.batch).lower(target)
    contraction = next(k for k in lowered.kernels if k.kind == "contraction")
    assert contraction.schedule["kind"] == kind and contraction.schedule["smem_bytes"] > 0
    assert lowered.cost_analysis() and "nova.kernel" in lowered.as_text()


def test_machine_code_for_a_gpu_that_is_not_here():
    pytest.importorskip("nova.tile.loops")
    compiled = nova.capture(lambda x: (x * 2 + 1).relu(), torch.randn(300, 7)).lower("h200").compile()
    (kernel,) = compiled.kernels
    assert ".target sm_90a" in compiled.as_text(kernel) == compiled.ptx(kernel)
    (launch,) = compiled.launches(kernel)
    assert f".visible .entry {launch['symbol']}(" in compiled.ptx(kernel)
    assert "nova_tile.store" in compiled.lowered.as_text(f"{kernel}:tile-program")
    assert "nvvm.kernel" in compiled.lowered.as_text(f"{kernel}:distribute")
    if ptxas.find_ptxas() is not None:
        assert compiled.cubin(kernel)[:4] == b"\x7fELF" and launch["spill_stores"] == 0
    assert compiled.memory_analysis().step_bytes >= 300 * 7 * 4


def test_an_unknown_target_is_named():
    with pytest.raises(nova.NovaError, match="unknown target 'h300'.*h200"):
        nova.capture(lambda x: x + 1, torch.randn(3)).lower("h300")


def test_the_step_stages_see_the_target_too():
    """Logits of 4 MiB outgrow the last cache of one target and not of the other: only there is the head split."""
    head = nn.Linear(8, 16384)

    def step(x, target):
        loss = nn.functional.cross_entropy(head(x), target)
        loss.backward()
        return loss.detach()

    captured = nova.capture(step, torch.randn(64, 8), torch.randint(16384, (64,)))
    assert "nova.sce_partials" in captured.lower("rtx3060").as_text("split-loss-head")
    assert "nova.sce_partials" not in captured.lower("zen3").as_text("split-loss-head")


def test_bf16_is_in_the_report(trainer):
    step = nova.jit(precision="bf16")(trainer.step)
    text = nova.capture(step, *trainer.batch).lower("h200").as_text("precision")
    assert "bf16" in text
    assert "bf16" not in nova.capture(trainer.step, *trainer.batch).lower("h200").as_text("precision")


def test_an_operation_left_to_pytorch_is_an_error_where_that_is_asked(unchanged):
    step = nova.jit(on_unsupported="error")(unchanged.step)
    with pytest.raises(nova.UnsupportedError, match=r"linalg[\s\S]*test_inspect.py, line"):
        nova.explain(step, *unchanged.batch)


def test_capture_puts_python_state_back():
    model, seen = nn.Linear(3, 3), []

    def step(x):
        seen.append(1)
        return model(x).sum().detach()

    for look in (nova.capture, nova.explain, nova.verify):
        with pytest.raises(nova.CaptureError, match="seen"):
            look(step, torch.randn(2, 3))
        assert seen == []


def test_verify_takes_a_method(unchanged):
    assert nova.verify(unchanged.compiled, *unchanged.batch).ok


def test_dump_holds_every_level(tmp_path, monkeypatch):
    monkeypatch.setenv("NOVA_DUMP", str(tmp_path))
    scale = torch.ones(5, requires_grad=True)

    @nova.jit
    def dumped(x):
        (x * scale).exp().sum().backward()
        return scale.grad * 2

    dumped(torch.randn(3, 5))
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith("-dumped")
    assert "mul" in (folder / "00-graph.txt").read_text()
    stages = ["nova", *(stage.name for stage in pipeline.STAGES if stage.scope == "step")]
    assert [f.name for f in sorted(folder.glob("*.mlir"))] == [f"{10 + i}-{s}.mlir" for i, s in enumerate(stages)]
    assert "fused" in (folder / "fusion.txt").read_text() and "arena" in (folder / "memory.txt").read_text()
    kernels = sorted((folder / "kernels").iterdir())
    assert kernels
    for kernel in kernels:
        last = [stage.name for stage in pipeline.kernel_stages(target.host())]
        files = ["outline-kernels", *last]
        assert [f.name for f in sorted(kernel.glob("*.mlir"))] == [f"{20 + i}-{s}.mlir" for i, s in enumerate(files)]
        assert "define" in (kernel / "30-llvm.ll").read_text()


def test_debug_prints_what_its_level_says(monkeypatch, capfd):
    def step(x):
        return (x + 1).relu()

    def printed(level: str) -> str:
        monkeypatch.setenv("NOVA_DEBUG", level)
        nova.jit(step)(torch.randn(4))
        return capfd.readouterr().err

    monkeypatch.setenv("NOVA_CACHE", "0")
    assert printed("0") == ""
    assert "captured and compiled in" in printed("1")
    two = printed("2")
    assert "captured and compiled in" in two and "(loops) x1: loops, vector" in two


def test_disabling_passes(trainer, monkeypatch):
    optional = [stage.name for stage in pipeline.STAGES if stage.optional]
    monkeypatch.setenv("NOVA_DISABLE", ",".join(optional))
    made = nova.capture(trainer.step, *trainer.batch).lower("cpu")
    assert not set(optional) & set(made.snapshots)
    assert nova.verify(trainer.step, *trainer.batch).ok
    for wrong in ("polish", "outline-kernels"):
        monkeypatch.setenv("NOVA_DISABLE", wrong)
        with pytest.raises(nova.NovaError, match=f"cannot leave out {wrong}"):
            nova.capture(trainer.step, *trainer.batch).lower("cpu")


def test_every_stage_of_a_kernel_keeps_its_contract(trainer, monkeypatch):
    monkeypatch.setenv("NOVA_VERIFY", "1")
    checked = []
    check_level = pipeline.check_level

    def check(stage, module):
        checked.append(stage.name)
        check_level(stage, module)

    monkeypatch.setattr(pipeline, "check_level", check)
    assert nova.capture(trainer.step, *trainer.batch).lower("cpu").kernels
    assert set(checked) == {stage.name for stage in pipeline.STAGES if stage.device == "any"}


def test_breakdown_of_a_jitted_step(monkeypatch):
    monkeypatch.setenv("NOVA_CACHE", "0")
    model = torch.nn.Sequential(
        torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.LayerNorm(65), torch.nn.Linear(65, 7)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    @nova.jit
    def step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = torch.randn(19, 33), torch.randint(7, (19,))
    step(*batch)
    step(*batch)
    before = [p.detach().clone() for p in model.parameters()]
    rows = inspect.breakdown(step, *batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert {"contraction", "loops", "multi_tensor"} <= {row["kind"] for row in rows}
    assert [row["seconds"] for row in rows] == sorted((row["seconds"] for row in rows), reverse=True)
    assert sum(row["share"] for row in rows) == pytest.approx(1) and all(row["calls"] > 0 for row in rows)
    assert all(row["predicted_seconds"] > 0 for row in rows if row["kind"] in ("contraction", "loops"))
