#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random programs in PyTorch: test_tensor_random makes them and writes their text, and this answers with what PyTorch makes of it.

Skipped (exit 77) where no Python with PyTorch is found; TEST_PYTHON names one. TEST_PROGRAMS is how many (300). Arguments go to test_tensor_random:
    random_torch_peer.py --seed 4711
docs/pytorch.md lists where the two differ; what is marked "differs" here follows it.
"""
import os
import subprocess
import sys
import warnings

SKIP = 77


sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from torch_python import with_torch  # noqa: E402

with_torch()
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

torch.set_num_threads(1)
warnings.filterwarnings("ignore")

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64, "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# PyTorch has next to no arithmetic for these: a program in which it refuses one of them is not compared.
RARE = {torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64}
MASK = (1 << 64) - 1


class Unknown(Exception):
    """PyTorch cannot tell."""


# ---- leaves ----

def random_value(seed, element, kind, limit):
    x = (seed * 1000003 + element * 7919 + 12345) & MASK
    x = ((x ^ x >> 31) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 29) * 0xBF58476D1CE4E5B9) & MASK
    x ^= x >> 32
    share = (x >> 11) * 2.0**-53
    if kind == 0:
        return ((x >> 40 & 15) - 8) / 4
    if kind == 1:
        return (-1 if x & 1 else 1) * (0.15 + 1.7 * share)
    if kind == 2:
        return 0.5 + 1.5 * share
    return float(int(share * limit))


def leaf(run, dtype, sizes, strides, seed, kind, limit, grad):
    count = 1
    for size in sizes:
        count *= size
    values = [random_value(seed, i, kind, limit) for i in range(count * (2 if dtype.is_complex else 1))]
    if kind != 3 and not dtype.is_floating_point and not dtype.is_complex:
        if dtype == torch.bool:
            values = [float(v > 0) for v in values]
        elif dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
            values = [float(int(abs(v) * 2)) for v in values]
        else:
            values = [float(int(v * 2 // 1)) for v in values]
    dense = torch.tensor(values, dtype=torch.float64)
    dense = torch.view_as_complex(dense.view(*sizes, 2)) if dtype.is_complex else dense.view(sizes)
    with torch.no_grad():
        x = torch.empty_strided(sizes, strides, dtype=dtype)
        x.untyped_storage().fill_(0)  # the gaps too
        x.copy_(dense)
    return x.requires_grad_() if grad else x


def weights_like(x, salt):
    count = x.numel() * (2 if x.is_complex() else 1)
    dense = torch.tensor([0.5 + (i * 7 + salt * 3) % 5 / 8 for i in range(count)], dtype=torch.float64)
    dense = torch.view_as_complex(dense.view(*x.shape, 2)) if x.is_complex() else dense.view(x.shape)
    return dense.to(x.dtype)


# ---- functions with a gradient of their own ----

class Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return lay_out(a * b, (a, b))

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return sum_to(grad * b.conj(), a) if ctx.needs_input_grad[0] else None, sum_to(grad * a.conj(), b) if ctx.needs_input_grad[1] else None


def sum_to(x, like):
    """PyTorch refuses gradients of functions that broadcast; Tutti sums them, as it does for operators."""
    return x.sum_to_size(like.shape)


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        y = lay_out(a.exp(), (a,))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, = ctx.saved_tensors
        return grad * y.conj()


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        total, product = lay_out(a + b, (a, b)), lay_out(a * b, (a, b))
        ctx.save_for_backward(a, b, product)
        return total, product

    @staticmethod
    def backward(ctx, of_sum, of_product):
        a, b, _ = ctx.saved_tensors
        return sum_to(of_sum + of_product * b.conj(), a), sum_to(of_sum + of_product * a.conj(), b)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        size = lay_out(a.abs(), (a,))
        ctx.mark_non_differentiable(size)
        return lay_out(a * 2, (a,)), size

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 2


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        with torch.autograd._unsafe_preserve_version_counter(a):  # differs: mark_dirty counts as a write of its own in PyTorch
            a.mul_(3)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class DirtySecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        first = lay_out(a * 10, (a,))
        with torch.autograd._unsafe_preserve_version_counter(b):
            b.mul_(2)
        ctx.mark_dirty(b)
        return first, b

    @staticmethod
    def backward(ctx, of_first, of_second):
        return of_first * 10, of_second * 2


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class View(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a.unsqueeze(0)

    @staticmethod
    def backward(ctx, grad):
        return grad.squeeze(0)


class Absent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        return lay_out(a * 4, (a,)), lay_out(b * 5, (b,))

    @staticmethod
    def backward(ctx, of_first, of_second):
        return None if of_first is None else of_first * 4, None if of_second is None else of_second * 5


class Restride(torch.autograd.Function):
    """PyTorch has no operator for it, and a moved copy would be a view."""

    @staticmethod
    def forward(ctx, x, dim):
        y = x.movedim(dim, 0).clone(memory_format=torch.contiguous_format).movedim(0, dim)
        result = torch.empty_strided(y.shape, y.stride(), dtype=x.dtype)
        with torch.autograd._unsafe_preserve_version_counter(result):
            result.copy_(y)
        return result

    @staticmethod
    def backward(ctx, grad):
        return grad * 1, None


# ---- hooks ----

def sum_of(x):
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return float(x.detach().to(torch.float64).sum())


def hook_scale(run, x, factor):
    x.register_hook(lambda grad: None if grad is None else grad * factor)


def hook_watch(run, x):
    line = run.line

    def watch(grad):
        if grad is not None and grad.numel() and not run.muted:
            run.log += [line, sum_of(grad)]

    x.register_hook(watch)


def hook_accumulate(run, x, factor=0):
    line = run.line

    def note(param):
        if param.grad.numel() and not run.muted:
            run.log += [line, sum_of(param.grad)]
        if factor != 0:
            with torch.no_grad():
                param.grad.mul_(factor)

    x.register_post_accumulate_grad_hook(note)


def hook_pre(run, x, factor):
    x.grad_fn.register_prehook(lambda grads: tuple(None if g is None else g * factor for g in grads))


def hook_post(run, x, factor):
    x.grad_fn.register_hook(lambda results, grads: tuple(None if g is None else g * factor for g in results))


# ---- backwards ----

def backward(run, x, retain):
    torch.autograd.backward([x], [weights_like(x, 0)], retain_graph=bool(retain))


def gradients(run, create, *roots):
    inputs = [(line, run.tensors[line, 0]) for line in run.inputs if (line, 0) in run.tensors]
    if not inputs or not roots:
        return
    leaves = [x for _, x in inputs]
    first = torch.autograd.grad(roots, leaves, [weights_like(x, i) for i, x in enumerate(roots)], create_graph=bool(create), allow_unused=True)
    for (line, _), grad in zip(inputs, first):
        run.record(f"first t{line}", grad)
    if not create:
        return
    run.muted = True  # which gradients of zero there are is each library's affair
    again = [(i, g) for i, g in enumerate(first) if g is not None and g.requires_grad]
    try:
        second = [None] * len(leaves) if not again else torch.autograd.grad([g for _, g in again], leaves, [weights_like(g, i) for i, g in again], allow_unused=True)
    except RuntimeError as error:
        run.unknown = run.unknown or run.incomparable("gradients", [], str(error))
        run.refuse("second", error)
        return
    finally:
        run.muted = False
    run.emit("second", "absent")
    for (line, _), grad in zip(inputs, second):
        run.record(f"second t{line}", grad)


# ---- operators whose call is another in PyTorch ----

def whole(dims):
    return dims if dims else None


OPERATORS = {
    "narrow": lambda r, x, d, s, n: x.narrow(d, s, n),
    "select": lambda r, x, d, i: x.select(d, i),
    "slice": lambda r, x, d, s, e, step: torch.ops.aten.slice(x, d, s, e, step),
    "transpose": lambda r, x, a, b: x.transpose(a, b),
    "permute": lambda r, x, order: x.permute(order),
    "t": lambda r, x: matrix_t(x),
    "expand": lambda r, x, sizes: x.expand(sizes),
    "squeeze": lambda r, x, d: x.squeeze(d),
    "unsqueeze": lambda r, x, d: x.unsqueeze(d),
    "view": lambda r, x, sizes: x.view(sizes),
    "reshape": lambda r, x, sizes: x.reshape(sizes),
    "flatten": lambda r, x, a, b: x.flatten(a, b) if x.flatten(a, b) is not x else x.view(x.shape),
    "as_strided": lambda r, x, sizes, strides, offset: x.as_strided(sizes, strides, offset),
    "alias": lambda r, x: torch.ops.aten.alias(x),
    "detach": lambda r, x: x.detach(),
    "view_as_real": lambda r, x: torch.view_as_real(x),
    "view_as_complex": lambda r, x: torch.view_as_complex(x),
    "split": lambda r, x, sizes, d: split(x, sizes, d),
    "chunk": lambda r, x, d, parts: chunk(x, d, parts),
    "clone": lambda r, x: x.clone(),
    "contiguous": lambda r, x: x.contiguous(),
    "to": lambda r, x, dtype: x.to(dtype),
    "to_device": lambda r, x: x,
    "restride": lambda r, x, d: Restride.apply(x, d),
    "copy_": lambda r, x, y: x.copy_(y),
    "fill_": lambda r, x, v: refuse_expanded(x).fill_(v),
    "zero_": lambda r, x: refuse_expanded(x).zero_(),
    "add_scaled": lambda r, a, b, f: add_scaled(a, b, number(f)),
    "add_scaled_": lambda r, a, b, f: add_scaled_(a, b, number(f)),
    "lerp": lambda r, a, b, w: torch.lerp(a, b, w),
    "lerp_": lambda r, a, b, w: a.lerp_(b, w),
    "addcmul": lambda r, x, a, b, f: torch.addcmul(x, a, b, value=f),
    "addcmul_": lambda r, x, a, b, f: x.addcmul_(a, b, value=f),
    "addcdiv": lambda r, x, a, b, f: torch.addcdiv(x, a, b, value=f),
    "addcdiv_": lambda r, x, a, b, f: x.addcdiv_(a, b, value=f),
    "add_scalar": lambda r, a, f: a + number(f),
    "add_scalar_": lambda r, a, f: a.add_(number(f)),
    "mul_scalar": lambda r, a, f: a * number(f),
    "mul_scalar_": lambda r, a, f: a.mul_(number(f)),
    "div_scalar": lambda r, a, f: a / number(f),
    "div_scalar_": lambda r, a, f: a.div_(number(f)),
    "pow_scalar": lambda r, a, f: a.pow(number(f)),
    "add_number": lambda r, a, f: a + number(f),
    "mul_number": lambda r, a, f: number(f) * a,
    "square": lambda r, x: x * x if x.dtype == torch.bool else x.square(),
    "silu": lambda r, x: F.silu(x),
    "gelu": lambda r, x: F.gelu(x),
    "gelu_tanh": lambda r, x: F.gelu(x, approximate="tanh"),
    "conj": lambda r, x: x.conj().resolve_conj() if x.is_complex() else x.clone(),
    "clamp": lambda r, x, low, high: x.clamp(number(low), number(high)),
    "clamp_": lambda r, x, low, high: x.clamp_(number(low), number(high)),
    "where": lambda r, c, a, b: torch.where(c, a, b),
    "masked_fill": lambda r, x, mask, v: x.masked_fill(mask, v),
    "sum_dims": lambda r, x, d, keep: x.sum(whole(d), keepdim=bool(keep)),
    "mean_dims": lambda r, x, d, keep: x.mean(whole(d), keepdim=bool(keep)),
    "amax": lambda r, x, d, keep: x.amax(d, keepdim=bool(keep)),
    "amin": lambda r, x, d, keep: x.amin(d, keepdim=bool(keep)),
    "prod": lambda r, x, d, keep: products(x, d, bool(keep)),
    "any": lambda r, x, d, keep: x.bool().any(whole(d), keepdim=bool(keep)),
    "all": lambda r, x, d, keep: x.bool().all(whole(d), keepdim=bool(keep)),
    "argmax": lambda r, x, d, keep: x.argmax(d, keepdim=bool(keep)),
    "sum": lambda r, x: x.sum(),
    "mean": lambda r, x: x.mean(),
    "norm": lambda r, x: torch.linalg.vector_norm(x),
    "sum_to": lambda r, x, sizes: x if list(x.shape) == sizes else x.sum_to_size(sizes),
    "cat": lambda r, d, *list_: torch.cat(list_, d),
    "stack": lambda r, d, *list_: torch.stack(list_, d),
    "index_select": lambda r, x, d, i: x.index_select(d, inside(i, x, d)),
    "index_add": lambda r, x, d, i, s: x.index_add(d, inside(i, x, d), s),
    "gather_dim": lambda r, x, d, i: gather(x, d, i),
    "sign": lambda r, x: sign(x),
    "scatter_add": lambda r, x, d, i, s: x.scatter_add(d, inside(i, x, d), s),
    "embedding": lambda r, w, i: F.embedding(inside(i, w, 0), w),
    "tril": lambda r, x, k: x.tril(k),
    "triu": lambda r, x, k: x.triu(k),
    "matmul": lambda r, a, b: a @ b,
    "linear": lambda r, x, w, b: F.linear(x, w, b),
    "int_matmul": lambda r, a, b: (a.to(torch.int32) @ b.to(torch.int32)),
    "softmax": lambda r, x, d: floats(x).softmax(d),
    "log_softmax": lambda r, x, d: floats(x).log_softmax(d),
    "layer_norm": lambda r, x, w, b, e: layer_norm(r, x, w, b, e),
    "rms_norm": lambda r, x, w, e: F.rms_norm(x, x.shape[-1:], w, e),
    "attention": lambda r, q, k, v, causal, scale: F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), scale=scale or None),
    "rope": lambda r, x, p, base: rope(x, p, base),
    "cross_entropy": lambda r, x, t, ignore: F.cross_entropy(x, t, ignore_index=ignore),
    "mse_loss": lambda r, x, y: F.mse_loss(x, y),
    "function_mul": lambda r, a, b: Mul.apply(a, b),
    "function_exp": lambda r, a: Exp.apply(a),
    "function_two": lambda r, a, b: Two.apply(a, b),
    "function_sign": lambda r, a: Sign.apply(a),
    "function_dirty": lambda r, a: Dirty.apply(a),
    "function_dirty_second": lambda r, a, b: DirtySecond.apply(a, b),
    "function_same": lambda r, a: Same.apply(a),
    "function_view": lambda r, a: View.apply(a),
    "function_absent": lambda r, a, b: Absent.apply(a, b),
    "hook_scale": hook_scale,
    "hook_watch": hook_watch,
    "hook_accumulate": hook_accumulate,
    "hook_accumulate_scale": hook_accumulate,
    "hook_pre": hook_pre,
    "hook_post": hook_post,
    "retain_grad": lambda r, x: x.retain_grad(),
    "grad_off": lambda r: torch._C._set_grad_enabled(False),
    "grad_on": lambda r: torch._C._set_grad_enabled(True),
    "backward": backward,
    "gradients": gradients,
    "leaf": leaf,
}
for name in ("add", "sub", "mul", "div", "maximum", "minimum", "pow", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
             "logical_not", "isnan", "neg", "abs", "exp", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "sqrt", "rsqrt", "log",
             "reciprocal", "floor", "ceil", "round"):
    OPERATORS[name] = lambda r, *a, f=getattr(torch, name): f(*a)
for name in ("add_", "sub_", "mul_", "div_", "neg_", "exp_", "tanh_", "sigmoid_", "relu_", "sqrt_"):
    OPERATORS[name] = lambda r, x, *a, n=name: getattr(x, n)(*a)


def add_scaled(a, b, factor):
    """Differs: the factor is a number like any other, where PyTorch takes only whole ones for integers, and none for the result's type."""
    if a.is_floating_point() or a.is_complex():
        return torch.add(a, b, alpha=factor)
    return a + factor * (b.to(a.dtype) if b.dtype == torch.bool and a.dtype != torch.bool else b)  # no i64 by a number and a bool


def add_scaled_(a, b, factor):
    if a.dtype == torch.bool or not a.is_floating_point() and not a.is_complex() and factor != int(factor):
        raise RuntimeError("the result is of another type")
    return a.add_(b, alpha=factor)


def sign(x):
    """Differs: the sign of NaN is NaN."""
    y = x.sign()
    return torch.where(x.isnan(), x.detach(), y) if x.is_floating_point() and bool(x.isnan().any()) else y


def gather(x, dim, index):
    """Differs: sizes are checked also where the index is empty."""
    if index.dim() == x.dim() and any(index.size(k) > x.size(k) for k in range(x.dim()) if k != dim % max(x.dim(), 1)):
        raise RuntimeError("the index exceeds the tensor")
    return x.gather(dim, inside(index, x, dim))


def inside(index, x, dim):
    """Differs: an index is checked also where there is nothing to read."""
    if index.numel() and x.dim() and (int(index.min()) < 0 or int(index.max()) >= x.size(dim)):
        raise IndexError("index out of range")
    return index


def layer_norm(run, x, weight, bias, epsilon):
    if weight is None and bias is not None and bias.requires_grad:
        run.unknown = True  # PyTorch's second derivatives are wrong there
    scale = weight if weight is not None else bias
    return F.layer_norm(x, x.shape[-1:] if scale is None else scale.shape, weight, bias, epsilon)


def floats(x):
    """PyTorch looks at the type only where there are elements."""
    if not x.is_floating_point():
        raise RuntimeError("floats only")
    return x


def matrix_t(x):
    """Differs: PyTorch takes vectors and single numbers too, and gives them back."""
    if x.dim() != 2:
        raise RuntimeError("no matrix")
    return x.t()


def number(value):
    """A whole number is an integer, as a literal without a point would be."""
    return int(value) if value == int(value) else value


def split(x, sizes, dim):
    """Differs: parts are views like any other in Tutti, where PyTorch forbids to change parts of a split in place."""
    if sum(sizes) != x.size(dim):
        raise RuntimeError("the sizes do not add up")
    return tuple(x.narrow(dim, sum(sizes[:i]), n) for i, n in enumerate(sizes))


def chunk(x, dim, parts):
    size = x.size(dim)
    if parts <= 0:
        raise RuntimeError("chunk expects chunks to be greater than 0")
    if size == 0:
        return tuple(x.narrow(dim, 0, 0) for _ in range(parts))
    each = -(-size // parts)
    return tuple(x.narrow(dim, start, min(each, size - start)) for start in range(0, size, each))


def products(x, dims, keep):
    if not dims:
        y = x.prod()
        return y.reshape([1] * x.dim()) if keep else y
    dims = [d if d >= 0 else d + x.dim() for d in dims]
    if len(set(dims)) != len(dims):
        raise RuntimeError("a dimension appears twice")
    for dim in sorted(dims, reverse=True):
        x = x.prod(dim, keepdim=keep)
    return x


def rope(x, position, base):
    if not x.is_floating_point():
        raise RuntimeError("floats only")
    half = x.size(-1) // 2
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    angle = position.to(torch.float64)[:, None] * base ** (-2 * torch.arange(half, dtype=torch.float64) / x.size(-1))
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    left, right = x[..., :half].to(wide), x[..., half:].to(wide)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


# ---- programs ----

def lay_out(result, inputs):
    """Differs: results are row-major in Tutti, unless all arguments lie in memory alike, where PyTorch gives them the strides of one argument; and they
    are no views of something that nobody sees, nor lie in storage that is larger than they are, as a sum in PyTorch may."""
    larger = result.untyped_storage().nbytes() > result.numel() * result.element_size()
    result = result.clone() if result._is_view() or larger else result
    layouts = {(x.shape, x.stride()) for x in inputs if x.dim() > 0}
    alike = len(layouts) == 1 and (result.shape, result.stride()) in layouts
    return result if result.is_contiguous() or alike else result.contiguous()


# What PyTorch says where it lacks something, or is wrong itself.
DEFECTS = ("does not support bool", "Boolean inputs not supported", "negative integer powers", "INTERNAL ASSERT", "bool tensor", "without overflow",
           "not support automatic differentiation", "Expected a floating point or complex", "Expected a proper Tensor but got None", "Expected isFloatingType(grad")


def changes(name):
    return name.endswith("_") or name.startswith("function_dirty")


def geometry(x):
    """Where a tensor lies. Strides of dimensions with one element say nothing."""
    strides = tuple(stride for size, stride in zip(x.shape, x.stride()) if size > 1)
    return x.untyped_storage()._cdata, x.shape, strides, x.storage_offset(), x.dtype


def refuse_expanded(x):
    """Differs: no write goes to an expanded tensor, where PyTorch lets fill_ and zero_ through."""
    if x.numel() and any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride())):
        raise RuntimeError("expanded")
    return x


def partly_the_same(x, y):
    """Whether a write into x may change y before it is read: what is not refused depends on the order."""
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata and (geometry(x) != geometry(y) or x.stride() != y.stride())


def touch(x):
    """A view that was made before its base had a history takes itself for a leaf until its history was asked for once."""
    try:
        x.grad_fn
    except RuntimeError:
        pass


def out_of_range(arguments):
    """Whether a number does not fit the integers that it is converted to: every machine has its own answer."""
    to, x = arguments[0], arguments[1]
    dtype, x = (to.dtype, x) if isinstance(to, torch.Tensor) and isinstance(x, torch.Tensor) else (x, to)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or not x.numel():
        return False
    x = x.detach().real if x.is_complex() else x.detach()
    info = torch.iinfo(dtype)
    values = x.to(torch.float64)
    return bool((values < info.min).any() or (values > info.max).any() or values.isnan().any())


class Run:
    def __init__(self, out):
        self.out, self.tensors, self.inputs, self.log, self.line, self.unknown = out, {}, [], [], 0, False
        self.off = []  # views that were made with gradient mode off
        self.births = {}  # versions of new results, by storage: some operators of PyTorch write their results several times
        self.unrecorded = set()  # storages that were written without a history
        self.fragile = set()  # storages of views with hooks, and of those that may reach beside what they are views of
        self.copied = set()  # storages of results that were made row-major
        self.wrote_without_gradients = self.dirtied = self.muted = False

    def emit(self, name, status, dtype="", sizes="", strides="", grad="", is_leaf="", version="", values=""):
        self.out.append("\t".join((name, status, dtype, sizes, strides, grad, is_leaf, version, values)))

    def refuse(self, name, error):
        self.emit(name, "refused", values=str(error).replace("\n", " ").replace("\t", " ")[:150])

    def shape(self, x):
        try:
            grad, is_leaf = int(x.requires_grad), int(x.is_leaf)
        except RuntimeError:  # the result of a custom function that was overtaken by a change in place: any use of it is refused
            grad, is_leaf = 1, 0
        if any(x is y for y in self.off):
            # Differs: in PyTorch a view made with gradient mode off says that it requires grad when its base does, and is a leaf of its own.
            grad, is_leaf = 0, 1
        version = x._version - self.births.get(x.untyped_storage()._cdata, 0)
        return NAMES[x.dtype], ",".join(map(str, x.shape)), ",".join(map(str, x.stride())), str(grad), str(is_leaf), str(version)

    def record(self, name, x):
        if x is None:
            self.emit(name, "absent")
            return
        flat = x.detach().resolve_conj().resolve_neg()
        flat = torch.zeros(flat.shape, dtype=flat.dtype) if flat._is_zerotensor() else flat
        flat = torch.view_as_real(flat.to(torch.complex128)) if flat.is_complex() else flat
        flat = flat.to(torch.float64) if flat.dtype.is_floating_point or flat.dtype == torch.bool else flat
        values = "".join(f" {v!r}" for v in flat.reshape(-1).tolist())
        self.emit(name, "ok", *self.shape(x), values)

    def argument(self, word):
        if word == "none":
            return None
        if word[0] == "t" and word[1].isdigit():
            line, _, result = word[1:].partition(".")
            return self.tensors[int(line), int(result or 0)]
        if word[0] == "[":
            return [int(v) for v in word[1:-1].split(",")] if len(word) > 2 else []
        if word in DTYPES:
            return DTYPES[word]
        try:
            return int(word)
        except ValueError:
            return float(word)

    def step(self, text):
        target, _, name, *words = text.split()
        self.line = int(target[1:])
        if name == "leaf" and words[-1] == "1":
            self.inputs.append(self.line)
        letters = FLOATS.get(name, ())
        try:
            arguments = [self.argument(w) for w in words]
        except KeyError:
            return
        arguments = [float(a) if i in letters else a for i, a in enumerate(arguments)]
        try:
            result = self.call(name, arguments)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            self.unknown = self.unknown or self.incomparable(name, arguments, str(error))
            self.refuse(f"line t{self.line}", error)
            return
        results = result if isinstance(result, tuple) else (result,)
        for i, x in enumerate(results[:3]):
            if isinstance(x, torch.Tensor):
                self.tensors[self.line, i] = x
                self.births.setdefault(x.untyped_storage()._cdata, x._version if name not in KEEPS_STRIDES else 0)
                unseen = not torch.is_grad_enabled() or name == "function_view" and not x.requires_grad
                if unseen and x._is_view() and not changes(name) and not any(x is y for y in self.off + arguments):
                    self.off.append(x)
        if results and isinstance(results[0], torch.Tensor):
            self.emit(f"line t{self.line}", "ok", *self.shape(results[0]))
        else:
            self.emit(f"line t{self.line}", "absent")

    def call(self, name, arguments):
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        reason = self.misleads(name, tensors, arguments)
        if reason:
            self.unknown = True
            raise RuntimeError("not comparable: " + reason)
        if name in REAL_ONLY and any(x.is_complex() for x in tensors):
            raise RuntimeError("differs: not defined for complex numbers")
        if changes(name) or name.startswith("hook"):
            for x in tensors:
                touch(x)
        if changes(name):
            if not torch.is_grad_enabled() or not tensors[0].requires_grad:
                self.wrote_without_gradients = True
                self.unrecorded.add(tensors[0].untyped_storage()._cdata)
            self.dirtied = self.dirtied or name.startswith("function_dirty")
        result = OPERATORS[name](self, *arguments)
        if name not in KEEPS_STRIDES and isinstance(result, torch.Tensor) and not any(result is x for x in arguments):
            laid = lay_out(result, tensors)
            if laid is not result:
                self.copied.add(laid.untyped_storage()._cdata)  # what was saved is another tensor
            result = laid
        if any(x.dtype not in NAMES for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)):
            self.unknown = True
            raise RuntimeError("complex32")
        return result

    def misleads(self, name, tensors, arguments):
        """Where PyTorch does what nobody would want, or what was done here to its tensors shows."""
        hook = name.startswith("hook") or name == "retain_grad"
        off = any(x is y for x in tensors for y in self.off)
        views = {x.untyped_storage()._cdata for x in tensors if x._is_view()}
        self.fragile |= views if hook or name == "as_strided" else set()
        copied = any(x.untyped_storage()._cdata in self.copied for x in tensors)
        written = 1 if name == "function_dirty_second" else 0 if changes(name) else None
        read = any(x is y for i, x in enumerate(tensors) if i != written for y in self.off)
        if off and hook or read and torch.is_grad_enabled():
            return "a view made without gradients"  # see shape; hooks on one crash PyTorch
        if copied and (hook or changes(name)):
            return "a result that was made row-major"
        if not self.fragile.isdisjoint(self.unrecorded):
            return "a view that was written without gradients"  # it makes its history anew after any write, and leaves its hooks behind
        if hook and self.dirtied and tensors[0]._is_view():
            return "a hook on a view of what a function changed"  # crashes PyTorch where the function has several results
        if name.startswith("function_dirty") and not torch.is_grad_enabled():
            return "a function that changes its argument without gradients"  # takes the history of its argument away
        if name == "copy_" and geometry(tensors[0]) == geometry(tensors[1]):
            return "a copy onto itself"  # does nothing, and checks nothing
        if changes(name) and any(partly_the_same(tensors[0], x) for x in tensors[1:]):
            return "a write that changes what it reads"
        if name in ("lerp", "lerp_") and not all(bool(x.isfinite().all()) for x in tensors):
            return "lerp of infinities"  # another formula for weights below -1/2
        if name == "pow_scalar" and tensors[0].is_floating_point() and bool(tensors[0].isneginf().any()):
            return "a power of infinity"  # the square root is taken
        if name in ("maximum", "minimum") and any(bool(x.isnan().any()) for x in tensors if x.is_floating_point()):
            return "a choice between NaNs"  # both get the whole gradient
        if name.startswith("view_as_") and not tensors[0].numel():
            return "a complex view of no elements"  # looks at strides, and has no gradient
        return "a number that does not fit" if name in ("to", "copy_") and out_of_range(arguments) else None

    def incomparable(self, name, arguments, error):
        """Refusals that say nothing about Tutti."""
        seen = self.tensors.values() if name in ("gradients", "backward") else arguments
        rare = any(isinstance(a, torch.Tensor) and a.dtype in RARE for a in seen)
        lacks = "not implemented for" in error and (name == "mse_loss" or "complex" not in error.lower() or "ComplexHalf" in error)
        return (rare or lacks or name.startswith("function_dirty")  # it has changed its argument already
                or "created inside a custom Function" in error and self.wrote_without_gradients
                or name in ("gradients", "backward") and "cannot reshape tensor of 0 elements" in error  # a gradient of its own
                or any(text in error for text in DEFECTS))

    def state(self):
        torch._C._set_grad_enabled(True)
        for (line, result), x in sorted(self.tensors.items()):
            self.record(f"value t{line}.{result}", x)
            if x.grad is not None or (result == 0 and line in self.inputs):
                self.record(f"grad t{line}.{result}", x.grad)
        self.emit("log", "ok", values="".join(f" {v!r}" for v in self.log))


# What keeps strides in both: views, copies, writes. The results of others are laid out as lay_out says.
KEEPS_STRIDES = {
    "leaf", "narrow", "select", "slice", "transpose", "permute", "t", "expand", "squeeze", "unsqueeze", "view", "reshape", "flatten", "as_strided",
    "alias", "detach", "view_as_real", "view_as_complex", "split", "chunk", "clone", "contiguous", "to_device", "restride", "function_same", "function_view",
    "function_dirty", "function_dirty_second", "function_mul", "function_exp", "function_two", "function_sign", "function_absent",
} | {name for name in OPERATORS if name.endswith("_")}
# Differs: operators that Tutti defines for real numbers alone.
REAL_ONLY = {"sin", "cos", "tanh", "tanh_", "sigmoid", "sigmoid_", "silu", "reciprocal", "rsqrt", "pow", "pow_scalar", "lerp", "lerp_", "addcmul", "addcmul_",
             "addcdiv", "addcdiv_", "sign", "isnan", "rms_norm", "layer_norm", "logical_and", "logical_or", "logical_not", "softmax", "log_softmax",
             "amax", "amin", "argmax", "maximum", "minimum"}
# Which arguments of a line are numbers, even where they are written as whole ones.
FLOATS = {"attention": (4,), "fill_": (1,)}


def answer(lines):
    out = []
    run = Run(out)
    torch._C._set_grad_enabled(True)
    for one in lines:
        if not run.unknown:
            run.step(one)
    if run.unknown:
        if os.environ.get("TEST_RANDOM_TRACE"):
            print("not compared: " + out[-1][-120:] if out else "?", file=sys.stderr, flush=True)
        out.append("unknown")
    else:
        run.state()
    return "\n".join(out) + "\nend\n"


def programs(reader):
    lines = []
    for text in reader:
        if text == "end\n":
            yield lines
            lines = []
        else:
            lines.append(text)


class Worker:
    """A process that runs programs: a few of them crash PyTorch, which tells nothing about Tutti."""

    def __init__(self):
        self.crashes = 0
        self.start()

    def start(self):
        to_child, from_child = os.pipe(), os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(to_child[1])
            os.close(from_child[0])
            with os.fdopen(to_child[0]) as reader, os.fdopen(from_child[1], "w") as writer:
                for lines in programs(reader):
                    writer.write(answer(lines))
                    writer.flush()
            os._exit(0)
        os.close(to_child[0])
        os.close(from_child[1])
        self.to, self.back = os.fdopen(to_child[1], "w"), os.fdopen(from_child[0])

    def ask(self, lines):
        self.to.write("".join(lines) + "end\n")
        self.to.flush()
        reply = []
        for text in self.back:
            reply.append(text)
            if text == "end\n":
                return "".join(reply)
        _, status = os.waitpid(self.child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(f"the process that runs PyTorch ended with {status} at this program:\n" + "".join(lines))
        self.crashes += 1
        self.start()
        return "unknown\nend\n"

    def end(self):
        self.to.close()
        os.waitpid(self.child, 0)


def main():
    if os.environ.get("TEST_SANITIZE"):
        print("skipped: the release build compares with PyTorch")
        sys.exit(SKIP)
    build = os.environ.get("TEST_BUILD", os.path.join(os.path.dirname(__file__), "../../build/release"))
    worker = Worker()
    to_us, from_us = os.pipe(), os.pipe()
    arguments = sys.argv[1:] or ["--count", os.environ.get("TEST_PROGRAMS", "300")]
    command = [os.path.join(build, "tests/test_tensor_random"), "agree_with_pytorch", "--peer", f"{from_us[0]},{to_us[1]}"] + arguments
    process = subprocess.Popen(command, pass_fds=(from_us[0], to_us[1]))
    os.close(from_us[0])
    os.close(to_us[1])
    with os.fdopen(to_us[0]) as reader, os.fdopen(from_us[1], "w") as writer:
        try:
            for lines in programs(reader):
                writer.write(worker.ask(lines))
                writer.flush()
        except BrokenPipeError:
            pass
    worker.end()
    print(f"{worker.crashes} programs crashed PyTorch")
    sys.exit(process.wait())


if __name__ == "__main__":
    main()
