#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The header for other languages: it has what the libraries export and nothing else, says the same as the headers that C programs include, and
holds nothing that needs a preprocessor. A program written with ctypes alone then uses it."""
import ctypes
import os
import pathlib
import re
import subprocess
import sys
import tempfile

source = pathlib.Path(os.environ.get("TEST_SOURCE", pathlib.Path(__file__).resolve().parents[2]))
build = pathlib.Path(os.environ.get("TEST_BUILD", source / "build" / "release"))
header = build / "tutti-ffi.h"
if os.environ.get("TEST_SANITIZE"):
    print("skipped: a library with a sanitizer cannot be loaded late")
    sys.exit(77)
if not header.exists():
    print("skipped: tutti-ffi.h was not built")
    sys.exit(77)
whole = header.read_text()
text = re.sub(r"/\*.*?\*/", " ", whole, flags=re.S)
libraries = {name: next(build.rglob(f"lib{name}.so"), None) for name in ("tutti", "tutti-tensor")}
umbrellas = "#include <tutti/tutti.h>\n" + ("#include <tutti/tensors.h>\n" if libraries["tutti-tensor"] else "")
passed = failed = 0


def report(sentence, problems):
    global passed, failed
    if problems:
        failed += 1
        print(f"FAILED  {sentence}")
        for problem in list(problems)[:20]:
            print(f"    {problem}")
    else:
        passed += 1
        print(f"ok      {sentence}")


def statements():
    """Top-level statements, without the bodies of structs and enums."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == ";" and depth == 0:
            yield text[start:at].strip()
            start = at + 1


def functions():
    names = []
    for statement in statements():
        if not statement.startswith("typedef") and "{" not in statement:
            match = re.search(r"(\w+)\s*\(", statement)
            if match:
                names.append(match.group(1))
    return names


def structs():
    """Name -> names of its fields."""
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\n\} (\w+);", text, re.S):
        fields = []
        for declaration in body.split(";"):
            declaration = re.sub(r"\(\*(\w+)\)\s*\(.*\)", r"\1", declaration.strip(), flags=re.S)
            for piece in declaration.split(",") if declaration else []:
                fields.append(re.sub(r"\[.*", "", piece).split()[-1].lstrip("*"))
        found[name] = fields
    return found


def exported(library):
    lines = subprocess.run(["nm", "-D", "--defined-only", "--with-symbol-versions", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in lines.splitlines() if line.split()[1] in "TW" and "TUTTI_PRIVATE" not in line}


def run_c(body, *lines):
    """Compiles a C program and gives what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "program"
        program.with_suffix(".c").write_text(body)
        made = subprocess.run([os.environ.get("CC", "cc"), "-std=c17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{source}/include",
                               f"-I{build}", program.with_suffix(".c"), "-o", program, *lines], capture_output=True, text=True)
        if made.returncode:
            return made.stderr.splitlines()
        return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()


C = "#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n"
report("nothing is left to preprocess", [line for line in text.splitlines() if "#" in line or "__" in line or "TUTTI_API" in line])
names = functions()
report("every function stands there once", {name for name in names if names.count(name) > 1})
for prefix, library in (("tutti_", libraries["tutti"]), ("tt_", libraries["tutti-tensor"])):
    if library is None:
        continue
    there, declared = exported(library), {name for name in names if name.startswith(prefix)}
    report(f"every symbol of {library.name} is declared", sorted(there - declared))
    report(f"every function of {library.name} that is declared is exported", sorted(declared - there))
report("it is C", run_c(C + '#include "tutti-ffi.h"\nint main(void) { return 0; }\n'))

fields = [(name, field) for name, members in structs().items() for field in members]
prints = "".join(f'printf("{n} %zu\\n", sizeof({n}));\n' for n in structs()) + "".join(
    f'printf("{n}.{f} %zu %zu\\n", offsetof({n}, {f}), sizeof((({n} *)0)->{f}));\n' for n, f in fields)
mine = run_c(C + '#include "tutti-ffi.h"\nint main(void) {\n' + prints + "}\n")
theirs = run_c(C + umbrellas + "int main(void) {\n" + prints + "}\n")
report(f"{len(structs())} structs are laid out as the C headers have them", [f"{a} | {b}" for a, b in zip(mine, theirs) if a != b] or
       (["nothing was compared"] if len(theirs) < 200 or len(mine) != len(theirs) else []))
constants = re.findall(r"\b(TU?T+I?_[A-Z0-9_]+) = (-?\w+)", text)
checks = "".join(f'_Static_assert({name} == {value}, "{name}");\n' for name, value in constants)
report(f"{len(constants)} constants have the values that the C headers give them", run_c(C + umbrellas + checks + "int main(void) { return 0; }\n") or
       (["no constant was found"] if len(constants) < 100 else []))
macros = subprocess.run(["cc", "-E", "-dM", "-x", "c", f"-I{source}/include", "-"], input=umbrellas, capture_output=True, text=True).stdout
known = {name for name, _ in constants}
missing = [name for name, value in re.findall(r"#define (TU?T+I?_[A-Z0-9_]+) (.+)", macros)
           if name not in known and not re.search(r"_(H|INIT|API|CHECKED|STRING)$", name)]
report("every constant is there", set(missing) - {"TUTTI_NON_GROUP_MEMBER", "TUTTI_ZERO", "TT_ALL_DIMS"})
try:
    import cffi
    try:
        cffi.FFI().cdef(whole)
        report("cffi reads it", [])
    except Exception as error:
        report("cffi reads it", [str(error)])
    code = re.search(r"```python\n(.*?)```", (source / "docs" / "bindings.md").read_text(), re.S).group(1)
    code = re.sub(r'\bopen\(".*?"\)', "open(header)", code).replace('"libtutti.so"', "str(library)")
    names = {"header": header, "library": libraries["tutti"]}
    try:
        exec(code, names)
        report("the example of docs/bindings.md runs", [] if list(names["data"]) == [1, 2, 3] else [list(names["data"])])
    except Exception as error:
        report("the example of docs/bindings.md runs", [repr(error)])
except ImportError:
    print("skipped  cffi reads it: cffi is not installed")



def one_way(declaration):
    """A declaration with its spaces as nobody writes them, so that two can be compared."""
    return re.sub(r"\s*([*(),])\s*", r"\1", " ".join(declaration.split()))


class Row(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), *((name, ctypes.c_char_p) for name in "name family summary prototype dtypes expression".split()),
                ("argument_count", ctypes.c_int), ("result_count", ctypes.c_int), ("saved_count", ctypes.c_int),
                *((name, ctypes.c_bool) for name in "in_place view differentiable pure composite".split()), ("differs", ctypes.c_char_p)]


class Argument(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("name", ctypes.c_char_p), ("type", ctypes.c_int), ("optional", ctypes.c_bool),
                ("written", ctypes.c_bool), ("declaration", ctypes.c_char_p)]


def parameters_of(text):
    """Name -> declaration, in order. Whether a tensor is const is the function's own affair: rows know what they write."""
    found = {}
    for parameter in one_way(text).split(","):
        found[re.split(r"[ *]", parameter)[-1]] = re.sub(r"^const tt_tensor\b", "tt_tensor", parameter)
    return found


def arguments_of(tensor, index, count):
    """The same of a row."""
    texts = []
    for at in range(count):
        argument = Argument(size=ctypes.sizeof(Argument))
        tensor.tt_operator_argument_at(index, at, ctypes.byref(argument))
        texts.append(argument.declaration.decode())
    return parameters_of(", ".join(texts))


def compare_rows(tensor):
    """What the operator table says of public functions against their declarations: prototypes to the letter; arguments by name, type and order,
    where the row does not explain each that only one of the two has, or has otherwise."""
    declared = {re.search(r"(\w+)\s*\(", one).group(1): one_way(one) for one in statements()
                if re.match(r"[\w\s*]+\(", one) and not one.startswith("typedef")}
    prototypes, arguments, rows = [], [], 0
    for index in range(tensor.tt_operator_count()):
        row = Row(size=ctypes.sizeof(Row))
        tensor.tt_operator_at(index, ctypes.byref(row))
        if row.prototype is None:
            continue
        rows += 1
        prototype = one_way(row.prototype.decode())
        function, parameters = re.fullmatch(r"[\w *]*?(\w+)\((.*)\)", prototype).groups()
        if declared.get(function) != prototype:
            prototypes.append(f"the row {row.name.decode()} says {prototype}, the header {declared.get(function)}")
        if row.in_place and not function.endswith("_") and function + "_" not in declared:
            prototypes.append(f"the row {row.name.decode()} has a form in place, the header no {function}_")
        theirs, mine, text = parameters_of(parameters), arguments_of(tensor, index, row.argument_count), (row.differs or b"").decode()
        unknown = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name) and not re.search(rf"\b{name}\b", text)]
        same = list(mine.items()) == list(theirs.items())
        if unknown or [name for name in mine if name in theirs] != [name for name in theirs if name in mine] or same != (not text):
            arguments.append(f"the row {row.name.decode()} has {list(mine.values())}, its function {list(theirs.values())}, "
                             f"explained by: {text or 'nothing'}")
    return prototypes, arguments, rows


values = dict((name, int(value, 0)) for name, value in constants)
if libraries["tutti-tensor"]:
    ctypes.CDLL(libraries["tutti"], mode=ctypes.RTLD_GLOBAL)
    prototypes, arguments, rows = compare_rows(ctypes.CDLL(libraries["tutti-tensor"]))
    report(f"{rows} operators have the prototypes that the header declares", prototypes or (["no row was compared"] if rows < 100 else []))
    report("the arguments of operators are those of their functions in name, type and order, or the row explains them", arguments)

# A world of one rank, with nothing but the header's knowledge.
tutti = ctypes.CDLL(libraries["tutti"])
tutti.tutti_error_message.restype = tutti.tutti_device_name.restype = ctypes.c_char_p
tutti.tutti_world_group.restype = ctypes.c_void_p
problems = []
world = ctypes.c_void_p()
options = (ctypes.c_char * 1024)()
size = int(next(line for line in theirs if line.startswith("tutti_world_options ")).split()[1])
tutti.tutti_world_options_init(options, ctypes.c_size_t(size))
if tutti.tutti_world_open(options, ctypes.byref(world)) != values["TUTTI_OK"]:
    problems.append(tutti.tutti_error_message())
ones, sums = (ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 3)()
if tutti.tutti_all_reduce(ctypes.c_void_p(tutti.tutti_world_group(world)), ones, sums, ctypes.c_size_t(3), values["TUTTI_F32"],
                          values["TUTTI_SUM"], None) != 0 or list(sums) != [1, 2, 3]:
    problems.append(tutti.tutti_error_message())
form, group = (ctypes.c_char * 256)(), ctypes.c_void_p()
if tutti.tutti_group_resolve(world, ctypes.byref(form), None, ctypes.byref(group)) == 0:
    problems.append("an empty form was accepted")
tutti.tutti_form_name(ctypes.byref(form), b"0")
if tutti.tutti_group_resolve(world, ctypes.byref(form), None, ctypes.byref(group)) != 0:
    problems.append(tutti.tutti_error_message())
tutti.tutti_group_release(group)
if tutti.tutti_device_name(values["TUTTI_CUDA"] + 2) != b"cuda:1":
    problems.append("cuda:1 has another name")
if tutti.tutti_world_close(world) != 0:
    problems.append(tutti.tutti_error_message())
report("Python uses it through ctypes", problems)
print(f"{passed} passed, {failed} failed, 0 skipped")
sys.exit(1 if failed else 0)
