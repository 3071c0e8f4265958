#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tensors from Python, compared with NumPy: operators, indexing, gradients, modules, optimizers, compiled functions, arrays of other libraries."""
import copy
import ctypes
import gc
import inspect
import math
import os
import pathlib
import pickle
import re
import sys
import tempfile
import threading

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises, run, skip  # noqa: E402
import tutti  # noqa: E402

try:
    import numpy
except ImportError:
    skip("NumPy is not installed")
from tutti import data, nn, optim, tensor as tt  # noqa: E402
from tutti._library import lib, struct  # noqa: E402

random = numpy.random.default_rng(7)


def alive():
    """How many tensors, nodes and scopes the library has."""
    gc.collect()
    counts = struct("tt_counts")()
    assert lib.tt_count(ctypes.byref(counts)) == 0
    return counts.tensors, counts.nodes, counts.scopes


def close(ours, theirs, tolerance=1e-5):
    numpy.testing.assert_allclose(numpy.asarray(ours.detach()), theirs, rtol=tolerance, atol=tolerance)


# ---- operators ----

def operators_of_the_table():
    """Name, family and arguments of each public function that an operator has."""
    row, argument = struct("tt_operator_info")(), struct("tt_argument_info")()
    for index in range(lib.tt_operator_count()):
        assert lib.tt_operator_at(index, ctypes.byref(row)) == 0
        if row.prototype is None:
            continue
        optional = set()
        for place in range(row.argument_count):
            assert lib.tt_operator_argument_at(index, place, ctypes.byref(argument)) == 0
            if argument.optional:
                optional.add(argument.name.decode())
        name, arguments = re.match(r".*?\b(tt_\w+)\((.*)\)$", row.prototype.decode()).groups()
        yield name[3:], [part.split()[-1].lstrip("*") for part in arguments.split(",")], optional, row.in_place


def every_operator_is_a_function():
    other = {  # properties, options and lists: under another name, or in another module
        "data_mut": tt.Tensor.data_ptr, "version": tt.Tensor.version, "set_version": None, "set_grad": tt.Tensor.grad, "require_grad": tt.Tensor.requires_grad,
        "adamw_step": optim.AdamW, "sgd_step": optim.SGD, "select": tt.Tensor.__getitem__, "slice": tt.Tensor.__getitem__, "add_scalar": tt.add,
        "add_scalar_": tt.add_, "mul_scalar": tt.mul, "mul_scalar_": tt.mul_, "div_scalar": tt.div, "div_scalar_": tt.div_, "pow_scalar": tt.pow,
        "sum_dims": tt.sum, "mean_dims": tt.mean, "fused_all_gather_matmul_native": tt.fused_all_gather_matmul}
    count = 0
    for name, arguments, optional, in_place in operators_of_the_table():
        for form in {name, name + "_" if in_place and not name.endswith("_") else name}:
            if form in other:
                continue
            function = getattr(tt, form, None)
            assert function is not None, f"tutti.tensor has no {form}"
            assert function.__doc__, form
            parameters = inspect.signature(function).parameters
            if form in ("fused_all_gather_matmul", "fused_all_gather_scaled_matmul", "arange", "seed"):
                continue
            for argument in arguments:
                if argument not in ("options", "void") and not argument.endswith("_count"):
                    argument = {"from": "source", "list": "tensors"}.get(argument, argument)
                    assert argument in parameters, (form, argument, list(parameters))
                    assert argument not in optional or parameters[argument].default is None, (form, argument)
            count += 1
    assert count > 150, count


def pointwise_operators():
    x, y = random.standard_normal((3, 4)).astype("f4"), random.uniform(0.5, 2, (3, 4)).astype("f4")
    a, b = tt.tensor(x), tt.tensor(y)
    for ours, theirs in ((a + b, x + y), (a - 1, x - 1), (2 - a, 2 - x), (a * 3, x * 3), (1.5 / b, 1.5 / y), (a / b, x / y), (b ** 2, y ** 2), (2 ** b, 2 ** y),
                         (-a, -x), (abs(a), abs(x)), (a @ b.T, x @ y.T), (tt.exp(a), numpy.exp(x)), (b.log(), numpy.log(y)), (a.tanh(), numpy.tanh(x)),
                         (a.relu(), numpy.maximum(x, 0)), (a.clamp(low=-0.5), numpy.maximum(x, -0.5)), (tt.where(a > 0, a, b), numpy.where(x > 0, x, y)),
                         (a.sigmoid(), 1 / (1 + numpy.exp(-x))), (tt.maximum(a, 0.1), numpy.maximum(x, 0.1)), (a.sum(), x.sum()), (a.sum(0), x.sum(0)),
                         (a.mean((0, 1), keep_dims=True), x.mean(keepdims=True)), (a.amax(-1), x.max(-1)), (a.softmax(), _softmax(x)),
                         (tt.cat([a, b], dim=1), numpy.concatenate([x, y], 1)), (tt.stack([a, b]), numpy.stack([x, y])), (a.tril(), numpy.tril(x))):
        close(ours, theirs)
    for ours, theirs in ((a < b, x < y), (a >= 0, x >= 0), (a == a, x == x), (a != b, x != y), ((a > 0) & (b > 1), (x > 0) & (y > 1)), (~(a > 0), ~(x > 0))):
        assert ours.dtype == "bool" and (ours.numpy() == theirs).all()
    c = a.clone()
    d = c
    c += 1
    c *= b
    c -= 0.5
    c /= 2
    assert d is c
    close(c, ((x + 1) * y - 0.5) / 2)
    assert a.argmax(1).tolist() == x.argmax(1).tolist() and a.dtype == "f32" and (a + 1.5).dtype == "f32" and (tt.arange(3) + 1.5).dtype == "f32"


def _softmax(x):
    e = numpy.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numbers_of_every_kind():
    big = 2**60 + 1
    x = tt.tensor([big, 3])
    assert x.dtype == "i64" and x.tolist() == [big, 3] and (x + big)[1].item() == big + 3 and (x * 2)[0].item() == 2 * big
    assert (tt.tensor([1], dtype="u64") + (2**64 - 2)).item() == 2**64 - 1
    assert tt.tensor(2.5).item() == 2.5 and tt.tensor([]).shape == (0,) and tt.tensor([[], []]).tolist() == [[], []]
    z = tt.tensor([1 + 2j, 3])
    assert z.dtype == "c64" and (z * 1j).tolist() == [-2 + 1j, 3j] and z[0].item() == 1 + 2j and (tt.ones(2) + 1j).dtype == "c64"
    assert tt.tensor([True, False]).dtype == "bool" and not tt.tensor([False]) and int(tt.tensor(7)) == 7 and [10, 20, 30][tt.tensor(1)] == 20
    for dtype in ("f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"):
        y = tt.tensor([1, 2, 3], dtype=dtype)
        assert y.dtype == dtype and y.tolist() == [1, 2, 3] and y.nbytes == 3 * tutti.buffers.dtype_bytes(dtype)
        assert pickle.loads(pickle.dumps(y)).dtype == dtype and pickle.loads(pickle.dumps(y)).tolist() == [1, 2, 3]
    raises(OverflowError, lambda: tt.ones(2) + 2**70)
    raises(IndexError, tt.ones(2).sum, 2**40)  # no dimension by accident
    raises(OverflowError, tt.ones(2).unsqueeze, 2**32)
    raises(OverflowError, tt.seed, -1)
    raises(ValueError, tt.tensor, [[1, 2], [3]])
    raises(TypeError, tt.tensor, {"a": 1})
    raises(TypeError, tt.tensor, "text")
    raises(TypeError, tt.ones, 2, "f31")
    assert "NumPy's 'f4' is 'f32' here" in str(raises(TypeError, tt.ones, 2, "f4"))
    said = str(raises(TypeError, tt.ones(2).to, "cuda:1"))
    assert said.startswith("tutti: to: argument 'dtype': 'cuda:1' is no element type but a device, and tensors go there by to_device;"), said


def indexing_is_as_in_numpy():
    x = random.standard_normal((4, 5, 6)).astype("f4")
    a = tt.tensor(x)
    for index in ((0,), (-1,), (slice(1, 3),), (slice(None, None, 2), 1), (Ellipsis, 2), (None, 1, Ellipsis, None), (slice(-2, None), slice(0, 100), slice(3, 1)), (1, 2, 3),
                  ([2, 0],), (numpy.array([2, 0]),), (slice(None), numpy.array([[1, 4]], "i4")), (numpy.int64(2),), (numpy.array(1),), (slice(None), [1, 1, 4]), ([[0, 1], [2, 3]],), (slice(5, 9),), ()):
        found = a[index]
        assert found.shape == x[index].shape, (index, found.shape)
        close(found, x[index])
    a[1:3, 0] = 7
    x[1:3, 0] = 7
    a[0] = tt.arange(6, dtype="f32")
    x[0] = numpy.arange(6)
    a[..., -1] = x[..., 0]
    x[..., -1] = x[..., 0]
    close(a, x)
    assert len(a) == 4 and [row.shape for row in a] == [(5, 6)] * 4
    raises(IndexError, lambda: a[4])
    raises(IndexError, lambda: a[0, 0, 0, 0])
    raises(ValueError, lambda: a[::-1])
    for mask in (a > 0, x > 0, x[0, 0] > 0, numpy.array(True), numpy.bool_(True), [True, False]):
        assert "masked_fill and where take masks" in str(raises(TypeError, lambda: a[mask])), mask
    raises(TypeError, lambda: a["x"])
    for several in ([0, 1], numpy.array([0, 1]), tt.arange(2), x > 0):
        raises(TypeError, a.__setitem__, several, 5)
    close(a, x)
    a[tt.tensor(1)] = 3  # one integer
    x[1] = 3
    close(a, x)
    y = tt.tensor(x, requires_grad=True)
    (y[1, :, ::2] * 2).sum().backward()
    expected = numpy.zeros_like(x)
    expected[1, :, ::2] = 2
    close(y.grad, expected)


def errors_are_exceptions_with_the_librarys_words():
    error = raises(tutti.ArgumentError, tt.matmul, tt.ones((2, 3)), tt.ones((2, 3)))
    assert error.status in ("ARGUMENT", "RANGE") and "matmul" in str(error) and isinstance(error, ValueError)
    assert "add" in str(raises(TypeError, tt.add, tt.ones(2), "text"))
    raises(TypeError, lambda: tt.ones(2) + "text")
    raises(tutti.Error, tt.add, tt.ones(2), None)
    raises(TypeError, tutti.tensor.Tensor)
    raises(ValueError, tt.zeros, [1] * 9)
    raises(tutti.Error, tt.zeros, (2, -3))
    raises(tutti.TypeMismatchError, tt.ones(2, "i32").requires_grad_)
    x = tt.ones(3, requires_grad=True)
    y = x * 2
    z = y * y
    y += 1
    error = raises(tutti.StateError, z.sum().backward)
    assert error.status == "VERSION" and isinstance(error, RuntimeError)
    w = (x * x).sum()
    w.backward()
    assert raises(tutti.StateError, w.backward).status == "GRAPH"
    assert alive()[2] == 0


def errors_call_arguments_by_their_names():
    """Python has those with a default last, where C may not: a number would mean another one."""
    from tutti.tensor import _operators
    bound = [function for function in vars(_operators).values() if hasattr(function, "argtypes")]
    assert len(bound) > 150 and all(len(function.names.split()) == len(function.argtypes) for function in bound)
    x = tt.ones((2, 2))
    with tutti.World() as world:
        for call, name, words in ((lambda: tt.all_reduce(x, "avg", world.group), "reduction", "is no reduction"),  # C's order
                                  (lambda: tt.all_reduce(x, "avg"), "group", "a str is no group"), (lambda: x.all_reduce("avg"), "group", "a str is no group"),
                                  (lambda: tt.all_gather(x, world.group, 2**40), "dim", "does not fit"), (lambda: tt.add("text", 1), "a", "no tensor"),
                                  (lambda: tt.sum(x, dims=["first"]), "dims", "str"), (lambda: tt.cat(x), "tensors", "one tensor")):
            text = str(raises((TypeError, ValueError, OverflowError), call))
            assert f": argument '{name}': " in text and words in text, text
    assert alive()[2] == 0


# ---- gradients ----

def gradients_flow():
    x = tt.tensor([1.0, 2.0, 3.0], requires_grad=True)
    assert x.is_leaf and x.grad is None and x.grad_fn is None
    y = (x ** 3).sum()
    assert y.requires_grad and y.grad_fn
    y.backward()
    close(x.grad, [3, 12, 27])
    (x * 2).backward(tt.ones(3))
    close(x.grad, [5, 14, 29])
    x.grad = None
    assert x.grad is None
    first, = tt.gradients([(x ** 3).sum()], [x], create_graph=True)
    second, missing = tt.gradients([first.sum()], [x, tt.ones(1, requires_grad=True)])
    close(second, [6, 12, 18])
    assert missing is None and x.grad is None
    with tt.no_grad():
        assert not (x * 2).requires_grad and not tt.grad_enabled()
        with tt.enable_grad():
            assert (x * 2).requires_grad
    assert tt.grad_enabled()

    @tt.no_grad()
    def quiet():
        return (x * 2).requires_grad
    assert not quiet() and not x.detach().requires_grad
    middle = x * 2
    middle.retain_grad()
    (middle * middle).sum().backward()
    close(middle.grad, [4, 8, 12])
    other = tt.ones(3, requires_grad=True)
    (x * other).sum().backward(inputs=[x])
    assert other.grad is None
    x.grad.zero_()
    close(x.grad, [0, 0, 0])
    with tt.detect_anomaly():
        raises(tutti.StateError, lambda: tt.tensor([-1.0]).log())


class Scaled(tt.Function):
    @staticmethod
    def forward(context, x, factor, y=None):
        context.save_for_backward(x, y)
        context.factor = factor
        return x * factor if y is None else (x * factor, y + 1)

    @staticmethod
    def backward(context, grad, *more):
        x, y = context.saved_tensors
        assert context.needs_input_grad[0] and not context.needs_input_grad[1]
        return (grad * context.factor, None, *((more[0] * 10,) if y is not None else ()))


def functions_of_ones_own():
    x, y = tt.tensor([1.0, 2.0], requires_grad=True), tt.tensor([5.0, 6.0], requires_grad=True)
    Scaled.apply(x, 3.0).sum().backward()
    close(x.grad, [3, 3])
    first, second = Scaled.apply(x, 2.0, y)
    (first + second).sum().backward()
    close(x.grad, [5, 5])
    close(y.grad, [10, 10])

    class Fails(Scaled):
        @staticmethod
        def backward(context, grad):
            raise ZeroDivisionError("on purpose")

    class Short(Scaled):
        @staticmethod
        def backward(context, grad):
            return grad

    raises(ZeroDivisionError, Fails.apply(x, 1.0).sum().backward)
    raises(ValueError, Short.apply(x, 1.0).sum().backward)
    raises(NotImplementedError, tt.Function.apply, x)
    raises(TypeError, type("Wrong", (tt.Function,), {"forward": staticmethod(lambda context, x: "text")}).apply, x)
    close(x + 1, [2, 3])  # the library goes on


def hooks_and_checkpoints():
    x, seen = tt.ones(2, requires_grad=True), []
    hook = x.register_hook(lambda grad: grad * 10)
    after = x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.tolist()))
    (x * 2).sum().backward()
    assert seen == [[20, 20]]
    hook.remove()
    hook.remove()
    after.remove()

    def fails(grad):
        raise KeyError("hook")
    failing = x.register_hook(fails)
    raises(KeyError, (x * 2).sum().backward)
    failing.remove()
    calls = []

    def region(x, factor):
        calls.append(1)
        return (x * factor).exp().dropout(0.5)
    tt.seed(3)
    x.grad = None
    tt.checkpoint(region, x, 2).sum().backward()
    assert len(calls) == 2
    ours = x.grad.tolist()
    tt.seed(3)
    x.grad = None
    region(x, 2).sum().backward()
    assert x.grad.tolist() == ours
    packed = []
    x.grad = None
    with tt.saved_tensors_hooks(lambda tensor: packed.append(tensor.shape) or tensor.detach().numpy().copy(), tt.tensor):
        y = x.detach().requires_grad_() ** 2
    y.sum().backward()
    assert packed


def nothing_is_kept_that_is_not_used():
    before, kept = alive(), len(tt._calls.kept._objects)
    for _ in range(3):
        gradients_flow()
        functions_of_ones_own()
        hooks_and_checkpoints()
        modules_have_names()
        compiled_functions()
    assert alive() == before and len(tt._calls.kept._objects) == kept, (alive(), before, len(tt._calls.kept._objects), kept)


# ---- modules ----

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(tt.ones(width))
        self.register_buffer("calls", tt.zeros(1))

    def forward(self, x, times=1):
        self.calls.add_(1)
        return x + self.linear(x) * self.scale * times


def modules_have_names():
    net = nn.Sequential(Block(4), tt.gelu, nn.Linear(4, 2, bias=False))
    assert [name for name, _ in net.named_parameters()] == ["0.scale", "0.linear.weight", "0.linear.bias", "2.weight"]
    assert [name for name, _ in net.named_buffers()] == ["0.calls"] and [name for name, _ in net.named_modules()] == ["", "0", "0.linear", "1", "2"]
    x = tt.randn((3, 4))
    block = net[0]
    expected = x.numpy() + x.numpy() @ block.linear.weight.detach().numpy().T + block.linear.bias.detach().numpy()
    close(block(x), expected)
    close(block(x, times=2), 2 * expected - x.numpy(), 1e-4)
    assert block.calls.item() == 2 and net(x).shape == (3, 2)
    state = {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}
    other = nn.Sequential(Block(4), tt.gelu, nn.Linear(4, 2, bias=False))
    other.load_state_dict(state)
    assert net(x).equal(other(x))
    raises(KeyError, other.load_state_dict, {"0.scale": state["0.scale"]})
    raises(ValueError, other.load_state_dict, {**state, "2.weight": numpy.zeros((9, 9), "f4")})
    block.scale = nn.Parameter(tt.zeros(4))
    close(block(x), x.numpy())
    assert net.training and not net.eval().training and not block.training
    raises(AttributeError, lambda: net.nothing)
    raises(ValueError, net.add_module, "0", nn.Linear(1, 1))
    raises(tutti.Error, block.register_parameter, "linear", tt.ones(1))
    raises(TypeError, nn.Linear(4, 4), x, 5)
    raises(TypeError, block, x=x)
    raises(NotImplementedError, nn.Module(), x)
    raises(RuntimeError, type("Forgot", (nn.Module,), {"__init__": lambda self: setattr(self, "child", nn.Linear(1, 1))}))
    raises(ZeroDivisionError, nn.Lambda(lambda x: 1 / 0), x)


def methods_of_modules_run_with_hooks():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(tt.tensor([2.0, 3.0]))

        def forward(self, x):
            return x * self.factor

        def backwards(self, x, scale=1.0):
            return x / self.factor * scale, x

    module, seen = Scaled(), []
    hook = module.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs)))
    x = tt.tensor([6.0, 6.0])
    result, same = module.call_method(module.backwards, x, scale=2.0)
    assert result.tolist() == [6.0, 4.0] and same.tolist() == [6.0, 6.0] and seen == [1] and module(x).tolist() == [12.0, 18.0] and seen == [1, 1]
    layer = nn.Linear(2, 2)
    assert layer.call_method(lambda x, rows: layer.weight[:rows] + x, x, 1).shape == (1, 2)
    hook.remove()


def module_hooks_change_what_passes():
    layer, x, seen = nn.Linear(2, 2), tt.ones((1, 2), requires_grad=True), []
    hooks = [layer.register_forward_pre_hook(lambda module, inputs: inputs[0] * 2), layer.register_forward_hook(lambda module, inputs, outputs: outputs[0] + 1),
             layer.register_full_backward_hook(lambda module, grad_inputs, grad_outputs: seen.append((module, len(grad_inputs), len(grad_outputs))))]
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    y = layer(x)
    close(y, 2 * numpy.ones((1, 2)) @ weight.T + bias + 1)
    y.sum().backward()
    assert seen == [(layer, 1, 1)]
    for hook in hooks:
        hook.remove()
    close(layer(x), numpy.ones((1, 2)) @ weight.T + bias)


def layers_compute_what_they_say():
    x = tt.randn((2, 3, 8))
    data = x.numpy()
    centred = data - data.mean(-1, keepdims=True)
    close(nn.LayerNorm(8)(x), centred / numpy.sqrt((centred ** 2).mean(-1, keepdims=True) + 1e-5), 1e-4)
    close(nn.RMSNorm(8)(x), data / numpy.sqrt((data ** 2).mean(-1, keepdims=True) + 1e-5), 1e-4)
    table = nn.Embedding(5, 4)
    close(table(tt.tensor([[1, 4]])), table.weight.detach().numpy()[[[1, 4]]])
    attention = nn.Attention(8, heads=2)
    first = attention(x)
    changed = tt.tensor(data)
    changed[:, 2] = 0
    assert first.shape == (2, 3, 8) and first[:, :2].equal(attention(changed)[:, :2]) and attention.qkv.weight.shape == (24, 8)  # nobody sees what comes later
    dropout = nn.Dropout(0.5)
    assert (dropout(tt.ones(1000)) == 0).any().item() and dropout.eval()(tt.ones(1000)).equal(tt.ones(1000))
    raises(TypeError, type("Mine", (nn.Linear,), {"forward": lambda self, x: x}), 2, 2)
    blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    assert len(blocks) == 3 and blocks[2] is list(blocks)[2] and "2.weight" in dict(blocks.named_parameters())


def training_goes_on_from_a_file():
    x = random.standard_normal((32, 4)).astype("f4")
    y = (x[:, :1] * x[:, 1:2]).copy()
    inputs, targets = tt.from_numpy(x), tt.from_numpy(y)

    def made():
        tt.seed(5)
        net = nn.Sequential(nn.Linear(4, 16), tt.tanh, nn.Linear(16, 1))
        return net, optim.AdamW(net, learning_rate=0.02), optim.Schedule("cosine", steps=60, warm_up=5)

    def steps(net, optimizer, schedule, count):
        for _ in range(count):
            schedule.apply(optimizer)
            loss = tt.mse_loss(net(inputs), targets)
            loss.backward()
            optim.clip_grad_norm(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    whole = made()
    first, last = steps(*whole, 1), steps(*whole, 59)
    assert last < first / 2 and whole[1].steps == 60
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "run.safetensors")
        half = made()
        steps(*half, 30)
        half[0].save(path, half[1])
        again = made()
        tt.seed(99)
        again[0].load(path, again[1])
        assert steps(*again, 30) == last and set(tt.load(path)) >= {"module.0.weight", "optimizer.step"}
        assert raises(FileNotFoundError, again[0].load, path + "x").errno == 2
    for name, tensor in whole[0].named_parameters():
        assert tensor.equal(dict(again[0].named_parameters())[name])


def optimizers_step_as_their_formulas():
    net = nn.Linear(3, 1, bias=False)
    weight = net.weight.detach().numpy().copy()
    optimizer = optim.SGD(net, learning_rate=0.1, momentum=0.9, weight_decay=0.01)
    velocity = numpy.zeros_like(weight)
    for _ in range(3):
        net(tt.ones((1, 3))).sum().backward()
        velocity = 0.9 * velocity + 1 + 0.01 * weight
        weight = weight - 0.1 * velocity
        optimizer.step()
        optimizer.zero_grad()
    close(net.weight, weight)
    assert optimizer.steps == 3 and optimizer.add_group([net.weight], learning_rate=0.5) == 1 and "velocity.weight" in dict(optimizer.state())
    optimizer.learning_rate = 0.25
    assert optimizer.learning_rate == 0.25 and optimizer.learning_rate_of(1).item() == 0.5
    raises(tutti.Error, optimizer.step)  # no gradient anywhere
    raises(ValueError, optim.Schedule, "square")
    assert optim.Schedule("step", every=10, factor=0.5).factor(25) == 0.25
    net.weight.grad = tt.full((1, 3), 5.0)
    gradients = numpy.concatenate([parameter.grad.numpy().ravel() for parameter in net.parameters()])
    for order in (1.0, 2.0, 3.0, math.inf):
        norm = optim.clip_grad_norm(net.parameters(), 1e9, p=order)
        assert math.isclose(norm.item(), numpy.linalg.norm(gradients.astype("f8"), order), rel_tol=1e-6) and optim.clip_grad_norm(net, 1e9, p=order).item() == norm.item()
    optim.clip_grad_value(net.parameters(), 2.0)
    close(net.weight.grad, [[2, 2, 2]])


# ---- graphs and compiled functions ----

def compiled_functions():
    net = nn.Sequential(nn.Linear(4, 4), tt.relu)

    def step(batch, scale, names=("a",)):
        y = net(batch["x"]) * scale
        return {"loss": y.square().mean(), "parts": (y, [y.sum(), None]), "names": names}
    fast = tutti.compile(step, full=True)
    for size in (3, 3, 5, 6):
        batch = {"x": tt.randn((size, 4))}
        ours, theirs = fast(batch, 2.0), step(batch, 2.0)
        assert ours["loss"].allclose(theirs["loss"]) and ours["parts"][0].allclose(theirs["parts"][0]) and ours["parts"][1][1] is None
        assert ours["names"] == ("a",)
        net.zero_grad()
        ours["loss"].backward()
        mine = [parameter.grad.clone() for parameter in net.parameters()]
        net.zero_grad()
        theirs["loss"].backward()
        assert all(a.allclose(b.grad, absolute=1e-6) for a, b in zip(mine, net.parameters()))
    assert fast.counts()["captures"] <= 3 and fast.counts()["eager"] == 0 and "relu" in fast.graph() and fast.graph(backward=True)
    assert fast({"x": tt.ones((3, 4))}, 3.0)["parts"][0].allclose(net(tt.ones((3, 4))) * 3)

    @tutti.compile(full=True)
    def reads(x):
        return x * x.sum().item()
    assert raises(tutti.StateError, reads, tt.ones(2)).status == "CAPTURE"
    raises(ZeroDivisionError, tutti.compile(lambda x: x / (1 // 0), full=True), tt.ones(2))
    raises(TypeError, fast, {"x": tt.ones((3, 4))}, [1], names=bytearray(1))
    raises(ValueError, tutti.compile, reads, mode="quick")


def graphs_can_be_looked_at():
    graph = tutti.capture(lambda x, y: (x * 2 + 1).relu() + y, tt.ones((2, 3)), tt.ones(3))
    assert "relu" in str(graph) and graph.count_of("relu") == 1 and graph.counts()["inputs"] == 2
    x, y = tt.randn((2, 3)), tt.randn(3)
    assert graph(x, y).equal((x * 2 + 1).relu() + y)
    again = tutti.graph.parse(str(graph))
    assert again(x, y)[0].equal(graph(x, y))
    for name in ("dead", "functional"):
        assert tutti.graph.passes()[name]
        graph.rewrite(name).check()
    assert graph.dot().startswith("digraph") and "relu" in graph.dot() and "<svg" in graph.svg() and graph.svg().rstrip().endswith("</svg>")
    raises(tutti.Error, graph.rewrite, "nonsense")
    raises(tutti.Error, tutti.graph.parse, "graph(")


# ---- other libraries ----

def memory_is_shared_with_numpy():
    x = numpy.arange(12, dtype="f8").reshape(3, 4)
    a = tt.from_numpy(x)
    x[0, 0] = 5
    a[2] = 9
    assert a[0, 0].item() == 5 and (x[2] == 9).all() and a.dtype == "f64"
    view = a.T[1:]
    back = view.numpy()
    assert back.shape == (3, 3) and back.strides == x.T[1:].strides
    back[0, 0] = -1
    assert x[0, 1] == -1
    del a, view
    gc.collect()
    back[0, 1] = -2
    assert x[1, 1] == -2
    b = tt.ones((2, 2))
    array = b.numpy()
    raises(tutti.Error, b.storage_resize, 0)  # while NumPy looks at it
    del b
    gc.collect()
    assert (array == 1).all()
    assert numpy.from_dlpack(tt.arange(4)).tolist() == [0, 1, 2, 3] and numpy.asarray(tt.ones(2, "f16")).dtype == numpy.float16
    assert numpy.asarray(tt.ones(2), dtype="f8").dtype == numpy.float64
    fixed = numpy.ones(3)
    fixed.flags.writeable = False
    copied = tt.as_tensor(fixed)
    copied += 1
    assert (fixed == 1).all()
    strided = tt.from_numpy(x[::2, ::2])
    assert strided.strides == (8, 2) and strided.tolist() == x[::2, ::2].tolist()
    raises(tutti.Error, tt.ones(2, requires_grad=True).numpy)
    raises(TypeError, tt.ones(2, device="meta").numpy)
    raises((TypeError, tutti.Error, BufferError), tt.as_tensor, x[::-1])  # a negative stride
    assert tt.tensor(x[0]).data_ptr != x.ctypes.data and tt.tensor(numpy.float32(2)).item() == 2


def memory_is_shared_by_the_buffer_protocol_and_dlpack():
    import array
    block = array.array("i", [1, 2, 3])
    a = tt.as_tensor(block)
    a[1] = 20
    assert a.dtype == "i32" and block[1] == 20
    raises(BufferError, block.append, 4)
    del a
    gc.collect()
    block.append(4)
    assert tt.as_tensor(b"ab").tolist() == [97, 98] and tt.as_tensor(array.array("d")).shape == (0,)

    class Old:
        """A library from before DLPack 1.0."""
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, stream=None):
            return self.tensor.__dlpack__()

        def __dlpack_device__(self):
            return (1, 0)
    before = alive()
    source = tt.arange(6, dtype="f32").reshape(2, 3)
    guest = tt.from_dlpack(Old(source.T))
    guest[0, 0] = 50
    assert source[0, 0].item() == 50 and guest.shape == (3, 2)
    del source
    gc.collect()
    assert guest[0, 0].item() == 50
    capsule = guest.__dlpack__(max_version=(1, 0))
    again = tt.from_dlpack(capsule)
    raises(TypeError, tt.from_dlpack, capsule)  # used
    unused = guest.__dlpack__(), guest.__dlpack__(max_version=(1, 0)), guest.__dlpack__(copy=True, max_version=(1, 0))
    del guest, capsule, again, unused
    assert alive() == before and not tt._dlpack._legacies and not tt._dlpack._guests
    raises(BufferError, tt.ones(1).__dlpack__, dl_device=(2, 0))
    raises(tutti.Error, tt.ones(1, requires_grad=True).__dlpack__)
    if sys.version_info >= (3, 12):
        shown = memoryview(tt.arange(6).reshape(2, 3))
        assert shown.shape == (2, 3) and shown.format == "q" and shown.tolist() == [[0, 1, 2], [3, 4, 5]]


def files_of_tensors():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        x = tt.randn((2, 3))
        tt.save(path / "x.npy", x)
        assert (numpy.load(path / "x.npy") == x.numpy()).all() and tt.load(path / "x.npy").equal(x)
        tt.save(path / "x.npz", {"x": x, "y": tt.arange(3)})
        assert (numpy.load(path / "x.npz")["y"] == [0, 1, 2]).all() and list(tt.load(path / "x.npz")) == ["x", "y"]
        tt.save(path / "x.safetensors", {"x": x.to("bf16")}, {"made": "here"})
        assert tt.load(path / "x.safetensors")["x"].dtype == "bf16" and tt.load_metadata(path / "x.safetensors") == {"made": "here"}
        raises(tutti.Error, tt.load, path / "none.npy")
        raises(ValueError, tt.save, path / "x.npz", {"x": x}, {"made": "here"})


def texts_that_c_would_cut_off_are_refused():
    """Instead of another file, another name and other words."""
    module, x = nn.Linear(2, 2), tt.ones(2)
    with tempfile.TemporaryDirectory() as folder, tutti.World() as world:
        file = os.path.join(folder, "x.safetensors")
        for call in (lambda: tt.save(file + "\0", {"x": x}), lambda: tt.load(file + "\0"), lambda: tt.save(os.path.join(folder, "x.npy\0.npy"), x),
                     lambda: tt.save(file, {"a\0b": x}), lambda: tt.save(file, {"x": x}, {"a\0b": "c"}), lambda: tt.save(file, {"x": x}, {"a": "b\0c"}), lambda: tt.load_metadata(file + "\0"),
                     lambda: module.save(file + "\0"), lambda: module.load(file + "\0"), lambda: data.Tokens(file + "\0"), lambda: tutti.Store.file(file + "\0"),
                     lambda: world.write_trace(folder + "\0"), lambda: module.register_parameter("a\0b", nn.Parameter(x)), lambda: module.register_buffer("a\0b", x),
                     lambda: module.add_module("a\0b", nn.Linear(1, 1)), lambda: tt.ones(2, name="a\0b"), lambda: setattr(x, "name", "a\0b"), lambda: tt.ones(2, device="cpu\0"),
                     lambda: tutti.compile(abs, skip="a\0b"), lambda: tutti.graph.parse("a\0b")):
            raises(ValueError, call)
        assert not os.listdir(folder) and [name for name, _ in module.named_parameters()] == ["weight", "bias"] and module.children() == []


def what_has_a_handle_is_not_copied():
    """A copy of tensors is one of their numbers; of others it would be used after the end of the first."""
    x = tt.ones(3, requires_grad=True)
    for copied in (copy.copy, copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))):
        assert copied(x).tolist() == [1.0] * 3 and copied(x).data_ptr != (x.data_ptr if copied is not copy.copy else 0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    graph = tutti.capture(lambda a: a + 1, tt.ones(3))
    for thing in (net, net[0], optim.SGD(net, learning_rate=0.1), graph, tutti.compile(lambda a: a + 1), tutti.CompiledBackward(), x.register_hook(lambda grad: None),
                  (x * 2).grad_fn, tutti.data.Progress(steps=1)):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            assert type(thing).__name__ in str(raises(TypeError, copied, thing))


def threads_have_their_own_modes_and_errors():
    failures = []

    def work(number):
        try:
            tt.seed(number)
            x = tt.ones(8, requires_grad=True)
            for _ in range(50):
                with tt.no_grad():
                    assert not (x * 2).requires_grad
                raises(tutti.Error, tt.matmul, tt.ones((2, 3)), tt.ones((2, 3)))
                (x * number).sum().backward()
            assert x.grad.tolist() == [50 * number] * 8
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def a_forked_child_may_forget_them():
    tensors = [tt.ones(4) for _ in range(10)]
    child = os.fork()
    if child == 0:
        tensors.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and tensors[0].sum().item() == 4


if __name__ == "__main__":
    run((every_operator_is_a_function, pointwise_operators, numbers_of_every_kind, indexing_is_as_in_numpy, errors_are_exceptions_with_the_librarys_words,
         errors_call_arguments_by_their_names,
         gradients_flow, functions_of_ones_own, hooks_and_checkpoints, modules_have_names, methods_of_modules_run_with_hooks, module_hooks_change_what_passes, layers_compute_what_they_say,
         training_goes_on_from_a_file, optimizers_step_as_their_formulas, compiled_functions, graphs_can_be_looked_at, nothing_is_kept_that_is_not_used,
         memory_is_shared_with_numpy, memory_is_shared_by_the_buffer_protocol_and_dlpack, files_of_tensors, texts_that_c_would_cut_off_are_refused,
         what_has_a_handle_is_not_copied, threads_have_their_own_modes_and_errors, a_forked_child_may_forget_them))
