# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors captured as graphs, and compiled."""
from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

from ._arguments import Unique, c_stream, name_of
from ._library import constants, lib, struct
from .tensor import _calls
from .tensor._autograd import address_of, fill
from .tensor._tensor import Tensor

_pointer = ctypes.c_void_p
_Options, _Counts, _GraphCounts = struct("tt_compile_options"), struct("tt_compiled_counts"), struct("tt_graph_counts")
_compile = _calls.bind("tt_compile", "done", "PPPP")
_call = _calls.bind("tt_compiled_call", "tensors", "PL")
_capture = _calls.bind("tt_capture", "done", "PPLP")
_run = _calls.bind("tt_graph_run", "tensors", "PL")
_text = _calls.bind("tt_graph_text", "pointer", "P")
_pass = _calls.bind("tt_graph_pass", "done", "Ps")
_count = _calls.bind("tt_graph_count", "done", "PP")
_parse = _calls.bind("tt_graph_parse", "pointer", "sP")
_check = _calls.bind("tt_graph_check", "done", "P")
_print_dot, _print_svg = _calls.bind("tt_graph_print_dot", "done", "PP"), _calls.bind("tt_graph_print_svg", "done", "PP")
_compiled_count = _calls.bind("tt_compiled_count", "done", "PP")
_CacheOptions, _BackwardCounts = struct("tt_backward_cache_options"), struct("tt_backward_counts")
_cache_new, _cache_count = _calls.bind("tt_backward_cache_new", "done", "PP"), _calls.bind("tt_backward_cache_count", "done", "PP")
_cache_begin, _cache_end = _calls.bind("tt_backward_compiled_begin", "done", "P"), _calls.bind("tt_backward_compiled_end", "done", "")
MOST = constants["TT_GRAPH_OUTPUTS"]
_MODES = {"fused": constants["TT_COMPILE_FUSED"], "split": constants["TT_COMPILE_SPLIT"], "interpret": constants["TT_COMPILE_INTERPRET"]}


# ---- structures of tensors ----

def flatten(thing: Any, tensors: List[Any]) -> Any:
    """What is left of tuples, lists and dicts when their tensors have gone to `tensors`: something to compare, and to build them again by."""
    if isinstance(thing, Tensor):
        tensors.append(thing)
        return ("tensor",)
    if isinstance(thing, (tuple, list)):
        return (type(thing).__name__, *(flatten(entry, tensors) for entry in thing))
    if isinstance(thing, dict):
        return ("dict", tuple(thing), *(flatten(entry, tensors) for entry in thing.values()))
    return ("value", thing)


def unflatten(structure: Any, tensors: Any) -> Any:
    """What flatten took apart, with the tensors that come."""
    kind, *rest = structure
    if kind == "tensor":
        return next(tensors)
    if kind in ("tuple", "list"):
        made = [unflatten(entry, tensors) for entry in rest]
        return tuple(made) if kind == "tuple" else made
    if kind == "dict":
        return {key: unflatten(entry, tensors) for key, entry in zip(rest[0], rest[1:])}
    return rest[0]


class _Traced:
    """A Python function for calls of one structure of arguments, as C calls it."""

    def __init__(self, function: Callable[..., Any], structure: Any, name: str) -> None:
        self.function, self.structure, self.name = function, structure, name
        self.result: Any = None  # how its results are put together


@ctypes.CFUNCTYPE(ctypes.c_int, _calls.ListStruct, _pointer, _pointer)
@_calls.callback(-1)
def _trace(inputs, outputs, user):
    traced = _calls.kept.get(user)
    arguments, named = unflatten(traced.structure, iter(_calls.list_of(inputs)))
    tensors: List[Any] = []
    structure = flatten(traced.function(*arguments, **named), tensors)
    if traced.result is not None and traced.result != structure:
        raise TypeError(f"tutti: {traced.name} put its results together in another way than before: {structure} instead of {traced.result}")
    traced.result = structure
    return fill(outputs, tensors, traced.name, MOST)


# ---- compiled functions ----

def _end_compiled(process: int, handle: int, number: int) -> None:
    if process == os.getpid():
        lib.tt_compiled_release(ctypes.byref(_pointer(handle)))
        _calls.kept.drop(number)


class Compiled(Unique):
    """A function that is captured at its first call and runs as compiled code from then on. See compile."""

    def __init__(self, function: Callable[..., Any], options: Dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options
        self._made: Dict[Any, Tuple[int, _Traced]] = {}
        self._last: Optional[int] = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        tensors: List[Any] = []
        structure = flatten((arguments, named), tensors)
        try:
            made = self._made.get(structure)
        except TypeError:
            raise TypeError("tutti: what a compiled function is given beside tensors must be hashable: each value has code of its own") from None
        if made is None:
            made = self._made[structure] = self._new(structure)
        handle, traced = made
        self._last = handle
        with _calls.Calls():
            results = _calls.tensors(_call, handle, tensors)
        return unflatten(traced.result, iter(results))

    def _new(self, structure: Any) -> Tuple[int, _Traced]:
        name = getattr(self._function, "__name__", "function")
        traced = _Traced(self._function, structure, name)
        number, handle = _calls.kept.add(traced), _pointer()
        options = _Options(name=name.encode(), **self._options)
        _calls.done(_compile, address_of(_trace), number, ctypes.byref(options), ctypes.byref(handle))
        weakref.finalize(self, _end_compiled, os.getpid(), handle.value or 0, number).atexit = False
        return handle.value, traced  # type: ignore[return-value]

    def _latest(self) -> int:
        if self._last is None:
            raise RuntimeError("tutti: the function has not been called yet")
        return self._last

    def counts(self) -> Dict[str, Any]:
        """How often what happened, of the arguments' structure that was called last: captures, entries, hits, misses, eager calls."""
        counts = _Counts()
        _calls.done(_compiled_count, self._latest(), ctypes.byref(counts))
        return {name: getattr(counts, name) for name in ("captures", "entries", "variants", "vertices", "eager", "hits", "replays")}

    def reason(self) -> str:
        """Why the last call that found no entry found none, or ran the function itself."""
        return lib.tt_compiled_reason(self._latest()).decode()

    def graph(self, backward: bool = False) -> Optional[str]:
        """The graph that ran last, as text; None where there is none."""
        handle = lib.tt_compiled_graph(self._latest(), constants["TT_BACKWARD" if backward else "TT_FORWARD"])
        return _graph_text(handle) if handle else None


def compile(function: Optional[Callable[..., Any]] = None, *, mode: str = "fused", full: bool = False, strict: bool = False, dynamic: bool = True,
            skip: Optional[str] = None, passes: Optional[str] = None, replay: bool = False) -> Any:
    """A compiled form of a function of tensors; also a decorator. The first call captures what the function does with its tensors, which may lie in tuples,
    lists and dicts; numbers and other tensors that it meets are frozen, what modules hold is not. Gradients are compiled with it. What cannot be captured
    (a function that reads elements) runs as it is, or with full is an error. strict: the very bits of the function itself. dynamic: a size that changes
    becomes variable. skip and passes name passes to leave out or to add. replay: on a GPU, as a CUDA graph."""
    if mode not in _MODES:
        raise ValueError(f"tutti: {mode!r} is no mode; there are {', '.join(_MODES)}")
    options = {"mode": _MODES[mode], "full": full, "strict": strict, "dynamic": 0 if dynamic else constants["TUTTI_NONE"], "replay": replay,
               "skip": name_of(skip) if skip else None, "with": name_of(passes) if passes else None}
    return Compiled(function, options) if function is not None else lambda given: Compiled(given, options)


# ---- compiled backwards ----

def _end_cache(process: int, handle: int) -> None:
    if process == os.getpid():
        lib.tt_backward_cache_release(ctypes.byref(_pointer(handle)))


class CompiledBackward(Unique):
    """Backwards that are captured once, hooks and all, and from then on run as graphs:

        compiled = tutti.CompiledBackward()
        for batch in batches:
            loss = loss_of(batch)
            with compiled:
                loss.backward()

    A backward looks for the graph of one like it: the same nodes, attributes and sizes in the same order, the same hooks, leaves that have a gradient and leaves
    that have none. Python hooks run while a backward is captured, and not when its graph runs: what they do with tensors is repeated, numbers that they compute are
    frozen; one that was registered as opaque keeps its backward from being compiled. So does every tutti.tensor.Function, of which each call is another one.
    full: what cannot be captured is an error; else it runs as ever. One thread uses it at a time."""

    def __init__(self, full: bool = False) -> None:
        handle = _pointer()
        _calls.done(_cache_new, ctypes.byref(_CacheOptions(full=bool(full))), ctypes.byref(handle))
        self._handle = handle.value
        weakref.finalize(self, _end_cache, os.getpid(), handle.value or 0).atexit = False

    def __enter__(self) -> CompiledBackward:
        _calls.done(_cache_begin, self._handle)
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        _calls.done(_cache_end)

    def counts(self) -> Dict[str, Any]:
        """Backwards that were captured, that found a graph and that ran as ever, vertices of all graphs, and under misses how many found none, by why."""
        counts = _BackwardCounts()
        _calls.done(_cache_count, self._handle, ctypes.byref(counts))
        found: Dict[str, Any] = {name: getattr(counts, name) for name in ("captures", "hits", "eager", "vertices")}
        found["misses"] = {name: counts.misses[constants[f"TT_BACKWARD_MISS_{name.upper()}"]] for name in ("first", "nodes", "hooks", "sizes", "gradients")}
        return found

    def reason(self) -> str:
        """Why the last backward that ran as ever did so; "" where none did."""
        return lib.tt_backward_cache_reason(self._handle).decode()

    def graph(self) -> Optional[str]:
        """The graph that ran last, as text; None where there is none."""
        handle = lib.tt_backward_cache_graph(self._handle)
        return _graph_text(handle) if handle else None


# ---- graphs ----

def _end_graph(process: int, handle: int) -> None:
    if process == os.getpid():
        lib.tt_graph_release(ctypes.byref(_pointer(handle)))


def _graph_text(handle: int) -> str:
    address = _calls.answer(_text, handle)
    text = ctypes.string_at(address).decode()
    lib.tutti_free(address)
    return text


class Graph(Unique):
    """What a function does with its tensors, as a list of operators: str() shows it, calling it runs it."""

    def __init__(self, handle: int, structure: Any = None) -> None:
        self._handle, self._structure = handle, structure
        self._release = weakref.finalize(self, _end_graph, os.getpid(), handle)
        self._release.atexit = False

    def __call__(self, *arguments: Any) -> Any:
        """Runs it with tensors like those that it was captured with. No history is recorded."""
        tensors: List[Any] = []
        flatten(arguments, tensors)
        results = _calls.tensors(_run, self._handle, tensors)
        return unflatten(self._structure, iter(results)) if self._structure is not None else results

    def __str__(self) -> str:
        return _graph_text(self._handle)

    def dot(self) -> str:
        """A picture in the language of Graphviz."""
        return self._printed(_print_dot)

    def svg(self) -> str:
        """A picture for a browser."""
        return self._printed(_print_svg)

    def _printed(self, function: Any) -> str:
        with tempfile.TemporaryFile() as file:
            with c_stream(file) as stream:
                _calls.done(function, self._handle, stream)
            file.seek(0)
            return file.read().decode()

    def rewrite(self, name: str) -> Graph:
        """Runs a pass by its name; passes() lists them. It changes the graph, which is returned."""
        _calls.done(_pass, self._handle, name_of(name))
        return self

    def check(self) -> None:
        """Raises where the graph is not well formed."""
        _calls.done(_check, self._handle)

    def counts(self) -> Dict[str, int]:
        """How many vertices, inputs, constants, outputs and collectives it has."""
        counts = _GraphCounts()
        _calls.done(_count, self._handle, ctypes.byref(counts))
        return {name: getattr(counts, name) for name in ("vertices", "inputs", "constants", "outputs", "collectives")}

    def count_of(self, name: str) -> int:
        """How many vertices call the operator of that name."""
        return lib.tt_graph_count_of(self._handle, name_of(name))


def capture(function: Callable[..., Any], *arguments: Any) -> Graph:
    """The graph of function(*arguments). It runs once, on tensors that have shapes and no data."""
    tensors: List[Any] = []
    traced = _Traced(function, flatten((arguments, {}), tensors), getattr(function, "__name__", "function"))
    number, handle = _calls.kept.add(traced), _pointer()
    try:
        with _calls.Calls():
            _calls.done(_capture, address_of(_trace), number, tensors, ctypes.byref(handle))
    finally:
        _calls.kept.drop(number)
    return Graph(handle.value, traced.result)  # type: ignore[arg-type]


def parse(text: str, world: Any = None) -> Graph:
    """The graph that a text tells; constants become inputs. Groups are looked up by name in the world."""
    return Graph(_calls.answer(_parse, name_of(text), world._handle if world is not None else None))


def passes() -> Dict[str, str]:
    """What can rewrite a graph: names, and what each does."""
    found: Dict[str, str] = {}
    while True:
        name = lib.tt_pass_name(len(found))
        if name is None:
            return found
        found[name.decode()] = lib.tt_pass_summary(name).decode()
