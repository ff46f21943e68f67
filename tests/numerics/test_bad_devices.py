"""GPUs that cannot do what a step needs: each an error that names the cause, with model and optimizer as before."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from torch import nn

import nova
from nova import pipeline
from nova.capture import session
from nova.cpu.compile import compile_kernel
from nova.errors import DeviceError
from nova.runtime import arena, cuda, executable, placement
from nova.runtime.cache import Cache
from nova.schedule import target
from tests.numerics.device_fakes import FakeDevice, guarded_copy, on_gpu, pretend_gpu
from tests.numerics.test_device_runtime import Board, device  # noqa: F401  (a fixture)
from tests.numerics.test_error_records import copies, counted_step, inputs  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")  # a scheduler that steps first


class ScriptedDriver(cuda.Driver):
    """A driver of CUDA 12.6 whose functions give what `answers` says, and else succeed."""

    version = (12, 6)

    def __init__(self, **answers):
        self.answers = answers
        self.steps_are_done = lambda: False

    def result(self, name, *args):
        return self.answers.get(name, 0)


class ScriptedDevice(cuda.Device):
    def __init__(self, driver, capability=(9, 0)):
        self.index, self.driver, self.name, self._capability = 0, driver, "NVIDIA Test Board", capability
        self.lock, self.handle = threading.RLock(), ctypes.c_void_p(7)

    @property
    def capability(self):
        return self._capability


# ---- the driver


def test_a_driver_that_does_not_read_the_ptx_is_an_error_before_and_at_the_load():
    new, old = ".version 8.6\n.target sm_90a\n", ".version 8.0\n.target sm_80\n"
    message = (
        r"kernel k is PTX 8.\d and this driver \(CUDA 12.6\) reads PTX up to 8.5: update the driver, or install ptxas"
    )
    with pytest.raises(nova.UnsupportedError, match=message):
        ScriptedDevice(ScriptedDriver()).load(new, b"", "k")
    with pytest.raises(nova.UnsupportedError, match=message):
        ScriptedDevice(ScriptedDriver(cuModuleLoadDataEx=222)).load(old, b"", "k")
    with pytest.raises(cuda.CudaError, match=r"loading kernel k failed with .*\(218\)"):
        ScriptedDevice(ScriptedDriver(cuModuleLoadDataEx=218)).load(old, b"", "k")


def test_a_board_that_is_too_old_is_an_error(monkeypatch):
    monkeypatch.setattr(cuda, "driver", ScriptedDriver)
    monkeypatch.setattr(cuda, "Device", lambda index, found: ScriptedDevice(found, (7, 5)))
    monkeypatch.setattr(cuda, "_devices", {})
    with pytest.raises(nova.UnsupportedError, match=r"Test Board has compute capability 7.5; .* 8.0 \(Ampere\)"):
        cuda.device(0)


# ---- errors from elsewhere


def test_a_lost_context_says_what_is_known_of_its_cause(device):  # noqa: F811
    step, state = counted_step().link(), inputs()
    step(state)
    device.driver.failing["cuMemcpyHtoDAsync"] = 700  # nothing of this step was launched, and the one before ended well
    with pytest.raises(DeviceError, match=r"\(700\).*context is lost.*All compiled steps .* ended well.* outside Nova"):
        step(state)
    device.driver.failing["cuLaunchKernel"] = 719
    unknown = r"launching kernel add.*\(719\).*context is lost.*any kernel launched before.*CUDA_LAUNCH_BLOCKING=1"
    with pytest.raises(DeviceError, match=f"(?s){unknown}"):
        step(state)
    assert state[4] == 6  # counts are as after the one good step
    device.driver.is_late = True
    step(state)
    device.driver.failing["cuMemcpyHtoDAsync"] = 700  # now a step is under way
    with pytest.raises(DeviceError, match=r"\(700\).*any kernel launched before, of a compiled step or outside Nova"):
        step(state)


def test_an_error_that_ends_nothing_does_not_say_so(device):  # noqa: F811
    step, state = counted_step().link(), inputs()
    device.driver.failing["cuLaunchKernel"] = 701  # too many resources
    with pytest.raises(cuda.CudaError, match=r"\(701\)") as caught:
        step(state)
    assert "lost" not in str(caught.value)


def test_what_a_device_refuses_does_not_make_a_stored_step_bad(monkeypatch, tmp_path):
    cache = Cache(tmp_path)
    cache.put("step", "digest", {"plan": {}}, {})
    refusals = [cuda.CudaError("lost", 700), nova.UnsupportedError("too old"), arena.OutOfMemoryError("full")]
    for refusal in refusals:

        def refuse(meta, blobs, refusal=refusal):
            raise refusal

        monkeypatch.setattr(executable.Executable, "from_entry", refuse)
        with pytest.raises(type(refusal)):
            executable.load("digest", cache)
    assert cache.get("step", "digest") is not None


# ---- whole steps


@pytest.fixture
def whole(device, monkeypatch):  # noqa: F811
    """nova.jit as if every tensor were on a GPU."""

    def build(text, chosen):
        if 'nova.kernel = "guarded_copy"' in text:
            return guarded_copy()
        *_, (_, module) = pipeline.lower_kernel(text, target.host(), last=3)
        return on_gpu(compile_kernel(str(module), target.host()), table='nova.kernel = "multi_tensor"' in text)

    pretend_gpu(monkeypatch, build)
    return device


class Training:
    """A step with a scheduler, and all that it changes."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.step = nova.jit(self._step)

    def _step(self, x):
        self.scheduler.step()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def state_of(training):
    found = [v.clone() for v in training.model.state_dict().values()]
    found += [v.clone() for entry in training.optimizer.state.values() for v in entry.values()]
    return found, training.optimizer.param_groups[0]["lr"], training.scheduler.last_epoch, torch.get_rng_state()


def unchanged(training, before):
    after = state_of(training)
    assert len(before[0]) == len(after[0]) and all(map(torch.equal, before[0], after[0]))
    assert before[1:3] == after[1:3] and torch.equal(before[3], after[3])


X = torch.randn(512, 6)


def refused(training, error, match):
    before = state_of(training)
    with pytest.raises(error, match=match) as caught:
        training.step(X)
    unchanged(training, before)
    return str(caught.value)


def test_a_first_call_on_a_board_that_is_too_old_changes_nothing(whole, monkeypatch):
    board = Board("Tesla V100", (7, 0))
    monkeypatch.setattr(target, "by_name", lambda name: target.describe(board))
    refused(Training(), nova.UnsupportedError, r"Tesla V100 has compute capability 7.0; .* 8.0")


def test_a_first_call_with_a_driver_that_is_too_old_changes_nothing(whole, monkeypatch):
    scripted = ScriptedDevice(ScriptedDriver())
    monkeypatch.setattr(FakeDevice, "load", lambda self, *_: scripted.load(".version 8.6\n", b"", "k"))
    refused(Training(), nova.UnsupportedError, r"reads PTX up to 8.5")


def test_tensors_on_two_gpus_change_nothing(whole, monkeypatch):
    pretended, training = session.capture, Training()

    def capture(*args, **kwargs):
        found = pretended(*args, **kwargs)
        (spec,) = [i for i in found.step.signature.inputs if i.role == "arg"]
        object.__setattr__(spec, "type", type(spec.type)(spec.type.shape, spec.type.dtype, "cuda:1"))
        return found

    monkeypatch.setattr(session, "capture", capture)
    device_of = lambda captured: placement.the_device(placement.devices_of(captured), captured.name)  # noqa: E731
    monkeypatch.setattr(placement, "device_of", device_of)
    refused(
        training, nova.UnsupportedError, r"_step has tensors on .*cuda:0 and cuda:1: a compiled step runs on one GPU"
    )


@pytest.mark.parametrize("what", ["arena", "outputs"])
def test_out_of_memory_says_what_the_step_needs_and_changes_nothing(whole, monkeypatch, what):
    training = Training()
    training.step(X)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as m:
        if what == "arena":
            m.setattr(executable, "acquire", full)
            needs = r"(?s)_step needs [\d,]+ B on cpu .*beside [\d,]+ B .*largest buffers:.*10,240 B  f32\[512, 5\] of linear"
            text = refused(training, torch.OutOfMemoryError, needs)
            assert "test_bad_devices.py, line" in text and "Tried to allocate" in text
        else:
            m.setattr(torch, "empty_strided", full)
            with pytest.raises(nova.NovaError, match="no room on cpu for the 1 tensors"):
                training.step._variants[0].executable.allocate_outputs()
        assert issubclass(arena.OutOfMemoryError, torch.OutOfMemoryError)
    rate = training.optimizer.param_groups[0]["lr"]
    training.step(X)
    assert training.optimizer.param_groups[0]["lr"] == rate / 2
