# SPDX-License-Identifier: Apache-2.0
"""The process group in Python: PyTorch's calls as Tutti's. The C++ part (shim) does the same."""
# PyTorch's stubs have forms of these methods that it does not call.
# mypy: disable-error-code="override,misc,assignment"
import ctypes
import datetime
import os
import queue
import sys
from typing import Any, NoReturn, Optional, Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import _interrupt
from .._library import constants, lib, struct
from ..buffers import _NUMBERS, _TYPES
from ..world import _drop, _nanoseconds, _sizes, hold
from . import cuda, functional, shim
from .member import Member, destroyed, seconds_of
from .work import Work, completer, not_compiled, raise_error

_Call = struct("tutti_call")
_Received = struct("tutti_received")
_DTYPES = {getattr(torch, aliases[0]): _NUMBERS[name] for name, aliases in _TYPES.items() if hasattr(torch, aliases[0])}
_REDUCTIONS = {getattr(dist.ReduceOp.RedOpType, name): constants["TUTTI_" + name] for name in
               ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")}
_PREMUL_SUM = constants["TUTTI_PREMUL_SUM"]


def _refuse_mixture(config: Any) -> None:
    """PyTorch takes a group that is written in Python for all devices, and would silently drop what was asked for others ("cpu:tutti,cuda:gloo")."""
    others = {device: name for device, name in config.get_device_backend_map().items() if name != "tutti"} if config is not None else {}
    if others:
        text = ", ".join(f"{device}:{name}" for device, name in others.items())
        raise ValueError(f"tutti: the backend tutti cannot share a process group with {text} without its C++ part (TUTTI_TORCH_SHIM); "
                         "make a group of its own with dist.new_group(backend=...)")


def create(options: Any, backend_options: Any) -> Any:
    """Called by torch.distributed for each group of this backend."""
    module = shim.load(speaks=options.group_rank == 0)
    if module is not None:
        return shim.backend(module, options)
    asked = sys._getframe(1).f_locals  # PyTorch keeps for itself what was asked of it: its own function, which calls this one, knows
    _refuse_mixture(asked.get("backend_config"))
    group = ProcessGroup(options)
    if asked.get("device_id") is not None:
        group.bound_device_id = asked["device_id"]
    return group


# ---- tensors ----

def _refuse(tensor: torch.Tensor, who: str) -> NoReturn:
    if tensor.layout is not torch.strided:
        raise TypeError(f"tutti: {who} of a sparse tensor ({tensor.layout}) is not supported; .to_dense() makes one that is not")
    if not tensor.is_cpu and not (tensor.is_cuda and cuda.here):
        raise TypeError(f"tutti: {who} of a tensor on {tensor.device}: this backend is for {cuda.what}")
    raise TypeError(f"tutti: {who} of {tensor.dtype}: the library has no such element type")


def _number(tensor: torch.Tensor, who: str) -> int:
    number = _DTYPES.get(tensor.dtype)
    if number is None or tensor.layout is not torch.strided or not (tensor.is_cpu or (tensor.is_cuda and cuda.here)):
        _refuse(tensor, who)
    return number


def _one(tensors: Sequence[torch.Tensor], who: str) -> Any:
    if len(tensors) != 1:
        raise ValueError(f"tutti: {who} takes one tensor on each rank, and was given {len(tensors)}")
    return tensors[0]


def _pairs(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], who: str) -> Any:
    if len(outputs) != len(inputs):
        raise ValueError(f"tutti: {who} wants as many outputs as inputs, and was given {len(outputs)} and {len(inputs)}")
    return zip(outputs, inputs)


def _alike(tensors: Sequence[torch.Tensor], who: str) -> int:
    """All of one element type and on one device, the first's."""
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise TypeError(f"tutti: {who}: tensors on {tensors[0].device} and {tensor.device} cannot be mixed")
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(f"tutti: {who}: tensors of {tensors[0].dtype} and {tensor.dtype} cannot be mixed")
    return _number(tensors[0], who)


def _reduction(operation: Any, tensor: torch.Tensor, who: str) -> Any:
    """The library's number of it, and for PREMUL_SUM the factor: one element of the tensor's type, on the host."""
    number = _REDUCTIONS.get(getattr(operation, "op", operation))
    if number is None:
        raise ValueError(f"tutti: {who} has no reduction {getattr(operation, 'op', operation)}; there are {', '.join(kind.name for kind in _REDUCTIONS)}")
    return number, _factor(operation, tensor, who) if number == _PREMUL_SUM else None


def _factor(operation: Any, tensor: torch.Tensor, who: str) -> torch.Tensor:
    factor = operation.__getstate__()[1]
    if isinstance(factor, torch.Tensor):
        if factor.is_complex():
            raise ValueError(f"tutti: {who}: the factor of PREMUL_SUM is complex, and has to be a real number")
        factor = factor.item()  # of a GPU's tensor: the host waits for it
    return torch.tensor([factor], dtype=tensor.dtype.to_real())


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Into a tensor that may be a parameter, or one of inference mode, by whichever thread comes to it."""
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.copy_(values)


def _back(target: torch.Tensor, tensor: torch.Tensor) -> Any:
    def finish():
        _write(tensor, target.view_as(tensor))
    return finish


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one after the other, with their own values: PyTorch notes on some views only that they are conjugate or negative."""
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def _writable(tensor: torch.Tensor) -> Any:
    """A dense tensor to write into, and what brings it back where the tensor itself is not dense."""
    target = _dense(tensor)
    if target is tensor:
        return tensor, None
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape)):
        raise ValueError("tutti: elements of the tensor share their memory (expand does that), so that no result can be written into it; "
                         ".clone() makes one that is whole")
    return target, _back(target, tensor)


def _copies(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
    """What brings the parts of a dense tensor to where they belong."""
    def finish():
        start = 0
        for tensor in tensors:
            count = tensor.numel()
            _write(tensor, flat[start:start + count].view(tensor.shape))
            start += count
    return finish


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return _dense(tensors[0]).view(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


@not_compiled
class ProcessGroup(Member, dist.ProcessGroup):
    """A group of ranks. PyTorch makes it (init_process_group, new_group) and calls it."""
    supports_splitting = True
    supports_coalescing = supports_tensor_alloc = False

    def __init__(self, options: Any) -> None:
        dist.ProcessGroup.__init__(self, options.group_rank, options.group_size)  # type: ignore[call-arg]
        functional.register(ProcessGroup)
        Member.__init__(self, options)
        self._description = ""
        self._plain = _Call()
        self._plain_at = ctypes.byref(self._plain)

    # ---- what PyTorch asks a group ----

    def getBackendName(self) -> str:
        return "tutti"

    def name(self) -> str:
        return "tutti"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> Any:
        return [torch.device("cpu"), torch.device("cuda")] if cuda.here else [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:
        if device.type != "cpu" and not (device.type == "cuda" and cuda.here):
            raise RuntimeError(f"tutti: this process group has no backend for {device.type}")
        return self

    def _get_sequence_number_for_group(self) -> int:
        return lib.tutti_group_sequence(self._handle)  # begun: works that run end earlier on one rank than on another

    def _set_sequence_number_for_group(self) -> None:
        """The library counts by itself."""

    # ---- parts of it (dist.split_group, and DeviceMesh where the ranks have a device) ----

    def split_group(self, ranks: Sequence[int], timeout: Optional[datetime.timedelta] = None, opts: Any = None, group_name: Optional[str] = None,
                    group_desc: Optional[str] = None, device_types: Any = None) -> Any:
        ranks = sorted(ranks)
        name = group_name if group_name is not None else f"{self._name}:split:{'_'.join(map(str, ranks))}"
        options = self.part(ranks, name, timeout if timeout is not None else (opts if opts is not None else self.options)._timeout)
        if options is None:
            return None
        group = ProcessGroup(options)
        group.setGroupDesc(group_desc if group_desc is not None else f"{self._description}:split:{'_'.join(map(str, ranks))}")
        return group

    def perform_nocolor_split(self, device: Any) -> None:
        """What a rank does that is not in a part: nothing."""

    def eager_connect_single_device(self, device: Any) -> None:
        """The device is made ready by the first call that needs it."""

    def shutdown(self) -> None:
        works = self.__dict__.pop("_queue", None)
        if works is not None:
            works.put(None)
        super().shutdown()

    def _completer(self) -> Any:
        works = self.__dict__.get("_queue")
        if works is None:
            made: Any = queue.SimpleQueue()
            works = self.__dict__.setdefault("_queue", made)  # one of several threads that come here, and also of destructors, starts it
            if works is made:
                completer(works)
        return works

    # ---- running ----

    def _run(self, function: Any, arguments: Any, options: Any, result: Any, kept: Any, finish: Any = None, factor: Any = None) -> Any:
        """Runs a collective now and returns None where PyTorch would only wait for it, else starts it."""
        seconds = seconds_of(options.timeout)
        waits = not getattr(options, "asyncOp", True)
        if cuda.here and (tensor := cuda.first(kept, result)) is not None:
            if self._handle is None:
                destroyed()
            return cuda.run(self, function, arguments, tensor, _nanoseconds(seconds), waits, result, kept, finish, factor)
        call = _Call(timeout_ns=_nanoseconds(seconds)) if seconds or not waits or factor is not None else self._plain
        if factor is not None:
            call.factor = factor.data_ptr()
        if self._handle is None:
            destroyed()
        if waits:
            status = _interrupt.call(self._world._handle, function, self._handle, *arguments, ctypes.byref(call))
            if status:
                raise_error(status)
            if finish is not None:
                finish()
            return None
        return self._start(function, arguments, call, result, kept, finish)

    def _start(self, function: Any, arguments: Any, call: Any, result: Any, kept: Any, finish: Any = None, alone: bool = False) -> Any:
        place = hold((kept, result, finish))
        call.work = ctypes.addressof(place)
        try:
            status = _interrupt.call(self._world._handle, function, self._handle, *arguments, ctypes.byref(call))
            if status:
                raise_error(status)
        except BaseException:  # an interrupt, after it has started: the buffers stay until it has ended
            _drop(os.getpid(), place)
            raise
        return Work(self, place, result, finish, alone)

    def _several(self, calls: Any, options: Any, result: Any, kept: Any, finishes: Any) -> Any:
        """Collectives as one operation."""
        if self._handle is None:
            destroyed()
        batch, ended = ctypes.c_void_p(), False

        def end(_, call):
            nonlocal ended
            ended = True  # also where it fails
            return lib.tutti_batch_end(batch, call)

        def finish():
            for each in finishes:
                if each is not None:
                    each()
        try:
            status = lib.tutti_batch_begin(self._handle, ctypes.byref(batch))
            if status:
                raise_error(status)
            noted = _Call(batch=batch.value)
            if cuda.here and (tensor := cuda.first(kept, result)) is not None:
                cuda.place(noted, tensor)
            for function, arguments, factor in calls:
                noted.factor = factor.data_ptr() if factor is not None else None
                status = function(self._handle, *arguments, ctypes.byref(noted))
                if status:
                    raise_error(status)
            return self._run(end, (), options, result, kept, finish if any(finishes) else None)
        except BaseException:  # an interrupt, too, which may come anywhere
            if batch.value is not None and not ended:
                lib.tutti_batch_cancel(batch)
            raise

    # ---- collectives ----

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = c10d.AllreduceOptions()) -> Any:
        tensor = tensors[0] if len(tensors) == 1 else _one(tensors, "all_reduce")
        number = _number(tensor, "all_reduce")
        reduction, factor = _reduction(opts.reduceOp, tensor, "all_reduce")
        target, finish = _writable(tensor)
        address = target.data_ptr()
        return self._run(lib.tutti_all_reduce, (address, address, target.numel(), number, reduction), opts, tensors, target, finish, factor)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = c10d.AllreduceCoalescedOptions()) -> Any:
        pairs = [_writable(tensor) for tensor in tensors]
        calls = []
        for target, _ in pairs:
            number, (reduction, factor) = _number(target, "all_reduce"), _reduction(opts.reduceOp, target, "all_reduce")
            calls.append((lib.tutti_all_reduce, (target.data_ptr(), target.data_ptr(), target.numel(), number, reduction), factor))
        return self._several(calls, opts, tensors, pairs, [finish for _, finish in pairs])

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = c10d.BroadcastOptions()) -> Any:
        tensor = _one(tensors, "broadcast")
        number = _number(tensor, "broadcast")
        target, finish = _writable(tensor)
        address = target.data_ptr()
        return self._run(lib.tutti_broadcast, (address, address, target.numel(), number, opts.rootRank), opts, tensors, target, finish)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = c10d.ReduceOptions()) -> Any:
        tensor = _one(tensors, "reduce")
        number = _number(tensor, "reduce")
        reduction, factor = _reduction(opts.reduceOp, tensor, "reduce")
        target, finish = _writable(tensor)
        address = target.data_ptr()
        return self._run(lib.tutti_reduce, (address, address, target.numel(), number, reduction, opts.rootRank), opts, tensors, target, finish, factor)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = c10d.AllgatherOptions()) -> Any:
        outputs, source = _one(output_tensors, "all_gather"), _dense(_one(input_tensors, "all_gather"))
        if len(outputs) != self._size:
            raise ValueError(f"tutti: all_gather wants {self._size} tensors to gather into, and was given {len(outputs)}")
        number = _alike([source, *outputs], "all_gather")
        counts = [tensor.numel() for tensor in outputs]
        if counts[self.rank()] != source.numel():
            raise ValueError(f"tutti: all_gather: rank {self.rank()} gives {source.numel()} elements, and gathers {counts[self.rank()]} of itself")
        flat = source.new_empty(sum(counts))
        if len(set(counts)) == 1:
            call: Any = (lib.tutti_all_gather, (source.data_ptr(), flat.data_ptr(), source.numel(), number))
            sizes: Any = None
        else:
            sizes = _sizes(counts)
            call = (lib.tutti_all_gather_v, (source.data_ptr(), flat.data_ptr(), sizes, None, number))
        return self._run(call[0], call[1], opts, outputs, (source, flat, sizes), _copies(flat, outputs))

    def _gather_call(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        source = _dense(tensor)
        number = _alike([source, output], "all_gather")
        target, finish = _writable(output)
        if target.numel() != source.numel() * self._size:
            raise ValueError(f"tutti: all_gather of {source.numel()} elements by {self._size} ranks needs a tensor of {source.numel() * self._size}, "
                             f"and was given one of {target.numel()}")
        return (lib.tutti_all_gather, (source.data_ptr(), target.data_ptr(), source.numel(), number), None), (source, target), finish

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = c10d.AllgatherOptions()) -> Any:
        call, kept, finish = self._gather_call(output, input)
        return self._run(call[0], call[1], opts, [output], kept, finish)

    def all_gather_single_coalesced(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = c10d.AllgatherOptions()) -> Any:
        parts = [self._gather_call(*pair) for pair in _pairs(outputs, inputs, "all_gather_into_tensor_coalesced")]
        return self._several([call for call, _, _ in parts], opts, outputs, parts, [finish for _, _, finish in parts])

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = c10d.AllgatherOptions()) -> Any:
        flats, calls, kept, finishes = [], [], [], []
        if len(output_lists) != self._size:
            raise ValueError(f"tutti: all_gather_coalesced wants a list of outputs for each of {self._size} ranks, and was given {len(output_lists)}")
        for outputs in output_lists:
            if len(outputs) != len(input_list):
                raise ValueError("tutti: all_gather_coalesced wants as many outputs of each rank as there are inputs")
        for i, tensor in enumerate(input_list):
            _alike([tensor, *[outputs[i] for outputs in output_lists]], "all_gather_coalesced")
            if any(outputs[i].numel() != tensor.numel() for outputs in output_lists):
                raise ValueError(f"tutti: all_gather_coalesced: input {i} has {tensor.numel()} elements, and its outputs "
                                 f"{[outputs[i].numel() for outputs in output_lists]}")
            flat = tensor.new_empty(tensor.numel() * self._size)
            call, held, _ = self._gather_call(flat, tensor)
            flats.append(flat)
            calls.append(call)
            kept.append(held)
            finishes.append(_copies(flat, [output_lists[rank][i] for rank in range(self._size)]))
        return self._several(calls, opts, [tensor for outputs in output_lists for tensor in outputs], (flats, kept), finishes)

    def _scatter_call(self, output: torch.Tensor, tensor: torch.Tensor, operation: Any) -> Any:
        source = _dense(tensor)
        number = _alike([source, output], "reduce_scatter")
        reduction, factor = _reduction(operation, source, "reduce_scatter")
        target, finish = _writable(output)
        if source.numel() != target.numel() * self._size:
            raise ValueError(f"tutti: reduce_scatter of {source.numel()} elements among {self._size} ranks leaves each {source.numel() / self._size:g}, "
                             f"and the output has {target.numel()}")
        return (lib.tutti_reduce_scatter, (source.data_ptr(), target.data_ptr(), target.numel(), number, reduction), factor), (source, target), finish

    def reduce_scatter_single(self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = c10d.ReduceScatterOptions()) -> Any:
        (function, arguments, factor), kept, finish = self._scatter_call(outputTensor, inputTensor, opts.reduceOp)
        return self._run(function, arguments, opts, [outputTensor], kept, finish, factor)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = c10d.ReduceScatterOptions()) -> Any:
        parts = [self._scatter_call(output, tensor, opts.reduceOp) for output, tensor in _pairs(outputs, inputs, "reduce_scatter_tensor_coalesced")]
        return self._several([call for call, _, _ in parts], opts, outputs, parts, [finish for _, _, finish in parts])

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = c10d.ReduceScatterOptions()) -> Any:
        output, inputs = _one(output_tensors, "reduce_scatter"), _one(input_tensors, "reduce_scatter")
        if len(inputs) != self._size:
            raise ValueError(f"tutti: reduce_scatter wants {self._size} tensors, and was given {len(inputs)}")
        number = _alike([output, *inputs], "reduce_scatter")
        reduction, factor = _reduction(opts.reduceOp, output, "reduce_scatter")
        counts = [tensor.numel() for tensor in inputs]
        target, finish = _writable(output)
        if counts[self.rank()] != target.numel():
            raise ValueError(f"tutti: reduce_scatter: the part of rank {self.rank()} has {counts[self.rank()]} elements, and its output {target.numel()}")
        flat = _flat(inputs)
        if len(set(counts)) == 1:
            call: Any = (lib.tutti_reduce_scatter, (flat.data_ptr(), target.data_ptr(), target.numel(), number, reduction))
            sizes: Any = None
        else:
            sizes = _sizes(counts)
            call = (lib.tutti_reduce_scatter_v, (flat.data_ptr(), target.data_ptr(), sizes, number, reduction))
        return self._run(call[0], call[1], opts, output_tensors, (flat, target, sizes), finish, factor)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = c10d.GatherOptions()) -> Any:
        source = _dense(_one(input_tensors, "gather"))
        if self.rank() != opts.rootRank:
            return self._run(lib.tutti_gather, (source.data_ptr(), None, source.numel(), _number(source, "gather"), opts.rootRank), opts, [], source)
        outputs = _one(output_tensors, "gather")
        if len(outputs) != self._size or any(tensor.numel() != source.numel() for tensor in outputs):
            raise ValueError(f"tutti: gather wants {self._size} tensors of {source.numel()} elements on its root")
        flat = source.new_empty(source.numel() * self._size)
        return self._run(lib.tutti_gather, (source.data_ptr(), flat.data_ptr(), source.numel(), _alike([source, *outputs], "gather"), opts.rootRank), opts,
                         outputs, (source, flat), _copies(flat, outputs))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = c10d.ScatterOptions()) -> Any:
        output = _one(output_tensors, "scatter")
        number = _number(output, "scatter")
        target, finish = _writable(output)
        flat = None
        if self.rank() == opts.rootRank:
            inputs = _one(input_tensors, "scatter")
            if len(inputs) != self._size or any(tensor.numel() != target.numel() for tensor in inputs):
                raise ValueError(f"tutti: scatter wants {self._size} tensors of {target.numel()} elements on its root")
            _alike([output, *inputs], "scatter")
            flat = _flat(inputs)
        return self._run(lib.tutti_scatter, (flat.data_ptr() if flat is not None else None, target.data_ptr(), target.numel(), number, opts.rootRank), opts,
                         output_tensors, (flat, target), finish)

    def _exchange(self, source: torch.Tensor, sent: Any, target: torch.Tensor, received: Any, opts: Any, result: Any, kept: Any, finish: Any) -> Any:
        number = _alike([source, target], "all_to_all")
        sent, received = _sizes(sent), _sizes(received)
        return self._run(lib.tutti_all_to_all_v, (source.data_ptr(), sent, None, target.data_ptr(), received, None, number), opts, result,
                         (kept, source, target, sent, received), finish)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = c10d.AllToAllOptions()) -> Any:
        if len(output_tensors) != self._size or len(input_tensors) != self._size:
            raise ValueError(f"tutti: all_to_all wants {self._size} tensors to send and as many to receive")
        _alike([*input_tensors, *output_tensors], "all_to_all")
        source, received = _flat(input_tensors), [tensor.numel() for tensor in output_tensors]
        flat = source.new_empty(sum(received))
        return self._exchange(source, [tensor.numel() for tensor in input_tensors], flat, received, opts, output_tensors, None, _copies(flat, output_tensors))

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any, input_split_sizes: Any,
                          opts: Any = c10d.AllToAllOptions()) -> Any:
        source = _dense(input)
        target, finish = _writable(output)

        def splits(tensor, sizes, what):
            rows = tensor.shape[0] if tensor.dim() > 0 else 1
            if not sizes:
                if rows % self._size:
                    raise ValueError(f"tutti: all_to_all: {rows} rows of the {what} cannot be cut into {self._size} parts")
                sizes = [rows // self._size] * self._size
            if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
                raise ValueError(f"tutti: all_to_all: the {what} has {rows} rows, and its splits are {list(sizes)}")
            width = tensor.numel() // rows if rows else 0
            return [size * width for size in sizes]
        return self._exchange(source, splits(source, input_split_sizes, "input"), target, splits(target, output_split_sizes, "output"), opts, [output], None, finish)

    def barrier(self, opts: Any = c10d.BarrierOptions()) -> Any:
        return self._run(lib.tutti_barrier, (), opts, [], None)

    # ---- from one to another ----

    def send(self, tensors: Sequence[torch.Tensor], dstRank: int, tag: int = 0) -> Any:
        source = _dense(_one(tensors, "send"))
        if source.is_cuda and cuda.here:
            return cuda.run(self, lib.tutti_send, (source.data_ptr(), source.numel(), _number(source, "send"), dstRank, tag), source, 0, False, tensors, source,
                            None)
        return self._start(lib.tutti_send, (source.data_ptr(), source.numel(), _number(source, "send"), dstRank, tag), _Call(), tensors, source, alone=True)

    def recv(self, tensors: Sequence[torch.Tensor], srcRank: int, tag: int = 0) -> Any:
        tensor = _one(tensors, "recv")
        number = _number(tensor, "recv")
        target, finish = _writable(tensor)
        if target.is_cuda and cuda.here:
            return cuda.run(self, lib.tutti_recv, (target.data_ptr(), target.numel(), number, srcRank, tag), target, 0, False, tensors, target, finish)
        received = _Received()
        work = self._start(lib.tutti_recv, (target.data_ptr(), target.numel(), number, srcRank, tag), _Call(received=ctypes.addressof(received)), tensors,
                           (target, received), finish, alone=True)
        work._received = received
        return work

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        return self.recv(tensors, constants["TUTTI_ANY_SOURCE"], tag)

    # ---- older names ----

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
