# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators for tensors on the stand-in for a GPU (tests/cuda/standin), whose memory is the host's: each is PyTorch's own for the CPU. Views, and what
makes tensors, are PyTorch's for CUDA, over the stand-in for CUDA's runtime; so are streams, events and the allocator. An operator waits for its stream, computes at
once and has its result put in place by the stream, a while later: who does not wait for it reads what was there before. What it does not show: an operator that is
still reading memory when somebody else writes it."""
import ctypes
import warnings

import torch

# What PyTorch has for CUDA that launches no kernel.
_NATIVE = {"aten::empty.memory_format", "aten::empty_strided", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::resize_", "aten::set_", "aten::_efficientzerotensor"}
LATE = 1_000_000  # cycles of the stand-in's clock: half a millisecond
_libraries = []  # what is registered goes with them


def _on_cpu(tensor):
    """The same memory as a tensor on the CPU."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = torch.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _put(to, value):
    """Makes the memory of a tensor what the CPU has computed: in the current stream and a while later, so that whatever comes without waiting for it finds what
    was there before. `value` has the shape and the strides of `to`. Returns what has to live until all results of an operator are on their way: the allocator would
    give it to the next of them, which the CPU writes at once."""
    beside = torch.empty_strided(to.size(), to.stride(), dtype=to.dtype, device="cuda")
    _on_cpu(beside).copy_(value)
    torch.cuda._sleep(LATE)
    _copy_memory(to, beside)
    return beside


def _copy_memory(to, source):
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = ctypes.CDLL(None).cudaMemcpyAsync(ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(to.nbytes), 3, stream)
    assert error == 0, error


def _is_dense(tensor):
    """Whether its elements fill a range of memory, each a place of its own."""
    return tensor.numel() > 0 and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _kernel(operator):
    written = {i for i, each in enumerate(operator._schema.arguments) if each.alias_info is not None and each.alias_info.is_write}
    names = {operator._schema.arguments[i].name for i in written}

    def run(*arguments, **named):
        given = {}  # those on the CPU, and what they are of
        late, kept = [], []  # of these what is computed beside its place; see _put

        def there(value, writes=False):
            if isinstance(value, torch.Tensor) and value.is_cuda:
                alias = _on_cpu(value)
                if writes and _is_dense(value):
                    alias = alias.clone(memory_format=torch.preserve_format)
                    late.append((value, alias))
                given[id(alias)] = alias, value
                return alias
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return type(value)(there(each, writes) for each in value) if isinstance(value, (list, tuple)) else value

        def back(value):
            if isinstance(value, torch.Tensor):
                if id(value) not in given:  # a new one
                    new = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")
                    if _is_dense(value):
                        kept.append(_put(new, value))
                    else:
                        _on_cpu(new).copy_(value)
                    return new
                alias, tensor = given[id(value)]
                if alias.size() != tensor.size():  # an output that the operator has given its shape
                    tensor.resize_(alias.size())
                    _on_cpu(tensor).copy_(alias)
                return tensor
            return type(value)(map(back, value)) if isinstance(value, (list, tuple)) else value

        torch.cuda.current_stream().synchronize()  # it runs now, after what is in the stream
        result = operator(*(there(value, i in written) for i, value in enumerate(arguments)), **{name: there(value, name in names) for name, value in named.items()})
        for tensor, alias in late:
            if alias.size() == tensor.size():
                kept.append(_put(tensor, alias))
        return back(result)
    return run


def _copying(otherwise):
    """copy_ as it is on a GPU, in the stream, where no kernel is needed for it."""
    def run(to, source, non_blocking=False):
        if not (to.is_cuda and source.is_cuda and to.is_contiguous() and source.is_contiguous() and to.dtype == source.dtype and to.size() == source.size()):
            return otherwise(to, source, non_blocking)
        _copy_memory(to, source)
        return to
    return run


def install():
    """For every operator that PyTorch has a kernel of CUDA for. Once per process."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    warnings.filterwarnings("ignore", "Warning only once for all operators")  # that they are replaced
    for name in {*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), "aten::copy_"} - _NATIVE:
        if not name.startswith("aten::"):
            continue
        packet, _, overload = name[len("aten::"):].partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if any(each.alias_info is not None and not each.alias_info.is_write for each in operator._schema.returns):  # a view
            continue
        kernel = _kernel(operator)
        library.impl(name[len("aten::"):], _copying(kernel) if packet == "copy_" else kernel, "CUDA", allow_override=True)
