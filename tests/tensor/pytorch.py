#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
#
# Values and gradients of libtutti-tensor against PyTorch, called through the C ABI. Skipped (exit 77) where no Python with PyTorch is found; name one
# with TEST_PYTHON.
import ctypes
import os
import shutil
import subprocess
import sys

try:
    import torch
except ImportError:
    for candidate in (os.environ.get("TEST_PYTHON"), os.environ.get("TUTTI_PYTHON"), shutil.which("python")):
        if candidate and os.path.abspath(candidate) != os.path.abspath(sys.executable) and "TUTTI_TORCH_TRIED" not in os.environ:
            environment = dict(os.environ, TUTTI_TORCH_TRIED="1")
            sys.exit(subprocess.run([candidate, __file__], env=environment).returncode)
    print("skipped: no PyTorch here (set TEST_PYTHON)")
    sys.exit(77)
import torch.nn.functional as F

build = os.environ.get("TEST_BUILD", "build/release")
if os.environ.get("TEST_SANITIZE"):
    print("skipped: a sanitized library cannot be loaded into Python")
    sys.exit(77)
ctypes.CDLL(f"{build}/src/libtutti.so", mode=ctypes.RTLD_GLOBAL)
lib = ctypes.CDLL(f"{build}/src/libtutti-tensor.so")
tutti = ctypes.CDLL(f"{build}/src/libtutti.so")
tutti.tutti_error_message.restype = ctypes.c_char_p


class Dims(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), ("at", ctypes.c_int64 * 8)]


class Scope(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint64)]


class List(ctypes.Structure):
    _fields_ = [("count", ctypes.c_size_t), ("at", ctypes.POINTER(ctypes.c_void_p))]


P, D, I, B, L = ctypes.c_void_p, ctypes.c_double, ctypes.c_int, ctypes.c_bool, ctypes.c_int64
lib.tt_scope_open.restype = Scope
TYPES = {torch.float64: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4, torch.int64: 10, torch.bool: 15}


def call(name, result, *arguments):
    function = getattr(lib, name)
    function.restype = result
    function.argtypes = [type(a) for a in arguments]
    return function(*arguments)


def dims(shape):
    return Dims(len(shape), (ctypes.c_int64 * 8)(*shape))


def send(t, grad=False):
    t = t.detach().contiguous()
    x = call("tt_from", P, P(t.data_ptr()), dims(t.shape), I(TYPES[t.dtype]), P(None))
    if grad:
        call("tt_require_grad", P, P(x), B(True))
    return P(x)


def receive(x, like):
    out = torch.empty_like(like).contiguous()
    if not call("tt_read", B, x, P(out.data_ptr()), I(TYPES[out.dtype]), ctypes.c_size_t(out.numel())):
        call("tt_error_show", I)
        raise RuntimeError(tutti.tutti_error_message().decode())
    return out


def tt(name, *arguments):
    return P(call("tt_" + name, P, *arguments))


failures = 0


def compare(what, got, expected, tolerance):
    global failures
    if not torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
        failures += 1
        print(f"FAILED {what}: largest difference {(got.double() - expected.double()).abs().max():.3g}")


def check(what, inputs, ours, theirs, tolerance=2e-5):
    """The value of theirs(*inputs), and the gradients of its sum of squares, from both."""
    scope = lib.tt_scope_open()
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    handles = [send(t, t.is_floating_point()) for t in inputs]
    expected = theirs(*leaves)
    result = ours(*handles)
    compare(what, receive(result, expected.detach()), expected.detach(), tolerance)
    if expected.requires_grad:
        (expected * expected).sum().backward()
        call("tt_backward", B, tt("sum", tt("mul", result, result)), P(None))
        for i, (leaf, handle) in enumerate(zip(leaves, handles)):
            if leaf.grad is not None:
                compare(f"{what}, gradient {i}", receive(tt("grad", handle), leaf.grad), leaf.grad, tolerance * 10)
    if call("tt_scope_close", I, ctypes.pointer(scope)) != 0:
        raise RuntimeError(tutti.tutti_error_message().decode())


torch.manual_seed(1)
x, y = torch.randn(5, 33), torch.randn(5, 33)
for name in ("neg", "abs", "square", "exp", "sin", "cos", "tanh", "erf", "sigmoid", "relu"):
    check(name, [x], lambda a, n=name: tt(n, a), getattr(torch, name))
for name in ("sqrt", "rsqrt", "log", "reciprocal"):
    check(name, [x.abs() + 0.5], lambda a, n=name: tt(n, a), getattr(torch, name))
check("gelu", [x], lambda a: tt("gelu", a), F.gelu)
check("gelu_tanh", [x], lambda a: tt("gelu_tanh", a), lambda a: F.gelu(a, approximate="tanh"))
check("silu", [x], lambda a: tt("silu", a), F.silu)
check("clamp", [x], lambda a: tt("clamp", a, D(-0.5), D(0.7)), lambda a: a.clamp(-0.5, 0.7))
for name in ("add", "sub", "mul", "div", "maximum", "minimum"):
    check(name, [x, y[0] + 3], lambda a, b, n=name: tt(n, a, b), getattr(torch, name))
check("pow", [x.abs() + 0.1, y], lambda a, b: tt("pow", a, b), torch.pow, 1e-4)
check("where", [x > 0, x, y], lambda c, a, b: tt("where", c, a, b), torch.where)
for keep in (False, True):
    check("sum", [x], lambda a, k=keep: tt("sum_dims", a, dims([1]), B(k)), lambda a, k=keep: a.sum(1, keepdim=k), 1e-4)
    check("mean", [x], lambda a, k=keep: tt("mean_dims", a, dims([0]), B(k)), lambda a, k=keep: a.mean(0, keepdim=k))
    check("amax", [x], lambda a, k=keep: tt("amax", a, dims([1]), B(k)), lambda a, k=keep: a.amax(1, keepdim=k))
check("prod", [x[:, :5]], lambda a: tt("prod", a, dims([1]), B(False)), lambda a: a.prod(1), 1e-4)
check("argmax", [x], lambda a: tt("argmax", a, I(1), B(False)), lambda a: a.argmax(1))
for dim in (0, 1):
    check("softmax", [x], lambda a, d=dim: tt("softmax", a, I(d)), lambda a, d=dim: a.softmax(d))
    check("log_softmax", [x], lambda a, d=dim: tt("log_softmax", a, I(d)), lambda a, d=dim: a.log_softmax(d), 1e-4)
check("matmul", [torch.randn(3, 1, 4, 5), torch.randn(2, 5, 6)], lambda a, b: tt("matmul", a, b), torch.matmul, 1e-4)
check("matmul of vectors", [torch.randn(7), torch.randn(7)], lambda a, b: tt("matmul", a, b), torch.matmul, 1e-4)
check("linear", [torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)], lambda a, w, b: tt("linear", a, w, b), F.linear, 1e-4)
w, b = torch.randn(33), torch.randn(33)
check("layer_norm", [x, w, b], lambda a, w, b: tt("layer_norm", a, w, b, D(1e-5)), lambda a, w, b: F.layer_norm(a, (33,), w, b, 1e-5), 1e-4)
check("rms_norm", [x, w], lambda a, w: tt("rms_norm", a, w, D(1e-6)), lambda a, w: F.rms_norm(a, (33,), w, 1e-6), 1e-4)
tokens = torch.tensor([[1, 5, 1], [0, 6, 2]])
check("embedding", [torch.randn(7, 4), tokens], lambda w, i: tt("embedding", w, i), lambda w, i: F.embedding(i, w))
targets = torch.tensor([3, 0, -100, 8, 2])
check("cross_entropy", [torch.randn(5, 9) * 3, targets], lambda a, t: tt("cross_entropy", a, t, L(-100)), F.cross_entropy)
check("cross_entropy of images", [torch.randn(2, 9, 3, 4) * 3, torch.randint(0, 9, (2, 3, 4))], lambda a, t: tt("cross_entropy", a, t, L(-100)), F.cross_entropy)
check("cross_entropy of one row", [torch.randn(9) * 3, torch.tensor(4)], lambda a, t: tt("cross_entropy", a, t, L(-100)), F.cross_entropy)
for causal in (False, True):
    check("attention", [torch.randn(2, 3, 70, 16) for _ in range(3)], lambda q, k, v, c=causal: tt("attention", q, k, v, B(c), D(0)),
          lambda q, k, v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c), 1e-4)
check("gather", [x, torch.randint(0, 33, (5, 4))], lambda a, i: tt("gather_dim", a, I(1), i), lambda a, i: a.gather(1, i))
check("index_select", [x, torch.tensor([3, 3, 9])], lambda a, i: tt("index_select", a, I(1), i), lambda a, i: a.index_select(1, i))
check("tril", [torch.randn(6, 6)], lambda a: tt("tril", a, L(-1)), lambda a: a.tril(-1))
for dtype in (torch.bfloat16, torch.float16):
    check(f"matmul in {dtype}", [torch.randn(40, 64, dtype=dtype), torch.randn(64, 24, dtype=dtype)], lambda a, b: tt("matmul", a, b), torch.matmul, 3e-2)


def optimizer(name, ours, theirs, state_count):
    scope = lib.tt_scope_open()
    p, states = torch.randn(40), [torch.zeros(40) for _ in range(state_count)]
    reference = p.clone().requires_grad_()
    handle, held = send(p), [send(s) for s in states]
    update = theirs([reference])
    for i in range(1, 6):
        reference.grad = torch.randn(40)
        ours(handle, send(reference.grad), held, i)
        update.step()
    compare(name, receive(handle, p), reference.detach(), 1e-5)
    if call("tt_scope_close", I, ctypes.pointer(scope)) != 0:
        raise RuntimeError(tutti.tutti_error_message().decode())


class Sgd(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("rate", D), ("momentum", D), ("decay", D)]


class AdamW(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("rate", D), ("beta1", D), ("beta2", D), ("epsilon", D), ("decay", D)]


sgd, adamw = Sgd(ctypes.sizeof(Sgd), 0.1, 0.9, 0.01), AdamW(ctypes.sizeof(AdamW), 0.01, 0.9, 0.99, 1e-8, 0.1)
optimizer("sgd", lambda p, g, s, i: call("tt_sgd_step", B, p, g, s[0], ctypes.pointer(sgd)),
          lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01), 1)
optimizer("adamw", lambda p, g, s, i: call("tt_adamw_step", B, p, g, s[0], s[1], L(i), ctypes.pointer(adamw)),
          lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), 2)
print("passed" if failures == 0 else f"{failures} differences")
sys.exit(1 if failures else 0)
