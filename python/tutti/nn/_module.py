# SPDX-License-Identifier: Apache-2.0
"""Modules: parameters, buffers and children by name, a forward, hooks around it. The C library keeps the slots, so that what it builds on modules (optimizers,
data parallel and fully sharded training, compiled functions) sees those written in Python like its own."""
from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from .._arguments import Unique, name_of, path_of
from .._library import lib, struct
from ..tensor import _calls
from ..tensor._autograd import HookHandle, address_of, fill, merge, no_grad, register, sequence, user_of
from ..tensor._operators import parameter as _new_parameter
from ..tensor._tensor import Tensor

_pointer = ctypes.c_void_p
_Type = struct("tt_module_type")
_call_all = _calls.bind("tt_module_call_all", "tensors", "PL")
_call_method = _calls.bind("tt_module_call_method", "tensors", "PPL")
_call_checkpointed = _calls.bind("tt_module_call_checkpointed", "tensor", "PT")
_set_parameter = _calls.bind("tt_module_set_parameter", "done", "PsT")
_parameter = _calls.bind("tt_module_parameter", "tensor", "Ps")
_set_buffer = _calls.bind("tt_module_set_buffer", "done", "PsT")
_buffer = _calls.bind("tt_module_buffer", "tensor", "Ps")
_add_child = _calls.bind("tt_module_add_child", "done", "PsP")
_new = _calls.bind("tt_module_new", "pointer", "PP")
_set_training = _calls.bind("tt_module_set_training", "done", "P?")
_zero_grad = _calls.bind("tt_module_zero_grad", "done", "P")
_hook_pre, _hook = _calls.bind("tt_hook_forward_pre", "done", "PPPPP"), _calls.bind("tt_hook_forward", "done", "PPPPP")
_hook_backward_pre, _hook_backward = _calls.bind("tt_hook_backward_pre", "done", "PPPPP"), _calls.bind("tt_hook_backward", "done", "PPPPP")
_save_state, _load_state = _calls.bind("tt_save_state", "done", "PPs"), _calls.bind("tt_load_state", "done", "PPs")


def _named_list(name: str) -> Any:
    function = _calls.bind(name, "done", "P")
    function.restype = struct("tt_named_list")
    return function


_parameters, _buffers = _named_list("tt_module_parameters"), _named_list("tt_module_buffers")
_living: "weakref.WeakValueDictionary[int, Module]" = weakref.WeakValueDictionary()  # by the address of the C module


class Parameter:
    """Parameter(tensor) marks a tensor as a parameter that is trained: assigned to an attribute of a module, it gets a slot there."""

    def __new__(cls, x: Tensor, requires_grad: bool = True) -> Any:
        return _new_parameter(x.detach(), requires_grad)


class _Call:
    """Arguments of a forward that are no tensors, beside those that go through C; and the method, where it is another one."""

    def __init__(self, template, arguments, named, method=None):
        self.template, self.arguments, self.named, self.single, self.method = template, arguments, named, False, method


def _under_way() -> Dict[int, _Call]:
    """Calls of this thread, by module."""
    return _calls.state.__dict__.setdefault("modules", {})


@ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _calls.ListStruct, _pointer)
@_calls.callback(-1)
def _forward(module, inputs, outputs):
    self = _living.get(module)
    if self is None:
        raise RuntimeError("tutti: the Python object of a module has gone, and its forward with it")
    call, tensors = _under_way().pop(module, None), _calls.list_of(inputs)
    if call is None or sum(call.template) != len(tensors):  # called by the library, or by a compiled function
        call = _Call([True] * len(tensors), [None] * len(tensors), {})
    method = call.method or self.forward
    result = method(*merge(call.template, call.arguments, tensors), **call.named)
    call.single = not isinstance(result, (tuple, list))
    return fill(outputs, sequence(result), f"{type(self).__name__}.{getattr(method, '__name__', 'forward')}")


_kinds: Dict[type, Any] = {}  # modules in C may outlive their objects, and point to the name


def _kind_of(cls: type) -> Any:
    if cls not in _kinds:
        _kinds[cls] = _Type(name=cls.__name__.encode(), forward=address_of(_forward))
    return _kinds[cls]


class Module(Unique):
    """A part of a network. Assign parameters, buffers and other modules to attributes, and write forward:

        class Block(Module):
            def __init__(self):
                super().__init__()
                self.linear = Linear(4, 4)
                self.scale = Parameter(tutti.tensor.ones(4))

            def forward(self, x):
                return x + self.linear(x) * self.scale
    """
    _handle: Optional[int] = None
    _native = False  # forward is C's

    def __init__(self) -> None:
        self._own(_calls.answer(_new, ctypes.byref(_kind_of(type(self))), None))

    def _own(self, handle: int) -> None:
        """Takes over a reference to a C module."""
        for name, value in (("_handle", handle), ("_children", {}), ("_slots", {})):
            object.__setattr__(self, name, value)
        _living[handle] = self
        self._release = weakref.finalize(self, _release_module, os.getpid(), handle)
        self._release.atexit = False

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """What the module computes."""
        raise NotImplementedError(f"tutti: {type(self).__name__} has no forward")

    # ---- parameters, buffers, children ----

    def register_parameter(self, name: str, parameter: Optional[Tensor]) -> None:
        """Writes the slot of that name, which is trained."""
        _calls.done(_set_parameter, self._need(), name_of(name), parameter)
        self._slots[name] = _parameter

    def register_buffer(self, name: str, buffer: Optional[Tensor]) -> None:
        """Writes the slot of that name, which belongs to the state and is not trained."""
        _calls.done(_set_buffer, self._need(), name_of(name), buffer)
        self._slots[name] = _buffer

    def add_module(self, name: str, module: Module) -> None:
        """Adds a child."""
        handle = self._need()
        if name in self._children:
            raise ValueError(f"tutti: {type(self).__name__} has a child {name!r} already, and children stay")
        _calls.done(_add_child, handle, name_of(name), lib.tt_module_keep(module._need()))
        self._children[name] = module

    def _need(self) -> int:
        if self._handle is None:
            raise RuntimeError(f"tutti: {type(self).__name__}.__init__ begins with super().__init__()")
        return self._handle

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            self.add_module(name, value)
        elif self._handle is not None and name in self._slots and (value is None or isinstance(value, Tensor)):
            _calls.done(_set_parameter if self._slots[name] is _parameter else _set_buffer, self._handle, name_of(name), value)
        elif isinstance(value, Tensor) and value.is_parameter:
            self.register_parameter(name, value)
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Slots are read in C each time: sharded training puts other tensors there."""
        slots, children = self.__dict__.get("_slots", {}), self.__dict__.get("_children", {})
        if name in slots:
            return _calls.tensor(slots[name], self._handle, name_of(name))
        if name in children:
            return children[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> List[str]:
        return [*super().__dir__(), *self._slots, *self._children]

    def named_parameters(self) -> List[Tuple[str, Tensor]]:
        """All parameters, its own first, then its children's; names are joined by dots."""
        return _calls.named(_parameters, self._need())

    def parameters(self) -> List[Tensor]:
        return [parameter for _, parameter in self.named_parameters()]

    def named_buffers(self) -> List[Tuple[str, Tensor]]:
        return _calls.named(_buffers, self._need())

    def children(self) -> List[Module]:
        return list(self._children.values())

    def named_modules(self, prefix: str = "") -> Iterator[Tuple[str, Module]]:
        """Itself and all below it."""
        yield prefix, self
        for name, child in self._children.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def zero_grad(self) -> None:
        """Removes the gradients of all parameters."""
        _calls.done(_zero_grad, self._need())

    # ---- training or not ----

    training = property(lambda self: lib.tt_module_training(self._handle), doc="Whether it is trained; dropout rests else.")

    def train(self, on: bool = True) -> Module:
        """Tells the module and all below it that they are trained."""
        _calls.done(_set_training, self._need(), bool(on))
        return self

    def eval(self) -> Module:
        """Tells them that they are only used."""
        return self.train(False)

    # ---- calling ----

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """forward, with hooks. Tensors must be given by position; everything else reaches forward as it is."""
        return self._call(None, arguments, named)

    def call_method(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """method(*arguments), where method is another one of this module than forward, with the hooks of a forward: fully sharded parameters are whole in it."""
        return self._call(method, arguments, named)

    def _call(self, method: Optional[Callable[..., Any]], arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if any(isinstance(value, Tensor) for value in named.values()):
            raise TypeError("tutti: tensors are given to modules by position")
        template = [isinstance(argument, Tensor) for argument in arguments]
        call = _Call(template, [None if is_tensor else argument for is_tensor, argument in zip(template, arguments)], named, method)
        if self._native and method is None and (named or not all(template)):
            raise TypeError(f"tutti: {type(self).__name__} takes tensors alone")
        handle = self._need()
        _under_way()[handle] = call
        try:
            with _calls.Calls():
                tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
                results = _calls.tensors(_call_all, handle, tensors) if method is None else _calls.tensors(_call_method, handle, address_of(_forward), tensors)
        finally:
            _under_way().pop(handle, None)
        return results[0] if len(results) == 1 and (call.single or (self._native and method is None)) else tuple(results)

    def checkpointed(self, x: Tensor) -> Tensor:
        """Calls it with one tensor; it keeps nothing for the backward, and runs once more then."""
        with _calls.Calls():
            return _calls.tensor(_call_checkpointed, self._need(), x)

    # ---- state ----

    def state_dict(self) -> Dict[str, Tensor]:
        """Parameters and buffers by name: the tensors themselves, without history."""
        return {name: tensor.detach() for name, tensor in (*self.named_parameters(), *self.named_buffers())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copies tensors, or arrays of other libraries, into parameters and buffers. Every name and shape is compared before anything is changed."""
        from ..tensor import as_tensor
        own = dict((*self.named_parameters(), *self.named_buffers()))
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise KeyError(f"tutti: load_state_dict: missing are {missing}, not expected {unknown}")
        given = {name: as_tensor(value) for name, value in state.items()}
        for name, tensor in given.items():
            if tensor.shape != own[name].shape:
                raise ValueError(f"tutti: load_state_dict: {name} has shape {own[name].shape}, and {tensor.shape} was given")
        with no_grad():
            for name, tensor in given.items():
                own[name].copy_(tensor)

    def save(self, path: Any, optimizer: Any = None) -> None:
        """Writes parameters, buffers, what the optimizer remembers and the random generator to a safetensors file, all or nothing."""
        _calls.done(_save_state, self._need(), optimizer._handle if optimizer is not None else None, path_of(path))

    def load(self, path: Any, optimizer: Any = None) -> None:
        """Reads what save wrote into a module (and optimizer) made as they were. Everything is compared before anything is changed."""
        _calls.done(_load_state, self._need(), optimizer._handle if optimizer is not None else None, path_of(path))

    # ---- hooks ----

    def register_forward_pre_hook(self, function: Callable[..., Any], first: bool = False) -> HookHandle:
        """function(module, inputs) runs before forward, and may return other inputs."""
        return register(_hook_pre, self._need(), _on_forward_pre, (weakref.ref(self), function), first)

    def register_forward_hook(self, function: Callable[..., Any], first: bool = False, always: bool = False) -> HookHandle:
        """function(module, inputs, outputs) runs after forward, and may return other outputs. always: also when forward failed."""
        return register(_hook, self._need(), _on_forward, (weakref.ref(self), function), first, always)

    def register_full_backward_pre_hook(self, function: Callable[..., Any], first: bool = False) -> HookHandle:
        """function(module, grad_outputs) runs before its backward, and may return other gradients."""
        return register(_hook_backward_pre, self._need(), _on_backward_pre, (weakref.ref(self), function), first)

    def register_full_backward_hook(self, function: Callable[..., Any], first: bool = False) -> HookHandle:
        """function(module, grad_inputs, grad_outputs) runs after its backward, and may return other gradients of the inputs."""
        return register(_hook_backward, self._need(), _on_backward, (weakref.ref(self), function), first)

    def __repr__(self) -> str:
        inner = "".join(f"\n  ({name}): " + repr(child).replace("\n", "\n  ") for name, child in self._children.items())
        own = ", ".join(f"{name}: {'none' if tensor is None else f'{tensor.dtype} {list(tensor.shape)}'}" for name, tensor in
                        ((name, getattr(self, name)) for name in self._slots))
        return f"{type(self).__name__}({own}{inner}{chr(10) if inner else ''})"


def _release_module(process: int, handle: int) -> None:
    if process == os.getpid():
        lib.tt_module_release(handle)


def _room(count: int, at: int) -> Any:
    return (_pointer * max(1, count)).from_address(at)


def _run_hook(context: int, count: int, at: int, *before: Sequence[Any], after: Sequence[Any] = ()) -> None:
    """Calls the function with the tensors at `at`, and puts what it returns in their places."""
    reference, function = user_of(context)
    room = _room(count, at)
    given = tuple(_calls.borrow(room[i]) for i in range(count))
    result = function(reference(), *before, given, *after)
    if result is None:
        return
    found = sequence(result)
    if len(found) != count:
        raise ValueError(f"tutti: a hook returned {len(found)} tensors in place of {count}")
    fill(at, found, "a hook")


@ctypes.CFUNCTYPE(None, _pointer, _pointer, ctypes.c_size_t, _pointer)
@_calls.callback(None)
def _on_forward_pre(context, module, count, inputs):
    _run_hook(context, count, inputs)


@ctypes.CFUNCTYPE(None, _pointer, _pointer, _calls.ListStruct, ctypes.c_size_t, _pointer)
@_calls.callback(None)
def _on_forward(context, module, inputs, count, outputs):
    _run_hook(context, count, outputs, tuple(_calls.list_of(inputs)))


@ctypes.CFUNCTYPE(None, _pointer, _pointer, ctypes.c_size_t, _pointer)
@_calls.callback(None)
def _on_backward_pre(context, module, count, grads):
    _run_hook(context, count, grads)


@ctypes.CFUNCTYPE(None, _pointer, _pointer, ctypes.c_size_t, _pointer, _calls.ListStruct)
@_calls.callback(None)
def _on_backward(context, module, count, grads, grad_outputs):
    _run_hook(context, count, grads, after=(tuple(_calls.list_of(grad_outputs)),))
