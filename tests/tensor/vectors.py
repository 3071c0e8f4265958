# SPDX-License-Identifier: Apache-2.0
"""The loops of elementary functions for AVX2 are vectors: in the machine code of each there is arithmetic on eight numbers at a time, and none on one.
A compiler that finds a loop too difficult leaves it scalar without a word, and everything still gives the right results, several times slower.

    vectors.py [object…]       default: those of the build in TEST_BUILD
"""
import glob
import os
import platform
import re
import shutil
import subprocess
import sys

FUNCTIONS = ["erf", "exp", "gelu", "gelu_tanh", "log", "sigmoid", "silu", "tanh"]
ARITHMETIC = re.compile(r"\s*[0-9a-f]+:\s+(v?(?:add|sub|mul|div|f[n]?m(?:add|sub)|max|min|sqrt)[0-9a-z]*)\s+(.*)")


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def count(objects):
    """name of a loop -> [instructions on ymm registers, instructions on one number]"""
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", *objects], capture_output=True, text=True, check=True).stdout
    found, counts = {}, None
    for line in text.splitlines():
        start = re.match(r"^[0-9a-f]+ <([^>]+)>:", line)
        if start:
            name = start.group(1).split(".")[0]  # without what a compiler appends to clones and cold parts
            wanted = name.endswith("_f32") and name[:-4] in FUNCTIONS
            counts = found.setdefault(name, [0, 0]) if wanted else None
        instruction = ARITHMETIC.match(line) if counts is not None else None
        if instruction:
            counts[0] += "%ymm" in instruction.group(2)
            counts[1] += instruction.group(1).endswith(("ss", "sd"))
    return found


def main():
    objects = sys.argv[1:]
    if not objects:
        if platform.machine() != "x86_64":
            skip("this is no x86-64")
        if os.environ.get("TEST_SANITIZE"):
            skip("a sanitizer's build is not optimized")
        if not shutil.which("objdump"):
            skip("no objdump here")
        objects = glob.glob(os.path.join(os.environ["TEST_BUILD"], "src/CMakeFiles/tutti_tensor_avx2.dir/tensor/kernel/*.o"))
        if not objects:
            skip("libtutti-tensor is not built here")
    found = count(objects)
    missing = [name for name in FUNCTIONS if name + "_f32" not in found]
    scalar = {name: counts for name, counts in found.items() if counts[0] == 0 or counts[1] > counts[0]}
    for name, counts in sorted(found.items()):
        print(f"{'FAILED' if name in scalar else 'ok':7} {name}: {counts[0]} instructions on vectors, {counts[1]} on one number")
    if missing:
        print(f"FAILED  not found: {', '.join(missing)}")
    sys.exit(1 if scalar or missing else 0)


main()
