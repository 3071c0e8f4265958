# SPDX-License-Identifier: Apache-2.0
"""Gradients: modes, backward, functions with a gradient of one's own, hooks, checkpoints."""
from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple

from .._arguments import Unique
from .._library import constants, lib, struct
from ..errors import StateError
from . import _calls

if TYPE_CHECKING:
    from ._tensor import Tensor

_pointer = ctypes.c_void_p
_List = _calls.ListStruct
_BackwardOptions, _HookOptions = struct("tt_backward_options"), struct("tt_hook_options")
_Context = struct("tt_hook_context")
_FunctionStruct, _SavedHooks = struct("tt_function"), struct("tt_saved_hooks")
_preserve = _calls.bind("tt_preserve_begin", "pointer", "L")
_backward_from = _calls.bind("tt_backward_from", "done", "LLP")
_gradients = _calls.bind("tt_gradients", "tensors", "LLLP")
_apply = _calls.bind("tt_apply", "tensors", "PLP")
_save = _calls.bind("tt_save_for_backward", "done", "PL")
_saved = _calls.bind("tt_saved_tensors", "tensors", "P")
_checkpoint = _calls.bind("tt_checkpoint", "tensors", "PPPL")
_push = _calls.bind("tt_saved_hooks_push", "done", "P")
_wrap = _calls.bind("tt_wrap", "tensor", "PDYPP")
_hook_tensor = _calls.bind("tt_hook_tensor", "done", "TPPPP")
_hook_accumulate = _calls.bind("tt_hook_accumulate", "done", "TPPPP")
_hook_pre, _hook_post = _calls.bind("tt_hook_node_pre", "done", "PPPPP"), _calls.bind("tt_hook_node_post", "done", "PPPPP")
_after_backward = _calls.bind("tt_backward_callback", "done", "PP")
MOST = constants["TT_FUNCTION_TENSORS"]


def address_of(function: Any) -> ctypes.c_void_p:
    return ctypes.cast(function, _pointer)


# ---- modes ----

class _Mode:
    """A switch of this thread, for a block or a function."""

    def __init__(self, switch: Callable[[bool], bool], on: bool) -> None:
        self._switch, self._on, self._before = switch, on, []  # type: Tuple[Any, bool, List[bool]]

    def __enter__(self) -> None:
        self._before.append(self._switch(self._on))

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._switch(self._before.pop())

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*arguments, **named):
            with _Mode(self._switch, self._on):
                return function(*arguments, **named)
        return inside


def no_grad() -> _Mode:
    """`with no_grad():` or `@no_grad()`: nothing is recorded for backwards."""
    return _Mode(lib.tt_grad_mode, False)


def enable_grad(on: bool = True) -> _Mode:
    """`with enable_grad():` records again inside of no_grad."""
    return _Mode(lib.tt_grad_mode, bool(on))


def grad_enabled() -> bool:
    """Whether this thread records."""
    return lib.tt_grad_enabled()


def detect_anomaly(on: bool = True) -> _Mode:
    """`with detect_anomaly():` an operator whose result holds a NaN is an error that names it, its module and, in a backward, its node. It is slow."""
    return _Mode(lib.tt_anomaly_mode, bool(on))


class preserve_versions:
    """`with preserve_versions(x, y):` what is written into these tensors inside leaves their versions as they were: to refill one that was saved for a backward."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors, self._handle = tensors, None  # type: Any, Any

    def __enter__(self) -> None:
        self._handle = _calls.answer(_preserve, self._tensors)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        lib.tt_preserve_end(self._handle)


# ---- backward ----

def _options(retain_graph: bool, create_graph: bool, inputs: Sequence[Any]) -> Any:
    options = _BackwardOptions(retain_graph=bool(retain_graph), create_graph=bool(create_graph))
    if inputs:
        options._inputs = options.inputs = _calls.handle_list(inputs)
    return options


def backward(tensors: Sequence[Tensor], grads: Sequence[Optional[Tensor]] = (), retain_graph: bool = False, create_graph: bool = False,
             inputs: Sequence[Tensor] = ()) -> None:
    """Computes gradients from several tensors at once; grads has one for each, or is empty where each has one element."""
    options = _options(retain_graph, create_graph, inputs)
    with _calls.Calls():
        _calls.done(_backward_from, tensors, grads, ctypes.byref(options))


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Optional[Tensor]] = (), retain_graph: bool = False,
              create_graph: bool = False) -> List[Optional[Tensor]]:
    """The gradients of the outputs with respect to the inputs, without touching .grad; None where no way leads to an input."""
    options = _options(retain_graph, create_graph, ())
    with _calls.Calls():
        return _calls.tensors(_gradients, outputs, inputs, grads, ctypes.byref(options))


# ---- hooks ----

class HookHandle(Unique):
    """A hook that was registered. remove() ends it; the hook stays where the handle is forgotten."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def remove(self) -> None:
        lib.tt_hook_remove(ctypes.byref(self._handle))

    def __del__(self, release: Any = lib.tt_hook_release) -> None:
        release(ctypes.byref(self._handle))


_byte = (ctypes.c_uint8 * 1)()


def register(function: Any, thing: Any, callback: Any, user: Any, first: bool = False, always: bool = False, opaque: bool = False) -> HookHandle:
    """A hook holds tensors that it was registered with, and lets them go when it ends: one of them lets the Python function go."""
    number = _calls.kept.add(user)
    try:
        guard = _calls.tensor(_wrap, _byte, (1,), "u8", address_of(_calls.release_kept), number)
    except BaseException:
        _calls.kept.drop(number)
        raise
    captured = _calls.handle_list([guard])
    options, handle = _HookOptions(first=first, always=always, opaque=opaque, captured=captured), _pointer()
    _calls.done(function, thing, address_of(callback), number, ctypes.byref(options), ctypes.byref(handle))
    return HookHandle(handle)


def user_of(context: int) -> Any:
    """The Python function of a hook that C calls."""
    return _calls.kept.get(_Context.from_address(context).user)


@ctypes.CFUNCTYPE(_pointer, _pointer, _pointer)
@_calls.callback(None)
def _on_tensor(context, grad):
    return _calls.give(user_of(context)(_calls.borrow(grad)))


@ctypes.CFUNCTYPE(None, _pointer, _pointer)
@_calls.callback(None)
def _on_accumulate(context, leaf):
    user_of(context)(_calls.borrow(leaf))


def tensor_hook(x: Tensor, function: Callable[[Tensor], Optional[Tensor]], opaque: bool) -> HookHandle:
    return register(_hook_tensor, x, _on_tensor, function, opaque=opaque)


def accumulate_hook(x: Tensor, function: Callable[[Tensor], None], opaque: bool) -> HookHandle:
    return register(_hook_accumulate, x, _on_accumulate, function, opaque=opaque)


@ctypes.CFUNCTYPE(None, _pointer, ctypes.c_size_t, _pointer)
@_calls.callback(None)
def _before_node(context, count, grads):
    _replace(grads, count, user_of(context)(_tensors_at(grads, count)), "before")


@ctypes.CFUNCTYPE(None, _pointer, ctypes.c_size_t, _pointer, ctypes.c_size_t, _pointer)
@_calls.callback(None)
def _behind_node(context, result_count, results, grad_count, grads):
    _replace(results, result_count, user_of(context)(_tensors_at(results, result_count), _tensors_at(grads, grad_count)), "after")


def _tensors_at(address: int, count: int) -> Tuple[Optional[Tensor], ...]:
    room = (_pointer * count).from_address(address) if count else ()
    return tuple(_calls.borrow(entry) for entry in room)


def _replace(address: int, count: int, found: Any, when: str) -> None:
    """What a node's hook returned, in the place of what it was given."""
    if found is None:
        return
    values = sequence(found)
    if len(values) != count:
        raise ValueError(f"tutti: a hook that runs {when} a node returned {len(values)} gradients, and there are {count}")
    fill(address, values, "a hook of a node")


class Node(Unique):
    """What computes one step of a backward: Tensor.grad_fn. It is good as long as its tensor lives and is not changed in place."""

    def __init__(self, tensor: Tensor, handle: int) -> None:
        self._tensor, self._node = tensor, handle
        self.name: str = lib.tt_node_name(handle).decode()  # of the operator or function that it differentiates: "mul"
        self.sequence: int = lib.tt_node_sequence(handle)  # the number of its creation within its thread

    def __repr__(self) -> str:
        return f"<node {self.name} {self.sequence}>"

    def _handle(self) -> int:
        handle = lib.tt_grad_fn(self._tensor._handle)
        if handle != self._node or lib.tt_node_sequence(handle) != self.sequence:
            raise StateError("STATE", f"tutti: the tensor of node {self.name} was changed in place, and another node computes it now")
        return handle

    def register_prehook(self, function: Callable[[Tuple[Optional[Tensor], ...]], Optional[Sequence[Optional[Tensor]]]], first: bool = False,
                         opaque: bool = False) -> HookHandle:
        """function(grads) is called before the node runs, with the gradients of its outputs, and may return others for all of them. opaque: it must run each
        time, and a backward that would run it is not compiled."""
        return register(_hook_pre, self._handle(), _before_node, function, first=first, opaque=opaque)

    def register_hook(self, function: Callable[..., Optional[Sequence[Optional[Tensor]]]], first: bool = False, opaque: bool = False) -> HookHandle:
        """function(results, grads) is called after the node has run, with the gradients of its inputs and of its outputs, and may return others for all of
        its inputs."""
        return register(_hook_post, self._handle(), _behind_node, function, first=first, opaque=opaque)


def node_of(tensor: Tensor) -> Optional[Node]:
    handle = lib.tt_grad_fn(tensor._handle)
    return Node(tensor, handle) if handle else None


@ctypes.CFUNCTYPE(None, _pointer)
@_calls.callback(None)
def _at_end(user):
    function = _calls.kept.get(user)
    _calls.kept.drop(user)
    function()


def queue_callback(function: Callable[[], Any]) -> None:
    """From inside a backward (a hook, a Function): function() is called after the last node, in order of queueing. It is not called where the backward fails."""
    number = _calls.kept.add(function)
    for under_way in _calls.state.kept[:1]:  # what has not run when the outermost call returns never will
        under_way.append(_Dropped(number))
    try:
        _calls.done(_after_backward, address_of(_at_end), number)
    except BaseException:
        _calls.kept.drop(number)
        raise


class _Dropped:
    def __init__(self, number):
        self._number = number

    def __del__(self, drop=_calls.kept.drop):
        drop(self._number)


# ---- functions with a gradient of one's own ----

class FunctionContext:
    """What forward leaves for backward. Attributes of one's own may be set."""
    needs_input_grad: Tuple[bool, ...] = ()
    saved_tensors: List[Optional[Tensor]] = []

    def __init__(self, function: Any, arguments: Tuple[Any, ...], template: List[bool]) -> None:
        self._function, self._arguments, self._template, self._handle = function, arguments, template, None  # type: Tuple[Any, Any, Any, Any]
        self._single = False

    def save_for_backward(self, *tensors: Optional[Tensor]) -> None:
        """In forward, once: tensors that backward finds in saved_tensors. They are checked: one that was changed in place since is an error."""
        _calls.done(_save, self._handle, tensors)

    def set_materialize_grads(self, on: bool) -> None:
        """False: gradients that are absent arrive as None instead of zeros."""
        lib.tt_materialize_grads(self._handle, bool(on))

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Inputs that forward has changed in place and returns."""
        for tensor in tensors:
            lib.tt_mark_dirty(self._handle, tensor._handle)

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Outputs that have no gradient."""
        for tensor in tensors:
            lib.tt_mark_non_differentiable(self._handle, tensor._handle)


def fill(outputs: int, values: Sequence[Any], what: str, most: int = MOST) -> int:
    """Writes tensors to where C wants them."""
    if len(values) > most:
        raise ValueError(f"tutti: {what} returned {len(values)} tensors; {most} are possible")
    room = (_pointer * max(1, len(values))).from_address(outputs)
    for i, value in enumerate(values):
        room[i] = _calls.give(value)
    return len(values)


def merge(template: Sequence[bool], arguments: Sequence[Any], tensors: Sequence[Any]) -> List[Any]:
    """Arguments as the user gave them, with the tensors that C hands over in their places."""
    given = iter(tensors)
    return [next(given) if is_tensor else argument for is_tensor, argument in zip(template, arguments)]


def sequence(result: Any) -> List[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


@ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _List, _pointer)
@_calls.callback(-1)
def _forward(handle, inputs, outputs):
    context = _calls.kept.get(lib.tt_function_user(handle))
    context._handle = handle
    result = context._function.forward(context, *merge(context._template, context._arguments, _calls.list_of(inputs)))
    context._single, context._handle = not isinstance(result, (tuple, list)), None
    context._arguments = tuple(None if is_tensor else argument for is_tensor, argument in zip(context._template, context._arguments))
    return fill(outputs, sequence(result), f"{context._function.__name__}.forward")


@ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _List, _pointer)
@_calls.callback(-1)
def _backward(handle, grads, results):
    context = _calls.kept.get(lib.tt_function_user(handle))
    places = [i for i, is_tensor in enumerate(context._template) if is_tensor]
    needs = [False] * len(context._template)
    for at, place in enumerate(places):
        needs[place] = lib.tt_needs_input_grad(handle, at)
    context.needs_input_grad = tuple(needs)
    context.saved_tensors = _calls.tensors(_saved, handle)
    try:
        found = sequence(context._function.backward(context, *_calls.list_of(grads)))
    finally:
        context.saved_tensors = []
    if len(found) != len(context._template):
        raise ValueError(f"tutti: {context._function.__name__}.backward returned {len(found)} gradients for {len(context._template)} inputs")
    return fill(results, [found[place] for place in places], f"{context._function.__name__}.backward")


class Function:
    """A function with a gradient of one's own:

        class Double(Function):
            @staticmethod
            def forward(context, x):
                context.save_for_backward(x)
                return x * 2

            @staticmethod
            def backward(context, grad):
                return grad * 2

        y = Double.apply(x)

    backward returns one gradient for each argument of forward, None for those that have none. Arguments that are no tensors reach forward as they are."""

    @staticmethod
    def forward(context: Any, *arguments: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        template = [isinstance(argument, _calls.Handle) for argument in arguments]
        context = FunctionContext(cls, arguments, template)
        number = _calls.kept.add(context)
        with _calls.Calls():  # the library ends the number, also after a failure
            results = _calls.tensors(_apply, ctypes.byref(_described(cls)), [a for a in arguments if isinstance(a, _calls.Handle)], number)
        return results[0] if context._single else tuple(results)


_descriptions: dict = {}


def _described(cls: type) -> Any:
    made = _descriptions.get(cls)
    if made is None:
        made = _FunctionStruct(forward=address_of(_forward), backward=address_of(_backward), release=address_of(_calls.release_kept))
        made._name = cls.__name__.encode()
        made.name = made._name
        _descriptions[cls] = made
    return made


# ---- less memory, and what is saved ----

@ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _List, _pointer)
@_calls.callback(0)
def _region(user, inputs, outputs):
    function, template, arguments, single = _calls.kept.get(user)
    result = function(*merge(template, arguments, _calls.list_of(inputs)))
    single[0] = not isinstance(result, (tuple, list))
    return fill(outputs, sequence(result), "the function of a checkpoint")


def checkpoint(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), whose nodes keep nothing for the backward: it runs once more then, with the same random numbers."""
    template, single = [isinstance(argument, _calls.Handle) for argument in arguments], [False]
    number = _calls.kept.add((function, template, [None if t else a for t, a in zip(template, arguments)], single))
    with _calls.Calls():
        results = _calls.tensors(_checkpoint, address_of(_region), number, address_of(_calls.release_kept),
                                 [a for a in arguments if isinstance(a, _calls.Handle)])
    return results[0] if single[0] else tuple(results)


@ctypes.CFUNCTYPE(_pointer, _pointer, _pointer)
@_calls.callback(None)
def _pack(user, tensor):
    hooks = _calls.kept.get(user)
    packed = _calls.kept.add(hooks.pack(_calls.borrow(tensor)))
    hooks.count += 1
    return packed


@ctypes.CFUNCTYPE(_pointer, _pointer, _pointer)
@_calls.callback(None)
def _unpack(user, packed):
    return _calls.give(_calls.kept.get(user).unpack(_calls.kept.get(packed)))


@ctypes.CFUNCTYPE(None, _pointer, _pointer)
def _release_packed(user, packed):
    if packed is not None:  # what was packed, and not what pack failed with
        _calls.kept.drop(packed)
        _calls.kept.get(user).use(-1, user)


class _PackHooks:
    """Lives until its block has ended, and the last of what it packed."""

    def __init__(self, pack, unpack):
        self.pack, self.unpack, self.count = pack, unpack, 1

    def use(self, change, number):
        self.count += change
        if self.count == 0:
            _calls.kept.drop(number)


class saved_tensors_hooks:
    """`with saved_tensors_hooks(pack, unpack):` what is saved for backwards goes through pack(tensor), which returns anything, and comes back through
    unpack of that."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._functions = pack, unpack

    def __enter__(self) -> None:
        self._number = _calls.kept.add(_PackHooks(*self._functions))
        hooks = _SavedHooks(pack=address_of(_pack), unpack=address_of(_unpack), release=address_of(_release_packed), user=self._number)
        _calls.done(_push, ctypes.byref(hooks))

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        lib.tt_saved_hooks_pop()
        _calls.kept.get(self._number).use(-1, self._number)
