# SPDX-License-Identifier: Apache-2.0
"""The C++ part: the same backend as a c10d::Backend, over the same library that Python has loaded. It is built when a group is first made, by the system's
compiler, and kept in the cache (~/.cache/tutti/torch) under a name that follows from its source and the versions of PyTorch, Python and Tutti. What it adds:
calls cost less, several backends can share a group ("cpu:tutti,cuda:gloo"), and the profiler sees the calls.

TUTTI_TORCH_SHIM=auto goes without it where it cannot be built, and says so; on makes that an error; off never builds it.
"""
from __future__ import annotations

import datetime
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from typing import Any, Optional

import torch

from ... import _interface, _interrupt
from .. import cuda
from ..member import Member
from ..work import failure

_HERE = pathlib.Path(__file__).parent
_SOURCES = ("backend.cpp", "work.hpp", "tensors.hpp", "calls.hpp", "tutti-ffi.h")
_LIMIT = 600.0  # seconds that a build may take, or that one waits for another rank's
_loaded: Any = None


class _Without(Exception):
    """Why there is no C++ part."""


def _wanted() -> str:
    chosen = os.environ.get("TUTTI_TORCH_SHIM") or "auto"
    if chosen not in ("auto", "on", "off"):
        raise ValueError(f"tutti: TUTTI_TORCH_SHIM is {chosen!r}, and can be auto, on or off")
    return chosen


def _folder() -> pathlib.Path:
    """The cache: this user's alone, since what lies there is loaded."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    path = (pathlib.Path(base) if base.startswith("/") else pathlib.Path.home() / ".cache") / "tutti" / "torch"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _Without(f"{path} cannot be made for the cache: {error}") from None
    for each in (path.parent, path):
        about = each.lstat()
        if not each.is_dir() or each.is_symlink() or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise _Without(f"{each} is not this user's alone: another owns it or can write it (chmod 700, or remove it)")
    return path


def _name() -> str:
    digest = hashlib.sha256("\0".join((torch.__version__, str(torch.version.cuda), sys.version, _interface.version)).encode())
    for source in _SOURCES:
        digest.update((_HERE / source).read_bytes())
    return f"{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def _command(target: str) -> list[str]:
    compiler = os.environ.get("CXX") or "c++"
    words = compiler.split()
    if shutil.which(words[0]) is None:
        raise _Without(f"there is no C++ compiler {words[0]} (CXX names one)")
    python = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(python, "Python.h")):
        raise _Without(f"{python}/Python.h is not there (a package such as python3-dev has it)")
    from torch.utils import cpp_extension  # late, since it takes long
    includes = [*cpp_extension.include_paths(), python, str(_HERE)]
    libraries = cpp_extension.library_paths()
    return [*words, "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w", "-DTORCH_EXTENSION_NAME=tutti_shim",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *[f"-I{each}" for each in includes], str(_HERE / "backend.cpp"), "-o", target,
            *[f"-L{each}" for each in libraries], "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def _build(path: pathlib.Path) -> None:
    """Compiles it. A build that fails is noted beside, with what the compiler said."""
    print(f"tutti: compiling its C++ part for PyTorch {torch.__version__}, once; this takes a moment (TUTTI_TORCH_SHIM=off goes without it)", file=sys.stderr, flush=True)
    making = f"making-{path.stem}-"
    for left in path.parent.glob(making + "*"):  # by one that was killed: whoever builds has the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=making) as folder:
        made = os.path.join(folder, "tutti_shim.so")
        try:
            done = subprocess.run(_command(made), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            raise _Without(f"the compiler took longer than {_LIMIT:g} s") from None
        if done.returncode != 0:
            log = path.with_suffix(".failed")
            log.write_bytes(done.stdout)
            raise _Without(_why(log))
        os.replace(made, path)
        path.with_suffix(".failed").unlink(missing_ok=True)


def _why(log: pathlib.Path) -> str:
    said = log.read_text(errors="replace").splitlines()
    first = next((line for line in said if "error" in line), said[0] if said else "it said nothing")
    return f"the compiler failed: {first.strip()} (all it said: {log})"


def _locked(path: pathlib.Path) -> Any:
    """One of the ranks builds; the lock ends with its process, however that ends."""
    file = open(path.with_suffix(".lock"), "w")
    end = time.monotonic() + _LIMIT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > end:
                raise _Without(f"another process has been building it for {_LIMIT:g} s (it holds {path.with_suffix('.lock')})") from None
            time.sleep(0.05)


def _load(wanted: str) -> Any:
    if not torch.distributed.is_available():
        raise _Without("PyTorch was built without torch.distributed")
    path = _folder() / f"{_name()}.so"
    if not path.exists():
        with _locked(path):
            if not path.exists():
                if path.with_suffix(".failed").exists() and wanted != "on":  # on tries again
                    raise _Without(_why(path.with_suffix(".failed")))
                _build(path)
    specification = importlib.util.spec_from_loader("tutti_shim", importlib.machinery.ExtensionFileLoader("tutti_shim", str(path)))
    assert specification is not None and specification.loader is not None
    try:
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    except ImportError as error:
        raise _Without(f"{path} cannot be loaded: {error}") from None
    made: Any = module
    made.set_up(failure, _interrupt.raises, _interrupt.hear, split, threading.main_thread().native_id, cuda.here)
    _interrupt.also.append(made)
    return made


def load(speaks: bool = True) -> Optional[Any]:
    """The module, or None where it is not wanted, or cannot be had; then one rank says why."""
    global _loaded
    wanted = _wanted()
    if wanted == "off":
        return None
    if _loaded is None:
        try:
            _loaded = _load(wanted)
        except _Without as why:
            if wanted == "on":
                raise RuntimeError(f"tutti: TUTTI_TORCH_SHIM is on, and the C++ part cannot be had: {why}") from None
            if speaks:
                print(f"tutti: the backend runs in Python, since its C++ part cannot be had: {why}. TUTTI_TORCH_SHIM=off says nothing", file=sys.stderr, flush=True)
            _loaded = False
    return _loaded or None


def backend(module: Any, options: Any) -> Any:
    """A c10d::Backend for this rank of a group."""
    member = Member(options)
    module.listen(_interrupt._read)
    return module.Backend(member, member.rank(), member.size(), member._world._handle, member._handle, member.options)


def split(member: Any, ranks: Any, name: str, seconds: float) -> Any:
    """A c10d::Backend for this rank of a part of a group, or None where it is in none."""
    options = member.part(ranks, name, datetime.timedelta(seconds=seconds))
    return backend(_loaded, options) if options is not None else None
