# SPDX-License-Identifier: Apache-2.0
"""`pytest tests/python` (or one file of it): each file is a program and one test, on the package of the build tree, as `ctest -R python_` runs them on a wheel."""
import os
import pathlib
import subprocess
import sys

import pytest

programs = pathlib.Path(__file__).parent / "python"


def pytest_collect_file(file_path, parent):
    if file_path.parent == programs and file_path.suffix == ".py" and file_path.name != "wheel.py" and not parent.session.isinitpath(file_path):
        return Program.from_parent(parent, path=file_path)
    return None


def pytest_pycollect_makemodule(module_path, parent):
    """Files that are named to pytest would be imported."""
    return Program.from_parent(parent, path=module_path) if module_path.parent == programs else None


class Program(pytest.File):
    def collect(self):
        yield Run.from_parent(self, name=self.path.stem)


class Run(pytest.Item):
    def runtest(self):
        environment = {"TEST_BUILD": str(programs.parent.parent / "build" / "release"), **os.environ}
        ran = subprocess.run([sys.executable, str(self.path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=1500)
        if ran.returncode == 77:
            pytest.skip(ran.stdout.strip())
        if ran.returncode != 0:
            raise AssertionError(ran.stdout)
        print(ran.stdout)

    def repr_failure(self, excinfo, style=None):
        return str(excinfo.value)

    def reportinfo(self):
        return self.path, None, self.name
