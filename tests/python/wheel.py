#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A wheel of what this build has built, with the names and files of the one that pip makes from a checkout, installed by pip into a virtual environment, without a
network. It runs before the other tests of the package, which then test what it has installed (support/harness.py)."""
import base64
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
import harness  # noqa: E402

source = pathlib.Path(os.environ.get("TEST_SOURCE", pathlib.Path(__file__).parent.parent.parent))
project = (source / "pyproject.toml").read_text()
interpreter = harness.wheel / "bin" / "python"


def setting(name):
    """A string of pyproject.toml, which the Python of some machines cannot read (before 3.11)."""
    return re.search(rf'^{name} = "(.*)"$', project, re.M)[1]


def version():
    return re.search(r'TUTTI_VERSION_STRING "(.*)"', (source / "include/tutti/export.h").read_text())[1]


def pack(staged, folder):
    """A wheel of a folder, whose name is returned."""
    name = f"{setting('name').replace('-', '_')}-{version()}"
    about = {"METADATA": f"Metadata-Version: 2.1\nName: {setting('name')}\nVersion: {version()}\nSummary: {setting('description')}\nRequires-Python: {setting('requires-python')}\n",
             "WHEEL": "Wheel-Version: 1.0\nGenerator: tests/python/wheel.py\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n".replace("x86_64", os.uname().machine),
             "entry_points.txt": f"[console_scripts]\ntutti-python-run = {setting('tutti-python-run')}\n"}
    record = []
    path = folder / f"{name}-py3-none-linux_{os.uname().machine}.whl"
    with zipfile.ZipFile(path, "w") as file:
        def add(entry, data, mode):
            information = zipfile.ZipInfo(entry)
            information.external_attr = (0o100000 | mode) << 16
            file.writestr(information, data)
            record.append(f"{entry},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n")
        for item in sorted(path for path in staged.rglob("*") if path.is_file()):
            assert not item.is_symlink(), f"{item} is a link, and wheels have none"
            add(item.relative_to(staged).as_posix(), item.read_bytes(), item.stat().st_mode & 0o777)
        for entry, text in about.items():
            add(f"{name}.dist-info/{entry}", text.encode(), 0o644)
        file.writestr(f"{name}.dist-info/RECORD", "".join(record) + f"{name}.dist-info/RECORD,,\n")
    return path


def call(*command, environment=None):
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600, env=environment, cwd=harness.build)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def it_is_made_and_installed():
    making = harness.wheel.with_name(harness.wheel.name + "-making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    call("cmake", "--install", harness.build, "--component", "python", "--prefix", making / "staged")
    made = pack(making / "staged", making)
    call(sys.executable, "-m", "venv", "--system-site-packages", harness.wheel)  # NumPy, if the machine has it
    call(interpreter, "-m", "pip", "--isolated", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--force-reinstall", made)
    shutil.rmtree(making)


ASK = """
import importlib.metadata as metadata, pathlib, tutti
about = metadata.distribution("tutti-symm")
assert about.version == tutti.__version__ and about.metadata["Requires-Python"] == ">=3.9", about.metadata
missing = [str(file) for file in about.files if not file.locate().exists()]
assert not missing, missing
if list(pathlib.Path(tutti.__file__).parent.glob("lib/libtutti-tensor.so.*")):
    from tutti import tensor as tt
    tt.ones(2)
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print("\\n".join(path for path in loaded if pathlib.Path(path).name.startswith(("libtutti", "libopenblas", "libblas", "libcblas"))))
"""


def everything_that_it_loads_is_its_own():
    """Nothing of the build tree, and no OpenBLAS of the machine."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH", "TUTTI_PLUGIN_PATH")}
    loaded = call(interpreter, "-c", ASK, environment=environment).split()
    assert loaded and all(path.startswith(str(harness.wheel)) for path in loaded), loaded


def its_command_runs_ranks():
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TUTTI_PLUGIN_PATH")}
    said = call(harness.wheel / "bin" / "tutti-python-run", "-n", 2, interpreter, "-c", "import tutti\nwith tutti.World() as w: w.group.barrier()\nprint(tutti.__file__)",
                environment=environment)
    assert said.count(str(harness.wheel)) == 2, said


if __name__ == "__main__":
    shutil.rmtree(harness.wheel, ignore_errors=True)
    if importlib.util.find_spec("ensurepip") is None:
        harness.skip("this Python makes no virtual environments (package python3-venv); the package is tested in the build tree")
    if harness.installed or not (harness.build / "cmake_install.cmake").exists():
        harness.skip("there is no build to make a wheel of")
    harness.run((it_is_made_and_installed, everything_that_it_loads_is_its_own, its_command_runs_ranks))
