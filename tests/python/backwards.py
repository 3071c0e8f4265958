#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Backwards from Python beyond the plain one: hooks of nodes, callbacks at their end, compiled backwards; and tokens and progress of training."""
import array
import gc
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import raises, run  # noqa: E402
import tutti  # noqa: E402
from tutti import data, nn, optim, tensor as tt  # noqa: E402
from tutti.tensor import _calls  # noqa: E402


def held_now():
    """How many Python objects C holds."""
    gc.collect()
    return len(_calls.kept._objects)


# ---- nodes ----

def nodes_have_names_and_hooks():
    x = tt.ones(3, requires_grad=True)
    assert x.grad_fn is None
    y = x * 2
    node, seen = y.grad_fn, []
    assert node.name == "mul_scalar" and y.grad_fn.sequence == node.sequence and "mul_scalar" in repr(node)
    assert (y + x).grad_fn.sequence > node.sequence

    def before(grads):
        seen.append(("before", [grad.tolist() for grad in grads]))
        return [grads[0] * 10]

    def after(results, grads):
        seen.append(("after", [result.tolist() for result in results], [grad.tolist() for grad in grads]))
        return (results[0] + 1,)
    node.register_prehook(before)
    handle = node.register_hook(after)
    y.sum().backward(retain_graph=True)
    assert seen == [("before", [[1, 1, 1]]), ("after", [[20, 20, 20]], [[10, 10, 10]])] and x.grad.tolist() == [21, 21, 21]
    handle.remove()
    handle.remove()
    x.grad = None
    y.sum().backward()
    assert len(seen) == 3 and x.grad.tolist() == [20, 20, 20]


def hooks_of_nodes_run_in_order_and_let_go():
    x, seen = tt.ones(2, requires_grad=True), []
    held = held_now()
    y = x.exp()
    node = y.grad_fn
    node.register_hook(lambda results, grads: seen.append("second"))
    node.register_hook(lambda results, grads: seen.append("first"), first=True)
    node.register_prehook(lambda grads: seen.append("before"))
    y.sum().backward()
    assert seen == ["before", "first", "second"] and x.grad is not None
    del y, node
    assert held_now() == held


def hooks_of_nodes_that_are_wrong_are_told():
    def chain(hook, before=True):
        x = tt.ones(2, requires_grad=True)
        y = x * 3
        (y.grad_fn.register_prehook if before else y.grad_fn.register_hook)(hook)
        y.sum().backward()
    error = raises(ValueError, chain, lambda grads: [])
    assert "before a node returned 0 gradients, and there are 1" in str(error)
    assert "after a node" in str(raises(ValueError, chain, lambda results, grads: [None, None], False))
    assert "no words" in str(raises(KeyError, chain, lambda grads: {}["no words"]))
    raises(TypeError, chain, lambda grads: ["text"])
    raises(tutti.Error, chain, lambda grads: [tt.ones(5)])  # another shape
    y = tt.ones(2, requires_grad=True) * 3
    node = y.grad_fn
    y += 1
    assert "changed in place" in str(raises(tutti.StateError, node.register_hook, print)) and y.grad_fn.name != node.name


def callbacks_come_when_a_backward_is_over():
    x, seen = tt.ones(2, requires_grad=True), []
    held = held_now()
    y = x * 2
    y.register_hook(lambda grad: (seen.append("hook"), tt.queue_callback(lambda: seen.append("end")), tt.queue_callback(lambda: seen.append("last")))[3:] or None)
    y.sum().backward()
    assert seen == ["hook", "end", "last"], seen
    raises(tutti.StateError, tt.queue_callback, print)  # no backward runs

    def fails(grad):
        tt.queue_callback(lambda: seen.append("never"))
        raise ArithmeticError("in the hook")
    z = x * 2
    z.register_hook(fails)
    raises(ArithmeticError, z.sum().backward)
    w = x * 2
    w.register_hook(lambda grad: tt.queue_callback(lambda: 1 // 0))
    raises(ZeroDivisionError, w.sum().backward)
    del y, z, w
    assert "never" not in seen and held_now() == held


def a_tensor_that_was_saved_can_be_refilled():
    x = tt.ones(3, requires_grad=True)
    y = x.exp()
    with tt.no_grad():
        saved = y.detach()
        kept = saved.clone()
        with tt.preserve_versions(y):
            saved.fill_(0)
            saved.copy_(kept)
    assert y.version == 0
    y.sum().backward()
    assert x.grad.equal(kept)
    z = x.exp()
    z.detach().fill_(0)
    raises(tutti.StateError, z.sum().backward)


# ---- compiled backwards ----

def network():
    tt.seed(3)
    return nn.Sequential(nn.Linear(4, 8), tt.tanh, nn.Linear(8, 2))


def trained(compiled, steps=6, hook=None, opaque=False):
    net = network()
    if hook is not None:
        next(iter(net.parameters())).register_hook(hook, opaque=opaque)
    optimizer = optim.SGD(net, learning_rate=0.1)
    x, y = tt.arange(12, dtype="f32").reshape(3, 4) * 0.1, tt.ones((3, 2))
    for _ in range(steps):
        loss = tt.mse_loss(net(x), y)
        if compiled is None:
            loss.backward()
        else:
            with compiled:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.tolist() for parameter in net.parameters()]


def compiled_backwards_compute_the_same():
    compiled = tutti.CompiledBackward()
    assert compiled.graph() is None and compiled.counts()["captures"] == 0 and compiled.reason() == ""
    assert trained(compiled) == trained(None)
    counts = compiled.counts()
    assert counts["captures"] >= 1 and counts["hits"] >= 4 and counts["eager"] == 0 and counts["vertices"] > 0, counts
    assert counts["misses"]["first"] == 1 and "graph(" in compiled.graph()
    with compiled:  # another function: other nodes
        tt.ones(2, requires_grad=True).exp().sum().backward()
    assert compiled.counts()["misses"]["nodes"] == 1


def hooks_are_captured_unless_they_are_opaque():
    ran = []

    def twice(grad):
        ran.append(1)
        return grad * 2
    compiled = tutti.CompiledBackward()
    expected = trained(None, hook=twice)
    assert len(ran) == 6
    ran.clear()
    assert trained(compiled, hook=twice) == expected and len(ran) == compiled.counts()["captures"] < 6
    ran.clear()
    compiled = tutti.CompiledBackward()
    assert trained(compiled, hook=twice, opaque=True) == expected and len(ran) == 6
    assert compiled.counts()["eager"] == 6 and compiled.counts()["hits"] == 0 and compiled.reason()
    error = raises(tutti.Error, trained, tutti.CompiledBackward(full=True), 1, twice, True)
    assert "opaque" in str(error), error


def what_a_hook_raises_leaves_a_compiled_backward():
    def fails(grad):
        raise ArithmeticError("while it is captured")
    compiled = tutti.CompiledBackward()
    raises(ArithmeticError, trained, compiled, 1, fails)
    assert trained(compiled) == trained(None)  # and it can be used further
    raises(tutti.Error, compiled.__exit__, None, None, None)  # no region is open


def functions_of_ones_own_run_as_ever():
    class Double(tt.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

        @staticmethod
        def backward(context, grad):
            return grad * 2
    compiled, x = tutti.CompiledBackward(), tt.ones(2, requires_grad=True)
    for _ in range(12):
        with compiled:
            Double.apply(x).sum().backward()
    assert x.grad.tolist() == [24, 24] and compiled.counts()["hits"] == 0


# ---- training ----

def tokens_come_in_batches():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "text.bin"
        path.write_bytes(b"head" + array.array("H", range(1000)).tobytes())
        with data.Tokens(path, length=10, batch=2, header_bytes=4, in_order=True) as tokens:
            assert tokens.count == 1000 and tokens.batches == 49
            inputs, targets = tokens.batch(1)
            assert inputs.tolist() == [list(range(20, 30)), list(range(30, 40))] and targets.tolist() == [list(range(21, 31)), list(range(31, 41))]
            assert inputs.dtype == "i64" and len(list(tokens)) == 49
        raises(tutti.StateError, tokens.batch, 0)
        tokens.close()
        rows = set()
        for rank in range(2):
            with data.Tokens(path, length=10, batch=2, header_bytes=4, seed=5, rank=rank, ranks=2) as tokens:
                rows |= {tuple(row) for inputs, _ in tokens for row in inputs.tolist()}
                assert tokens.batch(0)[0].equal(tokens.batch(0)[0]) and not tokens.batch(0)[0].equal(tokens.batch(tokens.batches)[0])
                raises(tutti.ArgumentError, tokens.batch, -1)
        assert len(rows) == 96  # no row twice, on no rank
        raises(FileNotFoundError, data.Tokens, path.with_name("none"))
        raises(tutti.Error, data.Tokens, path)  # too few for a row
        raises(tutti.Error, data.Tokens, path, 10, dtype="f32")
        raises(TypeError, data.Tokens, path, 10, dtype="word")


def progress_tells_how_far_it_is():
    with tempfile.TemporaryFile("w+") as file:
        file.write("before\n")
        with data.Progress(steps=4, done=1, file=file) as progress:
            progress.step(2.5, 100)
            progress.step(1.5, 100)
        raises(tutti.StateError, progress.step, 1.0)
        file.seek(0)
        text = file.read()
        assert text.startswith("before\n") and "3/4" in text and "1.5" in text, text
        number = file.fileno()
        os.fstat(number)  # ours is still open
    raises(tutti.Error, data.Progress, -1)


if __name__ == "__main__":
    run((nodes_have_names_and_hooks, hooks_of_nodes_run_in_order_and_let_go, hooks_of_nodes_that_are_wrong_are_told, callbacks_come_when_a_backward_is_over,
         a_tensor_that_was_saved_can_be_refilled, compiled_backwards_compute_the_same, hooks_are_captured_unless_they_are_opaque, what_a_hook_raises_leaves_a_compiled_backward,
         functions_of_ones_own_run_as_ever, tokens_come_in_batches, progress_tells_how_far_it_is))
