# SPDX-License-Identifier: Apache-2.0
"""The C libraries, by ctypes. Functions and structs are made from the table in _interface.py when they are first asked for: lib.tutti_barrier,
struct("tutti_call"). Calls run without the interpreter's lock."""
import ctypes
import os
import pathlib
import re

from . import _interface

_LETTERS = {"?": ctypes.c_bool, "c": ctypes.c_char, "i": ctypes.c_int, "I": ctypes.c_uint, "B": ctypes.c_uint8, "h": ctypes.c_int16, "H": ctypes.c_uint16,
            "q": ctypes.c_int64, "Q": ctypes.c_uint64, "z": ctypes.c_size_t, "d": ctypes.c_double, "f": ctypes.c_float, "s": ctypes.c_char_p,
            "P": ctypes.c_void_p, "F": ctypes.c_void_p, "v": None}
_TOKEN = re.compile(r"(\d*)(?:\{(\w+)\}|(.))")
constants = _interface.constants
_structs = {}


def _types(text):
    """The ctypes of a row of letters."""
    found = []
    for count, name, letter in _TOKEN.findall(text):
        kind = struct(name) if name else _LETTERS[letter]
        found.append(kind * int(count) if count else kind)
    return found


def struct(name):
    """The ctypes class of a public struct. Called without arguments it is all zeros, and its size is set: what TUTTI_..._INIT is."""
    made = _structs.get(name)
    if made is None:
        fields = [field.split(":") for field in _interface.structs[name].split()]
        made = type(name, (_Struct,), {"_fields_": [(field, _types(letters)[0]) for field, letters in fields]})
        _structs[name] = made
    return made


class _Struct(ctypes.Structure):
    def __init__(self, **fields):
        super().__init__(**fields)
        if self._fields_[0][0] == "size":
            self.size = ctypes.sizeof(self)


def _load(name):
    """A library of the package itself, or, in a package without any, one that the system finds."""
    soname = f"lib{name}.so.{'.'.join(_interface.version.split('.')[:2])}"
    own = pathlib.Path(__file__).with_name("lib") / soname
    try:
        return ctypes.CDLL(str(own) if own.exists() else soname, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ImportError(f"tutti: {soname} cannot be loaded: {error}") from None


def _load_needed():
    """What a wheel has for its libraries (for the tensors OpenBLAS and what it needs), in whatever order one needs the other: once loaded, it is found by its name."""
    waiting = [path for path in sorted((pathlib.Path(__file__).parent / "lib" / "needed").glob("*.so*")) if path.suffix != ".licence"]
    while waiting:
        left = []
        for path in waiting:
            try:
                ctypes.CDLL(str(path))
            except OSError:
                left.append(path)
        if len(left) == len(waiting):
            return  # the tensor library tells what it does not find
        waiting = left


class _Lib:
    """Attributes are the C functions."""

    def __init__(self):
        self._tutti = _load("tutti")
        self._tutti.tutti_version.restype = ctypes.c_char_p
        version = self._tutti.tutti_version().decode()
        if version.split(".")[:2] != _interface.version.split(".")[:2]:
            raise ImportError(f"tutti: the package was made for version {_interface.version} and the library is {version}")

    def __getattr__(self, name):
        letters = _interface.functions.get(name)
        if letters is None:
            raise AttributeError(f"tutti: there is no C function {name}")
        function = (load_tensors() if name.startswith("tt_") else self._tutti)[name]
        function.restype, *function.argtypes = _types(letters)
        setattr(self, name, function)
        return function


_tensors = None


def load_tensors():
    """The tensor library, which is loaded when it is first needed."""
    global _tensors
    if _tensors is None:
        _load_needed()
        _tensors = _load("tutti-tensor")
    return _tensors


_plugins = pathlib.Path(__file__).with_name("plugins")
if _plugins.is_dir():
    os.environ.setdefault("TUTTI_PLUGIN_PATH", str(_plugins))
lib = _Lib()
