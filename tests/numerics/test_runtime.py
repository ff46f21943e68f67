"""Executable: binding, donation, scalars, errors, PyTorch calls inside the step, storage round trip."""

from __future__ import annotations

import gc
import json
import threading
import weakref

import pytest
import torch

from nova.errors import NovaError
from nova.runtime import binding, executable
from nova.runtime.cache import Cache, CacheWarning
from nova.runtime.executable import Executable, link
from nova.runtime.step_plan import GraphCall, GraphOutput, GraphValue, StepGraph
from tests.numerics import runtime_kernels as kernels


class Builder:
    """Writes a StepGraph by hand."""

    def __init__(self):
        self.graph = StepGraph()
        self.kernels = {}

    def value(self, shape, dtype="f32", kind="temp", **fields) -> int:
        self.graph.values.append(GraphValue(shape, dtype, kind, **fields))
        return len(self.graph.values) - 1

    def input(self, *shape, dtype="f32", name="x") -> int:
        return self.value(shape, dtype, "tensor", name=name)

    def call(self, kernel, operands, shape, dtype="f32", **fields) -> int:
        result = self.value(shape, dtype)
        self.kernels[kernel.name] = kernel
        self.graph.calls.append(GraphCall("kernel", kernel.name, operands, [result], **fields))
        return result

    def aten(self, target, template, operands, *results) -> list[int]:
        made = [self.value(shape, dtype) for shape, dtype in results]
        self.graph.calls.append(GraphCall("aten", target, operands, made, template=template))
        return made

    def output(self, value, state_of=None, strides=None):
        self.graph.outputs.append(GraphOutput(value, state_of, strides))

    def link(self) -> Executable:
        return link(self.graph, self.kernels)


def sgd_step(n: int = 8) -> Builder:
    """p <- p + g * lr; returns p * p of the new p."""
    b = Builder()
    p, g = b.input(n, name="p"), b.input(n, name="g")
    lr = b.value((), "f64", "scalar", name="lr")
    update = b.call(kernels.scale(n), [g, lr], (n,))
    new = b.call(kernels.add(n), [p, update], (n,), inplace=[(0, 0), (1, 0)])
    square = b.call(kernels.mul(n), [new, new], (n,))
    b.output(new, state_of=p)
    b.output(square)
    return b


@pytest.fixture(params=[True, False], ids=["native", "data_ptr"])
def step(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(binding, "_native", lambda: None)
    return sgd_step().link()


def test_step_updates_state_in_place_and_returns_fresh_outputs(step):
    p, g = torch.randn(8), torch.randn(8)
    want = p.clone()
    previous = None
    for lr in (0.5, 0.25, -1.0):
        where = p.data_ptr()
        (out,) = step([p, g], [lr])
        want = want + g * lr
        assert p.data_ptr() == where and torch.allclose(p, want) and torch.allclose(out, want * want)
        assert previous is None or out.data_ptr() != previous[0].data_ptr()
        previous = (out, out.clone())
        assert torch.equal(*previous)
    assert step.memory_plan.donated and not step.memory_plan.copies_after


def test_moved_and_replaced_tensors_are_followed(step):
    p, g = torch.randn(8), torch.randn(8)
    step([p, g], [1.0])
    for _ in range(3):
        g = torch.randn(8)
        p.data = torch.randn(9)[1:]
        want = p + g * 2
        step((p, g), [2.0])
        assert torch.allclose(p, want)


def test_metadata_that_does_not_fit_the_plan_is_refused(step):
    p, g = torch.randn(8), torch.randn(8)
    step([p, g], [1.0])
    before = p.clone()
    for bad in (torch.randn(9), torch.randn(8, dtype=torch.float64), torch.randn(16)[::2], torch.randn(2, 4)):
        with pytest.raises(ValueError, match="input g"):
            step([p, bad], [1.0])
    with pytest.raises(TypeError):
        step([p, "no tensor"], [1.0])
    with pytest.raises(TypeError, match="2 tensors and 1 numbers"):
        step([p], [1.0])
    assert torch.equal(p, before)
    step([p, g], [1.0])
    assert torch.allclose(p, before + g)


def test_native_binding_reads_what_data_ptr_says():
    assert binding.tensor_layout() is not None, "this PyTorch keeps tensors differently: binding is slow but right"
    tensors = [torch.nn.Parameter(torch.randn(3, 4)), torch.randn(10)[3:7], torch.zeros(0, 3), torch.zeros(()),
               torch.randn(1, 2, 1, 3, 1, 2), torch.ones(5, dtype=torch.bfloat16)[2:]]  # fmt: skip
    expected = [binding.Expected(str(i), tuple(t.shape), t.dtype, t.stride()) for i, t in enumerate(tensors)]
    table = binding.PointerTable(2 * len(tensors), [[(2 * i, 0), (2 * i + 1, 24)] for i in range(len(tensors))])
    assert table.bind(tensors, 0, expected) == len(tensors)
    assert table.bind(tuple(tensors), 0, expected) == 0
    for i, tensor in enumerate(tensors):
        assert table.table[2 * i] == tensor.data_ptr() and table.table[2 * i + 1] == tensor.data_ptr() + 24
    tensors[1] = torch.randn(4)
    assert table.bind(tensors, 0, expected) == 1 and table.table[2] == tensors[1].data_ptr()


def test_stored_step_is_rebuilt_from_json_and_bytes():
    step = sgd_step().link()
    meta, blobs = step.entry()
    again = Executable.from_entry(json.loads(json.dumps(meta)), blobs)
    assert again.plan == step.plan
    p, g = torch.randn(8), torch.randn(8)
    want = p + 3 * g
    (out,) = again([p, g], [3.0])
    assert torch.allclose(p, want) and torch.allclose(out, want * want)


def test_step_comes_back_from_the_artifact_cache(tmp_path):
    executable.save(sgd_step().link(), "ab12", Cache(tmp_path), name="sgd")
    step = executable.load("ab12", Cache(tmp_path))
    p, g = torch.randn(8), torch.randn(8)
    want = p + 3 * g
    (out,) = step([p, g], [3.0])
    assert torch.allclose(p, want) and torch.allclose(out, want * want)
    assert executable.load("ab13", Cache(tmp_path)) is None
    cache = Cache(tmp_path)
    cache.put("step", "cd34", {"plan": {"version": 0}, "kernels": []}, {"step": b"", "constants": b""})
    with pytest.warns(CacheWarning, match="version 0"):
        assert executable.load("cd34", cache) is None


def test_workspace_constants_views_and_passthrough_outputs():
    n = 6
    b = Builder()
    x = b.input(2, 3)
    flat = b.value((6,), "f32", view_of=x)
    one = b.value((6,), "f32", "constant", data=torch.arange(6.0).numpy().tobytes())
    kernel = kernels.elementwise("add_ws", 2, n, "  %y = fadd float %x0, %x1", workspace=256)
    y = b.call(kernel, [flat, one], (6,))
    shaped = b.value((3, 2), "f32", view_of=y)
    for value in (shaped, y, x, one):
        b.output(value)
    step = b.link()
    x_value = torch.randn(2, 3)
    shaped_out, y_out, x_out, one_out = step([x_value])
    assert torch.equal(y_out, x_value.reshape(6) + torch.arange(6.0)) and torch.equal(shaped_out.reshape(6), y_out)
    assert torch.equal(x_out, x_value) and x_out.data_ptr() != x_value.data_ptr()
    assert torch.equal(one_out, torch.arange(6.0))
    assert len({t.data_ptr() for t in (shaped_out, y_out, x_out, one_out)}) == 4


def test_states_that_swap():
    b = Builder()
    x, y = b.input(4, name="x"), b.input(4, name="y")
    b.output(y, state_of=x)
    b.output(x, state_of=y)
    step = b.link()
    tx, ty = torch.zeros(4), torch.ones(4)
    step([tx, ty])
    assert tx.tolist() == [1] * 4 and ty.tolist() == [0] * 4


def test_multi_tensor_kernel_takes_any_number_of_tensors():
    shapes = [(3,), (2, 5), (0,), ()]
    b = Builder()
    inputs = [b.input(*shape, name=f"t{i}") for i, shape in enumerate(shapes)]
    kernel = kernels.multi_tensor_double()
    results = [b.value(shape, "f32") for shape in shapes]
    b.kernels["double4"] = kernel
    b.graph.calls.append(GraphCall("kernel", "double4", inputs, results, inplace=[(i, i) for i in range(4)], count=4))
    for source, result in zip(inputs, results, strict=True):
        b.output(result, state_of=source)
    step = b.link()
    tensors = [torch.randn(shape) for shape in shapes]
    want = [t * 2 for t in tensors]
    step(tensors)
    assert all(torch.equal(t, w) for t, w in zip(tensors, want, strict=True))


def test_flagged_kernel_raises_before_state_is_written():
    b = Builder()
    labels, p = b.input(5, dtype="i64", name="labels"), b.input(5, name="p")
    copy = b.call(kernels.checked_copy(5), [labels], (5,), "i64",
                  raises="IndexError: label {value} is out of range", source="train.py, line 7")  # fmt: skip
    new = b.call(kernels.add(5), [p, p], (5,), inplace=[(0, 0), (1, 0)])
    b.output(new, state_of=p)
    b.output(copy)
    step = b.link()
    good, p_value = torch.arange(5), torch.ones(5)
    step([good, p_value])
    bad = torch.tensor([1, 2, -7, 3, 4])
    for _ in range(2):
        with pytest.raises(IndexError, match=r"label -7 is out of range\n  at train.py, line 7"):
            step([bad, p_value])
    assert p_value.tolist() == [2] * 5
    step([good, p_value])
    assert p_value.tolist() == [4] * 5


def test_operation_left_to_pytorch_reads_and_writes_the_arena():
    b = Builder()
    x = b.input(2, 6)
    flat = b.value((12,), "f32", view_of=x)
    doubled = b.call(kernels.add(12), [flat, flat], (12,))
    rows = b.value((2, 6), "f32", view_of=doubled)
    k = b.value((), "f64", "scalar")
    values, indices = b.aten("aten.topk.default", {"args": [{"t": 0}, {"t": 1}, -1, True, True]}, [rows, k],
                             ((2, 3), "f32"), ((2, 3), "i64"))  # fmt: skip
    flat_values = b.value((6,), "f32", view_of=values)
    total = b.call(kernels.add(6), [flat_values, flat_values], (6,))
    b.output(total)
    b.output(indices)
    step = b.link()
    assert step.left_to_pytorch == {"aten.topk.default": 1}
    for _ in range(2):
        x_value = torch.randn(2, 6, requires_grad=True)
        total_out, indices_out = step([x_value], [3.0])
        want = torch.topk(x_value.detach() * 2, 3)
        assert torch.equal(total_out.reshape(2, 3), want.values * 2) and torch.equal(indices_out, want.indices)
        assert not total_out.requires_grad


def test_data_dependent_sizes_stay_live_tensors():
    b = Builder()
    x = b.input(6)
    (mask,) = b.aten("aten.gt.Scalar", {"args": [{"t": 0}, 0.0]}, [x], ((6,), "bool"))
    (where,) = b.aten("aten.nonzero.default", {"args": [{"t": 0}]}, [mask], (None, "i64"))
    (flat,) = b.aten("aten.view.default", {"args": [{"t": 0}, [-1]]}, [where], (None, "i64"))
    (picked,) = b.aten("aten.index_select.default", {"args": [{"t": 0}, 0, {"t": 1}]}, [x, flat], (None, "f32"))
    template = {"args": [{"t": 0}, [0]], "kwargs": {"dtype": {"dtype": "f64"}}}
    (total,) = b.aten("aten.sum.dim_IntList", template, [picked], ((), "f64"))
    b.output(total)
    b.output(picked)
    step = b.link()
    for seed in range(3):
        x_value = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        total_out, picked_out = step([x_value])
        assert torch.equal(picked_out, x_value[x_value > 0])
        assert torch.allclose(total_out, x_value[x_value > 0].double().sum())
    assert not step._fallback.live


def test_autocast_around_the_call_does_not_change_the_step():
    b = Builder()
    x = b.input(4, 4)
    (y,) = b.aten("aten.mm.default", {"args": [{"t": 0}, {"t": 0}]}, [x], ((4, 4), "f32"))
    b.output(y)
    step = b.link()
    x_value = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out,) = step([x_value])
    assert torch.equal(out, x_value @ x_value)


def test_exception_in_pytorch_reaches_the_caller_with_the_operation():
    b = Builder()
    x, i = b.input(4), b.input(2, dtype="i64")
    (y,) = b.aten("aten.index_select.default", {"args": [{"t": 0}, 0, {"t": 1}]}, [x, i], ((2,), "f32"))
    b.output(y)
    step = b.link()
    with pytest.raises(IndexError) as raised:
        step([torch.randn(4), torch.tensor([0, 9])])
    assert "aten.index_select.default" in "".join(raised.value.__notes__)
    (out,) = step([torch.arange(4.0), torch.tensor([3, 1])])
    assert out.tolist() == [3, 1]


def test_random_operations_are_not_left_to_pytorch():
    b = Builder()
    x = b.input(4)
    (y,) = b.aten("aten.bernoulli.default", {"args": [{"t": 0}]}, [x], ((4,), "f32"))
    b.output(y)
    with pytest.raises(executable.NovaError, match="random"):
        b.link()


def test_output_with_eager_strides():
    b = Builder()
    x = b.input(6)
    y = b.call(kernels.add(6), [x, x], (6,))
    b.output(b.value((2, 3), "f32", view_of=y), strides=(1, 2))
    b.output(b.value((3, 2), "f32", view_of=x), strides=(1, 3))
    step = b.link()
    x_value = torch.randn(6)
    first, second = step([x_value])
    assert first.stride() == (1, 2) and torch.equal(first, (x_value * 2).view(2, 3))
    assert second.stride() == (1, 3) and torch.equal(second, x_value.view(3, 2))


def test_default_device_of_the_user_does_not_matter():
    step = sgd_step().link()
    p, g = torch.randn(8), torch.randn(8)
    want = p + g
    binding.tensor_layout.cache_clear()
    with torch.device("meta"):
        (out,) = step([p, g], [1.0])
        assert binding.tensor_layout() is not None
    assert torch.allclose(p, want) and torch.allclose(out, want * want)


def test_out_of_memory_says_what_the_step_needs():
    step = chain(64)
    step.plan.arena_bytes = 1 << 60
    with pytest.raises(torch.OutOfMemoryError, match=r"needs 1,152,921,504,606,846,976 B on cpu") as raised:
        step([torch.randn(64)])
    assert isinstance(raised.value, NovaError)
    assert "256 B  f32[64] of add64" in str(raised.value) and "allocate memory" in str(raised.value)


def test_seed_reaches_the_step():
    b = Builder()
    b.value((), "f64", "scalar")
    seed = b.value((), "i64", "seed")
    b.output(seed)
    step = b.link()
    for value in (7, -1, 2**63 + 5):
        (out,) = step([], [0.5], value)
        assert out.item() % 2**64 == value % 2**64


def test_zero_size_tensors_and_empty_steps():
    b = Builder()
    x = b.input(0, 3)
    y = b.call(kernels.add(0), [x, x], (0, 3))
    b.output(y)
    (out,) = b.link()([torch.zeros(0, 3)])
    assert out.shape == (0, 3)
    assert Builder().link()([]) == []


def test_dropped_executable_frees_arena_and_keeps_no_input():
    step = sgd_step().link()
    p, g = torch.randn(8), torch.randn(8)
    step([p, g], [1.0])
    gone = weakref.ref(step), weakref.ref(step._memory), weakref.ref(g)
    gc.disable()
    try:
        del g
        assert gone[2]() is None
        del step
        assert gone[0]() is None and gone[1]() is None
    finally:
        gc.enable()


def chain(n: int) -> Executable:
    """((x + x) + x) * x through the arena."""
    b = Builder()
    x = b.input(n)
    first = b.call(kernels.add(n), [x, x], (n,))
    second = b.call(kernels.add(n), [first, x], (n,))
    b.output(b.call(kernels.mul(n), [second, x], (n,)))
    return b.link()


def test_reordering_calls_lowers_the_peak_and_keeps_the_result():
    b = Builder()
    x = b.input(64)
    # program order makes all four products first and adds them up afterwards
    products = [b.call(kernels.mul(64), [x, x], (64,)) for _ in range(4)]
    total = products[0]
    for product in products[1:]:
        total = b.call(kernels.add(64), [total, product], (64,), inplace=[(0, 0)])
    b.output(b.call(kernels.add(64), [total, total], (64,)))
    plain, moved = link(b.graph, b.kernels), link(b.graph, b.kernels, reorder=True)
    value = torch.randn(64)
    assert moved.arena_bytes < plain.arena_bytes
    assert torch.equal(plain([value])[0], moved([value])[0])


def test_executables_share_one_arena_and_the_last_one_frees_it():
    gc.collect()
    small, large = chain(64), chain(256)
    x, y = torch.randn(64), torch.randn(256)
    assert torch.equal(small([x])[0], (x + x + x) * x)
    assert torch.equal(large([y])[0], (y + y + y) * y)
    assert small._arena is not large._arena
    for _ in range(2):
        assert torch.equal(small([x])[0], (x + x + x) * x)
        assert torch.equal(large([y])[0], (y + y + y) * y)
        assert small._arena is large._arena
    alive = weakref.ref(large._arena)
    del large
    assert alive() is not None and torch.equal(small([x])[0], (x + x + x) * x)
    del small
    assert alive() is None


def test_steps_that_run_at_once_have_arenas_of_their_own():
    first, second = chain(64), chain(64)
    x = torch.randn(64)
    first([x])
    assert first._arena.busy.acquire(blocking=False)  # as if `first` were running in another thread
    try:
        assert torch.equal(second([x])[0], (x + x + x) * x)
        assert second._arena is not first._arena
    finally:
        first._arena.busy.release()
    assert torch.equal(first([x])[0], (x + x + x) * x)


def test_calls_from_several_threads_do_not_mix():
    step = sgd_step().link()
    wrong = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        p, g = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
        for _ in range(50):
            want = p + g * seed
            (out,) = step([p, g], [float(seed)])
            if not (torch.allclose(p, want) and torch.allclose(out, want * want)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
