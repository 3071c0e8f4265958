# SPDX-License-Identifier: Apache-2.0
"""A Python that has PyTorch, for tests against it."""
import os
import subprocess
import sys


def with_torch(module="torch"):
    """Runs the calling script again with a Python that has the module, when this one has not; exits as skipped where none has."""
    try:
        __import__(module)
        return
    except ImportError:
        pass
    candidates = (os.environ.get("TEST_PYTHON"), os.path.join(os.environ.get("VIRTUAL_ENV", ""), "bin", "python3"), "python3")
    for python in filter(None, candidates):
        if os.environ.get("TEST_TORCH_TRIED"):
            break
        try:
            found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=300).returncode == 0
        except OSError:
            continue
        if found:
            os.environ["TEST_TORCH_TRIED"] = "1"
            os.execvp(python, [python] + sys.argv)
    print("skipped: no python3 here can import torch; TEST_PYTHON names one")
    sys.exit(77)
