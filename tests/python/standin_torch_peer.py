#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_cuda.py without a GPU: over the stand-ins for CUDA's runtime and driver, whose streams run beside the host. It needs a PyTorch that was built with CUDA 13."""
import os
import pathlib
import subprocess
import sys

LIMIT = 700  # seconds; what hangs in a rank ends sooner, and says where (TEST_LIMIT of torch_cuda.py)

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))
from harness import build, run, skip, with_pytorch  # noqa: E402

with_pytorch()
standin = build / "tests" / "standin"
if not (standin / "libcudart.so.13").exists():
    skip("the stand-in for CUDA's runtime was not built (it needs CUDA's headers)")
if not (build / "plugins" / "libtutti-tensor-cuda.so").exists():
    skip("the plug-ins for CUDA were not built")
found = subprocess.run([sys.executable, "-c", "import torch; print(torch.version.cuda or '')"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
if found.returncode != 0:
    skip("PyTorch is not installed (make test-peers installs it)")
if not found.stdout.startswith("13."):
    skip("PyTorch was not built with CUDA 13")


def _over_the_standins(**environment):
    folders = os.pathsep.join(filter(None, (str(standin), os.environ.get("LD_LIBRARY_PATH"))))
    said = subprocess.run([sys.executable, "-W", "ignore", str(pathlib.Path(__file__).with_name("torch_cuda.py"))], env={
        **os.environ, "LD_PRELOAD": str(standin / "libcudart.so.13"), "LD_LIBRARY_PATH": folders, "TUTTI_PLUGIN_PATH": str(build / "plugins"),
        "TEST_STANDIN": "1", "TEST_LIMIT": "150", "STANDIN_STREAMS": "apart", "RANKS": "2 4", **environment}, timeout=LIMIT)
    assert said.returncode == 0, said.returncode  # 77, too: it would find no GPU


def tensors_on_a_gpu_in_python():
    _over_the_standins(TUTTI_TORCH_SHIM="off")


def tensors_on_a_gpu_in_cpp():
    _over_the_standins(TUTTI_TORCH_SHIM="on")


if __name__ == "__main__":
    run((tensors_on_a_gpu_in_python, tensors_on_a_gpu_in_cpp))
