#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The package on a machine that has neither OpenBLAS nor gfortran's library, nor libsodium: they are hidden from a process of its own (a mount namespace, which needs root).
A wheel brings its own, and everything works; the package of the build tree has no tensors then, and says what is missing."""
import ctypes
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import build, installed, packages, run, skip  # noqa: E402

SODIUM = r"|libsodium\W"  # a wheel brings it, the build tree uses that of the machine
BLAS = r"lib(openblas|blas|cblas|lapack|lapacke|gfortran|quadmath|blis|mkl_\w+)\W"
OTHERS = r"|lib(hwloc|dnnl|gomp|ucp|ucs|uct|ucm|numa)\W"  # what a build with optional packages uses, and a wheel does not


def libraries():
    """What the loader knows: names and files."""
    found = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=60)
    return re.findall(r"^\s+(\S+) \(.*\) => (\S+)$", found.stdout, re.M)


def hide(pattern):
    """Shows this process and its children the folders of libraries without those that match."""
    folders = {os.path.realpath(os.path.dirname(path)) for name, path in libraries() if re.match(pattern, name)}
    for number, folder in enumerate(sorted(folders)):
        original, shown = pathlib.Path(sys.argv[2]) / f"original{number}", pathlib.Path(sys.argv[2]) / f"shown{number}"
        original.mkdir()
        shown.mkdir()
        subprocess.run(["mount", "--bind", folder, original], check=True)
        for entry in os.listdir(folder):
            if not re.match(pattern, entry + "."):
                os.symlink(original / entry, shown / entry)
        subprocess.run(["mount", "--bind", shown, folder], check=True)


def gone(name):
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return "cannot open shared object file" in str(error)
    return False


PROGRAM = """
import os, tutti
with tutti.World() as world:
    world.group.barrier()
from tutti import tensor as tt, nn
x = tt.randn((64, 32), requires_grad=True)
net = nn.Linear(32, 16)
(net(x).relu() @ tt.ones((16, 4))).sum().backward()
assert x.grad.shape == (64, 32)
maps = open("/proc/self/maps").read()
used = {line.split()[-1] for line in maps.splitlines() if "openblas" in line or "gfortran" in line}
inside = os.path.dirname(tutti.__file__)
assert used and all(path.startswith(inside) for path in used), used
print("tensors work")
"""


def inside():
    """In the namespace."""
    of_wheel = installed or packages != build / "python"
    hide(BLAS + (SODIUM if of_wheel else "") + (OTHERS if installed else ""))  # what tests/python/wheel.py has made is of a build with optional packages
    assert gone("libopenblas.so.0") and gone("libgfortran.so.5"), "they are still there"
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    if of_wheel:
        assert ran.returncode == 0 and ran.stdout == "tensors work\n", (ran.stdout, ran.stderr)
    else:
        assert ran.returncode != 0 and "ImportError: tutti: libtutti-tensor" in ran.stderr and "blas" in ran.stderr, (ran.stdout, ran.stderr)
    ranks = [sys.executable, "-m", "tutti.run", "-n", "2", sys.executable, "-c", "import tutti\nwith tutti.World() as w: w.group.barrier()\nprint('met')"]
    ran = subprocess.run(ranks, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout.count("met") == 2, (ran.stdout, ran.stderr)


def a_machine_without_openblas_and_gfortran(*hidden):
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", *hidden)}
        ran = subprocess.run(["unshare", "--mount", "--propagation", "private", sys.executable, __file__, "inside", folder], capture_output=True, text=True,
                             env=environment, timeout=600)
        assert ran.returncode == 0, (ran.stdout, ran.stderr)


def such_a_machine_with_the_build_tree():
    a_machine_without_openblas_and_gfortran("TEST_WHEEL", "PYTHONPATH")


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside()
        sys.exit(0)
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode != 0:
        skip("libraries can be hidden by root alone, where mounts are allowed")
    if not any(re.match(BLAS, name) for name, path in libraries()):
        skip("this machine has no OpenBLAS to hide")
    if not installed and not any((build / "python/tutti/lib").glob("libtutti-tensor.so.*")):
        skip("the tensor library was not built")
    run((a_machine_without_openblas_and_gfortran,) if installed else (a_machine_without_openblas_and_gfortran, such_a_machine_with_the_build_tree))
