# SPDX-License-Identifier: Apache-2.0
"""Writes tutti/_interface.py, the table of the C interface, and the stub of tutti/_library.py, which tells what each C function takes."""
from operators import shown

HINTS = {"v": "None", "?": "bool", "i": "int", "I": "int", "q": "int", "Q": "int", "z": "int", "B": "int", "h": "int", "H": "int", "c": "bytes", "d": "float",
         "f": "float", "s": "Any", "P": "Any", "F": "Any"}


def module(header):
    lines = ["# Made from tutti-ffi.h by scripts/python.", f"version = {header.version!r}"]
    functions = {name: function.letters for name, function in header.functions.items()}
    for name, table in (("constants", header.constants), ("structs", header.structs), ("functions", functions)):
        lines += [f"{name} = {{"] + [f"    {key!r}: {value!r}," for key, value in table.items()] + ["}"]
    return "\n".join(lines) + "\n"


def hint(kind, letter):
    return HINTS[letter] if letter in HINTS else "Any"


def stub(header, docs):
    lines = ["# Made from tutti-ffi.h and the headers' comments by scripts/python.", "import ctypes", "from typing import Any, Dict, Type", "",
             "constants: Dict[str, int]", "", "def struct(name: str) -> Type[Any]: ...", "def load_tensors() -> ctypes.CDLL: ...", "", "class _Lib:"]
    for name, function in header.functions.items():
        letters = [header.letter(argument.declaration) for argument in function.arguments]
        parts = ", ".join(f"{argument.name}_: {hint(argument.kind, letter)}" for argument, letter in zip(function.arguments, letters))
        result = hint(function.result, function.letters[0])
        lines += [f"    def {name}(self{', ' if parts else ''}{parts}) -> {result}:", f'        """{shown(docs[name])}"""']
    return "\n".join(lines + ["", "lib: _Lib"]) + "\n"
