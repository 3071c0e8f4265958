# SPDX-License-Identifier: Apache-2.0
"""Writes tutti/tensor/_operators.py and its stub: a Python function for every function of the tensor library whose arguments are tensors, numbers, shapes,
element types, groups and lists of them, and the class that has them as methods. Rules are few: arguments keep the order of C, those that have a default
come last; a size_t that counts an array goes, and options become keywords; tt_sum and tt_sum_dims are one function, as are tt_add and tt_add_scalar."""
import re

# letter of tutti/tensor/_calls.py, annotation
KINDS = {"tt_tensor *": ("T", "TensorLike"), "const tt_tensor *": ("T", "TensorLike"), "tt_tensor_list": ("L", "Sequence[Optional[Tensor]]"), "int": ("i", "int"),
         "int64_t": ("q", "int"), "uint64_t": ("Q", "int"), "size_t": ("z", "int"), "double": ("d", "float"), "bool": ("?", "bool"), "tt_dims": ("D", "Dims"),
         "tutti_dtype": ("Y", "Dtype"), "tutti_reduction": ("R", "str"), "tutti_group *": ("G", "Optional[AnyGroup]"), "tutti_device": ("V", "Device"),
         "const tt_options *": ("O", ""), "const int64_t *": ("A", "Sequence[int]"), "const int *": ("a", "Sequence[int]")}
RESULTS = {"tt_tensor *": ("tensor", "Tensor"), "tt_tensor_list": ("tensors", "List[Tensor]"), "bool": ("done", "None")}
ANSWERS = {"equal", "allclose", "same_storage", "device_available"}  # whose bool is what they tell
# Written by hand, or no part of Python's interface: scopes, modes, and what is a property of a tensor.
BY_HAND = {"scope_return", "keep", "number", "is_contiguous", "require_grad", "requires_grad", "is_leaf", "is_parameter", "grad", "grad_mode", "grad_enabled",
           "backward", "anomaly_mode", "backward_compiled_end", "is_async", "set_version", "arange", "symm_pool_end", "replay_begin", "default_device_set",
           "clip_grad_norm", "clip_grad_value", "slice", "select"}
NAMES = {"from": "source", "list": "tensors"}
OPTIONAL = {("linear", "bias"), ("layer_norm", "weight"), ("layer_norm", "bias"), ("rms_norm", "weight"), ("scaled_matmul", "bias"),
            ("scaled_matmul", "result_scale"), ("fused_scaled_matmul_reduce_scatter", "bias"), ("fused_scaled_matmul_reduce_scatter", "result_scale"),
            ("multimem_one_shot_reduce_out", "out")}
DEFAULTS = {"keep_dims": "False", "dims": "None", "epsilon": "1e-5", "causal": "False", "scale": "0.0", "ignore": "-100", "reduction": "'sum'", "diagonal": "0",
            "root": "0", "tag": "0", "relative": "1e-5", "absolute": "1e-8", "step": "1", "requires_grad": "True", "major_align": "0",
            "out_splits": "None", "in_splits": "None", "rows": "None", "base": "10000.0"}
OWN_DEFAULTS = {("softmax", "dim"): "-1", ("log_softmax", "dim"): "-1", ("argmax", "dim"): "-1", ("cat", "dim"): "0", ("stack", "dim"): "0", ("chunk", "dim"): "0",
                ("split", "dim"): "0", ("all_gather", "dim"): "0", ("reduce_scatter", "dim"): "0", ("reduce_scatter_premul", "dim"): "0",
                ("flatten", "first"): "0", ("flatten", "last"): "-1", ("uniform_", "low"): "0.0", ("uniform_", "high"): "1.0", ("normal_", "mean"): "0.0",
                ("normal_", "deviation"): "1.0", ("clamp", "low"): "-math.inf", ("clamp", "high"): "math.inf", ("clamp_", "low"): "-math.inf",
                ("clamp_", "high"): "math.inf", ("as_strided", "offset"): "0", ("dropout", "share"): "0.5", ("scaled_matmul", "dtype"): "None",
                ("fused_scaled_matmul_reduce_scatter", "dtype"): "None", ("scaled_matmul", "use_fast_accum"): "False",
                ("fused_scaled_matmul_reduce_scatter", "use_fast_accum"): "False", ("randint", "dtype"): "'i64'", ("add_scaled", "factor"): "1.0",
                ("addcmul", "factor"): "1.0", ("addcdiv", "factor"): "1.0", ("add_scaled_", "factor"): "1.0", ("addcmul_", "factor"): "1.0",
                ("addcdiv_", "factor"): "1.0", ("foreach_add_", "factor"): "1.0", ("foreach_addcdiv_", "factor"): "1.0", ("all_to_all_vdev", "in_splits"): "",
                ("all_to_all_vdev_2d", "in_splits"): "", ("eye", "rows"): "", ("empty_pinned", "dtype"): "'f32'"}
CREATIONS = {"empty", "empty_strided", "zeros", "ones", "full", "eye", "rand", "randn"}
VARIADIC = {"view": "shape", "reshape": "shape", "expand": "shape", "permute": "order"}
SCALARS = {"add", "add_", "div", "div_", "mul", "mul_", "pow"}  # a number as second argument has a function of its own
DIMS = {"sum", "mean"}  # without dims, a function of its own
METHOD_SELVES = {"x", "a", "logits", "a_shard"}


class Parameter:
    def __init__(self, function, argument):
        self.name = NAMES.get(argument.name, argument.name)
        self.letter, self.annotation = KINDS[argument.kind]
        self.default = OWN_DEFAULTS.get((function, argument.name), DEFAULTS.get(argument.name, ""))
        if self.letter == "Y" and function in CREATIONS:
            self.default = "'f32'"
        if (function, argument.name) in OPTIONAL:
            self.default = "None"
        if self.letter == "T" and self.default == "None":
            self.annotation = "Optional[TensorLike]"
        if self.letter in "AaD" and self.default == "None":
            self.annotation = f"Optional[{self.annotation}]"
        if self.letter == "Y" and self.default == "None":
            self.annotation = "Optional[Dtype]"
        self.counted = False


def shown(text):
    """A comment of a header, in Python's words."""
    text = re.sub(r"\btt_(\w+)", r"\1", text).replace("NULL", "None").replace("\\", "\\\\")
    text = re.sub(r"TUTTI_(SUM|AVG|MIN|MAX|PRODUCT)\b", lambda match: repr(match[1].lower()), text)
    text = text[:1].upper() + text[1:] if re.match(r"[a-z][a-z]+ [a-z]", text) else text
    return text if text.endswith((".", ")")) else text + "."


class Operator:
    def __init__(self, function, docs, functions):
        self.c_name, self.name = function.name, function.name[3:]
        self.result, self.returns = RESULTS[function.result]
        if self.name in ANSWERS:
            self.result, self.returns = "answer", "bool"
        if self.name.endswith("_") and self.result == "tensor":
            self.result = "in_place"
        self.parameters, waiting = [], False
        for argument in function.arguments:
            if argument.kind == "size_t" and argument.name.endswith("_count"):
                waiting = True
                continue
            parameter = Parameter(self.name, argument)
            parameter.counted, waiting = waiting, False
            if parameter.counted:
                parameter.default = parameter.default if parameter.default != "None" else ""
                parameter.annotation = "Sequence[int]"
            self.parameters.append(parameter)
        self.letters = "".join(("z" if parameter.counted else "") + parameter.letter for parameter in self.parameters)
        self.scalar = functions.get(self.c_name.rstrip("_") + "_scalar" + "_" * self.c_name.endswith("_")) if self.name in SCALARS else None
        self.over_dims = functions.get(self.c_name + "_dims") if self.name in DIMS else None
        text = docs[self.c_name]
        if text == "in place":
            text = docs[self.c_name[:-1]].rstrip(".") + ". In place: the first tensor is written and returned"
        if self.over_dims:
            text = docs[self.over_dims.name]
        self.doc = shown(text)

    # ---- pieces of text ----

    def ordered(self):
        """Parameters as Python has them: those with a default last, options as keywords at the end."""
        plain = [p for p in self.parameters if p.letter != "O"]
        if self.name in VARIADIC:
            return plain
        return [p for p in plain if not p.default] + [p for p in plain if p.default]

    def signature(self, stub=False, method=False):
        parts = []
        for place, parameter in enumerate(self.ordered()):
            if method and place == 0:
                parts.append("self")
            elif self.name in VARIADIC and parameter.name == VARIADIC[self.name]:
                parts.append(f"*{parameter.name}: Dims")
            else:
                default = f" = {'...' if stub else parameter.default}" if parameter.default else ""
                parts.append(f"{parameter.name}: {parameter.annotation}{default}")
        if self.over_dims:
            parts += ["dims: Optional[Dims] = None", "keep_dims: bool = False"]
        if any(p.letter == "O" for p in self.parameters):
            parts += ["device: Optional[Device] = None", "requires_grad: bool = False", "name: Optional[str] = None"]
        return f"({', '.join(parts)}) -> {self.returns}"

    def passed(self):
        group = next((p.name for p in self.parameters if p.letter == "G"), None)
        for parameter in self.parameters:
            if parameter.letter == "O":
                yield "_c.options(device, requires_grad, name)"
            elif parameter.letter in "Aa":
                kind = "int64" if parameter.letter == "A" else "int"
                yield f"*_c.counted_{kind}({parameter.name})" if parameter.counted else f"_c.each_{kind}({parameter.name}, {group}, {parameter.name!r})"
            elif self.name in VARIADIC and parameter.name == VARIADIC[self.name]:
                yield f"_c.spread({parameter.name})"
            else:
                yield parameter.name

    def body(self):
        first = self.parameters[0].name if self.parameters else ""
        lines = []
        if self.scalar:
            second = self.parameters[1].name
            lines += [f"if _c.is_number({second}):", f"    return _c.{self.result}(_{self.name}_number, {first}, {second})"]
        if self.over_dims:
            lines += ["if dims is not None or keep_dims:", f"    return _c.tensor(_{self.name}_dims, {first}, dims, keep_dims)"]
        lines.append(f"return _c.{self.result}({', '.join([f'_{self.name}', *self.passed()])})")
        return lines

    def bindings(self):
        result = {"in_place": "tensor", "answer": "done"}.get(self.result, self.result)
        names = " ".join(" ".join([parameter.name] * (1 + parameter.counted)) for parameter in self.parameters)  # a count is of the list that it counts
        yield f"_{self.name} = _c.bind({self.c_name!r}, {result!r}, {self.letters!r}, {names!r})"
        if self.scalar:
            yield f"_{self.name}_number = _c.bind({self.scalar.name!r}, {result!r}, 'Td', {names!r})"
        if self.over_dims:
            yield f"_{self.name}_dims = _c.bind({self.over_dims.name!r}, {result!r}, 'TD?', {names + ' dims keep_dims'!r})"

    @property
    def is_method(self):
        return bool(self.parameters) and self.parameters[0].letter == "T" and self.parameters[0].name in METHOD_SELVES

    def documentation(self, indent):
        """A docstring, in lines of 150 columns at most."""
        words, lines, line = self.doc.split(), [], '"""'
        for word in words:
            if len(indent) + len(line) + 1 + len(word) > 145:
                lines.append(line)
                line = word
            else:
                line += ("" if line in ('"""', "") else " ") + word
        return [indent + part for part in lines + [line + '"""']]


def operators(header, docs):
    functions = header.functions
    merged = {name for base in SCALARS for name in (f"{base.rstrip('_')}_scalar{'_' * base.endswith('_')}",)} | {base + "_dims" for base in DIMS}
    found = []
    for function in functions.values():
        if not function.name.startswith("tt_") or function.name[3:] in BY_HAND | merged or function.result not in RESULTS:
            continue
        if function.name.endswith("_") or function.result != "bool" or function.name[3:] in ANSWERS | {"split_copy", "storage_resize", "set_random_state", "synchronize"}:
            if all(argument.kind in KINDS for argument in function.arguments):
                found.append(Operator(function, docs, functions))
    return found


def module(found):
    lines = ["# Made from tutti-ffi.h and the headers' comments by scripts/python.",
             '"""The functions of the tensor library on tensors, numbers, shapes, element types and groups."""',
             "from __future__ import annotations", "", "import math", "from typing import TYPE_CHECKING, List, Optional, Sequence", "",
             "from . import _calls as _c", "", "if TYPE_CHECKING:", "    from ._calls import AnyGroup, Device, Dims, Dtype, TensorLike", "    from ._tensor import Tensor", ""]
    for operator in found:
        lines += list(operator.bindings())
    for operator in found:
        lines += ["", "", f"def {operator.name}{operator.signature()}:", *operator.documentation("    "), *("    " + line for line in operator.body())]
    methods = [operator for operator in found if operator.is_method]
    lines += ["", "", "class Methods:", '    """The functions whose first argument is the tensor, as its methods."""', "    __slots__ = ()", ""]
    lines += [f"    {operator.name} = {operator.name}" for operator in methods]
    lines += ["", "", "__all__ = [" + ", ".join(repr(operator.name) for operator in found) + "]"]
    return "\n".join(lines) + "\n"


def stub(found):
    lines = ["# Made from tutti-ffi.h and the headers' comments by scripts/python.", "from typing import List, Optional, Sequence", "",
             "from ._calls import AnyGroup, Device, Dims, Dtype, TensorLike", "from ._tensor import Tensor", ""]
    for operator in found:
        lines += [f"def {operator.name}{operator.signature(stub=True)}:", *operator.documentation("    ")]
    lines += ["", "class Methods:"]
    for operator in found:
        if operator.is_method:
            lines += [f"    def {operator.name}{operator.signature(stub=True, method=True)}:", *operator.documentation("        ")]
    lines += ["", "__all__ = [" + ", ".join(repr(operator.name) for operator in found) + "]"]
    return "\n".join(lines) + "\n"
