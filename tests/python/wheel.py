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
import socket
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
import harness  # noqa: E402

source = pathlib.Path(os.environ.get("TEST_SOURCE", pathlib.Path(__file__).parent.parent.parent))
project = (source / "pyproject.toml").read_text()
interpreter, tutti = harness.wheel / "bin" / "python", harness.wheel / "bin" / "tutti"
BARRIER = "import tutti\nwith tutti.World() as w: w.group.barrier()\nprint(tutti.__file__)"


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
             "entry_points.txt": f"[console_scripts]\ntutti = {setting('tutti')}\n"}
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


def alone():
    """The environment of somebody who has the wheel and no build tree."""
    return {**{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH", "TUTTI_PLUGIN_PATH")}, "PYTHONUTF8": "0"}


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
print("\\n".join(path for path in loaded if pathlib.Path(path).name.startswith(("libtutti", "libsodium", "libopenblas", "libblas", "libcblas"))))
"""


def everything_that_it_loads_is_its_own():
    """Nothing of the build tree, and no OpenBLAS and no libsodium of the machine."""
    loaded = call(interpreter, "-c", ASK, environment=alone()).split()
    assert loaded and all(path.startswith(str(harness.wheel)) for path in loaded), loaded
    program = next(harness.wheel.glob("lib/python*/site-packages/tutti/bin/tutti"))
    of_program = [line for line in call("ldd", program, environment=alone()).splitlines() if "libsodium" in line]
    assert all(str(harness.wheel) in line for line in of_program), of_program
    assert bool(of_program) == any("libsodium" in path for path in loaded), (of_program, loaded)


def it_has_every_plugin_of_the_build():
    """And the command finds them where they are."""
    wanted = sorted(path.name for path in (harness.build / "plugins").glob("*.so"))
    found = next(harness.wheel.glob("lib/python*/site-packages/tutti/plugins"), pathlib.Path("/nowhere"))
    assert sorted(path.name for path in found.glob("*.so")) == wanted, (found, wanted)
    said = call(tutti, "info", environment=alone())
    assert not wanted or str(found) in said, said


def its_command_runs_ranks():
    said = call(tutti, "run", "-n", 2, interpreter, "-c", BARRIER, environment=alone())
    assert said.count(str(harness.wheel)) == 2, said


def its_command_has_all_sub_commands():
    assert version() in call(tutti, "info", environment=alone())
    said = call(tutti, "bench", "barrier", "-g", 2, "-n", 3, "-w", 1, environment=alone())
    assert "barrier" in said, said
    ran = subprocess.run([str(tutti), "ps"], capture_output=True, text=True, timeout=600, env=alone())
    assert ran.returncode == 0 or "no job" in ran.stdout, (ran.returncode, ran.stdout, ran.stderr)  # other jobs may run here
    ran = subprocess.run([str(tutti), "trace", "/nowhere"], capture_output=True, text=True, timeout=600, env=alone())
    assert ran.returncode not in (0, 127) and "/nowhere" in ran.stderr, (ran.returncode, ran.stderr)  # its exit status and words come through


def its_launchers_prove_a_secret():
    """Where the build has libsodium; elsewhere they say how to get it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        secret = pathlib.Path(folder) / "secret"
        secret.touch(0o600)
        secret.write_text("a secret for the tests\n")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ran = subprocess.run([str(tutti), "run", "--nodes", "1", "--node", "0", "--meet", f"127.0.0.1:{port}", "-n", "2", "--secret-file", str(secret), str(interpreter), "-c",
                              BARRIER], capture_output=True, text=True, timeout=600, env=alone())
    if "libsodium" in call("ldd", next(harness.wheel.glob("lib/python*/site-packages/tutti/bin/tutti"))):
        assert ran.returncode == 0 and ran.stdout.count(str(harness.wheel)) == 2, (ran.stdout, ran.stderr)
    else:
        assert ran.returncode != 0 and "libsodium-dev" in ran.stderr, (ran.stdout, ran.stderr)


def a_script_runs_by_the_python_that_is_named_or_by_this_one():
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "program.py"
        script.write_text("import sys\nprint(sys.flags.utf8_mode, sys.prefix)")
        this = call(interpreter, "-m", "tutti.run", "-n", 2, script, environment=alone())
        named = call(interpreter, "-m", "tutti.run", "-n", 2, interpreter, "-X", "utf8", script, environment=alone())
    assert this.count(f"0 {harness.wheel}") == 2 and named.count(f"1 {harness.wheel}") == 2, (this, named)


if __name__ == "__main__":
    shutil.rmtree(harness.wheel, ignore_errors=True)
    if importlib.util.find_spec("ensurepip") is None:
        harness.skip("this Python makes no virtual environments (package python3-venv); the package is tested in the build tree")
    if harness.installed or not (harness.build / "cmake_install.cmake").exists():
        harness.skip("there is no build to make a wheel of")
    harness.run((it_is_made_and_installed, everything_that_it_loads_is_its_own, it_has_every_plugin_of_the_build, its_command_runs_ranks, its_command_has_all_sub_commands, its_launchers_prove_a_secret,
                 a_script_runs_by_the_python_that_is_named_or_by_this_one))
