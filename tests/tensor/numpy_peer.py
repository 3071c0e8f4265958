# SPDX-License-Identifier: Apache-2.0
"""NumPy and PyTorch on the other end: they read the files that we wrote and we read theirs; DLPack goes both ways without a copy.

The library is called as Python programs call it, by ctypes. NumPy is required; torch and the safetensors package are used where there are.
"""
import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib

SKIP = 77


def with_numpy():
    """Runs this file again with a Python that has numpy and torch, or at least numpy."""
    if os.environ.get("TEST_NUMPY_TRIED"):
        return
    os.environ["TEST_NUMPY_TRIED"] = "1"
    virtual = os.path.join(os.environ["VIRTUAL_ENV"], "bin", "python3") if os.environ.get("VIRTUAL_ENV") else None
    candidates = [name for name in (os.environ.get("TEST_PYTHON"), os.environ.get("TUTTI_PYTHON"), virtual, sys.executable, "python3") if name]
    for modules in ("numpy, torch", "numpy"):
        for python in candidates:
            try:
                found = subprocess.run([python, "-c", "import " + modules], capture_output=True, timeout=120).returncode == 0
            except (OSError, subprocess.TimeoutExpired):
                continue
            if found:
                os.execvp(python, [python] + sys.argv)
    print("skipped: no python3 here can import numpy; TEST_PYTHON names one")
    sys.exit(SKIP)


BUILD = os.environ.get("TEST_BUILD", os.path.join(os.path.dirname(__file__), "../../build/release"))
LIBRARY = os.path.join(BUILD, "src", "libtutti-tensor.so")
if os.environ.get("TEST_SANITIZE"):
    print("skipped: a sanitizer's library cannot be loaded into Python")
    sys.exit(SKIP)
if not os.path.exists(LIBRARY):
    print("skipped: libtutti-tensor was not built")
    sys.exit(SKIP)
with_numpy()
import numpy as np  # noqa: E402

try:
    import torch
except ImportError:
    torch = None
try:
    import safetensors.torch as official
except ImportError:
    official = None

# ---- the library ----

tt = ctypes.CDLL(LIBRARY)
FOLDER = tempfile.mkdtemp(prefix="tutti-numpy-")


class Scope(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint64)]


class Dims(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), ("at", ctypes.c_int64 * 8)]


class List(ctypes.Structure):
    _fields_ = [("count", ctypes.c_size_t), ("at", ctypes.POINTER(ctypes.c_void_p))]


class Named(ctypes.Structure):
    _fields_ = [("count", ctypes.c_size_t), ("at", ctypes.POINTER(ctypes.c_void_p)), ("names", ctypes.POINTER(ctypes.c_char_p))]


def declare(name, result, *arguments):
    function = getattr(tt, name)
    function.restype, function.argtypes = result, arguments


POINTER, TEXT, NAMES = ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p)
declare("tt_scope_open", Scope)
declare("tt_scope_close", ctypes.c_int, ctypes.POINTER(Scope))
declare("tt_error_show", ctypes.c_int)
declare("tutti_error_message", TEXT)
declare("tt_from", POINTER, POINTER, Dims, ctypes.c_int, POINTER)
declare("tt_dtype", ctypes.c_int, POINTER)
declare("tt_sizes", Dims, POINTER)
declare("tt_numel", ctypes.c_int64, POINTER)
declare("tt_read", ctypes.c_bool, POINTER, POINTER, ctypes.c_int, ctypes.c_size_t)
declare("tt_data", POINTER, POINTER)
declare("tt_storage_resize", ctypes.c_bool, POINTER, ctypes.c_size_t)
declare("tt_transpose", POINTER, POINTER, ctypes.c_int, ctypes.c_int)
declare("tt_save_npy", ctypes.c_bool, POINTER, TEXT)
declare("tt_load_npy", POINTER, TEXT)
declare("tt_save_npz", ctypes.c_bool, List, NAMES, TEXT)
declare("tt_load_npz", Named, TEXT)
declare("tt_save_safetensors", ctypes.c_bool, List, NAMES, TEXT)
declare("tt_load_safetensors", Named, TEXT)
declare("tt_to_dlpack", POINTER, POINTER)
declare("tt_from_dlpack", POINTER, POINTER)

DTYPES = {"f8": 1, "f4": 2, "f2": 3, "i1": 7, "i2": 8, "i4": 9, "i8": 10, "u1": 11, "u2": 12, "u4": 13, "u8": 14, "b1": 15, "c8": 16, "c16": 17}
BY_CODE = {code: np.dtype(name) for name, code in DTYPES.items()}


def must(value):
    status = tt.tt_error_show()
    assert status == 0, tt.tutti_error_message().decode()
    return value


def path(name):
    return os.path.join(FOLDER, name)


def ours(array):
    """A tensor with the values of a NumPy array."""
    rows = np.ascontiguousarray(array)
    dims = Dims(array.ndim, (ctypes.c_int64 * 8)(*array.shape))
    return must(tt.tt_from(rows.ctypes.data, dims, DTYPES[array.dtype.str[1:]], None))


def theirs(tensor):
    """A NumPy array with the values of a tensor."""
    sizes, code = must(tt.tt_sizes(tensor)), tt.tt_dtype(tensor)
    out = np.empty(list(sizes.at[: sizes.count]), BY_CODE[code])
    must(tt.tt_read(tensor, out.ctypes.data, code, out.size))
    return out


def listed(tensors):
    return List(len(tensors), (ctypes.c_void_p * len(tensors))(*tensors))


def named(names):
    return (ctypes.c_char_p * len(names))(*[name.encode() for name in names])


def arrays():
    for kind in DTYPES:
        for shape in ((), (3,), (2, 3), (2, 0), (1, 2, 3, 4)):
            count = int(np.prod(shape))
            yield kind, (np.arange(count) % 7).reshape(shape).astype(kind)


def same(left, right):
    assert left.dtype == right.dtype and left.shape == right.shape, (left.dtype, right.dtype, left.shape, right.shape)
    assert np.array_equal(left, right)


# ---- files ----

def numpy_reads_our_npy():
    for _, array in arrays():
        must(tt.tt_save_npy(ours(array), path("x.npy").encode()))
        same(array, np.load(path("x.npy"), allow_pickle=False))
    turned = tt.tt_transpose(ours(np.arange(6.0).reshape(2, 3)), 0, 1)
    must(tt.tt_save_npy(turned, path("x.npy").encode()))
    same(np.arange(6.0).reshape(2, 3).T.copy(), np.load(path("x.npy")))


def our_npy_is_numpys_byte_for_byte():
    for _, array in arrays():
        must(tt.tt_save_npy(ours(array), path("x.npy").encode()))
        np.save(path("y.npy"), array)
        assert open(path("x.npy"), "rb").read() == open(path("y.npy"), "rb").read()


def we_read_numpys_npy():
    for _, array in arrays():
        for form in (array, np.asfortranarray(array), array.astype(array.dtype.newbyteorder(">"))):
            for version in ((1, 0), (2, 0), (3, 0)):
                with open(path("y.npy"), "wb") as file:
                    np.lib.format.write_array(file, form, version=version)
                same(form.astype(array.dtype), theirs(must(tt.tt_load_npy(path("y.npy").encode()))))


def npz_goes_both_ways():
    names, values = zip(*((f"{kind}/{index} ü", array) for index, (kind, array) in enumerate(arrays())))
    must(tt.tt_save_npz(listed([ours(array) for array in values]), named(names), path("x.npz").encode()))
    with np.load(path("x.npz"), allow_pickle=False) as read:
        assert list(read.keys()) == list(names)
        for name, array in zip(names, values):
            same(array, read[name])
    with zipfile.ZipFile(path("x.npz")) as archive:
        assert archive.testzip() is None
        for entry in archive.infolist():
            assert entry.CRC == zlib.crc32(archive.read(entry))
    np.savez(path("y.npz"), **dict(zip(names, values)))
    read = must(tt.tt_load_npz(path("y.npz").encode()))
    assert read.count == len(names)
    for index in range(read.count):
        assert read.names[index].decode() == names[index]
        same(values[index], theirs(read.at[index]))


def compressed_npz_is_refused():
    np.savez_compressed(path("z.npz"), a=np.zeros(9))
    assert tt.tt_load_npz(path("z.npz").encode()).count == 0
    assert tt.tt_error_show() == 7 and b"deflate" in tt.tutti_error_message(), tt.tutti_error_message()
    tt.tt_error_clear()


def plain_json_and_bytes_are_safetensors():
    """The format by its description: a length, JSON, elements."""
    kinds = {"f8": "F64", "f4": "F32", "f2": "F16", "i1": "I8", "i2": "I16", "i4": "I32", "i8": "I64", "u1": "U8", "u2": "U16", "u4": "U32",
             "u8": "U64", "b1": "BOOL", "c8": "C64"}
    values = {f"{kind} \"{index}\" ü": array for index, (kind, array) in enumerate(arrays()) if kind in kinds}
    must(tt.tt_save_safetensors(listed([ours(array) for array in values.values()]), named(list(values)), path("x.safetensors").encode()))
    with open(path("x.safetensors"), "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header, elements = json.loads(file.read(length)), file.read()
    assert length % 8 == 0 and list(header) == list(values)
    for name, array in values.items():
        start, end = header[name]["data_offsets"]
        assert header[name]["dtype"] == kinds[array.dtype.str[1:]] and start % array.dtype.itemsize == 0
        same(array, np.frombuffer(elements[start:end], array.dtype).reshape(header[name]["shape"]))
    header, elements = {"__metadata__": {"format": "pt"}}, b""
    for name, array in values.items():
        header[name] = {"shape": array.shape, "data_offsets": [len(elements), len(elements) + array.nbytes], "dtype": kinds[array.dtype.str[1:]]}
        elements += array.tobytes()
    text = json.dumps(header, indent=1).encode()
    with open(path("y.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + elements)
    read = must(tt.tt_load_safetensors(path("y.safetensors").encode()))
    assert [read.names[index].decode() for index in range(read.count)] == list(values)
    for index, array in enumerate(values.values()):
        same(array, theirs(read.at[index]))


def safetensors_goes_both_ways():
    if official is None:
        return "the safetensors package is not installed"
    kinds = {torch.float64: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4, torch.float8_e4m3fn: 5, torch.float8_e5m2: 6, torch.int8: 7,
             torch.int16: 8, torch.int32: 9, torch.int64: 10, torch.uint8: 11, torch.bool: 15}
    values = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    official.save_file(values, path("y.safetensors"), metadata={"format": "pt"})
    read = must(tt.tt_load_safetensors(path("y.safetensors").encode()))
    assert read.count == len(values)
    must(tt.tt_save_safetensors(List(read.count, read.at), read.names, path("x.safetensors").encode()))
    back = official.load_file(path("x.safetensors"))
    for name, value in values.items():
        assert back[name].dtype == value.dtype and torch.equal(back[name].to(torch.float64), value.to(torch.float64)), name
    return None


# ---- DLPack ----

python = ctypes.pythonapi
python.PyCapsule_New.restype, python.PyCapsule_New.argtypes = ctypes.py_object, (POINTER, TEXT, POINTER)
python.PyCapsule_GetPointer.restype, python.PyCapsule_GetPointer.argtypes = POINTER, (ctypes.py_object, TEXT)
python.PyCapsule_SetName.restype, python.PyCapsule_SetName.argtypes = ctypes.c_int, (ctypes.py_object, TEXT)
OFFERED, TAKEN = b"dltensor_versioned", b"used_dltensor_versioned"


class Offer:
    """What from_dlpack of any library takes."""

    def __init__(self, tensor):
        self.managed = must(tt.tt_to_dlpack(tensor))

    def __dlpack__(self, **_):
        return python.PyCapsule_New(self.managed, OFFERED, None)

    def __dlpack_device__(self):
        return (1, 0)


def take(producer):
    capsule = producer.__dlpack__(max_version=(1, 1))
    tensor = must(tt.tt_from_dlpack(python.PyCapsule_GetPointer(capsule, OFFERED)))
    python.PyCapsule_SetName(capsule, TAKEN)
    return tensor


def numpy_and_we_share_memory():
    for _, array in arrays():
        tensor = ours(array)
        shared = np.from_dlpack(Offer(tensor))
        same(array, np.array(shared))
        if array.size:
            assert shared.ctypes.data == tt.tt_data(tensor)
            assert not tt.tt_storage_resize(tensor, 0) and tt.tt_error_show() == 6
            tt.tt_error_clear()
            del shared
            must(tt.tt_storage_resize(tensor, 0))
        back = take(array)
        same(array, theirs(back))
        if array.size:
            assert array.ctypes.data == tt.tt_data(back)
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    copy = take(frozen)
    same(frozen, theirs(copy))
    assert tt.tt_data(copy) != frozen.ctypes.data


def torch_and_we_share_memory():
    if torch is None:
        return "torch is not installed"
    for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.uint8,
                 torch.bool, torch.complex64, torch.complex128):
        value = torch.arange(6).reshape(2, 3).to(kind).t()
        try:
            value.__dlpack__(max_version=(1, 1))
        except (BufferError, RuntimeError, TypeError) as refused:
            print(f"    torch does not give {kind} away: {refused}")
            continue
        tensor = take(value)
        assert tt.tt_data(tensor) == value.data_ptr()
        again = torch.from_dlpack(Offer(tensor))
        assert again.dtype == kind and again.data_ptr() == value.data_ptr() and again.stride() == value.stride()
        assert torch.equal(again.to(torch.complex128), value.to(torch.complex128))
    return None


def main():
    failed = 0
    for test in (numpy_reads_our_npy, our_npy_is_numpys_byte_for_byte, we_read_numpys_npy, npz_goes_both_ways, compressed_npz_is_refused,
                 plain_json_and_bytes_are_safetensors, safetensors_goes_both_ways, numpy_and_we_share_memory, torch_and_we_share_memory):
        scope = tt.tt_scope_open()
        try:
            reason = test()
            print(f"ok      {test.__name__}" if reason is None else f"skipped {test.__name__}: {reason}")
        except Exception as error:  # each is reported, and the rest still runs
            print(f"FAILED  {test.__name__}: {type(error).__name__}: {error}")
            failed += 1
            tt.tt_error_clear()
        status = tt.tt_scope_close(ctypes.byref(scope))
        if status != 0:
            print(f"FAILED  {test.__name__}: {tt.tutti_error_message().decode()}")
            failed += 1
    for name in os.listdir(FOLDER):
        os.unlink(path(name))
    os.rmdir(FOLDER)
    return 1 if failed else 0


sys.exit(main())
